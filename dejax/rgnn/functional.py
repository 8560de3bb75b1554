"""Functions of a program's values: elementwise functions, inner products, concatenation, edge softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dejax.rgnn.frontend import Argument, Symbol, fail
from dejax.rgnn.ir.inter import Space


def _symbol(x: Any, function: str) -> Symbol:
    if isinstance(x, Argument):
        x._untyped()
    if not isinstance(x, Symbol):
        raise fail(f"rgnn.{function} takes a value of the program, got {type(x).__name__}")
    return x


_WHOLE = ("relu", "abs", "square", "stop_gradient")  # integers to integers


def _unary(name: str, doc: str) -> Any:
    def function(x: Symbol) -> Symbol:
        trace = _symbol(x, name).trace
        return trace.emit(name, x if name in _WHOLE else trace.floating(x))

    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


exp = _unary("exp", "e to the x, element by element.")
log = _unary("log", "The natural logarithm, element by element.")
sqrt = _unary("sqrt", "The square root, element by element.")
rsqrt = _unary("rsqrt", "One over the square root, element by element.")
tanh = _unary("tanh", "The hyperbolic tangent, element by element.")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-x)), element by element.")
erf = _unary("erf", "The error function, element by element.")
relu = _unary("relu", "max(x, 0), element by element; its gradient at 0 is 0.")
abs_ = _unary("abs", "The absolute value, element by element; its gradient at 0 is 0.")
square = _unary("square", "x times x, element by element.")
reciprocal = _unary("reciprocal", "1 / x, element by element.")
stop_gradient = _unary("stop_gradient", "The value, through which no gradient flows.")


def leaky_relu(x: Symbol, negative_slope: float = 0.2) -> Symbol:
    """x where x > 0, else `negative_slope` times x."""
    trace = _symbol(x, "leaky_relu").trace
    return trace.emit("leaky_relu", trace.floating(x), slope=float(negative_slope))


def elu(x: Symbol, alpha: float = 1.0) -> Symbol:
    """x where x > 0, else alpha (exp(x) - 1)."""
    x = _symbol(x, "elu")
    x = x.trace.floating(x)
    positive = x.trace.emit("relu", x)
    negative = x - positive
    # exp(x) - 1 without the difference, which near 0 has no correct digit.
    return positive + alpha * (tanh(0.5 * negative) * (exp(negative) + 1.0))


def gelu(x: Symbol) -> Symbol:
    """x Phi(x) with the exact error function (arXiv 1606.08415)."""
    x = _symbol(x, "gelu")
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def silu(x: Symbol) -> Symbol:
    """x sigmoid(x)."""
    return _symbol(x, "silu") * sigmoid(x)


def maximum(x: Any, y: Any) -> Symbol:
    """The larger of two values, element by element; equal ones share the gradient."""
    return _symbol(x if isinstance(x, Symbol) else y, "maximum").trace.binary("max", x, y)


def minimum(x: Any, y: Any) -> Symbol:
    """The smaller of two values, element by element; equal ones share the gradient."""
    return _symbol(x if isinstance(x, Symbol) else y, "minimum").trace.binary("min", x, y)


def where_positive(condition: Symbol, x: Any, y: Any) -> Symbol:
    """x where `condition` > 0, else y; no gradient flows to the condition."""
    trace = _symbol(condition, "where_positive").trace
    like = x if isinstance(x, Symbol) else y if isinstance(y, Symbol) else condition
    c, a, b = trace.align(condition, trace.value(x, like), trace.value(y, like))
    return trace.emit("select", c, a, b)


def dot(x: Symbol, y: Symbol) -> Symbol:
    """The inner product over the last feature axis: (width,) gives (), (heads, width) gives (heads,)."""
    x, y = _symbol(x, "dot"), _symbol(y, "dot")
    x, y = x.trace.align(x, y)
    if not x.shape or x.shape != y.shape:
        raise fail(f"rgnn.dot needs two values of the same feature shape with a width, got {x.shape} and {y.shape}")
    return x.trace.emit("dot", x, y)


def concatenate(values: Sequence[Symbol], axis: int = -1) -> Symbol:
    """Features side by side along `axis`."""
    if not values:
        raise fail("rgnn.concatenate needs at least one value")
    first = _symbol(values[0], "concatenate")
    aligned = first.trace.align(*(_symbol(v, "concatenate") for v in values))
    if not first.shape:
        raise fail("rgnn.concatenate needs values with a feature axis; x[None] makes a scalar one number wide")
    return first.trace.emit("concat", *aligned, axis=first.trace.axis(first, axis))


def edge_softmax(score: Symbol, within: str = "dst") -> Symbol:
    """Softmax of an edge value over the edges that share a destination.

    Args:
      score: an edge value of any feature shape; each feature is normalised by itself.
      within: `"dst"`, over all incoming edges of a node; or `"relation"`, over those of one edge type.
    """
    vias = {"dst": "dst", "relation": "destination_pair"}
    if within not in vias:
        raise fail(f"edge_softmax(within=...) is 'dst' or 'relation', got {within!r}")
    score = _symbol(score, "edge_softmax")
    score = score.trace.declare(score, Space.EDGE, "rgnn.edge_softmax")
    return score.trace.emit("softmax", score.trace.floating(score), via=vias[within])
