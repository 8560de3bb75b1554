"""Indices in square brackets: slices of features, and rows of a table by the integers of another value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dejax.rgnn.compiler.frontend.errors import SPACE_WORDS, fail
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space

if TYPE_CHECKING:
    from dejax.rgnn.compiler.frontend.symbols import Symbol


def indexed(x: Symbol, key: tuple) -> Symbol:
    """`x[key]`."""
    by_value = [k for k in key if x.trace.is_operand(k)]
    if not by_value:
        return _sliced(x, key)
    if len(by_value) > 1 or by_value[0] is not key[0]:
        raise fail(
            "an index that is a value must be the first and the only such index, got another; write x[ids] or x[ids, "
            ":8]"
        )
    rows = _looked_up(x, x.trace.operand(key[0]))
    rest = key[1:]
    return rows if not rest else _sliced(rows, (*(slice(None),) * (len(rows.shape) - len(x.shape) + 1), *rest))


def _looked_up(table: Symbol, ids: Symbol) -> Symbol:
    """For each integer of `ids`, that row of the table along its first feature axis."""
    trace = table.trace
    trace.own(ids)
    if not table.shape:
        raise fail(f"{SPACE_WORDS[table.space]} must have a feature axis to look up in, got a scalar per row")
    if not ids.dtype.startswith(("int", "uint")):
        raise fail(
            f"an index must be of integers, got {ids.dtype}; use x.astype('int32'), or rgnn.where(mask, x, y) "
            "to choose by a mask"
        )
    if table.shape[0] == 0 and ids.op.width > 0:
        raise fail(f"the first feature axis must not be empty for a lookup, got feature shape {table.shape}")
    if table.space == Space.GRAPH:
        via = "all" if ids.space != Space.GRAPH else "self"
    elif inter.TYPE_VIA.get(ids.space) and inter.VIAS[inter.TYPE_VIA[ids.space]].coarse == table.space:
        via = inter.TYPE_VIA[ids.space]
    else:
        table, ids = trace.align(table, ids)
        via = "self"
    return trace.emit("lookup", table, ids, via=via, outside="clip")


def _sliced(x: Symbol, key: tuple) -> Symbol:
    rank = len(x.shape)
    used = sum(k is not None and k is not Ellipsis for k in key)
    if used > rank:
        raise fail(f"too many indices for feature shape {x.shape}; only features are indexed, never rows")
    dots = [at for at, k in enumerate(key) if k is Ellipsis]
    if len(dots) > 1:
        raise fail("an index must have at most one ellipsis (...), got more; write x[..., 0]")
    at = dots[0] if dots else len(key)
    key = (*key[:at], *(slice(None),) * (rank - used), *key[at + 1 :])
    axis, shape = 0, []
    for k in key:
        if k is None:
            shape.append(1)
            continue
        start, stop, drop = _bounds(k, axis, x.shape[axis])
        if (start, stop) != (0, x.shape[axis]):
            x = x.trace.emit("slice", x, axis=axis, start=start, stop=max(start, stop))
        if not drop:
            shape.append(x.shape[axis])
        axis += 1
    return x if tuple(shape) == x.shape else x.trace.emit("reshape", x, shape=tuple(shape))


def _bounds(k: Any, axis: int, size: int) -> tuple[int, int, bool]:
    """Start and stop of one index, and whether it drops its axis."""
    if isinstance(k, int) and not isinstance(k, bool):
        if not -size <= k < size:
            raise fail(f"index {k} is out of range for feature axis {axis} of size {size}")
        return k % size, k % size + 1, True
    if isinstance(k, slice) and k.step in (None, 1):
        start, stop, _ = k.indices(size)
        return start, stop, False
    raise fail(
        f"an index of features must be an integer, a slice without a step, None, ... or a value of integers, got {k!r}"
    )
