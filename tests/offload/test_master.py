"""Float32 copies of bfloat16 parameters in an optimizer's state."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax.offload import master_weights, stack_step

from .states import is_on_disk, is_on_host
from .test_layerwise import batch, body, embed, head, model

PARAMS = {"w": jnp.linspace(-3, 3, 96).reshape(8, 12).astype(jnp.bfloat16), "b": jnp.ones(5, jnp.bfloat16)}


def gradients(i):
    return jax.tree.map(lambda x: (jnp.sin(x.astype(jnp.float32) * (i + 1)) * 1e-2).astype(x.dtype), PARAMS)


def test_the_copies_are_those_of_float32_training():
    """Updates that bfloat16 cannot show add up."""
    tx, plain = master_weights(optax.adam(1e-4)), optax.adam(1e-4)
    params, wide = PARAMS, jax.tree.map(lambda x: x.astype(jnp.float32), PARAMS)
    state, held = tx.init(params), plain.init(wide)

    @functools.partial(jax.jit, static_argnums=0)
    def step(tx, grads, state, params):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(20):
        params, state = step(tx, gradients(i), state, params)
        wide, held = step(plain, jax.tree.map(lambda x: x.astype(jnp.float32), gradients(i)), held, wide)
    for key in PARAMS:
        np.testing.assert_array_equal(state.master[key], wide[key])
        assert params[key].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params[key], wide[key].astype(jnp.bfloat16))
    assert (params["w"] != PARAMS["w"]).any()


@pytest.mark.slow
@pytest.mark.parametrize("place", ["host", "disk"])
def test_in_a_step_layer_by_layer(place, tmp_path):
    def train(**how):
        outer, layers = model()
        layers = jax.tree.map(lambda x: x.astype(jnp.bfloat16), layers)
        tx = master_weights(optax.adamw(1e-2))
        step = stack_step(embed, narrow, head, tx, min_bytes=64, streams=True, clip_norm=0.5, **how)
        state = step.init(outer, layers)
        run, losses = step.jit(state), []
        for i in range(3):
            state, loss = run(state, batch(i))
            losses.append(float(loss))
        return losses, state

    def narrow(p, x):
        return body(jax.tree.map(lambda w: w.astype(jnp.float32), p), x)

    losses, state = train(moments=place, path=tmp_path if place == "disk" else None)
    assert losses == train(moments="device")[0] and losses[-1] < losses[0]
    master = state.layer_moments.master["w"]
    assert is_on_disk(master) if place == "disk" else is_on_host(master)
    np.testing.assert_array_equal(state.layers["w"], np.asarray(master).astype(jnp.bfloat16))


def test_bad_input():
    with pytest.raises(TypeError, match="`tx` must be an Optax transformation, got float"):
        master_weights(0.1)
    with pytest.raises(TypeError, match="`params` must be given to update, got None"):
        master_weights(optax.adam(1e-3)).update(gradients(0), master_weights(optax.adam(1e-3)).init(PARAMS))
