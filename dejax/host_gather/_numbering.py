"""Local numbers for the nodes of a sampled graph."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dejax.host_gather._ids import in_range


def unique_seeds(seeds: Array, num_nodes: int) -> Array:
    """Seeds in the given order; -1 for seeds out of range and for repeated ones after the first."""
    positions = jnp.arange(seeds.shape[0], dtype=jnp.int32)
    wanted = jnp.where(in_range(seeds, num_nodes), seeds, -1).astype(jnp.int32)
    ordered, at = jax.lax.sort((wanted, positions), num_keys=1)
    again = jnp.concatenate([jnp.zeros(1, bool), ordered[1:] == ordered[:-1]])[: seeds.shape[0]]
    return wanted.at[at].set(jnp.where(again, -1, ordered))


# Numbering by a table of all nodes takes about 20 bytes of traffic per node, by sorting about 100 per edge.
_DENSE_NODES_PER_EDGE = 4


def number_nodes(known: Array, found: Array, limit: int, num_nodes: int) -> tuple[Array, Array, Array]:
    """Numbers found nodes: known nodes keep their local numbers, new nodes follow by ascending node.

    The order is ascending so that the next hop reads its lists in the order in which they lie in memory.

    Args:
        known: int32[k], the node of each local number, -1 for padding.
        found: int32[n], nodes, -1 for padding.
        limit: the most local numbers.
        num_nodes: number of nodes of the whole graph.

    Returns:
        int32[limit] the node of each local number; int32[n] the local number of each of `found`, -1 for none; int32
        scalar how many new nodes did not fit.
    """
    dense = num_nodes <= _DENSE_NODES_PER_EDGE * found.shape[0]
    grown, local, count = (number_by_table if dense else number_by_sort)(known, found, limit, num_nodes)
    return grown, jnp.where(local < limit, local, -1), jnp.maximum(count - limit, 0).astype(jnp.int32)


def number_by_table(known: Array, found: Array, limit: int, num_nodes: int) -> tuple[Array, Array, Array]:
    old = known.shape[0]
    at = jnp.where(found >= 0, found, num_nodes)
    own = jnp.where(known >= 0, known, num_nodes)
    new = jnp.zeros(num_nodes, bool).at[at].set(True, mode="drop").at[own].set(False, mode="drop")
    number = old - 1 + jnp.cumsum(new, dtype=jnp.int32)
    count = number[-1] + 1 if num_nodes else jnp.int32(old)
    slots = jnp.where(new & (number < limit), number, limit)
    grown = jnp.full((limit,), -1, jnp.int32).at[:old].set(known)
    grown = grown.at[slots].set(jnp.arange(num_nodes, dtype=jnp.int32), mode="drop")
    number = number.at[own].set(jnp.arange(old, dtype=jnp.int32), mode="drop")
    return grown, number.at[at].get(mode="fill", fill_value=-1), count


def number_by_sort(known: Array, found: Array, limit: int, num_nodes: int) -> tuple[Array, Array, Array]:
    del num_nodes
    old = known.shape[0]
    everything = jnp.concatenate([known, found])
    positions = jnp.arange(everything.shape[0], dtype=jnp.int32)
    # The sort is stable: a known node comes before its copies in `found`.
    ordered, at = jax.lax.sort((everything, positions), num_keys=1)
    first = jnp.concatenate([jnp.ones(1, bool), ordered[1:] != ordered[:-1]])
    new = first & (at >= old) & (ordered >= 0)
    number = jnp.where(new, old - 1 + jnp.cumsum(new, dtype=jnp.int32), at)
    number = number[jax.lax.cummax(jnp.where(first, positions, 0))]  # the number of the first of equal nodes
    slots = jnp.where(new & (number < limit), number, limit)
    grown = jnp.full((limit,), -1, jnp.int32).at[:old].set(known).at[slots].set(ordered, mode="drop")
    local = jnp.zeros_like(positions).at[at].set(jnp.where(ordered >= 0, number, -1), unique_indices=True)
    return grown, local[old:], old + new.sum()
