"""The template of the grouped weight gradient: `x^T y`, summed over the rows of each type.

There are two passes and no atomics, so that the result is the same in every run. The rows of a type are split among
programs, each of which sums its rows into a float32 partial. A second kernel adds the partials of each type in their
order.

Reference: `products.reference.grouped_weight_gradient`. Contract test: `test_grouped_weight_gradient` of
`tests/pallas/test_contract.py`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import asdict, replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import _triton
from dejax.pallas._checks import as_index, check_float, check_precision
from dejax.pallas._shapes import next_power_of_two
from dejax.pallas.formats.row_scaled import RowScaled
from dejax.pallas.products.gradient_kernel import GradientPlan, partial_kernel
from dejax.pallas.products.product_schedule import (
    WeightGradientSchedule,
    merged_heads,
    rows_per_split,
    weight_gradient_candidates,
    weight_gradient_schedule,
)
from dejax.pallas.products.requests import GroupedWeightGradient, arithmetic
from dejax.pallas.products.sums import sum_rows
from dejax.pallas.tuning import bucket, choose


def split_table(offsets: jax.Array, rows_per_split: int, num_positions: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Cuts the positions of each type into splits of `rows_per_split`.

    Returns:
      The start and the end of each split, int32[num_positions // rows_per_split + types], where unused splits are
      empty; and the first split of each type, int32[types + 1].
    """
    types = offsets.shape[0] - 1
    if rows_per_split >= num_positions:  # one split a type
        return offsets[:-1], offsets[1:], jnp.arange(types + 1, dtype=jnp.int32)
    counts = offsets[1:] - offsets[:-1]
    splits = (counts + (rows_per_split - 1)) // rows_per_split
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(splits, dtype=jnp.int32)])
    number = jnp.arange(num_positions // rows_per_split + types, dtype=jnp.int32)
    t = jnp.clip(
        jnp.searchsorted(first, number, side="right", method="scan_unrolled").astype(jnp.int32) - 1, 0, types - 1
    )
    start = offsets[t] + (number - first[t]) * rows_per_split
    end = jnp.minimum(start + rows_per_split, offsets[t + 1])
    return start, jnp.where(number < first[-1], end, start), first


def grouped_weight_gradient(
    request: GroupedWeightGradient, *, schedule: WeightGradientSchedule | None = None, interpret: bool | None = None
) -> jax.Array:
    """For each type the sum of `x^T y` over its positions: `out[t, h] = sum_p x[i(p), h]^T y[j(p), h]`.

    The sum goes over positions p of type t, `offsets[t]` to `offsets[t + 1]`; i(p) = `x_index[p]` and j(p) =
    `y_index[p]`, or p without an index. The order of additions is fixed, so the result is the same in every run.

    Args:
      request: the operands and their groups.
      schedule: the sizes of the tile. None: those of the tuned table if it has this shape, otherwise those that a
        heuristic chooses.
      interpret: run the kernels interpreted; by default where there is no GPU.

    Returns:
      dtype[types, heads, k, n], exact zeros for types without positions.

    Raises:
      NotImplementedError: a dtype that the kernel does not have.
      ValueError: shapes that do not fit each other.
    """
    check_precision(request.precision)
    flat = request.x.ndim == 2
    r = _with_heads_axis(request)
    k, n = r.x.shape[2], r.y.shape[2]
    r = _with_stored_heads(r)
    types, empty = r.offsets.shape[0] - 1, 0 in (r.offsets.shape[0] - 1, r.num_positions, *r.x.shape, *r.y.shape)
    total = jnp.zeros((types, *_partial_shape(r)), r.dtype) if empty else _summed(r, schedule, interpret)
    total = total[:, :, :k, :n]  # without what zeros behind the features of a head make
    return total[:, 0] if flat else total


# --- checks ----------------------------------------------------------------------------------------------------------


def _with_heads_axis(r: GroupedWeightGradient) -> GroupedWeightGradient:
    """The request with an axis of heads in every operand."""
    x, y = r.x, r.y
    check_float(x, "x")
    check_float(y, "y")
    flat = x.ndim == 2
    if flat and x.ndim == y.ndim:
        x, y = x.reshape(x.shape[0], 1, x.shape[1]), y.reshape(y.shape[0], 1, y.shape[1])
    if x.ndim != 3 or y.ndim != 3 or x.shape[1] != y.shape[1]:
        raise ValueError(
            "`x` and `y` must be [rows, heads, width] with the same heads, or both [rows, width]; "
            f"got ranks {x.ndim - flat} and {y.ndim - flat}, shapes {x.shape} and {y.shape}"
        )
    return replace(r, x=x, y=y)


def _with_stored_heads(r: GroupedWeightGradient) -> GroupedWeightGradient:
    """The request whose `RowScaled` of several heads have the zeros behind each head's features as features."""
    if r.x.shape[1] == 1:
        return r
    x, y = (a.whole() if isinstance(a, RowScaled) else a for a in (r.x, r.y))
    return replace(r, x=x, y=y)


# --- the call --------------------------------------------------------------------------------------------------------


def _partial_shape(r: GroupedWeightGradient) -> tuple[int, ...]:
    return (*r.x.shape[1:], r.y.shape[2])


def _chosen_schedule(r: GroupedWeightGradient, merged: int, interpret: bool | None) -> WeightGradientSchedule:
    (_, heads, k), n = r.x.shape, r.y.shape[2]
    heuristic = weight_gradient_schedule(
        merged * k, merged * n, r.precision,
        in_16_bits=(_in_16_bits(r.x), _in_16_bits(r.y)), num_positions=r.num_positions,
    )  # fmt: skip
    forms = "".join("h" if isinstance(a, RowScaled) else "f" for a in (r.x, r.y))
    fields = choose(
        "outer",
        f"{next_power_of_two(k)}x{next_power_of_two(n)}x{heads}-{r.precision}-{r.x.dtype}-{forms}"
        f"-{bucket(r.num_positions)}",
        asdict(heuristic),
        # The heuristic merges heads; their tiles are not searched.
        lambda: weight_gradient_candidates(k, n) if merged == 1 else [],
        lambda fields: grouped_weight_gradient(r, schedule=WeightGradientSchedule(**fields), interpret=interpret),
    )
    return WeightGradientSchedule(**fields)


def _in_16_bits(rows: jax.Array | RowScaled) -> bool:
    return isinstance(rows, RowScaled) or rows.dtype.itemsize == 2


def _decoded(r: GroupedWeightGradient, merged: int, schedule: WeightGradientSchedule) -> GroupedWeightGradient:
    """The request, with `RowScaled` decoded where a tile's columns share no exponent or are not multiplied so."""
    scaled = arithmetic(r.precision, r.x.dtype, r.y.dtype) == "scaled"

    def readable(a: jax.Array | RowScaled, block: int) -> jax.Array | RowScaled:
        if not isinstance(a, RowScaled) or (scaled and a.one_exponent(merged * a.shape[2], block)):
            return a
        return a.decode()

    return replace(r, x=readable(r.x, schedule.block_k), y=readable(r.y, schedule.block_n))


def _operands(r: GroupedWeightGradient, splits: tuple[Any, ...]) -> dict[str, Any]:
    """The first kernel's operands by name, in order."""
    start, end, _, number = splits
    found = {"x": _stored_rows(r.x), "y": _stored_rows(r.y), "split_start": start, "split_end": end}
    if number is not None:
        found["split_number"] = number
    for name, a in (("x", r.x), ("y", r.y)):
        if isinstance(a, RowScaled):
            found[f"{name}_exponent"] = a.exponent
            if a.columns is not None:
                found[f"{name}_columns"] = a.columns.reshape(-1)
    for name, index in (("x_index", r.x_index), ("y_index", r.y_index)):
        if index is not None:
            found[name] = as_index(index, name, r.num_positions)
    return found


def _stored_rows(a: jax.Array | RowScaled) -> jax.Array:
    """Rows as they are stored, with their heads side by side."""
    return (a.mantissa if isinstance(a, RowScaled) else a).reshape(a.shape[0], -1)


def _summed(r: GroupedWeightGradient, schedule: WeightGradientSchedule | None, interpret: bool | None) -> jax.Array:
    """The gradient of each type's matrix: one kernel sums each split of the rows, another the splits of a type."""
    (_, heads, k), merged = r.x.shape, 1
    if schedule is None:
        merged = merged_heads(heads, k, r.y.shape[2], r.precision, r.x.dtype)
        schedule = _chosen_schedule(r, merged, interpret)
    r = _decoded(r, merged, schedule)
    per_split = r.rows_per_split or rows_per_split(r.num_positions)
    splits = r.splits or (*split_table(jnp.asarray(r.offsets), per_split, r.num_positions), None)
    operands, num_splits = _operands(r, splits), splits[0].shape[0]
    plan = GradientPlan(
        names=(*operands, "partial"),
        schedule=schedule,
        head_blocks=heads // merged,
        merged=merged,
        head_k=k,
        head_n=r.y.shape[2],
        precision=r.precision,
        arithmetic=arithmetic(r.precision, r.x.dtype, r.y.dtype),
    )
    (partials,) = _triton.pallas_call(
        functools.partial(partial_kernel, c=plan),
        name="grouped_weight_gradient",
        num_programs=num_splits * math.prod(plan.blocks),
        out_shape=[jax.ShapeDtypeStruct((num_splits, *_partial_shape(r)), jnp.dtype(jnp.float32))],
        num_warps=schedule.num_warps,
        num_stages=schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
    )(*operands.values())
    if per_split >= r.num_positions:  # one split of each type: its partial is the sum
        return partials.astype(r.dtype)
    return sum_rows(partials, splits[2], dtype=r.dtype, name="grouped_weight_gradient_sum", interpret=interpret)
