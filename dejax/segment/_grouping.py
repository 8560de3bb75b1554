"""Which entries belong to which segment, as the kernels take it, and plans that keep it."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._dtypes import clipped_to_int32, native_order
from dejax._pytrees import pytree
from dejax.pallas.segments.reduce import SegmentBounds
from dejax.pallas.segments.search import segment_offsets
from dejax.pallas.segments.segment_schedule import chunk_of


class Grouping(NamedTuple):
    """Entries grouped by segment.

    Attributes:
        ids: int32[entries], the segment of each entry. An id below 0, or not below the number of segments, is of none.
        order: int32[entries], entries sorted by segment; None where they are sorted.
        offsets: int32[segments + 1], where each segment begins in that order.
        first: int32[chunks], the id at the first position of each chunk; none where no segment can be long.
        last: int32[chunks], the id at the last position of each chunk.
    """

    ids: Any
    order: Any
    offsets: Any
    first: Any
    last: Any

    @property
    def num_segments(self) -> int:
        return self.offsets.shape[0] - 1

    @property
    def segments(self) -> SegmentBounds:
        return SegmentBounds(self.offsets, self.first, self.last, self.ids.shape[0])


_STATIC: dict[str, Any] = {"static": True}


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class Unsorted:
    """Ids in any order, whose entries XLA's scatter reduces. Many examples of them may be sorted instead, under `vmap`.

    Attributes:
        ids: int32[entries], as those of a `Grouping`.
        num_segments: number of segments (static).
    """

    ids: Any
    num_segments: int = field(metadata=_STATIC)


def as_ids(ids: Any) -> Array:
    """Ids as a jax array. Those that do not fit the widest integers of jax stay out of range.

    Without jax's 64-bit mode jax drops the upper bits of numpy's, and 2^32 would become 0.
    """
    if isinstance(ids, jax.Array):
        return ids
    ids = native_order(np.asarray(ids))
    if ids.size == 0 and ids.ndim == 1:  # of an empty list
        return jnp.zeros(0, jnp.int32)
    if ids.dtype.kind in "OSUmM":
        raise TypeError(f"ids must be integers, got dtype {ids.dtype}; convert them with .astype(np.int32)")
    if ids.dtype.kind in "iu" and ids.dtype.itemsize == 8 and not jax.config.values["jax_enable_x64"]:
        ids = clipped_to_int32(ids)
    return jnp.asarray(ids)


def sorted_ids(ids: Array, bound: int) -> tuple[Array, Array]:
    """Ids below `bound` in ascending order, and their positions; equal ids in the order of positions.

    Id and position are sorted as one word where they fit in one. Else XLA sorts one unsigned key with one value by
    radix.
    """
    position = jnp.arange(ids.shape[0], dtype=jnp.int32)
    bits = max(ids.shape[0] - 1, 0).bit_length()
    if bits and bits + (bound - 1).bit_length() <= 32:
        word = (ids.astype(jnp.uint32) << bits) | position.astype(jnp.uint32)
        word = jax.lax.sort(word, is_stable=False)
        return (word >> bits).astype(jnp.int32), (word & ((1 << bits) - 1)).astype(jnp.int32)
    key, order = jax.lax.sort((ids.astype(jnp.uint32), position), num_keys=1, is_stable=True)
    return key.astype(jnp.int32), order


@functools.partial(jax.jit, static_argnames=("num_segments", "is_sorted", "kernels", "interpret"), inline=True)
def group(ids: Array, num_segments: int, is_sorted: bool, kernels: bool, interpret: bool | None = None) -> Grouping:
    """The grouping of int32 ids. Ids in any order are sorted in the step.

    Args:
        ids: int32[entries].
        num_segments: number of segments.
        is_sorted: whether ids ascend.
        kernels: whether offsets are searched by a kernel, else by XLA.
        interpret: run that kernel interpreted; by default where there is no GPU.
    """
    entries = ids.shape[0]
    order, in_order = None, ids
    if not is_sorted:
        ids = jnp.where((ids >= 0) & (ids < num_segments), ids, num_segments)
        in_order, order = sorted_ids(ids, num_segments + 1)
    if kernels:
        offsets = segment_offsets(in_order, num_segments, interpret=interpret)
    else:
        queries = jnp.arange(num_segments + 1, dtype=jnp.int32)
        offsets = jnp.searchsorted(in_order, queries, method="scan_unrolled").astype(jnp.int32)
    chunk = chunk_of(entries)
    if entries <= chunk:
        first = last = jnp.zeros(0, jnp.int32)
    else:
        first = in_order[::chunk]
        last = in_order[np.minimum(np.arange(chunk - 1, entries + chunk - 1, chunk), entries - 1)]
    return Grouping(ids, order, offsets, first, last)


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class SegmentPlan:
    """Segment ids that are sorted in advance, so that calls with the plan do not sort them. `plan` makes one.

    It is a pytree, so it can be an ordinary argument of a jitted function.

    Attributes:
        ids: int32[entries], the segment of each entry; `num_segments` for entries that belong to no segment.
        order: int32[entries], the positions of the entries sorted by segment, in their own order within a segment; None
            if the entries are sorted already.
        offsets: int32[num_segments + 1]; the entries of segment i are `order[offsets[i]:offsets[i + 1]]`.
        first: int32[chunks], the segment of the first entry of each chunk, for kernels that cut long segments.
        last: int32[chunks], the segment of the last entry of each chunk.
        num_segments: number of segments (static).

    >>> import jax.numpy as jnp
    >>> from dejax import segment
    >>> plan = segment.plan(jnp.array([1, 0, 1]), 2)
    >>> isinstance(plan, segment.SegmentPlan), plan.offsets
    (True, Array([0, 1, 3], dtype=int32))
    >>> segment.segment_sum(jnp.array([1.0, 2.0, 4.0]), plan)
    Array([2., 5.], dtype=float32)
    """

    ids: Array
    order: Array | None
    offsets: Array
    first: Array
    last: Array
    num_segments: int = field(metadata=_STATIC)

    @classmethod
    def of(cls, g: Grouping, num_segments: int) -> SegmentPlan:
        """The plan with the arrays of a grouping."""
        return cls(g.ids, g.order, g.offsets, g.first, g.last, num_segments)

    @property
    def num_entries(self) -> int:
        """Number of entries, also of those that belong to no segment."""
        return self.ids.shape[0]

    @property
    def grouping(self) -> Grouping:
        """The arrays of the plan without the number of segments, as kernels take them."""
        return Grouping(self.ids, self.order, self.offsets, self.first, self.last)


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class EdgePlan:
    """Edges that are sorted in advance, by receiver for forward passes and by sender for gradients.

    `edge_plan` makes one.

    Attributes:
        by_receiver: the `SegmentPlan` of the receivers.
        by_sender: the `SegmentPlan` of the senders.
        senders: int32[edges], the sender of each edge, in the order of `by_receiver`.
        receivers: int32[edges], the receiver of each edge, in the order of `by_sender`.
    """

    by_receiver: SegmentPlan
    by_sender: SegmentPlan
    senders: Array
    receivers: Array
