"""Which values and sums of a traversal are linear in an operand: the operand times other values, feature by feature.

If each feature of the operand has a factor, such as a power of two, a linear value may be computed without the factor.
The factor multiplies the sum afterwards, or another operand whose inner product with the value is taken.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from dejax.rgnn.ir.inter import Op, OpProgram
from dejax.rgnn.ir.intra import Accumulator, Traversal
from dejax.rgnn.ir.templates import ONCE_A_SEGMENT

# Sides by which a value must be narrower than another for products with it to leave the features apart.
_NARROWER = 4


@dataclass(frozen=True, slots=True)
class WithoutFactors:
    """What is computed without the factors of operands.

    Attributes:
      values: value -> name of the operand whose factors it lacks; the operands, too.
      sums: result of an accumulator -> name of the operand by whose factors it is multiplied after the traversal.
      rows: (value, name of an operand that is read once for each segment): the value's factors multiply that operand
        instead, once for each segment.
      used: names of operands whose factors are used in the traversal.
    """

    values: dict[int, int]
    sums: dict[int, int]
    rows: dict[tuple[int, int], int]
    used: frozenset[int]


def without_factors(program: OpProgram, traversal: Traversal, names: Collection[int]) -> WithoutFactors:
    """Leaves factors out as far as they can be.

    Args:
      program: the level-1 program.
      traversal: the instance.
      names: operands with a factor for each feature.
    """
    values = {o.name: o.name for o in traversal.operands if o.name in names and o.access not in ONCE_A_SEGMENT}
    of_segments = {o.name for o in traversal.operands if o.access in ("row", "row_indexed")}
    rows: dict[tuple[int, int], int] = {}
    read = set(traversal.entry_outputs)
    for i in traversal.body:
        found = [a for a in program.ops[i].args if a in values]
        if len(found) == 1 and _passes(program, program.ops[i], found[0]):
            values[i] = values[found[0]]
        elif (
            len(found) == 1 and (other := _segment_operand(program, program.ops[i], found[0], of_segments)) is not None
        ):
            rows[i, other] = values[found[0]]
        else:
            read.update(found)
    sums: dict[int, int] = {}
    for a in traversal.accumulators:
        summand = _summand(a, values)
        if summand is not None and _features(program, summand) == _features(program, a.out):
            sums[a.out] = values[summand]
        else:
            read.update((a.value, *(t.value for t in a.terms)))
    return WithoutFactors(values, sums, rows, frozenset(values[v] for v in read if v in values))


def _segment_operand(program: OpProgram, op: Op, arg: int, of_segments: Collection[int]) -> int | None:
    """The operand of segments, as wide as `arg`, by which an operator multiplies `arg`; None where there is none."""
    others = [a for a in op.args if a != arg]
    if op.name not in ("mul", "dot") or len(others) != 1 or others[0] not in of_segments:
        return None
    return others[0] if program.ops[others[0]].shape == program.ops[arg].shape else None


def _features(program: OpProgram, value: int) -> tuple[int, ...]:
    """The feature shape without axes of size 1."""
    return tuple(s for s in program.ops[value].shape if s != 1)


def _passes(program: OpProgram, op: Op, arg: int) -> bool:
    """Whether each feature of the result is the argument's times what does not depend on it."""
    if op.name not in ("neg", "reshape", "mul", "div") or (op.name == "div" and op.args[0] != arg):
        return False
    others = [a for a in op.args if a != arg]
    narrow = all(program.ops[a].width * _NARROWER <= op.width for a in others)
    return narrow and tuple(s for s in op.shape if s != 1) == _features(program, arg)


def _summand(a: Accumulator, values: Collection[int]) -> int | None:
    """The one value that an accumulator adds up with weights."""
    if a.kind == "sum":
        return a.value if a.value in values else None
    found = [t for t in a.terms if t.value in values]
    if a.kind != "weighted" or a.value in values or len(found) != 1 or found[0].power < 0:
        return None
    return found[0].value
