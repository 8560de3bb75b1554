"""Makes the tables of the pages, and README's chart, from the JSON under benchmarks/results.

    python -m benchmarks.render_tables            # writes them
    python -m benchmarks.render_tables --check    # exit status 1 where a page or the chart differs from the JSON

A table stands between `<!-- NAME: made by ... -->` and `<!-- end NAME -->` on any of the pages (`PAGES`). To move a
table to another page, move its two markers. `accuracy` comes from the files accuracy_*.json, each of which is the
results.json of one run of examples/entity_classification.py. `means`, `performance`, `host_gather` and `offload` come
from what benchmarks/rgnn.py, host_gather.py and offload.py wrote on an H200.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import rgnn_report, speed_chart
from benchmarks.tables import markdown

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "docs" / "figures" / "rgnn_training_time.svg"
RESULTS = ROOT / "benchmarks" / "results"

PERFORMANCE = "rgnn_h200_float32_tf32_w64_h1.json"
HOST_GATHER = "host_gather_h200.json"
OFFLOAD = "offload_h200.json"
MINI_BATCH = "mini_batch_pipeline_h200.json"
MINI_BATCH_PEER = "mini_batch_peer_h200.json"
IGB_MESH = "igb_mesh_h200x4.json"

_GPT = {
    "saved": "everything saved",
    "remat": "`jax.checkpoint` around each block",
    "inputs": "`offload(jax.checkpoint(block))`",
    "names": "`offload`, named tensors",
}
_LAYERS = {
    "inputs saved": "`jax.checkpoint` around each layer",
    "offload, host, ring of auto": "`offload(jax.checkpoint(layer))`",
    "JAX's own offload": "JAX's `save_and_offload_only_these_names`",
}

_DATASETS = {"stdlib": "code graph of the standard library", "aifb": "AIFB", "mutag": "MUTAG", "bgs": "BGS", "am": "AM"}
_MODELS = {"rgcn": "R-GCN", "rgat": "RGAT", "hgt": "HGT"}


def _runs(results: Path, names: str, last: Callable[[dict[str, Any]], Any]) -> list[dict[str, Any]]:
    """The stored results of training runs, by data set and model."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(results.glob(names))]
    order = list(_DATASETS), list(_MODELS)
    return sorted(runs, key=lambda r: (_place(order[0], r["dataset"]), _place(order[1], r["model"]), last(r)))


def _which(run: dict[str, Any]) -> list[str]:
    return [_DATASETS.get(run["dataset"], run["dataset"]), _MODELS.get(run["model"], run["model"])]


def _test_accuracy(run: dict[str, Any]) -> str:
    test = run["accuracy"]["test"]
    return f"{100 * test['mean']:.1f} ± {100 * test['std']:.1f} ({len(test['runs'])})"


def _where(run: dict[str, Any]) -> str:
    return f"{run['machine']['kind']}, {run['machine']['backend']}, jax {run['versions']['jax']}"


def accuracy_table(results: Path) -> str:
    """One row for each data set, model and machine."""
    rows = []
    for run in _runs(results, "accuracy_*.json", lambda r: r["machine"]["kind"]):
        baselines, time = run["baselines"], run["time"]
        no_edges = f"{100 * baselines['no_edges']['mean']:.1f}" if baselines["no_edges"] else "-"
        times = [f"{time['epoch_ms']:.3g}", f"{time['total_s']:.0f}"]
        rows.append(
            [*_which(run), _test_accuracy(run), no_edges, f"{100 * baselines['majority']:.1f}", *times, _where(run)]
        )
    head = "data set | model | test accuracy, % (seeds) | no edges | most frequent class | epoch, ms | job, s | on"
    return markdown(head, rows)


def sampled_table(results: Path) -> str:
    """Mini-batches beside the full batch: the results.json of `dejax-train --sampled`, as sampled_*.json."""
    rows = []
    for run in _runs(results, "sampled_*.json", lambda r: r["settings"]["full_batch"]):
        settings, full = run["settings"], run["settings"]["full_batch"]
        seeds = f"{settings['batch_size']:,} seeds, fan-out {', '.join(map(str, settings['fan_outs']))}"
        steps = 1 if full else -(-run["graph"]["split_sizes"]["train"] // settings["batch_size"])
        sees, epochs = "the whole graph" if full else seeds, f"{settings['epochs']}, {steps}"
        rows.append([*_which(run), sees, epochs, _test_accuracy(run), f"{run['time']['step_ms']:.3g}", _where(run)])
    head = "data set | model | a step sees | epochs, steps of each | test accuracy, % (seeds) | step, ms | on"
    return markdown(head, rows)


def measured_on(found: Any) -> str:
    """The newest date in the JSON of a result."""
    if isinstance(found, dict):
        parts = [measured_on(value) for key, value in found.items() if key != "date"]
        return max([*parts, str(found.get("date", ""))], default="")
    return max(map(measured_on, found), default="") if isinstance(found, list) else ""


def means_table(results: Path) -> str:
    """README's table: each part against its peers, as geometric means over the cells of the full tables."""
    report = json.loads((results / PERFORMANCE).read_text(encoding="utf-8"))
    rows: list[list[str]] = []
    peers = {"device": "fastest other on the GPU", "hector": "Hector"}
    for model, title in rgnn_report.MODELS.items():
        cells = [c for c in rgnn_report.cells(report, rgnn_report.BASE) if c[1] == model]
        for against, name in peers.items():
            both = rgnn_report.known_ratios(report, rgnn_report.BASE, cells, against)
            means = [f"{rgnn_report.rounded(rgnn_report.geometric_mean(values), 2)}x" for values in both]
            if known := min(map(len, both)):
                own = [r for r in report["results"] if r["model"] == model and r["implementation"] == "dejax"]
                over = f"{known} graphs"
                rows.append([f"{title} layer, forward / training", name, " / ".join(means), over, measured_on(own)])
    sizes, when = _host_gather_sizes(results), _when_host_gather(results)
    for peer, name in (("torch", "PyTorch on 16 CPU threads, and a copy"), ("numpy", "`numpy.take`, and a copy")):
        ratios = [cell["auto"] / cell[peer] for cell in sizes if cell.get(peer)]
        if ratios:
            mean = rgnn_report.rounded(rgnn_report.geometric_mean(ratios), 2)
            rows.append(["rows of a table in host memory", name, f"{mean}x", f"{len(ratios)} sizes", when])
    rows += _mini_batch_rows(results)
    saved, named = (_offload_row(results, "gpt", name) for name in ("saved", "names"))
    memory = f"{_gib(named):.1f} instead of {_gib(saved):.1f} GiB, {named['ms']:.0f} instead of {saved['ms']:.0f} ms"
    gpt = "activations of 6 GPT blocks, width 8,192"
    rows.append([gpt, "everything saved", memory, "", _date_of(results / OFFLOAD)])
    for path in results.glob("accuracy_aifb_rgcn.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        test = found["accuracy"]["test"]
        accuracy = f"{100 * test['mean']:.1f} %, the paper 95.83 %"
        seeds = f"{len(test['runs'])} seeds"
        paper = "its paper (arXiv 1703.06103)"
        rows.append(["test accuracy of R-GCN on AIFB", paper, accuracy, seeds, measured_on(found)])
    rows += _entity_rows(results)
    return markdown("what | against | result | over | measured", rows)


def _entity_rows(results: Path) -> list[list[str]]:
    """Trainings of R-GCN on a real graph: seconds with and without compilation, beside the fastest of the peers.

    On a CPU, seconds of CPU time: the machine may have had other work.
    """
    rows = []
    for path in sorted(results.glob("entity_*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        own, clock = found["dejax"], "cpu_s" if found["dejax"]["device"] == "cpu" else "s"
        peer = min(found["peers"].values(), key=lambda run: run[f"later_{clock}"])
        unit, device = ("s of CPU time", "two cores") if clock == "cpu_s" else ("s", own["device"])
        what = f"R-GCN on AIFB, real data, {found['settings']['epochs']} epochs and test, {device}"
        first, later = (
            f"{_seconds(own[f'{when}_{clock}'])} instead of {_seconds(peer[f'{when}_{clock}'])} {unit}"
            for when in ("first", "later")
        )
        result = f"{later}; {first} for the first training, with compilation"
        rows.append([what, "PyTorch Geometric", result, f"{len(own['seconds'])} seeds", measured_on(found)])
    return rows


def _seconds(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _date_of(path: Path) -> str:
    return measured_on(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else ""


def _mini_batch_rows(results: Path) -> list[list[str]]:
    """Steps on mini-batches: against a pipeline of CPU threads, MLPerf's R-GAT, and four GPUs against one."""
    paths = [results / name for name in (MINI_BATCH, MINI_BATCH_PEER, IGB_MESH)]
    if not all(path.exists() for path in paths):
        return []
    own, peers, several = (json.loads(path.read_text(encoding="utf-8")) for path in paths)
    pipelined = {"section": "steps", "way": "pipelined"}.items()
    of_mag = [run for run in own["runs"] if run["results"][0]["case"] == "mag"][-1]
    mag = next(row for row in of_mag["results"] if pipelined <= row.items())
    theirs = next(row for row in peers["results"] if row["peer"].endswith("rgat"))
    last = [run for run in own["runs"] if run["results"][0]["case"] == "igb"][-1]
    igb = last["results"]
    (newest,) = (row for row in igb if pipelined <= row.items())
    (whole,) = several["all of IGB"]["results"]
    of_four = [row["times_one"] for row in several["a hundredth of IGB"]["results"]
               if row["devices"] == 4 and row["case"] == "divided"]  # fmt: skip
    millions = f"{igb[0]['nodes'] / 1e6:,.0f} million nodes"
    eight = "a GPU of MLPerf v5.1, which runs all of IGB on eight"
    times = f"{mag['wall_ms']:.1f} instead of {theirs['step_ms']:.1f} ms"
    rate = f"{newest['seeds_per_s']:,.0f} seeds/s, theirs 27,700"
    all_of_it = f"{whole['seeds_per_s_and_gpu']:,} seeds/s a GPU, theirs 27,700"
    return [
        [
            "mini-batch step of R-GAT, ogbn-mag's counts",
            "PyTorch Geometric fed by 16 CPU threads",
            times,
            "",
            f"{measured_on(of_mag)}, the peer {measured_on(peers)}",
        ],
        [f"MLPerf's R-GAT, mini-batches, IGB's shape, {millions}", eight, rate, "", measured_on(last)],
        [
            "the same, IGB's counts, 547 million nodes, on four H200 of one host",
            eight,
            all_of_it,
            "",
            measured_on(several),
        ],
        ["the same, a hundredth of IGB, on four H200", "one H200", f"{of_four[-1]:.2f}x", "", measured_on(several)],
    ]


def performance_table(results: Path) -> str:
    """One row for each graph and model."""
    return rgnn_report.markdown(json.loads((results / PERFORMANCE).read_text(encoding="utf-8")))


def host_gather_table(results: Path) -> str:
    """One row for each table size and number of ids."""
    head = "table, GiB | rows of 512 bytes | GB/s | of the copy engine | ids as they come | torch, 16 threads | numpy"
    rows = []
    for cell in _host_gather_sizes(results):
        rates = [f"{cell[name]:.1f}" if cell.get(name) else "-" for name in ("given", "torch", "numpy")]
        share = f"{cell['auto'] / cell['engine']:.2f}"
        rows.append([f"{cell['gib']:g}", f"{cell['ids']:,}", f"{cell['auto']:.1f}", share, *rates])
    return markdown(head, rows)


def _when_host_gather(results: Path) -> str:
    """The date of the section `sizes`, and of those sizes that were measured again."""
    path = results / HOST_GATHER
    if not path.exists():
        return ""
    report = json.loads(path.read_text(encoding="utf-8"))
    again = report["sections"].get("sizes_again", [])
    return str(report["date"]) + (f", {len(again)} sizes again {measured_on(again)}" if again else "")


def _host_gather_sizes(results: Path) -> list[dict[str, Any]]:
    """The section `sizes`, with the copy engine's rate in each cell; empty where there is no file."""
    path = results / HOST_GATHER
    if not path.exists():
        return []
    report = json.loads(path.read_text(encoding="utf-8"))
    return [cell | {"engine": report["copy_engine_of"]["sizes"]} for cell in report["sections"].get("sizes", [])]


def offload_table(results: Path) -> str:
    """One row for each way to train that offload was measured against."""
    cases = json.loads((results / OFFLOAD).read_text(encoding="utf-8"))["cases"]
    cells = []
    for case, title, names in (
        ("gpt", "6 GPT blocks, width 8,192", _GPT),
        ("layers24", "24 layers, width 4,096", _LAYERS),
        ("layers12", "12 layers, width 8,192", _LAYERS),
    ):
        rows = {row["name"]: row for row in cases[case]["rows"]}
        for name, words in names.items():
            if name in rows and "error" not in rows[name]:
                row = rows[name]
                when = " (earlier run)" if "note" in row else ""
                cells.append([title, f"{words}{when}", f"{row['ms']:.1f}", f"{_gib(row):.2f}"])
    return markdown("program | how | step, ms | activation memory, GiB", cells)


def _offload_row(results: Path, case: str, name: str) -> dict[str, Any]:
    rows = json.loads((results / OFFLOAD).read_text(encoding="utf-8"))["cases"][case]["rows"]
    return next(row for row in rows if row["name"] == name)


def _gib(row: dict[str, Any]) -> float:
    """Activation memory on the device, with the ring."""
    return float(row["temp_gib"] + row.get("ring_gib", 0))


TABLES: dict[str, Callable[[Path], str]] = {
    "means": means_table,
    "accuracy": accuracy_table,
    "sampled": sampled_table,
    "performance": performance_table,
    "host_gather": host_gather_table,
    "offload": offload_table,
}


def pages() -> dict[Path, str]:
    """Every page that may have tables, with its text."""
    paths = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return {path: path.read_text(encoding="utf-8") for path in paths}


def render(text: str, results: Path) -> str:
    """The text of a page with each of its tables made anew."""
    for name, make in TABLES.items():
        pattern = re.compile(rf"(<!-- {name}:[^\n]*-->\n).*?(<!-- end {name} -->)", re.DOTALL)
        if pattern.search(text):
            table = f"\n{make(results)}\n\n"
            text = pattern.sub(lambda match, table=table: match[1] + table + match[2], text)
    return text


def rendered(results: Path) -> dict[Path, tuple[str, str]]:
    """Each page and the chart: what the file has, and what it must have.

    Raises:
        ValueError: no page, or more than one, has the markers of a table.
    """
    found = pages()
    for name in TABLES:
        markers = f"<!-- {name}:", f"<!-- end {name} -->"
        places = [path.name for path, text in found.items() if all(marker in text for marker in markers)]
        if len(places) != 1:
            raise ValueError(f"the markers of table {name!r} must be on one page, got {places or 'none'}")
    both = {path: (text, render(text, results)) for path, text in found.items()}
    report = json.loads((results / PERFORMANCE).read_text(encoding="utf-8"))
    both[CHART] = CHART.read_text(encoding="utf-8") if CHART.exists() else "", speed_chart.svg(report)
    return both


def _place(order: Sequence[str], name: str) -> tuple[int, str]:
    return (order.index(name) if name in order else len(order)), name


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(description="Makes the pages' tables and README's chart from benchmarks/results.")
    p.add_argument("--check", action="store_true", help="write nothing; exit status 1 where a file is out of date")
    args: Any = p.parse_args(argv)
    stale = {path: new for path, (old, new) in rendered(RESULTS).items() if new != old}
    for path, text in stale.items():
        if args.check:
            print(f"{path.relative_to(ROOT)} is out of date: run python -m benchmarks.render_tables", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(bool(stale) and args.check)


if __name__ == "__main__":
    sys.exit(main())
