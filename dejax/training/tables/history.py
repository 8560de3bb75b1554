"""The history of rows as of cutoffs: how many rows refer to each, and since when. A network's seeds have it as columns.

It is counted on the host, once for all examples of a task, so that steps do not search edge lists for it. A linear
model of that and of an entity's own row is the baseline beside the network in the report of a run: where few examples
are given, or recency tells nearly all, it is hard to beat.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import HeteroDataset, Task
from dejax.datasets.columns import Column
from dejax.datasets.files._work import for_blocks
from dejax.minibatch import HeteroTopology
from dejax.minibatch.topology.hetero_topology import as_numpy
from dejax.training.tables.rows import TablePlan, pack
from dejax.training.tables.seed_times import DAY, is_latest

_WINDOWS = (30, 90, 365)
"""Days before the cutoff within which rows are counted."""
MOST_FITTED = 50_000
"""Training examples to which histories and linear models are fitted, and test examples of the latter: the quantiles and
some hundred coefficients of so many are known better than they need be, and the fit takes a second."""
_MOST_CODES = 50
_PART = 1 << 14  # rows of a call, and of a thread
_ALWAYS = np.iinfo(np.int32).min
_PENALTY = 1.0
_ROUNDS = 20


@dataclass(frozen=True, slots=True)
class RowHistory:
    """Numbers that tell the history of a table's rows as of cutoffs, from the edges that lead to them.

    Of each relation: log(1 + its known edges), in all and of the last 30, 90 and 365 days, and log(1 + days) since the
    last one. `HistoryReader` counts in the edge lists that samples are drawn from, up to the same cutoffs, so nothing
    later enters.

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

    def with_plan(self, plan: TablePlan) -> RowHistory:
        """With the columns of packed rows that a run has.

        Raises:
            ValueError: a number of the run is not among the history's, as of a relation without edges.
        """
        for place in plan.columns:
            if place.name not in self.names:
                raise ValueError(
                    f"relations must be those that the model was trained on, got none for the history {place.name!r}; "
                    "train again, or undo the change"
                )
        return dataclasses.replace(self, kept=tuple(self.names.index(place.name) for place in plan.columns), plan=plan)

    def numbers(self, counts: Array, cutoffs: Array) -> Array:
        """float32[rows, numbers] of the edges of some rows; NaN for the days since the last edge where there is none.

        Args:
            counts: int32[rows, relations, counts], of `HistoryReader.counts`.
            cutoffs: int32[rows], as the topology's clock counts.
        """
        found = []
        for number, timed in enumerate(self.timed):
            known, *before, last = counts[:, number].T
            found.append(jnp.log1p(known.astype(jnp.float32)))
            if timed:
                gap = (cutoffs - last).astype(jnp.uint32).astype(jnp.float32) / self.day  # up to 136 years of seconds
                found.append(jnp.where(last > _ALWAYS, jnp.log1p(gap), jnp.nan))
                found += [jnp.log1p((known - earlier).astype(jnp.float32)) for earlier in before]
        return jnp.stack(found, axis=1)

    def packed(self, counts: Array, cutoffs: Array) -> Array:
        """The numbers that are kept as packed rows of `plan`, float32[rows, width]; arguments as `numbers`."""
        numbers = self.numbers(counts, cutoffs)[:, np.array(self.kept, np.int32)]
        mean, deviation = (
            np.array([getattr(place, name)[0] for place in self.plan.columns], np.float32)
            for name in ("mean", "deviation")
        )
        return (numbers - mean) / deviation


_numbers = jax.jit(RowHistory.numbers, static_argnums=0)


class HistoryReader:
    """Counts the edges of which a `RowHistory` tells, for any number of rows, where the edges lie in host memory.

    Args:
        history: which numbers.
        topology: the edges, of `topology_in_time`.

    >>> from dejax.datasets import from_tables
    >>> from dejax.training.tables.seed_times import Clock, topology_in_time
    >>> orders = {"user": [7, 8, 7], "day": [1, 2, 6]}
    >>> data = from_tables({"users": {"id": [7, 8]}, "orders": orders}, {"users": "id"}, [("orders", "user", "users")],
    ...                    {"orders": "day"})
    >>> topology = topology_in_time(data, Clock(), latest=False, on_host=True)
    >>> read = HistoryReader(RowHistory.of(data, topology, "users"), topology)
    >>> np.expm1(read.numbers(np.array([0, 0, 1]), np.array([5, 6, 6]))[:, :2]).round()  # rows, days since the last
    array([[1., 4.],
           [2., 0.],
           [1., 4.]], dtype=float32)
    """

    def __init__(self, history: RowHistory, topology: HeteroTopology) -> None:
        self.history = history
        self._edges = [_EdgesByTime.of(topology, place) for place in history.relations]

    def fitted(self, rows: np.ndarray, cutoffs: np.ndarray, bins: int) -> HistoryReader:
        """With the columns of packed rows, by the numbers of some training examples; arguments as `numbers`."""
        found = copy.copy(self)
        found.history = self.history.fitted(self.numbers(rows, cutoffs), bins)
        return found

    def numbers(self, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """float32[rows, numbers], as `RowHistory.numbers`; arguments as `counts`."""
        counts, found = self.counts(rows, cutoffs), np.zeros((len(rows), len(self.history.names)), np.float32)
        for at in range(0, len(rows) if self._edges else 0, _PART):  # calls of one size
            missing = max(0, at + _PART - len(rows))
            given = (np.pad(of[at : at + _PART], [(0, missing)] + [(0, 0)] * (of.ndim - 1)) for of in (counts, cutoffs))
            found[at : at + _PART] = np.asarray(_numbers(self.history, *given))[: len(rows) - at]
        return found

    def counts(self, rows: np.ndarray, cutoffs: np.ndarray) -> np.ndarray:
        """int32[rows, relations, 2 + windows], from which a step computes the numbers.

        Of each relation: how many edges are known by the cutoff, and how many before each window; and the time of the
        last one that is known, the least int32 where none is.

        Args:
            rows: int[rows] of the table, -1 for padding, which has no edges.
            cutoffs: int32[rows], as the topology's clock counts.
        """
        found = np.zeros((len(rows), len(self._edges), 2 + len(_WINDOWS)), np.int32)

        def count(_: int, start: int, stop: int) -> None:
            some, limits = rows[start:stop], cutoffs[start:stop].astype(np.int64)
            for number, (edges, timed) in enumerate(zip(self._edges, self.history.timed, strict=True)):
                own = found[start:stop, number]
                first, own[:, 0] = edges.up_to(some, limits)
                own[:, -1] = edges.last(first, own[:, 0])
                for place, days in enumerate(_WINDOWS if timed else (), 1):
                    own[:, place] = edges.up_to(some, np.maximum(limits - days * self.history.day, _ALWAYS))[1]

        for_blocks(count, len(rows), _PART, progress=False)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _EdgesByTime:
    """The edges of a relation where they lie in host memory.

    Attributes:
        starts: int[receivers + 1], the position of each receiver's first edge, and where the last one's end.
        times: int32[edges], ascending within each receiver.
    """

    starts: np.ndarray
    times: np.ndarray

    @classmethod
    def of(cls, topology: HeteroTopology, place: int) -> _EdgesByTime:
        """Those of a topology's relation by its place."""
        relation = topology.relations[place]
        lists = topology.lists[relation.lists]
        groups = topology.num_nodes[relation.edge_type[2]] + 1
        assert lists.times is not None
        starts = as_numpy(lists.starts)[relation.first_group : relation.first_group + groups]
        return cls(starts, as_numpy(lists.times))

    def up_to(self, rows: np.ndarray, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The position of each row's first edge, and how many have a time up to its limit; none of row -1."""
        place = np.maximum(rows, 0)
        first, end = self.starts[place].astype(np.int64), self.starts[place + 1].astype(np.int64)
        low, high = first, np.where(rows >= 0, end, first)
        while (low < high).any():  # edges before `low` count, those from `high` on do not
            middle = (low + high) // 2
            counts = (low < high) & (self.times[np.minimum(middle, len(self.times) - 1)] <= limits)
            low, high = np.where(counts, middle + 1, low), np.where(counts, high, middle)
        return first, low - first

    def last(self, first: np.ndarray, count: np.ndarray) -> np.ndarray:
        """The time of the last of the first edges of each row; the least int32 for none."""
        found: np.ndarray = np.where(count > 0, self.times[np.maximum(first + count - 1, 0)], _ALWAYS)
        return found


def _day_of(data: HeteroDataset) -> int:
    """The length of a day in the unit of the times."""
    return DAY if data.time_unit == "s" else 1


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
        numbers: gives the history of rows at cutoffs, as `HistoryReader.numbers`, but cutoffs in the unit of `data`.

    Returns:
        Probabilities of class 1 [n], of each class [n, classes], or amounts [n].
    """
    train = task.splits["train"]
    if len(train) > MOST_FITTED:
        train = np.random.default_rng(0).choice(train, MOST_FITTED, replace=False)
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
