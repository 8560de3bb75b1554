"""The one question about a trace that jax's public names do not answer."""

from __future__ import annotations

import jax
from jax import Array


def closed_over(array: Array) -> bool:
    """Whether a concrete array is used inside a function that jax compiles, where it would become a constant."""
    if isinstance(array, jax.core.Tracer):
        return False
    try:
        from jax._src.core import unsafe_am_i_under_a_jit
    except ImportError:
        return False  # only a readable error is lost
    return bool(unsafe_am_i_under_a_jit())
