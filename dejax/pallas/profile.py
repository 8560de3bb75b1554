"""What the GPU did: the kernels, copies and fills that jax's profiler recorded while a function ran."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax


@dataclass(frozen=True, slots=True)
class Record:
    """One kernel, copy or fill on the device."""

    name: str
    start_ns: float
    duration_ns: float
    details: str = ""
    """The registers, shared memory, grid and block of a kernel, as the profiler writes them."""
    device: str = ""
    """The name of the device, as the profiler writes it."""


def record(run: Callable[[], Any]) -> list[Record]:
    """Calls `run`, which must wait for what it starts, and gives what the device did; nothing where there is no GPU.

    Only one profiler can be at work in a process. XLA launches kernels one by one while it is profiled, and not as CUDA
    graphs, unless `XLA_FLAGS` has `--xla_enable_command_buffers_during_profiling=true`.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # tracing Python would slow the dispatch between kernels
    options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        return [
            Record(
                event.name,
                event.start_ns,
                event.duration_ns,
                str(dict(event.stats).get("kernel_details", "")),
                plane.name,
            )
            for path in Path(folder).rglob("*.xplane.pb")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes
            if plane.name.startswith("/device:GPU")
            for line in plane.lines
            if line.name.startswith("Stream")  # other lines repeat the kernels by operation or module
            for event in line.events
        ]
