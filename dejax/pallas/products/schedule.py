"""Schedules of the kernels, tile sizes, warps and stages: what the heuristics take.

Their figures were found on one NVIDIA H200 (see docs/performance.md). A tuned table overrules them (`tuned_tables.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas._shapes import cdiv, next_power_of_two, previous_power_of_two

# Of a loop: as mutag's backward has it, where 0.6 made its steps too large (RGAT's training 175 us, so 149); rows of 64
# features came at 2.5 TB/s on am.
_STEP_SECONDS = 0.45e-6
_LOOP_BYTES_PER_SECOND = 2.5e12
# The machine starts 1.5 programs a nanosecond: 27,163 of one row take 18 us, whatever they do.
_MANY_PROGRAMS = 6000
# Below so many programs multiprocessors are left with few.
_FEW_PROGRAMS = 3500
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


@dataclass(frozen=True, slots=True)
class TraversalSchedule:
    """How a traversal is cut.

    Attributes:
      rows_per_program: rows that a program does side by side; a power of two.
      items_per_step: items of each row loaded at once; a power of two.
      num_warps: warps a program.
      num_stages: depth of the software pipeline over items.
    """

    rows_per_program: int
    items_per_step: int
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


def traversal_schedule(
    width: int,
    mean_degree: float,
    *,
    loads: Sequence[tuple[int, bool]] | None = None,
    row_loads: Sequence[tuple[int, bool]] = (),
    writes_items: bool = False,
    num_items: int | None = None,
    longest: int = 16,
    beside: bool = False,
    interpret: bool = False,
) -> TraversalSchedule:
    """The heuristic schedule of a traversal.

    Args:
      width: padded features of the widest tile.
      mean_degree: items a row, on average.
      loads: for each operand that is read for an item its features, and whether its rows are in 16 bits; None where
        that is not known.
      row_loads: the same for those that are read once for a row.
      writes_items: whether numbers of items are written.
      num_items: number of items; None for many.
      longest: the most items of a row that is not split.
      beside: whether there are sums over other items of the same rows.
      interpret: large tiles, because the interpreter pays for each program and not for lanes.
    """
    if interpret:
        items = min(8, next_power_of_two(int(mean_degree)))
        return TraversalSchedule(max(1, previous_power_of_two(8192 // (items * width))), items, 1, 1)
    # One number an item: am (mean degree 2) (64 rows, 4 items, 4 warps) 49 us, (32, 1, 1) 61, (16, 4, 1) 118; mag (14)
    # (32, 4, 2) 78, (64, 4, 4) 89, (8, 8, 1) 146; biokg (8) 23, 26, 62. Rows of hundreds of items are types.
    num_rows = float("inf") if num_items is None else num_items / max(mean_degree, 1e-9)
    if width <= 8:
        if mean_degree < 4:
            # mutag (2) (32, 8, 4) 4.2 us, (64, 4, 4) 5.3; aifb 3.5 and 4.6; fb15k 9.6 and 7.6.
            if num_rows <= 100_000:
                return TraversalSchedule(32, 8, 4, 1)
            # Four numbers, am: (32, 1, 1) 77 us, (64, 4, 4) 89; eight: (16, 1, 1) 138 and 166.
            return TraversalSchedule(64, 4, 4, 1) if width < 4 else TraversalSchedule(128 // width, 1, 1, 1)
        return TraversalSchedule(32, 4, 2, 1) if mean_degree < 64 else TraversalSchedule(1, 64, 1, 1)
    if beside:
        return _beside_schedule(width, mean_degree, num_rows)
    # Rows that are read for an item, and for a row; numbers for an item.
    known = loads if loads is not None else [(width, False)]
    widest = next_power_of_two(max((n for n, _ in (*known, *row_loads)), default=width))
    rows = [in_half for n, in_half in known if 2 * n >= widest]
    of_row = [in_half for n, in_half in row_loads if 2 * n >= widest]
    numbers = len(known) - len(rows)
    heads = max((n for n, _ in known if 2 * n < widest), default=1)  # the most numbers that are read together
    crowded, half = len(rows) + len(of_row) > 1, rows == [True] and not of_row
    # A slot is one item of one row.
    slots = max(512 // width, min(8, 2048 // width), 1)
    num_warps = min(4, max(1, width // 1024))
    most = 8
    if half:
        # In 16 bits, sums of 64 features with a number an item: am (mean degree 3) (8 rows, 1 item, 1 warp) 382 us,
        # (8, 2, 2) 403; mag (11) 783 and 898; biokg (51) (2, 4, 1) 137, (4, 2, 1) 146, (4, 4, 2) 184; its backward (7)
        # (8, 1, 1) 161, (4, 2, 1) 183; fb15k (43) (2, 4, 1) 22.0, (1, 4, 1) 26.7. Weighted by a softmax, which reads
        # and computes more numbers: am (4, 2, 1) 635, (8, 1, 1) 764; mag (4, 2, 1) 1.10 ms, (2, 4, 1) 1.32, (8, 2, 2)
        # 1.87; fb15k (2, 4, 1) 32.7, (1, 4, 1) 40.5.
        most = 4 if mean_degree >= 16 else 2 if numbers > 1 and heads < 8 else 1
        if heads >= 8:  # weighted by a softmax of 8 heads: am (4, 1, 1) 585, (4, 2, 1) 637
            slots = max(1, min(slots, 256 // width))
        if width >= 128:
            # A warp has as many numbers as fit, am: 100 (4, 1, 1) 0.74 ms, (2, 2, 1) 0.85, (8, 2, 2) 1.30; 256
            # (2, 1, 1) 1.31, (4, 2, 2) 1.93; RGAT's softmax and sum at 256 1.38 and 2.45; on mag at 128 (4, 1, 1) 1.67,
            # (2, 2, 1) 2.17. On biokg the rule's (1, 4, 1) and (1, 2, 1) are the best. Weighted by a softmax, am: 100
            # (2, 1, 1) 1.15, (4, 1, 1) 1.26; 256 (2, 1, 1).
            slots = max(1, 512 // width) if numbers < 2 else max(2, 256 // width)
            most = 4 if mean_degree >= 16 else 1
        elif most == 1 and mean_degree >= 6 and longest > 16 and num_items is not None and num_items <= 1_000_000:
            most = 2  # bgs (7) (4, 2, 1) 30.6 us, (4, 1, 1) 37.1
    elif not crowded and width >= 128:
        # Sums of float32 rows, am: 100 (4, 1, 1) 0.87 ms, (8, 1, 2) 0.95; 256 (2, 1, 1) 1.59, (8, 1, 1) 2.28.
        slots = max(1, 512 // width)
    elif not crowded and width >= 64 and mean_degree < 4:
        num_warps = 2  # sums of float32 rows over am's pairs (2): (8, 1, 2) 0.48 ms, (8, 1, 1) 0.52, (4, 2, 1) 0.54
    # Several rows leave registers for four slots of 64 features: HGT's backward on mag (11) (4, 1, 1) 2.53 ms, with
    # eight 2.83. Where rows of pairs are multiplied and summed over a few items they leave room for eight: am (2) 0.30,
    # with four 0.35; biokg (7) 32.7 us and 34.8; of 128 features for four, am 0.56, with eight 0.67; of 256 for two,
    # 1.10 and 1.24. So do two wider rows of an item: 128 (4, 1, 1) 1.19 ms, (2, 1, 1) 1.27; 256 (2, 1, 1) 2.34,
    # (1, 1, 1) 2.65. And numbers of several heads, of which eight slots need fewer loads: am, RGAT's backward with 4
    # (8, 1, 1) 0.99 ms, (4, 1, 1) 1.05; with 8 1.10 and 1.19.
    if crowded:
        products = len(rows) == len(of_row) == 1 and not writes_items and mean_degree < 8
        two = len(rows) == 2 and not of_row and widest >= 128
        slots = max(1, min(slots, (512 if products or two or heads >= 4 else 256) // widest))
    items = min(previous_power_of_two(max(1, int(mean_degree / 1.5))), most, slots)
    if crowded:
        # Long rows wait for their steps: HGT on biokg (51) (2, 2, 1) 252 us, (4, 1, 1) 257; fb15k (43) 47 and over 55.
        items = min(2 if mean_degree >= 16 else 1, slots)
    # A step waits for memory twice, so the longest row of a small graph takes longer than all rows' bytes do. But more
    # programs take longer to start: aifb's (3) (1, 8, 2) 6.4 us, (2, 4, 2) 3.9, (4, 2, 2) 3.5.
    if num_items is not None:
        bytes_seconds = num_items * width * 4 / _LOOP_BYTES_PER_SECOND
        while items < min(8, slots) and longest / items * _STEP_SECONDS > bytes_seconds:
            if num_rows * 2 * items / slots > _MANY_PROGRAMS:
                break
            items *= 2
    return TraversalSchedule(min(32, slots // items), items, num_warps, 1)


def _beside_schedule(width: int, mean_degree: float, num_rows: float) -> TraversalSchedule:
    """Of sums over other items of the same rows, too: few rows a program where there are few in all.

    Pairs of both kinds: am (2) (8, 1, 1) 402 us, (4, 1, 1) 432, with 8 heads (8, 1, 1) 393, (8, 1, 2) 434; bgs (2)
    (8, 1, 2) 20.7, (8, 1, 1) 23.0; mutag (2) (4, 1, 2) 7.8, (8, 1, 2) 9.9; aifb (3) (2, 1, 1) 5.8, (4, 1, 1) 10.8;
    biokg (7) (4, 1, 1) 56, (8, 1, 2) 68.
    """
    rows = max(1, (256 if mean_degree >= 3 else 512) // width)
    while rows > 1 and num_rows / rows < _FEW_PROGRAMS:
        rows //= 2
    large = num_rows > 1_000_000 or mean_degree >= 3
    return TraversalSchedule(rows, 1, 1 if large or rows * width < 256 else 2, 1)


def map_schedule(width: int, *, narrows: bool = False, interpret: bool = False) -> TraversalSchedule:
    """The heuristic schedule of a map over items; arguments as in `traversal_schedule`.

    With `narrows`, rows come in float32 alone, and are written as `HalfRows`.
    """
    if interpret:
        return traversal_schedule(width, 1.0, interpret=True)
    # Then they change threads to be stored. A copy of 1.9 million rows of 64 with their inner products: 8 items and 1
    # warp 0.26 ms, 16 and 2 0.42, 32 and 4 0.41. Where some are read in 16 bits 0.32 with either.
    if narrows and width <= 512:
        return TraversalSchedule(1, max(1, 512 // width), 1, 1)
    # Inner products of 64 features, 2 million: 32 items and 4 warps 0.25 ms, 8 items and 1 warp 0.29.
    return TraversalSchedule(1, min(256, max(1, 4 * 512 // width)), 4 if width <= 2048 else 8, 1)
