"""The front end: a Python function on symbolic values, traced once into the inter-operator IR.

A layer is a function of `g` (a `GraphSymbol`) and of arrays. Inside it every value has a space. The function gives an
array its space where it uses the array: `g.node(h)`, `g.edge(e)`, `g.per_edge_type(w)`, `g.per_node_type(w)` or
`g.shared(w)`. Misuse raises `ProgramError`, which points at the user's line.
"""

from dejax.rgnn.compiler.frontend.errors import SPACE_WORDS, ProgramError, fail, user_line
from dejax.rgnn.compiler.frontend.graph_symbol import GraphSymbol
from dejax.rgnn.compiler.frontend.symbols import Argument, Symbol
from dejax.rgnn.compiler.frontend.trace import Trace
from dejax.rgnn.compiler.frontend.tracing import trace_program

__all__ = [
    "SPACE_WORDS",
    "Argument",
    "GraphSymbol",
    "ProgramError",
    "Symbol",
    "Trace",
    "fail",
    "trace_program",
    "user_line",
]
