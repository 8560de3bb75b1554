"""The engine of `plan_stack` and `plan_names`: what ways to run a stack cost, which one is chosen, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from dejax.offload.plan.curve import best, draw
from dejax.offload.plan.profile import Placement, Tiers, measured_rows, place, profile, training_step

_NOISE = 1.005  # measured times differ by half a percent between runs


@dataclass(frozen=True, slots=True)
class Cost:
    """What one way to run a layer costs, in a stack of such layers.

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
class Use:
    """So many layers with this cost; seconds of the forward pass of each."""

    cost: Cost
    layers: int
    forward_seconds: float


@dataclass(frozen=True, slots=True)
class Predicted:
    """Memory and time of a training step.

    Attributes:
        peak_bytes: temporaries of the program and the device's ring.
        seconds: time of a step.
        stall_seconds: part of it that waits for the bus or the drive.
        ring_bytes: size of the device's ring.
        placement: where the stored tensors lie.
    """

    peak_bytes: float
    seconds: float
    stall_seconds: float
    ring_bytes: int
    placement: Placement


def predict(uses: Sequence[Use], tiers: Tiers) -> Predicted | None:
    """Memory and time of layers that run one after the other; None where the tiers are too small."""
    uses = [use for use in uses if use.layers]
    storing = [use for use in uses if use.cost.stored_bytes]
    ring = max((use.cost.ring_bytes for use in uses), default=0)
    peak = max(use.cost.base_bytes for use in uses) + sum(use.layers * use.cost.layer_bytes for use in uses) + ring
    seconds = max(use.cost.base_seconds for use in uses) + sum(use.layers * use.cost.layer_seconds for use in uses)
    placement = place(
        sum(use.layers * use.cost.stored_bytes for use in storing),
        ring,
        sum(use.layers * use.forward_seconds for use in storing),
        sum(use.layers * (use.cost.layer_seconds - use.forward_seconds) for use in storing),
        tiers,
    )
    if placement is None:
        return None
    return Predicted(peak, seconds + placement.stall_seconds, placement.stall_seconds, ring, placement)


class Way(Protocol):
    """What plans know of a way to run a stack."""

    @property
    def peak_bytes(self) -> float: ...
    @property
    def seconds(self) -> float: ...
    @property
    def stall_seconds(self) -> float: ...
    @property
    def placement(self) -> Placement: ...


W = TypeVar("W", bound=Way)


def fastest(ways: Sequence[W], budget_bytes: float, prefer: Callable[[W], Any]) -> W | None:
    """The fastest way within the budget, of about equally fast ones that with the largest `prefer`; None: none fits."""
    fitting = [way for way in ways if way.peak_bytes <= budget_bytes]
    if not fitting:
        return None
    least = min(way.seconds for way in fitting)
    return max((way for way in fitting if way.seconds <= _NOISE * least), key=prefer)


def nothing_fits(caller: str, ways: Sequence[W], budget_bytes: float, describe: Callable[[W], Any]) -> ValueError:
    """The error for a budget that no way meets, with the least that one would."""
    if not ways:
        return ValueError(
            f"{caller}: nothing fits the store's tiers; raise host_bytes, give the store a path, or allow 'recompute'"
        )
    least = min(ways, key=lambda way: way.peak_bytes)
    return ValueError(
        f"{caller}: nothing fits budget_bytes={int(budget_bytes)}; the least is about {int(least.peak_bytes)} bytes, "
        f"with {describe(least)}"
    )


@dataclass(slots=True)
class Plan(Generic[W]):
    """A plan for a stack of layers: what `plan_stack` and `plan_names` return.

    Attributes:
        chosen: the fastest way within the budget.
        ways: every way that was considered.
        budget_bytes: the given budget.
        num_layers: of the stack.
        tiers: bandwidths and sizes of the bus, host memory and the drive.
        measured: (peak bytes, seconds) of the chosen way, after `measure`.

    >>> from dejax.offload import StackPlan, NamesPlan
    >>> [issubclass(kind, Plan) for kind in (StackPlan, NamesPlan)]
    [True, True]
    """

    chosen: W
    ways: list[W]
    budget_bytes: int
    num_layers: int
    tiers: Tiers
    measured: tuple[float, float] | None = field(default=None, kw_only=True)

    def apply(self, params: Any, x: Any) -> Any:
        """Runs the stack as planned: `scan(body, params, x)`.

        Args:
            params: as the plan was made with: a pytree of arrays [layers, ...].
            x: the first layer's input.
        """
        raise NotImplementedError

    def measure(self, params: Any, x: Any) -> tuple[float, float]:
        """Compiles and times the chosen way; returns (peak bytes, seconds), which `table` then shows."""
        temp, seconds = profile(training_step(lambda params, x: self.apply(params, x)), params, x)
        self.measured = (temp + self._ring_bytes(), seconds)
        return self.measured

    def curve(self) -> list[W]:
        """The recompute-offload-keep curve: the ways that no other beats in both time and memory, sorted by memory."""
        found = {(way.peak_bytes, way.seconds): way for way in self.ways}
        return [found[point] for point in best(list(found))]

    def plot(self, path: str | Path) -> None:
        """Draws throughput against activation memory: every way, the curve, the chosen way, the measured point."""
        draw(
            path,
            [(way.peak_bytes, way.seconds) for way in self.ways],
            chosen=(self.chosen.peak_bytes, self.chosen.seconds),
            budget_bytes=self.budget_bytes,
            marked={name: [(way.peak_bytes, way.seconds) for way in some] for name, some in self._marked().items()},
            measured=[self.measured] if self.measured else [],
        )

    def table(self) -> str:
        """Markdown tables: the choices, predicted memory and time, and measured values."""
        lines = [
            *self._choices(),
            "| layers | peak, GiB | step, ms | of it waiting, ms | ring, host, disk, GiB |",
            "| --- | --- | --- | --- | --- |",
        ]
        for name, way in self._rows():
            where = way.placement
            lines.append(
                f"| {name} | {way.peak_bytes / 2**30:.3f} | {way.seconds * 1e3:.2f} | {way.stall_seconds * 1e3:.2f} | "
                f"{where.ring_bytes / 2**30:.2f}, {where.host_bytes / 2**30:.2f}, {where.disk_bytes / 2**30:.2f} |"
            )
        return "\n".join([*lines, *measured_rows((self.chosen.peak_bytes, self.chosen.seconds), self.measured)])

    def _ring_bytes(self) -> int:
        """Of the chosen way."""
        raise NotImplementedError

    def _marked(self) -> Mapping[str, list[W]]:
        """Ways that the plot names."""
        raise NotImplementedError

    def _choices(self) -> list[str]:
        """Lines of the table before predictions."""
        return []

    def _rows(self) -> list[tuple[str, W]]:
        """Ways that the table shows, by name."""
        return [("predicted", self.chosen)]


def moved_bytes(way: Way) -> float:
    where = way.placement
    return where.ring_bytes + where.host_bytes + where.disk_bytes
