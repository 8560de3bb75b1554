"""Relational tables as a graph: rows are nodes, foreign keys are edges (Fey et al., arXiv 2312.04615)."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import os
import sqlite3
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets._hetero import HeteroDataset

Columns = dict[str, np.ndarray]
ForeignKey = tuple[str, str, str]
"""(table, column, table that the column refers to)."""

_EXACT_NUMBERS = (int, np.integer, decimal.Decimal)
_NUMBERS = (int, float, np.floating, np.integer, np.bool_, decimal.Decimal)
_EXACT = 2**53  # beyond, float64 does not have every integer: keys with missing values stay objects


@dataclass(frozen=True)
class Label:
    """What to predict, and how rows are split.

    Attributes:
        table: the table.
        column: its column of classes, which is kept out of the features. Missing values have no label.
        valid_from: rows before this are training rows; a time or number, as in the table's column of `time_columns`.
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

    If `label.valid_from` is given, tables with a time column take means, deviations and categories from rows before
    that time alone. A category that only later rows have is all zeros. Tables without a time column use all their rows.

    Args:
        tables: name -> a pandas DataFrame, an Arrow table, or a mapping of columns; or the path of a SQLite file, whose
            own keys are the default of `primary_keys` and `foreign_keys`.
        primary_keys: table -> its column of unique keys. Tables without one are referred to by no other.
        foreign_keys: (table, column, table that it refers to). Missing values are no edges.
        time_columns: table -> its column with the time at which a row came to be. Times become `node_times` in seconds;
            numbers stay as they are. The edges of a row's foreign keys get the same time.
        label: what to predict.
        max_categories: as in the table above.
        text_width: as in the table above.
        dangling: what happens to a foreign key that refers to no row: "error" raises, "drop" leaves out the edge.
        name: the name of the dataset.

    Raises:
        ValueError: a table or column that does not exist; columns of different lengths; primary keys that are missing
            or repeated; foreign keys that no row has; a label without times to split by, or with `valid_from` after
            `test_from`; numbers that are infinite or complex.
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
        tables, own_keys, declared = _read_sqlite(Path(tables))
        primary_keys = own_keys if primary_keys is None else primary_keys
        foreign_keys = _to_primary_keys(declared, primary_keys) if foreign_keys is None else foreign_keys
    if dangling not in ("error", "drop"):
        raise ValueError(f"dangling must be 'error' or 'drop', got {dangling!r}")
    columns = {table: _columns(table, given) for table, given in tables.items()}
    keys, times_of = dict(primary_keys or {}), dict(time_columns or {})
    references = [tuple(reference) for reference in foreign_keys or ()]
    _check_names(columns, keys, references, times_of, label)
    counts = {table: len(next(iter(found.values()), ())) for table, found in columns.items()}
    times = {table: _times(columns[table][column], f"{table}.{column}") for table, column in times_of.items()}

    data = HeteroDataset(name, counts, _edges(columns, keys, references, dangling), node_times=times)
    data = data.with_reverse()
    edge_times = {}
    for table, column, other in references:
        if table in times:
            of_rows = times[table][data.edges[table, column, other][0]]
            edge_times[table, column, other] = edge_times[other, f"rev_{column}", table] = of_rows
    left_out = set(keys.items()) | {(t, c) for t, c, _ in references}
    left_out |= set(times_of.items()) | ({(label.table, label.column)} if label else set())
    known_before = None if label is None or label.valid_from is None else _time(label.valid_from)
    features = {}
    for table, found in columns.items():
        fitted = np.ones(counts[table], bool)
        if known_before is not None and table in times:
            fitted = times[table] < known_before
        parts = [
            _features(f"{table}.{column}", values, fitted, max_categories, text_width)
            for column, values in found.items()
            if (table, column) not in left_out
        ]
        if parts and sum(part.shape[1] for part in parts):
            features[table] = np.concatenate(parts, axis=1)
    data = dataclasses.replace(data, features=features, edge_times=edge_times, check=False)
    return data if label is None else _labelled(data, columns, times, label)


# --------------------------------------------------------------------------------------------------- reading


_Declared = dict[tuple[str, int], list[tuple[str, str, str | None]]]
"""(table, number) of a foreign key -> for each of its columns the other table, the column, the other table's column."""


def _read_sqlite(path: Path) -> tuple[dict[str, Columns], dict[str, str], _Declared]:
    """The tables, primary keys of one column, and foreign keys of a SQLite file."""
    if not path.is_file():
        raise FileNotFoundError(f"tables must be the path of a SQLite file, {path} does not exist")
    tables: dict[str, Columns] = {}
    keys: dict[str, str] = {}
    declared: _Declared = {}
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (table,) in found.fetchall():
            quoted = '"' + table.replace('"', '""') + '"'
            info = connection.execute(f"PRAGMA table_info({quoted})").fetchall()
            cursor = connection.execute(f"SELECT * FROM {quoted}")
            rows = cursor.fetchall()
            tables[table] = {column[1]: _objects([row[i] for row in rows]) for i, column in enumerate(info)}
            own = [column[1] for column in info if column[5]]
            if len(own) == 1:
                keys[table] = own[0]
            for reference in connection.execute(f"PRAGMA foreign_key_list({quoted})").fetchall():
                declared.setdefault((table, reference[0]), []).append((reference[2], reference[3], reference[4]))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"tables must be a SQLite file: {path}: {error}") from error
    finally:
        connection.close()
    return tables, keys, declared


def _to_primary_keys(declared: _Declared, keys: Mapping[str, str]) -> list[ForeignKey]:
    """The foreign keys of one column that refer to primary keys of one column; a warning names the others."""
    references: list[ForeignKey] = []
    for (table, _), parts in declared.items():
        other, column, target = parts[0]
        is_primary = target is None or target.lower() == keys.get(other, target).lower()
        if len(parts) == 1 and is_primary:
            references.append((table, column, other))
        else:
            columns = ", ".join(part[1] for part in parts)
            warnings.warn(
                f"left out the foreign key ({columns}) of {table!r}: it is not to the primary key of {other!r}; "
                "give `foreign_keys`, and the column that it refers to in `primary_keys`",
                stacklevel=3,
            )
    return references


def _columns(table: str, given: Any) -> Columns:
    """The columns of a table by name."""
    if isinstance(given, Mapping):
        found = {str(column): _array(values) for column, values in given.items()}
    elif hasattr(given, "column_names"):
        found = {str(column): _array(given.column(column)) for column in given.column_names}
    elif hasattr(given, "columns"):
        found = {str(column): _array(given[column]) for column in given.columns}
    else:
        raise ValueError(
            "tables must be pandas DataFrames, Arrow tables or mappings of columns, "
            f"{table!r} is {type(given).__name__}"
        )
    lengths = {column: len(values) for column, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of table {table!r} must have one length, got {lengths}")
    return found


def _array(values: Any) -> np.ndarray:
    """A column as numbers, booleans, times, or objects with None where missing."""
    if hasattr(values, "to_pylist"):
        values = values.to_pylist()
    elif hasattr(values, "isna"):
        missing = np.asarray(values.isna())
        values = np.asarray(values.to_numpy())
        if missing.any() and values.dtype == object:
            values = values.copy()
            values[missing] = None
    array = values if isinstance(values, np.ndarray) else _objects(list(values))
    if array.ndim != 1:
        raise ValueError(f"a column must have one value a row, got shape {list(array.shape)}")
    return _objects(list(array)) if array.dtype.kind in "OUS" else array


def _objects(values: list[Any]) -> np.ndarray:
    """Values of Python as numbers, booleans or times where all of them are, else as objects."""
    known = [value for value in values if not _is_missing(value)]
    kinds = {type(value) for value in known}
    if known and all(issubclass(kind, bool | np.bool_) for kind in kinds) and len(known) == len(values):
        return np.array(values, bool)
    if known and all(issubclass(kind, int | np.integer) for kind in kinds) and len(known) == len(values):
        return np.array(values, np.int64)
    wide = known and all(issubclass(kind, _EXACT_NUMBERS) for kind in kinds) and max(map(abs, known)) > _EXACT
    if known and not wide and all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array([np.nan if _is_missing(value) else value for value in values], np.float64)
    if known and all(issubclass(kind, datetime.timedelta | np.timedelta64) for kind in kinds):
        return np.array(["NaT" if _is_missing(value) else value for value in values], "timedelta64[us]")
    if known and all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        return np.array([np.datetime64("NaT") if _is_missing(value) else _moment(value) for value in values])
    array = np.empty(len(values), object)
    array[:] = [None if _is_missing(value) else value for value in values]
    return array


def _as_numbers(values: np.ndarray) -> np.ndarray:
    """A column of objects as float64 if it has only integers, which `_objects` kept exact for keys."""
    known = [value for value in values if value is not None] if values.dtype.kind == "O" else []
    if known and all(isinstance(value, _EXACT_NUMBERS) for value in known):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return values


def _is_missing(value: Any) -> bool:
    floats = float | np.floating | np.datetime64 | np.timedelta64 | decimal.Decimal
    return value is None or (isinstance(value, floats) and bool(value != value))


def _moment(value: Any) -> np.datetime64:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(value, "us")


def _missing(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind == "O":
        return np.array([value is None for value in values], bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)


def _check_names(
    columns: Mapping[str, Columns],
    keys: Mapping[str, str],
    references: Sequence[tuple[str, ...]],
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


# --------------------------------------------------------------------------------------------------- edges


def _edges(
    columns: Mapping[str, Columns], keys: Mapping[str, str], references: Sequence[Any], dangling: str
) -> dict[Any, Any]:
    row_of: dict[str, dict[Any, int]] = {}
    for table, column in keys.items():
        values = columns[table][column]
        if _missing(values).any():
            raise ValueError(f"the primary key {table}.{column} must have no missing values")
        row_of[table] = {value: row for row, value in enumerate(values.tolist())}
        if len(row_of[table]) != len(values):
            raise ValueError(f"the primary key {table}.{column} must be unique, some values are repeated")
    edges = {}
    for table, column, other in references:
        values = columns[table][column]
        rows = np.flatnonzero(~_missing(values))
        found = np.array([row_of[other].get(value, -1) for value in values[rows].tolist()], np.int32).reshape(-1)
        lost = found < 0
        if lost.any() and dangling == "error":
            example = values[rows][lost].tolist()[0]
            raise ValueError(
                f"the foreign key {table}.{column} must refer to rows of {other!r}: {int(lost.sum())} values such as "
                f"{example!r} do not; pass dangling='drop' to leave these edges out"
            )
        edges[table, column, other] = rows[~lost].astype(np.int32), found[~lost]
    return edges


# --------------------------------------------------------------------------------------------------- features


def _features(column: str, values: np.ndarray, fitted: np.ndarray, max_categories: int, text_width: int) -> np.ndarray:
    """float32[rows, features] of one column."""
    values = _as_numbers(values)
    if values.dtype.kind != "O":
        return _numbers(column, values, fitted)
    known = ~_missing(values)
    texts = [str(value) if not isinstance(value, bytes) else value.hex() for value in values]
    categories = sorted({texts[row] for row in np.flatnonzero(known & fitted)})
    if len(categories) <= max_categories:
        place = {category: number for number, category in enumerate(categories)}
        made = np.zeros((len(values), len(categories)), np.float32)
        for row in np.flatnonzero(known):
            if texts[row] in place:
                made[row, place[texts[row]]] = 1.0
        return made
    made = np.zeros((len(values), text_width), np.float32)
    for row in np.flatnonzero(known):
        for word in texts[row].lower().split():
            code = zlib.crc32(word.encode())
            made[row, (code >> 1) % text_width] += 1.0 if code & 1 else -1.0
    return made / np.maximum(np.linalg.norm(made, axis=1, keepdims=True), 1e-12)


def _numbers(column: str, values: np.ndarray, fitted: np.ndarray) -> np.ndarray:
    if values.dtype.kind not in "biufmM":
        raise ValueError(f"the column {column} must have numbers, times or text, got {values.dtype}")
    missing = _missing(values)
    numbers = _times(values, "").astype(np.float64) if values.dtype.kind == "M" else values.astype(np.float64)
    numbers = np.where(missing, 0.0, numbers)
    if not np.isfinite(numbers).all():
        raise ValueError(f"the column {column} must be finite, got infinity; replace it by NaN where it means missing")
    known = numbers[fitted & ~missing]
    mean, deviation = (known.mean(), known.std()) if known.size else (0.0, 1.0)
    scaled = np.where(missing, 0.0, (numbers - mean) / (deviation if deviation > 0 else 1.0))
    parts = [scaled, missing] if missing.any() else [scaled]
    return np.stack(parts, axis=1).astype(np.float32)


def _times(values: np.ndarray, what: str) -> np.ndarray:
    """Times in seconds since 1970, or numbers as they are; a missing time is the earliest."""
    missing, values = _missing(values), _as_numbers(values)
    if values.dtype.kind == "O":
        values = np.array(["NaT" if value is None else _iso(value, what) for value in values], "datetime64[us]")
    if values.dtype.kind == "M":
        seconds = values.astype("datetime64[s]").astype(np.int64)
        return np.where(missing, np.iinfo(np.int64).min, seconds)
    if values.dtype.kind not in "iuf":
        raise ValueError(f"the time column {what} must have times or numbers, got {values.dtype}")
    return np.where(missing, -np.inf, values) if values.dtype.kind == "f" else values


def _iso(value: Any, what: str) -> np.datetime64:
    try:
        return _moment(datetime.datetime.fromisoformat(str(value)))
    except ValueError as error:
        raise ValueError(f"the time column {what} must have times as ISO 8601 text, got {value!r}") from error


def _time(value: Any) -> Any:
    """A time of `Label` as `_times` has it."""
    return _times(_objects([value]), "of the label")[0]


def _labelled(
    data: HeteroDataset, columns: Mapping[str, Columns], times: Mapping[str, np.ndarray], label: Label
) -> HeteroDataset:
    values = columns[label.table][label.column]
    known = ~_missing(values)
    classes = np.unique([str(value) for value in values[known]] if values.dtype.kind == "O" else values[known])
    wanted = np.array([str(value) for value in values], object) if values.dtype.kind == "O" else values
    labels = np.full(len(values), -1, np.int64)
    labels[known] = np.searchsorted(classes, wanted[known].astype(classes.dtype))
    splits = {}
    if label.valid_from is not None or label.test_from is not None:
        if label.table not in times or label.valid_from is None or label.test_from is None:
            raise ValueError(
                f"label must have `valid_from` and `test_from`, and time_columns the table {label.table!r}, "
                "to split rows"
            )
        valid, test, when = _time(label.valid_from), _time(label.test_from), times[label.table]
        if not valid <= test:
            raise ValueError(
                f"label must have a `valid_from` no later than `test_from`, got {label.valid_from!r} and "
                f"{label.test_from!r}; else rows would be in two splits"
            )
        parts = {"train": when < valid, "valid": (when >= valid) & (when < test), "test": when >= test}
        splits = {split: {label.table: np.flatnonzero(known & part)} for split, part in parts.items()}
    return dataclasses.replace(
        data,
        labels={label.table: labels},
        num_classes={label.table: len(classes)},
        splits=splits,
        check=False,
    )
