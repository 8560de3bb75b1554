"""Products are distributed over a sum of rows and of a scalar of the same pair times a vector of its type.

    (y_p + s_p a) W   =   y_p W + s_p (a W),   sum of x_p (y_p + s_p a)   =   sum of x_p y_p + (sum of x_p s_p) a

RGAT's gradient of a source pair is such a sum: of gradients of nodes, and of the gradient of its score. The traversal
that sums the gradients of nodes computes the inner products whose mean the scalar needs (`_share_inner_products.py`),
so the scalar comes later, and a sum of both would be written and read once more.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program, Space
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import Counts, Rewrite, factors, live
from dejax.rgnn.passes.canonical.cse import cse


def distribute(program: Program, counts: Counts) -> Program:
    return cse(_Distribution(program, counts).run(), counts)


class _Distribution(Rewrite):
    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name not in ("linear", "outer"):
            return None
        found = self.parts(op.args[0 if op.name == "linear" else 1])
        if found is None:
            return None
        rows, scaled = self.new[found[0]], found[1]
        scalar, vector = (self.new[a] for a in scaled.args)
        attrs = dict(op.attrs)
        first, second = Product.parse(scaled.attr("spec")), Product.parse(op.attr("spec"))
        if op.name == "linear":
            by_type, by_row = first.weights_first(second)
            whole = builder.op("linear", rows, args[1], **attrs)
            weight = builder.op("linear", vector, args[1], spec=str(by_type), via="self")
            return builder.op("add", whole, builder.op("linear", scalar, weight, **attrs | {"spec": str(by_row)}))
        by_row, by_type = first.rows_first(second.swapped)
        whole = builder.op("outer", args[0], rows, **attrs)
        sums = builder.op("outer", args[0], scalar, **attrs | {"spec": str(by_row.swapped)})
        more = builder.op("outer", sums, vector, **attrs | {"spec": str(by_type), "via": "self"})
        return builder.op("add", whole, more)

    def parts(self, value: int) -> tuple[int, Op] | None:
        """The sum of rows, and the scaled vector that is added to it, where all products are better distributed."""
        ops, op = self.program.ops, self.program.ops[value]
        pairs = op.space in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR)
        if op.name != "add" or not pairs or value in self.program.outputs:
            return None
        for rows, scaled in (op.args, op.args[::-1]):
            made = ops[scaled]
            if made.name != "linear" or made.attr("via") != TYPE_VIA[op.space] or ops[rows].name != "reduce":
                continue
            one_dtype = len({ops[a].dtype for a in (value, rows, *made.args)}) == 1
            if one_dtype and _waits(self.program, rows, made.args[0]):
                return (rows, made) if all(self.distributes(u, value, made) for u in self.users[value]) else None
        return None

    def distributes(self, user: int, value: int, scaled: Op) -> bool:
        """Whether a product of type `scaled` reads the value, and gives rows without heads or a matrix."""
        op = self.program.ops[user]
        if op.name not in ("linear", "outer") or op.attr("via") != scaled.attr("via"):
            return False
        first, second = Product.parse(scaled.attr("spec")), Product.parse(op.attr("spec"))
        if op.name == "linear":
            fits = op.args[0] == value and second.left[-1:] == "n" and second.out == "k"
        else:
            fits = op.args[1] == value and second.right[-1:] == "n" and second.left == "k"
        return fits and first.is_scaled_vector


def _waits(program: Program, rows: int, scalar: int) -> bool:
    """Whether a scalar follows from a sum over edges of values made from the wide rows of the other sum."""
    ops = program.ops
    wide = [f.value for f in factors(program, ops[rows].args[0]) if ops[f.value].width == ops[rows].width]
    reads = {v for v in wide if ops[v].name == "gather"}

    reductions = (v for v in live(program, [scalar]) if ops[v].name == "reduce" and ops[v].space == Space.NODE)
    sums = [v for v in reductions if ops[ops[v].args[0]].space == Space.EDGE]
    return bool(reads) and any(not reads.isdisjoint(live(program, [v])) for v in sums)
