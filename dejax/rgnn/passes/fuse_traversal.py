"""Fusion, second half: reductions and the elementwise work around them become instances of the traversal template.

- Reductions over the same segments share one loop where neither needs the other's result. A maximum, the sum of
  exp(score - maximum) and sums weighted by it are one pass with a running maximum.
- Elementwise operators that lead to a reduction are computed in registers, again in every loop that needs them. Inner
  products that several loops need are computed and stored once (`_share_scalars.py`, `_share_inner_products.py`).
- Operators on the reduced rows become the epilogue of the loop.
- Sums over a node's source pairs and destination pairs are one instance (`_fuse_pair_sums.py`).
- Loops without a reduction compute rows of nodes that other loops gather (`_node_maps.py`).
"""

from __future__ import annotations

from dataclasses import replace

from dejax.rgnn.ir.inter import ROWWISE, VIAS, Op, Space
from dejax.rgnn.ir.intra import (
    Accumulator,
    Kernels,
    Operand,
    Term,
    Traversal,
    access_operand,
    as_part,
    can_weigh,
    refusal,
)
from dejax.rgnn.passes._fuse_pair_sums import fuse_pair_sums
from dejax.rgnn.passes._loops import ENTRY_SPACES, NARROWER, Fusion, Loop
from dejax.rgnn.passes._node_maps import add_node_maps, skip_unreached_rows
from dejax.rgnn.passes._rewrite import Counts, factors
from dejax.rgnn.passes._share_inner_products import products_to_share, store_common_summands
from dejax.rgnn.passes._share_scalars import share_scalars

# Operators that may stand between exp(score - maximum) and a weighted sum.
_WEIGHT_OPS = ("exp", "mul", "div", "reshape", "cast")


def fuse_traversal(kernels: Kernels, counts: Counts, *, sharing: bool = True, half: bool = False) -> Kernels:
    """Adds the traversals.

    Args:
      kernels: a level-2 program.
      counts: of the graph.
      sharing: one loop may store per-edge scalars for others (`_share_scalars.py`).
      half: rows that a traversal writes may be stored as row-scaled float16, so that a copy may pay.
    """
    fusion = Fusion(kernels, counts, half)
    for share in (True, False) if sharing else (False,):
        for epilogues_first in (True, False):
            _plan(fusion, share, epilogues_first)
            if fusion.acyclic():
                return _finished(fusion)
    return _finished(fusion)


def _plan(fusion: Fusion, share: bool, epilogues_first: bool) -> None:
    """Makes the loops.

    With epilogues first, loops store fewer values of entries. But then an epilogue may need a value that only a later
    loop can store, and the plan has a cycle.
    """
    fusion.loops = []
    fusion.shared_products = products_to_share(fusion)
    for i, op in enumerate(fusion.program.ops):
        reduces = op.name == "reduce" and op.attr("via") != "all" and op.attr("op") in ("sum", "max")
        if reduces and i not in fusion.written | fusion.refused:
            _place(fusion, i, op)
    if fusion.shared_products:
        store_common_summands(fusion)
    if share:
        share_scalars(fusion)
    steps = (_add_epilogues, _store_entries)
    for step in steps if epilogues_first else reversed(steps):
        step(fusion)
    add_node_maps(fusion)


def _finished(fusion: Fusion) -> Kernels:
    fuse_pair_sums(fusion)
    made = [_traversal(fusion, loop) for loop in fusion.loops]
    return Kernels(fusion.program, (*fusion.kernels.instances, *made))


# --- reductions ------------------------------------------------------------------------------------------------------


def _place(fusion: Fusion, i: int, op: Op) -> None:
    """Adds a reduction to the latest loop over the same segments that can take it, or to a new loop."""
    via, plain = op.attr("via"), Accumulator(op.attr("op"), i, op.args[0])
    for loop in reversed(fusion.loops):
        if loop.via != via:
            continue
        accumulator = _weighted(fusion, i, op, loop) or plain
        fits = accumulator.kind == "weighted" or _share_operands(fusion, accumulator, loop)
        if fits and fusion.extend(loop.accumulators, [accumulator]):
            return
    space = fusion.program.ops[op.args[0]].space
    fusion.loops.append(Loop(via, space, [plain], stored=fusion.shared_products.get(i, [])))


def _share_operands(fusion: Fusion, accumulator: Accumulator, loop: Loop) -> bool:
    """Whether a reduction loads an array that the loop loads already."""
    ops = fusion.program.ops
    mine, theirs = (fusion.cone(roots, set())[1] for roots in (list(accumulator.reads), loop.roots))
    return not {ops[v].args or v for v in mine}.isdisjoint(ops[v].args or v for v in theirs)


def _weighted(fusion: Fusion, i: int, op: Op, loop: Loop) -> Accumulator | None:
    """The reduction as a sum weighted by exp(score - largest score), if the loop has that largest score."""
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
        if read.name != "gather" or read.attr("via") != loop.via:
            continue
        for number, a in enumerate(loop.accumulators):
            same = a.kind == "max" and a.out == read.args[0] and a.value == score
            if same and can_weigh(ops[score].shape, factor.inserts, op.shape):
                rest = tuple(Term(f.value, f.power, f.inserts) for j, f in enumerate(found) if j != at)
                return Accumulator("weighted", i, score, rest, number, factor.inserts)
    return None


# --- values of entries that are stored -------------------------------------------------------------------------------


def _store_entries(fusion: Fusion) -> None:
    """Values of entries that must be arrays are stored by a loop that computes them, or by a loop of their own."""
    ops = fusion.program.ops
    demanded = (v for v in fusion.must_be_arrays() if ops[v].space in ENTRY_SPACES and fusion.in_registers(v))
    done = {v for loop in fusion.loops for v in loop.results}
    for value in sorted({*_needed_by_several(fusion), *demanded} - done):
        if ops[value].name == "const":
            continue
        able = [o for o in fusion.loops if o.space == ops[value].space and fusion.computes(o, value)]
        able.sort(key=lambda loop: _extra_width(fusion, loop, value))
        if not any(fusion.extend(loop.stored, [value]) for loop in able):
            fusion.loops.append(Loop(None, ops[value].space, stored=[value]))


def _extra_width(fusion: Fusion, loop: Loop, value: int) -> int:
    """Elements that a loop loads for each entry only because it computes the value."""
    ops = fusion.program.ops
    without = fusion.cone(loop.roots, {value})[1]
    loaded = fusion.cone([*loop.roots, value], set())[1]
    return sum(ops[v].width for v in loaded if v not in without and ops[v].attr("via") != loop.via)


def _needed_by_several(fusion: Fusion) -> list[int]:
    """Inner products that several loops compute, at least one of which loads rows only for that."""
    uses: dict[int, list[Loop]] = {}
    for loop in fusion.loops:
        for v in fusion.cone(loop.computed, fusion.stored_elsewhere(loop))[0]:
            uses.setdefault(v, []).append(loop)
    shared = ((v, loops) for v, loops in uses.items() if len(loops) > 1 and fusion.narrows(v))
    return [v for v, loops in shared if not all(fusion.has_operands_of(v, loop) for loop in loops)]


# --- epilogues -------------------------------------------------------------------------------------------------------


def _add_epilogues(fusion: Fusion) -> None:
    for loop in fusion.loops:
        if loop.via is not None:
            _add_epilogue(fusion, loop, VIAS[loop.via].coarse)


def _add_epilogue(fusion: Fusion, loop: Loop, rows: Space) -> None:
    """Moves the elementwise operators that follow on the reduced rows into the loop's epilogue."""
    if rows in (Space.EDGE_TYPE, Space.NODE_TYPE):  # a handful of rows: XLA fuses these with what follows
        return
    taken = {v for other in fusion.loops for v in other.results}
    for i, op in enumerate(fusion.program.ops):
        mine = {a.out for a in loop.accumulators} | set(loop.epilogue)
        if op.space != rows or i in taken or not mine.intersection(op.args):
            continue
        if _concatenates(fusion, op, mine) or _computable(fusion, i, op, mine):
            fusion.extend(loop.epilogue, [i])


def _computable(fusion: Fusion, value: int, op: Op, mine: set[int]) -> bool:
    """Whether an operator can be computed on the rows of a loop that has the results `mine`."""
    ops = fusion.program.ops
    if not fusion.in_registers(value) or any(ops[a].name == "concat" for a in op.args):
        return False
    vector = op.name == "linear"  # times a vector of its type, which is read by the row's type
    if vector and (op.args[0] not in mine or op.attr("via") == "all" or not _stays_on_row(fusion, value)):
        return False
    # A loop of scalars writes no rows: the next loop can compute them of the scalars.
    if vector and fusion.shared_products and all(ops[v].width < op.width for v in mine):
        return False
    given = () if vector else tuple(a for a in op.args if a not in mine)
    if fusion.depends_on(given, mine):  # an array made from this loop's results
        return False
    outside = [ops[a] for a in given]
    return not any((a.name == "gather" and a.attr("via") != "all") or a.width > NARROWER * op.width for a in outside)


def _concatenates(fusion: Fusion, op: Op, mine: set[int]) -> bool:
    """Whether an operator only concatenates rows of the loop, of one shape, along the first of two axes."""
    ops = fusion.program.ops
    side_by_side = op.name == "concat" and op.attr("axis") == 0 and len(op.shape) == 2
    if not side_by_side or not mine.issuperset(op.args) or refusal(op) is not None:
        return False
    return len({ops[a].shape for a in op.args}) == 1 and not any(ops[a].name == "concat" for a in op.args)


def _stays_on_row(fusion: Fusion, value: int) -> bool:
    """Whether only elementwise operators of its rows read the value, so that it need not be written for others."""
    ops = fusion.program.ops
    readers = [ops[u] for u in fusion.users[value]]
    return all(u.name in ROWWISE and u.space == ops[value].space for u in readers)


# --- instances -------------------------------------------------------------------------------------------------------


def _traversal(fusion: Fusion, loop: Loop) -> Traversal:
    program = fusion.program
    elsewhere = {v for other in fusion.loops if other is not loop for v in (*other.stored, *other.epilogue)}
    body, operands = fusion.operands(loop, elsewhere)
    operands = [*skip_unreached_rows(fusion, loop, operands), *_epilogue_operands(fusion, loop)]
    # The sums alongside go to the epilogue, and are not written themselves.
    alongside = None if loop.alongside is None else replace(_traversal(fusion, loop.alongside), row_outputs=())
    produced = sorted(loop.sums) + loop.epilogue
    return Traversal(
        via=loop.via,
        space=loop.space,
        operands=tuple({(o.name, o.access, o.via): o for o in operands}.values()),
        body=tuple(body),
        accumulators=tuple(loop.accumulators),
        epilogue=tuple(loop.epilogue),
        item_outputs=tuple(loop.stored),
        row_outputs=tuple(v for v in produced if v in program.outputs or _read_outside(fusion, v, loop)),
        beside=alongside,
    )


def _epilogue_operands(fusion: Fusion, loop: Loop) -> list[Operand]:
    ops, operands = fusion.program.ops, list[Operand]()
    inside = loop.sums | set(loop.epilogue)
    for op in (ops[i] for i in loop.epilogue):
        if op.name == "linear":
            operands.append(Operand(op.args[1], op.args[1], "row_indexed", op.attr("via")))
            continue
        outside = [a for a in op.args if a not in inside and ops[a].name != "const"]
        operands += [_row_operand(fusion, a, loop.via) for a in outside]
    return operands


def _row_operand(fusion: Fusion, value: int, via: str | None) -> Operand:
    """How an epilogue reads a value of the row."""
    operand = access_operand(fusion.program, value)
    return operand if operand.access == "shared" else as_part(fusion.program, Operand(value, value, "row", via))


def _read_outside(fusion: Fusion, value: int, loop: Loop) -> bool:
    """Whether anything but the loop itself needs a reduced row."""
    ops = fusion.program.ops
    for u in fusion.users[value]:
        gathered = ops[u].name == "gather" and ops[u].attr("via") == loop.via and u not in fusion.program.outputs
        of_softmax = gathered and all(_only_in_weighted_sums(fusion, w, loop, u) for w in fusion.users[u])
        if u not in loop.epilogue and not of_softmax:
            return True
    return False


def _only_in_weighted_sums(fusion: Fusion, value: int, loop: Loop, read: int) -> bool:
    """Whether the value is score - largest score, which only this loop's weighted sums use."""
    ops, outputs = fusion.program.ops, fusion.program.outputs
    weighted = {a.out: a.value for a in loop.accumulators if a.kind == "weighted"}
    op = ops[value]
    if op.name != "sub" or op.args[1] != read or op.args[0] not in weighted.values():
        return False

    def ends(v: int) -> bool:
        users = fusion.users[v]
        known = bool(users) and v not in outputs
        return known and all(u in weighted or (ops[u].name in _WEIGHT_OPS and ends(u)) for u in users)

    return ends(value)
