"""Functions of programs by name, and what conversions give."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import interop

GRAPH = rgnn.RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3)
X = np.array([[-1.0, 2.0], [3.0, -4.0], [0.0, 5.0]], np.float32)


def test_functions_over_features() -> None:
    @rgnn.program
    def each(g, x):
        h = g.node(x)
        return rgnn.sum(h), rgnn.max(h), rgnn.sign(h), rgnn.minimum(h, 1.0), rgnn.stop_gradient(h)

    total, largest, sign, smaller, same = each(GRAPH, X)
    np.testing.assert_allclose(total, X.sum(-1))
    np.testing.assert_allclose(largest, X.max(-1))
    np.testing.assert_allclose(sign, np.sign(X))
    np.testing.assert_allclose(smaller, np.minimum(X, 1))
    np.testing.assert_allclose(same, X)


def test_relations() -> None:
    writes = ("author", "writes", "paper")
    graph = interop.from_relations({writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3})
    (ends,) = interop.to_relations(graph).values()
    np.testing.assert_array_equal(ends, [[0, 1], [2, 0]])


def test_types_under_their_keys() -> None:
    jraph = pytest.importorskip("jraph")
    tuples = jraph.GraphsTuple(
        {interop.NODE_TYPE_KEY: jnp.array([0, 1, 1])},
        {interop.EDGE_TYPE_KEY: jnp.array([1, 0])},
        jnp.array([2, 2]),
        jnp.array([0, 1]),
        None,
        jnp.array([3]),
        jnp.array([2]),
    )
    graph = interop.from_graphs_tuple(tuples)
    assert (graph.num_node_types, graph.num_edge_types) == (2, 2)
    np.testing.assert_array_equal(graph.node_type, [0, 1, 1])
