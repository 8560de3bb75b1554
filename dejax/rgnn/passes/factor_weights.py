"""A typed product leaves an outer sum when the rows before the product are summed so already.

    sum over pairs p of a type of s_p (x_p W)   =   (sum over pairs p of the type of s_p x_p) W

Backward of attention scores needs the left side, the gradient of the vector that a product meets. The gradient of the
weight is an outer sum of the rows x, and one that the right side joins (`pair`): the rows of the product are not read.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program
from dejax.rgnn.ir.intra import fits_beside
from dejax.rgnn.passes._distribute import keep_apart
from dejax.rgnn.passes._rewrite import Counts, rebuild

# How the product was made, and how it is summed -> how the rows before it are summed, and that sum meets the weight.
_SUMS = {
    ("k,kn->n", "k,->k"): ("k,->k", "k,kn->n"),
    ("k,hkn->hn", "hk,h->hk"): ("k,h->hk", "hk,hkn->hn"),
    ("hk,hkn->hn", "hk,h->hk"): ("hk,h->hk", "hk,hkn->hn"),
    ("hk,kn->hn", "hk,h->hk"): ("hk,h->hk", "hk,kn->hn"),
}


def extract(program: Program, counts: Counts) -> Program:
    ops = program.ops
    new: dict[int, int] = {}

    def summed_beside(rows: int, via: str, spec: str, narrow: int, dtype: str) -> bool:
        """Whether there is an outer sum of the same rows that the one with `narrow` rows can join."""
        return any(
            o.name == "outer"
            and (o.args[0], o.attr("via"), o.dtype) == (rows, via, dtype)
            and ops[o.args[1]].width > ops[narrow].width
            and fits_beside(o.attr("spec"), spec, ops[narrow].shape)
            for o in ops
        )

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "outer" or op.attr("via") != TYPE_VIA.get(ops[op.args[0]].space):
            return None
        product, narrow, via = ops[op.args[0]], op.args[1], op.attr("via")
        specs = _SUMS.get((product.attr("spec"), op.attr("spec")))
        if product.name != "linear" or product.attr("via") != via or specs is None:
            return None
        rows, weight = product.args
        one_dtype = op.dtype == product.dtype == ops[rows].dtype == ops[weight].dtype
        if not (one_dtype and summed_beside(rows, via, specs[0], narrow, op.dtype)):
            return None
        total = builder.op("outer", new[rows], args[1], spec=specs[0], via=via, dtype=op.dtype)
        return builder.op("linear", total, new[weight], spec=specs[1], via="self")

    return keep_apart(rebuild(program, visit, new), counts)
