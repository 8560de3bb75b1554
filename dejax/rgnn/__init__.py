"""Relational graph neural networks, compiled: a model is a Python function, its layers run as few fused kernels.

Start with `RelGraph.from_edges`, and with `library.rgcn`, `library.rgat`, `library.hgt` or your own `@rgnn.program`.
Flax modules are in `dejax.rgnn.nnx` and `dejax.rgnn.linen`, jraph's graphs in `dejax.rgnn.interop`.
"""

from __future__ import annotations

import importlib
from typing import Any

from dejax.rgnn import library, zoo
from dejax.rgnn.compiler import functional
from dejax.rgnn.compiler.frontend import ProgramError
from dejax.rgnn.compiler.functional import *  # noqa: F403  (its `__all__` is a part of the one below)
from dejax.rgnn.compiler.program import Program, program
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.options import Options
from dejax.rgnn.passes.faults import KernelFallbackWarning

_LAZY = ("interop", "jraph_layers", "linen", "nnx")  # these import flax or jraph

__all__ = [
    *functional.__all__,
    "KernelFallbackWarning",
    "Options",
    "Program",
    "ProgramError",
    "RelGraph",
    "library",
    "program",
    "zoo",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"dejax.rgnn.{name}")
    raise AttributeError(f"module 'dejax.rgnn' has no attribute {name!r}")
