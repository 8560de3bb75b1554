"""Predictions of a task of tables as a file: a row for each example, with its key and its cutoff time."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import replacing
from dejax._optional import optional
from dejax.datasets import HeteroDataset, Task
from dejax.training.metrics import Ranking

FORMATS = ("csv", "parquet")
_OTHERS = ("time", "split", "label", "prediction", "rank", "score", "candidate")
"""The columns besides keys; those of probabilities have a space in their names."""


def labels_of(task: Task, places: np.ndarray) -> np.ndarray:
    """The labels of some examples, as `dejax.training.metrics.measure` takes them: of links their number."""
    return task.labels[places] if task.offsets is None else np.diff(task.offsets)[places]


def as_columns(
    data: HeteroDataset, task: Task, predicted: np.ndarray | Ranking, places: np.ndarray | None
) -> dict[str, Any]:
    """The columns of a file of predictions.

    Args:
        data: with the keys of the entity table; without keys the rows' numbers.
        task: its examples.
        predicted: probabilities of class 1, of each class [n, classes], amounts, or ranked candidates.
        places: int[n], the examples; None: the task has no labels, and all are meant.

    Returns:
        The key under its table's name ("key of time" of a table "time", which would be two columns of a name), "time",
        then "split" and "label" where there are labels, and "prediction": of zeros and ones the probability of 1, of
        classes with names the likeliest, and then the probability of each. Of links a row for each candidate of the
        lists: its "rank", its key under the name of its table ("candidate" where that is the entity's), and its
        "score"; its label is whether the entity met it.
    """
    chosen = np.arange(len(task)) if places is None else places
    lists = None
    if isinstance(predicted, Ranking):
        lists = np.nonzero(predicted.rows >= 0)
        chosen = chosen[lists[0]]
    times = task.times[chosen]
    found: dict[str, Any] = {
        _key_name(task.entity): _keys(data, task.entity, task.rows[chosen]),
        "time": times.astype("datetime64[s]") if data.time_unit == "s" else times,
    }
    if places is not None:
        split = np.full(len(task), "", dtype="<U5")
        for name, own in task.splits.items():
            split[own] = name
        found["split"] = split[chosen]
    if isinstance(predicted, Ranking):
        assert lists is not None and task.target is not None
        if places is not None:
            found["label"] = predicted.hits[lists].astype(np.int32)
        found["rank"] = lists[1] + 1
        name = _key_name(task.target) if task.target != task.entity else "candidate"
        return {**found, name: _keys(data, task.target, predicted.rows[lists]), "score": predicted.scores[lists]}
    named = task.kind == "classes" or (task.kind == "binary" and task.classes not in ((), ("0", "1")))
    if places is not None:
        labels = task.labels[chosen]
        found["label"] = _named(task, labels) if named else labels
    if not named:
        return {**found, "prediction": predicted}
    each = predicted if task.kind == "classes" else np.stack([1 - predicted, predicted], axis=1)
    found["prediction"] = _named(task, each.argmax(-1))
    names = task.classes or tuple(map(str, range(each.shape[1])))
    return found | {f"probability of {name}": each[:, n] for n, name in enumerate(names)}


def _key_name(table: str) -> str:
    return f"key of {table}" if table in _OTHERS else table


def _keys(data: HeteroDataset, table: str, rows: np.ndarray) -> np.ndarray:
    keys = np.asarray(data.keys[table])[rows] if table in data.keys else rows
    return keys.astype(object) if keys.dtype.kind == "f" else keys  # with all digits


def _named(task: Task, labels: np.ndarray) -> np.ndarray:
    return np.asarray(task.classes)[labels] if task.classes else labels


def write(path: Path, columns: Mapping[str, Any]) -> None:
    """Writes columns of one length as CSV or Parquet, by the file's ending.

    Raises:
        ValueError: another ending.
        ImportError: Parquet, and neither pyarrow nor polars is installed.
    """
    ending = path.suffix.removeprefix(".")
    if ending not in FORMATS:
        raise ValueError(f"predictions must be written to a file that ends with .csv or .parquet, got {path.name!r}")
    with replacing(path) as temporary:
        (_write_parquet if ending == "parquet" else _write_csv)(temporary, columns)


def _write_csv(path: Path, columns: Mapping[str, Any]) -> None:
    with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:  # keys may be no Unicode
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*map(_as_text, columns.values()), strict=True))


def _as_text(values: Any) -> list[Any]:
    values = np.asarray(values)
    if values.dtype.kind == "f":
        # Nine digits are those of float32, and enough of a share. Amounts far from 0 have theirs behind the first nine.
        most = 15 if values.dtype == np.float64 else 9
        return [f"{value:.{9 if abs(value) <= 1 else most}g}" for value in values.tolist()]
    if values.dtype.kind == "M":
        zone = "" if np.datetime_data(values.dtype)[0] in "YMWD" else "Z"
        return [f"{value}{zone}" for value in values.astype(str)]
    return values.tolist()


def _write_parquet(path: Path, columns: Mapping[str, Any]) -> None:
    with optional("pyarrow", of="predictions as Parquet"):
        import pyarrow
        import pyarrow.parquet
    table = {
        name: pyarrow.array(values.tolist() if values.dtype.kind in "OU" else values)
        for name, values in ((name, np.asarray(some)) for name, some in columns.items())
    }
    pyarrow.parquet.write_table(pyarrow.table(table), path)


def known_rows(data: HeteroDataset, task: Task, cutoff: int) -> Task:
    """The task of predicting, for all rows of the entity table that are known at a time, what comes after it.

    Raises:
        ValueError: no row is known then.
    """
    known = data.known_from.get(task.entity)
    rows = np.arange(data.num_nodes[task.entity]) if known is None else np.flatnonzero(known <= cutoff)
    if not len(rows):
        first = "" if known is None or not len(known) else f"; the first is known at {known.min()}"
        raise ValueError(
            f"--at must be a time at which rows of {task.entity!r} are known, got {cutoff}, at which none is{first}; "
            "choose a later time"
        )
    return Task(
        name=task.name,
        kind=task.kind,
        entity=task.entity,
        rows=rows.astype(np.int32),
        times=np.full(len(rows), cutoff, np.int64),
        labels=np.zeros(0 if task.kind == "link" else len(rows), task.labels.dtype),
        splits={},
        offsets=np.zeros(len(rows) + 1, np.int64) if task.kind == "link" else None,
        target=task.target,
        classes=task.classes,
        unit=task.unit,
        hidden=task.hidden,
    )


def time_of(text: str, unit: str) -> int:
    """A time of the command line in the unit of a data set: ISO 8601 in UTC for seconds, otherwise a whole number.

    Raises:
        ValueError: neither.
    """
    try:
        return int(np.datetime64(text.removesuffix("Z"), "s").astype(np.int64)) if unit == "s" else int(text)
    except ValueError:
        example = "2013-11-01T12:00:00Z" if unit == "s" else "17"
        raise ValueError(f"--at must be a time such as {example}, got {text!r}") from None
