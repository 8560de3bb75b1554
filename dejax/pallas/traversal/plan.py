"""What a traversal is, and the references that its kernels are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dejax.pallas.traversal.accumulate import Reduction

Output = tuple[tuple[int, ...], Any]
# Accesses by which an operand is read once for all entries of a row.
BY_ROW = ("row", "row_indexed", "shared", "each_slot", "late", "times_row")
# Accesses of arrays without a leading axis.
SHARED = ("shared", "each_slot", "late", "times_row")


@dataclass(frozen=True, slots=True)
class TileOperand:
    """How a traversal reads an array.

    Attributes:
      access: `entry`, row i of the array for entry i; `indexed`, row `index_tables[index][i]`; `positioned`, row
        `index_tables[index][p]` for position p of the order, which saves a load where the table could be permuted
        beforehand; `position`, row p for position p; `row`, the row of the traversal, of an array that may have further
        rows; `row_indexed`, row `index_tables[index][r]` for row r of the traversal; `shared`, an array without a
        leading axis, the same everywhere; `each_slot`, the same as a tile [rows, entries, *features], so that no
        element moves between threads where it meets the rows of entries; `late`, as `each_slot`, but after the
        traversal and for the epilogue alone; `times_row`, an array without a leading axis times the tile of operand
        `index`, which is read by row: multiplied once, before the traversal.
      index: which index table, for `indexed`, `positioned` and `row_indexed`; which operand before this one, for
        `times_row`.
      columns: the operand is a part of each row of an array [length, columns]: (first column, feature shape of at most
        one axis). Narrow values that are read at the same rows share an array, and with it a memory sector; not for
        what is read by row.
      part: the operand is a part of an array [length, m, n]: (first, count) on the axis of m.
      when: for `entry`, the position of an operand before this one, a scalar an entry: where that is 0 the row is not
        read, and is zeros.
    """

    access: str
    index: int | None = None
    columns: tuple[int, tuple[int, ...]] | None = None
    part: tuple[int, int] | None = None
    when: int | None = None


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """Static facts of one traversal. Arrays have a leading axis here, of size 1 where they are shared."""

    body: Callable[..., Any]
    epilogue: Callable[..., Any] | None
    operands: tuple[TileOperand, ...]
    features: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    reductions: tuple[Reduction, ...]
    entry_outputs: tuple[Output, ...]
    row_outputs: tuple[Output, ...]
    num_entries: int
    num_rows: int
    rows: int
    entries: int
    chunk: int | None = None  # the most entries of a row that is not cut
    num_chunks: int = 0
    merged_chunks: int = 1  # chunks of a long segment that are merged in a step
    warps: int = 1
    parts: tuple[int, ...] = ()  # exponents a row of operands that come as `RowScaled`, 0 for the others
    row_scaled: tuple[int, ...] = ()  # positions of the outputs of rows (of a map: of entries) written as `RowScaled`
    factored: bool = False  # the body takes wide tiles of entries as `Factored`
    num_tables: int = 0
    has_order: bool = False
    has_row_order: bool = False

    @property
    def needs_entries(self) -> bool:
        """Whether anything is read or written by entry id, so that the order must be read."""
        return bool(self.entry_outputs) or any(o.access in ("entry", "indexed") for o in self.operands)

    @property
    def per_row(self) -> tuple[int, ...]:
        """Which operands have one tile for all entries of a row, or the same in each slot of an entry."""
        return tuple(i for i, o in enumerate(self.operands) if o.access in BY_ROW)


@dataclass(frozen=True, slots=True)
class Array:
    """An operand's references: the rows, and the exponents of `RowScaled`."""

    rows: Any
    exponent: Any = None
    parts: int = 0


@dataclass(frozen=True, slots=True)
class Refs:
    """A kernel's references by what they are."""

    arrays: Sequence[Array]
    tables: Sequence[Any]
    offsets: Any
    order: Any
    row_order: Any = None
    bounds: Sequence[Any] = ()
    entry_outputs: Sequence[Any] = ()
    outputs: Sequence[Any] = ()


def operand_refs(plan: LoopPlan, refs: Sequence[Any]) -> tuple[list[Array], Sequence[Any], Sequence[Any]]:
    """The operands, whose exponents follow them, the tables, and the references after those."""
    n = len(plan.operands)
    exponent_refs = iter(refs[n:])
    parts = plan.parts or (0,) * n
    arrays = [Array(r, next(exponent_refs) if p else None, p) for r, p in zip(refs[:n], parts, strict=True)]
    rest = refs[n + sum(p > 0 for p in parts) :]
    return arrays, rest[: plan.num_tables], rest[plan.num_tables :]


def unpack(refs: Sequence[Any], plan: LoopPlan, num_aliased: int) -> Refs:
    """The references in the order in which `traverse` passes them."""
    arrays, tables, rest = operand_refs(plan, refs)
    offsets, rest = rest[0], rest[1:]
    order, rest = (rest[0], rest[1:]) if plan.has_order else (None, rest)
    row_order, rest = (rest[0], rest[1:]) if plan.has_row_order else (None, rest)
    num_bounds = 5 if plan.num_chunks else 0  # the arrays of a `LongSegmentTable`
    bounds, outputs = rest[:num_bounds], rest[num_bounds + num_aliased :]
    n = len(plan.entry_outputs)
    return Refs(arrays, tables, offsets, order, row_order, bounds, outputs[:n], outputs[n:])
