"""Relational tables as a graph: rows are nodes, foreign keys are edges (Fey et al., arXiv 2312.04615)."""

from __future__ import annotations

import dataclasses
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets._columns import Columns, ForeignKey, columns_of, missing_in, read_sqlite, to_primary_keys
from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets._known_from import TimeColumn, beginning, boundaries, known_from, read_times
from dejax.datasets._references import edges_of
from dejax.datasets._row_features import features_of


@dataclass(frozen=True)
class Label:
    """What to predict, and how rows are split.

    Attributes:
        table: the table.
        column: its column of classes, which is kept out of the features. Missing values have no label.
        valid_from: rows before this are training rows; a time or a number, as the table's column of `time_columns` has
            it.
        test_from: rows at this time and later are test rows; those between are validation rows.
    """

    table: str
    column: str
    valid_from: Any = None
    test_from: Any = None


def from_tables(
    tables: Mapping[str, Any] | str | os.PathLike[str],
    primary_keys: Mapping[str, str] | None = None,
    foreign_keys: Sequence[ForeignKey] | None = None,
    time_columns: Mapping[str, str] | None = None,
    *,
    label: Label | None = None,
    max_categories: int = 50,
    text_width: int = 32,
    dangling: str = "error",
    missing_times: str = "error",
    name: str = "tables",
) -> HeteroDataset:
    """A `HeteroDataset` from relational tables.

    Each row becomes a node; its table is the node's type. A foreign key `column` of `table` becomes the relation
    `(table, column, other table)` and its reverse `(other table, "rev_" + column, table)`. Each other column becomes
    some float32 features:

    | column | features |
    | --- | --- |
    | numbers, booleans | one: the value, standardised; 0 if missing, and then a second feature marks it |
    | times | the same, of the seconds |
    | text or bytes, up to `max_categories` different values | one for each value: one-hot |
    | other text or bytes | `text_width`: signed hashes of its words, with norm 1 (arXiv 0902.2206) |

    If `label.valid_from` is given, means, deviations and categories come from the rows that are known before that time
    alone. A category that only later rows have is all zeros.

    **Times.** A row is known from its own time on, and no earlier than each row that it refers to; rows of tables
    without times are known from the beginning on, or as soon as what they refer to is. An edge is known when both of
    its ends are. `edge_times` has that time for each edge, in both directions, of the relations in which some edge was
    not always known. `node_times` has the time at which a row is looked at: its own, or in tables without times the
    one from which it is known. So a sample with the seeds' `node_times` as `seed_times` has no later row.

    Args:
        tables: name -> a pandas DataFrame, an Arrow table, or a mapping of columns; or the path of a SQLite file, whose
            own keys are the default of `primary_keys` and `foreign_keys`.
        primary_keys: table -> its column of unique keys. Tables without one are referred to by no other.
        foreign_keys: (table, column, table that it refers to). Missing values are no edges.
        time_columns: table -> its column with the time at which a row came to be. Times are counted in whole seconds
            since 1970, so rows within one second are of one time; numbers stay as they are, so all columns need one
            unit.
        label: what to predict.
        max_categories: as in the table above.
        text_width: as in the table above.
        dangling: what happens to a foreign key that refers to no row: "error" raises, "drop" leaves out the edge, and
            `summary` counts them.
        missing_times: what happens to a row without a time, in a table that has times: "error" raises, "drop" leaves
            out the row and its edges, "always known" takes it as known from the beginning on.
        name: the name of the dataset.

    Raises:
        ValueError: a table or column that does not exist; columns of different lengths; primary keys that are missing
            or repeated; foreign keys that no row has, or of a type that cannot be converted exactly to that of the
            primary key; missing times; times in one table and numbers in another; a label without times to split by,
            with `valid_from` after `test_from`, or with either in another unit than the table's times; numbers that are
            infinite or complex.
        FileNotFoundError: no such SQLite file.

    >>> users = {"id": [10, 11], "age": [30.0, 50.0]}
    >>> orders = {"user": [11, 11, 10], "day": [1, 2, 3], "kind": ["a", "b", "a"]}
    >>> data = from_tables({"users": users, "orders": orders}, {"users": "id"}, [("orders", "user", "users")],
    ...                    {"orders": "day"})
    >>> data.edges["orders", "user", "users"][1], data.node_times["orders"]
    (array([1, 1, 0], dtype=int32), array([1, 2, 3]))
    >>> data.features["orders"]
    array([[1., 0.],
           [0., 1.],
           [1., 0.]], dtype=float32)
    """
    if isinstance(tables, str | os.PathLike):
        tables, own_keys, declared = read_sqlite(Path(tables))
        primary_keys = own_keys if primary_keys is None else primary_keys
        foreign_keys = to_primary_keys(declared, primary_keys) if foreign_keys is None else foreign_keys
    if dangling not in ("error", "drop"):
        raise ValueError(f"dangling must be 'error' or 'drop', got {dangling!r}")
    columns = {table: columns_of(table, given) for table, given in tables.items()}
    keys, references = dict(primary_keys or {}), list(foreign_keys or ())
    time_columns = dict(time_columns or {})
    _check_names(columns, keys, references, time_columns, label)
    times = read_times(columns, time_columns, missing_times)
    split_at = None if label is None else _split_times(label, times)
    edges, dangled = edges_of(columns, keys, references, dangling)
    left_out = {f"edges {' -> '.join(r)}, whose key no row has": n for r, n in dangled.items()}
    if missing_times == "drop":
        left_out |= {f"rows of {table} without a time": int(time.missing.sum()) for table, time in times.items()}
        columns, times, edges = _without_rows_of_no_time(columns, times, edges)
    counts = {table: _rows_of(found) for table, found in columns.items()}
    begin = beginning(times)
    own = {table: np.where(time.missing, begin, time.values) for table, time in times.items()}
    known = known_from(own, counts, edges, begin)

    not_features = {*keys.items(), *((t, c) for t, c, _ in references), *time_columns.items()}
    not_features |= {(label.table, label.column)} if label else set()
    fitted = {table: split_at is None or known[table] < split_at[0] for table in columns}
    features = _features(columns, not_features, fitted, max_categories, text_width)
    # A row is known no earlier than the rows that it refers to: it is the end of each edge that is known last.
    of_edges = {relation: known[relation[0]][ends[0]] for relation, ends in edges.items()}
    data = HeteroDataset(
        name,
        counts,
        edges,
        features=features,
        node_times={**{table: rows for table, rows in known.items() if (rows > begin).any()}, **own},
        edge_times={relation: found for relation, found in of_edges.items() if (found > begin).any()},
        left_out={what: count for what, count in left_out.items() if count},
    ).with_reverse()
    return data if label is None else _labelled(data, columns, label, split_at)


def _rows_of(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _without_rows_of_no_time(
    columns: Mapping[str, Columns], times: Mapping[str, TimeColumn], edges: Mapping[Relation, Ends]
) -> tuple[dict[str, Columns], dict[str, TimeColumn], dict[Relation, Ends]]:
    """Columns, times and edges without the rows that have no time, in the tables that have times."""
    kept = {t: ~times[t].missing if t in times else np.ones(_rows_of(found), bool) for t, found in columns.items()}
    left = {t: {name: values[kept[t]] for name, values in found.items()} for t, found in columns.items()}
    dated = {
        t: dataclasses.replace(time, values=time.values[kept[t]], missing=time.missing[kept[t]])
        for t, time in times.items()
    }
    between = {relation: _renumbered(ends, kept[relation[0]], kept[relation[2]]) for relation, ends in edges.items()}
    return left, dated, between


def _features(
    columns: Mapping[str, Columns],
    not_features: set[tuple[str, str]],
    fitted: Mapping[str, np.ndarray | bool],
    max_categories: int,
    text_width: int,
) -> dict[str, np.ndarray]:
    """The features of each table's rows, side by side, of the columns that are no keys, times or labels.

    `fitted` says for each table which rows give means, deviations and categories; True: all of them.
    """
    features = {}
    for table, found in columns.items():
        rows = np.broadcast_to(fitted[table], _rows_of(found))
        parts = [
            features_of(f"{table}.{column}", values, rows, max_categories, text_width)
            for column, values in found.items()
            if (table, column) not in not_features
        ]
        if parts and sum(part.shape[1] for part in parts):
            features[table] = np.concatenate(parts, axis=1)
    return features


def _renumbered(ends: Ends, kept: np.ndarray, kept_others: np.ndarray) -> Ends:
    """The edges between rows that are kept, by the rows' new numbers."""
    there = kept[ends[0]] & kept_others[ends[1]]
    numbers = [np.cumsum(rows, dtype=np.int32) - 1 for rows in (kept, kept_others)]
    return numbers[0][ends[0][there]], numbers[1][ends[1][there]]


def _check_names(
    columns: Mapping[str, Columns],
    keys: Mapping[str, str],
    references: Sequence[ForeignKey],
    times: Mapping[str, str],
    label: Label | None,
) -> None:
    named = [("primary_keys", *pair) for pair in keys.items()] + [("time_columns", *pair) for pair in times.items()]
    for reference in references:
        if len(reference) != 3:
            raise ValueError(f"foreign_keys must be (table, column, other table), got {reference}")
        named.append(("foreign_keys", reference[0], reference[1]))
        if reference[2] not in keys:
            raise ValueError(f"primary_keys must have the table {reference[2]!r}, to which {reference[:2]} refers")
    if label is not None:
        named.append(("label", label.table, label.column))
    for what, table, column in named:
        if table not in columns:
            raise ValueError(f"{what} must name tables, {', '.join(map(repr, columns))}; got {table!r}")
        if column not in columns[table]:
            raise ValueError(f"{what} must name a column of {table!r}, {', '.join(columns[table])}; got {column!r}")


def _split_times(label: Label, times: Mapping[str, TimeColumn]) -> list[int | float] | None:
    """From when on rows are validation rows, and test rows; None for a label without times."""
    given = (label.valid_from, label.test_from)
    if given == (None, None):
        return None
    if label.table not in times or None in given:
        raise ValueError(
            f"label must have `valid_from` and `test_from`, and time_columns the table {label.table!r}, to split rows"
        )
    found = boundaries(times[label.table], ("valid_from", "test_from"), given)
    if not found[0] <= found[1]:
        raise ValueError(
            f"label must have a `valid_from` no later than `test_from`, got {label.valid_from!r} and "
            f"{label.test_from!r}; else rows would be in two splits"
        )
    return found


def _labelled(
    data: HeteroDataset, columns: Mapping[str, Columns], label: Label, split_at: Sequence[int | float] | None
) -> HeteroDataset:
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
            f"{len(classes)} in all; to predict amounts, group them into ranges, or take the column as your own target",
            stacklevel=3,
        )
    splits = {}
    if split_at is not None:
        when = data.node_times[label.table]
        valid, test = split_at
        parts = {"train": when < valid, "valid": (when >= valid) & (when < test), "test": when >= test}
        splits = {split: {label.table: np.flatnonzero(known & part)} for split, part in parts.items()}
    return dataclasses.replace(
        data,
        labels={label.table: labels},
        num_classes={label.table: len(classes)},
        splits=splits,
        check=False,
    )
