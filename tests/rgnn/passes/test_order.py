"""Instances can run one after the other, whatever values of edges traversals store for each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph


@rgnn.program
def shared_by_a_product(g, x, w, b, mask, scale, factor, some):
    """XLA makes the product's gradient of edges, and what it reads shares the mask with what reads that gradient."""
    z = g.src(rgnn.tanh(g.node(x).reshape(6) @ g.per_node_type(w) + g.per_node_type(b))).reshape(2, 3)
    product = g.prod_to_src(rgnn.where(g.edge(mask) > 0, 0.5 + rgnn.sigmoid(z), rgnn.tanh(z)))
    score = g.per_edge_type(scale) * g.in_degree()
    mean = g.mean_to_dst(rgnn.edge_softmax(score, "dst") * z)
    other = rgnn.where(g.src(some) > 0, rgnn.rsqrt(g.out_degree()) * g.shared(factor), -np.inf)
    return product, mean, g.sum_to_dst(rgnn.edge_softmax(other, "dst") * score)


# Programs differ by the passes that are off, and by what the graph's numbers of nodes, edges and types let pay.
PASSES_OFF = [(), ("combine_products", "compact", "cse", "gemm", "hoist", "unit_axes"), ("share_scalars",)]


@pytest.mark.parametrize(
    ("nodes", "edges", "types", "passes_off"),
    [
        (1, 0, 1, PASSES_OFF[:1]),
        pytest.param(4, 9, 2, PASSES_OFF, marks=pytest.mark.slow),
        pytest.param(2, 6, 4, PASSES_OFF[1:2], marks=pytest.mark.slow),
        pytest.param(1, 0, 1, PASSES_OFF[1:], marks=pytest.mark.slow),
        pytest.param(2, 6, 4, PASSES_OFF[::2], marks=pytest.mark.slow),
    ],
)
def test_a_traversal_stores_what_another_would_store_too_late(nodes, edges, types, passes_off):
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, edges))
    graph = RelGraph.from_edges(*ends, rng.integers(0, types, edges), num_nodes=nodes, num_edge_types=types)
    shapes = ((nodes, 2, 3), (1, 6, 1), (1, 6), (edges,), (types,), (), (nodes,))
    arrays = [rng.normal(size=shape).astype(np.float32) for shape in shapes]

    def gradients(options: Options) -> list[jax.Array]:
        loss = lambda a: sum(jnp.sum(y**2) for y in shared_by_a_product(graph, *a, options=options))  # noqa: E731
        return jax.jit(jax.grad(loss))(arrays)

    expected = gradients(Options(backend="xla"))
    for disable in passes_off:
        found = gradients(Options(backend="pallas", interpret=True, precision="f32", disable=disable))
        for f, e in zip(found, expected, strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-4, atol=1e-4)
