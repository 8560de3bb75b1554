"""`make_blocks`: a graph for each layer of a sampled neighbourhood, with only what later layers need."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array

from dejax._dtypes import broadcasting
from dejax._jaxprs import traced_as_one
from dejax._pytrees import pytree
from dejax.minibatch.features._joined import JoinedFeatures
from dejax.minibatch.sampling._layout import SampleLayout
from dejax.minibatch.sampling.sample import SampledBlocks, split_nodes
from dejax.rgnn import RelGraph
from dejax.rgnn.graphs.building.build_slots import graphs_of_slots
from dejax.rgnn.graphs.building.slots import Slots, SlotSpec
from dejax.rgnn.graphs.building.sorting_traced import joined

__all__ = ["Block", "make_blocks"]


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Block:
    """The graph of one layer of a mini-batch, from the nodes that the layer reads to the nodes that it computes.

    The nodes that the layer computes are its destinations; all nodes that it reads are its sources. Sources are
    numbered hop by hop from the seeds, and within a hop type by type. So the destinations are the first of the sources,
    and are the sources of the next block:

        for layer, block in zip(layers, blocks):
            x = layer(block.bipartite, x)  # [sources, n] -> [destinations, n]

    A Block is a pytree.

    Attributes:
        graph: the graph of all sources, with the edge types and node types of the topology. Programs on it return a row
            for each source, but only destinations have all their edges.
        edge_slots: if the number of edges is bounded (`Capacities.edges`): int32[edges], the slot of the sample that
            each edge of the graph was drawn into. None: the edges of the graph are the slots of the sample, in order.
        hops: number of hops from the seeds to the destinations; the sources are one hop further (static).
        layout: the sizes of the sample (static).
    """

    graph: RelGraph
    edge_slots: Array | None
    hops: int = dataclasses.field(metadata={"static": True})
    layout: SampleLayout = dataclasses.field(metadata={"static": True})

    @property
    def bipartite(self) -> RelGraph:
        """The block's graph in a form with which programs return rows of destinations only: [num_destinations, *F].

        Use it rather than a slice of results on `graph`, because the compiler then computes no rows of other nodes, in
        forward and backward passes. Inputs for nodes have a row for each source in both cases.
        """
        return dataclasses.replace(self.graph, only_destinations=True)

    @property
    def num_sources(self) -> int:
        """Number of sources, padding included."""
        return self.layout.count(self.hops + 1)

    @property
    def num_destinations(self) -> int:
        """Number of destinations, padding included."""
        return self.layout.count(self.hops)

    @property
    def source_counts(self) -> dict[str, int]:
        """Number of sources of each node type, padding included."""
        return self.layout.counts(self.hops + 1)

    @property
    def destination_counts(self) -> dict[str, int]:
        """Number of destinations of each node type, padding included."""
        return self.layout.counts(self.hops)

    def join(self, x: Mapping[str, Array]) -> Array:
        """Joins values by node type into one array with a row for each source, [sources, n].

        Args:
            x: for each node type [nodes, n], in the order of the sample. Rows of nodes that are not sources are
                ignored. A type without sources may be missing.

        Raises:
            ValueError: a type is missing or has too few rows, or the types have rows of different shapes.
        """
        return join_nodes(self.layout, x, self.hops + 1)

    def split(self, x: Array) -> dict[str, Array]:
        """Splits an array with a row for each destination into a dict by node type, the reverse of `join`.

        Args:
            x: [destinations, n], or [sources, n], of which only the rows of destinations are used.
        """
        if x.shape[0] not in (self.num_destinations, self.num_sources):
            raise ValueError(
                f"Block.split: `x` must have {self.num_destinations} rows (destinations) or {self.num_sources} "
                f"(sources), got {x.shape[0]}"
            )
        return split_nodes(self.layout, x, self.hops)

    def edge_values(self, values: Sequence[Array]) -> Array:
        """Brings values of sampled edges into the edge order of the block's graph, for `g.edge(...)` in a program.

        Args:
            values: for each entry of `SampledBlocks.edges` an array [receivers, fan_out, ...].

        Returns:
            [edges, ...]; zeros for the self loops that `make_typed_blocks` has added.

        Raises:
            ValueError: `values` has another number of entries than `SampledBlocks.edges`.
        """
        if len(values) != len(self.layout.pieces):
            raise ValueError(
                f"Block.edge_values: `values` must have an entry for each of the sample's {len(self.layout.pieces)} "
                f"pieces, got {len(values)}"
            )
        flat = [jnp.asarray(some).reshape(math.prod(some.shape[:2]), *some.shape[2:]) for some in values]
        none = flat[0][:0] if flat else jnp.zeros(0, jnp.float32)  # a block may have no edges
        of_slots = jnp.concatenate([flat[n] for n in _pieces(self.layout, self.hops)] or [none])
        found = of_slots if self.edge_slots is None else of_slots[self.edge_slots]
        loops = self.graph.num_edges - found.shape[0]
        return jnp.pad(found, [(0, loops), *[(0, 0)] * (found.ndim - 1)]) if loops else found


@broadcasting
def make_blocks(sample: SampledBlocks) -> list[Block]:
    """Makes the graph of each layer from a sample. The blocks are in the order of the layers.

    Of L layers, layer k = 1, ..., L computes the nodes up to hop L - k and reads the nodes up to hop L - k + 1. Call it
    inside of `jax.jit`; XLA then drops index arrays that the layers do not use.
    """
    layout, given = sample.layout, []
    for hops in range(sample.num_layers):
        spec, runs = _slot_spec(layout, hops)
        senders = [
            joined([sample.slots[hop][first:last].reshape(-1, fan_out) for hop, first, last in some])
            for fan_out, some in runs
        ]
        given.append((senders, sample.nodes[: layout.count(hops + 1)] >= 0, spec))
    specs = tuple(spec for _, _, spec in given)
    blocks = []
    for hops, (graph, slots) in enumerate(_graphs([own[:2] for own in given], specs)):
        graph = dataclasses.replace(graph, num_destinations=layout.count(hops))
        blocks.append(Block(graph, slots, hops, layout))
    return blocks[::-1]


def _pieces(layout: SampleLayout, hops: int) -> list[int]:
    """The pieces of a block, by relation, then by hop."""
    own = [n for n, piece in enumerate(layout.pieces) if piece.hop <= hops]
    return sorted(own, key=lambda n: (layout.pieces[n].relation, layout.pieces[n].hop))


@partial(jax.jit, static_argnums=1, inline=True)
@traced_as_one
def _graphs(given: list[tuple[list[Array], Array]], specs: tuple[SlotSpec, ...]) -> list[tuple[RelGraph, Array | None]]:
    """A graph for each spec from its senders and its mask of nodes; and the slots of its edges, where it is bounded."""
    filled = [n for n, spec in enumerate(specs) if spec.num_slots]
    made = dict(zip(filled, graphs_of_slots([(*given[n], specs[n]) for n in filled]), strict=True)) if filled else {}
    found: list[tuple[RelGraph, Array | None]] = []
    for n, ((_, mask), spec) in enumerate(zip(given, specs, strict=True)):
        if n in made:
            graph, slots = made[n]
            found.append((graph, slots if spec.is_bounded else None))
        else:
            found.append((_without_edges(mask, spec), None))
    return found


def _without_edges(mask: Array, spec: SlotSpec) -> RelGraph:
    none = jnp.zeros(0, jnp.int32)
    types = [jnp.full(count, node_type, jnp.int32) for node_type, count in spec.node_runs]
    return RelGraph.build_traced(
        none,
        none,
        none,
        num_nodes=spec.num_nodes,
        num_edge_types=len(spec.edge_type_names),
        node_type=jnp.concatenate(types),
        num_node_types=len(spec.node_type_names),
        node_mask=mask,
        edge_type_names=spec.edge_type_names,
        node_type_names=spec.node_type_names,
    )


_Runs = list[tuple[int, list[tuple[int, int, int]]]]
"""For each fan-out the hops, first and last slots that have it."""


def _slot_spec(layout: SampleLayout, hops: int) -> tuple[SlotSpec, _Runs]:
    """The static part of a block's graph, and where its slots lie in the sample."""
    order = _pieces(layout, hops)
    place = {n: at for at, n in enumerate(order)}
    slots = [
        Slots(piece.relation, layout.first_of_all(piece.hop, piece.target), layout.receivers(piece), piece.fan_out)
        for piece in (layout.pieces[n] for n in order)
    ]
    stored: dict[int, list[int]] = {}
    runs: dict[int, list[tuple[int, int, int]]] = {}
    at, hop = 0, -1
    for n, piece in enumerate(layout.pieces):
        if piece.hop > hops:
            continue
        at = at if piece.hop == hop else 0
        hop, size = piece.hop, layout.receivers(piece) * piece.fan_out
        own = runs.setdefault(piece.fan_out, [])
        if own and own[-1][0] == hop and own[-1][2] == at:
            own[-1] = (hop, own[-1][1], at + size)
        else:
            own.append((hop, at, at + size))
        stored.setdefault(piece.fan_out, []).append(place[n])
        at += size
    spec = SlotSpec(
        slots=tuple(slots),
        node_runs=tuple((t, count) for sizes in layout.sizes[: hops + 2] for t, count in enumerate(sizes)),
        source_types=tuple(layout.node_types.index(source) for source, _, _ in layout.edge_types),
        edge_type_names=tuple("/".join(edge_type) for edge_type in layout.edge_types),
        node_type_names=layout.node_types,
        stored=tuple(tuple(some) for some in stored.values()),
        most_edges=None if layout.edges is None else layout.edges[hops],
        typical_source_pairs=None if layout.source_pairs is None else layout.source_pairs[hops],
        num_destinations=layout.count(hops),
    )
    return spec, list(runs.items())


_CONCATENATED = 1 << 24
"""Up to this number of bytes, one operation joins the rows, forward and backward, instead of one per type and hop."""


def join_nodes(layout: SampleLayout, x: Mapping[str, Array], hops: int) -> Array:
    """Values by node type as values of all nodes up to a hop."""
    unknown = set(x) - set(layout.node_types)
    if unknown:
        raise ValueError(f"node type must be one of {list(layout.node_types)}, got {sorted(unknown)[0]!r}")
    if isinstance(x, JoinedFeatures) and x.layout == layout:
        return x.rows[: layout.count(hops)]
    row = _row(layout, x, hops)
    parts: list[tuple[int, Array]] = []
    for hop in range(hops + 1):
        for number, name in enumerate(layout.node_types):
            if size := layout.sizes[hop][number]:
                first = layout.first(hop, number)
                parts.append((layout.first_of_all(hop, number), x[name][first : first + size]))
    if not parts:
        return jnp.zeros((0, *row))
    dtype = jnp.result_type(*(part for _, part in parts))
    if sum(part.size for _, part in parts) * dtype.itemsize <= _CONCATENATED:
        return joined([part.astype(dtype) for _, part in parts])
    whole = jnp.zeros((layout.count(hops), *row), dtype)
    for first, part in parts:
        # XLA copies a slice in place at the rate of the memory. A concatenation of two dozen parts takes twice as long:
        # 5.1 ms instead of 2.6 ms for a million rows of 1,024 bfloat16.
        whole = jax.lax.dynamic_update_slice_in_dim(whole, part.astype(dtype), first, 0)
    return whole


def _row(layout: SampleLayout, x: Mapping[str, Array], hops: int) -> tuple[int, ...]:
    """The shape of a row of the types with nodes up to a hop, after a check of each type's values."""
    row, of = next(((tuple(rows.shape[1:]), name) for name, rows in x.items()), ((), ""))
    first = True
    for name, count in layout.counts(hops).items():
        if not count:
            continue
        if name not in x:
            raise ValueError(
                f"`x` must have an entry for node type {name!r}, which has {count} nodes in this sample, got "
                f"{sorted(x)}"
            )
        shape = tuple(x[name].shape)
        if not shape or shape[0] < count:
            raise ValueError(f"`x[{name!r}]` must have at least {count} rows, got shape {shape}")
        if not first and shape[1:] != row:
            raise ValueError(
                f"`x[{name!r}]` must have rows of shape {row}, as those of {of!r}, got {shape[1:]}; project all types "
                "to one width"
            )
        row, of, first = shape[1:], name, False
    return row
