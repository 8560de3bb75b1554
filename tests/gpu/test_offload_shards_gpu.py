"""Training state that a mesh of two GPUs divides: the numbers of the same step with its state on the devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from dejax.offload import ActivationStore, DiskArray, optimizer, stack_step
from tests.gpu.test_offload_gpu import PLAIN
from tests.offload.test_shards import collectives

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.devices(2),
]
LAYERS, WIDTH, STEPS = 6, 512, 4
MESHES = {  # how w [6, 512, 512] and b [6, 512] are divided
    "fsdp": {"w": P(None, "data"), "b": P(None, "data")},
    "the other axis": {"w": P(None, None, "data")},
    "replicated": {},
}
PLACES = {
    "moments on disk": {"path": True},
    "all on disk": {"path": True, "params": "disk", "ahead": 2},
    "disk, and host memory by default": {"path": True, "moments": "host", "params": "disk"},
    "disk and host memory": {"path": True, "params": "host", "streams": True},
    "host memory": {"moments": "host", "params": "host", "streams": True, "ahead": 2},
    "moments in host memory": {"moments": "host", "streams": True},
    "host memory by default": {"moments": "host", "params": "host"},
}
OPTIONS = {
    "gradients in host memory": {"clip_norm": 0.05, "gradients": "host", "streams": True},
    "microbatches": {"microbatches": 3},
    "activations": {"activations": "host"},
}


def embed(outer, batch):
    return outer["in"][batch["tokens"]]


def body(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T / 8


def head(outer, x, batch):
    return optax.softmax_cross_entropy_with_integer_labels(x @ outer["out"], batch["labels"]).mean()


@functools.cache
def mesh():
    return Mesh(np.array(jax.devices()[:2]), ("data",))


def placed(x, spec=P()):
    return jax.device_put(x, NamedSharding(mesh(), spec))


def model(name):
    keys = jax.random.split(jax.random.key(0), 3)
    outer = {"in": jax.random.normal(keys[0], (11, WIDTH)), "out": jax.random.normal(keys[1], (WIDTH, 11)) / 16}
    layers = {"w": jax.random.normal(keys[2], (LAYERS, WIDTH, WIDTH)) / 16, "b": jnp.zeros((LAYERS, WIDTH))}
    return placed(outer), {key: placed(x, MESHES[name].get(key, P())) for key, x in layers.items()}


def batch(i):
    tokens = jax.random.randint(jax.random.key(i), (12, 64), 0, 11)
    return placed({"tokens": tokens, "labels": (tokens * 3 + 1) % 11}, P("data"))


def in_memory(state):
    return jax.tree.map(np.asarray, state, is_leaf=lambda x: isinstance(x, DiskArray))


def train(name, **how):
    step = stack_step(embed, body, head, optax.adamw(1e-4), **{"min_bytes": 100, "moments": None, **how})
    state = step.init(*model(name))
    options = {**PLAIN, "xla_gpu_deterministic_ops": True}
    run, losses = step.jit(state).lower(state, batch(0)).compile(options), []
    for i in range(STEPS):
        state, loss = run(state, batch(i))
        losses.append(float(loss))
    return losses, in_memory(state), collectives(run)


@functools.cache
def on_the_devices(name, **how):
    return train(name, moments="device", **how)


def same(got, want):
    """Bits are compared in tests/offload: here XLA rounds fused parts of the gradients in places of its own."""
    assert got[2] <= want[2]  # nothing more is communicated
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=2e-5), got[:2], want[:2])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("places", PLACES)
def test_the_numbers_of_state_on_the_devices(places, name, tmp_path):
    how = dict(PLACES[places])
    if how.get("path"):
        how["path"] = tmp_path
    same(train(name, **how), on_the_devices(name))


@pytest.mark.parametrize("options", OPTIONS)
def test_other_arguments(options, tmp_path):
    how = OPTIONS[options]
    with ActivationStore(host_bytes=1 << 26):
        want = train("fsdp", moments="device", **how)
        same(train("fsdp", path=tmp_path, params="disk", **how), want)


HOW = {"disk": {"path": True}, "host, by dejax": {"streams": True}, "host, by default": {}}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", MESHES)
def test_an_optimizer(name, how, tmp_path):
    """Gradients from outside: nothing that makes them is fused in."""
    where = {key: tmp_path if key == "path" else value for key, value in HOW[how].items()}
    found = []
    for tx in (optimizer(optax.adamw(1e-2), min_bytes=100, **where), optax.adamw(1e-2)):
        params = model(name)[1]
        shardings = jax.tree.map(lambda x: x.sharding, params)

        def step(params, state, grads, tx=tx, shardings=shardings):
            updates, state = tx.update(grads, state, params)
            return jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), shardings), state

        state, run = tx.init(params), jax.jit(step, compiler_options=PLAIN)
        communicated = collectives(run.lower(params, state, params).compile(PLAIN))
        for i in range(STEPS):
            grads = jax.tree.map(lambda x, i=i: jax.device_put(np.roll(np.asarray(x), i + 1), x.sharding), params)
            params, state = run(params, state, grads)
        found.append((in_memory((params, state)), communicated))
    jax.tree.map(np.testing.assert_array_equal, found[0][0], found[1][0])
    assert found[0][1] <= found[1][1]  # nothing more is communicated
