"""Local numbers of seeds, of found nodes of all types, and of nodes of which each seed has its own copy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.host_gather._ids import in_range
from dejax.rgnn.graphs.sorting_traced import begins_run, sort_pairs


def number_seeds(seeds: Array, num_nodes: int) -> tuple[Array, Array]:
    """Seeds as local numbers 0, 1, and so on.

    Returns:
        int32[seeds], the node of each local number, -1 for seeds out of range and for repeated ones after the first;
        int32[seeds], the local number of each seed: that of the first one of equal seeds, its own if it is out of
        range.
    """
    positions = jnp.arange(seeds.shape[0], dtype=jnp.int32)
    wanted = jnp.where(in_range(seeds, num_nodes), seeds, -1).astype(jnp.int32)
    ordered, at = jax.lax.sort((wanted, positions), num_keys=1, is_stable=True)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])[: seeds.shape[0]]
    first_at = at[jax.lax.cummax(jnp.where(first, positions, 0))]
    number = jnp.zeros_like(positions).at[at].set(first_at, unique_indices=True)
    number = jnp.where(wanted >= 0, number, positions)
    return jnp.where(number == positions, wanted, -1), number


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Nodes of one type.

    Attributes:
        known: int32[k], the node of each local number so far, -1 for padding.
        found: int32[n], nodes, -1 for padding.
        limit: the most local numbers.
        count: number of nodes of the type.
    """

    known: Array
    found: Array
    limit: int
    count: int


def number_together(types: Sequence[Numbers]) -> list[tuple[Array, Array, Array]]:
    """Numbers the found nodes of several types with one sort: known nodes keep their numbers, new ones follow by node.

    Args:
        types: they have fewer than 2**31 nodes together.

    Returns:
        For each type as `dejax.host_gather` numbers nodes: int32[limit] the node of each local number, -1 for padding;
        int32[n] the local number of each of `found`, -1 for none; int32 scalar, how many new nodes did not fit.
    """
    bases = _before([some.count for some in types])
    known_first = _before([some.known.shape[0] for some in types])
    num_known, total = known_first[-1], bases[-1]
    parts = [(some.known, base) for some, base in zip(types, bases[:-1], strict=True)]
    parts += [(some.found, base) for some, base in zip(types, bases[:-1], strict=True)]
    keys = jnp.concatenate([jnp.where(nodes >= 0, nodes + base, total) for nodes, base in parts])
    position = jnp.arange(keys.shape[0], dtype=jnp.int32)
    # The sort is stable: a known node comes before its copies in `found`.
    ordered, at = sort_pairs(keys, total + 1, position)
    node = ordered.astype(jnp.int32)
    first = begins_run(node)
    valid, new = node < total, first & (node < total) & (at >= num_known)
    kind = sum((node >= base for base in bases[1:-1]), jnp.zeros_like(node))
    new_of = jnp.stack([jnp.sum(new & (kind == t), dtype=jnp.int32) for t in range(len(types))])
    sizes, limits = (
        np.array(some, np.int32) for some in zip(*((n.known.shape[0], n.limit) for n in types), strict=True)
    )
    shift = sizes - jnp.cumsum(new_of) + new_of
    number = jnp.where(new, jnp.cumsum(new, dtype=jnp.int32) - 1 + shift[kind], at - _at(known_first, kind))
    number = number[jax.lax.cummax(jnp.where(first, position, 0))]
    fits = valid & (number < jnp.asarray(limits)[kind])
    grown_first = _before(limits.tolist())
    slots = jnp.where(new & fits, _at(grown_first, kind) + number, grown_first[-1])
    padded = [jnp.pad(n.known, (0, n.limit - n.known.shape[0]), constant_values=-1) for n in types]
    grown = jnp.concatenate(padded).at[slots].set(node - _at(bases, kind), mode="drop")
    local = jnp.zeros_like(position).at[at].set(jnp.where(fits, number, -1), unique_indices=True)
    found_first = _before([n.found.shape[0] for n in types])
    return [
        (
            grown[grown_first[t] : grown_first[t + 1]],
            local[num_known + found_first[t] : num_known + found_first[t + 1]],
            jnp.maximum(int(sizes[t]) + new_of[t] - n.limit, 0),
        )
        for t, n in enumerate(types)
    ]


def _before(sizes: Sequence[int]) -> list[int]:
    """The sum before each size, and that of all."""
    return [0, *np.cumsum(sizes, dtype=np.int64).tolist()]


def _at(firsts: Sequence[int], kind: Array) -> Array:
    return jnp.asarray(np.array(firsts[:-1], np.int32))[kind]


def number_copies(
    known: tuple[Array, Array], found: tuple[Array, Array], limit: int
) -> tuple[tuple[Array, Array], Array, Array]:
    """Numbers pairs of node and tree, as `dejax.host_gather` numbers nodes.

    Args:
        known: int32[k] nodes and trees of the local numbers so far, -1 for padding.
        found: int32[n] nodes, -1 for padding, and trees.
        limit: the most local numbers.

    Returns:
        int32[limit] nodes and trees of all local numbers; int32[n] the local number of each of `found`, -1 for none;
        int32 scalar, how many new pairs did not fit.
    """
    old = known[0].shape[0]
    node, tree = (jnp.concatenate(pair) for pair in zip(known, found, strict=True))
    positions = jnp.arange(node.shape[0], dtype=jnp.int32)
    node, tree, at = jax.lax.sort((node, tree, positions), num_keys=2, is_stable=True)
    first = (positions == 0) | (node != jnp.roll(node, 1)) | (tree != jnp.roll(tree, 1))
    new = first & (at >= old) & (node >= 0)
    number = jnp.where(new, old - 1 + jnp.cumsum(new, dtype=jnp.int32), at)
    number = number[jax.lax.cummax(jnp.where(first, positions, 0))]
    slots = jnp.where(new & (number < limit), number, limit)
    grown = tuple(
        jnp.full((limit,), -1, jnp.int32).at[:old].set(before).at[slots].set(ordered, mode="drop")
        for before, ordered in zip(known, (node, tree), strict=True)
    )
    local = jnp.zeros_like(positions).at[at].set(jnp.where(node >= 0, number, -1), unique_indices=True)[old:]
    lost = jnp.maximum(old + new.sum() - limit, 0).astype(jnp.int32)
    return (grown[0], grown[1]), jnp.where(local < limit, local, -1), lost
