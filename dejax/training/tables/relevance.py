"""Which numbers of histories a network reads: the counts, and of columns those that are sure to tell more.

Means and sums of columns are many numbers. A network with a thousand examples fits thirty of them by chance, where five
counts decide; with a hundred thousand it does not. So each must show by the training examples that it tells what the
counts and the row itself do not, more surely than the surest of as many random numbers would. What it tells must not be
the date: later dates lie where no training example was.
"""

from __future__ import annotations

from statistics import NormalDist

import numpy as np

from dejax.datasets import HeteroDataset, Task
from dejax.training.tables.history import RowHistory, differing
from dejax.training.tables.linear import inputs_of, scores_beside, unexplained

_CHANCE = 0.05
"""The chance that any number is kept where none tells more."""
_PERIODS = 20
_MOST_BY_TIME = 0.1
"""The share, between periods of cutoffs, of the variance of what a number tells besides counts, from which on it mostly
tells the date, as the number of all rows so far of an airport does."""


def relevant(
    history: RowHistory, data: HeteroDataset, task: Task, places: np.ndarray, numbers: np.ndarray
) -> np.ndarray:
    """bool[numbers], which numbers of a history to read.

    Args:
        history: the history of the entity's rows.
        data: tables as a graph.
        task: the examples, with binary labels, classes or amounts.
        places: int[n], training examples.
        numbers: float[n, numbers], their history.
    """
    counts, found = history.are_counts, history.are_counts.copy()
    asked = np.flatnonzero(differing(numbers) & ~counts)
    if not len(asked):
        return found
    ranks, own = _ranks(numbers[:, asked]), _ranks(numbers[:, counts])
    inputs = inputs_of(data, task, places, np.concatenate([numbers[:, counts], own, own**2], axis=1))
    period = _periods(task.times[places])
    timeless = _told_by_time(unexplained(inputs, ranks), period) < _MOST_BY_TIME
    asked, ranks = asked[timeless], ranks[:, timeless]
    of_periods = (period[:, None] == np.arange(1, period.max() + 1)) * 1.0
    scores = np.abs(scores_beside(task, places, np.concatenate([of_periods, inputs], axis=1), ranks))
    bound = NormalDist().inv_cdf(1 - _CHANCE / 2 / max(1, scores.size))
    found[asked[(scores > bound).any(0)]] = True
    return found


def _ranks(numbers: np.ndarray) -> np.ndarray:
    """float64[n, numbers], ranks about their mean in deviations, equal ones in the middle; 0 where unknown."""
    found = np.zeros(numbers.shape)
    for own, number in zip(found.T, numbers.T, strict=True):
        there = ~np.isnan(number)
        if there.any():
            _, place, count = np.unique(number[there], return_inverse=True, return_counts=True)
            rank = (np.cumsum(count) - (count + 1) / 2)[place]
            own[there] = (rank - rank.mean()) / (rank.std() or 1.0)
    return found


def _periods(times: np.ndarray) -> np.ndarray:
    """int[n], in which of some periods with about as many examples each a cutoff is, from 0 on, none being empty."""
    most = max(1, min(_PERIODS, len(times) // 50))
    ends = np.unique(np.quantile(times, np.linspace(0, 1, most + 1))[1:-1])
    found: np.ndarray = np.unique(np.searchsorted(ends, times, side="right"), return_inverse=True)[1]
    return found


def _told_by_time(numbers: np.ndarray, period: np.ndarray) -> np.ndarray:
    """The share of the variance of numbers that lies between periods, less what chance puts there."""
    sizes = np.bincount(period)
    numbers = numbers - numbers.mean(0)
    between = sum(numbers[period == n].sum(0) ** 2 / size for n, size in enumerate(sizes.tolist()))
    share = between / np.maximum((numbers**2).sum(0), 1e-9)
    found: np.ndarray = share - (len(sizes) - 1) * (1 - share) / max(1, len(numbers) - len(sizes))
    return found
