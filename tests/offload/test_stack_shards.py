"""A step layer by layer whose state a mesh divides: each device copies its shards, and the numbers stay the same."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dejax import _native
from dejax.offload import ActivationStore, master_weights, restore, stack_step
from tests.cases import slow_but
from tests.offload.processes import assert_two_are_fine, python
from tests.offload.state_faults import interceptor, store_of_shards
from tests.offload.states import dejax_copies, equal, in_memory, is_on_disk, load
from tests.offload.test_shards import collectives

pytestmark = pytest.mark.devices(4)
LAYERS, WIDTH = 3, 16
MESHES = {  # shape, names, and how w [layers, 16, 16], b [layers, 16] and odd [layers, 9, 16] are divided
    "fsdp": ((4,), ("data",), {"w": P(None, "data"), "b": P(None, "data"), "odd": P(None, None, "data")}),
    "data and tensor": ((2, 2), ("data", "tensor"), {"w": P(None, "data", "tensor"), "b": P(None, "tensor")}),
    "replicated": ((4,), ("data",), {}),
    "three devices": ((3,), ("data",), {"odd": P(None, "data")}),  # which divide no other array
}
PLACES = {
    "moments on disk": {"path": True},
    "all on disk": {"path": True, "params": "disk", "ahead": 2},
    "disk, and host memory by default": {"path": True, "moments": "host", "params": "disk"},
    "disk and host memory": {"path": True, "params": "host", "streams": True},
    "host memory": {"params": "host", "streams": True, "ahead": 2},
    "host memory by default": {"params": "host"},
}


def embed(outer, batch):
    return outer["in"][batch["tokens"]]


def body(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T + jnp.tanh(x @ p["odd"].T) @ p["odd"] / 4


def head(outer, x, batch):
    scores = x @ outer["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()


def mesh_of(name, kind=AxisType.Auto):
    shape, names, _ = MESHES[name]
    devices = np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape)
    return jax.sharding.Mesh(devices, names, axis_types=(kind,) * len(names))


def model(name, dtype=jnp.float32, kind=AxisType.Auto):
    """Parameters on a mesh; `None`: on one device."""
    keys = jax.random.split(jax.random.key(0), 4)
    outer = {"in": jax.random.normal(keys[0], (11, WIDTH)), "out": jax.random.normal(keys[1], (WIDTH, 11)) / 4}
    layers = {
        "w": jax.random.normal(keys[2], (LAYERS, WIDTH, WIDTH)) / 4,
        "b": jnp.zeros((LAYERS, WIDTH)),
        "odd": jax.random.normal(keys[3], (LAYERS, 9, WIDTH)) / 4,
    }
    outer, layers = jax.tree.map(lambda x: x.astype(dtype), (outer, layers))
    if name is None:
        return outer, layers
    mesh, specs = mesh_of(name, kind), MESHES[name][2]
    layers = {key: jax.device_put(x, NamedSharding(mesh, specs.get(key, P()))) for key, x in layers.items()}
    return jax.device_put(outer, NamedSharding(mesh, P())), layers


def batch(name, i, kind=AxisType.Auto):
    tokens = jax.random.randint(jax.random.key(i), (12, 7), 0, 11)
    found = {"tokens": tokens, "labels": (tokens * 3 + 1) % 11}
    return found if name is None else jax.device_put(found, NamedSharding(mesh_of(name, kind), P("data")))


def make(tx=None, **options):
    tx = optax.adamw(1e-2) if tx is None else tx
    return stack_step(embed, body, head, tx, **{"min_bytes": 100, "moments": None, **options})


def undonated(step, state):
    where = jax.tree.map(lambda x: x.sharding, state)
    return jax.jit(step, in_shardings=(where, None), out_shardings=(where, None))


def train(step, name, steps=2, first=0, state=None, dtype=jnp.float32):
    """Losses, the state, and the collective operations of a step."""
    state = step.init(*model(name, dtype)) if state is None else state
    run, losses = step.jit(state).lower(state, batch(name, 0)).compile(), []
    for i in range(first, first + steps):
        state, loss = run(state, batch(name, i))
        losses.append(float(loss))
    return losses, state, collectives(run)


@functools.cache
def on_the_devices(name, steps=2):
    losses, state, found = train(make(moments="device"), name, steps)
    return losses, in_memory(state), found


QUICK = [("disk and host memory", "data and tensor")]


@pytest.mark.parametrize(("places", "name"), slow_but(QUICK, itertools.product(PLACES, MESHES)))
def test_the_numbers_and_the_communication_of_state_on_the_devices(places, name, tmp_path):
    how = {**PLACES[places]}
    how["path"] = tmp_path if how.get("path") else None
    losses, state, found = train(make(**how), name)
    want, want_state, want_found = on_the_devices(name)
    assert found <= want_found
    equal((losses, in_memory(state)), (want, want_state))
    for key in ("w", "b", "odd"):
        for x in (state.layers[key], state.layer_moments[0].mu[key]):
            assert x.sharding.spec == MESHES[name][2].get(key, P())


OPTIONS = {
    "exact limit": {"clip_norm": 0.05},
    "exact limit, gradients in host memory": {"clip_norm": 0.05, "gradients": "host", "streams": True},
    "limit by the last norm": {"clip_norm": 0.05, "gradients": "freed"},
    "microbatches": {"microbatches": 3},
    "activations": {"activations": "host"},
    "master weights": {"tx": master_weights(optax.adam(1e-2))},
    "frozen": {"frozen": lambda path, x: path == "layers['odd']"},
    "adafactor": {"tx": optax.adafactor(1e-2)},
}


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS)
def test_other_arguments(options, tmp_path):
    how = OPTIONS[options]
    dtype = jnp.bfloat16 if options == "master weights" else jnp.float32
    found = []
    with ActivationStore(host_bytes=1 << 22):
        for places in ({"moments": "device"}, {"path": tmp_path, "params": "disk"}):
            losses, state, _ = train(make(**{**how, **places}), "data and tensor", dtype=dtype)
            found.append((losses, in_memory(state)))
    if options in ("exact limit", "adafactor"):  # XLA may round apart what it compiles apart, on one device, too
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), *found)
    else:
        equal(*found)


@pytest.mark.slow
@pytest.mark.parametrize("how", [{"path": True}, pytest.param({"streams": True}, marks=pytest.mark.slow)])
def test_the_loss_alone_leaves_the_state_as_it_is(how, tmp_path):
    step = make(params="host" if how.get("streams") else "disk", **{**how, "path": tmp_path if "path" in how else None})
    _, state, _ = train(step, "fsdp")
    before = in_memory(state)
    alone = jax.jit(step.loss)
    losses = [float(alone(state, batch("fsdp", 2))) for _ in range(2)]
    equal(in_memory(state), before)
    equal(losses, train(step, "fsdp", 1, 2, state)[0] * 2)
    equal(losses, on_the_devices("fsdp", 3)[0][2:] * 2)


@pytest.mark.slow
def test_axes_of_a_mesh_that_are_explicit(tmp_path):
    """The batch is divided by hand: XLA does not choose."""
    found = []
    for how in ({"moments": "device"}, {"path": tmp_path, "params": "host", "streams": True}):
        step = make(**how)
        with jax.set_mesh(mesh_of("replicated", AxisType.Explicit)):
            state = step.init(*model("replicated", kind=AxisType.Explicit))
            run = step.jit(state)
            for i in range(2):
                state, loss = run(state, batch(None, i))
        found.append((loss, in_memory(state)))
    equal(found[1], found[0])


@pytest.mark.slow
def test_arrays_that_are_not_on_the_mesh_yet_and_small_ones(tmp_path):
    outer, layers = model("fsdp")
    layers["odd"] = np.asarray(layers["odd"])  # replicated, therefore
    for how in ({"path": tmp_path, "params": "disk"}, {"params": "host", "streams": True}):
        step = make(min_bytes=200, **how)  # rows of b have 64 bytes
        state = step.init(*jax.tree.map(lambda x: x if isinstance(x, np.ndarray) else jnp.copy(x), (outer, layers)))
        assert state.layers["odd"].sharding.is_fully_replicated and len(state.layers["odd"].sharding.device_set) == 4
        assert isinstance(state.layers["b"], jax.Array) and state.layers["b"].sharding.memory_kind != "pinned_host"
        state, _ = step.jit(state)(state, batch("fsdp", 0))
        assert np.isfinite(in_memory(state).layers["w"]).all()


@pytest.mark.slow
def test_one_device_of_several(tmp_path):
    """Without `streams`, and without a mesh: dejax reads files, XLA copies host memory."""
    want, want_state, _ = on_the_devices(None)
    losses, state, _ = train(make(path=tmp_path, params="host"), None)
    equal((losses, in_memory(state)), (want, want_state))
    assert state.layer_moments[0].mu["w"].sharding is None and is_on_disk(state.layer_moments[0].mu["w"])


ENDED = """
import os, sys
from dejax.offload import StateStore
from tests.offload.state_faults import interceptor
from tests.offload.states import save
from tests.offload.test_stack_shards import batch, make, train
folder = sys.argv[1]
store = StateStore(folder)
step = make(path=store, params="disk")
losses, state, _ = train(step, "data and tensor", 1)
save(folder + "/saved.npz", state=state)
interceptor(store).slow(0.2)
step.jit(state)(state, batch("data and tensor", 1))
print(losses[0], flush=True)
os._exit(9)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["data and tensor", "fsdp"])
def test_a_process_that_ends_in_a_step_and_a_new_one_on_the_same_mesh_or_another(name, tmp_path):
    """Files go with their process: a checkpoint has whole arrays, which any mesh divides again."""
    ended = python(ENDED, str(tmp_path), as_here=True)
    assert ended.returncode == 9, ended.stderr
    assert len(list(tmp_path.iterdir())) == 2  # and what the process left
    found = []
    for how in ({"path": tmp_path, "params": "disk"}, {"params": "host", "streams": True}, {"moments": "device"}):
        step = make(**how)
        like = step.init(*model(name))
        if "path" in how:
            assert len(list(tmp_path.iterdir())) == 2  # its own in place of it
        state = restore(like, *load(tmp_path / "saved.npz", state=like))
        losses, state, _ = train(step, name, 2, 1, state)
        found.append((losses, in_memory(state)))
    equal(found[0], found[2])
    equal(found[1], found[2])
    if name == "data and tensor":
        want, want_state, _ = on_the_devices(name, 3)
        equal(found[2], (want[1:], want_state))
        assert float(ended.stdout) == want[0]


ONE_OF_TWO = """
(path,) = arguments
import jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from dejax.offload import StateStore, restore
from tests.offload.test_stack_shards import MESHES, batch, is_on_disk, make, mesh_of, model

def place(x, spec=P()):
    x = np.asarray(x)
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh_of("fsdp"), spec), lambda at: x[at])
def first_state(step, name):
    outer, layers = model(None)
    specs = MESHES[name][2]
    return step.init(jax.tree.map(place, outer), {key: place(x, specs.get(key, P())) for key, x in layers.items()})
def shards(tree):
    return [np.asarray(shard.data) for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
def read(state):
    return jax.tree.map(lambda x: x.on_devices("pinned_host") if is_on_disk(x) else x, state, is_leaf=is_on_disk)
def train(step, state, steps):
    run, losses = step.jit(state), []
    for i in steps:
        state, loss = run(state, jax.tree.map(lambda x: place(x, P("data")), batch(None, i)))
        losses.append(float(loss))
    return losses, state

def compare(name, store):
    step = make(moments="device", clip_norm=0.05, gradients="freed")
    want, want_state = train(step, first_state(step, name), range(3))
    for where in ({"path": store, "params": "disk"}, {"path": store, "params": "host"}, {"params": "host"}):
        step = make(clip_norm=0.05, gradients="freed", **where)
        losses, state = train(step, first_state(step, name), range(2))
        state = restore(first_state(step, name), read(state))
        last, state = train(step, state, range(2, 3))
        assert losses + last == want, (losses, last, want)
        for a, b in zip(shards(read(state)), shards(want_state), strict=True):
            np.testing.assert_array_equal(a, b)

with StateStore(path) as store:
    compare("fsdp", store)
    compare("replicated", store)
print("fine", flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_their_own_shards(tmp_path):
    assert_two_are_fine(ONE_OF_TWO, tmp_path)


class TestAnotherMesh:
    """State that comes with another mesh than it was made on is an error. test_state_shards.py has its tickets."""

    def test_parameters_and_state_of_two_meshes(self, tmp_path):
        step = make(path=tmp_path)
        a, b = step.init(*model("fsdp")), step.init(*model("data and tensor"))
        mixed = a._replace(layer_moments=(a.layer_moments[0]._replace(nu=b.layer_moments[0].nu), *a.layer_moments[1:]))
        with pytest.raises(ValueError, match="`state` must be of one mesh, got arrays of Mesh"):
            jax.jit(step)(mixed, batch("fsdp", 0))
        one = make(path=tmp_path).init(*model(None))
        mixed = a._replace(
            layer_moments=(a.layer_moments[0]._replace(nu=one.layer_moments[0].nu), *a.layer_moments[1:])
        )
        with pytest.raises(ValueError, match="`state` must be of one mesh, got an array of shape .* on one device"):
            jax.jit(step)(mixed, batch("fsdp", 0))

    @pytest.mark.slow
    def test_state_that_the_step_has_not_seen(self):
        made, other = (make(params="host", streams=True) for _ in range(2))
        state = made.init(*model("fsdp"))
        with pytest.raises(ValueError, match="must come from this step's init if it lies on several devices"):
            jax.jit(other)(state, batch("fsdp", 0))
        _, loss = other.jit(state)(state, batch("fsdp", 0))
        assert float(loss) == on_the_devices("fsdp")[0][0]


def first_axis_divided():
    outer, layers = model("fsdp")
    four = {key: jnp.concatenate((x, x[:1])) for key, x in layers.items()}
    return outer, jax.device_put(four, NamedSharding(mesh_of("fsdp"), P("data")))


def two_meshes():
    outer, layers = model("fsdp")
    return outer, layers | {"odd": model("data and tensor")[1]["odd"]}


class TestWhoCopiesHostMemory:
    """By default dejax where it can, else XLA, with the same numbers."""

    @pytest.mark.parametrize("name", ["fsdp", pytest.param("replicated", marks=pytest.mark.slow)])
    def test_dejax_copies_what_init_has_placed(self, name):
        step = make(params="host")
        state = step.init(*model(name))
        assert dejax_copies(step.jit(state), state, batch(name, 0))
        assert dejax_copies(jax.jit(step), state, batch(name, 0))
        assert dejax_copies(jax.jit(step.loss), state, batch(name, 0))

    @pytest.mark.slow
    @pytest.mark.parametrize("params", [first_axis_divided, two_meshes])
    def test_xla_copies_what_dejax_cannot(self, params):
        found = []
        for where in ("host", "device"):
            step = make(params=where, moments=where)
            state = step.init(*params())
            run = step.jit(state)
            assert not dejax_copies(run, state, batch("fsdp", 0))
            state, loss = run(state, batch("fsdp", 0))
            found.append((loss, in_memory(state)))
        equal(*found)

    def test_xla_copies_without_the_extension(self, monkeypatch):
        step = make(params="host")
        state = step.init(*model("fsdp"))
        monkeypatch.setattr(_native, "unavailable_reason", lambda: "it is not built")
        assert not dejax_copies(step.jit(state), state, batch("fsdp", 0))

    @pytest.mark.slow
    def test_xla_copies_state_that_the_step_has_not_seen(self):
        made, other = (make(params="host") for _ in range(2))
        state = made.init(*model("fsdp"))
        assert not dejax_copies(jax.jit(other), state, batch("fsdp", 0))
        _, loss = undonated(other, state)(state, batch("fsdp", 0))
        assert float(loss) == on_the_devices("fsdp")[0][0]
        assert dejax_copies(other.jit(state), state, batch("fsdp", 0))

    @pytest.mark.slow
    def test_xla_copies_where_two_meshes_are_possible(self):
        """`jit` knows which."""
        step = make(params="host")
        states = {name: step.init(*model(name)) for name in ("fsdp", "data and tensor")}
        for name, state in states.items():
            _, loss = undonated(step, state)(state, batch(name, 0))
            assert float(loss) == on_the_devices(name)[0][0]
            assert not dejax_copies(jax.jit(step), state, batch(name, 0))
            assert dejax_copies(step.jit(state), state, batch(name, 0))

    @pytest.mark.slow
    def test_xla_copies_outside_of_jit(self):
        step = make(params="host")
        _, loss = step(step.init(*model("fsdp")), batch("fsdp", 0))
        np.testing.assert_allclose(loss, on_the_devices("fsdp")[0][0], rtol=1e-6)

    def test_xla_copies_inside_of_shard_map(self):
        step = make(params="host")
        state = step.init(*model("replicated"))
        mapped = jax.shard_map(step.loss, mesh=mesh_of("replicated"), in_specs=P(), out_specs=P(), check_vma=False)
        assert not dejax_copies(jax.jit(mapped), state, batch(None, 0))
        assert np.isfinite(jax.jit(mapped)(state, batch(None, 0)))


def test_bad_arguments(tmp_path):
    outer, layers = model("fsdp")
    four = first_axis_divided()[1]
    for how in ({"path": tmp_path, "params": "disk"}, {"params": "host", "streams": True}, {"path": tmp_path}):
        with pytest.raises(ValueError, match=r"`layers` must be divided along other axes than the first one, because"):
            make(**how).init(outer, four)
        with pytest.raises(ValueError, match="stack_step: `params` must be of one mesh with .*, got arrays of Mesh"):
            make(**how).init(outer, model("data and tensor")[1])
    step = make(path=tmp_path)
    state = step.init(outer, layers)
    mesh = mesh_of("fsdp")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with pytest.raises(ValueError, match="must be called outside of jax.shard_map where a mesh divides the state"):
        jax.jit(mapped)(state, batch("fsdp", 0))
    with pytest.raises(ValueError, match="must be copied by dejax, got streams=False; leave `streams` at None"):
        jax.jit(make(path=tmp_path, streams=False))(state, batch("fsdp", 0))


class TestFaults:
    """The next step raises what failed on one device. test_state_shards.py has writes, old states and other meshes."""

    @pytest.fixture
    def store(self, tmp_path):
        with store_of_shards(tmp_path) as store:
            yield store

    @pytest.mark.slow  # one of an optimizer on a mesh is not
    def test_a_failed_read(self, store):
        step = make(path=store, params="disk")
        state = step.init(*model("data and tensor"))
        run = undonated(step, state)
        interceptor(store).inject("read", 5)
        after, loss = jax.block_until_ready(run(state, batch("data and tensor", 0)))
        interceptor(store).inject("read", 0)  # devices give up before they have read everything
        assert int(after.skipped) == 1
        with pytest.raises(RuntimeError, match="must be of a step that ended, got version 1"):
            in_memory(after)
        with pytest.raises(Exception, match=r"a read failed: injected fault \(on one device of several"):
            jax.block_until_ready(run(after, batch("data and tensor", 1)))
        losses = []
        for i in range(2):  # goes on from the state before
            state, loss = run(state, batch("data and tensor", i))
            losses.append(float(loss))
        want, want_state, _ = on_the_devices("data and tensor")
        equal((losses, in_memory(state)), (want, want_state))

    @pytest.mark.slow
    def test_a_failed_read_next_to_state_in_host_memory(self, store):
        """Which is changed in place: it is lost."""
        step = make(path=store, params="host", streams=True)
        state = step.init(*model("fsdp"))
        run = undonated(step, state)
        before = np.asarray(state.layers["w"])
        interceptor(store).inject("read", 1)
        after, _ = jax.block_until_ready(run(state, batch("fsdp", 0)))
        assert np.isnan(after.layers["w"]).all()
        np.testing.assert_array_equal(state.layers["w"], before)  # it was not donated
        with pytest.raises(Exception, match="a read failed: injected fault"):
            jax.block_until_ready(run(after, batch("fsdp", 1)))
        _, loss = run(state, batch("fsdp", 0))
        assert float(loss) == on_the_devices("fsdp")[0][0]
