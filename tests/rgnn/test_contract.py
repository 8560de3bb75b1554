"""What `dejax.rgnn` promises: operators and layers against float64, with gradients, on XLA and in interpreted kernels.

One case for each thing that a program can say; test_cases.py has the others, and runs all of them by numpy.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import RelGraph
from tests.rgnn.cases import Size
from tests.rgnn.contract import check
from tests.rgnn.references import GRAPHS
from tests.rgnn.test_cases import BF16, F32, PALLAS, XLA, check_padding, padded_case


@pytest.mark.parametrize(
    ("name", "graph", "size"),
    [
        ("linear_by_edge_type_and_head", "sparse", Size(17, 3, 2)),
        ("linear_by_node_type", "typical", Size(5, 4, 2)),
        ("dot_with_constants", "long_segments", Size(3, 17, 2)),
        ("softmax_within_relations", "fan_in", Size(5, 4, 2)),
        ("reductions", "typical", Size(17, 1, 1)),
        ("degrees", "one_type", Size(3, 1, 1)),
        ("elementwise", "typical", Size(3, 1, 1)),
        ("rgcn_bases", "long_segments", Size(17, 3, 2)),
        ("rgat", "typical", Size(17, 3, 2)),
    ],
    ids=str,
)
def test_xla(name: str, graph: str, size: Size) -> None:
    check(name, graph, size, XLA, tolerance=F32)


def test_kernels() -> None:
    """Products by edge type, a softmax and sums of one layer; test_cases.py has all cases."""
    check("rgat", "typical", Size(5, 4, 2), PALLAS, tolerance=F32)


def test_bfloat16() -> None:
    check("rgcn_mean", "typical", Size(17, 3, 2), XLA, "bfloat16", tolerance=BF16)


def test_padding_and_a_graph_that_is_built_inside_jit() -> None:
    """NaN in each row of padding: results and gradients are those without padding."""
    check_padding("rgat_relation", XLA, padded_case("rgat_relation", Size(3, 3, 2)))


def test_a_program_of_ones_own() -> None:
    """A layer as a user writes it, with its gradient, against numpy; it is used inside `jit` and under `vmap`."""
    edges, rng = GRAPHS["typical"], np.random.default_rng(0)
    graph = RelGraph.from_edges(
        edges.senders, edges.receivers, edges.edge_type, num_nodes=edges.num_nodes, num_edge_types=edges.num_edge_types
    )
    x, w = rng.normal(size=(edges.num_nodes, 3)), rng.normal(size=(edges.num_edge_types, 3, 4))

    @rgnn.program
    def layer(g: Any, x: Any, w: Any) -> Any:
        return g.sum_to_dst(g.src(x) @ g.per_edge_type(w))

    def loss(x: Any, w: Any) -> tuple[Any, Any]:
        y = layer(graph, x, w)
        return (y**2).sum() / 2, y

    many = jnp.stack([jnp.asarray(x, jnp.float32), jnp.asarray(2 * x, jnp.float32)])
    run = jax.jit(jax.vmap(jax.grad(loss, has_aux=True), in_axes=(0, None)))
    gradients, results = run(many, jnp.asarray(w, jnp.float32))
    want, gradient = np.zeros((edges.num_nodes, 4)), np.zeros(x.shape)
    np.add.at(want, edges.receivers, np.einsum("ek,ekn->en", x[edges.senders], w[edges.edge_type]))
    np.add.at(gradient, edges.senders, np.einsum("en,ekn->ek", want[edges.receivers], w[edges.edge_type]))
    np.testing.assert_allclose(results, [want, 2 * want], rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(gradients, [gradient, 2 * gradient], rtol=1e-5, atol=1e-3)


def test_mistakes_are_errors_at_their_line() -> None:
    graph = RelGraph.from_edges([0], [1], num_nodes=2)

    @rgnn.program
    def layer(g: Any, x: Any) -> Any:
        return g.sum_to_dst(g.node(x))

    with pytest.raises(rgnn.ProgramError, match=r"test_contract\.py"):
        layer(graph, jnp.ones((2, 3)))
