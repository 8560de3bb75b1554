"""`RelGraph.from_edges` and `from_relations`: every table against a plain reference, round trips, validation."""

from __future__ import annotations

import itertools
import re
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.rgnn.graphs import tables
from dejax.rgnn.graphs.building import sorting
from dejax.rgnn.graphs.loop_tables import LOOPS
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.tables import LONG_SEGMENT_CHUNK, tile_table
from dejax.rgnn.interop import to_relations
from tests.rgnn.strategies import CHUNK, EdgeList, check_tables, edge_lists

SETTINGS = hypothesis.settings(deadline=None, max_examples=20)


@pytest.mark.cpu_only("tables for a GPU are packed into one array: see test_tables_in_one_array")
@hypothesis.settings(SETTINGS, max_examples=40)
@hypothesis.given(st.booleans().flatmap(lambda masks: edge_lists(masks=masks)), st.booleans(), st.booleans())
def test_every_table_agrees_with_the_reference_and_edges_come_back(
    edges: EdgeList, add_reverse: bool, add_self_loops: bool
) -> None:
    graph = edges.build(add_reverse=add_reverse, add_self_loops=add_self_loops, long_segment_chunk=CHUNK)
    added = edges.added(add_reverse, add_self_loops)
    check_tables(graph, added, exact=True)
    for array, column in zip(graph.to_edges(), (added.senders, added.receivers, added.edge_type), strict=True):
        np.testing.assert_array_equal(np.asarray(array)[added.edge_mask], column[added.edge_mask])


@SETTINGS
@hypothesis.given(st.data())
def test_relations_come_back(data: st.DataObject) -> None:
    num_nodes = {f"node{k}": count for k, count in enumerate(data.draw(st.lists(st.integers(0, 4), max_size=3)))}
    keys = st.tuples(
        st.sampled_from(sorted(num_nodes)), st.sampled_from(["r", "a/b", "rev_r"]), st.sampled_from(sorted(num_nodes))
    )
    relations = {}
    for key in data.draw(st.lists(keys, max_size=4, unique=True)) if num_nodes else []:
        both = num_nodes[key[0]] > 0 and num_nodes[key[2]] > 0
        size = data.draw(st.integers(0, 5)) if both else 0
        relations[key] = tuple(
            np.array(
                data.draw(st.lists(st.integers(0, max(num_nodes[name] - 1, 0)), min_size=size, max_size=size)), np.int32
            )
            for name in (key[0], key[2])
        )
    graph = RelGraph.from_relations(relations, num_nodes, add_self_loops=data.draw(st.booleans()))
    back = to_relations(graph)
    assert list(back) == list(relations)
    for key, edges in relations.items():
        for actual, expected in zip(back[key], edges, strict=True):
            np.testing.assert_array_equal(actual, expected)
    assert graph.node_type_names == tuple(num_nodes)
    for number, (name, count) in enumerate(num_nodes.items()):
        rows = graph.node_slice(name)
        assert rows.stop - rows.start == count
        assert (np.asarray(graph.node_type)[rows] == number).all()
    assert graph.by_node_type.order is None


def test_relations_with_added_edges() -> None:
    graph = RelGraph.from_relations(
        {("author", "writes", "paper"): ([0, 1, 1], [2, 0, 1]), ("paper", "cites", "paper"): ([0], [2])},
        {"author": 2, "paper": 3},
        add_reverse=True,
        add_self_loops=True,
    )
    assert graph.edge_type_names == (
        "author/writes/paper",
        "paper/cites/paper",
        "paper/rev_writes/author",
        "paper/rev_cites/paper",
        "self_loop",
    )
    back = to_relations(graph)
    assert list(back)[2:] == [("paper", "rev_writes", "author"), ("paper", "rev_cites", "paper")]
    np.testing.assert_array_equal(back["paper", "rev_writes", "author"], [[2, 0, 1], [0, 1, 1]])
    np.testing.assert_array_equal(np.asarray(graph.by_edge_type.counts()), [3, 1, 3, 1, 5])
    assert graph.node_slice("paper") == slice(2, 5)


@pytest.mark.parametrize(
    ("keys", "bounds"),
    [
        # The third key, then the second, no longer fits into the word with the position.
        ((7, 1 << 30, 1 << 30), (8, 1 << 30, 1 << 30)),
        ((1 << 31, 1 << 31, 1 << 31), (1 << 31,) * 3),
        ((2, 3), (2, 3)),
        ((1, 1), (1, 1)),
    ],
)
def test_stable_argsort(keys: tuple[int, ...], bounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorting, "_BLOCK", 64)
    rng = np.random.default_rng(0)
    for size in (0, 1, 2, 64, 65, 1000):
        columns = []
        for high, bound in zip(keys, bounds, strict=True):
            values = rng.integers(0, min(high, bound), 5)  # few different values, for ties
            columns.append(np.append(values, bound - 1)[rng.integers(0, 6, size)].astype(np.int32))
        expected = np.lexsort(columns[::-1])
        np.testing.assert_array_equal(sorting.stable_argsort(columns, bounds), expected)


@pytest.mark.cpu_only("tables for a GPU are packed into one array: see test_tables_in_one_array")
def test_large_graph_agrees_with_lexsort() -> None:
    """More edges than one block, many types, and a segment longer than the default chunk."""
    rng = np.random.default_rng(1)
    nodes, edges, types = 5_000, 300_000, 300
    senders, receivers = rng.integers(0, nodes, (2, edges))
    receivers[: 3 * LONG_SEGMENT_CHUNK] = 17
    edge_type = rng.integers(0, types, edges) ** 2 // types
    graph = RelGraph.from_edges(senders, receivers, edge_type, num_nodes=nodes, num_edge_types=types)
    ids = np.lexsort((senders, receivers, edge_type))
    np.testing.assert_array_equal(graph.edge_ids, ids)
    s, r, t = senders[ids], receivers[ids], edge_type[ids]
    np.testing.assert_array_equal(graph.by_sender.order, np.argsort(s, kind="stable"))
    np.testing.assert_array_equal(graph.by_receiver.order, np.argsort(r, kind="stable"))
    for by_pair, by_node, by_type, node in (
        (graph.by_source_pair, graph.source_pair_by_node, graph.source_pair_by_type, s),
        (graph.by_destination_pair, graph.destination_pair_by_node, graph.destination_pair_by_type, r),
    ):
        pairs, index = np.unique(np.stack([t, node]), axis=1, return_inverse=True)
        np.testing.assert_array_equal(by_pair.index, index)
        np.testing.assert_array_equal(np.stack([by_type.index, by_node.index]), pairs)
        np.testing.assert_array_equal(by_node.order, np.argsort(pairs[1], kind="stable"))
    long_segments = graph.by_receiver.long_segments
    assert (
        long_segments is not None and 17 in np.asarray(long_segments.row) and long_segments.chunk == LONG_SEGMENT_CHUNK
    )
    assert graph.by_sender.long_segments is None
    tiles = graph.by_edge_type.tiles_for(128)
    assert len(tiles.start) <= edges // 128 + types  # and not types times tiles


@pytest.mark.parametrize("add_self_loops", [False, True])
def test_no_edges(add_self_loops: bool) -> None:
    graph = RelGraph.from_edges([], [], [], num_nodes=2, add_self_loops=add_self_loops)
    assert (graph.num_edges, graph.num_edge_types) == ((2, 2) if add_self_loops else (0, 1))
    assert graph.num_source_pairs == graph.num_edges


def test_no_nodes() -> None:
    graph = RelGraph.from_edges([], [], [], num_nodes=0, num_edge_types=0, add_self_loops=True, add_reverse=True)
    assert (graph.num_nodes, graph.num_edges, graph.num_edge_types) == (0, 0, 1)


def test_is_a_pytree_with_a_hashable_static_part() -> None:
    kwargs: dict[str, Any] = {
        "num_nodes": 3,
        "edge_type_names": ["a", "b"],
        "add_reverse": True,
        "long_segment_chunk": 1,
    }
    graph = RelGraph.from_edges([0, 1, 2], [1, 0, 0], [0, 1, 1], **kwargs)
    leaves, structure = jax.tree.flatten(graph)
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)
    other = RelGraph.from_edges([2, 0, 1], [0, 2, 2], [0, 1, 1], **kwargs)  # the same graph with renumbered nodes
    assert hash(structure) == hash(jax.tree.structure(other)) and structure == jax.tree.structure(other)
    traces = []

    @jax.jit
    def total(graph: RelGraph, x: jax.Array) -> jax.Array:
        traces.append(repr(graph))
        return jnp.zeros(graph.num_nodes).at[graph.receivers].add(x[graph.edge_ids])

    x = jnp.arange(6.0)
    np.testing.assert_array_equal(total(graph, x), [0 + 1 + 2 + 3, 0 + 4, 5])
    total(other, x)
    assert len(traces) == 1 and traces[0] == repr(graph)
    closed = jax.jit(lambda x: jnp.zeros(graph.num_nodes).at[graph.receivers].add(x[graph.edge_ids]))
    np.testing.assert_array_equal(closed(x), total(graph, x))
    np.testing.assert_array_equal(jax.jit(lambda g: g.by_edge_type.tiles_for(2).start)(graph)[:4], [0, 1, 3, 4])


def test_repr_and_summary_print_counts_only() -> None:
    graph = RelGraph.from_edges([0, 1, 1], [1, 1, 1], [0, 0, 0], num_nodes=4, node_mask=[True, True, True, False])
    assert repr(graph) == (
        "RelGraph(nodes=4, edges=3, edge_types=1, node_types=1, source_pairs=2, destination_pairs=1, node_mask)"
    )
    summary = graph.summary()
    assert re.search(r"^nodes +3 of 4$", summary, re.M)
    assert re.search(r"^largest in-degree +3$", summary, re.M)
    assert re.search(r"^largest out-degree +2$", summary, re.M)
    texts = []
    jax.jit(lambda g: texts.append(g.summary()))(graph)
    assert re.search(r"^largest in-degree +traced$", texts[0], re.M)


def test_arrays_of_the_caller_are_not_aliased() -> None:
    node_type, mask = np.array([0, 1], np.int32), np.array([True, False])
    graph = RelGraph.from_edges([0], [0], [0], num_nodes=2, node_type=node_type, num_node_types=2, node_mask=mask)
    node_type[:], mask[:] = 7, True
    np.testing.assert_array_equal(graph.node_type, [0, 2])
    np.testing.assert_array_equal(graph.node_mask, [True, False])


def test_jax_arrays_and_other_integer_dtypes_are_accepted() -> None:
    expected = RelGraph.from_edges([0, 1], [1, 1], [0, 1], num_nodes=2)
    for convert in (jnp.asarray, np.uint8, np.int64, np.uint64, tuple):
        graph = RelGraph.from_edges(*(convert(ids) for ids in ([0, 1], [1, 1], [0, 1])), num_nodes=np.int64(2))
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), graph, expected))


def _with(**changes: Any) -> dict[str, Any]:
    return {"senders": [0, 1, 2], "receivers": [1, 2, 0], "edge_type": [0, 1, 0], "num_nodes": 3} | changes


WRONG = [
    (_with(senders=[0, 3, 4]), IndexError, r"senders\[1\] = 3 .* num_nodes is 3, so ids go from 0 to 2 \(1 more"),
    (_with(receivers=[0, 0, -1]), IndexError, r"receivers\[2\] = -1 is out of range"),
    (_with(senders=np.array([0, 1, 2**63], np.uint64)), IndexError, r"senders\[2\] = 9223372036854775808"),
    (_with(edge_type=[0, 2, 0], num_edge_types=2), IndexError, r"edge_type\[1\] = 2 .*num_edge_types is 2"),
    (_with(edge_type=[0, -1, 0]), IndexError, r"edge_type\[1\] = -1"),
    (_with(num_nodes=0, senders=[0], receivers=[0], edge_type=[0]), IndexError, "num_nodes is 0, so no id is valid"),
    (_with(node_type=[0, 1, 5], num_node_types=2), IndexError, r"node_type\[2\] = 5 .*num_node_types is 2"),
    (_with(senders=[0.0, 1.0, 2.0]), TypeError, r"senders must hold integer ids, got dtype float64.*astype"),
    (_with(senders=[0.0, np.nan, 2.0]), TypeError, r"senders .* float64; leave out the entries without an id \(NaN\)"),
    (_with(senders=["a", "b", "c"]), TypeError, r"senders .* <U1; number names with .*np.unique"),
    (_with(senders=np.zeros(0, np.float32), receivers=[], edge_type=[]), TypeError, "senders .* float32"),
    (_with(edge_type=[True, False, True]), TypeError, "edge_type must hold integer ids, got dtype bool.*mask"),
    (_with(senders=[0, 1]), ValueError, "one length .*got senders 2, receivers 3, edge_type 3"),
    (_with(senders=[[0, 1, 2]]), ValueError, r"senders must have one axis, got shape \(1, 3\)"),
    (_with(edge_type=0), ValueError, r"edge_type must have one axis, got shape \(\)"),
    (_with(num_nodes=3.0), TypeError, "num_nodes must be a Python int"),
    (_with(num_nodes=-1), ValueError, "num_nodes must be from 0"),
    (_with(num_nodes=2**31), ValueError, "num_nodes must be from 0 to 2147483646"),
    (_with(num_edge_types=2**31), ValueError, "num_edge_types must be from 0"),
    (_with(node_type=[0, 0]), ValueError, "node_type must have num_nodes = 3 entries, got 2"),
    (_with(edge_mask=[1, 1, 0]), TypeError, "edge_mask must be a bool array"),
    (_with(edge_mask=[True]), ValueError, r"edge_mask must have shape \(3,\), got \(1,\)"),
    (_with(node_mask=[True, True]), ValueError, r"node_mask must have shape \(3,\)"),
    (_with(node_mask=[True, True, False]), ValueError, r"senders\[2\] = 2 is a padding node"),
    (_with(edge_type_names=["a"]), IndexError, r"edge_type\[1\] = 1"),
    (_with(edge_type_names=["a", "a"]), ValueError, "edge_type_names must be distinct, got 'a'"),
    (_with(edge_type_names="ab"), TypeError, "edge_type_names must be a sequence of strings"),
    (_with(edge_type_names=["a", "b"], num_edge_types=3), ValueError, "num_edge_types = 3 types, got 2"),
    (_with(long_segment_chunk=0), ValueError, "long_segment_chunk must be at least 1"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[f"{k}" for k in range(len(WRONG))])
def test_errors(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RelGraph.from_edges(**arguments)


def test_more_edges_than_int32_can_number() -> None:
    many = np.broadcast_to(np.int32(0), 2**30)  # one element, repeated 2^30 times without a copy
    with pytest.raises(ValueError, match=r"got 2147483648 \(reverse edges and self loops included\)"):
        RelGraph.from_edges(many, many, many, num_nodes=1, add_reverse=True)


def test_masked_edges_are_not_checked() -> None:
    graph = RelGraph.from_edges([0, 99], [1, -5], [0, 77], num_nodes=2, edge_mask=[True, False])
    assert graph.num_edge_types == 1
    np.testing.assert_array_equal(graph.senders, [0, 2])


def test_traced_arrays_are_refused_with_the_remedy() -> None:
    with pytest.raises(TypeError, match=r"senders must be concrete, got a traced array .* RelGraph.build_traced"):
        jax.jit(lambda s: RelGraph.from_edges(s, [0], [0], num_nodes=1))(jnp.array([0]))


@pytest.mark.parametrize(
    ("relations", "num_nodes", "error", "message"),
    [
        (
            {("a", "r", "b"): ([0], [1])},
            {"a": 1, "b": 1},
            IndexError,
            r"receivers of \('a', 'r', 'b'\)\[0\] = 1 .*num_nodes\['b'\]",
        ),
        (
            {("a", "r", "c"): ([0], [0])},
            {"a": 1, "b": 1},
            ValueError,
            r"must have the node types of all relations, got \['a', 'b'\]",
        ),
        ({("a", "r"): ([0], [0])}, {"a": 1}, TypeError, "keys of relations"),
        ({("a", "r", "a"): ([0], [0], [0])}, {"a": 1}, ValueError, r"pair \(senders, receivers\)"),
        ({("a", "r", "a"): ([0], [0, 0])}, {"a": 1}, ValueError, "one length"),
        ({}, {"a/b": 1}, ValueError, 'without "/"'),
        ({}, {"a": -1}, ValueError, r"num_nodes\['a'\]"),
        ({}, {"a": 1.5}, TypeError, r"num_nodes\['a'\]"),
        ({}, {"a": 2**30, "b": 2**30}, ValueError, "sum of num_nodes"),
    ],
)
def test_errors_of_relations(relations: Any, num_nodes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        RelGraph.from_relations(relations, num_nodes)


def test_names_of_added_edge_types_are_refused() -> None:
    edges = ([0], [0])
    with pytest.raises(ValueError, match="distinct, got 'a/rev_r/a'"):
        RelGraph.from_relations({("a", "r", "a"): edges, ("a", "rev_r", "a"): edges}, {"a": 1}, add_reverse=True)


def test_node_slice_needs_relations() -> None:
    graph = RelGraph.from_edges([0], [0], [0], num_nodes=1, node_type_names=["a"])
    with pytest.raises(ValueError, match="from_relations"):
        graph.node_slice("a")
    with pytest.raises(ValueError, match="from_relations"):
        to_relations(graph)
    graph = RelGraph.from_relations({}, {"a": 1})
    with pytest.raises(ValueError, match=r"one of \['a'\], got 'b'"):
        graph.node_slice("b")


def test_tile_table_refuses_empty_tiles() -> None:
    with pytest.raises(ValueError, match="block must be at least 1"):
        tile_table(np.array([0, 1]), 0, 1)


def test_near_tiles_are_ordered_by_the_nodes_that_they_read() -> None:
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 500, (2, 6000))
    graph = RelGraph.from_edges(senders, receivers, rng.integers(0, 3, 6000), num_nodes=500).with_loop_tables()
    for name, node in (
        ("source_pair_by_type", graph.source_pair_by_node.index),
        ("destination_pair_by_type", graph.destination_pair_by_node.index),
        ("by_edge_type", graph.receivers),
    ):
        group = graph.grouping(name)
        assert [t.block for t in group.near_tiles] == [t.block for t in group.tiles]
        for near, by_type in zip(group.near_tiles, group.tiles, strict=True):
            back = np.argsort(np.asarray(near.start))
            np.testing.assert_array_equal(np.asarray(near.start)[back], np.asarray(by_type.start))
            np.testing.assert_array_equal(np.asarray(near.row_type)[back], np.asarray(by_type.row_type))
            assert (np.diff(np.asarray(node)[np.asarray(near.start)]) >= 0).all()
            assert group.tiles_for(near.block, near=True) is near
        splits, by_type = group.near_splits, group.splits
        assert splits is not None and by_type is not None and splits.rows_per_split == by_type.rows_per_split
        np.testing.assert_array_equal(np.asarray(splits.start), np.asarray(by_type.start)[np.asarray(splits.number)])
        np.testing.assert_array_equal(np.asarray(splits.end), np.asarray(by_type.end)[np.asarray(splits.number)])
        assert (np.diff(np.asarray(node)[np.asarray(splits.start)]) >= 0).all()


def test_near_tiles_of_a_graph_without_edges() -> None:
    graph = RelGraph.from_edges([], [], [], num_nodes=3, num_edge_types=2).with_loop_tables()
    group = graph.grouping("by_edge_type")
    assert group.near_tiles == () and group.near_splits is None


def test_tables_in_one_array(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")  # where a graph has no loop tables before it is asked
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 60, (2, 3000))
    types, nodes = rng.integers(0, 3, 3000), rng.integers(0, 2, 60)
    graph = RelGraph.from_edges(senders, receivers, types, num_nodes=60, node_type=nodes, long_segment_chunk=16)
    packed = graph.with_loop_tables()
    assert packed.packed is not None and packed.with_loop_tables() is packed
    # The arguments of a compiled step cost a microsecond each.
    assert len(jax.tree.leaves(packed)) <= 45
    for name in LOOPS:
        apart, together = getattr(graph, name).with_loop(), packed.grouping(name)
        jax.tree.map(np.testing.assert_array_equal, together, jax.tree.map(np.asarray, apart))
        assert getattr(packed, name).long_segments is None
    for name in ("by_edge_type", "source_pair_by_type", "by_node_type"):
        group = packed.grouping(name)
        for table, apart in zip(group.tiles, getattr(graph, name).tiles, strict=True):
            np.testing.assert_array_equal(table.row_type, apart.row_type)
            np.testing.assert_array_equal(table.start, apart.start)
    # The same pytree structure, so that a graph of the same sizes compiles nothing again.
    again = RelGraph.from_edges(senders, receivers, types, num_nodes=60, node_type=nodes, long_segment_chunk=16)
    assert jax.tree.structure(again.with_loop_tables()) == jax.tree.structure(packed)


def test_a_graph_that_is_made_while_tracing_is_concrete(monkeypatch: pytest.MonkeyPatch) -> None:
    """With all tables, made in threads as for a large graph."""
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 60, (2, 3000))

    def made() -> RelGraph:
        return RelGraph.from_edges(senders, receivers, rng.integers(0, 3, 3000), num_nodes=60).with_loop_tables()

    rng, inside = np.random.default_rng(1), []
    expected = made()
    monkeypatch.setattr(sorting, "_MANY_ENTRIES", 1)
    monkeypatch.setattr(sorting, "_BLOCK", 1000)
    rng = np.random.default_rng(1)
    jax.jit(lambda x: inside.append(made()) or x)(0.0)
    assert not inside[0].is_traced
    jax.tree.map(np.testing.assert_array_equal, inside[0], expected)


@pytest.mark.parametrize("throughout", [True, False])
def test_kernels_take_rows_with_long_segments_first(throughout: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a small graph are sorted by length; rows of a large graph within blocks."""
    monkeypatch.setattr(tables, "_SORTED_BLOCK", 16)
    monkeypatch.setattr(tables, "_SORTED_THROUGHOUT", 3000 if throughout else 2999)
    offsets = np.concatenate([[0], np.sort(np.random.default_rng(0).integers(0, 3001, 59)), [3000]])
    loop = tables.loop_order(offsets, np.arange(3000), 128)
    assert loop is not None
    counts = np.diff(offsets)[loop.rows]
    for first in range(0, 60, 60 if throughout else 16):
        block = slice(first, first + (60 if throughout else 16))
        assert (np.diff(counts[block]) <= 0).all()
        np.testing.assert_array_equal(np.sort(loop.rows[block]), np.arange(60)[block])
    segments = [loop.order[a:b] for a, b in itertools.pairwise(loop.offsets)]
    for row, found in zip(loop.rows, segments, strict=True):
        np.testing.assert_array_equal(found, np.arange(offsets[row], offsets[row + 1]))


@pytest.mark.parametrize(
    "entries, rows, expected", [(20_851, 7262, 24), (148_100, 27_163, 24), (342_297, 14_541, 64),
                                (620_232, 342_297, 64), (620_232, 14_541, 96), (4_762_678, 93_773, 128), (30, 1, 64),
                                (10**6, 10, 128)]
)  # fmt: skip
def test_chunk_sizes(entries: int, rows: int, expected: int) -> None:
    assert tables.long_segment_chunk_of(entries, rows) == expected


def test_large_tables_are_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dejax.rgnn.graphs.packed._SMALL", 100)
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 60, (2, 3000))
    graph = RelGraph.from_edges(senders, receivers, rng.integers(0, 3, 3000), num_nodes=60, long_segment_chunk=16)
    packed = graph.with_loop_tables()
    loop = packed.by_sender.loop
    assert loop is not None and loop.long_segments is None and loop.order.shape == (3000,)
    expected = graph.by_sender.with_loop()
    jax.tree.map(np.testing.assert_array_equal, packed.grouping("by_sender"), jax.tree.map(np.asarray, expected))


def test_edges_need_no_types() -> None:
    graph = RelGraph.from_edges([0, 1, 1], [1, 0, 2], num_nodes=3)
    assert (graph.num_edge_types, graph.num_edges) == (1, 3)
    assert RelGraph.from_edges([], [], num_nodes=3).num_edges == 0
    with pytest.raises(ValueError, match="senders"):
        RelGraph.from_edges([0, 1], [1], num_nodes=3)


def test_bipartite_graphs_keep_the_order_of_edges() -> None:
    graph = RelGraph.from_bipartite([1, 0, 1], [2, 0, 1], [1, 0, 1], num_sources=2, num_destinations=3)
    senders, receivers, kinds = graph.to_edges()
    assert senders.tolist() == [1, 0, 1] and receivers.tolist() == [4, 2, 3] and kinds.tolist() == [1, 0, 1]
    assert graph.node_slice("source") == slice(0, 2) and graph.node_slice("destination") == slice(2, 5)
    with pytest.raises(IndexError, match=r"receivers\[0\] = 3 is out of range: num_destinations is 3"):
        RelGraph.from_bipartite([1], [3], num_sources=2, num_destinations=3)
