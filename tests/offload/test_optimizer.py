"""Optimizer state on the host: updates equal those of the transformation itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dejax.offload import master_weights, optimizer
from dejax.offload.state import first_state
from tests.cases import slow_but
from tests.offload.states import cannot_be_traced, equal, in_memory, is_on_disk, is_on_host, not_elementwise

PARAMS = {"a": jnp.linspace(-1, 1, 4096).reshape(64, 64), "b": {"c": jnp.ones(64), "d": jnp.full((32, 64), 0.5)}}


TRANSFORMATIONS = {
    "adam": optax.adam(1e-2),
    "adamw": optax.adamw(optax.cosine_decay_schedule(1e-2, 10), weight_decay=0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "momentum": optax.sgd(1e-2, momentum=0.9, nesterov=True),
    "lion": optax.lion(1e-3),
    "adafactor": optax.adafactor(1e-2),
    "lamb": optax.lamb(1e-2),  # a last factor that depends on the whole array
    "accumulated": optax.MultiSteps(optax.adam(1e-2), 2),
}


def after_steps(tx):
    """Parameters and state after four jitted steps."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params, state = PARAMS, tx.init(PARAMS)
    for _ in range(4):  # gradients from outside: nothing that makes them is fused in
        params, state = step(params, state, jax.tree.map(lambda x: jnp.roll(x, 1) - 0.5, params))
    return params, state


CASES = [(name, {"streams": True}, 3000) for name in TRANSFORMATIONS]
CASES += [(name, "on disk", size) for name, size in (("adam", 3000), ("clipped", 1 << 20), ("momentum", 200))]
CASES += [("adafactor", "on disk", 3000), ("accumulated", "on disk", 8000), ("adamw", {"streams": False}, 1)]
QUICK = [("lamb", {"streams": True}, 3000)]  # test_contract.py has state on disk
QUICK += [("adamw", {"streams": False}, 1)]  # the others are compared on meshes, in test_state_shards.py


@pytest.mark.parametrize(
    ("name", "place", "piece_bytes"),
    slow_but(QUICK, CASES),
)
def test_same_bits_as_the_transformation_itself(name, place, piece_bytes, tmp_path):
    tx, place = TRANSFORMATIONS[name], {"path": tmp_path} if place == "on disk" else place
    got = after_steps(optimizer(tx, min_bytes=1024, piece_bytes=piece_bytes, **place))
    want = after_steps(tx)
    equal(in_memory(got), in_memory(want))
    assert jax.tree.structure(in_memory(got)) == jax.tree.structure(want)
    for x in jax.tree.leaves(got[1], is_leaf=is_on_disk):
        assert (is_on_disk if "path" in place else is_on_host)(x) == (x.nbytes >= 1024)


@pytest.mark.slow
def test_rows_longer_than_a_piece():
    params = jnp.linspace(-1, 1, 1024).reshape(4, 256)

    def run(tx):
        update = jax.jit(lambda g, s, p: tx.update(g, s, p))
        return update(jnp.roll(params, 1), tx.init(params), params)

    got = run(optimizer(optax.adamw(1e-2), min_bytes=1024, streams=True, piece_bytes=500))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(optax.adamw(1e-2))), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [pytest.param(False, marks=pytest.mark.slow), True])
def test_donated_state(streams):
    def run(tx):
        state = tx.init(PARAMS)
        where = jax.tree.map(lambda x: x.sharding, (PARAMS, state))

        @functools.partial(jax.jit, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)
        def step(params, state):
            updates, state = tx.update(jax.tree.map(jnp.cos, params), state, params)
            return optax.apply_updates(params, updates), state

        params = jax.tree.map(jnp.copy, PARAMS)
        for _ in range(3):
            params, state = step(params, state)
        return params

    got = run(optimizer(optax.adam(1e-2), min_bytes=1024, streams=streams, piece_bytes=4096))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(optax.adam(1e-2))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_in_an_nnx_optimizer():
    def run(tx):
        model = nnx.Linear(64, 64, rngs=nnx.Rngs(0))
        state = nnx.Optimizer(model, tx, wrt=nnx.Param)

        @nnx.jit
        def step(model, state):
            state.update(model, nnx.grad(lambda m: (m(jnp.ones((2, 64))) ** 2).sum())(model))

        for _ in range(3):
            step(model, state)
        return nnx.state(model, nnx.Param)

    got, want = run(optimizer(optax.adam(1e-2), min_bytes=1)), run(optax.adam(1e-2))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(a, b)


def test_bad_arguments():
    with pytest.raises(TypeError, match="`tx` must be an Optax transformation, got float"):
        optimizer(0.1)
    with pytest.raises(ValueError, match="`piece_bytes` and `ahead` must be at least 1, got 0 and 2"):
        optimizer(optax.adam(1e-2), piece_bytes=0)


def test_pieces_travel_in_order_and_within_their_arrays():
    tx = optimizer(optax.adam(1e-2), min_bytes=1024, streams=True, piece_bytes=4096)
    state = tx.init(PARAMS)
    jaxpr = jax.make_jaxpr(lambda g, s: tx.update(g, s))(PARAMS, state)
    calls = [eqn for eqn in jaxpr.eqns if "pieces" in str(eqn.params.get("target_name", ""))]
    taken = [v.aval for eqn in calls[1:-1] for v in eqn.outvars[1:]]
    large = sum(x.nbytes for x in jax.tree.leaves(state) if x.nbytes >= 1024)
    assert sum(aval.size * 4 for aval in taken) == large  # everything once
    assert all(aval.size * 4 <= 4096 for aval in taken) and len(taken) == large // 4096


def test_updates_under_jit_grad_steps_and_two_at_once():
    """Two models in one program, one of whose states is unused: each chain of pieces ends on its own."""
    tx, want = (make(optax.adam(1e-2)) for make in (lambda t: optimizer(t, min_bytes=1, streams=True), lambda t: t))

    @functools.partial(jax.jit, static_argnums=0)
    def both(which, a, b):
        t = (tx, want)[which]
        first, _ = t.update(a, t.init(a), a)
        second, state = t.update(b, t.init(b), b)
        return first, second, jax.tree.leaves(state)[1]

    for x, y in zip(*(jax.tree.leaves(both(i, PARAMS["a"], PARAMS["b"])) for i in (0, 1)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)


def device_bytes():
    return sum(x.nbytes for x in jax.live_arrays() if x.sharding.memory_kind != "pinned_host")


INITS = {name: tx.init for name, tx in TRANSFORMATIONS.items()} | {
    "master": master_weights(optax.adam(1e-2), jnp.float16).init,
    "the parameters themselves": lambda params: {"z": params, "mean": jax.tree.map(lambda p: 0.5 * p + 1, params)},
    "not elementwise": not_elementwise,
    "cannot be traced": cannot_be_traced,
    "other leaves": lambda params: {
        "seed": 7,
        "key": jax.random.key(0),
        "table": np.arange(512, dtype=np.int32),
        "none": None,
    },
}


SOME = ("adafactor", "cannot be traced", "other leaves")


@pytest.mark.parametrize("host_params", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", slow_but(SOME, INITS))
def test_the_first_state_is_what_the_transformation_makes(name, host_params, tmp_path):
    params = PARAMS | {"bf16": jnp.linspace(-1, 1, 3000, dtype=jnp.bfloat16)}
    params["numpy"] = np.linspace(0, 1, 900).reshape(30, 30)
    init = INITS[name]
    tx = optax.GradientTransformation(init, optax.identity().update)
    want = init(jax.tree.map(jnp.asarray, params))
    if host_params:
        params = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), params)
    for place in ({}, {"path": tmp_path}):
        got = optimizer(tx, min_bytes=1024, piece_bytes=2000, **place).init(params)
        assert jax.tree.structure(got, is_leaf=is_on_disk) == jax.tree.structure(want)
        for a, b in zip(jax.tree.leaves(got, is_leaf=is_on_disk), jax.tree.leaves(want), strict=True):
            if not hasattr(b, "dtype") or jax.dtypes.issubdtype(b.dtype, jax.dtypes.extended):
                assert a == b
                continue
            np.testing.assert_array_equal(np.asarray(a), b)
            assert a.dtype == jax.dtypes.canonicalize_dtype(b.dtype)
            assert b.nbytes >= 1024 or a.weak_type == b.weak_type
            if b.nbytes >= 1024 and b.ndim:
                assert is_on_disk(a) if place else a.sharding.memory_kind == "pinned_host"


@pytest.mark.parametrize("on_disk", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_first_state_takes_no_memory_of_the_device(on_disk, tmp_path, monkeypatch):
    params = {name: jnp.ones((256, 1024), jnp.bfloat16) for name in "abcd"}
    tx = optimizer(master_weights(optax.adam(1e-2)), piece_bytes=1 << 14, **({"path": tmp_path} if on_disk else {}))
    before, seen = device_bytes(), [0]
    real = first_state.LazyArray._part

    def part(*args):
        value = real(*args)
        seen.append(device_bytes() - before)
        return value

    monkeypatch.setattr(first_state.LazyArray, "_part", part)
    state = tx.init(params)
    assert 0 < max(seen) <= 4 << 14 < params["a"].nbytes
    far = [x for x in jax.tree.leaves(state) if x.nbytes > 1 << 14]
    assert not on_disk or not far  # tickets
    assert device_bytes() - before < 4096


@pytest.mark.devices(2)
def test_the_first_state_of_sharded_parameters_is_sharded():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    params = {"w": jax.device_put(PARAMS["a"], rows), "b": jax.device_put(jnp.ones(4), rows)}
    for tx in (optax.adam(1e-2), master_weights(optax.adam(1e-2), jnp.float16)):
        got, want = optimizer(tx, min_bytes=1024).init(params), tx.init(params)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
            if b.ndim:
                assert a.sharding.memory_kind == ("pinned_host" if b.nbytes >= 1024 else rows.memory_kind)
                assert a.sharding.with_memory_kind(rows.memory_kind).is_equivalent_to(rows, a.ndim)
    single = optimizer(optax.adam(1e-2), min_bytes=1024).init(params["w"])[0]
    assert single.mu.sharding.spec == rows.spec and single.count.sharding.device_set == rows.device_set


@pytest.mark.devices(2)
@pytest.mark.parametrize("min_bytes", [pytest.param(1, marks=pytest.mark.slow), 1024])
def test_the_state_lies_on_the_device_of_its_parameters(min_bytes):
    second = jax.devices()[-1]  # not the default one, where there are several
    params = jax.device_put(PARAMS, second)
    tx = optimizer(optax.adam(1e-2), min_bytes=min_bytes, streams=False)
    state = tx.init(params)
    assert all(x.devices() == {second} for x in jax.tree.leaves(state))
    updates, _ = jax.jit(tx.update)(params, state)
    for got, g in zip(jax.tree.leaves(updates), map(np.asarray, jax.tree.leaves(PARAMS)), strict=True):
        np.testing.assert_allclose(got, -1e-2 * g / (np.abs(g) + 1e-8), rtol=1e-5)  # Adam's first step
