"""Dead code elimination: operators that no output depends on go; inputs stay, since callers pass them by position."""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import OpProgram
from dejax.rgnn.passes._rewrite import copy_ops, live


def dce(program: OpProgram, counts: Counts) -> OpProgram:
    kept = live(program, program.outputs).union(program.inputs)
    if len(kept) == len(program.ops):
        return program
    return copy_ops(program, sorted(kept), program.outputs)
