"""Runs a step on copies of what it may change, and records what the device did."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from dejax._platform import default_device, on_gpu, platform
from dejax.host_gather.tables.table import LocalTable


@dataclass(frozen=True, slots=True)
class Event:
    """What the profiler saw of one kernel, copy or XLA operator.

    Attributes:
        name: the name of the kernel, or on the CPU of the HLO instruction.
        instruction: the HLO instruction, where the profiler says it.
        start_ns, duration_ns: on the device's clock.
    """

    name: str
    instruction: str
    start_ns: float
    duration_ns: float


@dataclass(frozen=True, slots=True)
class Measured:
    """What was measured of a step.

    Attributes:
        seconds: wall time of one call, the median of all.
        calls: how many calls were timed, and how many were profiled.
        events: the events of all profiled calls.
        first_seconds: wall time of the first call after compilation.
        peak_bytes: the allocator's peak since the process began, where the device tells.
    """

    seconds: float
    calls: int
    events: Sequence[Event]
    first_seconds: float
    peak_bytes: int | None


def copies(tree: Any, donated: Sequence[bool]) -> Any:
    """The arguments with copies of what a step may change: donated arrays, and modules of nnx, which steps update."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and _has_modules(tree, nnx):
        graph, state = nnx.split(tree)
        return nnx.merge(graph, jax.tree.map(_copied, state))
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_table)
    if any(donated):
        leaves = [leaf if _is_table(leaf) else jax.tree.map(_copied, leaf) for leaf in leaves]
    return jax.tree.unflatten(structure, leaves)


def _has_modules(tree: Any, nnx: Any) -> bool:
    is_node = lambda node: isinstance(node, (nnx.Module, nnx.Variable, nnx.Optimizer))  # noqa: E731
    return any(map(is_node, jax.tree.leaves(tree, is_leaf=is_node)))


def _is_table(value: Any) -> bool:
    return isinstance(value, LocalTable)


def _copied(leaf: Any) -> Any:
    return leaf.copy() if isinstance(leaf, jax.Array) else leaf


def why_not_run(tree: Any, donated: Sequence[bool]) -> str:
    """Why a step must not be run by the report; "" where it may."""
    tables = [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_table) if _is_table(leaf)]
    if tables and any(donated):
        return "it takes a table and donates arguments, so that a call would change the table itself"
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree)):
        return "its arguments are shapes"
    return ""


def measure(call: Callable[[Any], Any], arguments: Callable[[], Any], calls: int) -> Measured:
    """Times and profiles `call(arguments())`.

    Args:
        call: the compiled step.
        arguments: makes arguments for one call.
        calls: how often to run it for the times, and again for the profile.
    """
    seconds = []
    for _ in range(calls + 1):
        given = jax.block_until_ready(arguments())
        began = time.perf_counter()
        jax.block_until_ready(call(given))
        seconds.append(time.perf_counter() - began)
    given = [jax.block_until_ready(arguments()) for _ in range(calls)]
    events = record(lambda: [jax.block_until_ready(call(each)) for each in given])
    stats = default_device().memory_stats() or {}
    return Measured(
        statistics.median(seconds[1:]), calls, events, seconds[0], stats.get("peak_bytes_in_use") if stats else None
    )


def record(run: Callable[[], Any]) -> list[Event]:
    """Calls `run` under jax's profiler and returns the events; none where another profile is being taken."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 2 if platform() == "cpu" else 1
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError:  # only one profiler can be at work
            run()
            return []
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        return [event for path in Path(folder).rglob("*.xplane.pb") for event in _events(path)]


def _events(path: Path) -> list[Event]:
    """The events of a profile: those of the GPU's streams, or without a GPU the instructions that the CPU ran."""
    found: list[Event] = []
    of_gpu: list[Event] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # jaxlib's statistics of events
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            gpu = plane.name.startswith("/device:GPU")
            if not gpu and plane.name != "/host:CPU":
                continue
            for line in plane.lines:
                if gpu and not line.name.startswith("Stream"):
                    continue  # other lines repeat the kernels
                for event in line.events:
                    instruction = str(dict(event.stats).get("hlo_op", ""))
                    if gpu or instruction:
                        kept = Event(event.name, instruction, event.start_ns, event.duration_ns)
                        (of_gpu if gpu else found).append(kept)
    return of_gpu or ([] if on_gpu() else found)
