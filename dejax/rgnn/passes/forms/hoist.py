"""Factors that all entries of a segment share, or all entries of the graph, are hoisted out of its sum.

`sum over edges into v of a_e y_v` becomes `(sum over edges into v of a_e) y_v`, and likewise for a divisor: the 1/c of
a mean, or the sum of a softmax, is applied to one row instead of to every edge.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, promote
from dejax.rgnn.passes._rewrite import (
    Factor,
    aligned,
    as_dtype,
    factors,
    in_range,
    insert_axes,
    multiply,
    rebuild,
    unless_empty,
    widened,
)
from dejax.rgnn.passes.gradients._softmax_gradient import mean_readers


def hoist(program: OpProgram, counts: Counts, *, exact: bool = False) -> OpProgram:
    """The pass. With `exact`, a mean stays as written if it is subtracted from the scalars whose mean it is.

    The same weights multiply the differences then, whose rounded sum is 0.
    """
    new: dict[int, int] = {}
    users = program.users()

    def subtracted(index: int, op: Op) -> bool:
        found = (mean_readers(program, users, index, f.value) for f in factors(program, op.args[0]))
        return any(r.cancels and not r.centred for r in found)

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int:
        left = exact and op.is_sum and subtracted(index, op)
        new[index] = (None if left else _hoisted(builder, op)) or builder.copy(op, args, builder.line)
        return new[index]

    def _hoisted(builder: Builder, op: Op) -> int | None:
        """The sum, multiplied afterwards by the factors that a segment shares; None without such factors or others."""
        if not op.is_sum:
            return None
        via = op.attr("via")
        shared: list[Factor] = []
        rest: list[Factor] = []
        for f in factors(program, op.args[0]):
            source = program.ops[f.value]
            row = source.name == "gather" and source.attr("via") in (via, "all") and via != "all"
            (shared if row else rest).append(f)
        if not shared or not rest:
            return None
        inside = multiply(builder, aligned(builder, new, rest), op.dtype)
        # The other factors may have a narrower dtype than the product: integers, booleans, or 16 bits. And without the
        # factors that made its summands small, a sum overflows in float16.
        inside = as_dtype(builder, inside, in_range(promote(builder.ops[inside].dtype, op.dtype)))
        total = builder.op("reduce", inside, via=via, op="sum")
        parts = [(total, 1)]
        for f in shared:
            read = program.ops[f.value]
            row = new[read.args[0]]
            if read.attr("via") == "all":
                row = builder.read_back(row, "all", builder.ops[total].space)
            else:
                row = unless_empty(builder, via, widened(builder, row), 1.0)  # of an empty segment it may be anything
            parts.append((insert_axes(builder, row, f.inserts), f.power))
        made = multiply(builder, parts, op.dtype)
        if any(program.ops[f.value].attr("via") == "all" for f in shared):
            made = unless_empty(builder, via, widened(builder, made), 0.0)  # what all segments share may be infinite
        if builder.ops[made].shape != op.shape:
            made = builder.op("broadcast", made, shape=op.shape)
        return as_dtype(builder, made, op.dtype)

    return rebuild(program, visit)
