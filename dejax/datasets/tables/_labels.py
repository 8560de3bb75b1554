"""`Label`: classes of the rows of a table, for models that classify nodes."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.datasets._hetero import HeteroDataset
from dejax.datasets.tables._columns import Columns, missing_in
from dejax.datasets.tables._known_from import TimeColumn, boundary


@dataclass(frozen=True)
class Label:
    """The column of a table to predict, and how rows are split, for models that classify nodes. See `from_tables`.

    Attributes:
        table: name of the table.
        column: its column of classes, which is kept out of the features. Rows with a missing value have no label.
        valid_from: rows before this time are training rows: a time or a number, in the form of the table's column in
            `time_columns`.
        test_from: rows from this time on are test rows; rows between the two times are validation rows.
    """

    table: str
    column: str
    valid_from: Any = None
    test_from: Any = None

    def split_times(self, times: Mapping[str, TimeColumn]) -> tuple[int | float, int | float] | None:
        """The two times from which on rows are for validation, and for test; None for a label without times.

        Raises:
            ValueError: one time without the other; times of another kind or unit than the table has, or in wrong order.
        """
        given = (self.valid_from, self.test_from)
        if given == (None, None):
            return None
        if self.table not in times or None in given:
            raise ValueError(
                "label must have `valid_from` and `test_from`, and time_columns a column of the table "
                f"{self.table!r}, to split its rows by time, got {self.valid_from!r}, {self.test_from!r} and "
                f"{sorted(times)}"
            )
        column = times[self.table]
        there = column.values[~column.missing]
        valid, test = (
            boundary(f"label must have a `{name}`", value, there, column.unit, column.name)
            for name, value in zip(("valid_from", "test_from"), given, strict=True)
        )
        if not valid <= test:
            raise ValueError(
                f"label must have a `valid_from` no later than `test_from`, got {self.valid_from!r} and "
                f"{self.test_from!r}; else rows would be in two splits"
            )
        return valid, test


def labelled(
    data: HeteroDataset, columns: Mapping[str, Columns], label: Label, split_at: tuple[int | float, int | float] | None
) -> HeteroDataset:
    """The dataset with the classes of a label and the splits of its rows."""
    values = columns[label.table][label.column]
    known = ~missing_in(values)
    classes = np.unique([str(value) for value in values[known]] if values.dtype.kind == "O" else values[known])
    wanted = np.array([str(value) for value in values], object) if values.dtype.kind == "O" else values
    labels = np.full(len(values), -1, np.int64)
    labels[known] = np.searchsorted(classes, wanted[known].astype(classes.dtype))
    if values.dtype.kind in "mM" or (values.dtype.kind == "f" and (classes != np.rint(classes)).any()):
        shown = ", ".join(str(value) for value in classes[:3])
        warnings.warn(
            f"the label {label.table}.{label.column} has values such as {shown}, of which each becomes a class, "
            f"{len(classes)} in all; to predict amounts, make a `Task` of the column",
            stacklevel=3,
        )
    splits = {}
    if split_at is not None:
        when = data.node_times[label.table]
        valid, test = split_at
        parts = {"train": when < valid, "valid": (when >= valid) & (when < test), "test": when >= test}
        splits = {split: {label.table: np.flatnonzero(known & part)} for split, part in parts.items()}
    return dataclasses.replace(
        data, labels={label.table: labels}, num_classes={label.table: len(classes)}, splits=splits, check=False
    )
