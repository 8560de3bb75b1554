"""Columns that tell the labels of a task: copies of a label, or what was filled in when the label became known."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import numpy as np

from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.columns import Column
from dejax.datasets.tasks.task import Task

_MOST = 10_000  # training examples that are looked at
_LEAST = 10  # examples of a class, or of a category on average, below which chance may tell labels
_SHARE = 0.998


def warn_of_telling_columns(data: HeteroDataset, task: Task) -> None:
    """Warns of columns of the entity's row that are seen at the cutoff and tell nearly all labels of training.

    A copy of the label is such a column, in any order-preserving form, and a column that is missing until the label is
    known, such as the reason of a return: databases often have it in the row, with no word about when it came there.
    """
    train = task.splits.get("train", np.zeros(0, np.int64))
    train = train[:: -(-len(train) // _MOST) or 1]
    rows, times, labels = task.rows[train], task.times[train], task.labels[train]
    for name, column in data.columns.get(task.entity, {}).items():
        if (task.entity, name) in task.hidden:
            continue
        if column.known_at is not None and not (column.known_at[rows] <= times).all():
            continue
        if any(_tells(values, labels, task.kind) for values in _views(column, rows, times)):
            warnings.warn(
                f"the column {task.entity}.{name} tells nearly all {len(train):,} training labels of task "
                f"{task.name!r} by itself. If it is filled in or changed after the cutoffs, a model sees the future: "
                "name the column with the time of that in known_at, or give it the kind 'ignore'",
                stacklevel=5,
            )


def _views(column: Column, rows: np.ndarray, times: np.ndarray) -> Iterator[np.ndarray]:
    """What of a column might tell labels: where it is missing, its values, and for times the distance to the cutoff."""
    missing = column.missing[rows]
    yield missing.astype(np.float64)
    if column.kind == "category":
        yield column.values[rows]
    elif column.kind in ("number", "time"):
        values = np.where(missing, -np.inf, column.values[rows])
        yield values.astype(np.float64)
        if column.kind == "time":
            yield np.where(missing, -np.inf, values - times)


def _tells(values: np.ndarray, labels: np.ndarray, kind: str) -> bool:
    """Whether values tell nearly all labels, by their order or by each value alone."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    if len(count) < 2:
        return False
    if kind == "regression":
        return len(labels) >= _LEAST and _related(values, labels) > _SHARE
    classes = np.bincount(labels)
    if np.sort(classes)[-2:].min() < _LEAST or len(classes) < 2:
        return False
    if kind == "binary" and values.dtype.kind == "f" and _parted(values, labels == 1) > _SHARE:
        return True
    if _LEAST * len(count) > len(labels):
        return False
    table = np.zeros((len(count), len(classes)), np.int64)
    np.add.at(table, (number, labels), 1)
    wrong, at_best = len(labels) - table.max(axis=1).sum(), len(labels) - classes.max()
    return bool(wrong <= (1 - _SHARE) * at_best)


def _related(values: np.ndarray, labels: np.ndarray) -> float:
    """The correlation of ranks, without its sign."""
    a, b = (_ranks(of) for of in (values, labels))
    return float(abs(a @ b) / np.sqrt((a @ a) * (b @ b)))


def _parted(values: np.ndarray, positive: np.ndarray) -> float:
    """|2 AUROC - 1| of values: 1 where they part the examples, 0 where they tell nothing."""
    ranks = _ranks(values)
    return float(2 * abs(ranks[positive].mean() - ranks[~positive].mean()) / len(values))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Ranks about their mean; equal values have the mean of theirs."""
    _, number, count = np.unique(values, return_inverse=True, return_counts=True)
    found: np.ndarray = (np.cumsum(count) - (count + 1) / 2)[number] - (len(values) - 1) / 2
    return found
