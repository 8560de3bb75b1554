"""`ShardedGraph`: a graph whose nodes belong to the devices of a mesh axis, with the rows that cross between them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax._pytrees import pytree
from dejax.distributed.full_graph._local_graphs import (
    Sizes,
    largest,
    padded_graph,
    pair_sizes,
    table_sizes,
    tables_of,
)
from dejax.distributed.full_graph._rewrite import SOURCE_PAIRS, CannotDistribute
from dejax.distributed.full_graph._split import GraphPart, PartsLayout, WholeGraph, padded, split
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.spec import Edges, GraphSpec

_STATIC: dict[str, Any] = {"static": True}


@pytree
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ShardedGraph:
    """A graph over the devices of a mesh axis: each owns some nodes and has the edges into them.

    A pytree: pass it to a jitted function as an argument. Make one with `from_graph` or `load`, not with the
    constructor. Arrays with one row for each node are [rows, *F]: the nodes of the first device, its padding rows, then
    those of the second device and so on, sharded over the axis. `shard_nodes` brings an array to this form, and
    `unshard_nodes` brings it back. Arrays with one row for each edge have an order of this kind, too.

    Programs take it where they take a `RelGraph`, and so do the layers of `dejax.rgnn.nnx` and `dejax.rgnn.linen`. It
    has a RelGraph's counts, types and masks, of these rows.

    Attributes:
        owned: for each device the graph of its own nodes, without edges; every table has a leading axis of parts.
        local: for each device the graph of its own nodes, the halo slots behind them, and the edges.
        send: int32[parts, halo slots], the own row that a device sends in each slot.
        node_ids: int32[rows], the number of each row's node in the whole graph; -1 for padding rows.
        edge_ids: int32[edge rows], likewise for edges, in the order in which the whole graph was given.
        node_mask: bool[rows], False for padding rows.
        edge_mask: bool[edge rows], False for padding rows.
        layout: the sizes that all parts have in common, and the rounds of the exchange (static).
        mesh: the mesh (static).
        axis: the name of its axis (static).
    """

    owned: RelGraph
    local: RelGraph
    send: Array
    node_ids: Array
    edge_ids: Array
    node_mask: Array
    edge_mask: Array
    layout: PartsLayout = field(metadata=_STATIC)
    mesh: Mesh = field(metadata=_STATIC)
    axis: str = field(metadata=_STATIC)

    @classmethod
    def from_graph(
        cls, graph: RelGraph, owner: Any, mesh: Mesh, axis: str | None = None, *, loop_tables: bool | None = None
    ) -> ShardedGraph:
        """Splits a graph over the devices of a mesh axis.

        Args:
            graph: the whole graph, without padding.
            owner: int[nodes], the part that owns each node, below the size of the axis; from
                `dejax.distributed.partition`, for example.
            mesh: the mesh. The other axes of the mesh hold copies.
            axis: the name of the axis; may be left out where the mesh has one axis.
            loop_tables: whether each device's graph gets the tables that GPU kernels read
                (`RelGraph.with_loop_tables`); None: where the mesh's devices are GPUs.

        Raises:
            TypeError: `graph` is not a RelGraph, or is traced.
            ValueError: a graph with padding, an owner out of range or of another length, an axis that the mesh lacks.
        """
        axis = axis_of(mesh, axis)
        whole = whole_graph(graph)
        layout, parts = split(whole, checked_owner(owner, graph.num_nodes, mesh.shape[axis]), mesh.shape[axis])
        tables = dict(enumerate(part_tables(layout, part) for part in parts))
        sizes = common_sizes(layout, [*tables.values()])
        return assemble(layout, dict(enumerate(parts)), tables, sizes, mesh, axis, loop_tables)

    @property
    def parts(self) -> int:
        """Number of devices that the nodes are spread over."""
        return self.layout.parts

    @property
    def num_rows(self) -> int:
        """Rows of an array with one row for each node, padding included."""
        return self.layout.parts * self.layout.rows

    @property
    def num_edge_rows(self) -> int:
        """Rows of an array with one row for each edge, padding included."""
        return self.layout.parts * self.layout.edges

    @property
    def num_nodes(self) -> int:
        """`num_rows`, as a RelGraph counts padding rows; `layout.num_nodes` has the nodes of the whole graph."""
        return self.num_rows

    @property
    def num_edges(self) -> int:
        """`num_edge_rows`; `layout.num_edges` has the edges of the whole graph."""
        return self.num_edge_rows

    @property
    def num_edge_types(self) -> int:
        return self.layout.num_edge_types

    @property
    def num_node_types(self) -> int:
        return self.layout.num_node_types

    @property
    def edge_type_names(self) -> tuple[str, ...] | None:
        return self.layout.edge_type_names

    @property
    def node_type_names(self) -> tuple[str, ...] | None:
        return self.layout.node_type_names

    @property
    def node_type_counts(self) -> None:
        """None: nodes of a type do not lie side by side, as they may in a RelGraph."""
        return None

    @property
    def node_type(self) -> Array:
        """int32[rows], the type of each row's node; `num_node_types` for padding rows."""
        return self.owned.node_type.reshape(-1)

    @property
    def num_source_pairs(self) -> int:
        raise CannotDistribute(SOURCE_PAIRS)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a ShardedGraph has no {name!r}: it has the counts, types and masks of a RelGraph; the tables of the "
            "devices are in `local`"
        )

    def shard_nodes(self, x: Any) -> Array:
        """An array [nodes, *F] in the order of the whole graph as [rows, *F] over the devices; zeros in padding rows.

        Each process reads only the rows of its own devices, so `x` may be a memory map.
        """
        return self._sharded(x, self.node_ids, self.layout.num_nodes, "node")

    def shard_edges(self, x: Any) -> Array:
        """As `shard_nodes`, for an array [edges, *F] in the order of the whole graph's edges."""
        return self._sharded(x, self.edge_ids, self.layout.num_edges, "edge")

    def unshard_nodes(self, x: Any) -> np.ndarray:
        """An array [rows, *F] back in the order of the whole graph: [nodes, *F], on every process."""
        return self._whole(x, self.node_ids, self.layout.num_nodes)

    def unshard_edges(self, x: Any) -> np.ndarray:
        """As `unshard_nodes`, for edges."""
        return self._whole(x, self.edge_ids, self.layout.num_edges)

    def _sharded(self, x: Any, ids: Array, count: int, kind: str) -> Array:
        if isinstance(x, jax.core.Tracer) or isinstance(ids, jax.core.Tracer):
            raise TypeError(f"shard_{kind}s moves data between hosts and devices; call it outside of jit")
        if getattr(x, "shape", ())[:1] != (count,):
            raise ValueError(
                f"x must have one row for each {kind} of the whole graph ({count}), got shape {np.shape(x)}"
            )
        dtype = jax.dtypes.canonicalize_dtype(x.dtype)
        shards = []
        for shard in ids.addressable_shards:
            here = np.asarray(shard.data)
            rows = np.asarray(x[np.maximum(here, 0)]) if count else np.zeros((here.shape[0], *x.shape[1:]))
            rows = rows.astype(dtype, copy=False)
            rows = np.where((here >= 0).reshape(-1, *(1,) * (rows.ndim - 1)), rows, np.zeros((), dtype))
            shards.append(jax.device_put(rows, shard.device))
        shape = (ids.shape[0], *x.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self.row_sharding(), shards)

    def _whole(self, x: Any, ids: Array, count: int) -> np.ndarray:
        if x.shape[:1] != ids.shape:
            raise ValueError(f"x must have {ids.shape[0]} rows, as this graph's arrays have, got shape {x.shape}")
        rows, there = _everywhere(x), _everywhere(ids)
        found = np.zeros((count, *x.shape[1:]), rows.dtype)
        found[there[there >= 0]] = rows[there >= 0]
        return found

    def row_sharding(self) -> NamedSharding:
        """The sharding of arrays with one row for each node or edge."""
        return NamedSharding(self.mesh, PartitionSpec(self.axis))

    def __repr__(self) -> str:
        some = self.layout
        return (
            f"ShardedGraph(nodes={some.num_nodes}, edges={some.num_edges}, parts={some.parts}, rows={some.rows} a "
            f"part, halo_rows={some.halo_rows}, rounds={len(some.rounds)})"
        )


def axis_of(mesh: Mesh, axis: str | None) -> str:
    """The checked name of a mesh axis."""
    if axis is None and len(mesh.axis_names) == 1:
        return str(mesh.axis_names[0])
    if axis is None or axis not in mesh.axis_names:
        raise ValueError(f"axis must be one of the mesh's axes {mesh.axis_names}, got {axis!r}")
    return axis


def checked_owner(owner: Any, num_nodes: int, parts: int) -> np.ndarray:
    """`owner` as int64[nodes]."""
    owner = np.asarray(owner)
    if owner.shape != (num_nodes,):
        raise ValueError(
            f"owner must have one entry for each of the graph's {num_nodes} nodes, got shape {owner.shape}; of a graph "
            "with node types give the entries type after type (Partition.owner())"
        )
    if not np.issubdtype(owner.dtype, np.integer):
        raise TypeError(f"owner must hold integers, got dtype {owner.dtype}")
    if owner.size and not (0 <= owner.min() and owner.max() < parts):
        raise ValueError(
            f"owner must be from 0 to {parts - 1}, one part for each device of the axis, got {owner.min()} to "
            f"{owner.max()}"
        )
    return owner.astype(np.int64)


def whole_graph(graph: RelGraph) -> WholeGraph:
    """The arrays of a graph that is to be split, checked."""
    if not isinstance(graph, RelGraph):
        raise TypeError(f"graph must be a RelGraph, got {type(graph).__name__}")
    if graph.is_traced:
        raise TypeError("graph must be concrete, got a traced RelGraph; split it outside of jit")
    if not all(np.all(mask) for mask in (graph.edge_mask, graph.node_mask) if mask is not None):
        raise ValueError("graph must have no padding, got one with a mask; make it with RelGraph.from_edges")
    senders, receivers, edge_type = (np.asarray(column) for column in graph.to_edges())
    return WholeGraph(
        senders,
        receivers,
        edge_type,
        np.asarray(graph.node_type),
        graph.num_edge_types,
        graph.num_node_types,
        graph.edge_type_names,
        graph.node_type_names,
    )


def _spec(layout: PartsLayout, num_nodes: int) -> GraphSpec:
    return GraphSpec(
        num_nodes,
        layout.num_edge_types,
        layout.num_node_types,
        edge_type_names=layout.edge_type_names,
        node_type_names=layout.node_type_names,
    )


PartTables = tuple[dict[str, Any], dict[str, Any]]
"""The tables of the two graphs of a part: of its own nodes, and with halo slots and edges."""


def part_tables(layout: PartsLayout, part: GraphPart) -> PartTables:
    """The tables of a part, without padding."""
    none, types = np.zeros(0, np.int32), layout.num_node_types
    own_type = padded(part.node_type, layout.rows, types)
    owned = tables_of(Edges(none, none, none, np.zeros(0, bool)), own_type, _spec(layout, layout.rows))
    edges = Edges(
        padded(part.senders, layout.edges, 0),
        padded(part.receivers, layout.edges, 0),
        padded(part.edge_type, layout.edges, 0),
        np.arange(layout.edges) < part.senders.shape[0],
    )
    local = tables_of(edges, np.concatenate([own_type, part.halo_type]), _spec(layout, layout.rows + layout.halo))
    return owned, local


def common_sizes(layout: PartsLayout, tables: Sequence[PartTables]) -> tuple[Sizes, Sizes]:
    """The sizes of tables that hold those of all parts: without and with edges."""
    found = []
    for which, num_nodes in enumerate((layout.rows, layout.rows + layout.halo)):
        spec = _spec(layout, num_nodes)
        pairs = largest([pair_sizes(some[which]) for some in tables])
        found.append(largest([table_sizes(some[which], pairs, spec) for some in tables]))
    return found[0], found[1]


def assemble(
    layout: PartsLayout,
    parts: dict[int, GraphPart],
    tables: dict[int, PartTables],
    sizes: tuple[Sizes, Sizes],
    mesh: Mesh,
    axis: str,
    loop_tables: bool | None,
) -> ShardedGraph:
    """The graph of the parts of this process' devices, by number; other processes have the others."""
    if loop_tables is None:
        loop_tables = mesh.devices.flat[0].platform == "gpu"
    made = {number: _fields(layout, part, tables[number], sizes, loop_tables) for number, part in parts.items()}
    sharding = NamedSharding(mesh, PartitionSpec(axis))

    shared: dict[tuple[int, ...], Array] = {}  # an array in two tables, such as senders, is moved once

    def joined(*leaves: np.ndarray) -> Array:
        key = tuple(map(id, leaves))
        if key not in shared:
            shared[key] = moved(*leaves)
        return shared[key]

    def moved(*leaves: np.ndarray) -> Array:
        by_number = dict(zip(made, leaves, strict=True))
        like = leaves[0]

        def rows(index: Any) -> np.ndarray:
            numbers = range(*index[0].indices(layout.parts))
            return np.stack([by_number[number] for number in numbers])

        return jax.make_array_from_callback((layout.parts, *like.shape), sharding, rows)

    fields: dict[str, Any] = jax.tree.map(joined, *made.values())
    node_ids, edge_ids = (_flat(fields.pop(name), sharding) for name in ("node_ids", "edge_ids"))
    return ShardedGraph(
        **fields,
        node_ids=node_ids,
        edge_ids=edge_ids,
        node_mask=node_ids >= 0,
        edge_mask=edge_ids >= 0,
        layout=layout,
        mesh=mesh,
        axis=axis,
    )


def _flat(array: Array, sharding: NamedSharding) -> Array:
    """[parts, rows] as [parts * rows], on the same devices."""
    return jax.jit(lambda a: a.reshape(-1), out_shardings=sharding)(array)


def _fields(
    layout: PartsLayout, part: GraphPart, tables: PartTables, sizes: tuple[Sizes, Sizes], loop_tables: bool
) -> dict[str, Any]:
    sources = None if layout.typed_sources is None else np.array(layout.typed_sources, np.int32)
    specs = _spec(layout, layout.rows), _spec(layout, layout.rows + layout.halo)
    owned, local = (
        padded_graph(some, of, spec, sources, destinations=layout.rows, loop_tables=loop_tables)
        for some, of, spec in zip(tables, sizes, specs, strict=True)
    )
    owned = dataclasses.replace(owned, edge_mask=None)
    if layout.parts == 1:  # nothing is padding: the graph of one device
        local = RelGraph._made(tables[1], specs[1])
        if loop_tables:
            local = local.with_loop_tables(specs[1].long_segment_chunk)
        local = jax.tree.map(np.asarray, local)
    return {
        "owned": owned,
        "local": local,
        "send": part.send,
        "node_ids": padded(part.node_ids, layout.rows, -1),
        "edge_ids": padded(part.edge_ids, layout.edges, -1),
    }


def _everywhere(array: Any) -> np.ndarray:
    """The values of an array over all processes."""
    if not isinstance(array, jax.Array) or array.is_fully_addressable:
        return np.asarray(array)
    from jax.experimental import multihost_utils

    return np.asarray(multihost_utils.process_allgather(array, tiled=True))


def local_part(graph: ShardedGraph) -> tuple[RelGraph, RelGraph, Array]:
    """Inside `shard_map`: the device's own graphs and its rows to send."""
    owned, local, send = jax.tree.map(lambda leaf: jnp.squeeze(leaf, 0), (graph.owned, graph.local, graph.send))
    return owned, local, send
