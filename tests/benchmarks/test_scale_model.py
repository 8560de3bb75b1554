"""`benchmarks/scale_model.py`: counts of bytes are exact, cases are sane, the command writes its files."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import scale_model
from benchmarks.__main__ import main
from benchmarks.scale_model import GRAPHS, Graph, Machine, Sampled


def test_unique_rows_are_those_of_draws():
    """Against draws from all nodes alike."""
    graph, some = Graph("small", 5000, 100_000, 4, 500), Sampled(batch=100, fan_outs=(5, 4))
    rng = np.random.default_rng(0)
    found = []
    for _ in range(20):
        frontier, rows = 100, 100
        for fan_out in some.fan_outs:
            frontier = np.unique(rng.integers(0, graph.nodes, frontier * fan_out)).size
            rows += frontier
        found.append(rows)
    rows, edges = scale_model.unique_rows(graph, some)
    assert rows == pytest.approx(np.mean(found), rel=0.02)
    assert edges == pytest.approx(100 * 5 + 5000 * (1 - np.exp(-0.1)) * 4, rel=1e-6)


@pytest.mark.parametrize("parts", [2, 5])
def test_replicas_are_those_of_random_owners(parts):
    rng = np.random.default_rng(1)
    nodes, edges = 4000, 16_000
    owner, senders = rng.integers(0, parts, nodes), rng.integers(0, nodes, edges)
    read = np.zeros((nodes, parts), bool)
    read[senders, rng.integers(0, parts, edges)] = True
    read[np.arange(nodes), owner] = False
    graph = Graph("random", nodes, edges, 4, nodes)
    # The model gives every node the mean degree, which is an upper bound for random ones.
    found = read.sum() / nodes
    assert found <= scale_model.replicas(graph, parts, 1.0) <= 1.12 * found
    assert scale_model.replicas(graph, 1, 1.0) == 0.0


def test_more_hosts_need_less_memory_each_and_no_longer_epochs():
    rows = scale_model.predict(hosts=(2, 4, 8, 16))
    for graph in GRAPHS:
        for way in ("sampled", "full"):
            some = [row for row in rows if (row.graph, row.way) == (graph.name, way)]
            for one, two in itertools.pairwise(some):
                assert two.gpu_memory + two.host_memory < one.gpu_memory + one.host_memory
                assert two.epoch < one.epoch
    one = scale_model.sampled(GRAPHS[0], 1, Machine(), Sampled())
    assert one.network == 0 and one.host_memory > GRAPHS[0].table


def test_a_slower_network_bounds_the_step():
    slow = dataclasses.replace(Machine(), network=1e9)
    row = scale_model.sampled(GRAPHS[1], 4, slow, Sampled())
    assert row.bound == "network" and row.step > scale_model.sampled(GRAPHS[1], 4, Machine(), Sampled()).step


def test_the_command_writes_a_table_json_and_a_plot(tmp_path, capsys):
    main(["scale_model", "--hosts", "1", "4", "--out", str(tmp_path / "a.json"), "--svg", str(tmp_path / "a.svg")])
    text = capsys.readouterr().out
    assert "IGB-full" in text and "does not fit" in text
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["rows"]) == 12 and found["machine"]["gpus"] == 8
    assert (tmp_path / "a.svg").read_text().count("<line") > 8


def test_the_page_and_the_results_are_what_the_model_gives():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "full_graph_mesh.md").read_text(encoding="utf-8")
    assert scale_model.table(scale_model.predict(hosts=(1, 8, 64))) in page
    found = json.loads((root / "benchmarks" / "results" / "scale_model.json").read_text(encoding="utf-8"))
    rows = scale_model.predict()
    for stored, row in zip(found["rows"], rows, strict=True):
        assert stored == {  # numpy's last digits differ from one processor to another
            name: pytest.approx(value, rel=1e-9) if isinstance(value, float) else value
            for name, value in dataclasses.asdict(row).items()
        }
    assert (root / "docs" / "figures" / "scale_model.svg").read_text(encoding="utf-8") == scale_model.svg(rows)
    for measured in found["measured"]:
        for case in measured["cases"].values():
            assert case["bytes"] == pytest.approx(case["model_bytes"], rel=0.02)
