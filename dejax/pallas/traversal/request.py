"""What a traversal is asked for: how it reads arrays, the segments of its rows, and its outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from dejax._pytrees import pytree
from dejax.pallas._checks import as_index

Output = tuple[tuple[int, ...], Any]
# Accesses by which an operand is read once for all entries of a row.
BY_ROW = ("row", "row_indexed", "shared", "slots", "epilogue", "times_row")
# Accesses of arrays without a leading axis.
SHARED = ("shared", "slots", "epilogue", "times_row")


@dataclass(frozen=True, slots=True)
class TileOperand:
    """How a traversal reads an array.

    Attributes:
      access: `entry`, row i of the array for entry i; `indexed`, row `index_tables[index][i]`; `positioned`, row
        `index_tables[index][p]` for position p of the order, which saves a load where the table could be permuted
        beforehand; `position`, row p for position p; `row`, the row of the traversal, of an array that may have further
        rows; `row_indexed`, row `index_tables[index][r]` for row r of the traversal. Of arrays without a leading axis:
        `shared`, the same everywhere; `slots`, the same, as a tile [rows, entries, *features], so that no element moves
        between threads where it meets the rows of entries; `epilogue`, as `slots`, but loaded after the loop over
        entries, for the epilogue alone; `times_row`, the array times the tile of operand `index`, which is read by row:
        multiplied once, before the loop.
      index: which index table, for `indexed`, `positioned` and `row_indexed`; which operand before this one, for
        `times_row`.
      columns: the operand is a part of each row of an array [length, columns]: (first column, feature shape of at most
        one axis). Narrow values that are read at the same rows share an array, and with it a memory sector; not for
        what is read by row.
      part: the operand is a part of an array [length, m, n]: (first, count) on the axis of m.
    """

    access: str
    index: int | None = None
    columns: tuple[int, tuple[int, ...]] | None = None
    part: tuple[int, int] | None = None

    def features(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The feature shape of the rows that the kernel reads from an array of shape `shape`, [rows, ...]."""
        if self.columns is not None:
            return self.columns[1]
        return shape[1:] if self.part is None else (self.part[1], *shape[2:])


@pytree
@dataclass(frozen=True, slots=True, eq=False)
class LongSegmentTable:
    """The long segments, rows with more than `chunk` entries, cut in chunks; C chunks in all, each a program's.

    The chunks of a segment stand side by side, in the order of its entries, and are merged in that order: by the
    program that finishes the last of them or, where they are many, by groups and then the groups.

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
        """The five arrays, in the order of the attributes."""
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
        """`long_segments`, or None if it has no chunk."""
        found = self.long_segments
        return found if found is not None and found.row.shape[0] > 0 else None

    @property
    def degree(self) -> float:
        """Mean number of entries of a row."""
        return self.num_entries / self.num_rows

    def check(self, operands: Sequence[TileOperand], index_tables: Sequence[jax.Array]) -> list[jax.Array]:
        """Converts the index tables of a traversal to int32. Raises ValueError if a table has another length."""
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
        """The same outputs with shapes as tuples and NumPy dtypes, so that equal outputs compare equal.

        Raises:
          ValueError: an output of `row_scaled` is not float32.
        """
        entries, rows = (
            tuple((tuple(shape), jnp.dtype(dtype)) for shape, dtype in each) for each in (self.entries, self.rows)
        )
        for i in self.row_scaled:
            if rows[i][1] != jnp.float32:
                raise ValueError(f"row_scaled names output {i}, which must be float32, got {rows[i][1]}")
        return Outputs(entries, rows, tuple(self.row_scaled), self.covers_all_entries)
