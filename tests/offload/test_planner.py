"""The planner's arithmetic, and a plan made, run and drawn on the CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from dejax import _native
from dejax.offload import CHOICES, ActivationStore, _names, _profile, offload, plan_names, plan_stack
from dejax.offload._planner import Cost, _compositions, _predict
from dejax.offload._profile import Tiers, place
from dejax.offload._stack import scan_pieces

COSTS = {
    "offload": Cost(10, 1, 0.0, 3.0, stored_bytes=100, ring_bytes=50),
    "offload inputs": Cost(10, 2, 0.0, 4.0, stored_bytes=10, ring_bytes=60),
    "recompute": Cost(10, 12, 0.0, 4.0, stored_bytes=0, ring_bytes=0),
    "keep": Cost(20, 101, 0.0, 3.0, stored_bytes=0, ring_bytes=0),
}


def test_prediction():
    bus = Tiers(100.0, 100.0)
    keep = _predict((0, 0, 0, 4), COSTS, 1.0, bus)
    assert (keep.peak_bytes, keep.seconds, keep.stall_seconds) == (20 + 4 * 101, 12.0, 0.0)
    fast = _predict((4, 0, 0, 0), COSTS, 1.0, bus)
    assert (fast.peak_bytes, fast.seconds) == (10 + 4 + 50, 12.0)  # 350 to move in 4 s forward, in 8 s backward
    slow = _predict((4, 0, 0, 0), COSTS, 1.0, Tiers(50.0, 25.0))
    assert slow.stall_seconds == (350 / 50 - 4) + (350 / 25 - 8)
    mixed = _predict((1, 1, 1, 1), COSTS, 1.0, bus)
    assert mixed.peak_bytes == 20 + 1 + 2 + 12 + 101 + 60


def test_the_drive_counts():
    # 350 bytes travel, host memory takes 7/8 of 160, so 210 go on to disk: 3.5 s to write, 7 s to read.
    where = place(400, 50, 4.0, 8.0, Tiers(1e9, 1e9, 160, 1000, 60, 30))
    assert (where.ring_bytes, where.host_bytes, where.disk_bytes, where.stall_seconds) == (50, 140, 210, 0.0)
    assert place(400, 50, 3.0, 6.0, Tiers(1e9, 1e9, 160, 1000, 60, 30)).stall_seconds == 0.875 + 1.75
    assert place(400, 50, 4.0, 8.0, Tiers(1e9, 1e9, 160, 200, 1, 1)) is None  # larger than the drive's share
    assert place(400, 50, 4.0, 8.0, Tiers(1e9, 1e9, 160)) is None  # no drive
    assert _predict((4, 0, 0, 0), COSTS, 1.0, Tiers(1e9, 1e9, 160)) is None
    slow = _predict((4, 0, 0, 0), COSTS, 1.0, Tiers(1e9, 1e9, 160, 1000, 1.0, 1.0))
    assert slow.seconds > _predict((0, 0, 4, 0), COSTS, 1.0, Tiers(1e9, 1e9)).seconds  # so it computes again


def test_compositions():
    ways = _compositions(3, [True, False, True, True])
    assert all(sum(way) == 3 and way[1] == 0 for way in ways)
    assert len(set(ways)) == len(ways) == 10
    assert all(sum(way) == 100 for way in _compositions(100, [True] * 4))


@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
def test_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(_profile, "_PROFILE_SECONDS", 0.0)
    ws = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64))

    def body(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    with ActivationStore() as store:
        with pytest.raises(ValueError, match="nothing fits budget_bytes=1000; the least is"):
            plan_stack(body, ws, x, budget_bytes=1000, store=store, choices=("keep",))
        plan = plan_stack(body, ws, x, budget_bytes=1 << 40, store=store, min_bytes=1, choices=("offload", "keep"))
        least = min(plan._ways, key=lambda way: way.peak_bytes)
        assert plan.costs["keep"].layer_bytes > plan.costs["offload"].layer_bytes
        plan.chosen = least

        def grad(stack):
            return jax.jit(jax.grad(lambda ws: (stack(ws, x) ** 2).mean()))(ws)

        want = grad(lambda ws, x: jax.lax.scan(lambda x, w: (body(w, x), None), x, ws)[0])
        np.testing.assert_allclose(grad(plan.apply), want, rtol=1e-5, atol=1e-7)
        peak, seconds = plan.measure(ws, x)
        assert abs(peak / least.peak_bytes - 1) < 0.25 and seconds > 0
    assert "measured" in plan.table() and "off by" in plan.table()
    curve = plan.curve()
    assert all(a.peak_bytes <= b.peak_bytes and a.seconds > b.seconds for a, b in itertools.pairwise(curve))
    plan.plot(tmp_path / "curve.svg")
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    assert sum(plan.chosen.layers) == 6 and len(plan.chosen.layers) == len(CHOICES)


@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
def test_layers_run_in_several_ways_share_parameters_and_gradients():
    keys = jax.random.split(jax.random.key(0))
    params = {"w": jax.random.normal(keys[0], (8, 128, 128)) / 12, "shift": jnp.arange(8)}
    x = {"a": jax.random.normal(keys[1], (8, 128)), "b": jnp.ones((8, 128))}

    def body(p, x):
        return {"a": x["a"] + jnp.tanh(x["b"] @ p["w"]) @ p["w"].T, "b": x["a"] * jnp.cos(p["shift"])}

    def compiled(stack):
        def loss(params, x):
            return sum((leaf**2).mean() for leaf in jax.tree.leaves(stack(params, x)))

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), allow_int=True)).lower(params, x).compile()

    offloads = {"inputs": 1, "min_bytes": 1}
    pieces = [
        (offload(body, **offloads), 2),
        (offload(jax.checkpoint(body), **offloads), 1),
        (jax.checkpoint(body), 2),
        (body, 3),
    ]
    plain = compiled(lambda params, x: _profile.scan_layers(body, params, x))
    with ActivationStore() as store:
        mixed = compiled(lambda params, x: scan_pieces(pieces, params, x))
        got = mixed(params, x)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(plain(params, x)), strict=True):
            if a.dtype != jax.dtypes.float0:
                np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        stats = store.stats()
    assert stats.stored_count == stats.fetched_count > 0
    # Neither the parameters nor their gradients are there twice.
    temps = [step.memory_analysis().temp_size_in_bytes for step in (mixed, plain)]
    assert temps[0] < temps[1] + params["w"].nbytes // 4


def test_a_plan_by_names_where_other_work_disturbed_the_shorter_stack(monkeypatch):
    times = itertools.cycle((3.0, 1.0))
    monkeypatch.setattr(_profile, "profile", lambda step, params, x: (1e6, next(times)))
    monkeypatch.setattr(_profile, "_PROFILE_SECONDS", 0.0)
    ws, x = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8, jnp.ones((512, 64))
    body = lambda w, x: x + jnp.tanh(checkpoint_name(x @ w, "product")) @ w.T  # noqa: E731
    with ActivationStore() as store:
        plan = plan_names(body, ws, x, budget_bytes=1 << 40, store=store, names=["product"], min_bytes=1)
    assert all(way.seconds >= 0 for way in plan.ways)
    assert plan.chosen.seconds <= 1.005 * min(way.seconds for way in plan.ways)


@pytest.mark.full
@pytest.mark.skipif(_native.unavailable_reason() is not None, reason="no native extension")
def test_a_plan_by_names_with_a_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(_profile, "_PROFILE_SECONDS", 0.0)
    monkeypatch.setattr(_profile.drive_bandwidths, "__defaults__", (1 << 22,))
    ws = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64))
    tensor = x.nbytes

    def body(w, x):
        return x + checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "act") @ w.T

    def grad(stack):
        return jax.jit(jax.grad(lambda ws: (stack(ws, x) ** 2).mean()))(ws)

    how = {"names": ["product", "act"], "min_bytes": 1}
    with ActivationStore(tmp_path, host_bytes=4 * tensor) as store:
        plan = plan_names(body, ws, x, budget_bytes=1 << 40, store=store, **how)
        assert 0 < plan.tiers.write_bandwidth < float("inf") and 0 < plan.tiers.read_bandwidth < float("inf")
        assert plan.bytes_of == {"(input)": tensor, "product": tensor, "act": tensor}
        everything = max(plan.ways, key=lambda way: len(way.offloaded))
        assert everything.placement.disk_bytes == 6 * 3 * tensor - 3.5 * tensor  # 7/8 of host memory
        least = min(plan.ways, key=lambda way: way.peak_bytes)
        plan.budget_bytes = 1000
        with pytest.raises(ValueError, match="nothing fits budget_bytes=1000; the least is about"):
            _names._choose(plan, ws, x)
        plan.chosen = everything
        np.testing.assert_allclose(
            grad(plan.apply), grad(lambda ws, x: _profile.scan_layers(body, ws, x)), rtol=1e-5, atol=1e-6
        )
        assert store.stats().stored_bytes == 6 * 3 * tensor
        plan.chosen = least
        peak, _ = plan.measure(ws, x)
        assert abs(peak / least.peak_bytes - 1) < 0.25
        assert "| product | 0 |" in plan.table() and "off by" in plan.table()
        plan.plot(tmp_path / "curve.svg")
        assert "all" in (tmp_path / "curve.svg").read_text()
        with pytest.raises(ValueError, match="is named 'nothing'"):
            plan_names(body, ws, x, names=["nothing"], budget_bytes=1 << 40, store=store)
