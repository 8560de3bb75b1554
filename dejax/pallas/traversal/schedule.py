"""The heuristic schedules of traversals: rows and items of a step, warps and stages.

Their figures were found on one NVIDIA H200 (see docs/performance.md). A tuned table overrules them (`tuned_tables.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dejax.pallas._shapes import next_power_of_two, previous_power_of_two

# Of a loop: as mutag's backward has it, where 0.6 made its steps too large (RGAT's training 175 us, so 149); rows of 64
# features came at 2.5 TB/s on am.
_STEP_SECONDS = 0.45e-6
_LOOP_BYTES_PER_SECOND = 2.5e12
# The machine starts 1.5 programs a nanosecond: 27,163 of one row take 18 us, whatever they do.
_MANY_PROGRAMS = 6000
# Below so many programs multiprocessors are left with few.
_FEW_PROGRAMS = 3500


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
