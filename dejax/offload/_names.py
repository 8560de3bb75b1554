"""Keep, recompute or offload, for each named tensor of a layer (`plan_stack` decides for each layer).

The set of saved names decides what is recomputed. It is profiled: short stacks with all names saved, with none, and
with each but one. Whether a saved tensor stays or is offloaded follows from its size, the bus and the drive.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dejax.offload._curve import Point, draw
from dejax.offload._profile import (
    Placement,
    Tiers,
    count_layers,
    device_bandwidth,
    forward_seconds,
    measured_rows,
    place,
    profile,
    residuals_of,
    ring_of,
    scan_layers,
    short_stacks,
    tiers_of,
    training_step,
)
from dejax.offload._residuals import Residual
from dejax.offload._store import ActivationStore
from dejax.offload._transform import MIN_BYTES, offload

INPUT = "(input)"
"""The layer's own input, among the names of a plan."""


@dataclass(frozen=True, slots=True)
class NamesWay:
    """A way to run each layer, with its predicted memory and time.

    Attributes:
        saved: names that are not recomputed; None: nothing is recomputed, `jax.checkpoint` is not used.
        offloaded: the saved names that are offloaded.
        peak_bytes: temporaries of the program and the device's ring.
        seconds: time of a step.
        stall_seconds: part of it that waits for the bus or the drive.
        ring_bytes: size of the device's ring.
        placement: where the stored tensors lie.
    """

    saved: frozenset[str] | None
    offloaded: frozenset[str]
    peak_bytes: float
    seconds: float
    stall_seconds: float
    ring_bytes: int
    placement: Placement

    def choice(self, name: str) -> str:
        """What happens to a name: "offload", "keep" or "recompute"."""
        if name in self.offloaded:
            return "offload"
        return "keep" if name == INPUT or self.saved is None or name in self.saved else "recompute"


@dataclass(frozen=True, slots=True)
class _Profile:
    """The cost of a set of saved names.

    Attributes:
        base_bytes, layer_bytes: temporaries of a stack of n layers: base_bytes + n * layer_bytes.
        base_seconds, layer_seconds: likewise, the time of a training step.
        sizes: of the residuals, by name.
        flops: of a layer's forward pass.
    """

    base_bytes: float
    layer_bytes: float
    base_seconds: float
    layer_seconds: float
    sizes: dict[str, list[int]]
    flops: float

    def sizes_of(self, names: Iterable[str]) -> list[int]:
        return [size for name in names for size in self.sizes[name]]


@dataclass(slots=True)
class NamesPlan:
    """A plan for the named tensors of a layer, made by `plan_names`.

    Attributes:
        chosen: the fastest way within the budget.
        ways: every way that was considered.
        bytes_of: a layer's bytes by name.
        budget_bytes: the given budget.
        num_layers: of the stack.
        tiers: bandwidths and sizes of the bus, host memory and the drive.
        measured: (peak bytes, seconds) of the chosen way, after `measure`.
    """

    chosen: NamesWay
    ways: list[NamesWay]
    bytes_of: dict[str, int]
    budget_bytes: int
    num_layers: int
    tiers: Tiers
    _body: Callable[[Any, Any], Any]
    _store: ActivationStore | None
    _min_bytes: int
    measured: tuple[float, float] | None = field(default=None)

    @property
    def layer(self) -> Callable[[Any, Any], Any]:
        """`body` as planned: (params of one layer, x) -> x."""
        return _make(self._body, self.chosen, self._store, self._min_bytes)

    def apply(self, params: Any, x: Any) -> Any:
        """Runs the stack as planned: `scan(body, params, x)`."""
        return scan_layers(self.layer, params, x)

    def measure(self, params: Any, x: Any) -> tuple[float, float]:
        """Compiles and times the chosen way; returns (peak bytes, seconds), which `table` then shows."""
        temp, seconds = profile(training_step(self.apply), params, x)
        self.measured = (temp + self.chosen.ring_bytes, seconds)
        return self.measured

    def table(self) -> str:
        """Markdown tables: what happens to each name, and predicted and measured memory and time."""
        lines = ["| tensor | MiB a layer | choice |", "| --- | --- | --- |"]
        for name, nbytes in self.bytes_of.items():
            lines.append(f"| {name} | {nbytes / 2**20:.0f} | {self.chosen.choice(name)} |")
        where, way = self.chosen.placement, self.chosen
        lines += [
            "",
            "| | peak, GiB | step, ms | of it waiting, ms | ring, host, disk, GiB |",
            "| --- | --- | --- | --- | --- |",
            f"| predicted | {way.peak_bytes / 2**30:.3f} | {way.seconds * 1e3:.2f} | {way.stall_seconds * 1e3:.2f} | "
            f"{where.ring_bytes / 2**30:.2f}, {where.host_bytes / 2**30:.2f}, {where.disk_bytes / 2**30:.2f} |",
        ]
        return "\n".join([*lines, *measured_rows((way.peak_bytes, way.seconds), self.measured)])

    def plot(self, path: str | Path) -> None:
        """Draws throughput against activation memory: every way, the curve, the chosen way, the measured point."""
        alone: dict[str, list[Point]] = {}
        for way in self.ways:
            does = {way.choice(name) for name in self.bytes_of if name != INPUT}
            if len(does) == 1:
                alone.setdefault(f"{does.pop()} all", []).append((way.peak_bytes, way.seconds))
        draw(
            path,
            [(way.peak_bytes, way.seconds) for way in self.ways],
            chosen=(self.chosen.peak_bytes, self.chosen.seconds),
            budget_bytes=self.budget_bytes,
            marked=alone,
            measured=[self.measured] if self.measured else [],
        )


def plan_names(
    body: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    *,
    names: Sequence[str],
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
) -> NamesPlan:
    """Decides for each named tensor of a layer whether it is kept, recomputed or offloaded, alike in every layer.

    Args:
        body: (params of one layer, x) -> x, with `jax.ad_checkpoint.checkpoint_name` in it.
        params: pytree of arrays [layers, ...], at least four layers.
        x: the first layer's input.
        names: of the tensors to decide about, at most eight. The plan decides about the input, too. Tensors without a
            name are recomputed, unless the plan recomputes nothing.
        budget_bytes: for temporaries of a training step (value and gradient of the stack) and the device's ring.
        store: where offloaded tensors go, see `plan_stack`.
        min_bytes: smaller tensors stay.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, `print(plan.table())` shows the choices.

    Raises:
        ValueError: a name is not found, there are too many or too few layers, or no way fits the budget.
    """
    num_layers = count_layers(params, "plan_names")
    if not 1 <= len(names) <= 8:
        raise ValueError(f"plan_names: `names` must have one to eight names, got {len(names)}")
    profiles = _profiles(body, params, x, names, min_bytes)
    forward = forward_seconds(body, params, x)
    tiers = tiers_of(store)
    ways: list[NamesWay] = []
    for saved, cost in profiles.items():
        can_go = [name for name, sizes in cost.sizes.items() if sizes]
        for count in range(len(can_go) + 1):
            for offloaded in itertools.combinations(can_go, count):
                ring = ring_of(store, cost.sizes_of(offloaded), cost.flops)
                way = _predict(saved, frozenset(offloaded), cost, num_layers, forward, ring, tiers)
                ways += [] if way is None else [way]
    bytes_of = {name: sum(sizes) for name, sizes in profiles[frozenset(names)].sizes.items()}
    plan = NamesPlan(ways[0], ways, bytes_of, budget_bytes, num_layers, tiers, body, store, min_bytes)
    return _choose(plan, params, x)


def _profiles(
    body: Callable[[Any, Any], Any], params: Any, x: Any, names: Sequence[str], min_bytes: int
) -> dict[frozenset[str] | None, _Profile]:
    """The cost of each candidate set of saved names."""
    profiles: dict[frozenset[str] | None, _Profile] = {}
    for saved in _candidates(names):
        variant = _saving(body, saved)
        residuals, flops = residuals_of(variant, params, x, min_bytes)
        sizes = {name: [r.nbytes for r in residuals if _named(r, names) == name] for name in (INPUT, *names)}
        if not profiles and (missing := [name for name in names if not sizes[name]]):  # the first candidate saves all
            raise ValueError(
                f"plan_names: no tensor of {min_bytes} bytes or more that backward needs is named {missing[0]!r}; give "
                "names that checkpoint_name gives inside `body`, outside of functions that are jitted by themselves"
            )
        profiles[saved] = _Profile(*short_stacks(variant, params, x), sizes, flops)
    return profiles


def _predict(
    saved: frozenset[str] | None,
    offloaded: frozenset[str],
    cost: _Profile,
    num_layers: int,
    forward: float,
    ring: int,
    tiers: Tiers,
) -> NamesWay | None:
    stored = sum(cost.sizes_of(offloaded))
    backward = num_layers * (cost.layer_seconds - forward)
    placement = place(num_layers * stored, ring, num_layers * forward, backward, tiers)
    if placement is None:
        return None
    copies = num_layers * 4 * stored / device_bandwidth() if ring else 0.0
    return NamesWay(
        saved=saved,
        offloaded=offloaded,
        peak_bytes=cost.base_bytes + num_layers * (cost.layer_bytes - stored) + ring,
        seconds=cost.base_seconds + num_layers * cost.layer_seconds + copies + placement.stall_seconds,
        stall_seconds=placement.stall_seconds,
        ring_bytes=ring,
        placement=placement,
    )


def _choose(plan: NamesPlan, params: Any, x: Any) -> NamesPlan:
    """Chooses the fastest way within the budget. Its memory is taken from the compiler, and must fit, too."""
    left = list(plan.ways)
    while left:
        fitting = [way for way in left if way.peak_bytes <= plan.budget_bytes]
        if not fitting:
            break
        fastest = min(way.seconds for way in fitting)
        # Measured times differ by half a percent between runs: among such ways, move as little as possible.
        best = min((w for w in fitting if w.seconds <= 1.005 * fastest), key=lambda w: _moved(w) + w.peak_bytes * 1e-6)
        plan.chosen = best
        base, layer_bytes, *_ = short_stacks(plan.layer, params, x, run=False)
        peak = base + plan.num_layers * layer_bytes + best.ring_bytes
        plan.chosen = dataclasses.replace(best, peak_bytes=peak)
        if peak <= plan.budget_bytes:
            return plan
        left.remove(best)
    least = min(plan.ways, key=lambda way: way.peak_bytes)
    raise ValueError(
        f"plan_names: nothing fits budget_bytes={plan.budget_bytes}; the least is about {int(least.peak_bytes)} bytes, "
        f"with { ({name: least.choice(name) for name in plan.bytes_of}) }"
    )


def _moved(way: NamesWay) -> float:
    return way.placement.ring_bytes + way.placement.host_bytes + way.placement.disk_bytes


def _named(residual: Residual, names: Sequence[str]) -> str:
    if residual.is_input:
        return INPUT
    return next((name for name in names if name in residual.names), "")


def _candidates(names: Sequence[str]) -> list[frozenset[str] | None]:
    everything = frozenset(names)
    some = [everything - {name} for name in names] if len(names) > 1 else []
    return [everything, *some, frozenset(), None]


def _saving(body: Callable[[Any, Any], Any], saved: frozenset[str] | None) -> Callable[[Any, Any], Any]:
    if saved is None:
        return body
    return jax.checkpoint(body, policy=jax.checkpoint_policies.save_only_these_names(*sorted(saved)))


def _make(
    body: Callable[[Any, Any], Any], way: NamesWay, store: ActivationStore | None, min_bytes: int
) -> Callable[[Any, Any], Any]:
    inner = _saving(body, way.saved)
    if not way.offloaded:
        return inner

    def goes(residual: Residual) -> bool:
        return INPUT in way.offloaded if residual.is_input else bool(residual.names & way.offloaded)

    return offload(inner, policy=goes, store=store, inputs=1, min_bytes=min_bytes)
