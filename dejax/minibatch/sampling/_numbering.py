"""Numbers of seeds, and of found nodes of all types."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.cuda import ordering
from dejax.host_gather._ids import in_range
from dejax.rgnn.graphs.building.sorting_traced import begins_run, cumulative_sum, put, put_where, sort_pairs, take
from dejax.rgnn.graphs.building.static_tables import on_device

_PAIRWISE = 1 << 12
"""Up to this number of seeds, one kernel compares all of them with all; sorting them takes about fifteen kernels."""


def number_seeds(seeds: Array, num_nodes: int) -> tuple[Array, Array]:
    """Seeds as local numbers 0, 1, and so on.

    Returns:
        int32[seeds], the node of each local number, -1 for seeds out of range and for repeated ones after the first;
        int32[seeds], the local number of each seed: that of the first one of equal seeds, its own if it is out of
        range.
    """
    positions = jnp.arange(seeds.shape[0], dtype=jnp.int32)
    wanted = jnp.where(in_range(seeds, num_nodes), seeds, -1).astype(jnp.int32)
    if seeds.shape[0] <= _PAIRWISE:
        first_of = jnp.min(jnp.where(wanted[:, None] == wanted, positions, seeds.shape[0]), axis=1)
        number = jnp.where(wanted >= 0, first_of, positions)
        return jnp.where(number == positions, wanted, -1), number
    ordered, at = jax.lax.sort((wanted, positions), num_keys=1, is_stable=True)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])[: seeds.shape[0]]
    first_at = at[jax.lax.cummax(jnp.where(first, positions, 0))]
    number = jnp.zeros_like(positions).at[at].set(first_at, unique_indices=True)
    number = jnp.where(wanted >= 0, number, positions)
    return jnp.where(number == positions, wanted, -1), number


@dataclass(frozen=True, slots=True, eq=False)
class NumberRanges:
    """The numbers among all nodes that a hop may give. Static.

    Attributes:
        counts: for each node type the number of nodes of the graph.
        first: for each node type the first number that the hop gives.
        sizes: for each node type how many numbers it may give. The ranges lie side by side, by type.
    """

    counts: tuple[int, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Nodes:
    """Nodes of several types.

    Attributes:
        nodes: int32[n], numbers within the types in the graph, -1 for padding.
        types: int32[n].
        trees: int32[n], of nodes of which each tree has its own copy; None where all trees share nodes.
    """

    nodes: Array
    types: Any
    trees: Array | None = None


_MOST_NODES = 2**31 - 1  # of all types, that one int32 counts, with one for none
# Numbering by a table of all nodes moves about 20 bytes for each node of the graph, by sorting about 100 for each node
# that was found.
_TABLE_NODES_PER_FOUND = 4


def number_found(known: Nodes, found: Nodes, places: NumberRanges) -> tuple[Nodes, Array, Array]:
    """Numbers found nodes: known nodes keep their numbers, new ones follow by type and node.

    The order is ascending so that the next hop reads its lists in the order in which they lie in memory.

    Args:
        known: the nodes of the numbers 0, 1, and so on.
        found: nodes, some of them several times.
        places: the numbers of new nodes.

    Returns:
        The known nodes and the new ones; int32[n], the number of each of `found`, -1 for none; int32[types], how many
        new nodes there are, those that did not fit included.
    """
    if known.trees is not None or sum(places.counts) >= _MOST_NODES:
        return by_sort(known, found, places)
    one_type = len(places.counts) == 1
    in_table = one_type and 0 < places.counts[0] <= _TABLE_NODES_PER_FOUND * found.nodes.shape[0]

    def by_xla(_: Array) -> tuple[Array, Array, Array]:
        after, local, added = (by_table if in_table else by_sort)(known, found, places)
        return after.nodes, local, added

    nodes, kinds = _together(known, found)
    bases = np.cumsum([0, *places.counts]).tolist()
    keys = jnp.where(nodes >= 0, nodes + take(np.array(bases[:-1], np.int32), kinds), bases[-1])
    old = known.nodes.shape[0]
    counted = old, bases[:-1], bases[-1], places.first, places.sizes, old + sum(places.sizes)
    after, local, added = ordering.number(keys, *counted, by_xla)
    return Nodes(after, _all_types(known, places.sizes)), local, added


def _together(known: Nodes, found: Nodes) -> tuple[Array, Array]:
    """The nodes of both, and their types."""
    kinds = jnp.asarray(on_device(np.asarray(known.types))[0]), jnp.asarray(found.types)
    return jnp.concatenate([known.nodes, found.nodes]), jnp.concatenate(kinds)


def by_table(known: Nodes, found: Nodes, places: NumberRanges) -> tuple[Nodes, Array, Array]:
    """`number_found` for one type, with a table that has the number of each node of the graph."""
    (count,), (first,), (size,) = places.counts, places.first, places.sizes
    own, at = (jnp.where(some.nodes >= 0, some.nodes, count) for some in (known, found))
    new = put(put(jnp.zeros(count, bool), at, True), own, False)
    rank = cumulative_sum(new)
    number = jnp.where(new & (rank <= size), first - 1 + rank, -1)
    slots = jnp.where(number >= 0, number, first + size)
    nodes = put(jnp.pad(known.nodes, (0, size), constant_values=-1), slots, jax.lax.iota(jnp.int32, count))
    number = put(number, own, jax.lax.iota(jnp.int32, known.nodes.shape[0]), unique=True)
    local = jnp.where(at < count, take(number, jnp.minimum(at, count - 1)), -1)
    return Nodes(nodes, _all_types(known, places.sizes)), local, rank[-1:]


def by_sort(known: Nodes, found: Nodes, places: NumberRanges) -> tuple[Nodes, Array, Array]:
    """`number_found` with one sort of the known and the found nodes."""
    types, old = len(places.counts), known.nodes.shape[0]
    nodes, kinds = _together(known, found)
    position = jnp.arange(nodes.shape[0], dtype=jnp.int32)
    trees = None
    if known.trees is not None and found.trees is not None:
        trees = jnp.concatenate([known.trees, found.trees])
    node, kind, tree, at = _ordered(nodes, kinds, trees, position, places.counts)
    valid = kind < types
    # The sorts are stable: a known node comes before its copies in `found`.
    first = begins_run(node, kind) if tree is None else begins_run(node, kind, tree)
    new = first & valid & (at >= old)
    of_type = new[None] & (kind[None] == jnp.arange(types, dtype=jnp.int32)[:, None])
    new_of = jnp.sum(of_type, axis=1, dtype=jnp.int32)
    # One cumulative sum, which is several kernels, for both: equal nodes, and new ones.
    run, rank = cumulative_sum(jnp.stack([first, new])) - 1
    first_number, sizes = (np.array(some, np.int32) for some in (places.first, places.sizes))
    shift = first_number - cumulative_sum(new_of) + new_of
    own = jnp.minimum(kind, types - 1)
    number = jnp.where(new, rank + take(shift, own), at)
    number = take(put_where(jnp.zeros_like(position), first, run, number), run)  # that of the first of equal nodes
    fits = valid & (number < take(first_number + sizes, own))
    total = old + int(sizes.sum())
    slots = jnp.where(new & fits, number, total)

    def grown(before: Array, values: Array) -> Array:
        padded = jnp.pad(before, (0, total - old), constant_values=-1)
        return put(padded, slots, values)

    grown_trees = None if known.trees is None or tree is None else grown(known.trees, tree)
    after = Nodes(grown(known.nodes, node), _all_types(known, places.sizes), grown_trees)
    local = put(jnp.zeros_like(position), at, jnp.where(fits, number, -1), unique=True)
    return after, local[old:], new_of


def _all_types(known: Nodes, sizes: Sequence[int]) -> np.ndarray:
    """The types of known nodes, and of the places for new ones."""
    return np.concatenate([np.asarray(known.types), np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)])


def _ordered(
    nodes: Array, kinds: Array, trees: Array | None, position: Array, counts: Sequence[int]
) -> tuple[Array, Array, Array | None, Array]:
    """Nodes, types and trees in the stable order by (type, node, tree), and positions; padding has the last type."""
    bases = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    total = int(bases[-1])
    if total >= _MOST_NODES:
        kind = jnp.where(nodes >= 0, kinds, len(counts))
        keys = (kind, nodes, position) if trees is None else (kind, nodes, trees, position)
        kind, node, *rest = jax.lax.sort(keys, num_keys=len(keys) - 1, is_stable=True)
        return node, kind, None if trees is None else rest[0], rest[-1]
    base = jnp.asarray(bases[:-1], jnp.int32)
    key = jnp.where(nodes >= 0, nodes + take(base, kinds), total)
    tree = None
    if trees is None:
        key, at = sort_pairs(key, total + 1)
    else:
        key, tree, at = jax.lax.sort((key, trees, position), num_keys=2, is_stable=True)
    key = key.astype(jnp.int32)
    kind = sum((key >= bound for bound in bases[1:].tolist()), jnp.zeros_like(key))
    node = key - take(np.append(bases[:-1], 0).astype(np.int32), kind)
    return node, kind, tree, at
