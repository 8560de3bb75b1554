"""Accumulators of a traversal: sums, running maxima, and sums weighted by exp(score - maximum) in one pass.

Each slot of the entries axis keeps its own accumulator, so that the loop has no exchange between threads; slots are
merged once, at the end. Merging chunks of a long row is the same update: a chunk's partial sum is a value whose score
is the chunk's maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import padded
from dejax.pallas._tiles import both, broadcast, resized, where, with_axes
from dejax.pallas.special import exp
from dejax.pallas.traversal.factored import add, whole

KINDS = ("sum", "max", "weighted", "ties")


@dataclass(frozen=True, slots=True)
class Reduction:
    """One reduction over the entries of a row.

    Attributes:
      kind: `sum`; `max`, 0 for a row without entries (or with none above -inf); `weighted`, the sum of
        exp(score - largest score of the row) * value, safe for scores of any size; or `ties`, the sum of the values
        whose score is the largest of the row, with a score for each of them.
      shape: feature shape of the value and of the result: (), (width,) or (heads, width).
      score: for `weighted` and `ties`, which reduction of the list (a `max`) is the score; its shape begins `shape`.
      factor: number of an operand with access `epilogue` and this shape, by which the sum is multiplied.
    """

    kind: str
    shape: tuple[int, ...]
    score: int | None = None
    factor: int | None = None


def check_reductions(reductions: Sequence[Reduction]) -> None:
    """Raises `ValueError` for invalid reductions, and `NotImplementedError` for reductions that no kernel computes."""
    for i, r in enumerate(reductions):
        if r.kind not in KINDS:
            raise ValueError(f"reductions[{i}].kind must be one of {', '.join(KINDS)}, got {r.kind!r}")
        if len(r.shape) > 2:
            raise NotImplementedError(f"reductions[{i}] has shape {r.shape}; a feature shape has at most two axes")
        if r.kind not in ("weighted", "ties"):
            continue
        if r.score is None or not 0 <= r.score < len(reductions) or reductions[r.score].kind != "max":
            raise ValueError(f"reductions[{i}].score must be the number of a max reduction, got {r.score}")
        score = reductions[r.score].shape
        if r.kind == "ties" and score != r.shape:
            raise ValueError(f"reductions[{i}] has shape {r.shape}, which must be the shape {score} of its score")
        if score != r.shape[: len(score)]:
            raise ValueError(
                f"reductions[{i}] has shape {r.shape}, which must begin with the shape {score} of its score"
            )


def _expand(x: jax.Array, rank: int) -> jax.Array:
    return with_axes(x, max(0, rank - x.ndim))


def _finite(maximum: jax.Array) -> jax.Array:
    """Replaces -inf by 0 in a maximum that is subtracted, because -inf less -inf is NaN."""
    return where(lax.eq(maximum, np.float32(-np.inf)), 0.0, maximum)


def initial(reductions: Sequence[Reduction], rows: int, entries: int) -> tuple[jax.Array, ...]:
    """Accumulators of [rows, entries, *padded shape] before the first entry."""
    return tuple(
        jnp.full((rows, entries, *padded(r.shape)), -jnp.inf if r.kind == "max" else 0.0, jnp.float32)
        for r in reductions
    )


def update(
    reductions: Sequence[Reduction], accs: Sequence[jax.Array], values: Sequence[jax.Array], mask: jax.Array
) -> tuple[jax.Array, ...]:
    """Accumulators after one step.

    Args:
      reductions: what is accumulated.
      accs: float32[rows, entries, *padded shape] each.
      values: values with the same shapes; sums take them as `Factored`, too.
      mask: bool[rows, entries], which slots hold an entry.
    """
    new = list(accs)
    for i, r in enumerate(reductions):
        if r.kind == "max":
            new[i] = _triton.maximum(accs[i], where(_expand(mask, accs[i].ndim), whole(values[i]), -jnp.inf))
    factors: dict[int, tuple[jax.Array, jax.Array]] = {}
    for i, r in enumerate(reductions):
        inside = _expand(mask, accs[i].ndim)
        if r.kind == "sum":
            new[i] = add(accs[i], values[i], inside)
        elif r.kind == "ties":
            assert r.score is not None
            top, value = new[r.score], broadcast(whole(values[i]), accs[i].shape)
            kept = where(lax.eq(accs[r.score], top), accs[i], 0.0)
            is_top = both(_expand(mask, accs[i].ndim), lax.eq(broadcast(whole(values[r.score]), top.shape), top))
            new[i] = lax.add(kept, where(is_top, value, 0.0))
        elif r.kind == "weighted":
            assert r.score is not None
            if r.score not in factors:
                top = _finite(new[r.score])
                score = whole(values[r.score])
                factors[r.score] = (exp(lax.sub(accs[r.score], top)), exp(lax.sub(score, top)))
            rescale, weight = (_expand(f, accs[i].ndim) for f in factors[r.score])
            new[i] = add(lax.mul(accs[i], broadcast(rescale, accs[i].shape)), values[i], inside, weight)
    return tuple(new)


def merge(reductions: Sequence[Reduction], accs: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Merges the accumulators of the entries of each row: [rows, *padded shape]. Maxima of no entry stay -inf."""
    if not accs:
        return ()
    if accs[0].shape[1] == 1:
        return tuple(resized(a, (a.shape[0], *a.shape[2:])) for a in accs)
    merged = [_triton.reduce_max(a, 1) if r.kind == "max" else a for r, a in zip(reductions, accs, strict=True)]
    for i, r in enumerate(reductions):
        if r.kind == "weighted":
            assert r.score is not None
            top = jnp.expand_dims(_finite(merged[r.score]), 1)
            merged[i] = lax.reduce_sum(accs[i] * _expand(exp(accs[r.score] - top), accs[i].ndim), (1,))
        elif r.kind == "ties":
            assert r.score is not None
            is_top = lax.eq(accs[r.score], broadcast(jnp.expand_dims(merged[r.score], 1), accs[i].shape))
            merged[i] = lax.reduce_sum(where(is_top, accs[i], 0.0), (1,))
        elif r.kind == "sum":
            merged[i] = lax.reduce_sum(accs[i], (1,))
    return tuple(merged)


def results(reductions: Sequence[Reduction], merged: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
    """Accumulators as an epilogue reads them: a maximum of no entry is 0, and its number of equal entries is 0."""

    def result(r: Reduction, a: jax.Array) -> jax.Array:
        if r.kind == "ties":
            assert r.score is not None
            return where(lax.eq(merged[r.score], np.float32(-np.inf)), 0.0, a)
        return _finite(a) if r.kind == "max" else a

    return tuple(result(r, a) for r, a in zip(reductions, merged, strict=True))
