"""Elementwise work on concatenated edge rows is done part by part: kernels have no concatenation of tiles.

    ([a, b] - g.dst(h)).sum()      becomes    (a - g.dst(h_1)).sum() + (b - g.dst(h_2)).sum()
    g.sum_to_dst([a, b] * c)       becomes    [g.sum_to_dst(a * c), g.sum_to_dst(b * c)], concatenated for each node
    g.src(h)[:d]                   becomes    g.src(h[:d]), sliced once for each node

Stacks, `concatenate([a[None], b[None]], axis=0)`, are treated likewise: the weighted sum of a stack is one of its
parts. A concatenation with a reader that needs the complete row is made where it is read, as before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import ELEMENTWISE, Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import Rewrite, as_dtype, in_range


def split_rows(program: OpProgram, counts: Counts) -> OpProgram:
    return _SplitRows(program, counts).run()


@dataclass(frozen=True, slots=True)
class _RowParts:
    """The new values that a concatenation of rows is made of, and the feature axis along which they lie.

    The parts of a stack have no such axis: each would be of size 1.
    """

    values: tuple[int, ...]
    axis: int
    stacked: bool

    def sizes(self, builder: Builder) -> list[int]:
        return [1 if self.stacked else builder.ops[v].shape[self.axis] for v in self.values]

    def axes(self, axes: tuple[int, ...]) -> tuple[int, ...]:
        """The axes of each part that are these axes of the concatenation."""
        return tuple(a - (self.stacked and a > self.axis) for a in axes if not self.stacked or a != self.axis)


class _SplitRows(Rewrite):
    """`parts` has the parts of each old value that is a concatenation."""

    def __init__(self, program: OpProgram, counts: Counts) -> None:
        super().__init__(program, counts)
        self.parts: dict[int, _RowParts] = {}

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name == "slice" and op.space == Space.EDGE:
            return self.sliced(builder, args[0], op.attr("axis"), op.attr("start"), op.attr("stop"))
        if not any(a in self.parts for a in op.args) and not self.begins(op, index):
            return None
        if op.name == "concat" and op.space == Space.EDGE:
            return self.concatenated(builder, op, args, index)
        if op.name in ELEMENTWISE or op.name == "dot":
            return self.by_element(builder, op, index)
        if op.name == "reduce" and len(op.args) == 1:
            parts = self.parts[op.args[0]]
            rows = tuple(builder.op("reduce", part, **dict(op.attrs)) for part in parts.values)
            return _whole(builder, replace(parts, values=rows))
        return self.summed(builder, op, index) if op.name == "sum_features" else None

    def begins(self, op: Op, index: int) -> bool:
        """Whether a concatenation of edge rows has a reader that can take it part by part."""
        if op.name != "concat" or op.space != Space.EDGE or len(op.args) > 8 or self.of_one_node(op):
            return False
        readers = ELEMENTWISE | {"reduce", "sum_features", "dot"}
        return any(self.program.ops[u].name in readers for u in self.users[index])

    def of_one_node(self, op: Op) -> bool:
        """Whether all parts are read from nodes at one end: `compact` concatenates them once for each node then."""
        waiting, maps = list(op.args), set()
        while waiting:
            part = self.program.ops[waiting.pop()]
            if part.name in ("slice", "reshape"):
                waiting += part.args
            else:
                maps.add(part.attr("via") if part.name == "gather" else None)
        return maps in ({"src"}, {"dst"})

    def concatenated(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int:
        axis, found = op.attr("axis"), list[int]()
        for a, arg in zip(op.args, args, strict=True):
            inner = self.parts.get(a)
            found += inner.values if inner is not None and inner.axis == axis and not inner.stacked else [arg]
        values = [as_dtype(builder, p, op.dtype) for p in found]  # as the concatenation promotes them
        stacked = len(op.shape) > 1 and all(builder.ops[p].shape[axis] == 1 for p in values)
        if stacked:
            values = [_without_axis(builder, p, axis) for p in values]
        self.parts[index] = _RowParts(tuple(values), axis, stacked)
        return builder.op("concat", *args, axis=axis)

    def by_element(self, builder: Builder, op: Op, index: int) -> int | None:
        parts = next(self.parts[a] for a in op.args if a in self.parts)
        pieces = self.pieces(builder, op, parts)
        if pieces is None:
            return None
        if op.name == "dot" and parts.axis == len(op.shape):  # over the parts
            wide = [(as_dtype(builder, x, in_range(op.dtype)), y) for x, y in pieces]
            product = "mul" if parts.stacked else "dot"
            return as_dtype(builder, _sum(builder, [builder.op(product, *piece) for piece in wide]), op.dtype)
        values = tuple(builder.op(op.name, *piece, **dict(op.attrs)) for piece in pieces)
        self.parts[index] = replace(parts, values=values)
        return _whole(builder, self.parts[index])

    def summed(self, builder: Builder, op: Op, index: int) -> int:
        """A sum over feature axes: over the axis of the parts, or in each part by itself."""
        parts, kept = self.parts[op.args[0]], op.attr("keepdims")
        axes = parts.axes(op.attr("axes"))
        if parts.axis not in op.attr("axes"):
            values = tuple(builder.op("sum_features", p, axes=axes, keepdims=kept) for p in parts.values)
            axis = parts.axis - (0 if kept else sum(a < parts.axis for a in op.attr("axes")))
            self.parts[index] = _RowParts(values, axis, parts.stacked)
            return _whole(builder, self.parts[index])
        # Parts of float16 may be beyond its range.
        values = tuple(as_dtype(builder, p, in_range(op.dtype)) for p in parts.values)
        if len({builder.ops[p].shape for p in values}) == 1:  # one sum of features instead of one for each part
            values = (_sum(builder, list(values)),)
        sums = [builder.op("sum_features", p, axes=axes, keepdims=kept) if axes else p for p in values]
        total = as_dtype(builder, _sum(builder, sums), op.dtype)
        return total if builder.ops[total].shape == op.shape else builder.op("reshape", total, shape=op.shape)

    def pieces(self, builder: Builder, op: Op, like: _RowParts) -> list[tuple[int, ...]] | None:
        """The arguments of an elementwise operator, part by part; None where one cannot be cut."""
        axis, sizes = like.axis, like.sizes(builder)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        columns = []
        for a in op.args:
            shape, parts = self.program.ops[a].shape, self.parts.get(a)
            if parts is not None and (parts.axis, parts.stacked) == (axis, like.stacked):
                if parts.sizes(builder) != sizes:
                    return None
                columns.append(list(parts.values))
                continue
            if shape == () or shape[axis] == 1:
                cuts = [self.new[a]] * len(sizes)
            elif parts is None and _is_read(builder, self.new[a]) and shape[axis] == sum(sizes):
                cuts = [self.sliced(builder, self.new[a], axis, s, s + w) for s, w in zip(starts, sizes, strict=True)]
            else:
                return None
            if like.stacked and shape:
                cuts = [_without_axis(builder, cut, axis) for cut in cuts]
            columns.append(cuts)
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


def _whole(builder: Builder, parts: _RowParts) -> int:
    """Concatenates the parts of a value."""
    values = parts.values
    if parts.stacked:
        values = tuple(_with_axis(builder, v, parts.axis) for v in values)
    return builder.op("concat", *values, axis=parts.axis)


def _with_axis(builder: Builder, value: int, axis: int) -> int:
    shape = builder.ops[value].shape
    return builder.op("reshape", value, shape=(*shape[:axis], 1, *shape[axis:]))


def _without_axis(builder: Builder, value: int, axis: int) -> int:
    """A value without an axis of size 1."""
    op = builder.ops[value]
    shape = (*op.shape[:axis], *op.shape[axis + 1 :])
    if op.name == "reshape" and builder.ops[op.args[0]].shape == shape:
        return op.args[0]
    if op.name == "gather":  # before edges read it
        return builder.op("gather", _without_axis(builder, op.args[0], axis), **dict(op.attrs))
    return builder.op("reshape", value, shape=shape)


def _sum(builder: Builder, terms: list[int]) -> int:
    result = terms[0]
    for term in terms[1:]:
        result = builder.op("add", result, term)
    return result
