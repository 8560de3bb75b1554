"""What a task takes from a data set before its first step: its examples, and the columns of tables as packed rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from dejax.datasets import HeteroDataset, Task
from dejax.training.command.predictions import labels_of
from dejax.training.tables.encoders import apart_name
from dejax.training.tables.rows import TablePlan, apart, pack, plan_of


def task_of(data: HeteroDataset, name: str | None) -> Task:
    """The task of a data set of this name, or its only one.

    Raises:
        ValueError: there is none, or several and no name.
    """
    tasks = data.tasks
    if not tasks:
        raise ValueError(f"dataset {data.name!r} must have a task, got none; make one with dejax.datasets")
    if (name is None and len(tasks) > 1) or (name is not None and name not in tasks):
        raise ValueError(
            f"target must be one of the tasks {', '.join(tasks)}, got {name!r}; give its name (on the command line "
            "--target NAME)"
        )
    return next(iter(tasks.values())) if name is None else tasks[name]


def training_examples(data: HeteroDataset, name: str | None) -> int:
    """The number of training examples of `task_of`, or of a link task that of their links."""
    task = task_of(data, name)
    places = task.splits.get("train", np.zeros(0, np.int64))
    return len(places) if task.offsets is None else int(labels_of(task, places).sum())


def packed_tables(
    data: HeteroDataset,
    until: int,
    hidden: Collection[tuple[str, str]],
    bins: int,
    day: int,
    fitted: Mapping[str, Sequence[Mapping[str, Any]]] | None,
) -> tuple[dict[str, TablePlan], dict[str, np.ndarray]]:
    """The plan of each table's columns, and what the feature store has of them.

    Args:
        data: tables as a graph.
        until, bins, day: as in `pack`.
        hidden: (table, column) pairs that are left out.
        fitted: of a run, what the columns of each table were fitted to (`plain`); None: what the data say.

    Raises:
        ValueError: other tables or columns than `fitted` has.
    """
    if fitted is not None and set(fitted) != set(data.num_nodes):
        raise ValueError(
            f"tables must be those that the model was trained on, {', '.join(fitted)}; got "
            f"{', '.join(data.num_nodes)}; train again, or undo the change"
        )
    plans: dict[str, TablePlan] = {}
    packed: dict[str, np.ndarray] = {}
    for table, count in data.num_nodes.items():
        columns = data.columns.get(table, {})
        try:
            rows, plans[table] = pack(
                columns,
                data.known_from.get(table),
                until,
                hidden=[column for other, column in hidden if other == table],
                bins=bins,
                day=day,
                fitted=None if fitted is None else plan_of(fitted[table]),
            )
        except ValueError as error:
            raise ValueError(f"table {table!r}: {error}") from None
        if count and plans[table].width:
            packed[table] = rows
        if count:
            vectors = apart(columns, plans[table])
            packed |= {apart_name(table, column): values for column, values in vectors.items()}
    return plans, packed
