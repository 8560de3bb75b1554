"""Tracing: a Python function over symbolic values is run once, into the inter-operator IR."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from dejax.rgnn.compiler.frontend.errors import ProgramError, fail
from dejax.rgnn.compiler.frontend.foreign_calls import as_program_error
from dejax.rgnn.compiler.frontend.graph_symbol import GraphSymbol
from dejax.rgnn.compiler.frontend.symbols import Argument, Symbol
from dejax.rgnn.compiler.frontend.trace import Trace
from dejax.rgnn.ir import inter
from dejax.rgnn.ir.inter import Space


def trace_program(
    name: str,
    function: Callable,
    rows: dict[Space, int],
    arguments: list[tuple[str, tuple[int, ...], str]],
    rebuild: Callable[[list[Argument]], tuple[tuple, dict]],
) -> tuple[inter.Program, Any, tuple[Any, ...]]:
    """Runs `function` over symbols; returns its program, the structure of its result, and arrays it closes over.

    Those arrays are inputs of the program, too: their positions follow the arguments'.

    Args:
      rows: how many rows each space has.
      arguments: name, shape and dtype of each array argument.
      rebuild: makes the function's positional and keyword arguments from the symbols.
    """
    import jax

    trace = Trace(name, rows, len(arguments))
    symbols = [Argument(trace, n, i, shape, dtype) for i, (n, shape, dtype) in enumerate(arguments)]
    args, kwargs = rebuild(symbols)
    try:
        result = function(GraphSymbol(trace), *args, **kwargs)
    except (TypeError, ValueError, AttributeError) as error:
        ours = None if isinstance(error, ProgramError) else as_program_error(error)
        if ours is None:
            raise
        raise ours from error
    leaves, tree = jax.tree_util.tree_flatten(result, is_leaf=lambda x: isinstance(x, (Symbol, Argument)))
    code = getattr(inspect.unwrap(function), "__code__", None)
    here = (
        f"{code.co_filename}:{code.co_firstlineno}" if code else None
    )  # the function is left: its head is what is known
    for leaf in leaves or [None]:
        if not isinstance(leaf, Symbol) or leaf.trace is not trace:
            raise fail(
                f"program {name!r} must return values made from its arguments, got {leaf!r}; "
                "an argument returned as it is needs g.node(x) or g.edge(x)",
                here,
            )
    return trace.builder.build(leaf.index for leaf in leaves), tree, tuple(trace.closed_over)
