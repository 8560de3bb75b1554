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
    """A graph whose nodes are divided over the devices of a mesh axis. Each device has the edges into its own nodes.

    Make one with `from_graph`, or with `load_parts` from a folder. It is a pytree: pass it to a jitted function as an
    argument. Programs and the layers of `dejax.rgnn.nnx` and `dejax.rgnn.linen` take it in place of a `RelGraph`.

    Arrays with one row for each node have the layout [rows, *F]: the nodes of the first device, then its padding rows,
    then the nodes of the second device, and so on. They are sharded over the axis. `shard_nodes` brings an array into
    this layout and `unshard_nodes` brings it back; `shard_edges` and `unshard_edges` do so for arrays with one row for
    each edge. Counts such as `num_nodes` are of these rows.

    Each device also has room for copies of the nodes of other devices that its edges start from: its halo.

    Attributes:
        owned: for each device the graph of its own nodes, without edges; all arrays have a leading axis of devices.
        local: for each device the graph of its own nodes, its halo, and its edges.
        send: int32[devices, halo slots], the row that a device sends in each slot of the exchange.
        node_ids: int32[rows], the number of each row's node in the whole graph; -1 for padding rows.
        edge_ids: int32[edge rows], the number of each row's edge in the given order of edges; -1 for padding rows.
        node_mask: bool[rows], False for padding rows.
        edge_mask: bool[edge rows], False for padding rows.
        layout: the sizes that all devices have in common, and the rounds of the exchange (static).
        mesh: the mesh (static).
        axis: the name of the mesh axis (static).
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
        """Divides a graph over the devices of a mesh axis.

        Args:
            graph: the whole graph, without padding.
            owner: int[nodes], the device (its place along the axis) that owns each node, for example
                `partition(graph, devices).owner()`.
            mesh: the mesh. If it has other axes, devices along them hold copies.
            axis: name of the axis; may be left out if the mesh has one axis.
            loop_tables: whether the graph of each device gets the index tables that GPU kernels read
                (`RelGraph.with_loop_tables`). None: if the devices are GPUs.

        Raises:
            TypeError: `graph` is not a RelGraph, or is traced.
            ValueError: the graph has padding, `owner` has another length or values out of range, or the mesh has no
                such axis.
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
        """Number of node rows, padding included, as `num_rows`; `layout.num_nodes` has the nodes of the whole graph."""
        return self.num_rows

    @property
    def num_edges(self) -> int:
        """The same as `num_edge_rows`; `layout.num_edges` is the number of edges of the whole graph."""
        return self.num_edge_rows

    @property
    def num_edge_types(self) -> int:
        """Number of edge types of the whole graph."""
        return self.layout.num_edge_types

    @property
    def num_node_types(self) -> int:
        """Number of node types of the whole graph."""
        return self.layout.num_node_types

    @property
    def edge_type_names(self) -> tuple[str, ...] | None:
        """The names of the edge types, by number; None if they have none."""
        return self.layout.edge_type_names

    @property
    def node_type_names(self) -> tuple[str, ...] | None:
        """The names of the node types, by number; None if they have none."""
        return self.layout.node_type_names

    @property
    def node_type_counts(self) -> None:
        """Always None: the nodes of one type are not contiguous, as they may be in a RelGraph."""
        return None

    @property
    def node_type(self) -> Array:
        """int32[rows], the node type of each row; `num_node_types` for padding rows."""
        return self.owned.node_type.reshape(-1)

    @property
    def num_source_pairs(self) -> int:
        """Raises an error: values of source pairs cannot be divided over devices."""
        raise CannotDistribute(SOURCE_PAIRS)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"a ShardedGraph has no {name!r}: it has the counts, types and masks of a RelGraph; the tables of the "
            "devices are in `local`"
        )

    def shard_nodes(self, x: Any) -> Array:
        """Brings an array [nodes, *F], in the whole graph's order, into the layout [rows, *F] over the devices.

        Padding rows are zeros. Each process reads only the rows of its own devices, so `x` may be a memory map.
        """
        return self._sharded(x, self.node_ids, self.layout.num_nodes, "node")

    def shard_edges(self, x: Any) -> Array:
        """Brings an array [edges, *F], in the whole graph's order, into the layout [edge rows, *F] over the devices."""
        return self._sharded(x, self.edge_ids, self.layout.num_edges, "edge")

    def unshard_nodes(self, x: Any) -> np.ndarray:
        """Brings an array [rows, *F] back into the whole graph's order: numpy [nodes, *F], on every process."""
        return self._whole(x, self.node_ids, self.layout.num_nodes)

    def unshard_edges(self, x: Any) -> np.ndarray:
        """Brings an array [edge rows, *F] back into the whole graph's order: numpy [edges, *F], on every process."""
        return self._whole(x, self.edge_ids, self.layout.num_edges)

    def _sharded(self, x: Any, ids: Array, count: int, kind: str) -> Array:
        if isinstance(x, jax.core.Tracer) or isinstance(ids, jax.core.Tracer):
            raise TypeError(
                f"shard_{kind}s must be called outside of jax.jit, because it moves data between hosts and devices, "
                "got a traced array"
            )
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
