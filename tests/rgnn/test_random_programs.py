"""Random programs: whatever backend and whichever passes, the numbers are those of plain XLA with every pass off."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st

from dejax.rgnn import Options, RelGraph
from dejax.rgnn.passes import PASSES
from tests.rgnn.contract import error
from tests.rgnn.random_programs import Recipe, recipes
from tests.rgnn.strategies import CHUNK, EdgeList, edge_lists

PLAIN = Options(backend="xla", disable=PASSES, precision="f32")
PASS_SUBSETS = st.one_of(st.just(()), st.lists(st.sampled_from(PASSES), unique=True).map(lambda p: tuple(sorted(p))))


def run(program: Any, graph: RelGraph, arrays: list[Any], options: Options) -> tuple[tuple, tuple, Any]:
    """(results without gradients, results with gradients, gradients)."""

    def all_of(graph: RelGraph, arrays: list[Any]) -> tuple[tuple, tuple, Any]:
        results, pull = jax.vjp(lambda a: program(graph, a, options=options), arrays)
        # Cotangents of many signs and sizes, without another random array.
        cotangents = tuple(jnp.cos(jnp.arange(y.size, dtype=y.dtype) * 1.7).reshape(y.shape) for y in results)
        return program(graph, arrays, options=options), results, pull(cotangents)[0]

    return jax.jit(all_of)(graph, arrays)


def assert_same(got: Any, want: Any, tolerance: float) -> None:
    for (path, w), g in zip(jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), strict=True):
        found = error(g, np.asarray(w, np.float64))
        assert found < tolerance, f"relative error {found:.1e} at {jax.tree_util.keystr(path)}"


def compare(recipe: Recipe, edges: EdgeList, options: Options, dtype: str, tolerance: float) -> None:
    note(f"{options}\n{edges}")
    graph, program = edges.build(hub_chunk=CHUNK), recipe.program()
    with jax.enable_x64(True):
        want = run(program, graph, [jnp.asarray(a) for a in recipe.arrays(edges)], PLAIN)
    with jax.enable_x64(dtype == "float64"):
        got = run(program, graph, [jnp.asarray(a, dtype) for a in recipe.arrays(edges)], options)
    assert_same(got, want, tolerance)


@settings(max_examples=12)
@given(recipe=recipes(), edges=edge_lists(), disable=PASS_SUBSETS)
def test_xla_with_any_passes(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
    compare(recipe, edges, Options(backend="xla", disable=disable), "float64", 1e-10)


@pytest.mark.slow
@settings(max_examples=100)
@given(recipe=recipes(), edges=edge_lists(), disable=PASS_SUBSETS)
def test_xla_with_any_passes_many(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
    compare(recipe, edges, Options(backend="xla", disable=disable), "float64", 1e-10)


@settings(max_examples=3)
@given(recipe=recipes(max_steps=8), edges=edge_lists(), disable=PASS_SUBSETS)
def test_kernels_with_any_passes(recipe: Recipe, edges: EdgeList, disable: tuple[str, ...]) -> None:
    options = Options(backend="pallas", precision="f32", disable=disable, interpret=True)
    compare(recipe, edges, options, "float32", 1e-3)


@settings(max_examples=8)
@given(recipe=recipes(max_steps=6), edges=edge_lists(max_edges=12))
def test_gradients_of_gradients(recipe: Recipe, edges: EdgeList) -> None:
    """The gradient of the squares of a gradient, by the compiler's backward of its backward and by JAX's autodiff."""
    graph, program = edges.build(hub_chunk=CHUNK), recipe.program()

    def twice(options: Options) -> Any:
        def penalty(arrays: list[Any]) -> Any:
            inner = jax.grad(lambda a: sum(jnp.sum(jnp.sin(y)) for y in program(graph, a, options=options)))(arrays)
            return sum(jnp.sum(g**2) for g in inner)

        return jax.jit(jax.grad(penalty))([jnp.asarray(a) for a in recipe.arrays(edges)])

    with jax.enable_x64(True):
        assert_same(twice(Options(backend="xla")), twice(PLAIN), 1e-8)
