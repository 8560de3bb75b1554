"""`data_parallel`: the losses of one device with the same global batch, on CPU devices and in processes."""

import dataclasses
import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax import distributed
from dejax.distributed import Part, data_parallel, make_mesh
from dejax.host_gather import (
    CachedTable,
    HostTable,
    OptimizerState,
    RowGradient,
    SplitTable,
    adam,
    gather,
    scatter_add,
    sgd,
)
from dejax.minibatch.topology._building import aligned
from tests.distributed import job, processes

pytestmark = pytest.mark.devices(4)

ROWS = np.random.default_rng(0).standard_normal((50, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def one_device():
    return job.run(None, 50)[0]


@pytest.mark.slow
@pytest.mark.parametrize("devices, tables", [(4, "sharded"), (2, "shared"), (2, "sharded"), (4, "shared")])
def test_losses_of_a_sampled_job_are_those_of_one_device(one_device, devices, tables) -> None:
    losses, state = job.run(make_mesh(devices), 50, tables)
    np.testing.assert_allclose(losses, one_device, rtol=0, atol=1e-6)
    assert one_device[-1] < one_device[0] - 0.3
    assert state["params"]["w"].sharding.is_fully_replicated


@pytest.mark.cpu_only("the processes run on the CPU, and are compared with this process to 1e-6")
@pytest.mark.parametrize(
    "count, tables",
    [
        (2, "plain"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(2, "shared"), (2, "sharded"), (4, "sharded")]),
    ],
)
def test_losses_of_processes_are_those_of_one_device(count, tables, tmp_path, request) -> None:
    want = job.run(make_mesh(1), 20, tables)[0] if tables == "plain" else request.getfixturevalue("one_device")
    processes.finish(processes.start(count, tmp_path, steps=20, tables=tables), tmp_path)
    for process in range(count):
        found = processes.losses(tmp_path, process)
        np.testing.assert_allclose([found[k] for k in range(20)], want[:20], rtol=0, atol=1e-6)


def gradients(state, key, ids, data):
    rows, real = gather(state["table"], ids), ids >= 0

    def loss_of(w, rows):
        losses = ((rows @ w - data[ids]) ** 2).sum(-1)
        return jnp.where(real, losses, 0).sum() / real.sum()

    loss, (of_w, of_rows) = jax.value_and_grad(loss_of, (0, 1))(state["w"], rows)
    noise = jax.random.normal(key, ())
    return Part({"loss": loss, "noise": noise}, of_w, real.sum(), {"t": RowGradient(ids, of_rows)}, real.sum())


def update(state, mean):
    table, moments = state["rule"].update(mean.rows["t"], state["moments"], state["table"])
    return {**state, "w": state["w"] - 0.05 * mean.gradients, "table": table, "moments": moments}


@cache
def trained(mesh, rule, parts=4, cached=False, steps=6, per_call=1):
    table = HostTable.from_numpy(ROWS)
    moments = rule.init(table)
    if cached:
        table = CachedTable.from_ids(table, [3, 8, 20])
    w = jnp.asarray(np.random.default_rng(1).standard_normal((6, 2)), jnp.float32)
    labels = jnp.asarray(np.random.default_rng(2).standard_normal((50, 2)), jnp.float32)
    state = {"w": w, "table": table, "moments": moments}
    if mesh is not None:
        state = distributed.share(state, mesh, writable=True)

    def given(state, mean):
        after = update({**state, "rule": rule}, mean)
        return {name: after[name] for name in state}

    step = data_parallel(gradients, given, mesh, parts=parts, steps=per_call)
    reports = []
    for first in range(0, steps, per_call):
        numbers = range(first, first + per_call)
        ids = np.stack([np.random.default_rng([3, n]).integers(0, 12, 32) for n in numbers]).astype(np.int32)
        ids[:, 32 - 9 :] = -1  # one part has no real seed; there are many equal ids
        keys = jnp.stack([jax.random.key(n) for n in numbers])
        state, report = step(state, *((keys, ids) if per_call > 1 else (keys[0], ids[0])), labels)
        found = [np.ravel(x) for x in (report.loss["loss"], report.loss["noise"], report.counts)]
        reports += [(float(loss), float(noise), int(count)) for loss, noise, count in zip(*found, strict=True)]
    return reports, state, gather(state["table"], np.arange(50)) if mesh is None else state["table"].numpy()


ADAM = adam(0.05)


@pytest.mark.parametrize(
    "devices, cached", [(4, True), *(pytest.param(n, False, marks=pytest.mark.slow) for n in (1, 4))]
)
def test_tables_are_written_once_for_all_devices(devices, cached) -> None:
    want, _, rows = trained(None, ADAM)
    got, state, table = trained(make_mesh(devices), ADAM, cached=cached)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(table, rows, rtol=0, atol=2e-6)
    assert [count for _, _, count in got] == [23] * 6
    host = state["table"].table if cached else state["table"]
    copies = [np.asarray(shard.data) for shard in host._leaf.addressable_shards]
    assert len(copies) == devices and all(np.array_equal(copies[0], copy) for copy in copies)
    if cached:
        np.testing.assert_array_equal(state["table"].cache, copies[0][[3, 8, 20]])


@pytest.mark.parametrize("devices, cached", [pytest.param(None, False, marks=pytest.mark.slow), (4, True)])
def test_several_steps_of_a_call_are_those_of_several_calls(devices, cached) -> None:
    mesh = None if devices is None else make_mesh(devices)
    want, state, rows = trained(mesh, ADAM, cached=cached)
    got, other, again = trained(mesh, ADAM, cached=cached, per_call=3)
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-6)
    np.testing.assert_allclose(again, rows, rtol=0, atol=1e-6)
    np.testing.assert_allclose(other["w"], state["w"], rtol=0, atol=1e-6)


def test_steps_of_a_call_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="`steps` must be at least 1, got 0"):
        data_parallel(gradients, update, steps=0)
    step = data_parallel(gradients, update, make_mesh(2), steps=3)
    keys = jax.random.split(jax.random.key(0), 3)
    message = r"must be \[3 steps, batch, ...\] with a batch that is a multiple of 2 parts, got shape \(32,\)"
    with pytest.raises(ValueError, match=message):
        step({}, keys, np.zeros(32, np.int32))
    with pytest.raises(ValueError, match=r"`key` must be key\[3\], one for each step, got shape \(\)"):
        step({}, jax.random.key(0), np.zeros((3, 32), np.int32))


def test_devices_wait_for_the_writes_of_the_others() -> None:
    """GPUs of a process write parts of one table. XLA once dropped what they wait by, since nothing used its result."""
    mesh = make_mesh(2)
    table = HostTable.from_numpy(ROWS).share(mesh, writable=True)
    table = HostTable(table._leaf, dataclasses.replace(table._spec, sharers=2))  # as GPUs have it
    everywhere, divided = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")

    def step(table, ids, rows):
        return scatter_add(table, ids, rows)

    over = jax.shard_map(
        step, mesh=mesh, in_specs=(everywhere, divided, divided), out_specs=everywhere, check_vma=False
    )
    ids, rows = jnp.arange(6, dtype=jnp.int32), jnp.ones((6, 6), jnp.float32)
    text = jax.jit(over, donate_argnums=0).lower(table, ids, rows).compile().as_text()
    assert len(re.findall(r" all-reduce(?:-start)?\(", text)) == 1
    # The write of no row comes last, and takes what the sum gave.
    assert len(re.findall(r'custom_call_target="dejax_table_update"', text)) == 2


def test_sums_of_equal_ids_have_the_bits_of_one_device() -> None:
    ids = jnp.asarray([1, 0, 1, 2, 1, 2, 1, 1])
    values = jnp.asarray(np.random.default_rng(0).standard_normal((8, 6)) * 1e3, jnp.float32)
    rule = sgd(0.1)
    table = HostTable.from_numpy(ROWS)
    start = OptimizerState(jnp.zeros((), jnp.int32), None, None)
    want, _ = rule.update(RowGradient(ids, values), start, table)
    mesh = make_mesh(4)
    shared = HostTable.from_numpy(ROWS).share(mesh, writable=True)

    def step(table, ids, values):
        return rule.update(RowGradient(ids, values), start, table)[0]

    everywhere, divided = jax.sharding.PartitionSpec(), jax.sharding.PartitionSpec("data")
    over = jax.shard_map(
        step, mesh=mesh, in_specs=(everywhere, divided, divided), out_specs=everywhere, check_vma=False
    )
    got = jax.jit(over, donate_argnums=0)(shared, ids, values)
    np.testing.assert_array_equal(got.numpy(), want.numpy())


def test_split_tables_and_topologies_are_shared_for_reading() -> None:
    mesh = make_mesh(4)
    tree = {"rows": SplitTable.from_numpy(ROWS, [4, 7]), "graph": job.graph()}
    shared = distributed.share(tree, mesh)
    ids = np.arange(-2, 54, dtype=np.int32).reshape(4, 14)
    spec = jax.sharding.PartitionSpec
    over = jax.shard_map(
        lambda tree, ids: tree["rows"][ids],
        mesh=mesh,
        in_specs=(spec(), spec("data")),
        out_specs=spec("data"),
        check_vma=False,
    )
    want = np.where(((ids >= 0) & (ids < 50))[..., None], ROWS[np.clip(ids, 0, 49)], 0)
    np.testing.assert_array_equal(jax.jit(over)(shared, ids), want)
    assert shared["graph"].num_edges == tree["graph"].num_edges


def test_a_divided_optimizer_makes_the_same_steps() -> None:
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((32, 5)).astype(np.float32), rng.standard_normal((32, 3)).astype(np.float32)
    params = {"w": jnp.zeros((5, 3)), "b": jnp.zeros(3)}

    def of_part(state, key, batch, data):
        def loss(p):
            return ((batch[0] @ p["w"] + p["b"] - batch[1]) ** 2).mean()

        return Part(*jax.value_and_grad(loss)(state["params"]), weight=len(batch[0]))

    found = {}
    mesh = make_mesh(4)
    for name, optimizer in {"whole": optax.adamw(0.1), "divided": distributed.divided(optax.adamw(0.1), mesh)}.items():

        def apply(state, mean, optimizer=optimizer):
            steps, opt = optimizer.update(mean.gradients, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], steps), "opt": opt}

        state = {"params": jax.tree.map(jnp.copy, params), "opt": optimizer.init(params)}
        step = data_parallel(of_part, apply, mesh)
        for number in range(4):
            state, _ = step(state, jax.random.key(number), (x, y))
        found[name] = state
    for a, b in zip(*(jax.tree.leaves(found[name]["params"]) for name in found), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-7)
    moment = found["divided"]["opt"][0].mu["w"]
    assert {shard.data.shape for shard in moment.addressable_shards} == {(16,)}


def test_errors() -> None:
    mesh = make_mesh(4)
    with pytest.raises(ValueError, match="`parts` must be a multiple of 4"):
        data_parallel(gradients, update, mesh, parts=6)
    with pytest.raises(ValueError, match="`axis` must be one of the mesh's axes, data, got 'x'"):
        data_parallel(gradients, update, mesh, axis="x")
    step = data_parallel(lambda *_: 1, update, mesh)
    with pytest.raises(ValueError, match="multiple of 4 parts, got shape \\(6,\\)"):
        step(0, jax.random.key(0), np.arange(6))
    with pytest.raises(TypeError, match="must return a Part"):
        step(jnp.zeros(()), jax.random.key(0), np.arange(8))
    step = data_parallel(lambda s, *_: Part(s, s), lambda s, mean: (s, s), mesh)
    with pytest.raises(ValueError, match="must return a state of the structure"):
        step(jnp.zeros(()), jax.random.key(0), np.arange(8))
    with pytest.raises(ValueError, match="`devices` must be 1 to"):
        make_mesh(jax.device_count() + 1)
    table = HostTable.from_numpy(ROWS).share(mesh, writable=True)
    with pytest.raises(ValueError, match="written inside of jax.shard_map"):
        sgd(0.1).update(RowGradient(jnp.zeros(1, jnp.int32), jnp.zeros((1, 6))), sgd(0.1).init(table), table)
    with pytest.raises(ValueError, match="divide 64"):
        distributed.divided(optax.sgd(0.1), make_mesh(3))


def test_ids_and_times_of_64_bits_do_not_wrap():
    def gradients(state, key, batch, data):
        return Part(jnp.zeros(()), jnp.zeros(()), counts={"late": jnp.sum(batch > 3), "ids": jnp.sum(batch == 0)})

    batch = np.array([2**32, 2**31, -(2**32), 2])
    for mesh in (None, make_mesh(1)):
        step = data_parallel(gradients, lambda state, mean: state, mesh)
        counts = step(jnp.zeros(()), jax.random.key(0), batch)[1].counts
        assert (int(counts["late"]), int(counts["ids"])) == (2, 0)
        with pytest.raises(ValueError, match="data_parallel: integers must fit int32"):
            step(jnp.zeros(()), jax.random.key(0), batch, batch)


@pytest.mark.cpu_only("jax copies numpy arrays to other devices")
@pytest.mark.parametrize("place", [distributed.replicate, distributed.share])
def test_a_later_write_to_a_numpy_array_changes_no_copy(place) -> None:
    given = {dtype: aligned((64, 64), np.dtype(dtype)) for dtype in ("float32", "int32", "uint8")}  # as jax keeps them
    for array in given.values():
        array[:] = 1
    copies = place(given, make_mesh(2))
    for array in given.values():
        array[:] = 5
    for copy in copies.values():
        assert all((np.asarray(shard.data) == 1).all() for shard in copy.addressable_shards)
