"""Which residuals are stored, in which form, and which are recomputed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback

from dejax.offload import ActivationStore, offload
from tests.offload.layers import TENSOR, operands


@pytest.fixture
def store():
    with ActivationStore() as store:
        yield store


def test_residuals_are_kept_before_they_are_broadcast(store):
    """A residual that is not stored is kept in its smallest form: here a row, not the broadcast matrix."""

    def fn(x):
        row = jnp.sin(x[0])
        return x * jnp.broadcast_to(row, x.shape)

    x = operands()[1]
    _, vjp = jax.vjp(lambda x: offload(fn, policy=[], min_bytes=1, inputs="none")(x), x)
    kept = sum(leaf.nbytes for leaf in jax.tree.leaves(vjp))
    assert kept < 1.5 * x.nbytes


def test_equal_tensors_views_and_parameters(store):
    """y is needed by three products, once as it is, once transposed, once cast; w and its transpose stay."""
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        y = jnp.sin(x @ w)
        wide = y.astype(jnp.bfloat16).astype(jnp.float32)
        return (y @ w.T) * (y.T @ y).sum() + wide * y

    want = jax.jit(jax.grad(lambda w, x: fn(w, x).sum(), argnums=(0, 1)))(w, x)
    got = jax.jit(jax.grad(lambda w, x: offload(fn, min_bytes=TENSOR // 2)(w, x).sum(), argnums=(0, 1)))(w, x)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    stats = store.stats()
    assert stats.stored_bytes <= 6 * TENSOR  # not w; y once, although six operations keep it or a view of it
    assert stats.live_count == 0


def test_names_and_functions_choose(store):
    w, x = operands()[0][0], operands()[1]

    def fn(w, x):
        return x + checkpoint_name(jax.nn.gelu(checkpoint_name(x @ w, "product")), "act") @ w.T

    def stored(**how):
        before = store.stats().stored_bytes
        jax.block_until_ready(jax.jit(jax.grad(lambda w: offload(fn, min_bytes=1, **how)(w, x).sum()))(w))
        return store.stats().stored_bytes - before

    assert stored(policy=["act"], inputs="none") == TENSOR
    with pytest.raises(ValueError, match="'no such name', which no tensor of"):
        stored(policy=["no such name"])
    assert stored(policy=lambda residual: residual.is_input) == TENSOR
    assert stored(policy=lambda residual: residual.is_input, inputs="none") == 0
    assert stored(policy=lambda residual: residual.is_input, inputs=(0, 1)) == 2 * TENSOR + WIDTH_EXTRA
    assert stored(policy=lambda residual: residual.shape == ()) < 64


WIDTH_EXTRA = 64 * 64 * 4 - TENSOR  # w is 64 x 64, x 32 x 64


def test_tensors_that_depend_on_no_argument_are_recomputed(store):
    x = operands()[1]
    seen = []

    @jax.jit  # as attention in jax.nn is
    def masked(x):
        return jnp.where(jnp.tril(jnp.ones((x.shape[0],) * 2, bool)), jnp.sin(x @ x.T), 0)

    def f(x):
        return masked(x) @ x + jax.nn.silu(x)

    def wanted(residual):
        seen.append(residual.dtype)
        return True

    got = jax.jit(jax.grad(lambda x: offload(f, policy=wanted, min_bytes=1)(x).sum()))(x)
    np.testing.assert_allclose(got, jax.jit(jax.grad(lambda x: f(x).sum()))(x), rtol=1e-5, atol=1e-5)
    assert set(seen) == {np.dtype("float32")} and store.stats().stored_count == store.stats().fetched_count > 0


def test_callbacks_are_not_repeated(store):
    """A callback depends on no argument, but would return another value the next time."""
    calls = []

    def number():
        calls.append(1)
        return np.full((64,), len(calls), np.float32)

    def scaled(x):
        return jnp.sin(x * io_callback(number, jax.ShapeDtypeStruct((64,), jnp.float32)))

    y, pull = jax.vjp(offload(scaled, min_bytes=0), jnp.ones((32, 64)))
    (gradient,) = pull(jnp.ones_like(y))
    assert len(calls) == 1
    np.testing.assert_allclose(gradient, np.cos(1.0) * np.ones((32, 64)), rtol=1e-6)


def test_residuals_that_backward_does_not_use_are_not_stored(store):
    x = operands()[1]

    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    f.defvjp(lambda x: (f(x), (jnp.cos(x), jnp.exp(x))), lambda kept, ct: (kept[0] * ct,))
    for run in jax.jit, lambda f: f:
        got = run(jax.grad(lambda x: offload(f, min_bytes=1)(x).sum()))(x)
        np.testing.assert_allclose(got, jnp.cos(x), rtol=1e-6)
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count == 2 and stats.live_count == 0
