"""Tools of the passes: rebuilding a program operator by operator, and reading a value as a product of factors."""

from __future__ import annotations

import abc
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space, is_float
from dejax.rgnn.ir.products import with_axes

# Given the new builder, the old operator, its arguments in the new program and its old number: the new value, or None
# to copy the operator as it is.
Visit = Callable[[Builder, Op, tuple[int, ...], int], int | None]


def rebuild(program: OpProgram, visit: Visit, new: dict[int, int] | None = None) -> OpProgram:
    """Makes a new program in which each operator is replaced by the result of `visit`.

    Args:
      program: the old one.
      visit: see `Visit`.
      new: an empty map, to be filled with the new value of each old one; for patterns that reach past an operator's own
        arguments.
    """
    builder = Builder(program.name)
    new = {} if new is None else new
    for i, op in enumerate(program.ops):
        args = tuple(new[a] for a in op.args)
        builder.line = program.lines[i] if program.lines else None
        made = visit(builder, op, args, i)
        new[i] = builder.copy(op, args, builder.line) if made is None else made
    return builder.build_from(program, (new[o] for o in program.outputs))


class Rewrite(abc.ABC):
    """A pass of several steps that `visit` each operator; `new` has the new value of each old one."""

    def __init__(self, program: OpProgram, counts: Counts) -> None:
        self.program, self.counts, self.users = program, counts, program.users()
        self.new: dict[int, int] = {}

    def run(self) -> OpProgram:
        return rebuild(self.program, self.visit, self.new)

    def read_once(self, value: int) -> bool:
        """Whether exactly one operator reads a value, and the value is no output of the program."""
        return len(self.users[value]) == 1 and value not in self.program.outputs

    @abc.abstractmethod
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Visit`."""


def live(program: OpProgram, outputs: Iterable[int], within: Container[int] | None = None) -> set[int]:
    """The values on which the outputs depend; with `within`, only through arguments of the operators in it."""
    found = set(outputs)
    for i in reversed(range(len(program.ops))):
        if i in found and (within is None or i in within):
            found.update(program.ops[i].args)
    return found


def origins(program: OpProgram, value: int) -> set[str]:
    """The maps by which an edge value is read from other spaces; "edge" where it has inputs of its own."""
    found, waiting, seen = set[str](), [value], set[int]()
    while waiting:
        i = waiting.pop()
        if i in seen:
            continue
        seen.add(i)
        op = program.ops[i]
        if op.name == "gather":
            found.add(op.attr("via"))
        elif op.name != "const":
            inner = [a for a in op.args if program.ops[a].space == Space.EDGE]
            waiting += inner
            if not inner or op.name in ("softmax", "lookup"):
                found.add("edge")
    return found - {"all"}


def is_anchor(maps: set[str]) -> bool:
    """Whether `compact` computes a value that is read by these maps once for each node, type or pair."""
    return any(maps <= within for within in ({"src", "etype", "source_pair"}, {"dst", "etype", "destination_pair"}))


def copy_ops(program: OpProgram, chosen: Iterable[int], outputs: Iterable[int]) -> OpProgram:
    """The program with the chosen operators, in their order."""
    builder, new = Builder(program.name), dict[int, int]()
    for i in chosen:
        line = program.lines[i] if program.lines else None
        new[i] = builder.copy(program.ops[i], (new[a] for a in program.ops[i].args), line)
    return builder.build_from(program, (new[o] for o in outputs))


def inserted_axes(op: Op, source: Op) -> tuple[int, ...] | None:
    """Where a reshape only inserts axes of size 1: the new axes; None for any other reshape."""
    if op.name != "reshape":
        return None
    axes, at = [], 0
    for i, size in enumerate(op.shape):
        if at < len(source.shape) and size == source.shape[at]:
            at += 1
        elif size == 1:
            axes.append(i)
        else:
            return None
    return tuple(axes) if at == len(source.shape) else None


def moves_unit_axes(op: Op, source: Op) -> bool:
    """Whether a reshape only inserts or removes axes of size 1."""
    return [s for s in op.shape if s != 1] == [s for s in source.shape if s != 1]


def powers_of_two(*sides: int) -> bool:
    """Whether tiles of these sides have no padding."""
    return all(n & (n - 1) == 0 for n in sides)


@dataclass(frozen=True, slots=True)
class Factor:
    """One factor of a product: a value, to the power +1 or -1, with axes of size 1 inserted one step after another."""

    value: int
    power: int
    inserts: tuple[tuple[int, ...], ...] = ()


def factors(program: OpProgram, value: int) -> list[Factor]:
    """The value as a product, looking through `mul`, `div`, rounding, and reshapes that only insert axes.

    A product rebuilt from the factors may have a wider dtype than the value: see `as_dtype`. A product of integers that
    a float multiplies is one factor, because it wraps around where products of floats do not.
    """
    op = program.ops[value]
    if op.name in ("mul", "div"):
        left, right = (
            factors(program, a) if is_float(program.ops[a].dtype) or not is_float(op.dtype) else [Factor(a, 1)]
            for a in op.args
        )
        sign = 1 if op.name == "mul" else -1
        return left + [Factor(f.value, sign * f.power, f.inserts) for f in right]
    if op.name == "cast" and program.ops[op.args[0]].dtype == "float32" and op.dtype in ("bfloat16", "float16"):
        return factors(program, op.args[0])  # the product is taken in float32 and rounded after
    if op.name == "reshape":
        axes = inserted_axes(op, program.ops[op.args[0]])
        if axes:
            return [Factor(f.value, f.power, (*f.inserts, axes)) for f in factors(program, op.args[0])]
    return [Factor(value, 1)]


def insert_axes(builder: Builder, x: int, inserts: tuple[tuple[int, ...], ...]) -> int:
    """The value with axes of size 1 inserted; a scalar needs none."""
    for axes in inserts if builder.ops[x].shape else ():
        x = builder.op("reshape", x, shape=with_axes(builder.ops[x].shape, (axes,)))
    return x


def sliced(builder: Builder, x: int, axis: int, start: int, stop: int) -> int:
    """The slice of a value, taken before its rows are read; the value itself where that is all of the axis."""
    op = builder.ops[x]
    if (start, stop) == (0, op.shape[axis]):
        return x
    if op.name == "gather":
        return builder.op("gather", sliced(builder, op.args[0], axis, start, stop), **dict(op.attrs))
    return builder.op("slice", x, axis=axis, start=start, stop=stop)


def aligned(builder: Builder, new: dict[int, int], parts: Iterable[Factor]) -> list[tuple[int, int]]:
    """Factors as new values with their axes inserted, and powers: the argument of `multiply`."""
    return [(insert_axes(builder, new[f.value], f.inserts), f.power) for f in parts]


def in_range(dtype: str) -> str:
    """The dtype for sums that a rewrite makes, whose terms may be more and larger than the program's."""
    return "float32" if dtype == "float16" else dtype


def as_dtype(builder: Builder, x: int, dtype: str) -> int:
    """The value in a dtype."""
    return x if builder.ops[x].dtype == dtype else builder.op("cast", x, dtype=dtype)


def widened(builder: Builder, x: int) -> int:
    """The value in the dtype that `in_range` says."""
    return as_dtype(builder, x, in_range(builder.ops[x].dtype))


def unless_empty(builder: Builder, via: str, row: int, none: float) -> int:
    """A value with one row for each segment of a map; the constant `none` where the segment is empty."""
    op, fine = builder.ops[row], {"space": str(Space.EDGE)} if via == "all" else {}
    some = builder.op("count", via=via, dtype="float64" if op.dtype == "float64" else "float32", **fine)
    if op.shape:
        some = builder.op("reshape", some, shape=(1,) * len(op.shape))
    return builder.op("select", some, row, builder.const(none, op.dtype, op.space))


def scale_of_weight(builder: Builder, factor: int) -> int:
    """A factor by type, or shared, for the weight of each type; 1 for types without rows.

    Nothing reads the weights of types without rows. Their factor may be infinite, such as 1 / the number of edges, and
    0 times infinity would make the gradient NaN.
    """
    via = {Space.EDGE_TYPE: "etype", Space.NODE_TYPE: "ntype", Space.GRAPH: "all"}[builder.ops[factor].space]
    return unless_empty(builder, via, widened(builder, factor), 1.0)


def or_one(builder: Builder, x: int) -> int:
    """The value, or 1 where it is 0: a divisor. NaN stays NaN."""
    op = builder.ops[x]
    return builder.op("add", x, builder.op("eq", x, builder.const(0.0, op.dtype, op.space)))


def divisor(program: OpProgram | Builder, value: int) -> int | None:
    """The argument of `or_one` if that made the value; None otherwise."""
    op = program.ops[value]
    none = program.ops[op.args[1]] if op.name == "add" else op
    if none.name != "eq" or none.args[0] != op.args[0]:
        return None
    zero = program.ops[none.args[1]]
    return op.args[0] if zero.name == "const" and zero.attr("value") == 0.0 else None


def multiply(builder: Builder, parts: list[tuple[int, int]], dtype: str) -> int:
    """The product of values with powers +1 or -1, at least one; a reciprocal is taken in `dtype`.

    Where that is a float, integers become floats first: among themselves they would wrap around.
    """
    if is_float(dtype):
        whole = [not is_float(builder.ops[v].dtype) and builder.ops[v].dtype != "bool" for v, _ in parts]
        parts = [(as_dtype(builder, v, dtype) if w else v, power) for (v, power), w in zip(parts, whole, strict=True)]
    up = [v for v, power in parts if power > 0]
    down = [v for v, power in parts if power < 0]
    if up:
        result = up[0]
    else:
        op = builder.ops[down[0]]
        result = builder.const(1.0, dtype, op.space)
    for v in up[1:]:
        result = builder.op("mul", result, v)
    for v in down:
        result = builder.op("div", result, v)
    return result
