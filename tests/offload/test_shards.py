"""Tensors that XLA divides among devices: each device stores and fetches its shard, and nothing is communicated."""

import collections
import functools
import re
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dejax.offload import ActivationStore, offload
from tests.offload.layers import assert_same, assert_same_bits, interceptor
from tests.offload.processes import start_two

pytestmark = pytest.mark.devices(4)
LAYERS, BATCH, TIME, WIDTH, HIDDEN = 3, 8, 4, 16, 32
HOST = 1 << 24
COLLECTIVE = re.compile(r"= \S+ (all-gather|all-reduce|reduce-scatter|collective-permute|all-to-all)(?:-start)?\(")


def layer(ws, x):
    up, down = ws
    return x + checkpoint_name(jax.nn.gelu(x @ up), "act") @ down


def mesh_of(shape, names, kind=AxisType.Auto):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


@functools.cache
def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    up = jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 4
    down = jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 6
    return (up, down), jax.random.normal(keys[2], (BATCH, TIME, WIDTH))


def placed(mesh, ups, downs, xs):
    """The operands on a mesh; the axes of each layer's matrices and of the input."""
    (up, down), x = operands()
    specs = (P(None, *ups), P(None, *downs)), P(*xs)
    return jax.tree.map(lambda a, spec: jax.device_put(a, NamedSharding(mesh, spec)), ((up, down), x), specs)


def loss_of(body, scan=True, constrain=lambda x: x):
    def loss(ws, x):
        if scan:
            x, _ = jax.lax.scan(lambda x, w: (constrain(body(w, x)), None), x, ws)
        else:
            for i in range(LAYERS):
                x = constrain(body(jax.tree.map(lambda w, i=i: w[i], ws), x))
        return (x**2).mean()

    return loss


def step_of(body, args, scan=True):
    """A training step, as trainers write it: activations and gradients keep their shardings."""
    where = jax.tree.map(lambda a: a.sharding, args)
    loss = loss_of(body, scan, lambda x: jax.lax.with_sharding_constraint(x, where[1]))
    return jax.jit(lambda *args: jax.lax.with_sharding_constraint(jax.grad(loss, (0, 1))(*args), where))


def collectives(compiled):
    return collections.Counter(COLLECTIVE.findall(compiled.as_text()))


def compared(make, args, body=layer, **options):
    """Compiles steps without and with offload, compares them, and returns the counters."""
    want, got = make(body), make(offload(body, min_bytes=1, **options))
    with ActivationStore(host_bytes=HOST) as store:
        without, with_offload = want.lower(*args).compile(), got.lower(*args).compile()
        assert collectives(with_offload) == collectives(without)
        for _ in range(2):
            assert_same(with_offload(*args), without(*args))
        stats = store.stats()
    assert stats.stored_bytes == stats.fetched_bytes > 0 and stats.live_count == stats.dropped_count == 0
    return stats


@functools.cache
def hidden_tensors():
    """How many tensors of the hidden width a layer keeps: versions of jax differ."""
    (up, down), x = operands()
    with ActivationStore(host_bytes=HOST) as store:
        jax.block_until_ready(jax.grad(lambda x: offload(layer, min_bytes=1)((up[0], down[0]), x).sum())(x))
        return (store.stats().stored_bytes - x.nbytes) // (x.nbytes // WIDTH * HIDDEN)


def whole_bytes():
    """Bytes that one step stores on one device."""
    return LAYERS * BATCH * TIME * (WIDTH + hidden_tensors() * HIDDEN) * 4


MESHES = {  # shape, names, division of the matrices and of x; the share of all bytes that each device stores
    "fsdp": ((4,), ("data",), ("data",), ("data",), ("data",), lambda x, h: (x / 4, h / 4)),
    "fsdp, all axes": ((2, 2), ("a", "b"), (("a", "b"),), (("a", "b"),), (("a", "b"),), lambda x, h: (x / 4, h / 4)),
    "replicated": ((4,), ("data",), (), (), (), lambda x, h: (x, h)),
    "data and tensor": ((2, 2), ("data", "tensor"), ("data", "tensor"), ("tensor", "data"), ("data",),
                        lambda x, h: (x / 2, h / 4)),
    "tensor": ((4,), ("tensor",), (None, "tensor"), ("tensor",), (), lambda x, h: (x, h / 4)),
    "data and sequence": ((2, 2), ("data", "seq"), ("data",), ("data",), ("data", "seq"), lambda x, h: (x / 4, h / 4)),
    "data, tensor, sequence": ((1, 2, 2), ("data", "tensor", "seq"), (None, "tensor"), ("tensor",), ("data", "seq"),
                               lambda x, h: (x / 2, h / 4)),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [name if name == "data and tensor" else pytest.param(name, marks=pytest.mark.slow) for name in MESHES]
)
def test_each_device_stores_its_shard(name):
    shape, names, ups, downs, xs, share = MESHES[name]
    args = placed(mesh_of(shape, names), ups, downs, xs)
    stats = compared(lambda body: step_of(body, args), args)
    one = LAYERS * BATCH * TIME * 4
    assert stats.stored_bytes == 2 * 4 * sum(share(one * WIDTH, one * HIDDEN * hidden_tensors()))


@pytest.mark.slow
@pytest.mark.parametrize("remat", [None, "inside", "outside", "names"])
@pytest.mark.parametrize("scan", [True, False])
def test_scans_loops_and_remat(remat, scan):
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    saved = jax.checkpoint_policies.save_only_these_names("act")
    body = {"inside": jax.checkpoint(layer), "names": jax.checkpoint(layer, policy=saved)}.get(remat, layer)
    outside = jax.checkpoint if remat == "outside" else lambda body: body
    options = {"policy": ["act"]} if remat == "names" else {}
    compared(lambda body: step_of(outside(body), args, scan), args, body, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    "kinds", [pytest.param((AxisType.Explicit,) * 2, marks=pytest.mark.slow), (AxisType.Explicit, AxisType.Auto)]
)
def test_explicit_axes(kinds):
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=kinds)
    both = kinds[1] == AxisType.Explicit

    def body(ws, x):
        hidden, out = (P("data", None, "tensor"), P("data")) if both else (None, None)
        up = jnp.einsum("btd,dh->bth", x, ws[0], out_sharding=hidden)
        return x + jnp.einsum("bth,hd->btd", jnp.tanh(up), ws[1], out_sharding=out)

    args = placed(mesh, (None, "tensor") if both else (), ("tensor",) if both else (), ("data",))
    with jax.set_mesh(mesh):
        stats = compared(lambda body: jax.jit(jax.grad(loss_of(body), (0, 1))), args, body)
    assert stats.stored_bytes < 2 * 4 * LAYERS * BATCH * TIME * (WIDTH + 3 * HIDDEN) * 4 / 2 + 1


@pytest.mark.slow
def test_sizes_that_are_no_multiples():
    args = placed(mesh_of((4,), ("data",)), (), (), ())
    where = NamedSharding(mesh_of((4,), ("data",)), P("data"))

    def make(body):
        loss = loss_of(body)
        return jax.jit(jax.grad(lambda ws, x: loss(ws, jax.lax.with_sharding_constraint(x[:7], where))))

    stats = compared(make, args)
    assert stats.stored_bytes == 2 * whole_bytes()  # three shards of two examples, and one of which half is padding


@pytest.mark.slow
def test_masks_are_guarded():
    def body(ws, x):
        hidden = x @ ws[0]
        return x + jnp.where((hidden > 0.1) | (jnp.sin(hidden) > 0.5), hidden, 0.01 * hidden) @ ws[1]

    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    compared(lambda body: step_of(body, args), args, body)


@pytest.mark.slow
def test_vmap_over_a_divided_axis():
    """Each device stores the examples that it has."""
    args = placed(mesh_of((4,), ("data",)), (), (), ("data",))
    kept = functools.partial(offload, min_bytes=1)

    def step(wrap):
        loss = loss_of(wrap(layer))
        return jax.jit(jax.grad(lambda ws, xs: jax.vmap(loss, (None, 0))(ws, xs).sum()))

    with ActivationStore(host_bytes=HOST) as store:
        want = step(functools.partial(kept, store="device")).lower(*args).compile()
        got = step(kept).lower(*args).compile()
        assert collectives(got) == collectives(want)
        assert_same_bits(got(*args), want(*args))
        assert store.stats().stored_bytes == whole_bytes()


@pytest.mark.slow
def test_backward_in_another_program_takes_the_sharding_of_forward():
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    backward = jax.jit(lambda vjp: vjp(jnp.float32(1)))
    results = []
    with ActivationStore(host_bytes=HOST) as store:
        for kept in (offload(layer, min_bytes=1), offload(layer, min_bytes=1, store="device")):
            _, vjp = jax.jit(lambda *args, kept=kept: jax.vjp(loss_of(kept), *args))(*args)
            results.append(backward(vjp))
        assert store.stats().stored_bytes == store.stats().fetched_bytes == whole_bytes()
    for got, want in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


def moved_to(devices):
    mesh = jax.sharding.Mesh(np.array(devices), ("data",))
    return lambda x: jax.device_put(x, NamedSharding(mesh, x.sharding.spec))


@pytest.mark.parametrize("move", [
    pytest.param(lambda: moved_to(jax.devices()[3::-1]), id="devices in another order"),
    pytest.param(lambda: moved_to(jax.devices()[:1]), id="a mesh of one", marks=pytest.mark.slow),
    pytest.param(
        lambda: lambda x: jax.device_put(np.asarray(x), jax.devices()[2]), id="one device", marks=pytest.mark.slow
    ),
])  # fmt: skip
def test_another_mesh_in_backward_is_an_error(move):
    args = placed(mesh_of((4,), ("data",)), (), (), ("data",))
    kept = offload(layer, min_bytes=1)
    with ActivationStore(host_bytes=HOST):
        _, vjp = jax.jit(lambda *args: jax.vjp(loss_of(kept), *args))(*args)
        moved = jax.tree.map(move(), vjp)
        with pytest.raises(jax.errors.JaxRuntimeError, match=r"stored in one sharding.*under one mesh|on device"):
            jax.block_until_ready(jax.jit(lambda vjp: vjp(jnp.float32(1)))(moved))


def test_a_store_that_is_too_small_fails_the_next_step_on_all_devices():
    """A device that raised alone would leave the others in a collective operation, and XLA would end the process."""
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    step = step_of(offload(layer, min_bytes=1), args)
    needs = rf"larger than host_bytes|(host tier is|was) full.*store {whole_bytes()} bytes"
    with ActivationStore(host_bytes=1 << 24):
        want = step(*args)
    with ActivationStore(host_bytes=4096):
        got = jax.block_until_ready(step(*args))
        assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(got))
        with pytest.raises(jax.errors.JaxRuntimeError, match=needs):
            jax.block_until_ready(step(*args))
    with ActivationStore(host_bytes=1 << 24):
        assert_same_bits(step(*args), want)


def test_leaving_a_store_raises_what_no_step_could():
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    step = step_of(offload(layer, min_bytes=1), args)
    with (
        pytest.raises(RuntimeError, match=r"one device of several.*NaN"),
        ActivationStore(device_bytes=0, host_bytes=4096),
    ):
        step(*args)
    with ActivationStore(host_bytes=1 << 24) as store:
        step(*args)
        store.check()


@pytest.mark.parametrize("fault", ["fetch", pytest.param("store", marks=pytest.mark.slow)])
def test_faults_of_one_device(fault):
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    step = step_of(offload(layer, min_bytes=1), args)
    with ActivationStore(host_bytes=HOST) as store:
        want = jax.block_until_ready(step(*args))
        interceptor(store).inject(fault, 1)
        assert any(np.isnan(leaf).any() for leaf in jax.tree.leaves(step(*args)))
        with pytest.raises(RuntimeError, match="one device of several"):
            store.check()
        for _ in range(2):
            assert_same_bits(step(*args), want)
        assert store.stats().live_count == 0


@pytest.mark.slow
def test_disk_tier(tmp_path):
    args = placed(mesh_of((4,), ("data",)), ("data",), ("data",), ("data",))
    step = step_of(offload(layer, min_bytes=1), args)
    want = step_of(layer, args)(*args)
    with ActivationStore(tmp_path, device_bytes=0, host_bytes=16 * 4096, engine="direct", chunk_bytes=4096) as store:
        for _ in range(3):
            assert_same(step(*args), want)
        assert store.stats().written_bytes > 0
    assert not list(tmp_path.iterdir())


ONE_OF_TWO = """
import os, signal
import jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from dejax.offload import ActivationStore, offload
from dejax.offload.activations.memory import launched_processes

(path,), index = arguments, jax.process_index()
mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
def place(x, *spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, P(*spec)), lambda at: x[at])
rng = np.random.default_rng(0)
ws = place(rng.normal(size=(3, 32, 32)).astype(np.float32) / 6, None, "data")
x = place(rng.normal(size=(16, 32)).astype(np.float32), "data")
layer = lambda w, x: x + jnp.tanh(x @ w) @ w.T
def step(body):
    loss = lambda ws, x: (jax.lax.scan(lambda x, w: (body(w, x), None), x, ws)[0] ** 2).mean()
    return jax.jit(jax.grad(loss, (0, 1)), out_shardings=(ws.sharding, x.sharding))
def shards(arrays):
    return [np.asarray(shard.data) for array in arrays for shard in array.addressable_shards]
assert launched_processes() == 2
store = ActivationStore(path + "/drive{process_index}", host_bytes=1 << 14, engine="direct", chunk_bytes=4096)
with store.use():
    want = shards(step(layer)(ws, x))
    got = step(offload(layer, min_bytes=1))
    for _ in range(2):
        for a, b in zip(shards(got(ws, x)), want, strict=True):
            np.testing.assert_array_equal(a, b)
stored = store.stats().stored_bytes
assert stored == store.stats().fetched_bytes and stored in [2 * 3 * k * x.nbytes / 2 for k in (2, 3)]
print("fine", len(os.listdir(path + f"/drive{index}")), flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_two_processes_have_their_own_stores(tmp_path):
    """And a process that dies leaves files that the next store removes."""
    folders = [tmp_path / f"drive{index}" for index in range(2)]
    for folder in folders:
        folder.mkdir()
    both = start_two(ONE_OF_TWO, str(tmp_path), stdin=-1)
    # Gloo's threads write to the same pipe, in pieces.
    fine = [any("fine 1" in line for line in process.stdout) for process in both]
    ends = [process.communicate("\n", timeout=60) for process in both]
    assert fine == [True, True], ends
    assert {process.returncode for process in both} == {-signal.SIGKILL}
    for folder in folders:
        assert len(list(folder.iterdir())) == 1
        with ActivationStore(folder, host_bytes=1 << 14) as store:
            assert list(folder.iterdir()) == [store._resources.claims[0].folder]
