"""Alias tables, by which one read draws an edge in proportion to its weight."""

from __future__ import annotations

import numpy as np

_UNIT = 1 << 30  # the integer that stands for one cell
_BLOCK = 1 << 22  # edges whose tables are computed at once


def alias_tables(starts: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Walker's alias tables of groups of edges (Walker, 1977), and the logarithms of the weights.

    A group of n edges has n cells of equal probability. A share of cell i belongs to edge i, and the rest to one other
    edge of the group. A light edge (less than a cell) has the share weight / mean weight of the group. It is stored in
    float32, so it has seven digits however small it is. Running sums would lose all weights below 1e-7 of the group's
    total.

    Args:
        starts: int[groups + 1], where each group's edges begin.
        weights: float64[edges], finite and not negative.

    Returns:
        alias: int32[edges, 2]: the bits of the share as float32, and the other edge, counted from the first edge of the
            group; -1 in groups whose weights are all 0.
        logs: float32[edges]: log(weight / the group's largest weight), -inf for weights of 0.
    """
    alias = np.empty((len(weights), 2), np.int32)
    logs = np.empty(len(weights), np.float32)
    first = 0
    while first < len(starts) - 1:
        last = int(np.searchsorted(starts, starts[first] + _BLOCK, side="right")) - 1
        last = min(max(last, first + 1), len(starts) - 1)
        begin, end = int(starts[first]), int(starts[last])
        if end > begin:
            counts = np.diff(starts[first : last + 1])
            _fill(counts[counts > 0].astype(np.int64), weights[begin:end], alias[begin:end], logs[begin:end])
        first = last
    return alias, logs


def _fill(counts: np.ndarray, weights: np.ndarray, alias: np.ndarray, logs: np.ndarray) -> None:
    """Writes the tables of consecutive groups that all have edges."""
    begins = np.cumsum(counts) - counts
    largest = np.repeat(np.maximum.reduceat(weights, begins), counts)
    with np.errstate(divide="ignore", invalid="ignore", under="ignore"):
        logs[:] = np.where(weights > 0, np.log(weights) - np.log(largest), -np.inf)
        relative = np.where(largest > 0, weights / largest, 1.0)
    # The unit is one cell: the weights of a group sum to its number of edges.
    cells = relative * np.repeat(counts / np.add.reduceat(relative, begins), counts)
    share, other = _handed_out(cells, counts, begins)
    group = np.repeat(begins, counts)
    nothing = largest == 0
    alias[:, 0] = np.where(nothing, 0, share).astype(np.float32).view(np.int32)
    alias[:, 1] = np.where(nothing, -1, other - group)


def _handed_out(cells: np.ndarray, counts: np.ndarray, begins: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each cell's share for its own edge, and the edge that has the rest of the cell.

    Heavy edges (at least one cell) fill the cells of light ones in order. A heavy edge whose surplus is used up becomes
    light, and the next heavy edge fills its cell. Running sums of the light edges' missing parts and of the heavy
    edges' surplus tell which edge fills which cell. They are integers and equal at the end of each group, so one pass
    serves all groups.
    """
    target = np.rint(cells * _UNIT).astype(np.int64)
    position = np.arange(len(cells))
    # A heaviest edge of each group takes the rounding errors of the others.
    is_largest = np.flatnonzero(target == np.repeat(np.maximum.reduceat(target, begins), counts))
    heaviest = is_largest[np.searchsorted(is_largest, begins)]
    target[heaviest] += counts * _UNIT - np.add.reduceat(target, begins)
    light, heavy = np.flatnonzero(target < _UNIT), np.flatnonzero(target >= _UNIT)
    missing, surplus = np.cumsum(_UNIT - target[light]), np.cumsum(target[heavy] - _UNIT)
    share, other = np.ones(len(cells)), position.copy()
    if light.size:
        before = missing - (_UNIT - target[light])
        share[light] = np.minimum(cells[light], 1.0)
        other[light] = heavy[np.searchsorted(surplus, before, side="right")]
        missing = np.concatenate([[0], missing])
        reached = missing[np.searchsorted(missing, surplus, side="left")]
        short = np.flatnonzero(reached > surplus)  # heavy edges whose surplus ends within a cell
        share[heavy[short]] = (_UNIT + surplus[short] - reached[short]) / _UNIT
        other[heavy[short]] = heavy[short + 1]
    return share, other
