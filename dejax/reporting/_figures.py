"""The figures of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejax._compiling import CompiledFunction
from dejax.reporting._kernels import Kernel
from dejax.reporting._liveness import Timeline
from dejax.reporting._owners import Leaf
from dejax.reporting._remedies import Remedy
from dejax.reporting._traffic import Traffic


@dataclass(frozen=True, slots=True)
class Figures:
    """What a step costs: the fields of `Report`, whose docstring says what each one is.

    The pages in `_text`, `_html` and `_picture` read them; `Report` stands above these pages.
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
    compiled: Sequence[CompiledFunction]
