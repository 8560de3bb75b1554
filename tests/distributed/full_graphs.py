"""Programs on a graph over several devices against the same programs on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from dejax.distributed.full_graph import ShardedGraph, over_mesh
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.ir.inter import Space

XLA = Options(backend="xla", precision="f32")
Tree = Any


def mesh_of(parts: int, backend: str | None = None) -> Mesh:
    return Mesh(np.array(jax.devices(backend)[:parts]), ("parts",))


def owners(num_nodes: int, parts: int, how: str = "random") -> np.ndarray:
    """Random owners; or "skewed", where the first part has most nodes and the last one none."""
    rng = np.random.default_rng(num_nodes + parts)
    if how == "skewed":
        return np.where(rng.random(num_nodes) < 0.7, 0, rng.integers(0, max(parts - 1, 1), num_nodes))
    return rng.integers(0, parts, num_nodes)


def sharded(graph: ShardedGraph, array: Any, kind: str) -> Any:
    if kind == "node":
        return graph.shard_nodes(array)
    return graph.shard_edges(array) if kind == "edge" else jnp.asarray(array)


def whole(graph: ShardedGraph, array: Any, kind: str) -> np.ndarray:
    if kind == "node":
        return graph.unshard_nodes(array)
    return graph.unshard_edges(array) if kind == "edge" else np.asarray(array)


def kind_of(space: Space) -> str:
    return str(space) if space in (Space.NODE, Space.EDGE) else "shared"


def compare(
    program: Any,
    graph: RelGraph,
    arrays: Tree,
    kinds: Tree,
    *,
    parts: int = 4,
    how: str = "random",
    tolerance: float = 1e-10,
    options: Options = XLA,
    **keywords: Any,
) -> None:
    """Results and gradients of `program(graph, arrays)` over devices equal those on one device.

    Args:
        arrays: a pytree, the program's only argument.
        kinds: for each leaf "node", "edge" or "shared".
        keywords: of the program.
    """
    split = ShardedGraph.from_graph(graph, owners(graph.num_nodes, parts, how), mesh_of(parts))
    layer = over_mesh(program)
    given = jax.tree.map(lambda a, kind: sharded(split, a, kind), arrays, kinds)
    plan = layer.plan(split, given, **keywords)
    spaces = [kind_of(plan.program.ops[o].space) for o, _ in plan.outputs]
    one = lambda a: program(graph, a, options=options, **keywords)  # noqa: E731
    many = lambda a: layer(split, a, options=options, **keywords)  # noqa: E731
    shapes = jax.tree.leaves(jax.eval_shape(one, arrays))
    rng = np.random.default_rng(3)
    cotangents = [rng.normal(size=s.shape).astype(s.dtype) for s in shapes]
    want, want_grads = both(one, jax.tree.map(jnp.asarray, arrays), cotangents)
    there = [sharded(split, c, kind) for c, kind in zip(cotangents, spaces, strict=True)]
    got, got_grads = both(many, given, there)
    for a, b, kind in zip(want, got, spaces, strict=True):
        close(whole(split, b, kind), a, tolerance, "result")
    for (path, a), b, kind in zip(
        jax.tree_util.tree_leaves_with_path(want_grads),
        jax.tree.leaves(got_grads),
        jax.tree.leaves(kinds),
        strict=True,
    ):
        if a.dtype != jax.dtypes.float0:
            close(whole(split, b, kind), a, tolerance, f"gradient of {path}")


def both(function: Callable[[Tree], Any], arrays: Tree, cotangents: list[Any]) -> tuple[list[Any], Tree]:
    """Results, and gradients of their inner product with the cotangents; whole numbers have none."""

    def run(arrays: Tree) -> Any:
        results, pull = jax.vjp(lambda a: tuple(jax.tree.leaves(function(a))), arrays)
        given = tuple(
            c if jnp.issubdtype(y.dtype, jnp.inexact) else np.zeros(y.shape, jax.dtypes.float0)
            for c, y in zip(cotangents, results, strict=True)
        )
        grads = jax.tree.map(
            lambda g, a: g if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.zeros(a.shape), pull(given)[0], arrays
        )
        return list(results), grads

    return jax.jit(run)(arrays)


def close(got: Any, want: Any, tolerance: float, what: str) -> None:
    want = np.asarray(want, np.float64)
    scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0.0)))
    np.testing.assert_allclose(
        np.asarray(got, np.float64), want, rtol=tolerance, atol=tolerance * scale, err_msg=what, equal_nan=False
    )
