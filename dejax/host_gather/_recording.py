"""How `value_and_grad` finds the rows that a loss gathers: while it runs, each gather of the table is noted."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from jax import Array

_state = threading.local()

# Called with the table, the ids and the rows of a gather; gives the rows to go on with.
Recorder = Callable[[Any, Array, Array], Array]


def record(table: Any, ids: Array, rows: Array) -> Array:
    """Tells the innermost recorder of this thread of a gather."""
    recorders: list[Recorder] = getattr(_state, "recorders", [])
    return recorders[-1](table, ids, rows) if recorders else rows


def recording_active() -> bool:
    """Whether a gather on this thread would be noted."""
    return bool(getattr(_state, "recorders", []))


class recording:
    """While entered, `recorder` is told of gathers on this thread."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __enter__(self) -> None:
        if not hasattr(_state, "recorders"):
            _state.recorders = []
        _state.recorders.append(self._recorder)

    def __exit__(self, *_: object) -> None:
        _state.recorders.pop()
