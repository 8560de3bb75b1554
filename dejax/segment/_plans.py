"""Plans: ids that are sorted once and used in many calls."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax._dtypes import clipped_to_int32
from dejax.segment._grouping import EdgePlan, SegmentPlan, as_ids, group
from dejax.segment._request import BACKENDS, count_of, place


def plan(
    segment_ids: Any, num_segments: int | None = None, indices_are_sorted: bool = False, *, backend: str = "auto"
) -> SegmentPlan:
    """Sorts segment ids in advance, so that the functions of `dejax.segment` that take the plan do not sort them.

    Call it outside of `jax.jit`, once for each array of ids. It then also notices ids that are sorted already. Inside
    of `jax.jit` it works, too, but sorts in every step.

    Args:
        segment_ids: integer[entries]. Entries with an id below 0 or at least `num_segments` belong to no segment.
        num_segments: number of segments; by default the largest id plus 1. Required inside of `jax.jit`.
        indices_are_sorted: promises that the ids ascend.
        backend: as in `segment_sum`.

    Returns:
        A `SegmentPlan` of about 8 bytes for each entry and 4 for each segment.

    Raises:
        TypeError: the ids are not integers.
        ValueError: the ids do not have one axis, or `num_segments` is not known.

    >>> import jax.numpy as jnp
    >>> from dejax import segment
    >>> p = segment.plan(jnp.array([2, 0, 2]), 3)
    >>> print(p.order, p.offsets, segment.segment_sum(jnp.array([1.0, 2.0, 4.0]), p))
    [1 0 2] [0 1 1 3] [2. 0. 5.]
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}")
    count = count_of("plan", segment_ids, num_segments)
    ids = _vector(segment_ids, "segment_ids")
    known = not isinstance(ids, jax.core.Tracer)
    is_sorted = indices_are_sorted or (known and bool(jnp.all(ids[1:] >= ids[:-1])))
    kernels, interpret = place(backend)
    return SegmentPlan.of(group(ids, count, is_sorted, kernels=kernels, interpret=interpret), count)


def edge_plan(
    senders: Any, receivers: Any, num_senders: int, num_segments: int | None = None, *, backend: str = "auto"
) -> EdgePlan:
    """Sorts the edges of a graph in advance, by receiver and by sender, for `gather_segment_sum` and its gradient.

    Args:
        senders: integer[edges], the row that each edge reads. Edges with a sender below 0 or at least `num_senders` are
            dropped.
        receivers: integer[edges], the segment to which each edge adds. Edges with a receiver below 0 or at least
            `num_segments` are dropped.
        num_senders: number of rows that are read from.
        num_segments: number of segments of the result; by default `num_senders`.
        backend: as in `segment_sum`.

    Returns:
        An `EdgePlan` of about 24 bytes for each edge.
    """
    count = num_senders if num_segments is None else num_segments
    sender, receiver = _vector(senders, "senders"), _vector(receivers, "receivers")
    if sender.shape != receiver.shape:
        raise ValueError(f"`senders` and `receivers` must have one length, got {sender.shape} and {receiver.shape}")
    sender, receiver = both_known(sender, receiver, num_senders, count)
    forward, back = plan(receiver, count, backend=backend), plan(sender, num_senders, backend=backend)
    rows = sender if forward.order is None else sender[forward.order]
    rows_back = receiver if back.order is None else receiver[back.order]
    return EdgePlan(forward, back, rows, rows_back)


def both_known(senders: Array, receivers: Array, num_senders: int, num_segments: int) -> tuple[Array, Array]:
    """Ids past the end at both ends of an edge where one end is out of range."""
    known = (senders >= 0) & (senders < num_senders) & (receivers >= 0) & (receivers < num_segments)
    return jnp.where(known, senders, num_senders), jnp.where(known, receivers, num_segments)


def _vector(ids: Any, name: str) -> Array:
    ids = as_ids(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"`{name}` must have one axis, got shape {ids.shape}")
    return clipped_to_int32(ids)
