"""Gradients of weights that all rows share become instances of the template of long products.

Such a gradient sums the outer products of the rows of two values. Where several values meet the same rows, and where
these rows are summed by themselves, as for the gradient of a bias, one instance does all of that.
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.ir.inter import OpProgram
from dejax.rgnn.ir.intra import Kernels, RowProducts
from dejax.rgnn.ir.row_sums import row_sum
from dejax.rgnn.ir.templates import KERNEL_DTYPES
from dejax.rgnn.passes._rewrite import live

# Largest number of arrays of one instance: more gain little, and the kernel has a loop for each array.
_MOST = 4


def fuse_row_products(kernels: Kernels) -> Kernels:
    """Adds the instances of sums over all rows to a level-2 program without fallbacks."""
    program, made = kernels.program, list[RowProducts]()
    for i, op in enumerate(program.ops):
        if row_sum(program, i) is None:
            continue
        x, y = op.args
        for number, other in enumerate(made):
            if (other.y, other.spec) == (y, op.attr("spec")) and len(other.xs) < _MOST and _apart(program, other, x, i):
                made[number] = replace(other, outs=(*other.outs, i), xs=(*other.xs, x))
                break
        else:
            made.append(RowProducts((i,), (x,), y, op.attr("spec")))
    return Kernels(program, (*kernels.instances, *_with_totals(program, made)))


def _apart(program: OpProgram, instance: RowProducts, x: int, out: int) -> bool:
    """Whether `x` does not depend on the instance's results, and the instance's operands do not depend on `out`."""
    return live(program, [x]).isdisjoint(instance.outs) and out not in live(program, instance.reads)


def _with_totals(program: OpProgram, made: list[RowProducts]) -> list[RowProducts]:
    """The instances, extended by the sums over all rows that the program takes of rows that they read anyway."""
    found = list(made)
    for i, op in enumerate(program.ops):
        if not (op.name == "reduce" and op.is_sum and op.attr("via") == "all" and op.dtype in KERNEL_DTYPES):
            continue
        for number, each in enumerate(found):
            if each.y == op.args[0] and each.total is None and i not in live(program, each.reads):
                found[number] = replace(each, total=i)
                break
    return found
