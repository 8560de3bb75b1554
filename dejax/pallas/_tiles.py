"""Operations that kernels use often, written with `lax` because it is traced faster than `jax.numpy`.

Functions of `jax.numpy` and the operators of arrays are jitted: for new shapes each call is traced by itself, which
takes 0.2 to 0.5 ms (0.05 to 0.2 ms with `jit` disabled) instead of 0.01 ms in `lax`. A kernel has a hundred operations
on tiles with shapes of their own, a training step has some 40 kernels, and even a program that is found in the
compilation cache is traced first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def broadcast(x: Any, shape: tuple[int, ...]) -> jax.Array:
    """Broadcasts a scalar, or a tile with as many axes as `shape`, to `shape`: axes of size 1 are repeated."""
    return x if x.shape == shape else lax.broadcast_in_dim(x, shape, tuple(range(x.ndim)))


def resized(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """A tile in another shape, which where it can be has sides of 1 inserted and removed.

    Triton's compiler knows which threads hold a tile that it broadcasts or reduces along an axis, be it of size 1. What
    comes out of a reshape it lays out anew: each of its numbers then goes from one thread to another, by shuffles or
    through shared memory, and what is computed of it may be in yet another layout.
    """
    if x.shape == shape:
        return x
    inserted, removed, axis = [], [], 0
    for number, side in enumerate(shape):
        while axis < x.ndim and x.shape[axis] == 1 != side:
            removed.append(axis)
            axis += 1
        if axis < x.ndim and x.shape[axis] == side:
            axis += 1
        elif side == 1:
            inserted.append(number)
        else:
            return lax.reshape(x, shape)
    removed += range(axis, x.ndim)
    if not shape or any(x.shape[a] != 1 for a in removed) or (removed and x.dtype == jnp.bool_):
        return lax.reshape(x, shape)
    for a in reversed(removed):
        x = lax.reduce_max(x, (a,))
    return lax.expand_dims(x, inserted)


def as_integers(function: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Applies a function that compares elements to the bits of a tile of 32-bit elements, as integers.

    Floats that are not negative have the order of their bits, NaN last, and equal ones have equal bits.
    """
    if x.dtype == jnp.int32:
        return function(x)
    return lax.bitcast_convert_type(function(lax.bitcast_convert_type(x, jnp.int32)), x.dtype)


def with_axes(x: jax.Array, count: int) -> jax.Array:
    """The tile with `count` axes of size 1 appended."""
    return resized(x, (*x.shape, *(1,) * count))


def where(mask: jax.Array, x: Any, y: Any) -> jax.Array:
    """`x` where `mask` holds, else `y`. All are scalars or tiles of one rank, whose axes of size 1 are broadcast."""
    dtype = jnp.result_type(x, y)
    shape = np.broadcast_shapes(mask.shape, np.shape(x), np.shape(y))
    x, y = (a if isinstance(a, jax.Array) else np.asarray(a, dtype) for a in (x, y))
    return lax.select(broadcast(mask, shape), broadcast(x, shape), broadcast(y, shape))


def both(mask: jax.Array, other: jax.Array) -> jax.Array:
    """The conjunction of two masks with as many axes; axes of size 1 are broadcast."""
    shape = np.broadcast_shapes(mask.shape, other.shape)
    return lax.bitwise_and(broadcast(mask, shape), broadcast(other, shape))


def within(index: jax.Array, length: int, mask: jax.Array) -> jax.Array:
    """The mask of elements where `mask` holds and an int32 index is in 0, 1, ..., `length - 1`."""
    return lax.bitwise_and(lax.bitwise_and(mask, lax.ge(index, np.int32(0))), lax.lt(index, np.int32(length)))


def steps(count: jax.Array, size: int) -> jax.Array:
    """How many steps of length `size` cover `count` elements, int32."""
    return lax.div(lax.add(count, np.int32(size - 1)), np.int32(size))
