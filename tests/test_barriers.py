"""Barriers: each result of one is used. XLA drops the others, and what they should wait for with them."""

import ast
from pathlib import Path

import jax
import jax.numpy as jnp

import dejax

HOUSE = Path(dejax.__file__).parent


def is_barrier(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "optimization_barrier"


def unused_results(tree: ast.Module) -> list[int]:
    """Lines of barriers of which only some results get a name."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and is_barrier(node.value):
            found.append(node.lineno)
        if isinstance(node, ast.Assign) and is_barrier(node.value):
            names = [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            found += [node.lineno for name in names if name.startswith("_")]
    return found


def test_every_result_of_a_barrier_has_a_name() -> None:
    for text in ("x = jax.lax.optimization_barrier((x, y))[1]", "x, _ = jax.lax.optimization_barrier((x, y))"):
        assert unused_results(ast.parse(text)) == [1]
    files = sorted(HOUSE.rglob("*.py"))
    assert len(files) > 100
    assert {str(f): lines for f in files if (lines := unused_results(ast.parse(f.read_text(encoding="utf-8"))))} == {}


def test_xla_drops_what_an_unused_result_waits_for() -> None:
    """The reason; should it fail one day, barriers hold what they are given."""

    def late(x: jax.Array, y: jax.Array) -> jax.Array:
        return jax.lax.optimization_barrier((jnp.linalg.cholesky(x), y))[1]

    text = jax.jit(late).lower(jnp.eye(4), jnp.ones(3)).compile().as_text()
    assert "custom-call" not in text and "opt-barrier" not in text
