"""Zeros in the last rows of arrays, interpreted."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas import padding
from tests.cases import slow_but
from tests.pallas.reference import interpreted

SHAPES = [((9,), "float32"), ((300, 2, 5), "bfloat16"), ((70, 1500), "float16"), ((300, 3), "uint8")]


@pytest.mark.parametrize(("shape", "dtype"), slow_but(SHAPES[1:3], SHAPES))
def test_clear_rows(shape, dtype):
    rows = shape[0]
    run = interpreted(lambda a, b, offsets: kernels.clear_rows([a, b], offsets))
    for valid in (0, 1, rows // 2, rows - 1, rows):
        wide, narrow = jnp.ones(shape, dtype), jnp.full((rows, 1), jnp.nan)
        found = run(wide, narrow, jnp.array([0, valid // 2, valid], jnp.int32))
        assert [a.dtype for a in found] == [wide.dtype, narrow.dtype]
        for before, after in zip((wide, narrow), found, strict=True):
            before, after = np.asarray(before, np.float64), np.asarray(after, np.float64)
            np.testing.assert_array_equal(after[:valid], before[:valid])
            assert (after[valid:] == 0).all()


def test_clear_rows_at_positions_of_an_order():
    x, order = jnp.ones((11, 3)), jnp.asarray(np.random.default_rng(0).permutation(11), jnp.int32)
    (found,) = interpreted(lambda x: kernels.clear_rows([x], jnp.array([8]), order=order))(x)
    want = np.ones((11, 3))
    want[np.asarray(order)[8:]] = 0
    np.testing.assert_array_equal(found, want)


def test_clear_rows_leaves_out_rows_that_the_arrays_do_not_have():
    x, order = jnp.ones((6, 3)), jnp.asarray(np.random.default_rng(0).permutation(11), jnp.int32)
    (found,) = interpreted(lambda x: kernels.clear_rows([x], jnp.array([4]), order=order))(x)
    want = np.ones((11, 3))
    want[np.asarray(order)[4:]] = 0
    np.testing.assert_array_equal(found, want[:6])


def test_clear_rows_of_nothing():
    x = jnp.ones((4, 0))
    assert kernels.clear_rows([x], jnp.array([2]))[0] is x


def test_more_rows_than_programs(monkeypatch):
    monkeypatch.setattr(padding, "_PROGRAMS", 1)
    monkeypatch.setattr(padding, "_TILE", 4)
    x = jnp.ones((1300, 2))
    (found,) = interpreted(lambda x: kernels.clear_rows([x], jnp.array([7])))(x)
    np.testing.assert_array_equal(found[:, 0], np.arange(1300) < 7)
