"""Sums of many arrays of a narrow dtype: gradients of parts of a batch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def wide(tree: Any) -> Any:
    """Arrays in the dtype in which many of them are added: float32 for narrower floats, otherwise their own.

    A sum of 256 arrays of bfloat16 in bfloat16 loses three of its eight bits.
    """
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def wide_dtype(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def narrowed(tree: Any, like: Any) -> Any:
    """Sums of `wide` arrays in the dtypes of `like`, rounded once."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def zeros(shapes: Any) -> Any:
    """Where sums of arrays of these shapes begin."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), shapes)
