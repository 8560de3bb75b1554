"""Where the state of a training step lies, chosen from measured times and sizes and budgets of memory.

Short stacks of the user's own layers are compiled and timed with all of their state on the device. Memory and time of
the whole stack follow: state that lies on the host costs its bytes over the bus, alongside the arithmetic of the
layers. Where both directions of the bus are busy, the bus has the rate that was measured so. Each array also costs two
copies on the device, and time of the thread that launches the step's work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from dejax import _native
from dejax.offload.activations import memory
from dejax.offload.activations.store import ActivationStore
from dejax.offload.plan.copy_cost import FREE, CopyCosts, copy_costs, duplex_bandwidth
from dejax.offload.plan.profile import (
    SHORT,
    Tiers,
    base_and_layer,
    count_layers,
    launched,
    measured_rows,
    part,
    state_bandwidths,
    tiers_of,
    timed,
)
from dejax.offload.plan.step_cost import NO_DRIVE, Cost, Drive, KeptGradients, Leaf, StepWay, predict
from dejax.offload.state.moments import Tier
from dejax.offload.state.stack_settings import Kept
from dejax.offload.state.stack_step import StackState, StackStep, stack_step
from dejax.offload.state.store import StateStore


@dataclass(slots=True)
class StepPlan:
    """A plan for a training step, made by `plan_step`.

    Attributes:
        chosen: the fastest way within the budgets.
        ways: every way that was considered.
        num_layers: of the stack.
        tiers: measured bandwidths, and the sizes of host memory and of the drive for activations.
        copies: measured costs of carrying state, besides the bus; all zero where XLA carries it.
        costs: measured short stacks, by number of microbatches.
        device_bytes, host_bytes, disk_bytes: the budgets.
        measured: (device bytes, seconds) of the chosen way, after `measure`.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.offload import plan_step
    >>> plan = plan_step(  # doctest: +SKIP
    ...     lambda outer, x: x * outer["scale"],
    ...     lambda w, x: x + jnp.tanh(x @ w),
    ...     lambda outer, x, batch: jnp.mean(x**2),
    ...     optax.adam(1e-3),
    ...     {"scale": jnp.ones(())},
    ...     jnp.ones((6, 128, 128)) / 128,
    ...     jnp.ones((16, 128)),
    ...     device_bytes=1 << 30,
    ... )
    >>> print(plan.table())  # doctest: +SKIP
    >>> step = plan.apply()  # doctest: +SKIP
    """

    chosen: StepWay
    ways: list[StepWay]
    num_layers: int
    tiers: Tiers
    copies: CopyCosts
    costs: Mapping[int, Cost]
    device_bytes: float
    host_bytes: float
    disk_bytes: float
    _make: Callable[..., StackStep]
    measured: tuple[float, float] | None = field(default=None)

    def apply(self) -> StackStep:
        """The step as planned."""
        return _step_of(self._make, self.chosen)

    def within(
        self,
        *,
        device_bytes: float | None = None,
        host_bytes: float | None = None,
        disk_bytes: float | None = None,
    ) -> StepPlan:
        """The plan for other budgets, by the same measurements.

        Args:
            device_bytes, host_bytes, disk_bytes: as for `plan_step`; None: as before.

        Raises:
            ValueError: nothing fits; the message gives the least that would.
        """
        device = self.device_bytes if device_bytes is None else device_bytes
        host = self.host_bytes if host_bytes is None else host_bytes
        disk = self.disk_bytes if disk_bytes is None else disk_bytes
        budgets: dict[str, Any] = {"device_bytes": device, "host_bytes": host, "disk_bytes": disk}
        return dataclasses.replace(self, chosen=_choose(self.ways, **budgets), measured=None, **budgets)

    def measure(self, state: StackState, batch: Any) -> tuple[float, float]:
        """Compiles and times the planned step; returns (device bytes, seconds), which `table` then shows.

        Args:
            state: from the planned step's `init`; it is used up.
            batch: of the step.
        """
        compiled = self.apply().jit(state).lower(state, batch).compile()
        near = sum(x.nbytes for x in jax.tree.leaves(state) if _is_near(x))
        temp = float(compiled.memory_analysis().temp_size_in_bytes)
        held = [state]

        def run() -> Any:
            held[0], loss = compiled(held[0], batch)
            return loss

        seconds = timed(run)
        self.measured = (near + temp + self.chosen.staging_bytes, seconds)
        return self.measured

    def table(self) -> str:
        """A Markdown table: the fastest way for each choice of places, the chosen one, and its measured values.

        A step's time has two parts besides arithmetic: it waits for the bus or the drive, and the device copies between
        staging memory and XLA's buffers. A step takes at least as long as the thread that launches its work.
        """
        lines = [
            "| parameters, moments on the host | on disk | inputs | parts | device, GB | host, disk, GB | step, ms | "
            "waiting, copying, ms | launching, ms |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for way in self.ways:
            if way is not self.chosen and way not in self.best():
                continue
            mark = "**" if way is self.chosen else ""
            counts = [
                " and ".join(str(sum(path.startswith(kind) for path in some)) for kind in ("params", "moments"))
                for some in (way.far, way.on_disk)
            ]
            lines.append(
                f"| {mark}{counts[0]} arrays{mark} | {counts[1]} arrays | {way.activations} | {way.microbatches} | "
                f"{way.device_bytes / 1e9:.3f} | {way.host_bytes / 1e9:.3f}, {way.disk_bytes / 1e9:.3f} | "
                f"{way.seconds * 1e3:.2f} | {way.stall_seconds * 1e3:.2f}, {way.copy_seconds * 1e3:.2f} | "
                f"{way.launch_seconds * 1e3:.2f} |"
            )
        lines += ["", "| | device, GiB | step, ms | | |", "| --- | --- | --- | --- | --- |"]
        lines.append(f"| predicted | {self.chosen.device_bytes / 2**30:.3f} | {self.chosen.seconds * 1e3:.2f} | | |")
        return "\n".join([*lines, *measured_rows((self.chosen.device_bytes, self.chosen.seconds), self.measured)])

    def best(self) -> list[StepWay]:
        """The ways that no other beats in both device memory and time, sorted by memory."""
        found: list[StepWay] = []
        for way in sorted(self.ways, key=lambda way: (way.device_bytes, way.seconds)):
            if not found or way.seconds < found[-1].seconds:
                found.append(way)
        return found


def plan_step(
    embed: Callable[[Any, Any], Any],
    body: Callable[[Any, Any], Any],
    head: Callable[[Any, Any, Any], Any],
    tx: Any,
    outer: Any,
    layers: Any,
    batch: Any,
    *,
    device_bytes: float | None = None,
    host_bytes: float | None = None,
    microbatches: Sequence[int] = (1,),
    store: ActivationStore | None = None,
    min_bytes: int = 1 << 16,
    streams: bool | None = None,
    clip_norm: float | None = None,
    gradients: Kept | None = None,
    frozen: Callable[[str, Any], bool] | None = None,
    path: Any = None,
    disk_bytes: float | None = None,
) -> StepPlan:
    """Decides where parameters, moments and activations of a `stack_step` lie, and in how many parts a batch runs.

    It measures the bus, the store's drive, and two short stacks for each number of microbatches. It also measures what
    an array that travels costs besides its time on the bus: copies on the device, and time of the thread that launches
    a step's work. It predicts the rest. Moments leave the device before parameters, because parameters travel twice in
    a step. Large arrays leave before small ones. The layers' inputs leave if computation hides their time over the bus.
    With a `path`, moments and then parameters may go on to a drive.

    Args:
        embed, body, head, tx: as for `stack_step`.
        outer: parameters outside of the stack.
        layers: pytree of arrays [layers, ...], or of `jax.ShapeDtypeStruct`; at least four layers.
        batch: of one step.
        device_bytes: budget for state, temporaries and staging memory. None: nine tenths of the device's memory.
        host_bytes: budget for state and activations in host memory. None: half of the available memory.
        disk_bytes: budget for the files of state on a drive, which hold two versions, and of activations. None: nine
            tenths of the free space at `path`.
        microbatches: the values of `microbatches` to choose from.
        store: where activations go, if they leave the device. None: the current store.
        min_bytes: arrays with fewer bytes per layer stay on the device.
        streams, clip_norm, gradients, frozen, path: as for `stack_step`.

    Returns:
        The plan: `step = plan.apply()`, `print(plan.table())`.

    Raises:
        ValueError: the stack has fewer than four layers, or nothing fits; the message gives the least that would.
    """
    num_layers = count_layers(layers, "plan_step")

    def make(**how: Any) -> StackStep:
        given = {"store": store, "min_bytes": min_bytes, "streams": streams, "frozen": frozen, "path": path}
        return stack_step(embed, body, head, tx, clip_norm=clip_norm, gradients=gradients, **given | how)  # type: ignore[arg-type]

    device_bytes = _device_budget() if device_bytes is None else device_bytes
    host_bytes = memory.available_memory() / 2 if host_bytes is None else host_bytes
    if disk_bytes is None:
        disk_bytes = float("inf") if path is None else _free_bytes(path)
    tiers, copies = dataclasses.replace(tiers_of(store), host_bytes=host_bytes), FREE
    if jax.default_backend() == "gpu" and _native.unavailable_reason() is None:
        tiers = tiers.with_duplex(duplex_bandwidth())
        copies = FREE if streams is False else copy_costs()
    drive = NO_DRIVE if path is None else Drive((), *state_bandwidths(path))
    step = make()
    leaves, kept = _leaves(step, outer, layers), _kept(step, outer, layers)
    total = sum(leaf.nbytes for leaf in leaves)
    outside = step.split(outer, layers)[0].trained(jax.tree.leaves(outer))
    fixed = sum(_nbytes(x) for x in jax.tree.leaves((outer, jax.eval_shape(tx.init, outside), batch)))
    movable = sorted(
        (leaf for leaf in leaves if leaf.nbytes >= max(1, min_bytes) * num_layers),
        key=lambda leaf: (leaf.is_param, -leaf.nbytes),
    )
    ways = []
    costs = {count: _cost(make, outer, layers, batch, count) for count in microbatches}
    for count, cost in costs.items():
        for (on_disk, moved), activations in itertools.product(_cuts(len(movable), path), ("device", "host")):
            some = dataclasses.replace(drive, leaves=tuple(movable[:on_disk]))
            far = movable[on_disk:moved]
            way = predict(far, total + fixed, cost, num_layers, count, activations, tiers, kept, some, copies)  # type: ignore[arg-type]
            ways += [] if way is None else [way]
    budgets: dict[str, Any] = {"device_bytes": device_bytes, "host_bytes": host_bytes, "disk_bytes": disk_bytes}
    return StepPlan(_choose(ways, **budgets), ways, num_layers, tiers, copies, costs, **budgets, _make=make)


def _excess(way: StepWay, budgets: dict[str, float]) -> set[str]:
    """Names of the budgets that a way does not meet."""
    return {name for name, most in budgets.items() if getattr(way, name) > most}


def _least(ways: Sequence[StepWay], budgets: dict[str, float]) -> str:
    """The least that fits: of each budget, with the others as they are, and of the device's memory."""
    if not ways:
        return "the tiers are too small for any way"
    said = []
    for name in budgets:
        alone = [getattr(way, name) for way in ways if _excess(way, budgets) == {name}]
        said += [f"{name}={math.ceil(min(alone))} would do"] if alone else []
    least = min(ways, key=lambda way: way.device_bytes)
    said.append(
        f"the least on the device takes {int(least.device_bytes)} bytes, with {int(least.host_bytes)} in host memory "
        f"and {int(least.disk_bytes)} on disk"
    )
    return "; ".join(said)


def _cuts(count: int, path: Any) -> list[tuple[int, int]]:
    """(arrays on the drive, these and those in host memory), of arrays in the order in which they leave the device."""
    return [(k, n) for n in range(count + 1) for k in range(n + 1 if path is not None else 1)]


def _choose(ways: Sequence[StepWay], **budgets: float) -> StepWay:
    """The fastest way within `device_bytes`, `host_bytes` and `disk_bytes`."""
    fitting = [way for way in ways if not _excess(way, budgets)]
    if not fitting:
        given = " and ".join(f"{name}={int(n)}" for name, n in budgets.items() if n != float("inf"))
        raise ValueError(
            f"plan_step: nothing fits {given}; {_least(ways, budgets)}; give more, a smaller batch, or more "
            "microbatches"
        )
    fastest = min(way.seconds for way in fitting)
    # Measured times differ by half a percent between runs: among such ways, move as little as possible.
    near = [way for way in fitting if way.seconds <= 1.005 * fastest]
    return min(near, key=lambda way: (way.host_bytes + way.disk_bytes, way.device_bytes))


def _cost(make: Callable[..., StackStep], outer: Any, layers: Any, batch: Any, count: int) -> Cost:
    """Two short stacks, all of their state on the device, and gradients that are kept."""
    step = make(params="device", moments="device", microbatches=count)
    if step.gradients == "host":
        step = dataclasses.replace(step, gradients="device")
    temps, seconds, launch = [], [], []
    for length in SHORT:
        state = step.init(jax.tree.map(_copied, outer), _some_layers(layers, length))
        compiled = step.jit(state).lower(state, batch).compile()
        temps.append(float(compiled.memory_analysis().temp_size_in_bytes))
        held = [state]

        def run(compiled: Any = compiled, held: list[Any] = held) -> Any:
            held[0], loss = compiled(held[0], batch)
            return loss

        took, returned = launched(run)
        seconds.append(took)
        launch.append(returned)
    x = jax.eval_shape(step.embed, outer, batch)
    input_bytes = sum(_nbytes(leaf) for leaf in jax.tree.leaves(x))
    layer_bytes = max(0.0, (temps[1] - temps[0]) / (SHORT[1] - SHORT[0]) - input_bytes)
    base_bytes = max(0.0, temps[0] - SHORT[0] * (layer_bytes + input_bytes))
    base_seconds, layer_seconds = base_and_layer(seconds)
    base_launch, layer_launch = base_and_layer(launch)
    return Cost(
        base_bytes,
        layer_bytes,
        base_seconds,
        layer_seconds,
        layer_seconds / 4,
        input_bytes,
        base_launch,
        layer_launch,
    )


def _leaves(step: StackStep, outer: Any, layers: Any) -> list[Leaf]:
    found = []
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layers)
    split = step.split(outer, layers)[1]
    moments = jax.eval_shape(jax.vmap(step.tx.init), split.trained(jax.tree.leaves(shapes)))
    for (path, leaf), frozen in zip(jax.tree_util.tree_leaves_with_path(shapes), split.frozen, strict=True):
        found.append(Leaf("params" + jax.tree_util.keystr(path), _nbytes(leaf), True, frozen))
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        found.append(Leaf("moments" + jax.tree_util.keystr(path), _nbytes(leaf), False, False))
    return found


def _kept(step: StackStep, outer: Any, layers: Any) -> KeptGradients:
    if step.gradients != "host":
        return KeptGradients(step.gradients == "freed", 0)
    trained = step.split(outer, layers)[1].trained(jax.tree.leaves(layers))
    places = step.places("host", trained)
    far = [_nbytes(x) for x, at in zip(jax.tree.leaves(trained), places, strict=True) if at == "host"]
    return KeptGradients(False, sum(far), len(far))


def _step_of(make: Callable[..., StackStep], way: StepWay) -> StackStep:
    def where(kind: str) -> Callable[[str, Any], Tier]:
        def place(path: str, _: Any) -> Tier:
            return "disk" if kind + path in way.on_disk else "host" if kind + path in way.far else "device"

        return place

    return make(
        params=where("params"),
        moments=where("moments"),
        activations=way.activations,
        microbatches=way.microbatches,
    )


def _some_layers(layers: Any, length: int) -> Any:
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(layers)):
        return jax.tree.map(lambda x: jax.numpy.full((length, *x.shape[1:]), 0.01, x.dtype), layers)
    return jax.tree.map(lambda x: jax.device_put(x, jax.memory.Space.Device), part(layers, 0, length))


def _copied(x: Any) -> Any:
    """The step is given its state for good."""
    return jax.numpy.full(x.shape, 0.01, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jax.numpy.copy(x)


def _free_bytes(path: Any) -> float:
    paths = path.paths if isinstance(path, StateStore) else [path] if isinstance(path, (str, os.PathLike)) else path
    return 0.9 * sum(shutil.disk_usage(place).free for place in paths)


def _device_budget() -> float:
    stats = jax.local_devices()[0].memory_stats() or {}
    return 0.9 * float(stats.get("bytes_limit", memory.available_memory()))


def _is_near(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) != jax.memory.Space.Host


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
