"""Sampling of heterogeneous neighbourhoods: what is found is there, each draw is as likely as it should be."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dejax.datasets import from_tables
from dejax.minibatch import HeteroTopology, SampleOptions, edge_ids, find_capacities, link_batch, links, sample_blocks
from tests.minibatch.graphs import CITES, COUNTS, LIKES, REV, WRITES, edge_lists, sampled_edges, topology_of

pytestmark = pytest.mark.sample(3)

KEY = jax.random.key(0)


def jitted(topology, seeds, fan_outs, key=KEY, **keywords):
    """`sample_blocks` inside jit, with the topology as an argument."""
    seeds = {seeds[0]: seeds[1]} if isinstance(seeds, tuple) else seeds
    traced = {name: keywords.pop(name) for name in ("exclude", "seed_times") if name in keywords}
    run = jax.jit(
        lambda key, topology, seeds, traced: sample_blocks(key, topology, seeds, fan_outs, **traced, **keywords)
    )
    return run(key, topology, jax.tree.map(jnp.asarray, seeds, is_leaf=lambda leaf: isinstance(leaf, list)), traced)


def neighbours(edges, edge_type, node):
    senders, receivers = (np.asarray(ids) for ids in edges[edge_type])
    return [(int(senders[e]), node, int(e)) for e in np.flatnonzero(receivers == node)]


@pytest.mark.sample(2)
@pytest.mark.parametrize("on_host", [True, False])
def test_all_neighbours_of_two_hops(on_host):
    edges, topology = edge_lists(), topology_of(on_host=on_host)
    sample = jax.jit(lambda t, s: sample_blocks(KEY, t, s, [-1, -1]))(topology, {"paper": jnp.array([4, 7])})
    found = sampled_edges(sample)
    expanded, reached = {("paper", 4), ("paper", 7)}, set()
    for hop in range(2):
        frontier = {("paper", 4), ("paper", 7)} if hop == 0 else reached - expanded
        expanded |= frontier
        for kind, node in frontier:
            for edge_type in edges:
                if edge_type[2] == kind:
                    reached |= {(edge_type[0], sender) for sender, _, _ in neighbours(edges, edge_type, node)}
    for edge_type in edges:
        want = [e for kind, node in expanded if kind == edge_type[2] for e in neighbours(edges, edge_type, node)]
        assert sorted((s, r) for s, r, _ in found[edge_type]) == sorted((s, r) for s, r, _ in want)
    ids = edge_ids(topology, sample)
    for piece, own, senders in zip(sample.layout.pieces, ids, sample.senders, strict=True):
        edge_type = sample.layout.edge_types[piece.relation]
        source = np.asarray(sample.node_ids[edge_type[0]])
        mask = np.asarray(senders) >= 0
        np.testing.assert_array_equal(
            np.asarray(edges[edge_type][0])[np.asarray(own)[mask]], source[np.asarray(senders)[mask]]
        )
    nodes = {(kind, int(n)) for kind, ids in sample.node_ids.items() for n in np.asarray(ids) if n >= 0}
    assert nodes == reached | expanded
    assert not np.asarray(sample.lost).any() and int(sample.lost_edges) == 0
    assert int(sample.found.sum()) == len(nodes)
    sample.check(error=True)


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
    by_hop = jitted(topology, ("paper", [1, 2]), [{WRITES: 2}, {REV: 3, CITES: 0}])
    by_relation = jitted(topology, ("paper", [1, 2]), {WRITES: [2, 0], REV: [0, 3]})
    for sample in (by_hop, by_relation):
        kinds = {(p.hop, sample.layout.edge_types[p.relation], p.fan_out) for p in sample.layout.pieces}
        assert kinds == {(0, WRITES, 2), (1, REV, 3)}
    longest = max(r.max_degree for r in topology.relations)
    wide = jitted(topology, ("paper", [1]), [1000])
    assert all(p.fan_out <= longest for p in wide.layout.pieces), "no slots that nothing can fill"


@pytest.mark.parametrize(
    "seeds", [("paper", np.array([3], np.uint8)), ("paper", np.array([3], np.int64)), {"paper": [3]}]
)
def test_ids_of_any_integer_dtype(seeds):
    assert int(sample_blocks(KEY, topology_of(), seeds, [{CITES: 1}]).node_ids["paper"][0]) == 3


def test_the_same_key_gives_the_same_sample_and_another_key_another():
    topology = topology_of()
    run = jax.jit(lambda key: sample_blocks(key, topology, ("paper", jnp.arange(13)), [2]).senders)
    first, again, other = run(KEY), run(KEY), run(jax.random.key(1))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any((a != b).any() for a, b in zip(first, other, strict=True))


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


@pytest.mark.sample(3)
@pytest.mark.parametrize("sizes", [(1, 2), (0, 0), (3, 0)])
def test_nodes_that_do_not_fit_are_counted_and_their_edges_masked(sizes):
    topology = topology_of()
    capacities = {"paper": sizes, "author": (2, 1)}
    sample = jitted(topology, ("paper", jnp.arange(6)), [3, 3], capacities=capacities)
    sampled_edges(sample)  # checks that all ends are there
    found, lost, layout = np.asarray(sample.found), np.asarray(sample.lost), sample.layout
    for hop in range(1, 3):
        for at, name in enumerate(layout.node_types):
            first = layout.first(hop, at)
            there = np.asarray(sample.node_ids[name])[first : first + layout.sizes[hop][at]]
            assert (there >= 0).sum() == found[hop, at] - lost[hop, at]
            assert found[hop, at] <= layout.sizes[hop][at] or lost[hop, at] == found[hop, at] - layout.sizes[hop][at]
    assert lost.any()
    with pytest.warns(UserWarning, match="did not fit"):
        sample.check()
    with pytest.raises(ValueError, match="did not fit"):
        sample.check(error=True)


def test_all_edges_within_a_bound_are_counted():
    edges = {CITES: (np.arange(13), np.zeros(13, int))}
    topology = topology_of(edges)
    sample = sample_blocks(KEY, topology, ("paper", [0]), [-1], options=SampleOptions(max_degree=5))
    assert (np.asarray(sample.senders[0]) >= 0).sum() == 5 and int(sample.lost_edges) == 8


def star(degree, leaves=None):
    """Papers that cite paper 0."""
    return {("leaf", "to", "hub"): (np.arange(degree) if leaves is None else leaves, np.zeros(degree, int))}


def counts_of_draws(topology, runs, fan_out, degree, seed=0, **keywords):
    """How often each leaf is drawn, over `runs` copies of the hub that draw independently."""

    def draw(key):
        sample = sample_blocks(key, topology, ("hub", jnp.array([0])), [fan_out], **keywords)
        return jnp.where(sample.edges[0] >= 0, sample.edges[0], degree).reshape(-1)

    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(seed), runs))
    return np.bincount(np.asarray(drawn).reshape(-1), minlength=degree + 1)[:degree], np.asarray(drawn)


def chi_square(counts, share):
    return stats.chisquare(counts, counts.sum() * share / share.sum()).pvalue


def test_draws_without_replacement_are_uniform():
    topology = HeteroTopology.from_edges(star(7), {"leaf": 7, "hub": 1})
    counts, drawn = counts_of_draws(topology, 4000, 3, 7)
    assert all(len(set(row)) == 3 for row in drawn)
    assert chi_square(counts, np.ones(7)) > 1e-4
    sets = np.unique(np.sort(drawn, axis=1) @ [49, 7, 1], return_counts=True)[1]
    assert len(sets) == 35 and stats.chisquare(sets).pvalue > 1e-4


def test_draws_with_replacement_are_uniform():
    topology = HeteroTopology.from_edges(star(7), {"leaf": 7, "hub": 1})
    counts, drawn = counts_of_draws(topology, 4000, 3, 7, options=SampleOptions(replace=True))
    assert any(len(set(row)) < 3 for row in drawn)
    assert chi_square(counts, np.ones(7)) > 1e-4


@pytest.mark.parametrize("replace", [False, True])
def test_draws_by_weight(replace):
    weights = np.array([0.0, 1, 2, 3, 4])
    topology = HeteroTopology.from_edges(star(5), {"leaf": 5, "hub": 1}, weights={("leaf", "to", "hub"): weights})
    counts, _ = counts_of_draws(topology, 6000, 1, 5, options=SampleOptions(replace=replace))
    assert counts[0] == 0 and chi_square(counts[1:], weights[1:]) > 1e-4


def test_a_degree_of_ten_million():
    degree = 10_000_000
    topology = HeteroTopology.from_edges(star(degree, np.arange(degree) % 97), {"leaf": 97, "hub": 1})
    sample = sample_blocks(KEY, topology, ("hub", jnp.array([0])), [20_000])
    position = np.asarray(sample.edges[0])[0]
    assert len(set(position.tolist())) == 20_000
    bins = np.bincount(position // (degree // 100), minlength=100)
    assert stats.chisquare(bins).pvalue > 1e-4
    last_bits = np.bincount(position % 8, minlength=8)
    assert stats.chisquare(last_bits).pvalue > 1e-4, "every position can be drawn"


def timed(edges=60, seed=3):
    lists = edge_lists(edges, seed)
    rng = np.random.default_rng(seed)
    return lists, {kind: rng.integers(0, 100, len(lists[kind][0])) for kind in lists}


@pytest.mark.sample(3)
@pytest.mark.parametrize("recent", [False, True])
@pytest.mark.parametrize("on_host", [False, True])
def test_no_edge_is_later_than_its_seed(recent, on_host):
    edges, times = timed()
    topology = topology_of(edges, times=times, on_host=on_host)
    seeds, limits = jnp.array([1, 1, 4, 6, -1]), jnp.array([80, 20, 50, -5, 90])
    options = SampleOptions(recent=recent)
    sample = jitted(topology, ("paper", seeds), [2, 2], seed_times=limits, options=options)
    ids = edge_ids(topology, sample)
    count = 0
    for piece, own, senders in zip(sample.layout.pieces, ids, sample.senders, strict=True):
        kind = sample.layout.edge_types[piece.relation]
        first = sample.layout.first(piece.hop, piece.target)
        for row, (some, local) in enumerate(zip(np.asarray(own), np.asarray(senders), strict=True)):
            tree, node = (int(a[kind[2]][first + row]) for a in (sample.trees, sample.node_ids))
            if node < 0:
                assert (some < 0).all()
                continue
            allowed = [e for _, _, e in neighbours(edges, kind, node) if times[kind][e] <= int(limits[tree])]
            got = some[some >= 0].tolist()
            assert len(got) == min(len(allowed), piece.fan_out) and set(got) <= set(allowed)
            assert all(int(sample.trees[kind[0]][s]) == tree for s in local[local >= 0]), "seeds do not share nodes"
            if recent:
                want = sorted((times[kind][e] for e in allowed), reverse=True)[: piece.fan_out]
                assert sorted((times[kind][e] for e in got), reverse=True) == want
            count += len(got)
    assert count > 10


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
    with pytest.raises(ValueError, match="must have shape"):
        sample_blocks(KEY, topology, ("paper", [0, 1]), [1], seed_times=[3])
    with pytest.raises(TypeError, match="must be integers"):
        sample_blocks(KEY, topology, ("paper", [0]), [1], seed_times=[0.5])


def test_excluded_edges_are_not_sampled():
    edges = edge_lists(200)
    topology = topology_of(edges, on_host=True)
    senders, receivers = edges[WRITES]
    chosen = np.arange(0, 200, 3)
    pairs = senders[chosen], receivers[chosen]
    out = {(int(s), int(r)) for s, r in zip(*pairs, strict=True)}
    exclude = {WRITES: (jnp.append(pairs[0], -1), jnp.append(pairs[1], -1)), REV: pairs[::-1]}
    sample = jitted(topology, ("paper", jnp.arange(13)), [-1, -1], exclude=exclude)
    found = sampled_edges(sample)
    every = {(int(s), int(r)) for s, r in zip(senders, receivers, strict=True)}
    assert {(s, r) for s, r, _ in found[WRITES]} == every - out
    assert not {(r, s) for s, r, _ in found[REV]} & out
    assert {(s, r) for s, r, _ in found[CITES]} == set(zip(*(a.tolist() for a in edges[CITES]), strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("edge_type", [WRITES, CITES])
@pytest.mark.parametrize("negatives", ["in_batch", "degree", "uniform"])
def test_link_batches(negatives, edge_type):
    edges, topology = edge_lists(), topology_of(on_host=True)
    pairs = np.append(edges[edge_type][0][:10], -1), np.append(edges[edge_type][1][:10], 3)
    reverse = REV if edge_type == WRITES else CITES
    run = jax.jit(lambda t, p: link_batch(KEY, t, edge_type, p, 4, negatives=negatives, reverse=reverse))
    batch = run(topology, pairs)
    sample = jitted(topology, batch.seeds, [3], exclude=batch.exclude)
    ids = {name: sample.node_ids[name].astype(jnp.float32)[:, None] for name in COUNTS}
    heads, tails, wrong = batch.rows(sample, ids)
    np.testing.assert_array_equal(heads[:10, 0], pairs[0][:10])
    np.testing.assert_array_equal(tails[:10, 0], pairs[1][:10])
    assert np.asarray(batch.mask).tolist() == [True] * 10 + [False]
    assert not np.asarray(batch.negative_mask)[10].any()
    mask = np.asarray(batch.negative_mask)[:10]
    assert (np.asarray(wrong)[:10, :, 0][mask] >= 0).all()
    assert mask.any() and (np.asarray(wrong)[:10, :, 0] != pairs[1][:10, None])[mask].all()
    left = {(s, r) for s, r, _ in sampled_edges(sample)[edge_type]}
    assert not left & set(zip(pairs[0][:10].tolist(), pairs[1][:10].tolist(), strict=True))


def test_negatives_by_degree_are_in_proportion():
    edges = {WRITES: (np.zeros(10, int), np.repeat([2, 5, 11], [1, 3, 6])), CITES: ([0], [0])}
    topology = topology_of(edges)
    pairs = jnp.zeros(2000, jnp.int32), jnp.zeros(2000, jnp.int32)
    batch = link_batch(KEY, topology, WRITES, pairs, 2, negatives="degree")
    counts = np.bincount(np.asarray(batch.seeds["paper"][2000:]), minlength=13)
    assert counts.sum() == 4000 and chi_square(counts[[2, 5, 11]], np.array([1, 3, 6])) > 1e-4
    assert counts[[2, 5, 11]].sum() == 4000
    uniform = link_batch(KEY, topology, WRITES, pairs, 2)
    assert chi_square(np.bincount(np.asarray(uniform.seeds["paper"][2000:]), minlength=13), np.ones(13)) > 1e-4


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


@pytest.mark.parametrize("capacities", [{"book": [1]}, {"paper": [1, 2]}, {"paper": [-1]}])
def test_bad_capacities_are_named(capacities):
    with pytest.raises(ValueError, match="capacities"):
        sample_blocks(KEY, topology_of(), ("paper", [1]), [2], capacities=capacities)


def test_positions_beyond_32_bits(tmp_path):
    """A relation of 2^32 edges in a sparse file: the last receiver's edges are found."""
    edges = 2**32 + 3
    path = tmp_path / "senders.npy"
    header = np.lib.format.open_memmap(path, "w+", np.int32, (edges,))
    header[-3:] = [5, 6, 4]
    header.flush()
    from dejax.host_gather import HostTable
    from dejax.minibatch.topology import EdgeLists, Relation

    kind = ("leaf", "to", "hub")
    with jax.enable_x64(True):
        starts = HostTable.from_numpy(np.array([0, 2**32, edges]))
        lists = EdgeLists(starts, HostTable.from_npy(path))
        topology = HeteroTopology((lists,), (Relation(kind, 0, 0, 0, edges, 2**32),), (("leaf", 7), ("hub", 2)))
        sample = sample_blocks(KEY, topology, ("hub", jnp.array([1])), [4], options=SampleOptions())
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


def test_excluded_pairs_of_64_bits_do_not_wrap():
    topology = HeteroTopology.from_edges({TO: ([0, 1], [0, 0])}, {"a": 2, "b": 1})
    with jax.enable_x64(True):
        pairs = jnp.array([2**32 + 1], jnp.int64), jnp.array([0], jnp.int64)
        sample = sample_blocks(jax.random.key(0), topology, ("b", [0]), [2], exclude={TO: pairs})
    assert sorted(np.asarray(sample.node_ids["a"]).tolist()) == [0, 1]


def test_receivers_beyond_half_of_int32(monkeypatch):
    monkeypatch.setattr(links, "take", lambda starts, ids: ids)  # a list in which each node has one edge
    edges = np.array([0, 2**30 + 3, 2**31 - 4], np.int32)
    found = links._receiver_of(jnp.zeros(1, jnp.int32), jnp.asarray(edges), 0, 2**31 - 1)
    np.testing.assert_array_equal(found, edges)


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
