"""Elementwise work on concatenated edge rows is done part by part: kernels have no concatenation of tiles.

    ([a, b] - g.dst(h)).sum()      becomes    (a - g.dst(h_1)).sum() + (b - g.dst(h_2)).sum()
    g.sum_to_dst([a, b] * c)       becomes    [g.sum_to_dst(a * c), g.sum_to_dst(b * c)], concatenated for each node
    g.src(h)[:d]                   becomes    g.src(h[:d]), sliced once for each node

A concatenation whose readers need the whole row is made where it is read, as before. Rows with heads stay.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import BINARY, UNARY, Builder, Op, Program, Space
from dejax.rgnn.passes._rewrite import Counts, Rewrite, as_dtype, in_range

_ELEMENTWISE = UNARY | BINARY | {"select"}


def split_rows(program: Program, counts: Counts) -> Program:
    return _SplitRows(program, counts).run()


class _SplitRows(Rewrite):
    """`parts` has for each old value that is a concatenation the new values that are its parts."""

    def __init__(self, program: Program, counts: Counts) -> None:
        super().__init__(program, counts)
        self.parts: dict[int, list[int]] = {}

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name == "slice" and op.space == Space.EDGE:
            return self.sliced(builder, args[0], op.attr("axis"), op.attr("start"), op.attr("stop"))
        if not any(a in self.parts for a in op.args) and not self.begins(op, index):
            return None
        if op.name == "concat" and op.space == Space.EDGE:
            parts = [p for a, arg in zip(op.args, args, strict=True) for p in self.parts.get(a, [arg])]
            self.parts[index] = [as_dtype(builder, p, op.dtype) for p in parts]  # as the concatenation promotes them
            return builder.op("concat", *args, axis=0)
        if op.name in _ELEMENTWISE:
            pieces = self.pieces(builder, op)
            if pieces is None:
                return None
            self.parts[index] = [builder.op(op.name, *piece, **dict(op.attrs)) for piece in pieces]
            return builder.op("concat", *self.parts[index], axis=0)
        if op.name == "reduce" and len(op.args) == 1:
            rows = [builder.op("reduce", part, **dict(op.attrs)) for part in self.parts[op.args[0]]]
            return builder.op("concat", *rows, axis=0)
        if op.name == "sum_features" and op.attr("axes") == (0,):
            parts = self.parts[op.args[0]]
            parts = [as_dtype(builder, p, in_range(op.dtype)) for p in parts]
            if len({builder.ops[p].shape for p in parts}) == 1:  # one sum of features instead of one for each part
                parts = [_sum(builder, parts)]
            return self.total(builder, [(part,) for part in parts], op)
        if op.name == "dot" and (pieces := self.pieces(builder, op)) is not None:
            pieces = [(as_dtype(builder, x, in_range(op.dtype)), y) for x, y in pieces]
            return self.total(builder, pieces, op)
        return None

    def begins(self, op: Op, index: int) -> bool:
        """Whether a concatenation of edge rows has a reader that can take it part by part."""
        if op.name != "concat" or op.space != Space.EDGE or len(op.shape) != 1 or len(op.args) > 8:
            return False
        readers = _ELEMENTWISE | {"reduce", "sum_features", "dot"}
        return any(self.program.ops[u].name in readers for u in self.users[index])

    def pieces(self, builder: Builder, op: Op) -> list[tuple[int, ...]] | None:
        """The arguments of an elementwise operator, part by part; None where one cannot be cut."""
        split = next(a for a in op.args if a in self.parts)
        widths = [builder.ops[p].shape[0] for p in self.parts[split]]
        if len(op.shape) > 1 or any(len(self.program.ops[a].shape) > 1 for a in op.args):
            return None
        columns = []
        for a in op.args:
            shape = self.program.ops[a].shape
            if a in self.parts and [builder.ops[p].shape[0] for p in self.parts[a]] == widths:
                columns.append(self.parts[a])
            elif shape in ((), (1,)):
                columns.append([self.new[a]] * len(widths))
            elif a not in self.parts and builder.ops[self.new[a]].name == "gather" and shape == (sum(widths),):
                starts = [sum(widths[:i]) for i in range(len(widths))]
                columns.append(
                    [self.sliced(builder, self.new[a], 0, s, s + w) for s, w in zip(starts, widths, strict=True)]
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
        return builder.op("slice", value, axis=axis, start=start, stop=stop)

    def total(self, builder: Builder, pieces: list[tuple[int, ...]], op: Op) -> int:
        """The sum over all parts of a reduction of features; parts of float16 may be beyond its range."""
        total = _sum(builder, [builder.op(op.name, *piece, **dict(op.attrs)) for piece in pieces])
        return as_dtype(builder, total, op.dtype)


def _sum(builder: Builder, terms: list[int]) -> int:
    result = terms[0]
    for term in terms[1:]:
        result = builder.op("add", result, term)
    return result
