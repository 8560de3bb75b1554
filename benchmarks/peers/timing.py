"""Time of one call as a caller sees it, and the shape of a measurement."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from device_time import DeviceTime


@dataclass(frozen=True, slots=True)
class Limits:
    """How long to measure.

    Attributes:
        target_s: time spent on the repetitions of one function.
        cut_s: a function that takes longer than this in one call is not called again.
        cell_s: an implementation that has not finished a cell by then is stopped.
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
        `ms`, of one call among many that are dispatched in a row, the median of `repeats` groups; `device`, what the
        profiler says of one call; `cut`, True where one call took so long that it was the only one. There is no
        `device` on a CPU, where a call takes more than a second, and where profiling fails.
    """
    start = time.perf_counter()
    synchronize(call())
    once = time.perf_counter() - start
    if once > limits.cut_s:
        return {"ms": once * 1e3, "device": None, "cut": True}
    count = max(1, min(200, int(limits.target_s / repeats / max(once, 1e-6))))
    found = []
    for _ in range(repeats if once * repeats < 4 * limits.target_s else 2):
        start = time.perf_counter()
        for _ in range(count):
            value = call()
        synchronize(value)
        found.append((time.perf_counter() - start) / count)
    result = {"ms": statistics.median(found) * 1e3, "device": None, "cut": False}
    if once < 1.0:
        try:
            device = profile(call, 10 if once < 0.05 else 3)
        except Exception as error:  # the profiler's failure is not the layer's
            return result | {"device_error": f"{type(error).__name__}: {str(error)[:200]}"}
        result["device"] = device and device.as_dict()
    return result
