"""A linear model of each example's own row and its history: the baseline beside the network in the report of a run.

Where few examples are given, or recency tells nearly all, it is hard to beat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from dejax.datasets import HeteroDataset, Task
from dejax.datasets.columns import Column
from dejax.training.tables.history import as_column, day_of

MOST_FITTED = 50_000
"""Training examples to which histories and linear models are fitted, and test examples of the latter: the quantiles and
some hundred coefficients of so many are known better than they need be, and the fit takes a second."""
_MOST_CODES = 50
_PENALTY = 1.0
_ROUNDS = 20


def linear_baseline(
    data: HeteroDataset, task: Task, wanted: np.ndarray, numbers: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> np.ndarray:
    """Predictions of a linear model for some of a task's examples, fitted to the training examples.

    Its inputs are known by the cutoff of each example: the columns of its row (numbers, categories, times), and the
    row's history.

    Args:
        data: tables as a graph.
        task: the examples, with binary labels, classes or amounts.
        wanted: int[n], the places of the examples to predict.
        numbers: gives the history of rows at cutoffs in the unit of `data`, float[rows, numbers], NaN where unknown.

    Returns:
        Probabilities of class 1 [n], of each class [n, classes], or amounts [n].
    """
    train = task.splits["train"]
    if len(train) > MOST_FITTED:
        train = np.random.default_rng(0).choice(train, MOST_FITTED, replace=False)
    places = np.concatenate([train, wanted])
    inputs = _inputs(data, task, places, numbers(task.rows[places], task.times[places]))
    inputs = _scaled(inputs, inputs[: len(train)])
    given, asked, labels = inputs[: len(train)], inputs[len(train) :], task.labels[train].astype(np.float64)
    if task.kind == "regression":
        return asked @ _amounts(given, labels)
    if task.kind == "binary":
        return _probabilities(asked @ _odds(given, labels))
    classes = max(len(task.classes), int(task.labels.max()) + 1)
    found = np.stack([_probabilities(asked @ _odds(given, (labels == n) * 1.0)) for n in range(classes)], axis=1)
    return found / found.sum(1, keepdims=True)


def inputs_of(data: HeteroDataset, task: Task, places: np.ndarray, history: np.ndarray) -> np.ndarray:
    """float64[n, inputs], those of the linear model of some training examples, and a constant.

    Args:
        data: tables as a graph.
        task: the examples.
        places: int[n], training examples.
        history: float[n, numbers], their history, NaN where unknown.
    """
    inputs = _inputs(data, task, places, history)
    return _scaled(inputs, inputs)


def unexplained(inputs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """What inputs do not tell about numbers, float64[n, numbers], by least squares."""
    found: np.ndarray = numbers - inputs @ _solved(inputs, np.ones(len(inputs)), numbers)
    return found


def scores_beside(task: Task, places: np.ndarray, inputs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """How surely each of some numbers tells about labels what a linear model of inputs does not, in deviations.

    This is Rao's score test of a number beside the model's inputs. Examples of one entity count as one observation, so
    that labels of the same customer at several cutoffs do not make a number seem surer than it is.

    Args:
        task: the examples, with binary labels, classes or amounts.
        places: int[n], training examples.
        inputs: float[n, inputs], of which the last is a constant.
        numbers: float[n, numbers].

    Returns:
        float64[outputs, numbers], from a standard normal distribution where a number tells nothing; of several classes
        a row for each class.
    """
    _, entity = np.unique(task.rows[places], return_inverse=True)
    found = []
    for error, weight in _errors(task, inputs, task.labels[places].astype(np.float64)):
        of_entities = np.zeros((entity.max(initial=-1) + 1, numbers.shape[1]))
        np.add.at(of_entities, entity, (numbers - inputs @ _solved(inputs, weight, numbers)) * error[:, None])
        found.append(of_entities.sum(0) / np.maximum(np.sqrt((of_entities**2).sum(0)), 1e-9))
    return np.array(found)


def _errors(task: Task, inputs: np.ndarray, labels: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """By output the errors of a linear model, as the gradient of its loss, and how much each example weighs in it."""
    if task.kind == "regression":
        error = (labels - inputs @ _amounts(inputs, labels)) / (float(labels.std()) or 1.0)
        yield np.clip(error, -1.0, 1.0), np.where(np.abs(error) < 1.0, 1.0, 1e-3)
        return
    for label in [1] if task.kind == "binary" else range(int(labels.max()) + 1):
        own = (labels == label) * 1.0
        share = _probabilities(inputs @ _odds(inputs, own))
        yield own - share, np.maximum(share * (1 - share), 1e-6)


def _inputs(data: HeteroDataset, task: Task, places: np.ndarray, history: np.ndarray) -> np.ndarray:
    """float64[n, inputs], of the rows of examples as of their cutoffs, and of their history, float[n, numbers]."""
    day, rows, cutoffs = day_of(data), task.rows[places], task.times[places]
    hidden = {column for table, column in task.hidden if table == task.entity}
    found = [np.zeros((len(rows), 0))]
    for name, column in data.columns.get(task.entity, {}).items():
        if name not in hidden and column.known_at is None:
            found += _of_column(column, rows, cutoffs, day)
    for number in history.T:
        found += _of_column(as_column(number), np.arange(len(rows)), cutoffs, day)
    return np.concatenate(found, axis=1)


def _scaled(inputs: np.ndarray, of_train: np.ndarray) -> np.ndarray:
    """The inputs that differ in training, in deviations, and a constant."""
    deviation = of_train.std(0)
    varied = deviation > 1e-9
    scaled = (inputs[:, varied] - of_train.mean(0)[varied]) / deviation[varied]
    return np.concatenate([np.clip(scaled, -10, 10), np.ones((len(inputs), 1))], axis=1)


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
        before, found = found, _solved(inputs, slope, odds + (labels - share) / slope)
        if np.abs(found - before).max() < 1e-9:
            break
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
