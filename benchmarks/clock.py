"""The time of a call as its caller sees it. All benchmarks time calls with this loop, also those without jax."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any


def rounds(
    call: Callable[[], Any],
    calls: int = 1,
    *,
    fewest: int = 1,
    seconds: float = 0.0,
    warm_up: int = 1,
    wait: Callable[[Any], Any] | None = None,
) -> list[float]:
    """Seconds of one call, for each round. The calls of a round are dispatched in a row and waited for once.

    Args:
        call: what is timed.
        calls: calls of a round.
        fewest: rounds at least.
        seconds: more rounds begin until this much time has passed.
        warm_up: calls before the first round. Each is waited for.
        wait: waits for the result of a call; None for `jax.block_until_ready`.
    """
    if wait is None:
        from jax import block_until_ready as wait

    for _ in range(warm_up):
        wait(call())
    found: list[float] = []
    end = time.perf_counter() + seconds
    while len(found) < fewest or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        found.append((time.perf_counter() - begin) / calls)
    return found


def milliseconds(call: Callable[[], Any], calls: int, turns: int = 5) -> float:
    """The median over some turns of the time of a call, ms; the calls of a turn are not waited for one by one."""
    return statistics.median(rounds(call, calls, fewest=turns)) * 1e3
