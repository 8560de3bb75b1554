"""Several traversals of the same edges need the same per-edge scalars: one traversal stores them, the others load them.

Backward of attention multiplies rows by two scalars of each edge, the share and the gradient of its score, in a
traversal over destinations and in a traversal of sources. Both scalars are made of inner products of rows. The
traversal that loads fewer rows computes and stores them (the writer); the other (the reader) then only multiplies and
sums, and needs registers neither for the inner products nor for their rows.
"""

from __future__ import annotations

from dejax.rgnn.ir.intra import access_operand, as_part
from dejax.rgnn.ir.templates import ONCE_A_SEGMENT
from dejax.rgnn.passes.kernels._traversal_plans import NARROWER, Fusion, TraversalPlan

# A traversal over destinations is the writer even if it holds up to this many times as many elements.
_DESTINATION = 1.5


def share_scalars(fusion: Fusion) -> None:
    """Chooses writers and readers: first the writer that holds the fewest elements in registers.

    A traversal over destinations may hold more (`_DESTINATION`). It reads the scalars of nodes that shares and
    gradients of scores are made of once for each row; another traversal takes a sector of memory for them at each edge.
    """
    found = []
    for reader in fusion.traversals:
        scalars = _multipliers(fusion, reader)
        if scalars:
            found += [
                (
                    _held(fusion, traversal, scalars) / (_DESTINATION if traversal.via == "dst" else 1),
                    traversal,
                    reader,
                    scalars,
                )
                for traversal in fusion.traversals
            ]
    writers: list[TraversalPlan] = []
    readers: list[TraversalPlan] = []
    apart: set[frozenset[int]] = set()  # traversals that each compute the scalars
    for _, writer, reader, scalars in sorted(found, key=lambda f: f[0]):
        if writer is reader or writer in readers or reader in (*readers, *writers):
            continue
        scalars = _before_sums(fusion, writer, scalars)
        ends = frozenset((id(writer), id(reader)))
        if writer.via == "dst" and _has_all_rows(fusion, reader, scalars):
            apart.add(ends)
        if ends in apart:
            continue
        if writer.space != reader.space or not _pays(fusion, writer, reader, scalars):
            continue
        if fusion.extend(writer.stored, [v for v in scalars if v not in writer.stored]):
            writers.append(writer)
            readers.append(reader)


def _multipliers(fusion: Fusion, traversal: TraversalPlan) -> list[int]:
    """Per-edge scalars that a traversal sums, or by which it multiplies rows, if one depends on an inner product."""
    ops = fusion.program.ops
    if traversal.via is None or any(a.kind != "sum" for a in traversal.accumulators):
        return []
    found: dict[int, None] = {}

    def visit(value: int, width: int) -> None:
        op = ops[value]
        if op.width * NARROWER <= max(width, _widest_ancestor(fusion, value)):
            found[value] = None
        elif op.name in ("mul", "div", "add", "sub") and fusion.in_registers(value):
            for a in op.args:
                visit(a, max(width, op.width))
        elif op.name in ("reshape", "cast") and fusion.in_registers(value):
            visit(op.args[0], width)

    for a in traversal.accumulators:
        visit(a.value, 0)
    scalars = list(dict.fromkeys(_unrounded(fusion, v) for v in found))
    scalars = [v for v in scalars if _is_computed(fusion, v)]
    return scalars if any(fusion.narrows(v) for v in fusion.cone(scalars, set())[0]) else []


def _widest_ancestor(fusion: Fusion, value: int) -> int:
    """The width of the widest value that must be computed or loaded to compute this value."""
    return max(fusion.program.ops[v].width for part in fusion.cone([value], set()) for v in part)


def _is_computed(fusion: Fusion, value: int) -> bool:
    return fusion.program.ops[value].name != "const" and bool(fusion.cone([value], set())[0])


def _before_sums(fusion: Fusion, writer: TraversalPlan, scalars: list[int]) -> list[int]:
    """The scalars that do not depend on the writer's sums, and the operands from which readers compute the others."""
    ops, found = fusion.program.ops, dict[int, None]()

    def visit(value: int) -> None:
        if not fusion.depends_on((value,), writer.sums):
            if _is_computed(fusion, value):
                found[value] = None
        elif fusion.in_registers(value):
            for a in ops[value].args:
                visit(a)

    for value in scalars:
        visit(value)
    return list(found)


def _unrounded(fusion: Fusion, value: int) -> int:
    """The value before reshapes, and before it is rounded: memory keeps all of its digits."""
    ops = fusion.program.ops
    while ops[value].name in ("reshape", "cast") and fusion.in_registers(ops[value].args[0]):
        (before,) = ops[value].args
        if ops[value].name == "cast" and ops[before].dtype != "float32":
            break
        value = before
    return value


def _has_all_rows(fusion: Fusion, traversal: TraversalPlan, scalars: list[int]) -> bool:
    """Whether a traversal loads every row that the scalars are made of even if it is given the scalars.

    GATv2's loop over sources does: what it multiplies depends on both rows of an edge. It computes the scalars itself,
    and none is stored for each edge: training takes 6.9 ms instead of 7.3 ms on 20 M edges.
    """
    ops = fusion.program.ops
    wide = NARROWER * max((ops[v].width for v in scalars), default=1)

    def rows(loaded: list[int]) -> set[int]:
        return {v for v in loaded if ops[v].width >= wide}

    return rows(fusion.cone(scalars, set())[1]) <= rows(fusion.cone(traversal.roots, set(scalars))[1])


def _held(fusion: Fusion, traversal: TraversalPlan, scalars: list[int]) -> int:
    """Number of elements in registers of a traversal that also computes the scalars: those that it loads and sums."""
    ops = fusion.program.ops
    _, leaves = fusion.cone([*traversal.roots, *scalars], set())
    sums = [ops[a.out] for a in traversal.accumulators]
    # A sum marked `recompute` would else be summed forward and kept (`_softmax_gradient.py`): no reader could have it.
    return sum(ops[v].width for v in leaves) + sum(op.width for op in sums if not op.attr("recompute"))


def _pays(fusion: Fusion, writer: TraversalPlan, reader: TraversalPlan, scalars: list[int]) -> bool:
    """Whether the writer loads nothing more; or only other parts of rows that it loads anyway, and less in all.

    The parts of one array lie side by side and cost as much as one row. And rows that only the writer loads are free
    when it is done, before their gradients are written: that lowers the peak of memory.
    """
    if any(a.kind != "sum" for a in writer.accumulators):
        return False
    program, ops = fusion.program, fusion.program.ops

    def by_entry(values: list[int], width: int) -> set[tuple]:
        """The rows of at least this width that the writer loads for each entry: array, map and part."""
        operands = [as_part(program, access_operand(program, v, writer.via)) for v in values if ops[v].width >= width]
        return {(o.value, o.via, o.part) for o in operands if o.access not in ONCE_A_SEGMENT}

    body, _ = fusion.cone(writer.roots, set())
    # Another traversal could load what the writer needs for inner products alone.
    anyway = fusion.cone(writer.roots, {v for v in body if fusion.narrows(v)})[1]
    needed = fusion.cone(scalars, set())[1]
    if by_entry(needed, 0) <= by_entry(anyway, 0):
        return True
    wide = NARROWER * max(ops[v].width for v in scalars)
    rows, others = ({row[:2] for row in by_entry(found, wide)} for found in (needed, anyway))
    return rows <= others and _held(fusion, writer, scalars) < _held(fusion, reader, [])
