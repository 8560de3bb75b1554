"""State in host memory of parameters that a mesh divides: dejax copies each device's shards, with the same numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from dejax.offload import optimizer, restore
from dejax.offload.state import optimizer as _optimizer
from tests.offload.test_disk_shards import (
    PAIRS,
    SMALL,
    TRANSFORMATIONS,
    equal,
    gradients,
    in_memory,
    params_of,
    step_of,
    train,
    two_in_one_step,
)

pytestmark = pytest.mark.devices(4)
NOT_SEEN = "`state` must come from this transformation's init, called outside of jax.jit, if it lies on several devices"


def far(tx, streams=True):
    return optimizer(tx, **SMALL, streams=streams)


def dejax_copies(run, *args):
    return "dejax_offload_pieces" in run.lower(*args).as_text()


def in_jit(init, params):
    """A state that is made in `jax.jit`."""
    where = jax.tree.map(lambda x: x.sharding, optimizer(optax.adam(1e-2), **SMALL).init(params))
    return jax.jit(init, out_shardings=where)(params)


def on_host(x):
    return x.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize(("name", "mesh"), PAIRS)
def test_the_numbers_and_the_communication_of_state_on_the_devices(name, mesh):
    params = params_of(mesh, dtype=jnp.bfloat16 if name == "master weights" else jnp.float32)
    first = far(TRANSFORMATIONS[name]).init(params)
    got, state, found = train(far(TRANSFORMATIONS[name]), params)
    want, want_state, want_found = train(TRANSFORMATIONS[name], params)
    equal((got, state), (want, want_state))
    assert found == want_found and jax.tree.structure(state) == jax.tree.structure(want_state)
    for x, begun in zip(jax.tree.leaves(state), jax.tree.leaves(first), strict=True):
        assert on_host(x) == on_host(begun) == (x.nbytes >= 100)
        assert not on_host(x) or x.sharding.is_equivalent_to(begun.sharding, x.ndim)


@pytest.mark.parametrize("name", ["adamw", pytest.param("clipped", marks=pytest.mark.slow)])
def test_axes_of_a_mesh_that_are_explicit(name):
    params = params_of("data and tensor", AxisType.Explicit)
    with jax.set_mesh(params["w"].sharding.mesh):
        got, want = (train(tx, params) for tx in (far(TRANSFORMATIONS[name]), TRANSFORMATIONS[name]))
    equal(got[:2], want[:2])
    assert got[2] == want[2]


@pytest.mark.slow
def test_types_of_explicit_axes_tell_what_init_has_not_placed():
    params = params_of("data and tensor", AxisType.Explicit)
    tx, state = far(TRANSFORMATIONS["adamw"]), far(TRANSFORMATIONS["adamw"]).init(params)
    with jax.set_mesh(params["w"].sharding.mesh):
        got, want = train(tx, params, state=state), train(TRANSFORMATIONS["adamw"], params)
    equal(got[:2], want[:2])
    updates, _ = jax.jit(tx.update)(params, state, params)  # the mesh is nowhere but in the types
    assert updates["w"].sharding.spec == params["w"].sharding.spec


@pytest.mark.slow
def test_two_optimizers_in_one_step_and_donated_state():
    equal(two_in_one_step(far), two_in_one_step(lambda tx: tx))


def test_several_updates_in_a_loop_of_one_program():
    def run(tx):
        params = params_of("fsdp")
        grads, state = gradients(params, 0), tx.init(params)

        @jax.jit
        def steps(params, state):
            def one(_, carry):
                updates, state = tx.update(grads, carry[1], carry[0])
                return optax.apply_updates(carry[0], updates), state

            return jax.lax.fori_loop(0, 3, one, (params, state))

        return steps(params, state)

    equal(run(far(TRANSFORMATIONS["momentum"])), run(TRANSFORMATIONS["momentum"]))


@pytest.mark.slow
def test_restored_state():
    tx, plain = far(TRANSFORMATIONS["adamw"]), TRANSFORMATIONS["adamw"]
    params = params_of("data and tensor")
    one, state, _ = train(tx, params, 1)
    other = far(TRANSFORMATIONS["adamw"])  # as in a new process
    state = restore(other.init(params), jax.tree.map(np.asarray, state))
    got = train(other, one, 2, 1, state)
    equal(got[:2], train(plain, params, 3)[:2])


@pytest.mark.parametrize("name", [pytest.param("not elementwise", marks=pytest.mark.slow), "cannot be traced"])
def test_first_states_that_are_no_constants(name):
    def not_elementwise(params):
        return jax.tree.map(lambda p: jnp.cumsum(p, 0), params)

    def cannot_be_traced(params):
        return jax.tree.map(lambda p: jnp.full(p.shape, float(p.ravel()[0])), params)

    init = not_elementwise if name == "not elementwise" else cannot_be_traced
    params = params_of("data and tensor")
    tx = optax.GradientTransformation(init, lambda g, s, p=None: (jax.tree.map(jnp.add, g, s), s))
    state = far(tx).init(params)
    equal(in_memory(state), init(params))
    for key, x in state.items():
        assert on_host(x) and x.sharding.spec == params[key].sharding.spec
    equal(train(far(tx), params)[:2], train(tx, params)[:2])


class TestRefusals:
    def test_parameters_of_two_meshes(self):
        with pytest.raises(ValueError, match="`params` must lie on one mesh with streams=True, got Mesh"):
            far(optax.adam(1e-2)).init({"a": params_of("fsdp")["w"], "b": params_of("data and tensor")["w"]})

    @pytest.mark.parametrize("made", ["by another", "in jit"])
    def test_state_that_init_has_not_placed(self, made):
        params, tx = params_of("fsdp"), far(optax.adam(1e-2))
        state = in_jit(tx.init, params) if made == "in jit" else far(optax.adam(1e-2)).init(params)
        with pytest.raises(ValueError, match=NOT_SEEN):
            jax.jit(tx.update)(params, state, params)
        tx.init(params)
        assert dejax_copies(jax.jit(lambda *args: tx.update(*args)), params, state, params)

    def test_a_call_inside_of_shard_map(self):
        params, tx = params_of("replicated"), far(optax.adam(1e-2))
        state = tx.init(params)
        mesh = params["w"].sharding.mesh
        mapped = jax.shard_map(tx.update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        with pytest.raises(ValueError, match="must be called outside of jax.shard_map where a mesh divides the state"):
            jax.jit(mapped)(params, state, params)

    def test_two_ways_of_placing_the_same_shapes(self):
        tx = far(optax.adam(1e-2))
        states = [tx.init(params_of(name)) for name in ("fsdp", "data and tensor")]
        with pytest.raises(ValueError, match="got 2 ways; make an optimizer for each"):
            jax.jit(tx.update)(params_of("fsdp"), states[0], params_of("fsdp"))

    @pytest.mark.slow
    def test_parameters_of_which_some_are_on_one_device(self):
        params = {"w": params_of("fsdp")["w"], "t": params_of(None)["t"]}
        tx = far(optax.adam(1e-2))
        state = tx.init(params)  # all of it on the mesh
        updates, _ = jax.jit(tx.update)(params, state)
        want, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params))
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, want)


class TestTheDefault:
    """On GPUs dejax copies where it can, else XLA."""

    @pytest.fixture(autouse=True)
    def as_on_gpus(self, monkeypatch):
        monkeypatch.setattr(_optimizer, "_by_default", lambda: True)

    @staticmethod
    def same_numbers(update, state, params):
        updates, _ = update(params, state, params)
        want, _ = optax.adam(1e-2).update(params, optax.adam(1e-2).init(params), params)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), updates, want)

    @pytest.mark.parametrize("mesh", ["fsdp", pytest.param("replicated", marks=pytest.mark.slow)])
    def test_dejax_copies_what_init_has_placed(self, mesh):
        params, tx = params_of(mesh), far(TRANSFORMATIONS["adamw"], None)
        assert dejax_copies(step_of(tx, params), params, tx.init(params), params)
        got, want = train(tx, params), train(TRANSFORMATIONS["adamw"], params)
        equal(got[:2], want[:2])
        assert got[2] == want[2]

    @pytest.mark.parametrize(
        "made",
        ["in jit", "on two meshes before"]
        + [pytest.param(m, marks=pytest.mark.slow) for m in ("by another", "on one device")],
    )
    def test_xla_copies_what_dejax_cannot(self, made):
        params, tx = params_of(None if made == "on one device" else "fsdp"), far(optax.adam(1e-2), None)
        if made == "on two meshes before":
            tx.init(params_of("replicated"))
        init = far(optax.adam(1e-2), None).init if made == "by another" else tx.init
        state = in_jit(init, params) if made == "in jit" else init(params)
        assert not dejax_copies(jax.jit(tx.update), params, state, params)
        self.same_numbers(jax.jit(tx.update), state, params)

    @pytest.mark.slow
    def test_xla_copies_state_of_two_meshes(self):
        params, tx = {"a": params_of("fsdp")["w"], "b": params_of("data and tensor")["w"]}, far(optax.adam(1e-2), None)
        state = tx.init(params)
        assert not dejax_copies(jax.jit(tx.update), params, state, params)
        self.same_numbers(jax.jit(tx.update), state, params)

    @pytest.mark.slow
    def test_xla_copies_inside_of_shard_map_and_outside_of_jit(self):
        params, tx = params_of("replicated"), far(optax.adam(1e-2), None)
        state = tx.init(params)
        mesh = params["w"].sharding.mesh
        mapped = jax.shard_map(tx.update, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        assert not dejax_copies(jax.jit(mapped), params, state, params)
        self.same_numbers(jax.jit(mapped), state, params)
        self.same_numbers(tx.update, state, params)
