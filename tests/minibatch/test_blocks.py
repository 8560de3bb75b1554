"""Blocks: their tables are those of the usual builder, and layers on them equal layers on the full graph."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.minibatch import Capacities, edge_ids, find_capacities, make_blocks, sample_blocks
from dejax.rgnn import library
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.graphs.building import static_tables
from dejax.rgnn.graphs.building.build_slots import graph_of_slots
from dejax.rgnn.graphs.building.slots import Slots, SlotSpec
from tests.cases import slow_but
from tests.minibatch.graphs import CITES, COUNTS, LIKES, REV, WRITES, edge_lists, sampled_edges, topology_of
from tests.rgnn.strategies import check_tiles_covered

KEY = jax.random.key(0)
SEEDS = {"paper": jnp.array([4, 7, 7, -1, 2]), "author": jnp.array([3])}
NAMES = sorted(COUNTS)
CASES = {
    "two hops": ([3, 2], {}),
    "three hops": ([2, 2, 2], {}),
    "some relations": ([{WRITES: 2, CITES: 0}, {REV: 3, CITES: 2}], {}),
    "few nodes fit": ([3, 3], {"capacities": {"paper": (1, 0), "author": (2, 3)}}),
    "one hop": ([{CITES: 2}], {}),
    "just enough edges": ([3, 2], {"capacities": Capacities({}, edges=(21, 67))}),  # as many as are found
    "edges fit": ([2, 2, 2], {"capacities": Capacities({}, edges=(15, 60, 69))}),
}


def sampled(fan_outs, keywords, seeds=SEEDS):
    run = jax.jit(lambda topology, seeds: sample_blocks(KEY, topology, seeds, fan_outs, **keywords))
    return run(topology_of(edge_lists(120)), seeds)


@functools.cache
def two_hops():
    return sampled(*CASES["two hops"])


@pytest.fixture(params=slow_but(["one hop"], CASES))
def sample(request):
    return sampled(*CASES[request.param])


@jax.jit
def graph_from(graph):
    """The same graph made by `build_traced` from a block's edges."""
    senders, receivers, edge_type = graph.to_edges()
    return rgnn.RelGraph.build_traced(
        senders,
        receivers,
        edge_type,
        num_nodes=graph.num_nodes,
        num_edge_types=graph.num_edge_types,
        node_type=graph.node_type,
        num_node_types=graph.num_node_types,
        edge_mask=edge_type < graph.num_edge_types,
        node_mask=graph.node_mask,
    )


def rows_of(group):
    """Each row's entries."""
    offsets = np.asarray(group.offsets)
    order = np.arange(group.num_entries) if group.order is None else np.asarray(group.order)
    return [order[a:b] for a, b in itertools.pairwise(offsets)]


EDGE_GROUPINGS = ("by_sender", "by_receiver", "by_source_pair", "by_destination_pair", "by_edge_type")
PAIR_GROUPINGS = (
    "source_pair_by_node",
    "destination_pair_by_node",
    "source_pair_by_type",
    "destination_pair_by_type",
)


def test_tables_are_those_of_the_usual_builder(sample):
    for block in jax.jit(make_blocks)(sample):
        graph, want = block.graph, graph_from(block.graph)
        np.testing.assert_array_equal(np.sort(graph.edge_ids), np.arange(graph.num_edges))
        np.testing.assert_array_equal(np.asarray(graph.edge_ids)[graph.edge_positions], np.arange(graph.num_edges))
        for name in ("receivers", "edge_type"):
            np.testing.assert_array_equal(getattr(graph, name), getattr(want, name))
        # The canonical order is the same but for the order within a type and receiver.
        user, want_user = np.asarray(graph.edge_ids), np.asarray(want.edge_ids)
        for name in EDGE_GROUPINGS:
            group, other = getattr(graph, name), getattr(want, name)
            for own, its in zip(rows_of(group), rows_of(other), strict=False):
                assert sorted(user[own]) == sorted(want_user[its]), name
            count = min(group.num_rows, other.num_rows)
            assert int(group.offsets[count]) == int(other.offsets[count]) == int(graph.edge_mask.sum())
            if group.order is not None:
                np.testing.assert_array_equal(np.sort(group.order), np.arange(graph.num_edges))
            check_group(graph.grouping(name))
        for name in PAIR_GROUPINGS:
            group, other = getattr(graph, name), getattr(want, name)
            size = min(group.num_entries, other.num_entries)
            np.testing.assert_array_equal(group.offsets, other.offsets)
            index = np.asarray(group.index)[:size]
            np.testing.assert_array_equal(index, np.asarray(other.index)[:size])
            for own, its in zip(rows_of(group), rows_of(other), strict=True):
                np.testing.assert_array_equal(own, its)
            check_group(graph.grouping(name))
        check_group(graph.by_node_type)


@pytest.mark.parametrize("edges", [(20, 66), (1, 1), (12, 40)])
@pytest.mark.slow
def test_edges_beyond_the_bound_are_left_out_and_counted(edges):
    whole, cut = two_hops(), sampled([3, 2], {"capacities": Capacities({}, edges=edges)})
    assert whole.edges_found.tolist() == cut.edges_found.tolist() == [21, 67]
    assert int(whole.lost_edges) == 0 and int(cut.lost_edges) == 21 + 67 - sum(edges)
    with pytest.warns(UserWarning, match=f"did not fit: {88 - sum(edges)} edges"):
        cut.check()
    for block, other in zip(jax.jit(make_blocks)(cut), jax.jit(make_blocks)(whole), strict=True):
        graph, full, most = block.graph, other.graph, edges[block.hops]
        assert graph.num_edges == most and bool(graph.edge_mask.all())
        for name in ("senders", "receivers", "edge_type"):
            np.testing.assert_array_equal(getattr(graph, name), getattr(full, name)[:most])
        np.testing.assert_array_equal(block.edge_slots, full.edge_ids[:most])
        for name in (*EDGE_GROUPINGS, *PAIR_GROUPINGS):
            check_group(graph.grouping(name))
        rng = np.random.default_rng(0)
        x, params = jnp.asarray(rng.standard_normal((graph.num_nodes, 4)), jnp.float32), parameters(rng, "users", 4)
        values = jnp.asarray(rng.standard_normal(most), jnp.float32)
        users = jax.jit(functools.partial(apply, "users"))
        y, want = (users(g, x, params, values) for g in (graph, graph_from(graph)))
        np.testing.assert_allclose(y, want, rtol=1e-4, atol=1e-5)


def test_bad_bounds_of_edges_are_errors():
    for name, numbers in itertools.product(("edges", "source_pairs"), ((3,), (0, 4))):
        with pytest.raises(ValueError, match=f"`capacities.{name}` must have 2 numbers from 1"):
            sampled([3, 2], {"capacities": Capacities({}, **{name: numbers})})


@pytest.mark.slow
def test_capacities_know_the_source_pairs_and_the_compiler_counts_them():
    topology = topology_of(edge_lists(120))
    capacities = find_capacities(KEY, topology, [SEEDS], [3, 2], print_table=None)
    sample = sampled([3, 2], {"capacities": capacities})
    for block in make_blocks(sample):
        pairs = int(block.graph.source_pair_by_type.offsets[-1])
        assert abs(pairs - capacities.source_pairs[block.hops]) <= 12  # of another draw
        assert counts_of(block.graph).source_pairs == min(
            capacities.source_pairs[block.hops], block.graph.num_source_pairs
        )
        assert counts_of(block.graph).source_pairs == block.graph.typical_source_pairs


def check_group(group):
    """Index, order and offsets agree; long segments and tiles cover every entry once."""
    index, offsets = np.asarray(group.index), np.asarray(group.offsets)
    for row, entries in enumerate(rows_of(group)):
        assert (index[entries] == row).all()
    lengths = np.diff(offsets)
    assert (lengths >= 0).all()
    if group.long_segments is None:
        assert not group.tiles or lengths.max(initial=0) <= 256
    else:
        long = np.flatnonzero(lengths > group.long_segments.chunk)
        assert set(long) <= set(np.asarray(group.long_segments.row).tolist())
    check_tiles_covered(group)


@pytest.mark.parametrize(
    ("types", "fan_out"),
    [(1, 5), pytest.param(3, 150, marks=pytest.mark.slow), pytest.param(40, 2, marks=pytest.mark.slow)],
)
def test_long_segments_and_many_types_and_one_type(types, fan_out):
    rng = np.random.default_rng(0)
    slots = tuple(Slots(t, first, 6, fan_out) for t in range(types) for first in (0, 6))
    spec = SlotSpec(slots, ((0, 6), (0, 6), (0, 50)), (0,) * types, tuple(map(str, range(types))), ("only",))
    senders = [rng.integers(-1, 8 if types == 3 else 62, (6, fan_out)).astype(np.int32) for _ in slots]
    graph = jax.jit(lambda senders, mask: graph_of_slots(senders, mask, spec)[0])(senders, jnp.ones(62, bool))
    want = rgnn.RelGraph.from_edges(
        np.concatenate([s.reshape(-1) for s in senders]),
        np.concatenate([np.repeat(np.arange(s.first, s.first + 6), fan_out) for s in slots]),
        np.concatenate([np.full(6 * fan_out, s.edge_type) for s in slots]),
        num_nodes=62,
        num_edge_types=types,
        edge_mask=np.concatenate([s.reshape(-1) for s in senders]) >= 0,
    )
    for name in (*EDGE_GROUPINGS, *PAIR_GROUPINGS):
        check_group(graph.grouping(name))
    x = jnp.asarray(rng.standard_normal((62, 4)), jnp.float32)
    w = jnp.asarray(rng.standard_normal((types, 4, 3)), jnp.float32)

    def loss(x, w, graph):
        return (typed_max(graph, x, w) ** 2).sum()

    gradient = jax.jit(jax.value_and_grad(loss, (0, 1)))
    got, expected = gradient(x, w, graph), gradient(x, w, want)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4), got, expected)


@rgnn.program
def typed_max(g, x, w):
    z = g.src(x) @ g.per_edge_type(w)
    return g.max_to_dst(z) + g.mean_to_dst(z)


@rgnn.program
def users(g, x, w, t, e):
    """A program of a user: edge features, node types, a softmax of its own, a maximum."""
    z = g.src(x) @ g.per_edge_type(w)
    score = rgnn.dot(z, g.dst(x) @ g.per_edge_type(w)) + g.edge(e)
    y = g.sum_to_dst(rgnn.edge_softmax(score, within="relation") * z) + g.max_to_dst(z)
    return rgnn.tanh(y) + g.node(x) @ g.per_node_type(t)


def parameters(rng, layer, width):
    def draw(*shape):
        return jnp.asarray(rng.standard_normal(shape) * 0.5)

    r, t, h, d = 4, 3, 2, width // 2
    if layer == "rgcn":
        return {"weight": draw(r, width, width), "root": draw(width, width), "bias": draw(width)}
    if layer == "rgat":
        return {"weight": draw(r, h, width, d), "attention_src": draw(r, h, d), "attention_dst": draw(r, h, d)}
    if layer == "hgt":
        shared = {name: draw(t, h, width, d) for name in ("key", "query", "value")}
        relation = {f"relation_{name}": draw(r, h, d, d) for name in ("attention", "message")}
        rest = {"prior": draw(r, h), "out": draw(t, width, width), "out_bias": draw(t, width), "skip": draw(t)}
        return {**shared, **relation, **rest}
    return {"w": draw(r, width, width), "t": draw(t, width, width)}


def apply(layer, graph, x, params, edge_value):
    if layer == "users":
        return users(graph, x, params["w"], params["t"], edge_value)
    return jnp.tanh(getattr(library, layer)(graph, x, params))


@pytest.mark.parametrize(
    ("layer", "case"),
    [
        ("users", "two hops"),
        ("rgcn", "three hops"),
        ("hgt", "few nodes fit"),
        ("rgat", "two hops"),
        ("users", "just enough edges"),
        ("hgt", "edges fit"),
    ],
)
@pytest.mark.slow
def test_layers_equal_those_on_the_full_graph_with_the_sampled_edges(layer, case):
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        topology = topology_of(edge_lists(120))
        fan_outs, keywords = CASES[case]
        x = {name: jnp.asarray(rng.standard_normal((COUNTS[name], 4))) for name in NAMES}
        features = {t: jnp.asarray(rng.standard_normal(120)) for t in (WRITES, CITES, REV)} | {LIKES: jnp.zeros(1)}
        params = [parameters(rng, layer, 4) for _ in fan_outs]
        sample = jax.jit(lambda t, seeds: sample_blocks(KEY, t, seeds, fan_outs, **keywords))(topology, SEEDS)

        def on_blocks(params, x, sample):
            blocks = make_blocks(sample)
            ids = edge_ids(topology, sample)
            edge_types = [sample.layout.edge_types[piece.relation] for piece in sample.layout.pieces]
            values = [features[t].at[own].get(mode="clip") for t, own in zip(edge_types, ids, strict=True)]
            local = {name: x[name].at[own].get(mode="fill", fill_value=0) for name, own in gathered(sample).items()}
            h = blocks[0].join(local)
            for block, some in zip(blocks, params, strict=True):
                h = apply(layer, block.graph, h, some, block.edge_values(values))[: block.num_destinations]
            outputs = blocks[-1].split(h)
            return outputs["paper"][sample.seed_positions["paper"]], outputs["author"]

        found = sampled_edges(sample)
        edges = {t: ([s for s, _, _ in e], [r for _, r, _ in e]) for t, e in found.items()}
        full = rgnn.RelGraph.from_relations(edges, {name: COUNTS[name] for name in COUNTS})
        positions = {t: topology.csc(t)[2][[p for *_, p in e]] if e else [] for t, e in found.items()}
        edge_value = jnp.concatenate([features[t][np.asarray(positions[t], int)] for t in full_order(full)])

        def on_all(params, x):
            h = jnp.concatenate([x[name] for name in COUNTS])
            for some in params:
                h = apply(layer, full, h, some, edge_value)
            valid = (SEEDS["paper"] >= 0)[:, None]
            papers = jnp.where(valid, h[full.node_slice("paper")][SEEDS["paper"]], 0)
            return papers, h[full.node_slice("author")][SEEDS["author"]]

        def loss(run):
            def weighted(params, x, *rest):
                papers, authors = run(params, x, *rest)
                return (papers * jnp.arange(1.0, 6)[:, None]).sum() + (authors**2).sum(), (papers, authors)

            return jax.jit(jax.value_and_grad(weighted, (0, 1), has_aux=True))

        got, want = loss(on_blocks)(params, x, sample), loss(on_all)(params, x)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-11), got, want)


def gathered(sample):
    """Node ids, with padding past the end: negative ids would count from the end."""
    return {name: jnp.where(ids >= 0, ids, 2**30) for name, ids in sample.node_ids.items()}


def full_order(graph):
    return [tuple(name.split("/")) for name in graph.edge_type_names]


def test_no_seeds_give_no_rows():
    sample = sampled([2, 2], {}, {"paper": jnp.zeros(0, jnp.int32)})
    blocks = make_blocks(sample)
    x = blocks[0].join({name: jnp.zeros((0, 4)) for name in NAMES})
    for block in blocks:
        x = library.rgcn(block.graph, x, {"weight": jnp.ones((4, 4, 4))})[: block.num_destinations]
    assert x.shape == (0, 4)


def test_seeds_without_edges_have_blocks():
    sample = sampled([2], {}, {"lonely": jnp.array([1, 3])})
    (block,) = make_blocks(sample)
    assert (block.num_sources, block.num_destinations, block.graph.num_edges) == (2, 2, 0)
    assert block.edge_values(sample.edges).shape == (0,)
    y = library.rgcn(block.graph, jnp.ones((2, 4)), {"weight": jnp.ones((4, 4, 4)), "bias": jnp.ones(4)})
    np.testing.assert_array_equal(block.split(y)["lonely"], np.ones((2, 4)))


@pytest.mark.slow
def test_rows_that_do_not_fit_are_named():
    sample = sampled([2], {})
    (block,) = make_blocks(sample)
    x = {name: jnp.zeros((block.source_counts[name], 2)) for name in NAMES}
    assert block.join(x).shape == (block.num_sources, 2)
    assert sum(block.source_counts.values()) == block.num_sources
    own = block.split(jnp.zeros((block.num_destinations, 2)))
    assert {name: len(rows) for name, rows in own.items()} == block.destination_counts
    with pytest.raises(ValueError, match=r"`x\['paper'\]` must have at least"):
        block.join(x | {"paper": x["paper"][1:]})
    with pytest.raises(ValueError, match="must have an entry for node type 'author'"):
        block.join({"paper": x["paper"]})
    with pytest.raises(ValueError, match="node type must be one of"):
        block.join(x | {"book": x["paper"]})
    with pytest.raises(ValueError, match=r"must have rows of shape \(1,\), as those of 'author', got \(2,\)"):
        block.join(x | {"author": x["author"][:, :1]})
    with pytest.raises(ValueError, match=r"must have at least .* rows, got shape \(\)"):
        block.join(x | {"paper": jnp.zeros(())})
    with pytest.raises(ValueError, match="`values` must have an entry for each of the sample's 3 pieces, got 1"):
        block.edge_values(sample.edges[:1])
    with pytest.raises(ValueError, match="must have .* rows"):
        block.split(jnp.zeros((1, 2)))


@pytest.mark.slow
def test_kernels_run_on_blocks():
    sample, rng = two_hops(), np.random.default_rng(1)
    params = {k: v.astype(jnp.float32) for k, v in parameters(rng, "rgat", 4).items()}
    blocks = jax.jit(make_blocks)(sample)
    x = jnp.asarray(rng.standard_normal((blocks[0].num_sources, 4)), jnp.float32)

    def loss(params, x, options):
        return (library.rgat(blocks[0].graph, x, params, options=options)[: blocks[0].num_destinations] ** 2).sum()

    options = rgnn.Options(backend="pallas", interpret=True, precision="f32")
    got, want = (
        jax.jit(jax.value_and_grad(loss, (0, 1)), static_argnums=2)(params, x, o)
        for o in (options, rgnn.Options(backend="xla"))
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), got, want)


@pytest.mark.slow
def test_static_tables_made_on_the_device_give_the_same_blocks(monkeypatch):
    def blocks():
        topology = topology_of(edge_lists(120))

        @jax.jit
        def made(topology, seeds):
            sample = sample_blocks(KEY, topology, seeds, [3, 2])
            return sample, make_blocks(sample)

        return jax.tree.leaves(made(topology, SEEDS))

    want = blocks()
    monkeypatch.setattr(static_tables, "_SHORT", 2)
    jax.clear_caches()  # of `_graph`, whose trace depends on it
    try:
        for a, b in zip(blocks(), want, strict=True):
            np.testing.assert_array_equal(a, b)
    finally:
        jax.clear_caches()
