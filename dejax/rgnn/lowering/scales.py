"""How large the columns of a value are: what rows in 16 bits, and products of such rows, are divided by.

A column that is 10^9 times smaller than the others would lose its digits in a row of one exponent. So the columns of an
array have powers of two of their own (`dejax.pallas.formats.row_scaled`). They are estimates: a row keeps all digits of
elements down to 2^-29 of its largest. Columns of inputs are measured, all of a program in one kernel. Columns of what
is computed are taken for those of one input, as far as one can tell: columns of a product for those of the weights,
columns of a sum of rows for those of the rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas.formats.column_powers import column_powers
from dejax.pallas.formats.row_scaled import RowScaled
from dejax.rgnn.ir.inter import Op, Program, parse_spec

# Operators whose result has the columns of their first argument.
_LIKE_FIRST = frozenset("gather reduce cast neg abs relu leaky_relu stop_gradient div".split())
_SUMS = frozenset("add sub max min".split())


@dataclass(frozen=True, slots=True)
class Marginal:
    """The columns of an input, or of some of its feature axes.

    Attributes:
      input: the value number of the `input` operator.
      axes: for each feature axis the input's feature axis of the same columns; None where it has none.
      shape: the feature shape, where the same columns in the same order have another one than the input's.
    """

    input: int
    axes: tuple[int | None, ...]
    shape: tuple[int, ...] | None = None

    def of_axes(self, axes: Iterable[int]) -> Marginal | None:
        return None if self.shape is not None else Marginal(self.input, tuple(self.axes[a] for a in axes))

    @property
    def measured(self) -> Marginal:
        """What is measured, whatever its shape."""
        return Marginal(self.input, tuple(a for a in self.axes if a is not None))

    @property
    def inputs(self) -> tuple[Marginal, ...]:
        return (self,)


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Columns of several sources, one after the other along a feature axis."""

    parts: tuple[Source, ...]
    axis: int

    def of_axes(self, axes: Iterable[int]) -> Source | None:
        chosen = tuple(axes)
        if self.axis not in chosen:
            return None
        parts = tuple(part.of_axes(chosen) for part in self.parts)
        return None if None in parts else SideBySide(parts, chosen.index(self.axis))  # type: ignore[arg-type]

    @property
    def inputs(self) -> tuple[Marginal, ...]:
        return tuple(m for part in self.parts for m in part.inputs)


Source = Marginal | SideBySide


class ColumnScales:
    """The powers of two of the columns of a program's values.

    Attributes:
      program: a level-1 program.
      inputs: arrays or `RowScaled` by value number, of the program's `input` operators.
      values: the values that are asked for.
      interpret: whether kernels are interpreted.
    """

    def __init__(
        self, program: Program, inputs: Mapping[int, Any], values: Iterable[int] = (), interpret: bool | None = None
    ) -> None:
        self.program = program
        self._sources: dict[int, Source | None] = {}
        self._inputs = {i: inputs[i] for i in program.inputs if i in inputs}
        wanted = [m for v in values if (source := self._complete(v)) is not None for m in source.inputs]
        measured = [
            m for m in dict.fromkeys(m.measured for m in wanted) if not isinstance(self._inputs[m.input], RowScaled)
        ]
        requests = [(self._inputs[m.input], tuple(a + 1 for a in m.axes if a is not None)) for m in measured]
        found = column_powers(requests, interpret=interpret) if requests else []
        self._powers: dict[Marginal, tuple[jax.Array, jax.Array]] = dict(zip(measured, found, strict=True))

    def powers(self, value: int, dtype: Any = jnp.bfloat16) -> jax.Array | None:
        """bfloat16[*features] or float32, the power of two of each column of a value that was asked for.

        None where all are 1.
        """
        source = self._complete(value)
        if source is None:
            return None
        return self._made(source, dtype == jnp.bfloat16).reshape(self.program.ops[value].shape).astype(dtype)

    def _made(self, source: Source, row_scaled: bool) -> jax.Array:
        if isinstance(source, SideBySide):
            parts = [self._made(part, row_scaled).reshape(self._shape(part)) for part in source.parts]
            return jnp.concatenate(parts, axis=source.axis)
        rows = self._inputs[source.input]
        if isinstance(rows, RowScaled):
            assert rows.columns is not None
            return rows.columns
        return self._powers[source.measured][row_scaled]

    def _shape(self, source: Source) -> tuple[int, ...]:
        if isinstance(source, Marginal):
            if source.shape is not None:
                return source.shape
            shape = self.program.ops[source.input].shape
            return tuple(1 if a is None else shape[a] for a in source.axes)
        shapes = [self._shape(part) for part in source.parts]
        return tuple(sum(s[a] for s in shapes) if a == source.axis else shapes[0][a] for a in range(len(shapes[0])))

    def _complete(self, value: int) -> Source | None:
        """The source of a value's columns, where all of them have one."""
        op, source = self.program.ops[value], self.source(value)
        if (
            source is None
            or op.width <= 1
            or len(self._shape(source)) != len(op.shape)
            or self._shape(source) != op.shape
        ):
            return None
        return source

    def source(self, value: int) -> Source | None:
        """Where a value's columns come from; None where that is not known."""
        if value not in self._sources:
            op = self.program.ops[value]
            self._sources[value] = self._input(value, op) if op.name == "input" else self._computed(op)
        return self._sources[value]

    def _input(self, value: int, op: Op) -> Source | None:
        array = self._inputs.get(value)
        if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        if isinstance(array, RowScaled) and array.columns is None:
            return None
        return Marginal(value, tuple(range(len(op.shape))))

    def _computed(self, op: Op) -> Source | None:
        if op.name in _LIKE_FIRST:
            return self._same_shape(op.args[0], op)
        if op.name == "reshape":
            return self._reshaped(op)
        if op.name == "mul" or op.name in _SUMS:
            return self._combined(op)
        if op.name == "linear":
            return self._product(op)
        if op.name == "concat":
            parts = tuple(self.source(a) for a in op.args)
            return None if None in parts else SideBySide(parts, op.attr("axis"))  # type: ignore[arg-type]
        return None

    def _same_shape(self, value: int, op: Op) -> Source | None:
        return self.source(value) if self.program.ops[value].shape == op.shape else None

    def _reshaped(self, op: Op) -> Source | None:
        source, shape = self.source(op.args[0]), self.program.ops[op.args[0]].shape
        if not isinstance(source, Marginal):
            return None
        if source.shape is not None or [s for s in shape if s != 1] != [s for s in op.shape if s != 1]:
            return Marginal(source.input, source.axes, op.shape) if self._shape(source) == shape else None
        kept = iter(a for a, s in zip(source.axes, shape, strict=True) if s != 1)
        return Marginal(source.input, tuple(None if s == 1 else next(kept) for s in op.shape))

    def _combined(self, op: Op) -> Source | None:
        """Of operands that have several columns; they must agree, or the larger cannot be told."""
        wide = [a for a in op.args if self.program.ops[a].width > 1]
        if op.name == "mul":
            wide = [a for a in op.args if 4 * self.program.ops[a].width > op.width]
        found = {self._same_shape(a, op) for a in wide}
        return found.pop() if len(found) == 1 else None

    def _product(self, op: Op) -> Source | None:
        """The columns of the weights; contracted axes and those of the rows are left out."""
        _, right, out = parse_spec(op.attr("spec"))
        source = self.source(op.args[1])
        if source is None:
            return None
        if all(c in right for c in out):
            return source.of_axes(right.index(c) for c in out)
        if isinstance(source, Marginal) and source.shape is not None:
            return None
        if isinstance(source, Marginal):
            return Marginal(source.input, tuple(source.axes[right.index(c)] if c in right else None for c in out))
        if out.index(right[source.axis]) != source.axis if right[source.axis] in out else True:
            return None
        parts = tuple(
            Marginal(p.input, tuple(p.axes[right.index(c)] if c in right else None for c in out))
            for p in source.parts
            if isinstance(p, Marginal) and p.shape is None
        )
        return SideBySide(parts, source.axis) if len(parts) == len(source.parts) else None
