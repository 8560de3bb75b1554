"""Partitioning: planted communities are found within the bounds, reports count what crosses, folders are read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejax.distributed.partition import Partition, partition, partition_of
from dejax.minibatch import HeteroTopology
from dejax.rgnn import RelGraph
from tests.rgnn.references import GRAPHS

CITES, WRITES = ("paper", "cites", "paper"), ("author", "writes", "paper")


def planted(communities: int, papers: int, authors: int, mixed: float = 0.1) -> tuple[dict, dict, dict]:
    """Papers cite, and authors write, papers of their own community, but for a share of `mixed`."""
    rng = np.random.default_rng(communities)
    sizes = {"paper": papers, "author": authors}
    of = {name: rng.integers(0, communities, size) for name, size in sizes.items()}
    by_community = [np.flatnonzero(of["paper"] == c) for c in range(communities)]

    def edges(source: str, count: int) -> tuple[np.ndarray, np.ndarray]:
        senders = rng.integers(0, sizes[source], count)
        receivers = np.array([rng.choice(by_community[c]) for c in of[source][senders]])
        anywhere = rng.random(count) < mixed
        receivers[anywhere] = rng.integers(0, papers, int(anywhere.sum()))
        return senders, receivers

    return {CITES: edges("paper", 8 * papers), WRITES: edges("author", 5 * authors)}, sizes, of


def metis_or_skip(method: str) -> None:
    if method == "metis":
        pytest.importorskip("pymetis")


@pytest.mark.parametrize("method", ["stream", "metis"])
@pytest.mark.parametrize("communities", [2, 5])
def test_planted_communities_are_found(method: str, communities: int) -> None:
    metis_or_skip(method)
    edges, sizes, of = planted(communities, 600, 300)
    best = partition_of(edges, of, communities, sizes).report
    found = partition(edges, communities, num_nodes=sizes, method=method, imbalance=1.2).report
    assert found.cut_edges <= 1.1 * best.cut_edges
    assert max(found.balance.values()) <= 1.2 + 1 / 60


@pytest.mark.parametrize("method", ["stream", "metis"])
@pytest.mark.parametrize("imbalance", [1.0, 1.05])
def test_no_part_exceeds_the_bound_of_a_type(method: str, imbalance: float) -> None:
    """A star, whose best cut would be all in one part, and types of few nodes."""
    metis_or_skip(method)
    rng = np.random.default_rng(0)
    edges = {CITES: (rng.integers(0, 3, 500), rng.integers(0, 101, 500)), WRITES: ([0, 1, 6], [0, 0, 1])}
    sizes = {"paper": 101, "author": 7}
    found = partition(edges, 4, num_nodes=sizes, method=method, imbalance=imbalance)
    for name, size in sizes.items():
        assert max(found.report.nodes[name]) <= max(-(-size // 4), int(size / 4 * imbalance))
        assert sum(found.report.nodes[name]) == size


def test_the_report_counts_what_crosses() -> None:
    # 0 and 1 in part 0; 2 and 3 in part 1. Node 0 is read twice by part 1, node 3 once by part 0.
    edges = {CITES: ([0, 0, 3, 1, 2], [2, 3, 1, 0, 3])}
    found = partition_of(edges, {"paper": [0, 0, 1, 1]}, 2, {"paper": 4})
    report = found.report
    assert (report.num_edges, report.cut_edges, report.halo_rows) == (5, 3, 2)
    assert report.halo == {"paper": (1, 1)} and report.edges == (2, 3) and report.nodes == {"paper": (2, 2)}
    assert report.replication == 1.5 and report.edge_balance == 1.2 and report.balance == {"paper": 1.0}
    assert report.halo_bytes(512) == report.halo_bytes({"paper": 512}) == 1024
    assert found.owner().tolist() == [0, 0, 1, 1]
    assert "halo rows" in str(report) and "60.0%" in str(report)


def test_all_kinds_of_graphs_give_one_partition(tmp_path: Path) -> None:
    edges, sizes, _ = planted(3, 120, 60)
    lists = partition(edges, 3, num_nodes=sizes, method="stream")
    graph = partition(RelGraph.from_relations(edges, sizes), 3, method="stream")
    np.testing.assert_array_equal(lists.owner(), graph.owner())
    topology = HeteroTopology.from_edges(edges, sizes, folder=tmp_path / "topology", on_host=True)
    streamed = partition(topology, 3)
    assert streamed.report.method == "stream" and list(streamed.assignment) == list(sizes)
    # The same assignment costs the same, whatever it was counted on.
    again = partition_of(edges, streamed.assignment, 3, sizes).report
    assert again.halo == streamed.report.halo and again.edges == streamed.report.edges


def test_a_rel_graph_of_mixed_types_is_partitioned_by_number() -> None:
    graph = GRAPHS["typical"].build()
    found = partition(graph, 3, method="stream")
    assert found.owner().shape == (graph.num_nodes,)


def test_a_folder_is_read_back(tmp_path: Path) -> None:
    edges, sizes, _ = planted(2, 50, 20)
    made = partition(edges, 2, num_nodes=sizes, method="stream")
    made.save(tmp_path)
    read = Partition.load(tmp_path)
    assert read.report == made.report
    assert all((read.assignment[name] == some).all() for name, some in made.assignment.items())
    assert isinstance(read.assignment["paper"], np.memmap)
    read.save(tmp_path)  # over the files that it has mapped
    again = Partition.load(tmp_path)
    assert all((again.assignment[name] == some).all() for name, some in made.assignment.items())


def broken(folder: Path, how: str) -> None:
    file = folder / "assignment_0.npy"
    if how == "short":
        file.write_bytes(file.read_bytes()[:-40])
    elif how == "missing":
        file.unlink()
    elif how == "other":
        np.save(file, np.zeros(3, np.int32))
    else:
        (folder / "partition.json").unlink()


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("short", ValueError, "must be a complete .npy file"),
        ("missing", FileNotFoundError, "save the partition again"),
        ("other", ValueError, "must have 50 entries"),
        ("json", FileNotFoundError, "writes last"),
    ],
)
def test_a_broken_folder_has_a_clear_error(tmp_path: Path, how: str, error: type, message: str) -> None:
    edges, sizes, _ = planted(2, 50, 20)
    partition(edges, 2, num_nodes=sizes, method="stream").save(tmp_path)
    broken(tmp_path, how)
    with pytest.raises(error, match=message):
        Partition.load(tmp_path)


PAIR: dict[Any, Any] = {CITES: ([0, 1], [1, 2])}


@pytest.mark.parametrize(
    ("graph", "parts", "keywords", "error", "message"),
    [
        (PAIR, 4, {"num_nodes": {"paper": 3}}, ValueError, "from 1 to the number of nodes, 3, got 4"),
        (PAIR, 0, {"num_nodes": {"paper": 3}}, ValueError, "got 0"),
        (PAIR, 2, {}, TypeError, "`num_nodes` must be the number of nodes of each type"),
        (PAIR, 2, {"num_nodes": {"author": 3}}, ValueError, "node type must be one of .*, got 'paper'"),
        (PAIR, 2, {"num_nodes": {"paper": 2}}, ValueError, "receivers of .* from 0 to 1, got 2"),
        ({CITES: ([0], [1, 2])}, 2, {"num_nodes": {"paper": 3}}, ValueError, "must be of one length"),
        ({CITES: ([0.0], [1.0])}, 2, {"num_nodes": {"paper": 3}}, TypeError, "must be integers, got float64"),
        ({"cites": ([0], [1])}, 2, {"num_nodes": {"paper": 3}}, TypeError, "got 'cites'"),
        (PAIR, 2, {"num_nodes": {"paper": 3}, "method": "best"}, ValueError, "got 'best'"),
        (PAIR, 2, {"num_nodes": {"paper": 3}, "imbalance": 0.9}, ValueError, "at least 1, got 0.9"),
        (3, 2, {}, TypeError, "got int"),
    ],
)
def test_bad_input_has_a_clear_error(graph: Any, parts: int, keywords: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        partition(graph, parts, **keywords)


@pytest.mark.parametrize("nodes", [1, 3])
def test_few_nodes_and_no_edges(nodes: int) -> None:
    found = partition({CITES: ([], [])}, nodes, num_nodes={"paper": nodes}, method="stream")
    assert sorted(found.owner().tolist()) == list(range(nodes)) and found.report.cut_edges == 0
