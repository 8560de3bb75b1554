"""`region`: every layer of a model is offloaded; and offloaded layers in every kind of program."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import _compat
from dejax.offload import ActivationStore, offload, region
from dejax.offload import linen as offload_linen
from dejax.offload import nnx as offload_nnx
from tests.cases import slow_but
from tests.offload.layers import (
    LAYERS,
    TENSOR,
    assert_close,
    assert_same,
    layer,
    loss_of,
    operands,
)

WIDTH = 32
kept = functools.partial(region, min_bytes=1)


def gradients_agree(fn, args, wraps, stored=None, run=None):
    """The gradients of `fn` with each wrapping are those without, or those of `run`."""
    want = (run or jax.jit(jax.grad(fn)))(*args)
    with ActivationStore(host_bytes=1 << 24) as store:
        for run in wraps:
            assert_same(jax.tree.leaves(run(*args)), jax.tree.leaves(want))
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0
    assert stored is None or stats.stored_count == stored
    return stats


@pytest.mark.parametrize(
    ("jitted", "scan"),
    [
        (True, True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, False), (False, True), (False, False)]),
    ],
)
def test_what_the_layers_keep_is_stored(scan, jitted):
    loss = loss_of(layer, scan)
    fn = jax.jit(loss) if jitted else loss
    stats = gradients_agree(fn, operands(), [jax.jit(jax.grad(kept(fn)))])
    # Outside of jit operators run one by one, which rounds otherwise.
    gradients_agree(fn, operands(), [jax.grad(kept(fn))], run=jax.grad(kept(fn, store="device")))
    assert stats.stored_bytes >= LAYERS * 5 * TENSOR
    # The bodies of the scan are offloaded one by one: no stack of all layers' tensors ever exists on the device.
    if scan:
        assert stats.stored_count > LAYERS * 5


def test_tensors_come_back_one_by_one():
    """A fetch waits for what backward has computed before: XLA cannot bring all back as backward begins."""
    ws, x = operands()
    text = jax.jit(jax.grad(kept(loss_of(layer, scan=False)))).lower(ws, x).as_text()
    waits = [line.split("(", 1)[1].split(")")[0].split(",")[1].strip()
             for line in text.splitlines() if "@dejax_offload_fetch" in line]  # fmt: skip
    assert len(waits) > LAYERS and len(set(waits)) > len(waits) / 2


@pytest.mark.slow
def test_loops_in_loops_policies_and_masks():
    def inner(w, x):
        return jax.lax.scan(lambda x, _: (jnp.where(x > 0, jnp.tanh(x @ w), 0.1 * x), x.sum()), x, None, length=2)

    def loss(ws, x):
        x, sums = jax.lax.scan(lambda x, w: inner(w, x), x, ws, reverse=True)
        return (x**2).sum() + jnp.sin(sums).sum()

    gradients_agree(loss, operands(), [jax.jit(jax.grad(kept(loss)))])
    floats = kept(loss, policy=lambda residual: residual.dtype == jnp.float32)
    gradients_agree(loss, operands(), [jax.jit(jax.grad(floats))])


@pytest.mark.slow
def test_static_and_keyword_arguments_and_closures():
    ws, x = operands()

    def loss(ws, kind, x, *, power, scale=1.0):
        act = {"tanh": jnp.tanh, "sin": jnp.sin}[kind]
        return (scale * jax.lax.scan(lambda c, w: (act(c @ w) + x, None), x, ws)[0] ** power).sum()

    wrapped = kept(loss, static_argnums=1, static_argnames="power")
    for kind, options in (("tanh", {"power": 2}), ("sin", {"power": 3, "scale": jnp.float32(2)})):
        want = jax.grad(lambda ws, kind=kind, options=options: loss(ws, kind, x, **options))
        got = jax.grad(lambda ws, kind=kind, options=options: wrapped(ws, kind, x, **options))
        with ActivationStore(host_bytes=1 << 24):
            np.testing.assert_allclose(jax.jit(got)(ws), jax.jit(want)(ws), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_random_keys_in_every_place_of_a_loop():
    """Keys have cotangents without values; those of a scan's slices were traced."""
    ws, x = operands()
    keys = jax.random.split(jax.random.key(3), LAYERS)

    def dropped(key, x):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), jnp.tanh(x), 0)

    def sliced(ws, x, keys):
        return (jax.lax.scan(lambda x, at: (dropped(at[1], x @ at[0]), None), x, (ws, keys))[0] ** 2).sum()

    def carried(ws, x, keys):
        def body(carry, w):
            x, key = carry
            key, now = jax.random.split(key)
            return (dropped(jax.random.fold_in(keys[0], 1), dropped(now, x @ w)), key), None

        return (jax.lax.scan(body, (x, keys[1]), ws)[0][0] ** 2).sum()

    for loss in (sliced, carried):
        want = jax.jit(jax.grad(loss))(ws, x, keys)
        with ActivationStore(host_bytes=1 << 24) as store:
            for run in (jax.jit(jax.grad(kept(loss))), jax.grad(kept(loss))):
                np.testing.assert_allclose(run(ws, x, keys), want, rtol=1e-5, atol=1e-5)
            assert store.stats().fetched_count > 0


def test_second_derivatives_and_forward_mode_are_errors():
    ws, x = operands()
    wrapped = kept(loss_of(layer))
    with ActivationStore(host_bytes=1 << 24), pytest.raises(NotImplementedError, match="offload"):
        jax.grad(lambda ws: (jax.grad(wrapped)(ws, x) ** 2).sum())(ws)
    with ActivationStore(host_bytes=1 << 24), pytest.raises(NotImplementedError, match="forward mode"):
        jax.jvp(lambda ws: wrapped(ws, x), (ws,), (ws,))


# ------------------------------------------------------- every kind of module, checkpoint, loop and transformation


class NnxLayer(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(x)))


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(WIDTH)(jax.nn.gelu(nn.Dense(2 * WIDTH)(x)))


def plain_layer(remat, wrap):
    def fn(params, x):
        return x + jax.nn.gelu(x @ params["up"]) @ params["down"]

    fn = jax.checkpoint(fn) if remat == "inside" else fn
    fn = offload(fn, min_bytes=1) if wrap else fn
    return jax.checkpoint(fn) if remat == "outside" else fn


def linen_layer(remat, wrap):
    module = nn.remat(LinenLayer) if remat == "inside" else LinenLayer
    module = offload_linen.offload(module, min_bytes=1) if wrap else module
    module = nn.remat(module) if remat == "outside" else module
    return lambda params, x: module().apply({"params": params}, x)


def nnx_layer(remat, wrap):
    call = nnx.remat(NnxLayer.__call__) if remat == "inside" else NnxLayer.__call__
    call = offload_nnx.offload(call, min_bytes=1) if wrap else call
    call = nnx.remat(call) if remat == "outside" else call
    graph = nnx.graphdef(NnxLayer(nnx.Rngs(0)))
    return lambda state, x: call(nnx.merge(graph, state), x)


def params_of(kind):
    keys = jax.random.split(jax.random.key(0), 2)
    if kind == "plain":
        return {"up": jax.random.normal(keys[0], (WIDTH, 64)) / 6, "down": jax.random.normal(keys[1], (64, WIDTH)) / 8}
    if kind == "linen":
        return LinenLayer().init(keys[0], jnp.ones((1, WIDTH)))["params"]
    return nnx.state(NnxLayer(nnx.Rngs(0)))


LAYER_OF = {"plain": plain_layer, "linen": linen_layer, "nnx": nnx_layer}


def program(kind, remat, scan, how, wrap):
    body = LAYER_OF[kind](remat, wrap)

    def loss(stack, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, params: (body(params, x), None), x, stack)
        else:
            for i in range(2):
                x = body(jax.tree.map(lambda leaf, i=i: leaf[i], stack), x)
        return (x**2).mean()

    if how == "grad of jit":
        return jax.grad(jax.jit(loss))
    if how == "vmap":
        return jax.jit(jax.grad(lambda stack, x: jax.vmap(loss, (None, 0))(stack, x.reshape(2, 4, WIDTH)).sum()))
    return jax.jit(jax.grad(loss))


QUICK = [("linen", "outside", True, "jit"), ("nnx", None, False, "grad of jit")]
PRODUCT = itertools.product(LAYER_OF, (None, "inside", "outside"), (True, False), ("jit", "grad of jit", "vmap"))


@pytest.mark.parametrize(
    ("kind", "remat", "scan", "how"),
    slow_but(QUICK, PRODUCT),
)
def test_every_kind_of_program(kind, remat, scan, how):
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, 0.9 * leaf]), params_of(kind))
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))
    want = jax.tree.leaves(program(kind, remat, scan, how, wrap=False)(stack, x))
    with ActivationStore(host_bytes=1 << 24) as store:
        got = jax.block_until_ready(jax.tree.leaves(program(kind, remat, scan, how, wrap=True)(stack, x)))
        assert store.stats().stored_count >= store.stats().fetched_count > 0
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-6 * np.abs(b).max())


@pytest.mark.parametrize("kind", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_region_around_a_model_of_flax(kind):
    body, params = LAYER_OF[kind](None, False), params_of(kind)
    x = jax.random.normal(jax.random.key(1), (8, WIDTH))

    def loss(params, x):
        return (body(params, body(params, x)) ** 2).mean()

    gradients_agree(loss, (params, x), [jax.jit(jax.grad(kept(loss)))])


def test_a_tensor_that_several_layers_use_is_stored_once():
    """Queries, keys and values of one input: each call of `offload` stores its input, a region stores it once."""
    ws, x = operands()
    ws = list(ws)  # matrices that are slices would be computed in the region, and so be stored, too
    project = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))

    def loss(ws, x, project=project):
        x = jnp.sin(x)
        return sum((project(w, x) ** 2).sum() for w in ws)

    one = functools.partial(loss, project=offload(project, min_bytes=1))
    want = jax.jit(jax.grad(loss))(ws, x)
    # XLA of jax 0.10 fuses across barriers on the CPU, and then rounds otherwise.
    close = assert_same if _compat.JAX_VERSION >= (0, 11) else assert_close
    for fn, stored in ((one, LAYERS), (kept(loss), 1 + LAYERS)):  # a region stores each tanh, too, for the square
        with ActivationStore(host_bytes=1 << 24) as store:
            close(jax.jit(jax.grad(fn))(ws, x), want)
            assert store.stats().stored_count == store.stats().fetched_count == stored
