"""What `dejax.distributed` promises, through its public names, against numpy and a single device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import distributed, rgnn
from dejax.distributed import Part, ShardedTable, check_lost, data_parallel, make_mesh
from dejax.distributed.full_graph import ShardedGraph, load_edges, load_nodes, load_parts, over_mesh, save_parts
from dejax.distributed.partition import partition
from dejax.host_gather import HostTable, RowGradient, gather, gather_done, gather_start, scatter, scatter_add, sgd
from dejax.minibatch import FeatureStore

pytestmark = pytest.mark.devices(4)

N, EDGES, TYPES, K = 60, 400, 3, 5
P = jax.sharding.PartitionSpec
RNG = np.random.default_rng(0)
SENDERS, RECEIVERS = RNG.integers(0, N, (2, EDGES))
KINDS = RNG.integers(0, TYPES, EDGES)
X = RNG.normal(size=(N, K)).astype(np.float32)
W = RNG.normal(size=(TYPES, K, K)).astype(np.float32)


@rgnn.program
def mean_by_type(g: Any, x: Any, w: Any) -> Any:
    return g.mean_to_dst(g.src(x) @ g.per_edge_type(w))


def graph() -> rgnn.RelGraph:
    return rgnn.RelGraph.from_edges(SENDERS, RECEIVERS, KINDS, num_nodes=N, num_edge_types=TYPES)


def mean_by_type_in_numpy(cotangent: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The layer's result, and the gradients of its inner product with `cotangent` by X and W."""
    degree = np.maximum(np.bincount(RECEIVERS, minlength=N), 1)[:, None]
    y, by_x, by_w = np.zeros((N, K)), np.zeros((N, K)), np.zeros((TYPES, K, K))
    for sender, receiver, kind in zip(SENDERS, RECEIVERS, KINDS, strict=True):
        g = cotangent[receiver] / degree[receiver]
        y[receiver] += X[sender] @ W[kind] / degree[receiver]
        by_x[sender] += W[kind] @ g
        by_w[kind] += np.outer(X[sender], g)
    return y, by_x, by_w


def test_a_full_graph_layer_and_its_gradients() -> None:
    """Of a graph that is partitioned over four devices, and of the same graph in a folder, as processes open it."""
    found = partition(graph(), 4, method="stream")
    assert found.report.num_edges == EDGES and 0 < found.report.cut_edges < EDGES
    split = ShardedGraph.from_graph(graph(), found.owner(), make_mesh(4, axis="parts"))
    layer, cotangent = over_mesh(mean_by_type), np.random.default_rng(1).normal(size=(N, K)).astype(np.float32)
    there = split.shard_nodes(cotangent)

    @jax.jit
    def both(x: Any, w: Any) -> Any:
        y, pull = jax.vjp(lambda x, w: layer(split, x, w), x, w)
        return y, pull(there)

    y, (by_x, by_w) = both(split.shard_nodes(X), jnp.asarray(W))
    wanted = mean_by_type_in_numpy(cotangent)
    for got, want in zip((split.unshard_nodes(y), split.unshard_nodes(by_x), by_w), wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_divided_graph_in_a_folder(tmp_path: Path) -> None:
    mesh = make_mesh(2, axis="parts")
    owner = partition(graph(), 2, method="stream").owner()
    save_parts(tmp_path, graph(), owner, 2, nodes={"x": X}, edges={"weight": np.arange(EDGES, dtype=np.float32)})
    split = load_parts(tmp_path, mesh)
    there = load_nodes(tmp_path, split, "x")
    np.testing.assert_array_equal(split.unshard_nodes(there), X)
    np.testing.assert_array_equal(split.unshard_edges(load_edges(tmp_path, split, "weight")), np.arange(EDGES))
    want = mean_by_type_in_numpy(np.zeros((N, K)))[0]
    found = split.unshard_nodes(over_mesh(mean_by_type)(split, there, W))
    np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-5)


def test_rows_and_updates_of_a_divided_table() -> None:
    """Rows by number and zeros for numbers without a row; sums of equal ids; what does not fit is counted.

    The functions of `host_gather` read and write it as any table.
    """
    mesh, rows = make_mesh(4), np.arange(206, dtype=np.float32).reshape(103, 2)
    ids = np.random.default_rng(2).integers(-2, 106, (4, 20)).astype(np.int32)
    values = np.random.default_rng(3).integers(-3, 4, (4, 20, 2)).astype(np.float32)
    table = ShardedTable.from_numpy(rows, mesh, hot=[3, 50])
    optimizer = sgd(1.0)
    moments = optimizer.init(table)

    def step(table: Any, ids: Any, values: Any) -> Any:
        pending, values = gather_start(table, ids, before=values)
        before = gather_done(pending)
        lost, few = table.gather(ids)[1], table.gather(ids, capacity=1)[1]
        after, _ = optimizer.update(RowGradient(ids.reshape(-1), values.reshape(-1, 2)), moments, table)
        after = scatter_add(scatter(after, ids[:, :1], values[:, :1]), ids, values)
        return after, before, gather(after, ids), lost[None], few[None]

    specs = jax.tree.map(lambda leaf: leaf.sharding.spec, table)
    mapped = jax.shard_map(
        step, mesh=mesh, in_specs=(specs, *[P("data")] * 2), out_specs=(specs, *[P("data")] * 4), check_vma=False
    )
    table, before, after, lost, few = jax.jit(mapped, donate_argnums=0)(table, ids, values)
    valid = (ids >= 0) & (ids < 103)
    read = lambda rows: np.where(valid[..., None], rows[np.where(valid, ids, 0)], 0)  # noqa: E731
    np.testing.assert_array_equal(before, read(rows))
    want = rows.copy()
    np.subtract.at(want, ids[valid], values[valid])
    for device in range(4):  # of equal ids the last one counts
        for place in np.flatnonzero(valid[device, :1]):
            want[ids[device, place]] = values[device, place]
    np.add.at(want, ids[valid], values[valid])
    np.testing.assert_array_equal(after, read(want))
    np.testing.assert_array_equal(table.numpy(), want)
    assert not lost.any() and few.any()
    with pytest.raises(ValueError, match="rows more; give a larger `capacity`"):
        check_lost(few)


def test_a_step_over_devices_is_the_step_of_the_whole_batch() -> None:
    """Dense weights and rows of a table in host memory by gradient descent, with seeds that are padding."""
    mesh, rate = make_mesh(4), 0.1
    rng = np.random.default_rng(4)
    labels, w = rng.normal(size=(N, 2)).astype(np.float32), rng.normal(size=(K, 2)).astype(np.float32)
    rule = sgd(rate)
    store = FeatureStore().with_table("node", HostTable.from_numpy(X), trainable=True)
    state = {"w": jnp.asarray(w), "store": store, "moments": store.init(rule)}

    def gradients(state: Any, key: Any, seeds: Any, data: Any) -> Part:
        rows, real = state["store"].gather({"node": seeds})["node"], seeds >= 0

        def loss_of(w: Any, rows: Any) -> Any:
            losses = ((rows @ w - data[seeds]) ** 2).sum(-1)
            return jnp.where(real, losses, 0).sum() / jnp.maximum(real.sum(), 1)

        loss, (of_w, of_rows) = jax.value_and_grad(loss_of, (0, 1))(state["w"], rows)
        return Part(loss, of_w, real.sum(), {"node": RowGradient(seeds, of_rows)}, real.sum())

    def update(state: Any, mean: Any) -> Any:
        rows = mean.rows["node"]
        store, moments = state["store"].update(rule, {"node": rows.ids}, {"node": rows.values}, state["moments"])
        return {"w": state["w"] - rate * mean.gradients, "store": store, "moments": moments}

    state = distributed.share(state, mesh, writable=True)
    step, table = data_parallel(gradients, update, mesh), X.astype(np.float64)
    for number in range(3):
        seeds = np.random.default_rng(number).integers(0, N, 16).astype(np.int32)
        seeds[11:] = -1  # a device has padding alone
        state, report = step(state, jax.random.key(number), seeds, jnp.asarray(labels))
        seeds = seeds[:11]
        error = table[seeds] @ w - labels[seeds]
        np.testing.assert_allclose(report.loss, (error**2).sum(-1).mean(), rtol=1e-5)
        assert int(report.counts) == 11
        of_w, of_rows = 2 * table[seeds].T @ error / 11, 2 * error @ w.T / 11
        np.subtract.at(table, seeds, rate * of_rows)
        w = w - rate * of_w
    np.testing.assert_allclose(state["w"], w, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(distributed.local(state["store"]["node"].table).numpy(), table, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("before, after", [(4, 2), (1, 4)])
def test_a_checkpoint_is_read_on_another_number_of_devices(before: int, after: int, tmp_path: Path) -> None:
    def state_of(devices: int, rows: np.ndarray, number: int) -> Any:
        mesh = make_mesh(devices)
        authors = FeatureStore().with_table("author", ShardedTable.from_numpy(rows, mesh), trainable=True)
        state = {"w": jnp.full(3, number + 0.25), "authors": authors, "moments": authors.init(sgd(0.1))}
        state |= {"table": HostTable.from_numpy(rows[:4]), "key": jax.random.key(number)}
        return distributed.share(state, mesh, writable=True)

    rows = np.arange(360, dtype=np.float32).reshape(120, 3)
    distributed.save(tmp_path, 7, state_of(before, rows, 3))
    like = state_of(after, np.zeros_like(rows), 0)
    words = lambda state: state["authors"]["author"].table.words.addressable_shards[0].data  # noqa: E731
    place = words(like).unsafe_buffer_pointer()
    assert distributed.latest_step(tmp_path) == 7
    got, step = distributed.restore(tmp_path, like)
    assert step == 7 and words(got).unsafe_buffer_pointer() == place
    np.testing.assert_array_equal(got["authors"]["author"].table.numpy(), rows)
    np.testing.assert_array_equal(got["table"].numpy(), rows[:4])
    np.testing.assert_array_equal(got["w"], [3.25] * 3)
    assert len(got["w"].sharding.device_set) == after
    assert jax.random.key_data(got["key"]).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
