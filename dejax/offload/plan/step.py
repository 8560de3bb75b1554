"""Where the state of a training step lies, chosen from measured times and sizes and budgets of memory.

Short stacks of the user's own layers are compiled and timed with all of their state on the device. Memory and time of
the whole stack follow: state that lies on the host costs its bytes over the bus, alongside the arithmetic of the
layers, and two copies on the device, between staging memory and XLA's buffers. Where both directions of the bus are
busy, the bus has the rate that was measured so.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from dejax import _native
from dejax._platform import default_device, on_gpu
from dejax.offload.activations import memory
from dejax.offload.activations.store import ActivationStore
from dejax.offload.plan.measure import (
    LayerCost,
    Tiers,
    count_layers,
    device_bandwidth,
    duplex_bandwidth,
    short_stacks,
    some_layers,
    state_bandwidths,
    tiers_of,
    timed,
)
from dejax.offload.plan.result import Phase, Plan, Way, place
from dejax.offload.state.placements import Tier
from dejax.offload.state.stack_settings import Kept
from dejax.offload.state.stack_step import StackStep, stack_step
from dejax.offload.state.store import StateStore

_STAGED_LAYERS = 4  # two on their way to the device and two on their way back


@dataclass(frozen=True, slots=True)
class StateArray:
    """An array of a step's state, of all layers."""

    path: str
    nbytes: int
    is_param: bool
    is_frozen: bool = False


@dataclass(frozen=True, slots=True)
class StepFacts:
    """Facts about a step that its ways have in common.

    Attributes:
        num_layers: the number of layers of the stack.
        state_bytes: the bytes of parameters, moments and the batch.
        tiers: the tiers for activations.
        write_bandwidth, read_bandwidth: bytes a second of the drive for state.
        freed: whether backward frees gradients; else they are kept.
        host_gradients: bytes of gradients that are kept in host memory.
        copy_bandwidth: bytes a second that the device reads and writes in a copy; inf: nothing is copied.
    """

    num_layers: int
    state_bytes: float
    tiers: Tiers
    write_bandwidth: float = float("inf")
    read_bandwidth: float = float("inf")
    freed: bool = True
    host_gradients: int = 0
    copy_bandwidth: float = float("inf")


def predict(
    host: Sequence[StateArray],
    disk: Sequence[StateArray],
    inputs: Tier,
    cost: LayerCost,
    facts: StepFacts,
    choices: dict[str, Any],
) -> Way | None:
    """Memory and time of a step with so much of its state in host memory and on a drive; None where that is too small.

    Args:
        host, disk: the arrays that lie there; all others lie on the device.
        inputs: where the layers' inputs lie.
        cost: the cost of a layer with all state on the device; its stored_bytes are those of its input.
        facts: the facts of the step.
        choices: for the result.
    """
    layers, away, kept = facts.num_layers, [*host, *disk], facts.host_gradients
    moved, on_drive = _bytes(away), _bytes(disk)
    params, back = _bytes(a for a in away if a.is_param), _bytes(a for a in away if not a.is_frozen)
    # What is on its way to and from the drive: two layers that are read, and as much as the staging memory to write.
    held = moved - on_drive + (2 + _STAGED_LAYERS) * on_drive / layers
    stored = layers * cost.stored_bytes if inputs == "host" else 0
    ring = min(stored, 2 * cost.stored_bytes)
    # One drive reads and writes in turn.
    read_params = _bytes(a for a in disk if a.is_param) / facts.read_bandwidth
    drive = on_drive / facts.read_bandwidth + _bytes(a for a in disk if not a.is_frozen) / facts.write_bandwidth

    def phase(seconds: float, into: float, out: float, on_drive: float, stored: float = 0) -> Phase:
        return Phase(layers * seconds + 2 * (into + out + stored) / facts.copy_bandwidth, into, out, on_drive)

    forward = phase(cost.forward_seconds, params, 0.0, read_params, stored)
    backward_seconds = max(0.0, cost.layer_seconds - cost.forward_seconds)
    if facts.freed:
        backward, update = phase(backward_seconds, moved, back, drive, stored), Phase(0.0)
    else:  # the update comes after backward, and next to no arithmetic hides its copies
        backward = phase(backward_seconds, params, kept, read_params, stored)
        update = phase(0.0, moved + kept, back, drive)
    left = dataclasses.replace(facts.tiers, host_bytes=max(0.0, facts.tiers.host_bytes - held - kept))
    where = place(stored, ring, forward, backward, left)
    if where is None:
        return None
    phases = (forward, backward, update)
    stall = where.stall_seconds + update.stall_seconds(facts.tiers)
    stall += sum(_ends(each, facts.tiers) for each in phases) / layers
    kept_inputs = 0 if inputs == "host" else layers * cost.stored_bytes
    staging = ring + _STAGED_LAYERS * (moved + kept) / layers
    return Way(
        choices,
        facts.state_bytes - moved - kept + cost.base_bytes + layers * cost.layer_bytes + kept_inputs + staging,
        cost.base_seconds + sum(each.seconds for each in phases) + stall,
        stall,
        staging,
        held + kept + where.host_bytes,
        where.disk_bytes + 2 * on_drive,
    )


def _bytes(arrays: Any) -> int:
    return sum(array.nbytes for array in arrays)


def _ends(phase: Phase, tiers: Tiers) -> float:
    """The time of a loop beyond the time of its slowest part for all layers.

    The first layer waits for its rows, and the loop ends when the last layer's rows are back. So of the ways in and out
    and the arithmetic, all but the slowest add the time of one layer.
    """
    parts = phase.seconds, phase.in_bytes / tiers.in_bandwidth, phase.out_bytes / tiers.out_bandwidth
    return sum(parts) - max(parts)


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
) -> Plan:
    """Decides where the state and activations of a `stack_step` lie, and the number of its microbatches.

    It measures the bus, the store's drive, and two short stacks for each number of microbatches, and predicts the time
    and memory of all placements. Optimizer state leaves the device before parameters, because parameters travel twice
    in a step, and large arrays leave before small ones. The inputs of the layers leave if computation hides their time
    on the bus. With a `path`, optimizer state and then parameters may move on to a drive.

    Args:
        embed, body, head, tx: as for `stack_step`.
        outer: parameters outside of the stack.
        layers: parameters of the stack, pytree of arrays or `jax.ShapeDtypeStruct`s [layers, ...]; at least four
            layers.
        batch: the batch of one step.
        device_bytes: device memory for state, temporaries and staging. None means nine tenths of the device's memory.
        host_bytes: host memory for state and activations. None means half of the available memory.
        disk_bytes: space on a drive for activations and for the files of state, which hold two versions. None means
            nine tenths of the free space at `path`.
        microbatches: the numbers of microbatches to consider.
        store: the `ActivationStore` for activations that leave the device. None means the current store.
        min_bytes: arrays with fewer bytes per layer stay on the device.
        streams, clip_norm, gradients, frozen, path: as for `stack_step`.

    Returns:
        The plan: `step = plan.apply()` makes the step, and `print(plan.table())` shows the placements.

    Raises:
        ValueError: the stack has fewer than four layers, or nothing fits; the message gives the smallest budget that
            would.
    """
    num_layers = count_layers(layers, "plan_step")

    def make(**how: Any) -> StackStep:
        given = {"store": store, "min_bytes": min_bytes, "streams": streams, "frozen": frozen, "path": path}
        return stack_step(embed, body, head, tx, clip_norm=clip_norm, gradients=gradients, **given | how)  # type: ignore[arg-type]

    step = make()
    budgets = {
        "device_bytes": _device_budget() if device_bytes is None else device_bytes,
        "host_bytes": memory.available_memory() / 2 if host_bytes is None else host_bytes,
        "disk_bytes": (math.inf if path is None else _free_bytes(path)) if disk_bytes is None else disk_bytes,
    }
    arrays = _arrays(step, outer, layers)
    facts = _facts(step, outer, layers, batch, arrays, store, path, budgets["host_bytes"])
    movable = [array for array in arrays if array.nbytes >= max(1, min_bytes) * num_layers]
    costs = {count: _cost(make, outer, layers, batch, count) for count in microbatches}

    def apply(way: Way) -> StackStep:
        return _step_of(make, way)

    return Plan(
        _ways(arrays, movable, costs, facts, drive=path is not None),
        budgets,
        facts.tiers,
        costs,
        {array.path: array.nbytes for array in arrays},
        "plan_step",
        apply,
        lambda way, state, batch: _measure(apply(way), state, batch),
    )


def _facts(
    step: StackStep,
    outer: Any,
    layers: Any,
    batch: Any,
    arrays: Sequence[StateArray],
    store: ActivationStore | None,
    path: Any,
    host_bytes: float,
) -> StepFacts:
    """Measures the rates that predictions use, and counts the bytes whose place the plan does not choose."""
    tiers, copies = dataclasses.replace(tiers_of(store), host_bytes=host_bytes), math.inf
    if on_gpu() and _native.unavailable_reason() is None:
        tiers = tiers.with_duplex(duplex_bandwidth())
        copies = math.inf if step.streams is False else device_bandwidth()
    outside = step.split(outer, layers)[0].trained(jax.tree.leaves(outer))
    fixed = sum(_nbytes(x) for x in jax.tree.leaves((outer, jax.eval_shape(step.tx.init, outside), batch)))
    gradients = 0
    if step.gradients == "host":
        trained = step.split(outer, layers)[1].trained(jax.tree.leaves(layers))
        places = zip(jax.tree.leaves(trained), step.places("host", trained), strict=True)
        gradients = sum(_nbytes(x) for x, at in places if at == "host")
    return StepFacts(
        count_layers(layers, "plan_step"),
        _bytes(arrays) + fixed,
        tiers,
        *((math.inf, math.inf) if path is None else state_bandwidths(path)),
        freed=step.gradients == "freed",
        host_gradients=gradients,
        copy_bandwidth=copies,
    )


def _ways(
    arrays: Sequence[StateArray],
    movable: Sequence[StateArray],
    costs: Mapping[int, LayerCost],
    facts: StepFacts,
    *,
    drive: bool,
) -> list[Way]:
    """Arrays leave the device in one order, and go on to the drive in that order."""
    leaving = sorted(movable, key=lambda array: (array.is_param, -array.nbytes))
    tiers: tuple[Tier, ...] = ("device", "host")
    ways = []
    for (count, cost), moved, inputs in itertools.product(costs.items(), range(len(leaving) + 1), tiers):
        for on_disk in range(moved + 1 if drive else 1):
            disk, host = leaving[:on_disk], leaving[on_disk:moved]
            choices: dict[str, Any] = {array.path: "device" for array in arrays}
            choices |= {array.path: "disk" for array in disk} | {array.path: "host" for array in host}
            way = predict(host, disk, inputs, cost, facts, choices | {"inputs": inputs, "microbatches": count})
            ways += [] if way is None else [way]
    return ways


def _cost(make: Callable[..., StackStep], outer: Any, layers: Any, batch: Any, count: int) -> LayerCost:
    """Measures two short stacks whose state is all on the device and whose gradients are kept.

    The cost's bytes are without the layers' inputs, and its stored_bytes are those of an input.
    """
    step = make(params="device", moments="device", microbatches=count)
    if step.gradients == "host":
        step = dataclasses.replace(step, gradients="device")
    input_bytes = sum(_nbytes(x) for x in jax.tree.leaves(jax.eval_shape(step.embed, outer, batch)))

    def measured(length: int) -> tuple[float, float]:
        state = step.init(jax.tree.map(_copied, outer), some_layers(layers, length))
        compiled = step.jit(state).lower(state, batch).compile()
        temp = float(compiled.memory_analysis().temp_size_in_bytes)
        return temp - length * input_bytes, timed(_running(compiled, state, batch))

    cost = short_stacks(measured)
    return dataclasses.replace(
        cost,
        base_bytes=max(0.0, cost.base_bytes),
        layer_bytes=max(0.0, cost.layer_bytes),
        forward_seconds=cost.layer_seconds / 4,  # backward computes a layer again
        stored_bytes=input_bytes,
    )


def _running(compiled: Any, state: Any, batch: Any) -> Callable[[], Any]:
    """A function that runs a step on the state that the previous step returned."""
    held = [state]

    def run() -> Any:
        held[0], loss = compiled(held[0], batch)
        return loss

    return run


def _measure(step: StackStep, state: Any, batch: Any) -> tuple[float, Callable[[], Any]]:
    compiled = step.jit(state).lower(state, batch).compile()
    held = sum(x.nbytes for x in jax.tree.leaves(state) if _is_on_device(x))
    return held + float(compiled.memory_analysis().temp_size_in_bytes), _running(compiled, state, batch)


def _arrays(step: StackStep, outer: Any, layers: Any) -> list[StateArray]:
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layers)
    split = step.split(outer, layers)[1]
    moments = jax.eval_shape(jax.vmap(step.tx.init), split.trained(jax.tree.leaves(shapes)))
    params = zip(jax.tree_util.tree_leaves_with_path(shapes), split.frozen, strict=True)
    found = [StateArray("params" + jax.tree_util.keystr(at), _nbytes(x), True, frozen) for (at, x), frozen in params]
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        found.append(StateArray("moments" + jax.tree_util.keystr(path), _nbytes(leaf), False))
    return found


def _step_of(make: Callable[..., StackStep], way: Way) -> StackStep:
    def where(kind: str) -> Callable[[str, Any], Tier]:
        return lambda path, _: way.choices[kind + path]  # type: ignore[no-any-return]

    return make(
        params=where("params"),
        moments=where("moments"),
        activations=way.choices["inputs"],
        microbatches=way.choices["microbatches"],
    )


def _copied(x: Any) -> Any:
    """An array that a step may donate: a copy, or arbitrary values for a shape."""
    return jax.numpy.full(x.shape, 0.01, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jax.numpy.copy(x)


def _free_bytes(path: Any) -> float:
    paths = path.paths if isinstance(path, StateStore) else [path] if isinstance(path, (str, os.PathLike)) else path
    return 0.9 * sum(shutil.disk_usage(place).free for place in paths)


def _device_budget() -> float:
    stats = default_device().memory_stats() or {}
    return 0.9 * float(stats.get("bytes_limit", memory.available_memory()))


def _is_on_device(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) != jax.memory.Space.Host


def _nbytes(x: Any) -> int:
    return math.prod(x.shape) * np.dtype(x.dtype).itemsize
