"""Edge softmax as a maximum and a sum for each segment, which are all that is saved for backward.

    m_v = max over edges into v of s_e ;  x_e = exp(s_e - m_v) ;  l_v = sum of x_e ;  p_e = x_e / l_v

Where all scores of a segment are -inf, as after a mask, m_v is 0 (the maximum of nothing), and all x_e and l_v are 0.
The divisor is then 1: shares and their gradients are 0, as for a segment without edges.

Fusion turns the maximum, the sum and a weighted sum of the same edges into one pass with a running maximum (Milakov and
Gimelshein, arXiv 1805.02867). It runs after backward generation, so the maximum needs no gradient.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram
from dejax.rgnn.passes._rewrite import as_dtype, or_one, rebuild


def expand_softmax(program: OpProgram, counts: Counts) -> OpProgram:
    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "softmax":
            return None
        (score,), via = args, op.attr("via")
        # The maximum and the sum are saved in float32: in bfloat16 a maximum of 100 would be off by up to 0.25, and the
        # shares that backward recomputes by a quarter.
        if op.dtype in ("bfloat16", "float16"):
            score = as_dtype(builder, score, "float32")
        largest = builder.op("reduce", score, via=via, op="max")
        shifted = builder.op("sub", score, builder.read_back(largest, via, op.space))
        exponential = builder.op("exp", shifted)
        total = builder.op("reduce", exponential, via=via, op="sum")
        share = builder.op("div", exponential, builder.read_back(or_one(builder, total), via, op.space))
        return as_dtype(builder, share, op.dtype)

    return rebuild(program, visit)
