"""One run of the user's function: operators are appended as its values are made."""

from __future__ import annotations

import numbers
from typing import Any

from dejax.rgnn.frontend.errors import REMEDY, SPACE_WORDS, fail, user_line
from dejax.rgnn.frontend.symbols import Argument, Symbol
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Builder, IRError, Space


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
            remedy = REMEDY.get(x.space)
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
            hints = [REMEDY[s] for s in found if s in REMEDY]
            raise fail(
                f"{' meets '.join(SPACE_WORDS[s] for s in found)}; all must live in one space"
                + (f": {hints[0]}" if hints else "")
            )
        target = rest.pop() if rest else xs[0].space if len({x.space for x in xs}) == 1 else Space.GRAPH
        return [self.symbol(self.builder.lift(x.index, target)) for x in xs]

    def binary(self, name: str, a: Any, b: Any) -> Symbol:
        like = a if isinstance(a, Symbol) else b
        x, y = self.align(self.value(a, like), self.value(b, like))
        if x.shape and y.shape and len(x.shape) != len(y.shape):
            raise fail(
                f"feature shapes {x.shape} and {y.shape} have different ranks; add the missing axis, for instance "
                "x[..., None] to give one number a head to a (heads, width) value, or x[None, :] for a bias"
            )
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
