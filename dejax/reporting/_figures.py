"""The figures of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejax.reporting._kernels import Kernel
from dejax.reporting._liveness import Timeline
from dejax.reporting._owners import Leaf
from dejax.reporting._remedies import Remedy
from dejax.reporting._traffic import Traffic


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step costs.

    Attributes:
        name: of the step.
        device: name of the device, and versions.
        backend: "gpu" or "cpu".
        how: how the figures of kernels were found.
        leaves: the arrays of the arguments.
        timeline: bytes on the device by owner, in the order of execution.
        memory: XLA's own figures, bytes by name.
        on_host: bytes of the arguments in host memory, by owner.
        kernels: by time.
        flops: of one call, counted by XLA; 0 where it does not tell.
        traffic: bytes over the bus and to the disk.
        waits: seconds of one call, by reason.
        idle: share of the time in which the device did nothing; None where it was not measured.
        seconds: wall time of one call; None where the step was not run.
        peak_bytes: the allocator's peak since the process began; None where the device does not tell.
        remedies: what to try, at most three.
    """

    name: str
    device: str
    backend: str
    how: str
    leaves: Sequence[Leaf]
    timeline: Timeline
    memory: Mapping[str, int]
    on_host: Mapping[str, int]
    kernels: Sequence[Kernel]
    flops: float
    traffic: Sequence[Traffic]
    waits: Mapping[str, float]
    idle: float | None
    seconds: float | None
    peak_bytes: int | None
    remedies: Sequence[Remedy]
