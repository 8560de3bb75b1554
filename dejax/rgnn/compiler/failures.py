"""Kernels that could not be made: XLA evaluates their part, the user is warned once, and `explain` shows why."""

from __future__ import annotations

import linecache
import warnings

from dejax.rgnn.ir.intra import Kernels, user_lines
from dejax.rgnn.options import Options


class KernelFallbackWarning(UserWarning):
    """A kernel could not be made; XLA evaluates that part of the program, with the same result.

    >>> import warnings
    >>> from dejax import rgnn
    >>> warnings.simplefilter("error", rgnn.KernelFallbackWarning)  # an exception instead of a slower program
    """


_found: dict[tuple[Kernels, Options], dict[int, str]] = {}
_told: set[tuple[str, str]] = set()


def failures(kernels: Kernels, options: Options) -> dict[int, str]:
    """The instances, by index, whose kernel could not be made when the program was traced, with the reason."""
    return dict(_found.get((kernels, options), {}))


def record_failure(kernels: Kernels, options: Options, number: int, error: Exception) -> None:
    """Records the error of a kernel that could not be made, and warns at the user's line, once per line and error."""
    instance, program = kernels.instances[number], kernels.program
    what = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    _found.setdefault((kernels, options), {})[number] = what
    lines = user_lines(program, instance)
    line = lines[0] if lines else ""
    if (line, what) in _told:
        return
    path, _, row = line.rpartition(":")
    text = linecache.getline(path, int(row)).strip() if line else ""
    message = (
        f"{line + ': ' if line else ''}no {instance.template} kernel could be made for [{number}] of "
        f"{program.name!r}; XLA computes this part, with the same result. Please report this program ({what})"
    ) + (f"\n    {text}" if text else "")
    if line:
        warnings.warn_explicit(message, KernelFallbackWarning, path, int(row))
    else:
        warnings.warn(message, KernelFallbackWarning, stacklevel=2)
    _told.add((line, what))
