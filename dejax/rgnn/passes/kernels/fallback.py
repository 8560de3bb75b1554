"""Operators that no template computes are left to XLA, and the instances are put in an order in which they can run."""

from __future__ import annotations

from dejax.rgnn.ir.inter import TYPE_SPACES, IRError, OpProgram
from dejax.rgnn.ir.intra import Fallback, Instance, Kernels, in_order, verify_kernels
from dejax.rgnn.ir.templates import refusal


def fallback(kernels: Kernels, *, merge: bool = True) -> Kernels:
    """Orders the instances by what they read, with fallback instances for the other operators.

    Args:
      kernels: a level-2 program.
      merge: neighbouring operators share one fallback instance; otherwise each has its own.
    """
    program, ordered, run = kernels.program, list[Instance](), list[int]()

    def close() -> None:
        if run:
            inside = set(run)
            reads = dict.fromkeys(a for i in run for a in program.ops[i].args if a not in inside)
            ordered.append(Fallback(tuple(run), tuple(reads), tuple(run), _reasons(program, run)))
            run.clear()

    for step in _schedule(kernels):
        if isinstance(step, int):
            run.append(step)
        if not isinstance(step, int) or not merge:
            close()
        if not isinstance(step, int):
            ordered.append(step)
    close()
    return verify_kernels(Kernels(program, tuple(ordered)))


def _schedule(kernels: Kernels) -> list[Instance | int]:
    """Instances and single operators, each after all that it reads."""
    program = kernels.program
    order = in_order(program, [(i.reads, i.writes) for i in kernels.instances], program.outputs)
    if order is None:
        raise IRError(f"{program.name}: two instances write one value, or wait for each other")
    steps = (step for step in order if step < 0 or program.ops[step].name != "input")
    return [step if step >= 0 else kernels.instances[~step] for step in steps]


def _reasons(program: OpProgram, values: list[int]) -> str:
    """Why no kernel computes the values of entries and nodes; XLA computes values of types anyway."""
    found: dict[str, None] = {}
    for v in values:
        op = program.ops[v]
        rows = [o for o in (op, *(program.ops[a] for a in op.args)) if o.space not in TYPE_SPACES and o.name != "const"]
        found.update((why, None) for o in rows if (why := refusal(o)) is not None)
    return ", ".join(found)
