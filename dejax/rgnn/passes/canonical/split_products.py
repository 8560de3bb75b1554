"""A product of a concatenation is split: each part is multiplied where it comes from, by its rows of the weight.

    [x_j, x_i, e_ij] @ W                 becomes    x_j @ W_1 + x_i @ W_2 + e_ij @ W_3
    a . [x_j, x_i]                       becomes    a_1 . x_j + a_2 . x_i

The first form multiplies and stores a wide row for each edge. In the second one `compact` multiplies the parts that
depend on one end alone, once for each node or pair. Concatenations of values of one origin stay: their product runs
there already. Parts have the dtype of the concatenation; terms of float16 products, which may be beyond its range where
the whole is not, are added as float32.
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import as_dtype, in_range, live, origins, rebuild, sliced

# The most parts into which a product is split: each part becomes one product.
_MOST_PARTS = 4


def split_products(program: OpProgram, counts: Counts) -> OpProgram:
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.space not in (Space.EDGE, Space.NODE) or op.name not in ("linear", "dot"):
            return None
        sides = (0, 1) if op.name == "dot" else (0,)
        apart = _of_several_origins if op.space == Space.EDGE else _of_sums
        at = next((side for side in sides if apart(program, op.args[side])), None)
        if at is None:
            return None
        if op.name == "linear":
            product = Product.parse(op.attr("spec"))
            if product.left[-1:] != "k" or op.attr("via") == "self":
                return None
            axis = product.right.index("k")
        else:
            axis = len(program.ops[op.args[1 - at]].shape) - 1
        start, terms = 0, []
        dtype = program.ops[op.args[at]].dtype
        for part in program.ops[op.args[at]].args:
            stop = start + program.ops[part].shape[-1]
            other = sliced(builder, args[1 - at], axis, start, stop)
            row = as_dtype(builder, new[part], dtype)
            if in_range(op.dtype) != op.dtype:
                other = _converted(builder, other, in_range(op.dtype))
            pair = (row, other) if at == 0 else (other, row)
            terms.append(builder.op(op.name, *pair, **dict(op.attrs)))
            start = stop
        total = terms[0]
        for term in terms[1:]:
            total = builder.op("add", total, term)
        return as_dtype(builder, total, op.dtype)

    return rebuild(program, visit, new)


def _of_several_origins(program: OpProgram, value: int) -> bool:
    """Whether a value is a concatenation along its last axis of values that do not all come from one end."""
    op = program.ops[value]
    if op.name != "concat" or op.attr("axis") != len(op.shape) - 1:
        return False
    return len(set.union(*(_ends(program, a) for a in op.args))) > 1


def _of_sums(program: OpProgram, value: int) -> bool:
    """Whether a value of nodes is a concatenation with sums over edges, as GraphSAGE's."""
    op = program.ops[value]
    if op.name != "concat" or op.attr("axis") != len(op.shape) - 1 or len(op.args) > _MOST_PARTS:
        return False
    return any(program.ops[a].name == "reduce" for a in live(program, op.args))


def _ends(program: OpProgram, value: int) -> set[str]:
    """The ends of edges whose rows a value depends on; also "edge" if it depends on values of the edges themselves."""
    return {via.partition("_pair")[0] for via in origins(program, value) - {"etype"}}  # pairs, too, have a type


def _converted(builder: Builder, value: int, dtype: str) -> int:
    """The value in a dtype, converted before it is read on the edges."""
    op = builder.ops[value]
    if op.name == "gather":
        return builder.op("gather", _converted(builder, op.args[0], dtype), **dict(op.attrs))
    return as_dtype(builder, value, dtype)
