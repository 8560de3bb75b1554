"""An optimizer's state in host memory or on disk, of parameters that a mesh divides: the numbers of state in memory."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from dejax.offload import DiskArray, StateStore, master_weights, optimizer, restore
from dejax.offload.state import optimizer as _optimizer
from tests.cases import slow_but
from tests.offload.processes import assert_two_are_fine
from tests.offload.state_faults import interceptor, store_of_shards
from tests.offload.states import (
    cannot_be_traced,
    dejax_copies,
    equal,
    in_memory,
    is_on_disk,
    is_on_host,
    not_elementwise,
)
from tests.offload.test_optimizer import TRANSFORMATIONS as OF_ONE_DEVICE
from tests.offload.test_shards import collectives, mesh_of

pytestmark = pytest.mark.devices(4)
SMALL = {"min_bytes": 100, "piece_bytes": 1500}
MESHES = {  # shape, names, and how w [64, 48], t [48, 32], odd [33, 32], b [512] are divided; the rest is replicated
    "fsdp": ((4,), ("data",), {"w": P("data"), "t": P("data"), "odd": P(None, "data"), "b": P("data")}),
    "fsdp, all axes": ((2, 2), ("a", "b"), {"w": P(("a", "b")), "t": P(None, ("a", "b")), "b": P(("b", "a"))}),
    "tensor": ((4,), ("tensor",), {"w": P(None, "tensor"), "t": P("tensor")}),
    "data and tensor": (
        (2, 2),
        ("data", "tensor"),
        {"w": P("data", "tensor"), "t": P("tensor", "data"), "b": P("data")},
    ),
    "replicated": ((4,), ("data",), {}),
}
TRANSFORMATIONS = OF_ONE_DEVICE | {"master weights": master_weights(optax.adam(1e-2))}
ADAM = optax.adam(1e-2)


def params_of(name, kind=AxisType.Auto, dtype=jnp.float32):
    """Parameters on a mesh; `None`: on one device."""
    keys = iter(jax.random.split(jax.random.key(0), 4))
    shapes = {"w": (64, 48), "t": (48, 32), "odd": (33, 32), "b": (512,)}
    params = {n: jax.random.normal(next(keys), shape).astype(dtype) for n, shape in shapes.items()}
    if name is None:
        return params
    shape, names, specs = MESHES[name]
    mesh = mesh_of(shape, names, kind)
    return {n: jax.device_put(x, NamedSharding(mesh, specs.get(n, P()))) for n, x in params.items()}


def dtype_of(name):
    return jnp.bfloat16 if name == "master weights" else jnp.float32


def gradients(params, i):
    """Gradients from outside: nothing that makes them is fused in."""
    return jax.tree.map(lambda x: jax.device_put(np.roll(np.asarray(x, np.float32), i + 1) - 0.5, x.sharding), params)


def step_of(tx, params):
    where = jax.tree.map(lambda x: x.sharding, params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), where), state

    return step


def train(tx, params, steps=3, first=0, state=None):
    """Parameters and state after some steps, and the collective operations of a step."""
    state = tx.init(params) if state is None else state
    step = step_of(tx, params).lower(params, state, gradients(params, 0)).compile()
    found = collectives(step)
    for i in range(first, first + steps):
        params, state = step(params, state, gradients(params, i))
    return params, state, found


@pytest.fixture(params=["host", pytest.param("disk", marks=pytest.mark.slow)])
def away(request, tmp_path):
    """Makes an optimizer whose state lies in host memory, or on disk: one stream brings both to the device."""
    where = {"streams": True} if request.param == "host" else {"path": tmp_path}
    return lambda tx, **how: optimizer(tx, **SMALL, **where, **how)


# The optimizer that reads the norm of all gradients needs the most communication.
QUICK = ("clipped", "data and tensor", "disk")
CASES = [(t, m, place) for t in TRANSFORMATIONS for m in MESHES for place in ("host", "disk", "by the copies of XLA")]


@pytest.mark.parametrize(("name", "mesh", "place"), slow_but([QUICK], CASES))
def test_the_numbers_and_the_communication_of_state_on_the_devices(name, mesh, place, tmp_path):
    params, tx = params_of(mesh, dtype=dtype_of(name)), TRANSFORMATIONS[name]
    how = {"path": tmp_path} if place == "disk" else {"streams": place == "host"}
    away = optimizer(tx, **SMALL, **how)
    first = away.init(params)
    got, state, found = train(away, params, state=first)
    want, want_state, want_found = train(tx, params)
    equal((got, in_memory(state)), (want, want_state))
    assert found == want_found and jax.tree.structure(in_memory(state)) == jax.tree.structure(want_state)
    for x, begun in zip(*(jax.tree.leaves(s, is_leaf=is_on_disk) for s in (state, first)), strict=True):
        moved = is_on_disk if place == "disk" else is_on_host
        assert moved(x) == moved(begun) == (x.nbytes >= 100) or place not in ("host", "disk")
        assert not moved(x) or x.sharding.is_equivalent_to(begun.sharding, x.ndim)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lion", "adamw", "master weights"])
def test_the_bits_of_state_on_disk_of_one_device(name, tmp_path):
    tx = optimizer(TRANSFORMATIONS[name], **SMALL, path=tmp_path)
    got, state, _ = train(tx, params_of("data and tensor", dtype=dtype_of(name)))
    want, want_state, _ = train(tx, params_of(None, dtype=dtype_of(name)))
    equal((got, in_memory(state)), (want, in_memory(want_state)))


@pytest.mark.parametrize("name", ["adamw", pytest.param("clipped", marks=pytest.mark.slow)])
def test_axes_of_a_mesh_that_are_explicit(name, away):
    params = params_of("data and tensor", AxisType.Explicit)
    with jax.set_mesh(params["w"].sharding.mesh):
        got, state, found = train(away(TRANSFORMATIONS[name]), params)
        want, want_state, want_found = train(TRANSFORMATIONS[name], params)
    equal((got, in_memory(state)), (want, want_state))
    assert found == want_found


@pytest.mark.slow
def test_types_of_explicit_axes_tell_what_init_has_not_placed():
    params = params_of("data and tensor", AxisType.Explicit)
    tx, other = (optimizer(TRANSFORMATIONS["adamw"], **SMALL, streams=True) for _ in range(2))
    state = other.init(params)
    with jax.set_mesh(params["w"].sharding.mesh):
        got, want = train(tx, params, state=state), train(TRANSFORMATIONS["adamw"], params)
    equal(got[:2], want[:2])
    updates, _ = jax.jit(tx.update)(params, state, params)  # the mesh is nowhere but in the types
    assert updates["w"].sharding.spec == params["w"].sharding.spec


def test_each_device_has_its_shard(tmp_path):
    params = params_of("data and tensor")
    with StateStore(tmp_path, chunk_bytes=4096) as store:
        state = optimizer(ADAM, **SMALL, path=store).init(params)
        mu = state[0].mu
        for name, parts, whole in (("w", 4, 64 * 48), ("b", 2, 512), ("odd", 1, 33 * 32)):
            shards = mu[name].shards()
            assert set(shards) == set(params["w"].sharding.device_set)
            assert all(shard.size == whole // parts for _, shard in shards.values())
            assert len({int(shard.ticket[1]) for _, shard in shards.values()}) == 4  # also of copies, which share files
            assert mu[name].sharding.is_equivalent_to(params[name].sharding, params[name].ndim)
        held = store.stats()["disk_bytes"]
        store.remove(state)
        assert store.stats()["disk_bytes"] < held
        with pytest.raises(RuntimeError, match="got one that was removed"):
            np.asarray(mu["w"])
    with StateStore(tmp_path, disk_bytes=8192) as store:
        with pytest.raises(RuntimeError, match="the disk tier is full: disk_bytes=8192"):
            store.put(params["w"], sharding=params["w"].sharding)
        store.put(np.ones(100, np.float32))  # the room of shards that were written is given back


@pytest.mark.parametrize("mesh", slow_but(["tensor"], MESHES))
def test_reading_and_writing(mesh, tmp_path):
    with StateStore(tmp_path) as store:
        for x in params_of(mesh).values():
            sources = (x, np.asarray(x), jax.device_put(x, jax.memory.Space.Host), jax.device_put(x, jax.devices()[0]))
            for source in (*sources, store.put(x), store.put(x, sharding=x.sharding)):
                array = store.put(source, 1024, x.sharding)
                for rows in (slice(None), slice(5, 23), -1, slice(7, 7)):
                    np.testing.assert_array_equal(array[rows], np.asarray(x)[rows])
                np.testing.assert_array_equal(array, x)
            for kind in (None, "pinned_host"):
                back = array.on_devices(kind)
                np.testing.assert_array_equal(back, x)
                assert back.sharding.spec == x.sharding.spec
                assert back.sharding.memory_kind in (kind, x.sharding.memory_kind)
        one = store.put(x := jnp.arange(9.0))
        np.testing.assert_array_equal(one.on_devices("pinned_host"), x)


@pytest.mark.slow
def test_devices_that_hold_the_same_part_share_its_files(tmp_path):
    """A part is written once, by the first of them."""
    sizes = {}
    for name in MESHES:
        params = params_of(name)
        with StateStore(tmp_path, chunk_bytes=4096) as store:
            tx = optimizer(ADAM, **SMALL, path=store)
            state = tx.init(params)
            begun = store.stats()
            _, state, _ = train(tx, params, 2, state=state)
            store.drain()
            stats = store.stats()
            sizes[name] = stats["disk_bytes"]
            whole = 2 * sum(x.nbytes for x in params.values())
            written = stats["written_bytes"] - begun["written_bytes"]
            assert 2 * whole <= written < 2 * whole + stats["disk_bytes"]  # in whole pages
            odd, first = np.asarray(state[0].mu["odd"]), state[0].mu["odd"].shards()
            store._native.remove(int(np.asarray(next(iter(first.values()))[1].ticket)[1]))
            assert store.stats()["disk_bytes"] <= sizes[name]
            if name == "replicated":  # the other ones still have the files
                assert store.stats()["disk_bytes"] == sizes[name]
                np.testing.assert_array_equal(list(first.values())[1][1], odd)
    assert sizes["replicated"] <= min(sizes.values())


@pytest.mark.slow
def test_two_optimizers_in_one_step_and_donated_state(away):
    def trained(wrap):
        both = [wrap(TRANSFORMATIONS[name]) for name in ("adamw", "clipped")]
        params = [params_of("data and tensor"), jax.tree.map(jnp.negative, params_of("data and tensor"))]
        whole = NamedSharding(params[0]["w"].sharding.mesh, P())
        states = [tx.init(p) for tx, p in zip(both, params, strict=True)]
        states = jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), states)
        where = jax.tree.map(lambda x: x.sharding, (params, states))

        @functools.partial(jax.jit, donate_argnums=(0, 1), in_shardings=(*where, None), out_shardings=where)
        def step(params, states, grads):
            made = [tx.update(grads, s, p) for tx, p, s in zip(both, params, states, strict=True)]
            return [optax.apply_updates(p, u) for p, (u, _) in zip(params, made, strict=True)], [s for _, s in made]

        for i in range(3):
            params, states = step(params, states, gradients(params_of("data and tensor"), i))
        return params, in_memory(states)

    equal(trained(away), trained(lambda tx: tx))


def test_several_updates_in_a_loop_of_one_program():
    def run(tx):
        params = params_of("fsdp")
        grads, state = gradients(params, 0), tx.init(params)

        # At this level, which rounds each operation: above it two loops round apart where one fuses more.
        @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
        def steps(params, state):
            def one(_, carry):
                updates, state = tx.update(grads, carry[1], carry[0])
                return optax.apply_updates(carry[0], updates), state

            return jax.lax.fori_loop(0, 3, one, (params, state))

        return steps(params, state)

    equal(run(optimizer(TRANSFORMATIONS["momentum"], **SMALL, streams=True)), run(TRANSFORMATIONS["momentum"]))


@pytest.mark.slow
def test_restored_state():
    params = params_of("data and tensor")
    tx, other = (optimizer(TRANSFORMATIONS["adamw"], **SMALL, streams=True) for _ in range(2))  # as in a new process
    one, state, _ = train(tx, params, 1)
    got = train(other, one, 2, 1, restore(other.init(params), in_memory(state)))
    equal(got[:2], train(TRANSFORMATIONS["adamw"], params, 3)[:2])


ONE_OF_TWO = """
(path,) = arguments
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import NamedSharding, PartitionSpec as P
from dejax.offload import StateStore, optimizer, restore
from tests.offload.test_state_shards import SMALL, is_on_disk, step_of, TRANSFORMATIONS
from tests.offload.test_shards import mesh_of

def place(x, spec):
    return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda at: x[at])
def shards(tree):
    return [np.asarray(shard.data) for array in jax.tree.leaves(tree) for shard in array.addressable_shards]
def read(state):
    return jax.tree.map(lambda x: x.on_devices("pinned_host") if is_on_disk(x) else x, state, is_leaf=is_on_disk)
def train(tx, steps, state=None, params=None, first=0):
    params = start if params is None else params
    state = tx.init(params) if state is None else state
    step = step_of(tx, start)
    for i in range(first, first + steps):
        grads = {name: place(np.roll(x, i + 1) - 0.5, start[name].sharding.spec) for name, x in values.items()}
        params, state = step(params, state, grads)
    return params, state

mesh = mesh_of((4,), ("data",))
rng = np.random.default_rng(0)
values = {"w": rng.normal(size=(64, 48)).astype(np.float32), "r": rng.normal(size=(33, 32)).astype(np.float32)}
start = {"w": place(values["w"], P("data")), "r": place(values["r"], P())}
tx = TRANSFORMATIONS["clipped"]
want = train(tx, 3)
with StateStore(path) as store:
    away = optimizer(tx, **SMALL, path=store)
    params, state = train(away, 2)
    try:
        np.asarray(jax.tree.leaves(state, is_leaf=is_on_disk)[-1])
    except RuntimeError as error:
        assert "must have all its shards in this process to be read as numpy" in str(error), error
    else:
        raise AssertionError("a part was read as the whole")
    state = restore(away.init(start), read(state))
    params, state = train(away, 1, state, params, 2)
    for a, b in zip(shards((params, read(state))), shards(want), strict=True):
        np.testing.assert_array_equal(a, b)
params, state = train(optimizer(tx, **SMALL, streams=True), 3)
for a, b in zip(shards((params, state)), shards(want), strict=True):
    np.testing.assert_array_equal(a, b)
print("fine", flush=True)
"""


@pytest.mark.slow
def test_two_processes_have_their_own_shards(tmp_path):
    assert_two_are_fine(ONE_OF_TWO, tmp_path)


@pytest.mark.parametrize("init", [not_elementwise, pytest.param(cannot_be_traced, marks=pytest.mark.slow)])
def test_first_states_that_are_no_constants(init, away):
    params = params_of("data and tensor")
    state = away(optax.GradientTransformation(init, optax.identity().update)).init(params)
    equal(in_memory(state), init(params))
    for key, x in state.items():
        assert (is_on_disk(x) or is_on_host(x)) and x.sharding.spec == params[key].sharding.spec


class TestAnotherMesh:
    """State that comes with another mesh than it was made on is right, or an error."""

    @pytest.mark.slow
    def test_parameters_of_another_mesh_over_the_same_devices(self, tmp_path):
        away, others = optimizer(TRANSFORMATIONS["adamw"], **SMALL, path=tmp_path), params_of("fsdp")
        got, state, _ = train(away, others, 2, state=away.init(params_of("data and tensor")))
        want, want_state, _ = train(TRANSFORMATIONS["adamw"], others, 2)
        equal((got, in_memory(state)), (want, want_state))

    def test_fewer_devices(self, tmp_path):
        away, params = optimizer(ADAM, **SMALL, path=tmp_path), params_of("fsdp")
        state = away.init(params)
        few = jax.device_put(params, NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",)), P()))
        with pytest.raises(ValueError, match="incompatible devices"):
            jax.jit(away.update)(few, state, few)

    def test_tickets_of_another_division(self, tmp_path):
        away, params = optimizer(ADAM, **SMALL, path=tmp_path), params_of("fsdp, all axes")
        old, like = away.init(params_of("data and tensor")), away.init(params)
        leaves = [jax.device_put(a, b.sharding) for a, b in zip(*map(jax.tree.leaves, (old, like)), strict=True)]
        state = jax.tree.unflatten(jax.tree.structure(like), leaves)
        words = "must be divided as it was made, got arrays of another mesh, or divided in"
        with pytest.raises(Exception, match=words):
            jax.block_until_ready(jax.jit(away.update)(params, state, params))

    @pytest.mark.slow
    def test_tickets_of_other_devices(self, tmp_path):
        with StateStore(tmp_path) as store:
            away, params = optimizer(ADAM, **SMALL, path=store), params_of("data and tensor")

            def rolled(x):
                rows = jax.device_put(np.roll(np.asarray(x.ticket), 1, 0), x.ticket.sharding)
                return DiskArray(rows, x.shape, x.dtype, x.unit_bytes, x.store, x.sharding)

            made = away.init(params)
            state = jax.tree.map(lambda x: rolled(x) if is_on_disk(x) else x, made, is_leaf=is_on_disk)
            updates, _ = jax.block_until_ready(jax.jit(away.update)(params, state, params))
            assert all(np.isnan(x).all() for x in jax.tree.leaves(updates))
            words = "must stay on the devices that it was made on, got the part of another"
            with pytest.raises(RuntimeError, match=words):
                store.drain()


def in_jit(init, params):
    """A state that is made in `jax.jit`."""
    where = jax.tree.map(lambda x: x.sharding, optimizer(ADAM, **SMALL).init(params))
    return jax.jit(init, out_shardings=where)(params)


def mapped(update, params):
    mesh = params["w"].sharding.mesh
    return jax.jit(jax.shard_map(update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))


class TestRefusals:
    def test_of_state_on_disk(self, tmp_path):
        away, params = optimizer(ADAM, **SMALL, path=tmp_path), params_of("fsdp")
        other = jax.pmap(lambda x: x)(jnp.ones((4, 8)))
        if not isinstance(other.sharding, NamedSharding):  # as in newer versions of jax
            with pytest.raises(ValueError, match="must have a NamedSharding with a path, got PmapSharding"):
                away.init({"w": other})
        with pytest.raises(ValueError, match="`init` must run outside of jax.jit with a path, got traced"):
            jax.jit(away.init)(params)
        state = away.init(params)
        with pytest.raises(ValueError, match="must be updated in jax.jit, got arrays outside of it"):
            away.update(params, state, params)
        mixed = away.init(params_of("data and tensor"))
        mixed = (state[0]._replace(nu=mixed[0].nu), *state[1:])
        with pytest.raises(ValueError, match="`state` must be of one mesh, got arrays of Mesh"):
            jax.jit(away.update)(params, mixed, params)

    @pytest.mark.parametrize("place", ["with a path", "with streams=True"])
    def test_of_both_places(self, place, tmp_path):
        away = optimizer(ADAM, **SMALL, **({"path": tmp_path} if "path" in place else {"streams": True}))
        with pytest.raises(ValueError, match=f"`params` must be of one mesh {place}, got arrays of Mesh"):
            away.init({"a": params_of("fsdp")["w"], "b": params_of("data and tensor")["w"]})
        params = params_of("replicated")
        with pytest.raises(ValueError, match="must be called outside of jax.shard_map where a mesh divides the state"):
            mapped(away.update, params)(params, away.init(params), params)

    @pytest.mark.parametrize("made", ["by another", "in jit"])
    def test_state_that_init_has_not_placed(self, made):
        params, (tx, other) = params_of("fsdp"), (optimizer(ADAM, **SMALL, streams=True) for _ in range(2))
        state = in_jit(tx.init, params) if made == "in jit" else other.init(params)
        words = "must come from this transformation's init, called outside of jax.jit, if it lies on several devices"
        with pytest.raises(ValueError, match=words):
            jax.jit(tx.update)(params, state, params)
        tx.init(params)
        assert dejax_copies(jax.jit(lambda *args: tx.update(*args)), params, state, params)

    def test_two_ways_of_placing_the_same_shapes(self):
        tx = optimizer(ADAM, **SMALL, streams=True)
        states = [tx.init(params_of(name)) for name in ("fsdp", "data and tensor")]
        with pytest.raises(ValueError, match="got 2 ways; make an optimizer for each"):
            jax.jit(tx.update)(params_of("fsdp"), states[0], params_of("fsdp"))

    @pytest.mark.slow
    def test_parameters_of_which_some_are_on_one_device(self):
        params = {"w": params_of("fsdp")["w"], "t": params_of(None)["t"]}
        tx = optimizer(ADAM, **SMALL, streams=True)
        state = tx.init(params)  # all of it on the mesh
        same_numbers(lambda g, s, p: jax.jit(tx.update)(g, s), state, params)


def same_numbers(update, state, params):
    updates, _ = update(params, state, params)
    want, _ = ADAM.update(params, ADAM.init(params), params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, want)


class TestTheDefault:
    """On GPUs dejax copies what is in host memory where it can, else XLA."""

    @pytest.fixture(autouse=True)
    def as_on_gpus(self, monkeypatch):
        monkeypatch.setattr(_optimizer, "_by_default", lambda: True)

    @pytest.mark.parametrize("mesh", ["fsdp", pytest.param("replicated", marks=pytest.mark.slow)])
    def test_dejax_copies_what_init_has_placed(self, mesh):
        params, tx = params_of(mesh), optimizer(TRANSFORMATIONS["adamw"], **SMALL)
        assert dejax_copies(step_of(tx, params), params, tx.init(params), params)
        if mesh == "replicated":
            equal(train(tx, params)[:2], train(TRANSFORMATIONS["adamw"], params)[:2])

    @pytest.mark.parametrize(
        "made",
        ["on two meshes before"]
        + [pytest.param(m, marks=pytest.mark.slow) for m in ("in jit", "by another", "on one device")],
    )
    def test_xla_copies_what_dejax_cannot(self, made):
        params, tx = params_of(None if made == "on one device" else "fsdp"), optimizer(ADAM, **SMALL)
        if made == "on two meshes before":
            tx.init(params_of("replicated"))
        init = optimizer(ADAM, **SMALL).init if made == "by another" else tx.init
        state = in_jit(init, params) if made == "in jit" else init(params)
        assert not dejax_copies(jax.jit(tx.update), params, state, params)
        same_numbers(jax.jit(tx.update), state, params)

    @pytest.mark.slow
    def test_xla_copies_state_of_two_meshes(self):
        params, tx = {"a": params_of("fsdp")["w"], "b": params_of("data and tensor")["w"]}, optimizer(ADAM, **SMALL)
        state = tx.init(params)
        assert not dejax_copies(jax.jit(tx.update), params, state, params)
        same_numbers(jax.jit(tx.update), state, params)

    @pytest.mark.slow
    def test_xla_copies_inside_of_shard_map_and_outside_of_jit(self):
        params, tx = params_of("replicated"), optimizer(ADAM, **SMALL)
        state, update = tx.init(params), mapped(tx.update, params)
        assert not dejax_copies(update, params, state, params)
        same_numbers(update, state, params)
        same_numbers(tx.update, state, params)


class TestFaults:
    """A call that fails on one device would leave others waiting in collective operations: the next step raises."""

    @pytest.fixture
    def store(self, tmp_path):
        with store_of_shards(tmp_path) as store:
            yield store

    def first(self, store):
        params = params_of("data and tensor")
        tx = optimizer(TRANSFORMATIONS["clipped"], **SMALL, path=store)
        return step_of(tx, params), params, tx.init(params)

    @staticmethod
    def has_nan(params):
        return any(bool(jnp.isnan(x).any()) for x in jax.tree.leaves(params))

    def goes_on(self, step, params, state, steps=3):
        """From the state before the failure, with the right numbers."""
        want, want_state, _ = train(TRANSFORMATIONS["clipped"], params_of("data and tensor"), steps)
        for i in range(steps - 3, steps):
            params, state = step(params, state, gradients(params, i))
        equal((params, in_memory(state)), (want, want_state))

    @pytest.mark.parametrize("count", [1, pytest.param(5, marks=pytest.mark.slow)])
    def test_a_failed_read(self, store, count):
        step, params, state = self.first(store)
        interceptor(store).inject("read", count)
        broken, after = jax.block_until_ready(step(params, state, gradients(params, 0)))
        interceptor(store).inject("read", 0)  # devices give up before they have read everything
        assert self.has_nan(broken)
        with pytest.raises(RuntimeError, match=r"must be of a step that ended, got version 1 of .* hold version 0"):
            in_memory(after)
        with pytest.raises(Exception, match=r"a read failed: injected fault \(on one device of several: the updates"):
            jax.block_until_ready(step(broken, after, gradients(params, 1)))
        self.goes_on(step, params, state)

    @pytest.mark.slow
    def test_a_failed_write(self, store):
        step, params, state = self.first(store)
        interceptor(store).inject("write", 1)
        one, after = jax.block_until_ready(step(params, state, gradients(params, 0)))
        assert not self.has_nan(one)
        with pytest.raises(RuntimeError, match="a write failed: injected fault"):
            store.drain()
        broken, later = jax.block_until_ready(step(one, after, gradients(params, 1)))
        assert self.has_nan(broken)
        with pytest.raises(Exception, match="a write failed: injected fault"):
            jax.block_until_ready(step(broken, later, gradients(params, 2)))
        with pytest.raises(RuntimeError, match="a write failed: injected fault"):
            for array in filter(is_on_disk, jax.tree.leaves(after, is_leaf=is_on_disk)):
                for _, shard in array.shards().values():  # all copies
                    np.asarray(shard)

    def test_damage_and_truncation(self, store):
        step, params, state = self.first(store)
        for file in next(store.paths[0].iterdir()).glob("chunks*"):
            file.write_bytes(b"")
        broken, _ = jax.block_until_ready(step(params, state, gradients(params, 0)))
        assert self.has_nan(broken)
        with pytest.raises(RuntimeError, match="is shorter than what was written to it"):
            store.drain()
        interceptor(store).inject("corrupt", 1)
        state = restore(state, jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), state, is_leaf=is_on_disk))
        with pytest.raises(RuntimeError, match="is damaged: it does not hold what was written to it"):
            in_memory(state)

    @pytest.mark.slow
    def test_a_closed_store(self, store):
        step, params, state = self.first(store)
        store.close()
        with pytest.raises(Exception, match="must lie in an open StateStore, got a state whose store is closed"):
            jax.block_until_ready(step(params, state, gradients(params, 0)))
