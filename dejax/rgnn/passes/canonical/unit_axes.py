"""A last feature axis of size 1 is removed; a reshape right before an operator adds it where that broadcasts along it.

    z @ a  with a [R, d, 1], a score of shape (1,)    becomes    z . a, a score of shape ()
    (z * a).sum(keepdims=True)                        becomes    (z * a).sum()
    (h, 1) x (h, d)                                   becomes    (h,), as (h, 1), times (h, d)

So a score is a scalar, or a scalar for each head, however it was written, and its product with a matrix of one column
is an inner product: later passes see one form. Products, sums and reshapes that give such an axis, and inputs of edges,
go without it from there on. Other axes of size 1 (one head, say) stay, and so do the shapes of inputs and outputs.
`can_weigh` says which of those a traversal can align.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import BINARY, UNARY, Builder, Op, OpProgram, Space
from dejax.rgnn.ir.products import Product

# Operators on each element of a row by itself.
_BY_ELEMENT = UNARY | {"gather", "reduce", "softmax"}


def drop_unit_axes(program: OpProgram, counts: Counts) -> OpProgram:
    return _UnitAxes(program).run()


class _UnitAxes:
    """Rebuilds a program; `bare` are old values whose new ones lack the last axis, of size 1."""

    def __init__(self, program: OpProgram) -> None:
        self.program, self.b = program, Builder(program.name)
        self.new: dict[int, int] = {}
        self.bare: set[int] = set()

    def run(self) -> OpProgram:
        for i, op in enumerate(self.program.ops):
            self.b.line = self.program.lines[i] if self.program.lines else None
            self.new[i] = self.visit(i, op)
        return self.b.build(self.with_axis(o) for o in self.program.outputs)

    def shaped(self, value: int, shape: tuple[int, ...]) -> int:
        return value if self.b.ops[value].shape == shape else self.b.op("reshape", value, shape=shape)

    def with_axis(self, old: int) -> int:
        return self.shaped(self.new[old], self.program.ops[old].shape)

    def without(self, old: int) -> int:
        """The value without its last axis, of size 1; a scalar, which has none, as it is."""
        return self.shaped(self.new[old], self.program.ops[old].shape[:-1])

    def visit(self, i: int, op: Op) -> int:
        b = self.b
        ends = op.shape[-1:] == (1,)
        bare = self.bare.intersection(op.args)
        if op.name == "reshape" and ends:
            self.bare.add(i)
            return self.shaped(self.new[op.args[0]], op.shape[:-1])
        if op.name == "input" and op.space == Space.EDGE and ends:
            self.bare.add(i)
            return self.shaped(b.copy(op, (), b.line), op.shape[:-1])
        if op.name == "linear" and ends and op.attr("via") != "self":
            product = Product.parse(op.attr("spec"))
            vector = product.of_one_column
            # The axis of size 1 must be the column's: an inner product with one head gives one, too.
            if product.out[-1:] == "n" and vector.is_inner:
                self.bare.add(i)
                x, w = op.args
                return b.op("linear", self.with_axis(x), self.without(w), spec=str(vector), via=op.attr("via"))
        if op.name == "sum_features" and (found := self.summed(i, op)) is not None:
            return found
        if bare and ends and (op.name in _BY_ELEMENT or op.name in BINARY or op.name == "select"):
            self.bare.add(i)
            return b.copy(op, (self.without(a) for a in op.args), b.line)
        if op.name in BINARY or op.name == "select":  # a scalar broadcasts to every shape
            scalars = {a for a in bare if len(self.program.ops[a].shape) == 1}
            return b.copy(op, (self.new[a] if a in scalars else self.with_axis(a) for a in op.args), b.line)
        return b.copy(op, (self.with_axis(a) for a in op.args), b.line)

    def summed(self, i: int, op: Op) -> int | None:
        """A sum that keeps its last axis, or whose last axis is gone already; None for any other."""
        (x,), axes = op.args, op.attr("axes")
        last = len(self.program.ops[x].shape) - 1
        if x in self.bare:
            rest = tuple(a for a in axes if a != last)
            if op.attr("keepdims") or last not in axes:
                self.bare.add(i)
            if not rest:
                return self.new[x]
            return self.b.op("sum_features", self.new[x], axes=rest, keepdims=op.attr("keepdims"))
        if op.attr("keepdims") and axes == (last,):
            self.bare.add(i)
            return self.b.op("sum_features", self.new[x], axes=axes, keepdims=False)
        return None
