"""Dead code elimination: operators that no output depends on go; inputs stay, since callers pass them by position."""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Program
from dejax.rgnn.passes._rewrite import Counts


def dce(program: Program, counts: Counts) -> Program:
    live = set(program.outputs)
    for i in reversed(range(len(program.ops))):
        if i in live:
            live.update(program.ops[i].args)
    builder = Builder(program.name)
    new: dict[int, int] = {}
    for i, op in enumerate(program.ops):
        if i in live or op.name == "input":
            line = program.lines[i] if program.lines else None
            new[i] = builder.copy(op, (new[a] for a in op.args), line)
    return builder.build(new[o] for o in program.outputs)
