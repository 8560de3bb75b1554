"""Reductions of the entries of each segment."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from dejax.segment._grouping import Grouping, SegmentPlan, Unsorted
from dejax.segment._primitives import by_scatter, reduce, rows_at, spread, wide
from dejax.segment._request import SegmentOptions, SegmentRequest, constant, request


def summed(r: SegmentRequest, dtype: Any = None) -> Array:
    """The sums of a request, rounded once to `dtype`, by default that of the data."""
    dtype = jnp.dtype(dtype or r.data.dtype)
    if r.kernels:
        return r.shaped(reduce("sum", r.rows, r.grouping(), dtype, r.interpret))
    return _scatter("sum", r, r.data.astype(wide(r.data.dtype))).astype(dtype)


def _scatter(kind: str, r: SegmentRequest, data: Array) -> Array:
    """The reduction as XLA's scatter."""
    return by_scatter(
        kind,
        data,
        r.ids,
        r.num_segments,
        indices_are_sorted=r.is_sorted,
        unique_indices=r.options.unique_indices,
        bucket_size=r.options.bucket_size,
    )


def extremum(kind: str, r: SegmentRequest) -> Array:
    """The greatest or least entry of each segment; the `identity` where there is none."""
    if not r.kernels:
        return _scatter(kind, r, r.data.astype(wide(r.data.dtype))).astype(r.data.dtype)  # ties are counted in float32
    return r.shaped(_extremum(kind, r.interpret, r.rows, r.grouping()))


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _extremum(kind: str, interpret: bool, data: Array, g: Grouping | Unsorted) -> Array:
    return reduce(kind, data, g, interpret=interpret)


@_extremum.defjvp
def _extremum_jvp(kind: str, interpret: bool, primals: Any, tangents: Any) -> tuple[Array, Array]:
    """Entries that are equal to the result share its derivative evenly, as in JAX."""
    data, g = primals
    data = lax.optimization_barrier(data)  # XLA would compute it again for the comparison, with other roundings
    out = _extremum(kind, interpret, data, g)
    return out, shared(data == rows_at(out, g.ids), tangents[0], g, data.dtype, interpret)


def shared(winners: Array, tangent: Array, g: Grouping | Unsorted, dtype: Any, interpret: bool) -> Array:
    """The mean of the tangents of each segment's winners."""
    compute = wide(dtype)
    winners = winners & ((g.ids >= 0) & (g.ids < g.num_segments))[:, None]
    count = reduce("sum", winners.astype(compute), g, interpret=interpret)
    part = jnp.where(winners, tangent.astype(compute), 0) / spread(jnp.maximum(count, 1), g, interpret=interpret)
    return reduce("sum", jnp.where(winners, part, 0), g, dtype, interpret)


def counts(r: SegmentRequest, dtype: Any) -> Array:
    """The number of entries of each segment, [segments, 1, ...]."""
    g = r.grouping() if r.kernels else None
    if isinstance(g, Grouping):
        found = (g.offsets[1:] - g.offsets[:-1]).astype(dtype)
    else:
        ones = jnp.ones(r.ids.shape, jnp.int32)  # float32 does not count beyond 2^24
        found = jax.ops.segment_sum(ones, r.ids, r.num_segments, indices_are_sorted=r.is_sorted).astype(dtype)
    return found.reshape(-1, *(1,) * (r.data.ndim - 1))


def segment_sum(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    *,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The sum of the entries of each segment. A replacement of `jax.ops.segment_sum` with some additional arguments.

    Args:
        data: [entries, ...], of any numeric dtype. 16-bit floats are accumulated in float32 and rounded once; integers
            overflow as in their own dtype.
        segment_ids: integer[entries], the segment of each entry; or a `SegmentPlan`. Entries with an id below 0 or at
            least `num_segments` are dropped.
        num_segments: number of segments; by default the largest id plus 1. Required inside of `jax.jit`.
        indices_are_sorted: promises that the ids ascend.
        unique_indices: promises that no id occurs twice.
        bucket_size: passed to XLA if XLA computes the sum; kernels do not use it.
        mode: what happens to entries whose id is out of range: None, `drop`, `fill` and `promise_in_bounds` drop them,
            `clip` adds them to the nearest segment.
        plan: `plan(segment_ids, num_segments)`, made in advance so that the call need not sort the ids. `segment_ids`
            may then be None.
        deterministic: whether the sums must have equal bits in every run. By default, sums of floats are deterministic
            on a GPU only with a plan or sorted ids; without, XLA's atomic additions are used where they are faster.
        backend: `"pallas"` for GPU kernels, `"xla"`, or `"auto"`: kernels on a GPU and XLA elsewhere.

    Returns:
        [num_segments, ...] of the dtype of `data`; 0 for a segment without entries.

    Raises:
        TypeError: the ids are not integers.
        ValueError: the shapes do not fit each other, or `num_segments` is not known.

    >>> import jax.numpy as jnp
    >>> from dejax import segment
    >>> print(segment.segment_sum(jnp.array([1.0, 2.0, 4.0]), jnp.array([1, 0, 1]), 3))
    [2. 5. 0.]
    """
    options = SegmentOptions(indices_are_sorted, unique_indices, bucket_size, mode, deterministic, backend)
    return summed(request("segment_sum", data, segment_ids, num_segments, options, plan))


def segment_mean(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    mode: Any = None,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The mean of the entries of each segment, like `jraph.segment_mean`; 0 for a segment without entries.

    The arguments are those of `segment_sum`. Means of integers are floats.
    """
    options = SegmentOptions(indices_are_sorted, unique_indices, None, mode, deterministic, backend)
    r = request("segment_mean", data, segment_ids, num_segments, options, plan)
    return mean_of(r)


def mean_of(r: SegmentRequest) -> Array:
    """The means of a request, in the dtype of its data where that is a float."""
    dtype = r.data.dtype
    if not jnp.issubdtype(dtype, jnp.inexact):  # a sum of integers may wrap
        dtype = jnp.result_type(float)
        r = dataclasses.replace(r, data=r.data.astype(dtype))
    total = summed(r, wide(dtype))
    return (total / jnp.maximum(counts(r, jnp.finfo(total.dtype).dtype), 1)).astype(dtype)


def _replaced(name: str, out: Array, r: SegmentRequest, empty: Any) -> Array:
    """`empty` in place of the results of empty segments, where it is given."""
    if empty is None:
        return out
    return jnp.where(counts(r, jnp.int32) > 0, out, constant(name, empty, out.dtype))


def segment_max(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    *,
    empty: Any = None,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The maximum of the entries of each segment. A replacement of `jax.ops.segment_max`.

    Entries that equal the maximum share its gradient evenly, as in JAX. A segment with a NaN has the result NaN.

    Args:
        data: [entries, ...], of any numeric dtype, or bool.
        segment_ids: integer[entries] or a `SegmentPlan`, as in `segment_sum`.
        num_segments: number of segments.
        indices_are_sorted: promises that the ids ascend.
        unique_indices: promises that no id occurs twice.
        bucket_size: as in `segment_sum`.
        mode: as in `segment_sum`.
        empty: the result of segments without entries. None means -inf, or the smallest integer, as in JAX.
        plan: a `SegmentPlan` of the ids, made in advance.
        deterministic: as in `segment_sum`; of a maximum it decides only the sign of a zero.
        backend: as in `segment_sum`.

    Returns:
        [num_segments, ...] of the dtype of `data`.
    """
    options = SegmentOptions(indices_are_sorted, unique_indices, bucket_size, mode, deterministic, backend)
    r = request("segment_max", data, segment_ids, num_segments, options, plan, kind="max")
    return _replaced("segment_max", extremum("max", r), r, empty)


def segment_min(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    bucket_size: int | None = None,
    mode: Any = None,
    *,
    empty: Any = None,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The minimum of the entries of each segment.

    A replacement of `jax.ops.segment_min`; arguments as in `segment_max`.
    """
    options = SegmentOptions(indices_are_sorted, unique_indices, bucket_size, mode, deterministic, backend)
    r = request("segment_min", data, segment_ids, num_segments, options, plan, kind="min")
    return _replaced("segment_min", extremum("min", r), r, empty)


def segment_max_or_constant(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    constant: float = 0.0,
    **others: Any,
) -> Array:
    """The maximum of the entries of each segment, or `constant` for a segment without entries, as in jraph.

    It is `segment_max` with `empty=constant`, and takes its arguments.
    """
    return segment_max(data, segment_ids, num_segments, indices_are_sorted, unique_indices, empty=constant, **others)


def segment_min_or_constant(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    constant: float = 0.0,
    **others: Any,
) -> Array:
    """The minimum of the entries of each segment, or `constant` for a segment without entries, as in jraph.

    It is `segment_min` with `empty=constant`, and takes its arguments.
    """
    return segment_min(data, segment_ids, num_segments, indices_are_sorted, unique_indices, empty=constant, **others)
