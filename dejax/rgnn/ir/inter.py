"""Level 1, the inter-operator IR: a list of operators over values that live in a space.

A value has one row for each element of its space (nodes, edges, unique pairs, types, or one for the whole graph) and a
feature shape that every row shares; layouts come later. Operator 3 defines value `%3`, so a program is in SSA form by
construction. An RGCN layer prints as

    %0 = input<x>                     : node[16] float32
    %1 = input<weight>                : edge_type[16, 8] float32
    %2 = gather %0 via=src            : edge[16] float32
    %3 = linear %2 %1 spec=k,kn->n via=etype : edge[8] float32
    %4 = reduce %3 via=dst op=sum     : node[8] float32
    return %4

Rows move between spaces along one of the maps in `VIAS`: by `gather` (each fine row reads its coarse row) and `reduce`
(each coarse row is the sum or maximum of its fine rows). The two are each other's transposes, so the generated backward
pass stays inside the IR. The same holds for `lookup`, which reads a row of a table by an integer, and `place`,
which adds rows at places that integers give.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from dejax.rgnn.ir.operators import BINARY, ELEMENTWISE, OPERATORS, ROWWISE, UNARY, infer
from dejax.rgnn.ir.type_rules import (
    COUNT_DTYPES,
    broadcast_shapes,
    is_float,
    need,
    parse_spec,
    promote,
    spec_sizes,
)
from dejax.rgnn.ir.values import (
    COMPOSED_VIAS,
    TYPE_SPACES,
    TYPE_VIA,
    VIAS,
    IRError,
    Op,
    OpProgram,
    Space,
    Via,
    format_op,
    print_program,
)

__all__ = [
    "BINARY",
    "Builder",
    "COMPOSED_VIAS",
    "COUNT_DTYPES",
    "ELEMENTWISE",
    "IRError",
    "OPERATORS",
    "Op",
    "OpProgram",
    "ROWWISE",
    "Space",
    "TYPE_SPACES",
    "TYPE_VIA",
    "UNARY",
    "VIAS",
    "Via",
    "broadcast_shapes",
    "format_op",
    "infer",
    "is_float",
    "parse_spec",
    "print_program",
    "promote",
    "spec_sizes",
    "verify",
]


def verify(program: OpProgram) -> OpProgram:
    """Checks every rule of the IR and returns the program; `IRError` names the operator that breaks one."""
    if program.is_verified:
        return program
    for i, op in enumerate(program.ops):
        need(all(0 <= a < i for a in op.args), f"%{i}: an argument is not defined before it: {op.args}")
        try:
            got = infer(op.name, [program.ops[a] for a in op.args], op.attrs)
        except IRError as error:
            raise IRError(f"%{i} = {op.name}: {error}") from None
        want = (op.space, op.shape, op.dtype)
        need(got == want, f"%{i} = {op.name} is typed {want}, its arguments give {tuple(got)}")
    need(all(0 <= o < len(program.ops) for o in program.outputs), "an output is not defined")
    positions = [program.ops[i].attr("position") for i in program.inputs]
    need(len(set(positions)) == len(positions), f"two inputs share a position: {positions}")
    object.__setattr__(program, "is_verified", True)
    return program


class Builder:
    """Appends operators and infers their types; the front end and every pass make programs with it."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.ops: list[Op] = []
        self.lines: list[str | None] = []
        self.line: str | None = None  # recorded with the operators that follow

    def op(self, op_name: str, *args: int, **attrs: Any) -> int:
        """Appends an operator on the values `args`, infers its type, and returns the number of its value."""
        return self._append(op_name, args, tuple(sorted(attrs.items())))

    def _append(self, name: str, args: tuple[int, ...], attrs: tuple[tuple[str, Any], ...]) -> int:
        self.ops.append(Op(name, args, attrs, *infer(name, [self.ops[a] for a in args], attrs)))
        self.lines.append(self.line)
        return len(self.ops) - 1

    def copy(self, op: Op, args: Iterable[int], line: str | None = None) -> int:
        """Appends `op` with other arguments and returns the number of its value; `line` is the user's source line."""
        self.line = line
        return self._append(op.name, tuple(args), op.attrs)

    def const(self, value: float, dtype: str, space: Space = Space.GRAPH) -> int:
        """Appends a constant: the scalar `value` in every row of `space`. Returns the number of its value."""
        if not isinstance(value, int) or float(value) == value:
            value = float(value)  # an integer above 2^53 keeps its digits
        # 0.0 == -0.0, so that programs which differ in this alone would be one to the caches and to `cse`.
        sign = {"negative": True} if value == 0 and math.copysign(1, value) < 0 else {}
        return self.op("const", value=value, dtype=dtype, space=str(space), **sign)

    def lift(self, x: int, space: Space) -> int:
        """Repeats the value `x`, of space `graph` or a constant, for every row of `space`; returns the new value."""
        op = self.ops[x]
        if op.space == space:
            return x
        if op.name == "const":
            return self.const(op.attr("value"), op.dtype, space)
        return self.op("gather", x, via="all", space=str(space))

    def read_back(self, x: int, via: str, fine: Space) -> int:
        """Reads the value `x` at each row of the space `fine`: the map `via` gives the row of `x` for each row."""
        return self.op("gather", x, via=via, **({"space": str(fine)} if VIAS[via].fine is None else {}))

    def build(self, outputs: Iterable[int]) -> OpProgram:
        """The verified program of the operators appended so far, which returns the values `outputs`."""
        outputs = tuple(outputs)  # first, since an iterator may append operators
        return verify(OpProgram(self.name, tuple(self.ops), outputs, tuple(self.lines)))

    def build_from(self, program: OpProgram, outputs: Iterable[int]) -> OpProgram:
        """As `build`, but returns `program` itself if the new program would be equal to it."""
        outputs = tuple(outputs)
        if outputs == program.outputs and tuple(self.ops) == program.ops:
            return program
        return self.build(outputs)
