"""Calls of native code from a traced program. Slices around a call stay operations of their own."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
from jax import Array


def ffi_call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[Array],
    *,
    fixed: Collection[int] = (),
    fixed_results: Collection[int] = (),
    aliases: Mapping[int, int] | None = None,
    has_side_effect: bool = False,
    **attributes: Any,
) -> list[Array]:
    """The results of an FFI call, behind barriers, as its operands are.

    XLA folds slices into the calls that take or return them. In jax 0.11 it keeps the original call as well if that has
    side effects or if its result has another use: gathers of a loop ran twice, so that rows crossed the bus twice and
    the end of a gather found the rows of another start. It also forgets that results are aliased: tables were copied,
    and a loop that stacked what had passed through a call got zeros. XLA does not fold across barriers, which cost
    nothing. So a call of native code is made here, and the barriers are not the caller's business.

    Args:
        target: the name of the handler.
        results: shape and dtype of each result.
        operands: its operands.
        fixed: positions of operands that no barrier may stand before: arrays in host memory, with which XLA does not
            compute, and small ones that native code knows by their address.
        fixed_results: positions of such results. A result that is aliased to a fixed operand is one.
        aliases: operand -> result that is written in its memory.
        has_side_effect: whether the call must stay if its results are not used.
        attributes: the attributes of the call.
    """
    aliases = dict(aliases or {})
    given = list(operands)
    apart = [at for at in range(len(given)) if at not in fixed]
    for at, operand in zip(apart, jax.lax.optimization_barrier([given[at] for at in apart]), strict=True):
        given[at] = operand
    call = jax.ffi.ffi_call(target, tuple(results), has_side_effect=has_side_effect, input_output_aliases=aliases)
    found = list(call(*given, **attributes))
    bare = {*fixed_results, *(result for operand, result in aliases.items() if operand in fixed)}
    apart = [at for at in range(len(found)) if at not in bare]
    for at, result in zip(apart, jax.lax.optimization_barrier([found[at] for at in apart]), strict=True):
        found[at] = result
    return found
