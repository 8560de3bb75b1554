"""A step layer by layer whose gradients are added from many parts, overflow, or are scaled."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax import _native
from dejax.distributed import Part, data_parallel
from dejax.offload import stack_step
from tests.cases import slow_but
from tests.offload.test_layerwise import batch, body, embed, head, model

pytestmark = pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
LIMIT, STEPS = 0.05, 4


def boosted(outer, x, batch):
    return head(outer, x, batch) * batch["boost"]


def batches():
    """The second one makes a loss that is not finite."""
    return [batch(i) | {"boost": jnp.float32(np.inf if i == 1 else 1)} for i in range(STEPS)]


@functools.cache
def wanted(limit):
    """Parameters of the whole model that Optax trains with `apply_if_finite`."""
    params = model()
    clip = optax.identity() if limit is None else optax.clip_by_global_norm(limit)
    tx = optax.apply_if_finite(optax.chain(clip, optax.adamw(1e-2)), 10)

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, p: (body(p, x), None), embed(params[0], batch), params[1])
        return boosted(params[0], x, batch)

    @jax.jit
    def step(params, state, batch):
        updates, state = tx.update(jax.grad(loss)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for each in batches():
        params, state = step(params, state, each)
    assert state.total_notfinite == 1
    return params


HOW = {
    "freed": {"loss_scale": 2.0**15},
    "kept": {"params": "host", "clip_norm": LIMIT, "gradients": "host", "loss_scale": 2.0**15},
    "on disk": {"clip_norm": LIMIT},
}


@pytest.mark.parametrize("name", slow_but(["kept"], HOW))
def test_a_step_that_is_not_finite_is_skipped(name, tmp_path):
    how = HOW[name] | ({"path": tmp_path} if name == "on disk" else {})
    step = stack_step(embed, body, boosted, optax.adamw(1e-2), min_bytes=100, streams=True, **how)
    state = step.init(*model())
    run = step.jit(state)
    for i, each in enumerate(batches()):
        state, loss = run(state, each)
        assert np.isfinite(loss) == (i != 1) and int(state.skipped) == (i >= 1)
        if "loss_scale" in how:
            assert float(state.scale) == 2.0 ** (15 if i == 0 else 14) and int(state.healthy) == (1, 0, 1, 2)[i]
    for a, b in zip(
        jax.tree.leaves((state.outer, state.layers)), jax.tree.leaves(wanted(how.get("clip_norm"))), strict=True
    ):
        np.testing.assert_allclose(a, b, atol=3e-4)
    assert "clip_norm" not in how or 0 < float(state.norm) < np.inf


def test_a_step_after_an_overflow_is_a_step():
    """With freed gradients, the norm that limits a step is that of the last one whose gradients were finite."""
    step = stack_step(
        embed, body, boosted, optax.sgd(1.0), min_bytes=100, moments="device", clip_norm=LIMIT, gradients="freed"
    )
    state = step.init(*model())
    run, norms = step.jit(state), []
    for each in batches():
        before = np.asarray(state.layers["w"])
        state, _ = run(state, each)
        change = np.abs(np.asarray(state.layers["w"]) - before).max((1, 2))
        norms.append(float(state.norm))
        assert (change > 0).all() if np.isfinite(each["boost"]) else (change == 0).all()
    assert norms[1] == norms[0] and np.isfinite(norms).all()


def test_the_scale_of_the_loss_keeps_small_gradients():
    """Gradients of float16 below 6e-8 would be 0. After many steps without an overflow the factor doubles."""
    step = stack_step(
        lambda outer, x: x, lambda w, x: x * w, lambda outer, x, batch: x.astype(jnp.float32).mean() * 1e-9,
        optax.trace(0.0), moments="device", loss_scale=2.0**12,
    )  # fmt: skip
    state = step.init({}, jnp.ones((2, 4), jnp.float16))
    new, loss = jax.jit(step)(state._replace(healthy=jnp.int32(1999)), jnp.ones((4,), jnp.float16))
    assert (float(new.scale), int(new.healthy)) == (2.0**13, 0) and loss == np.float32(1e-9)
    with pytest.raises(ValueError, match="`loss_scale` must be at least 1 or None, got 0"):
        stack_step(embed, body, head, optax.sgd(1.0), loss_scale=0)


def test_many_parts_are_added_in_float32():
    parts, width = 256, 8
    rng = np.random.default_rng(0)
    narrow = lambda *shape: jnp.asarray(rng.normal(size=shape) / 4, jnp.bfloat16)  # noqa: E731
    outer, layers = {"in": narrow(width, width), "out": narrow(width)}, narrow(2, width, width)
    xs = jnp.asarray(rng.normal(size=(parts, width)) + 1, jnp.float32)
    wide = functools.partial(jax.tree.map, lambda x: x.astype(jnp.float32))
    first, layer = lambda o, x: x @ wide(o["in"]), lambda w, x: x + jnp.tanh(x @ wide(w))
    last = lambda o, x, _: (x @ wide(o["out"])).mean()  # noqa: E731

    def loss(params):
        x = first(params[0], xs)
        for i in range(2):
            x = layer(params[1][i], x)
        return last(params[0], x, None)

    exact = jax.jit(jax.grad(loss))(wide((outer, layers)))
    step = stack_step(first, layer, last, optax.trace(0.0), moments="device", microbatches=parts)
    state, _ = jax.jit(step)(step.init(outer, layers), xs)
    found = (state.outer_moments.trace, state.layer_moments.trace)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(exact), strict=True):
        assert a.dtype == jnp.bfloat16
        assert np.linalg.norm(np.asarray(a, np.float32) - b) < 4e-3 * np.linalg.norm(b)
    # The same of the other place that adds gradients.
    values = jnp.asarray(1 + rng.random((parts, 1)), jnp.bfloat16)
    mean = np.asarray(values, np.float32).mean()
    step = data_parallel(
        lambda state, key, x, data: Part(x.sum(), x.sum(), weight=3), lambda state, mean: mean.gradients, parts=parts
    )
    found, _ = step(jnp.zeros((), jnp.bfloat16), jax.random.key(0), values[:, 0], None)
    np.testing.assert_allclose(np.float32(found), mean, rtol=4e-3)
