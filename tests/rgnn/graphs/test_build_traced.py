"""`RelGraph.build_traced`: the tables of the numpy builder inside jit, with static bounds and padding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.rgnn.graphs import interop, tables
from dejax.rgnn.graphs.building import pieces_traced, sorting_traced
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments, bounded_segments
from tests.rgnn.strategies import CHUNK, EdgeList, check_tables, edge_lists

SETTINGS = hypothesis.settings(deadline=None, max_examples=6)
NODES, EDGES, EDGE_TYPES, NODE_TYPES = 6, 14, 3, 2


@partial(jax.jit, static_argnames=("num_nodes", "num_edge_types", "num_node_types", "add_reverse", "add_self_loops"))
def build(senders: Any, receivers: Any, edge_type: Any, **options: Any) -> RelGraph:
    return RelGraph.build_traced(senders, receivers, edge_type, long_segment_chunk=CHUNK, **options)


def padded_lists() -> st.SearchStrategy[EdgeList]:
    """Graphs of one padded shape, which share a compilation."""

    def pad(edges: EdgeList, seed: int) -> EdgeList:
        edges = replace(edges, num_edge_types=EDGE_TYPES, num_node_types=NODE_TYPES)
        return edges.padded(EDGES, NODES, np.random.default_rng(seed))

    lists = partial(edge_lists, max_nodes=NODES, max_edges=EDGES, max_edge_types=EDGE_TYPES, max_node_types=NODE_TYPES)
    return st.builds(pad, st.booleans().flatmap(lambda masks: lists(masks=masks)), st.integers(0, 99))


@pytest.mark.parametrize("added", [False, pytest.param(True, marks=pytest.mark.slow)])
@SETTINGS
@hypothesis.given(edges=padded_lists())
def test_every_table_agrees_with_the_reference(added: bool, edges: EdgeList) -> None:
    """With and without reverse edges and self loops."""
    positional, keywords = edges.arguments()
    graph = build(*positional, **keywords, **({"add_reverse": True, "add_self_loops": True} if added else {}))
    check_tables(graph, edges.added(added, added), exact=False)


@SETTINGS
@hypothesis.given(padded_lists(), padded_lists())
def test_bounded_graphs_of_equal_shapes_have_equal_structures(edges: EdgeList, other: EdgeList) -> None:
    """Made outside of jit; with and without padding nodes, hubs and empty types."""
    graphs = [given.build(bounded=True, long_segment_chunk=CHUNK) for given in (edges, other)]
    check_tables(graphs[0], edges, exact=False)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *graphs)
    assert stacked.senders.shape == (2, EDGES)
    assert "of 14" in graphs[0].summary() or edges.edge_mask is None or edges.edge_mask.all()


@pytest.mark.slow
def test_bounded_graphs_of_relations_and_of_two_sides() -> None:
    relations = {("a", "to", "b"): ([0, 1, 1], [0, 0, 1]), ("b", "of", "a"): ([1], [1])}
    others = {("a", "to", "b"): ([1, 1, 1], [1, 1, 1]), ("b", "of", "a"): ([0], [1])}
    made = [
        RelGraph.from_relations(given, {"a": 2, "b": 2}, add_reverse=True, bounded=True)
        for given in (relations, others)
    ]
    assert jax.tree.structure(made[0]) == jax.tree.structure(made[1])
    for given, graph in zip((relations, others), made, strict=True):
        found = interop.to_relations(graph)
        assert {key: [ids.tolist() for ids in found[key]] for key in given} == {k: [*v] for k, v in given.items()}
        assert graph.by_node_type.order is None  # nodes are numbered type after type
    made = [
        RelGraph.from_bipartite(ends, [0, 1, 1], num_sources=2, num_destinations=2, bounded=True)
        for ends in ([0, 1, 0], [1, 1, 1])
    ]
    assert jax.tree.structure(made[0]) == jax.tree.structure(made[1])
    pytest.importorskip("jraph")
    assert interop.to_graphs_tuple(made[0]).senders.tolist() == [0, 1, 0]


def check_agreement(traced: RelGraph, graph: RelGraph) -> None:
    """Checks that the valid part of each table of `traced` equals the table of `graph`, which numpy built."""
    for name in ("senders", "receivers", "edge_type", "edge_ids", "edge_positions", "node_type"):
        np.testing.assert_array_equal(getattr(traced, name), getattr(graph, name))
    for actual, expected in zip(traced.to_edges(), graph.to_edges(), strict=True):
        np.testing.assert_array_equal(actual, expected)
    for name in RelGraph.__slots__:
        ours, theirs = getattr(traced, name), getattr(graph, name)
        if name == "edge_type_by_source":
            assert ours is None  # with several node types it is unknown while tracing
        elif isinstance(theirs, Segments):
            valid = int(theirs.offsets[-1])
            np.testing.assert_array_equal(ours.index[:valid], theirs.index[:valid])
            if theirs.order is not None and ours.order is not None:
                np.testing.assert_array_equal(ours.order[:valid], theirs.order[:valid])
                # Padding entries come last, in ascending order; the exact table has no unused pairs.
                same = ours.num_entries == theirs.num_entries
                rest = theirs.order[valid:] if same else np.arange(valid, ours.num_entries)
                np.testing.assert_array_equal(ours.order[valid:], rest)
            np.testing.assert_array_equal(ours.offsets[: theirs.num_rows + 1], theirs.offsets)
            assert (np.asarray(ours.offsets[theirs.num_rows :]) == valid).all()
            check_pieces(ours, theirs)


def check_pieces(ours: Segments, theirs: Segments) -> None:
    """Checks that long segments and tiles are equal and that unused entries are empty."""
    for table, exact in zip(ours.tiles, theirs.tiles, strict=True):
        used = len(exact.start)
        np.testing.assert_array_equal(table.row_type[:used], exact.row_type)
        np.testing.assert_array_equal(table.start[:used], exact.start)
        assert (np.asarray(table.start[used:]) == int(theirs.offsets[-1])).all()
    ours_long, theirs_long = ours.long_segments, theirs.long_segments
    used = 0 if theirs_long is None else len(theirs_long.row)
    if ours_long is None or theirs_long is None:
        assert used == 0 and (ours_long is None or not np.asarray(ours_long.count).any())
        return
    for mine, exact in zip(ours_long.arrays, theirs_long.arrays, strict=True):
        np.testing.assert_array_equal(mine[:used], exact)
    np.testing.assert_array_equal(ours_long.start[used:], ours_long.end[used:])
    assert (np.asarray(ours_long.row[used:]) == ours.num_rows).all() and not np.asarray(ours_long.count[used:]).any()


@SETTINGS
@hypothesis.given(padded_lists(), st.integers(0, 99))
def test_contents_of_padding_have_no_effect(edges: EdgeList, seed: int) -> None:
    """Tables depend on valid edges only, also where padding ids are out of range."""
    positional, keywords = edges.arguments()
    rng = np.random.default_rng(seed)
    others = [np.where(edges.edge_mask, column, rng.integers(-3, 99, EDGES)).astype(np.int32) for column in positional]
    other_nodes = np.where(edges.node_mask, edges.node_type, rng.integers(-3, 99, NODES)).astype(np.int32)
    graph = build(*positional, **keywords)
    other = build(*others, **{**keywords, "node_type": other_nodes})
    assert jax.tree.structure(graph) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, graph, other)


def test_a_segment_of_very_many_entries_has_longer_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most so many chunks, which numpy and XLA cut alike; other segments keep theirs."""
    monkeypatch.setattr(pieces_traced, "_MOST_CHUNKS", 4)
    offsets = np.array([0, 3, 25, 29, 29, 34], np.int32)
    exact = tables.long_segment_table(offsets, 4)
    assert exact is not None
    assert exact.start.tolist() == [3, 9, 15, 21, 29, 33] and exact.end.tolist() == [9, 15, 21, 25, 33, 34]
    assert exact.row.tolist() == [1] * 4 + [4] * 2
    assert exact.first.tolist() == [0] * 4 + [4] * 2 and exact.count.tolist() == [4] * 4 + [2] * 2
    index = np.repeat(np.arange(6, dtype=np.int32), np.diff([*offsets, 36]))
    bounded = bounded_segments({"it": (index, None, jnp.asarray(offsets))}, long_segment_chunk=4)["it"].long_segments
    assert bounded is not None
    for found, want in zip(bounded.arrays, exact.arrays, strict=True):
        np.testing.assert_array_equal(found[:6], want)
    assert not np.asarray(bounded.count[6:]).any()


# Sizes at which cumulative sums have several levels, and an edge has two or three sort keys.
LARGE = {
    "two words": (20_000, 30_000, 300, 0.1),
    "three words, most types empty": (20_000, 70_000, 70_000, 0.0),
    "one type, all padding": (20_000, 500, 1, 1.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LARGE)
def test_large_graphs_agree_with_the_numpy_builder(case: str) -> None:
    size, nodes, types, padding = LARGE[case]
    rng = np.random.default_rng(0)
    ends = np.minimum((nodes * rng.random((2, size)) ** 3).astype(np.int32), nodes - 1)  # long segments first
    edge_type = np.minimum((types * rng.random(size) ** 6).astype(np.int32), types - 1)
    mask = rng.random(size) >= padding
    node_type = rng.integers(0, NODE_TYPES, nodes).astype(np.int32)
    edges = EdgeList(*ends, edge_type, nodes, types, node_type, NODE_TYPES, edge_mask=mask)
    positional, keywords = edges.arguments()
    check_agreement(build(*positional, **keywords), edges.build(long_segment_chunk=CHUNK))


@pytest.mark.parametrize("bounds", [(5, 7, 9), (70_000, 300, 60_000), (1 << 31, 3), (1,)])
def test_stable_sort(bounds: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    columns = [np.append(rng.integers(0, bound, 300), [bound - 1, 0, 0]).astype(np.int32) for bound in bounds]
    found, order = sorting_traced.stable_sort([jnp.asarray(column) for column in columns], bounds)
    expected = np.lexsort(columns[::-1])
    np.testing.assert_array_equal(order, expected)
    for column, sorted_column in zip(columns, found, strict=True):
        np.testing.assert_array_equal(sorted_column, column[expected])


@pytest.mark.parametrize("size", [0, 1, 5000])
def test_row_of_positions(size: int) -> None:
    offsets = np.append(0, np.sort(np.random.default_rng(0).integers(0, size + 9, 2000))).astype(np.int32)
    expected = np.searchsorted(offsets, np.arange(size), side="right") - 1
    np.testing.assert_array_equal(sorting_traced.row_of_positions(jnp.asarray(offsets), size), expected)


def test_one_compilation_serves_all_batches_of_a_shape() -> None:
    traces = []

    @jax.jit
    def step(senders: jax.Array, receivers: jax.Array, valid: jax.Array, valid_nodes: jax.Array) -> RelGraph:
        graph = RelGraph.build_traced(
            senders,
            receivers,
            jnp.zeros_like(senders),
            num_nodes=5,
            num_edge_types=1,
            num_valid_edges=valid,
            num_valid_nodes=valid_nodes,
            add_self_loops=True,
        )
        traces.append(graph)
        return graph

    for valid in range(4):
        graph = step(jnp.array([0, 1, 1]), jnp.array([1, 0, 2]), jnp.int32(valid), jnp.int32(4))
        np.testing.assert_array_equal(graph.by_edge_type.counts(), [valid, 4])
        assert int(graph.edge_mask.sum()) == valid + 4  # type: ignore[union-attr]
        np.testing.assert_array_equal(graph.node_mask, [True] * 4 + [False])
    assert len(traces) == 1
    assert hash(jax.tree.structure(traces[0])) == hash(jax.tree.structure(graph))


def of_one_shape(*columns: list[int], node_type: Any = (0,) * NODES, node_mask: Any = (True,) * NODES) -> RelGraph:
    """The graph of some edges in arrays of the shape of `padded_lists`, so that it compiles nothing."""
    padded = [np.resize(np.array([*column, *[0] * EDGES], np.int32), EDGES) for column in columns]
    edges = EdgeList(*padded, NODES, EDGE_TYPES, np.array(node_type, np.int32), NODE_TYPES)
    edges = replace(edges, edge_mask=np.arange(EDGES) < len(columns[0]), node_mask=np.array(node_mask))
    positional, keywords = edges.arguments()
    return build(*positional, **keywords)


def test_edges_that_cannot_be_checked_count_as_padding() -> None:
    graph = of_one_shape(
        [0, 7, -1, 0, 0, 1], [1, 0, 0, 9, 1, 2], [0, 0, 0, 0, 5, 0], node_mask=[True, True, *[False] * 4]
    )
    np.testing.assert_array_equal(graph.edge_mask, [True] + [False] * (EDGES - 1))
    np.testing.assert_array_equal(graph.senders, [0] + [NODES] * (EDGES - 1))
    np.testing.assert_array_equal(graph.by_receiver.counts(), [0, 1, 0, 0, 0, 0])


def test_node_types_out_of_range_belong_to_no_type() -> None:
    graph = of_one_shape([0], [1], [0], node_type=[1, -4, 8, 0, 0, 0])
    np.testing.assert_array_equal(graph.node_type, [1, 2, 2, 0, 0, 0])
    np.testing.assert_array_equal(graph.by_node_type.counts(), [3, 1])


@pytest.mark.parametrize("num_edges", [0, 1])
@pytest.mark.parametrize("num_nodes", [0, 1])
def test_smallest_graphs(num_edges: int, num_nodes: int) -> None:
    ids = np.zeros(num_edges, np.int32)
    graph = build(ids, ids, ids, num_nodes=num_nodes, num_edge_types=1, add_self_loops=True)
    valid = min(num_edges, num_nodes)  # an edge without nodes is out of range
    np.testing.assert_array_equal(graph.by_edge_type.counts(), [valid, num_nodes])


@pytest.mark.slow
def test_works_outside_jit_and_under_strict_promotion() -> None:
    arguments: dict[str, Any] = {"num_nodes": 4, "num_edge_types": 2, "num_valid_edges": 2}
    ids = np.array([0, 1, 3]), np.array([1, 1, 1]), np.array([1, 0, 0])
    eager = RelGraph.build_traced(*ids, long_segment_chunk=CHUNK, **arguments)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        traced = jax.jit(lambda *ids: RelGraph.build_traced(*ids, long_segment_chunk=CHUNK, **arguments))(*ids)
    assert jax.tree.structure(eager) == jax.tree.structure(traced)
    jax.tree.map(np.testing.assert_array_equal, eager, traced)


@pytest.mark.slow
def test_vmap_over_graphs_of_one_shape() -> None:
    rng = np.random.default_rng(0)
    ids = [jnp.asarray(rng.integers(0, bound, (3, 8)), jnp.int32) for bound in (5, 5, 2)]
    one = partial(RelGraph.build_traced, num_nodes=5, num_edge_types=2, long_segment_chunk=CHUNK)
    many = jax.vmap(one)(*ids)
    for batch in range(3):
        jax.tree.map(
            lambda got, want, batch=batch: np.testing.assert_array_equal(got[batch], want),
            many,
            one(*(column[batch] for column in ids)),
        )


def _with(**changes: Any) -> dict[str, Any]:
    ids = jnp.array([0, 1])
    return {"senders": ids, "receivers": ids, "edge_type": ids, "num_nodes": 3, "num_edge_types": 2} | changes


WRONG = [
    (_with(senders=jnp.array([0.0, 1.0])), TypeError, "senders must hold integer ids, got dtype float32"),
    (_with(senders=jnp.array([[0, 1]])), ValueError, r"senders must have one axis, got shape \(1, 2\)"),
    (_with(edge_type=jnp.array([0])), ValueError, "one length .*edge_type 1"),
    (_with(num_edge_types=None), TypeError, "num_edge_types must be a Python int"),
    (_with(node_type=jnp.array([0])), ValueError, "node_type must have num_nodes = 3"),
    (_with(node_mask=jnp.array([True])), ValueError, r"node_mask must have shape \(3,\)"),
    (_with(edge_mask=jnp.array([1, 0])), TypeError, "edge_mask must be a bool array"),
    (
        _with(edge_mask=jnp.array([True, False]), num_valid_edges=1),
        ValueError,
        "num_valid_edges and edge_mask must not be given together",
    ),
    (_with(num_valid_edges=3), ValueError, "num_valid_edges must be from 0 to 2, the static bound"),
    (_with(num_valid_nodes=-1), ValueError, "num_valid_nodes must be from 0 to 3"),
    (_with(num_valid_nodes=1.0), TypeError, "num_valid_nodes must be an integer scalar"),
    (_with(num_valid_nodes=jnp.array([1])), TypeError, "num_valid_nodes must be an integer scalar"),
    (_with(edge_type_names=("a",)), ValueError, "edge_type_names must have a name for each"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[f"{k}" for k in range(len(WRONG))])
def test_errors_of_shapes_and_dtypes(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    arrays = {name: value for name, value in arguments.items() if isinstance(value, jax.Array)}
    others = {name: value for name, value in arguments.items() if name not in arrays}
    with pytest.raises(error, match=message):
        jax.jit(lambda arrays: RelGraph.build_traced(**arrays, **others))(arrays)
    with pytest.raises(error, match=message):
        RelGraph.build_traced(**arguments)


def test_sizes_must_be_static() -> None:
    with pytest.raises(
        TypeError, match=r"num_nodes must be a Python int known before jit, got a traced value; .*num_valid"
    ):
        jax.jit(lambda n: RelGraph.build_traced([0], [0], [0], num_nodes=n, num_edge_types=1))(3)


@pytest.mark.parametrize(
    ("wide", "dtype"), [(False, np.int64), (True, np.uint64), pytest.param(True, ">i8", marks=pytest.mark.slow)]
)
def test_wide_ids_stay_out_of_range(dtype: Any, wide: bool) -> None:
    """A cast to int32 drops their upper bits: 2^32 would be node 0."""
    with jax.enable_x64(wide):
        ids = np.array([2**32, 1]).astype(dtype), np.array([0, 2**40 + 1]).astype(dtype), np.array([0, 0])
        for arrays in (ids, [jnp.asarray(some.astype(some.dtype.newbyteorder("="))) for some in ids if wide]):
            if arrays:
                graph = RelGraph.build_traced(*arrays, num_nodes=3, num_edge_types=1)
                assert graph.edge_mask is not None and not graph.edge_mask.any()
