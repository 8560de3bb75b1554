"""Edge lists of any order to lists sorted by receiver, in parts that fit in memory."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dejax._files import new_npy
from dejax.datasets.files._work import for_blocks
from dejax.host_gather.tables.table import LocalTable
from dejax.minibatch._checks import EdgeList, EdgeType, check_range, checked_edge_type, ids_of, pieces
from dejax.minibatch.topology import _folder
from dejax.minibatch.topology._weights import alias_tables

__all__ = ["EdgeType", "ListArrays"]

# Edges that are sorted at once. Each takes about 40 bytes meanwhile.
BLOCK = 1 << 23
# Positions and groups of lists that several relations share fit in int32. A longer relation has lists of its own.
SHARED_LIMIT = 2**31 - 1
_SIDE_BY_SIDE = 1 << 28  # edges of lists whose relations are sorted at once: sorting takes 40 bytes of each edge


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class RelationInput:
    """One relation as it was given."""

    edge_type: EdgeType
    ends: EdgeList
    num_senders: int
    num_receivers: int
    weights: np.ndarray | None
    times: np.ndarray | None

    @property
    def num_edges(self) -> int:
        return len(self.ends[0])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ListGroup:
    """Relations that share lists."""

    sources: tuple[RelationInput, ...]
    keep_edge_ids: bool

    @property
    def num_edges(self) -> int:
        return sum(source.num_edges for source in self.sources)

    @property
    def num_groups(self) -> int:
        return sum(source.num_receivers + 1 for source in self.sources)


@dataclasses.dataclass(slots=True, eq=False)
class ListArrays:
    """The arrays of an `EdgeLists`; `places` has first group, first edge, edges and largest degree by relation."""

    starts: Any
    senders: Any
    edge_ids: Any = None
    alias: Any = None
    logs: Any = None
    times: Any = None
    places: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)

    def names(self) -> tuple[str, ...]:
        """The names of the arrays that are present."""
        names = ("starts", "senders", "edge_ids", "alias", "logs", "times")
        return tuple(name for name in names if getattr(self, name) is not None)


def plan(
    edges: Mapping[EdgeType, EdgeList],
    counts: Mapping[str, int],
    given: Mapping[str, Mapping[EdgeType, np.ndarray]],
    keep_edge_ids: bool,
) -> tuple[list[ListGroup], list[tuple[EdgeType, int, int]]]:
    """Which relations share lists: those with the same kinds of values, up to 2**31 edges.

    Returns:
        The parts; and for each relation, in the given order, its part and its place there.
    """
    parts: list[list[RelationInput]] = []
    kinds: list[tuple[bool, bool]] = []
    places = []
    for edge_type, ends in edges.items():
        weights, times = given["weights"].get(edge_type), given["times"].get(edge_type)
        source = RelationInput(edge_type, ends, counts[edge_type[0]], counts[edge_type[2]], weights, times)
        kind = weights is not None, times is not None
        for number, part in enumerate(parts):
            together = ListGroup((*part, source), keep_edge_ids)
            if kinds[number] == kind and max(together.num_edges, together.num_groups) < SHARED_LIMIT:
                break
        else:
            number = len(parts)
            parts.append([])
            kinds.append(kind)
        places.append((edge_type, number, len(parts[number])))
        parts[number].append(source)
    return [ListGroup(tuple(part), keep_edge_ids) for part in parts], places


def described(places: Sequence[tuple[EdgeType, int, int]], parts: Sequence[ListArrays]) -> Iterator[tuple[Any, ...]]:
    """The fields of each `Relation`."""
    for edge_type, number, at in places:
        yield edge_type, number, *parts[number].places[at]


def build(plan: ListGroup, folder: str | os.PathLike[str] | None, number: int) -> ListArrays:
    """The lists of a part, in memory or in the files of a folder."""
    edges = plan.num_edges
    position = np.int32 if edges < 2**31 else np.int64
    first = plan.sources[0]
    times = None if first.times is None else _times_dtype([s.times for s in plan.sources if s.times is not None])

    def array(name: str, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        if folder is None:
            return aligned(shape, dtype)
        return new_npy(_folder.list_path(folder, number, name), dtype, shape)

    part = ListArrays(array("starts", (plan.num_groups,), position), array("senders", (edges,), np.int32))
    if plan.keep_edge_ids:
        part.edge_ids = array("edge_ids", (edges,), position)
    if first.weights is not None:
        part.alias, part.logs = array("alias", (edges, 2), np.int32), array("logs", (edges,), np.float32)
    if times is not None:
        part.times = array("times", (edges,), times)
    groups = np.cumsum([0, *(source.num_receivers + 1 for source in plan.sources)]).tolist()
    begins = np.cumsum([0, *(source.num_edges for source in plan.sources)]).tolist()
    degrees = [0] * len(plan.sources)

    def fill(number: int, *_: int) -> None:
        degrees[number] = _fill(plan.sources[number], part, groups[number], begins[number])

    # Relations side by side, unless what sorting takes beside the lists is large.
    for_blocks(fill, len(plan.sources), 1, threads=None if edges < _SIDE_BY_SIDE else 1, progress=False)
    for number, source in enumerate(plan.sources):
        part.places.append((groups[number], begins[number], source.num_edges, degrees[number]))
    return part


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """An uninitialised array that begins at a multiple of 64 bytes, so that it can be pinned where it is."""
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    memory = np.empty(size + 64, np.uint8)
    begin = -memory.ctypes.data % 64
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _times_dtype(times: Sequence[np.ndarray]) -> Any:
    wide = any(t.size and (int(t.min()) < -(2**31) or int(t.max()) >= 2**31) for t in times)
    return np.int64 if wide else np.int32


def _fill(source: RelationInput, part: ListArrays, group: int, begin: int) -> int:
    """Writes one relation from `group` and `begin` on; returns its largest degree."""
    senders, receivers = source.ends
    counts = np.zeros(source.num_receivers, np.int64)
    for block in pieces(source.num_edges, BLOCK):
        target = receivers[block]
        check_range(f"senders of {source.edge_type}", senders[block], source.num_senders)
        check_range(f"receivers of {source.edge_type}", target, source.num_receivers)
        if len(target):
            counts += np.bincount(target.astype(np.int64), minlength=source.num_receivers)
    starts = np.zeros(source.num_receivers + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    part.starts[group : group + len(starts)] = starts + begin
    free = starts[:-1].copy()
    here = slice(begin, begin + source.num_edges)
    order = None if part.edge_ids is None else part.edge_ids[here]
    if order is None and (part.times is not None or part.alias is not None):
        order = np.empty(source.num_edges, np.int64)
    for block in pieces(source.num_edges, BLOCK):
        target = receivers[block].astype(np.int64)
        by_target = np.argsort(target, kind="stable")
        target = target[by_target]
        first = np.flatnonzero(np.concatenate([[True], target[1:] != target[:-1]]))
        lengths = np.diff(np.append(first, len(target)))
        place = np.repeat(free[target[first]] - first, lengths) + np.arange(len(target))
        free[target[first]] += lengths
        part.senders[here][place] = senders[block][by_target]
        if order is not None:
            order[place] = by_target + block.start
    if source.times is not None:
        assert order is not None
        _sort_by_time(source, part, starts, order, here)
    if source.weights is not None:
        assert order is not None
        part.alias[here], part.logs[here] = alias_tables(starts, source.weights[order].astype(np.float64))
    return int(counts.max(initial=0))


def _sort_by_time(source: RelationInput, part: ListArrays, starts: np.ndarray, order: np.ndarray, here: slice) -> None:
    """Sorts the edges of each receiver by time, blocks of receivers at a time."""
    senders, times = part.senders[here], part.times[here]
    assert source.times is not None
    first = 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + BLOCK, side="right")) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        some = slice(int(starts[first]), int(starts[last]))
        time = source.times[order[some]]
        receiver = np.repeat(np.arange(last - first), np.diff(starts[first : last + 1]))
        by_time = np.lexsort((time, receiver))
        times[some] = time[by_time]
        senders[some] = senders[some][by_time]
        order[some] = order[some][by_time]
        first = last


def from_csc(edge_type: EdgeType, pair: tuple[Any, Any], counts: Mapping[str, int]) -> ListArrays:
    """The lists of one relation that are sorted already, checked."""
    checked_edge_type(edge_type, counts)
    if len(pair) != 2:
        raise ValueError(f"lists of {edge_type} must be (starts, senders), got {len(pair)} lists")
    starts, senders = pair
    tables = {"starts": starts, "senders": senders}
    plain = {
        name: ids_of(f"{name} of {edge_type}", rows.numpy() if isinstance(rows, LocalTable) else rows)
        for name, rows in tables.items()
    }
    source, target = counts[edge_type[0]], counts[edge_type[2]]
    begins = plain["starts"]
    if begins.shape != (target + 1,):
        raise ValueError(f"`starts` of {edge_type} must have shape ({target + 1},), got {begins.shape}")
    edges = plain["senders"].shape[0]
    if int(begins[0]) != 0 or int(begins[-1]) != edges or not (begins[1:] >= begins[:-1]).all():
        raise ValueError(
            f"`starts` of {edge_type} must ascend from 0 to {edges}, the number of senders, got {begins.min()} to "
            f"{begins.max()}, or a descent"
        )
    for block in pieces(edges, BLOCK):
        check_range(f"senders of {edge_type}", plain["senders"][block], source)
    position = np.int32 if edges < 2**31 else np.int64
    kept = [
        rows if isinstance(rows, LocalTable) and rows.dtype == dtype else plain[name].astype(dtype, copy=False)
        for (name, rows), dtype in zip(tables.items(), (position, np.int32), strict=True)
    ]
    longest = int((begins[1:] - begins[:-1]).max(initial=0))
    return ListArrays(kept[0], kept[1], places=[(0, 0, edges, longest)])
