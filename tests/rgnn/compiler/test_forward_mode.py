"""Forward mode: correct without the generated backward pass, otherwise an error that names the remedy."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options
from dejax.rgnn.compiler.reverse_only import ForwardModeError
from tests.cases import slow_but
from tests.rgnn.references import GRAPHS, Reference, graph_of
from tests.rgnn.test_operators import OPERATORS, arrays_of

GRAPH = graph_of("typical")
X = jnp.asarray(np.random.default_rng(0).normal(size=(GRAPH.num_nodes, 2)), jnp.float32)
W = jnp.asarray(np.random.default_rng(1).normal(size=(GRAPH.num_edge_types, 2, 3)), jnp.float32)
OPTIONS = {
    "xla": Options(backend="xla"),
    "pallas": Options(backend="pallas", interpret=True),
}


@rgnn.program
def layer(g: Any, x: Any, w: Any) -> Any:
    z = g.src(x) @ g.per_edge_type(w)
    return g.sum_to_dst(rgnn.edge_softmax(z) * z)


def loss(x: Any, w: Any, options: Options) -> Any:
    return (layer(GRAPH, x, w, options=options) ** 2).sum()


ASKED = {
    "jvp": lambda f: jax.jvp(f, (X,), (X,)),
    "jvp of jit": lambda f: jax.jvp(jax.jit(f), (X,), (X,)),
    "jit of jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,)))(X),
    "jacfwd": lambda f: jax.jacfwd(f)(X),
    "hessian": lambda f: jax.hessian(f)(X),
    "jacfwd of grad": lambda f: jax.jit(jax.jacfwd(jax.grad(f)))(X),
    "linearize": lambda f: jax.linearize(f, X)[1](X),
    "jvp of vmap": lambda f: jax.jvp(lambda x: jax.vmap(f)(x[None]), (X,), (X,)),
    "jvp of scan": lambda f: jax.jvp(
        lambda x: jax.lax.scan(lambda c, _: (c + f(c) * 1e-3, None), x, None, 2)[0], (X,), (X,)
    ),
    "jvp of checkpoint": lambda f: jax.jvp(jax.checkpoint(f), (X,), (X,)),
}


@pytest.mark.parametrize("backend", OPTIONS)
@pytest.mark.parametrize("asked", ASKED)
def test_the_error_names_the_remedy(asked: str, backend: str) -> None:
    if backend == "pallas" and asked not in ("jvp", "jvp of jit", "hessian"):
        pytest.skip("the same code on both backends")
    with pytest.raises(ForwardModeError, match=r"with_options\(disable=\('backward',\)\)") as raised:
        ASKED[asked](lambda x: loss(x, W, OPTIONS[backend]))
    assert isinstance(raised.value, rgnn.ProgramError) and isinstance(raised.value, TypeError)


@pytest.mark.parametrize("asked", slow_but(["jvp"], ASKED))
def test_the_remedy(asked: str) -> None:
    """The remedy gives the derivatives of reverse mode."""
    plain = Options(backend="xla", disable=("backward",))
    got = ASKED[asked](lambda x: loss(x, W, plain))
    grad = jax.grad(loss)(X, W, OPTIONS["xla"])
    if "jvp" in asked and "scan" not in asked:
        np.testing.assert_allclose(np.sum(got[1]), (grad * X).sum(), rtol=2e-3)
    elif asked in ("hessian", "jacfwd of grad"):
        want = jax.jacrev(jax.grad(loss))(X, W, OPTIONS["xla"])
        np.testing.assert_allclose(got, want, rtol=1e-2, atol=1e-2 * float(jnp.abs(want).max()))
    else:
        assert all(np.isfinite(y).all() for y in jax.tree.leaves(got))


def test_inputs_outside_of_the_program_are_differentiated() -> None:
    scale = lambda c: c * loss(X, W, OPTIONS["xla"])  # noqa: E731
    value, tangent = jax.jvp(scale, (2.0,), (1.0,))
    np.testing.assert_allclose(value, 2 * tangent, rtol=1e-6)


@pytest.mark.slow
def test_reverse_mode_still_composes() -> None:
    f = lambda x: loss(x, W, OPTIONS["xla"])  # noqa: E731
    grad = jax.grad(f)(X)
    for other in (
        jax.jit(jax.grad(f)),
        jax.grad(jax.jit(f)),
        jax.grad(jax.checkpoint(f)),
        lambda x: jax.vmap(jax.grad(f))(x[None])[0],
        lambda x: jax.vmap(jax.grad(jax.checkpoint(f)))(x[None])[0],
        jax.jit(lambda x: jax.grad(lambda x: jax.vmap(f)(x[None]).sum())(x)),
        jax.jacrev(f),
        lambda x: jax.grad(lambda x: jax.lax.cond(x.sum() < 1e9, f, lambda x: 0.0, x))(x),
        lambda x: jax.grad(lambda x: jax.lax.scan(lambda c, _: (c, f(x)), 0.0, None, 1)[1][0])(x),
    ):
        np.testing.assert_allclose(other(X), grad, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATORS)
def test_operators_in_forward_mode(name: str) -> None:
    """Without the generated backward pass every operator has a tangent.

    Integers are in range here: for others forward mode of `jax.numpy` is no transpose of its reverse mode.
    """
    arrays = arrays_of(GRAPHS["typical"])
    size = arrays["table"].shape[0]
    arrays["i_far"] = arrays["i_far"] % (2 * size) - size
    program = rgnn.program(OPERATORS[name].program)
    plain = Options(backend="xla", disable=("backward",))
    whole = {n: jnp.asarray(a) for n, a in arrays.items() if n.startswith("i_")}
    with jax.enable_x64(True):
        floats = {n: jnp.asarray(a) for n, a in arrays.items() if n not in whole}
        reference = lambda a: OPERATORS[name].reference(Reference(GRAPHS["typical"]), {**a, **whole})  # noqa: E731
        got = jax.jvp(lambda a: program(GRAPH, {**a, **whole}, options=plain), (floats,), (floats,))
        want = jax.jvp(reference, (floats,), (floats,))
        for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(g, w, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("generated", [False, True])
def test_rows_of_clipped_integers_have_neither_tangent_nor_gradient(generated: bool) -> None:
    """So forward mode is the transpose of reverse mode, which is that of `jax.numpy`."""
    rng, size = np.random.default_rng(2), 4
    ids = np.resize(np.arange(-2 * size, 2 * size), GRAPH.num_edges)
    inside = (ids >= -size) & (ids < size)
    assert not inside.all() and inside.any()
    program = rgnn.program(lambda g, table: g.shared(table)[g.edge(ids)])
    plain = Options(backend="xla", disable=("backward",))
    options = Options(backend="xla") if generated else plain
    with jax.enable_x64(True):
        table, tangent = rng.normal(size=(2, size, 3))
        cotangent = rng.normal(size=(len(ids), 3))
        value, moved = jax.jvp(lambda t: program(GRAPH, t, options=plain), (table,), (tangent,))
        (gradient,) = jax.vjp(lambda t: program(GRAPH, t, options=options), table)[1](cotangent)
        (of_jax,) = jax.vjp(lambda t: t[ids], table)[1](cotangent)
    wrapped = np.where(ids < 0, ids + size, ids)
    np.testing.assert_array_equal(value, table[np.clip(wrapped, 0, size - 1)])
    np.testing.assert_array_equal(moved, np.where(inside[:, None], tangent[wrapped % size], 0))
    np.testing.assert_allclose(np.vdot(moved, cotangent), np.vdot(tangent, gradient), rtol=1e-12)
    np.testing.assert_allclose(gradient, of_jax, rtol=1e-12, atol=1e-12)
