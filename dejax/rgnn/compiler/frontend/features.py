"""Reductions and softmax over the feature axes of a value."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dejax.rgnn.compiler.frontend.errors import fail

if TYPE_CHECKING:
    from dejax.rgnn.compiler.frontend.symbols import Symbol

Axis = int | tuple[int, ...] | None


def axes_of(x: Symbol, axis: Any) -> tuple[int, ...]:
    """The feature axes that an `axis` argument names, in order; None names all."""
    rank = len(x.shape)
    if axis is None:
        return tuple(range(rank))
    given = axis if isinstance(axis, tuple) else (axis,)
    if any(not isinstance(a, int) or isinstance(a, bool) for a in given):
        raise fail(f"axis must be an integer, a tuple of integers or None (all axes), got {axis!r}")
    for a in given:
        if not -rank <= a < rank:
            raise fail(f"axis {a} is out of range for feature shape {x.shape}")
    found = sorted(a % rank for a in given)
    if len(set(found)) != len(found):
        raise fail(f"axis must name each axis of feature shape {x.shape} at most once, got {axis!r}")
    return tuple(found)


def axis_of(x: Symbol, axis: Any) -> int:
    """The one feature axis that an `axis` argument names."""
    if not isinstance(axis, int):
        raise fail(f"axis must be one feature axis, an integer, got {axis!r}")
    return axes_of(x, axis)[0]


def total(x: Symbol, axis: Axis, keepdims: bool) -> Symbol:
    axes = axes_of(x, axis)
    x = x.trace.counted(x)
    return x.trace.emit("sum_features", x, axes=axes, keepdims=bool(keepdims)) if axes else x


def mean(x: Symbol, axis: Axis, keepdims: bool) -> Symbol:
    count = _counted(x, axis, "mean")
    return _narrowed(total(_wide(x), axis, keepdims) * (1.0 / count), x)


def extremum(x: Symbol, how: str, axis: Axis, keepdims: bool) -> Symbol:
    """The `how`, "max" or "min", over feature axes."""
    _counted(x, axis, "maximum" if how == "max" else "minimum")
    axes = axes_of(x, axis)
    return x.trace.emit("extremum_features", x, axes=axes, keepdims=bool(keepdims), op=how) if axes else x


def _counted(x: Symbol, axis: Axis, what: str) -> int:
    """How many elements of a row are reduced; at least one."""
    count = math.prod(x.shape[a] for a in axes_of(x, axis))
    if count == 0:
        raise fail(f"a feature shape of {x.shape} has no {what} over an axis of size 0")
    return count


def _wide(x: Symbol) -> Symbol:
    """The value in floats of at least 32 bits, for sums of exponentials."""
    return x.trace.wide(x.trace.floating(x))


def _narrowed(result: Symbol, like: Symbol) -> Symbol:
    dtype = like.trace.floating(like).dtype
    return result if result.dtype == dtype else result.astype(dtype)


def _shifted(x: Symbol, axis: Axis) -> Symbol:
    """x minus its maximum, without gradient through the maximum: results do not depend on it."""
    largest = extremum(x, "max", axis, True)
    return x - x.trace.emit("stop_gradient", largest)


def softmax(x: Symbol, axis: Axis) -> Symbol:
    wide = _wide(x)
    exponential = wide.trace.emit("exp", _shifted(wide, axis))
    return _narrowed(exponential / total(exponential, axis, True), x)


def log_softmax(x: Symbol, axis: Axis) -> Symbol:
    wide = _wide(x)
    shifted = _shifted(wide, axis)
    summed = total(wide.trace.emit("exp", shifted), axis, True)
    return _narrowed(shifted - wide.trace.emit("log", summed), x)


def logsumexp(x: Symbol, axis: Axis, keepdims: bool) -> Symbol:
    wide, trace = _wide(x), x.trace
    largest = trace.emit("stop_gradient", extremum(wide, "max", axis, True))
    # An infinite maximum (all -inf, or one inf) cannot be subtracted, and need not be.
    finite = trace.binary("gt", math.inf, trace.emit("abs", largest))
    zero = trace.value(0.0, largest)
    shift = trace.emit("select", *trace.align(finite, largest, zero))
    summed = trace.emit("log", total(trace.emit("exp", wide - shift), axis, True)) + shift
    axes = axes_of(x, axis)
    if not keepdims and axes:
        shape = tuple(size for a, size in enumerate(x.shape) if a not in axes)
        summed = trace.emit("reshape", summed, shape=shape)
    return _narrowed(summed, x)
