"""The rounds of a halo exchange: which device sends how many rows to which, in collectives of static sizes.

Every device runs one program, so a collective has one size for all. A round is one `ppermute` between some pairs of
devices, all of which send the same number of rows. Device p sends to device p + k in the rounds of shift k. With one
round for each shift, every pair sends as many rows as the largest pair of its shift; where that is too much padding,
a shift gets further rounds, in which only pairs with more rows take part.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np

SLACK = 1.03
"""Rows sent, padding included, over rows needed: at most this, while each round still saves something."""


@dataclass(frozen=True, slots=True)
class Round:
    """One `ppermute`.

    Attributes:
        pairs: (sender, receiver), each device at most once on either side.
        rows: rows that each pair sends.
        start: the first halo slot of the round; the slots of all rounds follow each other.
    """

    pairs: tuple[tuple[int, int], ...]
    rows: int
    start: int

    @property
    def rows_sent(self) -> int:
        """Rows that cross a link, padding included."""
        return len(self.pairs) * self.rows


def plan_rounds(rows: np.ndarray, slack: float = SLACK) -> tuple[Round, ...]:
    """As few rounds as keep the rows sent, padding included, within `slack` of the rows needed.

    Args:
        rows: int[parts, parts], the rows that part p needs to send to part q; the diagonal is not read.
        slack: at least 1. With 1 no row is padding.

    >>> plan_rounds(np.array([[0, 3], [2, 0]]), slack=2.0)
    (Round(pairs=((0, 1), (1, 0)), rows=3, start=0),)
    """
    parts = rows.shape[0]
    needed = {
        shift: np.array([rows[p, (p + shift) % parts] for p in range(parts)], np.int64) for shift in range(1, parts)
    }
    levels = {shift: [int(some.max())] for shift, some in needed.items() if some.max(initial=0) > 0}
    least = sum(int(some.sum()) for some in needed.values())
    sent = {shift: _sent(needed[shift], some) for shift, some in levels.items()}
    while sum(sent.values()) > slack * least:
        savings = {
            (shift, int(value)): sent[shift] - _sent(needed[shift], [*some, int(value)])
            for shift, some in levels.items()
            for value in np.unique(needed[shift])
            if value > 0 and value not in some
        }
        if not savings:
            break
        shift, value = max(savings, key=lambda key: savings[key])
        levels[shift].append(value)
        sent[shift] = _sent(needed[shift], levels[shift])
    rounds, start = [], 0
    for shift, some in levels.items():
        below = 0
        for level in sorted(some):
            pairs = tuple((p, (p + shift) % parts) for p in range(parts) if needed[shift][p] > below)
            rounds.append(Round(pairs, level - below, start))
            start, below = start + level - below, level
    return tuple(rounds)


def _sent(needed: np.ndarray, levels: list[int]) -> int:
    """Rows that the pairs of a shift send in rounds up to each of the levels."""
    bounds = np.unique([0, *levels])
    return int(sum((needed > low).sum() * (high - low) for low, high in itertools.pairwise(bounds)))


def slots_of_pair(rounds: tuple[Round, ...], sender: int, receiver: int) -> np.ndarray:
    """The halo slots through which a pair sends its rows, in order; int64[slots]."""
    found = [np.arange(r.start, r.start + r.rows) for r in rounds if (sender, receiver) in r.pairs]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def num_slots(rounds: tuple[Round, ...]) -> int:
    """Halo slots of a device."""
    return sum(r.rows for r in rounds)
