"""Schedules of the kernels, tile sizes, warps and stages: what the heuristics take.

Their figures were found on one NVIDIA H200 (see docs/performance.md). A tuned table overrules them (`tuned_tables.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas._shapes import cdiv, next_power_of_two

_MULTIPROCESSORS = 132


@dataclass(frozen=True, slots=True)
class GemmSchedule:
    """How a typed product is cut.

    Attributes:
      block_k: length of a step over the contracted axis; a power of two, at least 16.
      block_n: columns of a tile; a power of two, at least 16.
      num_warps: warps a program.
      num_stages: depth of the software pipeline over `block_k`, and over the tiles of a program.
      tiles_per_program: tiles that a program multiplies one after the other.
    """

    block_k: int
    block_n: int
    num_warps: int
    num_stages: int
    tiles_per_program: int = 1


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """How sums of outer products are cut.

    Attributes:
      block_rows: positions a step; a power of two, at least 16.
      block_k: rows of a tile of the result; a power of two, at least 16.
      block_n: columns of a tile of the result; a power of two, at least 16.
      num_warps: warps a program.
      num_stages: depth of the software pipeline over positions.
    """

    block_rows: int
    block_k: int
    block_n: int
    num_warps: int
    num_stages: int


def gemm_block(
    k: int, n: int, num_positions: int, num_types: int, precision: str = "tf32", *, half_rows: bool = False
) -> int:
    """Rows of a tile of a typed product: the `block` for which to make the tile table.

    Args:
      k: contracted width.
      n: width of the result.
      num_positions: rows of the product.
      num_types: matrices that they are spread over.
      precision: `f32`, `tf32` or `bf16`.
      half_rows: whether the rows come as `HalfRows`.

    Returns:
      32, 64 or 128.
    """
    mean = num_positions / max(num_types, 1)
    if mean < 64:
        return 32
    # Operands come as two numbers each. And of few rows, tiles of 128 would leave multiprocessors without one: 7,262
    # rows, 64 to 64, 3.36 us, so 2.72; 128 to 64 4.5 and 3.5.
    if precision == "f32" or num_positions < 128 * _MULTIPROCESSORS:
        return 64
    # A row's whole result is to be in one tile, and a program converts rows of float32: 3 million rows, 256 to 256, 64
    # rows 2.8 ms.
    wide_k, wide_n = next_power_of_two(k), next_power_of_two(n)
    if precision == "tf32" and half_rows and _wide_half(wide_k, wide_n):
        return 64
    large_tiles = half_rows or _joined(wide_k, wide_n, num_positions)
    if precision == "tf32" and max(wide_k, wide_n) > 128 and not large_tiles:
        return 64
    # 64 to 64, 2 million rows of 64 types: 128 rows 0.39 ms, 64 rows 0.42; 128 to 64: 0.64 and 0.72. 3 million rows,
    # 128 to 128, 128 rows 0.73, 64 rows 0.85.
    return 128 if mean >= 512 else 64


# Shared memory that a program may have, by the device's compute capability; of others the least that there is.
_SHARED_BYTES = {"8.0": 163 * 1024, "8.7": 163 * 1024, "9.0": 227 * 1024, "10.0": 227 * 1024, "10.3": 227 * 1024}
_LEAST_SHARED_BYTES = 99 * 1024
# Of that, for the tiles of a pipeline's stages: the rest is for sums on their way to memory.
_FOR_STAGES = 0.88
# Below this many positions matrices are scaled in every tile, and come in float32: it spares a launch or two.
SCALE_BEFOREHAND = 500_000
# Positions from which a program of several tiles leaves enough programs for all multiprocessors.
_MANY_POSITIONS = 1 << 20
# Positions from which sums of outer products load steps ahead.
_MANY_PRODUCTS = 200_000


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program may have on the default device; an H200's where that is no GPU."""
    if jax.default_backend() not in ("gpu", "cuda"):
        return _SHARED_BYTES["9.0"]
    return _SHARED_BYTES.get(getattr(jax.devices()[0], "compute_capability", ""), _LEAST_SHARED_BYTES)


def _fitting_stages(most: int, stage_bytes: int) -> int:
    """As many stages of a pipeline as shared memory holds, one at least."""
    return min(most, max(1, int(_FOR_STAGES * shared_bytes()) // stage_bytes))


def _joined(wide_k: int, wide_n: int, num_positions: int) -> bool:
    """Whether a product has the widths of two of 128 that were joined: its programs do several tiles of 128 rows.

    3 million rows in float32, 128 to 256: 1.32 ms, a tile of 64 rows a program 1.36; 100 to 200: 1.30 and 2.20.
    """
    large = num_positions >= _MANY_POSITIONS and shared_bytes() >= _SHARED_BYTES["9.0"]
    return large and (wide_k, wide_n) == (128, 256)


def _wide_half(wide_k: int, wide_n: int) -> bool:
    """Whether a product of `HalfRows` takes tiles of 64 rows in several steps: more programs, which wait side by side.

    3 million rows, 128 to 128: 0.55 ms, transposed 0.52; tiles of 128 rows in one step, eight a program, 0.67 and 0.69.
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
    half: bool = False,
    half_rows: bool = False,
    transposed: bool = False,
) -> GemmSchedule:
    """The heuristic schedule of a typed product.

    Args:
      k: contracted width.
      n: width of the result.
      block: rows of a tile.
      precision: `f32`, `tf32` or `bf16`.
      num_positions: rows of the product; 0 for few.
      whole_n: keeps all columns in one tile.
      half: rows and matrices are arrays of 16 bits.
      half_rows: rows come as `HalfRows`.
      transposed: matrices are transposed.
    """
    wide_k, wide_n = max(16, next_power_of_two(k)), max(16, next_power_of_two(n))
    if half and wide_k >= 128 and wide_n >= 128 and not whole_n:
        # 2 million rows in bfloat16, 128 to 128: 0.33 ms, where (128, 128, 8 warps, 2 stages) takes 0.40; 256 to 256
        # 0.83, where (64, 128, 8, 2) takes 0.94.
        return GemmSchedule(64, min(wide_n, 256), 8 if block >= 128 else 4, 3)
    if precision == "tf32" and half_rows and block <= 64 and _wide_half(wide_k, wide_n):
        # 100 to 100 0.57 ms, (32, 128, 4 warps, 3 stages) 0.63; 100 to 200 0.99, 256 to 256 1.28, with (64, 256, 4, 2)
        # 1.12 and 1.53.
        return GemmSchedule(64, 128, 4, 2) if wide_n == 128 else GemmSchedule(32, 256, 4, 3)
    block_k = wide_k if wide_k <= 128 else 64
    limit_n = 128
    if precision == "f32":
        block_k = limit_n = 64
    elif precision == "tf32" and wide_k == wide_n == block == 128 and num_positions >= SCALE_BEFOREHAND:
        # 1.9 million rows in float32, 100 to 100, transposed, one tile and one stage 0.52 ms; tiles of 64 columns 0.78.
        return GemmSchedule(128, 128, 4, 1)
    elif precision == "tf32" and wide_k == 128 and half_rows and wide_n >= 128 and not whole_n:
        block_k = 64  # 2 million rows, 128 to 128: 0.40 ms, (128, 64) 0.48
    elif precision == "tf32" and wide_k == 128:
        limit_n = 64  # 128 to 64 takes 0.64 ms with this, 128 to 128 in one tile 1.74
    block_n = wide_n if whole_n else min(wide_n, limit_n)
    # 3 million rows, 128 to 128, 128 rows a tile: 4 warps 0.73 ms. 256 to 512 in float32, 64 rows and 128 columns: 4
    # warps 5.4, 8 warps 6.0; in 16 bits, 128 rows: 8 warps 2.8, 4 warps 3.1.
    large = block * block_n >= 128 * 128
    num_warps = 8 if large and (block_n > 128 or wide_k != 128 or precision != "tf32") else 4
    if precision == "tf32" and whole_n and block == 128 and not half_rows and _joined(wide_k, wide_n, num_positions):
        return GemmSchedule(block_k, block_n, num_warps, 4, 8)
    tiles, num_stages = 1, 2
    if block_k < wide_k:
        num_stages = 3  # 256 to 256 in float32 2.78 ms, 2 stages 3.25
    elif half_rows and num_positions >= _MANY_POSITIONS:
        # A program of one tile waits for its rows. 12.7 million in 16 bits: 1.03 -> 0.85 ms, 64 to 128 1.97 -> 1.54,
        # transposed 0.97 -> 0.89 (with 8 tiles 0.94). Rows in float32 gain nothing.
        tiles, num_stages = (4, 2) if transposed and wide_k < 128 else (8, 4)
    stage = block_k * (block * (2 if half_rows else 4) + block_n * (2 if num_positions >= SCALE_BEFOREHAND else 4))
    num_stages = _fitting_stages(num_stages, stage)
    return GemmSchedule(block_k, block_n, num_warps, num_stages, tiles)


def merged_heads(heads: int, k: int, n: int, precision: str, dtype: Any) -> int:
    """How many heads a product with tensor cores takes at once, as blocks on the diagonal of one matrix.

    The zeros between the blocks cost nothing where memory is the bound. With `f32` an infinity stays in its head.
    """
    if precision == "f32" and jnp.dtype(dtype) == jnp.float32:
        return 1
    fits = (m for m in range(heads, 1, -1) if heads % m == 0 and m * max(k, n) <= 64)
    return next(fits, 1)


def outer_schedule(
    k: int,
    n: int,
    precision: str,
    *,
    half: tuple[bool, bool] = (False, False),
    narrow: bool = False,
    num_positions: int = 0,
) -> OuterSchedule:
    """The heuristic schedule of sums of outer products.

    Args:
      k: width of x.
      n: width of y.
      precision: `f32`, `tf32` or `bf16`.
      half: whether rows of x and of y come in 16 bits.
      narrow: whether rows of x are multiplied with narrow rows, too.
      num_positions: products that are summed; 0 for few.
    """
    wide_k, wide_n = max(16, next_power_of_two(k)), max(16, next_power_of_two(n))
    block_k, block_n = min(wide_k, 128), min(wide_n, 64)
    if precision == "tf32" and block_k >= 64 and block_n == 64:
        found = _wide_outer_schedule(wide_k, wide_n, half, narrow, num_positions)
        sides = (found.block_k, found.block_n)
        stage = found.block_rows * sum(side * (2 if h else 4) for side, h in zip(sides, half, strict=True))
        return replace(found, num_stages=_fitting_stages(found.num_stages, stage))
    # Operands in two parts: 254 registers a thread with 4 warps, of which an H200 then has 8 a multiprocessor.
    num_warps = 8 if precision == "f32" and block_k == 128 else 4
    # 64 by 1 on 3 million rows: 128 rows a step 116 us, 64 rows 142; on 65,536 6.5 and 7.4.
    block_rows = 128 if block_n == 16 else 64
    return OuterSchedule(block_rows, block_k, block_n, num_warps, 1)


def _wide_outer_schedule(
    wide_k: int, wide_n: int, half: tuple[bool, bool], narrow: bool, num_positions: int
) -> OuterSchedule:
    """Of products in 16 bits.

    Rows in 16 bits go to shared memory as they come, and steps ahead. 128 by 128, 3 million rows, am: with 64 rows a
    step and 3 stages 0.31 ms, 128 rows and one stage 0.40; 128 by 256 0.91 and 1.20; 256 by 256 1.69 and 2.11. With
    narrow rows 128 rows and 2 stages 0.67, one stage 0.75, 64 rows and 3 stages 0.79. Rows of float32 are halved in
    registers: their side of a tile is 64, 0.78 ms for 0.96 where x is, 0.43 for 0.57 where y is.
    """
    if wide_k >= 128 and wide_n >= 128:
        if all(half):
            return OuterSchedule(128, 128, 128, 8, 2) if narrow else OuterSchedule(64, 128, 128, 8, 3)
        if any(half):
            return OuterSchedule(64, 128 if half[0] else 64, 128 if half[1] else 64, 4, 2)
        return OuterSchedule(128, 128, 128, 8, 1)  # 3 million rows, 100 by 100: 0.91 ms, (64, 128, 64, 4, 1) 1.26
    block_k = min(wide_k, 128)
    # Of few rows a pipeline is mostly its beginning: 131,072 rows 10.6 us, 2 stages 11.1; 16,384 11.1 and over 12.
    if num_positions < _MANY_PRODUCTS or block_k > 64:
        return OuterSchedule(64, block_k, 64, 4, 1)
    # 64 by 64, 1.9 million rows, am: (32 rows, 3 stages) 132 us, (64, 3) 144, (64, 1) 166; 12.7 million 789, 841 and
    # 970. With narrow rows (64, 3) 239, (64, 2) 246, (32, 3) 250, (64, 1) 267; x in float32 (64, 3) 305, (64, 1) 333;
    # y in float32 (64, 2) 205, (64, 1) 228, (64, 3) 229. 64 by 128 (64, 2) 356, (64, 1) 416.
    if all(half) and not narrow:
        return OuterSchedule(32, 64, 64, 4, 3) if wide_n == 64 else OuterSchedule(64, 64, 64, 4, 2)
    return OuterSchedule(64, 64, 64, 4, 3 if half[1] else 2 if half[0] else 1)


def rows_per_split(num_positions: int, num_types: int) -> int:
    """Positions that one program of the first pass of `typed_outer` sums.

    About 1,000 programs in all and 256 positions each at least; of few positions about 256 programs, 64 each at least.
    """
    del num_types
    few = min(256, max(64, next_power_of_two(cdiv(num_positions, 256))))
    return max(few, next_power_of_two(cdiv(num_positions, 1024)))
