"""Backward generation: reverse differentiation inside the inter-operator IR.

The joint program has the forward operators, one more input for the cotangent of each output, and the gradients of the
chosen inputs as further outputs. It is optimised and lowered like any program. The derivative of each operator is in
the table of operators (`ir/operators.py`) and is made of operators of the IR, so there are gradients of gradients, too.
"""

from __future__ import annotations

from dejax.rgnn.ir.inter import OPERATORS, Builder, Op, OpProgram, is_float


def differentiate(program: OpProgram, wrt: tuple[int, ...]) -> OpProgram:
    """The joint program.

    Args:
      program: the forward program.
      wrt: positions of the inputs whose gradients are wanted.

    Returns:
      A program whose inputs are the forward inputs and then the cotangents (one for each output, in order), and whose
      outputs are the forward outputs and then the gradients.
    """
    return _Differentiation(program, wrt).run()


class _Differentiation:
    def __init__(self, program: OpProgram, wrt: tuple[int, ...]) -> None:
        self.forward, self.wrt = program, wrt
        self.b = Builder(program.name)
        self.parts: dict[int, list[int]] = {}  # forward value -> contributions to its cotangent

    def run(self) -> OpProgram:
        forward, b = self.forward, self.b
        for i, op in enumerate(forward.ops):
            b.copy(op, op.args, forward.lines[i] if forward.lines else None)
        first = 1 + max((forward.ops[i].attr("position") for i in forward.inputs), default=-1)
        for k, o in enumerate(forward.outputs):
            op, name = forward.ops[o], f"cotangent{k}"
            g = b.op("input", name=name, position=first + k, space=str(op.space), shape=op.shape, dtype=op.dtype)
            if is_float(op.dtype):
                self.parts.setdefault(o, []).append(g)
        needed = self._reaching()
        for i in reversed(range(len(forward.ops))):
            op = forward.ops[i]
            derivative = OPERATORS[op.name].derivative
            if i in needed and i in self.parts and derivative is not None:
                b.line = forward.lines[i] if forward.lines else None
                for arg, part in zip(op.args, derivative(b, op, i, self.total(i)), strict=True):
                    if part is not None and arg in needed:
                        self.parts.setdefault(arg, []).append(self.fit(part, forward.ops[arg]))
        by_position = forward.by_position()
        gradients = [self.gradient(by_position[p]) for p in self.wrt]
        return b.build([*forward.outputs, *gradients])

    def _reaching(self) -> set[int]:
        """Values that depend on an input whose gradient is wanted."""
        found: set[int] = set()
        for i, op in enumerate(self.forward.ops):
            if (op.name == "input" and op.attr("position") in self.wrt) or found.intersection(op.args):
                found.add(i)
        return found

    def total(self, value: int) -> int:
        parts = self.parts[value]
        while len(parts) > 1:
            parts = [self.b.op("add", parts[0], parts[1]), *parts[2:]]
        return parts[0]

    def gradient(self, value: int) -> int:
        if value in self.parts:
            return self.total(value)
        op = self.forward.ops[value]
        zero = self.b.const(0.0, op.dtype, op.space)
        return self.b.op("broadcast", zero, shape=op.shape) if op.shape else zero

    def fit(self, g: int, like: Op) -> int:
        """A contribution in the argument's own dtype and feature shape, summed over axes that were broadcast."""
        b = self.b
        if b.ops[g].shape != like.shape:
            g = unbroadcast(b, g, like.shape)
        return g if b.ops[g].dtype == like.dtype else b.op("cast", g, dtype=like.dtype)


def unbroadcast(b: Builder, g: int, shape: tuple[int, ...]) -> int:
    have = b.ops[g].shape
    if shape == ():
        return b.op("sum_features", g, axes=tuple(range(len(have))), keepdims=False)
    if have == ():
        return b.op("broadcast", g, shape=shape)
    axes = tuple(i for i, (h, s) in enumerate(zip(have, shape, strict=True)) if s == 1 and h != 1)
    if axes:
        g = b.op("sum_features", g, axes=axes, keepdims=True)
    return g if b.ops[g].shape == shape else b.op("broadcast", g, shape=shape)
