"""Draws of one hop: for each receiver and relation up to `fan_out` edges.

Relations that share lists are read together, and draws of one size are made together: a hop takes some twenty kernels,
however many relations there are.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import defaultdict
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from dejax.host_gather import gather
from dejax.host_gather._draws import below, draw_subset, draw_weighted, draw_weighted_subset
from dejax.host_gather._operands import ReadableTable
from dejax.host_gather.topology import Rows
from dejax.minibatch._layout import Piece
from dejax.minibatch.topology import EdgeLists, HeteroTopology

# Keys of weighted draws without replacement: one for each edge of each receiver.
_MOST_KEYS = 1 << 28


@dataclasses.dataclass(frozen=True, slots=True)
class SampleOptions:
    """How `sample_blocks` draws.

    Attributes:
        replace: whether an edge may be drawn twice. Then a receiver that has any edge gets `fan_out` of them.
        recent: whether to take the most recent edges instead of uniform draws, in relations with times.
        max_degree: the most edges of a receiver and relation that are read, for fan-outs of -1 and for weights without
            replacement. `SampledBlocks.lost_edges` counts the others. By default all are read.
    """

    replace: bool = False
    recent: bool = False
    max_degree: int | None = None

    def __post_init__(self) -> None:
        if self.max_degree is not None and self.max_degree < 0:
            raise ValueError(f"SampleOptions: `max_degree` must be at least 0, got {self.max_degree}")
        if self.recent and self.replace:
            raise ValueError("SampleOptions: `recent` takes each edge once; leave `replace` out")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Receivers whose edges are drawn.

    Attributes:
        piece: the relation and the fan-out.
        nodes: int32[receivers], -1 for padding.
        times: int[receivers], up to when edges count, or None.
    """

    piece: Piece
    nodes: Array
    times: Array | None


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Drawn:
    """Drawn edges: senders and positions in the relation's list, [receivers, fan_out] each, -1 for none."""

    senders: Array
    edges: Array


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Segments:
    """The edges of each receiver of a request: first position in the lists, and how many."""

    request: Request
    start: Array
    degree: Array


def draw_hop(
    key: Array, topology: HeteroTopology, requests: Sequence[Request], options: SampleOptions
) -> tuple[list[Drawn], Array]:
    """Draws for all requests of a hop.

    Returns:
        For each request its edges; int32 scalar, how many edges were not looked at because of `max_degree`.
    """
    found: dict[int, Drawn] = {}
    lost = jnp.zeros((), jnp.int32)
    for number, lists in enumerate(topology.lists):
        here = [r for r in requests if topology.relations[r.piece.relation].lists == number]
        if not here:
            continue
        parts = _segments(topology, lists, here)
        positions, beyond = _positions(jax.random.fold_in(key, number), topology, lists, parts, options)
        lost = lost + beyond
        senders = take(lists.senders, jnp.concatenate([p.reshape(-1) for p in positions]))
        at = 0
        for part, position in zip(parts, positions, strict=True):
            relation = topology.relations[part.request.piece.relation]
            some = senders[at : at + position.size].reshape(position.shape)
            at += position.size
            mask = position >= 0
            found[id(part.request)] = Drawn(
                jnp.where(mask, some.astype(jnp.int32), -1), jnp.where(mask, position - relation.first_edge, -1)
            )
    return [found[id(request)] for request in requests], lost


def take(values: Rows, ids: Array) -> Array:
    """Elements of a list by position; 0 out of range."""
    if isinstance(values, ReadableTable):
        return gather(values, ids, order="given", num_sms=64)  # lists are read mostly in order, a few bytes per id
    if values.shape[0] == 0:
        return jnp.zeros(ids.shape + values.shape[1:], values.dtype)
    return values.at[jnp.where(ids < 0, values.shape[0], ids)].get(mode="fill", fill_value=0)


def _segments(topology: HeteroTopology, lists: EdgeLists, requests: Sequence[Request]) -> list[_Segments]:
    groups = []
    for request in requests:
        first = topology.relations[request.piece.relation].first_group
        groups.append(jnp.where(request.nodes >= 0, request.nodes + first, -1))
    joined = jnp.concatenate(groups)
    # Padding reads nothing: if it read group 0, all warps would queue for the same line of host memory.
    ends = jnp.where(joined >= 0, joined + 1, -1)
    bounds = take(lists.starts, jnp.stack([joined, ends], axis=-1))
    parts, at = [], 0
    for request in requests:
        some = bounds[at : at + len(request.nodes)]
        at += len(request.nodes)
        parts.append(_up_to_time(topology, lists, _Segments(request, some[:, 0], some[:, 1] - some[:, 0])))
    return parts


def _up_to_time(topology: HeteroTopology, lists: EdgeLists, part: _Segments) -> _Segments:
    """Only the edges up to each receiver's time: they are the first ones."""
    if lists.times is None or part.request.times is None:
        return part
    steps = topology.relations[part.request.piece.relation].max_degree.bit_length()
    return dataclasses.replace(
        part, degree=_count_up_to(lists.times, part.start, part.degree, part.request.times, steps)
    )


@functools.partial(jax.jit, static_argnames="steps")  # outside of jit, too, the loop must not close over the table
def _count_up_to(times: Rows, start: Array, degree: Array, limit: Array, steps: int) -> Array:
    """How many edges of each receiver have a time up to its limit, by binary search."""

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # edges before `low` count, those from `high` on do not
        middle = (low + high) // 2
        counts = (low < high) & (take(times, jnp.where(low < high, start + middle, -1)) <= limit)
        return jnp.where(counts, middle + 1, low), jnp.where(counts, high, jnp.maximum(middle, low))

    return jax.lax.fori_loop(0, steps, halve, (jnp.zeros_like(degree), degree))[0]


def _how(topology: HeteroTopology, lists: EdgeLists, piece: Piece, options: SampleOptions) -> tuple[str, int | None]:
    """The kind of a draw, and the most edges of a receiver that it looks at (None: all of them)."""
    longest = topology.relations[piece.relation].max_degree
    if piece.all_edges:
        return ("all", None) if piece.fan_out >= longest else ("subset", options.max_degree)
    if options.recent and lists.times is not None:
        return "recent", None
    if lists.weights is not None:
        if options.replace:
            return "by weight", None
        bounded = options.max_degree is not None and options.max_degree < longest
        return "keys", options.max_degree if bounded else longest
    if options.replace:
        return "any", None
    return ("all" if piece.fan_out >= longest else "subset"), None


def _lost(part: _Segments, bound: int | None) -> Array:
    if bound is None:
        return jnp.zeros((), jnp.int32)
    return jnp.sum(jnp.maximum(part.degree - bound, 0), dtype=jnp.int32)


def _positions(
    key: Array, topology: HeteroTopology, lists: EdgeLists, parts: Sequence[_Segments], options: SampleOptions
) -> tuple[list[Array], Array]:
    """Drawn positions in the lists, [receivers, fan_out], -1 for none; and how many edges were not looked at.

    Draws of one kind and size are made together.
    """
    together: dict[tuple[int, str, int | None], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        piece = part.request.piece
        together[piece.fan_out, *_how(topology, lists, piece, options)].append(number)
    found: dict[int, Array] = {}
    lost = jnp.zeros((), jnp.int32)
    for (fan_out, kind, bound), numbers in together.items():
        start = jnp.concatenate([parts[n].start for n in numbers])
        degree = jnp.concatenate([parts[n].degree for n in numbers])
        own = jax.random.fold_in(key, min(numbers))
        chosen, mask = _draw(own, lists, start, degree, fan_out, kind, bound)
        position = jnp.where(mask, start[:, None] + chosen.astype(start.dtype), -1)
        at = 0
        for n in numbers:
            found[n] = position[at : at + len(parts[n].start)]
            at += len(parts[n].start)
            lost = lost + _lost(parts[n], bound)
    return [found[n] for n in range(len(parts))], lost


def _draw(
    key: Array, lists: EdgeLists, start: Array, degree: Array, fan_out: int, kind: str, bound: int | None
) -> tuple[Array, Array]:
    """Positions within each receiver's edges, [receivers, fan_out], and which of them are valid."""
    i = jnp.arange(fan_out, dtype=degree.dtype)
    if kind == "recent":
        return degree[:, None] - 1 - i, i < degree[:, None]
    if kind == "all":
        return jnp.broadcast_to(i, (len(start), fan_out)), i < degree[:, None]
    if kind == "subset":
        return draw_subset(key, degree, fan_out)
    if kind == "any":
        chosen = below(key, (len(start), fan_out), degree[:, None])
        return chosen, jnp.broadcast_to(degree[:, None] > 0, chosen.shape)
    assert lists.weights is not None
    if kind == "by weight":
        if lists.times is not None:
            raise ValueError("sample_blocks: weights together with times need draws without replacement")
        return draw_weighted(key, functools.partial(take, lists.weights.alias), start, degree, fan_out)
    assert bound is not None
    if bound * len(start) > _MOST_KEYS:
        raise ValueError(
            f"sample_blocks: weights without replacement look at all edges of a receiver, up to {bound} of each of "
            f"{len(start)} receivers here; give SampleOptions(max_degree=...), or draw with replacement"
        )
    return draw_weighted_subset(key, functools.partial(take, lists.weights.logs), start, degree, fan_out, bound)


def excluded(pairs: tuple[Array, Array], senders: Array, receivers: Array) -> Array:
    """Which edges are among `pairs`: bool[receivers, fan_out].

    Args:
        pairs: int32[pairs] senders and receivers.
        senders: int32[receivers, fan_out].
        receivers: int32[receivers].
    """
    count = pairs[0].shape[0]
    if not count:
        return jnp.zeros(senders.shape, bool)
    receiver, sender = jax.lax.sort((pairs[1], pairs[0]), num_keys=2)
    wanted = jnp.broadcast_to(receivers[:, None], senders.shape)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds  # the first pair that is not less than the edge lies from `low` to `high`
        middle = jnp.minimum((low + high) // 2, count - 1)
        there, own = receiver[middle], sender[middle]
        less = (low < high) & ((there < wanted) | ((there == wanted) & (own < senders)))
        return jnp.where(less, middle + 1, low), jnp.where(less, high, jnp.maximum(middle, low))

    bounds = jnp.zeros_like(senders), jnp.full_like(senders, count)
    low, _ = jax.lax.fori_loop(0, count.bit_length(), halve, bounds)
    at = jnp.minimum(low, count - 1)
    return (low < count) & (receiver[at] == wanted) & (sender[at] == senders) & (senders >= 0)
