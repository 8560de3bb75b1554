"""A linear model of each example's own row and of its history: the model from which a network of tables starts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from dejax.datasets import HeteroDataset, Task
from dejax.datasets.columns import Column
from dejax.training.tables.history import day_of
from dejax.training.tables.rows import TablePlan

_MOST_CODES = 50  # categories of a column, of which each is an input
_MOST_CROSSED = 10_000  # training examples: with more, the model fits them no better than others
_PARTS = 5
_PENALTIES = (1.0, 10.0, 100.0, 1000.0, 10000.0) if os.environ.get('LIN_FORWARD', '0') == '1' else (1.0, 10.0, 100.0, 1000.0)
_ROUNDS = 20
_FAR = 10.0  # in deviations


@dataclass(frozen=True, slots=True)
class LinearModel:
    """A linear model of numbers, categories and times of the entity's row, and of numbers that tell its history.

    Its outputs are those of a network: of two classes the log odds of class 1, of several the log of each probability,
    of amounts what the labels were given as.

    Attributes:
        table: the entity table.
        columns: its columns that are inputs, each with the number of categories that training rows have.
        day: the length of a day in the unit of the times.
        centers: of each input before scaling, what stands for a missing one.
        kept: the inputs that differ among training examples.
        mean, deviation: those of the inputs that are kept, float64[inputs].
        coefficients: float64[inputs + 1, outputs], of the inputs and of a constant.
        kind: as `Task.kind`.
    """

    table: str
    columns: tuple[tuple[str, int], ...]
    day: int
    kind: str
    centers: np.ndarray
    kept: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    coefficients: np.ndarray

    @property
    def outputs(self) -> int:
        """The number of outputs."""
        return self.coefficients.shape[1]

    @classmethod
    def fitted(
        cls,
        data: HeteroDataset,
        task: Task,
        plan: TablePlan,
        places: np.ndarray,
        numbers: np.ndarray,
        labels: np.ndarray,
        weights: np.ndarray | None = None,
    ) -> tuple[LinearModel, np.ndarray | None]:
        """Fits a model to training examples.

        The penalty on its squared coefficients is the one with the least loss in examples of entities that a fit has
        not seen, each fifth of the entities in turn.

        Args:
            data: tables as a graph.
            task: the examples, with binary labels, classes or amounts.
            plan: the packed columns of the entity table: others are hidden.
            places: int[n], the training examples.
            numbers: float[n, numbers], their history.
            labels: float[n] of amounts, in deviations, or int[n].
            weights: float[n] of the examples.

        Returns:
            The model, and where examples are so few that it fits them better than others, the outputs of the training
            examples by models that were fitted without the examples of the same entities, float[n, outputs].
        """
        outputs = 1 if task.kind != "classes" else max(len(task.classes), int(task.labels.max()) + 1)
        own = tuple((place.name, place.codes) for place in plan.columns if place.known is None)
        first = task.entity, own, day_of(data), task.kind
        inputs = list(cls(*first, *[np.zeros(0)] * 5)._inputs(data, task.rows[places], task.times[places], numbers))
        centers = np.array([np.median(x[there]) if there.any() else 0.0 for x, there in inputs])
        whole = _filled(inputs, centers, len(places))
        deviation = whole.std(0)
        kept = np.flatnonzero(deviation > 1e-9)
        mean, deviation = whole.mean(0)[kept], deviation[kept]
        x = _scaled(whole, kept, mean, deviation)
        weights = np.ones(len(x)) if weights is None else weights
        part = np.random.default_rng(0).permutation(int(task.rows.max()) + 1)[task.rows[places]] % _PARTS
        few = len(x) <= _MOST_CROSSED
        some = np.arange(len(x)) if few else np.random.default_rng(0).permutation(len(x))[:_MOST_CROSSED]
        losses, crossed = [], []
        for penalty in _PENALTIES:
            found = np.zeros((len(some), outputs))
            for number in range(_PARTS):
                own, other = part[some] == number, part[some] != number
                if own.any() and other.any():
                    b = _solution(
                        task.kind, x[some][other], labels[some][other], weights[some][other], penalty, outputs
                    )
                    found[own] = _outputs(task.kind, x[some][own], b)
            losses.append((weights[some] * _losses(task.kind, found, labels[some])).sum())
            crossed.append(found)
        if os.environ.get("LIN_FORWARD", "0") == "1":
            when = task.times[places][some]
            ends = np.unique(np.quantile(when, [0.4, 0.55, 0.7, 0.85]))
            block = np.searchsorted(ends, when, side="left")
            losses = []
            for penalty in _PENALTIES:
                loss = 0.0
                for k in range(1, len(ends) + 1):
                    before, own = block < k, block >= k
                    if before.any() and own.any():
                        b = _solution(task.kind, x[some][before], labels[some][before], weights[some][before], penalty, outputs)
                        loss += (weights[some][own] * _losses(task.kind, _outputs(task.kind, x[some][own], b), labels[some][own])).mean()
                losses.append(loss)
        best = int(np.argmin(losses))
        coefficients = _solution(task.kind, x, labels, weights, _PENALTIES[best], outputs)
        model = cls(*first, centers, kept, mean, deviation, coefficients)
        return model, crossed[best] if few else None

    def __call__(self, data: HeteroDataset, rows: np.ndarray, cutoffs: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        """The outputs for rows as of cutoffs, float64[rows, outputs].

        Args:
            data: tables as a graph.
            rows: int[rows] of the entity table.
            cutoffs: int[rows], in the unit of the data's times.
            numbers: float[rows, numbers], their history.
        """
        whole = _filled(self._inputs(data, rows, cutoffs, numbers), self.centers, len(rows))
        return _outputs(self.kind, _scaled(whole, self.kept, self.mean, self.deviation), self.coefficients)

    def _inputs(
        self, data: HeteroDataset, rows: np.ndarray, cutoffs: np.ndarray, numbers: np.ndarray
    ) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Each input, and where it is there."""
        for name, codes in self.columns:
            yield from _of_column(data.columns[self.table][name], codes, rows, cutoffs, self.day)
        for number in numbers.T:
            there = np.isfinite(number)
            yield np.where(there, number, 0.0), there
            yield ~there, np.full(len(rows), True)


def _of_column(
    column: Column, codes: int, rows: np.ndarray, cutoffs: np.ndarray, day: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """The inputs from a column of the entity's own row, and where each is there."""
    there, always = ~column.missing[rows], np.full(len(rows), True)
    if column.kind == "number":
        values = np.where(there, np.clip(column.values[rows].astype(np.float64), -1e30, 1e30), 0.0)
        yield values, there
        yield np.sign(values) * np.log1p(np.abs(values)), there
        yield ~there, always
    elif column.kind == "category" and codes <= _MOST_CODES:
        for code in range(codes):
            yield column.values[rows] == code, always
    elif column.kind == "time":
        gap = np.where(there, (cutoffs - column.values[rows]) / day, 0.0)
        yield np.sign(gap) * np.log1p(np.abs(gap)), always
        yield ~there, always


def _filled(inputs: Iterable[tuple[np.ndarray, np.ndarray]], centers: np.ndarray, rows: int) -> np.ndarray:
    """float64[rows, inputs], with the centers where an input is missing."""
    found = np.empty((rows, len(centers)))
    for number, (x, there) in enumerate(inputs):
        found[:, number] = np.where(there, x, centers[number])
    return found


def _scaled(whole: np.ndarray, kept: np.ndarray, mean: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """The inputs that are kept, in deviations, and a constant."""
    x = np.clip((whole[:, kept] - mean) / deviation, -_FAR, _FAR)
    return np.concatenate([x, np.ones((len(x), 1))], axis=1)


def _outputs(kind: str, x: np.ndarray, coefficients: np.ndarray) -> np.ndarray:
    raw: np.ndarray = x @ coefficients
    if kind == "regression":
        return raw
    if kind == "binary":
        return np.clip(raw, -_FAR, _FAR)
    logs = -np.logaddexp(0.0, -np.clip(raw, -_FAR, _FAR))  # of one class against all others
    found: np.ndarray = logs - np.logaddexp.reduce(logs, axis=1, keepdims=True)
    return found


def _losses(kind: str, outputs: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The loss of each example, as a network's."""
    found: np.ndarray
    if kind == "regression":
        error = np.abs(outputs[:, 0] - labels)
        found = np.where(error < 1.0, error**2 / 2, error - 0.5)
    elif kind == "binary":
        found = np.logaddexp(0.0, np.where(labels == 1, -outputs[:, 0], outputs[:, 0]))
    else:
        found = -outputs[np.arange(len(labels)), labels.astype(np.int64)]
    return found


def _solution(
    kind: str, x: np.ndarray, labels: np.ndarray, weights: np.ndarray, penalty: float, outputs: int
) -> np.ndarray:
    """float64[inputs, outputs]: of each class against all others, or of amounts."""
    if kind == "regression":
        return _amounts(x, labels, weights, penalty)[:, None]
    wanted = [1] if kind == "binary" else range(outputs)
    return np.stack([_odds(x, (labels == n) * 1.0, weights, penalty) for n in wanted], axis=1)


def _solved(x: np.ndarray, weights: np.ndarray, wanted: np.ndarray, penalty: float) -> np.ndarray:
    """Least squares with weights and a penalty, which leaves the last input, a constant, alone."""
    penalties = np.full(x.shape[1], penalty)
    penalties[-1] = 1e-9
    weighted = x * weights[:, None]
    found: np.ndarray = np.linalg.solve(x.T @ weighted + np.diag(penalties), weighted.T @ wanted)
    return found


def _odds(x: np.ndarray, labels: np.ndarray, weights: np.ndarray, penalty: float) -> np.ndarray:
    """The coefficients of a logistic regression, by Newton's method."""
    found = np.zeros(x.shape[1])
    for _ in range(_ROUNDS):
        odds = np.clip(x @ found, -15, 15)
        share = 1.0 / (1.0 + np.exp(-odds))
        slope = np.maximum(share * (1 - share), 1e-6)
        before, found = found, _solved(x, weights * slope, odds + (labels - share) / slope, penalty)
        if np.abs(found - before).max() < 1e-4:
            break
    return found


def _amounts(x: np.ndarray, labels: np.ndarray, weights: np.ndarray, penalty: float) -> np.ndarray:
    """The coefficients of a regression by Huber's loss in deviations of the labels, as the network's."""
    found, each = np.zeros(x.shape[1]), weights
    for _ in range(_ROUNDS):
        before, found = found, _solved(x, each, labels, penalty)
        each = weights / np.maximum(np.abs(x @ found - labels), 1.0)
        if np.abs(found - before).max() < 1e-4:
            break
    return found
