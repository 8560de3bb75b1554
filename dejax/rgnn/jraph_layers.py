"""Relational layers on `jraph.GraphsTuple`: a graph goes in, a graph comes out, as in jraph's own models.

    step = graphs_tuple_layer(layer, edge_type="type", num_edge_types=4, node_key="features", edge_key="features")
    graphs = jraph.GraphNetwork(update_edge_fn, update_node_fn)(step(graphs))

The graph's tables are made from the tuple: by numpy where it is concrete, with static bounds inside `jax.jit`. A
tuple whose edges stay the same from call to call is better converted once, outside (`interop.from_graphs_tuple`), and
given as `graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from dejax.rgnn.graphs.rel_graph import RelGraph

if TYPE_CHECKING:
    from jraph import GraphsTuple

Updates: TypeAlias = Literal["nodes", "edges", "both"]


def apply_to_graphs_tuple(
    layer: Callable[..., Any],
    graphs_tuple: GraphsTuple,
    *,
    graph: RelGraph | None = None,
    node_key: str | None = None,
    edge_key: str | None = None,
    with_edges: bool = False,
    updates: Updates = "nodes",
    **graph_options: Any,
) -> GraphsTuple:
    """The graph with a layer's result in place of the features it was made from.

    Args:
      layer: an nnx module, `functools.partial(linen_module.apply, variables)`, a program with its weights bound, or any
        function `layer(graph, x)`; `layer(graph)` where the tuple has no nodes; with `with_edges`, edge features
        follow x.
      graphs_tuple: one graph or a batch, padded (`jraph.pad_with_graphs`) or not, concrete or traced.
      graph: the tuple's `RelGraph`, where it is known already; otherwise it is made here.
      node_key: for `nodes` that are a mapping: which entry is x, and is replaced.
      edge_key: the same for `edges`, where they are read or replaced.
      with_edges: whether the layer takes the edge features too.
      updates: what the layer returns: new `"nodes"`, new `"edges"`, or `"both"`, a pair. Where `edges` is the array of
        edge types itself, replacing it loses them for the next layer: give that one `graph`, or keep types under a key.
      **graph_options: of `interop.from_graphs_tuple` (`edge_type`, `num_edge_types`, ...), where `graph` is not given.

    Returns:
      A `GraphsTuple` that differs from `graphs_tuple` in what was updated only. Edge features are in the tuple's order;
      those of reverse edges and self loops that the `RelGraph` has in addition are left out.

    Raises:
      ValueError: `graph` beside options to make one, a graph of other counts, or an unknown `updates`.
      TypeError: features that are a mapping without a key, or a key without a mapping.
    """
    if updates not in ("nodes", "edges", "both"):
        raise ValueError(f"updates is 'nodes', 'edges' or 'both', got {updates!r}")
    from dejax.rgnn.graphs.interop import from_graphs_tuple, to_graphs_tuple

    if graph is None:
        graph = from_graphs_tuple(graphs_tuple, **graph_options)
    elif graph_options:
        raise ValueError(f"graph is given, so nothing is made from {sorted(graph_options)}; leave one of them out")
    inputs = [] if graphs_tuple.nodes is None else [_read(graphs_tuple.nodes, node_key, "node")]
    if with_edges:
        inputs.append(_pad_rows(_read(graphs_tuple.edges, edge_key, "edge"), graph.num_edges))
    result = layer(graph, *inputs)
    nodes, edges = {"nodes": (result, None), "edges": (None, result), "both": result}[updates]
    features: dict[str, Any] = {}
    if nodes is not None:
        features["nodes"] = _written(graphs_tuple.nodes, node_key, nodes)
    if edges is not None:
        # Reverses and self loops follow the tuple's own edges.
        num_edges = 0 if graphs_tuple.senders is None else graphs_tuple.senders.shape[0]
        features["edges"] = _written(graphs_tuple.edges, edge_key, jax.tree.map(lambda x: x[:num_edges], edges))
    return to_graphs_tuple(graph, like=graphs_tuple, **features)


def graphs_tuple_layer(layer: Callable[..., Any], **keywords: Any) -> Callable[[GraphsTuple], GraphsTuple]:
    """A function from `GraphsTuple` to `GraphsTuple`, as jraph's models are.

    Args:
      layer: as in `apply_to_graphs_tuple`.
      **keywords: those of `apply_to_graphs_tuple`.
    """

    def apply(graphs_tuple: GraphsTuple) -> GraphsTuple:
        return apply_to_graphs_tuple(layer, graphs_tuple, **keywords)

    return apply


def _read(features: Any, key: str | None, what: str) -> Any:
    if key is not None:
        if not isinstance(features, Mapping) or key not in features:
            given = f"a mapping of {sorted(features)}" if isinstance(features, Mapping) else type(features).__name__
            raise TypeError(f"{what}_key={key!r} needs {what}s that are a mapping with that entry, got {given}")
        return features[key]
    if not hasattr(features, "shape"):
        raise TypeError(
            f"the GraphsTuple's {what}s are of type {type(features).__name__}; name a mapping's entry by {what}_key"
        )
    return features


def _written(features: Any, key: str | None, value: Any) -> Any:
    return value if key is None else {**(features or {}), key: value}


def _pad_rows(x: Any, rows: int) -> Any:
    """Zeros for the edges that the RelGraph has beyond the tuple's."""
    x = jnp.asarray(x)
    return x if x.shape[0] == rows else jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
