"""Plans of a training step: the arithmetic of predictions, budgets, and a plan made and run on the CPU."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest

from dejax.offload import StepPlan, StepWay, plan_step
from dejax.offload.plan import profile
from dejax.offload.plan.copy_cost import FREE, Carried, CopyCosts, _slopes, copy_costs, duplex_bandwidth
from dejax.offload.plan.profile import Tiers, Traffic
from dejax.offload.plan.step import _choose
from dejax.offload.plan.step_cost import FREED, NO_DRIVE, Cost, Drive, KeptGradients, Leaf, predict

from .test_layerwise import batch, body, embed, head, model

COST = Cost(100.0, 2.0, 1.0, 4.0, 1.0, 10)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
LEAVES = [Leaf("moments['a']", 80, False), Leaf("params['a']", 40, True)]


def test_prediction():
    near = predict([], 120, COST, 5, 1, "device", Tiers(10.0, 10.0))
    assert (near.seconds, near.stall_seconds, near.host_bytes) == (21.0, 0.0, 0.0)
    assert near.device_bytes == 120 + 100 + 5 * 12
    moments = predict(LEAVES[:1], 120, COST, 5, 1, "device", Tiers(10.0, 10.0))
    ends = 80 / 10 / 5  # the last layer's way out; the first one's way in is during forward
    assert moments.stall_seconds == ends  # else 8 seconds of the bus alongside 15 of backward
    assert moments.device_bytes == near.device_bytes - 80 + 4 * 80 / 5 and moments.host_bytes == 80
    slow = predict(LEAVES, 120, COST, 5, 1, "device", Tiers(4.0, 5.0))
    ends = (5 + 120 / 5 + 15) / 5  # in forward, and in backward: all but the slowest
    assert slow.stall_seconds == (40 / 5 - 5) + (120 / 4 - 15) + ends  # forward brings parameters, backward moves all
    stored = predict([], 120, COST, 5, 1, "host", Tiers(10.0, 10.0))
    assert (stored.device_bytes, stored.host_bytes) == (120 + 100 + 10 + 20, 30)
    assert predict(LEAVES, 120, COST, 5, 1, "host", Tiers(10.0, 10.0, host_bytes=130)) is None


def test_prediction_where_gradients_are_kept():
    freed = predict(LEAVES[:1], 120, COST, 5, 1, "device", Tiers(10.0, 20.0))
    near = predict(LEAVES[:1], 120, COST, 5, 1, "device", Tiers(10.0, 20.0), KeptGradients(False, 0))
    assert freed.stall_seconds == 80 / 10 / 5
    assert near.stall_seconds == 80 / 10  # the update follows backward; the first layer's rows are there
    assert near.device_bytes == freed.device_bytes  # the measured stacks have the gradients
    far = predict(LEAVES[:1], 120, COST, 5, 1, "device", Tiers(10.0, 20.0), KeptGradients(False, 40))
    assert far.stall_seconds == 80 / 10 + 120 / 20 / 5 + 40 / 10 / 5 and far.host_bytes == near.host_bytes + 40
    assert far.device_bytes == near.device_bytes - 40 + 4 * 40 / 5
    frozen = [LEAVES[0], Leaf("params['a']", 400, True, is_frozen=True)]
    one_way = predict(frozen, 520, COST, 5, 1, "device", Tiers(10.0, 20.0))
    assert one_way.stall_seconds == (400 / 20 - 5) + (480 / 20 - 15) + 5 / 5 + (15 + 80 / 10) / 5


def test_prediction_where_both_directions_are_busy():
    bus = Tiers(10.0, 20.0, out_duplex=8.0, in_duplex=16.0)
    assert bus.bus_seconds(Traffic(80, 0)) == 4 and bus.bus_seconds(Traffic(0, 80)) == 8
    assert bus.bus_seconds(Traffic(160, 80)) == 10  # both all the time
    assert bus.bus_seconds(Traffic(160, 40)) == 5 + 80 / 20  # then one direction alone
    assert bus.bus_seconds(Traffic(80, 80)) == 5 + 40 / 10
    assert Tiers(10.0, 20.0, out_duplex=99.0, in_duplex=99.0).bus_seconds(Traffic(160, 80)) == 8  # never faster
    disturbed = Tiers(54.0, 25.0).with_duplex(49.0)  # a direction alone is no slower than with the other one
    assert (disturbed.out_bandwidth, disturbed.in_bandwidth) == (54.0, 49.0)
    assert disturbed.out_duplex == disturbed.in_duplex == 49.0
    alone = predict(LEAVES, 120, COST, 5, 1, "device", Tiers(5.0, 5.0))
    duplex = predict(LEAVES, 120, COST, 5, 1, "device", Tiers(5.0, 5.0, out_duplex=4.0, in_duplex=4.0))
    assert duplex.stall_seconds - alone.stall_seconds == 120 / 4 - 120 / 5  # in backward; forward only reads
    # Activations leave while parameters come in, and come back while moments go out.
    how = (120, COST, 5, 1, "host", Tiers(1.0, 1.0, out_duplex=0.5, in_duplex=0.5))
    stored = 5 * 10 - 2 * 10
    waits = (stored / 0.5 + (40 - stored) - 5) + (120 / 0.5 + stored - 15)
    assert predict(LEAVES, *how).stall_seconds == waits + (5 + 120 + 15) / 5


def test_prediction_with_copies_on_the_device():
    """Parameters in forward; in backward all arrays, there and back."""
    copies = CopyCosts(40.0, 0.5, 0.25, 0.0, 0.0)
    how = (120, COST, 5, 1, "device", Tiers(1e9, 1e9), FREED, NO_DRIVE)
    way = predict(LEAVES, *how, copies)
    forward = 2 * 40 / 40 + 5 * (1 * 0.5 + 1 * 0.25)
    backward = 2 * (120 + 120) / 40 + 5 * (4 * 0.5 + 2 * 0.25)
    assert way.copy_seconds == forward + backward
    assert way.seconds == pytest.approx(21.0 + way.copy_seconds, abs=1e-6) and way.launch_seconds == 0.0
    assert predict([], *how, copies).copy_seconds == 0.0
    frozen = [LEAVES[0], Leaf("params['a']", 40, True, is_frozen=True)]
    one_way = predict(frozen, *how, copies)
    assert one_way.copy_seconds == way.copy_seconds - 2 * 40 / 40 - 5 * 0.5
    # The device copies while the bus is busy.
    copies, forward, backward = CopyCosts(400.0, 0.05, 0.025, 0.0, 0.0), 0.2 + 5 * 0.075, 1.2 + 5 * 0.25
    slow = (120, COST, 5, 1, "device", Tiers(4.0, 5.0), FREED, NO_DRIVE)
    ends = (5 + forward + 120 / 5 + 15 + backward) / 5
    waits = (40 / 5 - 5 - forward) + (120 / 4 - 15 - backward)
    assert predict(LEAVES, *slow, copies).stall_seconds == pytest.approx(waits + ends)
    assert predict(LEAVES, *slow, copies).device_bytes == predict(LEAVES, *slow).device_bytes
    stored = predict([], 120, COST, 5, 1, "host", Tiers(1e9, 1e9), FREED, NO_DRIVE, copies)
    assert stored.copy_seconds == pytest.approx(2 * (2 * 50 / 400 + 5 * (0.05 + 0.025)))


def test_prediction_with_copies_where_gradients_are_kept():
    copies = CopyCosts(40.0, 0.5, 0.25, 0.0, 0.0)
    kept = KeptGradients(False, 40, 1)
    way = predict(LEAVES, 120, COST, 5, 1, "device", Tiers(1e9, 1e9), kept, NO_DRIVE, copies)
    forward = 2 * 40 / 40 + 5 * (0.5 + 0.25)
    backward = 2 * (40 + 40) / 40 + 5 * (2 * 0.5 + 2 * 0.25)
    update = 2 * (160 + 120) / 40 + 5 * (5 * 0.5 + 2 * 0.25)
    assert way.copy_seconds == forward + backward + update
    assert way.seconds == pytest.approx(21.0 + way.copy_seconds, abs=1e-6)


def test_prediction_where_launching_takes_longest():
    cost = Cost(100.0, 2.0, 1.0, 4.0, 1.0, 10, base_launch=2.0, layer_launch=1.0)
    how = (120, cost, 5, 1, "device", Tiers(1e9, 1e9), FREED, NO_DRIVE)
    assert predict(LEAVES, *how).launch_seconds == 2 + 5 * 1
    assert predict(LEAVES, *how).seconds == pytest.approx(21.0, abs=1e-6)
    way = predict(LEAVES, *how, CopyCosts(launch_array_seconds=1.0, launch_call_seconds=0.5))
    assert way.seconds == way.launch_seconds == 7 + 5 * (5 * 1.0 + 3 * 0.5)  # 1 array in forward, 4 in backward


def test_costs_are_slopes():
    array, call = 3e-6, 11e-6
    took = [1e-3 + length * 2 * (call + count * array) for count, length in ((1, 8), (33, 8), (1, 24))]
    assert _slopes(took, 33, (8, 24)) == pytest.approx((array, call))
    assert _slopes([1.0, 0.9, 0.8], 33, (8, 24)) == (0.0, 0.0)  # noise
    assert FREE.on_device(Carried(100, 3, 1), 5) == FREE.launching(Carried(100, 3, 1), 5) == 0.0


def test_recorded_plans_are_predicted_better_with_both_directions():
    """Stored results of an H100: memory, and time by the rates of each direction alone and of both at once."""
    recorded = json.loads((BENCHMARKS / "results" / "offload_plans_h100.json").read_text())
    arrays = {"feed-forward": (24, 24 * 4096 * 8192 * 4, 16384 * 4096 * 2),
              "experts": (16, 16 * 8 * 2048 * 2048 * 4, 16384 * 2048 * 2)}  # fmt: skip
    seen = 0
    for name, (layers, nbytes, input_bytes) in arrays.items():
        whole = recorded[name]["1.0"]["measured_ms"] / layers
        rates = {key: value / 1e3 for key, value in recorded[name]["measured_tiers"].items() if key != "host_bytes"}
        both = Tiers(**rates)  # bytes a millisecond
        one = Tiers(rates["out_bandwidth"], rates["in_bandwidth"])
        for row in recorded[name].values():
            if not isinstance(row, dict) or not row.get("moved"):
                continue
            leaves = [Leaf(path, nbytes, path.startswith("params")) for path in row["moved"]]
            cost = Cost(0, 0, 0, whole, whole / 4, input_bytes)
            how = (leaves, 0, cost, layers, 1, row["inputs"])
            off = [predict(*how, tiers).seconds / row["measured_ms"] - 1 for tiers in (one, both)]
            assert off[0] < 0 and abs(off[1]) < abs(off[0]), (name, off)
            assert abs(row["time_off"]) < 0.1 and abs(row["memory_off"]) < 0.05, (name, row)
            seen += 1
    assert seen == 3


def test_prediction_with_state_on_a_drive():
    how = (120, COST, 5, 1, "device", Tiers(10.0, 10.0), FREED)
    host = predict(LEAVES[:1], *how)
    disk = predict([], *how, Drive((LEAVES[0],), 16.0, 8.0))
    assert disk.device_bytes == host.device_bytes  # staging memory is the same
    assert (disk.host_bytes, disk.disk_bytes) == (6 * 80 / 5, 2 * 80)
    ends = host.stall_seconds
    assert disk.stall_seconds == ends  # 10 seconds of reading and 5 of writing alongside 15 of backward
    assert predict([], *how, Drive((LEAVES[0],), 8.0, 8.0)).stall_seconds == 5.0 + ends
    params = predict([], *how, Drive(tuple(LEAVES), 1e9, 4.0))
    ends = (4 + 12 + 12) / 5
    assert params.stall_seconds == pytest.approx((40 / 4 - 5) + (120 / 4 - 15) + ends)  # forward reads parameters, too
    ways = [host, disk, params]
    assert _choose(ways, device_bytes=1e9, host_bytes=200, disk_bytes=1e9) is host  # as fast, and moves less
    assert _choose(ways, device_bytes=260, host_bytes=200, disk_bytes=1e9) is params
    with pytest.raises(ValueError, match=r"host_bytes=70 and disk_bytes=100; host_bytes=80 would do; the least on"):
        _choose(ways, device_bytes=1e9, host_bytes=70, disk_bytes=100)


def test_times_are_right_where_other_work_runs_for_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(profile, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(seconds):
        now[0] += seconds * (5 if 10 <= now[0] % 100 < 50 else 1)

    assert profile.fastest([lambda: run(1.0), lambda: run(4.0)], seconds=60) == [1.0, 4.0]


@pytest.mark.slow
def test_both_directions_are_measured_by_the_copies_of_a_step():
    assert duplex_bandwidth(1 << 20) > 1e6
    costs = copy_costs(3, (2, 4), 256)
    assert costs.bandwidth > 0 and min(dataclasses.astuple(costs)) >= 0.0


@pytest.mark.slow
def test_a_plan_with_a_drive(monkeypatch, tmp_path):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    monkeypatch.setattr(profile.state_bandwidths, "__defaults__", (1 << 20,))
    outer, layers = model()
    layers = jax.tree.map(lambda x: np.concatenate([x] * 6), layers)  # 30 of them: few are on their way at a time
    how = {"min_bytes": 100, "streams": True, "path": tmp_path, "device_bytes": 1 << 40}
    plan = plan_step(embed, body, head, optax.adamw(1e-2), outer, layers, batch(0), host_bytes=1 << 30, **how)
    assert isinstance(plan, StepPlan) and isinstance(plan.chosen, StepWay)
    assert plan.chosen.on_disk == frozenset() and 0 < plan.disk_bytes < float("inf")
    moment = layers["w"].nbytes
    away = [way.device_bytes for way in plan.ways if way.activations == "device" and len(way.far | way.on_disk) == 2]
    small = plan.within(device_bytes=max(away), host_bytes=1.9 * moment)
    assert len(small.chosen.on_disk) >= 1 and small.chosen.host_bytes <= 1.9 * moment
    step = small.apply()
    state = step.init(outer, layers)
    assert step.bytes_by_tier(outer, layers)["disk"] * 2 == small.chosen.disk_bytes
    state, loss = step.jit(state)(state, batch(0))
    assert np.isfinite(loss) and f"{len(small.chosen.on_disk)} arrays" in small.table()
    with pytest.raises(ValueError, match=r"disk_bytes=0; .*host_bytes=\d+ would do; disk_bytes=\d+ would do"):
        plan.within(device_bytes=max(away), host_bytes=1.9 * moment, disk_bytes=0)


@pytest.mark.slow
def test_a_plan(monkeypatch):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    outer, layers = model()
    how = {"min_bytes": 100, "streams": True, "host_bytes": 1 << 30}
    tx = optax.adamw(1e-2)

    def plan(**budget):
        return plan_step(embed, body, head, tx, outer, layers, batch(0), **how, **budget)

    roomy = plan(device_bytes=1 << 40)
    assert roomy.chosen.far == frozenset() and roomy.chosen.activations == "device"
    all_of_it = roomy.chosen.device_bytes
    tight = plan(device_bytes=all_of_it - layers["w"].nbytes // 4)
    assert tight.chosen.far or tight.chosen.activations == "host"
    assert tight.chosen.device_bytes <= tight.device_bytes
    again = roomy.within(device_bytes=tight.device_bytes)
    assert again.chosen.device_bytes <= tight.device_bytes and again.chosen in roomy.ways
    with pytest.raises(ValueError, match="nothing fits device_bytes=10 "):
        roomy.within(device_bytes=10)
    step = tight.apply()
    state = step.init(*model())
    state, loss = step.jit(state)(state, batch(0))
    assert np.isfinite(loss)
    peak, seconds = tight.measure(state, batch(1))
    assert abs(peak / tight.chosen.device_bytes - 1) < 0.35 and seconds > 0
    assert "measured" in tight.table() and "off by" in tight.table()
    assert "waiting, copying, ms | launching, ms |" in tight.table()
    assert (tight.copies == FREE) == (jax.default_backend() == "cpu")  # there "streams" copy nothing
    assert tight.chosen.launch_seconds > 0
    with pytest.raises(ValueError, match=r"nothing fits device_bytes=1000 .* the least on the device takes \d+"):
        plan(device_bytes=1000)


@pytest.mark.slow
def test_a_plan_with_a_limit_and_frozen_parameters(monkeypatch):
    monkeypatch.setattr(profile, "_PROFILE_SECONDS", 0.0)
    outer, layers = model()
    how = {"min_bytes": 100, "streams": True, "host_bytes": 1 << 30, "device_bytes": 1 << 40}
    how |= {"clip_norm": 1.0, "frozen": lambda path, _: path == "layers['b']"}
    found = {
        kept: plan_step(embed, body, head, optax.adam(1e-2), outer, layers, batch(0), gradients=kept, **how)
        for kept in ("device", "host")
    }
    # Without moments of what is frozen; gradients lie on the host.
    assert not any("['b']" in way_path for way in found["host"].ways for way_path in way.far if "moments" in way_path)
    assert found["host"].chosen.host_bytes - found["device"].chosen.host_bytes == layers["w"].nbytes
    step = found["host"].apply()
    state = step.init(*model())
    state, loss = step.jit(state)(state, batch(0))
    assert np.isfinite(loss) and state.norm > 0


def test_short_stacks_are_refused():
    outer, layers = model()
    few = jax.tree.map(lambda x: x[:2], layers)
    with pytest.raises(ValueError, match="plan_step: `params` must have at least 4 layers"):
        plan_step(embed, body, head, optax.adam(1e-2), outer, few, batch(0))
