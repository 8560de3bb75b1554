"""Which node values cross between devices: a cut of the fewest bytes."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

_ENDLESS = 1 << 62


def least_cut(
    arguments: Mapping[int, Collection[int]], weights: Mapping[int, int], readers: Collection[int]
) -> set[int]:
    """The values of the least total weight that stand between the values without arguments and the readers.

    Each value may be computed from its arguments on any device, so it suffices to send a set of values through which
    every path to a reader leads. Among equally small sets the last one on the paths is taken: what comes before it
    runs on the owners alone.

    Args:
        arguments: for each value the values that it is made of; none for those that only the owner has.
        weights: bytes of a row of each value.
        readers: the values that are read on other devices.

    >>> sorted(least_cut({0: [], 1: [0], 2: [1]}, {0: 64, 1: 16, 2: 32}, [2]))
    [1]
    """
    # A flow network: each value is an edge of its weight from (value, "in") to (value, "out").
    source, sink = ("source",), ("sink",)
    capacity: dict[tuple, dict[tuple, int]] = {source: {}, sink: {}}

    def edge(tail: tuple, head: tuple, weight: int) -> None:
        capacity.setdefault(tail, {})
        capacity.setdefault(head, {})
        capacity[tail][head] = capacity[tail].get(head, 0) + weight
        capacity[head].setdefault(tail, 0)

    for value, args in arguments.items():
        edge((value, "in"), (value, "out"), weights[value])
        if not args:
            edge(source, (value, "in"), _ENDLESS)
        for a in args:
            edge((a, "out"), (value, "in"), _ENDLESS)
    for value in readers:
        edge((value, "out"), sink, _ENDLESS)
    while path := _path(capacity, source, sink):
        least = min(capacity[tail][head] for tail, head in path)
        for tail, head in path:
            capacity[tail][head] -= least
            capacity[head][tail] += least
    reaching = _reaching(capacity, sink)
    return {value for value in arguments if (value, "out") in reaching and (value, "in") not in reaching}


def _path(capacity: dict[tuple, dict[tuple, int]], source: tuple, sink: tuple) -> list[tuple[tuple, tuple]]:
    """The edges of a shortest path with capacity left; empty where there is none."""
    before: dict[tuple, tuple] = {source: source}
    queue = deque([source])
    while queue and sink not in before:
        tail = queue.popleft()
        for head, left in capacity[tail].items():
            if left > 0 and head not in before:
                before[head] = tail
                queue.append(head)
    if sink not in before:
        return []
    path, head = [], sink
    while head != source:
        path.append((before[head], head))
        head = before[head]
    return path


def _reaching(capacity: dict[tuple, dict[tuple, int]], sink: tuple) -> set[tuple]:
    """The nodes from which a path with capacity left leads to the sink."""
    found, queue = {sink}, deque([sink])
    while queue:
        head = queue.popleft()
        for tail in capacity[head]:
            if tail not in found and capacity[tail].get(head, 0) > 0:
                found.add(tail)
                queue.append(tail)
    return found
