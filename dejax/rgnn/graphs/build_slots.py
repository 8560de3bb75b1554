"""The builder of `RelGraph` for sampled edges: slots of a fixed stride by edge type and receiver, inside `jax.jit`.

`build_traced` takes edges in any order and sorts them four times. Here the order by receiver and the order by type are
known beforehand: only the numbers of valid slots are summed. One sort is left, by type and sender, from which the order
by sender follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs import sorting_traced
from dejax.rgnn.graphs.build import pairs_of
from dejax.rgnn.graphs.packed import packed_tiles
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Grouping, Segments, bounded_segments, make_segments
from dejax.rgnn.graphs.slots import Places, SlotSpec, first_groups_of, first_of_nodes_of, places_of
from dejax.rgnn.graphs.sorting_traced import (
    begins_run,
    count_before,
    cumulative_sum,
    inverse,
    put,
    put_where,
    sort_pairs,
    stable_sort,
    take,
    take_or,
)
from dejax.rgnn.graphs.spec import GraphSpec
from dejax.rgnn.graphs.static_tables import on_device


def graph_of_slots(senders: Sequence[Array], node_mask: Array, spec: SlotSpec) -> tuple[RelGraph, Array]:
    """A graph of edges that lie in slots, inside `jax.jit`; and int32[edges], the slot of each edge.

    It has the tables of `RelGraph.build_traced`. Within a type and receiver, edges are in the order of their slots, not
    of their senders. Nodes that are padding count as nodes of their type in the grouping by node type.

    The user's edges are the slots, empty ones included. Where `spec.most_edges` is less than their number, they are the
    edges in canonical order instead. Edges beyond the bound are left out, the last types first.

    Args:
        senders: for each of `spec.stored`, or else of `spec.slots`, int32[receivers, fan_out]; -1 for an empty slot.
            There is at least one of `spec.slots`, and each has a receiver and a slot at least.
        node_mask: bool[nodes], False for padding nodes.
        spec: the static part.
    """
    return graphs_of_slots([(senders, node_mask, spec)])[0]


def graphs_of_slots(many: Sequence[tuple[Sequence[Array], Array, SlotSpec]]) -> list[tuple[RelGraph, Array]]:
    """Several graphs as `graph_of_slots` makes them, with the same `long_segment_chunk`.

    Their small tables, of tiles and of long segments, are made together. These take a dozen kernels, whose time hardly
    depends on how many tables there are. The long segments by sender of the last graph are cut apart from the others:
    the first layer reads that graph, and mostly needs no gradient of its input, so that XLA drops them.
    """
    edges = [_receiver_side(senders, spec) for senders, _, spec in many]
    sources = [_source_side(own, spec) for own, (_, _, spec) in zip(edges, many, strict=True)]
    groupings: dict[tuple[int, str], Grouping] = {}
    typed: dict[tuple[int, str], Grouping] = {}
    by_sender: dict[tuple[int, str], Grouping] = {}
    for n, (own, source) in enumerate(zip(edges, sources, strict=True)):
        groupings[n, "by_source_pair"] = source.pop("by_source_pair")
        by_sender[n, "by_sender"] = source.pop("by_sender")
        own_typed = {**own.typed, "source_pair_by_type": source.pop("source_pair_by_type")}
        typed |= {(n, name): grouping for name, grouping in own_typed.items()}
    chunk = many[0][2].long_segment_chunk
    made = bounded_segments({**groupings, **typed}, long_segment_chunk=chunk, typed=tuple(typed), tiled=False)
    packed = packed_tiles({name: made[name] for name in typed}, len(many))
    last = len(many) - 1, "by_sender"
    for some in ({name: by_sender[name] for name in by_sender if name != last}, {last: by_sender[last]}):
        made |= bounded_segments(some, long_segment_chunk=chunk)
    found = []
    for n, (_, node_mask, spec) in enumerate(many):
        tables: dict[str, Any] = {**edges[n].tables, **sources[n], "packed": packed[n]}
        tables |= {name: table for (at, name), table in made.items() if at == n}
        found.append((_graph(edges[n], tables, node_mask, spec), edges[n].slots))
    return found


def _graph(edges: _SlotEdges, tables: dict[str, Any], node_mask: Array, spec: SlotSpec) -> RelGraph:
    """The graph of these groupings, with those that follow from the sizes alone."""
    names = spec.node_type_names
    by_type = np.array(spec.source_types, np.int32)
    order = np.argsort(by_type, kind="stable").astype(np.int32)
    bounds = np.searchsorted(by_type[order], np.arange(len(names) + 1)).astype(np.int32)
    of_types = make_segments({"by_source": (by_type, order, bounds)}, long_segment_chunk=spec.long_segment_chunk)
    node_type, by_node_type = _by_node_type(spec, spec.num_nodes)
    of_destinations = None if spec.num_destinations is None else _by_node_type(spec, spec.num_destinations)[1]
    graph_spec = GraphSpec(
        spec.num_nodes,
        len(spec.edge_type_names),
        len(names),
        edge_type_names=spec.edge_type_names,
        node_type_names=names,
        long_segment_chunk=spec.long_segment_chunk,
        typical_source_pairs=spec.typical_source_pairs,
    )
    fields = {
        **edges.columns,
        **tables,
        "node_type": node_type,
        "by_node_type": by_node_type,
        "destinations_by_type": of_destinations,
        "edge_type_by_source": of_types["by_source"],
        "node_mask": node_mask,
        "edge_mask": edges.columns["edge_type"] < len(spec.edge_type_names),
    }
    return RelGraph._made(jax.tree.map(jnp.asarray, fields), graph_spec)


@dataclass(frozen=True, slots=True, eq=False)
class _SlotEdges:
    """Canonical edges, and their groupings by receiver.

    Attributes:
        columns: senders, receivers, edge types, edge ids and positions, as in `RelGraph`.
        type_offsets: int32[edge types + 1].
        tables: the groupings without long segments.
        typed: index, order and offsets of the groupings by type.
        slots: int32[edges], the slot of each edge.
    """

    columns: dict[str, Array]
    type_offsets: Array
    tables: dict[str, Segments]
    typed: dict[str, Grouping]
    slots: Array


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Sums over groups, and where each slot's edge is in both orders.

    Attributes:
        start: int32[groups + 1], the valid edges before each group, in canonical order.
        start_by_receiver: the same in order of (receiver, type).
        pair: int32[groups + 1], the groups with edges before each group, in canonical order.
        pair_by_receiver: the same in order of (receiver, type).
        used: bool[2, groups], which groups have edges, in both orders.
        positions: int32[slots], the canonical position of each stored slot; empty slots come last.
        receiver_positions: int32[slots], its position in order of (receiver, type).
        slots: int32[slots], the number of each stored slot among all slots by type and receiver.
        groups: int32[slots], the canonical place of the group of each stored slot.
        senders: int32[slots], of each stored slot; the number of nodes for an empty one.
    """

    start: Array
    start_by_receiver: Array
    pair: Array
    pair_by_receiver: Array
    used: Array
    positions: Array
    receiver_positions: Array
    slots: Array
    groups: Array
    senders: Array


def _groups(senders: Sequence[Array], spec: SlotSpec, places: Places) -> _Groups:
    """The position of an edge: where its group begins, and the valid slots before it in the group."""
    stored = list(senders)
    if not spec.stored:
        stored = [_joined([senders[n] for n in some]) for some in places.by_fan_out.values()]
    masks = [(some >= 0) & (some < spec.num_nodes) for some in stored]
    within = [cumulative_sum(mask) for mask in masks]  # the valid slots of a group up to each one
    counts = _joined([some[:, -1] for some in within])
    if spec.is_bounded:
        counts, masks, within = _bounded(counts, masks, within, spec.num_edges, places)
    counted = jnp.stack([take(counts, places.stored), take(counts, places.stored_by_receiver)])
    used = counted > 0
    before = count_before(jnp.concatenate([counted, used.astype(jnp.int32)]))
    start, start_by_receiver, pair, pair_by_receiver = before
    starts, starts_by_receiver = take(start, places.canonical), take(start_by_receiver, places.of_receiver)
    columns: list[tuple[Array, ...]] = []
    at = 0
    for some, mask, up_to in zip(stored, masks, within, strict=True):
        own = slice(at, at + mask.shape[0])
        at += mask.shape[0]
        slot = jnp.asarray(places.first_slot[own, None]) + jnp.arange(mask.shape[1], dtype=jnp.int32)
        empty = start[-1] + slot - starts[own, None] - up_to
        parts = (
            jnp.where(mask, starts[own, None] + up_to - 1, empty),
            jnp.where(mask, starts_by_receiver[own, None] + up_to - 1, empty),
            slot,
            jnp.broadcast_to(places.canonical[own, None], mask.shape),
            jnp.where(mask, some, spec.num_nodes),
        )
        columns.append(tuple(part.reshape(-1) for part in parts))
    flat = (_joined(parts) for parts in zip(*columns, strict=True))
    return _Groups(start, start_by_receiver, pair, pair_by_receiver, used, *flat)


def _bounded(
    counts: Array, masks: Sequence[Array], within: Sequence[Array], most: int, places: Places
) -> tuple[Array, list[Array], list[Array]]:
    """The counts, masks and sums of slots with only the first `most` edges in canonical order."""
    start = jnp.minimum(count_before(take(counts, places.stored)), most)
    kept = take(start[1:] - start[:-1], places.canonical)
    new_masks, sums, at = [], [], 0
    for mask, up_to in zip(masks, within, strict=True):
        own = kept[at : at + mask.shape[0], None]
        at += mask.shape[0]
        new_masks.append(mask & (up_to <= own))
        sums.append(jnp.minimum(up_to, own))
    return kept, new_masks, sums


def _receiver_side(senders: Sequence[Array], spec: SlotSpec) -> _SlotEdges:
    """Canonical order and the groupings by receiver, by arithmetic."""
    num_edges, num_groups, num_types = spec.num_edges, spec.num_groups, len(spec.edge_type_names)
    places = places_of(spec).on_device()
    groups = _groups(senders, spec, places)
    start, pair = groups.start, groups.pair
    valid = start[-1]
    there = jnp.arange(num_edges, dtype=jnp.int32) < valid

    def placed(values: Array, where: Array) -> Array:
        return put(jnp.zeros(num_edges, jnp.int32), where, values, unique=True)

    group = placed(groups.groups, groups.positions)

    def of_group(values: Any, padding: int) -> Array:
        """A value of each group on all of its edges."""
        return jnp.where(there, take(values, group), padding)

    slots = ids = placed(groups.slots, groups.positions)
    if spec.is_bounded:
        ids = jnp.arange(num_edges, dtype=jnp.int32)
    columns = {
        "senders": placed(groups.senders, groups.positions),
        "receivers": of_group(places.receiver, spec.num_nodes),
        "edge_type": of_group(places.edge_type, num_types),
        "edge_ids": ids,
        "edge_positions": ids if spec.is_bounded else inverse(ids),
    }

    def of_pairs(padding: Array, values: Any) -> Array:
        """A value of each group with edges, by destination pair."""
        return put_where(padding, groups.used[0], pair[:-1], values)

    pair_offsets = of_pairs(jnp.full(num_groups + 1, valid, jnp.int32), start[:-1])
    pair_node = of_pairs(jnp.full(num_groups, spec.num_nodes, jnp.int32), places.receiver)
    pair_type = of_pairs(jnp.full(num_groups, num_types, jnp.int32), places.edge_type)
    in_order = take(pair, take(places.canonical, places.stored_by_receiver))
    number = jnp.arange(num_groups, dtype=jnp.int32)
    pair_order = put_where(number, groups.used[1], groups.pair_by_receiver[:-1], in_order)
    receiver_order = placed(groups.positions, groups.receiver_positions)
    ranges, (first_of_nodes,) = spec.by_receivers(), on_device(first_of_nodes_of(spec))
    by_receiver = (columns["receivers"], receiver_order, take(groups.start_by_receiver, first_of_nodes))
    by_node = (pair_node, pair_order, take(groups.pair_by_receiver, first_of_nodes))
    most_edges = max(sum(spec.slots[n].fan_out for n in together) for together in ranges)
    most_slots = max(some.fan_out for some in spec.slots)
    tables = {
        "by_receiver": _segments(*by_receiver, most_edges, spec),
        "by_destination_pair": _segments(of_group(pair[:-1], num_groups), None, pair_offsets, most_slots, spec),
        "destination_pair_by_node": _segments(*by_node, max(map(len, ranges)), spec),
    }
    first_groups = first_groups_of(spec)
    type_offsets = take(start, first_groups)
    typed: dict[str, Grouping] = {
        "by_edge_type": (columns["edge_type"], None, type_offsets),
        "destination_pair_by_type": (pair_type, None, take(pair, first_groups)),
    }
    return _SlotEdges(columns, type_offsets, tables, typed, slots)


def _source_side(edges: _SlotEdges, spec: SlotSpec) -> dict[str, Any]:
    """The groupings by sender: index, order and offsets, or a `Segments` where no segment is long."""
    num_edges, num_nodes, num_types = spec.num_edges, spec.num_nodes, len(spec.edge_type_names)
    num_pairs = spec.num_source_pairs
    columns = edges.columns["edge_type"], edges.columns["senders"]
    (types, nodes), order = stable_sort(columns, (num_types + 1, num_nodes + 1))
    position = jnp.arange(num_edges, dtype=jnp.int32)
    valid = edges.type_offsets[-1]
    before = count_before(begins_run(types, nodes))
    pairs = pairs_of(sorting_traced, nodes, types, order, before, valid, num_pairs, (num_nodes, num_types))
    offsets = pairs.by_pair[2]
    rank, node_offsets = _ranks_by_node(pairs.node, pairs.edge_type, take(before, valid), spec)
    pair_order = inverse(rank)
    # The edges of a pair stay together in the order by sender: only where each pair begins there is new.
    begins = count_before(take(offsets[1:] - offsets[:-1], pair_order))
    own = jnp.minimum(before[1:] - 1, num_pairs - 1)
    place = jnp.where(position < valid, take(begins, take(rank, own)) + position - take(offsets, own), position)
    sender_order = put(jnp.zeros(num_edges, jnp.int32), place, order, unique=True)
    return {
        "by_source_pair": pairs.by_pair,
        "source_pair_by_type": (pairs.edge_type, None, take(before, edges.type_offsets)),
        "source_pair_by_node": _segments(pairs.node, pair_order, node_offsets, num_types, spec),
        "by_sender": (edges.columns["senders"], sender_order, take(begins, node_offsets)),
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
    bits = jnp.zeros(num_nodes, jnp.uint32).at[pair_node].add(bit, mode="drop", wrap_negative_indices=False)
    offsets = count_before(jax.lax.population_count(bits).astype(jnp.int32))
    lower = take_or(bits, pair_node, 0) & (bit - 1)
    rank = take(offsets, pair_node) + jax.lax.population_count(lower).astype(jnp.int32)
    return jnp.where(position < used, rank, position), offsets


def _by_node_type(spec: SlotSpec, num_nodes: int) -> tuple[Any, Segments]:
    """The types of the first so many nodes, and these nodes grouped by type. They follow from the sizes alone."""
    num_types = len(spec.node_type_names)
    index = np.repeat(*(np.array(some, np.int32) for some in zip(*spec.node_runs, strict=True)))[:num_nodes]
    offsets: Any = np.concatenate([[0], np.cumsum(np.bincount(index, minlength=num_types))]).astype(np.int32)
    is_sorted = bool((index[1:] >= index[:-1]).all())
    (by_node,) = on_device(index)
    order = None if is_sorted else on_device(np.argsort(index, kind="stable").astype(np.int32))[0]
    grouping = {"by_node_type": (by_node, order, offsets)}
    return by_node, make_segments(grouping, long_segment_chunk=spec.long_segment_chunk, typed=grouping)["by_node_type"]


def _segments(index: Array, order: Array | None, offsets: Array, longest: int, spec: SlotSpec) -> Segments:
    """A grouping whose segments have at most `longest` entries."""
    if longest > spec.long_segment_chunk:
        return bounded_segments({"it": (index, order, offsets)}, long_segment_chunk=spec.long_segment_chunk)["it"]
    return Segments(index, order, offsets, None, (), offsets.shape[0] - 1, index.shape[0])


def _joined(parts: Sequence[Array]) -> Array:
    if not parts:
        return jnp.zeros(0, jnp.int32)
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)
