"""Backward generation: reverse differentiation inside the inter-operator IR.

The joint program has the forward operators, one more input for the cotangent of each output, and the gradients of the
chosen inputs as further outputs. It is optimised and lowered like any program. Every rule gives operators of the IR, so
there are gradients of gradients, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from dejax.rgnn.ir.inter import Builder, Op, Program, is_float
from dejax.rgnn.ir.products import Product
from dejax.rgnn.passes._rewrite import read_back


def differentiate(program: Program, wrt: tuple[int, ...]) -> Program:
    """The joint program.

    Args:
      program: the forward program.
      wrt: positions of the inputs whose gradients are wanted.

    Returns:
      A program whose inputs are the forward inputs and then the cotangents (one for each output, in order), and whose
      outputs are the forward outputs and then the gradients.
    """
    return _Differentiation(program, wrt).run()


class _Differentiation:
    def __init__(self, program: Program, wrt: tuple[int, ...]) -> None:
        self.forward, self.wrt = program, wrt
        self.b = Builder(program.name)
        self.parts: dict[int, list[int]] = {}  # forward value -> contributions to its cotangent

    def run(self) -> Program:
        forward, b = self.forward, self.b
        for i, op in enumerate(forward.ops):
            b.copy(op, op.args, forward.lines[i] if forward.lines else None)
        first = 1 + max((forward.ops[i].attr("position") for i in forward.inputs), default=-1)
        for k, o in enumerate(forward.outputs):
            op, name = forward.ops[o], f"cotangent{k}"
            g = b.op("input", name=name, position=first + k, space=str(op.space), shape=op.shape, dtype=op.dtype)
            if is_float(op.dtype):
                self.parts.setdefault(o, []).append(g)
        needed = self._reaching()
        for i in reversed(range(len(forward.ops))):
            op = forward.ops[i]
            if i in needed and i in self.parts and op.name != "input":
                b.line = forward.lines[i] if forward.lines else None
                g = self.total(i)
                for arg, part in zip(op.args, RULES[op.name](b, op, i, g), strict=True):
                    if part is not None and arg in needed:
                        self.parts.setdefault(arg, []).append(self.fit(part, forward.ops[arg]))
        by_position = forward.by_position()
        gradients = [self.gradient(by_position[p]) for p in self.wrt]
        return b.build([*forward.outputs, *gradients])

    def _reaching(self) -> set[int]:
        """Values that depend on a wanted input."""
        found: set[int] = set()
        for i, op in enumerate(self.forward.ops):
            if (op.name == "input" and op.attr("position") in self.wrt) or found.intersection(op.args):
                found.add(i)
        return found

    def total(self, value: int) -> int:
        parts = self.parts[value]
        while len(parts) > 1:
            parts = [self.b.op("add", parts[0], parts[1]), *parts[2:]]
        return parts[0]

    def gradient(self, value: int) -> int:
        if value in self.parts:
            return self.total(value)
        op = self.forward.ops[value]
        zero = self.b.const(0.0, op.dtype, op.space)
        return self.b.op("broadcast", zero, shape=op.shape) if op.shape else zero

    def fit(self, g: int, like: Op) -> int:
        """A contribution in the argument's own dtype and feature shape, summed over axes that were broadcast."""
        b = self.b
        if b.ops[g].shape != like.shape:
            g = unbroadcast(b, g, like.shape)
        return g if b.ops[g].dtype == like.dtype else b.op("cast", g, dtype=like.dtype)


def unbroadcast(b: Builder, g: int, shape: tuple[int, ...]) -> int:
    have = b.ops[g].shape
    if shape == ():
        return b.op("sum_features", g, axes=tuple(range(len(have))), keepdims=False)
    if have == ():
        return b.op("broadcast", g, shape=shape)
    axes = tuple(i for i, (h, s) in enumerate(zip(have, shape, strict=True)) if s == 1 and h != 1)
    if axes:
        g = b.op("sum_features", g, axes=axes, keepdims=True)
    return g if b.ops[g].shape == shape else b.op("broadcast", g, shape=shape)


# Each rule: (builder, forward operator, its value, cotangent) -> one contribution (or None) for each argument.
Rule = Callable[[Builder, Op, int, int], list[int | None]]


def _const(b: Builder, like: int, value: float) -> int:
    op = b.ops[like]
    return b.const(value, op.dtype, op.space)


def _scale(b: Builder, x: int, factor: float) -> int:
    return b.op("mul", x, _const(b, x, factor))


def _mul(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    return [b.op("mul", g, y), b.op("mul", g, x)]


def _div(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    dx = b.op("div", g, op.args[1])
    return [dx, b.op("neg", b.op("mul", dx, out))]


def _extremum(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    tie = _scale(b, b.op("eq", x, y), 0.5)
    first = b.op("gt", x, y) if op.name == "max" else b.op("gt", y, x)
    share = b.op("add", first, tie)
    return [b.op("mul", g, share), b.op("mul", g, b.op("sub", _const(b, share, 1.0), share))]


def _select(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    c = op.args[0]
    zero = _const(b, g, 0.0)
    return [None, b.op("select", c, g, zero), b.op("select", c, zero, g)]


def _unary_rule(make: Callable[[Builder, Op, int, int, int], int]) -> Rule:
    """A rule from the function (builder, op, argument, result, cotangent) -> contribution."""
    return lambda b, op, out, g: [make(b, op, op.args[0], out, g)]


def _one_minus(b: Builder, x: int) -> int:
    return b.op("sub", _const(b, x, 1.0), x)


def _pow(b: Builder, op: Op, x: int, out: int, g: int) -> int:
    e = op.attr("exponent")
    if e == 0:  # at x = 0, 0 x^-1 would be 0 times infinity
        return b.op("mul", g, _const(b, g, 0.0))
    return b.op("mul", g, _scale(b, b.op("pow", x, exponent=e - 1.0), e))


def _erf(b: Builder, op: Op, x: int, out: int, g: int) -> int:
    return b.op("mul", g, _scale(b, b.op("exp", b.op("neg", b.op("square", x))), 2.0 / math.sqrt(math.pi)))


def _gather(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [b.op("reduce", g, via=op.attr("via"), op="sum")]


def _counted(b: Builder, mask: int) -> int:
    """A mask in a dtype in which its ones can be counted: not one of 16 bits."""
    return b.op("cast", mask, dtype="float32") if b.ops[mask].dtype in ("float16", "bfloat16") else mask


def _reduce(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x,), via = op.args, op.attr("via")
    fine = b.ops[x].space
    if op.attr("op") == "sum":
        return [read_back(b, g, via, fine)]
    if op.attr("op") == "prod":
        return [b.op("mul", read_back(b, g, via, fine), b.op("product_of_others", x, via=via))]
    # The entries that hold the maximum share the gradient equally.
    largest = b.op("eq", x, read_back(b, out, via, fine))
    ties = b.op("reduce", _counted(b, largest), via=via, op="sum")
    share = b.op("div", g, b.op("max", ties, _const(b, ties, 1.0)))
    return [b.op("mul", largest, read_back(b, share, via, fine))]


def _product_of_others(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    """The operator is linear in each of its rows d_1, d_2, ..., and so is its derivative by x in the cotangent."""
    x, *rows = op.args
    parts: list[int | None] = [b.op("product_of_others", x, *rows, g, via=op.attr("via"))]
    for k in range(len(rows)):
        rest = (*rows[:k], *rows[k + 1 :], g)
        parts.append(b.op("product_of_others", x, *rest, via=op.attr("via")))
    return parts


def _extremum_features(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    share = b.op("extremum_share", op.args[0], axes=op.attr("axes"), op=op.attr("op"))
    (spread,) = _sum_features(b, op, out, g)
    assert spread is not None
    return [b.op("mul", spread, share)]


def _lookup(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    table, index = op.args
    size = b.ops[table].shape[0]
    # As in JAX, what was clipped has no gradient.
    outside = "wrap" if op.attr("outside") == "clip" else op.attr("outside")
    return [b.op("place", g, index, via=op.attr("via"), size=size, op="sum", outside=outside), None]


def _place(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, index = op.args
    attrs = {"via": op.attr("via"), "outside": op.attr("outside")}
    if op.attr("op") == "sum":
        return [b.op("lookup", g, index, **attrs), None]
    # As for a reduction: the rows that hold the extremum share the gradient equally.
    chosen = b.op("eq", x, b.op("lookup", out, index, **attrs))
    ties = b.op("place", _counted(b, chosen), index, size=op.attr("size"), op="sum", **attrs)
    share = b.op("div", g, b.op("max", ties, _const(b, ties, 1.0)))
    return [b.op("mul", chosen, b.op("lookup", share, index, **attrs)), None]


def _power(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    """As in JAX: no slope in x where y is 0, and none in y where x is 0."""
    x, y = op.args
    zero_y, zero_x = b.op("eq", y, _const(b, y, 0.0)), b.op("eq", x, _const(b, x, 0.0))
    exponent = b.op("select", zero_y, _const(b, y, 1.0), y)
    slope = b.op("mul", exponent, b.op("power", x, b.op("sub", exponent, _const(b, y, 1.0))))
    slope = b.op("select", zero_y, _const(b, slope, 0.0), slope)
    logarithm = b.op("log", b.op("select", zero_x, _const(b, x, 1.0), x))
    return [b.op("mul", g, slope), b.op("mul", g, b.op("mul", logarithm, out))]


def _atan2(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    y, x = op.args
    square = b.op("add", b.op("square", x), b.op("square", y))
    return [b.op("mul", g, b.op("div", x, square)), b.op("neg", b.op("mul", g, b.op("div", y, square)))]


def _softmax(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    via, fine = op.attr("via"), op.space
    mean = b.op("reduce", b.op("mul", out, g), via=via, op="sum")
    return [b.op("mul", out, b.op("sub", g, read_back(b, mean, via, fine)))]


def _linear(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x, w), via = op.args, op.attr("via")
    product = Product.parse(op.attr("spec"))
    dx = b.op("linear", g, w, spec=str(product.left_gradient), via=via)
    dw = b.op("outer", x, g, spec=str(product.right_gradient), via=via, dtype=b.ops[w].dtype)
    return [dx, dw]


def _outer(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    (x, y), via = op.args, op.attr("via")
    product = Product.parse(op.attr("spec"))
    dx = b.op("linear", y, g, spec=str(Product(product.right, product.out, product.left)), via=via)
    dy = b.op("linear", x, g, spec=str(product.right_gradient), via=via)
    return [dx, dy]


def _expand_last(b: Builder, x: int) -> int:
    return b.op("reshape", x, shape=(*b.ops[x].shape, 1))


def _dot(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    x, y = op.args
    wide = _expand_last(b, g)
    return [b.op("mul", wide, y), b.op("mul", wide, x)]


def _sum_features(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    shape = b.ops[op.args[0]].shape
    kept = tuple(1 if i in op.attr("axes") else s for i, s in enumerate(shape))
    g = g if b.ops[g].shape == kept else b.op("reshape", g, shape=kept)
    return [b.op("broadcast", g, shape=shape)]


def _reshape(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [b.op("reshape", g, shape=b.ops[op.args[0]].shape)]


def _transpose(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    perm = op.attr("perm")
    return [b.op("transpose", g, perm=tuple(perm.index(i) for i in range(len(perm))))]


def _concat(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis, start = op.attr("axis"), 0
    parts: list[int | None] = []
    for a in op.args:
        stop = start + b.ops[a].shape[axis]
        parts.append(b.op("slice", g, axis=axis, start=start, stop=stop))
        start = stop
    return parts


def _slice(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis = op.attr("axis")
    after = b.ops[op.args[0]].shape[axis] - op.attr("stop")
    return [b.op("pad", g, axis=axis, before=op.attr("start"), after=after)]


def _pad(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    axis, start = op.attr("axis"), op.attr("before")
    return [b.op("slice", g, axis=axis, start=start, stop=start + b.ops[op.args[0]].shape[axis])]


def _nothing(b: Builder, op: Op, out: int, g: int) -> list[int | None]:
    return [None] * len(op.args)


RULES: dict[str, Rule] = {
    "add": lambda b, op, out, g: [g, g],
    "sub": lambda b, op, out, g: [g, b.op("neg", g)],
    "mul": _mul,
    "div": _div,
    "max": _extremum,
    "min": _extremum,
    "select": _select,
    "neg": _unary_rule(lambda b, op, x, out, g: b.op("neg", g)),
    "exp": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, out)),
    "log": _unary_rule(lambda b, op, x, out, g: b.op("div", g, x)),
    "sqrt": _unary_rule(lambda b, op, x, out, g: b.op("div", _scale(b, g, 0.5), out)),
    "rsqrt": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, _scale(b, b.op("pow", out, exponent=3.0), -0.5))),
    "tanh": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, _one_minus(b, b.op("square", out)))),
    "sigmoid": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("mul", out, _one_minus(b, out)))),
    "erf": _unary_rule(_erf),
    "abs": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("sign", x))),
    "square": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, _scale(b, x, 2.0))),
    "reciprocal": _unary_rule(lambda b, op, x, out, g: b.op("neg", b.op("mul", g, b.op("square", out)))),
    "relu": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("step", x, slope=0.0))),
    "leaky_relu": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("step", x, slope=op.attr("slope")))),
    "pow": _unary_rule(_pow),
    "power": _power,
    "atan2": _atan2,
    "sin": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("cos", x))),
    "cos": _unary_rule(lambda b, op, x, out, g: b.op("neg", b.op("mul", g, b.op("sin", x)))),
    "log1p": _unary_rule(lambda b, op, x, out, g: b.op("div", g, b.op("add", x, _const(b, x, 1.0)))),
    "expm1": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("exp", x))),
    "softplus": _unary_rule(lambda b, op, x, out, g: b.op("mul", g, b.op("sigmoid", x))),
    "cast": _unary_rule(lambda b, op, x, out, g: b.op("cast", g, dtype=b.ops[x].dtype)),
    "gather": _gather,
    "reduce": _reduce,
    "softmax": _softmax,
    "linear": _linear,
    "outer": _outer,
    "dot": _dot,
    "product_of_others": _product_of_others,
    "lookup": _lookup,
    "place": _place,
    "sum_features": _sum_features,
    "extremum_features": _extremum_features,
    "reshape": _reshape,
    "transpose": _transpose,
    "broadcast": lambda b, op, out, g: [g],  # `fit` sums over the axes that were broadcast
    "concat": _concat,
    "slice": _slice,
    "pad": _pad,
    **dict.fromkeys(("step", "sign", "gt", "eq", "stop_gradient", "extremum_share"), _nothing),
}
