"""Fusion, second half: reductions and the elementwise work around them become instances of the traversal template.

- Reductions over the same segments share one traversal where neither needs the other's result. A maximum, the sum of
  exp(score - maximum) and sums weighted by it are one pass with a running maximum.
- Elementwise operators that lead to a reduction are computed in registers, again in every traversal that needs them.
  Inner products that several traversals need are computed and stored once (`_share_scalars.py`).
- Operators on the reduced rows become the epilogue of the traversal.
- Traversals without a reduction compute rows of nodes that other traversals gather (`_node_maps.py`).
"""

from __future__ import annotations

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import ROWWISE, VIAS, Op, Space
from dejax.rgnn.ir.intra import Accumulator, Kernels, Term, Traversal
from dejax.rgnn.ir.templates import can_weigh, refusal
from dejax.rgnn.passes._rewrite import factors
from dejax.rgnn.passes.kernels._node_maps import add_node_maps
from dejax.rgnn.passes.kernels._share_scalars import share_scalars
from dejax.rgnn.passes.kernels._traversal_plans import ENTRY_SPACES, NARROWER, Fusion, TraversalPlan

# Operators that may stand between exp(score - maximum) and a weighted sum.
_WEIGHT_OPS = ("exp", "mul", "div", "reshape", "cast")


def fuse_traversal(kernels: Kernels, counts: Counts, *, sharing: bool = True, row_scaled: bool = False) -> Kernels:
    """Adds the traversals.

    Args:
      kernels: a level-2 program.
      counts: numbers of nodes, edges and types of the graph.
      sharing: one traversal may store per-edge scalars for others (`_share_scalars.py`).
      row_scaled: rows that a traversal writes may be stored as row-scaled float16, so that a copy may pay.
    """
    fusion = Fusion(kernels, counts, row_scaled)
    for share in (True, False) if sharing else (False,):
        for epilogues_first in (True, False):
            _plan(fusion, share, epilogues_first)
            if fusion.acyclic():
                return _finished(fusion)
    while not fusion.acyclic():  # XLA computes what is left over
        fusion.traversals.pop()
    return _finished(fusion)


def _plan(fusion: Fusion, share: bool, epilogues_first: bool) -> None:
    """Makes the traversals.

    With epilogues first, traversals store fewer values of entries. But then an epilogue may need a value that only a
    later traversal can store, and the plan has a cycle.
    """
    fusion.traversals = []
    for i, op in enumerate(fusion.program.ops):
        reduces = op.name == "reduce" and op.attr("via") != "all" and op.attr("op") in ("sum", "max")
        if reduces and i not in fusion.written | fusion.refused:
            _place(fusion, i, op)
    if share:
        share_scalars(fusion)
    steps = (_add_epilogues, _store_entries)
    for step in steps if epilogues_first else reversed(steps):
        step(fusion)
    add_node_maps(fusion)


def _finished(fusion: Fusion) -> Kernels:
    made = [_traversal(fusion, traversal) for traversal in fusion.traversals]
    return Kernels(fusion.program, (*fusion.kernels.instances, *made))


# --- reductions ------------------------------------------------------------------------------------------------------


def _place(fusion: Fusion, i: int, op: Op) -> None:
    """Adds a reduction to the latest traversal of the same segments that can take it, or to a new traversal."""
    via, plain = op.attr("via"), Accumulator(op.attr("op"), i, op.args[0])
    for traversal in reversed(fusion.traversals):
        if traversal.via != via:
            continue
        accumulator = _weighted(fusion, i, op, traversal) or _ties(fusion, i, op, traversal) or plain
        fits = accumulator.kind in ("weighted", "ties") or _share_operands(fusion, accumulator, traversal)
        if fits and fusion.extend(traversal.accumulators, [accumulator]):
            return
    space = fusion.program.ops[op.args[0]].space
    fusion.traversals.append(TraversalPlan(via, space, [plain]))


def _share_operands(fusion: Fusion, accumulator: Accumulator, traversal: TraversalPlan) -> bool:
    """Whether a reduction loads an array that the traversal loads already."""
    ops = fusion.program.ops
    mine, theirs = (fusion.cone(roots, set())[1] for roots in (list(accumulator.reads), traversal.roots))
    return not {ops[v].args or v for v in mine}.isdisjoint(ops[v].args or v for v in theirs)


def _weighted(fusion: Fusion, i: int, op: Op, traversal: TraversalPlan) -> Accumulator | None:
    """The reduction as a sum weighted by exp(score - largest score), if the traversal has that largest score."""
    if op.attr("op") != "sum":
        return None
    ops, found = fusion.program.ops, factors(fusion.program, op.args[0])
    for at, factor in enumerate(found):
        exp = ops[factor.value]
        shifted = ops[exp.args[0]] if exp.name == "exp" else None
        if factor.power != 1 or shifted is None or shifted.name != "sub":
            continue
        score, largest = shifted.args
        read = ops[largest]
        if read.name != "gather" or read.attr("via") != traversal.via:
            continue
        for number, a in enumerate(traversal.accumulators):
            same = a.kind == "max" and a.out == read.args[0] and a.value == score
            if same and can_weigh(ops[score].shape, factor.inserts, op.shape):
                rest = tuple(Term(f.value, f.power, f.inserts) for j, f in enumerate(found) if j != at)
                return Accumulator("weighted", i, score, rest, number, factor.inserts)
    return None


def _ties(fusion: Fusion, i: int, op: Op, traversal: TraversalPlan) -> Accumulator | None:
    """The reduction as the number of entries that have the largest score, if the traversal has that largest score.

    The gradient of a maximum is shared among them.
    """
    ops = fusion.program.ops
    equal = ops[op.args[0]]
    if op.attr("op") != "sum" or equal.name != "eq" or not fusion.in_registers(op.args[0]):
        return None
    for score, read in (equal.args, equal.args[::-1]):
        if ops[read].name != "gather" or ops[read].attr("via") != traversal.via:
            continue
        for number, a in enumerate(traversal.accumulators):
            if a.kind == "max" and (a.out, a.value) == (ops[read].args[0], score) and ops[a.out].shape == op.shape:
                return Accumulator("ties", i, score, score=number)
    return None


# --- values of entries that are stored -------------------------------------------------------------------------------


def _store_entries(fusion: Fusion) -> None:
    """Has each value of entries that is needed as an array stored: by a traversal that computes it, or by a new one."""
    ops = fusion.program.ops
    demanded = (v for v in fusion.must_be_arrays() if ops[v].space in ENTRY_SPACES and fusion.in_registers(v))
    done = {v for traversal in fusion.traversals for v in traversal.results}
    for value in sorted({*_needed_by_several(fusion), *demanded} - done):
        if ops[value].name == "const":
            continue
        able = [o for o in fusion.traversals if o.space == ops[value].space and fusion.computes(o, value)]
        able.sort(key=lambda traversal: _extra_width(fusion, traversal, value))
        if not any(fusion.extend(traversal.stored, [value]) for traversal in able):
            _store_alone(fusion, value)


def _store_alone(fusion: Fusion, value: int) -> None:
    """Adds a traversal that only stores a value of entries.

    Others may load that value, or what XLA computes from it, and store what this one needs: then it stores that itself.
    """
    alone = TraversalPlan(None, fusion.program.ops[value].space, stored=[value])
    fusion.traversals.append(alone)
    while not fusion.acyclic():
        needed = fusion.cone(alone.stored, fusion.stored_elsewhere(alone))[1]
        owners = {v: other for other in fusion.traversals if other is not alone for v in other.stored if v in needed}
        if not owners:
            return
        for v, other in owners.items():
            other.stored.remove(v)
        alone.stored = sorted([*owners, *alone.stored])
    fusion.traversals = [t for t in fusion.traversals if t.results]


def _extra_width(fusion: Fusion, traversal: TraversalPlan, value: int) -> int:
    """Elements that a traversal loads for each entry only because it computes the value."""
    ops = fusion.program.ops
    without = fusion.cone(traversal.roots, {value})[1]
    loaded = fusion.cone([*traversal.roots, value], set())[1]
    return sum(ops[v].width for v in loaded if v not in without and ops[v].attr("via") != traversal.via)


def _needed_by_several(fusion: Fusion) -> list[int]:
    """Inner products that several traversals compute, if at least one of them loads rows for this product only."""
    uses: dict[int, list[TraversalPlan]] = {}
    for traversal in fusion.traversals:
        for v in fusion.cone(traversal.computed, fusion.stored_elsewhere(traversal))[0]:
            uses.setdefault(v, []).append(traversal)
    shared = ((v, traversals) for v, traversals in uses.items() if len(traversals) > 1 and fusion.narrows(v))
    return [v for v, traversals in shared if not all(fusion.has_operands_of(v, traversal) for traversal in traversals)]


# --- epilogues -------------------------------------------------------------------------------------------------------


def _add_epilogues(fusion: Fusion) -> None:
    for traversal in fusion.traversals:
        if traversal.via is not None:
            _add_epilogue(fusion, traversal, VIAS[traversal.via].coarse)


def _add_epilogue(fusion: Fusion, traversal: TraversalPlan, rows: Space) -> None:
    """Moves the elementwise operators that follow on the reduced rows into the traversal's epilogue."""
    if rows in (Space.EDGE_TYPE, Space.NODE_TYPE):  # a handful of rows: XLA fuses these with what follows
        return
    taken = {v for other in fusion.traversals for v in other.results}
    for i, op in enumerate(fusion.program.ops):
        mine = {a.out for a in traversal.accumulators} | set(traversal.epilogue)
        if op.space != rows or i in taken or not mine.intersection(op.args):
            continue
        if _concatenates(fusion, op, mine) or _computable(fusion, i, op, mine):
            fusion.extend(traversal.epilogue, [i])


def _computable(fusion: Fusion, value: int, op: Op, mine: set[int]) -> bool:
    """Whether an operator can be computed on the rows of a traversal that has the results `mine`."""
    ops = fusion.program.ops
    if not fusion.in_registers(value) or any(ops[a].name == "concat" for a in op.args):
        return False
    vector = op.name == "linear"  # times a vector of its type, which is read by the row's type
    if vector and (op.args[0] not in mine or op.attr("via") == "all" or not _stays_on_row(fusion, value)):
        return False
    given = () if vector else tuple(a for a in op.args if a not in mine)
    if fusion.depends_on(given, mine):  # an array made from this traversal's results
        return False
    outside = [ops[a] for a in given]
    return not any((a.name == "gather" and a.attr("via") != "all") or a.width > NARROWER * op.width for a in outside)


def _concatenates(fusion: Fusion, op: Op, mine: set[int]) -> bool:
    """Whether an operator only concatenates rows of the traversal, of one shape, along the first of two axes."""
    ops = fusion.program.ops
    side_by_side = op.name == "concat" and op.attr("axis") == 0 and len(op.shape) == 2
    if not side_by_side or not mine.issuperset(op.args) or refusal(op) is not None:
        return False
    return len({ops[a].shape for a in op.args}) == 1 and not any(ops[a].name == "concat" for a in op.args)


def _stays_on_row(fusion: Fusion, value: int) -> bool:
    """Whether only elementwise operators on the same rows read the value, so that it need not be written to memory."""
    ops = fusion.program.ops
    readers = [ops[u] for u in fusion.users[value]]
    return all(u.name in ROWWISE and u.space == ops[value].space for u in readers)


# --- instances -------------------------------------------------------------------------------------------------------


def _traversal(fusion: Fusion, traversal: TraversalPlan) -> Traversal:
    program = fusion.program
    body, operands = fusion.operands(traversal)
    operands = [*operands, *fusion.epilogue_operands(traversal)]
    produced = sorted(traversal.sums) + traversal.epilogue
    return Traversal(
        via=traversal.via,
        space=traversal.space,
        operands=tuple({(o.name, o.access, o.via): o for o in operands}.values()),
        body=tuple(body),
        accumulators=tuple(traversal.accumulators),
        epilogue=tuple(traversal.epilogue),
        entry_outputs=tuple(traversal.stored),
        row_outputs=tuple(v for v in produced if v in program.outputs or _read_outside(fusion, v, traversal)),
    )


def _read_outside(fusion: Fusion, value: int, traversal: TraversalPlan) -> bool:
    """Whether anything but the traversal itself needs a reduced row."""
    ops = fusion.program.ops
    for u in fusion.users[value]:
        gathered = ops[u].name == "gather" and ops[u].attr("via") == traversal.via and u not in fusion.program.outputs
        of_softmax = gathered and all(_only_in_weighted_sums(fusion, w, traversal, u) for w in fusion.users[u])
        if u not in traversal.epilogue and not of_softmax:
            return True
    return False


def _only_in_weighted_sums(fusion: Fusion, value: int, traversal: TraversalPlan, read: int) -> bool:
    """Whether the value is score - largest score, which only this traversal's weighted sums use."""
    ops, outputs = fusion.program.ops, fusion.program.outputs
    weighted = {a.out: a.value for a in traversal.accumulators if a.kind == "weighted"}
    op = ops[value]
    if op.name != "sub" or op.args[1] != read or op.args[0] not in weighted.values():
        return False

    def ends(v: int) -> bool:
        users = fusion.users[v]
        known = bool(users) and v not in outputs
        return known and all(u in weighted or (ops[u].name in _WEIGHT_OPS and ends(u)) for u in users)

    return ends(value)
