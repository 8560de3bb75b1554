"""Expected visits against counted ones, and the choice of rows against a plain greedy one."""

import jax
import numpy as np
import pytest

from dejax.minibatch import HeteroTopology, expected_visits, hot_rows
from dejax.minibatch.topology import hetero_topology

RNG = np.random.default_rng(0)
NODES = {"a": 7, "b": 5, "empty": 0}
EDGES = {
    ("b", "to", "a"): (RNG.integers(0, 5, 30), RNG.integers(0, 7, 30)),
    ("a", "in", "a"): np.stack([RNG.integers(0, 7, 20), RNG.integers(0, 7, 20)]),
    ("a", "of", "b"): (np.zeros(0, np.int32), np.zeros(0, np.int32)),
}


def counted(seeds, fan_outs, times):
    """Visits of samples without replacement, averaged."""
    visits = {name: np.zeros(count) for name, count in NODES.items()}
    for _ in range(times):
        frontier = [("a", v) for v in seeds]
        for name, v in frontier:
            visits[name][v] += 1
        for hop in fan_outs:
            reached = []
            for name, v in frontier:
                for relation, (senders, receivers) in EDGES.items():
                    k = hop.get(relation, 0) if isinstance(hop, dict) else hop
                    if relation[2] == name:
                        own = senders[receivers == v]
                        drawn = own if k < 0 else RNG.permutation(own)[:k]
                        reached += [(relation[0], u) for u in drawn]
            for name, v in reached:
                visits[name][v] += 1
            frontier = reached
    return {name: values / times for name, values in visits.items()}


@pytest.mark.parametrize("fan_outs", [[2, 1], [-1, {("b", "to", "a"): 1}], []])
def test_expected_visits(fan_outs) -> None:
    found = expected_visits(EDGES, NODES, {"a": [1, 4]}, fan_outs)
    want = counted([1, 4], fan_outs, 3000)
    for name in NODES:
        np.testing.assert_allclose(found[name], want[name], atol=0.2)
    half = expected_visits(EDGES, NODES, {"a": [1, 4]}, fan_outs, batch_size=1)
    np.testing.assert_allclose(half["b"], found["b"] / 2)


@pytest.mark.parametrize("fan_outs", [[2, 1], [-1, {("b", "to", "a"): 1}], [3, 0, 2], []])
@pytest.mark.parametrize("on_host", [False, True])
def test_topologies_expect_the_same_visits(fan_outs, on_host: bool, monkeypatch) -> None:
    monkeypatch.setattr(hetero_topology, "_PIECE", 7)  # a relation takes several pieces
    graph = HeteroTopology.from_edges(EDGES, NODES, on_host=on_host)
    seeds = {"a": [1, 4, 4], "b": [2]}
    for size in (None, 2):
        found = graph.expected_visits(seeds, fan_outs, batch_size=size, devices=(size and jax.devices()[:2]) or ())
        want = expected_visits(EDGES, NODES, seeds, fan_outs, batch_size=size)
        assert set(found) == set(want)
        for name, values in want.items():
            assert found[name].dtype == np.float64
            np.testing.assert_allclose(found[name], values, rtol=1e-6)
    moved = graph.with_starts_on_device().expected_visits(seeds, fan_outs)
    np.testing.assert_array_equal(moved["a"], graph.expected_visits(seeds, fan_outs)["a"])


@pytest.mark.parametrize("room", [0, 10, 60, 100, 137, 10_000])
@pytest.mark.parametrize("seed", range(3))
def test_hot_rows_are_the_most_visited(room: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    visits = {"a": rng.integers(0, 4, 20), "b": rng.random(5) * 4, "empty": np.zeros(0)}
    row_bytes = {"a": 4, "b": 16, "empty": 8}
    chosen = hot_rows(visits, row_bytes, room, slot_bytes=0)
    used = sum(len(ids) * row_bytes[name] for name, ids in chosen.items())
    assert used <= room
    cold = {name: np.delete(np.arange(len(visits[name])), ids) for name, ids in chosen.items()}
    least = min((visits[name][ids].min() for name, ids in chosen.items() if len(ids)), default=np.inf)
    left = [(visits[name][i], row_bytes[name]) for name, ids in cold.items() for i in ids if visits[name][i] > 0]
    assert all(count <= least for count, _ in left)
    most = max((count for count, _ in left), default=0)
    assert all(used + size > room for count, size in left if count == most)
    if room == 10_000:
        assert all(set(ids) == set(np.flatnonzero(visits[name])) for name, ids in chosen.items())


def test_slots_take_room() -> None:
    assert hot_rows({"a": [5, 6, 7]}, {"a": 8}, 12 + 8)["a"].tolist() == [2]
    assert hot_rows({"a": [5, 6, 7]}, {"a": 8}, 11)["a"].tolist() == []


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="node types must be of a, b, empty, got 'x'"):
        expected_visits(EDGES, NODES, {"x": [0]}, [1])
    with pytest.raises(ValueError, match="seeds must be integers from 0 to 6"):
        expected_visits(EDGES, NODES, {"a": [7]}, [1])
    with pytest.raises(ValueError, match="relations of `fan_outs` must be"):
        expected_visits(EDGES, NODES, {"a": [0]}, [{("b", "x", "a"): 1}])
    with pytest.raises(ValueError, match=r"receivers of \('b', 'to', 'a'\) must be"):
        expected_visits(EDGES, {**NODES, "a": 2}, {"a": [0]}, [1])
    wrong = {**EDGES, ("a", "of", "b"): ([7], [0])}  # in a relation that no hop draws from
    with pytest.raises(ValueError, match=r"senders of \('a', 'of', 'b'\) must be"):
        expected_visits(wrong, NODES, {"a": [0]}, [{("b", "to", "a"): 1}])
    graph = HeteroTopology.from_edges(EDGES, NODES)
    with pytest.raises(ValueError, match="node types must be of a, b, empty, got 'x'"):
        graph.expected_visits({"x": [0]}, [1])
    with pytest.raises(ValueError, match="seeds must be integers from 0 to 6"):
        graph.expected_visits({"a": [7]}, [1])
    with pytest.raises(ValueError, match="relations of `fan_outs` must be"):
        graph.expected_visits({"a": [0]}, [{("b", "x", "a"): 1}])
    with pytest.raises(ValueError, match="`row_bytes` must have"):
        hot_rows({"a": [1]}, {}, 5)
    with pytest.raises(ValueError, match="NaN"):
        hot_rows({"a": [np.nan]}, {"a": 1}, 5)
