"""Parts of a product are products with parts of the weight, where nothing reads the whole.

    y = x @ w;  y[:d], y[d:]                   becomes    x @ w[:, :d], x @ w[:, d:]
    y = relu(x @ w + b);  y[:d]                becomes    relu(x @ w[:, :d] + b[:d])

Queries, keys and values of one product, the gates of a GRU and of GLU, and FiLM's factors and biases are such parts.
Kernels read rows whole; a part of one would be copied first, for each node or edge.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import ELEMENTWISE, TYPE_SPACES, Builder, Op, OpProgram
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Rewrite, sliced


def slice_weights(program: OpProgram, counts: Counts) -> OpProgram:
    return _Slices(program, counts).run()


class _Slices(Rewrite):
    """Values in `in_parts` are read only as slices along one axis, `axis_of[value]`."""

    def __init__(self, program: OpProgram, counts: Counts) -> None:
        super().__init__(program, counts)
        self.axis_of: dict[int, int] = {}
        for i in reversed(range(len(program.ops))):
            axis = self.axis_read(i)
            if axis is not None:
                self.axis_of[i] = axis
        # The values in parts that products make.
        self.made: set[int] = set()
        for i in sorted(self.axis_of):
            op = program.ops[i]
            if op.name == "linear" or any(a in self.made for a in op.args):
                self.made.add(i)

    def axis_read(self, value: int) -> int | None:
        """The axis along which all readers of a value take slices; None if an operator reads the whole value."""
        op = self.program.ops[value]
        if op.space in TYPE_SPACES or value in self.program.outputs or not self.users[value] or not self.can_cut(op):
            return None
        axes, width = set(), 0
        for u in self.users[value]:
            user = self.program.ops[u]
            if user.name == "slice":
                axes.add(user.attr("axis"))
                width += user.attr("stop") - user.attr("start")
            elif (user.name == "gather" or user.name in ELEMENTWISE) and u in self.axis_of and user.shape == op.shape:
                axes.add(self.axis_of[u])
            else:
                return None
        axis = axes.pop() if len(axes) == 1 else None
        if axis is None or width > op.shape[axis]:  # parts that overlap would be made twice
            return None
        return axis if op.name != "linear" or _weight_axis(op, axis) is not None else None

    def can_cut(self, op: Op) -> bool:
        return op.name in ELEMENTWISE or op.name in ("linear", "gather")

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name != "slice" or op.args[0] not in self.made:
            return None
        axis = op.attr("axis")
        size = self.program.ops[op.args[0]].shape[axis]
        return self.part(builder, op.args[0], op.attr("start"), op.attr("stop"), axis, size)

    def part(self, builder: Builder, value: int, start: int, stop: int, axis: int, size: int) -> int:
        """A part of an old value, as a new value; a value whose axis is not of size `size` broadcasts."""
        op = self.program.ops[value]
        if len(op.shape) <= axis or op.shape[axis] != size:
            return self.new[value]
        if value not in self.made:
            return sliced(builder, self.new[value], axis, start, stop)
        if op.name == "linear":
            at = _weight_axis(op, axis)
            assert at is not None
            x, w = self.new[op.args[0]], sliced(builder, self.new[op.args[1]], at, start, stop)
            if "h" in Product.parse(op.attr("spec")).left and axis == 0:
                x = sliced(builder, x, 0, start, stop)
            return builder.op("linear", x, w, **dict(op.attrs))
        parts = (self.part(builder, a, start, stop, axis, size) for a in op.args)
        return builder.op(op.name, *parts, **dict(op.attrs))


def _weight_axis(op: Op, axis: int) -> int | None:
    """The axis of a product's weight that becomes an axis of its result; None for other products."""
    product = Product.parse(op.attr("spec"))
    letter = product.out[axis] if product.is_forward and op.attr("via") != "self" else ""
    return product.right.index(letter) if letter and letter in product.right else None
