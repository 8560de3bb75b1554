"""Tracing: runs a Python function once on symbolic values, which records the inter-operator IR."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import jax

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
) -> tuple[inter.OpProgram, Any, tuple[Any, ...]]:
    """Runs `function` on symbols.

    Args:
      name: the name of the program.
      function: takes a `GraphSymbol` and the arguments.
      rows: how many rows each space has.
      arguments: name, shape and dtype of each array argument.
      rebuild: makes the function's positional and keyword arguments from the symbols.

    Returns:
      The program, the structure of the function's result, and the arrays that the function closes over. These arrays
      are inputs of the program; their positions follow those of the arguments.
    """
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
    # The function has returned, so the error can only name its first line.
    here = f"{code.co_filename}:{code.co_firstlineno}" if code else None
    for leaf in leaves or [None]:
        if not isinstance(leaf, Symbol) or leaf.trace is not trace:
            raise fail(
                f"program {name!r} must return values made from its arguments, got {leaf!r}; "
                "write g.node(x) or g.edge(x) to return an argument",
                here,
            )
    return trace.builder.build(leaf.index for leaf in leaves), tree, tuple(trace.closed_over)
