"""One line around a block, in nnx and linen."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.offload import ActivationStore
from dejax.offload import linen as offload_linen
from dejax.offload import nnx as offload_nnx

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


@pytest.mark.slow
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


@pytest.mark.slow  # test_region.py has a layer of linen that is not
def test_linen():
    class Model(nn.Module):
        block: type[nn.Module]

        @nn.compact
        def __call__(self, x):
            return self.block(name="block")(x)

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


class Flagged(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(32, 32, rngs=rngs)

    def __call__(self, x, act, scale=1.0, *, mask=None, flip=False):
        y = {"sin": jnp.sin, "cos": jnp.cos}[act](self.inner(-x if flip else x)) * scale
        return y if mask is None else jnp.where(mask, y, 0)


class LinenFlagged(nn.Module):
    @nn.compact
    def __call__(self, x, act, scale=1.0, *, mask=None, flip=False):
        y = {"sin": jnp.sin, "cos": jnp.cos}[act](nn.Dense(32)(-x if flip else x)) * scale
        return y if mask is None else jnp.where(mask, y, 0)


CALLS = [
    (("sin",), {}),
    (("cos", 2.0), {"mask": X > 0}),
    (("cos",), {"scale": jnp.float32(3), "flip": True}),
    (("sin",), {"mask": None, "flip": False}),
]


@pytest.mark.parametrize(
    ("args", "kwargs"), [CALLS[1], *(pytest.param(*c, marks=pytest.mark.slow) for c in (CALLS[0], *CALLS[2:]))]
)
@pytest.mark.parametrize("run", [pytest.param(lambda f: f, marks=pytest.mark.slow), jax.jit], ids=["eager", "jit"])
def test_static_and_keyword_arguments(run, args, kwargs):
    """As in `remat(static_argnums=)` the module is argument 0."""
    how = {"static_argnums": (2,), "static_argnames": ("flip",), "min_bytes": 1}
    block, call = Flagged(nnx.Rngs(0)), offload_nnx.offload(Flagged.__call__, **how)
    split = nnx.split(block)

    def of_nnx(call):
        return run(jax.grad(lambda state, x: (call(nnx.merge(split[0], state), x, *args, **kwargs) ** 2).sum(), (0, 1)))

    module = LinenFlagged()
    variables = module.init(jax.random.key(0), X, *args, **kwargs)

    def of_linen(module):
        return run(jax.grad(lambda variables, x: (module.apply(variables, x, *args, **kwargs) ** 2).sum(), (0, 1)))

    with ActivationStore() as store:
        for got, want in (
            (of_nnx(call)(split[1], X), of_nnx(Flagged.__call__)(split[1], X)),
            (of_linen(offload_linen.offload(LinenFlagged, **how)())(variables, X), of_linen(module)(variables, X)),
        ):
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6 * max(1, np.abs(b).max()))
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0


def test_static_arguments_that_are_not_named():
    block = Flagged(nnx.Rngs(0))
    with pytest.raises(
        TypeError, match="arguments must be arrays or static, got str; name its position in static_argnums"
    ):
        offload_nnx.offload(Flagged.__call__, min_bytes=1)(block, X, "sin")
    for binding in offload_nnx, offload_linen:
        with pytest.raises(ValueError, match="must not name the module"):
            binding.offload(Flagged, static_argnums=(0, 2))


@pytest.mark.parametrize("kind", [nnx.Param, nnx.BatchStat])
def test_a_variable_as_first_argument(kind):
    variable = kind(jnp.linspace(0, 1, 32))

    def fn(variable, x):
        y = jnp.sin(x * variable[...])
        if kind is nnx.BatchStat:
            variable[...] = variable[...] + 1
        return y

    before = variable[...]
    call = offload_nnx.offload(fn, min_bytes=1)
    np.testing.assert_allclose(call(variable, X), jnp.sin(X * before), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variable[...], before + (kind is nnx.BatchStat))
    if kind is nnx.Param:
        got = jax.grad(lambda x: call(variable, x).sum())(X)
        np.testing.assert_allclose(got, jnp.cos(X * before) * before, rtol=1e-5, atol=1e-6)
