"""A program for one device as a program for each device of a mesh: stages, and the collectives between them."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dejax.distributed.full_graph._levels import Levels
from dejax.distributed.full_graph._rewrite import check, prepared
from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import rebuild


class Form(enum.StrEnum):
    """Which rows of a value there are."""

    OWN = "own"  # of the device's own nodes
    LOCAL = "local"  # of its own and its halo nodes
    EDGES = "edges"  # of its edges, or destination pairs
    SHARED = "shared"  # the same on every device
    PARTIAL = "partial"  # what the device adds to a reduction over devices


Ref = tuple[int, Form]
"""A value of the prepared program, in a form."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A program that each device runs on its own rows; inputs by position.

    Attributes:
        on_edges: whether it runs on the device's graph with halo and edges; else on its own nodes.
        program: level 1.
        inputs: what it reads.
        outputs: what it gives.
    """

    on_edges: bool
    program: OpProgram
    inputs: tuple[Ref, ...]
    outputs: tuple[Ref, ...]


@dataclass(frozen=True, slots=True)
class Exchange:
    """Node values that go to the devices that read them, all in one."""

    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Combine:
    """A reduction over devices.

    Attributes:
        value: the reduction.
        to_owners: whether the result is a value of nodes, for their owners; else all devices get it.
        extremum: "max" or "min", which has no gradient; None for sums.
    """

    value: int
    to_owners: bool
    extremum: str | None


@dataclass(frozen=True, slots=True)
class Distributed:
    """What each device runs.

    Attributes:
        program: the prepared program, whose values the steps name.
        steps: the steps, in order.
        outputs: the results.
    """

    program: OpProgram
    steps: tuple[Stage | Exchange | Combine, ...]
    outputs: tuple[Ref, ...]

    @property
    def exchanged_bytes(self) -> int:
        """Bytes of a node's row in all exchanges of the forward pass."""
        return sum(self.program.ops[v].row_bytes for s in self.steps if isinstance(s, Exchange) for v in s.values)


@lru_cache(maxsize=256)
def distribute(program: OpProgram, counts: Counts, parts: int) -> Distributed:
    """The stages and collectives of a program; on one device it is one stage.

    Raises:
        CannotDistribute: the program has an operator that is not supported over devices.
    """
    if parts == 1:
        return _alone(program)
    program = prepared(program, counts)
    return _Schedule(program, Levels(program)).run()


def _alone(program: OpProgram) -> Distributed:
    """The whole program as a stage, whose inputs are numbered without gaps."""
    check(program)
    places = {i: n for n, i in enumerate(program.inputs)}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        return builder.op("input", **{**dict(op.attrs), "position": places[index]}) if index in places else None

    inputs = tuple((i, form_of(program.ops[i])) for i in program.inputs)
    outputs = tuple((o, form_of(program.ops[o])) for o in program.outputs)
    return Distributed(program, (Stage(True, rebuild(program, visit), inputs, outputs),), outputs)


def form_of(op: Op) -> Form:
    """The form in which arguments and results have a value."""
    if op.space == Space.NODE:
        return Form.OWN
    return Form.EDGES if op.space in (Space.EDGE, Space.DESTINATION_PAIR) else Form.SHARED


class _Schedule:
    """Goes from the last stage to the first: what a stage reads, earlier ones give."""

    def __init__(self, program: OpProgram, levels: Levels) -> None:
        self.program, self.levels = program, levels
        self.wanted: dict[Ref, int] = {}  # the stage that gives it

    def run(self) -> Distributed:
        outputs = tuple((o, self._form(o)) for o in self.program.outputs)
        for ref in outputs:
            self._want(ref)
        steps: list[Stage | Exchange | Combine] = []
        for level in range(self._last(), -1, -1):
            found = [ref for ref, at in self.wanted.items() if at == level]
            combined = [self._combine(value) for value, form in found if self._is_combined(value, form)]
            sent = sorted(v for v, form in found if form == Form.LOCAL and v in self.levels.sent)
            steps += combined
            if sent:
                steps.append(Exchange(tuple(sent)))
                for value in sent:
                    self._want((value, Form.OWN))
            stage = self._stage(level)
            if stage is not None:
                steps.append(stage)
        return Distributed(self.program, tuple(reversed(steps)), outputs)

    def _last(self) -> int:
        return max(self.wanted.values(), default=0)

    def _form(self, value: int) -> Form:
        return form_of(self.program.ops[value])

    def _is_combined(self, value: int, form: Form) -> bool:
        return form in (Form.OWN, Form.SHARED) and self.levels.crosses(value)

    def _combine(self, value: int) -> Combine:
        op = self.program.ops[value]
        extremum = op.attr("op") if op.attr("op") in ("max", "min") else None
        if extremum is None:
            self._want((value, Form.PARTIAL))
        else:  # Of the rows themselves: a device without rows has no maximum.
            for a in op.args:
                self._want((a, self._form(a)))
        return Combine(value, op.space == Space.NODE, extremum)

    def _want(self, ref: Ref) -> None:
        """Notes that a later step reads a value."""
        value, form = ref
        op, levels = self.program.ops[value], self.levels
        if op.name == "input" and form != Form.LOCAL:
            return
        if form == Form.PARTIAL or self._is_combined(value, form):
            at = levels.home(value)
        elif form == Form.LOCAL:
            at = levels.own[value] if value in levels.sent else levels.local[value]
        elif form == Form.EDGES:
            at = levels.edge[value]
        elif form == Form.OWN:
            at = levels.own[value]
        else:
            at = levels.shared[value] + levels.shared[value] % 2
        self.wanted[ref] = at

    def _stage(self, level: int) -> Stage | None:
        given = [ref for ref, at in self.wanted.items() if at == level and self._is_given(ref)]
        if not given:
            return None
        made = _StageBuilder(self.program, self.levels, level, given)
        for ref in made.inputs:
            self._want(ref)
        return Stage(bool(level % 2), made.built, tuple(made.inputs), tuple(given))

    def _is_given(self, ref: Ref) -> bool:
        """Whether a stage gives the value, and not a collective."""
        value, form = ref
        if form == Form.LOCAL:
            return value not in self.levels.sent
        return not self._is_combined(value, form)


class _StageBuilder:
    """The program of one stage."""

    def __init__(self, program: OpProgram, levels: Levels, level: int, given: Sequence[Ref]) -> None:
        self.program, self.levels, self.level = program, levels, level
        self.builder = Builder(program.name)
        self.inputs: list[Ref] = []
        self.made: dict[Ref, int] = {}
        outputs = [self._value(value, form) for value, form in given]
        self.built = self.builder.build(outputs)

    def _value(self, value: int, form: Form) -> int:
        ref = (value, form)
        if ref not in self.made:
            self.made[ref] = self._make(value, form)
        return self.made[ref]

    def _make(self, value: int, form: Form) -> int:
        if not self._is_here(value, form):
            return self._input(value, form)
        op = self.program.ops[value]
        args = [self._value(a, self._form_read(value, a, form)) for a in op.args]
        return self.builder.copy(op, args, self.program.lines[value] if self.program.lines else None)

    def _is_here(self, value: int, form: Form) -> bool:
        """Whether the stage computes the value itself."""
        levels, op = self.levels, self.program.ops[value]
        if op.name == "input":
            return False
        if form == Form.PARTIAL or levels.free[value]:
            return True
        if levels.crosses(value):
            return False
        if form == Form.LOCAL:
            return value not in levels.sent and levels.local[value] == self.level
        return (levels.edge if form == Form.EDGES else levels.own)[value] == self.level

    def _form_read(self, value: int, arg: int, form: Form) -> Form:
        """The form in which an operator reads an argument."""
        op, read = self.program.ops[value], self.program.ops[arg]
        if read.space in (Space.EDGE, Space.DESTINATION_PAIR):
            return Form.EDGES
        if read.space != Space.NODE:
            return Form.SHARED
        if op.space == Space.NODE:
            return form if form == Form.LOCAL else Form.OWN
        local = self.levels.local.get(arg)
        via_source = op.name == "gather" and op.attr("via") == "src"
        there = local is not None and local <= self.level and self.level % 2 == 1
        return Form.LOCAL if not self.levels.free[arg] and (via_source or there) else Form.OWN

    def _input(self, value: int, form: Form) -> int:
        op = self.program.ops[value]
        self.builder.line = self.program.lines[value] if self.program.lines else None
        name = op.attr("name") if op.name == "input" else f"%{value}"
        position = len(self.inputs)
        self.inputs.append((value, form))
        return self.builder.op(
            "input", name=name, position=position, space=str(op.space), shape=op.shape, dtype=op.dtype
        )
