"""The history of rows as of cutoffs: how many rows refer to each, and since when. A network's seeds have it as columns.

A linear model of that and of an entity's own row is the baseline beside the network in the report of a run: where few
examples are given, or recency tells nearly all, it is hard to beat.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import HeteroDataset, Task
from dejax.datasets.columns import Column
from dejax.minibatch import HeteroTopology
from dejax.minibatch.sampling.past import past_edges
from dejax.training.tables.rows import TablePlan, pack
from dejax.training.tables.seed_times import DAY, is_latest

_WINDOWS = (30, 90, 365)
"""Days before the cutoff within which rows are counted."""
_MOST_CODES = 50
_MOST_EXAMPLES = 50_000  # for training
_PART = 1 << 14  # rows of a call
_PENALTY = 1.0
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class RowHistory:
    """Numbers that tell the history of a table's rows as of cutoffs, from the edges that lead to them.

    Of each relation: log(1 + its known edges), in all and of the last 30, 90 and 365 days, and log(1 + days) since the
    last one. They are counted in the edge lists that samples are drawn from, up to the same cutoffs, so nothing later
    enters.

    Attributes:
        relations: the places of the relations in the topology.
        timed: of which of them the edges have times; of the others there is one number.
        day: the length of a day in the times' unit.
        names: what each number says.
        kept: the numbers that differ among training examples, which a network reads.
        plan: their columns in packed rows.
    """

    relations: tuple[int, ...]
    timed: tuple[bool, ...]
    day: int
    names: tuple[str, ...]
    kept: tuple[int, ...] = ()
    plan: TablePlan = dataclasses.field(default_factory=lambda: TablePlan((), 0, 0))

    @classmethod
    def of(cls, data: HeteroDataset, topology: HeteroTopology, table: str) -> RowHistory:
        """That of a table's rows, from the relations to it but those of its own foreign keys, which come with a row."""
        relations, timed, names = [], [], []
        for place, relation in enumerate(topology.relations):
            edge_type = relation.edge_type
            source, name, target = edge_type
            own_key = (target, name.removeprefix("rev_"), source) in data.edges and name.startswith("rev_")
            if target != table or not relation.num_edges or is_latest(edge_type) or own_key:
                continue
            relations.append(place)
            timed.append(edge_type in data.edge_times)
            more = ("days since the last", *(f"of the last {days} days" for days in _WINDOWS)) if timed[-1] else ()
            names += [f"{', '.join(edge_type)}: {what}" for what in ("rows", *more)]
        return cls(tuple(relations), tuple(timed), _day_of(data), tuple(names))

    def fitted(self, numbers: np.ndarray, bins: int) -> RowHistory:
        """With the columns of packed rows, by the numbers of some training examples, float[examples, numbers]."""
        differ = [len(own) and not np.array_equal(own, np.full_like(own, own[0]), equal_nan=True) for own in numbers.T]
        kept = tuple(np.flatnonzero(differ).tolist())
        columns = {self.names[n]: _column(numbers[:, n]) for n in kept}
        return dataclasses.replace(self, kept=kept, plan=pack(columns, None, None, bins=bins)[1])

    def numbers(self, topology: HeteroTopology, rows: Array, cutoffs: Array) -> Array:
        """float32[rows, numbers]; NaN for the days since the last edge where there is none.

        Args:
            topology: the edges.
            rows: int32[rows] of the table, -1 for padding.
            cutoffs: int32[rows], as the topology's clock counts.
        """
        if not self.relations:
            return jnp.zeros((rows.shape[0], 0), jnp.float32)
        always = jnp.iinfo(jnp.int32).min
        limits = [cutoffs]
        for days in _WINDOWS:
            window = days * self.day
            limits.append(jnp.where(cutoffs < always + window, always, cutoffs - window))
        counts, last = past_edges(topology, self.relations, rows, jnp.stack(limits))
        found = []
        for count, when, timed in zip(counts, last, self.timed, strict=True):
            found.append(jnp.log1p(count[0].astype(jnp.float32)))
            if timed:
                gap = (cutoffs - when).astype(jnp.uint32).astype(jnp.float32) / self.day  # up to 136 years of seconds
                found.append(jnp.where(when > always, jnp.log1p(gap), jnp.nan))
                found += list(jnp.log1p((count[0] - count[1:]).astype(jnp.float32)))
        return jnp.stack(found, axis=1)

    def packed(self, topology: HeteroTopology, rows: Array, cutoffs: Array) -> Array:
        """The numbers that are kept as packed rows of `plan`, float32[rows, width]; arguments as `numbers`."""
        numbers = self.numbers(topology, rows, cutoffs)[:, np.array(self.kept, np.int32)]
        mean, deviation = (
            np.array([getattr(place, name)[0] for place in self.plan.columns], np.float32)
            for name in ("mean", "deviation")
        )
        return (numbers - mean) / deviation

    def numbers_of(self, topology: HeteroTopology, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """`numbers` of any number of rows, in calls of one size."""
        found = [np.zeros((0, len(self.names)), np.float32)]
        for at in range(0, len(rows), _PART):
            some = slice(at, at + _PART)
            missing = _PART - len(rows[some])
            given = np.pad(rows[some], (0, missing), constant_values=-1), np.pad(cutoffs[some], (0, missing))
            found.append(np.asarray(_numbers(self, topology, *given))[: len(rows[some])])
        return np.concatenate(found)


def _day_of(data: HeteroDataset) -> int:
    """The length of a day in the unit of the times."""
    return DAY if data.time_unit == "s" else 1


@functools.partial(jax.jit, static_argnums=0)
def _numbers(history: RowHistory, topology: HeteroTopology, rows: Array, cutoffs: Array) -> Array:
    return history.numbers(topology, rows, cutoffs)


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
        numbers: gives the history of rows at cutoffs, as `RowHistory.numbers_of`, but cutoffs in the unit of `data`.

    Returns:
        Probabilities of class 1 [n], of each class [n, classes], or amounts [n].
    """
    train = task.splits["train"]
    if len(train) > _MOST_EXAMPLES:
        train = np.random.default_rng(0).choice(train, _MOST_EXAMPLES, replace=False)
    places = np.concatenate([train, wanted])
    inputs = _inputs(data, task, task.rows[places], task.times[places], numbers)
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


def _inputs(
    data: HeteroDataset,
    task: Task,
    rows: np.ndarray,
    cutoffs: np.ndarray,
    numbers: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> np.ndarray:
    """float64[n, inputs], of rows of the entity table as of their cutoffs."""
    day = _day_of(data)
    hidden = {column for table, column in task.hidden if table == task.entity}
    found = [np.zeros((len(rows), 0))]
    for name, column in data.columns.get(task.entity, {}).items():
        if name not in hidden and column.known_at is None:
            found += _of_column(column, rows, cutoffs, day)
    for number in numbers(rows, cutoffs).T:
        found += _of_column(_column(number), np.arange(len(rows)), cutoffs, day)
    return np.concatenate(found, axis=1)


def _column(number: np.ndarray) -> Column:
    return Column("number", number.astype(np.float64), np.isnan(number))


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
