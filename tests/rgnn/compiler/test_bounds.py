"""`Explanation.bounds`: the least bytes counted by hand, and what costs, with the user's line."""

from __future__ import annotations

import io
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.compiler.bounds import Bounds

NODES, EDGES, K = 1000, 50_000, 64
INDEX = 4 * EDGES + 8 * NODES  # of a loop over the edges
ROWS = NODES * K * 4


def graph(types: int = 1) -> RelGraph:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, NODES, (2, EDGES))
    return RelGraph.from_edges(*ends, rng.integers(0, types, EDGES), num_nodes=NODES, num_edge_types=types)


def shape(*sides: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, jnp.float32)


def bounds(function: Any, *shapes: jax.ShapeDtypeStruct, types: int = 1, **options: Any) -> Bounds:
    options = {"backend": "pallas", "interpret": True} | options
    made = rgnn.program(function).explain(graph(types), *shapes, options=Options(**options), file=io.StringIO())
    return made.bounds()


def test_least_bytes_of_a_sum_over_neighbours() -> None:
    """The cache holds all rows: they are read once. Backward reads one cotangent and writes one gradient."""
    found = bounds(lambda g, x: g.sum_to_dst(g.src(x)), shape(NODES, K))
    forward, training, backward = found.parts
    assert [p.title for p in found.parts] == ["forward, without gradients", "forward, with gradients", "backward"]
    for part in found.parts:
        assert part.least == 2 * ROWS + INDEX
        assert part.least <= part.bytes and part.ratio == part.bytes / part.least
    assert forward.ratio < 1.1 and training.ratio < 1.1 and backward.ratio < 1.1
    assert not found.causes and "nothing takes much more" in str(found)


def test_saved_values_are_not_needed() -> None:
    """Forward with gradients stores what backward reads again, which is more than the function needs."""
    found = bounds(lambda g, x, a: rgnn.tanh(g.sum_to_dst(g.edge(a) * g.src(x))), shape(NODES, K), shape(EDGES))
    forward, training, backward = found.parts
    assert forward.least == training.least == 2 * ROWS + INDEX + 4 * EDGES
    # x, the weights of edges and the cotangent; the gradients of x and of the weights; loops over both ends.
    assert backward.least <= 3 * ROWS + 8 * EDGES + 2 * INDEX


def perceptron(g: Any, x: Any, w1: Any, w2: Any) -> Any:
    message = rgnn.relu(rgnn.concatenate([g.src(x), g.dst(x)]) @ g.shared(w1))
    return g.max_to_dst(message @ g.shared(w2))


def perceptron_before(g: Any, x: Any, w1: Any, w2: Any) -> Any:
    h, w1 = g.node(x), g.shared(w1)
    return g.max_to_dst(g.src(rgnn.relu(h @ w1[:K]) @ g.shared(w2)))


def test_a_product_on_each_edge_is_named_with_its_line() -> None:
    given = (shape(NODES, K), shape(2 * K, K), shape(K, K))
    written, before = bounds(perceptron, *given), bounds(perceptron_before, *given)
    assert written.parts[0].ratio > 5 * before.parts[0].ratio
    cause = next(c for c in written.causes if c.part == "forward")
    assert "a product runs on each edge" in cause.what and "g.src(x @ w)" in cause.cheaper
    assert cause.line.startswith("test_bounds.py:") and "message" in cause.line
    assert "message" in str(written) and "cheaper: multiply before" in str(written)
    assert not any("product" in c.what for c in before.causes)


@pytest.mark.parametrize("backend", ["pallas", "xla"])
def test_bounds_are_those_of_the_kernels(backend: str) -> None:
    """Also where XLA runs the program, as on a CPU."""
    shapes = shape(NODES, K), shape(3, K, K)
    found = bounds(lambda g, x, w: g.sum_to_dst(g.src(x) @ g.per_edge_type(w)), *shapes, types=3, backend=backend)
    assert [k.template for k in found.parts[0].kernels] == ["grouped GEMM", "traversal"]
    assert any("for each source pair" in c.what for c in found.causes)


def test_without_gradients() -> None:
    found = bounds(lambda g, x: g.sum_to_dst(g.src(x)), shape(NODES, K), disable=("backward",))
    assert [p.title for p in found.parts] == ["forward, without gradients"]
