"""Tiles whose rows have a factor of their own, kept apart: scalars are multiplied by scalars before rows are.

With 64 features, a scalar of a row takes one multiplication and the row takes 64. A row in 16 bits times its
power of two, times a weight, over a degree, and zero where a slot has no entry: four passes over the tile, or one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._tiles import broadcast, resized, where


@dataclass(frozen=True, slots=True)
class Factored:
    """A tile that is the product `tile * factor`, where few elements of the factor belong to many of the tile.

    The factor is multiplied only where the product itself is needed: factors meet each other first, which are smaller.

    Attributes:
      tile: float32[rows, entries, *padded features].
      factor: float32 with as many axes, of size 1 where one element belongs to all of the tile's axis; None for 1.
      zeros: whether `tile` is zero wherever a row of the tile has no entry.
    """

    tile: jax.Array
    factor: jax.Array | None = None
    zeros: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the product."""
        return self.tile.shape

    @property
    def ndim(self) -> int:
        """Number of axes of the product."""
        return self.tile.ndim

    def whole(self) -> jax.Array:
        """Computes the product `tile * factor`."""
        return self.tile if self.factor is None else lax.mul(self.tile, broadcast(self.factor, self.tile.shape))

    def times(self, factor: jax.Array) -> Factored:
        """The same tile with its factor multiplied by `factor`, which has as many axes."""
        return Factored(self.tile, factor if self.factor is None else self.factor * factor, self.zeros)

    def reshape(self, *shape: int) -> Factored:
        """The product with axes of size 1 inserted or removed.

        It stays `Factored` if the factor has one scalar for all features of a row; otherwise the product is computed.
        """
        if self.factor is None:
            return Factored(resized(self.tile, shape), None, self.zeros)
        lead = self.factor.shape[:2]
        if any(side != 1 for side in self.factor.shape[2:]):
            return Factored(resized(self.whole(), shape))
        return Factored(resized(self.tile, shape), resized(self.factor, (*lead, *(1,) * (len(shape) - 2))), self.zeros)


def whole(value: Any) -> Any:
    """Computes the product of a `Factored`; returns any other tile as it is."""
    return value.whole() if isinstance(value, Factored) else value


def scaled(value: Any, columns: jax.Array) -> Any:
    """A tile or a `Factored` times finite values of the same rank, one for each column."""
    if isinstance(value, Factored):
        return Factored(lax.mul(value.tile, broadcast(columns, value.tile.shape)), value.factor, value.zeros)
    shape = np.broadcast_shapes(value.shape, columns.shape)
    return lax.mul(broadcast(value, shape), broadcast(columns, shape))


def reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """A tile or a `Factored` with axes of size 1 inserted or removed."""
    return value.reshape(*shape) if isinstance(value, Factored) else resized(value, shape)


# A tile is multiplied into another tile's factor if it has at most one element for this many of the other's.
_NARROWER = 4


def _is_factor(x: Any, of: Any) -> bool:
    """Whether a tile has one element for many elements of another tile, so that it may join the other's factor."""
    sides = zip(x.shape[2:], of.shape[2:], strict=True) if x.ndim == of.ndim else ()
    return (
        not isinstance(x, Factored)
        and x.ndim == of.ndim
        and all(a in (1, b) for a, b in sides)
        and math.prod(x.shape[2:]) * _NARROWER <= math.prod(of.shape[2:])
    )


def product(x: Any, y: Any) -> Any:
    """`x * y` of one rank; either may be `Factored`. A tile with one element for many is multiplied into the factor."""
    for left, right in ((x, y), (y, x)):
        if isinstance(left, Factored):
            if _is_factor(right, left):
                return left.times(right)
            other = whole(right)
            return Factored(left.tile * other, left.factor)
    return x * y


def quotient(x: Any, y: Any) -> Any:
    """`x / y` of one rank. If one element of `y` divides many of `x`, its inverse is taken once and multiplied."""
    y = whole(y)
    return product(x, 1.0 / y) if x.ndim == y.ndim and _is_factor(y, x) else whole(x) / y


def sum_axis(x: Any, axis: int, size: int, keepdims: bool = False) -> Any:
    """The sum over a feature axis of a tile, padded lanes left out whatever they hold."""
    if isinstance(x, Factored):
        if x.factor is None or x.factor.shape[axis] != 1:
            return sum_axis(x.whole(), axis, size, keepdims)
        total = sum_axis(x.tile, axis, size, True) * x.factor
        return total if keepdims else resized(total, (*total.shape[:axis], *total.shape[axis + 1 :]))
    if x.shape[axis] != size:
        lanes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        x = jnp.where(lanes < size, x, jnp.zeros_like(x))
    total = lax.reduce_sum(x, (axis,))
    return jnp.expand_dims(total, axis) if keepdims else total


def max_axis(x: jax.Array, axis: int, size: int, keepdims: bool = False) -> jax.Array:
    """The maximum over a feature axis of a tile, NaN for NaN; padded lanes left out whatever they hold."""
    if x.shape[axis] != size:
        lanes = lax.broadcasted_iota(jnp.int32, x.shape, axis)
        x = jnp.where(lanes < size, x, jnp.full_like(x, -jnp.inf))
    largest = _triton.reduce_max(x, axis)
    return jnp.expand_dims(largest, axis) if keepdims else largest


def add(total: jax.Array, value: Any, inside: jax.Array, weight: jax.Array | None = None) -> jax.Array:
    """`total + weight * value` where `inside`, else `total`.

    Args:
      total: float32[rows, entries, *padded features].
      value: a tile of that shape or a `Factored`.
      inside: bool, of the same rank, which slots hold an entry.
      weight: a tile with as many axes.
    """
    if isinstance(value, Factored) and value.zeros:
        factor = value.factor if weight is None else weight if value.factor is None else value.factor * weight
        if factor is None:
            return lax.add(total, value.tile)
        # The tile has zeros in slots without an entry, but the factor may have infinities.
        factor = broadcast(where(inside, factor, 0.0), total.shape)
        return _triton.multiply_add(value.tile, factor, total)
    tile = whole(value)
    # The select is on the product: a slot without an entry may hold any value, infinities included.
    return lax.add(total, where(inside, tile if weight is None else lax.mul(broadcast(weight, tile.shape), tile), 0.0))
