"""The gradient of a softmax, whose parts cancel, where one of them has been made another way.

    ds_e = p_e (g_e - m_v),   m_v = sum over edges into v of p_e g_e,   g_e = y_v . z_e

The sum of ds_e over the edges into v is 0. So it stays, for every rounding of g_e, only while m_v is the mean of these
very numbers: y_v . (sum of p_e z_e), the same on paper, is off by some roundings of |y| |z|. That is more than all of
ds_e where one edge has nearly the whole share, or where rows have a large common part. What the contracted mean leaves
is itself a mean, of small numbers, and is subtracted in its turn:

    h_e = g_e - y_v . (sum of p_e z_e),   c_v = sum of p_e h_e,   ds_e = p_e (h_e - c_v)

No loop has to wait for c_v: sum of ds_e k_e = sum of p_e h_e k_e - c_v (sum of p_e k_e).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejax.rgnn.ir.inter import Builder, Op, Program, Space
from dejax.rgnn.passes._rewrite import Counts, Factor, as_dtype, factors, insert_axes, multiply, rebuild
from dejax.rgnn.passes.cse import cse

_ROW_CHAIN = ("div", "mul", "reshape", "cast", "select")


@dataclass(frozen=True, slots=True)
class Centred:
    """A difference `g - gather(mean)`, the share `p` that multiplies it, and the map of the mean."""

    difference: int
    share: int
    via: str


@dataclass(frozen=True, slots=True)
class Readers:
    """What reads a mean by row.

    Attributes:
      cancels: whether it is subtracted from the numbers that it is the mean of.
      centred: those differences, where all of them are a softmax's, and rows that they multiply are summed by the map
        of the mean; elsewhere none: the mean costs one scalar an edge (`_share_inner_products.py`), or must stay as it
        is.
    """

    cancels: bool
    centred: tuple[Centred, ...] = ()


def readers(program: Program, users: list[list[int]], mean: int, product: int) -> Readers:
    """How the sum `mean` of shares times the inner products `product` is read by the items of its rows."""
    ops, via = program.ops, program.ops[mean].attr("via")
    stack, seen = [mean], {mean}
    differences: list[int] = []
    while stack:
        for u in users[stack.pop()]:
            op = ops[u]
            if op.name in _ROW_CHAIN and op.space == ops[mean].space and u not in seen:
                seen.add(u)
                stack.append(u)
            elif op.name == "gather" and op.attr("via") == via:
                differences += [s for s in users[u] if _takes_off(program, s, u, product)]
    shares = [_share(program, users, d, via) for d in differences]
    known = all(s is not None for s in shares) and mean not in program.outputs
    if not (known and all(_multiplies_rows(program, users, d, via) for d in differences)):
        return Readers(bool(differences))
    found = (Centred(d, s, via) for d, s in zip(differences, shares, strict=True) if s is not None)
    return Readers(bool(differences), tuple(found))


def _takes_off(program: Program, value: int, mean: int, product: int) -> bool:
    op = program.ops[value]
    return op.name == "sub" and op.args[1] == mean and _plain(program, op.args[0]) == _plain(program, product)


def _plain(program: Program, value: int) -> int:
    while program.ops[value].name in ("reshape", "cast"):
        (value,) = program.ops[value].args
    return value


def _share(program: Program, users: list[list[int]], difference: int, via: str) -> int | None:
    """The share of a softmax that multiplies the difference, if one does: its weighted mean is 0 then."""
    ops = program.ops
    for u in users[difference]:
        if ops[u].name != "mul" or ops[u].args[0] == ops[u].args[1]:
            continue
        (share,) = (a for a in ops[u].args if a != difference)
        parts = factors(program, share)
        if len(parts) != 2 or {f.power for f in parts} != {1, -1} or ops[share].shape != ops[difference].shape:
            continue
        up, down = sorted(parts, key=lambda f: -f.power)
        read = ops[down.value]
        if read.name != "gather" or read.attr("via") != via:
            continue
        total = ops[read.args[0]]
        if (total.name, total.attr("op"), total.attr("via"), total.args) == ("reduce", "sum", via, (up.value,)):
            return share
    return None


def _multiplies_rows(program: Program, users: list[list[int]], difference: int, via: str) -> bool:
    """Whether a sum by `via` is of rows times what a difference leads to."""
    ops, stack, seen = program.ops, [difference], {difference}
    while stack:
        for u in users[stack.pop()]:
            op = ops[u]
            if op.name == "reduce" and op.attr("via") == via and op.width > ops[difference].width:
                return True
            if u not in seen and op.space == Space.EDGE and op.name != "reduce":
                seen.add(u)
                stack.append(u)
    return False


def subtract_what_is_left(program: Program, found: list[Centred], counts: Counts) -> Program:
    """The program with every difference centred again."""
    if not found:
        return program
    by_value = {c.difference: c for c in found}
    rows: dict[int, int] = {}  # the new difference -> the row's remainder
    plain: dict[int, int] = {}  # the new difference -> the one before
    weighted: dict[int, int] = {}  # the new difference -> the one before times its share
    vias: dict[int, str] = {}
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name == "mul" and op.args[1] in by_value:
            op = replace(op, args=op.args[::-1])
        if op.name == "mul" and op.args[0] in by_value and op.args[1] == by_value[op.args[0]].share:
            # p h - p c and not p (h - c): both products can be had from the loop that sums the one.
            made = new[op.args[0]]
            off = builder.op("gather", rows[made], via=vias[made])
            return builder.op("sub", weighted[made], builder.op("mul", new[op.args[1]], off))
        if index not in by_value:
            return None
        c = by_value[index]
        first = builder.copy(op, args, builder.line)
        times = builder.op("mul", new[c.share], first)
        left = builder.op("reduce", times, via=c.via, op="sum")
        made = builder.op("sub", first, builder.op("gather", left, via=c.via))
        rows[made], plain[made], weighted[made], vias[made] = left, first, times, c.via
        return made

    return cse(_split(rebuild(program, visit, new), rows, plain, vias), counts)


def _split(program: Program, rows: dict[int, int], plain: dict[int, int], vias: dict[int, str]) -> Program:
    """Sums of rows times a centred difference, by its own map: the remainder is taken off after the sum."""
    new: dict[int, int] = {}

    def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name != "reduce" or op.attr("op") != "sum":
            return None
        parts = factors(program, op.args[0])
        centred = [f for f in parts if f.value in rows and f.power == 1]
        if len(centred) != 1 or vias[centred[0].value] != op.attr("via"):
            return None
        (difference,) = centred
        rest = [f for f in parts if f is not difference]
        if not rest or op.width == program.ops[difference.value].width:
            return None

        def total(parts: list[Factor], **attrs: bool) -> int:
            made = [(insert_axes(builder, new[f.value], f.inserts), f.power) for f in parts]
            return builder.op("reduce", multiply(builder, made, op.dtype), via=op.attr("via"), op="sum", **attrs)

        whole = total([*rest, Factor(plain[difference.value], 1, difference.inserts)])
        # The loop that makes the one sum has all that the other needs: nothing is kept from forward for it.
        shares = total(rest, again=True)
        left = insert_axes(builder, new[rows[difference.value]], difference.inserts)
        off = builder.op("mul", left, shares)
        if builder.ops[off].shape != builder.ops[whole].shape:
            return None
        return as_dtype(builder, builder.op("sub", whole, off), op.dtype)

    return rebuild(program, visit, new)
