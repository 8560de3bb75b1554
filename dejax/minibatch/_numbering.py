"""Local numbers of seeds, and of nodes of which each seed has its own copy (temporal samples)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from dejax.host_gather._ids import in_range


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
