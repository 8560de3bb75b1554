"""Errors of the front end, which begin with the faulty line of the user's program."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import jax
import numpy as np

from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space

# Frames that are not the user's: those of the front end and the IR, of the files that call them, of JAX and of NumPy.
_FOLDERS = (str(Path(__file__).parent), str(Path(inter.__file__).parent))
_LIBRARIES = (str(Path(jax.__file__).parent), str(Path(np.__file__).parent))
_FILES = {str(Path(__file__).parent.parent / name) for name in ("program.py", "functional.py")}

SPACE_WORDS = {
    Space.NODE: "a node value",
    Space.EDGE: "an edge value",
    Space.SOURCE_PAIR: "a (source, edge type) value",
    Space.DESTINATION_PAIR: "a (destination, edge type) value",
    Space.EDGE_TYPE: "an edge-type constant",
    Space.NODE_TYPE: "a node-type constant",
    Space.GRAPH: "a shared value",
}
REMEDY = {
    Space.NODE: "read it on the edges with g.src(...) or g.dst(...)",
    Space.EDGE: "bring it to the nodes with g.sum_to_dst(...), g.mean_to_dst(...) or g.max_to_dst(...)",
    Space.NODE_TYPE: "use it with a node value, or read it on the edges with g.src(...) or g.dst(...)",
}


class ProgramError(ValueError):
    """A mistake in a relational program. The message begins with the faulty line of the user's code."""


def is_internal(path: str) -> bool:
    """Whether a file belongs to the front end or its callers in the compiler."""
    return path in _FILES or path.startswith(_FOLDERS)


def is_library(path: str) -> bool:
    """Whether a file is JAX's or NumPy's."""
    return path.startswith(_LIBRARIES)


def user_line() -> str | None:
    """The line of the user's code that is running, "file:line": the innermost frame outside of libraries and dejax."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if not is_internal(path) and not is_library(path):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def fail(message: str, line: str | None = None) -> ProgramError:
    """Makes a `ProgramError` whose message begins with `line`, "file:line"; by default the user's present line."""
    line = line or user_line()
    if line is None:
        return ProgramError(message)
    path, number = line.rsplit(":", 1)
    text = linecache.getline(path, int(number)).strip()
    return ProgramError(f"{line}: {message}" + (f"\n    {text}" if text else ""))
