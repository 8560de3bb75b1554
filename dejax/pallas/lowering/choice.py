"""Which lowering makes GPU programs of kernels."""

from __future__ import annotations

import contextlib
import contextvars
import os
from collections.abc import Iterator

LOWERINGS = ("pallas", "dejax")
"""Pallas' own lowering to Triton, and dejax's, which needs the package triton."""

_VARIABLE = "DEJAX_LOWERING"
_chosen: contextvars.ContextVar[str | None] = contextvars.ContextVar("dejax_lowering", default=None)


def checked(name: str | None, what: str) -> str | None:
    """Returns `name` if it is None or one of `LOWERINGS`.

    Raises:
      ValueError: `name` is neither; the message begins with `what`.
    """
    if name is not None and name not in LOWERINGS:
        raise ValueError(f"{what} must be {' or '.join(map(repr, LOWERINGS))}, got {name!r}")
    return name


def chosen() -> str | None:
    """The lowering of kernels traced now: that of `lowered_by`, else `$DEJAX_LOWERING`; None if neither is set."""
    return _chosen.get() or checked(os.environ.get(_VARIABLE) or None, f"${_VARIABLE}")


@contextlib.contextmanager
def lowered_by(name: str | None) -> Iterator[None]:
    """A context manager: kernels that are traced inside it are lowered by `name`; None leaves the choice as it is."""
    token = _chosen.set(name or _chosen.get())
    try:
        yield
    finally:
        _chosen.reset(token)
