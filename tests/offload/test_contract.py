"""What `dejax.offload` promises, through its public names, against numpy.

Each promise of equal bits is of one compiled program, whose tensors or state lie in different places.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dejax.offload import (
    ActivationStore,
    DiskArray,
    StateStore,
    default_store,
    master_weights,
    offload,
    optimizer,
    plan_stack,
    region,
    restore,
    stack_step,
)

LAYERS, BATCH, WIDTH = 3, 32, 64
TENSOR = BATCH * WIDTH * 4  # bytes of one activation: two pages
RNG = np.random.default_rng(0)
WS = (RNG.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5).astype(np.float32)
X = RNG.normal(size=(BATCH, WIDTH)).astype(np.float32)


def layer(w: Any, x: Any) -> Any:
    return x + jnp.tanh(x @ w)


def loss_of(body: Any) -> Any:
    return lambda ws, x: (jax.lax.scan(lambda x, w: (body(w, x), None), x, ws)[0] ** 2).mean()


def gradients_in_numpy(ws: np.ndarray, x: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
    """The loss, and its gradients by the weights and by the input, in float64."""
    ws, xs = ws.astype(np.float64), [x.astype(np.float64)]
    for w in ws:
        xs.append(xs[-1] + np.tanh(xs[-1] @ w))
    g, by_w = 2 * xs[-1] / xs[-1].size, np.zeros_like(ws)
    for i in reversed(range(len(ws))):
        inner = g * (1 - np.tanh(xs[i] @ ws[i]) ** 2)
        by_w[i] = xs[i].T @ inner
        g = g + inner @ ws[i].T
    return float((xs[-1] ** 2).mean()), by_w, g


def flip_bits(folder: Path) -> None:
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "owner" and file.stat().st_size:
            content = np.fromfile(file, np.uint8)
            content[100::4096] ^= 1
            content.tofile(file)


def test_activations_in_host_memory_and_on_a_drive(tmp_path: Path) -> None:
    """The gradients are right wherever the tensors lie, nothing is left, and damage of a file is an error."""
    body = offload(layer, min_bytes=1)
    forward = jax.jit(lambda ws, x: jax.vjp(loss_of(body), ws, x)[1])
    backward = jax.jit(lambda pull: pull(jnp.float32(1)))
    want = gradients_in_numpy(WS, X)[1:]
    small = {"device_bytes": 0, "host_bytes": 3 * TENSOR, "chunk_bytes": 4096, "io_threads": 2}
    with ActivationStore() as store:
        first = backward(forward(WS, X))
    stats = store.stats()
    assert stats.stored_count == stats.fetched_count >= LAYERS and stats.live_count == stats.written_bytes == 0
    for got, exact in zip(first, want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-6)
    for engine in ("tensorstore", "direct"):
        with ActivationStore(tmp_path, engine=engine, **small) as store:
            for _ in range(3):
                for got, before in zip(backward(forward(WS, X)), first, strict=True):
                    np.testing.assert_array_equal(got, before)
            store.drain()
            stats = store.stats()
            assert stats.read_bytes > 0 and stats.peak_host_bytes <= 3 * TENSOR
            assert stats.live_count == stats.disk_bytes == 0 and "disk" in store.summary()
            assert len(list(tmp_path.iterdir())) == 1
        assert not list(tmp_path.iterdir())
    with ActivationStore(tmp_path, **small) as store:
        pull = jax.block_until_ready(forward(WS, X))
        store.drain()
        flip_bits(tmp_path)
        with pytest.raises(Exception, match="checksum"):
            jax.block_until_ready(backward(pull))
        np.testing.assert_array_equal(backward(forward(WS, X))[0], first[0])
    with ActivationStore(host_bytes=TENSOR, device_bytes=0), pytest.raises(Exception, match="raise host_bytes"):
        jax.block_until_ready(forward(WS, X))
    np.testing.assert_array_equal(backward(forward(WS, X))[0], first[0])  # by the process's own store
    assert default_store().stats().fetched_count > 0


def test_the_layers_of_a_region() -> None:
    want = gradients_in_numpy(WS, X)[1]
    with ActivationStore() as store:
        got = jax.jit(jax.grad(region(loss_of(layer), min_bytes=1)))(WS, X)
    assert store.stats().stored_count == store.stats().fetched_count >= LAYERS
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def adam_in_numpy(params: np.ndarray, gradients: list[np.ndarray], rate: float) -> np.ndarray:
    m, v, params = np.zeros(params.shape), np.zeros(params.shape), params.astype(np.float64)
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        params = params - rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
    return params


@pytest.mark.parametrize("devices", [1, pytest.param(4, marks=pytest.mark.devices(4))])
def test_an_optimizers_state_in_host_memory_and_on_disk(devices: int, tmp_path: Path) -> None:
    """Adam of float32 copies of bfloat16 parameters, on one device and divided over a mesh."""
    start = np.round(RNG.normal(size=(64, 48)) * 32).astype(np.float32) / 32  # which bfloat16 holds
    mesh = jax.make_mesh((devices,), ("data",), (jax.sharding.AxisType.Auto,))
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    params = jnp.asarray(start, jnp.bfloat16)
    params = jax.device_put(params, where) if devices > 1 else params
    gradients = [np.round(RNG.normal(size=start.shape) * 8).astype(np.float32) / 8 for _ in range(3)]
    want = adam_in_numpy(start, gradients, 1e-2)
    for place in ({"streams": True}, {"path": tmp_path}):
        tx = optimizer(master_weights(optax.adam(1e-2)), min_bytes=1024, piece_bytes=1500, **place)
        now, state = params, tx.init(params)
        step = jax.jit(lambda g, s, p, tx=tx: tx.update(g, s, p))
        for g in gradients:
            g = jnp.asarray(g, jnp.bfloat16)
            updates, state = step(jax.device_put(g, where) if devices > 1 else g, state, now)
            now = optax.apply_updates(now, updates)
        if "path" in place:
            assert isinstance(state.master, DiskArray) and list(tmp_path.iterdir())
        else:
            assert state.master.sharding.memory_kind == "pinned_host"
        np.testing.assert_allclose(np.asarray(state.master), want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(now, np.asarray(state.master).astype(jnp.bfloat16))


def descent_in_numpy(steps: int, rate: float) -> tuple[list[float], np.ndarray]:
    """Losses and weights by gradient descent with momentum."""
    ws, velocity, losses = WS.astype(np.float64), np.zeros(WS.shape), []
    for _ in range(steps):
        loss, by_w, _ = gradients_in_numpy(ws, X)
        velocity = 0.9 * velocity + by_w
        ws = ws - rate * velocity
        losses.append(loss)
    return losses, ws


@pytest.mark.parametrize("place", ["host", "disk"])
def test_a_step_layer_by_layer(place: str, tmp_path: Path) -> None:
    """Parameters and moments away from the device, a checkpoint that another store goes on from."""

    def make(folder: Any) -> Any:
        return stack_step(
            lambda outer, x: x * outer, layer, lambda outer, x, batch: (x**2).mean(), optax.sgd(0.5, momentum=0.9),
            params=place, moments=place, min_bytes=100, streams=True, frozen=lambda path, _: path.startswith("outer"),
            path=folder,
        )  # fmt: skip

    folder = StateStore(tmp_path) if place == "disk" else None
    step = make(folder)
    state = step.init(jnp.ones(()), jnp.asarray(WS))
    run, losses = step.jit(state), []
    for _ in range(2):
        state, loss = run(state, X)
        losses.append(float(loss))
    assert step.bytes_by_tier(jnp.ones(()), WS)[place] == 2 * WS.nbytes
    want, weights = descent_in_numpy(3, 0.5)
    is_on_disk = lambda x: isinstance(x, DiskArray)  # noqa: E731
    if place == "disk":
        saved = jax.tree.map(np.asarray, state, is_leaf=is_on_disk)
        step.disk.close()
        with pytest.raises(RuntimeError, match="the store is closed; make another, and restore"):
            np.asarray(state.layers)
        assert not list(tmp_path.iterdir())
        step = make(tmp_path)
        like = step.init(jnp.ones(()), jnp.asarray(WS))
        with pytest.raises(ValueError, match=r"got float32\[2, 64, 64\] in place of float32\[3, 64, 64\]"):
            restore(like, saved._replace(layers=saved.layers[:2]))
        with pytest.raises(ValueError, match="`arrays` must have the structure of `like`, got"):
            restore(like, saved.layers)
        state = restore(like, saved)
        run = step.jit(state)
    else:
        assert state.layers.sharding.memory_kind == "pinned_host"
    alone = float(jax.jit(step.loss)(state, X))
    state, loss = run(state, X)
    assert alone == float(loss)
    np.testing.assert_allclose([*losses, float(loss)], want, rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state.layers), weights, rtol=1e-4, atol=1e-5)


def test_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured, chosen within a budget, explained, and run as chosen."""
    monkeypatch.setattr("dejax.offload.plan.measure._PROFILE_SECONDS", 0.0)
    ws = np.concatenate([WS, WS[:1]])
    how = {"min_bytes": 1, "choices": ("offload", "recompute")}
    with ActivationStore() as store:
        plan = plan_stack(layer, ws, X, budget_bytes=1 << 30, store=store, **how)
        way = min(plan.ways, key=lambda way: way.device_bytes)
        plan = plan.within(device_bytes=way.device_bytes)
        assert plan.chosen.device_bytes == way.device_bytes and sum(plan.chosen.choices.values()) == 4
        assert plan.chosen.describe() in plan.table()
        run = jax.jit(jax.grad(lambda ws, x: (plan.apply(ws, x) ** 2).mean(), argnums=(0, 1)))
        _, *want = gradients_in_numpy(ws, X)
        for found, exact in zip(run(ws, X), want, strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-6)
