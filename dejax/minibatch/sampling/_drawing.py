"""Draws of one hop: for each receiver and relation up to `fan_out` edges.

Relations that share lists are read together, and draws of one size are made together: a hop takes some twenty kernels,
however many relations there are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax._jaxprs import loop
from dejax.host_gather.deferred import deferrable_gather
from dejax.host_gather.tables.table import LocalTable
from dejax.minibatch.sampling._draws import below, below_by_bits, draw_weighted, draw_weighted_subset, subset_of
from dejax.minibatch.sampling._layout import Piece, SampleLayout
from dejax.minibatch.topology.hetero_topology import EdgeLists, HeteroTopology, Rows
from dejax.rgnn.graphs.building.sorting_traced import joined
from dejax.rgnn.graphs.building.sorting_traced import take as read
from dejax.rgnn.graphs.building.static_tables import on_device

# Keys of weighted draws without replacement: one for each edge of each receiver.
_MOST_KEYS = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True)
class SampleOptions:
    """How `sample_blocks` draws the edges of a node.

    Attributes:
        replace: whether an edge may be drawn more than once. If so, every node with an edge gets `fan_out` edges.
        recent: in relations with times: whether to take the most recent edges instead of random ones.
        max_degree: largest number of edges of a node in one relation that are read, where a draw needs all of them: for
            a fan-out of -1, and for weights without replacement. Further edges are ignored and counted in
            `SampledBlocks.lost_edges`. None reads all.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch import HeteroTopology, SampleOptions, sample_blocks
    >>> topology = HeteroTopology.from_edges({("a", "to", "a"): ([1], [0])}, {"a": 2})
    >>> twice = SampleOptions(replace=True)
    >>> sample_blocks(jax.random.key(0), topology, ("a", jnp.array([0])), [2], options=twice).slots[0]
    Array([1, 1], dtype=int32)
    """

    replace: bool = False
    recent: bool = False
    max_degree: int | None = None

    def __post_init__(self) -> None:
        if self.max_degree is not None and self.max_degree < 0:
            raise ValueError(f"SampleOptions: `max_degree` must be at least 0, got {self.max_degree}")
        if self.recent and self.replace:
            raise ValueError(
                "SampleOptions: `replace` must be False with `recent`, which takes each edge once, got True"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """Pieces that are drawn together: they have the same lists, fan-out and kind of draw.

    Attributes:
        lists: the number of their `EdgeLists`.
        kind: how positions are chosen.
        bound: the most edges of a receiver that are looked at; None: all.
        fan_out: slots of a receiver.
        first, last: the rows of the hop, from `first` to `last - 1`.
    """

    lists: int
    kind: str
    bound: int | None
    fan_out: int
    first: int
    last: int

    @property
    def slots(self) -> int:
        return (self.last - self.first) * self.fan_out


_UNIFORM = ("subset", "any")  # kinds of draws that take bits
_BY_KEY = ("by weight", "keys")  # and those that take keys


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Hop:
    """The rows of a hop: a receiver for each piece that draws its edges, piece by piece.

    Attributes:
        pieces: the pieces.
        draws: what is drawn together, in the order of rows.
        piece: int32[rows], the piece of each row.
        receiver: int32[rows], the receiver among the nodes that the hop before found.
    """

    pieces: tuple[Piece, ...]
    draws: tuple[Draw, ...]
    piece: Any
    receiver: Any

    @classmethod
    def of(cls, topology: HeteroTopology, layout: SampleLayout, hop: int, options: SampleOptions) -> Hop:
        """The rows of hop number `hop`. Neighbouring pieces whose edges are drawn in one way become one `Draw`."""
        pieces = layout.of_hop(hop)
        sizes = [layout.receivers(piece) for piece in pieces]
        ends = np.cumsum([0, *sizes]).tolist()
        draws: list[Draw] = []
        for n, (key, piece) in enumerate(zip(draw_keys(topology, pieces, options), pieces, strict=True)):
            lists, kind, bound, _ = key
            draw = Draw(lists, kind, None if bound < 0 else bound, piece.fan_out, ends[n], ends[n + 1])
            if draws and dataclasses.replace(draws[-1], first=draw.first, last=draw.last) == draw:
                draws[-1] = dataclasses.replace(draws[-1], last=draw.last)
            else:
                draws.append(draw)
        first = layout.first_of_all(hop, 0)
        none = np.zeros(0, np.int32)
        receivers = [
            layout.first_of_all(hop, piece.target) - first + np.arange(size, dtype=np.int32)
            for piece, size in zip(pieces, sizes, strict=True)
        ]
        of_piece = np.repeat(np.arange(len(pieces), dtype=np.int32), sizes)
        rows = on_device(of_piece, np.concatenate([none, *receivers]).astype(np.int32))
        return cls(tuple(pieces), tuple(draws), *rows)

    @property
    def uniform_slots(self) -> int:
        """Slots whose edges are drawn by bits."""
        return sum(draw.slots for draw in self.draws if draw.kind in _UNIFORM)

    def rows(self, values: Sequence[int], dtype: Any = np.int32) -> Any:
        """A value of each piece on its rows: [rows]."""
        table = np.asarray(values, dtype).reshape(-1)
        return table[self.piece] if isinstance(self.piece, np.ndarray) else read(table, self.piece)

    def on_slots(self, rows: Any) -> Array:
        """A value of each row on its slots: [slots]."""
        parts = [
            jnp.broadcast_to(rows[draw.first : draw.last, None], (draw.last - draw.first, draw.fan_out)).reshape(-1)
            for draw in self.draws
        ]
        return joined(parts)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Drawn edges of a hop: senders within their types, positions in the relation's list; [slots], -1 for none.

    `lost` counts edges that were not looked at because of `max_degree`.
    """

    senders: Array
    edges: Array
    lost: Array


def draw_keys(
    topology: HeteroTopology, pieces: Sequence[Piece], options: SampleOptions
) -> list[tuple[int, str, int, int]]:
    """The sort key of each piece: lists, kind, bound (-1: none), fan-out. Pieces with equal keys are drawn together."""
    keys = []
    for piece in pieces:
        lists = topology.relations[piece.relation].lists
        kind, bound = _how(topology, topology.lists[lists], piece, options)
        keys.append((lists, kind, -1 if bound is None else bound, piece.fan_out))
    # A subset of the edges of a receiver that has no more than `fan_out` is all of them: one draw serves both.
    return [
        (lists, "subset", bound, fan_out)
        if kind == "all" and (lists, "subset", bound, fan_out) in keys
        else (lists, kind, bound, fan_out)
        for lists, kind, bound, fan_out in keys
    ]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Randomness:
    """The random numbers of a sample. Uniform draws of all hops take their bits from one array, made by one kernel.

    Attributes:
        key: for other draws.
        bits: uint32[2, slots], for uniform draws.
    """

    key: Array
    bits: Array

    @classmethod
    def of(cls, key: Array, hops: Sequence[Hop]) -> Randomness:
        count = sum(hop.uniform_slots for hop in hops)
        return cls(jax.random.fold_in(key, 1), jax.random.bits(jax.random.fold_in(key, 0), (2, count), jnp.uint32))


def draw_hop(
    random: Randomness, topology: HeteroTopology, hop: Hop, nodes: Array, times: Array | None
) -> tuple[Drawn, Randomness]:
    """Draws for all rows of a hop; returns also the random numbers that are left.

    Args:
        random: random numbers.
        topology: the graph.
        hop: the rows.
        nodes: int32[rows], the receivers, -1 for padding.
        times: int[rows], up to when edges count, or None.
    """
    relations = [topology.relations[piece.relation] for piece in hop.pieces]
    first_group = hop.rows([relation.first_group for relation in relations])
    senders: list[Array] = []
    edges: list[Array] = []
    lost = jnp.zeros((), jnp.int32)
    for number, lists in enumerate(topology.lists):
        draws = [draw for draw in hop.draws if draw.lists == number]
        if not draws:
            continue
        first, last = draws[0].first, draws[-1].last
        start, degree = _segments(lists, nodes[first:last], first_group[first:last])
        if lists.times is not None and times is not None:
            longest = max(r.max_degree for r in relations if r.lists == number)
            degree = _count_up_to(lists.times, start, degree, times[first:last], longest.bit_length())
        positions: list[Array] = []
        for draw in draws:
            some = slice(draw.first - first, draw.last - first)
            taken = draw.slots if draw.kind in _UNIFORM else 0
            own = Randomness(random.key, random.bits[:, :taken])
            random = Randomness(random.key, random.bits[:, taken:])
            if draw.kind in _BY_KEY or start.dtype != jnp.int32:
                own = Randomness(jax.random.fold_in(random.key, 0), own.bits)
                random = Randomness(jax.random.fold_in(random.key, 1), random.bits)
            chosen, mask = _draw(own, lists, start[some], degree[some], draw)
            positions.append(jnp.where(mask, start[some, None] + chosen.astype(start.dtype), -1))
            if draw.bound is not None:
                lost = lost + jnp.sum(jnp.maximum(degree[some] - draw.bound, 0), dtype=jnp.int32)
        first_edge = hop.rows([relation.first_edge for relation in relations], start.dtype)
        shifts = [first_edge[draw.first : draw.last, None] for draw in draws]
        flat = joined([position.reshape(-1) for position in positions])
        senders.append(jnp.where(flat >= 0, take(lists.senders, flat).astype(jnp.int32), -1))
        within = [jnp.where(p >= 0, p - shift, -1).reshape(-1) for p, shift in zip(positions, shifts, strict=True)]
        edges.append(joined(within))
    return Drawn(joined(senders), joined(edges), lost), random


def take(values: Rows, ids: Array) -> Array:
    """Elements of a list by position; 0 out of range."""
    if isinstance(values, LocalTable):
        # Lists are read mostly in order, a few bytes per id.
        return deferrable_gather(values, ids, num_sms=64)
    if values.shape[0] == 0:
        return jnp.zeros(ids.shape + values.shape[1:], values.dtype)
    return values.at[jnp.where(ids < 0, values.shape[0], ids)].get(mode="fill", fill_value=0)


def _segments(lists: EdgeLists, nodes: Array, first_group: Any) -> tuple[Array, Array]:
    """The edges of each row: the first position in the lists, and how many."""
    group = jnp.where(nodes >= 0, nodes + first_group, -1)
    # Padding reads nothing: if it read group 0, all warps would queue for the same line of host memory.
    bounds = take(lists.starts, jnp.stack([group, jnp.where(group >= 0, group + 1, -1)], axis=-1))
    return bounds[:, 0], bounds[:, 1] - bounds[:, 0]


@functools.partial(jax.jit, static_argnames="steps")  # outside of jit, too, the loop must not close over the table
def _count_up_to(times: Rows, start: Array, degree: Array, limit: Array, steps: int) -> Array:
    """How many edges of each receiver have a time up to its limit, by binary search."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # edges before `low` count, those from `high` on do not
        middle = (low + high) // 2
        counts = (low < high) & (take(times, jnp.where(low < high, start + middle, -1)) <= limit)
        return jnp.where(counts, middle + 1, low), jnp.where(counts, high, jnp.maximum(middle, low))

    return loop(0, steps, halve, (jnp.zeros_like(degree), degree))[0]


def _how(topology: HeteroTopology, lists: EdgeLists, piece: Piece, options: SampleOptions) -> tuple[str, int | None]:
    """The kind of a draw, and the most edges of a receiver that it looks at (None: all of them)."""
    longest = topology.relations[piece.relation].max_degree
    if piece.all_edges:
        return ("all", None) if piece.fan_out >= longest else ("subset", options.max_degree)
    bounded = options.max_degree is not None and options.max_degree < longest
    if options.recent and lists.times is not None:
        if lists.weights is None:
            return "recent", None
        return "recent of weight", options.max_degree if bounded else longest
    if lists.weights is not None:
        if options.replace:
            return "by weight", None
        return "keys", options.max_degree if bounded else longest
    if options.replace:
        return "any", None
    return ("all" if piece.fan_out >= longest else "subset"), None


def _draw(random: Randomness, lists: EdgeLists, start: Array, degree: Array, draw: Draw) -> tuple[Array, Array]:
    """Positions within each receiver's edges, [receivers, fan_out], and which of them are valid."""
    fan_out, kind, key = draw.fan_out, draw.kind, random.key
    i = jnp.arange(fan_out, dtype=degree.dtype)
    if kind == "recent":
        return degree[:, None] - 1 - i, i < degree[:, None]
    if kind == "all":
        chosen = jnp.broadcast_to(i, (len(start), fan_out))
        return chosen, _of_weight(lists, start, chosen, i < degree[:, None])
    if kind in _UNIFORM:
        below_what = jnp.broadcast_to(degree[:, None], (len(start), fan_out))
        below_what = below_what - fan_out + i + 1 if kind == "subset" else below_what
        if degree.dtype == jnp.int32:
            drawn = below_by_bits(random.bits.reshape(2, *below_what.shape), below_what)
        else:
            drawn = below(key, below_what.shape, below_what)
        chosen, there = subset_of(drawn, degree) if kind == "subset" else (drawn, below_what > 0)
        return chosen, _of_weight(lists, start, chosen, there)
    assert lists.weights is not None
    if kind == "by weight":
        if lists.times is not None:
            raise ValueError(
                "sample_blocks: `replace` must be False for a relation with weights and times, got True; leave it out"
            )
        return draw_weighted(key, functools.partial(take, lists.weights.alias), start, degree, fan_out)
    bound = draw.bound
    assert bound is not None
    if bound * len(start) > _MOST_KEYS:
        raise ValueError(
            f"sample_blocks: weighted draws without replacement must read at most {_MOST_KEYS:,} edges in a hop, got "
            f"up to {bound} of each of {len(start)} receivers; give SampleOptions(max_degree=...), or draw with "
            "replacement"
        )
    if kind == "recent of weight":
        back = jnp.arange(bound, dtype=degree.dtype)
        position = degree[:, None] - 1 - back
        there = _of_weight(lists, start, position, back < degree[:, None])
        latest, chosen = jax.lax.top_k(jnp.where(there, bound - back, 0), min(fan_out, bound))
        missing = ((0, 0), (0, fan_out - chosen.shape[1]))
        return jnp.pad(jnp.take_along_axis(position, chosen, axis=1), missing), jnp.pad(latest, missing) > 0
    return draw_weighted_subset(key, functools.partial(take, lists.weights.logs), start, degree, fan_out, bound)


def _of_weight(lists: EdgeLists, start: Array, chosen: Array, there: Array) -> Array:
    """Which positions are there and have no weight of 0."""
    if lists.weights is None:
        return there
    return there & (take(lists.weights.logs, jnp.where(there, start[:, None] + chosen, -1)) > -jnp.inf)


def excluded(pairs: tuple[Array, Array], senders: Array, receivers: Array) -> Array:
    """Which edges are among `pairs`: bool[receivers, fan_out].

    Args:
        pairs: int32[pairs] senders and receivers.
        senders: int32[receivers, fan_out].
        receivers: int32[receivers].
    """
    receiver, sender = jax.lax.sort((pairs[1], pairs[0]), num_keys=2)
    return among_sorted(receiver, sender, jnp.broadcast_to(receivers[:, None], senders.shape), senders)


def among_sorted(receiver: Array, sender: Array, receivers: Array, senders: Array) -> Array:
    """Which edges are among pairs that are sorted by receiver and then by sender, by binary search: bool, as `senders`.

    Edges with a sender of -1 are none of them.
    """
    count = receiver.shape[0]
    if not count:
        return jnp.zeros(senders.shape, bool)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the first pair that is not less than the edge lies from `low` to `high`
        middle = jnp.minimum((low + high) // 2, count - 1)
        there, own = receiver[middle], sender[middle]
        less = (low < high) & ((there < receivers) | ((there == receivers) & (own < senders)))
        return jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.maximum(middle, low))

    bounds = jnp.zeros(senders.shape, jnp.int32), jnp.full(senders.shape, count, jnp.int32)
    low, _ = loop(0, count.bit_length(), halve, bounds)
    at = jnp.minimum(low, count - 1)
    return (low < count) & (receiver[at] == receivers) & (sender[at] == senders) & (senders >= 0)
