"""A sum of rows and a number of the same pair times a vector of its type stay apart, where the number comes later.

    (y_p + s_p a) W   =   y_p W + s_p (a W),   sum of x_p (y_p + s_p a)   =   sum of x_p y_p + (sum of x_p s_p) a

RGAT's gradient of a source pair is such a sum: of gradients of nodes, and of that of its score. The loop that sums the
first makes the inner products that the second needs a mean of (`_share_inner_products.py`): together they would be read and written
once more.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_VIA, Builder, Op, Program, Space
from dejax.rgnn.passes._rewrite import Counts, Factor, factors, rebuild
from dejax.rgnn.passes.cse import cse

# (spec of s a, spec of (..) W) -> (spec of a W, spec of s (a W)); the same of the outer sum of rows and (..).
_PRODUCTS = {
    ("h,hk->hk", "hn,hkn->k"): ("hn,hkn->hk", "h,hk->k"),
    (",k->k", "n,kn->k"): ("n,kn->k", ",k->k"),
}
_OUTERS = {
    ("h,hk->hk", "k,hn->hkn"): ("k,h->hk", "hk,hn->hkn"),
    (",k->k", "k,n->kn"): ("k,->k", "k,n->kn"),
}


def keep_apart(program: Program, counts: Counts) -> Program:
    ops, users = program.ops, program.users()
    new: dict[int, int] = {}

    def parts(value: int) -> tuple[int, Op] | None:
        """The sum of rows, and the product of number and vector that is added to it, where they are better apart."""
        op = ops[value]
        if op.name != "add" or op.space not in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR) or value in program.outputs:
            return None
        for rows, scaled in (op.args, op.args[::-1]):
            made, total = ops[scaled], ops[rows]
            if made.name != "linear" or made.attr("via") != TYPE_VIA[op.space] or total.name != "reduce":
                continue
            if len({ops[a].dtype for a in (value, rows, *made.args)}) == 1 and _waits(program, rows, made.args[0]):
                return (rows, made) if all(_taken(u, value, made) for u in users[value]) else None
        return None

    def _taken(user: int, value: int, made: Op) -> bool:
        op = ops[user]
        spec = (made.attr("spec"), op.attr("spec"))
        if op.name == "linear":
            return op.args[0] == value and op.attr("via") == made.attr("via") and spec in _PRODUCTS
        return op.name == "outer" and op.args[1] == value and op.attr("via") == made.attr("via") and spec in _OUTERS

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name not in ("linear", "outer"):
            return None
        found = parts(op.args[0 if op.name == "linear" else 1])
        if found is None:
            return None
        rows, made = found
        number, vector = (new[a] for a in made.args)
        via, spec = op.attr("via"), (made.attr("spec"), op.attr("spec"))
        if op.name == "linear":
            of_types, of_rows = _PRODUCTS[spec]
            whole = builder.op("linear", new[rows], args[1], spec=op.attr("spec"), via=via)
            both = builder.op("linear", vector, args[1], spec=of_types, via="self")
            return builder.op("add", whole, builder.op("linear", number, both, spec=of_rows, via=via))
        of_rows, of_types = _OUTERS[spec]
        whole = builder.op("outer", args[0], new[rows], spec=op.attr("spec"), via=via, dtype=op.dtype)
        numbers = builder.op("outer", args[0], number, spec=of_rows, via=via, dtype=op.dtype)
        more = builder.op("outer", numbers, vector, spec=of_types, via="self", dtype=op.dtype)
        return builder.op("add", whole, more)

    return cse(rebuild(program, visit, new), counts)


def _waits(program: Program, rows: int, number: int) -> bool:
    """Whether a number follows from a sum over edges of what is made from the wide rows of the other sum."""
    ops = program.ops
    wide: list[Factor] = [f for f in factors(program, ops[rows].args[0]) if ops[f.value].width == ops[rows].width]
    reads = {f.value for f in wide if ops[f.value].name == "gather"}

    def ancestors(value: int) -> set[int]:
        found, stack = set[int](), [value]
        while stack:
            for a in ops[stack.pop()].args:
                if a not in found:
                    found.add(a)
                    stack.append(a)
        return found

    sums = [
        v for v in ancestors(number)
        if ops[v].name == "reduce" and ops[ops[v].args[0]].space == Space.EDGE and ops[v].space == Space.NODE
    ]  # fmt: skip
    return bool(reads) and any(not reads.isdisjoint(ancestors(v)) for v in sums)
