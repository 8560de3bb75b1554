"""Sampling of heterogeneous neighbourhoods: what is found is there, each draw is as likely as it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset, from_tables
from dejax.minibatch import (
    HeteroTopology,
    NegativePool,
    SampleOptions,
    TrueEdges,
    find_capacities,
    link_batch,
    sample_blocks,
)
from dejax.minibatch.links import batches
from tests.minibatch.graphs import (
    CITES,
    COUNTS,
    LIKES,
    REV,
    WRITES,
    edge_lists,
    jitted,
    p_value,
    timed,
    topology_of,
)

KEY = jax.random.key(0)


def test_each_node_has_one_number_and_hops_are_prefixes():
    sample = jitted(topology_of(), {"paper": jnp.array([1, 5, 5, -1, 99, 1]), "author": [2]}, [2, 2, 2])
    for name, ids in sample.node_ids.items():
        ids = np.asarray(ids)
        valid = ids[ids >= 0]
        assert len(set(valid.tolist())) == len(valid)
        assert len(ids) == sample.layout.first(4, sample.layout.node_types.index(name))
    np.testing.assert_array_equal(sample.node_ids["paper"][:6], [1, 5, -1, -1, -1, -1])
    np.testing.assert_array_equal(sample.seed_positions["paper"], [0, 1, 1, 3, 4, 0])
    assert sample.layout.counts(3) == {name: len(ids) for name, ids in sample.node_ids.items()}


def test_no_seeds_and_types_without_edges():
    none = sample_blocks(KEY, topology_of(), {"paper": jnp.zeros(0, jnp.int32)}, [3, 2])
    assert all(ids.shape == (0,) for ids in none.node_ids.values()) and none.senders == ()
    lonely = sample_blocks(KEY, topology_of(), ("lonely", [3, 1]), [3])
    np.testing.assert_array_equal(lonely.node_ids["lonely"], [3, 1])
    assert lonely.senders == ()
    assert not any(
        sample.layout.edge_types[p.relation] == LIKES for sample in (none, lonely) for p in sample.layout.pieces
    )


def test_fan_outs_by_relation_and_hop():
    topology = topology_of()

    def shaped(seeds, fan_outs):
        return jax.eval_shape(lambda t: sample_blocks(KEY, t, ("paper", jnp.array(seeds)), fan_outs), topology)

    by_hop = shaped([1, 2], [{WRITES: 2}, {REV: 3, CITES: 0}])
    by_relation = shaped([1, 2], {WRITES: [2, 0], REV: [0, 3]})
    for sample in (by_hop, by_relation):
        kinds = {(p.hop, sample.layout.edge_types[p.relation], p.fan_out) for p in sample.layout.pieces}
        assert kinds == {(0, WRITES, 2), (1, REV, 3)}
    longest = max(r.max_degree for r in topology.relations)
    wide = shaped([1], [1000])
    assert all(p.fan_out <= longest for p in wide.layout.pieces), "no slots that nothing can fill"


def test_ids_of_any_integer_dtype():
    topology = topology_of()
    run = jax.jit(lambda seeds: sample_blocks(KEY, topology, seeds, [{CITES: 1}]).node_ids["paper"][0])
    for seeds in ({"paper": np.array([3], np.uint8)}, {"paper": np.array([3], np.int16)}):
        assert int(run(seeds)) == 3


def test_the_same_key_gives_the_same_sample_and_another_key_another():
    topology = topology_of()
    run = jax.jit(lambda key: sample_blocks(key, topology, ("paper", jnp.arange(13)), [2]).senders)
    first, again, other = run(KEY), run(KEY), run(jax.random.key(1))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


@pytest.mark.slow
def test_vmap_over_keys_and_seeds():
    topology, keys = topology_of(on_host=True), jax.random.split(KEY, 3)
    seeds = jnp.array([[1, 2], [3, 3], [-1, 5]])

    def run(key, topology, own):
        return sample_blocks(key, topology, ("paper", own), [2, 2])

    many = jax.jit(jax.vmap(run, in_axes=(0, None, 0)))(keys, topology, seeds)
    alone = jax.jit(run)
    for number in range(3):
        one = alone(keys[number], topology, seeds[number])
        for a, b in zip(jax.tree.leaves(many), jax.tree.leaves(one), strict=True):
            np.testing.assert_array_equal(a[number], b)


def test_all_edges_within_a_bound_are_counted():
    edges = {CITES: (np.arange(13), np.zeros(13, int))}
    topology = topology_of(edges)
    sample = jitted(topology, {"paper": [0]}, [-1], options=SampleOptions(max_degree=5))
    assert (np.asarray(sample.senders[0]) >= 0).sum() == 5 and int(sample.lost_edges) == 8


@pytest.mark.slow
def test_outside_of_jit_tables_in_host_memory_are_read_too():
    edges, times = timed()
    topology = topology_of(edges, times=times, on_host=True)
    sample = sample_blocks(KEY, topology, ("paper", [1]), [{CITES: 2}], seed_times=[50])
    assert sample.trees is not None
    batch = link_batch(KEY, topology, CITES, ([1], [2]), 1, negatives="degree")
    assert int(batch.seeds["paper"][2]) in edges[CITES][1]


def test_times_refuse_what_they_cannot_mean():
    with pytest.raises(ValueError, match="`topology` must have times"):
        sample_blocks(KEY, topology_of(), ("paper", [0]), [1], seed_times=[3])
    edges, times = timed()
    topology = topology_of(edges, times=times)
    with pytest.raises(ValueError, match="`seed_times` must be given where edges have times, .* seed_times=None takes"):
        sample_blocks(KEY, topology, ("paper", [0]), [1])
    with pytest.raises(ValueError, match="`seed_times` must be given where edges have times"):
        find_capacities(KEY, topology, [("paper", [0])], [1], print_table=None)
    with pytest.raises(ValueError, match="must have shape"):
        sample_blocks(KEY, topology, ("paper", [0, 1]), [1], seed_times=[3])
    with pytest.raises(TypeError, match="must be integers"):
        sample_blocks(KEY, topology, ("paper", [0]), [1], seed_times=[0.5])


def test_negatives_by_degree_are_in_proportion():
    edges = {WRITES: (np.zeros(10, int), np.repeat([2, 5, 11], [1, 3, 6])), CITES: ([0], [0])}
    topology = topology_of(edges)
    pairs = jnp.zeros(2000, jnp.int32), jnp.zeros(2000, jnp.int32)
    batch = link_batch(KEY, topology, WRITES, pairs, 2, negatives="degree")
    counts = np.bincount(np.asarray(batch.seeds["paper"][2000:]), minlength=13)
    assert counts.sum() == 4000 and p_value(counts[[2, 5, 11]], np.array([1, 3, 6])) > 1e-4
    assert counts[[2, 5, 11]].sum() == 4000
    uniform = link_batch(KEY, topology, WRITES, pairs, 2)
    assert p_value(np.bincount(np.asarray(uniform.seeds["paper"][2000:]), minlength=13), np.ones(13)) > 1e-4


@pytest.mark.slow
def test_capacities_of_some_batches(capsys):
    edges, topology = edge_lists(200), topology_of(edge_lists(200))
    batches = [("paper", np.random.default_rng(n).integers(0, 13, 3)) for n in range(4)]
    capacities = find_capacities(KEY, topology, batches, [2, 2])
    assert set(capacities) == set(COUNTS) and capacities["lonely"] == (0, 0)
    printed = capsys.readouterr().out
    assert "capacity" in printed and "paper" in printed
    sample = jitted(topology, batches[0], [2, 2], capacities=capacities)
    assert not np.asarray(sample.lost).any() and int(sample.lost_edges) == 0
    assert len(edges) == 4
    assert "edges of a block" in printed
    for batch in batches:
        sample = jitted(topology, batch, [2, 2])
        assert (np.asarray(sample.edges_found) <= capacities.edges).all()
        slots = np.cumsum([own.shape[0] for own in sample.slots])
        assert (np.asarray(capacities.edges) <= slots).all()
    with pytest.raises(ValueError, match="at least one batch"):
        find_capacities(KEY, topology, [], [2])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((("book", [1]), [2]), r"must be one of \['author', 'lonely', 'paper'\], got 'book'"),
        (([1, 2], [2]), "must be a dict"),
        ((("paper", [0.5]), [2]), "must be int"),
        ((("paper", [[1]]), [2]), "must be int"),
        ((("paper", [1]), 2), r"must be a list with a fan-out for each hop, got 2; give \[2\]"),
        ((("paper", [1]), []), "at least one hop"),
        ((("paper", [1]), [2.5]), "must have integers"),
        ((("paper", [1]), [-2]), "must have integers"),
        ((("paper", [1]), [{("a", "b", "c"): 1}]), "relation must be one of"),
        ((("paper", [1]), {WRITES: [1], CITES: [1, 2]}), "as many hops"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises((TypeError, ValueError), match=message):
        sample_blocks(KEY, topology_of(), *arguments)


def test_a_number_is_no_random_key():
    with pytest.raises(TypeError, match=r"`key` must be a random key of jax, got 0; use jax.random.key\(0\)"):
        sample_blocks(0, topology_of(), ("paper", [1]), [2])


@pytest.mark.parametrize("capacities", [{"book": [1]}, {"paper": [1, 2]}, {"paper": [-1]}])
def test_bad_capacities_are_named(capacities):
    with pytest.raises(ValueError, match="capacities"):
        sample_blocks(KEY, topology_of(), ("paper", [1]), [2], capacities=capacities)


@pytest.mark.slow
def test_positions_beyond_32_bits(tmp_path):
    """A relation of 2^32 edges in a sparse file: the last receiver's edges are found."""
    edges = 2**32 + 3
    path = tmp_path / "senders.npy"
    header = np.lib.format.open_memmap(path, "w+", np.int32, (edges,))
    header[-3:] = [5, 6, 4]
    header.flush()
    from dejax.host_gather import HostTable
    from dejax.minibatch.topology.hetero_topology import EdgeLists, Relation

    kind = ("leaf", "to", "center")
    with jax.enable_x64(True):
        starts = HostTable.from_numpy(np.array([0, 2**32, edges]))
        lists = EdgeLists(starts, HostTable.from_npy(path))
        topology = HeteroTopology((lists,), (Relation(kind, 0, 0, 0, edges, 2**32),), (("leaf", 7), ("center", 2)))
        sample = sample_blocks(KEY, topology, ("center", jnp.array([1])), [4], options=SampleOptions())
        assert sorted(np.asarray(sample.node_ids["leaf"]).tolist()) == [-1, 4, 5, 6]
        assert sorted(np.asarray(sample.edges[0])[0].tolist()) == [-1, 2**32, 2**32 + 1, 2**32 + 2]


TO = ("a", "to", "b")


@pytest.mark.parametrize(
    ("when", "expected"),
    [
        ([2**33], [0, 1, 2]),
        (np.array([2**31 + 5]), [0, 1, 2]),
        (np.array([np.iinfo(np.int64).max]), [0, 1, 2]),
        (np.array([2**32 - 1], np.uint32), [0, 1, 2]),
        (jnp.array([2**32 - 1], jnp.uint32), [0, 1, 2]),
        (np.array([-(2**40)]), []),
        (np.array([2], np.int8), [0, 1]),
    ],
)
def test_seed_times_of_other_dtypes_do_not_wrap(when, expected):
    topology = HeteroTopology.from_edges({TO: ([0, 1, 2], [0, 0, 0])}, {"a": 3, "b": 1}, times={TO: [1, 2, 3]})
    for times in (when, {"b": when}):
        sample = sample_blocks(jax.random.key(0), topology, ("b", [0]), [3], seed_times=times)
        found = np.asarray(sample.node_ids["a"])
        assert sorted(found[found >= 0].tolist()) == expected


def test_capacities_take_what_samples_take():
    topology = HeteroTopology.from_edges({TO: ([0, 1, 2], [0, 0, 1])}, {"a": 3, "b": 2}, times={TO: [1, 2, 3]})
    key, options = jax.random.key(0), {"exclude": {TO: ([0], [0])}, "seed_times": [2**40]}
    found = find_capacities(key, topology, [("b", [0]), {"b": [1]}], [2], print_table=None, **options)
    assert found == {"a": (2,), "b": (0,)}


@pytest.mark.slow
def test_excluded_pairs_of_64_bits_do_not_wrap():
    topology = HeteroTopology.from_edges({TO: ([0, 1], [0, 0])}, {"a": 2, "b": 1})
    with jax.enable_x64(True):
        pairs = jnp.array([2**32 + 1], jnp.int64), jnp.array([0], jnp.int64)
        sample = sample_blocks(jax.random.key(0), topology, ("b", [0]), [2], exclude={TO: pairs})
    assert sorted(np.asarray(sample.node_ids["a"]).tolist()) == [0, 1]


def test_receivers_beyond_half_of_int32(monkeypatch):
    monkeypatch.setattr(batches, "take", lambda starts, ids: ids)  # a list in which each node has one edge
    edges = np.array([0, 2**30 + 3, 2**31 - 4], np.int32)
    found = batches._receiver_of(jnp.zeros(1, jnp.int32), jnp.asarray(edges), 0, 2**31 - 1)
    np.testing.assert_array_equal(found, edges)


@pytest.mark.slow
def test_what_a_seed_sees_does_not_change_with_later_rows():
    """Samples of tables at a cutoff: rows that come later are changed, and refer to others."""
    rng, cutoff = np.random.default_rng(4), 10
    rows, late = 12, np.arange(12) >= 7
    tables = {
        "users": {"id": range(4), "joined": [0, 3, 12, 15]},
        "orders": {"id": range(rows), "user": rng.integers(0, 2, rows), "day": np.where(late, 14, np.arange(rows))},
        "lines": {"order": rng.permutation(rows), "near": rng.integers(0, 4, rows)},
    }
    references = [("orders", "user", "users"), ("lines", "order", "orders"), ("lines", "near", "users")]
    seen = []
    for changed in (False, True):
        if changed:
            orders = tables["orders"]
            orders["user"] = np.where(late, rng.integers(0, 4, rows), orders["user"])
            orders["day"] = np.where(late, 11 + rng.integers(0, 9, rows), orders["day"])
            late_lines = late[tables["lines"]["order"]] | (tables["lines"]["near"] >= 2)
            tables["lines"]["order"] = np.where(late_lines, 7 + rng.integers(0, 5, rows), tables["lines"]["order"])
        times = {"users": "joined", "orders": "day"}
        data = from_tables(tables, {"users": "id", "orders": "id"}, references, times)
        topology = HeteroTopology.from_dataset(data)
        sample = jitted(topology, ("users", jnp.array([0, 1])), [-1, -1], seed_times=jnp.array([cutoff, 2]))
        found = {
            (kind, node, tree)
            for kind, nodes in sample.node_ids.items()
            for node, tree in zip(nodes.tolist(), sample.trees[kind].tolist(), strict=True)
            if node >= 0
        }
        seen.append(found)
    assert seen[0] == seen[1] and {kind for kind, _, tree in seen[0] if tree == 0} == {"users", "orders", "lines"}
    assert not any(late[node] for kind, node, _ in seen[0] if kind == "orders")


def test_links_in_time_need_times_and_a_pool():
    topology, pool = topology_of(), NegativePool.from_times(np.zeros(13, int))
    edges = np.array([0, 1]), np.array([2, 3])
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="must be a NegativePool where `times` are given, .* got 'uniform'"):
        link_batch(key, topology, WRITES, edges, 2, times=[1, 2])
    with pytest.raises(ValueError, match="got 'a pool without times'"):
        link_batch(key, topology, WRITES, edges, 2, negatives=pool)
    with pytest.raises(ValueError, match=r"`times` must be int\[edges\], got int32\[1\] for \(2,\)"):
        link_batch(key, topology, WRITES, edges, 2, negatives=pool, times=np.array([1]))
    with pytest.raises(ValueError, match="must fit int32"):
        NegativePool.from_times([2**40])
    with pytest.raises(TypeError, match="times must be integers, got float64"):
        NegativePool.from_times([0.5, 1.0])
    late = NegativePool.from_times([5]).draw(key, np.array([2**40, -(2**40)]), 1)  # as int32 alone they would be 0
    assert late.tolist() == [[0], [-1]]
    with pytest.raises(ValueError, match="`edge_times` must have a time for each"):
        NegativePool.from_times([0, 1], receivers=[1])
    with pytest.raises(ValueError, match="`receivers` of NegativePool must be from 0 to 1, got -1"):
        NegativePool.from_times([0, 1], receivers=[-1], edge_times=[0])


def test_true_edges_of_64_bits_do_not_wrap():
    for wrong, error in (([2**32], ValueError), ([-1], ValueError), ([0.7], TypeError)):
        with pytest.raises(error, match="senders of TrueEdges must be"):
            TrueEdges.from_edges((np.array(wrong), [1]))
    true = TrueEdges.from_edges(([0, 2], [1, 1]))
    assert true.contain(np.array([2**32, 0, -(2**32)]), np.array([1, 1, 1])).tolist() == [False, True, False]
    assert not TrueEdges.from_edges(([], [])).contain(np.array([0]), np.array([0])).any()


def test_negatives_by_degree_are_those_of_edges_that_are_known():
    likes = ("a", "likes", "b")
    data = HeteroDataset(
        "x", {"a": 1, "b": 3}, {likes: ([0] * 4, [0, 0, 1, 2])}, edge_times={likes: np.array([1, 2, 3, 9])},
        known_from={"b": np.array([0, 5, 0])},
    )  # fmt: skip
    pool = NegativePool.from_dataset(data, likes, "degree")
    drawn = np.asarray(pool.draw(jax.random.key(0), np.array([0, 4, 6]), 3000))
    assert set(drawn[0]) == {-1} and set(drawn[1]) == {0}  # node 1 is not known before 5
    np.testing.assert_allclose(np.bincount(drawn[2]) / 3000, [2 / 3, 1 / 3], atol=0.05)
    assert set(np.asarray(NegativePool.from_dataset(data, likes).draw(jax.random.key(0), np.array([4]), 50))[0]) == {
        0,
        2,
    }
