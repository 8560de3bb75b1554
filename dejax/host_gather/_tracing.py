"""Questions about a trace that jax's public names do not answer. Without an answer only a readable error is lost."""

from __future__ import annotations

from typing import Any

import jax
from jax import Array


def closed_over(array: Array) -> bool:
    """Whether a concrete array is used inside a function that jax compiles, where it would become a constant."""
    if isinstance(array, jax.core.Tracer):
        return False
    try:
        from jax._src.core import unsafe_am_i_under_a_jit
    except ImportError:
        return False
    return bool(unsafe_am_i_under_a_jit())


def current_trace() -> Any:
    """The innermost transformation that is being traced, to be given to `inside`; None where it cannot be told."""
    try:
        from jax._src.core import trace_ctx
    except ImportError:
        return None
    return trace_ctx.trace


def inside(outer: Any) -> bool:
    """Whether what is traced now is traced for `outer` itself, or for derivatives within it.

    Not so in the body of a scan, a branch of cond, or a function that vmap maps: their values cannot leave them.
    """
    trace = current_trace()
    while trace is not None and trace is not outer and type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
        trace = getattr(trace, "parent_trace", None)
    return trace is None or trace is outer
