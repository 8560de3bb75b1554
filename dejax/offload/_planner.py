"""Keep, recompute or offload, for each layer of a stack, from measured times and sizes and a memory budget.

A stack of equal layers under `jax.lax.scan` is profiled with two short stacks for each choice. Memory and time of a
long stack follow by linear extrapolation. Short stacks fit into the ring and never wait for the bus, so those waits are
predicted from measured bandwidths.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from dejax.offload._curve import best, draw
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
from dejax.offload._stack import scan_pieces
from dejax.offload._store import ActivationStore
from dejax.offload._transform import MIN_BYTES, offload

CHOICES = ("offload", "offload inputs", "recompute", "keep")
"""In the order of the layers that get them: tensors of the first layers are fetched last and have most time."""
_TWIN = {"offload": "keep", "offload inputs": "recompute"}


@dataclass(frozen=True, slots=True)
class Cost:
    """What one choice costs.

    Attributes:
        base_bytes, layer_bytes: temporaries of a stack of n layers: base_bytes + n * layer_bytes.
        base_seconds, layer_seconds: likewise, time of a training step (value and gradient) without waits for the bus.
        stored_bytes: stored by one layer.
        ring_bytes: size of the device's ring.
    """

    base_bytes: float
    layer_bytes: float
    base_seconds: float
    layer_seconds: float
    stored_bytes: int
    ring_bytes: int


@dataclass(frozen=True, slots=True)
class Prediction:
    """A way to run the stack, with its predicted memory and time.

    Attributes:
        layers: number of layers for each of `CHOICES`.
        peak_bytes: temporaries of the program and the device's ring.
        seconds: time of a step.
        stall_seconds: part of it that waits for the bus or the drive.
        placement: where the stored tensors lie.
    """

    layers: tuple[int, ...]
    peak_bytes: float
    seconds: float
    stall_seconds: float
    placement: Placement


@dataclass(slots=True)
class StackPlan:
    """A plan for a stack, made by `plan_stack`.

    Attributes:
        chosen: the fastest way within the budget.
        budget_bytes: the given budget.
        num_layers: of the stack.
        costs: by choice.
        forward_seconds: of one layer.
        tiers: bandwidths and sizes of the bus, host memory and the drive.
        measured: (peak bytes, seconds) of the chosen way, after `measure`.
    """

    chosen: Prediction
    budget_bytes: int
    num_layers: int
    costs: dict[str, Cost]
    forward_seconds: float
    tiers: Tiers
    _body: Callable[[Any, Any], Any]
    _store: ActivationStore | None
    _min_bytes: int
    measured: tuple[float, float] | None = None
    _ways: list[Prediction] = field(default_factory=list)

    def apply(self, params: Any, x: Any) -> Any:
        """Runs the stack as planned: `scan(body, params, x)`, in one loop for each choice.

        Args:
            params: pytree of arrays [layers, ...].
            x: the first layer's input.
        """
        return _run(self._bodies(), self.chosen.layers, params, x)

    def measure(self, params: Any, x: Any) -> tuple[float, float]:
        """Compiles and times the chosen way; returns (peak bytes, seconds), which `table` then shows."""
        step = training_step(lambda params, x: self.apply(params, x))
        temp, seconds = profile(step, params, x)
        ring = max((self.costs[c].ring_bytes for c, n in zip(CHOICES, self.chosen.layers, strict=True) if n), default=0)
        self.measured = (temp + ring, seconds)
        return self.measured

    def curve(self) -> list[Prediction]:
        """The recompute-offload-keep curve: the ways that no other beats in both time and memory, sorted by memory."""
        wanted = best([(way.peak_bytes, way.seconds) for way in self._ways])
        found = {(way.peak_bytes, way.seconds): way for way in self._ways}
        return [found[point] for point in wanted]

    def table(self) -> str:
        """A Markdown table: each choice alone, the chosen way, and its measured values."""
        lines = [
            "| layers | peak, GiB | step, ms | of it waiting, ms | in host memory, on disk, GiB |",
            "| --- | --- | --- | --- | --- |",
        ]
        alone = [way for way in self._ways if sum(n > 0 for n in way.layers) == 1]
        for way in [*alone, self.chosen]:
            name = ", ".join(f"{n} {choice}" for n, choice in zip(way.layers, CHOICES, strict=True) if n)
            mark = "**" if way is self.chosen else ""
            lines.append(
                f"| {mark}{name}{mark} | {way.peak_bytes / 2**30:.3f} | {way.seconds * 1e3:.2f} | "
                f"{way.stall_seconds * 1e3:.2f} | {way.placement.host_bytes / 2**30:.2f}, "
                f"{way.placement.disk_bytes / 2**30:.2f} |"
            )
        return "\n".join([*lines, *measured_rows((self.chosen.peak_bytes, self.chosen.seconds), self.measured)])

    def plot(self, path: str | Path) -> None:
        """Draws throughput against activation memory: every way, the curve, the chosen way, the measured point."""
        points = {way.layers: (way.peak_bytes, way.seconds) for way in self._ways}
        alone = {
            f"all {choice}": [point for layers, point in points.items() if layers[at] == self.num_layers]
            for at, choice in enumerate(CHOICES)
        }
        draw(
            path,
            list(points.values()),
            chosen=(self.chosen.peak_bytes, self.chosen.seconds),
            budget_bytes=self.budget_bytes,
            marked={name: some for name, some in alone.items() if some},
            measured=[self.measured] if self.measured else [],
        )

    def _bodies(self) -> dict[str, Callable[[Any, Any], Any]]:
        return _variants(self._body, self._store, self._min_bytes)


def plan_stack(
    body: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    *,
    budget_bytes: int,
    store: ActivationStore | None = None,
    min_bytes: int = MIN_BYTES,
    choices: Sequence[str] = CHOICES,
) -> StackPlan:
    """Decides for each layer of a stack how its backward pass gets its residuals.

    Profiles on the device that holds `x`: two short stacks for each choice, forward alone, and the bus. A layer does
    one of `CHOICES`:

    - "offload": all residuals are moved, `offload(body)`.
    - "offload inputs": its input is moved and the rest recomputed, `offload(jax.checkpoint(body))`.
    - "recompute": its input stays and the rest is recomputed, `jax.checkpoint(body)`.
    - "keep": all residuals stay.

    Args:
        body: (params of one layer, x) -> x, as in `jax.lax.scan` over layers.
        params: pytree of arrays [layers, ...], at least four layers.
        x: the first layer's input.
        budget_bytes: for temporaries of a training step (value and gradient of the stack) and the device's ring.
        store: where offloaded tensors go. The plan respects its host memory, and measures its drive: it does not
            offload more than the drive takes in time. None: the current store, with unlimited host memory.
        min_bytes: smaller tensors stay.
        choices: the ones of `CHOICES` to consider.

    Returns:
        The plan: `plan.apply(params, x)` runs the stack, `print(plan.table())` shows the alternatives.

    Raises:
        ValueError: the stack has fewer than four layers, or no way fits the budget; the message has the least budget.
    """
    num_layers = count_layers(params, "plan_stack")
    if unknown := set(choices) - set(CHOICES):
        raise ValueError(f"plan_stack: `choices` must be of {CHOICES}, got {sorted(unknown)}")
    costs = _costs(body, params, x, store, min_bytes, choices)
    forward = forward_seconds(body, params, x)
    tiers = tiers_of(store)
    found = [
        _predict(layers, costs, forward, tiers)
        for layers in _compositions(num_layers, [choice in costs for choice in CHOICES])
    ]
    ways = [way for way in found if way is not None]
    return StackPlan(
        chosen=_choose(ways, budget_bytes),
        budget_bytes=budget_bytes,
        num_layers=num_layers,
        costs=costs,
        forward_seconds=forward,
        tiers=tiers,
        _body=body,
        _store=store,
        _min_bytes=min_bytes,
        _ways=ways,
    )


def _costs(
    body: Callable[[Any, Any], Any],
    params: Any,
    x: Any,
    store: ActivationStore | None,
    min_bytes: int,
    choices: Sequence[str],
) -> dict[str, Cost]:
    """Profiles the choices."""
    variants = _variants(body, store, min_bytes)
    costs: dict[str, Cost] = {}
    for choice in reversed(CHOICES):  # those that store nothing first
        if choice not in choices:
            continue
        sizes: list[int] = []
        flops = 0.0
        if choice in _TWIN:
            residuals, flops = residuals_of(body if choice == "offload" else jax.checkpoint(body), params, x, min_bytes)
            sizes = [residual.nbytes for residual in residuals]
        # On a GPU an offloading stack is compiled, but not run: it could wait half a minute for a slow drive. It takes
        # the time of the choice that computes the same without offloading, and of two copies on the device.
        twin = costs.get(_TWIN.get(choice, "")) if jax.default_backend() == "gpu" else None
        profiled = short_stacks(variants[choice], params, x, run=twin is None)
        cost = Cost(*profiled, sum(sizes), ring_of(store, sizes, flops))
        if twin is not None:
            copies = 4 * cost.stored_bytes / device_bandwidth()
            cost = dataclasses.replace(cost, base_seconds=twin.base_seconds, layer_seconds=twin.layer_seconds + copies)
        costs[choice] = cost
    return costs


def _choose(ways: Sequence[Prediction], budget_bytes: int) -> Prediction:
    """The fastest way within the budget."""
    if not ways:
        raise ValueError(
            "plan_stack: nothing fits the store's tiers; raise host_bytes, give the store a path, or allow 'recompute'"
        )
    fitting = [way for way in ways if way.peak_bytes <= budget_bytes]
    if not fitting:
        least = min(ways, key=lambda way: way.peak_bytes)
        raise ValueError(
            f"plan_stack: nothing fits budget_bytes={budget_bytes}; the least is {int(least.peak_bytes)} bytes, with "
            f"{dict(zip(CHOICES, least.layers, strict=True))}"
        )
    # Measured times differ by half a percent between runs: among such ways, keep as many layers as possible.
    fastest = min(way.seconds for way in fitting)
    return max((w for w in fitting if w.seconds <= 1.005 * fastest), key=lambda w: (w.layers[::-1], -w.peak_bytes))


def _predict(layers: tuple[int, ...], costs: dict[str, Cost], forward: float, tiers: Tiers) -> Prediction | None:
    used = [(costs[choice], n) for choice, n in zip(CHOICES, layers, strict=True) if n]
    storing = [(cost, n) for cost, n in used if cost.stored_bytes]
    ring = max((cost.ring_bytes for cost, _ in used), default=0)
    peak = max(cost.base_bytes for cost, _ in used) + sum(n * cost.layer_bytes for cost, n in used) + ring
    seconds = max(cost.base_seconds for cost, _ in used) + sum(n * cost.layer_seconds for cost, n in used)
    placement = place(
        sum(n * cost.stored_bytes for cost, n in storing),
        ring,
        sum(n for _, n in storing) * forward,
        sum(n * (cost.layer_seconds - forward) for cost, n in storing),
        tiers,
    )
    if placement is None:
        return None
    return Prediction(layers, peak, seconds + placement.stall_seconds, placement.stall_seconds, placement)


def _compositions(total: int, allowed: Sequence[bool]) -> list[tuple[int, ...]]:
    """All ways to divide `total` layers among the allowed choices, in steps of several layers for deep stacks."""
    step = max(1, total // 24)
    counts = [sorted({*range(0, total + 1, step), total}) if ok else [0] for ok in allowed]
    found = []
    for head in itertools.product(*counts[:-1]):
        rest = total - sum(head)
        if rest >= 0 and (allowed[-1] or rest == 0):
            found.append((*head, rest))
    return found


def _variants(
    body: Callable[[Any, Any], Any], store: ActivationStore | None, min_bytes: int
) -> dict[str, Callable[[Any, Any], Any]]:
    recomputing = jax.checkpoint(body)
    return {
        "offload": offload(body, store=store, inputs=1, min_bytes=min_bytes),
        "offload inputs": offload(recomputing, store=store, inputs=1, min_bytes=min_bytes),
        "recompute": recomputing,
        "keep": body,
    }


def _run(variants: dict[str, Callable[[Any, Any], Any]], layers: tuple[int, ...], params: Any, x: Any) -> Any:
    pieces = [(variants[choice], count) for choice, count in zip(CHOICES, layers, strict=True) if count]
    return scan_layers(pieces[0][0], params, x) if len(pieces) == 1 else scan_pieces(pieces, params, x)
