"""The heuristic schedules of grouped products: tile sizes, warps and stages.

The rules were found on one NVIDIA H200; docs/performance/schedules.md has the figures behind each. A tuned table
overrules them (`tuning.py`), and a tuner tries the candidates.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from dejax.pallas._shapes import cdiv, next_power_of_two
from dejax.pallas.machine import H200, machine

TILE_BLOCKS = (32, 64, 128)
"""The rows that a tile of a grouped GEMM may have; a grouping of a graph by type stores a table of tiles for each."""

# The share of shared memory for the tiles of a pipeline's stages. The rest is for sums on their way to memory.
_FOR_STAGES = 0.88
# The warps of a multiprocessor whose threads have 255 registers each.
_WARPS_AT_ONCE = 8
# What a row of a product saves where its matrix comes in float16, for its number of elements squared:
# 0.011 ns with 64 by 64 elements, 0.18 ns with 128 by 128. In float32 larger matrices also take more registers.
_SAVED_SECONDS = 6.5e-19
# Two or three launches, which scale the matrices and measure columns.
_SCALING_SECONDS = 6e-6
# Number of positions from which on programs of several tiles are enough for all multiprocessors.
_MANY_POSITIONS = 1 << 20
# Number of positions from which on weight gradients load steps ahead.
_MANY_PRODUCTS = 200_000


def scales_beforehand(num_positions: int, types: int, k: int, n: int) -> bool:
    """Whether matrices, [types, k, n], are put in float16 before the kernel. Otherwise each tile scales its matrix."""
    elements = max(16, next_power_of_two(k)) * max(16, next_power_of_two(n))
    scaling = _SCALING_SECONDS + types * elements * 6 / machine().bytes_per_second
    return num_positions * elements**2 * _SAVED_SECONDS >= scaling


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """Tile sizes, warps and pipeline stages of a grouped GEMM kernel.

    Attributes:
      block_k: length of a step over the contracted axis; a power of two, at least 16.
      block_n: columns of a tile; a power of two, at least 16.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline over `block_k`, and over the tiles of a program.
      tiles_per_program: tiles that a program multiplies one after the other.
    """

    block_k: int
    block_n: int
    num_warps: int
    num_stages: int
    tiles_per_program: int = 1


@dataclass(frozen=True, slots=True)
class WeightGradientSchedule:
    """Tile sizes, warps and pipeline stages of the kernel of a grouped weight gradient.

    Attributes:
      block_rows: positions of a step; a power of two, at least 16.
      block_k: rows of a tile of the result; a power of two, at least 16.
      block_n: columns of a tile of the result; a power of two, at least 16.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline over positions.
    """

    block_rows: int
    block_k: int
    block_n: int
    num_warps: int
    num_stages: int


def gemm_block(
    k: int,
    n: int,
    num_positions: int,
    num_types: int,
    precision: str = "tf32",
    *,
    row_scaled: bool = False,
    in_16_bits: bool = False,
) -> int:
    """Rows of a tile of a grouped GEMM: the `block` for which to make the tile table.

    Args:
      k: contracted width.
      n: width of the result.
      num_positions: rows of the product.
      num_types: matrices that they are spread over.
      precision: `f32`, `tf32` or `bf16`.
      row_scaled: whether the rows come as `RowScaled`.
      in_16_bits: whether rows and matrices are arrays of 16 bits.

    Returns:
      32, 64 or 128.
    """
    mean = num_positions / max(num_types, 1)
    if mean < 64:
        return 32
    # Exact products hold two parts of each operand. Few rows in tiles of 128 leave multiprocessors without a tile.
    if (precision == "f32" and not in_16_bits) or num_positions < 128 * machine().multiprocessors:
        return 64
    # A tile should hold a row's whole result, and a program converts rows of float32: wide rows take small tiles.
    wide_k, wide_n = next_power_of_two(k), next_power_of_two(n)
    if precision == "tf32" and row_scaled and _wide_row_scaled(wide_k, wide_n):
        return 64
    large_tiles = row_scaled or in_16_bits or _concatenated(wide_k, wide_n, num_positions)
    if precision == "tf32" and max(wide_k, wide_n) > 128 and not large_tiles:
        return 64
    return 128 if mean >= 512 else 64


def _fitting_stages(most: int, stage_bytes: int) -> int:
    """The number of pipeline stages that shared memory holds, at least one."""
    return min(most, max(1, int(_FOR_STAGES * machine().shared_bytes) // stage_bytes))


def _concatenated(wide_k: int, wide_n: int, num_positions: int) -> bool:
    """Whether a product has the width of two of 128 columns side by side: programs do several tiles of 128 rows."""
    large = num_positions >= _MANY_POSITIONS and machine().shared_bytes >= H200.shared_bytes
    return large and (wide_k, wide_n) == (128, 256)


def _wide_row_scaled(wide_k: int, wide_n: int) -> bool:
    """Whether a product of `RowScaled` takes tiles of 64 rows in several steps.

    There are more programs then, of which some compute while others wait for memory.
    """
    return 128 <= wide_k <= wide_n <= 256


def gemm_schedule(
    k: int,
    n: int,
    block: int,
    precision: str,
    *,
    num_positions: int = 0,
    whole_n: bool = False,
    in_16_bits: bool = False,
    row_scaled: bool = False,
    transposed: bool = False,
    scaled_before: bool = False,
) -> GemmSchedule:
    """The heuristic schedule of a grouped GEMM.

    Args:
      k: contracted width.
      n: width of the result.
      block: rows of a tile.
      precision: `f32`, `tf32` or `bf16`.
      num_positions: rows of the product; 0 for few.
      whole_n: keeps all columns in one tile.
      in_16_bits: rows and matrices are arrays of 16 bits.
      row_scaled: rows come as `RowScaled`.
      transposed: matrices are transposed.
      scaled_before: matrices come in float16, see `scales_beforehand`.
    """
    wide_k, wide_n = max(16, next_power_of_two(k)), max(16, next_power_of_two(n))
    tf32 = precision == "tf32"
    if in_16_bits and wide_k >= 128 and wide_n >= 128 and not whole_n:
        return GemmSchedule(64, min(wide_n, 256), 8 if block >= 128 else 4, 3)
    if tf32 and row_scaled and block <= 64 and _wide_row_scaled(wide_k, wide_n):
        return GemmSchedule(64, 128, 4, 2) if wide_n == 128 else GemmSchedule(32, 256, 4, 3)
    if tf32 and wide_k == wide_n == block == 128 and scaled_before:
        return GemmSchedule(128, 128, 4, 1)
    block_k, limit_n = wide_k if wide_k <= 128 else 64, 128
    if precision == "f32":
        block_k = limit_n = 64
    elif tf32 and wide_k == 128 and row_scaled and wide_n >= 128 and not whole_n:
        block_k = 64
    elif tf32 and wide_k == 128:
        limit_n = 64  # a tile of 128 columns does not fit into the registers
    block_n = wide_n if whole_n else min(wide_n, limit_n)
    large = block * block_n >= 128 * 128
    num_warps = 8 if large and (block_n > 128 or wide_k != 128 or not tf32) else 4
    if tf32 and whole_n and block == 128 and not row_scaled and _concatenated(wide_k, wide_n, num_positions):
        return GemmSchedule(block_k, block_n, num_warps, 4, 8)
    stage = block_k * (block * (2 if row_scaled else 4) + block_n * (2 if scaled_before or in_16_bits else 4))
    tiles, num_stages = 1, 2
    if block_k < wide_k:
        num_stages = 3
        if tf32 and not (scaled_before or row_scaled or in_16_bits):
            # Shared memory for as many programs as there are registers for, where each program measures columns.
            num_stages = max(2, _fitting_stages(3, stage * max(1, _WARPS_AT_ONCE // num_warps)))
    elif row_scaled and num_positions >= _MANY_POSITIONS:
        # A program of one tile waits for its rows; one of several loads the next rows meanwhile. Rows in float32 gain
        # nothing, because they are converted.
        tiles, num_stages = (4, 2) if transposed and wide_k < 128 else (8, 4)
    return GemmSchedule(block_k, block_n, num_warps, _fitting_stages(num_stages, stage), tiles)


def _sides(width: int) -> list[int]:
    """Sides of a tile to try for an axis of `width`."""
    padded = max(16, next_power_of_two(width))
    return sorted({min(padded, 64), min(padded, 128)})


def gemm_candidates(k: int, n: int) -> list[dict[str, Any]]:
    """Tiles, warps and stages to try for a grouped GEMM; `block` is the rows of a tile."""
    found = []
    for block, block_k, block_n, warps in itertools.product(TILE_BLOCKS, _sides(k), _sides(n), (2, 4, 8)):
        if block * block_n // (32 * warps) > 128:
            continue
        tile = {"block": block, "block_k": block_k, "block_n": block_n, "num_warps": warps}
        if next_power_of_two(k) > block_k:  # what the pipeline loads ahead: steps, or else tiles
            found += [tile | {"num_stages": stages} for stages in (1, 2, 3)]
            continue
        found.append(tile | {"num_stages": 1})
        ahead = ((4, 2), (4, 3), (8, 4)) if warps > 2 else ()
        found += [tile | {"num_stages": stages, "tiles_per_program": tiles} for tiles, stages in ahead]
    return found


class MergedHeads:
    """The sides of the product of `merged` heads at once, each `head_k` by `head_n`."""

    __slots__ = ()
    merged: int
    head_k: int
    head_n: int

    @property
    def k(self) -> int:
        return self.merged * self.head_k

    @property
    def n(self) -> int:
        return self.merged * self.head_n


def merged_heads(heads: int, k: int, n: int, precision: str, dtype: Any) -> int:
    """How many heads a product with tensor cores takes at once, as blocks on the diagonal of one matrix.

    The zeros between the blocks cost nothing where memory is the bound. With `f32` an infinity stays in its head.
    """
    if precision == "f32" and jnp.dtype(dtype) == jnp.float32:
        return 1
    fits = (m for m in range(heads, 1, -1) if heads % m == 0 and m * max(k, n) <= 64)
    return next(fits, 1)


def weight_gradient_schedule(
    k: int,
    n: int,
    precision: str,
    *,
    in_16_bits: tuple[bool, bool] = (False, False),
    num_positions: int = 0,
) -> WeightGradientSchedule:
    """The heuristic schedule of a grouped weight gradient.

    Args:
      k: width of x.
      n: width of y.
      precision: `f32`, `tf32` or `bf16`.
      in_16_bits: whether rows of x and of y come in 16 bits.
      num_positions: products that are summed; 0 for few.
    """
    wide_k, wide_n = max(16, next_power_of_two(k)), max(16, next_power_of_two(n))
    block_k, block_n = min(wide_k, 128), min(wide_n, 64)
    if precision == "tf32" and block_k >= 64 and block_n == 64:
        found = _wide_weight_gradient_schedule(wide_k, wide_n, in_16_bits, num_positions)
        sides = (found.block_k, found.block_n)
        stage = found.block_rows * sum(side * (2 if h else 4) for side, h in zip(sides, in_16_bits, strict=True))
        return replace(found, num_stages=_fitting_stages(found.num_stages, stage))
    # Operands in two parts fill the registers of 4 warps.
    num_warps = 8 if precision == "f32" and block_k == 128 else 4
    # A step's rows of float32 are in registers twice, as they come and scaled: at most 64 numbers a thread.
    long = block_n == 16 and (in_16_bits[0] or 128 * block_k <= 64 * 32 * num_warps)
    return WeightGradientSchedule(128 if long else 64, block_k, block_n, num_warps, 1)


def _wide_weight_gradient_schedule(
    wide_k: int, wide_n: int, in_16_bits: tuple[bool, bool], num_positions: int
) -> WeightGradientSchedule:
    """The schedule of products in float16.

    Rows in 16 bits go to shared memory as they come, steps ahead. Rows of float32 are converted in registers, so their
    side of a tile is 64.
    """
    if wide_k >= 128 and wide_n >= 128:
        if all(in_16_bits):
            return WeightGradientSchedule(64, 128, 128, 8, 3)
        if any(in_16_bits):
            return WeightGradientSchedule(64, 128 if in_16_bits[0] else 64, 128 if in_16_bits[1] else 64, 4, 2)
        return WeightGradientSchedule(64, 128, 128, 16, 1)
    block_k = min(wide_k, 128)
    # With few rows a program ends before its pipeline is filled.
    if num_positions < _MANY_PRODUCTS or block_k > 64:
        return WeightGradientSchedule(64, block_k, 64, 4, 1)
    if all(in_16_bits):
        return WeightGradientSchedule(32, 64, 64, 4, 3) if wide_n == 64 else WeightGradientSchedule(64, 64, 64, 4, 2)
    return WeightGradientSchedule(64, 64, 64, 4, 3 if in_16_bits[1] else 2 if in_16_bits[0] else 1)


def weight_gradient_candidates(k: int, n: int) -> list[dict[str, Any]]:
    """Tiles, warps and stages to try for grouped weight gradients."""
    return [
        {"block_rows": rows, "block_k": block_k, "block_n": block_n, "num_warps": warps, "num_stages": stages}
        for rows in TILE_BLOCKS
        for block_k in _sides(k)
        for block_n in _sides(n)
        for warps in (4, 8)
        for stages in (1, 2)
        if block_k * block_n // (32 * warps) <= 128
    ]


def rows_per_split(num_positions: int) -> int:
    """Positions that one program of the first pass of a grouped weight gradient sums.

    About 1,000 programs in all and 256 positions each at least; of few positions about 256 programs, 64 each at least.
    """
    few = min(256, max(64, next_power_of_two(cdiv(num_positions, 256))))
    return max(few, next_power_of_two(cdiv(num_positions, 1024)))


# Programs of the first pass of a row product for each multiprocessor: together they wait for enough rows.
_PROGRAMS = 4
# A part has at least this many rows.
_LEAST_PART = 128


def row_product_schedule(k: int, n: int, dtype: Any, *, exact: bool = False) -> WeightGradientSchedule:
    """The heuristic schedule of a row product.

    Args:
      k: width of x.
      n: width of y.
      dtype: the dtype in which tiles are multiplied.
      exact: whether they are, as float32, in two float16 parts.
    """
    wide_k, wide_n = max(16, next_power_of_two(k)), max(16, next_power_of_two(n))
    if exact:
        return weight_gradient_schedule(k, n, "f32")
    if jnp.dtype(dtype).itemsize == 4:
        # Two warps: the products of four take no transposed tiles of float32.
        block_k, block_n = min(wide_k, 64), min(wide_n, 64)
        return WeightGradientSchedule(1024 // max(block_k, block_n), block_k, block_n, 2, 3)
    if min(wide_k, wide_n) >= 128:
        return WeightGradientSchedule(64, 128, 128, 8, _fitting_stages(3, 64 * 2 * 128 * 2))
    return WeightGradientSchedule(32, min(wide_k, 64), min(wide_n, 64), 4, 3)


def rows_per_part(rows: int, tiles: int, block_rows: int) -> int:
    """Rows that one program of a row product sums, whole steps: as many programs as keep the device busy."""
    parts = max(1, min(_PROGRAMS * machine().multiprocessors // tiles, rows // _LEAST_PART))
    return cdiv(cdiv(rows, parts), block_rows) * block_rows
