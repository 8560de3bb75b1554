"""Two grouped GEMMs of the same rows become one, whose result holds both: rows are read once for both.

    x_j U_r,  x_j V_r   ->   y = x_j [U_r V_r],  y[first half],  y[second half]

Backward follows: the gradient of y is one array, its product with the weights one grouped GEMM, and the gradient of the
weights one grouped weight gradient. Keys and messages of attention are such a pair, once `fold` has made both products
of x. The weights are products themselves then, and these become one, too:

    [K_r A_r, V_r M_r]   ->   [K_r V_r] [A_r M_r], head by head
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import TYPE_SPACES, Builder, Op, OpProgram
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import copy_ops, rebuild

_SPEC = "k,hkn->hn"


@dataclass(frozen=True, slots=True)
class _Member:
    """A grouped GEMM; `value` has `bias` (by type) added where there is one."""

    value: int
    linear: Op
    bias: int | None


def merge_gemms(program: OpProgram, counts: Counts) -> OpProgram:
    """The pass: pairs of grouped GEMMs of the same rows become one, of which each reader takes its columns."""
    ordered = _weights_first(program)
    pairs = {member.value: pair for pair in _pairs(ordered, counts) for member in pair}
    if not pairs:
        return program
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        pair = pairs.get(index)
        if pair is None:
            return None
        if index == pair[1].value:  # made with the first
            return new[index]
        both = [m.linear for m in pair]
        via, heads = both[0].attr("via"), both[0].shape[0]
        w = _stacked(builder, *(new[o.args[1]] for o in both))
        y = builder.op("linear", new[both[0].args[0]], w, spec=_SPEC, via=via)
        biases = [new[m.bias] for m in pair if m.bias is not None]
        if biases:
            rows = {"space": str(op.space)} if via == "all" else {}  # shared biases
            y = builder.op("add", y, builder.op("gather", _stacked(builder, *biases), via=via, **rows))
        parts = [builder.op("slice", y, axis=0, start=i * heads, stop=(i + 1) * heads) for i in range(2)]
        new[pair[1].value] = parts[1]
        return parts[0]

    return rebuild(ordered, visit, new)


def _stacked(builder: Builder, x: int, y: int) -> int:
    """Two values of types, concatenated along heads; where equal operators made them, these take stacked arguments."""
    first, second = builder.ops[x], builder.ops[y]
    shapes = [tuple(builder.ops[a].shape for a in op.args) for op in (first, second)]
    if shapes[0] == shapes[1] and (first.name, first.attrs, first.dtype) == (second.name, second.attrs, second.dtype):
        own = first.name == "linear" and first.attr("via") == "self"
        if first.name == "gather" or (own and Product.parse(first.attr("spec")).for_each_head):
            args = (_stacked(builder, a, b) for a, b in zip(first.args, second.args, strict=True))
            return builder.op(first.name, *args, **dict(first.attrs))
    return builder.op("concat", x, y, axis=0)


def _pairs(program: OpProgram, counts: Counts) -> list[tuple[_Member, _Member]]:
    users = program.users()
    waiting: dict[tuple, _Member] = {}
    found = []
    for i, op in enumerate(program.ops):
        if op.name != "linear" or op.attr("spec") != _SPEC or op.space in TYPE_SPACES:
            continue
        member = _member(program, users, i)
        if member is None or not _is_read_in_place(program, users, member.value, counts):
            continue
        bias = None if member.bias is None else program.ops[member.bias]
        added = None if bias is None else (bias.shape, bias.dtype)
        key = (op.args[0], op.attr("via"), op.shape, op.dtype, added)
        first = waiting.pop(key, None)
        if first is None:
            waiting[key] = member
        elif max(op.args[1], -1 if member.bias is None else member.bias) < first.value:
            found.append((first, member))
    return found


def _is_read_in_place(program: OpProgram, users: list[list[int]], product: int, counts: Counts) -> bool:
    """Whether what reads a product can read it as a part of wider rows.

    The kernel of a product may also compute what reads the product by row, but not what gathers it. A grouped GEMM that
    gathers its rows needs an array of their own. This copy, and that of the gradients side by side, cost less than the
    launches that are saved only while the cache has them.
    """
    ops = program.ops
    if any(ops[u].name not in ("gather", "dot") for u in users[product]):
        return False
    multiplied = any(ops[v].name == "linear" for u in users[product] if ops[u].name == "gather" for v in users[u])
    return not (multiplied and counts.from_memory(ops[product], 2))


def _member(program: OpProgram, users: list[list[int]], product: int) -> _Member | None:
    op = program.ops[product]
    if product in program.outputs:
        return None
    if len(users[product]) == 1:
        (u,) = users[product]
        add = program.ops[u]
        if add.name == "add" and add.shape == op.shape and u not in program.outputs:
            (other,) = (a for a in add.args if a != product) if add.args[0] != add.args[1] else (product,)
            bias = program.ops[other]
            # One row for all heads cannot be stacked along the heads.
            for_heads = len(bias.shape) == 2 and bias.shape[0] == op.shape[0]
            if bias.name == "gather" and bias.attr("via") == op.attr("via") and for_heads:
                return _Member(u, op, bias.args[0])
    return _Member(product, op, None)


def _weights_first(program: OpProgram) -> OpProgram:
    """The same program with the operators that depend on weights only before all others."""
    early: set[int] = set()
    for i, op in enumerate(program.ops):
        if op.name == "input" or (op.space in TYPE_SPACES and early.issuperset(op.args)):
            early.add(i)
    return copy_ops(program, sorted(range(len(program.ops)), key=lambda i: i not in early), program.outputs)
