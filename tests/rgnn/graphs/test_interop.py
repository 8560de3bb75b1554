"""`jraph.GraphsTuple` to `RelGraph` and back without loss: batched, padded, traced."""

from __future__ import annotations

from functools import partial
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.interop import from_graphs_tuple, to_graphs_tuple
from tests.rgnn.strategies import CHUNK, EdgeList, check_tables, edge_lists

jraph = pytest.importorskip("jraph")
SETTINGS = hypothesis.settings(deadline=None, max_examples=5)
NODES, EDGES, GRAPHS, EDGE_TYPES, NODE_TYPES = 16, 30, 5, 4, 3


def graphs_tuple(edges: EdgeList) -> jraph.GraphsTuple:
    nodes: dict[str, Any] = {"x": np.arange(edges.num_nodes * 2, dtype=np.float32).reshape(-1, 2)}
    nodes["node_type"] = np.zeros(edges.num_nodes, np.int32) if edges.node_type is None else edges.node_type
    return jraph.GraphsTuple(
        nodes=nodes,
        edges={"edge_type": edges.edge_type, "x": np.arange(len(edges.senders), dtype=np.float32)},
        senders=edges.senders,
        receivers=edges.receivers,
        globals=np.ones((1, 2), np.float32),
        n_node=np.array([edges.num_nodes], np.int32),
        n_edge=np.array([len(edges.senders)], np.int32),
    )


def edge_list(batch: jraph.GraphsTuple, padding_nodes: int = 0, padding_edges: int = 0) -> EdgeList:
    """A tuple with padding as its last nodes and edges."""
    nodes, edges = len(batch.nodes["x"]), len(batch.senders)
    return EdgeList(
        *(np.asarray(ids) for ids in (batch.senders, batch.receivers, batch.edges["edge_type"])),
        num_nodes=nodes,
        num_edge_types=EDGE_TYPES,
        node_type=np.asarray(batch.nodes["node_type"]),
        num_node_types=NODE_TYPES,
        edge_mask=np.arange(edges) < edges - padding_edges,
        node_mask=np.arange(nodes) < nodes - padding_nodes,
    )


batches = st.lists(edge_lists(max_nodes=5, max_edges=9), min_size=1, max_size=3).map(
    lambda lists: jraph.batch_np([graphs_tuple(edges) for edges in lists])
)
TYPES: dict[str, Any] = {"num_edge_types": EDGE_TYPES, "num_node_types": NODE_TYPES, "long_segment_chunk": CHUNK}


def assert_same_tuple(actual: jraph.GraphsTuple, expected: jraph.GraphsTuple) -> None:
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@SETTINGS
@hypothesis.given(batches, st.booleans(), st.booleans())
def test_batched_graphs(batch: jraph.GraphsTuple, add_reverse: bool, add_self_loops: bool) -> None:
    graph = from_graphs_tuple(batch, add_reverse=add_reverse, add_self_loops=add_self_loops, **TYPES)
    check_tables(graph, edge_list(batch).added(add_reverse, add_self_loops), exact=True)
    assert_same_tuple(to_graphs_tuple(graph, like=batch), batch)
    # The graph alone has all edges and types of the tuple.
    back = to_graphs_tuple(graph)
    for name in ("senders", "receivers"):
        np.testing.assert_array_equal(getattr(back, name)[: len(batch.senders)], getattr(batch, name))
    np.testing.assert_array_equal(back.edges[: len(batch.senders)], batch.edges["edge_type"])
    assert (int(back.n_node[0]), int(back.n_edge[0])) == (graph.num_nodes, graph.num_edges)


@SETTINGS
@hypothesis.given(batches, st.integers(0, 3), st.integers(1, 2))
def test_padded_graphs(batch: jraph.GraphsTuple, extra: int, extra_graphs: int) -> None:
    nodes, edges = len(batch.nodes["x"]), len(batch.senders)
    padded = jraph.pad_with_graphs(batch, nodes + 1 + extra, edges + extra, len(batch.n_node) + extra_graphs)
    graph = from_graphs_tuple(padded, padded=True, add_self_loops=True, bounded=False, **TYPES)
    check_tables(graph, edge_list(padded, 1 + extra, extra).added(False, True), exact=True)
    assert_same_tuple(to_graphs_tuple(graph, like=padded), padded)


@pytest.mark.slow
@SETTINGS
@hypothesis.given(batches, batches)
def test_batches_padded_to_one_size_have_one_structure(batch: jraph.GraphsTuple, other: jraph.GraphsTuple) -> None:
    """So that a function of the graph compiles once for all of them."""
    both = [jraph.pad_with_graphs(given, NODES, EDGES, GRAPHS) for given in (batch, other)]
    graphs = [from_graphs_tuple(padded, padded=True, add_reverse=True, **TYPES) for padded in both]
    assert len({jax.tree.structure(graph) for graph in graphs}) == 1
    assert len({str(jax.tree.map(jnp.shape, graph)) for graph in graphs}) == 1
    plain = edge_list(both[0], NODES - int(batch.n_node.sum()), EDGES - int(batch.n_edge.sum()))
    check_tables(graphs[0], plain.added(True, False), exact=False)
    assert_same_tuple(to_graphs_tuple(graphs[0], like=both[0]), both[0])


@jax.jit
def round_trip(padded: jraph.GraphsTuple) -> tuple[RelGraph, jraph.GraphsTuple]:
    graph = from_graphs_tuple(padded, padded=True, add_reverse=True, add_self_loops=True, **TYPES)
    return graph, to_graphs_tuple(graph, nodes=padded.nodes["x"] * 2, like=padded)


@SETTINGS
@hypothesis.given(batches)
def test_padded_graphs_inside_jit(batch: jraph.GraphsTuple) -> None:
    padded = jraph.pad_with_graphs(batch, NODES, EDGES, GRAPHS)
    graph, back = round_trip(padded)
    plain = edge_list(padded, NODES - int(batch.n_node.sum()), EDGES - int(batch.n_edge.sum()))
    check_tables(graph, plain.added(True, True), exact=False)
    assert_same_tuple(back, padded._replace(nodes=padded.nodes["x"] * 2))


def test_rows_beyond_the_counts_are_padding() -> None:
    loose = jraph.GraphsTuple(
        nodes=np.zeros((4, 1)),
        edges=np.array([0, 1, 0]),
        senders=np.array([0, 1, 0]),
        receivers=np.array([1, 2, 0]),
        globals=None,
        n_node=np.array([2, 1]),
        n_edge=np.array([1, 1]),
    )
    for graph in (from_graphs_tuple(loose), jax.jit(partial(from_graphs_tuple, num_edge_types=2))(loose)):
        np.testing.assert_array_equal(graph.edge_mask, [True, True, False])
        np.testing.assert_array_equal(graph.node_mask, [True, True, True, False])
    with pytest.raises(ValueError, match="the sum of graphs_tuple.n_edge must be from 0 to 3, .* got 4"):
        from_graphs_tuple(loose._replace(n_edge=np.array([4])))


def test_every_graph_of_a_padded_tuple_may_be_empty() -> None:
    empty = jraph.GraphsTuple(
        nodes=np.zeros((0, 1)), edges=np.zeros(0, int), senders=np.zeros(0, int), receivers=np.zeros(0, int),
        globals=None, n_node=np.array([0]), n_edge=np.array([0]),
    )  # fmt: skip
    graph = from_graphs_tuple(jraph.pad_with_graphs(empty, 2, 3, 4), padded=True, num_edge_types=1)
    np.testing.assert_array_equal(graph.node_mask, [False, False])
    np.testing.assert_array_equal(graph.edge_mask, [False] * 3)


PLAIN = jraph.GraphsTuple(
    nodes=jnp.zeros((3, 2)),
    edges=jnp.array([1, 0]),
    senders=jnp.array([0, 1]),
    receivers=jnp.array([2, 2]),
    globals=None,
    n_node=jnp.array([3]),
    n_edge=jnp.array([2]),
)
NAMED = PLAIN._replace(edges={"kind": jnp.array([1, 0]), "x": jnp.zeros(2)}, nodes={"kind": jnp.array([0, 1, 1])})


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (PLAIN, {}),
        (PLAIN._replace(edges={"edge_type": PLAIN.edges}), {}),
        (NAMED, {"edge_type": "kind"}),
        (NAMED, {"edge_type": lambda edges: edges["kind"]}),
        (NAMED, {"edge_type": jnp.array([1, 0])}),
        (PLAIN._replace(edges=None), {"edge_type": [1, 0]}),
    ],
)
def test_where_edge_types_are_found(given: jraph.GraphsTuple, options: dict[str, Any]) -> None:
    expected = RelGraph.from_edges([0, 1], [2, 2], [1, 0], num_nodes=3)
    jax.tree.map(np.testing.assert_array_equal, from_graphs_tuple(given, **options), expected)
    traced = jax.eval_shape(lambda given: from_graphs_tuple(given, num_edge_types=2, **options), given)
    assert traced.edge_ids.shape == expected.edge_ids.shape


def test_one_edge_type_for_all() -> None:
    graph = from_graphs_tuple(PLAIN._replace(edges=None), edge_type=0)
    np.testing.assert_array_equal(graph.edge_type, [0, 0])
    assert graph.num_edge_types == 1


def test_where_node_types_are_found() -> None:
    for node_type in ("kind", lambda nodes: nodes["kind"], np.array([0, 1, 1])):
        graph = from_graphs_tuple(NAMED, edge_type="kind", node_type=node_type)
        np.testing.assert_array_equal(graph.node_type, [0, 1, 1])
        assert graph.num_node_types == 2


def test_integer_node_features_are_not_node_types() -> None:
    assert from_graphs_tuple(PLAIN._replace(nodes=jnp.arange(3))).num_node_types == 1


def test_no_edges_and_no_node_features() -> None:
    bare = PLAIN._replace(nodes=None, edges=None, senders=None, receivers=None, n_edge=jnp.array([0]))
    graph = from_graphs_tuple(bare)
    assert (graph.num_nodes, graph.num_edges) == (3, 0)
    assert to_graphs_tuple(graph, like=bare) == bare
    with pytest.raises(ValueError, match="to make the number of nodes static; give node features"):
        jax.jit(lambda given: from_graphs_tuple(given, num_edge_types=1).num_nodes)(bare)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (NAMED, {}, ValueError, "edge_type must be given, .*no entry 'edge_type'"),
        (PLAIN._replace(edges=None), {}, ValueError, "edge_type must be given"),
        (PLAIN._replace(edges=jnp.zeros((2, 3))), {}, ValueError, "edge_type must be given"),
        (NAMED, {"edge_type": "sort"}, ValueError, r"edge_type = 'sort' must be a key .*\['kind', 'x'\]"),
        (NAMED, {"edge_type": "x"}, TypeError, "edge_type must hold integer ids, got dtype float32"),
        (PLAIN, {"node_type": "kind"}, ValueError, "node_type = 'kind' must be a key of graphs_tuple.nodes"),
        (PLAIN, {"num_edge_types": 1}, IndexError, r"edge_type\[0\] = 1"),
    ],
)
def test_errors(given: jraph.GraphsTuple, options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_graphs_tuple(given, **options)


def test_numbers_of_types_must_be_given_inside_jit() -> None:
    with pytest.raises(TypeError, match="num_edge_types must be given inside jit"):
        jax.jit(from_graphs_tuple)(PLAIN)
    with pytest.raises(TypeError, match="num_node_types must be given inside jit"):
        jax.jit(partial(from_graphs_tuple, edge_type="kind", node_type="kind", num_edge_types=2))(NAMED)
    graph = jax.jit(partial(from_graphs_tuple, edge_type_names=("a", "b")))(PLAIN)
    assert graph.num_edge_types == 2


def test_features_of_the_result() -> None:
    graph = from_graphs_tuple(PLAIN, add_self_loops=True)
    result = to_graphs_tuple(graph, nodes={"y": jnp.ones((3, 1))}, edges=jnp.arange(5.0), like=PLAIN)
    assert_same_tuple(result, PLAIN._replace(nodes={"y": jnp.ones((3, 1))}, edges=jnp.arange(2.0)))
    assert to_graphs_tuple(graph, edges=None, like=PLAIN).edges is None
    np.testing.assert_array_equal(to_graphs_tuple(graph, edges=jnp.arange(5)).edges, jnp.arange(5))
    with pytest.raises(ValueError, match=r"nodes must have 3 rows, got shape \(2,\)"):
        to_graphs_tuple(graph, nodes=jnp.ones(2), like=PLAIN)
    with pytest.raises(ValueError, match=r"edges must have 2 rows \(or 5, with the added edges\), got shape \(4,\)"):
        to_graphs_tuple(graph, edges=jnp.ones(4), like=PLAIN)
    with pytest.raises(ValueError, match="like must have 2 nodes and at most 5 edges, .* got 3 and 2"):
        to_graphs_tuple(RelGraph.from_edges([0] * 5, [0] * 5, [0] * 5, num_nodes=2), like=PLAIN)
    padded = from_graphs_tuple(jraph.pad_with_graphs(PLAIN, 5, 5), padded=True)
    with pytest.raises(ValueError, match="like must be given for a graph with padding"):
        to_graphs_tuple(padded)
