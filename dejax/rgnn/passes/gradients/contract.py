"""Inner products are taken after a sum, where the sum of their other side is there already.

    sum over edges into v of c_e (y_v . z_e)   =   y_v . (sum over edges into v of c_e z_e)

Backward of a softmax-weighted sum needs the left side, and forward has made the sum on the right. One inner product a
node replaces reading a row for every edge, as in FlashAttention's backward (arXiv 2205.14135, appendix B.2). There the
sum is a mean that is subtracted from the inner products themselves. Where products are exact to float32, the difference
must keep its digits: the mean then stays as it is, or the difference is centred again (`_softmax_gradient.py`).
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram
from dejax.rgnn.ir.products import with_axes
from dejax.rgnn.passes._rewrite import Factor, as_dtype, factors, rebuild
from dejax.rgnn.passes.gradients._softmax_gradient import Centred, centre_differences, mean_readers


def contract(program: OpProgram, counts: Counts, *, exact: bool = False) -> OpProgram:
    """The pass; with `exact`, a difference that cancels keeps the digits that it has as it was written."""
    sums, users = _sums(program), program.users()
    new: dict[int, int] = {}
    centred: dict[int, Centred] = {}  # by the old difference

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if not op.is_sum:
            return None
        found = factors(program, op.args[0])
        for at, f in enumerate(found):
            pair = _inner_product(program, f.value, op.attr("via"))
            if pair is None or f.power != 1:
                continue
            row, wide = pair
            rest = [_placed(program, g, over=1) for j, g in enumerate(found) if j != at]
            sides = [_placed(program, g) for g in factors(program, wide)]
            known = sums.get((op.attr("via"), tuple(sorted([*rest, *sides]))))
            if known is None or known >= index:
                continue
            total, y = new[known], new[program.ops[row].args[0]]
            if builder.ops[total].shape != builder.ops[y].shape:
                continue
            if exact and (read := mean_readers(program, users, index, f.value)).cancels:
                if not read.centred:
                    continue
                centred.update((c.difference, c) for c in read.centred)
            product = builder.op("mul", y, total)
            last = len(builder.ops[product].shape) - 1
            summed = builder.op("sum_features", product, axes=(last,), keepdims=False)
            if builder.ops[summed].shape != op.shape:
                summed = builder.op("reshape", summed, shape=op.shape)
            return as_dtype(builder, summed, op.dtype)
        return None

    made = rebuild(program, visit, new)
    found = [replace(c, difference=new[c.difference], share=new[c.share]) for c in centred.values()]
    return centre_differences(made, found, counts)


def _sums(program: OpProgram) -> dict[tuple, int]:
    """The sums of products in the program: (map, factors) -> reduction."""
    found: dict[tuple, int] = {}
    for i, op in enumerate(program.ops):
        if op.is_sum and op.shape:
            key = tuple(sorted(_placed(program, f) for f in factors(program, op.args[0])))
            found.setdefault((op.attr("via"), key), i)
    return found


def _placed(program: OpProgram, factor: Factor, over: int = 0) -> tuple[int, int, tuple[int, ...]]:
    """A factor and its axes in the product, which tell a scalar for each head from a scalar for each feature.

    Args:
      over: axes of size 1 to add at the end, for a factor of an inner product, whose last axis is gone.
    """
    shape = (*with_axes(program.ops[factor.value].shape, factor.inserts), *(1,) * over)
    return factor.value, factor.power, () if all(size == 1 for size in shape) else shape


def _inner_product(program: OpProgram, value: int, via: str) -> tuple[int, int] | None:
    """The two sides of an inner product over the last feature axis, the gathered row's side first; else None."""
    op = program.ops[value]
    if op.name == "reshape":
        return _inner_product(program, op.args[0], via)
    if op.name == "dot":
        sides = op.args
    elif op.name == "sum_features" and op.attr("axes") == (len(program.ops[op.args[0]].shape) - 1,):
        product = program.ops[op.args[0]]
        if product.name != "mul" or any(program.ops[a].shape != product.shape for a in product.args):
            return None
        sides = product.args
    else:
        return None
    for row, wide in (sides, sides[::-1]):
        read = program.ops[row]
        if read.name == "gather" and read.attr("via") == via:
            return row, wide
    return None
