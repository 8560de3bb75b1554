"""Notes about functions that store nothing: each once, as a warning and in the summary of stores."""

from __future__ import annotations

import sys
import threading
import warnings
from typing import Any

_lock = threading.Lock()
_notes: dict[str, None] = {}
_INSIDE = ("contextlib", "dejax", "flax", "functools", "jax")


def note_stored(name: str, derivative: Any, choice: Any) -> None:
    """Warns where a differentiated call stores nothing because its tensors are too small."""
    if any(source.stored for source in derivative.sources):
        return
    declined = [source.info for source in derivative.sources if source.declined]
    small = [info.nbytes for info in declined if info.nbytes < choice.min_bytes and choice.wants(info)]
    if not small:
        return
    note = (
        f"offload: `{name}` stores nothing: the largest of {len(small)} tensors that backward needs has {max(small):,} "
        f"bytes, less than min_bytes={choice.min_bytes:,}; give min_bytes={max(small)} or less, or remove offload"
    )
    with _lock:
        if note in _notes:
            return
        _notes[note] = None
    warnings.warn(note, stacklevel=_depth_of_caller())


def _depth_of_caller() -> int:
    """Number of frames between `note_stored` and the user's code."""
    depth, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        depth, frame = depth + 1, frame.f_back
    return depth


def notes() -> list[str]:
    """One line for each function that was differentiated and stores nothing."""
    with _lock:
        return list(_notes)
