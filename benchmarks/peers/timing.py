"""Time of one call as a caller sees it, and the shape of a measurement."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.clock import rounds
from benchmarks.device_time import DeviceTime


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a measurement.

    Attributes:
        target_s: time to spend on the repetitions of one function.
        cut_s: a function that takes longer than this in one call is not called again.
        cell_s: an implementation is stopped if a cell takes longer than this.
    """

    target_s: float = 0.2
    cut_s: float = 5.0
    cell_s: float = 120.0


def measure(
    call: Callable[[], Any],
    synchronize: Callable[[Any], Any],
    profile: Callable[[Callable[[], Any], int], DeviceTime | None],
    limits: Limits,
    repeats: int = 5,
) -> dict[str, Any]:
    """Times a function that has been called once already.

    Returns:
        `ms`: the time of one call among many that are dispatched in a row, the median of `repeats` groups. `device`:
        the profiler's time of one call; None on a CPU, for calls of more than a second, and if profiling fails. `cut`:
        True if one call took so long that it was the only one.
    """
    once = rounds(call, warm_up=0, wait=synchronize)[0]
    if once > limits.cut_s:
        return {"ms": once * 1e3, "device": None, "cut": True}
    count = max(1, min(200, int(limits.target_s / repeats / max(once, 1e-6))))
    fewest = repeats if once * repeats < 4 * limits.target_s else 2
    found = rounds(call, count, fewest=fewest, warm_up=0, wait=synchronize)
    result = {"ms": statistics.median(found) * 1e3, "device": None, "cut": False}
    if once < 1.0:
        try:
            device = profile(call, 10 if once < 0.05 else 3)
        except Exception as error:  # a failure of the profiler is no failure of the layer
            return result | {"device_error": f"{type(error).__name__}: {str(error)[:200]}"}
        result["device"] = device and device.as_dict()
    return result
