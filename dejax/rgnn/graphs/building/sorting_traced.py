"""Sorting and grouping of many small integers inside `jax.jit`: the operations of `build` in static sizes.

`sorting` has the same operations for numpy, in exact sizes. Operators are chosen for what XLA does fast on a GPU:
- A sort of one unsigned key with one value is a radix sort: one kernel for all up to `ordering.LONGEST` entries, else
  some three for each byte of the key. Several keys, or signed keys of 8 or 16 bits, are sorted by comparisons.
- A cumulative sum is one kernel up to that size, else a few; on a CPU it is one for each factor of 16.
- A scatter to distinct places is one kernel. A scatter-add where many entries share a place is sequential.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._platform import platform
from dejax.cuda import ordering

xp = jnp
EXACT = False
"""Whether tables have the sizes of this graph, not the largest that arrays of its sizes allow."""

_WORD = 1 << 32
_WRITE = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
)


def rows_of(count: Any, most: int) -> int:
    """How many rows a table has of which `count` are used, `most` at most: `most`."""
    return most


def known_ascending(values: Array, known: bool) -> bool:
    """Whether `values` are known to ascend."""
    return known


def take(values: Any, index: Any) -> Array:
    """`values[index]`, for an index in range: without the operations that wrap negative numbers.

    These are two thirds of the operations of a graph's tables, and jax takes longer to trace them than the rest.
    """
    values, index = jnp.asarray(values), jnp.asarray(index)
    row = values.shape[1:]
    if not values.shape[0]:
        return jnp.zeros(index.shape + row, values.dtype)  # no index is in range, so there is none
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=tuple(range(index.ndim, index.ndim + len(row))), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    index = jax.lax.expand_dims(index, (index.ndim,))
    mode = jax.lax.GatherScatterMode.PROMISE_IN_BOUNDS
    return jax.lax.gather(values, index, numbers, slice_sizes=(1, *row), mode=mode)


def joined(parts: Sequence[Array]) -> Array:
    """Arrays one after the other: one alone without a copy, and int32[0] of none."""
    if not parts:
        return jnp.zeros(0, jnp.int32)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def take_or(values: Array, index: Array, fill: float) -> Array:
    """`values[index]`, and `fill` for an index past the end; no index is negative."""
    count, row = values.shape[0], values.shape[1:]
    if not count:
        return jnp.full(index.shape + row, fill, values.dtype)
    index = jnp.asarray(index)
    there = jax.lax.lt(index, jax.lax.full_like(index, count))
    found = take(values, jax.lax.min(index, jax.lax.full_like(index, count - 1)))
    there = jax.lax.broadcast_in_dim(there, found.shape, tuple(range(index.ndim)))
    return jax.lax.select(there, found, jax.lax.full_like(found, fill))


def put(base: Array, place: Array, values: Any, unique: bool = False) -> Array:
    """`base` with `values` at `place`; places out of range are left out. `unique`: the others are distinct."""
    values = jnp.broadcast_to(jnp.asarray(values, base.dtype), place.shape)
    place = jax.lax.expand_dims(place, (1,))
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(base, place, values, _WRITE, unique_indices=unique, mode=mode)


# Up to this number of entries, XLA sorts by one kernel.
_FEW = 1 << 11


def sort_pairs(key: Array, bound: int, values: Array | None = None) -> tuple[Array, Array]:
    """Keys and values in the stable order by key: uint32 and as `values`.

    Args:
        key: non-negative integers, [size].
        bound: an exclusive upper bound of the keys, at most 2^32.
        values: int32[size]; None: the positions.
    """

    def by_xla(key: Array, *values: Array) -> tuple[Array, Array]:
        dtype = next(t for t in (jnp.uint8, jnp.uint16, jnp.uint32) if bound - 1 <= jnp.iinfo(t).max)
        order = values[0] if values else jnp.arange(key.shape[0], dtype=jnp.int32)
        sorted_key, sorted_values = jax.lax.sort((key.astype(dtype), order), num_keys=1, is_stable=True)
        return sorted_key.astype(jnp.uint32), sorted_values

    given = [key.astype(jnp.uint32)] if values is None else [key.astype(jnp.uint32), values]
    if key.shape[0] <= _FEW:
        return by_xla(*given)
    return ordering.sort_pairs(given[0], values, (bound - 1).bit_length(), by_xla)


def stable_sort(
    columns: Sequence[Array], bounds: Sequence[int], wanted: int | None = None
) -> tuple[list[Array], Array]:
    """The stable order by `columns`, the most significant first, and the columns in that order.

    Args:
        columns: non-negative int32[size] each.
        bounds: for each column an exclusive upper bound of its values, at most 2^31.
        wanted: how many of the columns are returned, from the first on; None: all.

    Returns:
        The sorted columns, and int32[size], positions in sorted order.
    """
    # As many columns as fit are sorted as one word, from which the sorted columns are read back.
    groups: list[list[int]] = [[]]
    for column, bound in enumerate(bounds):
        if groups[-1] and prod(bounds[c] for c in groups[-1]) * bound > _WORD:
            groups.append([])
        groups[-1].append(column)
    order = None
    for group in reversed(groups):
        word = jnp.zeros(columns[0].shape[0], jnp.uint32)
        for column in group:
            word = word * jnp.uint32(bounds[column]) + columns[column].astype(jnp.uint32)
        if order is not None:
            word = take(word, order)
        word, order = sort_pairs(word, prod(bounds[c] for c in group), order)
    assert order is not None
    found = [take(column, order) for column in columns[len(groups[0]) :]]
    word = word.astype(jnp.uint32)
    for column in reversed(groups[0]):
        found.insert(0, (word % jnp.uint32(bounds[column])).astype(jnp.int32))
        word = word // jnp.uint32(bounds[column])
    return found[:wanted], order


def inverse(order: Array) -> Array:
    """The inverse of a permutation: int32[size]."""
    position = jnp.arange(order.shape[0], dtype=jnp.int32)
    return put(jax.lax.full_like(position, 0), order, position, unique=True)


def begins_run(*columns: Array) -> Array:
    """bool[size]: where a run of entries that are equal in all columns begins."""
    position = jnp.arange(columns[0].shape[0], dtype=jnp.int32)
    begins = position == 0
    for column in columns:
        begins |= column != jax.lax.pad(column, column.dtype.type(0), [(1, -1, 0)])  # the one before
    return begins


def count_before(counts: Array) -> Array:
    """int32[..., size + 1]: the sum of `counts` (or flags) before each entry, and at the end the sum of all."""
    # With a zero in front of the counts, which XLA adds as it reads them; in front of the sums it takes a kernel.
    front = [(0, 0, 0)] * (counts.ndim - 1) + [(1, 0, 0)]
    return cumulative_sum(jax.lax.pad(counts.astype(jnp.int32), np.int32(0), front))


# Up to this number of entries, one kernel sums them by additions.
_SHORT = 32
# Entries that one kernel of a CPU sums. XLA's own cumulative sum of 4,380 entries is nine kernels, this one four: they
# compile in 70 % of the time, and run as fast or faster up to a million entries.
_WINDOW = 16


def cumulative_sum(x: Array) -> Array:
    """int32[..., size]: sums of integers or flags along the last axis, up to each entry and with it."""
    x = x.astype(jnp.int32)
    return ordering.sums(x, _sums_by_xla) if x.shape[-1] > _WINDOW * _WINDOW else _sums_by_xla(x)


def _sums_by_xla(x: Array) -> Array:
    size = x.shape[-1]
    front: list[tuple[int, int, int]] = [(0, 0, 0)] * (x.ndim - 1)
    if platform() != "cpu":
        if size > _SHORT:
            return jax.lax.cumsum(x, axis=x.ndim - 1)
        step = 1
        while step < size:
            x = x + jax.lax.pad(x, np.int32(0), [*front, (step, -step, 0)])
            step *= 2
        return x
    if size <= 2 * _WINDOW:
        shape, rank = (*x.shape[:-1], size, size), x.ndim
        entries = jax.lax.broadcast_in_dim(x, shape, (*range(rank - 1), rank))
        counts = jax.lax.broadcast_in_dim(np.tri(size, dtype=bool), shape, (rank - 1, rank))
        return jax.lax.reduce_sum(jax.lax.select(counts, entries, jax.lax.full_like(entries, 0)), (rank,))
    rows = -(-size // _WINDOW)
    x = jax.lax.pad(x, np.int32(0), [*front, (0, rows * _WINDOW - size, 0)]).reshape(*x.shape[:-1], rows, _WINDOW)
    within = _sums_by_xla(x)
    before = _sums_by_xla(jax.lax.pad(within[..., -1], np.int32(0), [*front, (1, -1, 0)]))
    return (within + before[..., None]).reshape(*within.shape[:-2], rows * _WINDOW)[..., :size]


def put_where(base: Array, flags: Array, place: Array, values: Array) -> Array:
    """`base` with `values` written at `place` where `flags` is True; these places are distinct."""
    return put(base, jax.lax.select(flags, place, jax.lax.full_like(place, base.shape[0])), values)


def row_offsets(index: Array, num_rows: int) -> Array:
    """int32[rows + 1]: where each row begins, for an ascending `index`; entries with the row `num_rows` are padding."""
    size = index.shape[0]
    starts = put_where(
        jnp.full(num_rows + 1, size, jnp.int32), begins_run(index), index, jnp.arange(size, dtype=jnp.int32)
    )
    return jax.lax.cummin(starts, reverse=True)  # empty rows begin where the next row does


def row_of_positions(offsets: Array, size: int) -> Array:
    """int32[size]: for each position the last row that begins at or before it; `offsets` ascend from 0."""
    rows = offsets.shape[0]
    if rows * size <= 1 << 22:  # a single kernel, though it compares all with all
        position = jnp.arange(size, dtype=jnp.int32)
        return jnp.sum(offsets[1:, None] <= position[None], axis=0, dtype=jnp.int32)
    begun = jnp.zeros(size, jnp.int32).at[offsets[1:]].add(1, mode="drop", wrap_negative_indices=False)
    return cumulative_sum(begun)
