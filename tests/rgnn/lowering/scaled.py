"""Programs on arrays whose rows, columns, features, heads or types differ widely in scale.

The yardsticks are float64, and products as the hardware does them: `true_tf32` rounds the operands of every product to
10 bits of mantissa, each by itself, and computes the rest in float64.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import rgnn
from dejax.rgnn import RelGraph, library
from dejax.rgnn.compiler import execute
from dejax.rgnn.lowering.xla import Evaluator

NODES, EDGES, TYPES, WIDTH = 60, 700, 3, 32
Arrays = dict[str, Any]


def graph() -> RelGraph:
    rng = np.random.default_rng(3)
    senders, receivers, types = (rng.integers(0, n, EDGES) for n in (NODES, NODES, TYPES))
    return RelGraph.from_edges(
        senders, receivers, types, num_nodes=NODES, num_edge_types=TYPES, node_type=np.arange(NODES) % 2 + 0,
        num_node_types=2,
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A function of (graph, arrays, options), with the shapes of its arrays."""

    function: Callable[..., Any]
    shapes: dict[str, tuple[int, ...]]


@rgnn.program
def typed_sum(g: Any, x: Any, w: Any) -> Any:
    return g.sum_to_dst(g.src(x) @ g.per_edge_type(w))


@rgnn.program
def heads(g: Any, x: Any, w: Any) -> Any:
    z = g.src(x).reshape(4, WIDTH // 4) @ g.per_edge_type(w)
    return g.sum_to_dst(z.reshape(WIDTH))


@rgnn.program
def kept_heads(g: Any, x: Any, w: Any) -> Any:
    """As `heads`, but the sums keep their heads, and are summed again."""
    z = g.src(x).reshape(4, WIDTH // 4) @ g.per_edge_type(w)
    return g.sum_to_dst(g.src(g.sum_to_dst(z)))


@rgnn.program
def halves(g: Any, x: Any, w: Any) -> Any:
    """Products of slices, and of rows that are side by side, times a vector of features."""
    w = g.per_edge_type(w)
    half = WIDTH // 2
    z = rgnn.concatenate([g.src(x)[:half], g.dst(x)[half:]]) @ w
    return g.sum_to_dst(z * g.src(x)) + g.sum_to_dst(g.src(g.sum_to_dst(z)))


@rgnn.program
def masked(g: Any, x: Any, w: Any, m: Any) -> Any:
    """Products times features of their source, of which some are 0: so are these columns of its gradients."""
    return g.sum_to_dst((g.src(x) @ g.per_edge_type(w)) * g.src(m))


@rgnn.program
def spread(g: Any, x: Any, w: Any) -> Any:
    """PNA's standard deviation: the mean of squares less the square of the mean."""
    m = g.src(x) @ g.per_edge_type(w)
    mean, squares = g.mean_to_dst(m), g.mean_to_dst(m * m)
    return rgnn.sqrt(rgnn.relu(squares - mean**2) + 1e-5)


def _rgcn(graph: RelGraph, a: Arrays, options: rgnn.Options) -> Any:
    return library.rgcn(graph, a["x"], {"weight": a["w"]}, options=options)


def _rgat(graph: RelGraph, a: Arrays, options: rgnn.Options) -> Any:
    params = {"weight": a["w"], "attention_src": a["a"], "attention_dst": a["b"]}
    return library.rgat(graph, a["x"], params, options=options)


def _hgt(graph: RelGraph, a: Arrays, options: rgnn.Options) -> Any:
    return library.hgt(graph, a["x"], {k: v for k, v in a.items() if k != "x"}, options=options)


def _case(program: Any, **shapes: tuple[int, ...]) -> Case:
    return Case(lambda graph, a, options: program(graph, *(a[k] for k in shapes), options=options), shapes)


X, W = (NODES, WIDTH), (TYPES, WIDTH, WIDTH)
CASES: dict[str, Case] = {
    "typed_sum": _case(typed_sum, x=X, w=W),
    "heads": _case(heads, x=X, w=(TYPES, 4, WIDTH // 4, WIDTH // 4)),
    "kept heads": _case(kept_heads, x=X, w=(TYPES, 4, WIDTH // 4, WIDTH // 4)),
    "halves": _case(halves, x=X, w=W),
    "masked": _case(masked, x=X, w=W, m=X),
    "spread": _case(spread, x=X, w=W),
    "rgcn": Case(_rgcn, {"x": X, "w": W}),
    "rgat": Case(_rgat, {"x": X, "w": W, "a": (TYPES, WIDTH), "b": (TYPES, WIDTH)}),
    "hgt": Case(
        _hgt,
        {
            "x": X,
            **dict.fromkeys(("key", "query", "value"), (2, 1, WIDTH, WIDTH)),
            **dict.fromkeys(("relation_attention", "relation_message"), (TYPES, 1, WIDTH, WIDTH)),
            "prior": (TYPES, 1),
            "out": (2, WIDTH, WIDTH),
        },
    ),
}


def arrays(case: Case, seed: int = 0) -> Arrays:
    """Random float32 values as float64; weights are divided by the root of their fan-in."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in case.shapes.items():
        value = rng.normal(size=shape) / (1 if name == "x" or len(shape) < 3 else np.sqrt(shape[-2]))
        found[name] = value.astype(np.float32).astype(np.float64)
    return found


def _weights(a: Arrays) -> list[str]:
    return [k for k, v in a.items() if k != "x" and v.ndim >= 3]


def scaled(a: Arrays, where: str, factor: float) -> tuple[Arrays, bool]:
    """The arrays with one row, column, feature, head or type at another scale; the cotangent likewise."""
    a = {k: np.array(v) for k, v in a.items()}
    first = "w" if "w" in a else "value"
    if where == "row":
        a["x"][7] *= factor
    elif where == "row with zeros":
        a["x"][7] *= factor
        a["m"][7, : WIDTH // 2] = 0
    elif where == "column":
        a[first if "w" in a else "out"][..., 5] *= factor
    elif where == "inner column":
        a[first][..., 5] *= factor
    elif where == "feature":
        a["x"][:, 3] *= factor
        for k in [first] if "w" in a else ["key", "query", "value"]:
            (a[k][:, 0] if a[k].ndim == 4 else a[k])[:, 3] /= factor
    elif where == "feature of some columns":
        a["x"][:, 3] *= factor
        a[first][..., 3, : a[first].shape[-1] // 2] /= factor
    elif where == "feature alone":
        a["x"][:, 3] *= factor
    elif where == "weights of a feature":
        (a[first][:, 0] if a[first].ndim == 4 else a[first])[:, 3] *= factor
    elif where == "head":
        a[first][:, 1 if a[first].shape[1] > 1 and a[first].ndim == 4 else 0] *= factor
    elif where == "type":
        a[first][1] *= factor
    elif where == "all":
        a["x"] *= factor
    elif where == "offset":
        a["x"][:, 3] = factor
    elif where != "cotangent":
        raise ValueError(where)
    a = {k: v.astype(np.float32).astype(np.float64) for k, v in a.items()}
    return a, where == "cotangent"


def rounded_to_tf32(x: jax.Array) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits=11 if x.dtype == jnp.float64 else 8, mantissa_bits=10)


@contextlib.contextmanager
def _rounded_products() -> Iterator[None]:
    einsum = Evaluator._einsum

    def product(self: Evaluator, subscripts: str, x: jax.Array, y: jax.Array) -> jax.Array:
        return einsum(self, subscripts, rounded_to_tf32(x), rounded_to_tf32(y))

    Evaluator._einsum = product
    execute.forget_compiled()
    try:
        yield
    finally:
        Evaluator._einsum = einsum
        execute.forget_compiled()


def runner(case: Case, options: rgnn.Options) -> Callable[[RelGraph, Arrays, Any], tuple[Any, Arrays]]:
    """A compiled function of (graph, arrays, cotangent) that returns the result and the gradients."""

    def run(graph: RelGraph, a: Arrays, cotangent: Any) -> tuple[Any, Arrays]:
        y, pullback = jax.vjp(lambda a: case.function(graph, a, options), a)
        return y, pullback(cotangent)[0]

    return jax.jit(run)


class Yardsticks:
    """A case in float64, in float32 and with true TF32 products; each compiled once for all scales."""

    def __init__(self, case: Case, graph: RelGraph) -> None:
        self.graph, self.case, options = graph, case, rgnn.Options(backend="xla")
        a = arrays(case)
        with jax.enable_x64(True):
            shape = jax.eval_shape(lambda: case.function(graph, jax.tree.map(jnp.asarray, a), options)).shape
            self.cotangent = np.random.default_rng(9).normal(size=shape).astype(np.float32).astype(np.float64)
            self.exact = runner(case, options).lower(graph, a, self.cotangent).compile()
        self.given = (graph, *jax.tree.map(np.float32, (a, self.cotangent)))

    @functools.cached_property
    def f32(self) -> Callable[[RelGraph, Arrays, Any], tuple[Any, Arrays]]:
        return runner(self.case, rgnn.Options(backend="xla", precision="f32")).lower(*self.given).compile()

    @functools.cached_property
    def tf32(self) -> Callable[[RelGraph, Arrays, Any], tuple[Any, Arrays]]:
        with _rounded_products():
            return runner(self.case, rgnn.Options(backend="xla", precision="f32")).lower(*self.given).compile()

    def __call__(self, kind: str, a: Arrays, cotangent: np.ndarray) -> tuple[np.ndarray, Arrays]:
        """The result and the gradients, `kind` one of exact (float64), tf32 and f32."""
        if kind != "exact":
            return jax.tree.map(np.asarray, getattr(self, kind)(self.graph, *jax.tree.map(np.float32, (a, cotangent))))
        with jax.enable_x64(True):
            return jax.tree.map(np.asarray, self.exact(self.graph, a, cotangent))


def column_errors(
    found: np.ndarray, exact: np.ndarray, *, of_rows: bool = False, by_feature: bool = False
) -> np.ndarray:
    """The relative error of each column: of each index of the last axis, and of types where there are some.

    With `of_rows` the array is rows and not matrices by type, and each feature of each head is a column. `by_feature`
    takes the rows of matrices together instead: where one feature is much larger than the others, a column of the
    gradient is one element, and the error of one element, a sum that may cancel, says nothing.
    """
    if exact.ndim < 2:
        return np.atleast_1d(np.linalg.norm(found - exact) / max(np.linalg.norm(exact), 1e-300))
    axes = tuple(range(exact.ndim - 1)) if exact.ndim == 2 else tuple(range(1, exact.ndim - 1))
    axes = (0,) if of_rows else axes
    if by_feature and not of_rows and exact.ndim > 2:
        axes = (0, exact.ndim - 1)
    size = np.sqrt((exact**2).sum(axes))
    return np.sqrt(((np.asarray(found, np.float64) - exact) ** 2).sum(axes)) / np.where(size > 0, size, 1)
