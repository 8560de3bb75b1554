"""What a traversal is asked for: the segments of its rows, its outputs, and sums that are fused with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from dejax.pallas._checks import as_index
from dejax.pallas.traversal.accumulate import Reduction, check_reductions
from dejax.pallas.traversal.arrays import (
    check_operands,
    check_row_scaled,
    check_width,
    declared,
    exponents_of,
    flat,
    traversal_inputs,
)
from dejax.pallas.traversal.plan import BY_ROW, SHARED, Operand, Output, Plan


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
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

    def check(self, operands: Sequence[Operand], index_tables: Sequence[jax.Array]) -> list[jax.Array]:
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


@dataclass(frozen=True, slots=True, eq=False)
class FusedSums:
    """Sums over other entries of the rows of a traversal, fused with it.

    The program that writes a row makes them before the epilogue. One program takes all of a row's entries: they
    should be few. Fields are as in `traverse`, offsets and order by true row numbers; no operand is read by row.

    Attributes:
      body: from tiles to a value for each reduction.
      arrays: as in `traverse`.
      operands: how each array is read.
      offsets: int32[num_rows + 1].
      order: int32[num_entries], or None.
      num_entries: number of entries.
      index_tables: int32[num_entries] each.
      reductions: sums.
      factored: the body is given wide tiles as `Factored`.
    """

    body: Callable[..., Any]
    arrays: Sequence[Any]
    operands: Sequence[Operand]
    offsets: jax.Array
    order: jax.Array | None
    num_entries: int
    index_tables: Sequence[jax.Array]
    reductions: Sequence[Reduction]
    factored: bool = False

    def planned(self, num_rows: int, entries: int) -> tuple[Plan, list[jax.Array]]:
        """The plan of its own traversal, with `entries` at a time, and the arrays that a kernel is given for it."""
        check_reductions(self.reductions)
        wrong = [
            f"operand {i} by row" for i, o in enumerate(self.operands) if o.access in BY_ROW and o.access != "late"
        ]
        wrong += [f"reduction {i}, a {r.kind}" for i, r in enumerate(self.reductions) if r.kind != "sum"]
        if wrong:
            raise ValueError(f"fused_sums must have sums of what is read by entry, got {', '.join(wrong)}")
        if self.offsets.shape != (num_rows + 1,):
            raise ValueError(f"fused_sums.offsets must have {num_rows + 1} entries, got shape {self.offsets.shape}")
        tables = [
            as_index(t, f"fused_sums.index_tables[{i}]", self.num_entries) for i, t in enumerate(self.index_tables)
        ]
        ready, features = check_operands(self.arrays, self.operands, tables, self.num_entries, None)
        check_width([*features, *(r.shape for r in self.reductions)])
        plan = Plan(
            body=lambda *tiles: (tuple(self.body(*tiles)), ()),
            epilogue=None,
            operands=tuple(self.operands),
            features=features,
            lengths=lengths_of(self.arrays, self.operands),
            reductions=tuple(self.reductions),
            entry_outputs=(),
            row_outputs=(),
            num_entries=self.num_entries,
            num_rows=num_rows,
            rows=1,
            entries=entries,
            parts=exponents_of(ready),
            factored=self.factored,
            num_tables=len(tables),
            has_order=self.order is not None,
        )
        return plan, traversal_inputs(
            flat(ready), tables, self.offsets, self.order, self.num_entries, "fused_sums.order"
        )


def lengths_of(arrays: Sequence[Any], operands: Sequence[Operand]) -> tuple[int, ...]:
    """The rows of each array; 1 where all programs read one row."""
    return tuple(1 if o.access in SHARED else a.shape[0] for a, o in zip(arrays, operands, strict=True))
