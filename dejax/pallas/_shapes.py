"""Powers of two, masks and lane indices: every tensor of a kernel has power-of-two sides."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def next_power_of_two(n: int) -> int:
    """The least power of two that is at least `n` and at least 1.

    >>> [next_power_of_two(n) for n in (0, 1, 3, 16, 17)]
    [1, 1, 4, 16, 32]
    """
    return 1 << max(n - 1, 0).bit_length()


def previous_power_of_two(n: int) -> int:
    """The greatest power of two that is at most `n` and at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`shape` with each side at the next power of two."""
    return tuple(next_power_of_two(s) for s in shape)


def padded_size(shape: tuple[int, ...]) -> int:
    return math.prod(padded(shape))


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def lanes(size: int, axis: int, rank: int) -> jax.Array:
    """int32 0, 1, ... along `axis` of a tensor of `rank`, size 1 elsewhere."""
    return lax.broadcasted_iota(jnp.int32, tuple(size if a == axis else 1 for a in range(rank)), axis)


def divide(x: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Quotient and remainder of an int32 tensor without negative entries (`//` spends instructions on their signs)."""
    return lax.div(x, np.int32(size)), lax.rem(x, np.int32(size))


def feature_indices(shape: tuple[int, ...], lead: int, first: int = 0) -> tuple[jax.Array, ...]:
    """A lane index for each feature axis of a tile with `lead` leading axes; the first axis counts from `first`."""
    rank = lead + len(shape)
    found = [lanes(next_power_of_two(s), lead + i, rank) for i, s in enumerate(shape)]
    return (found[0] + first, *found[1:]) if first else tuple(found)


def feature_mask(shape: tuple[int, ...], axis: int | None = None, lead: int = 2) -> jax.Array | None:
    """Which lanes of a tile hold features and not padding.

    Args:
      shape: the true feature shape; the tile is `lead` leading axes and this shape padded to powers of two.
      axis: the feature axis to look at; None for all of them.
      lead: leading axes of the tile: 2 in a body (rows, entries), 1 in an epilogue (rows).

    Returns:
      bool of the tile's rank, size 1 on the axes that do not matter; None where no lane is padding.
    """
    axes = range(len(shape)) if axis is None else (axis % len(shape),)
    mask: jax.Array | None = None
    for a in axes:
        if next_power_of_two(shape[a]) == shape[a]:
            continue
        inside = lanes(next_power_of_two(shape[a]), lead + a, lead + len(shape)) < shape[a]
        mask = inside if mask is None else mask & inside
    return mask
