"""A layer and the shapes of its arguments, to lower it for an H200 on a machine without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from benchmarks.peers.case import Settings, make_graph, parameters
from benchmarks.peers.jax_layers import rel_graph
from dejax import rgnn
from dejax.rgnn import library


@dataclass(frozen=True, slots=True)
class Described:
    """Functions, and the shapes of their arguments: features, the graph with its tables for a GPU, parameters."""

    forward: Callable[..., Any]
    training: Callable[..., Any]
    args: tuple[Any, Any, Any]


def layer(graph_name: str, model: str, settings: Settings, disable: tuple[str, ...] = ()) -> Described:
    """One layer on one of the synthetic graphs, with the Pallas kernels."""
    graph = make_graph(graph_name)
    options = rgnn.Options(precision=settings.precision, backend="pallas", interpret=False, disable=disable)
    tables = rel_graph(graph)[0].with_loop_tables()

    def forward(x: Any, tables: Any, params: Any) -> Any:
        return getattr(library, model)(tables, x, params, options=options)

    def training(x: Any, tables: Any, params: Any) -> Any:
        y, pullback = jax.vjp(lambda x, p: forward(x, tables, p), x, params)
        return y, pullback(y)

    x = jax.ShapeDtypeStruct((graph.num_nodes, settings.width), settings.dtype)
    tables = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tables)
    params = {k: jax.ShapeDtypeStruct(a.shape, settings.dtype) for k, a in parameters(model, graph, settings).items()}
    return Described(forward, training, (x, tables, params))
