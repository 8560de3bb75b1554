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


def _recorders() -> list[Recorder]:
    if not hasattr(_state, "recorders"):
        _state.recorders = []
    found: list[Recorder] = _state.recorders
    return found


def record(table: Any, ids: Array, rows: Array) -> Array:
    """Tells the recorders that have marked the table of a gather, the outermost first."""
    recorders = _recorders()
    for level, number in table._spec.marks:
        if level < len(recorders):
            rows = recorders[level](number, table, ids, rows)
    return rows


def recorded(table: Any) -> bool:
    """Whether gathers of this table are noted now."""
    return any(level < len(_recorders()) for level, _ in table._spec.marks)


class recording:
    """While entered, `recorder` is told of gathers of the tables that are marked with the level that this gives."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> int:
        _recorders().append(self._recorder)
        return len(_recorders()) - 1

    def __exit__(self, *_: object) -> None:
        _recorders().pop()
