"""The planner's arithmetic, and a plan made, run and drawn on the CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.offload import CHOICES, ActivationStore, Plan, Prediction, StackPlan, plan_stack
from dejax.offload.plan import profile
from dejax.offload.plan.layers import Part, _compositions, _refined, _way, _ways_of
from dejax.offload.plan.profile import Tiers, place
from dejax.offload.plan.ways import Cost

COSTS = {
    "offload": Cost(10, 1, 0.0, 3.0, stored_bytes=100, ring_bytes=50),
    "offload inputs": Cost(10, 2, 0.0, 4.0, stored_bytes=10, ring_bytes=60),
    "recompute": Cost(10, 12, 0.0, 4.0, stored_bytes=0, ring_bytes=0),
    "keep": Cost(20, 101, 0.0, 3.0, stored_bytes=0, ring_bytes=0),
}


def _predict(layers, costs, forward, tiers):
    return _way([Part(None, sum(layers), costs, forward)], [layers], tiers)


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


def test_prediction_with_a_drive():
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


def test_unequal_parts():
    """Wide layers get the memory, if it saves more time there; the plan of both parts is the best of all ways."""
    wide = {name: Cost(c.base_bytes, 3 * c.layer_bytes, 0.0, c.layer_seconds, 3 * c.stored_bytes, c.ring_bytes)
            for name, c in COSTS.items() if name in ("recompute", "keep")}  # fmt: skip
    narrow = {name: COSTS[name] for name in ("recompute", "keep")}
    parts = [Part(None, 2, narrow, 1.0), Part(None, 40, wide, 1.0)]
    ways = _ways_of(parts, Tiers(100.0, 100.0))
    assert len(ways) == 3 * 41 and all(sum(way.layers) == 42 for way in ways)
    budget = 20 + 2 * 101 + 30 * 36 + 10 * 303
    best = min((way for way in ways if way.peak_bytes <= budget), key=lambda way: way.seconds)
    assert best.layers == (0, 0, 0, 2, 0, 0, 30, 10) and best.seconds == 2 * 3 + 30 * 4 + 10 * 3
    far = min((way for way in ways if way.peak_bytes <= budget), key=lambda way: -way.seconds)
    assert _refined(far, parts, budget, Tiers(100.0, 100.0)) == best
    many = [Part(None, 40, COSTS, 1.0)] * 3
    assert 100 < len(_ways_of(many, Tiers(100.0, 100.0))) <= 4000


@pytest.mark.slow
def test_a_plan_of_dense_layers_and_experts(monkeypatch):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    keys = jax.random.split(jax.random.key(0), 4)
    dense = jax.random.normal(keys[0], (2, 32, 32)) / 6
    experts = {"route": jax.random.normal(keys[1], (5, 32, 3)), "w": jax.random.normal(keys[2], (5, 3, 32, 32)) / 6}
    x = jax.random.normal(keys[3], (128, 32))

    def moe(p, x):
        return x + jnp.einsum(
            "te,ted->td", jax.nn.softmax(x @ p["route"]), jnp.tanh(jnp.einsum("td,edf->tef", x, p["w"]))
        )

    bodies, params = [lambda w, x: x + jnp.tanh(x @ w), moe], [dense, experts]
    with ActivationStore() as store:
        how = {"store": store, "min_bytes": 1, "choices": ("offload", "recompute", "keep")}
        plan = plan_stack(bodies, params, x, budget_bytes=1 << 40, **how)
        assert plan.num_layers == 7 and [part.num_layers for part in plan.parts] == [2, 5]
        assert sum(plan.chosen.layers) == 7 and "; " in plan.table()
        plan.chosen = next(way for way in plan.ways if way.layers == (1, 0, 0, 1, 2, 0, 2, 1))

        def grad(stack):
            return jax.jit(jax.grad(lambda ws: (stack(ws, x) ** 2).mean()))(params)

        def plain(ws, x):
            for body, some in zip(bodies, ws, strict=True):
                x = profile.scan_layers(body, some, x)
            return x

        for a, b in zip(*(jax.tree.leaves(grad(f)) for f in (plan.apply, plain)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
        peak, _ = plan.measure(params, x)
        assert peak > 0 and "off by" in plan.table()
        with pytest.raises(ValueError, match="`params` must have the parameters of each part, got 1 for 2 bodies"):
            plan_stack(bodies, [dense], x, budget_bytes=1, **how)
        with pytest.raises(ValueError, match="nothing fits budget_bytes=1; the least is about"):
            plan_stack(bodies, params, x, budget_bytes=1, **how)


def test_a_plan(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    ws = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64))

    def body(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    with ActivationStore() as store:
        with pytest.raises(ValueError, match="nothing fits budget_bytes=1000; the least is about"):
            plan_stack(body, ws, x, budget_bytes=1000, store=store, choices=("keep",))
        plan = plan_stack(body, ws, x, budget_bytes=1 << 40, store=store, min_bytes=1, choices=("offload", "keep"))
        assert isinstance(plan, StackPlan) and isinstance(plan, Plan) and isinstance(plan.chosen, Prediction)
        least = min(plan.ways, key=lambda way: way.peak_bytes)
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
