"""`CachedTable` works wherever a table does, and writes through it update its cached copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    HostTable,
    RowGradient,
    adagrad,
    adam,
    count_ids,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
    scatter_add,
    sgd,
    shardings,
)
from tests.host_gather.rows import HOT, IDS, ROWS

RNG = np.random.default_rng(1)


def both() -> tuple[HostTable, CachedTable]:
    table = HostTable.from_numpy(ROWS)
    return table, CachedTable.from_ids(HostTable.from_numpy(ROWS), HOT)


def assert_copies_are_current(cached: CachedTable) -> None:
    slots = np.asarray(cached.slots)
    words = cached.numpy().view(np.uint32)
    np.testing.assert_array_equal(np.asarray(cached.cache)[slots[slots >= 0]], words[slots >= 0])


def test_all_reads_give_the_rows_of_the_table() -> None:
    table, cached = both()
    for f in (
        lambda t: t[IDS],
        lambda t: gather(t, IDS, mode="clip", out_dtype=jnp.bfloat16),
        lambda t: gather(t, IDS.reshape(1, -1), reduce="mean"),
        lambda t: gather_done(gather_start(t, IDS)),
        lambda t: prefetched_scan(lambda c, rows, _: (c + rows.sum(), rows), 0.0, t, IDS[:, None]),
        lambda t: jax.vmap(lambda i: t[i])(jnp.asarray(IDS)),
        lambda t: jax.checkpoint(lambda t: t[IDS])(t),
    ):
        jax.tree.map(np.testing.assert_array_equal, jax.jit(f)(cached), jax.jit(f)(table))
    for name in ("shape", "dtype", "ndim", "size", "nbytes", "read_only"):
        assert getattr(cached, name) == getattr(table, name)
    assert len(cached) == 50
    np.testing.assert_array_equal(cached.numpy(), ROWS)
    with pytest.raises(TypeError, match="a slice would be copied"):
        cached[1:3]
    with cached:
        pass
    assert cached.is_closed()


@pytest.mark.parametrize("jitted", [False, True])
def test_writes_update_the_copies(jitted: bool) -> None:
    values = RNG.standard_normal((7, 6)).astype(np.float32)
    for f in (scatter, scatter_add):
        table, cached = both()
        step = jax.jit(f, donate_argnums=0, out_shardings=shardings(cached)) if jitted else f
        plain = f(table, IDS, values).numpy()
        written = step(cached, IDS, values)
        assert isinstance(written, CachedTable)
        np.testing.assert_array_equal(written.numpy(), plain)
        assert_copies_are_current(written)
        np.testing.assert_array_equal(written[IDS], HostTable.from_numpy(plain)[IDS])


@pytest.mark.parametrize(
    "optimizer", [adam(0.1), *(pytest.param(o, marks=pytest.mark.slow) for o in (sgd(0.1), adagrad(0.1)))]
)
def test_optimizers_update_the_copies(optimizer: object) -> None:
    gradient = RowGradient(IDS, RNG.standard_normal((7, 6)).astype(np.float32))
    table, cached = both()
    state, other = optimizer.init(table), optimizer.init(cached)
    step = jax.jit(optimizer.update, donate_argnums=(1, 2), out_shardings=shardings((cached, other)))
    for _ in range(2):
        table, state = optimizer.update(gradient, state, table)
        cached, other = step(gradient, other, cached)
    np.testing.assert_allclose(cached.numpy(), table.numpy(), rtol=1e-6)
    assert_copies_are_current(cached)


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
    with pytest.raises(ValueError, match="must not have NaN"):
        CachedTable.from_counts(table, np.full(50, np.nan), 1)
    with pytest.raises(TypeError, match="`counts` must be real, got complex128"):
        CachedTable.from_counts(table, np.full(50, 1j), 1)
