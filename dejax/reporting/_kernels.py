"""Kernels by time: those of `dejax.rgnn` under program and line, XLA's under the line of the user's code."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejax.reporting._hlo import Instruction, Module, short
from dejax.reporting._measure import Event
from dejax.rgnn.compiler.traced import TracedKernel

_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "optimization-barrier", "after-all"}
_WRAPPERS = re.compile(r"\b(?:jit|jvp|transpose|vmap|checkpoint|remat|rematted_computation|custom_\w+_call)\b")


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel of a step: a row in the report's table of kernels.

    Attributes:
        name: a readable name: the program and the kernel's number in it, or XLA's operator.
        line: the line of the user's code that the kernel computes.
        kind: "rgnn", "table", "offload", "copy" or "XLA".
        milliseconds: time in one call of the step; None if nothing was measured.
        launches: number of launches in one call of the step.
        nbytes: bytes that the kernel reads and writes, computed from shapes; None if unknown.
        predicted_ms: time that the cost model predicts for an NVIDIA H200; None if the model does not apply.
        why: if XLA computes a part of a relational program, the reason.

    >>> import dejax, jax, jax.numpy as jnp
    >>> page = dejax.report(jax.jit(lambda w, x: (x @ w).sum()), jnp.ones((8, 8)), jnp.ones((4, 8)), calls=0)
    >>> [kernel.kind for kernel in page.kernels][:1]
    ['XLA']
    """

    name: str
    line: str
    kind: str
    milliseconds: float | None
    launches: float
    nbytes: int | None
    predicted_ms: float | None = None
    why: str = ""


@dataclass(slots=True)
class _Sum:
    kind: str
    line: str = ""
    nanoseconds: float = 0.0
    launches: float = 0.0
    nbytes: int = 0
    program: str = ""


def kernels_of(
    module: Module, events: Sequence[Event], calls: int, traced: Mapping[str, TracedKernel], *, on_gpu: bool
) -> list[Kernel]:
    """The kernels of a step, the longest first; by bytes where nothing was measured.

    Args:
        module: the compiled program.
        events: what the profiler saw in `calls` calls.
        calls: their number.
        traced: instances of programs by name.
        on_gpu: whether kernels of our own run, and predictions apply.
    """
    known = {i.name: (i, times) for i, times in module.instructions()}
    by_kernel_name = {re.sub(r"\W", "_", name): found for name, found in known.items()}
    names = sorted(traced, key=len, reverse=True)
    sums: dict[tuple[str, str], _Sum] = {}
    sizes = _sizes(module)
    if events:
        for event in events:
            found = known.get(event.instruction) or known.get(event.name) or by_kernel_name.get(event.name)
            if found is None and not on_gpu:
                continue  # loops and calls: their parts are events of their own
            total = _entry(sums, module, found[0] if found else None, event.name, names)
            total.nanoseconds += event.duration_ns / calls
            total.launches += 1 / calls
    for instruction, times in known.values():
        if instruction.opcode in _FREE:
            continue
        total = _entry(sums, module, instruction, instruction.name, names)
        total.nbytes += sizes.get(instruction.name, 0) * times
        total.launches += 0 if events else times
    rows = [_row(name, total, traced, measured=bool(events), on_gpu=on_gpu) for (_, name), total in sums.items()]
    if events:
        rows = [row for row in rows if row.launches]
    return sorted(rows, key=lambda row: (-(row.milliseconds or 0), -(row.nbytes or 0), row.name))


def _entry(
    sums: dict[tuple[str, str], _Sum], module: Module, instruction: Instruction | None, name: str, names: Sequence[str]
) -> _Sum:
    label = _program(instruction.op_name if instruction else "", name, names)
    if label:
        return sums.setdefault(("rgnn", label), _Sum("rgnn", program=label))
    if instruction is None:
        kind = "copy" if name.lower().startswith(("memcpy", "memset")) else "XLA"
        return sums.setdefault((kind, name), _Sum(kind))
    kind = _kind(instruction)
    line = module.line(instruction)
    text = _readable(instruction)
    return sums.setdefault((kind, f"{text}  {line}"), _Sum(kind, line))


def _program(op_name: str, name: str, names: Sequence[str]) -> str:
    parts = set(re.split(r"[/()]", op_name))
    return next((label for label in names if label in parts or name.startswith(f"{label}_")), "")


def _kind(instruction: Instruction) -> str:
    if instruction.target.startswith(("dejax_table", "dejax_row", "dejax_drive")):
        return "table"
    if instruction.target.startswith("dejax_offload"):
        return "offload"
    return "copy" if instruction.opcode.startswith("copy") else "XLA"


def _readable(instruction: Instruction) -> str:
    """The last name of JAX's path, and whether it belongs to the backward pass."""
    if instruction.target.startswith("dejax_"):
        return instruction.target.removeprefix("dejax_").replace("_", " ")
    last = instruction.op_name.split(";")[0].rsplit("/", 1)[-1]
    text = last if last and not _WRAPPERS.match(last) else re.sub(r"[.\d]+$", "", instruction.name)
    return f"{text}, backward" if instruction.is_backward else text


def _sizes(module: Module) -> dict[str, int]:
    """Bytes that each instruction reads and writes, from the shapes."""
    made = {i.name: i.nbytes for body in module.computations.values() for i in body}
    return {
        i.name: i.nbytes + sum(made.get(name, 0) for name in i.operands)
        for body in module.computations.values()
        for i in body
        # A table in host memory is an operand of which few rows are read.
        if not i.target.startswith("dejax_")
    } | {i.name: i.nbytes for body in module.computations.values() for i in body if i.target.startswith("dejax_")}


def _row(name: str, total: _Sum, traced: Mapping[str, TracedKernel], *, measured: bool, on_gpu: bool) -> Kernel:
    milliseconds = total.nanoseconds / 1e6 if measured else None
    if not total.program:
        return Kernel(name.split("  ")[0], total.line, total.kind, milliseconds, total.launches, total.nbytes or None)
    kernel = traced[total.program]
    cost = kernel.cost()
    number = total.program.rpartition("_")[2]
    runs = on_gpu and kernel.template != "xla"
    return Kernel(
        f"{kernel.program} [{number}] {kernel.template}",
        ", ".join(short(line) for line in kernel.lines[:2]),
        "rgnn",
        milliseconds,
        total.launches,
        cost.bytes if runs else total.nbytes,
        cost.seconds * 1e3 if runs else None,
        kernel.why_xla() if on_gpu else "",
    )
