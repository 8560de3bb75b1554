"""Common subexpression elimination: equal operators on equal arguments are computed once."""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram
from dejax.rgnn.passes._rewrite import rebuild


def cse(program: OpProgram, counts: Counts) -> OpProgram:
    seen: dict[tuple, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        key = (op.name, args, op.attrs)
        if key not in seen:
            seen[key] = builder.copy(op, args, builder.line)
        return seen[key]

    return rebuild(program, visit)
