"""Operators that compare each entry with its segment: softmax, logsumexp, variance, normalization."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._dtypes import numbers
from dejax.segment._grouping import Grouping, SegmentPlan
from dejax.segment._primitives import rows_at, spread, wide
from dejax.segment._reductions import extremum, mean_of, summed
from dejax.segment._request import SegmentOptions, SegmentRequest, request


def _grouped(r: SegmentRequest, data: Array) -> SegmentRequest:
    """The request with its ids grouped once for all its reductions, and with other data."""
    if r.kernels and r.plan is None and isinstance(g := r.grouping(), Grouping):
        r = dataclasses.replace(r, plan=SegmentPlan.of(g, r.num_segments))
    return dataclasses.replace(r, data=data)


def _at_entries(rows: Array, r: SegmentRequest) -> Array:
    """The row of each entry's segment, zeros for entries of none."""
    if not r.kernels:
        return rows_at(rows, r.ids)
    found = spread(rows.reshape(rows.shape[0], r.width), r.grouping(), interpret=r.interpret)
    return found.reshape(found.shape[0], *rows.shape[1:])


def _belongs(r: SegmentRequest) -> Array:
    inside = (r.ids >= 0) & (r.ids < r.num_segments)
    return inside.reshape(-1, *(1,) * (r.data.ndim - 1))


def _floats(name: str, data: Any) -> tuple[Array, Any]:
    """Data in the dtype of the computation, and the dtype of the result."""
    data = numbers(f"`data` of {name}", data)
    if jnp.issubdtype(data.dtype, jnp.complexfloating):
        raise TypeError(f"`data` of {name} must be real, got {data.dtype}")
    dtype = data.dtype if jnp.issubdtype(data.dtype, jnp.floating) else jnp.result_type(float)
    return data.astype(wide(dtype)), dtype


def _exponentials(r: SegmentRequest) -> tuple[Array, Array, Array]:
    """exp(entry - its segment's maximum), the sums of these, and the maxima, with 0 for maxima that are not finite."""
    fixed = dataclasses.replace(r, data=jax.lax.stop_gradient(r.data))
    top = extremum("max", fixed)
    top = jnp.where(jnp.isfinite(top), top, 0)
    belongs = _belongs(r)
    # Entries of no segment may be of any size: their exponentials are not taken, so that gradients stay finite.
    powers = jnp.where(belongs, jnp.exp(jnp.where(belongs, r.data, 0) - _at_entries(top, r)), 0)
    return powers, summed(dataclasses.replace(r, data=powers)), top


def segment_softmax(
    logits: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The softmax of logits within each segment, like `jraph.segment_softmax`.

        y_i = exp(x_i) / sum of exp(x_j) over the entries j of the segment of i

    Large logits do not overflow. An entry whose id is out of range gets 0, and so do the entries of a segment whose
    logits are all -inf. The arguments are those of `segment_sum`.

    Args:
        logits: [entries, ...]. 16-bit floats are computed in float32.
        segment_ids: integer[entries] or a `SegmentPlan`, as in `segment_sum`.
        num_segments: number of segments.
        indices_are_sorted: promises that the ids ascend.
        unique_indices: promises that no id occurs twice.
        plan: a `SegmentPlan` of the ids, made in advance.
        deterministic: as in `segment_sum`.
        backend: as in `segment_sum`.

    Returns:
        [entries, ...] of the dtype of `logits`; floats if the logits are integers.
    """
    data, dtype = _floats("segment_softmax", logits)
    options = SegmentOptions(indices_are_sorted, unique_indices, None, None, deterministic, backend)
    r = request("segment_softmax", data, segment_ids, num_segments, options, plan)
    r = _grouped(r, r.data)
    powers, totals, _ = _exponentials(r)
    totals = _at_entries(totals, r)
    return (powers / jnp.where(totals == 0, 1, totals)).astype(dtype)


def segment_logsumexp(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The logarithm of the sum of exp(x) over the entries x of each segment; -inf for a segment without entries.

    The arguments are those of `segment_softmax`.
    """
    data, dtype = _floats("segment_logsumexp", data)
    options = SegmentOptions(indices_are_sorted, unique_indices, None, None, deterministic, backend)
    r = request("segment_logsumexp", data, segment_ids, num_segments, options, plan)
    _, totals, top = _exponentials(_grouped(r, r.data))
    found = jnp.log(jnp.where(totals == 0, 1, totals)) + top
    return jnp.where(totals == 0, -jnp.inf, found).astype(dtype)


def partition_softmax(logits: Any, partitions: Any, sum_partitions: int | None = None) -> Array:
    """The softmax within each of several consecutive partitions of the entries, like `jraph.partition_softmax`.

    Args:
        logits: [entries, ...].
        partitions: integer[partitions], the number of entries of each partition.
        sum_partitions: the total number of entries; by default that of `logits`.

    Returns:
        [entries, ...].

    Raises:
        ValueError: the partitions do not sum to the number of entries.
    """
    count, entries = len(partitions), jnp.shape(logits)[0]
    total = entries if isinstance(partitions, jax.core.Tracer) else int(np.sum(partitions))
    if not entries == total == (total if sum_partitions is None else sum_partitions):
        raise ValueError(
            f"`partitions` of partition_softmax must sum to the {entries} entries of `logits`, got "
            f"{total if sum_partitions is None else sum_partitions}"
        )
    ids = jnp.repeat(jnp.arange(count), jnp.asarray(partitions), total_repeat_length=entries)
    return segment_softmax(logits, ids, count, indices_are_sorted=True)


def segment_variance(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    *,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """The variance (mean squared deviation from the mean) of each segment's entries, like jraph's function.

    A segment without entries gets 0. The arguments are those of `segment_softmax`.
    """
    data, dtype = _floats("segment_variance", data)
    options = SegmentOptions(indices_are_sorted, unique_indices, None, None, deterministic, backend)
    r = request("segment_variance", data, segment_ids, num_segments, options, plan)
    r = _grouped(r, r.data)
    return _variance(r, _deviations(r)).astype(dtype)


def _deviations(r: SegmentRequest) -> Array:
    """Entries less the mean of their segment; 0 for entries of none, which may be of any size."""
    return jnp.where(_belongs(r), r.data - _at_entries(mean_of(r), r), 0)


def _variance(r: SegmentRequest, deviations: Array) -> Array:
    return mean_of(dataclasses.replace(r, data=jnp.square(deviations)))


def segment_normalize(
    data: Any,
    segment_ids: Any,
    num_segments: int | None = None,
    indices_are_sorted: bool = False,
    unique_indices: bool = False,
    eps: float = 1e-8,
    *,
    plan: SegmentPlan | None = None,
    deterministic: bool = False,
    backend: str = "auto",
) -> Array:
    """Normalizes the entries of each segment to mean 0 and standard deviation 1, like `jraph.segment_normalize`.

    A variance below `eps` counts as `eps`. An entry whose id is out of range gets 0. The other arguments are those of
    `segment_softmax`.
    """
    data, dtype = _floats("segment_normalize", data)
    options = SegmentOptions(indices_are_sorted, unique_indices, None, None, deterministic, backend)
    r = request("segment_normalize", data, segment_ids, num_segments, options, plan)
    r = _grouped(r, r.data)
    deviations = _deviations(r)
    variances = jnp.maximum(_variance(r, deviations), jnp.asarray(eps, r.data.dtype))
    return (deviations * _at_entries(jax.lax.rsqrt(variances), r)).astype(dtype)
