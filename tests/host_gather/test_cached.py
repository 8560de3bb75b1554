"""`CachedTable`: which rows it copies, and copies of rows of any dtype; test_placed.py has its reads and writes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    HostTable,
    count_ids,
    gather,
    scatter,
)
from tests.host_gather.rows import HOT, ROWS

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float16", "float64", "complex64", "bool"])
def test_written_rows_of_any_dtype(dtype: str) -> None:
    rows = (ROWS * 9).astype(dtype)
    with jax.enable_x64(True):
        cached = scatter(CachedTable.from_ids(HostTable.from_numpy(rows), HOT), np.array([17, 3]), rows[:2])
        rows[[17, 3]] = rows[:2]
        np.testing.assert_array_equal(cached.numpy(), rows)
        np.testing.assert_array_equal(cached[np.array([17, 3, 0])], rows[[17, 3, 0]])
    np.testing.assert_array_equal(np.asarray(cached.cache)[int(cached.slots[17])].tobytes(), rows[17].tobytes())


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "uint32", "uint64", "int8", "int64", "bool", "float32", "float16"]
)
def test_counts_of_any_dtype(dtype: str) -> None:
    table = HostTable.from_numpy(ROWS)
    counts = np.zeros(50, dtype)
    counts[[3, 7, 11]] = [1, 1, 1] if dtype == "bool" else [5, 100, 1]
    for k, want in ((3, {3, 7, 11}), (50, set(range(50))), (1, {3, 7, 11} if dtype == "bool" else {7})):
        cached = CachedTable.from_counts(table, counts, k)
        assert set(np.flatnonzero(np.asarray(cached.slots) >= 0)) <= want and cached.cache.shape[0] == k
    if dtype in ("uint64", "int64"):
        counts[20] = np.iinfo(dtype).max
        assert int(CachedTable.from_counts(table, counts, 1).slots[20]) == 0
        counts[20] = np.iinfo(dtype).min
        assert int(CachedTable.from_counts(table, counts, 3).slots[20]) == -1


def test_rows_are_chosen_by_counts() -> None:
    table, degrees = HostTable.from_numpy(ROWS), np.arange(50)[::-1]
    cached = CachedTable.from_counts(table, degrees, 10)
    assert sorted(np.flatnonzero(np.asarray(cached.slots) >= 0)) == list(range(10))
    ids = np.array([0, 9, 10, 49, -1, 50])
    want = np.where(((ids >= 0) & (ids < 50))[:, None], ROWS[np.clip(ids, 0, 49)], 0)
    for order in ("given", "sorted"):
        np.testing.assert_array_equal(gather(cached, ids, order=order), want)
    assert float(cached.hit_rate(ids)) == 0.5
    assert CachedTable.from_counts(table, degrees, 0)[ids].shape == (6, 6)
    counts = count_ids(jnp.zeros(50, jnp.int32), ids)
    assert counts.sum() == 4 and counts[49] == 1


def test_bad_ids_and_counts() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(ValueError, match="distinct"):
        CachedTable.from_ids(table, [1, 1])
    with pytest.raises(ValueError, match="integers from 0 to 49"):
        CachedTable.from_ids(table, [50])
    with pytest.raises(ValueError, match=r"`counts` must have shape \(50,\)"):
        CachedTable.from_counts(table, np.ones(3), 1)
    with pytest.raises(ValueError, match="must be numbers, got NaN"):
        CachedTable.from_counts(table, np.full(50, np.nan), 1)
    with pytest.raises(TypeError, match="`counts` must be real, got complex128"):
        CachedTable.from_counts(table, np.full(50, 1j), 1)
