"""Factors that a reduction's rows share are applied once, after the sum.

`sum over edges into v of a_e y_v` becomes `(sum over edges into v of a_e) y_v`, and likewise for a divisor: the 1/c of
a mean, or the sum of a softmax, is applied to one row instead of to every edge.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program, promote
from dejax.rgnn.passes._centre import readers
from dejax.rgnn.passes._rewrite import Counts, Factor, as_dtype, factors, insert_axes, multiply, rebuild


def hoist(program: Program, counts: Counts, *, exact: bool = False) -> Program:
    """The pass; with `exact`, a mean that is subtracted from what it is the mean of stays as it was written.

    Its weights are those that multiply the differences: their sum, rounded, is 0 then.
    """
    new: dict[int, int] = {}
    users = program.users()

    def subtracted(index: int, op: Op) -> bool:
        found = (readers(program, users, index, f.value) for f in factors(program, op.args[0]))
        return any(r.cancels and not r.centred for r in found)

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int:
        left = exact and op.name == "reduce" and op.attr("op") == "sum" and subtracted(index, op)
        new[index] = (None if left else _hoisted(builder, op)) or builder.copy(op, args, builder.line)
        return new[index]

    def _hoisted(builder: Builder, op: Op) -> int | None:
        if op.name != "reduce" or op.attr("op") != "sum":
            return None
        via = op.attr("via")
        shared: list[Factor] = []
        rest: list[Factor] = []
        for f in factors(program, op.args[0]):
            source = program.ops[f.value]
            row = source.name == "gather" and source.attr("via") == via and via != "all"
            (shared if row else rest).append(f)
        if not shared or not rest:
            return None
        inside = multiply(builder, [(insert_axes(builder, new[f.value], f.inserts), f.power) for f in rest], op.dtype)
        # What is left may be narrower than the product: integers, booleans, or 16 bits, whose sums overflow.
        inside = as_dtype(builder, inside, promote(builder.ops[inside].dtype, op.dtype))
        total = builder.op("reduce", inside, via=via, op="sum")
        # A row without items may hold anything, 0 / 0 included: it is replaced by 1.
        count = builder.op("count", via=via, dtype="float32")
        parts = [(total, 1)]
        for f in shared:
            row = new[program.ops[f.value].args[0]]
            row_op = builder.ops[row]
            some = count
            if row_op.shape:
                some = builder.op("reshape", count, shape=(1,) * len(row_op.shape))
            one = builder.const(1.0, row_op.dtype, row_op.space)
            row = builder.op("select", as_dtype(builder, some, row_op.dtype), row, one)
            parts.append((insert_axes(builder, row, f.inserts), f.power))
        made = multiply(builder, parts, op.dtype)
        if builder.ops[made].shape != op.shape:
            made = builder.op("broadcast", made, shape=op.shape)
        return as_dtype(builder, made, op.dtype)

    return rebuild(program, visit)
