"""The sum of two parts that are padded with zeros, each where the other is not, is their concatenation.

The gradient of a value that is read in parts (`merge_gemms`) is such a sum. A traversal that computes both parts can
then write them into one array.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program
from dejax.rgnn.passes._rewrite import Counts, rebuild


def concat_parts(program: Program, counts: Counts) -> Program:
    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "add":
            return None
        left, right = (builder.ops[a] for a in args)
        if left.name != "pad" or right.name != "pad" or left.attr("axis") != right.attr("axis"):
            return None
        axis = left.attr("axis")
        for first, second in ((left, right), (right, left)):
            zeros = [o.attr(side) for o in (first, second) for side in ("before", "after")]
            sizes = [builder.ops[o.args[0]].shape[axis] for o in (first, second)]
            if zeros == [0, sizes[1], sizes[0], 0]:
                return builder.op("concat", first.args[0], second.args[0], axis=axis)
        return None

    return rebuild(program, visit)
