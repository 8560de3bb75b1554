"""Where a scatter of XLA is faster than a sort and a kernel, estimated for an H200.

The rates are of one H200: a sort of 20 million pairs by 32-bit keys takes about 1.3 ms, four passes; XLA's scatter adds
330 e9 numbers a second where few of them meet. Numbers that meet at one address wait for each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

_SORT_PASS = 16e-12
_SORT_START = 30e-6
_SCATTERED = 1 / 330e9
_MEETING = 1e-9
_GATHERED_BYTE = 1 / 2.5e12
_STREAMED_BYTE = 1 / 4.3e12


@dataclass(frozen=True, slots=True)
class Shape:
    """A reduction: entries, segments, features of an entry, dtype of the data."""

    entries: int
    segments: int
    width: int
    dtype: Any


def sort_seconds(entries: int, segments: int) -> float:
    """Of sorting ids with their positions."""
    passes = 1 if segments < 2**8 else 2 if segments < 2**16 else 4
    return _SORT_START + passes * _SORT_PASS * entries


def kernel_seconds(shape: Shape, is_sorted: bool) -> float:
    """Of sorting, where ids are not sorted, and of a kernel."""
    nbytes = shape.width * jnp.dtype(shape.dtype).itemsize
    offsets = 5e-6 + 8 * shape.segments * _STREAMED_BYTE
    if is_sorted:
        return offsets + 4e-6 + shape.entries * nbytes * _STREAMED_BYTE
    return (
        sort_seconds(shape.entries, shape.segments) + offsets + shape.entries * (4 + max(32, nbytes)) * _GATHERED_BYTE
    )


def scatter_seconds(shape: Shape) -> float:
    """Of XLA's scatter with the additions, maxima and minima that the GPU has."""
    apart = shape.entries * shape.width * _SCATTERED
    return 5e-6 + max(apart, shape.entries / max(shape.segments, 1) * _MEETING)


def scatter_pays(shape: Shape, kind: str, is_sorted: bool, deterministic: bool) -> bool:
    """Whether XLA's scatter computes a reduction, whose bits it must not change where they are to be the same.

    Integers have one result in every order. Additions of floats do not, and XLA makes those of 16 bits, and maxima, by
    compare and swap, which is slow.
    """
    dtype = jnp.dtype(shape.dtype)
    if jnp.issubdtype(dtype, jnp.integer):
        allowed = dtype.itemsize >= 4
    else:
        allowed = kind == "sum" and dtype == jnp.float32 and not deterministic
    return allowed and scatter_seconds(shape) < kernel_seconds(shape, is_sorted)
