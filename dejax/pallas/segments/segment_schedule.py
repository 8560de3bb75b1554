"""Tiles of a segment reduction, and the length from which a segment is cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dejax.pallas._shapes import cdiv, next_power_of_two, previous_power_of_two


@dataclass(frozen=True, slots=True)
class SegmentSchedule:
    """Tile sizes and warps of a segment reduction kernel.

    Attributes:
      rows: segments that a program reduces at once; a power of two.
      entries: entries of each segment that are loaded at once; a power of two.
      width: features that a program reduces; a power of two.
      num_warps: warps of a program.
    """

    rows: int
    entries: int
    width: int
    num_warps: int


def width_block(width: int) -> int:
    """Features of a program: a power of two of at most 512 that leaves few lanes without a feature.

    >>> [width_block(w) for w in (1, 3, 64, 100, 300, 512, 1000)]
    [1, 4, 64, 128, 64, 512, 512]
    """
    whole = next_power_of_two(width)
    if whole <= 128:
        return whole
    blocks = [b for b in (512, 256, 128, 64) if b <= whole]
    least = min(cdiv(width, b) * b for b in blocks)
    # A larger block reads each index less often, which is worth a tenth of the lanes.
    return next(b for b in blocks if cdiv(width, b) * b <= 1.1 * least)


def segment_schedule(width: int, mean_length: float, itemsize: int = 4) -> SegmentSchedule:
    """The heuristic schedule.

    Args:
      width: features of an entry.
      mean_length: entries of a segment, on average.
      itemsize: bytes of a number.
    """
    block = width_block(width)
    most = previous_power_of_two(max(1, int(mean_length / 1.5)))
    if block <= 8:
        # Narrow entries: a thread holds eight numbers, and many segments share a program, which takes time to start.
        entries = min(most, 64)
        return SegmentSchedule(max(1, min(64, 1024 // (entries * block))), entries, block, 4)
    # Twice the numbers where they have half the bytes: 512 left 16-bit rows of 64 at 1.4 times their bytes.
    slots = max(1, (1024 if itemsize < 4 and block <= 128 else 512) // block)
    entries = min(most, 8, slots)
    return SegmentSchedule(min(32, slots // entries), entries, block, 1)


def chunk_of(num_entries: int) -> int:
    """The length from which a segment is cut in chunks of as many entries.

    The longest uncut segment and the merging of a segment that has all entries should both take little of the time of
    reading the entries: the first grows with the chunk and the second with the number of chunks.

    >>> [chunk_of(n) for n in (100, 10**5, 2 * 10**7, 10**8)]
    [64, 64, 1024, 2048]
    """
    return min(4096, max(64, previous_power_of_two(math.isqrt(num_entries) // 4)))
