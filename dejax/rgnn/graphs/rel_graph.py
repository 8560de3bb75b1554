"""`RelGraph`: a graph with typed edges and nodes, and the tables that kernels read, computed once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax import Array

from dejax._platform import on_gpu
from dejax._pytrees import pytree
from dejax.rgnn.graphs import checks
from dejax.rgnn.graphs.building import build
from dejax.rgnn.graphs.loop_tables import on_device, with_loop_tables
from dejax.rgnn.graphs.packed import PackedTables
from dejax.rgnn.graphs.relations import join_bipartite, join_relations
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.graphs.spec import (
    Edges,
    GraphSpec,
    check_ids,
    checked_edges,
    count_types,
    edge_names,
    node_names,
)
from dejax.rgnn.graphs.summary import summary
from dejax.rgnn.graphs.tables import LONG_SEGMENT_CHUNK

_STATIC: dict[str, Any] = {"static": True}


@pytree
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RelGraph:
    """A relational graph: nodes, typed edges, and the groupings of edges by node, type and unique (node, type) pair.

    It is a pytree: arrays are leaves, counts and names are static (part of the jit cache key). Make one with
    `from_edges`, `from_relations`, `build_traced` (inside jit) or `dejax.rgnn.interop.from_graphs_tuple`, not with the
    constructor.

    Edges are stored in *canonical order*: sorted stably by (edge type, receiver, sender), with padding edges last.
    `x[graph.edge_ids]` brings an array with one row per user's edge to canonical order, and `x[graph.edge_positions]`
    brings it back. The user's edges are followed by their reverses (`add_reverse`), in the same order, and by one self
    loop per node (`add_self_loops`), in order of the nodes.

    A *source pair* is a unique (sender, edge type) of some edge, a *destination pair* a unique (receiver, edge type).
    Pairs are numbered in order of (edge type, node). A *bounded* graph, made by `build_traced` or with `bounded=True`,
    has as many pairs as edges. Its unused pairs come last; they have no edges, the node `num_nodes` and the type
    `num_edge_types`.

    Attributes:
        senders: **Edges and nodes.** int32[edges], source node of each edge, canonical; `num_nodes` for padding edges.
        receivers: int32[edges], destination node of each edge, canonical; `num_nodes` for padding edges.
        edge_type: int32[edges], canonical, ascending; `num_edge_types` for padding edges.
        edge_ids: int32[edges], the user's edge at each canonical position.
        edge_positions: int32[edges], the inverse: the canonical position of each of the user's edges.
        node_type: int32[nodes]; `num_node_types` for padding nodes.
        node_mask: bool[nodes], False for padding nodes; None where there is none.
        edge_mask: bool[edges], canonical, False for padding edges; None where there is none.
        by_sender: **Groupings.** Edges grouped by sender.
        by_receiver: edges grouped by receiver.
        by_source_pair: edges grouped by source pair.
        by_destination_pair: edges grouped by destination pair; canonical edges are sorted so (`order` is None).
        by_edge_type: edges grouped by edge type, with tiles; canonical edges are sorted so.
        source_pair_by_node: source pairs grouped by their sender.
        destination_pair_by_node: destination pairs grouped by their receiver.
        source_pair_by_type: source pairs grouped by edge type, with tiles; pairs are sorted so.
        destination_pair_by_type: destination pairs grouped by edge type, with tiles; pairs are sorted so.
        by_node_type: nodes grouped by node type, with tiles; `order` is None where nodes are sorted by type.
        num_nodes: **Sizes**, static. Number of nodes, padding included.
        num_edges: number of edges, added ones and padding included.
        num_edge_types: number of edge types, added ones included.
        num_node_types: number of node types.
        num_source_pairs: number of source pairs; its upper bound in a bounded graph.
        num_destination_pairs: number of destination pairs; its upper bound in a bounded graph.
        typical_source_pairs: about how many of `num_source_pairs` are no padding, where that is known. The compiler
            decides by it, results do not depend on it.
        edge_type_names: **Types**, static but for the grouping. A name for each edge type, or None.
        node_type_names: a name for each node type, or None.
        node_type_counts: nodes of each type where `from_relations` made the graph, otherwise None.
        edge_type_by_source: edge types grouped by the node type of their sources. None where some edge type has
            sources of several node types, and in a bounded graph with more than one node type.
        num_destinations: **Blocks of a sample and parts of a divided graph.** Nodes from this number on have no
            incoming edges (static); None in other graphs, where nothing is known.
        only_destinations: whether programs return only the first `num_destinations` rows of results for nodes (static).
        destinations_by_type: in a block of a sample the destinations grouped by node type; otherwise None.
        packed: **Tables of kernels.** The tables that only kernels read, in one array: all of them after
            `with_loop_tables`, tiles and splits in a block of a sample; otherwise None. The groupings then lack these
            tables, and `grouping` gives a grouping with them.
        loop_tables: made by `with_loop_tables`. `"dst:source_pair"` is int32[edges]: for each position of the order by
            "dst" its source pair. The other tables are named likewise.
    """

    senders: Array
    receivers: Array
    edge_type: Array
    edge_ids: Array
    edge_positions: Array
    node_type: Array
    node_mask: Array | None
    edge_mask: Array | None

    by_sender: Segments
    by_receiver: Segments
    by_source_pair: Segments
    by_destination_pair: Segments
    by_edge_type: Segments
    source_pair_by_node: Segments
    destination_pair_by_node: Segments
    source_pair_by_type: Segments
    destination_pair_by_type: Segments
    by_node_type: Segments

    num_nodes: int = field(metadata=_STATIC)
    num_edges: int = field(metadata=_STATIC)
    num_edge_types: int = field(metadata=_STATIC)
    num_node_types: int = field(metadata=_STATIC)
    num_source_pairs: int = field(metadata=_STATIC)
    num_destination_pairs: int = field(metadata=_STATIC)
    typical_source_pairs: int | None = field(default=None, metadata=_STATIC)

    edge_type_names: tuple[str, ...] | None = field(default=None, metadata=_STATIC)
    node_type_names: tuple[str, ...] | None = field(default=None, metadata=_STATIC)
    node_type_counts: tuple[int, ...] | None = field(default=None, metadata=_STATIC)
    edge_type_by_source: Segments | None = None

    num_destinations: int | None = field(default=None, metadata=_STATIC)
    only_destinations: bool = field(default=False, metadata=_STATIC)
    destinations_by_type: Segments | None = None

    packed: PackedTables | None = None
    loop_tables: dict[str, Array] = field(default_factory=dict)

    def grouping(self, name: str) -> Segments:
        """The grouping called `name` with all its index tables; those in `packed` become `dejax.pallas.TableSlice`s."""
        group: Segments = getattr(self, name)
        return group if self.packed is None else self.packed.onto(name, group)

    def with_loop_tables(self, long_segment_chunk: int = LONG_SEGMENT_CHUNK) -> RelGraph:
        """The graph with the tables that GPU kernels read; 48 bytes per edge.

        - `loop_tables`: a segment reduction over destinations finds the source pair of its p-th edge at
          `loop_tables["dst:source_pair"][p]`, a contiguous read, instead of at
          `by_source_pair.index[by_receiver.order[p]]`, a gather. The backward pass of RGAT on 21 M edges took 2.5 ms
          instead of 4.6 ms. `"dst:#destination_pair"` (float32[edges]) is the number of edges of each edge's
          destination pair, by which a mean divides.
        - `Segments.loop`: the order in which kernels take the segments of a grouping, by length.
        - `Segments.near_tiles`: tiles by type, ordered by the nodes that they read.
        - `packed`: the small tables that only kernels read, in one array.

        Graphs made where the default backend is a GPU have these tables; bounded graphs do not, because the sizes of
        the tables depend on the edges.

        Args:
            long_segment_chunk: the value that the graph was made with.
        """
        return with_loop_tables(self, long_segment_chunk)

    @classmethod
    def from_edges(
        cls,
        senders: Any,
        receivers: Any,
        edge_type: Any = None,
        *,
        num_nodes: int,
        num_edge_types: int | None = None,
        node_type: Any = None,
        num_node_types: int | None = None,
        edge_mask: Any = None,
        node_mask: Any = None,
        add_reverse: bool = False,
        add_self_loops: bool = False,
        edge_type_names: Sequence[str] | None = None,
        node_type_names: Sequence[str] | None = None,
        validate: bool = True,
        bounded: bool = False,
        long_segment_chunk: int = LONG_SEGMENT_CHUNK,
    ) -> RelGraph:
        """Makes a graph from concrete edge arrays, with numpy on the host.

        Args:
            senders: int[edges], source node of each edge.
            receivers: int[edges], destination node of each edge.
            edge_type: int[edges], type of each edge; all 0 by default.
            num_nodes: number of nodes.
            num_edge_types: number of edge types before any is added; by default the number of `edge_type_names` or,
                without names, the largest type plus one (at least 1).
            node_type: int[nodes], type of each node; all 0 by default.
            num_node_types: number of node types; by default the number of `node_type_names` or, without names, the
                largest type plus one (at least 1).
            edge_mask: bool[edges], False for padding edges, whose ends and types are ignored.
            node_mask: bool[nodes], False for padding nodes; no valid edge may end at one.
            add_reverse: adds for each edge of type `t` an edge of type `t + num_edge_types` from receiver to sender.
            add_self_loops: adds one more edge type with an edge `v -> v` for each valid node.
            edge_type_names: a distinct name for each edge type before any is added; reverses are named
                `rev_<name>`, self loops `self_loop`.
            node_type_names: a distinct name for each node type.
            validate: whether to check that ids are in range; unchecked ids out of range give a wrong graph.
            bounded: gives all tables the sizes of their static bounds, as in `build_traced`, in place of those of this
                graph. Graphs of equal numbers of nodes, edges and types then have equal structures and shapes: they
                share one compiled program, and `jax.tree.map(lambda *x: jnp.stack(x), *graphs)` stacks them for
                `jax.vmap` and `jax.lax.scan`. Each edge then counts as a source pair and a destination pair of its
                own, so values per pair take as many rows as values per edge, and kernels have no `loop_tables`.
            long_segment_chunk: nodes and pairs with more edges than this are split in chunks of this many edges, or of
                more where they have very many.

        Returns:
            The graph.

        Raises:
            TypeError: ids that are not integers, masks that are not bools, traced arrays, counts that are not ints.
            ValueError: wrong lengths or ranks, names that do not match the counts, too many edges for int32, a valid
                edge at a padding node.
            IndexError: ids out of range.

        >>> RelGraph.from_edges([0, 1, 1], [1, 0, 2], [0, 1, 0], num_nodes=3)
        RelGraph(nodes=3, edges=3, edge_types=2, node_types=1, source_pairs=3, destination_pairs=3)
        """
        num_nodes = checks.check_count(num_nodes, "num_nodes")
        edges = checked_edges(checks.as_ids, senders, receivers, edge_type)
        edges = edges._replace(mask=checks.as_mask(edge_mask, "edge_mask", edges.senders.shape[0]))
        node_mask = checks.as_mask(node_mask, "node_mask", num_nodes)
        node_type = None if node_type is None else checks.check_size(checks.as_ids(node_type, "node_type"), num_nodes)
        if num_edge_types is None:
            num_edge_types = count_types(edges.edge_type, edge_type_names, edges.mask)
        if num_node_types is None:
            num_node_types = count_types(node_type, node_type_names, node_mask)
        num_edge_types = checks.check_count(num_edge_types, "num_edge_types")
        num_node_types = checks.check_count(num_node_types, "num_node_types")
        spec = GraphSpec(
            num_nodes,
            num_edge_types,
            num_node_types,
            add_reverse,
            add_self_loops,
            edge_names(edge_type_names, num_edge_types, add_reverse, add_self_loops),
            node_names(node_type_names, num_node_types),
            long_segment_chunk=long_segment_chunk,
        )
        spec.check_edge_count(edges.senders.shape[0])
        if validate:
            check_ids(edges, node_type, node_mask, spec)
        senders, receivers, edge_type = (column.astype(np.int32, copy=False) for column in edges[:3])
        edges = Edges(senders, receivers, edge_type, edges.mask)
        return cls._concrete(edges, node_type, node_mask, spec, bounded)

    @classmethod
    def from_relations(
        cls,
        relations: Mapping[tuple[str, str, str], tuple[Any, Any]],
        num_nodes: Mapping[str, int],
        *,
        add_reverse: bool = False,
        add_self_loops: bool = False,
        validate: bool = True,
        bounded: bool = False,
        long_segment_chunk: int = LONG_SEGMENT_CHUNK,
    ) -> RelGraph:
        """Makes a graph from edge lists by relation, with node ids that count from 0 within each node type.

        Nodes are numbered type after type in the order of `num_nodes` (see `node_slice`). Edge types are numbered in
        the order of `relations`, and the user's edges are the relations' edges joined in that order. Edge types are
        named `source/relation/destination`, their reverses `destination/rev_relation/source`.

        Args:
            relations: `{(source type, relation, destination type): (senders, receivers)}`, int[edges] each.
            num_nodes: `{node type: number of nodes}`; type names have no "/".
            add_reverse: adds for each relation its reverse.
            add_self_loops: adds one more edge type with an edge `v -> v` for each node.
            validate: whether to check that ids are in range.
            bounded: as in `from_edges`; the number of edges is that of all relations.
            long_segment_chunk: as in `from_edges`.

        Raises:
            TypeError, ValueError, IndexError: as `from_edges`, naming the relation.

        >>> writes = ("author", "writes", "paper")
        >>> graph = RelGraph.from_relations({writes: ([0, 1], [2, 0])}, {"author": 2, "paper": 3})
        >>> graph.node_slice("paper"), graph.edge_type_names
        (slice(2, 5, None), ('author/writes/paper',))
        """
        edges, node_type, spec = join_relations(
            relations,
            num_nodes,
            add_reverse=add_reverse,
            add_self_loops=add_self_loops,
            validate=validate,
            long_segment_chunk=long_segment_chunk,
        )
        return cls._concrete(edges, node_type, None, spec, bounded)

    @classmethod
    def build_traced(
        cls,
        senders: Any,
        receivers: Any,
        edge_type: Any,
        *,
        num_nodes: int,
        num_edge_types: int,
        node_type: Any = None,
        num_node_types: int = 1,
        num_valid_edges: Any = None,
        edge_mask: Any = None,
        num_valid_nodes: Any = None,
        node_mask: Any = None,
        add_reverse: bool = False,
        add_self_loops: bool = False,
        edge_type_names: Sequence[str] | None = None,
        node_type_names: Sequence[str] | None = None,
        long_segment_chunk: int = LONG_SEGMENT_CHUNK,
    ) -> RelGraph:
        """Makes a graph inside `jax.jit` from traced edge arrays of a static size, some of which may be padding.

        The arrays' lengths bound all tables, so that batches of one shape compile once. Padding edges and nodes have no
        effect on any result. Only shapes and dtypes can be checked. An edge counts as padding if its ids or type are
        out of range or if it ends at a padding node; a node counts as padding if its type is out of range. The result
        always has an `edge_mask`.

        Args:
            senders: int[edges].
            receivers: int[edges].
            edge_type: int[edges].
            num_nodes: number of nodes, padding included; a Python int.
            num_edge_types: number of edge types before any is added; a Python int.
            node_type: int[nodes]; all 0 by default.
            num_node_types: number of node types; a Python int.
            num_valid_edges: the edges after this many are padding; may be traced. Not together with `edge_mask`.
            edge_mask: bool[edges], False for padding edges.
            num_valid_nodes: the nodes after this many are padding; may be traced. Not together with `node_mask`.
            node_mask: bool[nodes], False for padding nodes.
            add_reverse: as in `from_edges`; reverses of padding edges are padding.
            add_self_loops: as in `from_edges`; loops of padding nodes are padding.
            edge_type_names: as in `from_edges`.
            node_type_names: as in `from_edges`.
            long_segment_chunk: as in `from_edges`.

        Raises:
            TypeError: wrong dtypes, or counts that are not Python ints.
            ValueError: wrong lengths or ranks, both a count and a mask given, more valid edges than the arrays have.
        """
        remedy = "; sizes are static: pass the number of padded rows, and num_valid_nodes for the valid ones"
        spec = GraphSpec(
            checks.check_count(num_nodes, "num_nodes", remedy=remedy),
            checks.check_count(num_edge_types, "num_edge_types"),
            checks.check_count(num_node_types, "num_node_types"),
            add_reverse,
            add_self_loops,
            edge_names(edge_type_names, num_edge_types, add_reverse, add_self_loops),
            node_names(node_type_names, num_node_types),
            long_segment_chunk=long_segment_chunk,
        )
        edges = checked_edges(checks.as_traced_ids, senders, receivers, edge_type)
        num_edges = edges.senders.shape[0]
        spec.check_edge_count(num_edges)
        nodes_sorted = node_type is None and node_mask is None
        if node_type is not None:
            node_type = checks.check_size(checks.as_traced_ids(node_type, "node_type"), num_nodes)
        edges = edges._replace(mask=checks.as_traced_mask(edge_mask, num_valid_edges, "edge", num_edges))
        node_mask = checks.as_traced_mask(node_mask, num_valid_nodes, "node", num_nodes)
        return cls._made(build.build_traced(edges, node_type, node_mask, spec, nodes_sorted), spec)

    @classmethod
    def from_bipartite(
        cls,
        senders: Any,
        receivers: Any,
        edge_type: Any = None,
        *,
        num_sources: int,
        num_destinations: int,
        num_edge_types: int | None = None,
        validate: bool = True,
        bounded: bool = False,
        long_segment_chunk: int = LONG_SEGMENT_CHUNK,
    ) -> RelGraph:
        """Makes a graph whose edges lead from source nodes to destination nodes, each numbered from 0.

        In the graph, the destinations follow the sources: `node_slice("source")` and `node_slice("destination")` are
        their rows. Layers that take a pair of features (`dejax.rgnn.zoo`) take one row for each source and one for
        each destination, of two widths.

        Args:
            senders: int[edges], source of each edge, below num_sources.
            receivers: int[edges], destination of each edge, below num_destinations.
            edge_type: int[edges], type of each edge; all 0 by default.
            num_sources: number of source nodes.
            num_destinations: number of destination nodes.
            num_edge_types, validate, bounded, long_segment_chunk: as in `from_edges`.

        Raises:
            TypeError, ValueError, IndexError: as `from_edges`.

        >>> RelGraph.from_bipartite([0, 1, 1], [0, 0, 1], num_sources=2, num_destinations=3)
        RelGraph(nodes=5, edges=3, edge_types=1, node_types=2, source_pairs=2, destination_pairs=2)
        """
        edges = checked_edges(checks.as_ids, senders, receivers, edge_type)
        if num_edge_types is None:
            num_edge_types = count_types(edges.edge_type, None, None)
        edges, node_type, spec = join_bipartite(
            edges,
            num_sources,
            num_destinations,
            num_edge_types,
            validate=validate,
            long_segment_chunk=long_segment_chunk,
        )
        return cls._concrete(edges, node_type, None, spec, bounded)

    @classmethod
    def _made(cls, arrays: dict[str, Any], spec: GraphSpec) -> RelGraph:
        """The graph of the arrays that a builder made."""
        return cls(
            **arrays,
            num_nodes=spec.num_nodes,
            num_edges=arrays["senders"].shape[0],
            num_edge_types=spec.all_edge_types,
            num_node_types=spec.num_node_types,
            num_source_pairs=arrays["by_source_pair"].num_rows,
            num_destination_pairs=arrays["by_destination_pair"].num_rows,
            edge_type_names=spec.edge_type_names,
            node_type_names=spec.node_type_names,
            node_type_counts=spec.node_type_counts,
            typical_source_pairs=spec.typical_source_pairs,
        )

    @classmethod
    def _concrete(cls, edges: Edges, node_type: Any, node_mask: Any, spec: GraphSpec, bounded: bool) -> RelGraph:
        """The graph of checked numpy arrays, on the default device; see `from_edges` on `bounded`.

        With the tables of kernels where that is a GPU, unless it is bounded.
        """
        if bounded:
            nodes_sorted = (node_type is None and node_mask is None) or spec.node_type_counts is not None
            with jax.ensure_compile_time_eval():
                return cls._made(build.build_traced(edges, node_type, node_mask, spec, nodes_sorted), spec)
        graph = cls._made(build.build(edges, node_type, node_mask, spec), spec)
        return graph.with_loop_tables(spec.long_segment_chunk) if on_gpu() else on_device(graph)

    @property
    def is_traced(self) -> bool:
        """Whether the graph's arrays are tracers: inside jit, an argument or a graph of `build_traced`."""
        return checks.is_traced(*jax.tree.leaves(self))

    def to_edges(self) -> tuple[Array, Array, Array]:
        """Senders, receivers and edge types in the user's order, int32[edges] each, with added and padding edges."""
        positions = self.edge_positions
        return self.senders[positions], self.receivers[positions], self.edge_type[positions]

    def node_slice(self, node_type: str) -> slice:
        """The rows of the nodes of one type, in a graph of `from_relations`; also inside jit.

        Raises:
            ValueError: the graph was made in another way, or has no such type.
        """
        if self.node_type_counts is None or self.node_type_names is None:
            raise ValueError(
                "node_slice: the graph must be made by RelGraph.from_relations, whose nodes are numbered type after "
                "type, got a graph of another constructor; select nodes of other graphs by graph.node_type"
            )
        if node_type not in self.node_type_names:
            raise ValueError(f"node_type must be one of {list(self.node_type_names)}, got {node_type!r}")
        position = self.node_type_names.index(node_type)
        start = sum(self.node_type_counts[:position])
        return slice(start, start + self.node_type_counts[position])

    def summary(self) -> str:
        """A small table of the graph's size: counts, largest degrees, bytes of all tables.

        For a padded graph it shows both the valid count and the bound. Inside jit, values that are not static are shown
        as "traced".
        """
        return summary(self)

    def __repr__(self) -> str:
        padded = "".join(f", {name}" for name in ("node_mask", "edge_mask") if getattr(self, name, None) is not None)
        return (
            f"RelGraph(nodes={self.num_nodes}, edges={self.num_edges}, edge_types={self.num_edge_types}, "
            f"node_types={self.num_node_types}, source_pairs={self.num_source_pairs}, "
            f"destination_pairs={self.num_destination_pairs}{padded})"
        )
