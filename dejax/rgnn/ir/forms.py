"""XLA forms of level-1 operators that take more than a line; the others are in the table (`operators.py`).

A form takes arrays of rows, whose axis is the first, and the operator's attributes by name; axes in attributes count
the features of a row. The caller converts the result to the operator's dtype.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dejax._compat import reduce_extremum
from dejax.rgnn.ir.type_rules import promote


def wide(x: jax.Array) -> jax.Array:
    """16-bit floats as float32, in which kernels accumulate; other arrays as they are."""
    return x.astype(jnp.float32) if x.dtype in (jnp.bfloat16, jnp.float16) else x


# --- element by element ----------------------------------------------------------------------------------------------


def sign(x: jax.Array) -> jax.Array:
    if x.dtype == jnp.bool_:
        return x
    return jnp.where(x == x, (x > 0).astype(x.dtype) - (x < 0).astype(x.dtype), x)  # NaN stays


def power(x: jax.Array, exponent: float) -> jax.Array:
    """x to a constant power, by multiplication where the exponent is a small whole number."""
    if exponent == int(exponent) and 0 <= exponent <= 4:
        result = jnp.ones_like(x)
        for _ in range(int(exponent)):
            result = result * x
        return result
    integers = jnp.issubdtype(x.dtype, jnp.integer)  # a power by a float would be float32's
    return jax.lax.integer_pow(x, int(exponent)) if integers else x**exponent


# --- the features of each row ----------------------------------------------------------------------------------------


def _axes(axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + 1 for a in axes)


def dot(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(wide(x) * wide(y), axis=-1)


def sum_features(x: jax.Array, axes: tuple[int, ...], keepdims: bool) -> jax.Array:
    return jnp.sum(wide(x), axis=_axes(axes), keepdims=keepdims)


def reshape(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return x.reshape(x.shape[0], *shape)


def transpose(x: jax.Array, perm: tuple[int, ...]) -> jax.Array:
    return jnp.transpose(x, (0, *_axes(perm)))


def broadcast(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    x = x.reshape(x.shape[0], *(1,) * len(shape)) if x.ndim == 1 else x
    return jnp.broadcast_to(x, (x.shape[0], *shape))


def concat(*args: jax.Array, axis: int) -> jax.Array:
    dtype = promote(*(str(a.dtype) for a in args))
    return jnp.concatenate([a.astype(dtype) for a in args], axis=axis + 1)


def slice(x: jax.Array, axis: int, start: int, stop: int) -> jax.Array:
    return jax.lax.slice_in_dim(x, start, stop, axis=axis + 1)


def pad(x: jax.Array, axis: int, before: int, after: int) -> jax.Array:
    config = [(0, 0, 0)] * x.ndim
    config[axis + 1] = (before, after, 0)
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def extremum_features(x: jax.Array, axes: tuple[int, ...], op: str, keepdims: bool) -> jax.Array:
    differentiable = jnp.issubdtype(x.dtype, jnp.inexact)
    return (_extremum if differentiable else _extremum.fun)(x, _axes(axes), op, keepdims)


def extremum_share(x: jax.Array, axes: tuple[int, ...], op: str) -> jax.Array:
    return _share(x, _axes(axes), op)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def _extremum(x: jax.Array, axes: tuple[int, ...], how: str, keepdims: bool) -> jax.Array:
    return reduce_extremum(how, x, axes, keepdims)


@_extremum.defjvp
def _extremum_jvp(axes: tuple[int, ...], how: str, keepdims: bool, primals: Any, tangents: Any) -> tuple[Any, Any]:
    """JAX's own rule divides 0 by 0 where the extremum equals no element; see `_share`."""
    share = _share(primals[0], axes, how)
    tangent = (share * tangents[0]).sum(axis=axes, keepdims=keepdims).astype(tangents[0].dtype)
    return _extremum(primals[0], axes, how, keepdims), tangent


def _share(x: jax.Array, axes: tuple[int, ...], how: str) -> jax.Array:
    """The part of each element in the gradient of the extremum over `axes`: equal elements share it.

    XLA may compute `x` once for the extremum and once for the comparison, and round the two differently, whatever
    barrier stands between. Then no element equals the extremum. The element that the reduction finds counts, too, and
    so does each NaN.
    """
    order = [a for a in range(x.ndim) if a not in axes] + list(axes)
    rows = jnp.transpose(x, order)
    flat = rows.reshape(*rows.shape[: x.ndim - len(axes)], math.prod(x.shape[a] for a in axes))
    first = (jnp.argmax if how == "max" else jnp.argmin)(flat, axis=-1, keepdims=True)
    chosen = (flat == reduce_extremum(how, flat, -1, True)) | (flat != flat) | (jnp.arange(flat.shape[-1]) == first)
    chosen = wide(chosen.astype(x.dtype))
    share = chosen / chosen.sum(axis=-1, keepdims=True)
    return jnp.transpose(share.reshape(rows.shape), [order.index(a) for a in range(x.ndim)])
