"""Forward mode and second derivatives are errors that name the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import ActivationStore, offload
from tests.offload.layers import loss_of, offloaded, operands


@pytest.fixture
def store():
    with ActivationStore() as store:
        yield store


@pytest.mark.parametrize("transform", [jax.hessian, lambda f: jax.jacfwd(jax.grad(f))])
def test_second_derivatives_are_an_error_at_trace_time(store, transform):
    w, x = operands()[0][0], operands()[1]
    with pytest.raises((NotImplementedError, ValueError), match="offload"):
        jax.make_jaxpr(transform(lambda x: offloaded(w, x).sum()))(x)


@pytest.mark.parametrize("run", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit], ids=["eager", "jit"])
def test_forward_mode_names_the_remedy(store, run):
    ws, x = operands()
    sine = offload(jnp.sin, min_bytes=1, inputs="all")

    def loop(x):
        return jax.lax.while_loop(lambda c: c[1] < 3, lambda c: (sine(c[0]), c[1] + 1), (x, 0))[0]

    for forward in (
        lambda x: jax.jvp(sine, (x,), (x,)),
        lambda x: jax.jvp(loss_of(offloaded), (ws, x), (ws, x)),
        lambda x: jax.jvp(loop, (x,), (x,)),
        lambda x: jax.jacfwd(sine)(x),
        lambda x: jax.vmap(lambda x: jax.jvp(sine, (x,), (x,))[1])(x),
        lambda x: jax.linearize(sine, x)[1](x),
        lambda x: jax.jvp(jax.checkpoint(sine), (x,), (x,)),
    ):
        with pytest.raises(NotImplementedError, match="offload: forward mode .* take jax.checkpoint"):
            jax.block_until_ready(run(forward)(x))
    fixed = run(jax.grad(lambda x: jax.lax.fori_loop(0, 3, lambda _, c: sine(c), x).sum()))(x)
    plain = jax.grad(lambda x: jnp.sin(jnp.sin(jnp.sin(x))).sum())(x)
    np.testing.assert_allclose(fixed, plain, rtol=1e-5, atol=1e-6)
