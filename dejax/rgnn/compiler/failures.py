"""Kernels that could not be made: XLA evaluates their part, the user is warned once, and `explain` shows why."""

from __future__ import annotations

from dejax.rgnn.ir.intra import Kernels, user_lines
from dejax.rgnn.options import Options
from dejax.rgnn.passes.faults import described, warn_once

_found: dict[tuple[Kernels, Options], dict[int, str]] = {}


def failures(kernels: Kernels, options: Options) -> dict[int, str]:
    """The instances, by index, whose kernel could not be made when the program was traced, with the reason."""
    return dict(_found.get((kernels, options), {}))


def record_failure(kernels: Kernels, options: Options, number: int, error: Exception) -> None:
    """Records the error of a kernel that could not be made, and warns at the user's line, once per line and error."""
    instance, program = kernels.instances[number], kernels.program
    what = described(error)
    _found.setdefault((kernels, options), {})[number] = what
    lines = user_lines(program, instance)
    line = lines[0] if lines else ""
    message = (
        f"no {instance.template} kernel could be made for [{number}] of {program.name!r}; XLA computes this part, with "
        f"the same result. Please report this program ({what})"
    )
    warn_once((line, what), line, message)
