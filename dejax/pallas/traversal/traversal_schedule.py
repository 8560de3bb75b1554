"""The heuristic schedules of traversals: rows and entries of a step, warps and stages.

The rules were found on one NVIDIA H200; docs/performance/schedules.md has the figures behind each. A tuned table
overrules them (`tuning.py`), and a tuner tries the candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dejax.pallas._shapes import next_power_of_two, previous_power_of_two
from dejax.pallas.machine import H200


@dataclass(frozen=True, slots=True)
class TraversalSchedule:
    """Tile sizes, warps and pipeline stages of a traversal kernel.

    Attributes:
      rows_per_program: rows that a program computes at once; a power of two.
      entries_per_step: entries of each row loaded at once; a power of two.
      num_warps: warps of a program.
      num_stages: depth of the software pipeline over entries.
    """

    rows_per_program: int
    entries_per_step: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class _Reads:
    """The operands of a traversal, as far as the schedule depends on them.

    Attributes:
      entry_rows: for each wide operand that is read for an entry, whether its rows are in 16 bits.
      own_rows: the same for those that are read once for a row.
      scalars: narrow operands that are read for an entry.
      heads: the most scalars that are read together.
      widest: features of the widest operand, padded.
    """

    entry_rows: list[bool]
    own_rows: list[bool]
    scalars: int
    heads: int
    widest: int

    @property
    def crowded(self) -> bool:
        """Whether there are several wide rows for an entry."""
        return len(self.entry_rows) + len(self.own_rows) > 1

    @property
    def one_row_in_16_bits(self) -> bool:
        """Whether the only wide row of an entry is in 16 bits."""
        return self.entry_rows == [True] and not self.own_rows


def traversal_schedule(
    width: int,
    mean_degree: float,
    *,
    loads: Sequence[tuple[int, bool]] | None = None,
    row_loads: Sequence[tuple[int, bool]] = (),
    writes_entries: bool = False,
    num_entries: int | None = None,
    longest: int = 16,
    interpret: bool = False,
) -> TraversalSchedule:
    """The heuristic schedule of a traversal.

    Args:
      width: padded features of the widest tile.
      mean_degree: entries of a row, on average.
      loads: for each operand that is read for an entry its features, and whether its rows are in 16 bits; None where
        that is not known.
      row_loads: the same for those that are read once for a row.
      writes_entries: whether values are written for each entry.
      num_entries: number of entries; None for many.
      longest: the most entries of a row that is not split.
      interpret: large tiles, because the interpreter pays for each program and not for lanes.
    """
    if interpret:
        entries = min(8, next_power_of_two(int(mean_degree)))
        return TraversalSchedule(max(1, previous_power_of_two(8192 // (entries * width))), entries, 1, 1)
    num_rows = float("inf") if num_entries is None else num_entries / max(mean_degree, 1e-9)
    if width <= 8:
        return _narrow_schedule(width, mean_degree, num_rows)
    reads = _reads(width, loads, row_loads)
    # A slot is one entry of one row.
    slots, most = max(512 // width, min(8, 2048 // width), 1), 8
    num_warps = min(4, max(1, width // 1024))
    if reads.one_row_in_16_bits:
        few = longest > 16 and num_entries is not None and num_entries <= 1_000_000
        slots, most = _slots_of_16_bits(width, mean_degree, reads, slots, few)
    elif not reads.crowded and width >= 128:
        slots = max(1, 512 // width)
    elif not reads.crowded and width >= 64 and mean_degree < 4:
        num_warps = 2
    if reads.crowded:
        slots = _crowded_slots(mean_degree, reads, slots, writes_entries)
        most = 2 if mean_degree >= 16 else 1  # long rows wait for their steps
        entries = min(most, slots)
    else:
        entries = min(previous_power_of_two(max(1, int(mean_degree / 1.5))), most, slots)
    if num_entries is not None:
        entries = _entries_of_long_rows(entries, slots, num_entries * width * 4, num_rows, longest)
    return TraversalSchedule(min(32, slots // entries), entries, num_warps, 1)


def _reads(width: int, loads: Sequence[tuple[int, bool]] | None, row_loads: Sequence[tuple[int, bool]]) -> _Reads:
    known = loads if loads is not None else [(width, False)]
    widest = next_power_of_two(max((n for n, _ in (*known, *row_loads)), default=width))
    entry_rows = [in_16_bits for n, in_16_bits in known if 2 * n >= widest]
    own_rows = [in_16_bits for n, in_16_bits in row_loads if 2 * n >= widest]
    heads = max((n for n, _ in known if 2 * n < widest), default=1)
    return _Reads(entry_rows, own_rows, len(known) - len(entry_rows), heads, widest)


def _narrow_schedule(width: int, mean_degree: float, num_rows: float) -> TraversalSchedule:
    """The schedule of a traversal that reads scalars only."""
    if mean_degree >= 64:  # rows of hundreds of entries are types
        return TraversalSchedule(1, 64, 1, 1)
    if mean_degree >= 4:
        return TraversalSchedule(32, 4, 2, 1)
    if num_rows <= 100_000:
        return TraversalSchedule(32, 8, 4, 1)
    return TraversalSchedule(64, 4, 4, 1) if width < 4 else TraversalSchedule(128 // width, 1, 1, 1)


def _slots_of_16_bits(width: int, mean_degree: float, reads: _Reads, slots: int, few: bool) -> tuple[int, int]:
    """The number of slots, and the most slots of one row, for traversals that read one wide row, in 16 bits, per entry.

    `few`: there are few entries, and rows of more than 16.
    """
    most = 4 if mean_degree >= 16 else 2 if reads.scalars > 1 and reads.heads < 8 else 1
    if reads.heads >= 8:
        slots = max(1, min(slots, 256 // width))
    if width >= 128:
        # As many elements as fit into a warp. A softmax, which reads several scalars, needs registers, too.
        slots = max(1, 512 // width) if reads.scalars < 2 else max(2, 256 // width)
        return slots, 4 if mean_degree >= 16 else 1
    return slots, 2 if most == 1 and mean_degree >= 6 and few else most


def _crowded_slots(mean_degree: float, reads: _Reads, slots: int, writes_entries: bool) -> int:
    """Slots where an entry has several wide rows: registers hold four of 64 features.

    There is room for eight where rows are multiplied and summed over a few entries, and where two wide rows of an entry
    have at least 128 features. Scalars of several heads need fewer loads with eight.
    """
    one_each = len(reads.entry_rows) == len(reads.own_rows) == 1
    products = one_each and not writes_entries and mean_degree < 8
    two = len(reads.entry_rows) == 2 and not reads.own_rows and reads.widest >= 128
    return max(1, min(slots, (512 if products or two or reads.heads >= 4 else 256) // reads.widest))


def _entries_of_long_rows(entries: int, slots: int, nbytes: int, num_rows: float, longest: int) -> int:
    """Entries of a step, more of them where the longest row would take longer than all rows' bytes.

    A step waits for memory twice. But with more entries of a step there are more programs, which take time to start.
    """
    bytes_seconds = nbytes / H200.gather_bytes_per_second
    while entries < min(8, slots) and longest / entries * H200.step_seconds > bytes_seconds:
        if num_rows * 2 * entries / slots > H200.many_programs:
            break
        entries *= 2
    return entries


def map_schedule(width: int, *, narrows: bool = False, interpret: bool = False) -> TraversalSchedule:
    """The heuristic schedule of a map over entries; arguments as in `traversal_schedule`.

    With `narrows`, rows come in float32 alone, and are written as `RowScaled`.
    """
    if interpret:
        return traversal_schedule(width, 1.0, interpret=True)
    # Rows that are narrowed move from thread to thread to be stored, which small programs do faster.
    if narrows and width <= 512:
        return TraversalSchedule(1, max(1, 512 // width), 1, 1)
    return TraversalSchedule(1, min(256, max(1, 4 * 512 // width)), 4 if width <= 2048 else 8, 1)


def traversal_candidates(width: int) -> list[dict[str, Any]]:
    """Rows and entries of a step, and warps, to try for a traversal with tiles of `width`."""
    least = 4 if width > 8 else 1  # elements a thread; traversals of scalars alone were the fastest with two
    return [
        {"rows_per_program": rows, "entries_per_step": entries, "num_warps": warps, "num_stages": 1}
        for warps in (1, 2, 4)
        for rows in (1, 2, 4, 8, 16, 32, 64)
        for entries in (1, 2, 4, 8)
        if least <= rows * entries * width // (32 * warps) <= 32
    ]
