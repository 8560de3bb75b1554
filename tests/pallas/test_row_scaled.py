"""Rows in 16 bits; float32 from two float16 elements, and products of `precision="f32"`, against float64."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas.formats.row_scaled import encode, two_parts
from dejax.pallas.products import grouped_gemm
from tests.cases import slow_but
from tests.pallas.reference import decoded, interpreted, tile_table

# Of a row's result: 2^-22 of each operand, and the rounding of sums.
EXACT = 1e-6
COUNTS = (40, 0, 35, 125)


HOW = {"XLA": encode, "kernel": interpreted(kernels.to_row_scaled)}


@pytest.mark.parametrize(
    ("how", "shape"),
    slow_but(
        [("XLA", (37, 100)), ("XLA", (5, 4, 5)), ("kernel", (37, 100)), ("kernel", (5, 4, 5)), ("kernel", (0, 20))],
        itertools.product(HOW, [(37, 100), (5, 17), (5, 3), (5, 4, 5), (0, 20), (0, 4, 5)]),
    ),
)
def test_rows_in_16_bits(how, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    rows = HOW[how](jnp.asarray(x))
    assert rows.shape == shape and rows.ndim == x.ndim
    np.testing.assert_allclose(decoded(rows), x, atol=2.0**-11 * np.abs(x).max(initial=0))


@pytest.mark.parametrize("given, shape", [
    ((5, 2, 20), (5, 1, 40)), ((5, 2, 20), (5, 40)), ((5, 2, 20), (5, 2, 1, 20)), ((5, 2, 20), (5, 2, 20, 1)),
    ((5, 2, 20), (5, 4, 10)), ((5, 1, 20), (5, 20)), ((5, 20), (5, 1, 20)), ((5, 20), (5, 4, 5)),
])  # fmt: skip
def test_rows_in_16_bits_take_other_axes(given, shape):
    """Rows that are stored longer stay so where the last axis does, also as an argument of `jit`."""
    x = np.random.default_rng(0).standard_normal(given).astype(np.float32)
    rows = encode(jnp.asarray(x))
    again = jax.jit(lambda rows: rows.reshape(shape))(rows)
    assert again.shape == shape and (again.width is not None) == (shape[-1] == given[-1])
    np.testing.assert_array_equal(decoded(again) if again.width else again.decode(), rows.decode().reshape(shape))
    np.testing.assert_array_equal(again.reshape(given).decode(), rows.decode())


def test_halves_keep_22_bits():
    x = np.random.default_rng(0).uniform(-(2**15), 2**15, 20_000).astype(np.float32)
    x[:10_000] *= np.logspace(-9, 0, 10_000, dtype=np.float32)
    high, low = (np.asarray(a, np.float64) for a in two_parts(jnp.asarray(x)))
    assert np.max(np.abs(high + low * 2.0**-11 - x) / np.maximum(np.abs(x), 2.0**-2)) <= 2.0**-22


def test_halves_of_what_is_not_finite():
    high, low = two_parts(jnp.array([jnp.inf, -jnp.inf, jnp.nan, 0.0]))
    np.testing.assert_array_equal(high, np.array([np.inf, -np.inf, np.nan, 0], np.float16))
    np.testing.assert_array_equal(low, np.zeros(4, np.float16))


def operands(k: int, n: int, scales: float) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows of magnitudes from e^-scales to e^scales, half of whose elements are much smaller than the others."""
    rng = np.random.default_rng(1)
    rows = sum(COUNTS)
    x, y = rng.standard_normal((rows, k)), rng.standard_normal((rows, n))
    x *= np.exp(rng.uniform(-scales, scales, (rows, 1)))
    x[:, ::2] *= 1e-4
    w = rng.standard_normal((len(COUNTS), k, n))
    offsets = np.concatenate([[0], np.cumsum(COUNTS)]).astype(np.int32)
    return x.astype(np.float32), y.astype(np.float32), w.astype(np.float32), offsets


def multiply(x: np.ndarray, w: np.ndarray, offsets: np.ndarray, columns: np.ndarray | None = None) -> np.ndarray:
    tile_type, tile_start = map(jnp.asarray, tile_table(offsets, 16, x.shape[0]))
    groups = kernels.GemmGroups(jnp.asarray(offsets), x.shape[0], lambda _: (tile_type, tile_start), 16)
    known = None if columns is None else jnp.asarray(columns)
    request = kernels.GroupedGemm(jnp.asarray(x), jnp.asarray(w), groups, x_columns=known, precision="f32")
    return np.asarray(kernels.grouped_gemm(request))


@pytest.mark.parametrize(
    ("before", "known", "k", "n", "scales"),  # known: powers of the columns, to which rows may be 2^-126
    slow_but(
        [(False, False, 20, 17, 60), (True, True, 20, 17, 40), (True, False, 20, 17, 60)],
        [(before, known, *sizes)
         for known, scales in [(True, 40), (False, 60)]
         for before in (False, True)
         for sizes in [(64, 64, 0), (20, 17, scales), (100, 130, scales)]],
    ),
)  # fmt: skip
def test_products_of_float32(before, known, k, n, scales, monkeypatch):
    """Powers of two are divided out in each tile, or before the product where those of the columns are known."""
    monkeypatch.setattr(grouped_gemm, "scales_beforehand", lambda *_: before)
    x, _, w, offsets = operands(k, n, scales)
    columns = 2.0 ** np.floor(np.log2(np.abs(x).max(0))) if known else None
    types = np.repeat(np.arange(len(COUNTS)), COUNTS)
    expected = np.einsum("pk,pkn->pn", x.astype(np.float64), w[types].astype(np.float64))
    error = np.linalg.norm(multiply(x, w, offsets, columns) - expected, axis=1) / np.linalg.norm(expected, axis=1)
    assert error.max() < EXACT


@pytest.mark.parametrize(("k", "n", "scales"), slow_but([(20, 17, 20)], [(64, 64, 0), (20, 17, 20)]))
def test_weight_gradients_of_float32(k, n, scales):
    x, y, _, offsets = operands(k, n, scales)
    parts = zip(
        np.split(x.astype(np.float64), offsets[1:-1]), np.split(y.astype(np.float64), offsets[1:-1]), strict=True
    )
    expected = np.stack([a.T @ b for a, b in parts])
    found = kernels.grouped_weight_gradient(
        kernels.GroupedWeightGradient(*map(jnp.asarray, (x, y, offsets)), x.shape[0], precision="f32")
    )
    error = np.linalg.norm(np.asarray(found, np.float64) - expected, axis=(1, 2))
    assert np.all(error <= EXACT * np.linalg.norm(expected, axis=(1, 2)))


def test_a_row_that_is_not_finite_stays_alone():
    x, _, w, offsets = operands(20, 17, 0)
    clean = multiply(x, w, offsets)
    x[3, 5], x[7, 1] = np.inf, np.nan
    found = multiply(x, w, offsets)
    others = np.setdiff1d(np.arange(len(x)), [3, 7])
    assert not np.isfinite(found[[3, 7]]).any()
    np.testing.assert_array_equal(found[others], clean[others])


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("infinity", [np.inf, -np.inf, np.nan])
def test_infinities_and_nan_take_no_digit_of_their_row(how, infinity):
    x = np.random.default_rng(0).standard_normal((5, 16)).astype("float32")
    x[1, 3] = x[2, :] = infinity
    found = np.asarray(HOW[how](jnp.asarray(x)).decode())
    finite = np.isfinite(x)
    np.testing.assert_array_equal(found[~finite], x[~finite])
    np.testing.assert_allclose(found[finite], x[finite], rtol=2**-10)
