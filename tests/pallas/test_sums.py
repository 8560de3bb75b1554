"""Sums of wide rows, interpreted, against their float64 reference."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas.products import reference
from tests.cases import slow_but
from tests.pallas.reference import interpreted


@pytest.mark.parametrize(
    ("ordered", "shape", "dtype"),
    slow_but(
        [(False, (70_000,), "float32"), (True, (2, 16, 33), "bfloat16")],
        itertools.product((False, True), [(2, 16, 33), (7,), (70_000,)], ("float32", "bfloat16")),
    ),
)
def test_sum_rows(ordered, shape, dtype):
    rng = np.random.default_rng(0)
    counts = np.array([3, 0, 19, 1])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    x = jnp.asarray(rng.standard_normal((counts.sum(), *shape)), dtype)
    order = rng.permutation(counts.sum()).astype(np.int32) if ordered else None

    def run(x):
        return kernels.sum_rows(x, jnp.asarray(offsets), order=None if order is None else jnp.asarray(order))

    expected = reference.sum_rows(x, offsets, order)
    found = interpreted(run)(x)
    assert found.dtype == dtype
    tolerance = 1e-5 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=tolerance * np.abs(expected).max())


def test_sum_rows_of_nothing():
    assert kernels.sum_rows(jnp.zeros((0, 3)), jnp.zeros(3, jnp.int32)).shape == (2, 3)
    assert kernels.sum_rows(jnp.zeros((2, 0)), jnp.zeros(3, jnp.int32)).shape == (2, 0)


def test_sum_rows_takes_an_order_of_all_rows():
    with pytest.raises(ValueError, match="order must have shape"):
        kernels.sum_rows(jnp.zeros((2, 3)), jnp.zeros(2, jnp.int32), order=jnp.zeros(1, jnp.int32))
