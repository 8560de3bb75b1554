"""Linear operator reordering (Hector, section 3.2.3): weights meet weights before they meet rows.

`(x W_r) . a_r` becomes `x . (W_r a_r)`, and `(x W_r) V_r` becomes `x (W_r V_r)` where that is less work: the product of
two weights is made once for each type, the product with a row once for each row. `((x W_r) . y) c_r` becomes
`(x (c_r W_r)) . y`, so that no edge reads a number of its type.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program
from dejax.rgnn.passes._rewrite import Counts, rebuild

# How `x` was made from `u` -> (spec of W a, by type; spec of u . (W a), by row).
_DOT_AFTER_LINEAR = {
    "k,kn->n": ("n,kn->k", "k,k->"),
    "k,hkn->hn": ("hn,hkn->hk", "k,hk->h"),
    "hk,hkn->hn": ("hn,hkn->hk", "hk,hk->h"),
    "hk,kn->hn": ("hn,kn->hk", "hk,hk->h"),
}


# Products whose weight, [k, n] or [heads, k, n], a number by type (and head) can be multiplied into.
_SCALED = frozenset(("k,kn->n", "k,hkn->hn", "hk,hkn->hn"))
# What reading a number by type costs an edge, whose types need not be in the order of the loop: a memory burst.
_TYPED_READ_BYTES = 64


def reorder(program: Program, counts: Counts) -> Program:
    users = program.users()

    def typed_constant(value: int, space: str) -> int | None:
        """The by-type value behind a gather of one, if that is what `value` is."""
        op = program.ops[value]
        if op.name == "gather" and op.attr("via") == TYPE_VIA.get(op.space):
            return op.args[0]
        return None

    def only_in_dots(value: int) -> bool:
        return value not in program.outputs and all(
            program.ops[u].name == "dot"
            and any(typed_constant(a, program.ops[u].space) is not None for a in program.ops[u].args)
            for u in users[value]
        )

    def read_once(value: int) -> bool:
        return value not in program.outputs and len(users[value]) == 1

    def scaled_dot(op: Op) -> tuple[int, int, Op] | None:
        """Of `((x W_r) . y) c_r` the values c and y, and the product's operator; None where `op` is nothing such."""
        for value, factor in (op.args, op.args[::-1]):
            dot, scale = program.ops[value], typed_constant(factor, op.space)
            if dot.name != "dot" or scale is None or not read_once(value):
                continue
            for product, other in (dot.args, dot.args[::-1]):
                linear = program.ops[product]
                if linear.name != "linear" or linear.attr("spec") not in _SCALED or not read_once(product):
                    continue
                weight = program.ops[linear.args[1]]
                typed = linear.attr("via") == TYPE_VIA.get(op.space) and weight.dtype == program.ops[scale].dtype
                heads = program.ops[scale].shape in ((), weight.shape[:-2])
                moved = 3 * counts.rows(weight.space) * weight.row_bytes
                if typed and heads and moved < counts.rows(op.space) * _TYPED_READ_BYTES:
                    return scale, other, linear
        return None

    new: dict[int, int] = {}  # old -> new, for what a pattern reaches past its own arguments

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name == "mul" and (found := scaled_dot(op)) is not None:
            scale, other, made = found
            x, w = (new[a] for a in made.args)
            factor = new[scale]
            if program.ops[scale].shape:
                factor = builder.op("reshape", factor, shape=(*program.ops[scale].shape, 1, 1))
            weight = builder.op("mul", w, factor)
            product = builder.op("linear", x, weight, spec=made.attr("spec"), via=made.attr("via"))
            return builder.op("dot", product, new[other])
        if op.name == "dot":
            for at in (0, 1):
                constant = typed_constant(op.args[at], op.space)
                if constant is None:
                    continue
                x, x_op = args[1 - at], program.ops[op.args[1 - at]]
                via = TYPE_VIA[op.space]
                linear = x_op.name == "linear" and x_op.attr("via") == via and x_op.attr("spec") in _DOT_AFTER_LINEAR
                if linear and only_in_dots(op.args[1 - at]):
                    by_type, by_row = _DOT_AFTER_LINEAR[x_op.attr("spec")]
                    folded = builder.op("linear", new[constant], new[x_op.args[1]], spec=by_type, via="self")
                    return builder.op("linear", new[x_op.args[0]], folded, spec=by_row, via=via)
                spec = "k,k->" if len(x_op.shape) == 1 else "hk,hk->h"
                return builder.op("linear", x, new[constant], spec=spec, via=via) if len(x_op.shape) <= 2 else None
        if op.name == "linear" and op.attr("spec") == "k,kn->n" and op.attr("via") != "self":
            inner = program.ops[op.args[0]]
            same = inner.name == "linear" and inner.attr("spec") == "k,kn->n" and inner.attr("via") == op.attr("via")
            if same and len(users[op.args[0]]) == 1 and op.args[0] not in program.outputs:
                (k,), (n,), (m,) = program.ops[inner.args[0]].shape, inner.shape, op.shape
                rows, types = counts.rows(op.space), counts.rows(program.ops[op.args[1]].space)
                if rows * (k * n + n * m) > rows * k * m + types * k * n * m:
                    product = builder.op("linear", new[inner.args[1]], new[op.args[1]], spec="jk,kn->jn", via="self")
                    return builder.op("linear", new[inner.args[0]], product, spec="k,kn->n", via=op.attr("via"))
        return None

    return rebuild(program, visit, new)
