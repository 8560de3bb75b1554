"""The decoder of `examples/train_gpt.py`: its layers and its training step against plain references."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.train_gpt import (
    SIZES,
    DecoderConfig,
    Recipe,
    cross_entropy,
    forward,
    generate,
    init_params,
    loss,
    make_mesh,
    make_trainer,
)

CONFIG = DecoderConfig(layers=2, width=24, heads=4, kv_heads=2, head_dim=6, hidden=32, dtype="float32")
KEY = jax.random.key(0)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 256, (2, 9), np.int32))
# Compiled once: all that call it have tokens of one shape.
scores_of = jax.jit(functools.partial(forward, CONFIG))


@functools.cache
def params():
    return jax.jit(functools.partial(init_params, CONFIG))(KEY)


def test_a_token_sees_only_what_precedes_it():
    before = scores_of(params(), TOKENS)
    after = scores_of(params(), TOKENS.at[:, 5].set((TOKENS[:, 5] + 1) % 256))
    np.testing.assert_array_equal(before[:, :5], after[:, :5])
    assert (np.abs(before[:, 5:] - after[:, 5:]).max(-1) > 0).all()


def reference(params, tokens):
    """float64, head by head, with the keys and values of a group repeated."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
    sequence = tokens.shape[1]

    def norm(x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.norm_eps) * scale

    def rotate(x):  # as complex numbers
        half = CONFIG.head_dim // 2
        turn = np.exp(1j * np.arange(sequence)[:, None] * CONFIG.rope_base ** (-np.arange(half) / half))
        z = (x[..., :half] + 1j * x[..., half:]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = p["embed"][tokens]
    for i in range(CONFIG.layers):
        w = {name: value[i] for name, value in p["layers"].items()}
        h = norm(x, w["attention_norm"])
        mixed = []
        for head in range(CONFIG.heads):
            shared = head // (CONFIG.heads // CONFIG.kv_heads)
            of = lambda name, at, h=h, w=w: np.split(h @ w[name], w[name].shape[1] // CONFIG.head_dim, -1)[at]  # noqa: E731
            q, k, v = rotate(of("query", head)), rotate(of("key", shared)), of("value", shared)
            scores = q @ k.swapaxes(1, 2) / np.sqrt(CONFIG.head_dim)
            scores = np.where(np.tri(sequence, dtype=bool), scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            mixed.append(weights / weights.sum(-1, keepdims=True) @ v)
        x = x + np.concatenate(mixed, -1) @ w["out"]
        h = norm(x, w["mlp_norm"])
        gate = h @ w["gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["up"])) @ w["down"]
    return norm(x, p["norm"]) @ p["unembed"]


def test_as_a_reference_in_float64():
    got = scores_of(jax.tree.map(lambda x: x * 3, params()), TOKENS)
    want = reference(jax.tree.map(lambda x: x * 3, params()), np.asarray(TOKENS))
    np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-4)


def test_loss_is_cross_entropy():
    scores = np.random.default_rng(0).normal(size=(2, 8, 256))
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    want = -np.log(np.take_along_axis(weights, np.asarray(TOKENS)[:, 1:, None], -1)).mean()
    np.testing.assert_allclose(cross_entropy(jnp.asarray(scores), TOKENS[:, 1:]), want, rtol=1e-5)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name):
    config = SIZES[name]
    shapes = jax.eval_shape(lambda key: init_params(config, key), KEY)
    assert sum(x.size for x in jax.tree.leaves(shapes)) == config.num_params
    if name != "tiny":
        wanted = float(name[:-1]) * {"m": 1e6, "b": 1e9}[name[-1]]
        assert abs(config.num_params / wanted - 1) < 0.04
    assert config.flops_per_token(1) > 0.99 * 6 * (config.num_params - config.vocabulary * config.width) * 0.97


@pytest.mark.cpu_only("for a GPU XLA counts operations of the elementwise rest otherwise")
@pytest.mark.parametrize("sequence", [32, pytest.param(160, marks=pytest.mark.slow)])
def test_operations_are_those_that_xla_counts(sequence):
    """Of one layer, since XLA counts a loop's body once. XLA computes all of attention's square, not its half."""
    config = DecoderConfig(layers=1, width=64, heads=4, kv_heads=2, head_dim=32, hidden=160, dtype="float32")
    shapes = jax.eval_shape(lambda key: init_params(config, key), KEY)
    tokens = jax.ShapeDtypeStruct((2, sequence + 1), jnp.int32)
    compiled = jax.jit(jax.grad(lambda p, t: loss(config, p, t))).lower(shapes, tokens).compile()
    counted = compiled.cost_analysis()["flops"] / (2 * sequence)
    other_half = 6 * config.heads * config.head_dim * sequence
    # The rest is elementwise.
    assert 1 < counted / (config.flops_per_token(sequence) + other_half) < 1.05


def test_samples_are_those_of_the_whole_model():
    prompt = TOKENS[:, :4]
    got = generate(params(), prompt, KEY, config=CONFIG, length=5, temperature=0.0)
    want = jnp.zeros_like(TOKENS).at[:, :4].set(prompt)
    for last in range(3, 8):  # a token sees only what precedes it
        want = want.at[:, last + 1].set(scores_of(params(), want)[:, last].argmax(-1))
    np.testing.assert_array_equal(got, want)


@pytest.mark.slow
def test_samples_depend_on_the_key_alone():
    how = {"config": CONFIG, "length": 20}
    first, again, other = (generate(params(), TOKENS[:, :1], jax.random.key(k), **how) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and first.shape == (2, 21)
    few = generate(params(), TOKENS[:, :1], KEY, top_k=1, **how)
    np.testing.assert_array_equal(few, generate(params(), TOKENS[:, :1], KEY, temperature=0.0, **how))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_heads": 3}, "`kv_heads` must divide `heads`, got kv_heads=3 and heads=4"),
        ({"head_dim": 5}, "`head_dim` must be even, got 5"),
        ({"layers": 0}, "`layers` must be at least 1, got 0"),
    ],
)
def test_bad_shapes(changes, words):
    with pytest.raises(ValueError, match=words):
        CONFIG.replace(**changes)


@functools.cache
def losses(recipe, steps=3, mesh=None):
    trainer = make_trainer(CONFIG, recipe, mesh=mesh)
    state, found = trainer.init(KEY), []
    for i in range(steps):
        tokens = jax.random.randint(jax.random.fold_in(KEY, i), (recipe.batch, recipe.sequence + 1), 0, 8)
        state, value = trainer.step(state, trainer.put(tokens))
        found.append(float(value))
    return found, trainer.params_of(state)


BASE = Recipe(batch=4, sequence=16, steps=30, rate=1e-2, warmup=2, min_bytes=1)


def test_loss_decreases_and_a_step_that_is_not_finite_is_skipped():
    trainer = make_trainer(CONFIG, BASE)
    state, found = trainer.init(KEY), []
    tokens = [jax.random.randint(jax.random.fold_in(KEY, i), (4, 17), 0, 8) for i in range(25)]
    for some in tokens:
        state, value = trainer.step(state, some)
        found.append(float(value))
    assert found[-1] < 0.6 * found[0] and int(state["skipped"]) == 0
    state["params"]["norm"] = state["params"]["norm"].at[0].set(np.inf)
    before = jax.tree.map(np.array, state)
    state, value = trainer.step(state, tokens[0])
    assert not np.isfinite(value) and int(state["skipped"]) == 1
    for name in ("params", "moments"):
        jax.tree.map(np.testing.assert_array_equal, state[name], before[name])


@pytest.mark.slow
def test_accumulation_equals_one_large_batch():
    (one, params), (several, others) = losses(BASE), losses(dataclasses.replace(BASE, accumulate=2))
    np.testing.assert_allclose(one, several, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.slow
def test_state_in_host_memory_gives_the_same_losses():
    want, params = losses(BASE)
    got, others = losses(dataclasses.replace(BASE, state="all", gradients="host"))
    np.testing.assert_allclose(got, want, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-3)


@pytest.mark.slow
@pytest.mark.devices(4)
def test_a_mesh_divides_parameters_and_gives_the_same_losses():
    want, _ = losses(BASE)
    got, params = losses(BASE, mesh=make_mesh(4))
    np.testing.assert_allclose(got, want, rtol=1e-4)
    got, other = losses(dataclasses.replace(BASE, state="moments", clip=0.0), mesh=make_mesh(4))
    np.testing.assert_allclose(got, losses(dataclasses.replace(BASE, clip=0.0))[0], rtol=1e-4)
    for gate in (params["layers"]["gate"], other["layers"]["gate"]):
        assert gate.addressable_shards[0].data.size == gate.size // 4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"offload": "disk"}, "`offload` must be one of none, remat, inputs, all, got 'disk'"),
        ({"accumulate": 3}, "`accumulate` must divide `batch`, got accumulate=3 and batch=4"),
        ({"gradients": "disk"}, "`gradients` must be one of freed, device, host, got 'disk'"),
        ({"state": "all", "offload": "all"}, "`offload` must be 'remat' or 'inputs'"),
    ],
)
def test_bad_recipes(changes, words):
    with pytest.raises(ValueError, match=words):
        dataclasses.replace(BASE, **changes)
