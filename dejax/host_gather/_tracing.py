"""Questions about a trace, and how `value_and_grad` finds the rows that a loss gathers while it is traced.

Questions need jax's private names. Where a name is missing, only a readable error is lost.

While a loss runs, gathers of its tables are recorded. A table to record carries a mark in its static part,
`TableSpec.marks`. The mark is thus in jit's cache key, so that jit traces a loss again that it had traced without
recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import jax
from jax import Array

from dejax.host_gather._spec import TableSpec


def closed_over(array: Array) -> bool:
    """Whether a concrete array is used inside a function that jax compiles, where it would become a constant."""
    if isinstance(array, jax.core.Tracer):
        return False
    try:
        from jax._src.core import unsafe_am_i_under_a_jit
    except ImportError:
        return False
    return bool(unsafe_am_i_under_a_jit())


def current_trace() -> Any:
    """The innermost transformation that is being traced, for `inside`; None where jax does not tell."""
    try:
        from jax._src.core import trace_ctx
    except ImportError:
        return None
    return trace_ctx.trace


def inside(outer: Any) -> bool:
    """Whether the current trace is `outer`, or differentiation within it.

    Values can leave such a trace. They cannot leave the body of a scan, a branch of cond, or a function that vmap maps.
    """
    trace = current_trace()
    while trace is not None and trace is not outer and type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
        trace = getattr(trace, "parent_trace", None)
    return trace is None or trace is outer


# -------------------------------------------------------------------------------------------- recording

_state = threading.local()

# (number of the table, its leaf, ids, gathered rows) -> the rows to go on with.
Recorder = Callable[[int, Array, Array, Array], Array]


def _recorders() -> list[Recorder | None]:
    if not hasattr(_state, "recorders"):
        _state.recorders = []
    found: list[Recorder | None] = _state.recorders
    return found


def record(spec: TableSpec, leaf: Array, ids: Array, rows: Array) -> Array:
    """Passes a gather to the recorders that have marked its table, the outermost first."""
    recorders = _recorders()
    for level, number in spec.marks:
        recorder = recorders[level] if level < len(recorders) else None
        if recorder is not None:
            rows = recorder(number, leaf, ids, rows)
    return rows


def is_recorded(spec: TableSpec) -> bool:
    """Whether gathers of this table are being recorded."""
    recorders = _recorders()
    return any(level < len(recorders) and recorders[level] is not None for level, _ in spec.marks)


class recording:
    """A context in which `recorder` gets the gathers of marked tables. Entering gives the level of its marks.

    Args:
        recorder: the recorder.
        alone: pause the other recorders: for a trial run whose results are dropped.
    """

    def __init__(self, recorder: Recorder, *, alone: bool = False) -> None:
        self._recorder, self._alone = recorder, alone

    def __enter__(self) -> int:
        self._before = _recorders()
        others = [None] * len(self._before) if self._alone else self._before
        _state.recorders = [*others, self._recorder]
        return len(others)

    def __exit__(self, *_: object) -> None:
        _state.recorders = self._before
