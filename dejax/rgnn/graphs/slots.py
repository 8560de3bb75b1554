"""Slots of sampled edges: their sizes, and all places in a graph of slots that follow from the sizes alone."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from dejax.rgnn.graphs.sorting_traced import inverse
from dejax.rgnn.graphs.static_tables import on_device
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
        slots: in the order of the user's edges: by type, then by receiver. Two of them have the same receivers or none
            in common.
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


@dataclass(frozen=True, slots=True, eq=False)
class Places:
    """Places of groups (a receiver and a type), int32[groups] each. They follow from the sizes alone.

    Groups are stored by fan-out, so that those of one fan-out are one array. Canonical order is by (type, receiver).
    Gathers by static places take one kernel each, however many relations there are; slices and joins of the groups of
    each relation would take one for some dozens of them, and long to compile.

    Attributes:
        by_fan_out: places in `SlotSpec.slots` of those with one fan-out.
        stored: the stored group at each canonical place.
        canonical: the canonical place of each stored group.
        stored_by_receiver: the stored group at each place in order of (receiver, type).
        of_receiver: the place in order of (receiver, type) of each stored group.
        receiver: the receiver, by canonical place.
        edge_type: the type, by canonical place.
        first_slot: the first of the user's edges of each stored group.
    """

    by_fan_out: dict[int, list[int]]
    stored: Any
    canonical: Any
    stored_by_receiver: Any
    of_receiver: Any
    receiver: Any
    edge_type: Any
    first_slot: Any

    def on_device(self) -> Places:
        """The same places, where they are many made on the device."""
        stored, receiver, edge_type = on_device(self.stored, self.receiver, self.edge_type)
        canonical, of_receiver, first_slot = on_device(self.canonical, self.of_receiver, self.first_slot)
        by_receiver = self.stored_by_receiver
        if not isinstance(of_receiver, np.ndarray):  # receivers of several types alternate: not linear in pieces
            by_receiver = inverse(of_receiver)
        return Places(self.by_fan_out, stored, canonical, by_receiver, of_receiver, receiver, edge_type, first_slot)


@lru_cache(maxsize=64)
def places_of(spec: SlotSpec) -> Places:
    by_fan_out: dict[int, list[int]] = {}
    for n in itertools.chain(*spec.stored) if spec.stored else range(len(spec.slots)):
        by_fan_out.setdefault(spec.slots[n].fan_out, []).append(n)
    counts = [some.count for some in spec.slots]
    first_slot = np.cumsum([0, *(some.count * some.fan_out for some in spec.slots)])
    # In the user's order, which is the canonical one.
    receiver = np.concatenate([np.arange(some.first, some.first + some.count) for some in spec.slots])
    edge_type = np.repeat([some.edge_type for some in spec.slots], counts)
    slot = np.concatenate([first_slot[n] + np.arange(some.count) * some.fan_out for n, some in enumerate(spec.slots)])
    begins = np.cumsum([0, *counts])
    canonical = np.concatenate([np.arange(begins[n], begins[n + 1]) for some in by_fan_out.values() for n in some])
    stored = np.argsort(canonical)
    by_receiver = np.lexsort((edge_type, receiver))
    of_receiver = np.argsort(by_receiver)[canonical]
    arrays = stored, canonical, stored[by_receiver], of_receiver, receiver, edge_type, slot[canonical]
    return Places(by_fan_out, *(array.astype(np.int32) for array in arrays))


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
