"""Zeros in the last rows of arrays, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from tests.pallas.reference import interpreted

pytestmark = pytest.mark.newest_jax

SHAPES = [((9,), "float32"), ((300, 2, 5), "bfloat16"), ((70, 1500), "float16"), ((300, 3), "uint8")]


@pytest.mark.parametrize("first_of", [0, 2])
@pytest.mark.parametrize(("shape", "dtype"), SHAPES, ids=str)
def test_clear_rows(shape, dtype, first_of):
    rows = shape[0]
    first = rows // first_of if first_of else 0
    for valid in {first, rows - 1, rows}:
        wide, narrow = jnp.ones(shape, dtype), jnp.full((rows, 1), jnp.nan)
        offsets = jnp.array([0, first, valid], jnp.int32)
        found = interpreted(lambda a, b, offsets=offsets: kernels.clear_rows([a, b], offsets, first))(wide, narrow)
        assert [a.dtype for a in found] == [wide.dtype, narrow.dtype]
        for before, after in zip((wide, narrow), found, strict=True):
            before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
            np.testing.assert_array_equal(after[:valid], before[:valid])
            assert (after[valid:] == 0).all()


def test_clear_rows_at_positions_of_an_order():
    x, order = jnp.ones((11, 3)), jnp.asarray(np.random.default_rng(0).permutation(11), jnp.int32)
    (found,) = interpreted(lambda x: kernels.clear_rows([x], jnp.array([8]), 6, order=order))(x)
    want = np.ones((11, 3))
    want[np.asarray(order)[8:]] = 0
    np.testing.assert_array_equal(found, want)


def test_clear_rows_of_nothing():
    x = jnp.ones((4, 0))
    assert kernels.clear_rows([x], jnp.array([2]), 0)[0] is x
    full = jnp.ones((4, 2))
    assert kernels.clear_rows([full], jnp.array([4]), 4)[0] is full
