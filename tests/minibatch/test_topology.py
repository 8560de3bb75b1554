"""Heterogeneous topologies: sorted lists equal a plain sort, folders give them back, bad input is named."""

import jax
import numpy as np
import pytest

from dejax.host_gather import CachedTable, HostTable
from dejax.minibatch import HeteroTopology, SampleOptions, edge_ids, sample_blocks
from dejax.minibatch.topology import _building

WRITES, CITES, LIKES = ("author", "writes", "paper"), ("paper", "cites", "paper"), ("author", "likes", "author")
COUNTS = {"author": 7, "paper": 11, "venue": 3}


def random_edges(edges=60, seed=0):
    rng = np.random.default_rng(seed)
    return {
        (s, name, d): (rng.integers(0, COUNTS[s], edges), rng.integers(0, COUNTS[d], edges))
        for s, name, d in (WRITES, CITES)
    } | {LIKES: ([], [])}


def assert_has(topology, edges, times=None):
    for edge_type, (senders, receivers) in edges.items():
        starts, found, ids = topology.csc(edge_type)
        senders, receivers = np.asarray(senders, int), np.asarray(receivers, int)
        time = np.zeros(len(senders), int) if times is None else times[edge_type]
        order = np.lexsort((np.arange(len(senders)), time, receivers))
        np.testing.assert_array_equal(found, senders[order])
        np.testing.assert_array_equal(ids, order)
        counts = np.bincount(receivers, minlength=COUNTS[edge_type[2]])
        np.testing.assert_array_equal(np.diff(starts), counts)
        assert starts[0] == 0
        assert topology.relations[topology.number_of(edge_type)].max_degree == counts.max(initial=0)


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("block", [7, 1 << 20])
def test_edges_are_sorted_by_receiver(on_host, block, monkeypatch):
    monkeypatch.setattr(_building, "BLOCK", block)
    edges = random_edges()
    topology = HeteroTopology.from_edges(edges, COUNTS, on_host=on_host)
    assert_has(topology, edges)
    assert isinstance(topology.lists[0].senders, HostTable) == on_host
    assert topology.num_edges == {WRITES: 60, CITES: 60, LIKES: 0}
    assert topology.num_nodes == COUNTS and topology.edge_types == (WRITES, CITES, LIKES)
    assert len(topology.lists) == 1, "relations of one kind share lists"


@pytest.mark.parametrize("block", [7, 1 << 20])
def test_edges_of_a_receiver_are_sorted_by_time(block, monkeypatch):
    monkeypatch.setattr(_building, "BLOCK", block)
    edges = random_edges()
    rng = np.random.default_rng(1)
    times = {kind: rng.integers(0, 5, len(edges[kind][0])) for kind in edges}
    topology = HeteroTopology.from_edges(edges, COUNTS, times=times)
    assert_has(topology, edges, times)
    found = np.asarray(topology.lists[0].times)
    _, _, ids = topology.csc(CITES)
    np.testing.assert_array_equal(found[60:120], times[CITES][ids])


def test_relations_with_weights_have_lists_of_their_own():
    edges = random_edges()
    weights = {WRITES: np.arange(60.0)}
    topology = HeteroTopology.from_edges(edges, COUNTS, weights=weights)
    assert [lists.weights is not None for lists in topology.lists] == [True, False]
    assert_has(topology, edges)


def test_short_limits_split_lists(monkeypatch):
    monkeypatch.setattr(_building, "SHARED_LIMIT", 70)
    topology = HeteroTopology.from_edges(random_edges(), COUNTS)
    assert len(topology.lists) == 2
    assert_has(topology, random_edges())


@pytest.mark.parametrize("on_host", [False, True])
def test_a_folder_gives_the_topology_back(tmp_path, on_host):
    edges = random_edges()
    weights, times = {WRITES: np.ones(60)}, {CITES: np.arange(60)}
    made = HeteroTopology.from_edges(edges, COUNTS, weights=weights, times=times, on_host=on_host)
    made.save(tmp_path / "graph")
    again = HeteroTopology.load(tmp_path / "graph", on_host=on_host)
    assert jax.tree.structure(again) is not None
    assert (again.relations, again.node_counts) == (made.relations, made.node_counts)
    for one, other in zip(jax.tree.leaves(made), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_topology_is_built_in_a_folder_from_memory_maps(tmp_path):
    edges = random_edges()
    for (_, name, _), (senders, receivers) in edges.items():
        np.save(tmp_path / f"{name}.npy", np.array([senders, receivers], np.int64))
    mapped = {
        kind: np.load(tmp_path / f"{kind[1]}.npy", mmap_mode="r" if len(edges[kind][0]) else None) for kind in edges
    }
    topology = HeteroTopology.from_edges(mapped, COUNTS, folder=tmp_path / "graph", on_host=True)
    assert_has(topology, edges)
    assert_has(HeteroTopology.load(tmp_path / "graph"), edges)


def test_relations_without_edges_have_folders_and_samples(tmp_path):
    nothing = {WRITES: ([], []), LIKES: ([], [])}
    for topology in (
        HeteroTopology.from_edges(nothing, COUNTS, folder=tmp_path, on_host=True),
        HeteroTopology.load(tmp_path),
        HeteroTopology.from_edges({}, COUNTS),
    ):
        sample = sample_blocks(jax.random.key(0), topology, ("paper", [1]), [3, 2])
        assert {name: ids.tolist() for name, ids in sample.node_ids.items()} == {
            "author": [],
            "paper": [1],
            "venue": [],
        }


def test_from_csc_takes_sorted_lists():
    starts, senders = np.array([0, 2, 2, 3]), np.array([1, 0, 6], np.int64)
    kind = ("author", "visits", "venue")
    topology = HeteroTopology.from_csc({kind: (starts, senders)}, COUNTS, on_host=True)
    found = topology.csc(kind)
    np.testing.assert_array_equal(found[0], starts)
    np.testing.assert_array_equal(found[1], senders)
    assert topology.relations[0].max_degree == 2


@pytest.mark.parametrize(
    ("edges", "counts", "message"),
    [
        ({("author", "writes", "book"): ([], [])}, COUNTS, r"node type must be one of \['author', 'paper', 'venue'\]"),
        ({("author", "writes"): ([], [])}, COUNTS, "a relation must be"),
        ({"writes": ([], [])}, COUNTS, "a relation must be"),
        ({WRITES: ([0, 1], [0])}, COUNTS, "must be of one length, got 2 and 1"),
        ({WRITES: ([7], [0])}, COUNTS, r"senders of .*'writes'.* must be from 0 to 6, got 7"),
        ({WRITES: ([0], [-1])}, COUNTS, "receivers of .* must be from 0 to 10, got -1"),
        ({WRITES: ([0.5], [0])}, COUNTS, "must be integers, got float64"),
        ({WRITES: np.zeros((5, 2), int)}, COUNTS, "transpose"),
        ({WRITES: ([[0]], [[0]])}, COUNTS, "must have one axis"),
        ({}, {"author": -1}, "must be from 0 to"),
        ({}, {"author": 1.5}, "must be an integer"),
        ([], COUNTS, "must be a dict"),
    ],
)
def test_bad_edges_are_named(edges, counts, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HeteroTopology.from_edges(edges, counts)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"weights": {CITES: [1.0]}}, "relation must be one of"),
        ({"weights": {WRITES: [1.0, 2.0]}}, r"must have shape \(1,\), got \(2,\)"),
        ({"weights": {WRITES: [-1.0]}}, "finite and at least 0, got "),
        ({"weights": {WRITES: [np.nan]}}, "finite and at least 0, got "),
        ({"weights": {WRITES: [1j]}}, "`weights` of .* must be real numbers, got complex128"),
        ({"weights": {WRITES: ["a"]}}, "`weights` of .* must be real numbers, got <U1"),
        ({"times": {WRITES: [0.5]}}, "must be integers"),
        ({"times": {WRITES: np.array([2**64 - 1], np.uint64)}}, r"must be below 2\*\*63, got 18446744073709551615"),
    ],
)
def test_bad_values_are_named(values, message):
    with pytest.raises((TypeError, ValueError), match=message):
        HeteroTopology.from_edges({WRITES: ([0], [0])}, COUNTS, **values)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        ([], "`lists` must be a dict"),
        ({WRITES: ([0] * 12, [], [])}, r"must be \(starts, senders\), got 3 lists"),
        ({WRITES: ([0, 1], [0])}, r"`starts` of .* must have shape \(12,\), got \(2,\)"),
        ({WRITES: (np.zeros(12, np.float32), [])}, "starts of .* must be integers, got float32"),
        ({WRITES: (np.zeros(12, np.int32), [[0]])}, r"senders of .* must have one axis, got shape \(1, 1\)"),
    ],
)
def test_bad_sorted_lists_are_named(lists, message):
    tables = {  # tables are checked as arrays are
        edge_type: tuple(HostTable.from_numpy(np.asarray(some)) if np.size(some) else some for some in pair)
        for edge_type, pair in (lists or {}).items()
    }
    for given in [lists, tables] if lists else [lists]:
        with pytest.raises((TypeError, ValueError), match=message):
            HeteroTopology.from_csc(given, COUNTS)


def test_a_folder_with_a_missing_or_short_file_is_refused(tmp_path):
    HeteroTopology.from_edges(random_edges(), COUNTS).save(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"topology\.json"):
        HeteroTopology.load(tmp_path / "none")
    np.save(tmp_path / "0_senders.npy", np.zeros(5, np.int32))
    with pytest.raises(ValueError, match=r"must have shape \(120,\) of int32, got \(5,\)"):
        HeteroTopology.load(tmp_path)
    (tmp_path / "0_senders.npy").unlink()
    with pytest.raises(FileNotFoundError, match="0_senders"):
        HeteroTopology.load(tmp_path)


def test_unsigned_and_narrow_ids():
    edges = {WRITES: (np.array([0, 6], np.uint8), np.array([10, 0], np.uint64))}
    assert_has(HeteroTopology.from_edges(edges, COUNTS), edges)


def test_times_beyond_32_bits_need_wide_jax():
    with pytest.raises(ValueError, match="64-bit mode"):
        HeteroTopology.from_edges({WRITES: ([0], [0])}, COUNTS, times={WRITES: [2**40]})


@pytest.mark.parametrize("on_host", [False, True])
def test_a_later_write_to_sorted_lists_does_not_show(on_host):
    memory = np.zeros(64, np.int32)
    first = (-memory.ctypes.data % 64) // 4  # at a multiple of 64 bytes, where arrays can be used in place
    senders = memory[first : first + 3]
    senders[:] = 0, 1, 2
    relation = ("a", "to", "b")
    topology = HeteroTopology.from_csc({relation: (np.array([0, 3]), senders)}, {"a": 3, "b": 1}, on_host=on_host)
    senders[:] = 0
    assert topology.csc(relation)[1].tolist() == [0, 1, 2]


@pytest.mark.parametrize("again", ["save", "from_edges"])
def test_a_folder_that_is_mapped_can_be_written_again(again, tmp_path):
    relation, counts = ("a", "to", "b"), {"a": 7, "b": 3}
    edges = np.arange(5000) % 7, np.arange(5000) % 3
    topology = HeteroTopology.from_edges({relation: edges}, counts, folder=tmp_path, on_host=True)
    if again == "save":
        topology.save(tmp_path)
    else:
        HeteroTopology.from_edges({relation: ([1], [2])}, counts, folder=tmp_path)
    expected = HeteroTopology.from_edges({relation: edges}, counts).csc(relation)
    for found, wanted in zip(topology.csc(relation), expected, strict=True):
        np.testing.assert_array_equal(found, wanted)
    assert HeteroTopology.load(tmp_path).num_edges == {relation: 5000 if again == "save" else 1}


def test_a_folder_is_incomplete_while_it_is_written_again(tmp_path):
    relation, counts = ("a", "to", "b"), {"a": 7, "b": 3}
    HeteroTopology.from_edges({relation: ([1], [2])}, counts, folder=tmp_path)
    with pytest.raises(ValueError, match="senders"):
        HeteroTopology.from_edges({relation: ([9], [2])}, counts, folder=tmp_path)
    with pytest.raises(FileNotFoundError, match=r"topology\.json"):
        HeteroTopology.load(tmp_path)


@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.slow
def test_starts_on_the_device_give_the_same_samples(on_host):
    edges = random_edges()
    topology = HeteroTopology.from_edges(edges, COUNTS, on_host=on_host)
    moved = topology.with_starts_on_device()
    assert all(isinstance(some.starts, jax.Array) for some in moved.lists)
    assert isinstance(moved.lists[0].senders, HostTable) == on_host
    assert moved.starts_nbytes == 4 * sum(COUNTS[kind] + 1 for _, _, kind in edges)
    assert_has(moved, edges)
    draw = jax.jit(lambda t: sample_blocks(jax.random.key(0), t, ("paper", np.arange(5)), [3, 2]))
    jax.tree.map(np.testing.assert_array_equal, draw(topology), draw(moved))


@pytest.mark.parametrize(
    "weights", [[0.0, 2.0, 1.0, 0.0, 3.0], pytest.param([False, True, True, False, True], marks=pytest.mark.slow)]
)
@pytest.mark.slow
def test_edges_of_weight_0_are_never_drawn(weights):
    to = ("a", "to", "a")
    lists = {to: ([0, 1, 2, 3, 4], [0, 0, 0, 0, 1])}
    topology = HeteroTopology.from_edges(lists, {"a": 5}, weights={to: weights}, times={to: [1, 2, 3, 4, 5]})
    recent = SampleOptions(recent=True)
    cases = [(-1, SampleOptions()), (1, recent)]
    for fan_out, options in [*cases, (-1, SampleOptions(max_degree=2)), (3, SampleOptions(recent=True, max_degree=2))]:
        sample = sample_blocks(jax.random.key(0), topology, ("a", [0]), [fan_out], seed_times=None, options=options)
        (ids,) = edge_ids(topology, sample)
        found = ids[ids >= 0].tolist()
        if options.max_degree is None:
            assert sorted(found) == ([2] if fan_out == 1 else [1, 2])
        assert set(found) <= {1, 2}
    starts, senders = topology.drawable(to)
    assert starts.tolist() == [0, 2, 3, 3, 3, 3] and senders.tolist() == [1, 2, 4]


def cached(array):
    return CachedTable.from_ids(HostTable.from_numpy(array), [1, 0])


@pytest.mark.parametrize("wrap", [np.asarray, HostTable.from_numpy, cached])
def test_sorted_lists_take_weights(wrap):
    """Lists in tables stay where they are, of which rows may be cached on the device."""
    to, receivers = ("node", "to", "node"), np.array([0, 0, 0, 2])
    senders, weights = np.array([1, 2, 0, 1], np.int32), np.array([1.0, 0.0, 3.0, 2.0])
    want = HeteroTopology.from_edges((senders, receivers), 3, weights=weights).lists[0].weights
    starts = np.array([0, 3, 3, 4], np.int32)
    topology = HeteroTopology.from_csc((wrap(starts), wrap(senders)), 3, weights=wrap(weights))
    jax.tree.map(np.testing.assert_array_equal, topology.lists[0].weights, want)
    if wrap is cached:
        assert isinstance(topology.lists[0].starts, CachedTable)
        sample = jax.jit(lambda t: sample_blocks(jax.random.key(0), t, [0, 2], [3]))(topology)
        assert sorted(sample.positions[0].tolist()) == [-1] * 3 + [0, 2, 3]  # not the edge of weight 0
    with pytest.raises(ValueError, match=r"must have shape \(4,\), got \(1,\)"):
        HeteroTopology.from_csc((starts, senders), 3, weights=[1.0])
    with pytest.raises(ValueError, match="relation must be one of"):
        HeteroTopology.from_csc({to: (starts, senders)}, {"node": 3}, weights={("a", "b", "c"): weights})
