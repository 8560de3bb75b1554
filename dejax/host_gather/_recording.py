"""How `value_and_grad` finds the rows that a loss gathers: while the loss runs, gathers of its tables are recorded.

A table to record carries a mark in its static part, `TableSpec.marks`. The mark is thus in jit's cache key, so that jit
traces a loss again that it had traced without recording.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from jax import Array

from dejax.host_gather._spec import TableSpec

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
