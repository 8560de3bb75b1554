"""Where a scatter of XLA is faster than a sort and a kernel, estimated for an H200.

The rates were measured there with jax 0.11 (docs/performance/segment.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from dejax.pallas.machine import H200

_SORT_START = 80e-6
_SORT_ENTRY = 45e-12
# XLA's scatter: seconds for each entry, for each element (less where the results lie in the cache, of which the entries
# take a part), and for each entry that shares an address with others.
_SCATTERED_ENTRY = 10e-12
_SCATTERED_ELEMENT = 3.4e-12
_CACHED_ELEMENT = 2.2e-12
_CACHED_BYTES = H200.cache_bytes / 2
_MEETING = 2.5e-9
_SWAPPED = 2.5  # times as long for extrema of floats, which compare and swap
# A row that is read through an index takes at least the time of a sector from memory.
_SECTOR = 30e-12
_GATHERED_BYTE = 1 / 3.9e12
_STREAMED_BYTE = 1 / 4.0e12


@dataclass(frozen=True, slots=True)
class ReductionSize:
    """A reduction.

    Attributes:
        entries: number of entries.
        segments: number of segments.
        width: features of an entry.
        dtype: dtype of the data.
        examples: number of such reductions with the same ids.
    """

    entries: int
    segments: int
    width: int
    dtype: Any
    examples: int = 1


def kernel_seconds(shape: ReductionSize, is_sorted: bool, planned: bool = False) -> float:
    """Seconds of a kernel, and of the sort before it where ids are not sorted and have no plan.

    Several examples are features of the same entries, for which the data are transposed.
    """
    nbytes = shape.examples * shape.width * jnp.dtype(shape.dtype).itemsize
    offsets = 0.0 if planned else 5e-6 + 20e-12 * shape.segments
    if shape.examples > 1:
        offsets += 2 * shape.entries * nbytes * _STREAMED_BYTE
    if is_sorted:
        return offsets + 9e-6 + shape.entries * (2e-12 + nbytes * _STREAMED_BYTE)
    sort = 0.0 if planned else _SORT_START + _SORT_ENTRY * shape.entries
    return sort + offsets + 9e-6 + shape.entries * max(_SECTOR, nbytes * _GATHERED_BYTE)


def scatter_seconds(shape: ReductionSize, swapped: bool = False) -> float:
    """Seconds of XLA's scatter with the GPU's atomic additions of 32 or 64 bits, or where it compares and swaps."""
    entries, itemsize = shape.examples * shape.entries, jnp.dtype(shape.dtype).itemsize
    results = shape.examples * shape.segments * shape.width * max(itemsize, 4)
    element = _CACHED_ELEMENT if results <= _CACHED_BYTES else _SCATTERED_ELEMENT
    apart = entries * (_SCATTERED_ENTRY + shape.width * element)
    if itemsize < 4:  # they become wider first
        apart += entries * shape.width * 10 * _STREAMED_BYTE
    seconds = max(apart, shape.entries / max(shape.segments, 1) * _MEETING)
    return 6e-6 + seconds * (_SWAPPED if swapped else 1)


def scatter_pays(shape: ReductionSize, kind: str, is_sorted: bool, deterministic: bool, planned: bool = False) -> bool:
    """Whether to leave a reduction to XLA's scatter: it is faster there, and may take entries in any order.

    Integers give the same result in every order. Floats do not: sums round, and a maximum of 0 and -0 is either. With a
    plan, reductions of floats always have a fixed order. 16-bit floats are reduced as float32.
    """
    dtype = jnp.dtype(shape.dtype)
    integers = jnp.issubdtype(dtype, jnp.integer)
    if integers:
        allowed = dtype.itemsize >= 4
    else:
        allowed = dtype.itemsize <= 4 and not (deterministic or planned)
    seconds = scatter_seconds(shape, swapped=kind != "sum" and not integers)
    return allowed and not is_sorted and seconds < kernel_seconds(shape, is_sorted, planned)
