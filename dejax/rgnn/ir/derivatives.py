"""The derivatives of level-1 operators that take more than a line; the others are in the table (`operators.py`).

Each is a function (builder, operator, its value, the cotangent of that) -> for each argument a contribution to its
cotangent, or None. `Builder` is the program that is being made, in which the operators of forward have their numbers.
A contribution may have the shape to which an argument is broadcast: `gradients/backward.py` sums over those axes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from dejax.rgnn.ir.products import Product
from dejax.rgnn.ir.values import Op

if TYPE_CHECKING:
    from dejax.rgnn.ir.inter import Builder

Derivative = Callable[["Builder", Op, int, int], list[int | None]]


def constant(b: Builder, like: int, value: float) -> int:
    """A scalar constant in the space and dtype of a value."""
    op = b.ops[like]
    return b.const(value, op.dtype, op.space)


def scaled(b: Builder, x: int, factor: float) -> int:
    return b.op("mul", x, constant(b, x, factor))


def one_minus(b: Builder, x: int) -> int:
    return b.op("sub", constant(b, x, 1.0), x)


# --- element by element ----------------------------------------------------------------------------------------------


def pow(b: Builder, x: int, out: int, g: int, exponent: float) -> int:
    if exponent == 0:  # at x = 0, 0 x^-1 would be 0 times infinity
        return b.op("mul", g, constant(b, g, 0.0))
    return b.op("mul", g, scaled(b, b.op("pow", x, exponent=exponent - 1.0), exponent))


def erf(b: Builder, x: int, out: int, g: int) -> int:
    return b.op("mul", g, scaled(b, b.op("exp", b.op("neg", b.op("square", x))), 2.0 / math.sqrt(math.pi)))


def mul(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    return [b.op("mul", g, y), b.op("mul", g, x)]


def div(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    dx = b.op("div", g, op.args[1])
    return [dx, b.op("neg", b.op("mul", dx, out))]


def extremum(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    tie = scaled(b, b.op("eq", x, y), 0.5)
    first = b.op("gt", x, y) if op.name == "max" else b.op("gt", y, x)
    share = b.op("add", first, tie)
    return [b.op("mul", g, share), b.op("mul", g, b.op("sub", constant(b, share, 1.0), share))]


def select(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    c = op.args[0]
    zero = constant(b, g, 0.0)
    return [None, b.op("select", c, g, zero), b.op("select", c, zero, g)]


def gather(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [b.op("reduce", g, via=op.attr("via"), op="sum")]


def _counted(b: Builder, mask: int) -> int:
    """A mask in a dtype in which its ones can be counted: not one of 16 bits."""
    return b.op("cast", mask, dtype="float32") if b.ops[mask].dtype in ("float16", "bfloat16") else mask


def reduce(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x,), via = op.args, op.attr("via")
    fine = b.ops[x].space
    if op.attr("op") == "sum":
        return [b.read_back(g, via, fine)]
    if op.attr("op") == "prod":
        return [b.op("mul", b.read_back(g, via, fine), b.op("product_of_others", x, via=via))]
    # The entries that hold the maximum share the gradient equally. A product with the mask would spread NaN of the
    # share to all entries, or not: XLA makes a selection of some such products.
    largest = b.op("eq", x, b.read_back(out, via, fine))
    ties = b.op("reduce", _counted(b, largest), via=via, op="sum")
    share = b.op("div", g, b.op("max", ties, constant(b, ties, 1.0)))
    share = b.read_back(share, via, fine)
    return [b.op("select", largest, share, constant(b, share, 0.0))]


def product_of_others(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    """The operator is linear in each of its rows d_1, d_2, ..., and so is its derivative by x in the cotangent."""
    x, *rows = op.args
    parts: list[int | None] = [b.op("product_of_others", x, *rows, g, via=op.attr("via"))]
    for k in range(len(rows)):
        rest = (*rows[:k], *rows[k + 1 :], g)
        parts.append(b.op("product_of_others", x, *rest, via=op.attr("via")))
    return parts


def extremum_features(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    share = b.op("extremum_share", op.args[0], axes=op.attr("axes"), op=op.attr("op"))
    (spread,) = sum_features(b, op, out, g)
    assert spread is not None
    return [b.op("mul", spread, share)]


def lookup(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    table, index = op.args
    size = b.ops[table].shape[0]
    # As in JAX, what was clipped has no gradient.
    outside = "wrap" if op.attr("outside") == "clip" else op.attr("outside")
    return [b.op("place", g, index, via=op.attr("via"), size=size, op="sum", outside=outside), None]


def place(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, index = op.args
    attrs = {"via": op.attr("via"), "outside": op.attr("outside")}
    if op.attr("op") == "sum":
        return [b.op("lookup", g, index, **attrs), None]
    # As for a reduction: the rows that hold the extremum share the gradient equally.
    chosen = b.op("eq", x, b.op("lookup", out, index, **attrs))
    ties = b.op("place", _counted(b, chosen), index, size=op.attr("size"), op="sum", **attrs)
    share = b.op("div", g, b.op("max", ties, constant(b, ties, 1.0)))
    share = b.op("lookup", share, index, **attrs)
    return [b.op("select", chosen, share, constant(b, share, 0.0)), None]


def power(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    """As in JAX: no slope in x where y is 0, and none in y where x is 0."""
    x, y = op.args
    zero_y, zero_x = b.op("eq", y, constant(b, y, 0.0)), b.op("eq", x, constant(b, x, 0.0))
    exponent = b.op("select", zero_y, constant(b, y, 1.0), y)
    slope = b.op("mul", exponent, b.op("power", x, b.op("sub", exponent, constant(b, y, 1.0))))
    slope = b.op("select", zero_y, constant(b, slope, 0.0), slope)
    logarithm = b.op("log", b.op("select", zero_x, constant(b, x, 1.0), x))
    return [b.op("mul", g, slope), b.op("mul", g, b.op("mul", logarithm, out))]


def atan2(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    y, x = op.args
    square = b.op("add", b.op("square", x), b.op("square", y))
    return [b.op("mul", g, b.op("div", x, square)), b.op("neg", b.op("mul", g, b.op("div", y, square)))]


def softmax(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    via, fine = op.attr("via"), op.space
    mean = b.op("reduce", b.op("mul", out, g), via=via, op="sum")
    return [b.op("mul", out, b.op("sub", g, b.read_back(mean, via, fine)))]


def linear(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x, w), via = op.args, op.attr("via")
    product = Product.parse(op.attr("spec"))
    dx = b.op("linear", g, w, spec=str(product.left_gradient), via=via)
    dw = b.op("outer", x, g, spec=str(product.right_gradient), via=via, dtype=b.ops[w].dtype)
    return [dx, dw]


def outer(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x, y), via = op.args, op.attr("via")
    product = Product.parse(op.attr("spec"))
    dx = b.op("linear", y, g, spec=str(Product(product.right, product.out, product.left)), via=via)
    dy = b.op("linear", x, g, spec=str(product.right_gradient), via=via)
    return [dx, dy]


def _expand_last(b: Builder, x: int) -> int:
    return b.op("reshape", x, shape=(*b.ops[x].shape, 1))


def dot(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    wide = _expand_last(b, g)
    return [b.op("mul", wide, y), b.op("mul", wide, x)]


def sum_features(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    shape = b.ops[op.args[0]].shape
    kept = tuple(1 if i in op.attr("axes") else s for i, s in enumerate(shape))
    g = g if b.ops[g].shape == kept else b.op("reshape", g, shape=kept)
    return [b.op("broadcast", g, shape=shape)]


def reshape(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [b.op("reshape", g, shape=b.ops[op.args[0]].shape)]


def transpose(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    perm = op.attr("perm")
    return [b.op("transpose", g, perm=tuple(perm.index(i) for i in range(len(perm))))]


def broadcast(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [g]


def concat(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis, start = op.attr("axis"), 0
    parts: list[int | None] = []
    for a in op.args:
        stop = start + b.ops[a].shape[axis]
        parts.append(b.op("slice", g, axis=axis, start=start, stop=stop))
        start = stop
    return parts


def slice(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis = op.attr("axis")
    after = b.ops[op.args[0]].shape[axis] - op.attr("stop")
    return [b.op("pad", g, axis=axis, before=op.attr("start"), after=after)]


def pad(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis, start = op.attr("axis"), op.attr("before")
    return [b.op("slice", g, axis=axis, start=start, stop=start + b.ops[op.args[0]].shape[axis])]
