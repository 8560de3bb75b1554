"""Examples of a task while it is made: keys as rows, cutoffs in the unit of the data, splits by time, and checks."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dejax.datasets._hetero import ALWAYS, SPLITS, HeteroDataset
from dejax.datasets.tables._columns import array_of, missing_in
from dejax.datasets.tables._known_from import TimeColumn, boundary
from dejax.datasets.tables._references import rows_of_keys
from dejax.datasets.tasks._telling import warn_of_telling_columns
from dejax.datasets.tasks.task import Task, TaskKind

_ALWAYS_KNOWN = (ALWAYS, -(2**63), -np.inf)  # times of rows without one
_SHARES = (0.8, 0.9)  # where splits of data without times begin


@dataclass(frozen=True)
class Splitting:
    """How the examples of a task are split: by two times, or by names.

    Attributes:
        valid_from: examples with a cutoff before this are for training.
        test_from: those with this cutoff or a later one are for tests; those between are for validation.
        splits: instead, the split of each example by name.
    """

    valid_from: Any = None
    test_from: Any = None
    splits: Any = None

    def of(self, data: HeteroDataset, task: str, times: np.ndarray) -> dict[str, np.ndarray]:
        """The places of each split, of the cutoffs of a task's examples.

        Raises:
            ValueError: no times to split by, in data with times; times of another unit, or in the wrong order; names of
                other splits; a split with an example that is earlier than one of the split before.
        """
        if self.splits is not None:
            names = np.asarray(self.splits)
            if len(names) != len(times) or not np.isin(names, SPLITS).all():
                raise ValueError(
                    f"splits of task {task!r} must be 'train', 'valid' or 'test' for each of {len(times)} examples, "
                    f"got {len(names)} names such as {sorted(set(names.tolist()))[:4]}"
                )
            found = {split: np.flatnonzero(names == split) for split in SPLITS}
        elif not has_times(data) and (self.valid_from, self.test_from) == (None, None):
            order = np.random.default_rng(0).permutation(len(times))
            cuts = [int(share * len(times)) for share in _SHARES]
            found = {split: np.sort(part) for split, part in zip(SPLITS, np.split(order, cuts), strict=True)}
        elif not has_times(data):
            raise ValueError(
                f"task {task!r} must have no `valid_from` and `test_from` if no table has times, got "
                f"{self.valid_from!r} and {self.test_from!r}; name columns of times in `time_columns` of from_tables"
            )
        else:
            if self.valid_from is None or self.test_from is None:
                raise ValueError(
                    f"task {task!r} must have `valid_from` and `test_from`, got {self.valid_from!r} and "
                    f"{self.test_from!r}; data with times are split by time, and the examples between the two are for "
                    "validation"
                )
            span = np.concatenate([times, *_dated(data)])
            valid, test = (
                boundary(f"task {task!r} must have a `{name}`", value, span, data.time_unit, "the data's times")
                for name, value in (("valid_from", self.valid_from), ("test_from", self.test_from))
            )
            if not valid <= test:
                raise ValueError(
                    f"task {task!r} must have a `valid_from` no later than `test_from`, got {self.valid_from!r} and "
                    f"{self.test_from!r}"
                )
            number = (times >= valid).astype(int) + (times >= test)
            found = {split: np.flatnonzero(number == k) for k, split in enumerate(SPLITS)}
        self._check_order(task, times, found)
        return found

    @staticmethod
    def _check_order(task: str, times: np.ndarray, found: dict[str, np.ndarray]) -> None:
        latest = None
        for split in SPLITS:
            own = times[found[split]]
            if latest is not None and own.size and own.min() < latest[1]:
                raise ValueError(
                    f"splits of task {task!r} must follow each other in time, got a cutoff {own.min()} in {split} and "
                    f"{latest[1]} in {latest[0]}"
                )
            if own.size:
                latest = split, own.max()


def has_times(data: HeteroDataset) -> bool:
    """Whether rows of the data have times."""
    return bool(data.known_from or data.node_times)


def _dated(data: HeteroDataset) -> list[np.ndarray]:
    """The times of rows by table, without those of rows that have none."""
    return [np.asarray(rows)[~np.isin(rows, _ALWAYS_KNOWN)] for rows in data.node_times.values()]


def cutoffs_of(data: HeteroDataset, task: str, times: Any) -> np.ndarray:
    """int64[n], cutoffs in the unit of the dataset's times; of one time alone, int64[1].

    Raises:
        ValueError: missing cutoffs; times of another kind than the dataset's; fractions.
    """
    times = [times] if isinstance(times, str | datetime.date | np.datetime64 | int) else times
    found = TimeColumn.of(f"of the cutoffs of task {task!r}", array_of(times))
    if found.missing.any():
        row = int(found.missing.argmax())
        raise ValueError(
            f"times of task {task!r} must have a cutoff for each example, got none for example {row}; leave that "
            "example out"
        )
    if found.kind is not None and found.unit != data.time_unit:
        kinds = {"s": "times", "": "numbers"}
        raise ValueError(
            f"times of task {task!r} must be {kinds[data.time_unit]}, as those of {data.name!r}, got "
            f"{kinds[found.unit]} such as {times[0]!r}"
        )
    if found.values.dtype.kind == "f":
        raise ValueError(f"times of task {task!r} must be whole numbers, got {times[0]!r}")
    return found.values


def entity_rows(data: HeteroDataset, task: str, table: str, keys: Any, missing_keys: str = "error") -> np.ndarray:
    """int32[n], the rows of a table with these keys, -1 for none. Without a primary key, keys are row numbers.

    Raises:
        ValueError: a table that does not exist; a key that is missing or, unless `missing_keys` is "drop", that no row
            has; keys of a type that cannot be converted exactly to that of the primary key.
    """
    if table not in data.num_nodes:
        raise ValueError(
            f"task {task!r} must name a table, one of {', '.join(map(repr, data.num_nodes))}; got {table!r}"
        )
    if missing_keys not in ("error", "drop"):
        raise ValueError(f"missing_keys must be 'error' or 'drop', got {missing_keys!r}")
    given = array_of(keys)
    if missing_in(given).any():
        raise ValueError(
            f"keys of task {task!r} must not be missing, got none for example {int(missing_in(given).argmax())}; "
            "leave that example out"
        )
    primary = data.keys.get(table, np.arange(data.num_nodes[table]))
    rows = rows_of_keys(f"keys of task {task!r}", given, f"{table}'s keys", primary)
    unknown = rows < 0
    if unknown.any() and missing_keys == "error":
        of = "the primary key" if table in data.keys else f"a row number below {data.num_nodes[table]}"
        raise ValueError(
            f"keys of task {task!r} must be values of {of} of {table!r}, got {int(unknown.sum())} of {len(rows)} "
            f"that are none, such as {given[unknown][:1].tolist()[0]!r}; pass missing_keys='drop' to leave these "
            "examples out"
        )
    return rows


def label_values(task: str, labels: Any, kind: str | None) -> tuple[TaskKind, np.ndarray, np.ndarray, tuple[str, ...]]:
    """The kind of a task, its labels, which of them are missing, and the names of classes.

    Without a kind, booleans, zeros and ones, and two different texts are binary, more texts are classes, and other
    numbers are a regression.

    Raises:
        ValueError: labels that cannot be of the kind.
    """
    given = array_of(labels)
    missing = missing_in(given)
    if given.ndim != 1 or given.dtype.kind in "mM":
        raise ValueError(f"labels of task {task!r} must be numbers, booleans or text, got {given.dtype}; convert them")
    known = given[~missing]
    is_text = given.dtype.kind == "O" and not all(isinstance(value, bool | int | float) for value in known.tolist())
    if not is_text:  # integers as they are: float64 would round those beyond 2**53
        known = np.array(known.tolist()) if known.dtype.kind == "O" and len(known) else known
        known = known if known.dtype.kind in "iuO" and len(known) else known.astype(np.float64)
    names = sorted({str(value) for value in known.tolist()}) if is_text else np.unique(known).tolist()
    if kind is None:
        zeros_and_ones = not is_text and set(names) <= {0.0, 1.0}
        kind = "binary" if zeros_and_ones or (is_text and len(names) <= 2) else "classes" if is_text else "regression"
    if kind == "regression":
        if is_text:
            raise ValueError(f"labels of task {task!r} must be numbers for a regression, got {known[0]!r}")
        values = np.where(missing, 0, given).astype(np.float64)
        if not np.isfinite(values).all():
            raise ValueError(f"labels of task {task!r} must be finite, got infinity; leave those examples out")
        return "regression", values, missing, ()
    if kind not in ("binary", "classes") or (kind == "binary" and len(names) > 2):
        raise ValueError(
            f"labels of task {task!r} must fit its kind, {kind!r}: binary has two different ones, classes and "
            f"regression have more; got {len(names)} such as {names[:3]}"
        )
    if kind == "binary" and not is_text and set(names) <= {0.0, 1.0}:
        names = [0.0, 1.0]
    values = np.array([str(value) for value in known.tolist()]) if is_text else known
    codes = np.zeros(len(given), np.int32)
    if len(known):
        codes[~missing] = np.searchsorted(np.array(names, values.dtype), values)
    shown = tuple(str(int(n)) if isinstance(n, float) and n == int(n) else str(n) for n in names)
    return cast(TaskKind, kind), codes, missing, shown


def labelled_task(
    data: HeteroDataset,
    name: str,
    entity: str,
    rows: np.ndarray,
    cutoffs: np.ndarray,
    labels: Any,
    splitting: Splitting,
    *,
    kind: str | None = None,
    unit: str = "",
    hidden: tuple[tuple[str, str], ...] = (),
) -> Task:
    """A task of rows (-1 for none), int64 cutoffs and labels, without the examples that have no row or no label.

    Warns:
        UserWarning: a column of the entity tells nearly all labels of training.
    """
    parts = splitting.of(data, name, cutoffs)
    found, values, missing, classes = label_values(name, labels, kind)
    task = Task(name, found, entity, rows, cutoffs, values, parts, classes=classes, unit=unit, hidden=hidden)
    task = task.with_kept(rows >= 0, f"examples whose key {entity} lacks")
    task = finished(data, task.with_kept(~missing[rows >= 0], "examples without a label"))
    warn_of_telling_columns(data, task)
    return task


def finished(data: HeteroDataset, task: Task) -> Task:
    """The task without examples that cannot be asked: its `left_out` counts them.

    Raises:
        ValueError: no example is left; labels that are constant in training.
    """
    if not len(task):
        raise ValueError(
            f"task {task.name!r} must have examples, got none; {task.entity!r} has {data.num_nodes[task.entity]} rows"
            + (", none known or active at a cutoff; choose later ones" if data.num_nodes[task.entity] else "")
        )
    for table in filter(None, (task.entity, task.target)):
        if not data.num_nodes[table]:
            raise ValueError(f"tables of task {task.name!r} must have rows, got the empty table {table!r}")
    example = task.times[0].item()
    first = min((rows.min().item() for rows in _dated(data) if rows.size), default=None)
    if first is not None:
        task = task.with_kept(task.times >= first, "examples with a cutoff before all data")
        if not len(task):
            raise ValueError(
                f"times of task {task.name!r} must not all be before the data, which begins at "
                f"{_shown(data, first)}; got {_shown(data, example)}"
            )
    known = data.known_from.get(task.entity)
    if known is not None:
        task = task.with_kept(known[task.rows] <= task.times, f"examples whose row of {task.entity} is not known then")
        if not len(task):
            raise ValueError(
                f"times of task {task.name!r} must be times at which its rows of {task.entity!r} are known; every row "
                f"is later than its cutoff, such as {_shown(data, example)}"
            )
    train = task.splits.get("train", np.zeros(0, np.int64))
    if task.kind in ("binary", "classes", "regression") and len(train):
        labels = task.labels[train]
        if (labels == labels[0]).all():
            value = task.classes[labels[0]] if task.classes else labels[0].item()
            raise ValueError(
                f"labels of task {task.name!r} must differ in training, all {len(train)} are {value!r}; check the "
                "labels and `valid_from`"
            )
    return task


def _shown(data: HeteroDataset, time: int | float) -> str:
    return str(np.datetime64(int(time), "s")) if data.time_unit == "s" else str(time)
