"""The template of the grouped GEMM: rows times the matrix of their type; gathered or scattered.

Reference: `products.reference.grouped_gemm`. Contract test: `test_grouped_gemm` of `tests/pallas/test_contract.py`.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas import _triton
from dejax.pallas._checks import as_index, check_float, check_precision
from dejax.pallas._shapes import cdiv, next_power_of_two
from dejax.pallas.formats.row_scaled import (
    RowScaled,
    encode,
    inverse_of,
    of_stored,
    power,
    raised_exponents,
    stored,
    two_parts,
)
from dejax.pallas.products.gemm_kernel import GemmPlan, gemm_kernel
from dejax.pallas.products.product_schedule import (
    TILE_BLOCKS,
    GemmSchedule,
    gemm_block,
    gemm_candidates,
    gemm_schedule,
    merged_heads,
    scales_beforehand,
)
from dejax.pallas.products.requests import GroupedGemm, arithmetic, both_in_16_bits
from dejax.pallas.tuning import bucket, choose

# The widest results that one program computes whole rows of: where an inner product with a vector needs that, and where
# a row is to have one exponent.
MAX_WHOLE_N, MAX_ROW_SCALED_N = 512, 256


def grouped_gemm(request: GroupedGemm, *, schedule: GemmSchedule | None = None, interpret: bool | None = None) -> Any:
    """Each row times the matrix of its type.

        out[o(p), h] = activation(x[i(p), h] @ w[type(p), h] + bias[type(p), h])

    Positions p = 0, 1, ... are sorted by type. Position p reads row i(p) = `x_index[p]` and writes row o(p) =
    `output.index[p]`; without an index, row p.

    Narrow heads are multiplied several at a time, by a block-diagonal matrix (not with `precision="f32"`): infinities
    and NaN in one head of a row then reach its other heads.

    Args:
      request: the operands, the groups, the epilogue and the output.
      schedule: the sizes of the tile. None: those of the tuned table if it has this shape and `groups.block` is None,
        otherwise those that a heuristic chooses.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      [out_rows, heads, n], zeros in rows that no position writes; with `dot_vector` a pair of that and [out_rows,
      heads], or [out_rows, heads * dot_parts] where `dot_parts` is more than one.

    Raises:
      NotImplementedError: a dtype or a width that the kernel does not have.
      ValueError: shapes that do not fit each other.
    """
    check_precision(request.precision)
    if request.groups.block is None:
        return _with_chosen_schedule(request, interpret)
    flat = request.x.ndim == 2
    r = _with_heads_axis(request)
    _check_shapes(r)
    _check_supported(r, schedule)
    x, epilogue = r.x, r.epilogue
    tiles = r.groups.tiles(request.groups.block)
    if min(tiles[0].shape[0], r.groups.num_positions, r.out_rows, r.n, *x.shape[:2]) == 0:
        y, dot = _zeros(r)
    else:
        y, dot = _multiplied(r, tiles, schedule, interpret)
    if not flat:
        y = y.reshape(r.out_rows, x.shape[1], r.n)
    elif dot is not None and epilogue.dot_parts == 1:
        dot = dot.reshape(r.out_rows)
    return y if dot is None else (y, dot)


def _with_chosen_schedule(r: GroupedGemm, interpret: bool | None) -> Any:
    """The result with the tuned table's tile, else with the heuristic's."""
    k, n, types, positions = r.x.shape[-1], r.n, r.w.shape[0], r.groups.num_positions
    heads, row_scaled = r.x.shape[1] if r.x.ndim == 3 else 1, isinstance(r.x, RowScaled)
    block = gemm_block(k, n, positions, types, r.precision, row_scaled=row_scaled, in_16_bits=both_in_16_bits(r.x, r.w))
    form = "fh"[row_scaled] + "fh"[r.output.row_scaled] + "nt"[r.transpose_w]
    form += ("" if r.epilogue.bias is None else "b") + ("" if r.epilogue.dot_vector is None else "d")

    def call(fields: dict[str, Any]) -> Any:
        tile = {key: value for key, value in fields.items() if key != "block"}
        request = replace(r, groups=replace(r.groups, block=fields["block"]))
        return grouped_gemm(request, schedule=GemmSchedule(**tile) if tile else None, interpret=interpret)

    fields = choose(
        "gemm",
        f"{k}x{n}x{heads}-{r.precision}-{r.x.dtype}-{form}-{bucket(positions / max(types, 1))}-{bucket(positions)}",
        {"block": block},  # the rest by `gemm_schedule`
        lambda: gemm_candidates(k, n) if heads == 1 else [{"block": b} for b in TILE_BLOCKS],
        call,
    )
    return call(fields)


# --- checks ----------------------------------------------------------------------------------------------------------


def _with_heads_axis(r: GroupedGemm) -> GroupedGemm:
    """The request with an axis of heads in every operand."""
    x, w, e = r.x, r.w, r.epilogue
    flat = x.ndim == 2
    if flat:
        x, w = x.reshape(x.shape[0], 1, x.shape[1]), w[:, None]
        bias, dot_vector = (a if a is None or a.ndim == 3 else a[:, None] for a in (e.bias, e.dot_vector))
        e = replace(e, bias=bias, dot_vector=dot_vector)
    if x.ndim != 3 or w.ndim != 4:
        raise ValueError(
            "`x` and `w` must be [rows, heads, k] and [types, heads, k, n], or [rows, k] and [types, k, n]; "
            f"got ranks {x.ndim - flat} and {w.ndim - flat}"
        )
    if isinstance(x, RowScaled) and x.width is not None and x.shape[1] > 1:
        # Zeros behind the features of each head meet zeros of the matrices. The kernel masks those of a single head.
        behind = (0, x.mantissa.shape[2] - x.shape[2])
        x, w = x.whole(), jnp.pad(w, ((0, 0), (0, 0), *((0, 0), behind)[:: 1 if r.transpose_w else -1]))
    return replace(r, x=x, w=w, epilogue=e)


def _check_shapes(r: GroupedGemm) -> None:
    (_, heads, k), types, n, e = r.x.shape, r.w.shape[0], r.n, r.epilogue
    w_k = r.w.shape[-1 if r.transpose_w else -2]
    if r.w.shape[1] != heads or w_k != k:
        raise ValueError(
            f"`w` must have {heads} heads and a contracted width of {k}, as `x` has; got {r.w.shape[1]} heads and "
            f"{w_k} (transpose_w={r.transpose_w})"
        )
    if r.groups.offsets.shape != (types + 1,):
        raise ValueError(
            f"`offsets` must have types + 1 = {types + 1} entries, got shape {tuple(r.groups.offsets.shape)}"
        )
    block = r.groups.block or 0
    if block < 16 or next_power_of_two(block) != block:
        raise ValueError(f"`block` must be a power of two of at least 16, got {block}")
    for name, a in (("bias", e.bias), ("dot_vector", e.dot_vector)):
        if a is not None and a.shape != (types, heads, n):
            raise ValueError(f"`{name}` must be [{types}, {heads}, {n}], got {a.shape}")


def _check_supported(r: GroupedGemm, schedule: GemmSchedule | None) -> None:
    e, n = r.epilogue, r.n
    for name, a in (("x", r.x), ("w", r.w), ("bias", e.bias), ("dot_vector", e.dot_vector)):
        if a is not None:
            check_float(a, name)
    if schedule is not None and e.dot_vector is not None and schedule.block_n < n:
        raise ValueError(
            f"`schedule` must have all {n} columns in one tile for dot_vector, got block_n={schedule.block_n}"
        )
    if r.x.shape[2] == 0:
        raise NotImplementedError("`x` must have columns, got none: its product is all zeros, which needs no kernel")
    if e.dot_parts > 1 and any(next_power_of_two(a) != a for a in (e.dot_parts, n)):
        raise NotImplementedError(f"`dot_parts` and columns must be powers of two, got {e.dot_parts} of {n} columns")
    if e.dot_vector is not None and next_power_of_two(n) > MAX_WHOLE_N:
        raise NotImplementedError(f"`dot_vector` needs a result of at most {MAX_WHOLE_N} columns, got {n}")
    if r.output.row_scaled and (r.precision != "tf32" or r.out_dtype != jnp.float32):
        raise ValueError(
            "`row_scaled` must be False but for float32 results of precision='tf32', got True with "
            f"{r.out_dtype} and {r.precision!r}"
        )


# --- the call --------------------------------------------------------------------------------------------------------


def _zeros(r: GroupedGemm) -> tuple[Any, jax.Array | None]:
    heads = r.x.shape[1]
    y: Any = jnp.zeros((r.out_rows, heads * r.n), r.out_dtype)
    if r.output.row_scaled:
        y = encode(y, columns=None if r.output.columns is None else r.output.columns.reshape(-1))
    if r.epilogue.dot_vector is None:
        return y, None
    return y, jnp.zeros((r.out_rows, heads * r.epilogue.dot_parts), jnp.float32)


def _multiplied(
    r: GroupedGemm, tiles: tuple[Any, Any], schedule: GemmSchedule | None, interpret: bool | None
) -> tuple[Any, jax.Array | None]:
    """The result rows, with their heads side by side, and the inner products with `dot_vector`."""
    plan = _plan(r, schedule)
    r, out_length = _as_possible(r, plan)
    operands = _operands(r, tiles, plan)
    results, aliases = _results(r, plan, out_length), {}
    if not r.output.covers_all:
        for i, s in enumerate(results.values()):
            aliases[len(operands)] = i
            operands[f"zeros{i}"] = jnp.zeros(s.shape, s.dtype)
    # The powers of the columns of a large tile would take the registers of its second program on a multiprocessor.
    large = plan.block * plan.schedule.block_n >= 128 * 128
    divided_w = "out_columns" in operands and "w_power" not in operands and _is_linear(r) and large
    found = _triton.pallas_call(
        functools.partial(gemm_kernel, c=replace(plan, names=(*operands, *results), divided_w=divided_w)),
        name="grouped_gemm",
        num_programs=cdiv(tiles[0].shape[0], plan.schedule.tiles_per_program) * plan.head_blocks * plan.blocks_n,
        out_shape=list(results.values()),
        num_warps=plan.schedule.num_warps,
        num_stages=plan.schedule.num_stages,
        interpret=_triton.use_interpreter(interpret),
        aliases=aliases,
    )(*operands.values())
    made: dict[str, Any] = dict(zip(results, found, strict=True))
    if r.output.row_scaled:
        features = (r.n,) if r.x.shape[1] == 1 else (r.x.shape[1], r.n)
        columns = None if r.output.columns is None else r.output.columns.reshape(features)
        rows = made["y"].reshape(r.out_rows, *features[:-1], out_length)
        made["y"] = of_stored(rows, made["y_exponent"], features, columns)
    return made["y"], made.get("dot")


def _plan(r: GroupedGemm, schedule: GemmSchedule | None) -> GemmPlan:
    """The plan of the call, without the names of the kernel's references."""
    (_, heads, k), n, dots = r.x.shape, r.n, r.epilogue.dot_vector is not None
    assert r.groups.block is not None
    merged = merged_heads(heads, k, n, r.precision, r.x.dtype) if schedule is None and not dots else 1
    products, row_scaled = arithmetic(r.precision, r.x.dtype, r.w.dtype), isinstance(r.x, RowScaled)
    # Tiles whose columns nobody has measured scale their matrix by what they find.
    known = products != "direct" and (row_scaled or r.x_columns is not None)
    multiplied = r.groups.num_positions * heads // merged
    scaled_before = known and scales_beforehand(multiplied, r.w.shape[0], merged * k, merged * n)
    if schedule is None:
        schedule = gemm_schedule(
            merged * k,
            merged * n,
            r.groups.block,
            r.precision,
            num_positions=r.groups.num_positions,
            # With whole rows in a tile a row has one exponent, which traversals read with it.
            whole_n=dots or (r.output.row_scaled and next_power_of_two(merged * n) <= MAX_ROW_SCALED_N),
            in_16_bits=both_in_16_bits(r.x, r.w),
            row_scaled=row_scaled,
            transposed=r.transpose_w,
            scaled_before=scaled_before,
        )
    return GemmPlan(
        schedule=schedule,
        block=r.groups.block,
        positions=r.groups.num_positions,
        head_blocks=heads // merged,
        merged=merged,
        head_k=k,
        head_n=n,
        transpose_w=r.transpose_w,
        activation=r.epilogue.activation,
        precision=r.precision,
        arithmetic=products,
        scaled_before=scaled_before,
    )


def _as_possible(r: GroupedGemm, c: GemmPlan) -> tuple[GroupedGemm, int]:
    """The request in the forms that the kernel reads and writes, and the columns of a head of the result as stored.

    `RowScaled` that the kernel cannot read are decoded, powers of columns without a use left out, and a result whose
    tiles have parts of several widths stays float32.
    """
    (_, heads, k), x, x_columns, output = r.x.shape, r.x, r.x_columns, r.output
    if isinstance(x, RowScaled):
        x_columns = x.columns
        if c.arithmetic != "scaled" or not x.one_exponent(c.k, c.schedule.block_k):
            x = x.decode()
    x_columns = None if x_columns is None or c.arithmetic == "direct" else x_columns.reshape(heads, k)
    row_scaled = output.row_scaled and (c.n <= c.schedule.block_n or c.n % c.schedule.block_n == 0)
    columns = None if output.columns is None or not row_scaled else output.columns.reshape(heads, r.n)
    out_length = stored((r.n,))[0] if row_scaled and c.merged == 1 and c.blocks_n == 1 else r.n
    output = replace(output, row_scaled=row_scaled, columns=columns)
    return replace(r, x=x, x_columns=x_columns, output=output), out_length


def _operands(r: GroupedGemm, tiles: tuple[Any, Any], c: GemmPlan) -> dict[str, Any]:
    """The kernel's operands by name, in order."""
    (rows, heads, k), n, x, groups, e = r.x.shape, r.n, r.x, r.groups, r.epilogue
    positions, types = groups.num_positions, r.w.shape[0]
    w, w_low, w_power, dot_vector = _weights(r, c)
    # Matrices that were scaled beforehand were multiplied by the powers of the columns of `RowScaled`.
    multiplied = isinstance(x, RowScaled) and w_power is not None
    x_columns = None if r.x_columns is None or multiplied else r.x_columns.reshape(heads * k)
    # And divided by those of the columns of the result, if they have one power for each type.
    divided = r.output.columns is None or (w_power is not None and w_power.ndim == 1)
    found = {
        "x": (x.mantissa if isinstance(x, RowScaled) else x).reshape(rows, -1),
        "w": w,
        "offsets": groups.offsets,
        "tile_type": tiles[0],
        "tile_start": tiles[1],
        "x_exponent": x.exponent if isinstance(x, RowScaled) else None,
        "w_power": w_power,
        "x_columns": x_columns,
        "w_low": w_low,
        "x_index": None if r.x_index is None else as_index(r.x_index, "x_index", positions),
        "out_index": None if r.output.index is None else as_index(r.output.index, "output.index", positions),
        "bias": None if e.bias is None else e.bias.reshape(types, heads * n),
        "dot_vector": dot_vector,
        "out_columns": None if divided or r.output.columns is None else r.output.columns.reshape(heads * n),
    }
    return {name: a for name, a in found.items() if a is not None}


def _weights(r: GroupedGemm, c: GemmPlan) -> tuple[Any, Any, Any, Any]:
    """The matrices as the kernel takes them, and the `dot_vector` that meets their result.

    Returns:
      The matrices, as they are or in float16; the rest of them where products are to be exact; their powers of two, of
      each column, float32[types, heads, n], or, where matrices were divided by the powers of the result's columns,
      float32[types]; and the vector.
    """
    vector, columns = r.epilogue.dot_vector, r.output.columns
    if not c.scaled_before:
        return r.w, None, None, vector
    w = r.w.astype(jnp.float32)
    if r.x_columns is not None:
        w = w * (r.x_columns[:, None] if r.transpose_w else r.x_columns[:, :, None])
    # Rows are stored divided by the powers of two of their columns. Where the epilogue is linear the matrices are
    # divided instead, and then all their columns have about one scale.
    divided = columns is not None and _is_linear(r)
    if columns is not None and divided:
        inverse = inverse_of(columns)
        w = w * (inverse[:, :, None] if r.transpose_w else inverse[:, None])
        vector = None if vector is None else vector * columns
    w, low, powers = _as_scaled(w, r.transpose_w, c.arithmetic == "exact", divided)
    if c.merged == 1:  # matrices of whole tiles need no mask
        tile = (c.schedule.block_k, c.schedule.block_n)
        sides = tuple((0, -a % b) for a, b in zip((r.x.shape[2], r.n), tile, strict=True))
        sides = (0, 0), (0, 0), *(sides[::-1] if r.transpose_w else sides)
        w, low = jnp.pad(w, sides), None if low is None else jnp.pad(low, sides)
    return w, low, powers, vector


def _is_linear(r: GroupedGemm) -> bool:
    """Whether the result is proportional to the matrices."""
    return r.epilogue.bias is None and r.epilogue.activation is None


def _as_scaled(
    w: jax.Array, transposed: bool, exact: bool, by_type: bool
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """float16 matrices, the rest of them where products are to be exact, and the power of two of each column.

    `w` is float32[types, heads, k, n], n before k where `transposed`; powers are float32[types, heads, n], or
    `by_type` float32[types].
    """
    exponent, inverse = raised_exponents(w, (1, 2, 3) if by_type else 3 if transposed else 2)
    powers = power(exponent).reshape((-1,) if by_type else (w.shape[0], w.shape[1], -1))
    w = w * inverse
    return (*two_parts(w), powers) if exact else (w.astype(jnp.float16), None, powers)


def _results(r: GroupedGemm, c: GemmPlan, out_length: int) -> dict[str, jax.ShapeDtypeStruct]:
    """The kernel's results by name; a head of the result has `out_length` columns."""
    heads, rows = r.x.shape[1], r.out_rows
    dtype = jnp.dtype(jnp.float16) if r.output.row_scaled else r.out_dtype
    found = {"y": jax.ShapeDtypeStruct((rows, heads * out_length), dtype)}
    if r.epilogue.dot_vector is not None:
        found["dot"] = jax.ShapeDtypeStruct((rows, heads * r.epilogue.dot_parts), jnp.dtype(jnp.float32))
    if r.output.row_scaled:
        found["y_exponent"] = jax.ShapeDtypeStruct((rows, c.head_blocks * c.blocks_n), jnp.dtype(jnp.uint8))
    return found
