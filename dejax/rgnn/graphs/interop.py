"""Graphs from and to `jraph.GraphsTuple`, and to edge lists by (source type, relation, destination type)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn.graphs.checks import is_traced
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import HUB_CHUNK
from dejax.rgnn.graphs.spec import SELF_LOOP

if TYPE_CHECKING:
    import jraph

EDGE_TYPE_KEY = "edge_type"
NODE_TYPE_KEY = "node_type"


class _Keep:
    """The default of an argument whose None has a meaning of its own."""

    def __repr__(self) -> str:
        return "<as in like>"


_KEEP = _Keep()

from_relations = RelGraph.from_relations


def to_relations(graph: RelGraph) -> dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]:
    """The edge lists by relation of a graph of `from_relations`, in the order in which they were given.

    Reverses are relations of their own, `(destination, "rev_" + relation, source)`; self loops are left out.

    Returns:
        `{(source type, relation, destination type): (senders, receivers)}`, int32 ids within each node type.

    Raises:
        ValueError: if the graph was made in another way.
    """
    if graph.node_type_counts is None or graph.node_type_names is None or graph.edge_type_names is None:
        raise ValueError("to_relations needs a graph of RelGraph.from_relations, whose types have names")
    senders, receivers, edge_type = (np.asarray(array) for array in graph.to_edges())
    offsets = np.asarray(graph.by_edge_type.offsets)
    # Edges of a relation stand together in the user's order, which is that of the types.
    assert (edge_type[1:] >= edge_type[:-1]).all()
    relations = {}
    for number, name in enumerate(graph.edge_type_names):
        if name == SELF_LOOP:
            continue
        source, rest = name.split("/", 1)
        relation, target = rest.rsplit("/", 1)
        edges = slice(offsets[number], offsets[number + 1])
        relations[source, relation, target] = (
            senders[edges] - graph.node_slice(source).start,
            receivers[edges] - graph.node_slice(target).start,
        )
    return relations


def from_graphs_tuple(
    graphs_tuple: jraph.GraphsTuple,
    *,
    edge_type: Any = None,
    num_edge_types: int | None = None,
    node_type: Any = None,
    num_node_types: int | None = None,
    padded: bool = False,
    add_reverse: bool = False,
    add_self_loops: bool = False,
    edge_type_names: tuple[str, ...] | None = None,
    node_type_names: tuple[str, ...] | None = None,
    validate: bool = True,
    hub_chunk: int = HUB_CHUNK,
) -> RelGraph:
    """Makes a graph from a `jraph.GraphsTuple`, batched graphs as one graph with several components.

    Concrete arrays take numpy's way (`RelGraph.from_edges`). Inside jit, where an array of the tuple is traced, it is
    `RelGraph.build_traced`: static sizes are the arrays' lengths, and the numbers of types must be given.

    Args:
        graphs_tuple: `senders` and `receivers` are int[edges], or None without edges; `n_node` and `n_edge` are
            int[graphs].
        edge_type: where the edge types are: an int[edges] array, an int (one type for all edges), a key of the mapping
            `graphs_tuple.edges`, or a function of `graphs_tuple.edges`. None: `edges` itself where it is an array of
            integers of rank 1, else its entry "edge_type".
        num_edge_types: number of edge types; found from the types where those are concrete.
        node_type: as `edge_type`, in `graphs_tuple.nodes`. None: its entry "node_type" if there is one, else 0.
        num_node_types: number of node types; found as that of edge types.
        padded: whether `graphs_tuple` comes from `jraph.pad_with_graphs`, so
            that its last graph with nodes, and what follows, is padding. A padded tuple looks like a batch: this cannot
            be seen from the tuple. Nodes and edges beyond the sums of `n_node` and `n_edge` are padding in any case.
        add_reverse: as in `RelGraph.from_edges`.
        add_self_loops: as in `RelGraph.from_edges`.
        edge_type_names: as in `RelGraph.from_edges`.
        node_type_names: as in `RelGraph.from_edges`.
        validate: as in `RelGraph.from_edges`; no effect inside jit.
        hub_chunk: as in `RelGraph.from_edges`.

    Returns:
        The graph; its user's edge order is that of `graphs_tuple`, so that `graphs_tuple.edges` fits as it is.

    Raises:
        TypeError, ValueError, IndexError: as `RelGraph.from_edges`, or where the types cannot be found.
    """
    senders, receivers = graphs_tuple.senders, graphs_tuple.receivers
    num_edges = _num_edges(graphs_tuple)
    if senders is None or receivers is None:  # jraph's way to say that there are no edges
        senders = receivers = np.zeros(0, np.int32)
        edge_type = 0 if edge_type is None else edge_type
    num_nodes = _num_nodes(graphs_tuple)
    edge_types = _types(
        graphs_tuple.edges, edge_type, ("edge_type", "edges", "num_edge_types"), EDGE_TYPE_KEY, num_edges
    )
    node_types = _types(
        graphs_tuple.nodes, node_type, ("node_type", "nodes", "num_node_types"), NODE_TYPE_KEY, num_nodes
    )
    if edge_types is None:
        raise ValueError(
            "edge_type is not given and graphs_tuple.edges is no integer array and has no entry 'edge_type'; give an "
            "array, a key or a function of graphs_tuple.edges, or edge_type=0 where all edges have one type"
        )
    options: dict[str, Any] = {
        "add_reverse": add_reverse,
        "add_self_loops": add_self_loops,
        "edge_type_names": edge_type_names,
        "node_type_names": node_type_names,
        "hub_chunk": hub_chunk,
    }
    counts = (graphs_tuple.n_node, graphs_tuple.n_edge)
    if is_traced(senders, receivers, edge_types, node_types, *counts):
        for name, given, names in (
            ("num_edge_types", num_edge_types, edge_type_names),
            ("num_node_types", num_node_types, node_type_names if node_types is not None else ()),
        ):
            if given is None and names is None:
                raise TypeError(f"{name} must be given inside jit, where the types' values are unknown")
        num_valid_nodes, num_valid_edges = _num_valid(graphs_tuple, padded, jnp)
        return RelGraph.build_traced(
            senders,
            receivers,
            edge_types,
            num_nodes=num_nodes,
            num_edge_types=len(edge_type_names or ()) if num_edge_types is None else num_edge_types,
            node_type=node_types,
            num_node_types=max(len(node_type_names or ()), 1) if num_node_types is None else num_node_types,
            num_valid_edges=num_valid_edges,
            num_valid_nodes=num_valid_nodes,
            **options,
        )
    num_valid_nodes, num_valid_edges = (int(number) for number in _num_valid(graphs_tuple, padded, np))
    for name, valid, size in (("n_node", num_valid_nodes, num_nodes), ("n_edge", num_valid_edges, num_edges)):
        if not 0 <= valid <= size:
            raise ValueError(f"graphs_tuple.{name} counts {valid} in all, but the arrays have {size} rows")
    return RelGraph.from_edges(
        senders,
        receivers,
        edge_types,
        num_nodes=num_nodes,
        num_edge_types=num_edge_types,
        node_type=node_types,
        num_node_types=num_node_types,
        edge_mask=None if num_valid_edges == num_edges else np.arange(num_edges) < num_valid_edges,
        node_mask=None if num_valid_nodes == num_nodes else np.arange(num_nodes) < num_valid_nodes,
        validate=validate,
        **options,
    )


def to_graphs_tuple(
    graph: RelGraph, *, nodes: Any = _KEEP, edges: Any = _KEEP, like: jraph.GraphsTuple | None = None
) -> jraph.GraphsTuple:
    """Makes a `jraph.GraphsTuple` of a graph, or puts new features in the one it was made from.

    Args:
        graph: the graph.
        nodes: node features, a pytree of arrays with `graph.num_nodes` rows; those of `like` (or None) by default.
        edges: edge features in the user's order, which is that of `like`; a pytree of arrays with a row for each of the
            user's edges or for each edge of the graph. Those of `like` by default, and without it the edge types.
        like: the tuple that `from_graphs_tuple` made the graph from. Its `senders`, `receivers`, `n_node`, `n_edge` and
            `globals` are kept as they are, padding included; edges that were added to the graph are left out.

    Returns:
        The tuple; without `like` it is one graph with all of the graph's edges, added ones included, in the user's
        order.

    Raises:
        ValueError: if the features' rows, or `like`, do not fit the graph, or if a graph with padding is given without
            `like`.
    """
    import jraph

    if like is not None:
        num_edges = _num_edges(like)
        if _num_nodes(like) != graph.num_nodes or num_edges > graph.num_edges:
            raise ValueError(
                f"like has {_num_nodes(like)} nodes and {num_edges} edges, the graph has {graph.num_nodes} and "
                f"{graph.num_edges}; give the GraphsTuple that the graph was made from"
            )
        return like._replace(
            nodes=like.nodes if isinstance(nodes, _Keep) else _rows(nodes, "nodes", graph.num_nodes),
            edges=like.edges if isinstance(edges, _Keep) else _rows(edges, "edges", num_edges, graph.num_edges),
        )
    if graph.edge_mask is not None or graph.node_mask is not None:
        raise ValueError("the graph has padding, whose form only the original GraphsTuple knows; give it as like")
    senders, receivers, edge_type = graph.to_edges()
    return jraph.GraphsTuple(
        nodes=None if isinstance(nodes, _Keep) else _rows(nodes, "nodes", graph.num_nodes),
        edges=edge_type if isinstance(edges, _Keep) else _rows(edges, "edges", graph.num_edges),
        senders=senders,
        receivers=receivers,
        globals=None,
        n_node=jnp.array([graph.num_nodes], jnp.int32),
        n_edge=jnp.array([graph.num_edges], jnp.int32),
    )


def _rows(features: Any, name: str, size: int, also: int | None = None) -> Any:
    """`features` with `size` rows each; of arrays with `also` rows the first ones are taken."""

    def check(leaf: Any) -> Any:
        shape = np.shape(leaf)
        if shape[:1] == (size,):
            return leaf
        if also is not None and shape[:1] == (also,):
            return leaf[:size]
        expected = f"{size} rows" if also in (None, size) else f"{size} rows (or {also}, with the added edges)"
        raise ValueError(f"{name} must have {expected}, got shape {shape}")

    return jax.tree.map(check, features)


def _num_edges(graphs_tuple: jraph.GraphsTuple) -> int:
    return 0 if graphs_tuple.senders is None else int(graphs_tuple.senders.shape[0])


def _num_nodes(graphs_tuple: jraph.GraphsTuple) -> int:
    """The static number of node rows: from the features, or else from concrete `n_node`."""
    leaves = jax.tree.leaves(graphs_tuple.nodes)
    if leaves:
        return int(leaves[0].shape[0])
    if is_traced(graphs_tuple.n_node):
        raise ValueError(
            "graphs_tuple.nodes has no array and n_node is traced, so the number of nodes is not static; give node "
            "features, of width 0 if there is nothing to say"
        )
    return int(np.sum(graphs_tuple.n_node))


def _num_valid(graphs_tuple: jraph.GraphsTuple, padded: bool, xp: Any) -> tuple[Any, Any]:
    """The numbers of valid nodes and edges, which come first."""
    n_node, n_edge = xp.asarray(graphs_tuple.n_node), xp.asarray(graphs_tuple.n_edge)
    if not padded:
        return n_node.sum(), n_edge.sum()
    # The dummy graph that jraph.pad_with_graphs adds has all padding nodes (one or more); only empty graphs follow it.
    graphs = n_node.shape[0]
    last = xp.max(xp.where(n_node > 0, xp.arange(graphs), 0), initial=0)
    real = xp.arange(graphs) < last
    return xp.where(real, n_node, 0).sum(), xp.where(real, n_edge, 0).sum()


def _types(
    features: Any, given: str | Callable[[Any], Any] | Any, names: tuple[str, str, str], key: str, size: int
) -> Any:
    """The types in `features` that `given` speaks of, or None where nothing is given and nothing is found."""
    name, where, _ = names
    if given is None:
        if isinstance(features, Mapping):
            return features.get(key)
        integers = hasattr(features, "dtype") and features.ndim == 1 and jnp.issubdtype(features.dtype, jnp.integer)
        return features if name == "edge_type" and integers else None
    if isinstance(given, str):
        if not isinstance(features, Mapping) or given not in features:
            has = list(features) if isinstance(features, Mapping) else type(features).__name__
            raise ValueError(f"{name} = {given!r} must be a key of graphs_tuple.{where}, which has {has}")
        return features[given]
    if isinstance(given, int | np.integer):
        return np.full(size, given, np.int32)
    return given(features) if callable(given) else given
