"""Reductions of gathered rows, which are never stored: message passing in one kernel."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dejax._dtypes import clipped_to_int32, numbers
from dejax.segment._grouping import EdgePlan, SegmentPlan, as_ids, group
from dejax.segment._plans import both_known
from dejax.segment._primitives import ReadEdges, by_scatter, gather_reduce, in_scales, reduce, rows_at, spread, wide
from dejax.segment._reductions import shared
from dejax.segment._request import BACKENDS, FLOATS, INTEGERS, constant, count_of, place


@dataclass(frozen=True, slots=True)
class _Messages:
    """A checked call.

    Attributes:
        x: [rows, width].
        scale: [edges, scales], or None.
        edges: senders and receivers; ids of none are past the end at both ends where no plan or order forbids.
        features: the axes of the width.
        dtype: the dtype of the result.
        kernels: whether kernels compute it.
        interpret: whether they are interpreted.
        dropped: whether a sender may be out of range where its receiver is not.
    """

    x: Array
    scale: Array | None
    edges: Any
    num_segments: int
    features: tuple[int, ...]
    dtype: Any
    kernels: bool
    interpret: bool
    dropped: bool

    def shaped(self, out: Array) -> Array:
        return out.reshape(out.shape[0], *self.features)

    @property
    def senders(self) -> Array:
        return self.edges[0] if not self.kernels else self.edges.senders

    @property
    def receivers(self) -> Array:
        return self.edges[1] if not self.kernels else self.edges.by_receiver.ids


def _scales(scale: Any, edges: int, features: tuple[int, ...]) -> Array:
    """Scales as [edges, scales]: one, or one for each index of the first axes of the features."""
    scale = numbers("`scale`", scale)
    shape = scale.shape
    while len(shape) > 1 and shape[-1] == 1:
        shape = shape[:-1]
    if not shape or shape[0] != edges or shape[1:] != features[: len(shape) - 1]:
        raise ValueError(
            f"`scale` must have the shape ({edges},), or that and first axes of the features {features} of x, got "
            f"{scale.shape}"
        )
    return scale.reshape(edges, math.prod(shape[1:]))


def _messages(
    name: str,
    x: Any,
    senders: Any,
    receivers: Any,
    num_segments: int | None,
    scale: Any,
    is_sorted: bool,
    plan: EdgePlan | None,
    backend: str,
) -> _Messages:
    """Checks the arguments of a reduction of gathered rows, and brings them to the form that kernels or XLA take."""
    if backend not in BACKENDS:
        raise ValueError(f"`backend` must be one of {', '.join(BACKENDS)}, got {backend!r}")
    x = numbers(f"`x` of {name}", x)
    if x.ndim == 0:
        raise ValueError(f"`x` of {name} must have an axis of rows, got a scalar")
    if plan is not None:
        senders, receivers, num_segments = _ids_of_plan(name, plan, x.shape[0], num_segments)
    count = count_of(name, receivers, num_segments)
    sender, receiver = (_ids(name, n, ids) for n, ids in (("senders", senders), ("receivers", receivers)))
    if sender.shape != receiver.shape:
        raise ValueError(
            f"`senders` and `receivers` of {name} must have one length, got {sender.shape}, {receiver.shape}"
        )
    features = x.shape[1:]
    x = x.reshape(x.shape[0], math.prod(features))
    dtype = x.dtype
    if scale is not None:
        scale = _scales(scale, sender.shape[0], features)
        dtype = jnp.result_type(x, scale)
        if wide(dtype) != wide(x.dtype):
            x = x.astype(dtype)
    sender, receiver = clipped_to_int32(sender), clipped_to_int32(receiver)
    kernels, interpret = place(backend, *x.shape, sender.shape[0], count)
    kernels = kernels and (
        x.dtype in FLOATS or (x.dtype in INTEGERS and x.dtype.itemsize > 1 and x.dtype != jnp.uint64)
    )
    dropped = is_sorted and plan is None
    if not dropped and plan is None:
        sender, receiver = both_known(sender, receiver, x.shape[0], count)
    edges: Any = (sender, receiver)
    if kernels and plan is not None:
        forward, back = plan.by_receiver.grouping, plan.by_sender.grouping
        edges = ReadEdges(sender, forward, back, plan.senders, plan.receivers)
    elif kernels:
        edges = ReadEdges(sender, group(receiver, count, is_sorted, kernels=True, interpret=interpret))
    return _Messages(x, scale, edges, count, features, dtype, kernels, interpret, dropped)


def _ids_of_plan(name: str, plan: EdgePlan, rows: int, count: int | None) -> tuple[Array, Array, int]:
    if not isinstance(plan, EdgePlan):
        raise TypeError(
            f"`plan` of {name} must be made by edge_plan(senders, receivers, ...), got {type(plan).__name__}"
        )
    if plan.by_sender.num_segments != rows:
        raise ValueError(
            f"`x` of {name} must have the {plan.by_sender.num_segments} rows that its plan was made for, got {rows}"
        )
    if count is not None and int(count) != plan.by_receiver.num_segments:
        raise ValueError(
            f"`num_segments` of {name} must be that of the plan, {plan.by_receiver.num_segments}, got {count}"
        )
    return plan.by_sender.ids, plan.by_receiver.ids, plan.by_receiver.num_segments


def _ids(name: str, which: str, ids: Any) -> Array:
    ids = as_ids(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"`{which}` of {name} must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"`{which}` of {name} must have one axis, got shape {ids.shape}")
    return ids


def _stored(m: _Messages) -> Array:
    """The messages as an array, [edges, width], in the dtype of the computation."""
    rows = rows_at(m.x, m.senders).astype(wide(m.dtype))
    if m.scale is None:
        return rows
    # The scale of an edge that is left out may be inf or NaN.
    known = (m.senders >= 0) & (m.senders < m.x.shape[0]) & (m.receivers >= 0) & (m.receivers < m.num_segments)
    return _product(rows.dtype, rows, jnp.where(known[:, None], m.scale, 0))


def _summed(m: _Messages, dtype: Any) -> Array:
    if m.kernels:
        return gather_reduce("sum", m.x, m.scale, m.edges, dtype, m.interpret)
    return by_scatter("sum", _stored(m), m.receivers, m.num_segments).astype(dtype)


def _edge_counts(m: _Messages, dtype: Any) -> Array:
    """Edges of each segment, those with a sender out of range left out."""
    known = (m.senders >= 0) & (m.senders < m.x.shape[0])
    if not m.kernels:
        return jax.ops.segment_sum(known.astype(jnp.int32), m.receivers, m.num_segments).astype(dtype)[:, None]
    g = m.edges.by_receiver
    if m.dropped:
        return reduce("sum", known.astype(dtype)[:, None], g, interpret=m.interpret)
    return (g.offsets[1:] - g.offsets[:-1]).astype(dtype)[:, None]


def gather_segment_sum(
    x: Any,
    senders: Any,
    receivers: Any,
    num_segments: int | None = None,
    scale: Any = None,
    indices_are_sorted: bool = False,
    *,
    plan: EdgePlan | None = None,
    backend: str = "auto",
) -> Array:
    """The sum of the rows that edges read, for each segment of edges: message passing in one kernel.

        y_i = sum over the edges e with receivers[e] = i of scale[e] * x[senders[e]]

    It equals `segment_sum(scale[:, None] * x[senders], receivers, num_segments)`. On a GPU one kernel reads, scales and
    adds the rows, so that no array with a row for each edge is stored. The gradient of `x` is the same operator with
    senders and receivers exchanged.

    Args:
        x: [rows, ...], of any numeric dtype.
        senders: integer[edges], the row that each edge reads. None with a plan.
        receivers: integer[edges], the segment to which each edge adds. None with a plan. Edges with a sender or a
            receiver out of range are dropped.
        num_segments: number of segments; by default the largest receiver plus 1. Required inside of `jax.jit`.
        scale: factors of the edges: None, [edges], or [edges, ...] with the first feature axes of `x`, for example a
            factor for each head of [rows, heads, width].
        indices_are_sorted: promises that the receivers ascend.
        plan: `edge_plan(senders, receivers, rows, num_segments)`, made in advance. Without it each step sorts the edges
            by receiver (unless `indices_are_sorted`), and by sender for the gradient of `x`.
        backend: as in `segment_sum`.

    Returns:
        [num_segments, ...], of the dtype of `scale * x`; 16-bit floats are accumulated in float32 and rounded once.

    Raises:
        TypeError: the ids are not integers, or `plan` is not an `EdgePlan`.
        ValueError: the shapes do not fit each other, or `num_segments` is not known.

    >>> import jax.numpy as jnp
    >>> from dejax import segment
    >>> x = jnp.array([[1.0], [10.0]])
    >>> print(segment.gather_segment_sum(x, jnp.array([0, 1, 1]), jnp.array([0, 0, 1]), 2, jnp.array([1.0, 2.0, 3.0])))
    [[21.]
     [30.]]
    """
    m = _messages("gather_segment_sum", x, senders, receivers, num_segments, scale, indices_are_sorted, plan, backend)
    return m.shaped(_summed(m, m.dtype))


def gather_segment_mean(
    x: Any,
    senders: Any,
    receivers: Any,
    num_segments: int | None = None,
    scale: Any = None,
    indices_are_sorted: bool = False,
    *,
    plan: EdgePlan | None = None,
    backend: str = "auto",
) -> Array:
    """The mean of `scale[e] * x[senders[e]]` over the edges e of each segment; 0 for a segment without edges.

    The arguments are those of `gather_segment_sum`.
    """
    m = _messages("gather_segment_mean", x, senders, receivers, num_segments, scale, indices_are_sorted, plan, backend)
    if not jnp.issubdtype(m.dtype, jnp.inexact):  # a sum of integers may wrap
        dtype = jnp.result_type(float)
        m = dataclasses.replace(m, x=m.x.astype(dtype), dtype=dtype)
    total = _summed(m, wide(m.dtype))
    return m.shaped((total / jnp.maximum(_edge_counts(m, jnp.finfo(total.dtype).dtype), 1)).astype(m.dtype))


def gather_segment_max(
    x: Any,
    senders: Any,
    receivers: Any,
    num_segments: int | None = None,
    scale: Any = None,
    indices_are_sorted: bool = False,
    *,
    empty: Any = None,
    plan: EdgePlan | None = None,
    backend: str = "auto",
) -> Array:
    """The maximum of `scale[e] * x[senders[e]]` over the edges e of each segment.

    The arguments are those of `gather_segment_sum`, and `empty`. Edges whose values equal the maximum share its
    gradient evenly. The gradient stores an array with a row for each edge.

    Args:
        x: [rows, ...].
        senders: integer[edges], the row that each edge reads.
        receivers: integer[edges], the segment of each edge.
        num_segments: number of segments.
        scale: factors of the edges, or None.
        indices_are_sorted: promises that the receivers ascend.
        empty: the result of segments without edges. None means -inf, or the smallest integer, as in JAX.
        plan: an `edge_plan`, made in advance.
        backend: as in `segment_sum`.

    Returns:
        [num_segments, ...].
    """
    m = _messages("gather_segment_max", x, senders, receivers, num_segments, scale, indices_are_sorted, plan, backend)
    return _extreme("max", m, empty)


def gather_segment_min(
    x: Any,
    senders: Any,
    receivers: Any,
    num_segments: int | None = None,
    scale: Any = None,
    indices_are_sorted: bool = False,
    *,
    empty: Any = None,
    plan: EdgePlan | None = None,
    backend: str = "auto",
) -> Array:
    """The minimum of `scale[e] * x[senders[e]]` over the edges of each segment; see `gather_segment_max`."""
    m = _messages("gather_segment_min", x, senders, receivers, num_segments, scale, indices_are_sorted, plan, backend)
    return _extreme("min", m, empty)


def _extreme(kind: str, m: _Messages, empty: Any) -> Array:
    if m.kernels:
        out = _extremum(kind, m.dtype, m.interpret, m.x, m.scale, m.edges)
    else:
        known = (m.senders >= 0) & (m.senders < m.x.shape[0])
        receivers = jnp.where(known, m.receivers, m.num_segments)
        stored = _stored(m)
        if stored.dtype != m.dtype:  # rounded as the result is; ties are counted in float32
            stored = lax.reduce_precision(stored, jnp.finfo(m.dtype).nexp, jnp.finfo(m.dtype).nmant)
        out = by_scatter(kind, stored, receivers, m.num_segments).astype(m.dtype)
    if empty is not None:
        out = jnp.where(_edge_counts(m, jnp.float32) > 0, out, constant(f"gather_segment_{kind}", empty, out.dtype))
    return m.shaped(out)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def _extremum(kind: str, dtype: Any, interpret: bool, x: Array, scale: Array | None, edges: ReadEdges) -> Array:
    return gather_reduce(kind, x, scale, edges, dtype, interpret)


@_extremum.defjvp
def _extremum_jvp(kind: str, dtype: Any, interpret: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    x, scale, edges = primals
    out = _extremum(kind, dtype, interpret, x, scale, edges)
    g, rows = edges.by_receiver, x.shape[0]
    back = edges.swapped(rows, interpret).by_receiver
    compute = wide(dtype)
    product = functools.partial(_product, compute)
    gathered, tangent = spread(x, back, compute, interpret), spread(tangents[0], back, compute, interpret)
    message = gathered
    if scale is not None:
        message, tangent = product(gathered, scale), product(tangent, scale)
        if jnp.issubdtype(scale.dtype, jnp.inexact):  # integers have no tangents
            tangent = tangent + product(gathered, tangents[1])
    # Rounded as the result is, which XLA does not leave out.
    info = jnp.finfo(dtype)
    message = lax.reduce_precision(message, info.nexp, info.nmant)
    known = ((edges.senders >= 0) & (edges.senders < rows))[:, None]
    winners = known & (message == rows_at(out, g.ids).astype(compute))
    return out, shared(winners, tangent, g, dtype, interpret)


def _product(dtype: Any, rows: Array, scale: Array) -> Array:
    parts = in_scales(rows, scale.shape[1])
    return (parts * scale.astype(dtype)[:, :, None]).reshape(rows.shape)


def gather(x: Any, ids: Any, *, plan: SegmentPlan | None = None, backend: str = "auto") -> Array:
    """Reads rows by their ids, as `x[ids]` does, with a gradient that is a `segment_sum`.

    This gradient adds in a fixed order, so it is deterministic, and it is fast if many ids are equal.

    Args:
        x: [rows, ...].
        ids: integer[entries], or a `SegmentPlan` of the ids. An id out of range gives a row of zeros.
        plan: `plan(ids, rows)`, made in advance. Without it the gradient sorts the ids.
        backend: as in `segment_sum`.

    Returns:
        [entries, ...], of the dtype of `x`.
    """
    x = numbers("`x` of gather", x)
    if isinstance(ids, SegmentPlan):
        ids, plan = ids.ids, plan or ids
    if plan is not None and plan.num_segments != x.shape[0]:
        raise ValueError(f"`x` of gather must have the {plan.num_segments} rows of its plan, got {x.shape[0]}")
    number = clipped_to_int32(_ids("gather", "ids", ids if plan is None else plan.ids))
    kernels, interpret = place(backend, *x.shape, number.shape[0])
    # The ids are sorted for the gradient alone, and only a traced `x` has one.
    if not kernels or not isinstance(x, jax.core.Tracer) or not jnp.issubdtype(x.dtype, jnp.floating):
        return rows_at(x, number)
    g = group(number, x.shape[0], False, kernels=True, interpret=interpret) if plan is None else plan.grouping
    width = math.prod(x.shape[1:])
    out = spread(x.reshape(x.shape[0], width), g, interpret=interpret)
    return out.reshape(out.shape[0], *x.shape[1:])
