"""`FeatureStore` with a table that is divided over devices: the rows, and a training step, of one array."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import distributed
from dejax.distributed import Part, ShardedTable, check_lost, data_parallel, make_mesh
from dejax.distributed._placing import spec_of
from dejax.host_gather import DeviceTable, HostTable, RowGradient, adam, sgd
from dejax.minibatch import FeatureStore, HeteroTopology, sample_blocks
from tests.cases import slow_but

pytestmark = pytest.mark.devices(4)

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((103, 6)).astype(np.float32)
OTHER = RNG.standard_normal((40, 3)).astype(np.float32)
IDS = {"paper": RNG.integers(-2, 106, (2, 20)).astype(np.int32), "author": RNG.integers(0, 40, (2, 9)).astype(np.int32)}
P = jax.sharding.PartitionSpec


def store_of(mesh, **options) -> FeatureStore:
    store = FeatureStore.from_arrays({"author": OTHER})
    return distributed.share(store.with_table("paper", ShardedTable.from_numpy(ROWS, mesh, **options)), mesh)


def on_devices(mesh, function, store, ids=IDS):
    """What each device gives, stacked."""
    specs = jax.tree.map(lambda leaf: spec_of(leaf, mesh), store)
    stacked = lambda store, ids: jax.tree.map(lambda x: x[None], function(store, jax.tree.map(lambda i: i[0], ids)))  # noqa: E731
    mapped = jax.shard_map(stacked, mesh=mesh, in_specs=(specs, P("data")), out_specs=P("data"), check_vma=False)
    return jax.jit(mapped)(store, ids)


NARROW = {"dtype": "int8", "scale": "row", "hot": [3, 50]}


@pytest.mark.parametrize(("options", "dtype", "how"), [(NARROW, "bfloat16", "gather"), ({}, None, "gather_start")])
def test_rows_are_those_of_an_array(options, dtype, how) -> None:
    mesh = make_mesh(2)

    def read(store, ids):
        if how == "gather":
            return store.gather(ids, dtype=dtype, order="sorted")
        return store.gather_start(ids, dtype=dtype).gather_done()

    store = store_of(mesh, **options)
    got = on_devices(mesh, read, store)
    plain = FeatureStore.from_arrays(
        {"paper": ROWS, "author": OTHER}, **{name: {"paper": options.get(name)} for name in ("dtype", "scale")}
    )
    want = plain.gather(IDS, dtype=dtype)
    for name in IDS:
        assert got[name].dtype == want[name].dtype
        np.testing.assert_array_equal(np.asarray(got[name], np.float32), np.asarray(want[name], np.float32))
    assert store["paper"].result_dtype == plain["paper"].result_dtype
    assert store.row_bytes == plain.row_bytes
    store.check_counts({"paper": 103, "author": 40})
    assert "paper: (103, 6)" in repr(store) and "divided over devices" in repr(store)


def test_started_rows_with_work_in_between() -> None:
    mesh = make_mesh(2)

    def read(store, ids):
        x = jnp.arange(4.0)
        pending, x = store.gather_start(ids, before=x)
        rows, x = pending.gather_done(after=x * 2)
        return rows["paper"], x

    got, x = on_devices(mesh, read, store_of(mesh))
    np.testing.assert_array_equal(
        got,
        np.where((IDS["paper"] >= 0)[..., None], ROWS[np.clip(IDS["paper"], 0, 102)], 0)
        * (IDS["paper"] < 103)[..., None],
    )
    np.testing.assert_array_equal(x, np.tile(np.arange(4.0) * 2, (2, 1)))


def test_what_does_not_fit_is_counted() -> None:
    mesh = make_mesh(2)
    ids = {"paper": np.stack([np.arange(100, 103), np.arange(3)]).astype(np.int32)}  # all of the other device
    counted = lambda capacity: on_devices(  # noqa: E731
        mesh, lambda store, ids: store.gather_counted(ids, capacity={"paper": capacity}), store_of(mesh), ids
    )
    rows, lost = counted(2)
    assert lost.tolist() == [1, 1]
    np.testing.assert_array_equal(rows["paper"][:, :2], ROWS[ids["paper"][:, :2]])
    assert not np.asarray(rows["paper"][:, 2]).any()
    with pytest.raises(ValueError, match="got 2 rows more"):
        check_lost(lost)
    assert not counted(3)[1].any()


def test_a_mini_batch_step_on_two_devices_is_that_of_an_array() -> None:
    rng, counts = np.random.default_rng(1), {"paper": 103, "author": 40}
    edges = {
        ("paper", "cites", "paper"): (rng.integers(0, 103, 300), rng.integers(0, 103, 300)),
        ("author", "writes", "paper"): (rng.integers(0, 40, 200), rng.integers(0, 103, 200)),
    }
    topology = HeteroTopology.from_edges(edges, counts)

    def gradients(w, key, seeds, data):
        sample = sample_blocks(key, data["topology"], ("paper", seeds), [3])
        rows = data["store"].gather(sample.node_ids)

        def loss_of(w):
            return sum(jnp.tanh(rows[name] @ w[name]).sum() for name in w) / seeds.size

        loss, of_w = jax.value_and_grad(loss_of)(w)
        return Part(loss, of_w, weight=(seeds >= 0).sum(), counts=sample.lost.sum())

    def update(w, mean):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, mean.gradients)

    def run(mesh, store):
        w = {"paper": jnp.ones((6, 2)), "author": jnp.ones((3, 2))}
        data = {"topology": topology, "store": store}
        if mesh is not None:
            w, data = distributed.share(w, mesh, writable=True), distributed.share(data, mesh)
        step, losses = data_parallel(gradients, update, mesh, parts=2), []
        for number in range(3):
            seeds = np.random.default_rng(number).integers(0, 103, 16).astype(np.int32)
            w, report = step(w, jax.random.key(number), seeds, data)
            losses.append(float(report.loss))
        return losses, w

    mesh = make_mesh(2)
    got, want = run(mesh, store_of(mesh)), run(None, FeatureStore.from_arrays({"paper": ROWS, "author": OTHER}))
    np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-6)
    for name in want[1]:
        np.testing.assert_allclose(got[1][name], want[1][name], rtol=0, atol=1e-6)


ADAM = adam(0.1)
CUT = {
    "host": lambda store, mesh: store.embedding("author", 40, 3, seed=2),
    "cached": lambda store, mesh: store.embedding("author", 40, 3, seed=2).cached({"author": [3, 9]}),
    "device": lambda store, mesh: store.embedding("author", 40, 3, seed=2, on_device=True),
    "split": lambda store, mesh: store.embedding("author", 40, 3, seed=2, on_device=[1, 7, 30]),
    "divided": lambda store, mesh: store.with_table(
        "author", ShardedTable.normal((40, 3), mesh, seed=2), trainable=True
    ),
    "divided, device": lambda store, mesh: store.with_table(
        "author", ShardedTable.normal((40, 3), mesh, seed=2, memory="device"), trainable=True
    ),
    "divided, hot": lambda store, mesh: store.with_table(
        "author", ShardedTable.normal((40, 3), mesh, seed=2, hot=[3, 9, 39]), trainable=True
    ),
}


def trained(mesh, kind, *, rule=ADAM, capacity=None, steps=3, parts=4):
    """(rows, losses, counts) of an embedding after steps of `data_parallel`; many equal ids."""

    def gradients(state, key, seeds, data):
        ids = {"author": jnp.where(seeds >= 0, seeds // 2, -1)}
        rows, lost = state["store"].gather_counted(ids, capacity={})
        loss = lambda rows: (jnp.sin(rows["author"] + data["shift"]) ** 2).sum() / seeds.size  # noqa: E731
        value, found = jax.value_and_grad(loss)(rows)
        return Part(value, {}, (seeds >= 0).sum(), {"author": RowGradient(ids["author"], found["author"])}, lost)

    def update(state, mean):
        ids, values = ({"author": getattr(mean.rows["author"], name)} for name in ("ids", "values"))
        if capacity is None:
            store, moments = state["store"].update(rule, ids, values, state["moments"])
            return {"store": store, "moments": moments, "lost": state["lost"]}
        store, moments, lost = state["store"].update_counted(rule, ids, values, state["moments"], capacity=capacity)
        return {"store": store, "moments": moments, "lost": state["lost"] + jax.lax.psum(lost, "data")}

    store = CUT[kind](FeatureStore(), mesh)
    state, data = {"store": store, "moments": store.init(rule), "lost": jnp.zeros((), jnp.int32)}, {"shift": 0.3}
    if mesh is not None:
        state, data = distributed.share(state, mesh, writable=True), distributed.share(data, mesh)
    step, losses = data_parallel(gradients, update, mesh, parts=parts), []
    for number in range(steps):
        seeds = np.random.default_rng(number).integers(-2, 84, 32).astype(np.int32)
        state, report = step(state, jax.random.key(number), seeds, data)
        assert int(report.counts) == 0
        losses.append(float(report.loss))
    after = state["store"]["author"].table
    rows = after.numpy() if isinstance(after, ShardedTable) else distributed.local(after).numpy()
    return np.array(rows), losses, int(state["lost"])


@cache
def trained_on_one_device():
    return trained(None, "host")


KINDS = slow_but(["divided, hot"], CUT)


@pytest.mark.parametrize("kind", KINDS)
def test_trained_rows_are_those_of_one_device(kind) -> None:
    want = trained_on_one_device()
    for devices in (4, 2) if kind.startswith("divided") else (2,):
        rows, losses, _ = trained(make_mesh(devices), kind)
        np.testing.assert_allclose(rows, want[0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(losses, want[1], rtol=0, atol=1e-6)
    if kind != "cached" and not kind.startswith("divided"):
        np.testing.assert_array_equal(trained(None, kind)[0], want[0])


def test_gradients_that_do_not_fit_are_counted() -> None:
    mesh, first = make_mesh(2), ShardedTable.normal((40, 3), make_mesh(2), seed=2).numpy()
    rows, _, lost = trained(mesh, "divided", rule=sgd(0.1), capacity={"author": 2}, steps=1, parts=2)
    assert lost > 0 and 0 < (rows != first).any(1).sum() <= 8  # two rows at most from each device to each owner
    assert trained(mesh, "divided", capacity={"author": 32}, steps=1)[2] == 0


def test_numbers_of_a_new_embedding() -> None:
    for dtype in ("float32", "bfloat16"):
        store = FeatureStore().embedding("author", 103, 5, seed=7, dtype=dtype, stddev=0.5)
        table = ShardedTable.normal((103, 5), make_mesh(4), seed=7, dtype=dtype, stddev=0.5)
        assert table.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(table.numpy(), store["author"].table.numpy())


def test_misuse_of_training_is_told() -> None:
    mesh = make_mesh(2)
    with pytest.raises(ValueError, match="must be shared for writing, got one of a single device; .*share") as raised:
        store = FeatureStore().embedding("author", 40, 3)
        moments = store.init(sgd(0.1))
        step = lambda store, ids: store.update(sgd(0.1), ids, {"author": jnp.ones((9, 3))}, moments)[1]  # noqa: E731
        on_devices(mesh, step, store, {"author": IDS["author"]})
    assert raised.value.__notes__[0] == "for the node type 'author'"
    with pytest.raises(TypeError, match="must have rows of float32, bfloat16, float16, got int8"):
        FeatureStore().with_table("paper", ShardedTable.zeros((4, 2), mesh, dtype="int8"), trainable=True)
    with pytest.raises(ValueError, match="got a read-only DeviceTable; make it with writable=True"):
        FeatureStore().with_table("paper", DeviceTable.from_numpy(ROWS), trainable=True)
    with pytest.raises(ValueError, match="must have no `row_scale`"):
        FeatureStore().with_table("paper", HostTable.from_numpy(ROWS), row_scale=2.0, trainable=True)
    with pytest.raises(ValueError, match="`num_nodes` must be at least 0 and `width` at least 1, got 3 and 0"):
        ShardedTable.normal((3, 0), mesh)
    plain = FeatureStore().embedding("author", 4, 3)
    with pytest.raises(
        ValueError, match="`capacity` must be of a table that is divided over devices, got one on: host"
    ):
        ids, rows = {"author": np.array([1])}, {"author": np.ones((1, 3), np.float32)}
        plain.update_counted(sgd(0.1), ids, rows, plain.init(sgd(0.1)), capacity={"author": 1})


def test_misuse_is_told() -> None:
    mesh = make_mesh(2)
    store = store_of(mesh)
    with pytest.raises(
        ValueError, match=r"must be used inside of jax.shard_map over its axis .*data_parallel"
    ) as raised:
        store.gather(IDS)
    assert raised.value.__notes__ == ["for the node type 'paper'"]
    with pytest.raises(ValueError, match="`row_scale` and `column_scale` must be None"):
        FeatureStore().with_table("paper", store["paper"].table, row_scale=2.0)
    with pytest.raises(
        ValueError, match="must lie in host memory or on a drive alone, got the placement 'divided over devices"
    ):
        store.cached({"paper": [1]})
    with pytest.raises(ValueError, match="`mode` must be 'fill' for a table that is divided over devices, got 'raise'"):
        store.gather(IDS, mode="raise")
    with pytest.raises(
        ValueError, match="`capacity` must be of a table that is divided over devices, got one on: host"
    ):
        store.gather_counted({"author": IDS["author"]}, capacity={"author": 3})
    with pytest.raises(ValueError, match="the type must be one of the store's"):
        store.gather_counted({"author": IDS["author"]}, capacity={"venue": 3})
