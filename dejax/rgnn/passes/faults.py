"""Faults of the compiler that cost speed and no result: the user is warned once for each."""

from __future__ import annotations

import linecache
import warnings

from dejax.rgnn.ir.inter import OpProgram


class KernelFallbackWarning(UserWarning):
    """A GPU kernel could not be compiled, so XLA computes that part of the program, slower but with the same result.

    >>> import warnings
    >>> from dejax import rgnn
    >>> warnings.simplefilter("error", rgnn.KernelFallbackWarning)  # an exception instead of a slower program
    """


_told: set[tuple[str, ...]] = set()


def described(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def warn_once(key: tuple[str, ...], line: str | None, message: str) -> None:
    """Warns at a line of the user's program, "file:number" where it is known, unless it has with the same key."""
    if key in _told:
        return
    if line:
        path, _, row = line.rpartition(":")
        text = linecache.getline(path, int(row)).strip()
        message = f"{line}: {message}" + (f"\n    {text}" if text else "")
        warnings.warn_explicit(message, KernelFallbackWarning, path, int(row))
    else:
        warnings.warn(message, KernelFallbackWarning, stacklevel=3)
    _told.add(key)


def left_out(program: OpProgram, what: str, instead: str, error: Exception) -> None:
    """Warns that a pass or a plan of kernels had an error and was left out, once for each program, pass and kind of
    error: the halves of a program for training, whose names begin with its name, are the program.
    """
    name = program.name.partition(".")[0]
    line = next((line for line in program.lines if line is not None), None)
    message = f"{what} of {name!r} failed; {instead}, with the same result. Please report this program"
    warn_once((name, what, type(error).__name__), line, f"{message} ({described(error)})")
