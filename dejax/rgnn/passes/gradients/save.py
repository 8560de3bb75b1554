"""Save or recompute: the joint program is cut into a forward and a backward program.

Values that both need stay in memory between the two, or backward computes them again.

- Saved: results of grouped GEMMs and reductions, which have at most as many rows as there are pairs or nodes; scalars
  of edges, such as scores; and rows of nodes that a grouped GEMM of forward reads, which are arrays anyway.
- Recomputed: gathered rows, other elementwise functions, every edge-by-width tensor, and, on graphs with many edges,
  inner products of two gathered rows.
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.cost.work import Counts
from dejax.rgnn.ir.inter import BINARY, ROWWISE, UNARY, Builder, Op, OpProgram, Space
from dejax.rgnn.passes._rewrite import copy_ops, divisor, live


@dataclass(frozen=True, slots=True)
class Cut:
    """A differentiated program, cut into a forward and a backward program.

    Attributes:
      forward: takes the inputs, and returns the outputs followed by the values saved for the backward program.
      backward: takes the inputs at the positions `needed`, the saved values and the cotangents, and returns the
        gradients.
      needed: positions of the inputs that the backward program reads again.
    """

    forward: OpProgram
    backward: OpProgram
    needed: tuple[int, ...]
    num_outputs: int

    @property
    def num_saved(self) -> int:
        """Number of values that the forward program returns for the backward program."""
        return len(self.forward.outputs) - self.num_outputs


# The cache holds the scalars of edges next to the rows that are read with them: then reading the scalars out of order
# costs less than computing them again.
_ARRAYS_IN_CACHE = 3


def cut(joint: OpProgram, num_inputs: int, num_outputs: int, counts: Counts, *, save_all: bool = False) -> Cut:
    """Cuts a joint program; its first `num_inputs` input positions and `num_outputs` outputs belong to forward."""
    ops = joint.ops
    in_backward: set[int] = set()  # depends on a cotangent
    for i, op in enumerate(ops):
        if (op.name == "input" and op.attr("position") >= num_inputs) or in_backward.intersection(op.args):
            in_backward.add(i)
    gradients = joint.outputs[num_outputs:]
    kept = _compared(joint) | {
        op.args[0]
        for i, op in enumerate(ops)
        if op.name == "linear" and i not in in_backward and op.space == Space.NODE
    }
    # The divisor of a softmax, and not the sum that it is made of: traversals then read it as it is.
    kept |= {i for i in range(len(ops)) if divisor(joint, i) is not None}
    saved: dict[int, None] = {}
    recomputed: set[int] = set()

    def need(value: int) -> None:
        if value in saved or value in recomputed or ops[value].name == "input":
            return
        if _keep(joint, value, counts, save_all or value in kept):
            saved[value] = None
            return
        recomputed.add(value)
        for a in ops[value].args:
            need(a)

    for i in sorted(in_backward):
        for a in ops[i].args:
            if a not in in_backward:
                need(a)
    for g in gradients:
        if g not in in_backward:
            need(g)

    backward, needed = _backward_program(joint, in_backward, recomputed, tuple(saved), gradients, num_inputs)
    outputs = (*joint.outputs[:num_outputs], *saved)
    in_forward = live(joint, outputs).union(joint.inputs) - in_backward
    return Cut(copy_ops(joint, sorted(in_forward), outputs), backward, needed, num_outputs)


def _compared(program: OpProgram) -> set[int]:
    """Values that backward compares for equality, to find which one was the largest.

    They are saved: another kernel may round recomputed values differently, and then none would be equal.
    """
    ops = program.ops
    found: set[int] = set()
    stack: list[int] = []
    for op in ops:
        if op.name == "eq" and any(_reads_maximum(program, a) for a in op.args):
            stack += op.args
    while stack:
        value = stack.pop()
        if value in found:
            continue
        if (exact := _negated(program, value)) is not None:
            stack.append(exact)  # a difference of 0 and the value, which rounds nothing, is not saved
            continue
        found.add(value)
        if ops[value].name in ("gather", "lookup"):
            stack.append(ops[value].args[0])
    return found


def _negated(program: OpProgram, value: int) -> int | None:
    """The value whose negative this value is; None if it is not a negative."""
    op = program.ops[value]
    if op.name == "neg":
        return op.args[0]
    zero = program.ops[op.args[0]] if op.name == "sub" else op
    return op.args[1] if zero.name == "const" and op.name == "sub" and zero.attr("value") == 0.0 else None


def _reads_maximum(program: OpProgram, value: int) -> bool:
    op = program.ops[value]
    made = program.ops[op.args[0]] if op.name in ("gather", "lookup") else op
    return made.is_extremum


def _keep(program: OpProgram, value: int, counts: Counts, save_all: bool) -> bool:
    op = program.ops[value]
    if op.name in ("const", "count", "gather") or op.attr("recompute"):
        return False
    if save_all:
        return True
    widest = max((program.ops[a].width for a in op.args if program.ops[a].space == op.space), default=0)
    if op.space == Space.EDGE:
        at_hand = _dot_of_rows(program, op) and counts.from_memory(op, _ARRAYS_IN_CACHE)
        return op.width * 4 <= widest and not at_hand
    # Elementwise operators on saved values are computed again when these are read.
    return op.name not in ROWWISE or op.name in ("dot", "sum_features")


def _dot_of_rows(program: OpProgram, op: Op) -> bool:
    """Whether an edge value is an inner product of gathered rows, or of elementwise functions of them (GATv2's score).

    The traversals of its gradient load the rows: one for each segment, the other for each entry.
    """
    ops = program.ops

    def of_rows(value: int) -> bool:
        made = ops[value]
        if made.name == "gather":
            return made.attr("via") in ("src", "dst", "all")
        return made.name in UNARY | BINARY and all(map(of_rows, made.args))

    if op.name != "dot":
        return False
    return all(ops[a].name == "gather" for a in op.args) or all(map(of_rows, op.args))


def _backward_program(
    joint: OpProgram,
    in_backward: set[int],
    recomputed: set[int],
    saved: tuple[int, ...],
    gradients: tuple[int, ...],
    num_inputs: int,
) -> tuple[OpProgram, tuple[int, ...]]:
    """The backward part of a joint program, and the positions of the forward inputs that the backward part reads.

    Its inputs are these forward inputs, then the saved values, then the cotangents.
    """
    ops = joint.ops
    wanted = in_backward | recomputed
    read = live(joint, gradients, wanted)
    inputs = [i for i in joint.inputs if ops[i].attr("position") < num_inputs and i in read]
    needed = tuple(ops[i].attr("position") for i in inputs)
    cotangents = [i for i in joint.inputs if ops[i].attr("position") >= num_inputs]
    b = Builder(f"{joint.name}.backward")
    new: dict[int, int] = {}

    def as_input(old: int, name: str) -> None:
        op: Op = ops[old]
        new[old] = b.op("input", name=name, position=len(new), space=str(op.space), shape=op.shape, dtype=op.dtype)

    for i in inputs:
        as_input(i, ops[i].attr("name"))
    for i in saved:
        as_input(i, f"saved{i}")
    for i in cotangents:
        as_input(i, ops[i].attr("name"))
    for i, op in enumerate(ops):
        if i in read and i in wanted and i not in new:
            new[i] = b.copy(op, (new[a] for a in op.args), joint.lines[i])
    return b.build(new[g] for g in gradients), needed
