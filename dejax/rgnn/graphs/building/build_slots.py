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

from dejax.rgnn.graphs.building.slots import Places, SideBySide, SlotSpec, first_groups_of, first_of_nodes_of, places_of
from dejax.rgnn.graphs.building.sorting_traced import (
    begins_run,
    cumulative_sum,
    inverse,
    joined,
    put,
    put_where,
    sort_pairs,
    stable_sort,
    take,
    take_or,
)
from dejax.rgnn.graphs.building.static_tables import on_device
from dejax.rgnn.graphs.packed import packed_tiles
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Grouping, Segments, bounded_segments, make_segments
from dejax.rgnn.graphs.spec import GraphSpec


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
    """Several graphs as `graph_of_slots` makes them, with the same types and the same `long_segment_chunk`.

    The graphs are made as one, so that there is one sort and four cumulative sums, however many graphs there are. Of
    the small tables, the long segments by sender of the last graph are cut apart from the others: the first layer reads
    that graph, and mostly needs no gradient of its input, so that XLA drops them.
    """
    specs = tuple(spec for _, _, spec in many)
    edges = _receiver_side([senders for senders, _, _ in many], specs)
    sources = _source_side(edges, specs)
    groupings: dict[tuple[int, str], Grouping] = {}
    typed: dict[tuple[int, str], Grouping] = {}
    by_sender: dict[tuple[int, str], Grouping] = {}
    for n, source in enumerate(sources):
        groupings[n, "by_source_pair"] = source.pop("by_source_pair")
        by_sender[n, "by_sender"] = source.pop("by_sender")
        own_typed = {**edges.typed[n], "source_pair_by_type": source.pop("source_pair_by_type")}
        typed |= {(n, name): grouping for name, grouping in own_typed.items()}
    chunk = specs[0].long_segment_chunk
    made = bounded_segments({**groupings, **typed}, long_segment_chunk=chunk, typed=tuple(typed), tiled=False)
    packed = packed_tiles({name: made[name] for name in typed}, len(many))
    last = len(many) - 1, "by_sender"
    for some in ({name: by_sender[name] for name in by_sender if name != last}, {last: by_sender[last]}):
        made |= bounded_segments(some, long_segment_chunk=chunk)
    found = []
    for n, (_, node_mask, spec) in enumerate(many):
        tables: dict[str, Any] = {**edges.tables[n], **sources[n], "packed": packed[n]}
        tables |= {name: table for (at, name), table in made.items() if at == n}
        found.append((_graph(edges.columns[n], tables, node_mask, spec), edges.columns[n]["slot"]))
    return found


def _graph(columns: dict[str, Array], tables: dict[str, Any], node_mask: Array, spec: SlotSpec) -> RelGraph:
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
    names_of_columns = ("senders", "receivers", "edge_type", "edge_ids", "edge_positions")
    fields = {
        **{name: columns[name] for name in names_of_columns},
        **tables,
        "node_type": node_type,
        "by_node_type": by_node_type,
        "destinations_by_type": of_destinations,
        "edge_type_by_source": of_types["by_source"],
        "node_mask": node_mask,
        "edge_mask": columns["edge_type"] < len(spec.edge_type_names),
    }
    return RelGraph._made(jax.tree.map(jnp.asarray, fields), graph_spec)


@dataclass(frozen=True, slots=True, eq=False)
class _SlotEdges:
    """Canonical edges of several graphs, and their groupings by receiver.

    Attributes:
        space: the edges of all graphs side by side.
        there: bool[places], False for padding.
        senders, types: int32[places], those of each edge; for padding the numbers of nodes and of types.
        type_offsets: int32[graphs, edge types + 1].
        columns: for each graph senders, receivers, edge types, edge ids and positions, as in `RelGraph`; and the slot
            of each edge.
        tables: for each graph the groupings without long segments.
        typed: for each graph index, order and offsets of the groupings by type.
    """

    space: SideBySide
    there: Array
    senders: Array
    types: Array
    type_offsets: Array
    columns: list[dict[str, Array]]
    tables: list[dict[str, Segments]]
    typed: list[dict[str, Grouping]]


@dataclass(frozen=True, slots=True, eq=False)
class _Groups:
    """Sums over the groups of a graph before each one, and where each slot's edge is in both orders.

    Attributes:
        start, pair: int32[places], the edges, and the groups with edges, before each group in canonical order.
        start_by_receiver, pair_by_receiver: the same in order of (receiver, type).
        used: bool[2, places], which groups have edges, in both orders.
        placed: int32[2 * slots], the place of each stored slot's edge among the edges of all graphs in canonical order,
            empty slots last; then the same in order of (receiver, type), behind the places of the former.
        positions: int32[slots], the canonical position of each stored slot in its graph.
        slots: int32[slots], the number of each stored slot among all slots by type and receiver.
        groups: int32[slots], the canonical place of the group of each stored slot.
        senders: int32[slots], of each stored slot.
    """

    start: Array
    start_by_receiver: Array
    pair: Array
    pair_by_receiver: Array
    used: Array
    placed: Array
    positions: Array
    slots: Array
    groups: Array
    senders: Array


def _groups(
    senders: Sequence[Sequence[Array]], specs: Sequence[SlotSpec], places: Places, space: SideBySide
) -> _Groups:
    """The position of an edge: where its group begins, and the valid slots before it in the group."""
    stored: dict[int, list[Array]] = {fan_out: [] for fan_out in places.fan_outs}
    for own, spec in zip(senders, specs, strict=True):
        for some in own:
            stored[some.shape[1]].append(jnp.where(some < spec.num_nodes, some, -1))
    tables = [joined(some) for some in stored.values()]
    masks = [some >= 0 for some in tables]
    within = [cumulative_sum(mask) for mask in masks]  # the valid slots of a group up to each one
    counts = joined([some[:, -1] for some in within])
    bounded = any(spec.is_bounded for spec in specs)
    if bounded:
        counts, masks, within = _bounded(counts, masks, within, specs, places)
    counted = take_or(counts, _stacked(places.stored, places.stored_by_receiver), 0)
    used = counted > 0
    sums = places.space.sums_before(jnp.concatenate([counted, used.astype(jnp.int32)]))
    start, start_by_receiver, pair, pair_by_receiver = sums
    starts, starts_by_receiver = take(start, places.canonical), take(start_by_receiver, places.of_receiver)
    empties = take(start, places.end) - starts
    columns: list[tuple[Array, ...]] = []
    at = 0
    for some, mask, up_to in zip(tables, masks, within, strict=True):
        rows = (slice(at, at + mask.shape[0]), None)
        at += mask.shape[0]
        slot = jnp.asarray(places.first_slot[rows]) + jnp.arange(mask.shape[1], dtype=jnp.int32)
        empty = empties[rows] + slot - up_to
        position = jnp.where(mask, starts[rows] + up_to - 1, empty)
        by_receiver = jnp.where(mask, starts_by_receiver[rows] + up_to - 1, empty)
        placed = [position + places.first_edge[rows], by_receiver + (places.first_edge[rows] + space.total)]
        if bounded:
            fits = (position < places.num_edges[rows], by_receiver < places.num_edges[rows])
            placed = [jnp.where(fit, place, 2 * space.total) for fit, place in zip(fits, placed, strict=True)]
        group = jnp.broadcast_to(places.canonical[rows], mask.shape)
        columns.append(tuple(part.reshape(-1) for part in (*placed, position, slot, group, some)))
    first, second, *flat = zip(*columns, strict=True)
    return _Groups(start, start_by_receiver, pair, pair_by_receiver, used, joined(first + second), *map(joined, flat))


def _bounded(
    counts: Array, masks: Sequence[Array], within: Sequence[Array], specs: Sequence[SlotSpec], places: Places
) -> tuple[Array, list[Array], list[Array]]:
    """The counts, masks and sums of slots with only the first edges of each graph in canonical order."""
    start = places.space.sums_before(take_or(counts, places.stored, 0))
    start = jnp.minimum(start, places.space.each([spec.num_edges for spec in specs]))
    kept = take(start, places.canonical + 1) - take(start, places.canonical)
    new_masks, sums, at = [], [], 0
    for mask, up_to in zip(masks, within, strict=True):
        own = kept[at : at + mask.shape[0], None]
        at += mask.shape[0]
        new_masks.append(mask & (up_to <= own))
        sums.append(jnp.minimum(up_to, own))
    return kept, new_masks, sums


def _receiver_side(senders: Sequence[Sequence[Array]], specs: tuple[SlotSpec, ...]) -> _SlotEdges:
    """Canonical order and the groupings by receiver, by arithmetic."""
    places, space = places_of(specs).on_device(), SideBySide([spec.num_edges for spec in specs])
    of_groups, groups = places.space, _groups(senders, specs, places, space)
    ends = np.array(of_groups.ends, np.int32)
    there = space.within() < space.each(take(groups.start, ends))
    # One scatter writes the stored slot of each edge in canonical order, and the edges by (receiver, type). All other
    # values of edges are read through the first.
    values = jnp.concatenate([jnp.arange(groups.positions.shape[0], dtype=jnp.int32), groups.positions])
    found = put(jnp.zeros(2 * space.total, jnp.int32), groups.placed, values, unique=True)
    slot, receiver_order = found[: space.total], found[space.total :]
    group = jnp.where(there, take(groups.groups, slot), space.each(ends))
    edges = {
        "senders": jnp.where(there, take(groups.senders, slot), space.each([spec.num_nodes for spec in specs])),
        "receivers": take(places.receiver, group),
        "edge_type": take(places.edge_type, group),
        "slot": take(groups.slots, slot),
        "receiver_order": receiver_order,
        "pair": jnp.where(there, take(groups.pair, group), space.each(of_groups.sizes)),
    }
    pair_group, pair_order = _pairs_in_order(groups, places)
    pairs = {
        "offsets": take(groups.start, pair_group),
        "node": take(places.receiver, pair_group),
        "edge_type": take(places.edge_type, pair_group),
        "order": pair_order,
    }
    first_groups = [first_groups_of(spec) + begin for spec, begin in zip(specs, of_groups.begins, strict=True)]
    type_offsets, pair_types = (take(x, np.stack(first_groups)) for x in (groups.start, groups.pair))
    columns, tables, typed = [], [], []
    for n, spec in enumerate(specs):
        own, own_pairs = (
            {name: x.of(some[name], n) for name in some} for x, some in ((space, edges), (of_groups, pairs))
        )
        own["edge_ids"] = jnp.arange(spec.num_edges, dtype=jnp.int32) if spec.is_bounded else own["slot"]
        own["edge_positions"] = own["edge_ids"] if spec.is_bounded else inverse(own["edge_ids"])
        columns.append(own)
        (first_of_nodes,) = on_device(first_of_nodes_of(spec) + of_groups.begins[n])
        by_node = take(groups.start_by_receiver, first_of_nodes), take(groups.pair_by_receiver, first_of_nodes)
        by_pair = own["pair"], None, of_groups.of(pairs["offsets"], n, ends=1)
        most_edges, most_pairs = spec.most_of_a_receiver()
        tables.append(
            {
                "by_receiver": _segments(own["receivers"], own["receiver_order"], by_node[0], most_edges, spec),
                "by_destination_pair": _segments(*by_pair, max(some.fan_out for some in spec.slots), spec),
                "destination_pair_by_node": _segments(
                    own_pairs["node"], own_pairs["order"], by_node[1], most_pairs, spec
                ),
            }
        )
        typed.append(
            {
                "by_edge_type": (own["edge_type"], None, type_offsets[n]),
                "destination_pair_by_type": (own_pairs["edge_type"], None, pair_types[n]),
            }
        )
    return _SlotEdges(space, there, edges["senders"], edges["edge_type"], type_offsets, columns, tables, typed)


def _pairs_in_order(groups: _Groups, places: Places) -> tuple[Array, Array]:
    """int32[places]: the group of each destination pair, or the end of its graph; and the pairs in order of nodes."""
    space, number = places.space, jnp.arange(places.space.total, dtype=jnp.int32)
    pair = jnp.stack([groups.pair, groups.pair_by_receiver]) + space.each(space.begins)
    # The group at each place in order of (receiver, type), and so its pair.
    by_receiver = take(groups.pair, take_or(places.canonical, places.stored_by_receiver, 0))
    base = jnp.stack([jnp.broadcast_to(space.each(space.ends), number.shape), space.within()])
    place = pair + jnp.array([[0], [space.total]], jnp.int32)
    values = jnp.stack([number, by_receiver])
    found = put_where(base.reshape(-1), groups.used.reshape(-1), place.reshape(-1), values.reshape(-1))
    return found[: space.total], found[space.total :]


def _source_side(edges: _SlotEdges, specs: tuple[SlotSpec, ...]) -> list[dict[str, Any]]:
    """For each graph the groupings by sender: index, order and offsets, or a `Segments` where no segment is long."""
    count, num_types, space, there = len(specs), len(specs[0].edge_type_names), edges.space, edges.there
    pairs = SideBySide([spec.num_source_pairs for spec in specs])
    nodes = SideBySide([spec.num_nodes for spec in specs])
    position, begins, first_edges = space.within(), space.each(space.begins), np.array(space.begins, np.int32)
    keys = edges.types + (num_types + 1) * space.each(range(count)), edges.senders
    (types, senders), order = stable_sort(keys, (count * (num_types + 1), max(nodes.sizes) + 1))
    is_first = begins_run(types, senders)
    # The pair of each edge. The padding of a graph begins a pair, too, which shows how many pairs there are.
    number = cumulative_sum(is_first)
    number = number - space.each(take(number, first_edges))
    pair = jnp.where(there, number, space.each(pairs.sizes))
    bounds = take(number, edges.type_offsets + first_edges[:, None])
    # One scatter writes the pair of each canonical edge, and where each pair begins.
    base = jnp.broadcast_to(pairs.each(edges.type_offsets[:, -1]), (pairs.total,))
    place = jnp.where(is_first & there, space.total + pair + space.each(pairs.begins), space.total + pairs.total)
    found = put(
        jnp.concatenate([jnp.zeros(space.total, jnp.int32), base]),
        jnp.concatenate([order, place]),
        jnp.concatenate([pair, position]),
        unique=True,
    )
    index, offsets = found[: space.total], found[space.total :]
    # An unused pair begins at the padding.
    begin = offsets + pairs.each(space.begins)
    pair_node, pair_type = take(senders, begin), take(types, begin) - (num_types + 1) * pairs.each(range(count))
    rank, node_offsets = _ranks_by_node(pair_node, pair_type, bounds[:, -1], pairs, nodes, num_types)
    first_pair = pairs.each(pairs.begins)
    pair_order = put(jnp.zeros_like(rank), first_pair + rank, pairs.within(), unique=True)
    # The edges of a pair stay together in the order by sender: only where each pair begins there is new.
    sizes = jax.lax.pad(offsets, np.int32(0), [(-1, 1, 0)]) - offsets
    edges_before = pairs.sums_before(take(sizes, first_pair + pair_order))
    own = pair + space.each(pairs.begins)
    shift = take(edges_before, space.each(pairs.begins) + take(rank, own)) - take(offsets, own)
    place = begins + position + jnp.where(there, shift, 0)
    order = order - begins
    sender_order = put(jnp.zeros_like(order), place, order, unique=True)
    offsets_by_node = take(edges_before, node_offsets + nodes.each(pairs.begins))
    return [
        {
            "by_source_pair": (space.of(index, n), space.of(order, n), pairs.of(offsets, n, ends=1)),
            "source_pair_by_type": (pairs.of(pair_type, n), None, bounds[n]),
            "source_pair_by_node": _segments(
                pairs.of(pair_node, n), pairs.of(pair_order, n), nodes.of(node_offsets, n, ends=1), num_types, spec
            ),
            "by_sender": (edges.columns[n]["senders"], space.of(sender_order, n), nodes.of(offsets_by_node, n, ends=1)),
        }
        for n, spec in enumerate(specs)
    ]


def _ranks_by_node(
    pair_node: Array, pair_type: Array, used: Array, pairs: SideBySide, nodes: SideBySide, num_types: int
) -> tuple[Array, Array]:
    """The place of each pair in order of (node, type), and where the pairs of each node begin there."""
    node, is_used = pair_node + pairs.each(nodes.begins), pairs.within() < pairs.each(used)
    written = jnp.where(is_used, node, nodes.total)
    if num_types > 32:
        _, order = sort_pairs(node, nodes.total)
        counts = jnp.zeros(nodes.total, jnp.int32).at[written].add(1, mode="drop")
        return inverse(order) - pairs.each(pairs.begins), nodes.sums_before(counts)
    # Bit t of a node says that it has a pair of type t; the bits below are those of the pairs before it.
    bit = jnp.left_shift(jnp.uint32(1), pair_type.astype(jnp.uint32))
    bits = jnp.zeros(nodes.total, jnp.uint32).at[written].add(bit, mode="drop", wrap_negative_indices=False)
    offsets = nodes.sums_before(jax.lax.population_count(bits).astype(jnp.int32))
    lower = take(bits, node) & (bit - 1)
    rank = take(offsets, node) + jax.lax.population_count(lower).astype(jnp.int32)
    return jnp.where(is_used, rank, pairs.within()), offsets


def _by_node_type(spec: SlotSpec, num_nodes: int) -> tuple[Any, Segments]:
    """The types of the first `num_nodes` nodes, and these nodes grouped by type. They follow from the sizes alone."""
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


def _stacked(*arrays: Any) -> Any:
    """Places of equal length as one array, static if they are."""
    return np.stack(arrays) if all(isinstance(array, np.ndarray) for array in arrays) else jnp.stack(arrays)
