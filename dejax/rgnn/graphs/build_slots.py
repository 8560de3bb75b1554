"""The builder of `RelGraph` for sampled edges: slots of a fixed stride by edge type and receiver, inside `jax.jit`.

`build_traced` takes edges in any order and sorts them four times. Here the order by receiver and the order by type are
known beforehand: only the numbers of valid slots are summed. One sort is left, by type and sender, from which the order
by sender follows.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments, bounded_segments, make_segments
from dejax.rgnn.graphs.sorting_traced import begins_run, count_before, inverse, put_where, sort_pairs, stable_sort
from dejax.rgnn.graphs.spec import GraphSpec
from dejax.rgnn.graphs.tables import (
    LONG_SEGMENT_CHUNK,
    TILE_BLOCKS,
    chunk_of,
    long_segment_table,
    split_table,
    tile_table,
)


@dataclass(frozen=True, slots=True)
class Slots:
    """The slots of an edge type for receivers with consecutive numbers.

    Attributes:
        edge_type: the type of the edges.
        first: the first receiver.
        count: number of receivers.
        fan_out: slots per receiver.
    """

    edge_type: int
    first: int
    count: int
    fan_out: int


@dataclass(frozen=True, slots=True)
class SlotSpec:
    """The static part of a graph of slots.

    Attributes:
        slots: in the order of the user's edges: by type, then by receiver. Two of them have the same receivers or none
            in common.
        node_runs: type and number of nodes with consecutive numbers, from node 0 on.
        source_types: for each edge type the node type of its senders.
        edge_type_names: a name for each edge type.
        node_type_names: a name for each node type.
        long_segment_chunk: segments with more entries than this are split in chunks of this many.
    """

    slots: tuple[Slots, ...]
    node_runs: tuple[tuple[int, int], ...]
    source_types: tuple[int, ...]
    edge_type_names: tuple[str, ...]
    node_type_names: tuple[str, ...]
    long_segment_chunk: int = LONG_SEGMENT_CHUNK

    @property
    def num_nodes(self) -> int:
        return sum(count for _, count in self.node_runs)

    @property
    def num_edges(self) -> int:
        return sum(some.count * some.fan_out for some in self.slots)

    @property
    def num_groups(self) -> int:
        """Receivers and types with slots: the most destination pairs."""
        return sum(some.count for some in self.slots)

    @property
    def num_source_pairs(self) -> int:
        """The most source pairs: each edge has one, and each type has as many as there are senders."""
        by_type = [0] * len(self.node_type_names)
        for node_type, count in self.node_runs:
            by_type[node_type] += count
        used = {some.edge_type for some in self.slots}
        return min(self.num_edges, sum(by_type[self.source_types[edge_type]] for edge_type in used))

    def by_receivers(self) -> list[list[int]]:
        """The places of `slots` that have the same receivers, by type; ascending by receiver."""
        places = sorted(range(len(self.slots)), key=lambda n: (self.slots[n].first, self.slots[n].edge_type))
        return [list(some) for _, some in itertools.groupby(places, key=lambda n: self.slots[n].first)]


def graph_of_slots(senders: Sequence[Array], node_mask: Array, spec: SlotSpec) -> RelGraph:
    """A graph of edges that lie in slots, inside `jax.jit`.

    It has the tables of `RelGraph.build_traced`. Within a type and receiver, edges are in the order of their slots, not
    of their senders. Nodes that are padding count as nodes of their type in the grouping by node type.

    Args:
        senders: for each of `spec.slots`, each of which has a receiver and a slot at least, int32[receivers, fan_out];
            -1 for an empty slot. There is at least one.
        node_mask: bool[nodes], False for padding nodes.
        spec: the static part.
    """
    edges = _receiver_side(senders, spec)
    tables: dict[str, Any] = {**edges.tables, **_source_side(edges, spec)}
    typed = {**edges.typed, "source_pair_by_type": tables.pop("source_pair_by_type")}
    tables |= bounded_segments(
        {"by_source_pair": tables.pop("by_source_pair"), **typed},
        long_segment_chunk=spec.long_segment_chunk,
        typed=tuple(typed),
    )
    tables |= bounded_segments({"by_sender": tables.pop("by_sender")}, long_segment_chunk=spec.long_segment_chunk)
    names = spec.node_type_names
    by_type = np.array(spec.source_types, np.int32)
    order = np.argsort(by_type, kind="stable").astype(np.int32)
    bounds = np.searchsorted(by_type[order], np.arange(len(names) + 1)).astype(np.int32)
    by_source = make_segments(by_type, order, bounds, long_segment_chunk=spec.long_segment_chunk)
    node_type, by_node_type = _by_node_type(spec)
    graph_spec = GraphSpec(
        spec.num_nodes,
        len(spec.edge_type_names),
        len(names),
        edge_type_names=spec.edge_type_names,
        node_type_names=names,
        long_segment_chunk=spec.long_segment_chunk,
    )
    fields = {
        **edges.columns,
        **tables,
        "node_type": node_type,
        "by_node_type": by_node_type,
        "edge_type_by_source": by_source,
        "node_mask": node_mask,
        "edge_mask": edges.columns["edge_type"] < len(spec.edge_type_names),
    }
    return RelGraph._made(jax.tree.map(jnp.asarray, fields), graph_spec)


_Grouping = tuple[Array, Array | None, Array]
"""Index, order and offsets of a `Segments`."""


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """Canonical edges, and their groupings by receiver.

    Attributes:
        columns: senders, receivers, edge types, edge ids and positions, as in `RelGraph`.
        type_offsets: int32[edge types + 1].
        tables: the groupings without long segments.
        typed: index, order and offsets of the groupings by type.
    """

    columns: dict[str, Array]
    type_offsets: Array
    tables: dict[str, Segments]
    typed: dict[str, _Grouping]


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Slots by group: a receiver and a type. One order is by (type, receiver), the other by (receiver, type).

    Attributes:
        ranges: the places of `SlotSpec.slots` with the same receivers.
        start: int32[groups + 1], the valid edges before each group, by (type, receiver).
        start_by_receiver: the same by (receiver, type).
        pair: int32[groups + 1], the groups with edges before each group, by (type, receiver).
        pair_by_receiver: the same by (receiver, type).
        used: bool[2, groups], which groups have edges, in both orders.
        positions: int32[edges], the canonical position of each slot; empty slots come last.
        receiver_order: int32[edges], canonical positions by (receiver, type).
    """

    ranges: list[list[int]]
    start: Array
    start_by_receiver: Array
    pair: Array
    pair_by_receiver: Array
    used: Array
    positions: Array
    receiver_order: Array

    def by_receiver(self, parts: Sequence[Array]) -> Array:
        """Values of the groups of each of `SlotSpec.slots`, in order of (receiver, type)."""
        return _by_receiver(parts, self.ranges)


def _by_receiver(parts: Sequence[Array], ranges: Sequence[Sequence[int]]) -> Array:
    return _joined([jnp.stack([parts[n] for n in together], axis=1).reshape(-1) for together in ranges])


def _groups(senders: Sequence[Array], spec: SlotSpec) -> _Groups:
    """Where each slot's edge is in both orders: where its group begins, and the valid slots before it in the group."""
    masks = [(some >= 0) & (some < spec.num_nodes) for some in senders]
    within = _valid_up_to(masks)
    counts = [some[:, -1] for some in within]
    ranges = spec.by_receivers()
    counted = jnp.stack([_joined(counts), _by_receiver(counts, ranges)])
    used = counted > 0
    before = count_before(jnp.concatenate([counted, used.astype(jnp.int32)]))
    start, start_by_receiver, pair, pair_by_receiver = before
    starts = _split(start[:-1], [some.count for some in spec.slots])
    starts_by_receiver = _unstacked(start_by_receiver[:-1], ranges, spec)
    places, receiver_places, slot = [], [], 0
    for n, mask in enumerate(masks):
        number = slot + jax.lax.iota(jnp.int32, mask.size).reshape(mask.shape)
        slot += mask.size
        empty = start[-1] + number - starts[n][:, None] - within[n]
        places.append(jnp.where(mask, starts[n][:, None] + within[n] - 1, empty).reshape(-1))
        here = jnp.where(mask, starts_by_receiver[n][:, None] + within[n] - 1, empty)
        receiver_places.append(here.reshape(-1))
    positions = _joined(places)
    order = jnp.zeros(slot, jnp.int32).at[_joined(receiver_places)].set(positions, unique_indices=True)
    return _Groups(ranges, start, start_by_receiver, pair, pair_by_receiver, used, positions, order)


# Sums of so many slots are additions in one kernel; longer ones are cumulative sums of XLA, which are several kernels.
_SHORT = 32


def _valid_up_to(masks: Sequence[Array]) -> list[Array]:
    """The valid slots of a group up to each one, itself included; those of one fan-out are counted together."""
    found: dict[int, Array] = {}
    for fan_out in {mask.shape[1] for mask in masks}:
        numbers = [n for n, mask in enumerate(masks) if mask.shape[1] == fan_out]
        sums = _joined([masks[n] for n in numbers]).astype(jnp.int32)
        if fan_out <= _SHORT:
            step = 1
            while step < fan_out:
                sums = sums + jnp.pad(sums, ((0, 0), (step, 0)))[:, :fan_out]
                step *= 2
        else:
            sums = jnp.cumsum(sums, axis=1, dtype=jnp.int32)
        parts = _split(sums, [masks[n].shape[0] for n in numbers])
        found |= dict(zip(numbers, parts, strict=True))
    return [found[n] for n in range(len(masks))]


def _receiver_side(senders: Sequence[Array], spec: SlotSpec) -> _Edges:
    """Canonical order and the groupings by receiver, by arithmetic."""
    num_edges, num_groups, num_types = spec.num_edges, spec.num_groups, len(spec.edge_type_names)
    groups = _groups(senders, spec)
    start, pair, ranges = groups.start, groups.pair, groups.ranges
    ids = inverse(groups.positions)
    valid = start[-1]
    there = jnp.arange(num_edges, dtype=jnp.int32) < valid

    def canonical(parts: Sequence[Array], padding: int) -> Array:
        return jnp.where(there, _joined([part.reshape(-1) for part in parts])[ids], padding)

    def of_slots(parts: Sequence[Array]) -> list[Array]:
        """A value of each receiver on all of its slots."""
        shapes = [(some.count, some.fan_out) for some in spec.slots]
        return [jnp.broadcast_to(part[:, None], shape) for part, shape in zip(parts, shapes, strict=True)]

    receivers = [jnp.arange(some.first, some.first + some.count, dtype=jnp.int32) for some in spec.slots]
    types = [jnp.full(some.count, some.edge_type, jnp.int32) for some in spec.slots]
    pairs = _split(pair[:-1], [some.count for some in spec.slots])
    columns = {
        "senders": canonical(senders, spec.num_nodes),
        "receivers": canonical(of_slots(receivers), spec.num_nodes),
        "edge_type": canonical(of_slots(types), num_types),
        "edge_ids": ids,
        "edge_positions": groups.positions,
    }

    def of_pairs(padding: Array, values: Array) -> Array:
        """A value of each group with edges, by destination pair."""
        return put_where(padding, groups.used[0], pair[:-1], values)

    pair_index = canonical(of_slots(pairs), num_groups)
    pair_offsets = of_pairs(jnp.full(num_groups + 1, valid, jnp.int32), start[:-1])
    pair_node = of_pairs(jnp.full(num_groups, spec.num_nodes, jnp.int32), _joined(receivers))
    pair_type = of_pairs(jnp.full(num_groups, num_types, jnp.int32), _joined(types))
    number, place = jnp.arange(num_groups, dtype=jnp.int32), groups.pair_by_receiver[:-1]
    pair_order = put_where(number, groups.used[1], place, groups.by_receiver(pairs))
    by_receiver = (columns["receivers"], groups.receiver_order, _node_offsets(groups.start_by_receiver, ranges, spec))
    by_node = (pair_node, pair_order, _node_offsets(groups.pair_by_receiver, ranges, spec))
    most_edges = max(sum(spec.slots[n].fan_out for n in together) for together in ranges)
    tables = {
        "by_receiver": _segments(*by_receiver, most_edges, spec),
        "by_destination_pair": _segments(
            pair_index, None, pair_offsets, max(some.fan_out for some in spec.slots), spec
        ),
        "destination_pair_by_node": _segments(*by_node, max(map(len, ranges)), spec),
    }
    first_groups = _first_groups(spec)
    type_offsets = start[first_groups]
    typed: dict[str, _Grouping] = {
        "by_edge_type": (columns["edge_type"], None, type_offsets),
        "destination_pair_by_type": (pair_type, None, pair[first_groups]),
    }
    return _Edges(columns, type_offsets, tables, typed)


def _source_side(edges: _Edges, spec: SlotSpec) -> dict[str, Any]:
    """The groupings by sender: index, order and offsets, or a `Segments` where no segment is long."""
    num_edges, num_nodes, num_types = spec.num_edges, spec.num_nodes, len(spec.edge_type_names)
    num_pairs = spec.num_source_pairs
    columns = edges.columns["edge_type"], edges.columns["senders"]
    (types, nodes), order = stable_sort(columns, (num_types + 1, num_nodes + 1))
    position = jnp.arange(num_edges, dtype=jnp.int32)
    valid = edges.type_offsets[-1]
    first = begins_run(types, nodes) & (position < valid)
    before = count_before(first)
    pair = jnp.where(position < valid, before[1:] - 1, num_pairs)
    index = jnp.zeros(num_edges, jnp.int32).at[order].set(pair, unique_indices=True)
    offsets = put_where(jnp.full(num_pairs + 1, valid, jnp.int32), first, pair, position)
    # An unused pair begins at a padding edge, which has the right node and type, or past the end.
    pair_node = nodes.at[offsets[:-1]].get(mode="fill", fill_value=num_nodes)
    pair_type = types.at[offsets[:-1]].get(mode="fill", fill_value=num_types)
    rank, node_offsets = _ranks_by_node(pair_node, pair_type, before[-1], spec)
    pair_order = inverse(rank)
    # The edges of a pair stay together in the order by sender: only where each pair begins there is new.
    begins = count_before((offsets[1:] - offsets[:-1])[pair_order])
    own = jnp.minimum(pair, num_pairs - 1)
    place = jnp.where(position < valid, begins[rank[own]] + position - offsets[own], position)
    sender_order = jnp.zeros(num_edges, jnp.int32).at[place].set(order, unique_indices=True)
    return {
        "by_source_pair": (index, order, offsets),
        "source_pair_by_type": (pair_type, None, before[edges.type_offsets]),
        "source_pair_by_node": _segments(pair_node, pair_order, node_offsets, num_types, spec),
        "by_sender": (edges.columns["senders"], sender_order, begins[node_offsets]),
    }


def _ranks_by_node(pair_node: Array, pair_type: Array, used: Array, spec: SlotSpec) -> tuple[Array, Array]:
    """The place of each pair in order of (node, type), and where the pairs of each node begin there."""
    num_nodes, num_pairs = spec.num_nodes, pair_node.shape[0]
    position = jnp.arange(num_pairs, dtype=jnp.int32)
    if len(spec.edge_type_names) > 32:
        nodes, order = sort_pairs(pair_node, num_nodes + 1, position)
        counts = jnp.zeros(num_nodes, jnp.int32).at[nodes.astype(jnp.int32)].add(1, mode="drop")
        return inverse(order), count_before(counts)
    # Bit t of a node says that it has a pair of type t; the bits below are those of the pairs before it.
    bit = jnp.left_shift(jnp.uint32(1), pair_type.astype(jnp.uint32))
    bits = jnp.zeros(num_nodes, jnp.uint32).at[pair_node].add(bit, mode="drop")
    offsets = count_before(jax.lax.population_count(bits).astype(jnp.int32))
    lower = bits.at[pair_node].get(mode="fill", fill_value=0) & (bit - 1)
    rank = offsets.at[pair_node].get(mode="clip") + jax.lax.population_count(lower).astype(jnp.int32)
    return jnp.where(position < used, rank, position), offsets


def _by_node_type(spec: SlotSpec) -> tuple[Array, Segments]:
    """The node types, and nodes grouped by type: static, but made on the device."""
    counts = [0] * len(spec.node_type_names)
    runs: list[list[Array]] = [[] for _ in counts]
    first = 0
    for node_type, count in spec.node_runs:
        runs[node_type].append(jnp.arange(first, first + count, dtype=jnp.int32))
        counts[node_type] += count
        first += count
    index = _joined([jnp.full(count, node_type, jnp.int32) for node_type, count in spec.node_runs])
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    num_nodes = spec.num_nodes
    is_sorted = all(a <= b for (a, _), (b, _) in itertools.pairwise(run for run in spec.node_runs if run[1]))
    return index, Segments(
        index=index,
        order=None if is_sorted else _joined([run for some in runs for run in some]),
        offsets=jnp.asarray(offsets),
        long_segments=long_segment_table(offsets, chunk_of(spec.long_segment_chunk, num_nodes, True), num_nodes),
        tiles=tuple(tile_table(offsets, block, num_nodes) for block in TILE_BLOCKS),
        splits=split_table(offsets, num_nodes),
        num_rows=len(counts),
        num_entries=num_nodes,
    )


def _segments(index: Array, order: Array | None, offsets: Array, longest: int, spec: SlotSpec) -> Segments:
    """A grouping whose segments have at most `longest` entries."""
    if longest > spec.long_segment_chunk:
        return bounded_segments({"it": (index, order, offsets)}, long_segment_chunk=spec.long_segment_chunk)["it"]
    return Segments(index, order, offsets, None, (), offsets.shape[0] - 1, index.shape[0])


def _first_groups(spec: SlotSpec) -> np.ndarray:
    """int32[edge types + 1]: the first group of each type, and the number of groups."""
    counts = np.zeros(len(spec.edge_type_names), np.int32)
    for some in spec.slots:
        counts[some.edge_type] += some.count
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


def _node_offsets(before: Array, ranges: Sequence[Sequence[int]], spec: SlotSpec) -> Array:
    """int32[nodes + 1]: `before`, which counts by group in order of (receiver, type), where each node begins."""
    parts, node, group = [], 0, 0
    for together in ranges:
        some = spec.slots[together[0]]
        if some.first > node:  # nodes without slots
            parts.append(jnp.broadcast_to(before[group], (some.first - node,)))
        end = group + some.count * len(together)
        parts.append(before[group : end : len(together)])
        node, group = some.first + some.count, end
    parts.append(jnp.broadcast_to(before[-1], (spec.num_nodes + 1 - node,)))
    return jnp.concatenate(parts)


def _unstacked(values: Array, ranges: Sequence[Sequence[int]], spec: SlotSpec) -> list[Array]:
    """Values in order of (receiver, type) by place of `slots`."""
    found: dict[int, Array] = {}
    at = 0
    for together in ranges:
        count = spec.slots[together[0]].count
        some = values[at : at + count * len(together)].reshape(count, len(together))
        found |= {n: some[:, column] for column, n in enumerate(together)}
        at += count * len(together)
    return [found[n] for n in range(len(spec.slots))]


def _split(values: Array, sizes: Sequence[int]) -> list[Array]:
    """Consecutive parts of these numbers of rows."""
    ends = list(itertools.accumulate(sizes, initial=0))
    return [values[a:b] for a, b in itertools.pairwise(ends)]


def _joined(parts: Sequence[Array]) -> Array:
    if not parts:
        return jnp.zeros(0, jnp.int32)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
