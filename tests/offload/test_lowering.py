"""Programs for a GPU, lowered without one: barriers keep slices apart from FFI calls.

XLA on GPUs folds slices whose size is a multiple of 128 bytes into FFI calls that take or return them. In jax 0.11 a
call could then run twice.
"""

import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest

from dejax.offload import offload, optimizer, stack_step
from tests.barriers import without_barrier

W = jax.ShapeDtypeStruct((64, 64), jnp.float32)
XS = jax.ShapeDtypeStruct((3, 32, 64), jnp.float32)
WS = jax.ShapeDtypeStruct((3, 64, 64), jnp.float32)
kept = functools.partial(offload, min_bytes=1, inputs="all")


def lowered(function, *args, **options):
    return jax.jit(function, **options).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


@jax.custom_vjp
def residuals_are_gradients(a, x):
    return (x @ a).sum()


residuals_are_gradients.defvjp(
    lambda a, x: (residuals_are_gradients(a, x), (a, x)), lambda kept, ct: (kept[0], ct * kept[1] + kept[1] @ kept[0])
)


def sum_of(body):
    return lambda *xs: jax.lax.scan(lambda c, x: (c + body(*x), None), 0.0, xs)[0]


PROGRAMS = {
    "inputs that are slices": (sum_of(kept(lambda w, x: jnp.tanh(x @ w).sum())), WS, XS),
    "of a constant": (lambda ws, xs: kept(lambda w, x: jnp.tanh(x @ w).sum())(ws[1], xs[2]), WS, XS),
    "a slice inside": (sum_of(kept(lambda w, x: (jnp.sin(x)[:16] @ jnp.sin(w)).sum())), WS, XS),
    "fetched into a stack": (sum_of(kept(residuals_are_gradients)), WS, XS),
    "vmap": (lambda w, xs: jax.vmap(kept(lambda w, x: jnp.sin(x @ w).sum()), (None, 0))(w, xs).sum(), W, XS),
    "vmap of all": (lambda ws, xs: jax.vmap(kept(residuals_are_gradients))(ws, xs).sum(), WS, XS),
    "masks": (sum_of(kept(lambda x, m: jnp.where(m @ m.T > 0, x, 0).sum())), WS, WS),
    "masks under vmap": (
        lambda xs, ms: jax.vmap(kept(lambda x, m: jnp.where(m > 0, x, 0)))(xs, ms).sum(),
        XS,
        jax.ShapeDtypeStruct(XS.shape, jnp.int32),
    ),
    "checkpoint": (sum_of(jax.checkpoint(kept(lambda w, x: jnp.tanh(jnp.sin(x) @ w).sum()))), WS, XS),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_slices_are_kept_apart_from_stores_and_fetches(name):
    function, *args = PROGRAMS[name]
    differentiable = tuple(i for i, x in enumerate(args) if x.dtype == jnp.float32)
    text = lowered(jax.grad(function, argnums=differentiable), *args)
    assert "@dejax_offload_store" in text and "@dejax_offload_fetch" in text
    assert "@dejax_offload_guard" not in text  # for several devices alone
    assert without_barrier(text) == []


def test_slices_are_kept_apart_from_pieces_of_state():
    """The state's new values are slices of the gradient, and the updates are rows of a stack."""
    previous = optax.GradientTransformation(
        lambda params: jax.tree.map(jnp.zeros_like, params), lambda updates, state, params=None: (state, updates)
    )
    tx = optimizer(previous, min_bytes=1, streams=True, piece_bytes=16 * 64 * 4)
    state = jax.core.ShapedArray((64, 64), jnp.dtype("float32"), memory_space=jax.memory.Space.Host)
    text = lowered(lambda g, s: tx.update(g[1], s), WS, state, donate_argnums=1)
    assert text.count("@dejax_offload_pieces") == 9
    assert without_barrier(text, whole=("64x64xf32",)) == []
    assert "tf.aliasing_output" in text
    assert len(re.findall(r"@dejax_offload_pieces.*output_operand_alias", text)) == 9
    # A piece that is a leaf of its own.
    tx = optimizer(previous, min_bytes=1, streams=True)
    text = lowered(lambda g, s: tx.update(g[1].astype(jnp.bfloat16).astype(jnp.float32), s), WS, state)
    assert re.search(r"optimization_barrier %\w+ : tensor<64x64xf32>", text)


def test_a_first_state_and_its_update_in_one_program():
    """Both moments are zeros. XLA for a GPU would make one array of them, and refuses to overwrite an operand twice."""
    tx = optimizer(optax.adam(1e-2), min_bytes=1, streams=True)
    step = stack_step(
        lambda outer, x: x * outer, lambda w, x: x @ w, lambda outer, x, batch: x.mean(), optax.adam(1e-2),
        min_bytes=1, streams=True,
    )  # fmt: skip
    for function, args in (
        (lambda g: tx.update(g, tx.init(g), g), (W,)),
        (lambda ws, x: step(step.init(jnp.ones(()), ws), x), (WS, W)),
    ):
        text = lowered(function, *args)
        (begin,) = (line for line in text.splitlines() if "mode = 1 : i64" in line)
        operands = re.findall(r"%\w+(?:#\d+)?", begin.split(" = ", 1)[1].split("{")[0])
        made = {x.split("#")[0] for x in operands}
        assert len(operands) == len(set(operands)) > 1 and len(made) == 1
        assert f"{made.pop()}:{len(operands)} = stablehlo.optimization_barrier" in text
