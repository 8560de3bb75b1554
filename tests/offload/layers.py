"""A small stack of layers for the tests of offload, and faults to inject."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dejax import _native
from dejax.offload import offload

LAYERS, BATCH, WIDTH = 4, 32, 64
TENSOR = BATCH * WIDTH * 4  # bytes of one activation in float32: two pages


def layer(w, x):
    return x + 0.1 * (jax.nn.gelu(x @ w) @ w.T)


def stack(body, ws, x, scan=True):
    if scan:
        return jax.lax.scan(lambda c, w: (body(w, c), None), x, ws)[0]
    for i in range(ws.shape[0]):
        x = body(ws[i], x)
    return x


def loss_of(body, scan=True):
    return lambda ws, x: (stack(body, ws, x, scan).astype(jnp.float32) ** 2).mean()


@functools.cache
def operands(dtype=jnp.float32, layers=LAYERS):
    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = jax.random.normal(key_w, (layers, WIDTH, WIDTH)) / WIDTH**0.5
    return ws.astype(dtype), jax.random.normal(key_x, (BATCH, WIDTH)).astype(dtype)


offloaded = offload(layer, min_bytes=1)
offloaded_inputs = offload(jax.checkpoint(layer), min_bytes=1)


@functools.cache
def step(kind="inputs", scan=True):
    """A jitted gradient that the tests share. It uses the store that is current when it runs."""
    body = {"plain": layer, "checkpoint": jax.checkpoint(layer), "all": offloaded, "inputs": offloaded_inputs}[kind]
    return jax.jit(jax.grad(loss_of(body, scan), argnums=(0, 1)))


def interceptor(store):
    """Makes operations of a store fail or slow down: native/testing/interceptor.h."""
    return _native.extension("tests").offload_testing.Interceptor(store._native)


def assert_same_bits(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def assert_close(got, want, rtol=2e-6):
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())


# Two programs are compiled apart. On a GPU, fusions, and so roundings, differ between them.
assert_same = assert_close if jax.default_backend() == "gpu" else assert_same_bits
