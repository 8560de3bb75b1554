"""The benchmark of attention and of long segments, on small graphs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import attention
from benchmarks.__main__ import main


def test_one_model_on_one_graph(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "HEADS", ((2, 8),))
    options = ["--graphs", "small", "--models", "gatv2", "--scale", "1e-4", "--seconds", "0", "--skip-long"]
    main(["attention", *options, "--out", str(tmp_path)])
    (found,) = json.loads((tmp_path / "attention.json").read_text())["attention"]
    assert (found["edges"], found["model"]) == (230, "gatv2") and 0 < found["forward"] and 0 < found["training"]


@pytest.mark.slow
def test_a_share_of_the_edges_ends_at_one_node() -> None:
    graph = attention.graph_of_one(50, 2000, 0.44)
    assert 0.4 < float((graph.receivers == 0).mean()) < 0.5
    for program, inputs in attention.layers(50).values():
        assert program(graph, inputs).shape[0] == 50
