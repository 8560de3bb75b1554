"""Questions about a trace that need jax's private names. Where a name is missing, only a readable error is lost."""

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
    """The innermost transformation that is being traced, for `inside`; None where jax does not tell."""
    try:
        from jax._src.core import trace_ctx
    except ImportError:
        return None
    return trace_ctx.trace


def inside(outer: Any) -> bool:
    """Whether the current trace is `outer`, or differentiation within it.

    Values can leave such a trace. They cannot leave the body of a scan, a branch of cond, or a function that vmap maps.
    """
    trace = current_trace()
    while trace is not None and trace is not outer and type(trace).__name__ in ("JVPTrace", "LinearizeTrace"):
        trace = getattr(trace, "parent_trace", None)
    return trace is None or trace is outer
