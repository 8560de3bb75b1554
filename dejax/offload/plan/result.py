"""Plans: where a step's stored bytes lie and how long it waits for them, which way is chosen, and what it says."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dejax.offload.plan.curve import best, draw
from dejax.offload.plan.measure import Tiers, timed

_NOISE = 1.005  # measured times differ by half a percent between runs
_KEPT_FREE = 1 / 8  # the part of host memory that a store with a disk tier leaves free
_ROWS = 8  # rows of the curve in a table


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of a step.

    Attributes:
        seconds: the time of its arithmetic.
        in_bytes, out_bytes: the bytes that go over the bus meanwhile, to the device and from it.
        drive_seconds: the seconds that a drive takes for its part.
    """

    seconds: float
    in_bytes: float = 0.0
    out_bytes: float = 0.0
    drive_seconds: float = 0.0

    def stall_seconds(self, tiers: Tiers) -> float:
        """The time of the phase beyond that of its arithmetic."""
        bus = tiers.bus_seconds(self.in_bytes, self.out_bytes)
        return max(0.0, bus - self.seconds, self.drive_seconds - self.seconds)


class Stored(NamedTuple):
    """Bytes that a step stores in host memory and on disk, and the time that it waits for them and all other copies."""

    host_bytes: float
    disk_bytes: float
    stall_seconds: float


def place(stored: float, ring: float, forward: Phase, backward: Phase, tiers: Tiers) -> Stored | None:
    """Predicts where stored bytes lie, and how long a step waits for them; None where the tiers are too small.

    All bytes but the ring's leave the device while forward runs; where the bus is slower, the compute stream waits.
    Backward likewise. Bytes that host memory does not hold are written to disk meanwhile. They must be there before the
    last tensor needs their memory, so the time of the tensors that stay in the ring does not count.

    Args:
        stored: bytes of a step.
        ring: bytes of the device's ring.
        forward, backward: the phases that store and fetch, without what they store and fetch.
        tiers: the tiers below the ring.
    """
    travels = max(0.0, stored - ring)
    on_disk = max(0.0, travels - tiers.host_bytes * (1 - _KEPT_FREE)) if tiers.disk_bytes > 0 else 0.0
    if on_disk > tiers.disk_bytes or travels - on_disk > tiers.host_bytes:
        return None
    share = travels / stored if stored > 0 else 0.0
    storing = dataclasses.replace(forward, out_bytes=forward.out_bytes + travels)
    fetching = dataclasses.replace(backward, in_bytes=backward.in_bytes + travels)
    stall = max(storing.stall_seconds(tiers), on_disk / tiers.write_bandwidth - share * forward.seconds)
    stall += max(fetching.stall_seconds(tiers), on_disk / tiers.read_bandwidth - share * backward.seconds)
    return Stored(travels - on_disk, on_disk, stall)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a stack or a step that a `Plan` considered, with its predicted memory and time.

    Attributes:
        choices: what is done with which layer, tensor or array. From `plan_stack`: the number of layers for each of
            `CHOICES`; for a stack of several parts, a tuple with the number for each part. From `plan_names`: "keep",
            "offload" or "recompute" for each name. From `plan_step`: the place ("device", "host" or "disk") of each
            array, such as "params['w']" and "moments[0].mu['w']", and of the layers' "inputs"; and the number of
            "microbatches".
        device_bytes: temporary and staging memory on the device; from `plan_step` including the state on the device.
        seconds: time of a step.
        stall_seconds: part of `seconds` that the device waits for the bus or a drive.
        staging_bytes: part of `device_bytes` that is the store's ring or buffers of copies under way.
        host_bytes: bytes in host memory.
        disk_bytes: bytes on drives; files of training state hold two versions.

    >>> import jax.numpy as jnp
    >>> from dejax.offload import plan_stack
    >>> ws, x = jnp.ones((4, 16, 16)) / 16, jnp.ones((32, 16))
    >>> plan = plan_stack(lambda w, x: x + jnp.tanh(x @ w), ws, x, budget_bytes=1 << 30)  # doctest: +SKIP
    >>> plan.chosen.choices, plan.chosen.device_bytes, plan.chosen.seconds  # doctest: +SKIP
    """

    choices: Mapping[str, Any]
    device_bytes: float
    seconds: float
    stall_seconds: float
    staging_bytes: float
    host_bytes: float
    disk_bytes: float

    def describe(self) -> str:
        """The choices as one line of text: each choice if there are few, otherwise the number of each."""
        if len(self.choices) <= 6:
            return ", ".join(f"{what}: {choice}" for what, choice in self.choices.items())
        counts = Counter(choice for choice in self.choices.values() if isinstance(choice, str))
        return ", ".join(f"{count} {choice}" for choice, count in counts.items())

    @property
    def alike(self) -> str | None:
        """The choice that all layers, tensors or arrays have, or None if they differ."""
        found = {choice for choice in self.choices.values() if isinstance(choice, str)} or set(self.choices)
        return found.pop() if len(found) == 1 else None


@dataclass(slots=True)
class Plan:
    """The result of `plan_stack`, `plan_names` or `plan_step`: the fastest way within the memory budgets.

    `print(plan.table())` shows the decision; `plan.apply(...)` carries it out.

    Attributes:
        chosen: the fastest `Way` within the budgets.
        ways: every way that was considered.
        budgets: the limits "device_bytes", "host_bytes" and "disk_bytes", as far as given.
        tiers: measured bandwidths, and the sizes of host memory and of a drive.
        costs: the measured costs, by choice or by number of microbatches; a tuple for a stack of several parts.
        bytes_of: bytes that each choice is about: of a layer, or of an array of state.
        measured: a pair (device bytes, seconds) for the chosen way, after a call of `measure`.

    >>> import jax.numpy as jnp
    >>> from dejax.offload import plan_stack
    >>> ws, x = jnp.ones((4, 16, 16)) / 16, jnp.ones((32, 16))
    >>> plan = plan_stack(lambda w, x: x + jnp.tanh(x @ w), ws, x, budget_bytes=1 << 30)  # doctest: +SKIP
    >>> print(plan.table())  # doctest: +SKIP
    >>> y = plan.apply(ws, x)  # doctest: +SKIP
    """

    chosen: Way = field(init=False)
    ways: list[Way]
    budgets: dict[str, float]
    tiers: Tiers
    costs: Any
    bytes_of: Mapping[str, int]
    _caller: str
    _apply: Callable[..., Any]  # (way, arguments of apply)
    _measure: Callable[[Way, Any, Any], tuple[float, Callable[[], Any]]]  # to (bytes without staging, the step)
    _finish: Callable[[Way, float], Way] | None = None  # (way, budget on the device) -> what is made of the way
    measured: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        self.chosen = self._choose()

    def apply(self, *arguments: Any) -> Any:
        """Runs the stack in the chosen way; for a plan of `plan_step`, makes the step.

        Args:
            arguments: for `plan_stack` and `plan_names`, the parameters of the stack and the input of its first layer;
                the result is the output of the last layer. For `plan_step`, none; the result is a `StackStep`.
        """
        return self._apply(self.chosen, *arguments)

    def within(
        self,
        *,
        device_bytes: float | None = None,
        host_bytes: float | None = None,
        disk_bytes: float | None = None,
    ) -> Plan:
        """The plan for other budgets, from the same measurements.

        Args:
            device_bytes, host_bytes, disk_bytes: new budgets; None keeps the old one.

        Raises:
            ValueError: nothing fits; the message gives the smallest budget that would.
        """
        given = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
        budgets = self.budgets | {name: most for name, most in given.items() if most is not None}
        return dataclasses.replace(self, budgets=budgets, measured=None)

    def measure(self, first: Any, second: Any) -> tuple[float, float]:
        """Compiles and times the chosen way. Returns a pair (device bytes, seconds), which `table` then shows, too.

        Args:
            first, second: for `plan_stack` and `plan_names`, parameters and input of the stack. For `plan_step`, a
                state from `init` of the planned step, which is used up, and a batch.
        """
        nbytes, run = self._measure(self.chosen, first, second)
        self.measured = (nbytes + self.chosen.staging_bytes, timed(run))
        return self.measured

    def curve(self) -> list[Way]:
        """The ways on the Pareto front of time and device memory, sorted by memory."""
        found = {_point(way): way for way in self.ways}
        return [found[point] for point in best(list(found))]

    def plot(self, path: str | Path) -> None:
        """Draws throughput against device memory: all ways, the Pareto front, the chosen way, the measured point."""
        alike: dict[str, list[tuple[float, float]]] = {}
        for way in self.ways:
            if way.alike is not None:
                alike.setdefault(f"{way.alike} all", []).append(_point(way))
        draw(
            path,
            [_point(way) for way in self.ways],
            chosen=_point(self.chosen),
            budget_bytes=self.budgets["device_bytes"],
            marked=alike,
            measured=[self.measured] if self.measured else [],
        )

    def table(self) -> str:
        """The plan as Markdown tables: the choice, predictions for it and for other choices, and measured values."""
        lines = ["| what | MiB | choice |", "| --- | --- | --- |"]
        for what, choice in self.chosen.choices.items():
            size = f"{self.bytes_of[what] / 2**20:.0f}" if what in self.bytes_of else ""
            lines.append(f"| {what} | {size} | {choice} |")
        lines += ["", "| way | device, GiB | step, ms | of it waiting, ms | host, disk, GiB |"]
        lines += ["| --- | --- | --- | --- | --- |"]
        curve = self.curve()
        shown = [way for way in self.ways if way.alike is not None] + curve[:: max(1, math.ceil(len(curve) / _ROWS))]
        others = {_point(way): way for way in shown if way.describe() != self.chosen.describe()}
        rows = [(way.describe(), way) for way in others.values()]
        for name, way in [*rows, (f"**{self.chosen.describe()}**", self.chosen)]:
            lines.append(
                f"| {name} | {way.device_bytes / 2**30:.3f} | {way.seconds * 1e3:.2f} | {way.stall_seconds * 1e3:.2f} "
                f"| {way.host_bytes / 2**30:.2f}, {way.disk_bytes / 2**30:.2f} |"
            )
        if self.measured is not None:
            nbytes, seconds = self.measured
            off = [f"{100 * (a / b - 1):+.1f} %" for a, b in zip(_point(self.chosen), self.measured, strict=True)]
            lines.append(f"| measured | {nbytes / 2**30:.3f} | {seconds * 1e3:.2f} | | |")
            lines.append(f"| off by | {off[0]} | {off[1]} | | |")
        return "\n".join(lines)

    def _choose(self) -> Way:
        """The fastest way within the budgets; of about equally fast ones the one that moves the least."""
        left = [way for way in self.ways if not self._excess(way)]
        while left:
            least = min(way.seconds for way in left)
            fast = [way for way in left if way.seconds <= _NOISE * least]
            found = min(fast, key=lambda w: (w.host_bytes + w.disk_bytes + w.staging_bytes, w.device_bytes))
            left.remove(found)
            if self._finish is not None:
                found = self._finish(found, self.budgets["device_bytes"])
            if not self._excess(found):
                return found
        raise ValueError(f"{self._caller}: {self._least()}")

    def _excess(self, way: Way) -> set[str]:
        """Names of the budgets that a way does not meet."""
        return {name for name, most in self.budgets.items() if getattr(way, name) > most}

    def _least(self) -> str:
        """The budgets as text: for each the least that would suffice beside the others, and the least device memory."""
        if not self.ways:
            return "nothing fits the store's tiers; raise host_bytes, give the store a path, or allow 'recompute'"
        given = " and ".join(f"{name}={int(n)}" for name, n in self.budgets.items() if n != float("inf"))
        said = [f"nothing fits {given}"]
        for name in self.budgets:
            alone = [getattr(way, name) for way in self.ways if self._excess(way) == {name}]
            said += [f"{name}={math.ceil(min(alone))} would do"] if alone else []
        least = min(self.ways, key=lambda way: way.device_bytes)
        said.append(
            f"the least on the device takes {int(least.device_bytes)} bytes, with {int(least.host_bytes)} in host "
            f"memory and {int(least.disk_bytes)} on disk ({least.describe()})"
        )
        return "; ".join([*said, "give more, a smaller batch, or more microbatches"])


def _point(way: Way) -> tuple[float, float]:
    return way.device_bytes, way.seconds
