"""Which values are masks, and logic on them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dejax.rgnn.compiler.frontend.errors import fail
from dejax.rgnn.ir.inter import OPERATORS, Op

if TYPE_CHECKING:
    from dejax.rgnn.compiler.frontend.symbols import Symbol


def is_mask(ops: Sequence[Op], value: int) -> bool:
    """Whether every element of a value is 0 or 1: booleans, comparisons, and logic on them."""
    op = ops[value]
    masks = OPERATORS[op.name].masks
    if op.dtype == "bool" or masks == "made":
        return True
    if masks == "kept":
        return all(is_mask(ops, a) for a in op.args)
    if op.name == "const":
        return op.attr("value") in (0.0, 1.0)
    if op.name == "sub":
        one = ops[op.args[0]]
        return one.name == "const" and one.attr("value") == 1.0 and is_mask(ops, op.args[1])
    return False


def _mask(x: Any, word: str, like: Symbol) -> Symbol:
    symbol = like.trace.value(x, like)
    if not is_mask(symbol.trace.builder.ops, symbol.index):
        raise fail(
            f"operands of x {word} y and ~x must be masks (booleans and comparisons), got {symbol.dtype}; write x != 0 "
            "to make a mask"
        )
    return symbol


def both(x: Any, y: Any, like: Symbol) -> Symbol:
    return like.trace.binary("mul", _mask(x, "&", like), _mask(y, "&", like))


def either(x: Any, y: Any, like: Symbol) -> Symbol:
    return like.trace.binary("max", _mask(x, "|", like), _mask(y, "|", like))


def negated(x: Symbol) -> Symbol:
    x = _mask(x, "&", x)
    return x.trace.binary("eq", x, False) if x.dtype == "bool" else 1 - x
