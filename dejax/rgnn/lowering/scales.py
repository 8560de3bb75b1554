"""How large the columns of a value are: what rows in 16 bits, and products of such rows, are divided by.

A column that is 10^9 times smaller than the others would lose its digits in a row of one exponent. So the columns of an
array have powers of two of their own (`dejax.pallas.formats.row_scaled`). They are estimates: a row keeps all digits of
elements down to 2^-29 of its largest. Columns of inputs are measured, and from these those of computed values are
estimated, all of a program in one kernel (`dejax.pallas.formats.column_powers`). A column of a product is as large as
the largest element of its weights, each times the feature that it multiplies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from dejax.pallas.formats.column_powers import ROWS, Columns, Placed, Source, column_powers, of_array
from dejax.pallas.formats.row_scaled import RowScaled
from dejax.rgnn.ir.inter import OPERATORS, Op, OpProgram, parse_spec

# The most steps of an estimate. Layers with a residual, `h + f(h)`, in one program double them each time.
_MOST_STEPS = 32
# For the axes of features where no product names them.
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class ColumnScales:
    """The powers of two of the columns of a program's values.

    Attributes:
      program: a level-1 program.
      inputs: arrays or `RowScaled` by value number, of the program's `input` operators.
      values: the values that are asked for.
      interpret: whether kernels are interpreted.
    """

    def __init__(
        self, program: OpProgram, inputs: Mapping[int, Any], values: Iterable[int] = (), interpret: bool | None = None
    ) -> None:
        self.program = program
        self._sources: dict[int, Source | None] = {}
        self._proportional: set[int] = set()  # whose columns are known up to a factor that they all have
        self._inputs = {i: inputs[i] for i in program.inputs if i in inputs}
        wanted = dict.fromkeys(s for v in values if self._given(v) is None and (s := self.source(v)) is not None)
        self._powers: dict[Source, tuple[jax.Array, jax.Array]] = {}
        if wanted:
            arrays: dict[int, Any] = {v: a.columns if isinstance(a, RowScaled) else a for v, a in self._inputs.items()}
            self._powers = dict(zip(wanted, column_powers(arrays, list(wanted), interpret=interpret), strict=True))

    def powers(self, value: int, dtype: Any = jnp.bfloat16) -> jax.Array | None:
        """bfloat16[*features] or float32, the power of two of each column of a value that was asked for.

        None where all are 1.
        """
        given, source = self._given(value), self.source(value)
        if source is None:
            return None
        found = self._powers[source][dtype == jnp.bfloat16] if given is None else given
        return found.reshape(self.program.ops[value].shape).astype(dtype)

    def _given(self, value: int) -> jax.Array | None:
        """The powers of an input that has its own, as it is or moved."""
        op = self.program.ops[value]
        while op.name in ("gather", "reshape"):
            value, op = op.args[0], self.program.ops[op.args[0]]
        rows = self._inputs.get(value)
        return rows.columns if isinstance(rows, RowScaled) else None

    def source(self, value: int) -> Source | None:
        """The source from which a value's columns are estimated, one for each feature; None if it is not known."""
        if value not in self._sources:
            op = self.program.ops[value]
            source = None if op.width <= 1 else self._input(value, op) if op.name == "input" else self._computed(op)
            assert source is None or source.size == op.width, (op, source)
            self._sources[value] = source if source is None or _steps(source) <= _MOST_STEPS else None
            if self._has_unknown_factor(op):
                self._proportional.add(value)
        return self._sources[value]

    def _has_unknown_factor(self, op: Op) -> bool:
        """Whether a value's columns are as large as its source says times something that is not known."""
        if any(a in self._proportional for a in op.args):
            return True
        if op.name == "div":
            return not _is_count(self.program, op.args[1])
        return op.name in ("mul", "linear") and any(self.source(a) is None for a in op.args)

    def _input(self, value: int, op: Op) -> Source | None:
        array = self._inputs.get(value)
        if array is None or not jnp.issubdtype(array.dtype, jnp.floating):
            return None
        if isinstance(array, RowScaled) and array.columns is None:
            return None
        if not isinstance(array, RowScaled):
            return of_array(value, array.shape, tuple(range(1, array.ndim)))
        letters = _LETTERS[: len(op.shape)]
        return Columns(((value, letters),), letters, tuple(zip(letters, op.shape, strict=True)))

    def _computed(self, op: Op) -> Source | None:
        """What bounds the columns of an operator's result, from what bounds its operands; None if nothing is known."""
        first, columns = op.args[0], OPERATORS[op.name].columns
        if columns in ("same", "at most"):
            return self.source(first) if self.program.ops[first].width == op.width else None
        if op.name == "broadcast":
            return self._elementwise((first,), op)
        if op.name == "transpose":
            return self._transposed(op)
        if op.name == "mul":
            return self._elementwise(op.args, op)
        if columns == "largest":
            parts = tuple(self._elementwise((a,), op) for a in op.args if self.program.ops[a].width > 1)
            return self._placed(parts, (0,) * len(parts), 0, op)
        if op.name == "linear":
            return self._product(op)
        if op.name == "concat":
            axis, starts = op.attr("axis"), [0]
            for a in op.args:
                starts.append(starts[-1] + self.program.ops[a].shape[axis])
            return self._placed(tuple(self.source(a) for a in op.args), starts[:-1], axis, op)
        if op.name == "slice":
            source = self.source(first)
            return None if source is None else _sliced(source, op.attr("start"), op.attr("axis"), op.shape)
        if op.name == "pad":
            return self._placed((self.source(first),), (op.attr("before"),), op.attr("axis"), op)
        return None

    def _placed(self, parts: tuple[Source | None, ...], starts: Iterable[int], axis: int, op: Op) -> Source | None:
        known = tuple(p for p in parts if p is not None)
        if not known or len(known) < len(parts):
            return None
        placed = tuple(dict.fromkeys(zip(known, starts, strict=True)))
        if len(placed) == 1 and placed[0][0].size == op.width:
            return known[0]
        if OPERATORS[op.name].columns == "largest" and any(a in self._proportional for a in op.args):
            return None  # nothing says which of the parts is the largest
        return Placed(placed, axis, op.shape)

    def _transposed(self, op: Op) -> Source | None:
        source = self.source(op.args[0])
        if source is None:
            return None
        letters = _LETTERS[: len(op.shape)]
        sizes = tuple(zip(letters, self.program.ops[op.args[0]].shape, strict=True))
        return Columns(((source, letters),), "".join(letters[a] for a in op.attr("perm")), sizes)

    def _elementwise(self, args: tuple[int, ...], op: Op) -> Source | None:
        """The source of a product of values that are broadcast; a factor with few columns need not be known."""
        letters, ops = _LETTERS[: len(op.shape)], self.program.ops
        factors = []
        for a in args:
            source = self.source(a)
            if source is None and (4 * ops[a].width > op.width or len(args) == 1):
                return None
            if source is not None:
                factors.append((source, _letters_of(ops[a].shape, letters)))
        if not factors:
            return None
        if len(factors) == 1 and factors[0][0].size == op.width:
            return factors[0][0]
        return Columns(tuple(factors), letters, tuple(zip(letters, op.shape, strict=True)))

    def _product(self, op: Op) -> Source | None:
        """The columns of the weights, each element times its feature of the rows."""
        left, right, out = parse_spec(op.attr("spec"))
        x, w = op.args
        sizes = dict(zip(left + right, self.program.ops[x].shape + self.program.ops[w].shape, strict=True))
        return self._contracted(self.source(x), left, w, right, out, sizes)

    def _contracted(
        self, rows: Source | None, left: str, w: int, right: str, out: str, sizes: dict[str, int]
    ) -> Source | None:
        """The columns of the einsum `left,right->out` of columns and weights.

        Weights that are computed are taken apart, so that no source has a column for each element of a matrix.
        """
        ops = self.program.ops
        while OPERATORS[ops[w].name].columns == "same" or (ops[w].name == "mul" and _has_narrow_factor(ops[w], ops)):
            if ops[w].name == "mul" and (scales := self.source(narrow := min(ops[w].args, key=lambda a: ops[a].width))):
                of_scales = _letters_of(ops[narrow].shape, right)
                factors = ((scales, of_scales), *(() if rows is None else ((rows, left),)))
                left = "".join(dict.fromkeys(of_scales + ("" if rows is None else left)))
                rows = Columns(factors, left, tuple((c, sizes[c]) for c in left))
            w = max(ops[w].args, key=lambda a: ops[a].width)
        op = ops[w]
        if op.name == "concat":
            return self._side_by_side(rows, left, op, right, out, sizes)
        if op.name == "linear" and (parts := self._one_after_the_other(rows, left, op, right, out, sizes)) is not None:
            return parts
        found: list[tuple[int | Source, str]]
        if op.name == "input" and isinstance(given := self.source(w), Columns) and ROWS in dict(given.sizes):
            found, sizes = [(w, ROWS + right)], {ROWS: self._inputs[w].shape[0], **sizes}
        elif (weights := self.source(w)) is not None:
            found = [(weights, right)]
        else:
            return None
        if rows is not None:
            found.append((rows, left))
        used = {*out, *"".join(subscripts for _, subscripts in found)}
        return Columns(tuple(found), out, tuple((c, n) for c, n in sizes.items() if c in used))

    def _side_by_side(
        self, rows: Source | None, left: str, op: Op, right: str, out: str, sizes: dict[str, int]
    ) -> Source | None:
        """Rows times a concatenation of weights: a product with each weight, of all columns or of its own."""
        axis, start, parts = op.attr("axis"), 0, []
        along = right[axis]
        for w in op.args:
            of_part = {**sizes, along: self.program.ops[w].shape[axis]}
            rows_of_part = rows
            if rows is not None and along in left:
                rows_of_part = _sliced(rows, start, left.index(along), tuple(of_part[c] for c in left))
            part = self._contracted(rows_of_part, left, w, right, out, of_part)
            if part is None:
                return None
            parts.append((part, start if along in out else 0))
            start += of_part[along]
        return Placed(tuple(parts), max(out.find(along), 0), tuple(sizes[c] for c in out))

    def _one_after_the_other(
        self, rows: Source | None, left: str, op: Op, right: str, out: str, sizes: dict[str, int]
    ) -> Source | None:
        """Rows times a product of two weights: the rows times the first weight, and the result times the second."""
        ops = self.program.ops
        first, second, product = parse_spec(op.attr("spec"))
        names = dict(zip(product, right, strict=True))
        unused = (c for c in _LETTERS if c not in sizes)
        for c in first + second:
            names.setdefault(c, next(unused))
        sizes = dict(sizes)
        factors = []
        for value, letters in zip(op.args, (first, second), strict=True):
            subscripts = "".join(names[c] for c in letters)
            sizes.update(zip(subscripts, ops[value].shape, strict=True))
            factors.append((value, subscripts))
        contracted = set(left) & set(right) - set(out)
        for (a, of_a), (b, of_b) in (factors, factors[::-1]):
            if contracted <= set(of_a) - set(of_b):
                between = "".join(c for c in dict.fromkeys(left + of_a) if c in out or c in of_b)
                middle = self._contracted(rows, left, a, of_a, between, sizes)
                return None if middle is None else self._contracted(middle, between, b, of_b, out, sizes)
        return None


def _steps(source: Source) -> int:
    """How many estimates a source is made of, itself and repetitions included."""
    return 1 + sum(_steps(s) for s in source.arguments)


def _sliced(source: Source, start: int, axis: int, shape: tuple[int, ...]) -> Source:
    """Columns of these features, from `start` on along an axis: one of the parts where the source has such a part."""
    if isinstance(source, Placed) and source.axis == axis and source.shape[:axis] == shape[:axis]:
        size = source.size // source.shape[axis] * shape[axis]
        same = [part for part, at in source.parts if at == start and part.size == size]
        within = [at for part, at in source.parts if at < start + shape[axis] and at + source.length(part) > start]
        if len(same) == len(within) == 1:
            return same[0]
    return Placed(((source, -start),), axis, shape)


def _is_count(program: OpProgram, value: int) -> bool:
    """Whether a value is a number of entries, which is small beside the range of a row in 16 bits."""
    op = program.ops[value]
    if op.name in ("cast", "max", "gather", "reshape", "broadcast"):
        return all(_is_count(program, a) for a in op.args)
    return op.name in ("count", "const")


def _letters_of(shape: tuple[int, ...], letters: str) -> str:
    """The letters of a shape that is broadcast to axes of these letters, without axes of size 1."""
    return "".join(c for c, s in zip(letters[len(letters) - len(shape) :], shape, strict=True) if s > 1)


def _has_narrow_factor(op: Op, ops: Sequence[Op]) -> bool:
    """Whether an elementwise product is of a value of its own shape and of one that has fewer columns."""
    wide = [a for a in op.args if ops[a].shape == op.shape]
    return len(wide) == 1 and all(4 * ops[a].width <= op.width for a in op.args if a != wide[0])
