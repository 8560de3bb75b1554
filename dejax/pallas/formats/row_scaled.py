"""Rows in 16 bits with an exponent of their own, and products of such operands: `tf32` and `f32` of the kernels.

TF32 keeps 10 bits of an operand's mantissa and float32's exponent. float16 keeps the same 10 bits. Powers of two make
up for the range that it lacks; they multiply exactly. So rows that only products and sums read can be stored in half
the bytes, and tensor cores multiply float16 at twice the rate of TF32 and take it from shared memory by wider
instructions.

There are two kinds of powers. One belongs to each row: it brings the row's largest element just below 2^15. One
belongs to each column of an array (`columns`): it brings columns of different scales to one scale first, so that a
feature of 10^9 among features of 1, or a weight's column of 10^-9, costs no digits. The columns of a matrix of weights
have powers of their own for each type. An element then keeps its 10 bits down to 2^-29 of the largest of its row, and
vanishes below 2^-40 of it.

`f32` products are three of float16: an operand is the sum of two float16 numbers, which keep 22 bits of it, and the
product of the two small parts, 2^-22 of the whole, is left out. (Ootomo and Yokota, 2022, recover single precision so.)
Tensor cores do that in a fraction of the time that products of float32 take without them. The small part is stored
2^11 times larger, so that it has the range of the large one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from dejax._pytrees import pytree
from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, feature_mask
from dejax.pallas._tiles import as_integers, where

_ONE = 127  # the biased exponent of 1.0
# Biased exponents of powers of two whose inverse is a normal number, too.
_LOW, _HIGH = np.int32(1), np.int32(253)
_MANTISSA, _EXPONENT = np.int32(23), np.int32(0xFF)  # a float32's bits of mantissa, and the mask of its exponent
# Kernels pad the last axis of rows with at least `_LEAST_WIDTH` features to a multiple of `ROW_MULTIPLE` elements,
# because a row that begins at a multiple of 16 bytes is read 8 elements at a time.
_LEAST_WIDTH = 16
ROW_MULTIPLE = 8


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class RowScaled:
    """An array of rows as float16 elements and powers of two.

    Attributes:
      mantissa: float16[rows, *features]. Its last axis may be longer, with zeros behind the features; see `width`.
      exponent: uint8[rows, parts], biased by 127: part p of a row's features (they are cut in equal, contiguous parts)
        is `mantissa * 2 ** (exponent - 127) * columns`.
      columns: bfloat16[*features], powers of two, which that dtype holds as they are; None where all are 1.
      width: number of features on the last axis if `mantissa` has zeros behind them; else None.
    """

    mantissa: Array
    exponent: Array
    columns: Array | None = None
    width: int | None = field(default=None, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *features), without the zeros that are stored behind the features."""
        shape = self.mantissa.shape
        return shape if self.width is None else (*shape[:-1], self.width)

    @property
    def ndim(self) -> int:
        """Number of axes, that of the rows included."""
        return self.mantissa.ndim

    @property
    def dtype(self) -> np.dtype:
        """float32, the dtype of the elements that the mantissas and powers of two stand for."""
        return np.dtype(np.float32)

    @property
    def part_width(self) -> int:
        """Number of neighbouring features of a row that share one exponent."""
        return math.prod(self.shape[1:]) // self.exponent.shape[1]

    def one_exponent(self, width: int, block: int) -> bool:
        """Whether the columns of each tile share one exponent.

        Args:
          width: number of columns in a group; tiles do not cross groups.
          block: number of columns in a tile.
        """
        part = self.part_width
        return self.exponent.shape[1] == 1 or (
            part % min(block, width) == 0 and (width % part == 0 or part % width == 0)
        )

    def reshape(self, *shape: Any) -> RowScaled:
        """The same rows with another shape of their features; arguments as of `jax.Array.reshape`."""
        to = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
        columns = None if self.columns is None else self.columns.reshape(to[1:])
        if self.width is None:
            return RowScaled(self.mantissa.reshape(to), self.exponent, columns)
        if to[-1] == self.width:
            mantissa = self.mantissa.reshape(*to[:-1], self.mantissa.shape[-1])
            return RowScaled(mantissa, self.exponent, columns, self.width)
        return RowScaled(self.mantissa[..., : self.width].reshape(to), self.exponent, columns)

    def whole(self) -> RowScaled:
        """The same rows with their stored padding as ordinary features (zeros), so that `width` is None."""
        columns = self.columns
        if columns is not None and self.width is not None:
            behind = self.mantissa.shape[-1] - self.width
            columns = jnp.pad(columns, [(0, 0)] * (columns.ndim - 1) + [(0, behind)], constant_values=1)
        return RowScaled(self.mantissa, self.exponent, columns)

    def decode(self) -> Array:
        """Computes the rows that are stood for: float32[rows, *features]."""
        rows, parts = self.exponent.shape
        scale = power(self.exponent.astype(jnp.int32))
        flat = self.mantissa[..., : self.width].reshape(rows, parts, self.part_width)
        found = (flat.astype(jnp.float32) * scale[:, :, None]).reshape(self.shape)
        return found if self.columns is None else found * self.columns.astype(jnp.float32)


def stored(features: tuple[int, ...]) -> tuple[int, ...]:
    """The feature axes of the array in which kernels write `RowScaled`."""
    if not features or features[-1] < _LEAST_WIDTH:
        return features
    return (*features[:-1], cdiv(features[-1], ROW_MULTIPLE) * ROW_MULTIPLE)


def of_stored(mantissa: Array, exponent: Array, features: tuple[int, ...], columns: Array | None = None) -> RowScaled:
    """Makes a `RowScaled` with the feature axes `features` from the mantissas and exponents that a kernel wrote."""
    return RowScaled(mantissa, exponent, columns, None if mantissa.shape[1:] == features else features[-1])


def encode(x: Array, parts: int = 1, columns: Array | None = None) -> RowScaled:
    """float32[rows, *features] as `RowScaled`, by plain XLA; `columns` as in `RowScaled`."""
    width = math.prod(x.shape[1:])
    if columns is not None:
        x = x * inverse_of(columns)
    flat = x.reshape(x.shape[0], parts, width // parts)
    exponent, inverse = raised_exponents(flat, 2)
    mantissa = (flat * inverse).astype(jnp.float16).reshape(x.shape)
    behind = [(0, at - size) for at, size in zip(stored(x.shape[1:]), x.shape[1:], strict=True)]
    exponent = exponent.reshape(x.shape[0], parts).astype(jnp.uint8)
    return of_stored(jnp.pad(mantissa, ((0, 0), *behind)), exponent, x.shape[1:], columns)


def powers_of(largest: Array) -> Array:
    """The power of two at or below each magnitude, float32.

    A magnitude of 0 gets the power of the largest magnitude, or 1 if all magnitudes are 0.
    """
    return powers_of_tile(largest, jnp.max(largest, initial=0))


def powers_of_tile(largest: Array, of_all: Array) -> Array:
    """The same powers as `powers_of`, where `of_all` is the largest of all magnitudes."""
    largest = where(largest > 0, largest, of_all)
    exponent = lax.min(lax.max(_biased(largest), _LOW), _HIGH)
    return where(largest > 0, power(exponent), 1.0)


def finite_magnitude(x: Array) -> Array:
    """Magnitudes as float32, 0 for infinities and NaN."""
    magnitude = lax.abs(x.astype(jnp.float32))
    return where(magnitude < jnp.inf, magnitude, 0.0)


def inverse_of(powers: Array) -> Array:
    """1 over powers of two from 2^-126 to 2^126, exactly, in float32."""
    return inverse_power(_biased(powers.astype(jnp.float32)))


def powers_of_columns(tile: Array) -> Array:
    """A power of two near the largest finite magnitude of each column of a tile of rows, [1, columns]."""
    largest = max_magnitude(finite_magnitude(tile), 0)
    return powers_of_tile(largest, whole_max(largest))


def relative_powers_of_columns(tile: Array) -> Array:
    """The powers of `powers_of_columns` divided by the power of the largest column: from 2^-126 to 1.

    Division by these powers leaves the largest elements as they are, so that rows much smaller than others stay normal.
    """
    largest = max_magnitude(finite_magnitude(tile), 0)
    of_all = whole_max(largest)
    exponent = _biased(where(largest > 0, largest, of_all)) - _biased(of_all) + _ONE
    return power(lax.max(exponent, _LOW))


def _biased(x: Array) -> Array:
    """The biased exponent of float32 values that are not negative."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.shift_right_logical(bits, lax.full_like(bits, 23))


def power(exponent: Array) -> Array:
    """2 ** (exponent - 127) as float32, for int32 exponents from 1 to 254."""
    return lax.bitcast_convert_type(lax.shift_left(exponent, _MANTISSA), jnp.float32)


def inverse_power(exponent: Array) -> Array:
    """The power of two that undoes `power(exponent)`, for exponents as `exponents` gives them."""
    return power(lax.sub(np.int32(2 * _ONE), exponent))


def power_of_any(x: Array, exponent: Array) -> Array:
    """`x * 2 ** (exponent - 127)` in float32, for a number `exponent` of any int32 value."""
    near = lax.min(lax.max(exponent, np.int32(1)), np.int32(254))
    rest = lax.min(lax.max(lax.sub(exponent, near) + _ONE, np.int32(1)), np.int32(254))
    return x * power(near) * power(rest)


def exponents(x: Array, axis: int | tuple[int, ...] | None) -> tuple[Array, Array]:
    """The biased exponent of the largest finite magnitude along axes (kept, size 1), and the power that undoes it.

    Finite elements of `x` times that power of two are below 2 in magnitude. Infinities and NaN stay what they are, and
    their neighbours keep their digits: a score that is masked is -inf. `axis` None: of all of `x`.
    """
    # The exponents of the magnitudes' bits are raised by 1: infinities and NaN then overflow to negative integers.
    bits = lax.bitcast_convert_type(lax.abs(x.astype(jnp.float32)), jnp.int32)
    bits = lax.add(bits, lax.full_like(bits, 1 << 23))
    if axis is None:
        bits = whole_max(bits)
    else:
        for a in axis if isinstance(axis, tuple) else (axis,):
            bits = lax.expand_dims(lax.reduce_max(bits, (a,)), (a,))
    exponent = lax.bitwise_and(lax.shift_right_arithmetic(bits, _MANTISSA), _EXPONENT)
    exponent = lax.sub(exponent, np.int32(1))
    exponent = lax.min(lax.max(exponent, _LOW), _HIGH)
    return exponent, inverse_power(exponent)


def without_padding(x: Array, shape: tuple[int, ...]) -> Array:
    """A tile of `shape` padded to powers of two, zeros in its padding."""
    inside = feature_mask(shape, lead=x.ndim - len(shape))
    return x if inside is None else where(inside, x, 0.0)


def rounded(x: Array, shape: tuple[int, ...]) -> Array:
    """Rounds the rows of a float32 tile as `RowScaled` with one exponent for each row would store them.

    Args:
      x: float32[rows, *features], each axis of the features padded to a power of two.
      shape: the feature shape without the padding.
    """
    x = without_padding(x, shape)
    exponent, inverse = raised_exponents(x, tuple(range(x.ndim - len(shape), x.ndim)))
    return _triton.narrowed(x * inverse, jnp.float16)[1] * power(exponent)


# float16 numbers below 2^(1 + RAISED) are finite, and so are sums of their products in float32.
RAISED = 14


def raised(exponent: Array) -> Array:
    """The exponent whose `inverse_power` brings rows with the exponent `exponent` below 2^15 instead of below 2."""
    return lax.max(lax.sub(exponent, np.int32(RAISED)), _LOW)


def raised_exponents(x: Array, axis: int | tuple[int, ...] | None) -> tuple[Array, Array]:
    """Exponents like those of `exponents`, but `x` times the power is below 2^15 in magnitude instead of below 2."""
    exponent = raised(exponents(x, axis)[0])
    return exponent, inverse_power(exponent)


# The factor by which the small part of a float32 number is stored larger.
LOW_RAISED = 11


def two_parts(x: Array) -> tuple[Array, Array]:
    """Two float16 tiles a and b with `x` = a + 2^-11 b to 22 bits; `x` must be below 2^15 in magnitude."""
    high, kept = _triton.narrowed(x, jnp.float16)
    low = lax.sub(x, kept) * np.float32(2.0**LOW_RAISED)
    low = lax.select(lax.eq(low, low), low, lax.full_like(low, 0))  # infinity less infinity
    return high, low.astype(jnp.float16)


def max_magnitude(x: Array, axis: int) -> Array:
    """The largest of float32 magnitudes along an axis (kept, size 1); NaN where one of them is NaN."""
    return lax.expand_dims(as_integers(lambda bits: lax.reduce_max(bits, (axis,)), x), (axis,))


def whole_max(x: Array) -> Array:
    """The largest of all int32 or float32 magnitudes, NaN where one of them is NaN.

    Axis by axis: the Triton lowering of jax 0.12 reduces one axis at a time.
    """
    while x.ndim:
        x = as_integers(lambda bits: lax.reduce_max(bits, (bits.ndim - 1,)), x)
    return x
