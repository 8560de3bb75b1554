"""The front end: a Python function over symbolic values, traced once into the inter-operator IR.

A model layer is a function of `g` (a `GraphSymbol`) and of arrays; inside it every value knows its space. What an array
argument stands for is said where it is used: `g.node(h)`, `g.edge(e)`, `g.per_edge_type(w)`, `g.per_node_type(w)` or
`g.shared(w)`. Misuse raises `ProgramError`, which points at the user's line.
"""

from __future__ import annotations

import inspect
import linecache
import math
import numbers
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Builder, IRError, Space

_HERE = str(Path(__file__).parent)
_INTERNAL = {str(Path(_HERE) / name) for name in ("frontend.py", "program.py", "functional.py")}

SPACE_WORDS = {
    Space.NODE: "a node value",
    Space.EDGE: "an edge value",
    Space.SOURCE_PAIR: "a (source, edge type) value",
    Space.DESTINATION_PAIR: "a (destination, edge type) value",
    Space.EDGE_TYPE: "an edge-type constant",
    Space.NODE_TYPE: "a node-type constant",
    Space.GRAPH: "a shared value",
}
_REMEDY = {
    Space.NODE: "read it on the edges with g.src(...) or g.dst(...)",
    Space.EDGE: "bring it to the nodes with g.sum_to_dst(...), g.mean_to_dst(...) or g.max_to_dst(...)",
    Space.NODE_TYPE: "use it with a node value, or read it on the edges with g.src(...) or g.dst(...)",
}


class ProgramError(ValueError):
    """A relational program that makes no sense; the message begins with the line of the program at fault."""


def user_line() -> str | None:
    """`file:line` of the innermost frame that is not the front end's own."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path not in _INTERNAL and not path.startswith(str(Path(inter.__file__).parent)):
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return None


def fail(message: str, line: str | None = None) -> ProgramError:
    """The error, pointing at `file:line`, by default the line of the program that runs now."""
    line = line or user_line()
    if line is None:
        return ProgramError(message)
    path, number = line.rsplit(":", 1)
    text = linecache.getline(path, int(number)).strip()
    return ProgramError(f"{line}: {message}" + (f"\n    {text}" if text else ""))


def _float_of(dtype: str) -> str:
    """The dtype of integers' quotients."""
    return "float64" if dtype in ("int64", "uint64") else "float32"


def _dtype_of(x: numbers.Real, like: str) -> str:
    """The dtype of a Python number in arithmetic with a value of dtype `like`."""
    if inter.is_float(like) or isinstance(x, bool):
        return like
    if not isinstance(x, numbers.Integral):
        return _float_of(like)
    return "int32" if like == "bool" else like


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
        mean = self.trace.wide(self).sum(axis, keepdims) * (1.0 / size)
        return mean.astype(self.dtype) if inter.is_float(self.dtype) and mean.dtype != self.dtype else mean

    def astype(self, dtype: Any) -> Symbol:
        return self.trace.emit("cast", self, dtype=np.dtype(dtype).name)

    def __getitem__(self, key: Any) -> Symbol:
        """Slices and `None` over the feature axes: `x[..., None]`, `x[:, :8]`, `x[0]`."""
        return self.trace.index(self, key if isinstance(key, tuple) else (key,))


class Trace:
    """One run of the user's function: the builder and what has been said of each argument."""

    def __init__(self, name: str, rows: dict[Space, int]) -> None:
        self.builder = Builder(name)
        self.rows = rows
        self.declared: dict[int, Symbol] = {}

    def symbol(self, index: int) -> Symbol:
        return Symbol(self, index)

    def emit(self, name: str, *args: Symbol, **attrs: Any) -> Symbol:
        self.builder.line = user_line()
        for x in args:
            self.own(x)
        try:
            return Symbol(self, self.builder.op(name, *(a.index for a in args), **attrs))
        except IRError as error:
            raise fail(str(error)) from None

    def own(self, x: Argument | Symbol) -> None:
        """Numbers of values mean something in their own program only."""
        if x.trace is not self:
            raise fail("a value of another program is used here; a program uses its own arguments only")

    def declare(self, x: Any, space: Space, method: str) -> Symbol:
        """An argument becomes an input of `space`; a value is checked to be of that space."""
        if isinstance(x, Argument | Symbol):
            self.own(x)
        if isinstance(x, Argument):
            known = self.declared.get(x.position)
            if known is None:
                known = self._input(x, space, method)
                self.declared[x.position] = known
            if known.space != space:
                raise fail(
                    f"argument {x.name!r} is used here as {SPACE_WORDS[space]} and elsewhere as "
                    f"{SPACE_WORDS[known.space]}; an argument has rows of one kind"
                )
            return known
        if isinstance(x, numbers.Real):
            x = self.symbol(self.builder.const(float(x), "float32"))
        if not isinstance(x, Symbol):
            raise fail(
                f"{method} takes an array argument of the program or a value made from one, got {type(x).__name__}"
            )
        if space != Space.GRAPH and (x.space == Space.GRAPH or x.op.name == "const"):
            return self.symbol(self.builder.lift(x.index, space))
        if x.space == Space.NODE_TYPE and space == Space.NODE:
            return self.emit("gather", x, via="ntype")
        if x.space != space:
            remedy = _REMEDY.get(x.space)
            raise fail(
                f"{method} needs {SPACE_WORDS[space]}, got {SPACE_WORDS[x.space]}" + (f"; {remedy}" if remedy else "")
            )
        return x

    def _input(self, x: Argument, space: Space, method: str) -> Symbol:
        shape = x.shape
        if x.dtype.startswith("complex"):
            raise fail(
                f"argument {x.name!r} is {x.dtype}; programs have no complex numbers: pass the real and the imaginary "
                "part, side by side as features or as two arguments"
            )
        if space != Space.GRAPH:
            rows = self.rows[space]
            if not shape or shape[0] != rows:
                raise fail(
                    f"{method} needs one row for each {space.replace('_', ' ')} ({rows}); "
                    f"argument {x.name!r} has shape {shape}"
                )
            shape = shape[1:]
        return self.emit_input(x, space, shape)

    def emit_input(self, x: Argument, space: Space, shape: tuple[int, ...]) -> Symbol:
        self.builder.line = user_line()
        index = self.builder.op(
            "input", name=x.name, position=x.position, space=str(space), shape=tuple(shape), dtype=x.dtype
        )
        return self.symbol(index)

    def axis(self, x: Symbol, axis: int) -> int:
        if not isinstance(axis, int):
            raise fail(f"axis must be one feature axis, a whole number, got {axis!r}")
        if not -len(x.shape) <= axis < len(x.shape):
            raise fail(f"axis {axis} is out of range for feature shape {x.shape}")
        return axis % len(x.shape)

    def value(self, x: Any, like: Symbol) -> Symbol:
        """An operand of arithmetic with `like`: a number becomes a constant of its dtype."""
        if isinstance(x, Argument):
            x._untyped()
        if isinstance(x, numbers.Real):
            return self.symbol(self.builder.const(float(x), _dtype_of(x, like.dtype), like.space))
        if not isinstance(x, Symbol):
            raise fail(
                f"arithmetic with {type(x).__name__} is not possible here; pass the array as an argument of the program"
            )
        self.own(x)
        return x

    def floating(self, x: Symbol) -> Symbol:
        """Integers as float32 (of 64 bits as float64), for functions whose values are not whole numbers."""
        return x if inter.is_float(x.dtype) else self.emit("cast", x, dtype=_float_of(x.dtype))

    def wide(self, x: Symbol) -> Symbol:
        """Floats of 16 bits as float32, for sums that are divided."""
        return x.astype("float32") if x.dtype in ("float16", "bfloat16") else x

    def counted(self, x: Symbol) -> Symbol:
        """Booleans as int32, for sums."""
        return self.emit("cast", x, dtype="int32") if x.dtype == "bool" else x

    def number(self, x: Symbol, what: str) -> Symbol:
        """The value, which `what` is done with, unless it is of booleans."""
        if x.dtype == "bool":
            raise fail(f"{what} has no meaning for booleans; use x.astype('float32') or, for `not`, 1 - x")
        return x

    def align(self, *xs: Symbol) -> list[Symbol]:
        """The same values in one space: constants by type and shared values are read where the others live."""
        for x in xs:
            self.own(x)
        spaces = {x.space for x in xs if x.op.name != "const"} or {x.space for x in xs}
        for coarse, fine, via in (
            (Space.EDGE_TYPE, Space.EDGE, "etype"),
            (Space.EDGE_TYPE, Space.SOURCE_PAIR, "source_pair.etype"),
            (Space.EDGE_TYPE, Space.DESTINATION_PAIR, "destination_pair.etype"),
            (Space.NODE_TYPE, Space.NODE, "ntype"),
        ):
            if spaces - {Space.GRAPH} == {coarse, fine}:
                xs = tuple(
                    self.emit("gather", x, via=via) if x.space == coarse and x.op.name != "const" else x for x in xs
                )
        rest = {x.space for x in xs if x.op.name != "const"} - {Space.GRAPH}
        if len(rest) > 1:
            found = sorted(rest)
            hints = [_REMEDY[s] for s in found if s in _REMEDY]
            raise fail(
                f"{' meets '.join(SPACE_WORDS[s] for s in found)}; all must live in one space"
                + (f": {hints[0]}" if hints else "")
            )
        target = rest.pop() if rest else xs[0].space if len({x.space for x in xs}) == 1 else Space.GRAPH
        return [self.symbol(self.builder.lift(x.index, target)) for x in xs]

    def binary(self, name: str, a: Any, b: Any) -> Symbol:
        like = a if isinstance(a, Symbol) else b
        x, y = self.align(self.value(a, like), self.value(b, like))
        if name == "div":
            x, y = self.floating(x), self.floating(y)
        if name == "sub" and x.dtype == y.dtype:
            x = self.number(x, "x - y")
        return self.emit(name, x, y)

    def matmul(self, x: Symbol, w: Any) -> Symbol:
        if isinstance(w, Argument):
            raise fail(
                f"the weight {w.name!r} of shape {w.shape} is not typed; write x @ g.per_edge_type(w), "
                "x @ g.per_node_type(w) or x @ g.shared(w)"
            )
        if not isinstance(w, Symbol):
            raise fail(
                f"x @ w needs a weight made by g.per_edge_type, g.per_node_type or g.shared, got {type(w).__name__}"
            )
        self.own(w)
        if w.space == x.space and w.space in (Space.EDGE_TYPE, Space.NODE_TYPE, Space.GRAPH):
            via = "self"
        elif w.space == Space.GRAPH:
            via = "all"
        else:
            via = inter.TYPE_VIA.get(x.space, "")
            if not via or inter.VIAS[via].coarse != w.space:
                hint = ""
                if w.space == Space.NODE_TYPE:
                    hint = (
                        "; multiply on the nodes first, g.node(h) @ g.per_node_type(w), then g.src(...) or g.dst(...)"
                    )
                elif w.space == Space.EDGE_TYPE and x.space == Space.NODE:
                    hint = "; read the node value on the edges first, g.src(h) @ g.per_edge_type(w)"
                raise fail(f"{SPACE_WORDS[x.space]} cannot be multiplied by {SPACE_WORDS[w.space]}{hint}")
        rank = (len(x.shape), len(w.shape))
        spec = {(1, 2): "k,kn->n", (2, 3): "hk,hkn->hn", (1, 3): "k,hkn->hn", (2, 2): "hk,kn->hn"}.get(rank)
        if via == "self" and rank == (2, 2):
            spec = "jk,kn->jn"
        if spec is None:
            raise fail(
                f"x @ w takes rows of shape (width,) or (heads, width) and a weight of shape (width, out) or "
                f"(heads, width, out) for each type; got {x.shape} and {w.shape}"
            )
        if x.shape[-1] != w.shape[-2]:
            raise fail(
                f"wrong width: rows of {SPACE_WORDS[x.space]} are {x.shape[-1]} wide, the weight takes {w.shape[-2]}"
            )
        return self.emit("linear", x, w, spec=spec, via=via)

    def index(self, x: Symbol, key: tuple) -> Symbol:
        rank = len(x.shape)
        used = sum(k is not None and k is not Ellipsis for k in key)
        if used > rank:
            raise fail(f"too many indices for feature shape {x.shape}; only features are indexed, never rows")
        if Ellipsis not in key:
            key = (*key, Ellipsis)
        at = key.index(Ellipsis)
        key = (*key[:at], *(slice(None),) * (rank - used), *key[at + 1 :])
        axis, shape = 0, []
        for k in key:
            if k is None:
                shape.append(1)
                continue
            size = x.shape[axis]
            if isinstance(k, int):
                if not -size <= k < size:
                    raise fail(f"index {k} is out of range for feature axis {axis} of size {size}")
                start, stop, drop = k % size, k % size + 1, True
            elif isinstance(k, slice) and k.step in (None, 1):
                (start, stop, _), drop = k.indices(size), False
            else:
                raise fail(f"features are indexed by integers, slices without a step, None and ...; got {k!r}")
            if (start, stop) != (0, size):
                x = self.emit("slice", x, axis=axis, start=start, stop=max(start, stop))
            if not drop:
                shape.append(x.shape[axis])
            axis += 1
        return x if tuple(shape) == x.shape else self.emit("reshape", x, shape=tuple(shape))


class GraphSymbol:
    """The graph inside a program: where values are read, typed and brought together."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace

    # what arguments stand for
    def node(self, x: Any) -> Symbol:
        """A value with one row a node."""
        return self._trace.declare(x, Space.NODE, "g.node")

    def edge(self, x: Any) -> Symbol:
        """A value with one row an edge, in the order of the edges that the graph was made from."""
        return self._trace.declare(x, Space.EDGE, "g.edge")

    def source_pair(self, x: Any) -> Symbol:
        """A value with one row a unique (sender, edge type) pair, numbered as in `RelGraph.by_source_pair`."""
        return self._trace.declare(x, Space.SOURCE_PAIR, "g.source_pair")

    def per_edge_type(self, w: Any) -> Symbol:
        """A weight or constant with one row an edge type."""
        return self._trace.declare(w, Space.EDGE_TYPE, "g.per_edge_type")

    def per_node_type(self, w: Any) -> Symbol:
        """A weight or constant with one row a node type."""
        return self._trace.declare(w, Space.NODE_TYPE, "g.per_node_type")

    def shared(self, w: Any) -> Symbol:
        """A weight or constant without rows, the same for all."""
        return self._trace.declare(w, Space.GRAPH, "g.shared")

    # reading on the edges
    def src(self, x: Any) -> Symbol:
        """The value of each edge's source node (or of its source pair)."""
        return self._endpoint(x, "src", "source_pair", "g.src")

    def dst(self, x: Any) -> Symbol:
        """The value of each edge's destination node."""
        return self._endpoint(x, "dst", "destination_pair", "g.dst")

    def _endpoint(self, x: Any, via: str, pair_via: str, method: str) -> Symbol:
        if isinstance(x, Symbol) and x.space == inter.VIAS[pair_via].coarse:
            return self._trace.emit("gather", x, via=pair_via)
        return self._trace.emit("gather", self._trace.declare(x, Space.NODE, method), via=via)

    def in_degree(self, *, within_relation: bool = False, dtype: str = "float32") -> Symbol:
        """On each edge, how many edges arrive at its destination (of the same edge type, `within_relation`).

        `dtype` is float32, float64, int32 or int64: 16 bits do not hold the counts of large graphs. A value in 16 bits
        over a count is float32; `.astype` gives it in 16 bits.
        """
        via = "destination_pair" if within_relation else "dst"
        return self._trace.emit("gather", self._trace.emit("count", via=via, dtype=np.dtype(dtype).name), via=via)

    def out_degree(self, *, dtype: str = "float32") -> Symbol:
        """On each edge, how many edges leave its source; `dtype` as for `in_degree`."""
        return self._trace.emit("gather", self._trace.emit("count", via="src", dtype=np.dtype(dtype).name), via="src")

    # bringing together
    def _reduce(self, x: Any, via: str, how: str, method: str) -> Symbol:
        trace = self._trace
        if isinstance(x, Symbol) and x.space == Space.EDGE_TYPE:
            x = trace.emit("gather", x, via="etype")
        x = trace.declare(x, Space.EDGE, method)
        if how != "mean":
            return trace.emit("reduce", trace.counted(x) if how == "sum" else x, via=via, op=how)
        x = trace.floating(x)
        # Sums and counts of many edges are beyond 16 bits, their quotients not.
        wide = trace.wide(x)
        total = trace.emit("reduce", wide, via=via, op="sum")
        count = trace.emit("count", via=via, dtype=wide.dtype)
        one = trace.symbol(trace.builder.const(1.0, wide.dtype))
        mean = trace.binary("div", total, trace.binary("max", count, one))
        return mean if mean.dtype == x.dtype else mean.astype(x.dtype)

    def sum_to_dst(self, x: Any) -> Symbol:
        """Each node's sum over its incoming edges; 0 where there is none."""
        return self._reduce(x, "dst", "sum", "g.sum_to_dst")

    def mean_to_dst(self, x: Any) -> Symbol:
        """Each node's mean over its incoming edges; 0 where there is none."""
        return self._reduce(x, "dst", "mean", "g.mean_to_dst")

    def max_to_dst(self, x: Any) -> Symbol:
        """Each node's maximum over its incoming edges; 0 where there is none above -inf.

        Ties share the gradient equally.
        """
        return self._reduce(x, "dst", "max", "g.max_to_dst")

    def sum_to_src(self, x: Any) -> Symbol:
        """Each node's sum over its outgoing edges; 0 where there is none."""
        return self._reduce(x, "src", "sum", "g.sum_to_src")

    def mean_to_src(self, x: Any) -> Symbol:
        """Each node's mean over its outgoing edges; 0 where there is none."""
        return self._reduce(x, "src", "mean", "g.mean_to_src")

    def max_to_src(self, x: Any) -> Symbol:
        """Each node's maximum over its outgoing edges; 0 where there is none above -inf."""
        return self._reduce(x, "src", "max", "g.max_to_src")


def _line_in(function: Callable, error: Exception) -> str | None:
    """`file:line` of the last place in the function's file that an error came through."""
    path = getattr(getattr(inspect.unwrap(function), "__code__", None), "co_filename", None)
    lines = [
        f"{path}:{line}" for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == path
    ]
    return lines[-1] if lines else None


def trace_program(
    name: str,
    function: Callable,
    rows: dict[Space, int],
    arguments: list[tuple[str, tuple[int, ...], str]],
    rebuild: Callable[[list[Argument]], tuple[tuple, dict]],
) -> tuple[inter.Program, Any]:
    """Runs `function` over symbols and returns its program with the structure of its result.

    Args:
      rows: how many rows each space has.
      arguments: name, shape and dtype of each array argument.
      rebuild: makes the function's positional and keyword arguments from the symbols.
    """
    import jax

    trace = Trace(name, rows)
    symbols = [Argument(trace, n, i, shape, dtype) for i, (n, shape, dtype) in enumerate(arguments)]
    args, kwargs = rebuild(symbols)
    try:
        result = function(GraphSymbol(trace), *args, **kwargs)
    except TypeError as error:
        if not any(words in str(error) for words in ("not a valid JAX type", "as a JAX value")):
            raise
        raise fail(
            "functions of jax.numpy and jax.nn do not take values of a program; use those of rgnn (rgnn.exp, "
            "rgnn.relu, rgnn.maximum, ...), or call them before or after the program",
            _line_in(function, error),
        ) from error
    leaves, tree = jax.tree_util.tree_flatten(result, is_leaf=lambda x: isinstance(x, (Symbol, Argument)))
    code = getattr(inspect.unwrap(function), "__code__", None)
    here = (
        f"{code.co_filename}:{code.co_firstlineno}" if code else None
    )  # the function is left: its head is what is known
    for leaf in leaves or [None]:
        if not isinstance(leaf, Symbol) or leaf.trace is not trace:
            raise fail(
                f"program {name!r} must return values made from its arguments, got {leaf!r}; "
                "an argument returned as it is needs g.node(x) or g.edge(x)",
                here,
            )
    return trace.builder.build(leaf.index for leaf in leaves), tree
