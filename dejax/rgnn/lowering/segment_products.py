"""Products of the rows of each segment, by plain XLA: of all of them, and for each row of the others.

A quotient `product / x` would be wrong where an x is 0, so nothing is divided. A row's product of the others is that of
the rows before it in its segment times that of the rows after it, both by a segmented scan.

Derivatives of products are products in which some rows are replaced: the derivative of `y_k = product of x_j, j not k`
in a direction d has `sum over i not k of d_i (product of x_j, j not i or k)`. With directions d_1, ..., d_m each row is
the polynomial `x_j + e_1 d_1j + ... + e_m d_mj` with `e_i e_i = 0`, and the derivative is the coefficient of
`e_1 ... e_m` in the product of such polynomials.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

# Coefficients of a polynomial in e_1, ..., e_m, by the set of its factors as bits of a number.
Polynomial = list[jax.Array]


def segment_prod(x: jax.Array, order: jax.Array | None, offsets: jax.Array) -> jax.Array:
    """The product of each segment's rows, 1 where there is none.

    Args:
      x: [entries, ...].
      order: int32[entries], the entries segment by segment; None where they are in that order.
      offsets: int32[segments + 1], where each segment begins in that order.
    """
    if x.shape[0] == 0:
        return jnp.ones((offsets.shape[0] - 1, *x.shape[1:]), x.dtype)
    (total,) = _running([x if order is None else x[order]], _starts(x.shape[0], offsets), reverse=False)
    some = (offsets[1:] > offsets[:-1]).reshape(-1, *(1,) * (x.ndim - 1))
    return jnp.where(some, total[jnp.maximum(offsets[1:] - 1, 0)], jnp.ones((), x.dtype))


def product_of_others(
    x: jax.Array, directions: Sequence[jax.Array], order: jax.Array | None, offsets: jax.Array
) -> jax.Array:
    """For each row the product of the other rows of its segment, or its derivative in `directions`; see above."""
    if x.shape[0] == 0:
        return x
    rows: Polynomial = [x, *(jnp.zeros_like(x) for _ in range(2 ** len(directions) - 1))]
    for bit, d in enumerate(directions):
        rows[2**bit] = d
    if order is not None:
        rows = [r[order] for r in rows]
    starts = _starts(x.shape[0], offsets)
    ends = jnp.concatenate([starts[1:], jnp.ones((1,), bool)])
    one = [jnp.ones_like(x[:1]), *(jnp.zeros_like(x[:1]) for _ in rows[1:])]

    def outside(mask: jax.Array, shifted: Polynomial) -> Polynomial:
        """1 at the end of a segment, where the shifted row belongs to another."""
        mask = mask.reshape(-1, *(1,) * (x.ndim - 1))
        return [jnp.where(mask, o, s) for o, s in zip(one, shifted, strict=True)]

    before = _running(rows, starts, reverse=False)
    before = outside(starts, [jnp.concatenate([r[:1], r[:-1]]) for r in before])
    after = _running(rows, ends, reverse=True)
    after = outside(ends, [jnp.concatenate([r[1:], r[-1:]]) for r in after])
    result = _product(before, after)[-1]
    return result if order is None else jnp.zeros_like(result).at[order].set(result, unique_indices=True)


def _starts(entries: int, offsets: jax.Array) -> jax.Array:
    """Which entries, in order, begin a segment; those after the last segment (padding) are one segment more."""
    return jnp.zeros((entries,), bool).at[offsets].set(True, mode="drop")


def _product(a: Polynomial, b: Polynomial) -> Polynomial:
    found = []
    for whole in range(len(a)):
        parts = [part for part in range(whole + 1) if part & whole == part]
        found.append(sum((a[part] * b[whole ^ part] for part in parts[1:]), a[0] * b[whole]))
    return found


def _running(rows: Polynomial, starts: jax.Array, *, reverse: bool) -> Polynomial:
    """The running product of each segment, from its start, or from its end with `reverse`."""

    def combine(left: tuple[jax.Array, Polynomial], right: tuple[jax.Array, Polynomial]) -> tuple:
        (a, x), (b, y) = left, right
        mask = b.reshape(-1, *(1,) * (rows[0].ndim - 1))
        return a | b, [jnp.where(mask, q, p) for p, q in zip(_product(x, y), y, strict=True)]

    return jax.lax.associative_scan(combine, (starts, rows), reverse=reverse)[1]
