"""What is known of a traversal besides its arrays, and the references of its kernels by what they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from dejax.pallas.traversal.accumulate import Reduction
from dejax.pallas.traversal.request import BY_ROW, Outputs, TileOperand
from dejax.pallas.traversal.traversal_schedule import TraversalSchedule

Name = tuple[str, int]
"""A field of `Refs`, and a number there."""


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """The static facts of a traversal; `names` are the kernel's references in order."""

    body: Callable[..., Any]
    epilogue: Callable[..., Any] | None
    operands: tuple[TileOperand, ...]
    reductions: tuple[Reduction, ...]
    outputs: Outputs
    schedule: TraversalSchedule
    names: tuple[Name, ...] = ()
    factored: bool = False  # the body takes wide tiles of entries as `Factored`
    chunk: int | None = None  # the most entries of a row that is not cut

    @property
    def rows(self) -> int:
        return self.schedule.rows_per_program

    @property
    def entries(self) -> int:
        return self.schedule.entries_per_step

    @property
    def needs_entries(self) -> bool:
        """Whether anything is read or written by entry id, so that the order must be read."""
        return bool(self.outputs.entries) or any(o.access in ("entry", "indexed") for o in self.operands)

    @property
    def per_row(self) -> tuple[int, ...]:
        """Which operands have one tile for all entries of a row."""
        return tuple(i for i, o in enumerate(self.operands) if o.access in BY_ROW)


@dataclass(frozen=True, slots=True)
class Refs:
    """A kernel's references by what they are and their numbers.

    Attributes:
      arrays: the array of each operand. Arrays have a leading axis here, of size 1 where they are shared.
      exponents: the exponents of the operands that come as `RowScaled`.
      tables: the index tables.
      offsets, order, row_order: the offsets, order and row order of the segments, as number 0; without the last two
          where there are none.
      chunks: the arrays of a `LongSegmentTable`, where there is a chunk.
      zeros: the same memory as some outputs.
      entries: the entry outputs.
      rows: the row outputs.
      row_exponents: the exponents of those that are written as `RowScaled`.
      partials: the accumulators of chunks.
      counters: number 0 counts what is done: chunks, for each first chunk of a group, then as many counts of groups.
    """

    arrays: Mapping[int, Any] = field(default_factory=dict)
    exponents: Mapping[int, Any] = field(default_factory=dict)
    tables: Mapping[int, Any] = field(default_factory=dict)
    offsets: Mapping[int, Any] = field(default_factory=dict)
    order: Mapping[int, Any] = field(default_factory=dict)
    row_order: Mapping[int, Any] = field(default_factory=dict)
    chunks: Mapping[int, Any] = field(default_factory=dict)
    zeros: Mapping[int, Any] = field(default_factory=dict)
    entries: Mapping[int, Any] = field(default_factory=dict)
    rows: Mapping[int, Any] = field(default_factory=dict)
    row_exponents: Mapping[int, Any] = field(default_factory=dict)
    partials: Mapping[int, Any] = field(default_factory=dict)
    counters: Mapping[int, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: LoopPlan, refs: Sequence[Any]) -> Refs:
        found: dict[str, dict[int, Any]] = {}
        for (what, number), ref in zip(plan.names, refs, strict=True):
            found.setdefault(what, {})[number] = ref
        return cls(**found)

    @property
    def num_rows(self) -> int:
        return int(self.offsets[0].shape[0]) - 1

    @property
    def num_chunks(self) -> int:
        return int(self.chunks[0].shape[0]) if self.chunks else 0
