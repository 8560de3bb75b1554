"""Columns of tables: read from DataFrames, Arrow tables, mappings or SQLite, as numpy arrays with missing values."""

from __future__ import annotations

import datetime
import decimal
import sqlite3
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

Columns = dict[str, np.ndarray]
ForeignKey = tuple[str, str, str]
"""(table, column, table that the column refers to)."""

_EXACT_NUMBERS = (int, np.integer, decimal.Decimal)
_NUMBERS = (int, float, np.floating, np.integer, np.bool_, decimal.Decimal)
EXACT = 2**53  # beyond, float64 does not have every integer: keys with missing values stay objects


Declared = dict[tuple[str, int], list[tuple[str, str, str | None]]]
"""(table, number) of a foreign key -> for each of its columns the other table, the column, the other table's column."""


def read_sqlite(path: Path) -> tuple[dict[str, Columns], dict[str, str], Declared]:
    """The tables, primary keys of one column, and foreign keys of a SQLite file."""
    if not path.is_file():
        raise FileNotFoundError(f"tables must be the path of a SQLite file, {path} does not exist")
    tables: dict[str, Columns] = {}
    keys: dict[str, str] = {}
    declared: Declared = {}
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    try:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (table,) in found.fetchall():
            quoted = '"' + table.replace('"', '""') + '"'
            info = connection.execute(f"PRAGMA table_info({quoted})").fetchall()
            cursor = connection.execute(f"SELECT * FROM {quoted}")
            rows = cursor.fetchall()
            tables[table] = {column[1]: objects_of([row[i] for row in rows]) for i, column in enumerate(info)}
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


def to_primary_keys(declared: Declared, keys: Mapping[str, str]) -> list[ForeignKey]:
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


def columns_of(table: str, given: Any) -> Columns:
    """The columns of a table by name."""
    if isinstance(given, Mapping):
        found = {str(column): array_of(values) for column, values in given.items()}
    elif hasattr(given, "column_names"):
        found = {str(column): array_of(given.column(column)) for column in given.column_names}
    elif hasattr(given, "columns"):
        found = {str(column): array_of(given[column]) for column in given.columns}
    else:
        raise ValueError(
            "tables must be pandas DataFrames, Arrow tables or mappings of columns, "
            f"{table!r} is {type(given).__name__}"
        )
    lengths = {column: len(values) for column, values in found.items()}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"the columns of table {table!r} must have one length, got {lengths}")
    return found


def array_of(values: Any) -> np.ndarray:
    """A column as numbers, booleans, times, or objects with None where missing."""
    if hasattr(values, "to_pylist"):
        values = values.to_pylist()
    elif hasattr(values, "isna"):
        missing = np.asarray(values.isna())
        values = np.asarray(values.to_numpy())
        if missing.any() and values.dtype == object:
            values = values.copy()
            values[missing] = None
    array = values if isinstance(values, np.ndarray) else objects_of(list(values))
    if array.ndim != 1:
        raise ValueError(f"a column must have one value a row, got shape {list(array.shape)}")
    return objects_of(list(array)) if array.dtype.kind in "OUS" else array


def objects_of(values: list[Any]) -> np.ndarray:
    """Values of Python as numbers, booleans or times where all of them are, else as objects."""
    known = [value for value in values if not _is_missing(value)]
    kinds = {type(value) for value in known}
    if known and all(issubclass(kind, bool | np.bool_) for kind in kinds) and len(known) == len(values):
        return np.array(values, bool)
    if known and all(issubclass(kind, int | np.integer) for kind in kinds) and len(known) == len(values):
        return np.array(values, np.int64)
    wide = known and all(issubclass(kind, _EXACT_NUMBERS) for kind in kinds) and max(map(abs, known)) > EXACT
    if known and not wide and all(issubclass(kind, _NUMBERS) for kind in kinds):
        return np.array([np.nan if _is_missing(value) else value for value in values], np.float64)
    if known and all(issubclass(kind, datetime.timedelta | np.timedelta64) for kind in kinds):
        return np.array(["NaT" if _is_missing(value) else value for value in values], "timedelta64[us]")
    if known and all(issubclass(kind, datetime.date | np.datetime64) for kind in kinds):
        return np.array([np.datetime64("NaT", "us") if _is_missing(value) else moment_of(value) for value in values])
    array = np.empty(len(values), object)
    array[:] = [None if _is_missing(value) else value for value in values]
    return array


def as_numbers(values: np.ndarray) -> np.ndarray:
    """A column of objects as float64 if it has only integers, which `objects_of` kept exact for keys."""
    known = [value for value in values if value is not None] if values.dtype.kind == "O" else []
    if known and all(isinstance(value, _EXACT_NUMBERS) for value in known):
        return np.array([np.nan if value is None else value for value in values], np.float64)
    return values


def _is_missing(value: Any) -> bool:
    floats = float | np.floating | np.datetime64 | np.timedelta64 | datetime.datetime | decimal.Decimal
    return value is None or (isinstance(value, floats) and bool(value != value))


def moment_of(value: Any) -> np.datetime64:
    if isinstance(value, datetime.datetime) and value.tzinfo is not None:
        value = value.astimezone(datetime.UTC).replace(tzinfo=None)
    return np.datetime64(value, "us")


def missing_in(values: np.ndarray) -> np.ndarray:
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind == "O":
        return np.array([value is None for value in values], bool)
    return np.isnan(values) if values.dtype.kind == "f" else np.zeros(len(values), bool)
