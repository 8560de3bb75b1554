"""What a traversal is asked for: the segments of its rows, its outputs, and sums that are fused with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dejax.pallas._checks import as_index
from dejax.pallas.traversal.arrays import (
    check_row_scaled,
    declared,
)
from dejax.pallas.traversal.plan import SHARED, Output, TileOperand


@dataclass(frozen=True, slots=True, eq=False)
class RowSegments:
    """Which entries belong to which row: the entries of row r are `order[offsets[r]:offsets[r + 1]]`.

    Attributes:
      offsets: int32[num_rows + 1].
      num_entries: number of entries, those of no row included.
      num_rows: number of rows.
      order: int32[num_entries], entry ids in the order of rows; None where entry ids are the positions.
      row_order: int32[num_rows], a permutation: then `offsets`, `order` and positions are of the rows in this order,
        row `row_order[0]` first. Chunks of long segments are in this order, too; their rows are true row numbers. Rows
        of about one length do not wait for each other when they are neighbours.
      long_segments: the long segments, L of them, cut in C chunks; None if there is none. A tuple of
        - chunk: the most entries of a chunk. Every row with more entries must be among the long segments.
        - rows: int32[L], the row of each long segment; `num_rows` where unused.
        - offsets: int32[L + 1]; long segment i has the chunks `offsets[i]` to `offsets[i + 1]`.
        - chunk_row: int32[C], the row of each chunk; `num_rows` where unused.
        - chunk_start, chunk_end: int32[C], the positions of each chunk; none where unused.
        - chunk_segment, optional: int32[C], the long segment of each chunk; L where unused. With it, the program that
          finishes a long segment's last chunk merges the chunks; without it (or None), a second kernel does.
        - groups, segment_groups, optional: int32[G + 1] and int32[L + 1], where a segment has very many chunks. Group g
          has the chunks `groups[g]` to `groups[g + 1]`, which one program merges first; long segment i has the groups
          `segment_groups[i]` to `segment_groups[i + 1]`.
    """

    offsets: jax.Array
    num_entries: int
    num_rows: int
    order: jax.Array | None = None
    row_order: jax.Array | None = None
    long_segments: tuple[Any, ...] | None = None

    @property
    def cut(self) -> tuple[Any, ...] | None:
        """`long_segments`, where there is a chunk."""
        found = self.long_segments
        return found if found and found[1].shape[0] > 0 and found[3].shape[0] > 0 else None

    @property
    def counted(self) -> bool:
        """Whether the last chunk of a long segment to be done merges all of them."""
        return self.cut is not None and len(self.cut) > 6 and self.cut[6] is not None

    @property
    def groups(self) -> tuple[Any, ...] | None:
        """The groups of chunks and the groups of each long segment, where chunks are merged in groups first."""
        return None if self.cut is None or len(self.cut) < 9 else self.cut[7:9]

    @property
    def degree(self) -> float:
        """Entries of a row on average."""
        return self.num_entries / self.num_rows

    def check(self, operands: Sequence[TileOperand], index_tables: Sequence[jax.Array]) -> list[jax.Array]:
        """The index tables as int32; raises ValueError where lengths do not fit."""
        if self.offsets.shape != (self.num_rows + 1,):
            raise ValueError(
                f"offsets must have num_rows + 1 = {self.num_rows + 1} entries, got shape {self.offsets.shape}"
            )
        by_row = {o.index for o in operands if o.access == "row_indexed"}
        lengths = (self.num_rows if i in by_row else self.num_entries for i in range(len(index_tables)))
        return [
            as_index(t, f"index_tables[{i}]", n) for i, (t, n) in enumerate(zip(index_tables, lengths, strict=True))
        ]


@dataclass(frozen=True, slots=True)
class Outputs:
    """What a traversal writes.

    Attributes:
      entries: (feature shape, dtype) of each array to write at entry ids.
      rows: (feature shape, dtype) of each array to write by row; may be () where there is no epilogue, for the
        reductions in float32.
      row_scaled: positions of the row outputs, float32 each, that are to be returned as `RowScaled`.
      covers_all_entries: the caller's word that every entry belongs to a row: no entry output need be set to zero.
    """

    entries: Sequence[Output] = ()
    rows: Sequence[Output] = ()
    row_scaled: Sequence[int] = ()
    covers_all_entries: bool = False

    def declared(self) -> Outputs:
        """With tuples of dtypes of NumPy; raises ValueError where an output of `row_scaled` is not float32."""
        rows = declared(self.rows)
        check_row_scaled(tuple(self.row_scaled), rows, "row output")
        return Outputs(declared(self.entries), rows, tuple(self.row_scaled), self.covers_all_entries)


def lengths_of(arrays: Sequence[Any], operands: Sequence[TileOperand]) -> tuple[int, ...]:
    """The rows of each array; 1 where all programs read one row."""
    return tuple(1 if o.access in SHARED else a.shape[0] for a, o in zip(arrays, operands, strict=True))
