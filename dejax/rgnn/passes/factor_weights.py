"""A weight leaves a grouped weight gradient, where the rows before the grouped GEMM are summed so already.

    sum over pairs p of a type of s_p (x_p W)   =   (sum over pairs p of the type of s_p x_p) W

Backward of attention scores needs the left side, the gradient of the vector that a product meets. The gradient of the
weight sums products with the rows x, too, so one kernel computes both (`merge_weight_gradients`), and nothing reads the
rows of the product any more.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program
from dejax.rgnn.ir.products import Product
from dejax.rgnn.ir.templates import takes_narrow_rows
from dejax.rgnn.passes._rewrite import Counts, rebuild


def factor_weights(program: Program, counts: Counts) -> Program:
    ops = program.ops
    new: dict[int, int] = {}

    def can_join(rows: int, via: str, spec: str, scalars: int, dtype: str) -> bool:
        """Whether there is a wider weight gradient of the same rows that the one with `scalars` can join."""
        return any(
            o.name == "outer"
            and (o.args[0], o.attr("via"), o.dtype) == (rows, via, dtype)
            and ops[o.args[1]].width > ops[scalars].width
            and takes_narrow_rows(o.attr("spec"), spec, ops[scalars].shape)
            for o in ops
        )

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "outer" or op.attr("via") != TYPE_VIA.get(ops[op.args[0]].space):
            return None
        made, scalars, via = ops[op.args[0]], op.args[1], op.attr("via")
        if made.name != "linear" or made.attr("via") != via:
            return None
        product, outer = Product.parse(made.attr("spec")), Product.parse(op.attr("spec"))
        if not product.is_forward or not outer.swapped.is_scaled_vector:
            return None
        sums, weights = product.rows_first(outer)
        rows, weight = made.args
        one_dtype = op.dtype == made.dtype == ops[rows].dtype == ops[weight].dtype
        if not (one_dtype and can_join(rows, via, str(sums), scalars, op.dtype)):
            return None
        total = builder.op("outer", new[rows], args[1], spec=str(sums), via=via, dtype=op.dtype)
        return builder.op("linear", total, new[weight], spec=str(weights), via="self")

    return rebuild(program, visit, new)
