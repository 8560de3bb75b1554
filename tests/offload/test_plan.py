"""Plans: the arithmetic of predictions, which way is chosen, and plans made, run and drawn on the CPU."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.ad_checkpoint import checkpoint_name

from dejax.offload import CHOICES, ActivationStore, Plan, Way, plan_names, plan_stack, plan_step
from dejax.offload.plan import measure
from dejax.offload.plan.activations import StackPart, compositions, refined, ways_of
from dejax.offload.plan.activations import predict as predict_layers
from dejax.offload.plan.measure import LayerCost, Tiers, duplex_bandwidth
from dejax.offload.plan.result import Phase, place
from dejax.offload.plan.step import StateArray, StepFacts, predict

from .test_layerwise import batch, body, embed, head, model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
COSTS = {
    "offload": LayerCost(10, 1, 0.0, 3.0, 1.0, stored_bytes=100, ring_bytes=50),
    "offload inputs": LayerCost(10, 2, 0.0, 4.0, 1.0, stored_bytes=10, ring_bytes=60),
    "recompute": LayerCost(10, 12, 0.0, 4.0, 1.0),
    "keep": LayerCost(20, 101, 0.0, 3.0, 1.0),
}
STEP = LayerCost(100.0, 2.0, 1.0, 4.0, 1.0, stored_bytes=10)
MOMENT, PARAM = StateArray("moments['a']", 80, False), StateArray("params['a']", 40, True)
FROZEN = StateArray("params['a']", 40, True, is_frozen=True)
FAST = Tiers(1e9, 1e9)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(measure, "_PROFILE_SECONDS", 0.0)


def layers(counts, tiers):
    return predict_layers([(COSTS[choice], n) for choice, n in counts.items()], tiers, counts)


def step(host=(), disk=(), inputs="device", cost=STEP, tiers=FAST, **facts):
    return predict(host, disk, inputs, cost, StepFacts(5, 120, tiers, **facts), {})


def test_prediction_of_a_stack():
    bus = Tiers(100.0, 100.0)
    keep = layers({"keep": 4}, bus)
    assert (keep.device_bytes, keep.seconds, keep.stall_seconds) == (20 + 4 * 101, 12.0, 0.0)
    fast = layers({"offload": 4}, bus)
    assert (fast.device_bytes, fast.seconds) == (10 + 4 + 50, 12.0)  # 350 to move in 4 s forward, in 8 s backward
    slow = layers({"offload": 4}, Tiers(50.0, 25.0))
    assert slow.stall_seconds == (350 / 50 - 4) + (350 / 25 - 8)
    assert layers(dict.fromkeys(CHOICES, 1), bus).device_bytes == 20 + 1 + 2 + 12 + 101 + 60


def test_prediction_with_a_drive():
    # 350 bytes travel, host memory takes 7/8 of 160, so 210 go on to disk: 3.5 s to write, 7 s to read.
    def placed(scale, *tiers):
        return place(400, 50, Phase(4.0 * scale), Phase(8.0 * scale), Tiers(1e9, 1e9, *tiers))

    assert placed(1, 160, 1000, 60, 30) == (140, 210, 0.0)
    assert placed(0.75, 160, 1000, 60, 30).stall_seconds == 0.875 + 1.75
    assert placed(1, 160, 200, 1, 1) is None  # larger than the drive's share
    assert placed(1, 160) is None  # no drive
    assert layers({"offload": 4}, Tiers(1e9, 1e9, 160)) is None
    slow = layers({"offload": 4}, Tiers(1e9, 1e9, 160, 1000, 1.0, 1.0))
    assert slow.seconds > layers({"recompute": 4}, FAST).seconds  # so it computes again


def test_compositions():
    ways = compositions(3, [True, False, True, True])
    assert all(sum(way) == 3 and way[1] == 0 for way in ways)
    assert len(set(ways)) == len(ways) == 10
    assert all(sum(way) == 100 for way in compositions(100, [True] * 4))


def test_unequal_parts():
    """Wide layers get the memory, if it saves more time there; the plan of both parts is the best of all ways."""
    narrow = {name: COSTS[name] for name in ("recompute", "keep")}
    wide = {name: LayerCost(c.base_bytes, 3 * c.layer_bytes, 0.0, c.layer_seconds, 1.0) for name, c in narrow.items()}
    parts, bus = [StackPart(None, 2, narrow), StackPart(None, 40, wide)], Tiers(100.0, 100.0)
    ways = ways_of(parts, bus)
    assert len(ways) == 3 * 41
    budget = 20 + 2 * 101 + 30 * 36 + 10 * 303
    fitting = [way for way in ways if way.device_bytes <= budget]
    best, worst = (find(fitting, key=lambda way: way.seconds) for find in (min, max))
    assert best.choices == {"recompute": (0, 30), "keep": (2, 10)} and best.seconds == 2 * 3 + 30 * 4 + 10 * 3
    assert refined(worst, parts, budget, bus) == best
    assert 100 < len(ways_of([StackPart(None, 40, COSTS)] * 3, bus)) <= 4000


def test_prediction_of_a_step():
    bus = Tiers(10.0, 10.0)
    near = step(tiers=bus)
    assert (near.seconds, near.stall_seconds, near.host_bytes) == (21.0, 0.0, 0.0)
    assert near.device_bytes == 120 + 100 + 5 * 12
    moments = step([MOMENT], tiers=bus)
    assert moments.stall_seconds == 2 * 80 / 10 / 5  # the ends; else 8 seconds of the bus alongside 15 of backward
    assert moments.device_bytes == near.device_bytes - 80 + 4 * 80 / 5 and moments.host_bytes == 80
    slow = step([MOMENT, PARAM], tiers=Tiers(4.0, 5.0))
    ends = (5 + 120 / 5 + 15) / 5  # in forward, and in backward: all but the slowest
    assert slow.stall_seconds == (40 / 5 - 5) + (120 / 4 - 15) + ends  # forward brings parameters, backward moves all
    stored = step(inputs="host", tiers=bus)
    assert (stored.device_bytes, stored.host_bytes) == (120 + 100 + 10 + 20, 30)
    assert step([MOMENT, PARAM], inputs="host", tiers=Tiers(10.0, 10.0, host_bytes=130)) is None


def test_prediction_where_gradients_are_kept():
    bus = Tiers(10.0, 20.0)
    freed, near, far = (
        step([MOMENT], tiers=bus, freed=kept is None, host_gradients=kept or 0) for kept in (None, 0, 40)
    )
    assert freed.stall_seconds == (80 / 10 + 80 / 20) / 5
    assert near.stall_seconds == 80 / 10 + 80 / 20 / 5  # the update follows backward
    assert near.device_bytes == freed.device_bytes  # the measured stacks have the gradients
    assert far.stall_seconds == 80 / 10 + 120 / 20 / 5 + 40 / 10 / 5 and far.host_bytes == near.host_bytes + 40
    assert far.device_bytes == near.device_bytes - 40 + 4 * 40 / 5


def test_prediction_where_both_directions_are_busy():
    bus = Tiers(10.0, 20.0, duplex_bandwidth=8.0)
    assert bus.bus_seconds(80, 0) == 4 and bus.bus_seconds(0, 80) == 8
    assert bus.bus_seconds(80, 80) == 10  # both all the time
    assert bus.bus_seconds(160, 40) == 5 + 120 / 20  # then one direction alone
    assert Tiers(10.0, 20.0, duplex_bandwidth=99.0).bus_seconds(160, 80) == 8  # never faster
    assert FAST.with_duplex(float("inf")).bus_seconds(1, 1) == 0
    disturbed = Tiers(54.0, 25.0).with_duplex(49.0)  # a direction alone is no slower than with the other one
    assert (disturbed.out_bandwidth, disturbed.in_bandwidth, disturbed.duplex_bandwidth) == (54.0, 49.0, 49.0)
    alone, duplex = (step([MOMENT, PARAM], tiers=Tiers(5.0, 5.0, duplex_bandwidth=rate)) for rate in (5.0, 4.0))
    assert duplex.stall_seconds - alone.stall_seconds == 120 / 4 - 120 / 5  # in backward; forward only reads


def test_prediction_with_copies_on_the_device():
    """Parameters in forward; in backward all arrays, there and back."""
    all_arrays = step([MOMENT, PARAM], copy_bandwidth=40.0)
    assert all_arrays.seconds == pytest.approx(21.0 + 2 * (40 + 120 + 120) / 40, abs=1e-6)
    assert step([MOMENT, FROZEN], copy_bandwidth=40.0).seconds == pytest.approx(all_arrays.seconds - 2 * 40 / 40)
    kept = step([MOMENT, PARAM], copy_bandwidth=40.0, freed=False, host_gradients=40)
    assert kept.seconds == pytest.approx(21.0 + 2 * (40 + (40 + 40) + (160 + 120)) / 40, abs=1e-6)
    assert step(inputs="host", copy_bandwidth=400.0).seconds == pytest.approx(21.0 + 2 * 2 * 50 / 400)


def test_prediction_with_state_on_a_drive():
    bus = Tiers(10.0, 10.0)
    host = step([MOMENT], tiers=bus)
    disk = step([], [MOMENT], tiers=bus, write_bandwidth=16.0, read_bandwidth=8.0)
    assert disk.device_bytes == host.device_bytes  # staging memory is the same
    assert (disk.host_bytes, disk.disk_bytes) == (6 * 80 / 5, 2 * 80)
    assert disk.stall_seconds == host.stall_seconds  # 10 seconds of reading and 5 of writing alongside 15 of backward
    slow = step([], [MOMENT], tiers=bus, write_bandwidth=8.0, read_bandwidth=8.0)
    assert slow.stall_seconds == 5.0 + host.stall_seconds
    params = step([], [MOMENT, PARAM], tiers=bus, read_bandwidth=4.0)
    assert params.stall_seconds == pytest.approx(
        (40 / 4 - 5) + (120 / 4 - 15) + (4 + 12 + 12) / 5
    )  # forward reads, too
    ways = [host, disk, params]

    def chosen(device_bytes, host_bytes, disk_bytes):
        budgets = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        return Plan(ways, budgets, bus, {}, {}, "plan_step", None, None).chosen

    assert chosen(1e9, 200, 1e9) is host  # as fast, and moves less
    assert chosen(260, 200, 1e9) is params
    with pytest.raises(ValueError, match=r"host_bytes=70 and disk_bytes=100; host_bytes=80 would do; the least on"):
        chosen(1e9, 70, 100)


def test_the_rate_of_both_directions_predicts_recorded_steps_better():
    """Stored results of an H100: memory, and time by the rates of each direction alone and of both at once."""
    recorded = json.loads((BENCHMARKS / "results" / "offload_plans_h100.json").read_text())
    arrays = {"feed-forward": (24, 24 * 4096 * 8192 * 4, 16384 * 4096 * 2),
              "experts": (16, 16 * 8 * 2048 * 2048 * 4, 16384 * 2048 * 2)}  # fmt: skip
    seen = 0
    for name, (count, nbytes, input_bytes) in arrays.items():
        whole = recorded[name]["1.0"]["measured_ms"] / count
        cost = LayerCost(0, 0, 0, whole, whole / 4, input_bytes)
        rates = recorded[name]["measured_tiers"]
        one = Tiers(rates["out_bandwidth"] / 1e3, rates["in_bandwidth"] / 1e3)  # bytes a millisecond
        for row in recorded[name].values():
            if not isinstance(row, dict) or not row.get("moved"):
                continue
            moved = [StateArray(path, nbytes, path.startswith("params")) for path in row["moved"]]
            off = [
                predict(moved, [], row["inputs"], cost, StepFacts(count, 0, tiers), {}).seconds / row["measured_ms"] - 1
                for tiers in (one, one.with_duplex(rates["out_duplex"] / 1e3))
            ]
            assert off[0] < 0 and abs(off[1]) < abs(off[0]), (name, off)
            seen += 1
    assert seen == 3


def test_times_are_right_where_other_work_runs_for_a_while(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(measure, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def run(seconds):
        now[0] += seconds * (5 if 10 <= now[0] % 100 < 50 else 1)

    assert measure.fastest([lambda: run(1.0), lambda: run(4.0)], seconds=60) == [1.0, 4.0]


def test_both_directions_are_measured_by_the_copies_of_a_step():
    assert duplex_bandwidth(1 << 20) > 1e6


def gradient(stack, ws, x):
    return jax.tree.leaves(jax.jit(jax.grad(lambda ws: (stack(ws, x) ** 2).mean()))(ws))


def assert_close(found, want):
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow  # test_contract.py has a smaller one
def test_a_plan_of_a_stack(tmp_path):
    ws = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64))

    def layer(w, x):
        return x + jnp.tanh(x @ w) @ w.T

    with ActivationStore() as store:
        how = {"store": store, "min_bytes": 1, "choices": ("offload", "keep")}
        plan = plan_stack(layer, ws, x, budget_bytes=1 << 40, **how)
        assert isinstance(plan, Plan) and isinstance(plan.chosen, Way)
        assert plan.costs["keep"].layer_bytes > plan.costs["offload"].layer_bytes
        least = min(plan.ways, key=lambda way: way.device_bytes)
        with pytest.raises(ValueError, match="plan_stack: nothing fits device_bytes=1000; device_bytes=.* would do; "):
            plan.within(device_bytes=1000)
        plan.chosen = plan.within(device_bytes=least.device_bytes).chosen
        assert plan.chosen == least
        want = gradient(lambda ws, x: jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0], ws, x)
        assert_close(gradient(plan.apply, ws, x), want)
        peak, seconds = plan.measure(ws, x)
        assert abs(peak / least.device_bytes - 1) < 0.25 and seconds > 0
    assert "| offload | 0 | " in plan.table() and "measured" in plan.table() and "off by" in plan.table()
    assert all(a.device_bytes <= b.device_bytes and a.seconds > b.seconds for a, b in itertools.pairwise(plan.curve()))
    plan.plot(tmp_path / "curve.svg")
    assert "keep all" in (tmp_path / "curve.svg").read_text()
    assert sum(plan.chosen.choices.values()) == 6


@pytest.mark.slow
def test_a_plan_of_dense_layers_and_experts():
    keys = jax.random.split(jax.random.key(0), 4)
    dense = jax.random.normal(keys[0], (2, 32, 32)) / 6
    experts = {"route": jax.random.normal(keys[1], (5, 32, 3)), "w": jax.random.normal(keys[2], (5, 3, 32, 32)) / 6}
    x = jax.random.normal(keys[3], (128, 32))

    def moe(p, x):
        return x + jnp.einsum(
            "te,ted->td", jax.nn.softmax(x @ p["route"]), jnp.tanh(jnp.einsum("td,edf->tef", x, p["w"]))
        )

    def plain(params, x):
        for layer, some in zip(layers_of, params, strict=True):
            x = measure.scan_layers(layer, some, x)
        return x

    layers_of, params = [lambda w, x: x + jnp.tanh(x @ w), moe], [dense, experts]
    with ActivationStore() as store:
        how = {"store": store, "min_bytes": 1, "choices": ("offload", "recompute", "keep")}
        plan = plan_stack(layers_of, params, x, budget_bytes=1 << 40, **how)
        assert [sum(n) for n in zip(*plan.chosen.choices.values(), strict=True)] == [2, 5]
        mixed = {"offload": (1, 2), "recompute": (0, 2), "keep": (1, 1)}
        plan.chosen = next(way for way in plan.ways if way.choices == mixed)
        assert_close(gradient(plan.apply, params, x), gradient(plain, params, x))
        peak, _ = plan.measure(params, x)
        assert peak > 0 and "off by" in plan.table()
        with pytest.raises(ValueError, match="`params` must have the parameters of each part, got 1 for 2 bodies"):
            plan_stack(layers_of, [dense], x, budget_bytes=1, **how)


def names_layer(w, x):
    return x + checkpoint_name(jnp.tanh(checkpoint_name(x @ w, "product")), "act") @ w.T


@pytest.mark.slow
def test_a_plan_by_names_where_other_work_disturbed_the_shorter_stack(monkeypatch):
    times = itertools.cycle((3.0, 1.0))
    monkeypatch.setattr(measure, "timed", lambda run: next(times))
    ws, x = jnp.ones((4, 64, 64)) / 8, jnp.ones((512, 64))
    with ActivationStore() as store:
        plan = plan_names(names_layer, ws, x, budget_bytes=1 << 40, store=store, names=["product"], min_bytes=1)
    assert all(way.seconds >= 0 for way in plan.ways)
    assert plan.chosen.seconds <= 1.005 * min(way.seconds for way in plan.ways)


@pytest.mark.slow
def test_a_plan_by_names_with_a_drive(tmp_path, monkeypatch):
    monkeypatch.setattr(measure.drive_bandwidths, "__defaults__", (1 << 22,))
    ws = jax.random.normal(jax.random.key(0), (6, 64, 64)) / 8
    x = jax.random.normal(jax.random.key(1), (512, 64))
    tensor = x.nbytes
    how = {"names": ["product", "act"], "min_bytes": 1}
    with ActivationStore(tmp_path, host_bytes=4 * tensor) as store:
        plan = plan_names(names_layer, ws, x, budget_bytes=1 << 40, store=store, **how)
        assert 0 < plan.tiers.write_bandwidth < float("inf") and 0 < plan.tiers.read_bandwidth < float("inf")
        assert plan.bytes_of == {"(input)": tensor, "product": tensor, "act": tensor}
        everything = max(plan.ways, key=lambda way: list(way.choices.values()).count("offload"))
        on_disk = 6 * 3 * tensor - everything.staging_bytes - 3.5 * tensor  # 7/8 of host memory
        assert everything.disk_bytes == on_disk > 0
        least = min(plan.ways, key=lambda way: way.device_bytes)
        with pytest.raises(ValueError, match="plan_names: nothing fits device_bytes=1000; device_bytes="):
            plan.within(device_bytes=1000)
        plan.chosen = everything
        want = gradient(lambda ws, x: measure.scan_layers(names_layer, ws, x), ws, x)
        assert_close(gradient(plan.apply, ws, x), want)
        assert store.stats().stored_bytes == 6 * 3 * tensor
        plan.chosen = least
        peak, _ = plan.measure(ws, x)
        assert abs(peak / least.device_bytes - 1) < 0.25
        assert "| product | 0 |" in plan.table() and "off by" in plan.table()
        with pytest.raises(ValueError, match="is named 'nothing'"):
            plan_names(names_layer, ws, x, names=["nothing"], budget_bytes=1 << 40, store=store)


def lies(way, tier):
    return [what for what, choice in way.choices.items() if choice == tier and what != "inputs"]


@pytest.mark.slow
def test_a_plan_of_a_step_with_a_drive(monkeypatch, tmp_path):
    monkeypatch.setattr(measure.state_bandwidths, "__defaults__", (1 << 20,))
    outer, layers = model()
    layers = jax.tree.map(lambda x: np.concatenate([x] * 6), layers)  # 30 of them: few are on their way at a time
    how = {"min_bytes": 100, "streams": True, "path": tmp_path, "device_bytes": 1 << 40}
    plan = plan_step(embed, body, head, optax.adamw(1e-2), outer, layers, batch(0), host_bytes=1 << 30, **how)
    assert not lies(plan.chosen, "disk") and 0 < plan.budgets["disk_bytes"] < float("inf")
    moment = layers["w"].nbytes
    two_away = [way for way in plan.ways if way.choices["inputs"] == "device" and len(lies(way, "device")) == 4]
    device = max(way.device_bytes for way in two_away)
    small = plan.within(device_bytes=device, host_bytes=1.9 * moment)
    assert lies(small.chosen, "disk") and small.chosen.host_bytes <= 1.9 * moment
    step = small.apply()
    state = step.init(outer, layers)
    assert step.bytes_by_tier(outer, layers)["disk"] * 2 == small.chosen.disk_bytes
    state, loss = step.jit(state)(state, batch(0))
    assert np.isfinite(loss) and f"| {lies(small.chosen, 'disk')[0]} | 0 | disk |" in small.table()
    with pytest.raises(ValueError, match=r"disk_bytes=0; .*host_bytes=\d+ would do; disk_bytes=\d+ would do"):
        plan.within(device_bytes=device, host_bytes=1.9 * moment, disk_bytes=0)


def test_a_plan_of_a_step():
    outer, layers = model()
    how = {"min_bytes": 100, "streams": True, "host_bytes": 1 << 30, "device_bytes": 1 << 40}
    roomy = plan_step(embed, body, head, optax.adamw(1e-2), outer, layers, batch(0), **how)
    assert not lies(roomy.chosen, "host") and roomy.chosen.choices["inputs"] == "device"
    tight = roomy.within(device_bytes=roomy.chosen.device_bytes - layers["w"].nbytes // 4)
    assert lies(tight.chosen, "host") or tight.chosen.choices["inputs"] == "host"
    assert tight.chosen.device_bytes <= tight.budgets["device_bytes"] and tight.chosen in roomy.ways
    step = tight.apply()
    peak, seconds = tight.measure(step.init(*model()), batch(1))
    assert abs(peak / tight.chosen.device_bytes - 1) < 0.35 and seconds > 0
    assert "| params['w'] | 0 | " in tight.table() and "off by" in tight.table()
    with pytest.raises(ValueError, match=r"nothing fits device_bytes=10 .* the least on the device takes \d+"):
        roomy.within(device_bytes=10)


@pytest.mark.slow
def test_a_plan_with_a_limit_and_frozen_parameters():
    outer, layers = model()
    how = {"min_bytes": 100, "streams": True, "host_bytes": 1 << 30, "device_bytes": 1 << 40}
    how |= {"clip_norm": 1.0, "frozen": lambda path, _: path == "layers['b']"}
    found = {
        kept: plan_step(embed, body, head, optax.adam(1e-2), outer, layers, batch(0), gradients=kept, **how)
        for kept in ("device", "host")
    }
    # Without moments of what is frozen; gradients lie on the host.
    assert not any("['b']" in what for what in found["host"].chosen.choices if "moments" in what)
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
