"""Every function that takes ids takes all integer dtypes, without wrapping, and refuses everything else."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    HostTable,
    RowGradient,
    adam,
    count_ids,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
    scatter_add,
    sgd,
)
from dejax.host_gather._ids import checked_ids
from tests.cases import ForeignTensor, slow_but

ROWS = np.random.default_rng(0).standard_normal((300, 4)).astype(np.float32)


def table() -> HostTable:
    return HostTable.from_numpy(ROWS)


def cached() -> CachedTable:
    return CachedTable.from_ids(table(), np.arange(0, 300, 7))


def scanned(ids: Any) -> jax.Array:
    def step(carry: jax.Array, rows: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        return carry, rows

    return prefetched_scan(step, jnp.zeros(()), table(), ids[:, None] if hasattr(ids, "shape") else ids)[1]


def updated(optimizer: Any, ids: Any) -> np.ndarray:
    made, values = table(), jnp.ones((len(ids), 4))
    return optimizer.update(RowGradient(ids, values), optimizer.init(made), made)[0].numpy()


ENTRIES: dict[str, Callable[[Any], Any]] = {
    "gather": lambda ids: gather(table(), ids),
    "gather clip": lambda ids: gather(table(), ids, mode="clip"),
    "gather cached": lambda ids: gather(cached(), ids),
    "gather_start": lambda ids: gather_done(gather_start(table(), ids)),
    "prefetched_scan": scanned,
    "scatter": lambda ids: scatter(table(), ids, jnp.ones((len(ids), 4))).numpy(),
    "scatter_add": lambda ids: scatter_add(table(), ids, jnp.ones((len(ids), 4))).numpy(),
    "sgd": lambda ids: updated(sgd(0.5), ids),
    "adam": lambda ids: updated(adam(0.5), ids),
    "count_ids": lambda ids: count_ids(jnp.zeros(300, jnp.int32), ids),
    "hit_rate": lambda ids: cached().hit_rate(ids),
}


# They all check their ids by `checked_ids`; the others are slow.
_SOME = slow_but(("gather", "scatter_add", "hit_rate"), ENTRIES)


@pytest.mark.parametrize("name", _SOME)
def test_all_integer_dtypes_give_the_same(name: str) -> None:
    entry, small = ENTRIES[name], np.array([3, 37, 0, 119, 14, 5, 6, 7])
    want = np.asarray(entry(small.astype(np.int32)))
    for dtype in ("uint8", "int8", "uint16", "int16", "int64", "uint64", ">i4", ">i2", ">i8"):
        np.testing.assert_array_equal(entry(small.astype(dtype)), want, err_msg=dtype)
    np.testing.assert_array_equal(entry(ForeignTensor(small)), want)
    for dtype in (jnp.uint8, jnp.int8, jnp.uint16, jnp.int16):
        np.testing.assert_array_equal(entry(jnp.asarray(small, dtype)), want, err_msg=str(dtype))


@pytest.mark.parametrize("name", _SOME)
def test_wide_ids_do_not_wrap(name: str) -> None:
    entry = ENTRIES[name]
    wide = np.array([3, 2**32 + 5, -(2**32) + 7, 2**31, -(2**63), 2**63 - 1, 299, 300])
    clipped = np.array([3, 2**31 - 1, -1, 2**31 - 1, -1, 2**31 - 1, 299, 300], np.int32)
    want = np.asarray(entry(clipped))
    np.testing.assert_array_equal(entry(wide), want)
    with jax.enable_x64(True):
        for given in (wide, jnp.asarray(wide)):
            np.testing.assert_allclose(np.asarray(entry(given), np.float64), np.asarray(want, np.float64), rtol=1e-6)


@pytest.mark.parametrize(
    "name", [name if name != "adam" else pytest.param(name, marks=pytest.mark.slow) for name in ENTRIES]
)
def test_other_dtypes_are_refused(name: str) -> None:
    for wrong, match in (
        (np.array([1.5, 2.0]), r"must be (integers|int\[seeds\]), got float64"),
        (jnp.array([1.5, 2.0]), r"must be (integers|int\[seeds\]), got float32"),
        (jnp.array([1.0, 2.0], jnp.bfloat16), "bfloat16"),
        (np.array([1 + 0j]), "complex"),
        (np.array([True, False]), "got a mask"),
        (jnp.array([1, 2], jnp.uint32), "signed integers, got uint32"),
    ):
        with pytest.raises(TypeError, match=match):
            ENTRIES[name](wrong)


def test_narrow_ids_and_long_counts() -> None:
    counts = count_ids(jnp.zeros(1000, jnp.int32), jnp.array([255, 255, 0], jnp.uint8))
    assert counts[255] == 2 and counts[0] == 1 and counts.sum() == 3
    big = CachedTable.from_ids(HostTable.zeros((1000, 1)), [255, 600])
    assert float(big.hit_rate(jnp.array([255, 1], jnp.uint8))) == 0.5


def test_tables_of_more_rows_than_int32_counts() -> None:
    rows = 2**31 + 10
    np.testing.assert_array_equal(checked_ids("f", np.array([5, -3, 2**31 - 2]), rows), [5, -1, 2**31 - 2])
    with pytest.raises(ValueError, match="64-bit mode"):
        checked_ids("f", np.array([2**31 + 3]), rows)
    with pytest.raises(ValueError, match="64-bit mode"):  # int32's last value would also be row 2**31 - 1
        checked_ids("f", np.array([2**40]), rows)
