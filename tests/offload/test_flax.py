"""One line around a block, in nnx and linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import _native
from dejax.offload import ActivationStore
from dejax.offload import linen as offload_linen
from dejax.offload import nnx as offload_nnx

pytestmark = pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
X = jax.random.normal(jax.random.key(1), (16, 32))


class NnxBlock(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 64, rngs=rngs)
        self.down = nnx.Linear(64, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return x + self.down(self.dropout(jax.nn.gelu(self.up(self.norm(x)))))


def nnx_gradient(call):
    block = NnxBlock(nnx.Rngs(0))

    @nnx.jit
    def gradient(block, x):
        return nnx.grad(lambda block: (call(block, x) ** 2).mean())(block)

    return gradient(block, X), nnx.state(block, nnx.BatchStat, nnx.RngState)


def test_nnx():
    want, want_state = nnx_gradient(NnxBlock.__call__)
    with ActivationStore() as store:
        got, got_state = nnx_gradient(offload_nnx.offload(NnxBlock.__call__, min_bytes=1))
        jax.block_until_ready(jax.tree.leaves(got))
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0
    for a, b in zip(jax.tree.leaves((got, got_state)), jax.tree.leaves((want, want_state)), strict=True):
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


def test_nnx_scan():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def make(rngs):
        return nnx.Linear(32, 32, rngs=rngs)

    def gradient(call):
        layers = make(nnx.Rngs(0))

        @nnx.jit
        def run(layers, x):
            def loss(layers):
                @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
                def stack(layer, x):
                    return jnp.tanh(call(layer, x))

                return (stack(layers, x) ** 2).mean()

            return nnx.grad(loss)(layers)

        return run(layers, X)

    want = gradient(nnx.Linear.__call__)
    with ActivationStore() as store:
        got = gradient(offload_nnx.offload(nnx.Linear.__call__, min_bytes=1))
        jax.block_until_ready(jax.tree.leaves(got))
        assert store.stats().stored_count == store.stats().fetched_count >= 3
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.Dense(32)(jax.nn.gelu(nn.Dense(64)(nn.LayerNorm()(x))))


def test_linen():
    class Model(nn.Module):
        block: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            for i in range(2):
                x = self.block(name=f"block{i}")(x)
            return x

    plain, offloaded = Model(LinenBlock), Model(offload_linen.offload(LinenBlock, min_bytes=1))
    variables = plain.init(jax.random.key(0), X)

    def gradient(model):
        return jax.jit(jax.grad(lambda v: (model.apply(v, X) ** 2).mean()))(variables)

    want = gradient(plain)
    with ActivationStore() as store:
        assert jax.tree.structure(offloaded.init(jax.random.key(0), X)) == jax.tree.structure(variables)
        got = jax.block_until_ready(gradient(offloaded))
        assert store.stats().stored_count == store.stats().fetched_count > 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
