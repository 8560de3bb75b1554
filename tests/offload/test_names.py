"""`plan_names`: predictions, and a plan made, run and drawn on the CPU."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

from dejax.offload import ActivationStore, NamesPlan, NamesWay, plan_names
from dejax.offload.plan import names, profile


@pytest.mark.slow
def test_a_plan_by_names_where_other_work_disturbed_the_shorter_stack(monkeypatch):
    times = itertools.cycle((3.0, 1.0))
    monkeypatch.setattr(profile, "profile", lambda step, params, x: (1e6, next(times)))
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    ws, x = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8, jnp.ones((512, 64))
    body = lambda w, x: x + jnp.tanh(checkpoint_name(x @ w, "product")) @ w.T  # noqa: E731
    with ActivationStore() as store:
        plan = plan_names(body, ws, x, budget_bytes=1 << 40, store=store, names=["product"], min_bytes=1)
    assert isinstance(plan, NamesPlan) and all(isinstance(way, NamesWay) for way in plan.ways)
    assert all(way.seconds >= 0 for way in plan.ways)
    assert plan.chosen.seconds <= 1.005 * min(way.seconds for way in plan.ways)


@pytest.mark.slow
def test_a_plan_by_names_with_a_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    monkeypatch.setattr(profile.drive_bandwidths, "__defaults__", (1 << 22,))
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
        on_disk = 6 * 3 * tensor - everything.placement.ring_bytes - 3.5 * tensor  # 7/8 of host memory
        assert everything.placement.disk_bytes == on_disk > 0
        least = min(plan.ways, key=lambda way: way.peak_bytes)
        plan.budget_bytes = 1000
        with pytest.raises(ValueError, match="nothing fits budget_bytes=1000; the least is about"):
            names._choose(plan, ws, x)
        plan.chosen = everything
        np.testing.assert_allclose(
            grad(plan.apply), grad(lambda ws, x: profile.scan_layers(body, ws, x)), rtol=1e-5, atol=1e-6
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
