"""Products of nodes that are added become one product: the rows are added first.

    a_v @ W + b_v @ W                  becomes    (a_v + b_v) @ W
    sum over v of x_v^T a_v + the same with b_v    becomes    sum over v of x_v^T (a_v + b_v)

Backward makes such sums where a program multiplies both ends of an edge by one weight: the gradients of the two ends
meet at the node, and in the gradient of the weight. `combine_products` does the same for edges, before compaction.
Rows of 16 bits stay: their sum would be rounded once more.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import Builder, Op, Program, Space
from dejax.rgnn.passes._rewrite import Counts, rebuild

# Which operand of a product two products may have in common.
_COMMON = {"linear": 1, "outer": 0}


def combine_node_products(program: Program, counts: Counts) -> Program:
    users = program.users()

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "add" or op.dtype not in ("float32", "float64"):
            return None
        if any(len(users[a]) > 1 or a in program.outputs for a in op.args) or args[0] == args[1]:
            return None
        left, right = (builder.ops[a] for a in args)
        if left.name not in _COMMON or (left.name, left.attrs) != (right.name, right.attrs):
            return None
        common = _COMMON[left.name]
        if left.args[common] != right.args[common]:
            return None
        rows = [builder.ops[p.args[1 - common]] for p in (left, right)]
        kinds = {(r.space, r.shape, r.dtype) for r in rows}
        if kinds != {(Space.NODE, rows[0].shape, op.dtype)} or any(r.name == "gather" for r in rows):
            return None
        total = builder.op("add", left.args[1 - common], right.args[1 - common])
        operands = [total, total]
        operands[common] = left.args[common]
        return builder.op(left.name, *operands, **dict(left.attrs))

    return rebuild(program, visit)
