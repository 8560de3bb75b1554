"""What device memory holds over a step: arguments, and the results of instructions from their making to their last use.

XLA's compiled text has the instructions in the order in which they run. The estimate follows it, and lets
elementwise operators write over an operand that is not needed later. XLA packs buffers by rules of its own, so that its
plan differs a little; the report shows both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dejax.reporting._hlo import Instruction, Module

ACTIVATIONS, GRADIENTS, RESULTS, TEMPORARIES = "activations", "gradients", "results", "temporaries"
_SAME_MEMORY = {"bitcast", "optimization-barrier", "while", "async-done", "copy-done", "all-reduce-done", "domain"}

Value = tuple[frozenset[int], ...]  # the buffers of each part of a result


@dataclass(slots=True)
class Buffer:
    """A piece of memory.

    Attributes:
        shape: dtype and sizes.
        nbytes: its size.
        on_host: whether it lies in host memory.
        made, last: positions in the order of execution.
        backward: whether the backward pass made it.
        read_by_backward: whether the backward pass reads it.
        by: the instruction that made it.
        is_result: whether the step returns it.
    """

    shape: str
    nbytes: int
    on_host: bool
    made: int
    last: int
    backward: bool
    read_by_backward: bool
    by: Instruction
    is_result: bool = False

    def owner(self, parameters: frozenset[str]) -> str:
        """Who needs it."""
        if self.is_result:
            return RESULTS
        if self.backward:
            return GRADIENTS if self.shape in parameters else TEMPORARIES
        return ACTIVATIONS if self.read_by_backward else TEMPORARIES


@dataclass(frozen=True, slots=True)
class Timeline:
    """The memory of the device over a step: bytes by owner after each instruction of the compiled program.

    Attributes:
        owners: for each owner its bytes after each instruction.
        buffers: all buffers, largest first.

    >>> import dejax, jax, jax.numpy as jnp
    >>> step = jax.jit(lambda params, x: (x @ params).sum())
    >>> page = dejax.report(step, jnp.ones((8, 8)), jnp.ones((4, 8)), calls=0)
    >>> page.timeline.at_peak()["parameters"]  # bytes
    256
    """

    owners: Mapping[str, Sequence[int]]
    buffers: Sequence[Buffer]

    @property
    def totals(self) -> list[int]:
        """Bytes of all owners together after each instruction."""
        return [sum(parts) for parts in zip(*self.owners.values(), strict=True)]

    @property
    def peak(self) -> int:
        """The number of the instruction after which memory is largest."""
        totals = self.totals
        return max(range(len(totals)), key=totals.__getitem__) if totals else 0

    def at_peak(self) -> dict[str, int]:
        """Bytes of each owner where memory is largest."""
        return {owner: series[self.peak] for owner, series in self.owners.items() if series}


class _LivenessWalk:
    """Follows the buffers through a computation; a called computation becomes part of its caller."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.buffers: list[Buffer] = []
        self.inner: dict[int, int] = {}  # bytes inside of loops, by position
        self.in_place: list[tuple[int, frozenset[int], frozenset[int]]] = []  # position, operands, results
        self.position = 0

    def run(self, computation: str, given: Sequence[Value]) -> Value:
        values: dict[str, Value] = {}
        result: Value = ()
        for instruction in self.module.computations.get(computation, ()):
            operands = [values.get(name, ()) for name in instruction.operands]
            value = self.step(instruction, operands, given)
            values[instruction.name] = value
            if instruction.root:
                result = value
        return result

    def step(self, instruction: Instruction, operands: list[Value], given: Sequence[Value]) -> Value:
        """The buffers of an instruction's result. New buffers begin here, and those that it reads live until here."""
        opcode = instruction.opcode
        if opcode == "parameter":
            return given[instruction.index] if instruction.index < len(given) else (frozenset(),)
        if opcode == "constant":
            return (frozenset(),)
        if opcode == "tuple":
            return tuple(frozenset().union(*value) for value in operands)
        if opcode == "get-tuple-element":
            source = operands[0] if operands else ()
            return (source[instruction.index],) if instruction.index < len(source) else (frozenset(),)
        if opcode == "call" and instruction.calls:
            return self.run(instruction.calls[0], operands)
        self.position += 1
        read = frozenset().union(*(part for value in operands for part in value))
        for number in read:
            buffer = self.buffers[number]
            buffer.last = self.position
            buffer.read_by_backward |= instruction.is_backward
        if opcode == "while":
            self.inner[self.position] = max(_peak_inside(self.module, name) for name in instruction.calls)
        if opcode in _SAME_MEMORY or instruction.alias:
            return operands[0] if opcode == "while" or len(operands) == 1 else self.reused(instruction, operands)
        if opcode == "dynamic-update-slice" or "dynamic-update-slice" in instruction.name:
            return self.reused(instruction, operands)
        made = tuple(self.make(instruction, number) for number in range(len(instruction.shapes)))
        if instruction.elementwise:
            self.in_place.append((self.position, read, frozenset().union(*made)))
        return made

    def share(self) -> None:
        """Ends an operand that a result of the same size may overwrite before that result begins."""
        for position, read, made in self.in_place:
            for number in made:
                result = self.buffers[number]
                last = (self.buffers[b] for b in read if self.buffers[b].last == position)
                over = next((b for b in last if b.nbytes == result.nbytes and not b.is_result), None)
                if over is not None and over.made < position:
                    over.last = position - 1

    def reused(self, instruction: Instruction, operands: list[Value]) -> Value:
        """The first operand of the result's size that lies in its memory; otherwise new memory."""
        found: list[frozenset[int]] = []
        for number, shape in enumerate(instruction.shapes):
            match = next(
                (
                    part
                    for value in operands
                    for part in value
                    if any(self.buffers[b].shape == shape.text for b in part)
                ),
                None,
            )
            found.append(self.make(instruction, number) if match is None else match)
        return tuple(found)

    def make(self, instruction: Instruction, number: int) -> frozenset[int]:
        shape = instruction.shapes[number]
        self.buffers.append(
            Buffer(
                shape.text,
                shape.nbytes,
                shape.on_host,
                made=self.position,
                last=self.position,
                backward=instruction.is_backward,
                read_by_backward=False,
                by=instruction,
            )
        )
        return frozenset({len(self.buffers) - 1})


def _peak_inside(module: Module, computation: str) -> int:
    """The largest sum of temporary bytes inside of a loop's body."""
    walk = _LivenessWalk(module)
    walk.run(computation, ())
    walk.share()
    series = _series([b for b in walk.buffers if not b.on_host], walk.position, walk.inner)
    return max(series, default=0)


def _series(buffers: Sequence[Buffer], end: int, inner: Mapping[int, int]) -> list[int]:
    changes = [0] * (end + 2)
    for buffer in buffers:
        changes[buffer.made] += buffer.nbytes
        changes[buffer.last + 1] -= buffer.nbytes
    held, found = 0, []
    for position in range(end + 1):
        held += changes[position]
        found.append(held + inner.get(position, 0))
    return found


def timeline(module: Module, arguments: Mapping[str, int], parameters: frozenset[str]) -> Timeline:
    """Bytes on the device over a step.

    Args:
        module: the compiled program.
        arguments: bytes of the arguments by owner; they stay for the whole step.
        parameters: shapes of the parameters, in XLA's words: a result of the backward pass with such a shape is a
            gradient.
    """
    walk = _LivenessWalk(module)
    result = walk.run(module.entry, ())
    end = walk.position
    for number, part in enumerate(result):
        for buffer in part:
            walk.buffers[buffer].last = end
            walk.buffers[buffer].is_result = number not in module.aliased
    walk.share()
    # A result in a donated argument's memory takes none of its own.
    donated = {b for n, part in enumerate(result) if n in module.aliased for b in part}
    kept = [b for n, b in enumerate(walk.buffers) if n not in donated and not b.on_host]
    owners: dict[str, list[int]] = {name: [nbytes] * (end + 1) for name, nbytes in arguments.items() if nbytes}
    for owner in (ACTIVATIONS, GRADIENTS, RESULTS, TEMPORARIES):
        mine = [b for b in kept if b.owner(parameters) == owner]
        inner = walk.inner if owner == TEMPORARIES else {}
        if mine or inner:
            owners[owner] = _series(mine, end, inner)
    return Timeline(owners, sorted(kept, key=lambda b: -b.nbytes))
