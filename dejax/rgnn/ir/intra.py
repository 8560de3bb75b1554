"""Level 2, the intra-operator IR: which kernel instance computes each value, and how it reaches its operands.

A level-2 program is the level-1 program it implements and a list of instances, each of two templates or the fallback:

    grouped GEMM %7 = gathered(%0 by source_pair.node) x %1 by source_pair.etype, k,kn->n
    traversal over dst                                       one segment of edges for each node
      reads gathered(%7 by source_pair) as %8, row(%3 ...)   what each edge loads
      body %9 %10                                            computed for each edge, in registers
      max %11 of %10 ; weighted %14 of %8                    accumulators
      epilogue %15                                           computed once for each node, in registers
      writes %15                                             what reaches memory

Values are the level-1 values. A value that no instance writes never reaches memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from dejax.rgnn.ir.inter import VIAS, IRError, Op, OpProgram, Space, format_op
from dejax.rgnn.ir.templates import GEMM_SPECS, access_by, can_weigh


@dataclass(frozen=True, slots=True)
class Operand:
    """An array that an instance reads.

    Attributes:
      name: the level-1 value that the loaded row stands for inside the instance.
      value: the array.
      access: `dense`, row i of the array for entry i; `gathered`, row index[i], by the map `via`; `row`, row r for
        segment r; `row_indexed`, row index[r] for segment r; `shared`, one row for all.
      via: the map of a gathered, row or shared access.
      part: (first index, how many) of the first feature axis: the rest of each row is not read.
    """

    name: int
    value: int
    access: str
    via: str | None = None
    part: tuple[int, int] | None = None

    def __str__(self) -> str:
        by = f" by {self.via}" if self.access in ("gathered", "row_indexed") else ""
        part = "" if self.part is None else f"[{self.part[0]}:{sum(self.part)}]"
        text = f"{self.access}(%{self.value}{part}{by})"
        return text if self.name == self.value else f"{text} as %{self.name}"


@dataclass(frozen=True, slots=True)
class Gemm:
    """A grouped GEMM, rows times the matrix of their type: `out = x @ w[type]`, with gathered rows.

    Attributes:
      out: the value after the epilogue (`bias`, `activation`); `product`, before it.
      bias: a row for each type that is added to the rows of the product.
      activation: a level-1 elementwise operator.
      dot: the inner product of each row of the product with `vector`, the vector of its type.
    """

    template: ClassVar[str] = "grouped GEMM"
    out: int
    product: int
    x: Operand
    w: int
    spec: str
    via: str
    bias: int | None = None
    activation: str | None = None
    dot: int | None = None
    vector: int | None = None

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,) if self.dot is None else (self.out, self.dot)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.x.value, self.w, *(v for v in (self.bias, self.vector) if v is not None))

    def __str__(self) -> str:
        extra = f", plus %{self.bias}" if self.bias is not None else ""
        extra += f", then {self.activation}" if self.activation else ""
        extra += f", %{self.dot} = its inner product with %{self.vector}" if self.dot is not None else ""
        return f"{self.template} %{self.out} = {self.x} x %{self.w} by {self.via}, {self.spec}{extra}"


@dataclass(frozen=True, slots=True)
class WeightGradient:
    """A grouped weight gradient: outer products of the rows of `x` and `y`, summed by type."""

    template: ClassVar[str] = "weight gradient"
    out: int
    x: Operand
    y: Operand
    spec: str
    via: str

    @property
    def writes(self) -> tuple[int, ...]:
        return (self.out,)

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.x.value, self.y.value)

    def __str__(self) -> str:
        return f"{self.template} %{self.out} = {self.x} x {self.y} by {self.via}, {self.spec}"


@dataclass(frozen=True, slots=True)
class RowProducts:
    """Outer products of the rows of each of `xs` with those of `y`, summed over all rows: gradients of shared weights.

    `outs` are the sums, by the contraction `spec` each; `total` is the sum of the rows of `y` in the same pass.
    """

    template: ClassVar[str] = "row products"
    outs: tuple[int, ...]
    xs: tuple[int, ...]
    y: int
    spec: str
    total: int | None = None

    @property
    def writes(self) -> tuple[int, ...]:
        return self.outs if self.total is None else (*self.outs, self.total)

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys((*self.xs, self.y)))

    def __str__(self) -> str:
        products = ", ".join(f"%{out} = %{x} x %{self.y}" for out, x in zip(self.outs, self.xs, strict=True))
        extra = "" if self.total is None else f"; %{self.total} = sum of %{self.y}"
        return f"{self.template} {products} over all rows, {self.spec}{extra}"


@dataclass(frozen=True, slots=True)
class Term:
    """One factor of a weighted sum's summand: a value to the power +1 or -1, with axes inserted."""

    value: int
    power: int
    inserts: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One accumulator of a traversal.

    Attributes:
      kind: `sum` or `max` of `value`; `weighted`: the sum of exp(score - largest score) times the product of `terms`;
        or `ties`: how many entries have the largest score.
      out: the level-1 reduction.
      value: what is reduced (for `weighted` and `ties`, the score).
      score: for `weighted` and `ties`, which accumulator of the traversal (a `max`) is the largest score.
      score_inserts: axes inserted into the score to align it with the summand.
    """

    kind: str
    out: int
    value: int
    terms: tuple[Term, ...] = ()
    score: int | None = None
    score_inserts: tuple[tuple[int, ...], ...] = ()

    @property
    def reads(self) -> tuple[int, ...]:
        return (self.value, *(t.value for t in self.terms))

    def __str__(self) -> str:
        if self.kind != "weighted":
            return f"{self.kind} %{self.out} of %{self.value}"
        product = " ".join(f"{'/' if t.power < 0 else ''}%{t.value}" for t in self.terms) or "1"
        return f"weighted %{self.out} of {product}"


@dataclass(frozen=True, slots=True)
class Traversal:
    """A traversal of the segments of a map and the entries of each, or over rows alone (`via` None).

    Attributes:
      via: the map: its coarse rows are the segments, its fine rows the entries.
      body: operators computed for each entry; `epilogue`, once for each segment.
      entry_outputs: values of entries that it writes; `row_outputs`, reduced values.
    """

    template: ClassVar[str] = "traversal"
    via: str | None
    space: Space
    operands: tuple[Operand, ...]
    body: tuple[int, ...]
    accumulators: tuple[Accumulator, ...]
    epilogue: tuple[int, ...]
    entry_outputs: tuple[int, ...]
    row_outputs: tuple[int, ...]

    @property
    def writes(self) -> tuple[int, ...]:
        return (*self.entry_outputs, *self.row_outputs)

    @property
    def reads(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(o.value for o in self.operands))

    def __str__(self) -> str:
        lines = [f"traversal over {self.via}" if self.via else f"traversal of each {self.space}"]
        if self.operands:
            lines.append("reads " + ", ".join(map(str, self.operands)))
        if self.body:
            lines.append("body " + " ".join(f"%{i}" for i in self.body))
        if self.accumulators:
            lines.append(" ; ".join(map(str, self.accumulators)))
        if self.epilogue:
            lines.append("epilogue " + " ".join(f"%{i}" for i in self.epilogue))
        lines.append("writes " + " ".join(f"%{i}" for i in self.writes))
        return "\n      ".join(lines)


@dataclass(frozen=True, slots=True)
class Fallback:
    """Operators left to XLA, which fuses them as it sees fit; `why` says why no template computes them."""

    template: ClassVar[str] = "xla"
    ops: tuple[int, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    why: str = ""

    def __str__(self) -> str:
        return f"{self.template} " + " ".join(f"%{i}" for i in self.ops) + (f": {self.why}" if self.why else "")


Instance = Gemm | WeightGradient | RowProducts | Traversal | Fallback


@dataclass(frozen=True)
class Kernels:
    """A level-1 program and the instances that compute it, in the order of execution.

    `row_scaled` are the values stored as row-scaled float16 (`dejax.pallas.formats.row_scaled`). `read_row_scaled` are
    the names of operands of traversals that may be read so, where their arrays exist in that form or making them costs
    next to nothing.
    """

    program: OpProgram
    instances: tuple[Instance, ...] = ()
    row_scaled: frozenset[int] = frozenset()
    read_row_scaled: frozenset[int] = frozenset()

    def first_readers(self) -> dict[int, int]:
        """For each value that an instance reads, the number of the first such instance."""
        first: dict[int, int] = {}
        for number, instance in enumerate(self.instances):
            for v in instance.reads:
                first.setdefault(v, number)
        return first

    def __str__(self) -> str:
        return print_kernels(self)


def access_operand(program: OpProgram, value: int, over: str | None = None) -> Operand:
    """How an instance reads a value: through the gather that makes it, if one does."""
    op = program.ops[value]
    if op.name != "gather":
        return Operand(value, value, "dense")
    return Operand(value, op.args[0], *access_by(op.attr("via"), over))


def as_part(program: OpProgram, operand: Operand) -> Operand:
    """An operand that is a slice along the first of two feature axes, as a part of the array that it is cut from."""
    op = program.ops[operand.value]
    if operand.access == "shared" or op.name != "slice" or op.attr("axis") != 0 or len(op.shape) != 2:
        return operand
    return replace(operand, value=op.args[0], part=(op.attr("start"), op.attr("stop") - op.attr("start")))


def in_order(
    program: OpProgram, instances: Sequence[tuple[Iterable[int], Iterable[int]]], outputs: Iterable[int] | None = None
) -> list[int] | None:
    """An order in which instances can run, with the single operators that no instance writes.

    Args:
      program: the level-1 program.
      instances: what each reads and what it writes.
      outputs: the values that are wanted; by default all that the instances write.

    Returns:
      Values (operators that no instance writes) and ~n (instance n), each after all that it reads. None where there is
      no such order, because two instances write one value, or wait for each other.
    """
    writer: dict[int, int] = {}
    for number, (_, writes) in enumerate(instances):
        for v in writes:
            if writer.setdefault(v, ~number) != ~number:
                return None
    found: list[int] = []
    state: dict[int, bool] = {}  # True: in `found`; False: waits for what it reads
    stack = [writer.get(v, v) for v in (writer if outputs is None else outputs)][::-1]
    while stack:
        node = stack[-1]
        if node in state:
            stack.pop()
            if not state[node]:
                state[node] = True
                found.append(node)
            continue
        state[node] = False
        before = [writer.get(v, v) for v in (program.ops[node].args if node >= 0 else instances[~node][0])]
        if any(state.get(b) is False for b in before):
            return None
        stack += [b for b in reversed(before) if b not in state]
    return found


def left_to_xla(program: OpProgram, instance: Instance, why: str) -> Fallback:
    """The operators that XLA computes instead of an instance."""
    reads, found, stack = set(instance.reads), set(), list(instance.writes)
    while stack:
        v = stack.pop()
        if v not in found and v not in reads:
            found.add(v)
            stack += program.ops[v].args
    return Fallback(tuple(sorted(found)), instance.reads, instance.writes, why)


def user_lines(program: OpProgram, instance: Instance) -> list[str]:
    """The lines of the user's program that an instance computes; first the lines of the values that it writes."""
    ops = [*instance.writes, *left_to_xla(program, instance, "").ops]
    return list(dict.fromkeys(line for v in ops if program.lines and (line := program.lines[v]) is not None))


def verify_kernels(kernels: Kernels) -> Kernels:
    """Checks that every value is written once, before it is read, and that templates can compute their operators."""
    program = kernels.program
    have = {i for i, op in enumerate(program.ops) if op.name == "input"}
    for number, instance in enumerate(kernels.instances):
        where = f"instance {number} ({instance.template})"
        missing = [v for v in instance.reads if v not in have]
        if missing:
            raise IRError(f"{where} reads %{missing[0]} before it is written")
        twice = [v for v in instance.writes if v in have]
        if twice:
            raise IRError(f"{where} writes %{twice[0]} again")
        if isinstance(instance, Traversal):
            _verify_traversal(program, instance, where)
        if isinstance(instance, Gemm) and instance.spec not in GEMM_SPECS:
            raise IRError(f"{where}: contraction {instance.spec} is not a product with a matrix")
        have.update(instance.writes)
    lost = [o for o in program.outputs if o not in have]
    if lost:
        raise IRError(f"output %{lost[0]} is written by no instance")
    return kernels


def _verify_traversal(program: OpProgram, t: Traversal, where: str) -> None:
    loaded = {o.name for o in t.operands}
    for i in t.body:
        op: Op = program.ops[i]
        if op.space != t.space:
            raise IRError(f"{where}: body operator %{i} must be a value of {t.space}, got {op.space}")
        if any(a not in loaded for a in op.args):
            raise IRError(f"{where}: body operator %{i} reads a value that is neither loaded nor computed")
        loaded.add(i)
    for v in (*(v for a in t.accumulators for v in a.reads), *t.entry_outputs):
        if v not in loaded:
            raise IRError(f"{where}: %{v} is reduced or written, and must be loaded or computed before")
    for a in t.accumulators:
        score, shape = program.ops[a.value].shape, program.ops[a.out].shape
        if a.kind == "weighted" and not can_weigh(score, a.score_inserts, shape):
            raise IRError(f"{where}: %{a.out} is weighted by a score of another shape, %{a.value}")
    if t.via is not None:
        rows = VIAS[t.via].coarse
        done = loaded | {a.out for a in t.accumulators}
        for i in t.epilogue:
            unknown = [a for a in program.ops[i].args if a not in done and program.ops[a].name != "const"]
            if program.ops[i].space != rows or unknown:
                raise IRError(f"{where}: epilogue operator %{i} is not computable from the row")
            done.add(i)


def print_kernels(kernels: Kernels) -> str:
    """The instances as text, each followed by the level-1 operators that it computes in registers."""
    lines = [f"{kernels.program.name}, kernels:"]
    for number, instance in enumerate(kernels.instances):
        lines.append(f"  [{number}] {instance}")
        inner: tuple[int, ...] = ()
        if isinstance(instance, Traversal):
            inner = (*instance.body, *instance.epilogue)
        elif isinstance(instance, Fallback):
            inner = instance.ops
        lines += [f"        {format_op(i, kernels.program.ops[i])}" for i in inner]
    if kernels.row_scaled:
        lines.append("  stored as row-scaled float16: " + " ".join(f"%{v}" for v in sorted(kernels.row_scaled)))
    if kernels.read_row_scaled:
        lines.append("  read as row-scaled float16: " + " ".join(f"%{v}" for v in sorted(kernels.read_row_scaled)))
    return "\n".join(lines)
