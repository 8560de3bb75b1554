"""The table of level-1 operators: all that the compiler knows of each.

A row says how an operator is typed, what its derivative is, how XLA and kernels compute it, and what passes may assume
of it. Sets of operators that passes ask for are drawn from the table, below.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import jax
import jax.numpy as jnp

from dejax import pallas as kernels
from dejax.pallas.traversal.factored import product, quotient
from dejax.rgnn.ir import derivatives, forms
from dejax.rgnn.ir import type_rules as types
from dejax.rgnn.ir.derivatives import Derivative, constant, one_minus, scaled
from dejax.rgnn.ir.values import IRError, Op, Type


class Linear(enum.Enum):
    """How an operator passes on a small relative change of an argument."""

    MOVES = "moves elements, reads them at other rows, or changes their sign or dtype"
    ADDS = "a sum or difference of two arguments"
    SCALES = "the first argument times the second, or over it"
    SUMS = "a sum over rows or features, perhaps of products with another argument; or an extremum of rows"
    SAME_FACTOR = "c f(x) = f(c x) for c > 0, but not linear"
    CONSTANT = "constant but for jumps"
    NO = "none of these"


class Infinite(enum.Enum):
    """Where an operator may be infinite, or have an infinite slope, for finite arguments.

    On rows that nothing reads, backward would multiply that by 0.
    """

    NOWHERE = "nowhere"
    SLOPE = "its slope at 0, or itself and its slope far from 0"
    VALUE = "itself at 0 or at 1, as a quotient or a logarithm"


@dataclass(frozen=True, slots=True)
class Operator:
    """What the compiler knows of an operator.

    Attributes:
      kind: element by element with one, two or three arguments; `features`, a function of the features of each row; or
        `rows`, between rows, or a value without arguments.
      typing: (types of the arguments, attributes by name) -> the type of the result.
      derivative: see `derivatives.py`; None where no gradient passes.
      form: (arrays of rows, attributes by name) -> the result by XLA. None for operators that read the graph: those are
        methods of `lowering/xla.py`.
      commutes: whether its two arguments may be exchanged.
      tile: the same on tiles inside kernels, for elementwise operators whose `form` cannot be lowered or is slower.
      in_registers: whether a traversal computes it on tiles.
      epilogue: whether the kernel of a grouped GEMM can apply it to its result.
      linear, infinite: see these classes.
      masks: `kept` if the result is a mask (of zeros and ones) where all arguments are; `made` if it always is.
      columns: what is known of the size of each column of the result: the `same` as the first argument's, `at most`
        those, up to a factor that all have, or at most the `largest` of the arguments'.
      of_integers: whether integers have an integer result; of others they are converted to floats first.
    """

    kind: Literal["unary", "binary", "ternary", "features", "rows"]
    typing: Callable[..., types.Typed]
    derivative: Derivative | None = None
    form: Callable[..., Any] | None = None
    commutes: bool = False
    tile: Callable[..., Any] | None = None
    in_registers: bool = True
    epilogue: bool = False
    linear: Linear = Linear.NO
    infinite: Infinite = Infinite.NOWHERE
    masks: Literal["", "kept", "made"] = ""
    columns: Literal["", "same", "at most", "largest"] = ""
    of_integers: bool = False


def _unary(form: Callable[..., Any], derivative: Callable[..., int] | None = None, **facts: Any) -> Operator:
    """An elementwise function of x; its derivative is (builder, x, result, cotangent, attributes) -> contribution."""

    def of_argument(b: Any, op: Op, out: int, g: int) -> list[int | None]:
        assert derivative is not None
        return [derivative(b, op.args[0], out, g, **dict(op.attrs))]

    facts.setdefault("typing", types.like_argument)
    return Operator("unary", derivative=derivative and of_argument, form=form, **facts)


def _binary(form: Callable[..., Any], derivative: Derivative | None = None, **facts: Any) -> Operator:
    return Operator("binary", types.elementwise, derivative, form, **facts)


def _features(name: str, **facts: Any) -> Operator:
    """A function of features, whose parts have its name."""
    derivative, form = getattr(derivatives, name, None), getattr(forms, name)
    return Operator("features", getattr(types, f"of_{name}"), derivative, form, **facts)


def _rows(name: str, **facts: Any) -> Operator:
    """An operator between rows, whose parts have its name."""
    facts.setdefault("in_registers", False)
    return Operator("rows", getattr(types, f"of_{name}"), getattr(derivatives, name, None), **facts)


# Facts that several operators share.
_MOVES: dict[str, Any] = {"linear": Linear.MOVES}
_MOVES_ELEMENTS: dict[str, Any] = {**_MOVES, "masks": "kept", "columns": "same"}
_MASK: dict[str, Any] = {"linear": Linear.CONSTANT, "masks": "made"}
_SUMS: dict[str, Any] = {"linear": Linear.SUMS}
_SAME_FACTOR: dict[str, Any] = {"linear": Linear.SAME_FACTOR}
_SLOPE: dict[str, Any] = {"infinite": Infinite.SLOPE}
_VALUE: dict[str, Any] = {"infinite": Infinite.VALUE}
_RECTIFIER: dict[str, Any] = {**_SAME_FACTOR, "epilogue": True, "columns": "at most"}
_EXTREMUM: dict[str, Any] = {**_SAME_FACTOR, "masks": "kept", "columns": "largest", "commutes": True}
_ADDS: dict[str, Any] = {"linear": Linear.ADDS, "columns": "largest"}
_SCALES: dict[str, Any] = {"linear": Linear.SCALES}

OPERATORS: dict[str, Operator] = {
    # Without arguments.
    "input": _rows("input"),
    "const": _rows("const", in_registers=True),
    "count": _rows("count"),
    # Element by element, of two arguments or three.
    "add": _binary(lambda x, y: x + y, lambda b, op, out, g: [g, g], **_ADDS, commutes=True),
    "sub": _binary(lambda x, y: x - y, lambda b, op, out, g: [g, b.op("neg", g)], **_ADDS),
    "mul": _binary(lambda x, y: x * y, derivatives.mul, **_SCALES, tile=product, masks="kept", commutes=True),
    "div": _binary(lambda x, y: x / y, derivatives.div, **_SCALES, **_VALUE, tile=quotient, columns="at most"),
    "max": _binary(jnp.maximum, derivatives.extremum, **_EXTREMUM, tile=kernels.maximum),
    "min": _binary(jnp.minimum, derivatives.extremum, **_EXTREMUM, tile=kernels.minimum),
    "gt": _binary(lambda x, y: (x > y).astype(x.dtype), **_MASK),
    "eq": _binary(lambda x, y: (x == y).astype(x.dtype), **_MASK, commutes=True),
    "power": _binary(jnp.power, derivatives.power, **_VALUE),
    "atan2": _binary(jnp.arctan2, derivatives.atan2, **_SLOPE),
    "select": Operator("ternary", types.of_select, derivatives.select, lambda c, x, y: jnp.where(c > 0, x, y)),
    # Element by element, of one argument.
    # Pallas' lowering takes -x as 0 - x, which makes 0 of 0 in place of -0: 1 / -x was infinity, not minus infinity.
    "neg": _unary(lambda x: -x, lambda b, x, y, g: b.op("neg", g), tile=lambda x: x * -1, **_MOVES, columns="same"),
    "cast": _unary(
        lambda x, dtype: x,
        lambda b, x, y, g, dtype: b.op("cast", g, dtype=b.ops[x].dtype),
        **_MOVES_ELEMENTS,
        typing=types.of_cast,
    ),
    "stop_gradient": _unary(jax.lax.stop_gradient, **_MOVES_ELEMENTS, of_integers=True),
    "exp": _unary(jnp.exp, lambda b, x, y, g: b.op("mul", g, y), **_SLOPE, tile=kernels.exp),
    "expm1": _unary(jnp.expm1, lambda b, x, y, g: b.op("mul", g, b.op("exp", x)), **_SLOPE),
    "log": _unary(jnp.log, lambda b, x, y, g: b.op("div", g, x), **_VALUE),
    "log1p": _unary(jnp.log1p, lambda b, x, y, g: b.op("div", g, b.op("add", x, constant(b, x, 1.0))), **_VALUE),
    "sin": _unary(jnp.sin, lambda b, x, y, g: b.op("mul", g, b.op("cos", x))),
    "cos": _unary(jnp.cos, lambda b, x, y, g: b.op("neg", b.op("mul", g, b.op("sin", x)))),
    "sqrt": _unary(jnp.sqrt, lambda b, x, y, g: b.op("div", scaled(b, g, 0.5), y), **_SLOPE),
    "rsqrt": _unary(
        jax.lax.rsqrt, lambda b, x, y, g: b.op("mul", g, scaled(b, b.op("pow", y, exponent=3.0), -0.5)), **_VALUE
    ),
    "square": _unary(lambda x: x * x, lambda b, x, y, g: b.op("mul", g, scaled(b, x, 2.0)), **_SLOPE, of_integers=True),
    "reciprocal": _unary(lambda x: 1 / x, lambda b, x, y, g: b.op("neg", b.op("mul", g, b.op("square", y))), **_VALUE),
    "pow": _unary(forms.power, derivatives.pow, **_VALUE, typing=types.with_exponent),
    "tanh": _unary(jnp.tanh, lambda b, x, y, g: b.op("mul", g, one_minus(b, b.op("square", y))), epilogue=True),
    "sigmoid": _unary(
        lambda x: 1 / (1 + jnp.exp(-x)),
        lambda b, x, y, g: b.op("mul", g, b.op("mul", y, one_minus(b, y))),
        epilogue=True,
    ),
    "softplus": _unary(
        lambda x: jnp.logaddexp(x, jnp.zeros_like(x)),
        lambda b, x, y, g: b.op("mul", g, b.op("sigmoid", x)),
        tile=lambda x: kernels.maximum(x, 0.0) + jnp.log1p(kernels.exp(-jnp.abs(x))),
    ),
    "erf": _unary(jax.lax.erf, derivatives.erf, tile=kernels.erf),
    "abs": _unary(
        jnp.abs, lambda b, x, y, g: b.op("mul", g, b.op("sign", x)), **_SAME_FACTOR, columns="same", of_integers=True
    ),
    "sign": _unary(forms.sign, linear=Linear.CONSTANT, of_integers=True),
    "relu": _unary(
        lambda x: jnp.where(x <= 0, jnp.zeros_like(x), x),  # NaN stays
        lambda b, x, y, g: b.op("mul", g, b.op("step", x, slope=0.0)),
        **_RECTIFIER,
        of_integers=True,
    ),
    "leaky_relu": _unary(
        lambda x, slope: jnp.where(x > 0, x, slope * x),
        lambda b, x, y, g, slope: b.op("mul", g, b.op("step", x, slope=slope)),
        **_RECTIFIER,
        typing=types.with_slope,
    ),
    "step": _unary(  # the slope of both
        lambda x, slope: jnp.where(x > 0, jnp.ones_like(x), jnp.full_like(x, slope)),
        typing=types.with_slope,
        linear=Linear.CONSTANT,
    ),
    # Operators on the features of each row.
    "dot": _features("dot", **_SUMS, commutes=True),
    "sum_features": _features("sum_features", **_SUMS),
    "extremum_features": _features("extremum_features"),
    "extremum_share": _features("extremum_share"),
    "reshape": _features("reshape", **_MOVES, in_registers=False, masks="kept", columns="at most"),
    "transpose": _features("transpose", **_MOVES, in_registers=False, masks="kept"),
    "broadcast": _features("broadcast", **_MOVES, masks="kept"),
    "concat": _features("concat", **_MOVES, in_registers=False, masks="kept"),
    "slice": _features("slice", **_MOVES, in_registers=False, masks="kept"),
    "pad": _features("pad", **_MOVES, in_registers=False),
    # Between rows.
    "gather": _rows("gather", **_MOVES_ELEMENTS),
    "reduce": _rows("reduce", **_SUMS, columns="at most"),
    "softmax": _rows("softmax"),
    "linear": _rows("linear", **_SUMS),
    "outer": _rows("outer", **_SUMS),
    "product_of_others": _rows("product_of_others"),
    "lookup": _rows("lookup"),
    "place": _rows("place"),
}


def named(holds: Callable[[Operator], bool]) -> frozenset[str]:
    """The names of the operators of which something holds."""
    return frozenset(name for name, operator in OPERATORS.items() if holds(operator))


UNARY = named(lambda o: o.kind == "unary")
BINARY = named(lambda o: o.kind == "binary")
ELEMENTWISE = named(lambda o: o.kind in ("unary", "binary", "ternary"))
# Row by row: the value of a row depends on the same row of each argument alone.
ROWWISE = named(lambda o: o.kind != "rows")


@lru_cache(maxsize=1 << 16)
def _infer(name: str, args: tuple[Type, ...], attrs: tuple[tuple[str, Any], ...]) -> Type:
    operator = OPERATORS.get(name)
    types.need(operator is not None, f"unknown operator {name!r}")
    assert operator is not None
    try:
        return Type(*operator.typing(*args, **dict(attrs)))
    except TypeError as error:  # of the call: the rule's signature has the arguments and attributes
        raise IRError(f"{name}: {error}") from error


def infer(name: str, args: list[Op], attrs: tuple[tuple[str, Any], ...]) -> Type:
    """The space, feature shape and dtype that an operator gives, or `IRError`.

    The passes ask for the same types many times: the last answers are kept.
    """
    return _infer(name, tuple([Type(a.space, a.shape, a.dtype) for a in args]), attrs)
