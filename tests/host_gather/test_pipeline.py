"""Overlapped gathers give the same rows as `gather`, in loops and by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import HostTable, gather_done, gather_start, prefetched_scan

ROWS = np.random.default_rng(0).standard_normal((64, 12)).astype(np.float32)
IDS = np.random.default_rng(1).integers(-3, 67, (7, 9), np.int32)


def expected(ids: np.ndarray) -> np.ndarray:
    inside = (ids >= 0) & (ids < 64)
    return np.where(inside[..., None], ROWS[np.clip(ids, 0, 63)], 0)


@pytest.mark.parametrize("depth", [1, 3, 9])
@pytest.mark.parametrize("jitted", [False, True])
def test_prefetched_scan(depth: int, jitted: bool) -> None:
    table = HostTable.from_numpy(ROWS)

    def run(table: HostTable, ids: jax.Array, xs: jax.Array) -> tuple[jax.Array, jax.Array]:
        def step(carry: jax.Array, rows: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            return carry + x * rows.sum(), rows

        return prefetched_scan(step, jnp.float32(0), table, ids, xs, depth=depth)

    xs = jnp.arange(7.0)
    for _ in range(2):  # a run must not see starts of the run before
        total, rows = (jax.jit(run) if jitted else run)(table, jnp.asarray(IDS), xs)
        np.testing.assert_array_equal(rows, expected(IDS))
    np.testing.assert_allclose(total, (xs * expected(IDS).sum((1, 2))).sum(), rtol=1e-4)


def test_start_and_done() -> None:
    table = HostTable.from_numpy(ROWS)

    @jax.jit
    def step(table: HostTable, ids: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        pending, x = gather_start(table, ids, before=x)
        other = gather_start(table, ids[:3], out_dtype=jnp.bfloat16)
        y = x @ x
        rows, y = gather_done(pending, after=y)
        return rows, gather_done(other), y

    rows, few, y = step(table, IDS[0], jnp.eye(3))
    np.testing.assert_array_equal(rows, expected(IDS[0]))
    np.testing.assert_array_equal(few.astype(jnp.float32), expected(IDS[0][:3]).astype(jnp.bfloat16).astype(np.float32))
    np.testing.assert_array_equal(y, np.eye(3))


def test_bad_arguments() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(TypeError, match="options must be of"):
        gather_start(table, IDS, mood="fill")
    with pytest.raises(ValueError, match="`reduce` must be None"):
        gather_start(table, IDS, reduce="mean")
    with pytest.raises(ValueError, match="`depth` must be at least 1"):
        prefetched_scan(lambda c, rows, x: (c, None), 0, table, IDS, depth=0)
    for options, match in (
        ({"mood": 1}, "options must be of"),
        ({"reduce": "mean"}, "must be None"),
        ({"mode": "clip"}, "`mode` must be 'fill', got 'clip'"),
    ):
        with pytest.raises((TypeError, ValueError), match=match):
            prefetched_scan(lambda c, rows, x: (c, None), 0, table, IDS, **options)
    with pytest.raises(TypeError, match="must be a HostTable, got ndarray"):
        prefetched_scan(lambda c, rows, x: (c, None), 0, ROWS, IDS)
    with pytest.raises(ValueError, match="leading axis"):
        prefetched_scan(lambda c, rows, x: (c, None), 0, table, np.int32(1))


def test_integers_that_jit_would_cut_are_refused():
    table = HostTable.from_numpy(np.ones((3, 1), np.float32))
    with pytest.raises(ValueError, match="prefetched_scan: integers must fit int32 .*, got 4294967296 to 4294967296"):
        prefetched_scan(lambda c, rows, x: (c, x), 0, table, np.zeros((1, 1), np.int32), np.array([2**32]))
