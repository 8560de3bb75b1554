"""Graphs from and to `jraph.GraphsTuple`, and to edge lists by (source type, relation, destination type)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax._optional import optional
from dejax.rgnn.graphs.checks import is_traced
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.spec import SELF_LOOP
from dejax.rgnn.graphs.tables import LONG_SEGMENT_CHUNK

if TYPE_CHECKING:
    import jraph

EDGE_TYPE_KEY = "edge_type"
NODE_TYPE_KEY = "node_type"


class _Keep:
    """The default of an argument for which None is a value."""

    def __repr__(self) -> str:
        return "<as in like>"


_KEEP = _Keep()

from_relations = RelGraph.from_relations


def to_relations(graph: RelGraph) -> dict[tuple[str, str, str], tuple[np.ndarray, np.ndarray]]:
    """Converts a graph made by `from_relations` back to edge lists by relation, in their original order.

    Added reverse edges become relations of their own, `(destination, "rev_" + relation, source)`; added self loops are
    left out.

    Returns:
        `{(source type, relation, destination type): (senders, receivers)}`, int32 ids within each node type.

    Raises:
        ValueError: the graph was not made by `from_relations`.

    >>> from dejax import rgnn
    >>> writes = ("author", "writes", "paper")
    >>> graph = rgnn.RelGraph.from_relations({writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3})
    >>> rgnn.interop.to_relations(graph)
    {('author', 'writes', 'paper'): (array([0, 1], dtype=int32), array([2, 0], dtype=int32))}
    """
    if graph.node_type_counts is None or graph.node_type_names is None or graph.edge_type_names is None:
        raise ValueError(
            "to_relations: `graph` must be made by RelGraph.from_relations, whose types have names, got a graph "
            "without names"
        )
    senders, receivers, edge_type = (np.asarray(array) for array in graph.to_edges())
    offsets = np.asarray(graph.by_edge_type.offsets)
    # In the user's order the edges are joined relation after relation.
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
    bounded: bool | None = None,
    long_segment_chunk: int = LONG_SEGMENT_CHUNK,
) -> RelGraph:
    """Converts a `jraph.GraphsTuple` to a `RelGraph`. A batch of graphs becomes one graph with several components.

    Outside of `jax.jit` the graph is built by `RelGraph.from_edges`. If an array of the tuple is traced, it is built by
    `RelGraph.build_traced`: the sizes of the graph are the lengths of the arrays, and the numbers of types must be
    given.

    Args:
        graphs_tuple: `senders` and `receivers` are int[edges], or None without edges; `n_node` and `n_edge` are
            int[graphs].
        edge_type: the edge types: an int[edges] array, an int (one type for all edges), a key of the mapping
            `graphs_tuple.edges`, or a function of `graphs_tuple.edges`. None: `edges` itself if it is an integer array
            of rank 1, else its entry "edge_type".
        num_edge_types: number of edge types; by default found from the types. Required inside of `jax.jit`.
        node_type: the node types, in the same forms, from `graphs_tuple.nodes`. None: its entry "node_type" if there is
            one, else type 0 for all nodes.
        num_node_types: number of node types; by default found from the types. Required inside of `jax.jit`.
        padded: whether `graphs_tuple` comes from `jraph.pad_with_graphs`, so that its last graph with nodes, and all
            graphs after it, are padding. The tuple itself does not tell, since a padded tuple looks like a batch. Nodes
            and edges beyond the sums of `n_node` and `n_edge` are padding in any case.
        add_reverse: as in `RelGraph.from_edges`.
        add_self_loops: as in `RelGraph.from_edges`.
        edge_type_names: as in `RelGraph.from_edges`.
        node_type_names: as in `RelGraph.from_edges`.
        validate: as in `RelGraph.from_edges`; no effect inside of `jax.jit`.
        bounded: as in `RelGraph.from_edges`: tuples of equal shapes, such as batches that are padded to one size, then
            share one compiled program. None means the value of `padded`. No effect inside of `jax.jit`, where all
            graphs are bounded.
        long_segment_chunk: as in `RelGraph.from_edges`.

    Returns:
        The graph. The user's order of its edges is the order of `graphs_tuple`, so `graphs_tuple.edges` fits it.

    Raises:
        TypeError, ValueError, IndexError: as `RelGraph.from_edges`; or the types cannot be found.
    """
    senders, receivers = graphs_tuple.senders, graphs_tuple.receivers
    num_nodes, num_edges = _num_nodes(graphs_tuple), _num_edges(graphs_tuple)
    if senders is None or receivers is None:  # jraph's form of a graph without edges
        senders = receivers = np.zeros(0, np.int32)
        edge_type = 0 if edge_type is None else edge_type
    edge_types = _types(graphs_tuple.edges, edge_type, ("edge_type", "edges"), EDGE_TYPE_KEY, num_edges)
    node_types = _types(graphs_tuple.nodes, node_type, ("node_type", "nodes"), NODE_TYPE_KEY, num_nodes)
    if edge_types is None:
        raise ValueError(
            "edge_type must be given, because graphs_tuple.edges is no integer array and has no entry 'edge_type'; "
            "give an array, a key or a function of graphs_tuple.edges, or edge_type=0 where all edges have one type"
        )
    arrays = {"senders": senders, "receivers": receivers, "edge_type": edge_types, "node_type": node_types}
    options: dict[str, Any] = {
        "num_nodes": num_nodes,
        "num_edge_types": num_edge_types,
        "num_node_types": num_node_types,
        "add_reverse": add_reverse,
        "add_self_loops": add_self_loops,
        "edge_type_names": edge_type_names,
        "node_type_names": node_type_names,
        "long_segment_chunk": long_segment_chunk,
    }
    if is_traced(*arrays.values(), graphs_tuple.n_node, graphs_tuple.n_edge):
        valid_nodes, valid_edges = _num_valid(graphs_tuple, padded, jnp)
        options |= _static_type_counts(options, node_types is not None)
        return RelGraph.build_traced(**arrays, **options, num_valid_nodes=valid_nodes, num_valid_edges=valid_edges)
    valid_nodes, valid_edges = (int(number) for number in _num_valid(graphs_tuple, padded, np))
    return RelGraph.from_edges(
        **arrays,
        **options,
        edge_mask=_first_valid("n_edge", valid_edges, num_edges),
        node_mask=_first_valid("n_node", valid_nodes, num_nodes),
        validate=validate,
        bounded=padded if bounded is None else bounded,
    )


def _static_type_counts(options: Mapping[str, Any], typed_nodes: bool) -> dict[str, int]:
    """The numbers of types where their values are traced: as given, or as many as there are names."""
    found = {}
    for kind, needed in (("edge", True), ("node", typed_nodes)):
        count, names = options[f"num_{kind}_types"], options[f"{kind}_type_names"]
        if count is None and names is None and needed:
            raise TypeError(
                f"num_{kind}_types must be given inside jit, where the values of types are not known, got None"
            )
        found[f"num_{kind}_types"] = len(names or ()) if count is None else count
    if options["num_node_types"] is None:
        found["num_node_types"] = max(found["num_node_types"], 1)
    return found


def _first_valid(name: str, valid: int, size: int) -> np.ndarray:
    """The mask of the first `valid` of `size` rows."""
    if not 0 <= valid <= size:
        raise ValueError(
            f"the sum of graphs_tuple.{name} must be from 0 to {size}, the rows of the arrays, got {valid}"
        )
    return np.arange(size) < valid


def to_graphs_tuple(
    graph: RelGraph, *, nodes: Any = _KEEP, edges: Any = _KEEP, like: jraph.GraphsTuple | None = None
) -> jraph.GraphsTuple:
    """Converts a `RelGraph` to a `jraph.GraphsTuple`, or puts new features into the tuple that the graph was made from.

    Args:
        graph: the graph.
        nodes: node features, a pytree of arrays with `graph.num_nodes` rows; by default those of `like`, or None.
        edges: edge features, a pytree of arrays with a row for each edge of the user (in the user's order, which is the
            order of `like`) or a row for each edge of the graph. By default those of `like`, or the edge types.
        like: the tuple that `from_graphs_tuple` made the graph from. Its `senders`, `receivers`, `n_node`, `n_edge` and
            `globals` are kept, padding included; edges that were added to the graph are left out.

    Returns:
        The tuple. Without `like` it is one graph with all edges, added ones included, in the user's order.

    Raises:
        ValueError: the features or `like` do not fit the graph; or a graph with padding comes without `like`.

    >>> from dejax import rgnn
    >>> graph = rgnn.RelGraph.from_edges([0, 1], [1, 2], [0, 1], num_nodes=3)
    >>> found = rgnn.interop.to_graphs_tuple(graph)
    >>> found.senders, found.receivers, found.edges
    (Array([0, 1], dtype=int32), Array([1, 2], dtype=int32), Array([0, 1], dtype=int32))
    """
    with optional("jraph", of="to_graphs_tuple"):
        import jraph

    if like is not None:
        num_edges = _num_edges(like)
        if _num_nodes(like) != graph.num_nodes or num_edges > graph.num_edges:
            raise ValueError(
                f"like must have {graph.num_nodes} nodes and at most {graph.num_edges} edges, as the graph has, got "
                f"{_num_nodes(like)} and {num_edges}; give the GraphsTuple that the graph was made from"
            )
        return like._replace(
            nodes=like.nodes if isinstance(nodes, _Keep) else _rows(nodes, "nodes", graph.num_nodes),
            edges=like.edges if isinstance(edges, _Keep) else _rows(edges, "edges", num_edges, graph.num_edges),
        )
    masks = [mask for mask in (graph.edge_mask, graph.node_mask) if mask is not None]
    if is_traced(*masks) or not all(np.all(mask) for mask in masks):
        raise ValueError(
            "like must be given for a graph with padding, got None; give the GraphsTuple that the graph was made from"
        )
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
    """`features` with `size` rows each; arrays with `also` rows are cut to the first `size`."""

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
    """The static number of node rows, of the features or else of a concrete `n_node`."""
    leaves = jax.tree.leaves(graphs_tuple.nodes)
    if leaves:
        return int(leaves[0].shape[0])
    if is_traced(graphs_tuple.n_node):
        raise ValueError(
            "graphs_tuple.nodes must have an array where n_node is traced, to make the number of nodes static; give "
            "node features, of width 0 if there are none"
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


def _types(features: Any, given: str | Callable[[Any], Any] | Any, names: tuple[str, str], key: str, size: int) -> Any:
    """The types in `features` that `given` names; None where nothing is given and nothing is found."""
    name, where = names
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
