"""The error function and the exponential, against those of float64."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from dejax import pallas as kernels


def test_erf():
    x = np.concatenate([np.linspace(-6, 6, 20_001), np.logspace(-30, 0, 2_000), [0.0]]).astype(np.float32)
    exact = np.array([math.erf(v) for v in x.astype(np.float64)])
    found = np.asarray(jax.jit(kernels.erf)(x), np.float64)
    assert np.max(np.abs(found - exact) / np.maximum(np.abs(exact), 1e-37)) < 4e-7
    assert np.abs(found).max() <= 1


def test_erf_beyond_numbers():
    found = kernels.erf(jnp.array([jnp.inf, -jnp.inf, jnp.nan, 3e38]))
    assert found[0] == 1 and found[1] == -1 and jnp.isnan(found[2]) and found[3] == 1


def test_exp():
    x = np.linspace(-87, 88, 20_001).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    error = np.abs(np.asarray(jax.jit(kernels.exp)(x), np.float64) - exact) / exact
    assert np.max(error - 8e-8 * np.abs(x)) < 4e-7
    found = kernels.exp(jnp.array([0.0, -jnp.inf, -1e4, jnp.inf, jnp.nan]))
    assert found[0] == 1 and found[1] == found[2] == 0 and found[3] == jnp.inf and jnp.isnan(found[4])
