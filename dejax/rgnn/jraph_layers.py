"""Relational layers on `jraph.GraphsTuple`: a graph goes in, a graph comes out, as in jraph's own models.

    step = graphs_tuple_layer(layer, edge_type="type", num_edge_types=4, node_key="features", edge_key="features")
    graphs = jraph.GraphNetwork(update_edge_fn, update_node_fn)(step(graphs))

The graph's tables are made from the tuple: with numpy where it is concrete, with static bounds inside `jax.jit`. If the
edges stay the same from call to call, convert the tuple once, outside (`interop.from_graphs_tuple`), and pass the
result as `graph`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from dejax.rgnn.graphs.interop import from_graphs_tuple, to_graphs_tuple
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
    """Applies a layer to a `jraph.GraphsTuple`, and returns the tuple with new features.

    Args:
      layer: a function `layer(graph, x)`: an nnx module, `functools.partial(linen_module.apply, variables)`, a program
        with its weights bound, or any other. If the tuple has no nodes it is called as `layer(graph)`; with
        `with_edges`, edge features are its last argument.
      graphs_tuple: one graph or a batch, padded (`jraph.pad_with_graphs`) or not, concrete or traced.
      graph: the tuple's `RelGraph`; None makes it from the tuple.
      node_key: if `nodes` is a mapping: the key of the entry that is x and is replaced.
      edge_key: if `edges` is a mapping: the key of the entry that is read or replaced.
      with_edges: whether the layer takes the edge features, too.
      updates: what the layer returns: new `"nodes"`, new `"edges"`, or `"both"`, a pair. If `edges` is the array of
        edge types, replacing it loses the types for the next layer: pass `graph` to that layer, or keep the types under
        a key.
      **graph_options: options of `interop.from_graphs_tuple` (`edge_type`, `num_edge_types`, ...), if `graph` is not
        given.

    Returns:
      A `GraphsTuple` that differs from `graphs_tuple` only in the new features. Edge features are in the tuple's order,
      without reverse edges and self loops that were added to the `RelGraph`.

    Raises:
      ValueError: `graph` comes together with options to make one, or has other counts than the tuple, or `updates` is
        unknown.
      TypeError: a mapping of features comes without a key, or a key without a mapping.

    >>> import jax.numpy as jnp, jraph
    >>> from dejax import rgnn
    >>> from dejax.rgnn.jraph_layers import apply_to_graphs_tuple
    >>> @rgnn.program
    ... def from_neighbours(g, x):
    ...     return g.sum_to_dst(g.src(x))
    >>> x, senders, receivers = jnp.array([[1.0], [3.0], [5.0]]), jnp.array([0, 1]), jnp.array([2, 2])
    >>> tuples = jraph.GraphsTuple(x, None, receivers, senders, None, jnp.array([3]), jnp.array([2]))
    >>> apply_to_graphs_tuple(from_neighbours, tuples, edge_type=0).nodes[2]
    Array([4.], dtype=float32)
    """
    if updates not in ("nodes", "edges", "both"):
        raise ValueError(f"updates must be 'nodes', 'edges' or 'both', got {updates!r}")
    if graph is None:
        graph = from_graphs_tuple(graphs_tuple, **graph_options)
    elif graph_options:
        raise ValueError(
            f"graph must not be given together with {sorted(graph_options)}, which make one; leave one of them out"
        )
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
    """Wraps a layer as a function from `GraphsTuple` to `GraphsTuple`, like the models of jraph.

    Args:
      layer: as in `apply_to_graphs_tuple`.
      **keywords: keyword arguments of `apply_to_graphs_tuple`.

    >>> import jax.numpy as jnp, jraph
    >>> from dejax import rgnn
    >>> from dejax.rgnn.jraph_layers import graphs_tuple_layer
    >>> layer = graphs_tuple_layer(rgnn.program(lambda g, x: g.max_to_dst(g.src(x))), edge_type=0)
    >>> x, senders, receivers = jnp.array([[1.0], [3.0], [5.0]]), jnp.array([0, 1]), jnp.array([2, 2])
    >>> layer(jraph.GraphsTuple(x, None, receivers, senders, None, jnp.array([3]), jnp.array([2]))).nodes[2]
    Array([3.], dtype=float32)
    """

    def apply(graphs_tuple: GraphsTuple) -> GraphsTuple:
        return apply_to_graphs_tuple(layer, graphs_tuple, **keywords)

    return apply


def _read(features: Any, key: str | None, what: str) -> Any:
    if key is not None:
        if not isinstance(features, Mapping) or key not in features:
            given = f"a mapping of {sorted(features)}" if isinstance(features, Mapping) else type(features).__name__
            raise TypeError(f"{what}s must be a mapping with the entry {what}_key={key!r}, got {given}")
        return features[key]
    if not hasattr(features, "shape"):
        raise TypeError(
            f"the GraphsTuple's {what}s must be an array, got {type(features).__name__}; name an entry of a mapping by "
            f"{what}_key"
        )
    return features


def _written(features: Any, key: str | None, value: Any) -> Any:
    return value if key is None else {**(features or {}), key: value}


def _pad_rows(x: Any, rows: int) -> Any:
    """`x` with rows of zeros for the edges that were added to the RelGraph."""
    x = jnp.asarray(x)
    return x if x.shape[0] == rows else jnp.pad(x, ((0, rows - x.shape[0]), *((0, 0),) * (x.ndim - 1)))
