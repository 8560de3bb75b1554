"""Random draws of edges: uniform or by weight, with and without replacement."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array

_IN_TURN = 8  # up to this number of draws, they are compared one after the other, which XLA does in one kernel
_PAIRWISE = 64  # up to this number of draws, all pairs are compared; sorting more of them is less work
_FINE = 1 << 16  # with more edges, keys need more than 32 random bits


def below(key: Array, shape: tuple[int, ...], bound: Array) -> Array:
    """Uniform integers from 0 to `bound` - 1, of the bound's dtype; 0 where `bound` is below 1.

    They are drawn as integers. Floats in [0, 1) are multiples of 2^-23: scaled to 10^7, they miss a sixth of the
    integers. The bias of `randint` is `bound` / 2^64 here.
    """
    return jax.random.randint(key, shape, 0, jnp.maximum(bound, 1), bound.dtype)


def below_by_bits(bits: Array, bound: Array) -> Array:
    """Uniform integers from 0 to `bound` - 1, int32, of 64 random bits each; 0 where `bound` is below 1.

    They are the upper 32 bits of the product of bits and bound. The bias is `bound` / 2^64.

    Args:
        bits: uint32[2, ...], upper and lower words.
        bound: int32[...].
    """
    scale = jnp.maximum(bound, 1).astype(jnp.uint32)
    (high, carried), low = _upper_product(bits, scale), bits[0] * scale
    total = low + carried
    return (high + (total < low).astype(jnp.uint32)).astype(jnp.int32)


def _upper_product(x: Array, y: Array) -> Array:
    """The upper 32 bits of products of uint32."""
    x0, x1, y0, y1 = x & 0xFFFF, x >> 16, y & 0xFFFF, y >> 16
    right, left = x0 * y1, x1 * y0
    middle = (x0 * y0 >> 16) + (right & 0xFFFF) + (left & 0xFFFF)
    return x1 * y1 + (right >> 16) + (left >> 16) + (middle >> 16)


def subset_of(drawn: Array, degree: Array) -> tuple[Array, Array]:
    """Floyd's algorithm: a uniform subset of `fan_out` positions below `degree`, or all if there are no more.

    Let last(i) = degree - fan_out + i. Draw i is uniform from 0 to last(i), and is replaced by last(i) if its position
    is taken. A position is taken if an earlier draw was the same, or if it is last(j) of an earlier draw j that was
    replaced. Following pointers from i to such j tells which draws are replaced, without a loop over the draws.

    Args:
        drawn: int[seeds, fan_out], the draws.
        degree: int[seeds].

    Returns:
        int[seeds, fan_out] positions, and bool[seeds, fan_out] which of them are valid.
    """
    fan_out = drawn.shape[1]
    i = jnp.arange(fan_out, dtype=degree.dtype)
    degree = degree[:, None]
    last = degree - fan_out + i
    if fan_out <= _IN_TURN:
        return jnp.where(degree <= fan_out, i, _in_turn(drawn, last)), i < degree
    earlier = drawn - (degree - fan_out)  # j, where the draw is last(j)
    pointer = jnp.where((earlier >= 0) & (earlier < i), earlier, i).astype(jnp.int32)
    taken = again_pairwise(drawn) if fan_out <= _PAIRWISE else again_sorted(drawn)
    for _ in range(math.ceil(math.log2(max(fan_out, 2)))):
        taken = taken | jnp.take_along_axis(taken, pointer, axis=1)
        pointer = jnp.take_along_axis(pointer, pointer, axis=1)
    chosen = jnp.where(degree <= fan_out, i, jnp.where(taken, last, drawn))
    return chosen, i < degree


def _in_turn(drawn: Array, last: Array) -> Array:
    """Each draw of a row, or its `last` where a draw before it has taken its position."""
    chosen: list[Array] = []
    for i in range(drawn.shape[1]):
        own = drawn[:, i]
        taken = [own == before for before in chosen]
        chosen.append(jnp.where(functools.reduce(jnp.logical_or, taken), last[:, i], own) if taken else own)
    return jnp.stack(chosen, axis=1)


def again_pairwise(drawn: Array) -> Array:
    """Which draws of a row equal an earlier one of that row."""
    before = jnp.tri(drawn.shape[1], k=-1, dtype=bool)
    return ((drawn[:, :, None] == drawn[:, None, :]) & before).any(axis=2)


def again_sorted(drawn: Array) -> Array:
    """The same as `again_pairwise` by sorting each row, which takes less memory for long rows."""
    place = jax.lax.broadcasted_iota(jnp.int32, drawn.shape, 1)
    ordered, place = jax.lax.sort((drawn, place), dimension=1, num_keys=2)
    same = jnp.concatenate([jnp.zeros_like(ordered[:, :1], bool), ordered[:, 1:] == ordered[:, :-1]], axis=1)
    return jax.lax.sort((place, same), dimension=1, num_keys=1)[1]


def draw_weighted(
    key: Array, alias: Callable[[Array], Array], start: Array, degree: Array, fan_out: int
) -> tuple[Array, Array]:
    """Positions with replacement, in proportion to the weights, by alias tables: a cell, then one of its two edges.

    Args:
        key: jax.random key.
        alias: gives rows of `EdgeWeights.alias` by edge.
        start, degree: int[seeds], the first edge of each seed, and how many it has.
        fan_out: draws per seed.

    Returns:
        int[seeds, fan_out] positions, and bool[seeds, fan_out] which of them are valid: none where all weights are 0.
    """
    for_cell, for_share = jax.random.split(key)
    cell = below(for_cell, (len(start), fan_out), degree[:, None])
    found = alias(jnp.where(degree[:, None] > 0, start[:, None] + cell, -1))
    share, other = jax.lax.bitcast_convert_type(found[..., 0], jnp.float32), found[..., 1]
    own = _happens(for_share, share)
    there = (degree[:, None] > 0) & (other >= 0)
    return jnp.where(own, cell, jnp.maximum(other, 0).astype(cell.dtype)), there


def _happens(key: Array, probability: Array) -> Array:
    """True with this probability, float32, by 64 random bits: 1e-12 is not rounded to a multiple of 2^-23."""
    high, low = jax.random.bits(key, (2, probability.size), jnp.uint32).reshape(2, *probability.shape)
    scaled = probability * 2.0**32
    whole = jnp.floor(scaled)
    rest = jnp.floor((scaled - whole) * 2.0**32)
    sure = probability >= 1
    whole, rest = (jnp.where(sure, 0, x).astype(jnp.uint32) for x in (whole, rest))
    return sure | (high < whole) | ((high == whole) & (low < rest))


def draw_weighted_subset(
    key: Array, logs: Callable[[Array], Array], start: Array, degree: Array, fan_out: int, max_degree: int
) -> tuple[Array, Array]:
    """Positions without replacement by weight: the edges with the `fan_out` largest keys log(weight / Exp(1)).

    Args:
        key: jax.random key.
        logs: gives elements of `EdgeWeights.logs` by edge.
        start, degree: int[seeds], the first edge of each seed, and how many it has.
        fan_out: draws per seed.
        max_degree: further edges of a seed are ignored.

    Returns:
        int[seeds, fan_out] positions, and bool[seeds, fan_out] which of them are valid.
    """
    position = jnp.arange(max_degree, dtype=start.dtype)
    there = position < degree[:, None]
    weight = logs(jnp.where(there, start[:, None] + position, -1))
    usable = there & (weight > -jnp.inf)
    # The largest keys come from the smallest of `max_degree` uniform draws, which must be finely spaced near 0.
    words = 2 if max_degree > _FINE else 1
    bits = jax.random.bits(key, (words, usable.size), jnp.uint32).reshape(words, *usable.shape).astype(jnp.float32)
    uniform = (bits[0] + 0.5) * 2.0**-32 if words == 1 else bits[0] * 2.0**-32 + (bits[1] + 0.5) * 2.0**-64
    exponential = -jnp.log1p(-jnp.minimum(uniform, 1 - 2.0**-24))
    keys = jnp.where(usable, weight - jnp.log(exponential), -jnp.inf)
    keys, chosen = jax.lax.top_k(keys, min(fan_out, max_degree))
    missing = ((0, 0), (0, fan_out - chosen.shape[1]))
    return (
        jnp.pad(chosen, missing).astype(start.dtype),
        jnp.pad(keys, missing, constant_values=-jnp.inf) > -jnp.inf,
    )
