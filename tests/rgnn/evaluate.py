"""Level-1 programs by numpy: what a pass must preserve, without a trace or a compilation.

An operator here is its definition, row by row, and shares no code with the lowerings. Tests of the passes compare
programs with each other by `evaluate`; tests of the operators compare `evaluate` with `jax.numpy`.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

from dejax.rgnn import RelGraph
from dejax.rgnn.ir.inter import VIAS, Op, OpProgram, Space, is_float, parse_spec
from dejax.rgnn.lowering.segments import num_rows, segments

Array = np.ndarray
DISTURBANCE = 2.0**-40


class Known:
    """Values by what computes them, so that programs with many operators in common compute these once.

    All of its programs run on one graph, undisturbed or in one disturbed run. An input is the array itself, at whatever
    position.
    """

    def __init__(self) -> None:
        self.values: dict[Any, tuple[int, Array]] = {}
        self.inputs: dict[int, Any] = {}  # kept, so that no other array gets the identity of one

    def key(self, op: Op, args: list[int], inputs: Mapping[int, Any]) -> Any:
        """What computes a value, by the numbers of the values that it reads."""
        if op.name == "input":
            given = inputs[op.attr("position")]
            self.inputs[id(given)] = given
            return "input", id(given), op.space, op.shape, op.dtype
        attrs = tuple((name, repr(x) if isinstance(x, float) else x) for name, x in op.attrs)  # 0.0 == -0.0
        return op.name, tuple(args), attrs, op.space, op.shape, op.dtype


def evaluate(
    program: OpProgram,
    graph: RelGraph,
    inputs: Mapping[int, Any],
    *,
    rounded: bool = False,
    disturbed: int | None = None,
    known: Known | None = None,
) -> list[Array]:
    """The results of a program.

    Args:
      program: at level 1, verified.
      graph: without padding.
      inputs: by position, in the compiler's form (`to_rows`).
      rounded: whether floats have the dtypes of the program, computed in float32 where these have 16 bits. By default
        every float is a float64.
      disturbed: the number of a run with a relative error of up to `DISTURBANCE` in every number that an operator
        computes. Numbers that are only moved or chosen stay as they are, and equal numbers of one operator stay equal,
        so that ties do.
      known: what programs computed before; it is added to.
    """
    assert graph.edge_mask is None and graph.node_mask is None
    known = Known() if known is None else known
    numbers: list[int] = []
    found: dict[int, Array] = {}
    with np.errstate(all="ignore"):
        for i, op in enumerate(program.ops):
            key = known.key(op, [numbers[a] for a in op.args], inputs)
            if key in known.values:
                number, found[i] = known.values[key]
                numbers.append(number)
                continue
            kept, computed = _dtypes(op.dtype, rounded)
            if op.name == "input":
                result = np.asarray(inputs[op.attr("position")])
            else:
                args = [found[a] for a in op.args]
                # Indices and conditions keep their dtypes.
                some = [n for n, a in enumerate(op.args) if (op.name, n) not in _AS_THEY_ARE]
                for n in some:
                    args[n] = args[n].astype(computed if is_float(op.dtype) else args[n].dtype)
                space = program.ops[op.args[0]].space if op.args else op.space
                result = _Rows(graph, space, op).apply(args)
            assert result.shape == (num_rows(graph, op.space), *op.shape), f"%{i} = {op.name}: {result.shape}"
            found[i] = result.astype(kept)
            if disturbed is not None and op.name != "input" and is_float(op.dtype):
                found[i] = _disturb(found[i], args, disturbed, op.name)
            numbers.append(len(known.values))
            known.values[key] = numbers[i], found[i]
    return [found[o] for o in program.outputs]


_AS_THEY_ARE = {("select", 0), ("lookup", 1), ("place", 1)}


def _dtypes(dtype: str, rounded: bool) -> tuple[np.dtype, np.dtype]:
    """Those in which a value of this dtype is kept and computed."""
    if not is_float(dtype):
        return np.dtype(dtype), np.dtype(dtype)
    kept = np.dtype(jnp.dtype(dtype) if rounded else np.float64)
    return kept, np.dtype(np.float32) if kept.itemsize == 2 else kept


def _disturb(x: Array, args: list[Array], run: int, operator: str) -> Array:
    """Float64 numbers with an error that follows from the number, the run and the operator."""
    moved = np.isin(x, np.concatenate([a.reshape(-1).astype(np.float64) for a in args])) if args else True
    salt = np.uint64(zlib.crc32(f"{run} {operator}".encode()) | 1)
    bits = (np.ascontiguousarray(x).view(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + salt) * salt
    error = (bits >> np.uint64(32)).astype(np.float64) * 2.0**-31 - 1
    return np.where(moved, x, x * (1 + DISTURBANCE * error))


def to_rows(graph: RelGraph, space: Space, x: Any) -> Array:
    """An argument in the compiler's form: edges in its order, one row for a shared value."""
    x = np.asarray(x)
    if space == Space.EDGE:
        return x[np.asarray(graph.edge_ids)]
    return x[None] if space == Space.GRAPH else x


def from_rows(graph: RelGraph, space: Space, x: Array) -> Array:
    """The opposite of `to_rows`, for results."""
    if space == Space.EDGE:
        return x[np.asarray(graph.edge_positions)]
    return x[0] if space == Space.GRAPH else x


class _Rows:
    """One operator on rows of a space."""

    def __init__(self, graph: RelGraph, space: Space, op: Op) -> None:
        self.graph, self.space, self.op, self.attr = graph, space, op, dict(op.attrs)

    def apply(self, args: list[Array]) -> Array:
        op = self.op
        if op.name in ELEMENTWISE:
            rank = len(op.shape)
            return ELEMENTWISE[op.name](op, *(a.reshape(-1, *(1,) * rank) if a.ndim == 1 else a for a in args))
        return getattr(self, f"_{op.name}")(*args)

    def index(self, space: Space | None = None) -> Array:
        """For each row of a finer space (by default that of the first argument), the row to which the map leads."""
        via, space = self.attr["via"], space or self.space
        if via == "self":
            return np.arange(num_rows(self.graph, space))
        if via == "all":
            return np.zeros(num_rows(self.graph, space), int)
        return np.asarray(segments(self.graph, via).index)

    # Values of rows, and rows of other spaces.

    def _const(self) -> Array:
        return np.full(num_rows(self.graph, self.op.space), self.attr["value"])

    def _count(self) -> Array:
        fine = VIAS[self.attr["via"]].fine or Space(self.attr["space"])
        return np.bincount(self.index(fine), minlength=num_rows(self.graph, self.op.space))

    def _gather(self, x: Array) -> Array:
        return x[self.index(self.op.space)]

    def _reduce(self, x: Array) -> Array:
        return reduce_at(self.attr["op"], x, (self.index(),), (num_rows(self.graph, self.op.space),))

    def _softmax(self, score: Array) -> Array:
        index, rows = self.index(), (num_rows(self.graph, VIAS[self.attr["via"]].coarse),)
        e = np.exp(score - reduce_at("max", score, (index,), rows)[index])
        total = reduce_at("sum", e, (index,), rows)[index]
        return e / np.where(total == 0, 1, total)

    def _product_of_others(self, x: Array, *directions: Array) -> Array:
        """For each row the coefficient of e_1 ... e_m in the product of the others' `x + e_1 d_1 + ... + e_m d_m`.

        Squares of an e_i are 0. A polynomial is the array of its coefficients, by the set of its factors as bits.
        """
        index, result = self.index(), np.empty_like(x)
        rows = np.zeros((2 ** len(directions), *x.shape), x.dtype)
        rows[0] = x
        for bit, d in enumerate(directions):
            rows[2**bit] = d
        for k in range(len(x)):
            product = np.zeros_like(rows[:, 0])
            product[0] = 1
            for j in np.flatnonzero(index == index[k]):
                if j != k:
                    before, product = product, np.zeros_like(product)
                    for part, other in itertools.product(range(len(rows)), repeat=2):
                        if not part & other:
                            product[part | other] += before[part] * rows[other, j]
            result[k] = product[-1]
        return result

    def _lookup(self, table: Array, index: Array) -> Array:
        row, column = self._places(index, table.shape[1])
        padded = np.pad(table, [(0, 0), (0, 1)] + [(0, 0)] * (table.ndim - 2))  # what goes nowhere reads zeros
        return padded[row, column]

    def _place(self, x: Array, index: Array) -> Array:
        size = self.attr["size"]
        shape = (num_rows(self.graph, self.op.space), size + 1)  # what goes nowhere is the last one
        return reduce_at(self.attr["op"], x, self._places(index, size), shape)[:, :size]

    def _places(self, index: Array, size: int) -> tuple[Array, Array]:
        """The row and the place for each index; `size` for those that go nowhere."""
        row = self.index().reshape(-1, *(1,) * (index.ndim - 1))
        outside = self.attr["outside"]
        column = index.astype(np.int64)
        if outside != "drop":
            column = np.where(column < 0, column + size, column)
        if outside == "clip" and size:
            column = np.clip(column, 0, size - 1)
        return np.broadcast_to(row, index.shape), np.where((column >= 0) & (column < size), column, size)

    # Products.

    def _linear(self, x: Array, w: Array) -> Array:
        left, right, out = parse_spec(self.attr["spec"])
        return np.einsum(f"...{left},...{right}->...{out}", x, w[self.index()] if len(w) > 1 or not len(x) else w)

    def _outer(self, x: Array, y: Array) -> Array:
        left, right, out = parse_spec(self.attr["spec"])
        product = np.einsum(f"...{left},...{right}->...{out}", x, y)
        return reduce_at("sum", product, (self.index(),), (num_rows(self.graph, self.op.space),))

    def _dot(self, x: Array, y: Array) -> Array:
        return np.einsum("...k,...k->...", x, y)

    # Features.

    @property
    def axes(self) -> tuple[int, ...]:
        return tuple(a + 1 for a in self.attr["axes"])

    def _sum_features(self, x: Array) -> Array:
        return x.sum(self.axes, keepdims=self.attr["keepdims"])

    def _extremum_features(self, x: Array) -> Array:
        return (np.max if self.attr["op"] == "max" else np.min)(x, self.axes, keepdims=self.attr["keepdims"])

    def _extremum_share(self, x: Array) -> Array:
        extremum = (np.max if self.attr["op"] == "max" else np.min)(x, self.axes, keepdims=True)
        chosen = ((x == extremum) | (x != x)).astype(x.dtype)
        return chosen / chosen.sum(self.axes, keepdims=True)

    def _reshape(self, x: Array) -> Array:
        return x.reshape(len(x), *self.op.shape)

    def _transpose(self, x: Array) -> Array:
        return x.transpose(0, *(a + 1 for a in self.attr["perm"]))

    def _broadcast(self, x: Array) -> Array:
        x = x.reshape(-1, *(1,) * len(self.op.shape)) if x.ndim == 1 else x
        return np.broadcast_to(x, (len(x), *self.op.shape))

    def _concat(self, *parts: Array) -> Array:
        return np.concatenate(parts, self.attr["axis"] + 1)

    def _slice(self, x: Array) -> Array:
        return x.take(range(self.attr["start"], self.attr["stop"]), self.attr["axis"] + 1)

    def _pad(self, x: Array) -> Array:
        widths = [(0, 0)] * x.ndim
        widths[self.attr["axis"] + 1] = (self.attr["before"], self.attr["after"])
        return np.pad(x, widths)


def reduce_at(how: str, x: Array, index: tuple[Array, ...], shape: tuple[int, ...]) -> Array:
    """The sum, product, maximum or minimum of the rows at each index.

    An extremum is 0 where there are no rows, and where none of them is finite.
    """
    row = index[0] if len(index) == 1 else index[0] * shape[1] + index[1]
    shape = (*shape, *x.shape[row.ndim :])
    width = math.prod(x.shape[row.ndim :])
    at = (row.reshape(-1, 1) * width + np.arange(width)).reshape(-1)  # numpy is ten times as fast on one axis

    def reduced(by: np.ufunc, start: Any) -> Array:
        found = np.full(math.prod(shape), start, x.dtype)
        by.at(found, at, x.reshape(-1))
        return found.reshape(shape)

    if how in ("sum", "prod"):
        return reduced(np.add if how == "sum" else np.multiply, how == "prod")
    if x.dtype == bool:
        start = how == "min"
    elif x.dtype.kind == "f":
        start = np.inf if how == "min" else -np.inf
    else:
        start = np.iinfo(x.dtype).max if how == "min" else np.iinfo(x.dtype).min
    found = reduced(np.minimum if how == "min" else np.maximum, start)
    some = np.zeros(math.prod(shape), bool)
    some[at] = True
    some = some.reshape(shape)
    return np.where(some & (found != start) if x.dtype.kind == "f" else some, found, 0)


ELEMENTWISE: dict[str, Callable[..., Array]] = {
    "add": lambda op, x, y: x + y,
    "sub": lambda op, x, y: x - y,
    "mul": lambda op, x, y: x * y,
    "div": lambda op, x, y: x / y,
    "max": lambda op, x, y: np.maximum(x, y),
    "min": lambda op, x, y: np.minimum(x, y),
    "gt": lambda op, x, y: x > y,
    "eq": lambda op, x, y: x == y,
    "select": lambda op, c, x, y: np.where(c > 0, x, y),
    "power": lambda op, x, y: np.power(x, y),
    "atan2": lambda op, y, x: np.arctan2(y, x),
    "neg": lambda op, x: -x,
    "sin": lambda op, x: np.sin(x),
    "cos": lambda op, x: np.cos(x),
    "log1p": lambda op, x: np.log1p(x),
    "expm1": lambda op, x: np.expm1(x),
    "softplus": lambda op, x: np.logaddexp(x, 0),
    "exp": lambda op, x: np.exp(x),
    "log": lambda op, x: np.log(x),
    "sqrt": lambda op, x: np.sqrt(x),
    "rsqrt": lambda op, x: 1 / np.sqrt(x),
    "tanh": lambda op, x: np.tanh(x),
    "sigmoid": lambda op, x: 1 / (1 + np.exp(-x)),
    "erf": lambda op, x: np.vectorize(math.erf, otypes=[x.dtype])(x),
    "abs": lambda op, x: np.abs(x),
    "sign": lambda op, x: np.sign(x),
    "square": lambda op, x: x * x,
    "reciprocal": lambda op, x: 1 / x,
    "relu": lambda op, x: np.where(x <= 0, 0, x),
    "leaky_relu": lambda op, x: np.where(x > 0, x, op.attr("slope") * x),
    "step": lambda op, x: np.where(x > 0, 1, op.attr("slope")),
    "pow": lambda op, x: (
        x ** (int(e) if (e := op.attr("exponent")) == int(e) and (e >= 0 or x.dtype.kind == "f") else e)
    ),
    "cast": lambda op, x: x,
    "stop_gradient": lambda op, x: x,
}
