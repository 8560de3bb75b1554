"""The CPU row gather against numpy."""

import itertools
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

from dejax import _native

DTYPES = [
    *(np.dtype(name) for name in "bool int8 int16 int32 uint8 uint16 uint32 float16 float32 complex64".split()),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
]
WIDE_DTYPES = [np.dtype(name) for name in ("int64", "uint64", "float64", "complex128")]


def reference(table: np.ndarray, ids: np.ndarray, mode: str, fill_value: object = 0) -> np.ndarray:
    rows = table.shape[0]
    out = np.full(ids.shape + table.shape[1:], np.asarray(fill_value).astype(table.dtype))
    for at in np.ndindex(ids.shape):
        row = int(ids[at])
        if mode == "clip" and rows:
            row = min(max(row, 0), rows - 1)
        if 0 <= row < rows:
            out[at] = table[row]
    return out


def random_table(shape: tuple[int, ...], dtype: np.dtype, seed: int = 0) -> np.ndarray:
    values = np.random.default_rng(seed).integers(0, 100, shape)
    return values % 2 == 1 if dtype.kind == "b" else values.astype(dtype)


def check(table: np.ndarray, ids: np.ndarray, mode: str, fill_value: object = 0) -> None:
    got = _native.row_gather(jnp.asarray(table), jnp.asarray(ids), mode, fill_value=fill_value)
    assert got.dtype == table.dtype
    want = reference(table, ids, mode, fill_value)
    assert got.shape == want.shape
    # Bits, not values: the rows are moved, never computed with.
    assert np.asarray(got).tobytes() == want.tobytes()


@pytest.mark.parametrize("mode", ["fill", "clip"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(dtype: np.dtype, mode: str) -> None:
    check(random_table((11, 5), dtype), np.array([3, 10, -1, 0, 11, 2**31 - 1, -(2**31), 3], np.int32), mode, 1)


@pytest.mark.parametrize("dtype", WIDE_DTYPES, ids=str)
def test_wide_dtypes_and_ids(dtype: np.dtype) -> None:
    with jax.enable_x64(True):
        ids = np.array([3, 10, -1, 0, 11, 2**63 - 1, -(2**63), 2**32 + 3], np.int64)
        for mode in ("fill", "clip"):
            check(random_table((11, 5), dtype), ids, mode, 1)


@settings(max_examples=50)
@given(
    rows=st.integers(0, 9),
    row=st.lists(st.integers(0, 7), max_size=2).map(tuple),
    ids_shape=st.lists(st.integers(0, 4), max_size=2).map(tuple),
    mode=st.sampled_from(["fill", "clip"]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
def test_any_shape(rows: int, row: tuple, ids_shape: tuple, mode: str, dtype: np.dtype, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(-3, rows + 3, ids_shape, np.int32)
    check(random_table((rows, *row), dtype, seed), ids, mode, 3)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 16, 17, 100, 1000])
def test_odd_widths_over_several_threads(width: int) -> None:
    table = random_table((1 << 12, width), np.dtype(np.int8))
    count = 3 * 128 * 1024 // width + 7  # more than three ranges of native/row_gather.cc
    ids = np.random.default_rng(1).integers(0, len(table), count, np.int32)
    got = _native.row_gather(jnp.asarray(table), jnp.asarray(ids))
    np.testing.assert_array_equal(got, table[ids])


@pytest.mark.parametrize(("table_axis", "ids_axis"), [(None, 0), (0, None), (1, None), (2, None), (0, 0), (2, 1)])
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_vmap(table_axis: int | None, ids_axis: int | None, mode: str) -> None:
    table = random_table((4, 4, 4), np.dtype(np.float32))
    ids = np.random.default_rng(0).integers(-2, 6, (4, 4), np.int32)
    gather = jax.jit(jax.vmap(lambda t, i: _native.row_gather(t, i, mode, fill_value=7), (table_axis, ids_axis)))
    tables = itertools.repeat(table) if table_axis is None else np.moveaxis(table, table_axis, 0)
    blocks = itertools.repeat(ids) if ids_axis is None else np.moveaxis(ids, ids_axis, 0)
    want = np.stack([reference(t, i, mode, 7) for t, i, _ in zip(tables, blocks, range(4), strict=False)])
    np.testing.assert_array_equal(gather(jnp.asarray(table), jnp.asarray(ids)), want)


def test_nested_vmap_and_scan() -> None:
    table = random_table((2, 6, 3), np.dtype(np.int32))
    ids = np.random.default_rng(0).integers(-1, 7, (3, 5), np.int32)
    both = jax.vmap(jax.vmap(_native.row_gather, (None, 0)), (0, None))
    want = np.stack([np.stack([reference(t, i, "fill") for i in ids]) for t in table])
    np.testing.assert_array_equal(both(jnp.asarray(table), jnp.asarray(ids)), want)

    _, scanned = jax.lax.scan(lambda carry, i: (carry, _native.row_gather(table[0], i)), 0, jnp.asarray(ids))
    np.testing.assert_array_equal(scanned, want[0])


def test_two_python_threads_at_once() -> None:
    table = random_table((1 << 12, 64), np.dtype(np.float32))
    gather = jax.jit(_native.row_gather)
    blocks = np.random.default_rng(0).integers(-5, len(table) + 5, (16, 1 << 13), np.int32)
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda ids: np.asarray(gather(table, ids)), blocks))
    for ids, got in zip(blocks, results, strict=True):
        inside = (ids >= 0) & (ids < len(table))
        np.testing.assert_array_equal(got, np.where(inside[:, None], table[np.clip(ids, 0, len(table) - 1)], 0))


def test_agrees_with_the_gather_of_other_platforms() -> None:
    table, ids = random_table((5, 3), np.dtype(np.float32)), np.array([[0, 4], [-1, 5]], np.int32)
    for clip, rows in itertools.product((False, True), (5, 0)):
        got = _native._xla_row_gather(jnp.asarray(table[:rows]), jnp.asarray(ids), clip=clip, fill=np.float32(2))
        np.testing.assert_array_equal(got, reference(table[:rows], ids, "clip" if clip else "fill", 2))


def test_misuse_is_an_error_that_names_the_argument() -> None:
    table, ids = jnp.zeros((3, 2)), jnp.zeros(2, jnp.int32)
    with pytest.raises(TypeError, match=r"`ids` must be int32 or int64, got float32"):
        _native.row_gather(table, jnp.zeros(2))
    with pytest.raises(ValueError, match=r"`mode` must be 'fill' or 'clip', got 'wrap'"):
        _native.row_gather(table, ids, "wrap")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`table` must have an axis of rows"):
        _native.row_gather(jnp.float32(1), ids)
    with pytest.raises(TypeError, match=r"dtype of whole bytes, got int4"):
        _native.row_gather(table.astype(jnp.int4), ids)
    with pytest.raises(ValueError, match=r"`fill_value` must be a scalar"):
        _native.row_gather(table, ids, fill_value=[1, 2])


@pytest.mark.sample(2)
@pytest.mark.parametrize("threads", [1, 3])
def test_number_of_threads_can_be_set(threads: int) -> None:
    code = (
        "import jax.numpy as jnp, numpy as np; from dejax import _native as n\n"
        "table = np.arange(1 << 18, dtype=np.int32).reshape(-1, 4)\n"
        "ids = np.arange(1 << 17, dtype=np.int32) % len(table)\n"
        "np.testing.assert_array_equal(n.row_gather(table, ids), table[ids]); print(n.num_threads())"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "DEJAX_NUM_THREADS": str(threads), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.strip() == str(threads), ran.stderr
