"""Sorting and grouping of many small integers inside `jax.jit`.

The forms are those that XLA does fast on a GPU. One unsigned key with one value goes to a radix sort, a pass for each
byte of the key; several keys, or signed keys of 8 or 16 bits, to a sort by comparisons. Sums along an axis are few
kernels. Writes to distinct places are one; adding where many items share a place is one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

_WORD = 1 << 32


def sort_pairs(key: Array, bound: int, values: Array) -> tuple[Array, Array]:
    """Keys and values in the stable order by key; the keys as the shortest unsigned integers that hold them.

    Args:
        key: non-negative integers, [items].
        bound: a number that all keys are below, at most 2^32.
        values: what goes along, [items].
    """
    dtype = next(t for t in (jnp.uint8, jnp.uint16, jnp.uint32) if bound - 1 <= jnp.iinfo(t).max)
    sorted_key, sorted_values = jax.lax.sort((key.astype(dtype), values), num_keys=1, is_stable=True)
    return sorted_key, sorted_values


def stable_sort(columns: Sequence[Array], bounds: Sequence[int]) -> tuple[list[Array], Array]:
    """The stable order by `columns`, the most significant first, and the columns in it.

    Args:
        columns: non-negative int32[items] each.
        bounds: for each column a number that all its values are below, at most 2^31.

    Returns:
        The sorted columns, and int32[items], item ids in sorted order.
    """
    # As many columns as fit are sorted as one word, so that the most significant ones come out of the sort sorted.
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
        if order is None:
            order = jnp.arange(word.shape[0], dtype=jnp.int32)
        else:
            word = word[order]
        word, order = sort_pairs(word, prod(bounds[c] for c in group), order)
    assert order is not None
    found = [column[order] for column in columns[len(groups[0]) :]]
    word = word.astype(jnp.uint32)
    for column in reversed(groups[0]):
        found.insert(0, (word % jnp.uint32(bounds[column])).astype(jnp.int32))
        word = word // jnp.uint32(bounds[column])
    return found, order


def inverse(order: Array) -> Array:
    """The inverse of a permutation: int32[items]."""
    position = jnp.arange(order.shape[0], dtype=jnp.int32)
    return jnp.zeros_like(position).at[order].set(position, unique_indices=True)


def begins_run(*columns: Array) -> Array:
    """bool[items]: where a run of items begins that are equal in all columns."""
    position = jnp.arange(columns[0].shape[0], dtype=jnp.int32)
    begins = position == 0
    for column in columns:
        begins |= column != jnp.roll(column, 1)
    return begins


def count_before(counts: Array) -> Array:
    """int32[..., items + 1]: the sum of `counts` (or flags) before each item, and last of all."""
    sums = jnp.cumsum(counts, axis=-1, dtype=jnp.int32)
    return jnp.concatenate([jnp.zeros((*counts.shape[:-1], 1), jnp.int32), sums], axis=-1)


def put_where(base: Array, flags: Array, place: Array, values: Array) -> Array:
    """`base` with `values` at `place` for the items that `flags` says; their places are distinct."""
    return base.at[jnp.where(flags, place, base.shape[0])].set(values, mode="drop")


def row_offsets(index: Array, num_rows: int) -> Array:
    """int32[rows + 1]: where each row begins among items with ascending `index`; rows of `num_rows` are padding."""
    size = index.shape[0]
    starts = put_where(
        jnp.full(num_rows + 1, size, jnp.int32), begins_run(index), index, jnp.arange(size, dtype=jnp.int32)
    )
    return jax.lax.cummin(starts, reverse=True)  # rows without items begin where the next one does


def row_of_positions(offsets: Array, size: int) -> Array:
    """int32[size]: for each position the last row that begins at or before it; `offsets` ascends from 0."""
    rows = offsets.shape[0]
    if rows * size <= 1 << 22:  # one kernel, if one that compares all with all
        position = jnp.arange(size, dtype=jnp.int32)
        return jnp.sum(offsets[1:, None] <= position[None], axis=0, dtype=jnp.int32)
    begun = jnp.zeros(size, jnp.int32).at[offsets[1:]].add(1, mode="drop")
    return jnp.cumsum(begun, dtype=jnp.int32)
