"""`ShardedTable`: rows and sums of a table that is divided over devices are those of one table."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.distributed import ShardedTable, check_lost, link_bytes, make_mesh
from dejax.distributed._placing import spec_of
from dejax.host_gather import HostTable, RowGradient, adagrad, adam, scatter_add, sgd
from dejax.minibatch import NodeFeatures

pytestmark = pytest.mark.devices(4)

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((203, 6)).astype(np.float32)
IDS = RNG.integers(-2, 206, (4, 40)).astype(np.int32)
VALUES = RNG.standard_normal((4, 40, 6)).astype(np.float32)
P = jax.sharding.PartitionSpec


def over(mesh, function, tree, out, donate=False):
    """A function of a tree of tables and of arrays that are divided over the mesh, jitted."""
    specs = jax.tree.map(lambda leaf: spec_of(leaf, mesh), tree)
    out = specs if out is None else out
    mapped = jax.shard_map(function, mesh=mesh, in_specs=(specs, P("data")), out_specs=out, check_vma=False)
    return jax.jit(mapped, donate_argnums=0 if donate else ())


def read(mesh, table, ids=IDS, **options):
    def of_device(table, ids):
        rows, lost = table.gather(ids, **options)
        return rows, lost[None]

    return over(mesh, of_device, table, (P("data"), P("data")))(table, ids)


HOT = (3, 7, 150)
QUICK = [
    ("int8", "row", 4, "host", ()),
    ("int8", "row", 1, "host", HOT),
    ("float32", None, 4, "device", HOT),
    ("float8_e4m3fn", "column", 2, "device", HOT),
    ("float16", None, 2, "host", HOT),
    ("int32", None, 4, "device", ()),
]
PRODUCT = itertools.product(
    [("int8", "row"), ("float32", None), ("float8_e4m3fn", "column"), ("float16", None), ("int32", None)],
    (4, 1, 2),
    ("host", "device"),
    ((), HOT),
)
MORE = [(*kind, *rest) for kind, *rest in PRODUCT if (*kind, *rest) not in QUICK]


@pytest.mark.parametrize(
    "dtype, scale, devices, memory, hot", [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]
)
def test_rows_are_those_of_one_table(dtype, scale, devices, memory, hot) -> None:
    mesh = make_mesh(devices)
    rows = np.rint(ROWS * 20) if dtype == "int32" else ROWS
    table = ShardedTable.from_numpy(rows, mesh, dtype=dtype, scale=scale, memory=memory, hot=hot)
    got, lost = read(mesh, table)
    want = NodeFeatures.from_numpy(rows, dtype=dtype, scale=scale).gather(IDS)
    assert got.dtype == want.dtype and not lost.any()
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))
    if devices > 1:
        assert {shard.data.shape[0] for shard in table.words.addressable_shards} == {256 // devices}


@pytest.mark.parametrize(
    ("memory", "rule"),
    [("host", adam(0.01)), ("device", adagrad(0.1)), pytest.param("host", sgd(0.1), marks=pytest.mark.slow)],
    ids=["host-adam", "device-adagrad", "host-sgd"],
)
def test_updates_have_the_bits_of_one_table_and_are_in_place(memory, rule) -> None:
    mesh = make_mesh(4)
    table = ShardedTable.from_numpy(ROWS, mesh, memory=memory)
    tree = table, table.init(rule)

    def step(tree, given):
        table, state, _ = tree[0].update(rule, RowGradient(given[0].reshape(-1), given[1].reshape(-1, 6)), tree[1])
        return table, state

    jitted = over(mesh, step, tree, None, donate=True)
    places = [shard.data.unsafe_buffer_pointer() for shard in table.words.addressable_shards]
    whole = HostTable.from_numpy(ROWS)
    state = rule.init(whole)
    for ids in (IDS, IDS[::-1].copy()):
        tree = jitted(tree, (ids, VALUES))
        gradient = RowGradient(jnp.asarray(ids.reshape(-1)), jnp.asarray(VALUES.reshape(-1, 6)))
        whole, state = rule.update(gradient, state, whole)
    np.testing.assert_array_equal(tree[0].numpy(), whole.numpy())
    assert memory == "device" or places == [
        shard.data.unsafe_buffer_pointer() for shard in tree[0].words.addressable_shards
    ]
    for got, want in ((tree[1].first, state.first), (tree[1].second, state.second)):
        assert (got is None) == (want is None)
        if got is not None:
            np.testing.assert_array_equal(got.numpy(), want.numpy())


@pytest.mark.parametrize(
    ("memory", "devices"),
    [("host", 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in [("device", 4), ("host", 1)])],
)
def test_hot_rows_are_written_and_their_copies_stay_equal(memory, devices) -> None:
    """Updates have the bits of one table, and after each of them every device has the owner's rows."""
    mesh, rule = make_mesh(devices), adam(0.01)
    hot = np.array([1, 70, 150, 202])
    ids = IDS.copy()
    ids[:, ::3] = hot[np.arange(14) % 4]  # on all devices, many times
    table = ShardedTable.from_numpy(ROWS, mesh, memory=memory, hot=hot)
    tree = table, table.init(rule)
    assert tree[1].first.hot_ids is None

    def step(tree, given):
        gradient = RowGradient(given[0].reshape(-1), given[1].reshape(-1, 6))
        table, state, lost = tree[0].update(rule, gradient, tree[1])
        rows, _ = table.gather(given[0])  # read after the write, in the same step
        return (table, state), rows, lost[None]

    specs = jax.tree.map(lambda leaf: spec_of(leaf, mesh), tree)
    jitted = over(mesh, step, tree, (specs, P("data"), P("data")), donate=True)
    whole = HostTable.from_numpy(ROWS)
    state = rule.init(whole)
    for given in (ids, ids[::-1].copy()):
        tree, rows, lost = jitted(tree, (given, VALUES))
        gradient = RowGradient(jnp.asarray(given.reshape(-1)), jnp.asarray(VALUES.reshape(-1, 6)))
        whole, state = rule.update(gradient, state, whole)
        want = whole.numpy()
        np.testing.assert_array_equal(tree[0].numpy(), want)
        inside = (given >= 0) & (given < 203)
        np.testing.assert_array_equal(rows, np.where(inside[..., None], want[np.where(inside, given, 0)], 0))
        shards = [jax.device_put(shard.data, jax.memory.Space.Device) for shard in tree[0].hot_words.addressable_shards]
        copies = [np.asarray(shard).view(np.float32) for shard in shards]
        assert len(copies) == devices and all((copy == want[hot]).all() for copy in copies)
        assert not lost.any()
    often = np.tile(np.asarray(ids)[0], 50)  # of so many ids the margin of deviations is a small part
    assert tree[0].find_capacity([often], update=True) > tree[0].find_capacity([often])


def test_sums_of_float16_rows_and_hot_rows() -> None:
    mesh = make_mesh(2)
    table = ShardedTable.from_numpy(ROWS, mesh, dtype="float16", hot=[5, 120])

    def add(table, given):
        return table.scatter_add(*given)[0]

    got = over(mesh, add, table, None, donate=True)(table, (IDS[:2], VALUES[:2]))
    for shard in got.hot_words.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data).view(np.float16), got.numpy()[[5, 120]])


def test_a_table_to_train_has_copies_of_the_same_rows() -> None:
    mesh = make_mesh(2)
    table = ShardedTable.normal((100, 4), mesh, seed=3, hot=[2, 60])
    np.testing.assert_array_equal(np.asarray(table.hot_words).view(np.float32), table.numpy()[[2, 60]])


def test_sums_of_float16_rows() -> None:
    mesh = make_mesh(2)
    table = ShardedTable.from_numpy(ROWS, mesh, dtype="float16")
    ids, values = IDS[:2], VALUES[:2]

    def add(table, given):
        return table.scatter_add(*given)[0]

    got = over(mesh, add, table, None, donate=True)(table, (ids, values))
    want = scatter_add(HostTable.from_numpy(ROWS.astype(np.float16)), ids.reshape(-1), values.reshape(-1, 6))
    np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_what_does_not_fit_is_counted_and_has_rows_of_zeros() -> None:
    mesh = make_mesh(4)
    table = ShardedTable.from_numpy(ROWS, mesh, hot=[5])
    ids = np.full((4, 40), -1, np.int32)
    ids[:, :9] = np.arange(65, 74)  # of the second device
    ids[:, 9] = 5
    got, lost = read(mesh, table, ids, capacity=4)
    assert lost.tolist() == [5, 0, 5, 5]
    want = np.where((ids >= 0)[..., None], ROWS[ids], 0)
    there = np.ones((4, 40, 1), bool)
    there[[0, 2, 3], 4:9] = False
    np.testing.assert_array_equal(got, np.where(there, want, 0))
    with pytest.raises(ValueError, match="got 15 rows more; give a larger `capacity`"):
        check_lost(lost)
    check_lost(np.zeros(4))
    capacity = table.find_capacity(list(ids))
    assert capacity == 9 + 5 * 3  # five times the root of the mean
    assert not read(mesh, table, ids, capacity=capacity)[1].any()


def test_bytes_over_links_are_those_that_are_told() -> None:
    mesh = make_mesh(4)
    for dtype, scale in (("float16", None), ("int8", "row")):
        table = ShardedTable.from_numpy(ROWS, mesh, dtype=dtype, scale=scale)
        specs = jax.tree.map(lambda leaf: spec_of(leaf, mesh), table)
        mapped = jax.shard_map(
            lambda table, ids: table.gather(ids, capacity=12)[0],
            mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check_vma=False,
        )  # fmt: skip
        found = link_bytes(jax.jit(mapped).lower(table, IDS).compile(), 4)
        told = table.exchange_bytes(40, capacity=12)
        assert found == {"all-to-all": told["ids"] + told["rows"]}
        assert told == {"ids": 3 * 12 * 4, "rows": 3 * 12 * (12 if dtype == "float16" else 6 + 4)}


def test_errors() -> None:
    mesh = make_mesh(2)
    table = ShardedTable.from_numpy(ROWS, mesh)
    assert "2 devices" in repr(table) and len(table) == 203 and table.shape == (203, 6)
    with pytest.raises(ValueError, match="jax.shard_map over it"):
        table.gather(IDS)
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        read(mesh, table, capacity=0)
    with pytest.raises(TypeError, match="must be integers"):
        read(mesh, table, IDS.astype(np.float32))
    with pytest.raises(ValueError, match="`memory` must be 'host' or 'device', got 'disk'"):
        ShardedTable.from_numpy(ROWS, mesh, memory="disk")
    with pytest.raises(ValueError, match="`hot` must be integers from 0 to 202, got"):
        ShardedTable.from_numpy(ROWS, mesh, hot=[203])
    with pytest.raises(ValueError, match="distinct"):
        ShardedTable.from_numpy(ROWS, mesh, hot=[3, 3])
    with pytest.raises(ValueError, match="`axis` must be one of the mesh's axes"):
        ShardedTable.from_numpy(ROWS, mesh, axis="model")
    with pytest.raises(ValueError, match="has scales"):
        ShardedTable.from_numpy(ROWS, mesh, dtype="int8", scale="row").init(adam(0.1))
