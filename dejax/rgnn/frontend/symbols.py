"""Symbolic values: what a program's function is called with, and what every method of them gives."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from dejax.rgnn.frontend.errors import fail
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space

if TYPE_CHECKING:
    from dejax.rgnn.frontend.trace import Trace


class Argument:
    """An array argument of a program, before it is said what its rows stand for."""

    __array_ufunc__ = None  # numpy operands defer to the methods here

    def __init__(self, trace: Trace, name: str, position: int, shape: tuple[int, ...], dtype: str) -> None:
        self.trace, self.name, self.position = trace, name, position
        self.shape, self.dtype = shape, dtype

    def __repr__(self) -> str:
        return f"<argument {self.name}: {self.dtype}{list(self.shape)}>"

    def _untyped(self, *_: Any) -> Any:
        raise fail(
            f"argument {self.name!r} of shape {self.shape} is used without saying what its rows stand for; write "
            "g.node(x), g.src(x), g.dst(x), g.edge(x), g.per_edge_type(x), g.per_node_type(x) or g.shared(x)"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _untyped
    __matmul__ = __rmatmul__ = __neg__ = __pow__ = __getitem__ = reshape = astype = sum = mean = _untyped
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __iter__ = _untyped
    __hash__ = object.__hash__


class Symbol:
    """A value of the program being traced: a space, the feature shape of one row, a dtype."""

    __array_ufunc__ = None

    def __init__(self, trace: Trace, index: int) -> None:
        self.trace, self.index = trace, index

    @property
    def op(self) -> inter.Op:
        return self.trace.builder.ops[self.index]

    @property
    def space(self) -> Space:
        return self.op.space

    @property
    def shape(self) -> tuple[int, ...]:
        """The feature shape of one row: () for a scalar, (width,), or (heads, width)."""
        return self.op.shape

    @property
    def dtype(self) -> str:
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

    def __neg__(self) -> Symbol:
        return self.trace.emit("neg", self.trace.number(self, "-x"))

    def __pow__(self, exponent: float) -> Symbol:
        if not isinstance(exponent, numbers.Real):
            raise fail(f"x ** y needs a Python number as y, got {exponent!r}")
        whole = isinstance(exponent, numbers.Integral) and exponent >= 0
        return self.trace.emit("pow", self if whole else self.trace.floating(self), exponent=float(exponent))

    def __matmul__(self, weight: Any) -> Symbol:
        return self.trace.matmul(self, weight)

    # comparisons: 1 where they hold, else 0, in the dtype of what is compared; without gradient
    def __eq__(self, other: Any) -> Symbol:  # type: ignore[override]
        return self.trace.binary("eq", self, other)

    def __ne__(self, other: Any) -> Symbol:  # type: ignore[override]
        return 1 - self.trace.binary("eq", self, other)

    def __gt__(self, other: Any) -> Symbol:
        return self.trace.binary("gt", self, other)

    def __lt__(self, other: Any) -> Symbol:
        return self.trace.binary("gt", other, self)

    def __ge__(self, other: Any) -> Symbol:
        return (self > other) + (self == other)

    def __le__(self, other: Any) -> Symbol:
        return (self < other) + (self == other)

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise fail(
            "a value is not true or false while the program is traced: it has many rows. Choose row by row with "
            "rgnn.where_positive(condition, x, y), or multiply masks for `and`"
        )

    def __iter__(self) -> Iterator[Symbol]:
        if not self.shape:
            raise fail("a value of one number a row has no feature axis to unpack; rows are never indexed")
        return (self[i] for i in range(self.shape[0]))

    # features
    def reshape(self, *shape: Any) -> Symbol:
        """The same numbers of each row in another feature shape; one axis may be -1."""
        sizes = tuple(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else tuple(shape)
        if -1 in sizes:
            rest = math.prod(s for s in sizes if s != -1)
            sizes = tuple(self.op.width // rest if s == -1 else s for s in sizes)
        return self.trace.emit("reshape", self, shape=sizes)

    def sum(self, axis: int = -1, keepdims: bool = False) -> Symbol:
        """The sum over a feature axis; of booleans their number."""
        x = self.trace.counted(self)
        return self.trace.emit("sum_features", x, axes=(self.trace.axis(self, axis),), keepdims=bool(keepdims))

    def mean(self, axis: int = -1, keepdims: bool = False) -> Symbol:
        """The mean over a feature axis."""
        size = self.shape[self.trace.axis(self, axis)]
        if size == 0:
            raise fail(f"a feature shape of {self.shape} has no mean over an axis of size 0")
        return self.sum(axis, keepdims) * (1.0 / size)

    def astype(self, dtype: Any) -> Symbol:
        return self.trace.emit("cast", self, dtype=np.dtype(dtype).name)

    def __getitem__(self, key: Any) -> Symbol:
        """Slices and `None` over the feature axes: `x[..., None]`, `x[:, :8]`, `x[0]`."""
        return self.trace.index(self, key if isinstance(key, tuple) else (key,))
