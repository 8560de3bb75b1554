"""Symbolic values: the arguments of a program's function while it is traced, and the values made from them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dejax.rgnn.compiler.frontend import features
from dejax.rgnn.compiler.frontend.errors import fail
from dejax.rgnn.compiler.frontend.features import Axis
from dejax.rgnn.compiler.frontend.foreign_calls import error_of_caller, instead_of
from dejax.rgnn.compiler.frontend.indexing import indexed
from dejax.rgnn.compiler.frontend.masks import both, either, negated
from dejax.rgnn.compiler.frontend.matmul import matmul
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space

if TYPE_CHECKING:
    from dejax.rgnn.compiler.frontend.trace import Trace


class Argument:
    """An array argument of a program that has not said yet what its rows stand for, by `g.node`, `g.edge` or so."""

    __array_ufunc__ = None  # numpy operands defer to the methods here

    def __init__(self, trace: Trace, name: str, position: int, shape: tuple[int, ...], dtype: str) -> None:
        self.trace, self.name, self.position = trace, name, position
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"<argument {self.name}: {self.dtype}{list(self.shape)}>"

    def _untyped(self, *_: Any, **__: Any) -> Any:
        """Raises an error that names the methods of the graph by which an argument gets a space."""
        if self.shape == ():
            raise fail(
                f"argument {self.name!r} is a scalar array (traced, or made by jax or numpy); write g.shared(x) to "
                "compute with it. Where Python needs a number (a shape, an axis, a range, if), pass a static one: "
                "jax.jit(..., static_argnums=...), or a closure"
            )
        raise fail(
            f"argument {self.name!r} of shape {self.shape} must say what its rows stand for; write "
            "g.node(x), g.src(x), g.dst(x), g.edge(x), g.per_edge_type(x), g.per_node_type(x) or g.shared(x)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _untyped
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __rpow__ = __getitem__ = __abs__ = __invert__ = _untyped
    __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = __round__ = __pos__ = _untyped
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _untyped
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = _untyped
    __float__ = __int__ = __index__ = __complex__ = __array__ = __array_function__ = _untyped
    reshape = transpose = swapaxes = astype = sum = mean = max = min = softmax = logsumexp = _untyped
    T = property(_untyped)
    __hash__ = object.__hash__


class Symbol:
    """A value of the program being traced: a space, the feature shape of one row, a dtype."""

    __array_ufunc__ = None

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace, self.index = trace, index

    @property
    def op(self) -> inter.Op:
        """The operator that defines the value."""
        return self.trace.builder.ops[self.index]

    @property
    def space(self) -> Space:
        """What the rows of the value stand for: nodes, edges, pairs, types or the whole graph."""
        return self.op.space

    @property
    def shape(self) -> tuple[int, ...]:
        """The feature shape of one row: () for a scalar, (width,), or (heads, width)."""
        return self.op.shape

    @property
    def dtype(self) -> str:
        """The dtype of the elements."""
        return self.op.dtype

    def __repr__(self) -> str:
        return f"<%{self.index}: {self.op.type}>"

    # arithmetic
    def __add__(self, other: Any) -> Symbol:
        return self.trace.binary("add", self, other)

    def __radd__(self, other: Any) -> Symbol:
        return self.trace.binary("add", other, self)

    def __sub__(self, other: Any) -> Symbol:
        return self.trace.binary("sub", self, other)

    def __rsub__(self, other: Any) -> Symbol:
        return self.trace.binary("sub", other, self)

    def __mul__(self, other: Any) -> Symbol:
        return self.trace.binary("mul", self, other)

    def __rmul__(self, other: Any) -> Symbol:
        return self.trace.binary("mul", other, self)

    def __truediv__(self, other: Any) -> Symbol:
        return self.trace.binary("div", self, other)

    def __rtruediv__(self, other: Any) -> Symbol:
        return self.trace.binary("div", other, self)

    def __pos__(self) -> Symbol:
        return self

    def __abs__(self) -> Symbol:
        return self.trace.emit("abs", self.trace.number(self, "abs(x)"))

    def __neg__(self) -> Symbol:
        return self.trace.emit("neg", self.trace.number(self, "-x"))

    def __pow__(self, exponent: Any) -> Symbol:
        if not isinstance(exponent, numbers.Real):
            return self.trace.binary("power", self, exponent)
        whole = isinstance(exponent, numbers.Integral) and float(exponent) >= 0
        return self.trace.emit("pow", self if whole else self.trace.floating(self), exponent=float(exponent))

    def __rpow__(self, base: Any) -> Symbol:
        return self.trace.binary("power", base, self)

    def __matmul__(self, weight: Any) -> Symbol:
        return matmul(self, weight)

    def __rmatmul__(self, weight: Any) -> Symbol:
        raise fail("a weight stands on the right: x @ w, with w of shape (width, out), or its .T")

    # comparisons: 1 where they hold, else 0, in the dtype of their operands; without gradient
    def __eq__(self, other: Any) -> Symbol:  # type: ignore[override]
        return self.trace.binary("eq", self, other)

    def __ne__(self, other: Any) -> Symbol:  # type: ignore[override]
        return 1 - self.trace.binary("eq", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return self.trace.binary("gt", self, other)

    def __lt__(self, other: Any) -> Symbol:
        return self.trace.binary("gt", other, self)

    def __ge__(self, other: Any) -> Symbol:
        return self.trace.binary("max", self > other, self == other)

    def __le__(self, other: Any) -> Symbol:
        return self.trace.binary("max", self < other, self == other)

    __hash__ = object.__hash__

    # logic on masks: booleans and the results of comparisons
    def __and__(self, other: Any) -> Symbol:
        return both(self, other, self)

    def __or__(self, other: Any) -> Symbol:
        return either(self, other, self)

    def __invert__(self) -> Symbol:
        return negated(self)

    __rand__, __ror__ = __and__, __or__

    def __bool__(self) -> bool:
        raise fail(
            "a value with many rows has no single truth value while the program is traced; choose row by row with "
            "rgnn.where(condition, x, y), and write &, | and ~ for `and`, `or` and `not`"
        )

    def _not_a_number(self, *_: Any, **__: Any) -> Any:
        raise fail(
            "a value with many rows is not a Python number while the program is traced; use its methods and the "
            "functions of rgnn, and Python numbers for shapes and axes"
        )

    __float__ = __int__ = __index__ = __complex__ = _not_a_number

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise error_of_caller()

    def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
        raise fail(instead_of(getattr(function, "__name__", "")))

    def __iter__(self) -> Iterator[Symbol]:
        if not self.shape:
            raise fail("a scalar value has no feature axis to unpack; rows are never indexed")
        return (self[i] for i in range(self.shape[0]))

    # features
    def reshape(self, *shape: Any) -> Symbol:
        """The features of each row in another shape; one axis may be -1."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if -1 in sizes:
            rest = math.prod(s for s in sizes if s != -1)
            sizes = tuple(self.op.width // rest if s == -1 else s for s in sizes)
        return self.trace.emit("reshape", self, shape=sizes)

    @property
    def T(self) -> Symbol:
        """The feature axes in reverse order, as the transpose of a matrix."""
        if len(self.shape) < 2:
            return self
        return self.trace.emit("transpose", self, perm=tuple(reversed(range(len(self.shape)))))

    def transpose(self, *axes: Any) -> Symbol:
        """The feature axes in another order, by default reversed."""
        given = tuple(axes[0]) if len(axes) == 1 and isinstance(axes[0], tuple | list) else axes
        rank = len(self.shape)
        if not given:
            return self.T
        perm = tuple(a % rank if isinstance(a, int) and -rank <= a < rank else a for a in given)
        if sorted(perm, key=str) != sorted(range(rank), key=str):
            raise fail(f"axes must name each of the {rank} feature axes once, got {given}; rows are no axis")
        return self if perm == tuple(range(rank)) else self.trace.emit("transpose", self, perm=perm)

    def swapaxes(self, axis1: int, axis2: int) -> Symbol:
        """The value with two feature axes exchanged."""
        axes = list(range(len(self.shape)))
        a, b = features.axis_of(self, axis1), features.axis_of(self, axis2)
        axes[a], axes[b] = b, a
        return self.transpose(*axes)

    def sum(self, axis: Axis = -1, keepdims: bool = False) -> Symbol:
        """The sum over a feature axis, several (a tuple) or all (None); of booleans, how many are true."""
        return features.total(self, axis, keepdims)

    def mean(self, axis: Axis = -1, keepdims: bool = False) -> Symbol:
        """The mean over feature axes, as `sum` names them."""
        return features.mean(self, axis, keepdims)

    def max(self, axis: Axis = -1, keepdims: bool = False) -> Symbol:
        """The maximum over feature axes, as `sum` names them; ties share the gradient equally."""
        return features.extremum(self, "max", axis, keepdims)

    def min(self, axis: Axis = -1, keepdims: bool = False) -> Symbol:
        """The minimum over feature axes, as `sum` names them; ties share the gradient equally."""
        return features.extremum(self, "min", axis, keepdims)

    def softmax(self, axis: Axis = -1) -> Symbol:
        """The softmax over feature axes, as `sum` names them."""
        return features.softmax(self, axis)

    def logsumexp(self, axis: Axis = -1, keepdims: bool = False) -> Symbol:
        """The logarithm of the sum of exponentials over feature axes, as `sum` names them."""
        return features.logsumexp(self, axis, keepdims)

    def astype(self, dtype: Any) -> Symbol:
        """The value converted to another dtype."""
        name = np.dtype(dtype).name
        x = self.trace.in_dtype(self, name) if name in ("float32", "float64") else self
        return self.trace.emit("cast", x, dtype=name)

    def __getitem__(self, key: Any) -> Symbol:
        """Slices and `None` over the feature axes, `x[..., None]`, `x[:, :8]`, `x[0]`; or rows of a table, `w[ids]`.

        An index that is a value of integers looks up along the first feature axis: in a shared table, in the table of
        the integer's own type, or in the features of its own row. Negative integers count from the end. Integers out of
        range are clipped; they have no gradient, as in jax.numpy, and no tangent.
        """
        return indexed(self, key if isinstance(key, tuple) else (key,))
