"""Axes of size 1 at every place of a feature shape: passes and kernels keep results and gradients.

The sweep is over pairs of feature shapes that broadcast. Each shape is one program with every way to bring it together
with the others, so that a program is compiled once for many pairs.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from dejax.rgnn.compiler.execute import CompileTask, counts_of, inference_kernels
from dejax.rgnn.ir.intra import Fallback
from tests.rgnn.contract import row_counts
from tests.rgnn.preserved import by_numpy
from tests.rgnn.references import GRAPHS
from tests.rgnn.strategies import CHUNK

EDGES = GRAPHS["typical"]
# Every feature shape of rank 0 to 2 whose sides are 1 or one other number.
SHAPES = [(), (1,), (3,), (1, 1), (1, 3), (2, 1), (2, 3)]
Shape = tuple[int, ...]


def meets(x: Shape, y: Shape) -> bool:
    return () in (x, y) or len(x) == len(y)


def elementwise(g: Any, x: Shape, a: dict[str, Any]) -> list:
    """Values of every space, of one shape, with edge values of every shape that broadcasts with it."""
    found = []
    for y in SHAPES:
        if meets(x, y):
            edge, typed = g.edge(a[f"edge{y}"]), g.per_edge_type(a[f"etype{x}"])
            node, shared = g.node(a[f"node{x}"]), g.shared(a[f"shared{x}"])
            mixed = edge * g.src(node) - typed / (1.5 + rgnn.square(edge)) + rgnn.maximum(shared, edge)
            found.append(g.sum_to_dst(rgnn.where_positive(edge + 0.1, mixed, typed)))
            by_node = g.node(a[f"node{y}"]) * node + g.per_node_type(a[f"ntype{x}"])
            found.append(g.mean_to_src(g.dst(rgnn.tanh(by_node * shared))))
    return found


def attention(g: Any, x: Shape, a: dict[str, Any]) -> list:
    """A softmax of one shape that weighs rows of every shape that broadcasts with it."""
    found = []
    score = g.edge(a[f"edge{x}"]) + g.per_edge_type(a[f"etype{x}"])
    for number, y in enumerate(SHAPES):
        if meets(x, y):
            share = rgnn.edge_softmax(rgnn.leaky_relu(score), ("dst", "relation")[number % 2])
            found.append(g.sum_to_dst(share * g.src(a[f"node{y}"])))
    share = rgnn.edge_softmax(score)
    found += [g.max_to_dst(share), g.sum_to_src(share)]
    if len(x) == 1:
        found.append(g.sum_to_dst(share[None, :] * g.src(a[f"node{(1, *x)}"])))
        found.append(g.sum_to_dst(share[:, None] * g.src(a[f"node{(*x, 1)}"])))
    return found


def contractions(g: Any, x: Shape, a: dict[str, Any]) -> list:
    """Products with one column or one row, inner products, sums that keep their axis, and what they score."""
    found = []
    z, h = g.src(a[f"node{x}"]), g.node(a[f"node{x}"])
    for name in ("etype", "shared"):
        declare = g.per_edge_type if name == "etype" else g.shared
        for n in (1, 2):
            w = declare(a[f"{name}{x}n{n}"])
            y = z @ w
            found.append(g.sum_to_dst(rgnn.edge_softmax(y) * z) if n == 1 else g.sum_to_dst(y))
        c = declare(a[f"{name}{x}"])
        found.append(g.sum_to_dst(rgnn.edge_softmax(rgnn.dot(z, c)[..., None]) * z))
        found.append(g.mean_to_dst(rgnn.edge_softmax((z * c).sum(keepdims=True), "relation") * z))
    for axis, keep in itertools.product(range(len(x)), (False, True)):
        found += [h.sum(axis, keepdims=keep), g.max_to_dst((z * g.dst(h)).mean(axis, keepdims=keep))]
    return found


def as_written(g: Any, x: Shape, a: dict[str, Any]) -> list:
    """The attention that most people write, and scores that have fewer heads than what they weigh."""
    z = g.src(a["node(3,)"])
    two = g.src(a["node(2, 3)"])
    one = z[None]
    scored = [
        z @ g.per_edge_type(a["etype(3,)n1"]),
        (z * g.per_edge_type(a["etype(3,)"])).sum(keepdims=True),
    ]
    found = [rgnn.edge_softmax(s) * z for s in scored]
    found += [
        rgnn.edge_softmax((two * two).sum(keepdims=True)) * two,  # (2, 1) x (2, 3)
        rgnn.edge_softmax((one * one).sum(keepdims=True)) * two,  # (1, 1) x (2, 3)
        rgnn.edge_softmax(one) * two,  # (1, 3) x (2, 3)
        rgnn.edge_softmax(z)[None, :] * one,
    ]
    return [g.sum_to_dst(y) for y in found]


WAYS: dict[str, tuple[Callable, list[Shape]]] = {
    "elementwise": (elementwise, SHAPES),
    "attention": (attention, SHAPES),
    "contractions": (contractions, SHAPES[1:]),
    "as_written": (as_written, []),
}


def arrays(needed: str, x: Shape) -> dict[str, np.ndarray]:
    rng, rows = np.random.default_rng(7), row_counts(EDGES)
    kinds = {"edge": rows["edge"], "node": rows["node"], "etype": rows["etype"], "ntype": rows["ntype"]}
    shapes = {f"{kind}{y}": (n, *y) for kind, n in kinds.items() for y in SHAPES} | {f"shared{y}": y for y in SHAPES}
    if needed in ("contractions", "as_written"):
        shapes |= {f"etype{x}n{n}": (rows["etype"], *x, n) for n in (1, 2)}
        shapes |= {f"shared{x}n{n}": (*x, n) for n in (1, 2)}
    shapes |= {f"node{(*y, 1)}": (rows["node"], *y, 1) for y in ((3,), (1,))}
    return {name: rng.normal(size=shape) for name, shape in shapes.items()}


CASES = [(way, x) for way, (_, shapes) in WAYS.items() for x in shapes or [(3,)]]


def gradients(way: str, x: Shape, options: Options, dtype: str) -> tuple:
    """The results, and their gradients for cotangents of numpy: what JAX computes outside of `jit`, XLA compiles."""
    program, graph = rgnn.program(lambda g, a: tuple(WAYS[way][0](g, x, a))), EDGES.build(long_segment_chunk=CHUNK)
    given = {k: jnp.asarray(v.astype(dtype)) for k, v in arrays(way, x).items()}
    results, pull = jax.vjp(lambda a: program(graph, a, options=options), given)
    return results, pull(tuple(np.cos(np.arange(y.size, dtype=y.dtype)).reshape(y.shape) for y in results))


@pytest.mark.parametrize(("way", "x"), CASES, ids=str)
def test_passes_with_unit_axes(way: str, x: Shape) -> None:
    with by_numpy():
        gradients(way, x, Options(), "float32")


@pytest.mark.slow
@pytest.mark.parametrize(("way", "x"), CASES, ids=str)
def test_kernels_with_unit_axes(way: str, x: Shape) -> None:
    with jax.enable_x64(True), by_numpy(exact=()):
        want = gradients(way, x, Options(), "float64")
    got = gradients(way, x, Options(backend="pallas", precision="f32", interpret=True), "float32")
    for (path, w), y in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        assert y.shape == w.shape
        scale = 1 + np.abs(w).max()
        np.testing.assert_allclose(y, w, rtol=0, atol=2e-5 * scale, err_msg=jax.tree_util.keystr(path))


def test_a_score_by_one_column_is_one_pass() -> None:
    """A weight of one column compiles to the kernels of a vector."""

    def kernels(shape: Shape, *, keepdims: bool = False) -> list[str]:
        def layer(g: Any, x: Any, a: Any) -> Any:
            z, a = g.src(x), g.per_edge_type(a)
            if keepdims:
                score = (z * a).sum(keepdims=True)
            else:
                score = z @ a if len(a.shape) == 2 else rgnn.dot(z, a)
            return g.sum_to_dst(rgnn.edge_softmax(rgnn.leaky_relu(score)) * z)

        graph, rows = EDGES.build(), row_counts(EDGES)
        x, a = jnp.zeros((rows["node"], 8)), jnp.zeros((rows["etype"], *shape))
        task, _, _ = rgnn.program(layer)._prepare(graph, None, (x, a), {})
        found = inference_kernels(CompileTask(task.program, counts_of(graph), Options())).instances
        return [type(i).__name__ for i in found if not isinstance(i, Fallback)]

    assert kernels((8, 1)) == kernels((8,))
    assert kernels((8,), keepdims=True) == kernels((8,))
