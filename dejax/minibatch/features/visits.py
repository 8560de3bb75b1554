"""How often a sampler visits nodes, and which rows of features therefore go to the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import ArrayLike

from dejax.datasets.files._work import available_cores

Relation = tuple[str, str, str]
_CHUNK = 1 << 24  # edges at once, for memory maps


def expected_visits(
    edges: Mapping[Relation, Sequence[np.ndarray]],
    num_nodes: Mapping[str, int],
    seeds: Mapping[str, ArrayLike],
    fan_outs: Sequence[int | Mapping[Relation, int]],
    *,
    batch_size: int | None = None,
) -> dict[str, np.ndarray]:
    """Computes how often a batch visits each node on average, to choose the rows that lie on the device (`hot_rows`).

    Each seed is equally likely to be in a batch. A visited node v with d(v) edges in a relation of fan-out k visits
    each of its neighbours min(k, d(v)) / d(v) times. All visits of a node by one batch count, although a sampler reads
    its row once.

    Args:
        edges: for each (source type, relation, destination type) a pair (senders, receivers), int[edges] each, or
            int[2, edges].
        num_nodes: number of nodes of each type.
        seeds: for each node type int[seeds], the nodes that batches are drawn from.
        fan_outs: for each hop, the number of neighbours that are drawn from each relation: one number, or a dict by
            relation, which uses only the relations that it names. -1 means all neighbours.
        batch_size: number of seeds in a batch; by default all.

    Returns:
        For each node type float64[nodes].

    Raises:
        ValueError: a node type or relation is unknown, or a node is out of range.

    >>> visits = expected_visits({("b", "to", "a"): ([0, 1, 1], [0, 0, 1])}, {"a": 2, "b": 3}, {"a": [0, 1]}, [1])
    >>> visits["b"]
    array([0.5, 1.5, 0. ])
    """
    for name in {kind for source, _, destination in edges for kind in (source, destination)}:
        _known(name, num_nodes)
    degrees = {
        relation: _counts(ends[1], num_nodes[relation[2]], f"receivers of {relation}")
        for relation, ends in edges.items()
    }

    def sent(relation: Relation, reached: np.ndarray, fan_out: int) -> np.ndarray:
        weight = reached * _share_drawn(np, degrees[relation], fan_out)
        return _pushed(edges[relation], weight, num_nodes[relation[0]], f"senders of {relation}")

    return visits_by_hops(seed_visits(seeds, num_nodes, batch_size), edges, sent, fan_outs)


def seed_visits(
    seeds: Mapping[str, ArrayLike], num_nodes: Mapping[str, int], batch_size: int | None
) -> dict[str, np.ndarray]:
    """Visits of each node as a seed of a batch: float64[nodes] by type."""
    for name in seeds:
        _known(name, num_nodes)
    total = sum(np.asarray(nodes).size for nodes in seeds.values())
    share = 1.0 if batch_size is None else batch_size / max(1, total)
    found = {name: np.zeros(count) for name, count in num_nodes.items()}
    for name, nodes in seeds.items():
        found[name] += share * np.bincount(_checked("seeds", nodes, num_nodes[name]), minlength=num_nodes[name])
    return found


def visits_by_hops(
    reached: Mapping[str, Any],
    relations: Iterable[Relation],
    sent: Callable[[Relation, Any, int], Any],
    fan_outs: Sequence[int | Mapping[Relation, int]],
) -> dict[str, Any]:
    """Visits of all hops.

    Args:
        reached: visits of the seeds by type, arrays of numpy or jax.
        relations: all of them.
        sent: (relation, visits of the receivers, fan-out) -> visits of the senders.
        fan_outs: as in `expected_visits`.
    """
    relations = list(relations)
    visits = dict(reached)
    for hop in fan_outs:
        if isinstance(hop, Mapping) and (unknown := set(hop) - set(relations)):
            raise ValueError(f"expected_visits: relations of `fan_outs` must be of {relations}, got {sorted(unknown)}")
        following: dict[str, Any] = {}
        for relation in relations:
            source, _, destination = relation
            k = hop.get(relation, 0) if isinstance(hop, Mapping) else hop
            if destination in reached:
                new = sent(relation, reached[destination], k)
                following[source] = following[source] + new if source in following else new
        reached = following
        for name, values in reached.items():
            visits[name] = visits[name] + values if name in visits else values
    return visits


def sent_by_csc(
    starts: Array,
    senders: Iterable[np.ndarray | Array],
    reached: Array,
    fan_out: int,
    num_senders: int,
    devices: Sequence[jax.Device] = (),
) -> Array:
    """The visits of the senders of one relation: float32[num_senders].

    Args:
        starts: int[receivers + 1], the first edge of each receiver, and the number of edges.
        senders: int[edges], cut in pieces, such as slices of a table in host memory.
        reached: float32[receivers], visits of the receivers.
        fan_out: edges that are drawn of each receiver; -1 for all.
        num_senders: number of senders.
        devices: the devices that take turns with the pieces; none means jax's default device. The result lies on the
            first one.
    """
    on = list[Any](devices) or [None]
    if fan_out == 0:
        return jnp.zeros(num_senders, jnp.float32)
    pieces = list(senders)
    begins = np.cumsum([0, *map(len, pieces)]).tolist()
    given = _weights(starts, reached, fan_out), starts

    def added(number: int) -> Array:
        own = jnp.zeros(num_senders, jnp.float32, device=on[number])
        weight, starts = given if on[number] is None else jax.device_put(given, on[number])
        for at in range(number, len(pieces), len(on)):
            own = _add_piece(own, weight, starts, jax.device_put(pieces[at], on[number]), begins[at])
        return own

    with ThreadPoolExecutor(len(on)) as pool:  # a thread copies pieces to its device
        found = list(pool.map(added, range(len(on))))
    return functools.reduce(jnp.add, [jax.device_put(own, on[0]) for own in found])


def _share_drawn(module: Any, degree: Any, fan_out: int) -> Any:
    """The part of its edges that a receiver of this degree draws."""
    drawn = degree if fan_out < 0 else module.minimum(fan_out, degree)
    return drawn / module.maximum(degree, 1)


@functools.partial(jax.jit, static_argnums=2)
def _weights(starts: Array, reached: Array, fan_out: int) -> Array:
    return reached * _share_drawn(jnp, jnp.diff(starts), fan_out).astype(jnp.float32)


@functools.partial(jax.jit, donate_argnums=0)
def _add_piece(total: Array, weight: Array, starts: Array, senders: Array, begin: int) -> Array:
    """Adds the weights of the receivers of the edges `begin`, `begin` + 1, ..."""
    edges = jnp.arange(len(senders), dtype=starts.dtype) + jnp.asarray(begin).astype(starts.dtype)
    receivers = jnp.searchsorted(starts, edges, side="right") - 1
    return total.at[senders].add(weight[receivers])


def hot_rows(
    visits: Mapping[str, ArrayLike], row_bytes: Mapping[str, int], device_bytes: int, *, slot_bytes: int = 4
) -> dict[str, np.ndarray]:
    """Chooses the rows of all node types that should lie on the device: the most visited ones that fit.

    Rows are taken in descending order of visits, up to the first one that does not fit. The width of a row does not
    matter for the order: each visit of a row on the device saves its bytes on the bus, and the row takes as many bytes
    of device memory, so that the gain for each byte is the number of visits. Rows without visits are not taken.

    Args:
        visits: for each node type real[rows], how often each row is read: from `expected_visits`, counted
            (`dejax.host_gather.count_ids`), or the degrees of the nodes.
        row_bytes: for each node type, the bytes of a row.
        device_bytes: device memory for rows and slots.
        slot_bytes: additional bytes of device memory for each row, hot or not, of a node type that has hot rows.

    Returns:
        For each node type int64[hot rows], ascending ids.

    Raises:
        ValueError: `row_bytes` lacks a node type, or `visits` have a NaN.

    >>> hot_rows({"a": [5, 1, 9], "b": [7, 0]}, {"a": 8, "b": 16}, 44)
    {'a': array([2]), 'b': array([0])}
    """
    counts = {name: np.asarray(values).reshape(-1) for name, values in visits.items()}
    for name, values in counts.items():
        if name not in row_bytes:
            raise ValueError(f"hot_rows: `row_bytes` must have the type {name!r} of `visits`, got {list(row_bytes)}")
        if values.dtype.kind == "f" and np.isnan(values).any():
            raise ValueError(f"hot_rows: `visits` of {name!r} must be numbers, got NaN; replace them by 0")
    room = device_bytes - slot_bytes * sum(len(values) for values in counts.values())
    cuts = [(name, first) for name, values in counts.items() for first in range(0, len(values), _CHUNK)]

    def sorted_chunk(cut: tuple[str, int]) -> np.ndarray:
        own = counts[cut[0]][cut[1] : cut[1] + _CHUNK]
        return np.sort(own[own > 0])

    with ThreadPoolExecutor(available_cores()) as pool:  # numpy sorts on one core
        ascending = list(zip(cuts, pool.map(sorted_chunk, cuts), strict=True))

    def bytes_above(bound: float) -> int:
        return sum((len(x) - int(np.searchsorted(x, bound, side="right"))) * row_bytes[n] for (n, _), x in ascending)

    low, high = 0.0, max((float(x[-1]) for _, x in ascending if x.size), default=0.0)
    if bytes_above(0.0) <= room:
        high = 0.0
    else:
        while (middle := (low + high) / 2) not in (low, high):  # until no float lies in between
            low, high = (low, middle) if bytes_above(middle) <= room else (middle, high)
    room -= bytes_above(high)
    chosen = {}
    for name, values in counts.items():
        equal = np.flatnonzero(values == high) if high > 0 else np.zeros(0, np.int64)
        equal = equal[: max(0, room) // max(1, row_bytes[name])]
        room -= len(equal) * row_bytes[name]
        taken = values > high if high or room >= 0 else np.zeros(len(values), bool)
        taken[equal] = True
        chosen[name] = np.flatnonzero(taken)
    return chosen


def _known(name: str, num_nodes: Mapping[str, int]) -> None:
    if name not in num_nodes:
        raise ValueError(f"expected_visits: node types must be of {', '.join(num_nodes)}, got {name!r}")


def _checked(what: str, nodes: ArrayLike, count: int) -> np.ndarray:
    found = np.asarray(nodes).reshape(-1)
    if found.size and (found.dtype.kind not in "iu" or found.min() < 0 or found.max() >= count):
        raise ValueError(
            f"expected_visits: {what} must be integers from 0 to {count - 1}, got {found.min()} to {found.max()}"
        )
    return found.astype(np.int64, copy=False)


def _counts(nodes: np.ndarray, count: int, what: str) -> np.ndarray:
    total = np.zeros(count, np.int64)
    for start in range(0, len(nodes), _CHUNK):
        total += np.bincount(_checked(what, nodes[start : start + _CHUNK], count), minlength=count)
    return total


def _pushed(ends: Sequence[np.ndarray], weight: np.ndarray, count: int, what: str) -> np.ndarray:
    """The sum over the edges of each sender of the receiver's weight."""
    senders, receivers = ends[0], ends[1]
    total = np.zeros(count)
    for start in range(0, len(senders), _CHUNK):
        part = _checked(what, senders[start : start + _CHUNK], count)
        total += np.bincount(part, weights=weight[np.asarray(receivers[start : start + _CHUNK])], minlength=count)
    return total
