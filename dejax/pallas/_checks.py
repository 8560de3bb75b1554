"""Checks that the templates' arguments share, with errors that say what to do."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from dejax.pallas._triton import PRECISIONS

FLOATS = tuple(jnp.dtype(t) for t in (jnp.float32, jnp.bfloat16, jnp.float16))


def check_precision(precision: str) -> None:
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


def check_float(array: Any, name: str) -> None:
    """Raises `NotImplementedError` for a dtype in which the kernels do not compute, so that a caller can fall back."""
    if array.dtype not in FLOATS:
        raise NotImplementedError(f"{name} must be float32, bfloat16 or float16 for this kernel, got {array.dtype}")


def as_index(index: Any, name: str, length: int) -> Any:
    """An int32 index table of `length` entries."""
    if index.shape != (length,):
        raise ValueError(f"{name} must have shape ({length},), got {index.shape}")
    if not jnp.issubdtype(index.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {index.dtype}")
    return index.astype(jnp.int32)
