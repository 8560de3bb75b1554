"""The powers of two of columns, against numpy's maxima."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.pallas.formats.column_powers import MAX_COLUMNS, column_powers

pytestmark = pytest.mark.newest_jax


def powers(array, kept):
    ((found, short),) = column_powers([(jnp.asarray(array), kept)], interpret=True)
    assert found.dtype == jnp.float32 and short.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(found), np.asarray(short, np.float32))
    return np.asarray(found)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("shape", "kept"),
    [((9, 4), (1,)), ((5000, 33), (1,)), ((3, 8, 16), (2,)), ((3, 8, 16), (1,)), ((7, 2, 5, 6), (1, 3)),
     ((7, 2, 5, 6), (3, 1)), ((2, 70, 90), (1,)), ((4, MAX_COLUMNS + 1), (1,)), ((3, 1), (1,)), ((6, 5, 1000), (0, 1))],
)  # fmt: skip
def test_powers_are_within_a_factor_of_the_largest_element(shape, kept):
    rng = np.random.default_rng(1)
    scales = 10.0 ** rng.integers(-12, 13, size=[n if a in kept else 1 for a, n in enumerate(shape)])
    x = (rng.normal(size=shape) * scales).astype(np.float32)
    found = powers(x, kept)
    largest = np.abs(x).max(axis=tuple(a for a in range(x.ndim) if a not in kept))
    largest = np.transpose(largest, np.argsort(np.argsort(kept))).reshape(-1)
    assert np.all(np.log2(found) == np.round(np.log2(found)))
    assert np.all(found <= largest * 1.0001) and np.all(found >= largest / 16)


def test_a_column_of_zeros_has_the_largest_power_and_an_array_of_zeros_has_ones():
    x = np.zeros((10, 3), np.float32)
    assert np.array_equal(powers(x, (1,)), [1, 1, 1])
    x[:, 1] = 2.0**-30
    assert np.array_equal(powers(x, (1,)), [2.0**-30] * 3)
    assert np.array_equal(powers(np.zeros((0, 3), np.float32), (1,)), [1, 1, 1])


def test_infinities_and_nan_are_left_out():
    x = np.array([[np.inf, 3.0, np.nan], [4.0, np.nan, np.nan]], np.float32)
    assert np.array_equal(powers(x, (1,)), [4, 2, 4])


def test_several_arrays_at_once():
    a, b = np.full((4, 2), 8, np.float32), np.full((3, 5, 6), 0.25, np.float32)
    found = column_powers([(jnp.asarray(a), (1,)), (jnp.asarray(b), (1,)), (jnp.asarray(b), (2,))], interpret=True)
    assert [set(np.asarray(f).tolist()) for f, _ in found] == [{8.0}, {0.25}, {0.25}]
    assert [f.shape for f, _ in found] == [(2,), (5,), (6,)]
