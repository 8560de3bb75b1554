"""RelBench's databases and tasks (arXiv 2407.20060), as its own package loads them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from dejax._optional import optional
from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.tables.graph import from_tables
from dejax.datasets.tasks.makers import task_from_columns

_KINDS = {
    "binary_classification": "binary",
    "multiclass_classification": "classes",
    "regression": "regression",
    "recommendation": "link",
    "link_prediction": "link",
}
_SPLITS = {"train": "train", "val": "valid", "test": "test"}


def from_relbench(dataset: Any, task: Any, **options: Any) -> HeteroDataset:
    """Loads a database of RelBench with one of its tasks: the same examples, cutoffs, labels and splits as in RelBench.

    The data set has only what the task may see: it lacks the columns from which the labels are made, and rows after
    RelBench's test time. Rows without a time in tables with times are left out, as in RelBench.

    Args:
        dataset: name or folder for `relbench.load_dataset`, or a dataset object of RelBench.
        task: name of one of its tasks, or a task object.
        options: keyword arguments of `from_tables`, such as `kinds`.

    Returns:
        A HeteroDataset whose `tasks` has the task by its name.

    Raises:
        ModuleNotFoundError: a name is given, and relbench is not installed.
        ValueError: the task has several labels for each example; or as `from_tables`.

    >>> from dejax.datasets import from_relbench
    >>> data = from_relbench("rel-f1", "driver-dnf")  # doctest: +SKIP
    >>> print(data.tasks["driver-dnf"].summary())  # doctest: +SKIP
    """
    if isinstance(dataset, str | os.PathLike):
        with optional("relbench", of=f"from_relbench({os.fspath(dataset)!r})"):
            import relbench
        dataset = relbench.load_dataset(dataset)
    name = task if isinstance(task, str) else getattr(task, "name", None) or type(task).__name__
    task = dataset.load_task(task) if isinstance(task, str) else task
    database = (task if hasattr(task, "get_db") else dataset).get_db()
    tables = database.table_dict
    given: dict[str, Any] = {
        "dangling": "drop",
        "missing_times": "drop",
        "fit_before": _seconds(dataset.val_timestamp),
        "fixed_features": False,
        "name": getattr(getattr(dataset, "manifest", None), "name", type(dataset).__name__),
        **options,
    }
    data = from_tables(
        {table: found.df for table, found in tables.items()},
        {table: found.pkey_col for table, found in tables.items() if found.pkey_col is not None},
        [
            (table, column, other)
            for table, found in tables.items()
            for column, other in found.fkey_col_to_pkey_table.items()
        ],
        {table: found.time_col for table, found in tables.items() if found.time_col is not None},
        **given,
    )
    return _with_examples(data, name, task)


def _with_examples(data: HeteroDataset, name: str, task: Any) -> HeteroDataset:
    """The dataset with the examples of all splits of a task."""
    kind = _KINDS.get(str(getattr(task.task_type, "value", task.task_type)))
    if kind is None:
        raise ValueError(f"task {name!r} must have one label for each example, or links, got the type {task.task_type}")
    is_link = kind == "link"
    entity, column = (task.src_entity_table, task.src_entity_col) if is_link else (task.entity_table, task.entity_col)
    label = task.dst_entity_col if is_link else task.target_col
    frames = {to: task.get_table(split, mask_input_cols=False).df for split, to in _SPLITS.items()}
    made = task_from_columns(
        data,
        name,
        entity,
        np.concatenate([frame[column].to_numpy() for frame in frames.values()]),
        np.concatenate([frame[task.time_col].to_numpy() for frame in frames.values()]),
        [value for frame in frames.values() for value in frame[label].tolist()],
        kind=kind,
        target=task.dst_entity_table if is_link else None,
        splits=np.repeat(list(frames), [len(frame) for frame in frames.values()]),
        missing_keys="drop",
    )
    return data.with_task(made)


def _seconds(timestamp: Any) -> np.datetime64:
    return np.datetime64(timestamp, "s")
