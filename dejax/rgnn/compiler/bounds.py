"""Bounds: the bytes of a plan over the least bytes that its function needs, by kernel, and what costs most.

The least bytes of a function are: each input read once, each output written once, and for each loop over the edges one
row per edge, of which the cache serves its share, with its index. Values that a plan stores between kernels, rows that
it reads again and further rows per edge are what it takes more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dejax.rgnn.cost.model import CostModel
from dejax.rgnn.ir.inter import OpProgram, Space
from dejax.rgnn.ir.intra import (
    Fallback,
    Gemm,
    Instance,
    Kernels,
    Operand,
    RowProducts,
    Traversal,
    WeightGradient,
    user_lines,
)
from dejax.rgnn.passes._rewrite import live

# Rows of fewer elements are scalars, for each head at most: what they take is not worth a line.
_WIDE = 8
# What takes a smaller share of the bytes is not listed.
_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class KernelBound:
    """One kernel: the bytes that it moves, those of them that the function needs, and its predicted time.

    Attributes:
      number: the number of the kernel, as `explain` and profiles number them.
      template: grouped GEMM, weight gradient, row products, traversal or xla.
      bytes: bytes moved from and to memory.
      needed: the part of the least bytes that this kernel moves.
      seconds: predicted for an NVIDIA H200.
      lines: the lines of the user's program that it computes, first the ones whose results it writes.
    """

    number: int
    template: str
    bytes: int
    needed: int
    seconds: float
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Cause:
    """Bytes that the function would not need: which kernel moves them, why, at which line, and what is cheaper."""

    part: str
    kernel: int
    bytes: int
    what: str
    line: str
    cheaper: str


@dataclass(frozen=True, slots=True)
class PartBound:
    """The forward or backward part of a plan.

    Attributes:
      title: which part.
      kernels: the kernels, in the order in which they run.
      bytes: the bytes that all kernels move.
      least: the least bytes that the function needs.
      seconds: predicted for an NVIDIA H200.
      least_seconds: the time to move the least bytes at the bandwidth of a copy.
    """

    title: str
    kernels: tuple[KernelBound, ...]
    least_seconds: float

    @property
    def bytes(self) -> int:
        return sum(k.bytes for k in self.kernels)

    @property
    def least(self) -> int:
        return sum(k.needed for k in self.kernels)

    @property
    def seconds(self) -> float:
        return sum(k.seconds for k in self.kernels)

    @property
    def ratio(self) -> float:
        """Bytes of the plan over the least."""
        return self.bytes / max(1, self.least)


@dataclass(frozen=True, slots=True)
class Bounds:
    """The parts of a plan beside their bounds; printing it shows a table and what costs most.

    Attributes:
      name: the name of the program.
      parts: forward without gradients, then, where there are gradients, forward with them and backward.
      causes: what takes more bytes than the function needs, the most first.
    """

    name: str
    parts: tuple[PartBound, ...]
    causes: tuple[Cause, ...] = field(default=())

    def __str__(self) -> str:
        lines = [f"{self.name}: bytes of the plan over the least that the function needs"]
        for part in self.parts:
            times = f"{part.seconds * 1e6:.1f} us predicted, {part.least_seconds * 1e6:.1f} us for the least bytes"
            lines += ["", f"{part.title}: {part.ratio:.2f} x ({times})"]
            lines.append(f"{'kernel':<8}{'template':<18}{'bytes':>12}{'needed':>12}{'ratio':>9}  line")
            for k in part.kernels:
                ratio = f"{k.bytes / k.needed:.2f} x" if k.needed > k.bytes / 1000 else "-"
                where = Path(k.lines[0]).name if k.lines else ""
                row = f"[{k.number}]".ljust(8) + f"{k.template:<18}{megabytes(k.bytes):>12}{megabytes(k.needed):>12}"
                lines.append(f"{row}{ratio:>9}  {where}".rstrip())
            lines.append(f"{'total':<26}{megabytes(part.bytes):>12}{megabytes(part.least):>12}{part.ratio:>7.2f} x")
        lines += ["", "what takes more than the function needs:" if self.causes else "nothing takes much more."]
        said: set[str] = set()
        for c in self.causes:
            lines.append(f"- {megabytes(c.bytes)}, {c.part} [{c.kernel}]: {c.what}" + (f"; {c.line}" if c.line else ""))
            lines += [] if c.cheaper in said else [f"  cheaper: {c.cheaper}"]
            said.add(c.cheaper)
        return "\n".join(lines)


def megabytes(n: float) -> str:
    return f"{n / 1e6:,.1f} MB"


def bounds_of(name: str, models: Sequence[tuple[str, CostModel, int]]) -> Bounds:
    """The bounds of the parts of a plan: of each its title, its cost model and how many results the function has."""
    parts, causes = [], list[Cause]()
    for title, model, num_outputs in models:
        part = _BoundedPart(title, model, num_outputs)
        parts.append(part.bound())
        if title != "forward, with gradients":  # which is mostly the same as without
            causes += part.causes()
    total = sum(p.bytes for p in parts)
    causes = [c for c in causes if c.bytes >= _SHARE * total]
    return Bounds(name, tuple(parts), tuple(sorted(causes, key=lambda c: -c.bytes)[:6]))


class _BoundedPart:
    """One level-2 program and its cost model."""

    def __init__(self, title: str, model: CostModel, num_outputs: int) -> None:
        self.title, self.model = title, model
        self.outputs = set(model.kernels.program.outputs[:num_outputs])  # the others are saved for backward
        self.kernels: Kernels = model.kernels
        self.program: OpProgram = model.kernels.program
        self.costs = model.costs()
        self.needed = [0.0] * len(self.costs)
        self._count_inputs_and_outputs()
        for number, needed in _loops(model).items():
            self.needed[number] += needed

    def _table(self, value: int) -> int:
        op = self.program.ops[value]
        return self.model.counts.rows(op.space) * op.row_bytes

    def _count_inputs_and_outputs(self) -> None:
        ops, first = self.program.ops, self.kernels.first_readers()
        for i in self.program.inputs:
            if i in first and not str(ops[i].attr("name")).startswith("saved"):
                self.needed[first[i]] += self._table(i)
        for number, instance in enumerate(self.kernels.instances):
            self.needed[number] += sum(self._table(v) for v in instance.writes if v in self.outputs)

    def bound(self) -> PartBound:
        found = []
        for number, (instance, c) in enumerate(zip(self.kernels.instances, self.costs, strict=True)):
            lines = tuple(user_lines(self.program, instance))
            needed = int(min(self.needed[number], c.bytes))
            found.append(KernelBound(number, instance.template, c.bytes, needed, c.seconds, lines))
        least = sum(k.needed for k in found)
        return PartBound(self.title, tuple(found), least / self.model.constants.bytes_per_second)

    def causes(self) -> list[Cause]:
        """Values that are stored between kernels, then rows that are read for each edge."""
        found, stored_at = [], [0.0] * len(self.costs)
        readers: dict[int, list[int]] = {}
        for number, instance in enumerate(self.kernels.instances):
            for v in instance.reads:
                readers.setdefault(v, []).append(number)
        for number, instance in enumerate(self.kernels.instances):
            for v in instance.writes:
                if v in self.outputs:
                    continue
                size = self.model.table_bytes(v)
                for at in (number, *readers.get(v, [])):
                    stored_at[at] += size
                if self.program.ops[v].width >= _WIDE:
                    reading = [self.kernels.instances[r] for r in readers.get(v, [])]
                    what, cheaper = _why_stored(self.program, v, instance, reading)
                    moved = size * (1 + len(reading))
                    found.append(self._cause(number, moved, what, cheaper, self._line(v, instance)))
        for number, instance in enumerate(self.kernels.instances):
            rows = _rows_of_edges(self.program, instance)
            more = self.costs[number].bytes - self.needed[number] - stored_at[number]
            if rows and more > 0:
                widths = " + ".join(str(self.program.ops[o.name].width) for o in rows)
                what = f"each edge reads {len(rows)} row{'s' * (len(rows) > 1)} of {widths} numbers"
                found.append(self._cause(number, int(more), what, _NARROWER_ROWS, self._line(None, instance)))
        return found

    def _cause(self, number: int, moved: int, what: str, cheaper: str, line: str) -> Cause:
        return Cause(self.title.split(",")[0], number, moved, what, line, cheaper)

    def _line(self, value: int | None, instance: Instance) -> str:
        """The line of a value, or the first one of an instance; with the text of the line where the file is there."""
        at = self.program.lines[value] if value is not None and self.program.lines else None
        at = at or next(iter(user_lines(self.program, instance)), None)
        if at is None:
            return ""
        file, _, line = at.rpartition(":")
        try:
            text = Path(file).read_text(encoding="utf-8").splitlines()[int(line) - 1].strip()
        except (OSError, ValueError, IndexError):
            return Path(at).name
        return f"{Path(at).name}: {text}"


_NARROWER_ROWS = "narrower rows, bfloat16 features, or one array that holds what each edge reads"
_BEFORE_EDGES = (
    "multiply before the edges read it, g.src(x @ w), or after the sum, g.sum_to_dst(m) @ w; write x_i - x_j as two "
    "products; a maximum or an activation of both ends in between keeps the product on the edges"
)


def _why_stored(program: OpProgram, value: int, writer: Instance, readers: list[Instance]) -> tuple[str, str]:
    """What a stored value is, and what would be cheaper."""
    op = program.ops[value]
    row = f"stores {op.width} numbers for each {str(op.space).replace('_', ' ')}"
    if op.space == Space.EDGE:
        if any(_multiplies(program, i) for i in (writer, *readers)):
            return f"{row}: a product runs on each edge", _BEFORE_EDGES
        if isinstance(writer, Fallback) or any(isinstance(r, Fallback) for r in readers):
            why = next((i.why for i in (writer, *readers) if isinstance(i, Fallback) and i.why), "")
            return f"{row} for XLA" + (f" ({why})" if why else ""), "a form that kernels compute: docs/programs.md"
        if any(isinstance(r, WeightGradient | RowProducts) for r in readers):
            return f"{row} for the gradient of a weight", "a weight that meets rows of nodes, before edges read them"
        return f"{row} for another kernel", "fewer passes over the edges: fewer aggregations of one message"
    if op.space in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR):
        return row, "narrower rows, or one weight for several edge types (bases, g.shared)"
    return row, "narrower rows; a chain of products without activations can be one product"


def _multiplies(program: OpProgram, instance: Instance) -> bool:
    """Whether an instance is a product of rows with a matrix, as a kernel or by XLA."""
    if isinstance(instance, Fallback):
        return any(program.ops[i].name == "linear" for i in instance.ops)
    return isinstance(instance, Gemm)


def _rows_of_edges(program: OpProgram, instance: Instance) -> list[Operand]:
    """The wide rows that a traversal of edges reads by index for each."""
    if not isinstance(instance, Traversal) or instance.space != Space.EDGE:
        return []
    found = [o for o in instance.operands if o.access == "gathered" and program.ops[o.name].width >= _WIDE]
    return list({(o.value, o.via, o.part): o for o in found}.values())


@dataclass(slots=True)
class _Loop:
    """Traversals of the edges by one end that one loop could be: none reads rows that follow from another's sums."""

    end: str
    sums: set[int]
    number: int
    needed: float


def _loops(model: CostModel) -> dict[int, float]:
    """For the traversal that takes most of each loop, the bytes of one row per edge that the cache does not serve."""
    program, counts = model.kernels.program, model.counts
    loops: list[_Loop] = []
    for number, t in enumerate(model.kernels.instances):
        if not isinstance(t, Traversal) or t.space != Space.EDGE or t.via is None:
            continue
        read = [o for o in t.operands if o.access == "gathered" and o.via != "etype"]
        row = max((model.row_bytes(o.value) * _share_of_row(program, o) for o in read), default=0.0)
        table = counts.nodes * row
        reread = max(0.0, model.missed_bytes(counts.edges, int(row), table) - min(counts.edges * row, table))
        needed = reread + 4.0 * counts.edges * bool(read) + 8.0 * counts.nodes
        before = live(program, [o.value for o in read if program.ops[o.name].width >= _WIDE])
        end = "dst" if t.via in ("dst", "destination_pair") else "src" if t.via in ("src", "source_pair") else t.via
        wide = {a.out for a in t.accumulators if program.ops[a.out].width >= _WIDE}
        same = [p for p in loops if p.end == end and p.sums.isdisjoint(before)]
        if not same:
            loops.append(_Loop(end, wide, number, needed))
            continue
        same[-1].sums |= wide
        if needed > same[-1].needed:
            same[-1].number, same[-1].needed = number, needed
    found: dict[int, float] = {}
    for p in loops:
        found[p.number] = found.get(p.number, 0.0) + p.needed
    return found


def _share_of_row(program: OpProgram, o: Operand) -> float:
    return 1.0 if o.part is None else o.part[1] / program.ops[o.value].shape[0]
