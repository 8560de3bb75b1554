"""`FeatureStore` with a table that is divided over devices: the rows, and a training step, of one array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import _native, distributed
from dejax.distributed import Part, ShardedTable, check_lost, data_parallel, make_mesh
from dejax.distributed._placing import spec_of
from dejax.minibatch import FeatureStore, HeteroTopology, sample_blocks

pytestmark = [
    pytest.mark.skipif(
        _native.unavailable_reason() is not None, reason=f"no native extension: {_native.unavailable_reason()}"
    ),
    pytest.mark.newest_jax,
]
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


@pytest.mark.parametrize("how", ["gather", "gather_start"])
@pytest.mark.parametrize(
    ("options", "dtype"), [({}, None), ({"dtype": "int8", "scale": "row", "hot": [3, 50]}, "bfloat16")]
)
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
    with pytest.raises(ValueError, match="2 rows did not fit"):
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


def test_misuse_is_told() -> None:
    mesh = make_mesh(2)
    store = store_of(mesh)
    with pytest.raises(ValueError, match=r"read inside of jax.shard_map over it; .*data_parallel") as raised:
        store.gather(IDS)
    assert raised.value.__notes__ == ["for the node type 'paper'"]
    with pytest.raises(ValueError, match="`row_scale` and `column_scale` must be None"):
        FeatureStore().with_table("paper", store["paper"].table, row_scale=2.0)
    with pytest.raises(ValueError, match="must lie in host memory alone, it lies on: divided over devices"):
        store.cached({"paper": [1]})
    with pytest.raises(ValueError, match="`mode` must be 'fill' for a table that is divided over devices, got 'raise'"):
        store.gather(IDS, mode="raise")
    with pytest.raises(
        ValueError, match="`capacity` must be of a table that is divided over devices, got one on: host"
    ):
        store.gather_counted({"author": IDS["author"]}, capacity={"author": 3})
    with pytest.raises(ValueError, match="the type must be one of the store's"):
        store.gather_counted({"author": IDS["author"]}, capacity={"venue": 3})
