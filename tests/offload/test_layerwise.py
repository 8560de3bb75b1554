"""A step layer by layer: equal numbers wherever the state lies, and those of plain autodiff."""

import functools
import re
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.extend.core import Literal

from dejax.offload import ActivationStore, stack_step
from tests.cases import slow_but
from tests.offload.states import equal, in_memory

LAYERS, WIDTH = 5, 16
KEYS = jax.random.split(jax.random.key(0), 4)


def embed(outer, batch):
    return outer["in"][batch["tokens"]]


def body(p, x):
    return x + jnp.tanh(x @ p["w"] + p["b"]) @ p["w"].T


def head(outer, x, batch):
    scores = x @ outer["out"]
    return optax.softmax_cross_entropy_with_integer_labels(scores, batch["labels"]).mean()


def model():
    outer = {"in": jax.random.normal(KEYS[0], (11, WIDTH)), "out": jax.random.normal(KEYS[1], (WIDTH, 11)) / 4}
    layers = {"w": jax.random.normal(KEYS[2], (LAYERS, WIDTH, WIDTH)) / 4, "b": jnp.zeros((LAYERS, WIDTH))}
    return outer, layers


def batch(step, size=8):
    tokens = jax.random.randint(jax.random.fold_in(KEYS[3], step), (size, 7), 0, 11)
    return {"tokens": tokens, "labels": (tokens * 3 + 1) % 11}


def train(step, steps=3):
    state = step.init(*model())
    run = step.jit(state)
    losses = []
    for i in range(steps):
        state, loss = run(state, batch(i))
        losses.append(float(loss))
    return losses, in_memory(state)


make = functools.partial(stack_step, embed, body, head, optax.adamw(1e-2), min_bytes=100, streams=True)
PLACES = {
    "moments": {"params": "device", "moments": "host"},
    "everything": {"params": "host", "moments": "host"},
    "two ahead": {"params": "host", "moments": "host", "ahead": 2},
    "further ahead than there are layers": {"params": "host", "ahead": 9},
    "parameters": {"params": "host", "moments": "device"},
    "one array": {"params": "device", "moments": lambda path, x: "host" if "nu" in path and "w" in path else "device"},
    "activations": {"params": "host", "activations": "host"},
    "moments on disk": {"path": True},
    "all on disk": {"path": True, "params": "disk", "ahead": 2},
    "disk, and parameters in host memory": {"path": True, "params": "host"},
    "disk, and moments in host memory": {"path": True, "params": "disk", "moments": "host"},
    "all three": {
        "path": True,
        "moments": lambda path, x: "disk" if "nu" in path else "host" if "w" in path else "device",
    },
}


@pytest.fixture(scope="module")
def on_the_device():
    return train(make(params="device", moments="device"))


QUICK = ("activations", "all on disk")


@pytest.mark.parametrize("name", slow_but(QUICK, PLACES))
def test_same_bits_wherever_the_state_lies(name, on_the_device, tmp_path):
    how = PLACES[name] | ({"path": tmp_path} if "path" in PLACES[name] else {})
    with ActivationStore():
        losses, state = train(make(**how))
    assert losses == on_the_device[0] and losses[-1] < losses[0]
    equal(state, on_the_device[1])


@pytest.mark.parametrize("gradients", ["freed", "device"])
def test_the_first_moments_come_during_the_forward_pass(gradients):
    """XLA orders calls by what they read, so the loop of the forward pass must read what begins the copies."""
    step = make(moments="host", gradients=gradients)
    jaxpr = jax.make_jaxpr(step)(step.init(*model()), batch(0)).jaxpr

    def pulls(eqn):
        array = dict(eqn.params.get("attributes") or ()).get("pull_array", ())
        return np.asarray(getattr(array, "val", array)).size > 0

    begins = [eqn for eqn in jaxpr.eqns if pulls(eqn)]
    forward = next(e for e in jaxpr.eqns if e.primitive.name == "scan")
    behind = set(begins[0].outvars)
    for eqn in jaxpr.eqns[jaxpr.eqns.index(begins[0]) + 1 :]:
        if any(v in behind for v in eqn.invars if not isinstance(v, Literal)):
            behind.update(eqn.outvars)
        if eqn is forward:
            break
    assert len(begins) == 1 and behind.intersection(forward.outvars)


@pytest.mark.slow
def test_microbatches_equal_one_batch(on_the_device):
    losses, state = train(make(params="host", moments="host", microbatches=4))
    want, want_state = on_the_device
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    again, again_state = train(make(params="device", moments="device", microbatches=4))
    assert losses == again
    for a, b, c in zip(*map(jax.tree.leaves, (state, again_state, want_state)), strict=True):
        np.testing.assert_array_equal(a, b)
        np.testing.assert_allclose(a, c, atol=5e-3)


def test_state_lies_where_it_was_put():
    step = make(params="host", moments="host")
    state = step.init(*model())
    kinds = {x.sharding.memory_kind for x in (state.layers["w"], state.layer_moments[0].mu["w"])}
    assert kinds == {"pinned_host"}
    assert state.layers["b"].sharding.memory_kind != "pinned_host"  # its rows are small
    run = step.jit(state)
    state, _ = run(state, batch(0))
    assert state.layer_moments[0].mu["w"].sharding.memory_kind == "pinned_host"
    found = step.bytes_by_tier(*jax.eval_shape(model))
    assert found["host"] == 3 * LAYERS * WIDTH * WIDTH * 4


@pytest.mark.slow
def test_three_threads_at_once_and_one_layer(on_the_device):
    step, found = make(params="host", moments="host"), [None] * 3

    def run(i):
        found[i] = train(step)[0]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [on_the_device[0]] * 3
    outer, layers = model()
    one = jax.tree.map(lambda x: x[:1], layers)
    far, near = (make(params=place, moments=place) for place in ("host", "device"))
    losses = [step.jit(state)(state, batch(0))[1] for step in (far, near) for state in [step.init(*copied(outer, one))]]
    assert losses[0] == losses[1]


def copied(*trees):
    return jax.tree.map(jnp.copy, trees)


@pytest.mark.slow
def test_parameters_that_are_given_in_host_memory():
    outer, layers = model()
    far = jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Host), layers)
    step = make(params="host")
    state = step.init(outer, far)
    assert state.layers["b"].sharding.memory_kind != "pinned_host"
    step.jit(state)(state, batch(0))
    with pytest.raises(ValueError, match="`state` must lie where `init` puts it, got an array of shape"):
        jax.jit(make(params="device"))(step.init(outer, far), batch(0))


@pytest.mark.slow
def test_no_gradient_of_the_whole_stack():
    """Temporaries do not grow with the number of layers but for their inputs."""
    temps = []
    for layers in (4, 16):
        step = make(params="host", moments="host")
        stack = {"w": jnp.zeros((layers, 256, 256)), "b": jnp.zeros((layers, 256))}
        outer = {"in": jnp.zeros((11, 256)), "out": jnp.zeros((256, 11))}
        state = step.init(outer, stack)
        temps.append(step.jit(state).lower(state, batch(0, 1)).compile().memory_analysis().temp_size_in_bytes)
    assert temps[1] - temps[0] < 12 * (256 * 256 * 4) / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "places", [pytest.param({"params": "device", "moments": "device"}, marks=pytest.mark.slow), {"params": "host"}]
)
def test_a_state_that_is_the_parameters_is_a_copy(places):
    """What `jit` gives away, it gives away once: an average of parameters begins as their values."""

    def update(g, s, p):
        return jax.tree.map(lambda g: -0.1 * g, g), jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, s, p)

    step = stack_step(embed, body, head, optax.GradientTransformation(lambda p: p, update), min_bytes=100, **places)
    losses, state = train(step)
    assert losses[-1] < losses[0]
    assert np.abs(state.layer_moments["w"] - state.layers["w"]).max() > 0


def test_bad_input():
    with pytest.raises(TypeError, match="`tx` must be an Optax transformation, got float"):
        stack_step(embed, body, head, 0.1)
    with pytest.raises(ValueError, match="`moments` must be 'device', 'host' or 'disk', got 'disc'"):
        make(moments="disc")
    with pytest.raises(ValueError, match="`microbatches` and `ahead` must be at least 1, got 0 and 1"):
        make(microbatches=0)
    with pytest.raises(ValueError, match="`microbatches` must divide the batch, got 3 for 8 examples"):
        train(make(microbatches=3))
    outer, layers = model()
    for wrong, words in (({**layers, "b": layers["b"][:4]}, "(4, 16), (5, 16, 16)"), ({"w": layers["w"][:0]}, "(0, 16"),
                         ({}, "of no array")):  # fmt: skip
        with pytest.raises(ValueError, match="of equally many layers, at least one, got shapes " + re.escape(words)):
            make().init(outer, wrong)
    step = make(params="host")
    with pytest.raises(ValueError, match="must run in jax.jit, got arrays outside of it; call step.jit"):
        step(step.init(*model()), batch(0))
    mixing = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2))
    one = (model()[0], model()[1]["w"])
    for body_, start in ((body, model()), (lambda w, x: x + jnp.tanh(x @ w), one)):
        step = stack_step(embed, body_, head, mixing, moments="device")
        with pytest.raises(ValueError, match="must update each layer by itself, got one that mixes them"):
            jax.eval_shape(step, step.init(*start), batch(0))


CLIPPED = {
    "on the device": {"params": "device", "moments": "device"},
    "moments": {},
    "all": {"params": "host"},
    "gradients, too": {"params": "host", "gradients": "host"},
    "by the copies of XLA": {"params": "host", "gradients": "host", "streams": False},
}


@functools.cache
def clipped(limit):
    """Losses, norms and the last state of plain autodiff with `optax.clip_by_global_norm`."""
    outer, layers = model()
    params = {"outer": outer, "layers": layers}
    tx = optax.chain(optax.clip_by_global_norm(limit), optax.adamw(1e-2))
    state, losses, norms = tx.init(params), [], []

    def loss(params, batch):
        x, _ = jax.lax.scan(lambda x, p: (body(p, x), None), embed(params["outer"], batch), params["layers"])
        return head(params["outer"], x, batch)

    @jax.jit
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(loss)(params, batch)
        updates, state = tx.update(gradient, state, params)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        return optax.apply_updates(params, updates), state, value, norm

    for i in range(3):
        params, state, value, norm = step(params, state, batch(i))
        losses.append(float(value))
        norms.append(float(norm))
    return losses, norms, params


@pytest.mark.slow  # test_layerwise_numbers.py has one that is not
@pytest.mark.parametrize("name", CLIPPED)
def test_the_norm_of_all_gradients_is_limited(name):
    want, norms, params = clipped(0.05)
    assert min(norms) > 0.05
    losses, state = train(make(clip_norm=0.05, **CLIPPED[name]))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_allclose(state.norm, norms[-1], rtol=1e-4)
    for key in ("w", "b"):
        np.testing.assert_allclose(state.layers[key], params["layers"][key], atol=2e-4)
    first, first_state = train(make(clip_norm=0.05, **CLIPPED["on the device"]))
    assert losses == first
    equal(state[:4], first_state[:4])


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"gradients": "freed"}, {"gradients": "host", "microbatches": 1}])
def test_a_limit_that_no_gradient_reaches_changes_nothing(how, on_the_device):
    losses, state = train(make(clip_norm=1e6, **how))
    np.testing.assert_allclose(losses, on_the_device[0], rtol=1e-6)
    assert state.norm > 0


@pytest.mark.slow
def test_a_limit_with_freed_gradients_takes_the_last_norm():
    """A step scales by the larger of the last norm and that of its gradients so far, head first."""
    sgd = functools.partial(stack_step, embed, body, head, optax.sgd(1.0), min_bytes=100, streams=True)
    state = sgd(clip_norm=0.05, gradients="freed").init(*model())
    state = state._replace(norm=jnp.float32(1e3))
    new, _ = sgd(clip_norm=0.05, gradients="freed").jit(state)(state, batch(0))
    free = sgd().init(*model())
    plain, _ = sgd().jit(free)(free, batch(0))
    _, layers = model()
    change, want = new.layers["w"] - layers["w"], (plain.layers["w"] - layers["w"]) * 0.05 / 1e3
    np.testing.assert_allclose(change, want, atol=1e-7)
    np.testing.assert_allclose(new.norm, clipped(0.05)[1][0], rtol=1e-5)
    # Without a last norm the first layer, which comes last, knows nearly all gradients.
    state = sgd(clip_norm=0.05, gradients="freed").init(*model())
    new, _ = sgd(clip_norm=0.05, gradients="freed").jit(state)(state, batch(0))
    factor = np.abs(new.layers["w"][0] - layers["w"][0]).max() / np.abs(plain.layers["w"][0] - layers["w"][0]).max()
    assert 0.05 / clipped(0.05)[1][0] <= factor * 1.001 < 0.05 / clipped(0.05)[1][0] * 2


def lora_body(p, x):
    w = p["base"].astype(jnp.float32) * p["scale"] + p["a"] @ p["b"]
    return x + jnp.tanh(x @ w) @ w.T


def lora():
    outer, _ = model()
    layers = {
        "base": jax.random.randint(KEYS[2], (LAYERS, WIDTH, WIDTH), -127, 127, jnp.int8),
        "scale": jnp.full((LAYERS, 1), 1 / 500),
        "a": jax.random.normal(KEYS[3], (LAYERS, WIDTH, 2)) / 4,
        "b": jnp.zeros((LAYERS, 2, WIDTH)),
    }
    return outer, layers


def is_frozen(path, _):
    return path in ("layers['base']", "layers['scale']", "outer['in']")


@pytest.mark.slow  # test_contract.py has frozen parameters, too
@pytest.mark.parametrize("how", [{}, {"params": "host"}, {"params": "host", "clip_norm": 0.1, "gradients": "host"}])
def test_frozen_parameters_stay_as_they_are(how):
    """Adapters over weights in eight bits: no gradient, no moments, and no way back for what is frozen."""
    limit = how.get("clip_norm")
    step = stack_step(embed, lora_body, head, optax.adam(1e-2), min_bytes=64, streams=True, frozen=is_frozen, **how)
    outer, layers = lora()
    state = step.init(outer, layers)
    assert set(state.layer_moments[0].mu) == {"base", "scale", "a", "b"}
    assert [x.shape for x in jax.tree.leaves(state.layer_moments[0].mu)] == [(LAYERS, WIDTH, 2), (LAYERS, 2, WIDTH)]
    run, losses = step.jit(state), []
    for i in range(3):
        state, loss = run(state, batch(i))
        losses.append(float(loss))

    outer, layers = lora()  # the others were given away
    trained = {"out": outer["out"], "a": layers["a"], "b": layers["b"]}
    tx = optax.adam(1e-2) if limit is None else optax.chain(optax.clip_by_global_norm(limit), optax.adam(1e-2))
    held, want = tx.init(trained), []

    def value(t, batch):
        stack = {"base": lora()[1]["base"], "scale": lora()[1]["scale"], "a": t["a"], "b": t["b"]}
        x, _ = jax.lax.scan(lambda x, p: (lora_body(p, x), None), lora()[0]["in"][batch["tokens"]], stack)
        return head({"out": t["out"]}, x, batch)

    @jax.jit
    def plain(trained, held, batch):
        loss, gradient = jax.value_and_grad(value)(trained, batch)
        updates, held = tx.update(gradient, held, trained)
        return optax.apply_updates(trained, updates), held, loss

    for i in range(3):
        trained, held, loss = plain(trained, held, batch(i))
        want.append(float(loss))
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    np.testing.assert_array_equal(state.layers["base"], lora()[1]["base"])
    np.testing.assert_array_equal(state.outer["in"], lora()[0]["in"])
    for key in ("a", "b"):
        np.testing.assert_allclose(state.layers[key], trained[key], atol=1e-4)
    if how:
        assert state.layers["base"].sharding.memory_kind == "pinned_host"
        found = step.bytes_by_tier(*jax.eval_shape(lora))
        assert found["host"] >= LAYERS * WIDTH * WIDTH


def test_integers_that_are_trained_are_an_error():
    step = stack_step(embed, lora_body, head, optax.adam(1e-2))
    with pytest.raises(ValueError, match=r"a floating-point dtype, got int8 for layers\['base'\]; name it in"):
        step.init(*lora())
    with pytest.raises(ValueError, match="`gradients` must be 'freed', 'device', 'host' or None, got 'disk'"):
        make(gradients="disk")
    with pytest.raises(ValueError, match="`clip_norm` must be positive or None, got -1"):
        make(clip_norm=-1)


@pytest.mark.slow  # test_contract.py has those by the copies of dejax
def test_the_loss_alone_leaves_the_state_as_it_is():
    step = make(params="host", streams=False, microbatches=2)
    state = step.init(*model())
    run, loss = step.jit(state), jax.jit(step.loss)
    for i in range(2):
        before = in_memory(state)
        alone = [float(loss(state, batch(i))) for _ in range(2)]
        equal(in_memory(state), before)
        state, value = run(state, batch(i))
        assert alone == [float(value)] * 2


@pytest.mark.slow
def test_rows_of_all_sizes():
    """Of no byte, of one, of an odd number; in several dtypes. What has no bytes stays on the device."""

    def odd_body(p, x):
        scale = 1 + p["one"].astype(jnp.float32) / 100 + p["odd"].astype(jnp.float32).sum() + p["none"].sum()
        return x + jnp.tanh(x @ p["w"]) * scale

    def odd_model():
        layers = {
            "w": model()[1]["w"],
            "one": jnp.arange(LAYERS, dtype=jnp.uint8),
            "odd": jnp.full((LAYERS, 3), 0.25, jnp.bfloat16),
            "none": jnp.zeros((LAYERS, 0)),
        }
        return model()[0], layers

    found = []
    for place in ("device", "host"):
        step = stack_step(
            embed, odd_body, head, optax.adam(1e-2), params=place, moments=place, streams=True, min_bytes=1,
            frozen=lambda path, _: path == "layers['one']",
        )  # fmt: skip
        state = step.init(*odd_model())
        far = {name for name, x in state.layers.items() if jax.typeof(x).memory_space == jax.memory.Space.Host}
        assert far == (set() if place == "device" else {"w", "one", "odd"})
        run = step.jit(state)
        for i in range(2):
            state, loss = run(state, batch(i))
        found.append(jax.tree.leaves(jax.tree.map(np.asarray, (state.layers, state.layer_moments, loss))))
    for a, b in zip(*found, strict=True):
        np.testing.assert_array_equal(a, b)
