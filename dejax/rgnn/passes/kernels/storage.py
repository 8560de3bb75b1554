"""Which values kernels keep in 16 bits (`dejax.pallas.formats.row_scaled`): wide float32 rows that only kernels read.

Where products round their operands to 10 bits (TF32), rows may be stored with 10 bits. The traversals that read one
such row for each edge then move half the bytes. `linear_in` says for which rows that is safe.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from dejax.pallas.machine import H200
from dejax.rgnn.cost.work import RATES, Counts, Work
from dejax.rgnn.ir.inter import OPERATORS, Op, OpProgram, Space
from dejax.rgnn.ir.intra import Fallback, Gemm, Instance, Kernels, RowProducts, Traversal, WeightGradient
from dejax.rgnn.ir.operators import Linear
from dejax.rgnn.passes.gradients.save import Cut

# Narrower rows share a memory sector anyway.
MIN_WIDTH = 16

_ENCODED_WIDTH = 32
# What a weight gradient of two wide rows saves, compared with another read, where rows come from memory: 3.1 million
# reads of 1.9 million rows 43 us, and their product 68 (a sum with narrow rows 250).
_READ_OF_WEIGHT_GRADIENT = 0.5
_OF_MEMORY = 0.6  # such rows come from memory if they need more than this share of the cache
# A product of rows with this many float32 numbers is bound by their conversion, and counts as several reads. Reading
# 3 million rows of 1.9 million, 256 to 256: 1.47 ms and 0.68 ms for putting them in 16 bits, instead of 2.78 ms.
_WIDE_PRODUCT = 256
_READS_OF_WIDE = 4


@dataclass(frozen=True, slots=True)
class _Carries:
    """How a value depends on a stored row.

    Attributes:
      summed: whether there is a product or a sum between the row and the value.
      part: (axis, start, stop) if the value depends on these features of the row only; None for all.
    """

    summed: bool = False
    part: tuple[int, int, int] | None = None

    def apart(self, other: _Carries) -> bool:
        """Whether the two values depend on different features of the row."""
        if self.part is None or other.part is None or self.part[0] != other.part[0]:
            return False
        return self.part[2] <= other.part[1] or other.part[2] <= self.part[1]


@lru_cache(maxsize=4096)
def linear_in(program: OpProgram, value: int) -> bool:
    """Whether products and sums alone read the rows of a value, so that these may be stored in 16 bits.

    Rounding to 10 bits changes a row by 2^-12 of itself, as a TF32 product does. Products and sums pass that on as it
    is. Other functions may not. The mean of squares less the square of the mean is a small difference of large numbers.
    Where one mean is of rounded rows and the other is not, the rounding is all that is left.

    So up to the first product or sum, a stored row must not be multiplied by itself, subtracted from what is made of
    it, or go through a function that is not linear. What is made of it must not be subtracted from another result of
    the same arguments, either. Nor is it compared with another value than 0: of rows that a maximum was found in, none
    would be equal to it.
    """
    carried = {value: _Carries()}
    before = _ancestors(program, value)
    arguments = {a for a in before if _is_made(program.ops[a])}
    for i in range(value + 1, len(program.ops)):
        op = program.ops[i]
        found = [carried[a] for a in op.args if a in carried]
        if not found or _asks_for_sign(program, op):
            continue
        if not _safe(op, found, carried) or (arguments and _meets(program, i, value, arguments, before)):
            return False
        part = found[0].part
        if op.name == "slice" and op.args[0] == value:
            part = (op.attr("axis"), op.attr("start"), op.attr("stop"))
        elif any(c.part != part for c in found):
            part = None
        carried[i] = _Carries(OPERATORS[op.name].linear is Linear.SUMS or all(c.summed for c in found), part)
    return True


def _asks_for_sign(program: OpProgram, op: Op) -> bool:
    """Whether an operator depends on no more of its argument than its sign, which rounding keeps."""
    others = [program.ops[a] for a in op.args]
    with_zero = len(others) == 1 or any(o.name == "const" and o.attr("value") == 0 for o in others)
    return OPERATORS[op.name].linear is Linear.CONSTANT and with_zero


@lru_cache(maxsize=65536)
def _ancestors(program: OpProgram, value: int) -> frozenset[int]:
    """A value and all values on which it depends."""
    return frozenset({value}).union(*(_ancestors(program, a) for a in program.ops[value].args))


def _is_made(op: Op) -> bool:
    """Whether an operator computes wide rows, and does not just read or move them."""
    moves = OPERATORS[op.name].linear is Linear.MOVES
    return op.width >= MIN_WIDTH and not moves and op.name not in ("input", "const")


def _meets(program: OpProgram, i: int, value: int, arguments: set[int], before: frozenset[int]) -> bool:
    """Whether operator `i` subtracts a value that depends on a stored row from one made of the row's arguments."""
    op = program.ops[i]
    if op.name not in ("add", "sub"):
        return False
    after = frozenset().union(*(_ancestors(program, a) for a in op.args)) - before
    if op.name == "add" and not any(program.ops[a].name in ("neg", "sub") for a in after | {*arguments}):
        return False
    made = [(a, _ancestors(program, a)) for a in op.args]
    others = [a for a, of in made if value not in of and (arguments - {value}) & of]
    return any(_related(program, value, a, b) for a in op.args for b in others)


@lru_cache(maxsize=65536)
def _related(program: OpProgram, value: int, a: int, b: int) -> bool:
    """Whether `a` depends on a value by a path without a product with weights on which `b` does not depend.

    After such a product nothing says that the two would cancel: the gradients by way of the keys and of the values of
    attention, say, which are added up.
    """
    if a == value:
        return True
    op = program.ops[a]
    if value not in _ancestors(program, a):
        return False
    if op.name == "linear":
        shared = _ancestors(program, op.args[1]) & _ancestors(program, b)
        if not any(program.ops[v].name == "input" for v in shared):
            return _related(program, value, op.args[1], b)
    return any(_related(program, value, x, b) for x in op.args)


def _safe(op: Op, found: list[_Carries], carried: dict[int, _Carries]) -> bool:
    """Whether an operator is linear in its arguments that are stored rows, and subtracts none of them from another."""
    rows, linear = [c for c in found if not c.summed], OPERATORS[op.name].linear
    if not rows or linear in (Linear.MOVES, Linear.SAME_FACTOR) or op.name == "add":
        return True
    if op.name == "select":
        return carried.get(op.args[0], _Carries(summed=True)).summed
    if op.name == "sub":
        return len(found) == 1 or found[0].apart(found[1])
    if op.name == "div" and not carried.get(op.args[1], _Carries(summed=True)).summed:
        return False
    if linear not in (Linear.SUMS, Linear.SCALES):
        return False
    return len(rows) == 1 or rows[0].apart(rows[1])


def may_be_given_rounded(kernels: Kernels, position: int) -> bool:
    """Whether an input may be given as row-scaled float16 alone: kernels read it so, and it is safe (`linear_in`)."""
    value = kernels.program.by_position().get(position)
    if value is None:
        return True
    whole = any(value in _needs_whole(instance) for instance in kernels.instances)
    return not whole and linear_in(kernels.program, value)


def _pays(reads: float, rows: int, width: int) -> bool:
    """Whether float32 rows are read so often that converting them to 16 bits first is faster."""
    in_16_bits = Work().move(rows, 6 * width).move(reads, 2 * width).seconds() + RATES.encoding_seconds
    return rows > 0 and in_16_bits <= Work().move(reads, 4 * width).seconds()


def encoded_values(
    kernels: Kernels, num_rows: Callable[[Space], int], row_scaled: frozenset[int] | None = None
) -> frozenset[int]:
    """Values in float32 that are worth putting in 16 bits first, because instances read their rows many times.

    Args:
      kernels: a level-2 program.
      num_rows: rows of each space.
      row_scaled: the values that are in 16 bits already; by default what the kernels write so.
    """
    ops = kernels.program.ops
    row_scaled = kernels.row_scaled if row_scaled is None else row_scaled
    reads = _rounded_reads(kernels, num_rows)
    return frozenset(
        v for v, n in reads.items() if v not in row_scaled and _pays(n, num_rows(ops[v].space), ops[v].width)
    )


def shared_encodings(
    parts: Cut, forward: Kernels, backward: Kernels, num_rows: Callable[[Space], int]
) -> frozenset[int]:
    """Positions of the inputs that forward puts in 16 bits for backward, too: both together read them many times."""
    first, second = _rounded_reads(forward, num_rows), _rounded_reads(backward, num_rows)
    here, there = forward.program.by_position(), backward.program.by_position()
    found = set()
    for number, position in enumerate(parts.needed):
        counts = first.get(here[position], 0), second.get(there[number], 0)
        op = forward.program.ops[here[position]]
        if min(counts) > 0 and _pays(sum(counts), num_rows(op.space), op.width):
            found.add(position)
    return frozenset(found)


def _rounded_reads(kernels: Kernels, num_rows: Callable[[Space], int]) -> dict[int, float]:
    """For each value in wide float32 rows, how many rows are read by instances that may read them rounded.

    A read counts as one where 16 bits save it half of its time: in a weight gradient of rows from memory they save less
    and it counts as less, in products of very wide rows they save more and it counts as several.
    """
    ops = kernels.program.ops
    reads: dict[int, float] = {}
    rows: float
    for instance in kernels.instances:
        if isinstance(instance, Gemm):
            values, rows = [instance.x.value], num_rows(ops[instance.product].space)
            if ops[instance.x.value].width >= _WIDE_PRODUCT:
                rows *= _READS_OF_WIDE
        elif isinstance(instance, WeightGradient):
            values, rows = [instance.x.value, instance.y.value], num_rows(ops[instance.x.name].space)
            x = ops[instance.x.value]
            from_memory = _OF_MEMORY * num_rows(x.space) * 4 * x.width > H200.cache_bytes
            if from_memory and min(ops[v].width for v in values) >= _ENCODED_WIDTH:
                rows *= _READ_OF_WEIGHT_GRADIENT
        elif isinstance(instance, Traversal) and may_round(kernels, instance):
            gathered = [o.value for o in instance.operands if o.access == "gathered"]
            values, rows = [v for v in gathered if linear_in(kernels.program, v)], num_rows(instance.space)
        else:
            continue
        for v in values:
            reads[v] = reads.get(v, 0) + rows
    return {v: n for v, n in reads.items() if ops[v].dtype == "float32" and ops[v].width >= _ENCODED_WIDTH}


def may_round(kernels: Kernels, t: Traversal) -> bool:
    """Whether a traversal may read rows that are rounded to 16 bits.

    The gradient of a softmax compares inner products of rows with each other, so all of these products must be of
    unrounded rows. An inner product with the vector of a type is compared with no other product, so a map over rows may
    take it of rounded rows, as products of rows and matrices are.
    """
    unrounded = ("dot", "sum_features") if t.via is None else ("dot", "sum_features", "linear")
    return not any(kernels.program.ops[i].name in unrounded for i in t.body)


def storage(
    kernels: Kernels, row_scaled_outputs: tuple[int, ...] = (), *, inference: bool = False, counts: Counts | None = None
) -> Kernels:
    """Names the values to store in 16 bits.

    Args:
      kernels: a level-2 program.
      row_scaled_outputs: positions of the program's outputs that may be stored so too; others may not.
      inference: whether no gradients are made of the program. Its inner products are then compared with none of those
        that a gradient would compute, so they may be of rounded rows, as products of matrices are.
      counts: numbers of nodes, edges and types of the graph. For inference on a small graph nothing is stored in 16
        bits, because that would save less than the kernel takes that measures the scales of columns. Training on such a
        graph gains more: its products read these rows again (aifb's HGT takes 154 us, and 174 with rows in float32).
    """
    outputs = {v for i, v in enumerate(kernels.program.outputs) if i not in row_scaled_outputs}
    found: set[int] = set()
    for instance in kernels.instances:
        written = (v for v in _candidates(kernels, instance) if v not in outputs)
        found.update(v for v in written if linear_in(kernels.program, v))
    for instance in kernels.instances:
        found -= _needs_whole(instance)
    if inference and counts is not None and not _pays_measuring(kernels, found, counts):
        return Kernels(kernels.program, kernels.instances)
    rounded: set[int] = set()
    elsewhere: set[int] = set()  # names that a traversal reads for something else
    for t in kernels.instances if inference else ():
        if isinstance(t, Traversal):
            names = _in_inner_products(kernels, t)
            rounded |= names
            elsewhere |= {o.name for o in t.operands} - names
    rounded -= elsewhere
    return Kernels(kernels.program, kernels.instances, frozenset(found), frozenset(rounded))


def _pays_measuring(kernels: Kernels, values: set[int], counts: Counts) -> bool:
    """Whether values in 16 bits save more than it takes to measure the scales of their columns."""
    ops, saved = kernels.program.ops, Work()
    for v in values:
        saved.move(counts.rows(ops[v].space), 2 * ops[v].width)
    for instance in kernels.instances:
        rows = counts.rows(instance.space if isinstance(instance, Traversal) else ops[instance.writes[0]].space)
        for v in values.intersection(instance.reads):
            saved.move(rows, 2 * ops[v].width)
    return saved.seconds() >= RATES.measuring_seconds


def _in_inner_products(kernels: Kernels, t: Traversal) -> set[int]:
    """Operands in wide float32 rows, read by the traversal's row or by type, whose only use is in inner products."""
    ops, users = kernels.program.ops, kernels.program.users()
    body = set(t.body)
    reduced = {v for a in t.accumulators for v in (a.value, *(term.value for term in a.terms))} | set(t.entry_outputs)

    def summed(value: int) -> bool:
        """Whether all that reads a value is a sum over its features, perhaps after products, additions and reshapes."""
        readers = [u for u in users[value] if u in body]
        return (
            bool(readers)
            and value not in reduced
            and all(
                ops[u].name in ("dot", "sum_features") or (ops[u].name in ("mul", "add", "reshape") and summed(u))
                for u in readers
            )
        )

    wide = [o for o in t.operands if ops[o.name].dtype == "float32" and ops[o.name].width >= _ENCODED_WIDTH]
    read = [o for o in wide if o.access == "row" or (o.access == "gathered" and ops[o.value].space == Space.EDGE_TYPE)]
    return {o.name for o in read if o.part is None and summed(o.name)}


def _candidates(kernels: Kernels, instance: Instance) -> list[int]:
    ops = kernels.program.ops
    written: tuple[int, ...] = ()
    if isinstance(instance, Gemm):
        written = (instance.out,)
    elif isinstance(instance, Traversal) and instance.via is None:
        written = instance.entry_outputs  # which it uses itself as it writes them
    elif isinstance(instance, Traversal):
        # What the epilogue uses again must be what was written.
        used = {a for i in instance.epilogue for a in ops[i].args}
        written = tuple(v for v in instance.row_outputs if v not in used)
    return [v for v in written if ops[v].dtype == "float32" and ops[v].width >= MIN_WIDTH]


def _needs_whole(instance: Instance) -> set[int]:
    """Values that the instance must read in float32, because it cannot read them as `RowScaled`."""
    if isinstance(instance, Gemm):
        return set(instance.reads) - {instance.x.value}
    if isinstance(instance, WeightGradient):
        return set()
    if isinstance(instance, Traversal):
        return {o.value for o in instance.operands if o.access == "shared"}
    assert isinstance(instance, Fallback | RowProducts)
    return set(instance.reads)
