"""Optimizer state on the host: the numbers of the transformation itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dejax.offload import optimizer

PARAMS = {"a": jnp.linspace(-1, 1, 4096).reshape(64, 64), "b": {"c": jnp.ones(64), "d": jnp.full((32, 64), 0.5)}}


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-2),
        optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
        optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
        optax.sgd(1e-2, momentum=0.9, nesterov=True),
        optax.lion(1e-3),
        optax.adafactor(1e-2),
    ],
    ids=["adam", "adamw", "clipped", "momentum", "lion", "adafactor"],
)
def test_same_bits_as_the_transformation_itself(tx):
    far = optimizer(tx, min_bytes=1024)

    def run(tx):
        @jax.jit
        def step(params, state):
            grads = jax.grad(lambda p: sum((jnp.sin(x) * x).sum() for x in jax.tree.leaves(p)))(params)
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        params, state = PARAMS, tx.init(PARAMS)
        for _ in range(4):
            params, state = step(params, state)
        return params, state

    (want, want_state), (got, got_state) = run(tx), run(far)
    assert jax.tree.structure(got_state) == jax.tree.structure(want_state)
    for a, b in zip(jax.tree.leaves((got, got_state)), jax.tree.leaves((want, want_state)), strict=True):
        np.testing.assert_array_equal(a, b)
    large = [x for x in jax.tree.leaves(got_state) if x.nbytes >= 1024]
    assert all(x.sharding.memory_kind == "pinned_host" for x in large)
    assert all(x.sharding.memory_kind != "pinned_host" for x in jax.tree.leaves(got_state) if x.nbytes < 1024)


def test_donated_state():
    tx = optimizer(optax.adam(1e-2), min_bytes=1024)
    state = tx.init(PARAMS)
    where = jax.tree.map(lambda x: x.sharding, (PARAMS, state))

    @functools.partial(jax.jit, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)
    def step(params, state):
        updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
        return optax.apply_updates(params, updates), state

    params = jax.tree.map(jnp.copy, PARAMS)
    for _ in range(3):
        params, state = step(params, state)
    assert np.isfinite(np.asarray(params["a"])).all()


def test_in_an_nnx_optimizer():
    def run(tx):
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        state = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, state):
            state.update(model, nnx.grad(lambda m: (m(jnp.ones((2, 64))) ** 2).sum())(model))

        for _ in range(3):
            step(model, state)
        return nnx.state(model, nnx.Param)

    got, want = run(optimizer(optax.adam(1e-2), min_bytes=1)), run(optax.adam(1e-2))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_no_transformation():
    with pytest.raises(TypeError, match="`tx` is an Optax transformation; float was given"):
        optimizer(0.1)
