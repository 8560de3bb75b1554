"""Rows that are reshaped into heads are made with heads: the reshape moves into the weight.

    (x W).reshape(H, d)              becomes    x W', with W' [H, k, d] of the columns of W
    relu(x W + b).reshape(H, d)      becomes    relu(x W' + b.reshape(H, d))

So scores and weighted sums of heads fuse with the product as they do for weights with heads. Rows that are also read
without heads stay.
"""

from __future__ import annotations

import math

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import TYPE_SPACES, UNARY, Builder, Op, OpProgram
from dejax.rgnn.passes._rewrite import Rewrite

_SPEC = "k,hkn->hn"


def weight_heads(program: OpProgram, counts: Counts) -> OpProgram:
    return _WeightHeads(program, counts).run()


class _WeightHeads(Rewrite):
    """`heads` has the feature shape with heads of each value that is made with them."""

    def __init__(self, program: OpProgram, counts: Counts) -> None:
        super().__init__(program, counts)
        wanted: dict[int, tuple[int, ...]] = {}
        for i in reversed(range(len(program.ops))):
            shapes = {self.shape_read(u, wanted) for u in self.users[i]}
            shape = shapes.pop() if len(shapes) == 1 else None
            # A row of size 1 that a bias makes wider has no heads.
            if shape is not None and program.ops[i].shape == (math.prod(shape),) and i not in program.outputs:
                wanted[i] = shape
        self.heads: dict[int, tuple[int, ...]] = {}
        for i, op in enumerate(program.ops):
            made = self.made_of(op)
            if op.name == "reshape" and self.heads.get(op.args[0]) == op.shape:
                self.heads[i] = op.shape
            elif i in wanted and (_makes_rows(op) if made is None else made in self.heads):
                self.heads[i] = wanted[i]

    def shape_read(self, user: int, wanted: dict[int, tuple[int, ...]]) -> tuple[int, ...] | None:
        """The shape with heads in which an operator reads its row; None where it reads it without heads."""
        op = self.program.ops[user]
        if op.name == "reshape":
            return op.shape if len(op.shape) == 2 and op.shape[0] > 1 else None
        return None if self.made_of(op) is None else wanted.get(user)

    def made_of(self, op: Op) -> int | None:
        """The row that an operator reads, or maps element by element; None for all other operators."""
        if op.name in UNARY:
            return op.args[0]
        if op.name == "gather" and self.program.ops[op.args[0]].space not in TYPE_SPACES:
            return op.args[0]
        bias = self.bias(op) if op.name == "add" else None
        return None if bias is None else op.args[1 - op.args.index(bias)]

    def bias(self, op: Op) -> int | None:
        """The operand of a sum that is read from weights."""
        for a in op.args:
            arg = self.program.ops[a]
            if arg.name == "gather" and self.program.ops[arg.args[0]].space in TYPE_SPACES and arg.shape == op.shape:
                return a
        return None

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        """See `Rewrite`."""
        shape = self.heads.get(index)
        if shape is None:
            return None
        if op.name == "reshape":
            return args[0]
        if op.name == "linear":
            columns = builder.op("reshape", args[1], shape=(builder.ops[args[1]].shape[0], *shape))
            w = builder.op("transpose", columns, perm=(1, 0, 2))
            return builder.op("linear", args[0], w, spec=_SPEC, via=op.attr("via"))
        if op.name != "add":
            return builder.op(op.name, *args, **dict(op.attrs))
        bias = self.bias(op)
        assert bias is not None
        source = self.program.ops[bias]
        rows = builder.op("reshape", self.new[source.args[0]], shape=shape)
        read = builder.op("gather", rows, **dict(source.attrs))
        return builder.op("add", *(read if a == bias else self.new[a] for a in op.args))


def _makes_rows(op: Op) -> bool:
    """Whether an operator is a product of rows without heads and a weight without heads."""
    if op.name != "linear" or op.space in TYPE_SPACES:
        return False
    return bool(op.attr("spec") == "k,kn->n" and op.attr("via") != "self")
