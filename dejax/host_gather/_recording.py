"""How `value_and_grad` finds the rows that a loss gathers: while it runs, each gather of its tables is noted.

Which tables are noted is written in their static part, `TableSpec.marks`. So it belongs to the key by which jit keeps
what it has traced: a loss that was compiled before, and noted nothing then, is traced again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jax import Array

_state = threading.local()

# Called with the table's number, the table, the ids and the rows of a gather; gives the rows to go on with.
Recorder = Callable[[int, Any, Array, Array], Array]


def _recorders() -> list[Recorder | None]:
    if not hasattr(_state, "recorders"):
        _state.recorders = []
    found: list[Recorder | None] = _state.recorders
    return found


def record(table: Any, ids: Array, rows: Array) -> Array:
    """Tells the recorders that have marked the table of a gather, the outermost first."""
    recorders = _recorders()
    for level, number in table._spec.marks:
        recorder = recorders[level] if level < len(recorders) else None
        if recorder is not None:
            rows = recorder(number, table, ids, rows)
    return rows


def recorded(table: Any) -> bool:
    """Whether gathers of this table are noted now."""
    recorders = _recorders()
    return any(level < len(recorders) and recorders[level] is not None for level, _ in table._spec.marks)


class recording:
    """While entered, `recorder` is told of gathers of the tables that are marked with the level that this gives.

    Args:
        recorder: who is told.
        alone: others are not told meanwhile: of a trial run, of which nothing is kept.
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
