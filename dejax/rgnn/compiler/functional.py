"""Functions of a program's values: elementwise, reductions of features, inner products, concatenation, softmax."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dejax.rgnn.compiler.frontend import SPACE_WORDS, Argument, Symbol, fail, features
from dejax.rgnn.compiler.frontend.features import Axis
from dejax.rgnn.compiler.frontend.masks import is_mask
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import OPERATORS, Space

__all__ = [
    "abs",
    "arctan2",
    "clip",
    "concatenate",
    "cos",
    "dot",
    "edge_softmax",
    "elu",
    "erf",
    "exp",
    "expm1",
    "gelu",
    "leaky_relu",
    "log",
    "log1p",
    "log_softmax",
    "logsumexp",
    "max",
    "maximum",
    "mean",
    "min",
    "minimum",
    "reciprocal",
    "relu",
    "row_softmax",
    "rsqrt",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "softmax",
    "softplus",
    "sqrt",
    "square",
    "stack",
    "stop_gradient",
    "sum",
    "tanh",
    "where",
    "where_positive",
]


def _symbol(x: Any, function: str) -> Symbol:
    if isinstance(x, Argument):
        x._untyped()
    if not isinstance(x, Symbol):
        raise fail(f"rgnn.{function} takes a value of the program, got {type(x).__name__}")
    return x


def _first(function: str, *xs: Any) -> Symbol:
    """The first value of the program among operands that may also be numbers or arrays."""
    return _symbol(next((x for x in xs if isinstance(x, Symbol)), xs[0]), function)


def _unary(name: str, doc: str) -> Any:
    """The function of an elementwise operator."""

    def function(x: Symbol) -> Symbol:
        trace = _symbol(x, name).trace
        return trace.emit(name, x if OPERATORS[name].of_integers else trace.floating(x))

    function.__name__, function.__qualname__, function.__doc__ = name, name, doc
    return function


exp = _unary("exp", "e to the x, element by element.")
expm1 = _unary("expm1", "e to the x, minus 1, element by element; exact near 0.")
log = _unary("log", "The natural logarithm, element by element.")
log1p = _unary("log1p", "The natural logarithm of 1 + x, element by element; exact near 0.")
sin = _unary("sin", "The sine, element by element.")
cos = _unary("cos", "The cosine, element by element.")
sqrt = _unary("sqrt", "The square root, element by element.")
rsqrt = _unary("rsqrt", "One over the square root, element by element.")
tanh = _unary("tanh", "The hyperbolic tangent, element by element.")
sigmoid = _unary("sigmoid", "1 / (1 + exp(-x)), element by element.")
erf = _unary("erf", "The error function, element by element.")
softplus = _unary("softplus", "log(1 + exp(x)), element by element.")
relu = _unary("relu", "max(x, 0), element by element; its gradient at 0 is 0.")
abs = _unary("abs", "The absolute value, element by element; its gradient at 0 is 0.")
sign = _unary("sign", "-1, 0 or 1, element by element; without gradient.")
square = _unary("square", "x times x, element by element.")
reciprocal = _unary("reciprocal", "1 / x, element by element.")
stop_gradient = _unary("stop_gradient", "The value, without gradient.")


def leaky_relu(x: Symbol, negative_slope: float = 0.2) -> Symbol:
    """The leaky ReLU: x where x > 0, else `negative_slope` times x."""
    trace = _symbol(x, "leaky_relu").trace
    return trace.emit("leaky_relu", trace.floating(x), slope=float(negative_slope))


def elu(x: Symbol, alpha: float = 1.0) -> Symbol:
    """The exponential linear unit: x where x > 0, else alpha (exp(x) - 1)."""
    x = _symbol(x, "elu")
    x = x.trace.floating(x)
    positive = x.trace.emit("relu", x)
    negative = _select(x, 0.0, x)  # x less the positive part would be NaN at infinity
    # exp(x) - 1 by a product: the difference would have no correct digit near 0.
    return positive + alpha * (tanh(0.5 * negative) * (exp(negative) + 1.0))


def gelu(x: Symbol) -> Symbol:
    """The Gaussian error linear unit, x Phi(x), with the exact error function (arXiv 1606.08415)."""
    x = _symbol(x, "gelu")
    return 0.5 * x * (1.0 + erf(x * math.sqrt(0.5)))


def silu(x: Symbol) -> Symbol:
    """The sigmoid linear unit: x sigmoid(x)."""
    return _symbol(x, "silu") * sigmoid(x)


def maximum(x: Any, y: Any) -> Symbol:
    """The larger of two values, element by element; equal elements share the gradient."""
    return _first("maximum", x, y).trace.binary("max", x, y)


def minimum(x: Any, y: Any) -> Symbol:
    """The smaller of two values, element by element; equal elements share the gradient."""
    return _first("minimum", x, y).trace.binary("min", x, y)


def clip(x: Symbol, min: Any = None, max: Any = None) -> Symbol:
    """x limited to at least `min` and at most `max`; None sets no limit."""
    x = _symbol(x, "clip")
    x = x if min is None else maximum(x, min)
    return x if max is None else minimum(x, max)


def arctan2(y: Any, x: Any) -> Symbol:
    """The angle of the point (x, y), element by element, in (-pi, pi]."""
    return _first("arctan2", y, x).trace.binary("atan2", y, x)


def where_positive(condition: Symbol, x: Any, y: Any) -> Symbol:
    """x where `condition` > 0, else y; no gradient flows to the condition."""
    return _select(_symbol(condition, "where_positive"), x, y)


def where(condition: Symbol, x: Any, y: Any) -> Symbol:
    """x where `condition` is true or nonzero, else y; no gradient flows to the condition.

    Args:
      condition: booleans, a comparison, or numbers.
      x, y: values, numbers or arrays.
    """
    c = _first("where", condition, x, y).trace.operand(condition)
    return _select(c, x, y) if is_mask(c.trace.builder.ops, c.index) else _select(c == 0, y, x)


def _select(condition: Symbol, x: Any, y: Any) -> Symbol:
    trace = condition.trace
    like = x if isinstance(x, Symbol) else y if isinstance(y, Symbol) else condition
    c, a, b = trace.align(condition, trace.value(x, like), trace.value(y, like))
    return trace.emit("select", c, a, b)


def sum(x: Symbol, axis: Axis = -1, keepdims: bool = False) -> Symbol:
    """The sum over one feature axis, several axes (a tuple) or all (None).

    For booleans, the number of true elements.
    """
    return features.total(_symbol(x, "sum"), axis, keepdims)


def mean(x: Symbol, axis: Axis = -1, keepdims: bool = False) -> Symbol:
    """The mean over feature axes; `axis` as in `sum`."""
    return features.mean(_symbol(x, "mean"), axis, keepdims)


def max(x: Symbol, axis: Axis = -1, keepdims: bool = False) -> Symbol:
    """The maximum over feature axes; `axis` as in `sum`. Equal maxima share the gradient."""
    return features.extremum(_symbol(x, "max"), "max", axis, keepdims)


def min(x: Symbol, axis: Axis = -1, keepdims: bool = False) -> Symbol:
    """The minimum over feature axes; `axis` as in `sum`. Equal minima share the gradient."""
    return features.extremum(_symbol(x, "min"), "min", axis, keepdims)


def softmax(x: Symbol, axis: Axis = -1) -> Symbol:
    """The softmax over feature axes, exp(x) divided by its sum; `axis` as in `sum`."""
    return features.softmax(_symbol(x, "softmax"), axis)


def log_softmax(x: Symbol, axis: Axis = -1) -> Symbol:
    """The logarithm of the softmax over feature axes; `axis` as in `sum`."""
    return features.log_softmax(_symbol(x, "log_softmax"), axis)


def logsumexp(x: Symbol, axis: Axis = -1, keepdims: bool = False) -> Symbol:
    """The logarithm of the sum of exp(x) over feature axes; `axis` as in `sum`."""
    return features.logsumexp(_symbol(x, "logsumexp"), axis, keepdims)


def dot(x: Symbol, y: Symbol) -> Symbol:
    """The inner product over the last feature axis: (width,) gives (), (heads, width) gives (heads,)."""
    x, y = _symbol(x, "dot"), _symbol(y, "dot")
    x, y = x.trace.align(x, y)
    if not x.shape or x.shape != y.shape:
        raise fail(f"rgnn.dot needs two values of the same feature shape with a width, got {x.shape} and {y.shape}")
    return x.trace.emit("dot", x, y)


def concatenate(values: Sequence[Symbol], axis: int = -1) -> Symbol:
    """Concatenates values along a feature axis."""
    if not values:
        raise fail("rgnn.concatenate needs at least one value")
    first = _symbol(values[0], "concatenate")
    aligned = first.trace.align(*(_symbol(v, "concatenate") for v in values))
    if not first.shape:
        raise fail("rgnn.concatenate needs values with a feature axis; x[None] gives a scalar an axis of size 1")
    return first.trace.emit("concat", *aligned, axis=features.axis_of(first, axis))


def stack(values: Sequence[Symbol], axis: int = 0) -> Symbol:
    """Stacks values of one feature shape along a new feature axis: two of (width,) give (2, width)."""
    if not values:
        raise fail("rgnn.stack needs at least one value")
    first = _symbol(values[0], "stack")
    aligned = first.trace.align(*(_symbol(v, "stack") for v in values))
    shapes = {v.shape for v in aligned}
    if len(shapes) > 1:
        raise fail(f"rgnn.stack needs values of one feature shape, got {' and '.join(map(str, sorted(shapes)))}")
    rank = len(first.shape) + 1
    if not isinstance(axis, int) or isinstance(axis, bool) or not -rank <= axis < rank:
        raise fail(f"axis must be from {-rank} to {rank - 1} for values of feature shape {first.shape}, got {axis!r}")
    at = axis % rank
    shape = (*first.shape[:at], 1, *first.shape[at:])
    return first.trace.emit("concat", *(v.reshape(shape) for v in aligned), axis=at)


def edge_softmax(score: Symbol, within: str = "dst") -> Symbol:
    """The softmax of an edge value over the edges that have the same destination (or source), for attention.

    Args:
      score: an edge value of any feature shape; each feature is normalised separately.
      within: over which edges the softmax goes: `"dst"`, all incoming edges of a node; `"src"`, all outgoing edges of a
        node; or `"relation"`, the incoming edges of a node that have one edge type.
    """
    vias = {"dst": "dst", "src": "src", "relation": "destination_pair"}
    if within not in vias:
        raise fail(f"edge_softmax(within=...) must be 'dst', 'src' or 'relation', got {within!r}")
    score = _symbol(score, "edge_softmax")
    score = score.trace.declare(score, Space.EDGE, "rgnn.edge_softmax")
    return score.trace.emit("softmax", score.trace.floating(score), via=vias[within])


def row_softmax(score: Symbol, within: str = "graph") -> Symbol:
    """The softmax of a value over all its rows, or over the rows of each type, for global or semantic attention.

    Args:
      score: a value with a row for each node, edge or pair, of any feature shape; each feature is normalised
        separately.
      within: over which rows the softmax goes: `"graph"`, all rows; or `"type"`, the nodes of a node type, or the edges
        (or pairs) of an edge type.
    """
    if within not in ("graph", "type"):
        raise fail(f"row_softmax(within=...) must be 'graph' or 'type', got {within!r}")
    score = _symbol(score, "row_softmax")
    via = "all" if within == "graph" else inter.TYPE_VIA.get(score.space)
    if score.space == Space.GRAPH or via is None:
        found = SPACE_WORDS[score.space]
        raise fail(f"row_softmax(within={within!r}) needs rows of nodes, edges or pairs, got {found}")
    return score.trace.emit("softmax", score.trace.floating(score), via=via)
