"""Ways of writing one function become one form, which the other passes and the kernels know.

(a * b).sum(-1)                       becomes    dot(a, b)
x ** 2                                becomes    square(x)
0 + x,  1 * x                         becomes    x
p / g.dst(g.sum_to_dst(p)), with p = exp(s - g.dst(g.max_to_dst(s)))    becomes    edge_softmax(s)
g.sum_to_dst(m.reshape(H * d))        becomes    g.sum_to_dst(m).reshape(H * d)
g.src(x).reshape(H, d)                becomes    g.src(x.reshape(H, d)), where nothing reads the row in its old shape
x.reshape(3, d)[1]                    becomes    x[d : 2 * d].reshape(d)
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program, is_float
from dejax.rgnn.passes._rewrite import Counts, Rewrite, moves_unit_axes


def plain_forms(program: Program, counts: Counts) -> Program:
    return _PlainForms(program, counts).run()


class _PlainForms(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        if op.name == "reshape":
            once = _reshaped_once(builder, op, args[0])
            return self.reshaped_rows(builder, op, args[0]) if once is None else once
        if op.name == "slice":
            return _slice_of_reshape(builder, op, args[0])
        if op.name == "reduce":
            return self.sum_of_reshaped(builder, op, args)
        if not is_float(op.dtype):
            return None
        if op.name == "pow" and op.attr("exponent") == 2.0:
            return builder.op("square", args[0])
        if op.name in ("add", "mul"):
            return self.without_neutral(op)
        if op.name == "div":
            found = self.softmax(op)
            return None if found is None else builder.op("softmax", self.new[found[0]], via=found[1])
        return self.inner_product(builder, op) if op.name == "sum_features" else None

    def without_neutral(self, op: Op) -> int | None:
        """`x + 0`, as Python's `sum` begins, and `x * 1`."""
        neutral = 0.0 if op.name == "add" else 1.0
        for x, other in (op.args, op.args[::-1]):
            const, row = self.program.ops[other], self.program.ops[x]
            if (
                const.name == "const"
                and const.attr("value") == neutral
                and (row.shape, row.dtype) == (op.shape, op.dtype)
            ):
                return self.new[x]
        return None

    def softmax(self, op: Op) -> tuple[int, str] | None:
        """Of `p / g.dst(g.sum_to_dst(p))` with `p = exp(s - g.dst(g.max_to_dst(s)))` the score and the map."""
        ops = self.program.ops
        p, read = ops[op.args[0]], self.program.ops[op.args[1]]
        if read.name == "add":  # one that the sum, which is at least 1, rounds away
            read = self.without_small(read)
        if read.name != "gather" or p.name != "exp" or ops[p.args[0]].name != "sub":
            return None
        via, total = read.attr("via"), ops[read.args[0]]
        if total.name == "add":
            total = self.without_small(total)
        if not (total.is_sum and total.args == (op.args[0],) and total.attr("via") == via):
            return None
        score, shift = ops[p.args[0]].args
        largest = self.through_stop(ops[shift])
        if largest.name != "gather" or largest.attr("via") != via:
            return None
        largest = self.through_stop(ops[largest.args[0]])
        is_shift = largest.is_extremum and largest.attr("op") == "max" and largest.attr("via") == via
        return (score, via) if is_shift and largest.args == (score,) and ops[score].shape == op.shape else None

    def through_stop(self, op: Op) -> Op:
        return self.program.ops[op.args[0]] if op.name == "stop_gradient" else op

    def without_small(self, op: Op) -> Op:
        """Of a sum with a constant that rounding takes from 1 the other term; any other sum as it is."""
        half = {"float32": 2.0**-24, "float64": 2.0**-53}.get(op.dtype, 0.0)
        for value, small in (op.args, op.args[::-1]):
            const = self.program.ops[small]
            if const.name == "const" and 0 <= const.attr("value") < half:
                return self.program.ops[value]
        return op

    def inner_product(self, builder: Builder, op: Op) -> int | None:
        """`(a * b).sum(-1)` as `dot(a, b)`; a product that others read, too, stays."""
        product = self.program.ops[op.args[0]]
        shapes = {self.program.ops[a].shape for a in product.args}
        if op.attr("axes") != (len(product.shape) - 1,) or product.name != "mul" or shapes != {product.shape}:
            return None
        a, b = product.args
        if a == b or len(self.users[op.args[0]]) > 1 or op.args[0] in self.program.outputs:
            return None
        made = builder.op("dot", self.new[a], self.new[b])
        return builder.op("reshape", made, shape=op.shape) if op.attr("keepdims") else made

    def sum_of_reshaped(self, builder: Builder, op: Op, args: tuple[int, ...]) -> int | None:
        """A reduction of reshaped edge rows, reshaped after it."""
        made = builder.ops[args[0]]
        if made.name != "reshape" or len(op.args) != 1 or len(self.users[op.args[0]]) > 1:
            return None
        if moves_unit_axes(made, builder.ops[made.args[0]]) or op.args[0] in self.program.outputs:
            return None
        return builder.op("reshape", builder.op("reduce", made.args[0], **dict(op.attrs)), shape=op.shape)

    def reshaped_rows(self, builder: Builder, op: Op, row: int) -> int | None:
        """Rows of nodes that edges read, reshaped before the edges read them."""
        read = self.program.ops[op.args[0]]
        if read.name != "gather" or moves_unit_axes(op, read) or op.args[0] in self.program.outputs:
            return None
        if any(self.program.ops[u].name != "reshape" for u in self.users[op.args[0]]):
            return None
        gather = builder.ops[row]
        return builder.op("gather", builder.op("reshape", gather.args[0], shape=op.shape), **dict(gather.attrs))


def _reshaped_once(builder: Builder, op: Op, value: int) -> int | None:
    """Rows reshaped, of which axes of size 1 are removed then: one reshape."""
    made = builder.ops[value]
    if made.name != "reshape" or len(made.shape) <= len(op.shape) or not moves_unit_axes(op, made):
        return None
    source = builder.ops[made.args[0]]
    return made.args[0] if source.shape == op.shape else builder.op("reshape", made.args[0], shape=op.shape)


def _slice_of_reshape(builder: Builder, op: Op, value: int) -> int | None:
    """Some of the first axis of reshaped rows: a slice of the rows, reshaped."""
    made = builder.ops[value]
    if made.name == "gather":
        inner = _slice_of_reshape(builder, op, made.args[0])
        return None if inner is None else builder.op("gather", inner, **dict(made.attrs))
    if made.name != "reshape" or op.attr("axis") != 0 or len(made.shape) < 2:
        return None
    source = builder.ops[made.args[0]]
    if len(source.shape) != 1:
        return None
    each = made.width // made.shape[0]
    rows = builder.op("slice", made.args[0], axis=0, start=op.attr("start") * each, stop=op.attr("stop") * each)
    return builder.op("reshape", rows, shape=op.shape)
