"""Elementwise work on concatenated edge rows is done part by part: kernels have no concatenation of tiles.

    ([a, b] - g.dst(h)).sum()      becomes    (a - g.dst(h_1)).sum() + (b - g.dst(h_2)).sum()
    g.sum_to_dst([a, b] * c)       becomes    [g.sum_to_dst(a * c), g.sum_to_dst(b * c)], concatenated for each node
    g.src(h)[:d]                   becomes    g.src(h[:d]), sliced once for each node

So are stacks, `concatenate([a[None], b[None]], axis=0)`: their weighted sum is one of the parts. A concatenation whose
readers need the whole row is made where it is read, as before.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.ir.inter import BINARY, UNARY, Builder, Op, Program, Space
from dejax.rgnn.passes._rewrite import Counts, Rewrite, as_dtype, in_range

_ELEMENTWISE = UNARY | BINARY | {"select"}


def split_rows(program: Program, counts: Counts) -> Program:
    return _SplitRows(program, counts).run()


@dataclass(frozen=True, slots=True)
class _Parts:
    """The new values that a concatenation of rows is made of, and the feature axis along which they lie."""

    values: tuple[int, ...]
    axis: int

    def sizes(self, builder: Builder) -> list[int]:
        return [builder.ops[v].shape[self.axis] for v in self.values]


class _SplitRows(Rewrite):
    """`parts` has for each old value that is a concatenation the parts."""

    def __init__(self, program: Program, counts: Counts) -> None:
        super().__init__(program, counts)
        self.parts: dict[int, _Parts] = {}

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name == "slice" and op.space == Space.EDGE:
            return self.sliced(builder, args[0], op.attr("axis"), op.attr("start"), op.attr("stop"))
        if not any(a in self.parts for a in op.args) and not self.begins(op, index):
            return None
        if op.name == "concat" and op.space == Space.EDGE:
            return self.concatenated(builder, op, args, index)
        if op.name in _ELEMENTWISE or op.name == "dot":
            return self.by_element(builder, op, index)
        if op.name == "reduce" and len(op.args) == 1:
            parts = self.parts[op.args[0]]
            rows = [_reduced(builder, op, part, parts.axis) for part in parts.values]
            return builder.op("concat", *rows, axis=parts.axis)
        return self.summed(builder, op, index) if op.name == "sum_features" else None

    def begins(self, op: Op, index: int) -> bool:
        """Whether a concatenation of edge rows has a reader that can take it part by part."""
        if op.name != "concat" or op.space != Space.EDGE or len(op.args) > 8:
            return False
        readers = _ELEMENTWISE | {"reduce", "sum_features", "dot"}
        return any(self.program.ops[u].name in readers for u in self.users[index])

    def concatenated(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int:
        axis, found = op.attr("axis"), list[int]()
        for a, arg in zip(op.args, args, strict=True):
            inner = self.parts.get(a)
            found += inner.values if inner is not None and inner.axis == axis else [arg]
        # As the concatenation promotes them.
        self.parts[index] = _Parts(tuple(as_dtype(builder, p, op.dtype) for p in found), axis)
        return builder.op("concat", *args, axis=axis)

    def by_element(self, builder: Builder, op: Op, index: int) -> int | None:
        pieces = self.pieces(builder, op)
        if pieces is None:
            return None
        axis = next(self.parts[a].axis for a in op.args if a in self.parts)
        if op.name == "dot" and axis == len(op.shape):  # over the parts
            wide = [(as_dtype(builder, x, in_range(op.dtype)), y) for x, y in pieces]
            return as_dtype(builder, _sum(builder, [builder.op("dot", *piece) for piece in wide]), op.dtype)
        values = tuple(builder.op(op.name, *piece, **dict(op.attrs)) for piece in pieces)
        self.parts[index] = _Parts(values, axis)
        return builder.op("concat", *values, axis=axis)

    def summed(self, builder: Builder, op: Op, index: int) -> int:
        """A sum of features: over the parts, or part by part."""
        parts, axes, kept = self.parts[op.args[0]], op.attr("axes"), op.attr("keepdims")
        if parts.axis not in axes:
            values = tuple(builder.op("sum_features", p, **dict(op.attrs)) for p in parts.values)
            axis = parts.axis - (0 if kept else sum(a < parts.axis for a in axes))
            self.parts[index] = _Parts(values, axis)
            return builder.op("concat", *values, axis=axis)
        # Parts of float16 may be beyond its range.
        values = tuple(as_dtype(builder, p, in_range(op.dtype)) for p in parts.values)
        if len({builder.ops[p].shape for p in values}) == 1:  # one sum of features instead of one for each part
            values = (_sum(builder, [_without_axis(builder, p, parts.axis) for p in values]),)
            if len(builder.ops[values[0]].shape) < len(self.program.ops[op.args[0]].shape):
                axes = tuple(a - (a > parts.axis) for a in axes if a != parts.axis)
        sums = [builder.op("sum_features", p, axes=axes, keepdims=kept) if axes else p for p in values]
        total = as_dtype(builder, _sum(builder, sums), op.dtype)
        return total if builder.ops[total].shape == op.shape else builder.op("reshape", total, shape=op.shape)

    def pieces(self, builder: Builder, op: Op) -> list[tuple[int, ...]] | None:
        """The arguments of an elementwise operator, part by part; None where one cannot be cut."""
        split = next(self.parts[a] for a in op.args if a in self.parts)
        axis, sizes = split.axis, split.sizes(builder)
        columns = []
        for a in op.args:
            shape, parts = self.program.ops[a].shape, self.parts.get(a)
            if parts is not None and parts.axis == axis and parts.sizes(builder) == sizes:
                columns.append(list(parts.values))
            elif shape == () or shape[axis] == 1:
                columns.append([self.new[a]] * len(sizes))
            elif parts is None and _is_read(builder, self.new[a]) and shape[axis] == sum(sizes):
                starts = [sum(sizes[:i]) for i in range(len(sizes))]
                columns.append(
                    [self.sliced(builder, self.new[a], axis, s, s + w) for s, w in zip(starts, sizes, strict=True)]
                )
            else:
                return None
        return list(zip(*columns, strict=True))

    def sliced(self, builder: Builder, value: int, axis: int, start: int, stop: int) -> int:
        """A slice, taken before the value is read on the edges."""
        op = builder.ops[value]
        if op.name == "gather":
            inner = self.sliced(builder, op.args[0], axis, start, stop)
            return builder.op("gather", inner, **dict(op.attrs))
        if op.name == "reshape" and _is_read(builder, value):
            read = builder.ops[op.args[0]]
            rows = builder.op("reshape", read.args[0], shape=op.shape)
            return self.sliced(builder, builder.op("gather", rows, **dict(read.attrs)), axis, start, stop)
        return builder.op("slice", value, axis=axis, start=start, stop=stop)


def _is_read(builder: Builder, value: int) -> bool:
    """Whether edges read a value from elsewhere, reshaped or not."""
    op = builder.ops[value]
    return "gather" in (op.name, builder.ops[op.args[0]].name if op.name == "reshape" else "")


def _reduced(builder: Builder, op: Op, part: int, axis: int) -> int:
    """The reduction of a part, which has the axis of a stack again after it."""
    total = builder.op("reduce", _without_axis(builder, part, axis), **dict(op.attrs))
    shape = builder.ops[part].shape
    return total if builder.ops[total].shape == shape else builder.op("reshape", total, shape=shape)


def _without_axis(builder: Builder, value: int, axis: int) -> int:
    """A part of a stack, without the axis of size 1 along which it was stacked; another part as it is."""
    shape = builder.ops[value].shape
    if shape[axis] != 1:
        return value
    return builder.op("reshape", value, shape=(*shape[:axis], *shape[axis + 1 :]))


def _sum(builder: Builder, terms: list[int]) -> int:
    result = terms[0]
    for term in terms[1:]:
        result = builder.op("add", result, term)
    return result
