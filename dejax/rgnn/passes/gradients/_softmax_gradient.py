"""The gradient of a softmax: a difference that cancels, whose two parts must stay consistent.

    ds_e = p_e (g_e - m_v),   m_v = sum over edges into v of p_e g_e,   g_e = y_v . z_e

On paper the sum of ds_e over the edges into v is 0. In floating point that holds, for every rounding of g_e, only while
m_v is the mean of the very scalars g_e. The contracted mean y_v . (sum of p_e z_e) differs from it by some roundings of
|y| |z|. That is more than all of ds_e where one edge has nearly the whole share, or where rows have a large common
part. So the difference from the contracted mean is centred again:

    h_e = g_e - y_v . (sum of p_e z_e),   c_v = sum of p_e h_e,   ds_e = p_e (h_e - c_v)

No traversal has to wait for c_v: sum of ds_e k_e = sum of p_e h_e k_e - c_v (sum of p_e k_e).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import Factor, aligned, as_dtype, factors, insert_axes, multiply, rebuild
from dejax.rgnn.passes.canonical.cse import cse

# Operators on the mean of a segment before edges gather it.
_ROW_CHAIN = ("div", "mul", "reshape", "cast", "select")


@dataclass(frozen=True, slots=True)
class Centred:
    """A difference `g - gather(mean)`, the share `p` that multiplies it, and the map of the mean."""

    difference: int
    share: int
    via: str


@dataclass(frozen=True, slots=True)
class MeanReaders:
    """The readers of a mean over segments.

    Attributes:
      cancels: whether it is subtracted from the scalars that it is the mean of.
      centred: these differences, where each is a softmax's and multiplies rows that are summed by the map of the mean.
        Empty if one of the differences is not, because then the mean must be the mean of the very scalars from which it
        is subtracted.
    """

    cancels: bool
    centred: tuple[Centred, ...] = ()


def mean_readers(program: OpProgram, users: list[list[int]], mean: int, product: int) -> MeanReaders:
    """The readers of the sum `mean` of shares times the inner products `product`."""
    via, differences = program.ops[mean].attr("via"), _differences(program, users, mean, product)
    shares = [_share(program, users, d, via) for d in differences]
    known = all(s is not None for s in shares) and mean not in program.outputs
    if not (known and all(_multiplies_rows(program, users, d, via) for d in differences)):
        return MeanReaders(bool(differences))
    found = (Centred(d, s, via) for d, s in zip(differences, shares, strict=True) if s is not None)
    return MeanReaders(bool(differences), tuple(found))


def _differences(program: OpProgram, users: list[list[int]], mean: int, product: int) -> list[int]:
    """The values of edges from which the mean of their segment is subtracted."""
    ops, found, stack, seen = program.ops, list[int](), [mean], {mean}
    while stack:
        for u in users[stack.pop()]:
            op = ops[u]
            if op.name in _ROW_CHAIN and op.space == ops[mean].space and u not in seen:
                seen.add(u)
                stack.append(u)
            elif op.name == "gather" and op.attr("via") == ops[mean].attr("via"):
                found += [s for s in users[u] if _subtracts(program, s, u, product)]
    return found


def _subtracts(program: OpProgram, value: int, mean: int, product: int) -> bool:
    op = program.ops[value]
    return op.name == "sub" and op.args[1] == mean and _unshaped(program, op.args[0]) == _unshaped(program, product)


def _unshaped(program: OpProgram, value: int) -> int:
    while program.ops[value].name in ("reshape", "cast"):
        (value,) = program.ops[value].args
    return value


def _share(program: OpProgram, users: list[list[int]], difference: int, via: str) -> int | None:
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


def _multiplies_rows(program: OpProgram, users: list[list[int]], difference: int, via: str) -> bool:
    """Whether rows times values made of the difference are summed by `via`."""
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


def centre_differences(program: OpProgram, found: list[Centred], counts: Counts) -> OpProgram:
    """Subtracts the weighted mean from every difference a second time, which removes its rounding error."""
    return cse(_Centring(program, found).run(), counts) if found else program


@dataclass(frozen=True, slots=True)
class _Remainder:
    """The parts of a difference that is centred a second time.

    In this order: the difference before, its product with its share, the sum of these products for each row, and the
    map of the sum.
    """

    plain: int
    weighted: int
    left: int
    via: str


class _Centring:
    def __init__(self, program: OpProgram, found: list[Centred]) -> None:
        self.program, self.by_value = program, {c.difference: c for c in found}
        self.new: dict[int, int] = {}
        self.remainders: dict[int, _Remainder] = {}  # by new difference

    def run(self) -> OpProgram:
        return self.sums_apart(rebuild(self.program, self.visit, self.new))

    def visit(self, builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
        if op.name == "mul" and op.args[1] in self.by_value:
            op = replace(op, args=op.args[::-1])
        if op.name == "mul" and op.args[0] in self.by_value and op.args[1] == self.by_value[op.args[0]].share:
            # p h - p c and not p (h - c): the traversal that sums the one can compute both products.
            r = self.remainders[self.new[op.args[0]]]
            off = builder.op("gather", r.left, via=r.via)
            return builder.op("sub", r.weighted, builder.op("mul", self.new[op.args[1]], off))
        if index not in self.by_value:
            return None
        c = self.by_value[index]
        first = builder.copy(op, args, builder.line)
        weighted = builder.op("mul", self.new[c.share], first)
        left = builder.op("reduce", weighted, via=c.via, op="sum")
        made = builder.op("sub", first, builder.op("gather", left, via=c.via))
        self.remainders[made] = _Remainder(first, weighted, left, c.via)
        return made

    def sums_apart(self, program: OpProgram) -> OpProgram:
        """Sums of rows times a centred difference, by its own map: the remainder is subtracted after the sum."""
        new: dict[int, int] = {}

        def visit(builder: Builder, op: Op, args: tuple[int, ...], index: int) -> int | None:
            if not op.is_sum:
                return None
            parts = factors(program, op.args[0])
            centred = [f for f in parts if f.value in self.remainders and f.power == 1]
            if len(centred) != 1 or self.remainders[centred[0].value].via != op.attr("via"):
                return None
            (difference,) = centred
            rest, r = [f for f in parts if f is not difference], self.remainders[difference.value]
            if not rest or op.width == program.ops[difference.value].width:
                return None

            def total(parts: list[Factor], **attrs: bool) -> int:
                made = multiply(builder, aligned(builder, new, parts), op.dtype)
                return builder.op("reduce", made, via=op.attr("via"), op="sum", **attrs)

            whole = total([*rest, Factor(r.plain, 1, difference.inserts)])
            # Not kept from forward, since the traversal that makes `whole` has all that this sum needs.
            shares = total(rest, recompute=True)
            off = builder.op("mul", insert_axes(builder, new[r.left], difference.inserts), shares)
            if builder.ops[off].shape != builder.ops[whole].shape:
                return None
            return as_dtype(builder, builder.op("sub", whole, off), op.dtype)

        return rebuild(program, visit, new)
