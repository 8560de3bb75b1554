"""Rewrites of concatenated rows and rows with heads keep dtypes, ranges and broadcasting of programs as written."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import RelGraph
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.passes import optimise
from tests.rgnn.evaluate import evaluate
from tests.rgnn.preserved import trace

N, R = 7, 3
RNG = np.random.default_rng(0)
GRAPH = RelGraph.from_edges(*(RNG.integers(0, n, 60) for n in (N, N - 1, R - 1)), num_nodes=N, num_edge_types=R)


def near(function, arrays, tolerance, disable=()):
    """Results have the dtypes and, to a tolerance, the values of the program as it is written."""
    program, inputs = trace(rgnn.program(function), GRAPH, *arrays)
    made = optimise(program, counts_of(GRAPH), frozenset(disable))
    want, got = (evaluate(p, GRAPH, inputs, rounded=True) for p in (program, made))
    for w, g in zip(want, got, strict=True):
        assert g.dtype == w.dtype
        w, g = np.asarray(w, np.float64), np.asarray(g, np.float64)
        assert np.isfinite(w).all()
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance * np.abs(w).max())


def normal(*shape, dtype="float32", scale=1.0):
    return jnp.asarray(RNG.normal(size=shape) * scale, dtype)


def full(*shape, value, dtype):
    return jnp.full(shape, value, dtype)


def product(g, x, y, w):
    return rgnn.concatenate([g.src(x), g.dst(y)]) @ g.shared(w)


def rows(g, x, y, w):
    joined = rgnn.concatenate([g.src(x), g.dst(y)])
    return g.sum_to_dst(joined * g.shared(w)), rgnn.dot(joined, g.shared(w)), rgnn.exp(joined * 0.001).sum()


@pytest.mark.parametrize(
    ("x", "y", "w"),
    [
        (normal(N, 4, dtype="float16", scale=300), normal(N, 3), normal(7, dtype="float16", scale=300)),
        (full(N, 4, value=100, dtype="int8"), full(N, 3, value=1, dtype="int32"), full(7, value=100, dtype="int8")),
        (full(N, 4, value=100, dtype="int8"), normal(N, 3), normal(7)),
    ],
    ids=["float16", "int8", "int8 and float32"],
)
def test_parts_have_the_dtype_of_the_concatenation(x, y, w):
    near(product, (x, y, w[:, None] * jnp.ones((1, 5), w.dtype)), 1e-6)
    near(rows, (x, y, w), 1e-6)


def test_terms_beyond_float16():
    """Only the whole is within its range."""

    def layer(g, x, y, w, a):
        joined = rgnn.concatenate([g.src(x), g.dst(y)])
        return joined @ g.shared(w), rgnn.dot(joined, g.shared(a)), rgnn.sin(joined * 1e-4).sum(), (joined * 200).sum()

    x, w, a = full(N, 4, value=150, dtype="float16"), normal(8, 5, dtype="float16"), jnp.full(8, 150, "float16")
    near(layer, (x, -x, (w[:1] + 150).repeat(8, 0), a), 2e-3)


@pytest.mark.parametrize("bias", [(1, 3), (), (2, 1), (2, 3)])
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float16")])
def test_biases_of_two_products_of_the_same_rows(bias, dtypes):
    def layer(g, x, u, v, b, c):
        h = g.src(x)
        key, value = h @ g.per_edge_type(u) + g.per_edge_type(b), h @ g.per_edge_type(v) + g.per_edge_type(c)
        return rgnn.dot(key, key), rgnn.dot(value, value)

    x, u, v = (normal(*shape, dtype=dtypes[1]) for shape in ((N, 4), (R, 2, 4, 3), (R, 2, 4, 3)))
    near(
        layer, (x, u, v, *(normal(R, *bias, dtype=dtype) for dtype in dtypes)), 1e-6 if dtypes[1] == "float32" else 2e-3
    )


def test_heads_of_a_row_that_a_bias_makes_wider():
    def layer(g, x, w, b):
        return g.sum_to_dst(g.src(g.node(x) @ g.shared(w) + g.shared(b)).reshape(2, 3))

    near(layer, (normal(N, 4), normal(4, 1), normal(6)), 1e-6, disable=("unit_axes",))
