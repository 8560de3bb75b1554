"""Runs a case of the contract on a backend and compares it with its float64 reference."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn import Options, RelGraph
from tests.rgnn.cases import CASES, Size
from tests.rgnn.references import GRAPHS, Arrays, Reference, graph_of
from tests.rgnn.strategies import EdgeList

# --- arrays, and the comparison --------------------------------------------------------------------------------------


def row_counts(edges: EdgeList) -> dict[str, int]:
    pairs = len(set(zip(edges.senders.tolist(), edges.edge_type.tolist(), strict=True)))
    return {
        "node": edges.num_nodes,
        "edge": len(edges.senders),
        "source_pair": pairs,
        "etype": edges.num_edge_types,
        "ntype": edges.num_node_types,
    }


def make_arrays(name: str, edges: EdgeList, size: Size, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arrays of a case, rounded to `dtype`, as float64."""
    rng, rows = np.random.default_rng(seed), row_counts(edges)
    found = {}
    for key, (kind, shape, scale) in CASES[name].arrays(size).items():
        full = shape if kind == "shared" else (rows[kind], *shape)
        found[key] = round_to(rng.normal(size=full) * scale, dtype)
    return found


def waves(y: Any) -> np.ndarray:
    """A cotangent of many signs and sizes for a result; by numpy, since jax would compile it for each shape."""
    return np.cos(np.arange(y.size) * 1.7).reshape(y.shape).astype(y.dtype)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(x, np.float64) if dtype == "float64" else x.astype(jnp.dtype(dtype)).astype(np.float64)


@dataclass(frozen=True)
class Expected:
    """A case's arrays and cotangents, its results and its gradients, in float64."""

    arrays: dict[str, np.ndarray]
    cotangents: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    gradients: dict[str, np.ndarray]


@cache
def expected(name: str, graph: str, size: Size, dtype: str, scores: float = 1.0) -> Expected:
    """The float64 reference on one of `GRAPHS`; arrays named `s` are multiplied by `scores`."""
    edges = GRAPHS[graph]
    arrays = make_arrays(name, edges, size, dtype)
    if "s" in arrays:
        arrays["s"] = round_to(arrays["s"] * scores, dtype)
    reference, r = CASES[name].reference, Reference(edges)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):

        def flat(a: Arrays) -> tuple:
            return tuple(jax.tree.leaves(reference(r, a)))

        shapes = jax.eval_shape(flat, arrays)
        rng = np.random.default_rng(1)
        cotangents = tuple(round_to(rng.normal(size=s.shape), dtype) for s in shapes)

        def both(a: Arrays, c: tuple) -> tuple:
            results, pull = jax.vjp(flat, a)
            return results, pull(c)[0]

        results, gradients = jax.jit(both)(arrays, cotangents)
    to_numpy = lambda tree: jax.tree.map(np.asarray, tree)  # noqa: E731
    return Expected(arrays, cotangents, to_numpy(results), to_numpy(gradients))


def run_case(
    name: str, graph: RelGraph, arrays: Arrays, cotangents: tuple, options: Options, *, jit: bool = True
) -> tuple[tuple, tuple, Arrays]:
    """(results without gradients, results with gradients, gradients) of a case's program."""

    def both(graph: RelGraph, a: Arrays, c: tuple) -> tuple[tuple, tuple, Arrays]:
        flat = lambda a: tuple(jax.tree.leaves(CASES[name].run(graph, a, options)))  # noqa: E731
        results, pull = jax.vjp(flat, a)
        c = tuple(x.astype(y.dtype) for x, y in zip(c, results, strict=True))
        return flat(a), results, pull(c)[0]

    return (jax.jit(both) if jit else both)(graph, arrays, cotangents)


def error(got: Any, want: np.ndarray) -> float:
    """The norm of the difference divided by the norm of the expected value.

    Numbers here are of the order of 1 or more, so what is wanted counts as 0.1 at least: a gradient may cancel to
    nothing.
    """
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return 0.0
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 0.1 * np.sqrt(want.size)))


def assert_agrees(got: tuple[tuple, tuple, Arrays], want: Expected, tolerance: float, dtype: str | None = None) -> None:
    """Compares every result and gradient; NaN equals nothing.

    Gradients are given half as much again: those of a softmax are sums that cancel.
    """
    plain, results, gradients = got
    found = {
        f"result {i} without gradients": error(y, w) for i, (y, w) in enumerate(zip(plain, want.results, strict=True))
    }
    found |= {f"result {i}": error(y, w) for i, (y, w) in enumerate(zip(results, want.results, strict=True))}
    assert gradients.keys() == want.gradients.keys()
    found |= {f"gradient of {key}": error(gradients[key], w) / 1.5 for key, w in want.gradients.items()}
    wrong = {key: f"{value:.1e}" for key, value in found.items() if not value < tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"
    if dtype is not None:
        assert {str(x.dtype) for x in jax.tree.leaves(got)} == {dtype}


def check(
    name: str,
    graph: str,
    size: Size,
    options: Options,
    dtype: str = "float32",
    *,
    tolerance: float,
    scores: float = 1.0,
    loop_tables: bool = False,
) -> None:
    """The contract: a case's results and gradients on a backend are those of its float64 reference.

    `loop_tables`: on a graph with the tables that are otherwise made where there is a GPU.
    """
    want = expected(name, graph, size, dtype, scores)
    with jax.enable_x64(dtype == "float64"):
        arrays = {key: value.astype(jnp.dtype(dtype)) for key, value in want.arrays.items()}
        cotangents = tuple(c.astype(jnp.dtype(dtype)) for c in want.cotangents)
        tables = graph_of(graph).with_loop_tables() if loop_tables else graph_of(graph)
        got = run_case(name, tables, arrays, cotangents, options)
    assert_agrees(got, want, tolerance, dtype)


# --- coverings -------------------------------------------------------------------------------------------------------

WIDTHS = (1, 3, 17, 100)
HEADS = (1, 2, 8, 3)


def covering(names: tuple[str, ...], graphs: tuple[str, ...], each: int) -> list[tuple[str, str, Size]]:
    """Some pairs (graph, size) for each case, which step through graphs, widths and heads at different rates."""
    found = []
    for i, name in enumerate(names):
        for j in range(each):
            at = i * each + j
            size = Size(WIDTHS[at % 4], WIDTHS[(at // 4 + j) % 4], HEADS[(at + at // 3) % 4])
            if name.startswith("hgt") or size.k * size.n * size.h > 10_000:
                size = replace(size, n=min(size.n, 17), h=min(size.h, 3) if size.n > 3 else size.h)
            found.append((name, graphs[at % len(graphs)], size))
    return found
