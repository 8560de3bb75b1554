"""`benchmarks/rgnn.py`: device time, inputs of peers, failing workers, tables."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import device_time, rgnn_training
from benchmarks import rgnn as command
from benchmarks import rgnn_report as report
from benchmarks.__main__ import parse
from benchmarks.peers import case, runner
from benchmarks.peers.case import Graph, Settings
from benchmarks.peers.timing import Limits, measure

SMALL = Settings(width=8, heads=2, precision="f32")


def tiny(name: str = "tiny") -> Graph:
    """Three node types. Each of five relations joins two of them. One node has no incoming edge."""
    rng = np.random.default_rng(0)
    counts, relations = np.array([5, 9, 6]), [(0, 1), (1, 1), (2, 0), (1, 2), (0, 2)]
    first = np.concatenate([[0], np.cumsum(counts)])
    edge_type = np.sort(rng.integers(0, 5, 60)).astype(np.int32)
    ends = [
        np.array([first[relations[t][side]] + rng.integers(0, counts[relations[t][side]] - side) for t in edge_type])
        for side in (0, 1)
    ]
    node_type = np.repeat(np.arange(3, dtype=np.int32), counts)
    return Graph(name, *(e.astype(np.int32) for e in ends), edge_type, node_type, 20, 5, 3)


# --- time


def test_records_are_split_into_calls_by_their_number():
    call = [(0.0, 2e6), (3e6, 1e6)]  # 2 ms, a pause of 1 ms, 1 ms
    records = [(start + 10e6 * i, duration) for i in range(3) for start, duration in call]
    found = device_time.summarize(records[::-1], 3)
    assert found is not None and found.as_dict() == {"span_ms": 4.0, "kernels_ms": 3.0, "launches": 2.0}


def test_calls_of_different_lengths_are_split_at_the_longest_pauses():
    records = [(0.0, 1e6), (10e6, 1e6), (12e6, 1e6), (30e6, 1e6)]
    found = device_time.summarize(records, 3)
    assert found is not None and found.span_ms == 1.0 and found.launches == pytest.approx(4 / 3)


def test_without_records_there_is_no_device_time():
    assert device_time.summarize([], 3) is None


def test_overlapping_kernels_are_one_span():
    found = device_time.summarize([(0.0, 5e6), (1e6, 1e6)], 1)
    assert found is not None and (found.span_ms, found.kernels_ms) == (5.0, 6.0)


def test_without_a_working_profiler_there_is_only_the_callers_time():
    def profile(*_: Any) -> None:
        raise RuntimeError("no counters")

    found = measure(lambda: None, lambda _: None, profile, Limits(target_s=0.0))
    assert found["device"] is None and found["device_error"] == "RuntimeError: no counters" and found["ms"] >= 0


def test_a_slow_function_is_called_once():
    calls = []
    found = measure(lambda: calls.append(1), lambda _: None, lambda *_: None, Limits(cut_s=-1.0))
    assert len(calls) == 1 and found["cut"] and found["device"] is None


# --- shared inputs


def test_row_bound():
    graph = tiny()
    reached = len(np.unique(graph.receivers))
    assert reached < 20 and graph.num_receivers == reached
    moved = 60 * (64 * 4 + 8) + reached * 64 * 4 + 5 * 64 * 64 * 4
    assert graph.row_bound_ms(Settings()) == pytest.approx(moved / 4.3e12 * 1e3)
    assert graph.row_bound_ms(Settings(dtype="bfloat16")) < graph.row_bound_ms(Settings())


def test_mean_scale_is_one_over_the_edges_of_the_type():
    graph = tiny()
    key = graph.receivers * 5 + graph.edge_type
    np.testing.assert_allclose(graph.mean_scale, [1 / (key == k).sum() for k in key])


def test_save_and_load_of_a_graph(tmp_path):
    graph = tiny()
    graph.save(tmp_path / "g")
    again = Graph.load(tmp_path / "g")
    np.testing.assert_array_equal(again.senders, graph.senders)
    assert (again.num_nodes, again.num_edge_types, again.num_node_types) == (20, 5, 3)


def test_a_graph_from_a_file_is_sorted_and_renumbered(tmp_path):
    np.savez(tmp_path / "g.npz", senders=[0, 1, 2], receivers=[1, 2, 0], edge_type=[1, 0, 1], node_type=[1, 0, 0])
    graph = case.read_graph(tmp_path / "g.npz")
    assert graph.name == "g" and graph.node_type.tolist() == [0, 0, 1]
    # Node 0 became 2, 1 became 0, 2 became 1.
    assert (graph.edge_type.tolist(), graph.senders.tolist(), graph.receivers.tolist()) == (
        [0, 1, 1], [0, 2, 1], [1, 0, 2],
    )  # fmt: skip
    np.savez(tmp_path / "h.npz", senders=[0], receivers=[1])
    with pytest.raises(ValueError, match="lacks edge_type"):
        case.read_graph(tmp_path / "h.npz")
    np.savez(tmp_path / "i.npz", senders=[0], receivers=[7], edge_type=[0], node_type=[0, 0])
    with pytest.raises(ValueError, match="receivers must lie in"):
        case.read_graph(tmp_path / "i.npz")


def test_agreement_reports_a_wrong_gradient(tmp_path):
    y = np.ones((4, 3))
    case.write_sample(tmp_path / "s.npz", y, y, {"a": np.ones((2, 3)), "w": y})
    good = case.agreement(tmp_path / "s.npz", y, y, {"a": np.full((1, 3), 2.0), "w": y})
    assert good == {"forward": 0.0, "gradients": 0.0}
    bad = case.agreement(tmp_path / "s.npz", y, y, {"w": 1.1 * y})
    assert bad is not None and bad["gradients"] == pytest.approx(0.1)
    with pytest.raises(ValueError, match="shape"):
        case.agreement(tmp_path / "s.npz", y.T, y, {})
    assert case.agreement(tmp_path / "none.npz", y, y, {}) is None


# --- peers agree with ours


def run_cells(run: Any, tmp_path: Path, model: str, names: list[str]) -> dict[str, dict[str, Any]]:
    folder = tmp_path / "tiny"
    if not folder.exists():
        tiny().save(folder)
        case.features(tiny(), folder, SMALL)
    settings = {"width": 8, "heads": 2, "dtype": "float32", "precision": "f32"}
    cells = [{"graph": "tiny", "model": model, "implementation": name, "settings": settings} for name in names]
    return {c["implementation"]: run.run_cell(c, folder, Limits(target_s=0.0)) for c in cells}


ONE_PROFILE = pytest.mark.cpu_only("jax's profiler ends a process while other tests' processes use the same GPU")


@ONE_PROFILE
@pytest.mark.parametrize(
    "model", [pytest.param(m, marks=[] if m == "rgcn" else pytest.mark.slow) for m in command.MODELS]
)
def test_jax_peers_agree_with_ours(model, tmp_path):
    from benchmarks.peers import run_jax

    found = run_cells(run_jax, tmp_path, model, ["dejax", "jax_ragged", "jax_dense"])
    for name in ("jax_ragged", "jax_dense"):
        assert max(found[name]["agreement"].values()) < 1e-5, name
    ours = found["dejax"]
    assert ours["training"]["needed_bytes"] > 0 and ours["graph_s"] > 0 and ours["forward"]["first_call_s"] > 0


@ONE_PROFILE
@pytest.mark.parametrize("model", command.MODELS)
def test_torch_peers_agree_with_ours(model, tmp_path):
    pytest.importorskip("torch_geometric")
    from benchmarks.peers import run_jax, run_torch

    run_cells(run_jax, tmp_path, model, ["dejax"])
    names = ["pyg", "grouped", *(["pyg_fast"] if model == "rgcn" else [])]
    for name, result in run_cells(run_torch, tmp_path, model, names).items():
        assert max(result["agreement"].values()) < 1e-5, name


def training_cell(tmp_path: Path, model: str, name: str) -> dict[str, Any]:
    settings = {"width": 8, "heads": 2, "dtype": "float32", "precision": "f32"}
    tiny().save(tmp_path / "tiny")
    case.features(tiny(), tmp_path / "tiny", SMALL)
    return {
        "task": "train", "graph": "tiny", "model": model, "implementation": name, "settings": settings, "classes": 3
    }  # fmt: skip


@pytest.mark.slow
def test_training_starts_from_the_same_loss_and_falls(tmp_path):
    from benchmarks.peers import run_jax

    cells = [training_cell(tmp_path, "rgcn", name) for name in ("dejax", "jax_dense")]
    ours, dense = (run_jax.run_cell(c, tmp_path / "tiny", Limits(target_s=0.0)) for c in cells)
    assert ours["losses"] == pytest.approx(dense["losses"], rel=1e-4) and ours["losses"][2] < ours["losses"][0]
    assert ours["epoch"]["peak_bytes"] > 0
    results = [{**cells[0], "status": "ok", **ours}, {**cells[1], "status": "OOM"}]
    lines = rgnn_training.table(results).splitlines()
    assert lines[0] == "| graph | model | dejax | jax_dense |" and lines[2].endswith("| OOM |")
    assert "MiB" in lines[2] and rgnn_training.line(results[0]).startswith("tiny")


@pytest.mark.parametrize("model", command.MODELS)
def test_torch_trains_as_ours_does(model, tmp_path):
    pytest.importorskip("torch_geometric")
    from benchmarks.peers import run_jax, run_torch

    cells = [training_cell(tmp_path, model, name) for name in ("dejax", "pyg")]
    runs = zip((run_jax, run_torch), cells, strict=True)
    ours, peer = (run.run_cell(c, tmp_path / "tiny", Limits(target_s=0.0))["losses"] for run, c in runs)
    count = 1 if model == "rgat" else 3  # PyTorch Geometric shares attention vectors among the relations
    assert ours[:count] == pytest.approx(peer[:count], rel=1e-4)


def test_every_peer_has_a_worker_and_a_missing_package_is_reported():
    from benchmarks.peers import jax_layers, run_jax

    assert set(jax_layers.LAYERS) == {name for name, kind in runner.FRAMEWORKS.items() if kind == "jax"}
    assert run_jax.classify(jax_layers.NotInstalled("x")) == "absent"
    assert run_jax.classify(RuntimeError("RESOURCE_EXHAUSTED: Out of memory while")) == "OOM"
    assert run_jax.classify(RuntimeError("x")) == "error"


# --- workers

_WORKER = """
import json, os, sys, time
job = json.loads(sys.stdin.read())
graphs = "command_buffers_during_profiling" in os.environ["XLA_FLAGS"]
open(os.path.join(job["folder"], "flags"), "a").write("graphs " if graphs else "none ")
print("@@" + json.dumps({"versions": {"fake": "1"}}), flush=True)
for i, cell in enumerate(job["cells"]):
    print("@@" + json.dumps({"start": i}), flush=True)
    if cell["implementation"] == "hangs":
        time.sleep(60)
    if cell["implementation"] == "dies":
        os._exit(3)
    print("something else")
    print("@@" + json.dumps({"done": i, "result": {"status": "ok", "known": len(job["known"])}}), flush=True)
"""


def test_a_worker_that_hangs_or_dies_is_reported_and_the_other_cells_run(tmp_path, monkeypatch, capfd):
    worker = tmp_path / "worker.py"
    worker.write_text(_WORKER, encoding="utf-8")
    monkeypatch.setattr(runner, "_WORKER", worker)
    cells = [{"implementation": name} for name in ("a", "hangs", "b", "dies", "c")]
    found: list[tuple[str, dict[str, Any]]] = []
    note = lambda cell, result: found.append((cell["implementation"], result))  # noqa: E731
    versions = runner.run("jax", cells, tmp_path, Limits(cell_s=1.0), note)
    assert versions == {"fake": "1"}
    assert (tmp_path / "flags").read_text(encoding="utf-8").split() == ["graphs", "graphs", "none", "none"]
    assert [(name, r["status"]) for name, r in found] == [
        ("a", "ok"), ("hangs", "timeout"), ("b", "ok"), ("dies", "error"), ("c", "ok"),
    ]  # fmt: skip
    assert "status 3" in found[3][1]["message"]
    assert [r["known"] for _, r in found if r["status"] == "ok"] == [0, 1, 2]
    assert "something else" in capfd.readouterr().err


def test_a_worker_that_does_not_start_is_not_started_again(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(f"open({str(tmp_path / 'starts')!r}, 'a').write('x'); raise SystemExit(1)", encoding="utf-8")
    monkeypatch.setattr(runner, "_WORKER", worker)
    found: list[dict[str, Any]] = []
    runner.run("torch", [{"implementation": "a"}] * 3, tmp_path, Limits(), lambda _, result: found.append(result))
    assert [r["status"] for r in found] == ["error"] * 3 and "worker torch ended" in found[0]["message"]
    assert (tmp_path / "starts").read_text(encoding="utf-8") == "x"


# --- tables


def measured(ms: float, device: float | None = None, launches: float = 4) -> dict[str, Any]:
    span = None if device is None else {"span_ms": device, "kernels_ms": device, "launches": launches}
    return {"ms": ms, "device": span, "cut": False, "first_call_s": 1.0, "peak_bytes": 3 * 2**20}


def record(name: str, forward: Any, training: Any, model: str = "rgcn", **settings: Any) -> dict[str, Any]:
    return {
        "graph": "am", "model": model, "implementation": name, "settings": {**report.BASE, **settings},
        "status": "ok", "forward": forward, "training": training,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    names = [{**report.BASE}, {**report.BASE, "width": 128}]
    bounds = dict(zip(map(report.settings_name, names), (0.4, 0.8), strict=True))
    ours = record("dejax", measured(1.0, 0.5), measured(3.0, 1.5))
    ours["training"]["needed_bytes"] = 2 * 2**20
    failed = {**record("pyg", None, None, "rgat"), "status": "OOM", "message": "too large"}
    return {
        "graphs": {"am": {"nodes": 10, "edges": 20, "row_bound_ms": bounds}},
        "results": [
            ours,
            record("dejax", measured(2.0, 1.5), measured(6.0, 3.0), width=128),
            record("dejax", measured(2.0, 1.0), measured(6.0, 4.0), "rgat"),
            record("pyg", measured(10.0, 8.0), measured(60.0, 30.0)),
            record("jax_dense", measured(20.0, 10.0), measured(30.0, 15.0)),
            record("grouped", measured(5.0, 4.5), measured(90.0, 9.0)),
            record("grouped_bf16", measured(0.1, 0.1), measured(0.1, 0.1)),
            failed,
        ],
    }


def test_ratios(results):
    ratio = lambda phase, against: report.ratio(results, report.BASE, ("am", "rgcn"), phase, against)  # noqa: E731
    assert ratio("forward", "all") == pytest.approx(5.0)
    assert ratio("forward", "plain") == pytest.approx(10.0)
    assert ratio("training", "all") == ratio("training", "plain") == pytest.approx(10.0)
    assert ratio("training", "device") == pytest.approx(6.0)
    assert ratio("forward", "hector") == pytest.approx(4.15 / 0.5)
    assert ratio("training", "hector") == pytest.approx(14.4 / 1.5)
    report.ours(results, report.BASE, "am", "rgcn")["training"]["device"]["span_ms"] = (
        9.0  # launches are slow while profiled
    )
    assert ratio("training", "hector") == pytest.approx(14.4 / 3.0)
    assert report.ratio(results, report.BASE, ("am", "rgat"), "forward", "all") is None
    assert report.geometric_mean([2.0, 8.0]) == pytest.approx(4.0) and math.isnan(report.geometric_mean([]))


def test_text_has_every_table(results):
    text = report.text(results, Settings())
    assert "30 (jax_dense)" in text and "OOM" in text
    # Width 128 moves twice the bytes in three times the time.
    line = next(line for line in text.splitlines() if " 128 " in line)
    assert line.split()[-2:] == ["1.5", "1"]


def test_without_device_times_the_callers_times_count(results):
    for r in results["results"]:
        for phase in report.PHASES:
            if r[phase]:
                r[phase]["device"] = None
    assert report.ratio(results, report.BASE, ("am", "rgcn"), "forward", "hector") == pytest.approx(4.15)
    assert " - " in report.text(results, report.BASE)


def test_markdown(results):
    lines = report.markdown(results).splitlines()
    assert lines[2] == "| am | RGCN | 0.4 | 0.5 | 1.5 | 5 (grouped) | 30 (jax_dense) | 9 / 6 | 8.3 / 9.6 |"
    assert lines[3].startswith("| am | RGAT | 0.4 | 1 | 4 | OOM (pyg) | OOM (pyg) | - / - |")
    assert lines[4].startswith("| geometric mean | RGCN |") and len({line.count("|") for line in lines}) == 1
    assert lines[5].startswith("| for a caller, over PyG and plain JAX alone | RGCN | | | | | | ")


def test_merge_replaces_what_was_measured_again(results):
    new = {"graphs": results["graphs"], "results": [record("pyg", measured(7.0), measured(8.0))]}
    merged = report.merge(results, new)
    assert len(merged["results"]) == len(results["results"])
    assert report.select(merged, report.BASE, model="rgcn", implementation="pyg")[0]["forward"]["ms"] == 7.0
    other = {"graphs": {"am": {"nodes": 11, "edges": 20, "row_bound_ms": {}}}, "results": []}
    with pytest.raises(ValueError, match="graph am must have the counts of the earlier results"):
        report.merge(results, other)


def test_stored_figures_of_hector_are_consistent_with_the_graphs_and_models():
    reference = json.loads((Path(report.__file__).parent / "peers" / "hector.json").read_text(encoding="utf-8"))
    assert set(reference["ms"]) == set(command.GRAPHS)
    assert all(set(models) == set(command.MODELS) for models in reference["ms"].values())
    assert report.hector("am", "rgcn", "training", {**report.BASE, "width": 128}) is None


def test_arguments():
    args = command.checked(parse(command, "rgnn", ["--graphs", "am,mag", "--peers", "all"]))
    assert args.graphs == ["am", "mag"] and args.peers == list(command.PEERS) and args.models == list(command.MODELS)
    with pytest.raises(SystemExit, match="unknown bm"):
        command.checked(parse(command, "rgnn", ["--graphs", "bm"]))
    with pytest.raises(SystemExit):
        command.checked(parse(command, "rgnn", ["--heads", "3"]))
