"""`HostTable`: rows keep every bit, control flow, meshes, and a readable error for every misuse."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    HostTable,
    RowGradient,
    adam,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
)

ROWS = np.arange(40, dtype=np.float32).reshape(8, 5)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "bfloat16", "float8_e5m2"]
)
def test_from_numpy_keeps_every_bit(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    array = np.random.default_rng(0).integers(0, 2, (7, 3, 2)).astype(kind)
    with HostTable.from_numpy(array) as table:
        assert table.shape == array.shape and table.dtype == array.dtype and table.nbytes == array.nbytes
        assert len(table) == 7 and table.ndim == 3
        assert table.numpy().tobytes() == array.tobytes()
        assert np.asarray(table).tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (1,), (3,)])
def test_shapes_without_elements_or_without_row_axes(shape: tuple[int, ...]) -> None:
    table = HostTable.zeros(shape, np.int32)
    assert table.numpy().shape == shape
    got = table[np.array([0, -1])]
    assert got.shape == (2, *shape[1:])
    assert not np.asarray(got).any()


def test_write_and_read_back() -> None:
    table = HostTable.zeros((4, 3))
    table.write(1, np.ones((2, 3)))
    np.testing.assert_array_equal(table.numpy().sum(1), [0, 3, 3, 0])
    np.testing.assert_array_equal(table[np.array([2, 3])].sum(1), [3, 0])
    with pytest.raises(ValueError, match="must fit into the table of 4 rows, got rows 3 to 4"):
        table.write(3, np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"`rows` must have shape \(3,\), got \(4,\)"):
        table.write(0, np.ones((1, 4)))
    with pytest.raises(ValueError, match="read-only"):
        table.numpy()[0] = 1


def test_arguments_of_the_wrong_kind() -> None:
    assert HostTable.zeros(3).shape == (3,)
    with pytest.raises(TypeError, match=r"the shape must be integers \[rows, \*row\], got"):
        HostTable.zeros((3, 2.5))
    with pytest.raises(TypeError, match=r"one of jax.devices\(\), got 'gpu'"):
        HostTable.zeros((3, 2), device="gpu")
    with pytest.raises(ValueError, match=r"the shape must be \[rows, \*row\], got \(\)"):
        HostTable.from_numpy(np.float32(1))
    with pytest.raises(ValueError, match="shape"):
        HostTable.zeros((-1, 3))
    for dtype in (np.dtype("O"), np.dtype("M8[s]"), np.dtype(ml_dtypes.int4), np.dtype("S3")):
        with pytest.raises(TypeError, match="the dtype must"):
            HostTable.zeros((2,), dtype)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda t: jnp.take(t, jnp.array([0]), axis=0), TypeError, r"Use table\[ids\]"),
        (lambda t: jnp.sum(t), TypeError, r"Use table\[ids\]"),
        (lambda t: t[1:3], TypeError, "a slice would be copied"),
        (lambda t: t[0, 1], TypeError, "one array of row ids"),
        (lambda t: jax.jit(lambda ids: t[ids])(jnp.array([0])), TypeError, "Pass it as an argument"),
        (lambda t: jax.lax.scan(lambda c, row: (c, row[jnp.array([0])]), 0, t), ValueError, "`xs` of a scan"),
        (lambda t: jax.vmap(lambda t: t[jnp.array([0])])(t), ValueError, "sliced"),
        (lambda t: gather(ROWS, jnp.array([0])), TypeError, "must be a HostTable, got ndarray"),
        (lambda t: jax.grad(lambda t: t[jnp.array([0])].sum())(t), TypeError, "uint32"),
        (lambda t: jax.jit(lambda t: t.numpy())(t), TypeError, "must be called outside of jitted functions"),
    ],
    ids=lambda value: None,
)
def test_misuse_is_a_readable_error(misuse: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        misuse(HostTable.from_numpy(ROWS))


@pytest.mark.slow
def test_branches_that_vmap_chooses_for_each_example_gather() -> None:
    """`vmap` of `cond` by a mapped predicate runs both branches and maps over all their operands, the table too."""
    table, other = HostTable.from_numpy(ROWS), DeviceTable.from_numpy(ROWS[::-1].copy())
    chosen, ids = np.array([True, False, True]), np.array([[1, 0], [2, 9], [-1, 0]])

    def one(table, other, chosen, ids):
        def other_branch(table, other):
            return gather(other, ids[::-1], scale=2.0) + table[ids[0]]

        return jax.lax.cond(chosen, lambda table, _: table[ids], other_branch, table, other)

    mapped = jax.vmap(one, (None, None, 0, 0))
    want = [one(table, other, chosen[n], ids[n]) for n in range(3)]
    for run in mapped, jax.jit(mapped):
        np.testing.assert_array_equal(run(table, other, chosen, ids), want)
    branches = [lambda t: t[jnp.array(0)], lambda t: 2 * t[jnp.array(1)]]
    switched = jax.vmap(lambda t, k: jax.lax.switch(k, branches, t), (None, 0))
    np.testing.assert_array_equal(jax.jit(switched)(table, jnp.array([0, 1])), [ROWS[0], 2 * ROWS[1]])


def test_a_stack_of_tables_that_vmap_maps_over_gives_the_rows_of_each() -> None:
    """JAX maps over the operands of a `cond` in the same way, so that a stack cannot be told apart and refused."""
    both = [ROWS, 2 * ROWS[::-1]]
    tables = jax.tree.map(lambda *x: jnp.stack([np.asarray(leaf) for leaf in x]), *map(HostTable.from_numpy, both))
    for run in (mapped := jax.vmap(lambda table: table[jnp.array([0, 3])])), jax.jit(mapped):
        np.testing.assert_array_equal(run(tables), [rows[[0, 3]] for rows in both])


def test_control_flow_and_pytrees() -> None:
    table = HostTable.from_numpy(ROWS)
    blocks = jnp.array([[0, 7], [3, 3]])

    @jax.jit
    def f(table: HostTable, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, rows = jax.lax.scan(lambda c, ids: (c + table[ids].sum(), table[ids]), 0.0, blocks)
        other = jax.lax.cond(total > 0, lambda t: t[blocks[0]], lambda t: t[blocks[1]], table)
        return rows, other

    rows, other = f(table, blocks)
    np.testing.assert_array_equal(rows, ROWS[np.asarray(blocks)])
    np.testing.assert_array_equal(other, ROWS[[0, 7]])
    assert jax.tree.structure(table) == jax.tree.structure(HostTable.from_numpy(ROWS))
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"features": table})
    assert jax.tree_util.keystr(path) == "['features'].rows"


def test_a_table_shared_by_the_devices_of_a_mesh() -> None:
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    table = HostTable.from_numpy(ROWS)
    shared = table.share(mesh)
    assert shared.read_only and "shared" in repr(shared)
    spec = jax.sharding.PartitionSpec
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, (len(devices), 6), np.int32))
    f = jax.jit(jax.shard_map(lambda t, i: t[i], mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x")))
    np.testing.assert_array_equal(f(shared, ids), ROWS[np.asarray(ids)])

    # The rows differ between the devices: gradients of what all of them have are sums over the devices.
    def loss(w: jax.Array, t: HostTable, i: jax.Array) -> jax.Array:
        both = t[i] * w, gather_done(gather_start(t, i)) * w
        return jax.lax.psum(sum(jnp.sum(rows) for rows in both), "x")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(spec(), spec(), spec("x")), out_specs=spec())
    gradient = jax.jit(jax.grad(mapped))(jnp.ones(ROWS.shape[1:]), shared, ids)
    np.testing.assert_allclose(gradient, 2 * ROWS[np.asarray(ids)].sum((0, 1)), rtol=1e-5)
    with pytest.raises(ValueError, match="shared by several devices"):
        scatter(shared, np.array([0]), ROWS[:1])


@pytest.mark.slow
def test_results_lie_on_the_device_of_the_table() -> None:
    for device in jax.devices()[-1:]:
        table = HostTable.from_numpy(ROWS, device=device)
        with jax.default_device(device):
            assert HostTable.zeros((2, 2))._leaf.devices() == {device}
        ids = np.array([3, 1])
        cached = CachedTable.from_ids(table, [3])
        for got in (
            table[ids],
            jax.jit(gather)(table, ids),
            cached[ids],
            cached.cache,
            cached.slots,
            gather(table, ids, scale=np.ones(8, np.float32)),
            prefetched_scan(lambda c, rows, _: (c + rows.sum(), None), 0.0, table, ids[:, None])[0],
            HostTable.zeros((2, 2), device=device)[ids],
        ):
            assert got.devices() == {device}
        optimizer = adam(0.1)
        state = optimizer.init(table)
        table, state = optimizer.update(RowGradient(ids, jnp.ones((2, 5))), state, table)
        assert {d for x in (table, state.first, state.second) for d in x._leaf.devices()} == {device}
        assert scatter(table, ids, jnp.ones((2, 5)))[ids].devices() == {device}
