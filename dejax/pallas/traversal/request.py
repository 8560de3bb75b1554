"""What a traversal is asked for: the segments of its rows, its outputs, and sums that are fused with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax

from dejax._pytrees import pytree
from dejax.pallas._checks import as_index
from dejax.pallas.traversal.arrays import (
    check_row_scaled,
    declared,
)
from dejax.pallas.traversal.plan import SHARED, Output, TileOperand


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class LongSegmentTable:
    """The long segments, rows with more than `chunk` entries, cut in chunks; C chunks in all, each a program's.

    The chunks of a segment stand side by side, in the order of its entries. The program that finishes the last of them
    merges them all, in that order.

    Attributes:
      chunk: the most entries of a row that is not cut (static).
      row: int32[C], the row of each chunk; the number of rows where unused.
      start: int32[C], the first position of each chunk.
      end: int32[C], the position after its last one; that of `start` where unused.
      first: int32[C], the first chunk of the same segment.
      count: int32[C], the number of chunks of the same segment; 0 where unused.
    """

    chunk: int = field(metadata={"static": True})
    row: Any
    start: Any
    end: Any
    first: Any
    count: Any

    @property
    def arrays(self) -> list[Any]:
        return [self.row, self.start, self.end, self.first, self.count]


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
      long_segments: the rows with very many entries, cut in chunks; None if there is none.
    """

    offsets: jax.Array
    num_entries: int
    num_rows: int
    order: jax.Array | None = None
    row_order: jax.Array | None = None
    long_segments: LongSegmentTable | None = None

    @property
    def chunks(self) -> LongSegmentTable | None:
        """`long_segments`, where there is a chunk."""
        found = self.long_segments
        return found if found is not None and found.row.shape[0] > 0 else None

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
