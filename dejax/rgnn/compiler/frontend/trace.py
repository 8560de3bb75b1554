"""One run of the user's function, which appends an operator for each value it makes."""

from __future__ import annotations

import functools
import numbers
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn.compiler.frontend.errors import REMEDY, SPACE_WORDS, fail, user_line
from dejax.rgnn.compiler.frontend.symbols import Argument, Symbol
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Builder, IRError, Space


def _float_of(dtype: str) -> str:
    """The dtype of a quotient of integers."""
    return "float64" if dtype in ("int64", "uint64") else "float32"


def _dtype_of(x: numbers.Real, like: str) -> str:
    """The dtype of a Python number in arithmetic with a value of dtype `like`."""
    if inter.is_float(like) or isinstance(x, bool):
        return like
    if not isinstance(x, numbers.Integral):
        return _float_of(like)
    return "int32" if like == "bool" else like


def _held(x: Any, dtype: str) -> float:
    """A number that a constant of this dtype holds: an integer dtype has bounds, beyond which it would wrap around."""
    if dtype == "bool" or inter.is_float(dtype):
        return float(x)
    info = np.iinfo(dtype)
    if not info.min <= x <= info.max:
        raise fail(
            f"a number beside {dtype} values must be from {info.min} to {info.max}, got {x}; give the values a wider "
            "dtype first: x.astype('int32') or x.astype('float32')"
        )
    return int(x)


def is_array(x: Any) -> bool:
    """Whether an object is an array of numpy or jax, also a traced one, and not a Python number."""
    return isinstance(x, np.ndarray | jax.Array) or (isinstance(x, np.generic) and not isinstance(x, numbers.Real))


class Trace:
    """One run of the user's function: its operators, and the space of each argument used so far."""

    def __init__(self, name: str, rows: dict[Space, int], num_arguments: int) -> None:
        self.builder = Builder(name)
        self.rows = rows
        self.num_arguments = num_arguments
        self.declared: dict[int, Symbol] = {}
        self.closed_over: list[Any] = []  # arrays of the closure; they are inputs after the arguments
        self._known: dict[tuple[int, Space], Argument] = {}
        # Values made of numbers and counts alone take the float dtype of what they meet, as numbers do in jax.numpy.
        self.weak: set[int] = set()
        self.float_dtype = jax.dtypes.canonicalize_dtype("float64").name

    def symbol(self, index: int) -> Symbol:
        """The value with this number."""
        return Symbol(self, index)

    def emit(self, name: str, *args: Symbol, **attrs: Any) -> Symbol:
        """Appends an operator and returns its value. Operands that must have one dtype are converted to it.

        Raises:
          ProgramError: the operator cannot take such values; the message names the user's line.
        """
        self.builder.line = user_line()
        for x in args:
            self.own(x)
        values = args[1:] if name == "select" else args  # a condition decides no dtype
        met = dict(zip(values, self._of_one_kind(name, values), strict=True))
        weak = bool(values) and name != "cast" and all(x.index in self.weak for x in met.values())
        try:
            made = Symbol(self, self.builder.op(name, *(met.get(a, a).index for a in args), **attrs))
        except IRError as error:
            raise fail(str(error)) from None
        if weak:
            self.weak.add(made.index)
        return made

    def _of_one_kind(self, name: str, values: Sequence[Symbol]) -> list[Symbol]:
        """Values that meet in an operator: weak ones in the dtype of the others, integers in one dtype, as in JAX."""
        dtypes = dict.fromkeys(v.dtype for v in values if v.index not in self.weak)
        floats = [d for d in dtypes if inter.is_float(d)]
        if floats:
            dtype = "float64" if "float64" in floats else "float32"  # 16-bit floats do not hold counts
            found = [self.in_dtype(v, dtype) for v in values]
            if name not in ("linear", "dot"):
                return found
            # Passes add and multiply what products read, which wraps around in integers.
            result = inter.promote(*(v.dtype for v in found))
            return [v if inter.is_float(v.dtype) else self.emit("cast", v, dtype=result) for v in found]
        if name in inter.BINARY | {"select", "concat", "dot", "linear"} and len(dtypes) > 1:
            dtype = functools.reduce(lambda a, b: jnp.promote_types(a, b).name, dtypes)
            dtype = jax.dtypes.canonicalize_dtype(dtype).name
            return [v if v.dtype in ("bool", dtype) else self.emit("cast", v, dtype=dtype) for v in values]
        return list(values)

    def in_dtype(self, x: Symbol, dtype: str) -> Symbol:
        """A weak value computed anew with its numbers and counts in `dtype`; any other value as it is."""
        if x.index not in self.weak or x.dtype == dtype:
            return x
        made: dict[int, int] = {}

        def visit(index: int) -> int:
            if index not in made:
                op = self.builder.ops[index]
                attrs = {**dict(op.attrs), **({"dtype": dtype} if op.name in ("const", "count") else {})}
                made[index] = self.builder.op(op.name, *map(visit, op.args), **attrs)
            return made[index]

        found = Symbol(self, visit(x.index))
        self.weak.update(made.values())
        return found

    def count(self, via: str, dtype: Any = None, **attrs: Any) -> Symbol:
        """For each row of the map's coarse space, how many rows are mapped to it.

        Without `dtype` the count is weak: it takes the float dtype of the values that it meets.
        """
        made = self.emit("count", via=via, dtype=self.float_dtype if dtype is None else np.dtype(dtype).name, **attrs)
        if dtype is None:
            self.weak.add(made.index)
        return made

    def number_of(self, x: numbers.Real, like: Symbol) -> Symbol:
        """A Python number as a constant in the dtype that it has in arithmetic with `like`."""
        weak_float = not inter.is_float(like.dtype) and not isinstance(x, numbers.Integral)
        dtype = self.float_dtype if weak_float else _dtype_of(x, like.dtype)
        made = self.symbol(self.builder.const(_held(x, dtype), dtype, like.space))
        if weak_float or like.index in self.weak:
            self.weak.add(made.index)
        return made

    def own(self, x: Argument | Symbol) -> None:
        """Raises ProgramError for a value of another program, whose index has no meaning here."""
        if x.trace is not self:
            raise fail("a program must use its own arguments and values only, got a value of another program")

    def declare(self, x: Any, space: Space, method: str) -> Symbol:
        """Makes an argument or an array an input with rows of `space`; checks that a value has rows of that space.

        `method` is the name of the user's call, for errors.
        """
        if is_array(x):
            x = self.closure(x, space)
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
            x = self.symbol(self.builder.const(float(x), self.float_dtype))
            self.weak.add(x.index)
        if not isinstance(x, Symbol):
            raise fail(
                f"{method} takes an array, an argument of the program or a value made from one, got {type(x).__name__}"
            )
        if space != Space.GRAPH and (x.space == Space.GRAPH or x.op.name == "const"):
            return self.lifted(x, space)
        if x.space == Space.NODE_TYPE and space == Space.NODE:
            return self.emit("gather", x, via="ntype")
        if x.space != space:
            remedy = REMEDY.get(x.space)
            raise fail(
                f"{method} needs {SPACE_WORDS[space]}, got {SPACE_WORDS[x.space]}" + (f"; {remedy}" if remedy else "")
            )
        return x

    def closure(self, x: Any, space: Space) -> Argument:
        """Makes an array that the program closes over an argument with rows of `space`."""
        key = (id(x), space)
        if key not in self._known:
            dtype = jax.dtypes.canonicalize_dtype(np.dtype(x.dtype)).name
            position = self.num_arguments + len(self.closed_over)
            self.closed_over.append(x)  # keeps the array alive, so that its id is not used again
            self._known[key] = Argument(self, f"array {len(self.closed_over)} closed over", position, x.shape, dtype)
        return self._known[key]

    def _input(self, x: Argument, space: Space, method: str) -> Symbol:
        shape = x.shape
        if x.dtype.startswith("complex"):
            raise fail(
                f"argument {x.name!r} must be real, got {x.dtype}; pass the real and the imaginary part, concatenated "
                "as features or as two arguments"
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
        """Appends the `input` operator of an argument with rows of `space` and the feature shape `shape`."""
        self.builder.line = user_line()
        index = self.builder.op(
            "input", name=x.name, position=x.position, space=str(space), shape=tuple(shape), dtype=x.dtype
        )
        return self.symbol(index)

    def is_operand(self, x: Any) -> bool:
        """Whether an operand is a value or an array, not a Python number or anything else."""
        return isinstance(x, Argument | Symbol) or is_array(x)

    def operand(self, x: Any) -> Symbol:
        """Returns a value of the program as it is, and makes an array a shared value."""
        if isinstance(x, Argument):
            x._untyped()
        if is_array(x):
            return self.declare(x, Space.GRAPH, "an array")
        self.own(x)
        return x

    def value(self, x: Any, like: Symbol) -> Symbol:
        """An operand of arithmetic with `like`: Python numbers become constants of its dtype, arrays shared values."""
        if isinstance(x, numbers.Real):
            return self.number_of(x, like)
        if not self.is_operand(x):
            raise fail(
                f"operands must be values, numbers or arrays, got {type(x).__name__} (an array that is not an argument "
                "is a shared value)"
            )
        return self.operand(x)

    def weight(self, w: Any) -> Symbol:
        """Checks the right side of `x @ w` and returns it as a value."""
        if isinstance(w, Argument):
            raise fail(
                f"the weight {w.name!r} of shape {w.shape} must say whether it is typed; write x @ g.per_edge_type(w), "
                "x @ g.per_node_type(w) or x @ g.shared(w)"
            )
        if not self.is_operand(w):
            raise fail(
                f"x @ w needs a weight made by g.per_edge_type, g.per_node_type or g.shared, got {type(w).__name__}"
            )
        return self.operand(w)

    def floating(self, x: Symbol) -> Symbol:
        """Converts integers to float32 (64-bit integers to float64), for functions whose results are not integers."""
        return x if inter.is_float(x.dtype) else self.emit("cast", x, dtype=_float_of(x.dtype))

    def wide(self, x: Symbol) -> Symbol:
        """Converts 16-bit floats to float32, for sums that are divided later."""
        return x.astype("float32") if x.dtype in ("float16", "bfloat16") else x

    def counted(self, x: Symbol) -> Symbol:
        """Converts booleans and narrow integers to JAX's default integers, for sums and products."""
        if inter.is_float(x.dtype):
            return x
        dtype = jax.dtypes.canonicalize_dtype("uint64" if x.dtype.startswith("uint") else "int64").name
        return x if x.dtype == dtype else self.emit("cast", x, dtype=dtype)

    def number(self, x: Symbol, what: str) -> Symbol:
        """The value; raises ProgramError for booleans, on which the operation `what` is not defined."""
        if x.dtype == "bool":
            raise fail(f"{what} is not defined for booleans; use x.astype('float32') or, for `not`, 1 - x")
        return x

    def align(self, *xs: Symbol) -> list[Symbol]:
        """The values in one space: values by type and shared values are read in the space of the others."""
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
            hints = [REMEDY[s] for s in found if s in REMEDY]
            raise fail(
                f"operands must be in one space, got {' and '.join(SPACE_WORDS[s] for s in found)}"
                + (f"; {hints[0]}" if hints else "")
            )
        target = rest.pop() if rest else xs[0].space if len({x.space for x in xs}) == 1 else Space.GRAPH
        return [self.lifted(x, target) for x in xs]

    def lifted(self, x: Symbol, space: Space) -> Symbol:
        """A shared value or a constant for every row of a space."""
        made = self.symbol(self.builder.lift(x.index, space))
        if x.index in self.weak:
            self.weak.add(made.index)
        return made

    def binary(self, name: str, a: Any, b: Any) -> Symbol:
        """Appends the operator `name` on two operands, which are brought to one space and dtype first."""
        like = a if isinstance(a, Symbol) else b
        x, y = self.align(self.value(a, like), self.value(b, like))
        if name in ("div", "power", "atan2"):
            x, y = self.floating(x), self.floating(y)
        if name == "sub" and x.dtype == y.dtype:
            x = self.number(x, "x - y")
        return self.emit(name, x, y)
