"""A baseline without a network: a linear model of an entity's own row, and of how many rows refer to it and since when.

Where few examples are given, or recency tells nearly all, a network on the tables can be worse than that. The report of
a run puts both side by side.
"""

from __future__ import annotations

import numpy as np

from dejax.datasets import HeteroDataset, Task
from dejax.datasets._hetero import ALWAYS
from dejax.datasets.columns import Column
from dejax.training.tables.seed_times import DAY

_WINDOWS = (30, 90, 365)
"""Days before the cutoff within which rows are counted."""
_MOST_CODES = 50
_MOST_EXAMPLES = 50_000  # for training
_PENALTY = 1.0
_ROUNDS = 20


def linear_baseline(data: HeteroDataset, task: Task, wanted: np.ndarray) -> np.ndarray:
    """Predictions of a linear model for some of a task's examples, fitted to the training examples.

    Its inputs are known by the cutoff of each example: the columns of its row (numbers, categories, times), and of
    each relation that leads to the row, how many rows refer to it, in all and within 30, 90 and 365 days, and the time
    since the last one.

    Args:
        data: tables as a graph.
        task: the examples, with binary labels, classes or amounts.
        wanted: int[n], the places of the examples to predict.

    Returns:
        Probabilities of class 1 [n], of each class [n, classes], or amounts [n].
    """
    train = task.splits["train"]
    if len(train) > _MOST_EXAMPLES:
        train = np.random.default_rng(0).choice(train, _MOST_EXAMPLES, replace=False)
    places = np.concatenate([train, wanted])
    inputs = _inputs(data, task, task.rows[places], task.times[places])
    of_train = inputs[: len(train)]
    deviation = of_train.std(0)
    varied = deviation > 1e-9
    inputs = (inputs[:, varied] - of_train.mean(0)[varied]) / deviation[varied]
    inputs = np.concatenate([np.clip(inputs, -10, 10), np.ones((len(inputs), 1))], axis=1)
    given, asked, labels = inputs[: len(train)], inputs[len(train) :], task.labels[train].astype(np.float64)
    if task.kind == "regression":
        return asked @ _amounts(given, labels)
    if task.kind == "binary":
        return _probabilities(asked @ _odds(given, labels))
    classes = max(len(task.classes), int(task.labels.max()) + 1)
    found = np.stack([_probabilities(asked @ _odds(given, (labels == n) * 1.0)) for n in range(classes)], axis=1)
    return found / found.sum(1, keepdims=True)


def _inputs(data: HeteroDataset, task: Task, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
    """float64[n, inputs], of rows of the entity table as of their cutoffs."""
    day = DAY if data.time_unit == "s" else 1
    hidden = {column for table, column in task.hidden if table == task.entity}
    found = [np.zeros((len(rows), 0))]
    for name, column in data.columns.get(task.entity, {}).items():
        if name not in hidden and column.known_at is None:
            found += _of_column(column, rows, cutoffs, day)
    asked = np.zeros(data.num_nodes[task.entity], bool)
    asked[rows] = True
    for relation, (_, receivers) in data.edges.items():
        if relation[2] != task.entity:
            continue
        some = asked[receivers]
        times = data.edge_times.get(relation)
        known = np.full(int(some.sum()), ALWAYS, np.int64) if times is None else times[some]
        found += _of_relation(receivers[some], known, rows, cutoffs, day)
    return np.concatenate(found, axis=1)


def _of_column(column: Column, rows: np.ndarray, cutoffs: np.ndarray, day: int) -> list[np.ndarray]:
    """The inputs from a column of the entity's own row."""
    there = ~column.missing[rows]
    if column.kind == "number":
        values = np.where(there, np.clip(column.values[rows].astype(np.float64), -1e30, 1e30), np.nan)
        center = np.nanmedian(values) if there.any() else 0.0
        values = np.where(there, values, center)
        return [np.stack([values, np.sign(values) * np.log1p(np.abs(values)), ~there], axis=1)]
    if column.kind == "category" and len(column.categories) <= _MOST_CODES:
        return [(column.values[rows, None] == np.arange(len(column.categories))).astype(np.float64)]
    if column.kind == "time":
        gap = np.where(there, (cutoffs - column.values[rows]) / day, 0.0)
        return [np.stack([np.sign(gap) * np.log1p(np.abs(gap)), ~there], axis=1)]
    return []


def _of_relation(
    receivers: np.ndarray, known: np.ndarray, rows: np.ndarray, cutoffs: np.ndarray, day: int
) -> list[np.ndarray]:
    """The inputs from the edges of one relation: counts by time, and the time since the last edge."""
    order = np.lexsort((known, receivers))
    receivers, known = receivers[order], known[order]
    first = np.searchsorted(receivers, rows)

    def before(times: np.ndarray) -> np.ndarray:
        """For each example the number of its edges up to a time."""
        owner, when = np.concatenate([receivers, rows]), np.concatenate([known, times])
        asks = np.concatenate([np.zeros(len(receivers), bool), np.ones(len(rows), bool)])
        sorted_places = np.lexsort((asks, when, owner))
        passed = np.empty(len(owner), np.int64)
        passed[sorted_places] = np.cumsum(~asks[sorted_places])
        counted: np.ndarray = passed[len(receivers) :] - first
        return counted

    count = before(cutoffs)
    inputs = [np.log1p(count), count > 0]
    if len(known) and known[-1] != ALWAYS:
        last = known[np.maximum(first + count - 1, 0)]
        timed = (count > 0) & (last != ALWAYS)
        gap = np.log1p(np.where(timed, cutoffs - np.where(timed, last, cutoffs), 0) / day)
        inputs += [np.where(timed, gap, gap.max(initial=0.0)), timed]
        inputs += [np.log1p(count - before(cutoffs - days * day)) for days in _WINDOWS]
    return [np.stack(inputs, axis=1).astype(np.float64)]


def _solved(inputs: np.ndarray, weights: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Least squares with weights and a small penalty, which leaves the last input, a constant, alone."""
    penalty = np.full(inputs.shape[1], _PENALTY)
    penalty[-1] = 1e-9
    weighted = inputs * weights[:, None]
    found: np.ndarray = np.linalg.solve(inputs.T @ weighted + np.diag(penalty), weighted.T @ wanted)
    return found


def _odds(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The coefficients of a logistic regression, by Newton's method."""
    found = np.zeros(inputs.shape[1])
    for _ in range(_ROUNDS):
        odds = np.clip(inputs @ found, -15, 15)
        share = _probabilities(odds)
        slope = np.maximum(share * (1 - share), 1e-6)
        found = _solved(inputs, slope, odds + (labels - share) / slope)
    return found


def _amounts(inputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The coefficients of a regression by Huber's loss in deviations of the labels, as the network's."""
    scale, weights = float(labels.std()) or 1.0, np.ones(len(labels))
    for _ in range(_ROUNDS):
        found = _solved(inputs, weights, labels)
        weights = 1 / np.maximum(np.abs(inputs @ found - labels) / scale, 1.0)
    return found


def _probabilities(odds: np.ndarray) -> np.ndarray:
    found: np.ndarray = 1.0 / (1.0 + np.exp(-np.clip(odds, -700, 700)))
    return found
