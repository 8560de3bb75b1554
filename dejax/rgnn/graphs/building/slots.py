"""Slots of sampled edges: their sizes, and all places in a graph of slots that follow from the sizes alone."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs.building.sorting_traced import count_before, put
from dejax.rgnn.graphs.building.static_tables import on_device
from dejax.rgnn.graphs.tables import LONG_SEGMENT_CHUNK


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
        slots: the slots, in the order of the user's edges: by type, then by receiver. Two of them have the same
            receivers or none in common.
        node_runs: type and number of nodes with consecutive numbers, from node 0 on.
        source_types: for each edge type the node type of its senders.
        edge_type_names: a name for each edge type.
        node_type_names: a name for each node type.
        long_segment_chunk: segments with more entries than this are split in chunks of this many.
        stored: how senders are given: for each fan-out the places of `slots` whose senders form one array. Without it
            each of `slots` has an array of its own.
        most_edges: the most edges of the graph, at least 1. By default there is room for an edge in each slot.
        typical_source_pairs, num_destinations: see `RelGraph`.
    """

    slots: tuple[Slots, ...]
    node_runs: tuple[tuple[int, int], ...]
    source_types: tuple[int, ...]
    edge_type_names: tuple[str, ...]
    node_type_names: tuple[str, ...]
    long_segment_chunk: int = LONG_SEGMENT_CHUNK
    stored: tuple[tuple[int, ...], ...] = ()
    most_edges: int | None = None
    typical_source_pairs: int | None = None
    num_destinations: int | None = None

    @property
    def num_nodes(self) -> int:
        return sum(count for _, count in self.node_runs)

    @property
    def num_slots(self) -> int:
        return sum(some.count * some.fan_out for some in self.slots)

    @property
    def is_bounded(self) -> bool:
        """Whether the graph may have fewer edges than there are slots."""
        return self.most_edges is not None and self.most_edges < self.num_slots

    @property
    def num_edges(self) -> int:
        return self.num_slots if self.most_edges is None else min(self.num_slots, self.most_edges)

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

    def most_of_a_receiver(self) -> tuple[int, int]:
        """The most edges, and the most destination pairs, that a receiver can have."""
        ranges = self.by_receivers()
        return max(sum(self.slots[n].fan_out for n in together) for together in ranges), max(map(len, ranges))


class SideBySide:
    """A space (groups, edges, nodes or pairs) of several graphs in one array. Static.

    The entries of a graph lie side by side, and behind them one place more: for padding, and for the end of offsets.
    So each operation is done once, however many graphs there are.

    Attributes:
        sizes: for each graph the number of its entries.
        begins: for each graph its first place.
        total: the number of all places.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = tuple(sizes)
        *begins, self.total = np.cumsum([0, *(size + 1 for size in sizes)]).tolist()
        self.begins = tuple(begins)

    @property
    def ends(self) -> list[int]:
        """For each graph the place behind its entries."""
        return [begin + size for begin, size in zip(self.begins, self.sizes, strict=True)]

    def each(self, values: Any) -> Any:
        """A value of each graph on its places: [places], or the value where there is one graph."""
        found = values[0]
        for begin, value in zip(self.begins[1:], values[1:], strict=True):
            position = jax.lax.iota(jnp.int32, self.total)
            found = jnp.where(jax.lax.ge(position, jax.lax.full_like(position, begin)), value, found)
        return found

    def within(self) -> Array:
        """int32[places], the number of each place within its graph."""
        return jax.lax.iota(jnp.int32, self.total) - self.each(self.begins)

    def sums_before(self, counts: Array) -> Array:
        """int32[..., places], the sum of counts (or flags) of the same graph before each place."""
        sums = count_before(counts[..., :-1])
        return sums - self.each([sums[..., begin, None] for begin in self.begins]) if len(self.sizes) > 1 else sums

    def of(self, values: Any, graph: int, ends: int = 0) -> Any:
        """The values of a graph's entries, and of the place behind them with `ends=1`."""
        begin = self.begins[graph]
        return values[begin : begin + self.sizes[graph] + ends]


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of groups (a receiver and a type) of several graphs. They follow from the sizes alone.

    Groups are stored by fan-out, then by graph, so that those of one fan-out are one array. Canonical order is by
    (graph, type, receiver). Gathers by static places take one kernel each, however many relations there are; slices and
    joins of the groups of each relation would take one for some dozens of them, and long to compile.

    Attributes:
        fan_outs: the fan-outs, in the order in which their groups are stored.
        space: the groups in canonical order.
        stored: the stored group at each canonical place; their number at the end of a graph.
        canonical: the canonical place of each stored group.
        stored_by_receiver: the stored group at each place in order of (graph, receiver, type), as `stored`.
        of_receiver: the place in order of (graph, receiver, type) of each stored group.
        receiver: the receiver, by canonical place; the number of nodes at the end of a graph.
        edge_type: the type, by canonical place; the number of types at the end of a graph.
        first_slot: the first of the user's edges of each stored group.
        end: the place behind the last group of its graph, for each stored group.
        first_edge: the first place of the edges of its graph, for each stored group.
        num_edges: the most edges of its graph, for each stored group.
    """

    fan_outs: tuple[int, ...]
    space: SideBySide
    stored: Any
    canonical: Any
    stored_by_receiver: Any
    of_receiver: Any
    receiver: Any
    edge_type: Any
    first_slot: Any
    end: Any
    first_edge: Any
    num_edges: Any

    def on_device(self) -> Places:
        """The same places, where they are many made on the device."""
        by_place = "stored", "receiver", "edge_type"
        by_group = "canonical", "of_receiver", "first_slot", "end", "first_edge", "num_edges"
        made = {
            name: array
            for names in (by_place, by_group)
            for name, array in zip(names, on_device(*(getattr(self, name) for name in names)), strict=True)
        }
        count = self.canonical.shape[0]
        if not isinstance(
            made["of_receiver"], np.ndarray
        ):  # receivers of several types alternate: not linear in pieces
            number = jnp.arange(count, dtype=jnp.int32)
            none = jnp.full(self.space.total, count, jnp.int32)
            made["stored_by_receiver"] = put(none, made["of_receiver"], number, unique=True)
        return dataclasses.replace(self, **made)


@lru_cache(maxsize=64)
def places_of(specs: tuple[SlotSpec, ...]) -> Places:
    """Where the groups of slots of several graphs lie, side by side in one array, in each of the orders of `Places`."""
    space, edges = SideBySide([spec.num_groups for spec in specs]), SideBySide([spec.num_edges for spec in specs])
    stored: dict[int, list[np.ndarray]] = {}
    by_place: list[np.ndarray] = []
    for n, spec in enumerate(specs):
        counts = [some.count for some in spec.slots]
        first_slot = np.cumsum([0, *(some.count * some.fan_out for some in spec.slots)])
        # In the user's order, which is the canonical one.
        receiver = np.concatenate([np.arange(some.first, some.first + some.count) for some in spec.slots])
        edge_type = np.repeat([some.edge_type for some in spec.slots], counts)
        slot = np.concatenate(
            [first_slot[i] + np.arange(c) * s.fan_out for i, (s, c) in enumerate(zip(spec.slots, counts, strict=True))]
        )
        place = space.begins[n] + np.arange(len(receiver))
        of_receiver = space.begins[n] + np.argsort(np.lexsort((edge_type, receiver)))
        same = [np.full_like(place, number) for number in (space.ends[n], edges.begins[n], spec.num_edges)]
        columns = np.stack([place, of_receiver, slot, *same])
        begins = np.cumsum([0, *counts])
        for i in itertools.chain(*spec.stored) if spec.stored else range(len(counts)):
            stored.setdefault(spec.slots[i].fan_out, []).append(columns[:, begins[i] : begins[i + 1]])
        ends = [spec.num_nodes], [len(spec.edge_type_names)]
        by_place.append(np.stack([np.append(receiver, ends[0]), np.append(edge_type, ends[1])]))
    canonical, of_receiver, *others = np.concatenate(list(itertools.chain(*stored.values())), axis=1)
    inverses = np.full((2, space.total), len(canonical))
    inverses[0, canonical] = inverses[1, of_receiver] = np.arange(len(canonical))
    receiver, edge_type = np.concatenate(by_place, axis=1)
    arrays = inverses[0], canonical, inverses[1], of_receiver, receiver, edge_type, *others
    return Places(tuple(stored), space, *(array.astype(np.int32) for array in arrays))


def first_groups_of(spec: SlotSpec) -> np.ndarray:
    """int32[edge types + 1]: the first group of each type, and the number of groups."""
    counts = np.zeros(len(spec.edge_type_names), np.int32)
    for some in spec.slots:
        counts[some.edge_type] += some.count
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


@lru_cache(maxsize=64)
def first_of_nodes_of(spec: SlotSpec) -> np.ndarray:
    """int32[nodes + 1]: the place of each node's first group in order of (receiver, type); of the next one without."""
    found = np.empty(spec.num_nodes + 1, np.int32)
    node = group = 0
    for together in spec.by_receivers():
        some = spec.slots[together[0]]
        found[node : some.first] = group  # nodes without slots
        end = group + some.count * len(together)
        node = some.first + some.count
        found[some.first : node] = np.arange(group, end, len(together))
        group = end
    found[node:] = group
    return found
