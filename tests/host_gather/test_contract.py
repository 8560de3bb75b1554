"""What `dejax.host_gather` promises, through its public functions and against numpy, each capability once."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from dejax.distributed import share
from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    HostTable,
    RowGradient,
    SplitTable,
    TableClosedError,
    adagrad,
    adam,
    check_errors,
    count_ids,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
    scatter_add,
    sgd,
    shardings,
    value_and_grad,
)
from tests.host_gather.rows import HOT, IDS, ROWS, on_drive

RNG = np.random.default_rng(1)
PLACES = {
    "host": HostTable.from_numpy,
    "cached": lambda rows: CachedTable.from_ids(HostTable.from_numpy(rows), HOT),
    "split": lambda rows: SplitTable.from_numpy(rows, HOT, writable=True),
    "device": lambda rows: DeviceTable.from_numpy(rows, writable=True),
}
ON_A_DRIVE = {
    "drive": on_drive,
    "drive, split": lambda rows: SplitTable.from_parts(
        on_drive(np.delete(rows, HOT, axis=0)), DeviceTable.from_numpy(rows[HOT]), HOT
    ),
}


def looked_up(rows: np.ndarray, ids: np.ndarray, fill: float = 0) -> np.ndarray:
    there = (ids >= 0) & (ids < len(rows))
    return np.where(there[..., None], rows[np.where(there, ids, 0)], fill)


@pytest.mark.parametrize("place", PLACES | ON_A_DRIVE)
def test_rows_are_those_of_numpy_wherever_they_lie(place: str) -> None:
    table, scale = (PLACES | ON_A_DRIVE)[place](ROWS), RNG.standard_normal(50).astype(np.float32)

    @jax.jit
    def reads(table, ids):
        return (
            table[ids],
            gather(table, ids, order="sorted", fill_value=3),
            gather(table, ids, mode="clip", out_dtype=jnp.bfloat16, scale=scale),
            gather(table, ids[None], reduce="mean"),
            gather_done(gather_start(table, ids)),
            prefetched_scan(lambda c, rows, _: (c + rows.sum(), rows), 0.0, table, ids[:, None])[1],
            jax.vmap(lambda one: table[one])(ids),
        )

    plain, filled, scaled, mean, *others = reads(table, jnp.asarray(IDS))
    want = looked_up(ROWS, IDS)
    np.testing.assert_array_equal(plain, want)
    np.testing.assert_array_equal(filled, looked_up(ROWS, IDS, 3))
    clipped = np.clip(IDS, 0, 49)
    exact = ROWS[clipped] * scale[clipped, None]
    np.testing.assert_array_equal(scaled, exact.astype(ml_dtypes.bfloat16))
    np.testing.assert_allclose(mean[0], ROWS[[4, 17, 4, 3, 0]].mean(0), rtol=1e-5, atol=1e-6)
    for other in others:
        np.testing.assert_array_equal(np.asarray(other).reshape(want.shape), want)
    assert table.shape == (50, 6) and table.dtype == np.float32 and len(table) == 50
    np.testing.assert_array_equal(table.numpy(), ROWS)


def test_narrow_rows_are_converted_as_they_are_read() -> None:
    small = np.array([[1, 2], [3, 4], [5, -6]], np.int8)
    got = gather(HostTable.from_numpy(small), np.array([2, 0, -1]), scale=0.5)
    np.testing.assert_array_equal(got, [[2.5, -3], [0.5, 1], [0, 0]])
    eight = ROWS.astype(ml_dtypes.float8_e4m3fn)
    got = gather(HostTable.from_numpy(eight), np.arange(50), out_dtype=jnp.float16)
    np.testing.assert_array_equal(got, eight.astype(np.float16))


@pytest.mark.parametrize("place", PLACES)
def test_writes_in_a_donating_step(place: str) -> None:
    """Of equal ids `scatter` keeps the last and `scatter_add` the sum; ids out of range name no row."""
    table, new = PLACES[place](ROWS), RNG.standard_normal((7, 6)).astype(np.float32)

    def write(table, ids, new):
        return scatter_add(scatter(table, ids, new), ids, new)

    written = jax.jit(write, donate_argnums=0, out_shardings=shardings(table))(table, jnp.asarray(IDS), new)
    want = ROWS.copy()
    for number, row in zip(IDS, new, strict=True):
        if 0 <= number < 50:
            want[number] = row
    for number, row in zip(IDS, new, strict=True):
        if 0 <= number < 50:
            want[number] += row
    np.testing.assert_allclose(written.numpy(), want, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(written[HOT], want[HOT], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [(sgd(0.1), optax.sgd(0.1)), (adagrad(0.1), optax.adagrad(0.1)), (adam(0.1), optax.adam(0.1))],
    ids=["sgd", "adagrad", "adam"],
)
def test_embeddings_train_as_by_optax(ours, theirs) -> None:
    """The gradient of a table has rows for the ids that the loss read; other rows stay."""
    table, params, ids = HostTable.from_numpy(ROWS), jnp.asarray(ROWS), jnp.array([3, 17, 3])
    state, other = ours.init(table), theirs.init(params)

    def loss(table, ids, labels):
        return ((table[ids].sum(-1) - labels) ** 2).mean()

    def step(table, state, labels):
        value, gradient = value_and_grad(loss)(table, ids, labels)
        assert isinstance(gradient, RowGradient)
        table, state = ours.update(gradient, state, table)
        return table, state, value

    step = jax.jit(step, donate_argnums=(0, 1), out_shardings=shardings((table, state, 0.0)))
    for k in range(2):
        labels = jnp.arange(3.0) + k
        table, state, value = step(table, state, labels)
        want, gradient = jax.value_and_grad(loss)(params, ids, labels)
        updates, other = theirs.update(gradient, other, params)
        np.testing.assert_allclose(value, want, rtol=1e-5)
        params = params.at[jnp.array([3, 17])].add(updates[jnp.array([3, 17])])
    np.testing.assert_allclose(table.numpy(), params, rtol=2e-5, atol=2e-6)


def test_rows_are_cached_by_counts() -> None:
    counts = count_ids(jnp.zeros(50, jnp.int32), jnp.array([3, 3, 17, 5, -1]))
    cached = CachedTable.from_counts(HostTable.from_numpy(ROWS), counts, cached_rows=3)
    assert float(cached.hit_rate(jnp.array([3, 17, 9, 3]))) == 0.75


def test_files_are_tables(tmp_path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    table = HostTable.from_npy(tmp_path / "rows.npy")
    np.testing.assert_array_equal(table[IDS[:3]], ROWS[IDS[:3]])
    assert table.read_only
    with pytest.raises(ValueError, match="read-only"):
        scatter(table, [0], ROWS[:1])


def test_what_cannot_be_is_refused() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(TypeError, match="jax.numpy would copy all of it"):
        jnp.sum(table)
    with pytest.raises(TypeError, match="slice"):
        table[1:3]
    with pytest.raises(TypeError):
        jax.jit(lambda ids: table[ids])(jnp.array([1]))  # it would be a constant of the program
    with pytest.raises(TypeError):
        jax.grad(lambda table: table[jnp.array([1])].sum())(table)
    with pytest.raises(Exception, match="id 50 (is|was) out of range"):  # at once, or on a GPU when it is asked for
        gather(table, np.array([50]), mode="raise").block_until_ready()
        check_errors()
    table.close()
    with pytest.raises(TableClosedError):
        table[IDS]


@pytest.mark.devices(2)
def test_devices_share_a_table() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    shared, spec = HostTable.from_numpy(ROWS).share(mesh), jax.sharding.PartitionSpec
    ids = jnp.asarray(RNG.integers(0, 50, (2, 6)), jnp.int32)
    read = jax.shard_map(lambda table, ids: table[ids], mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x"))
    np.testing.assert_array_equal(jax.jit(read)(shared, ids), ROWS[np.asarray(ids)])


@pytest.mark.devices(2)
@pytest.mark.parametrize("place", PLACES | ON_A_DRIVE)
def test_tables_are_made_and_shared_where_the_caller_has_set_a_mesh(place: str) -> None:
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    ids = jnp.asarray(IDS)
    with jax.set_mesh(mesh):
        table = (PLACES | ON_A_DRIVE)[place](ROWS)
        np.testing.assert_array_equal(table.numpy(), ROWS)
        read = jax.jit(lambda table, ids: table[ids])
        np.testing.assert_array_equal(read(share(table, mesh), ids), looked_up(ROWS, IDS))
        with pytest.raises(ValueError, match=r"a table of 1 devices and a mesh of 2; give dejax\.distributed\.share"):
            table[ids]
    np.testing.assert_array_equal(table[ids], looked_up(ROWS, IDS))
