"""Tables in files: SQLite, and folders of Parquet and CSV files."""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from dejax._optional import optional
from dejax.datasets.tables import _csv
from dejax.datasets.tables._columns import Columns, objects_of

_SUFFIXES = (".parquet", *_csv.SUFFIXES)

Declared = dict[tuple[str, int], list[tuple[str, str, str | None]]]
"""(table, number) of a foreign key -> for each of its columns the other table, the column, the other table's column."""


def read_sqlite(path: Path) -> tuple[dict[str, Columns], dict[str, str | tuple[str, ...]], Declared]:
    """The tables, primary keys (of several columns as a tuple), and foreign keys of a SQLite file."""
    if not path.is_file():
        raise FileNotFoundError(f"tables must be a folder or a SQLite file, got {path}, which does not exist")
    tables: dict[str, Columns] = {}
    keys: dict[str, str | tuple[str, ...]] = {}
    declared: Declared = {}
    connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)
    # SQLite checks no text: bytes that are no UTF-8 become such as \xff, which keeps different texts apart.
    connection.text_factory = lambda text: text.decode("utf-8", "backslashreplace")
    try:
        found = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'")
        for (table,) in found.fetchall():
            quoted = '"' + table.replace('"', '""') + '"'
            info = connection.execute(f"PRAGMA table_info({quoted})").fetchall()
            cursor = connection.execute(f"SELECT * FROM {quoted}")
            rows = cursor.fetchall()
            # Of a generated column the result has values, and the list of columns no entry.
            tables[table] = {what[0]: objects_of([row[i] for row in rows]) for i, what in enumerate(cursor.description)}
            own = [column[1] for column in sorted(info, key=lambda column: column[5]) if column[5]]
            if own:
                keys[table] = own[0] if len(own) == 1 else tuple(own)
            for reference in connection.execute(f"PRAGMA foreign_key_list({quoted})").fetchall():
                declared.setdefault((table, reference[0]), []).append((reference[2], reference[3], reference[4]))
    except sqlite3.DatabaseError as error:
        raise ValueError(f"tables must be a SQLite file, got {path}: {error}") from error
    finally:
        connection.close()
    return tables, keys, declared


def to_primary_keys(declared: Declared, keys: Mapping[str, Any]) -> list[Any]:
    """The foreign keys that refer to primary keys, of several columns as tuples; a warning names the others."""
    references: list[Any] = []
    for (table, _), parts in declared.items():
        tables = {name.lower(): name for name in keys}  # SQLite knows no upper and lower case of names
        other = tables.get(parts[0][0].lower(), parts[0][0])
        key = keys.get(other)
        primary = [key] if isinstance(key, str) else list(key or ())
        if all(part[2] is None for part in parts) and len(primary) == len(parts):
            column_of = dict(zip(map(str.lower, primary), (part[1] for part in parts), strict=True))
        else:
            column_of = {(part[2] or "").lower(): part[1] for part in parts}
        if column_of.keys() == {name.lower() for name in primary} and len(parts) == len(primary):
            columns = tuple(column_of[name.lower()] for name in primary)
            references.append((table, columns[0] if len(columns) == 1 else columns, other))
        else:
            names = ", ".join(part[1] for part in parts)
            warnings.warn(
                f"left out the foreign key ({names}) of {table!r}: it is not to the primary key of {other!r}; "
                "give `foreign_keys`, and the columns that it refers to in `primary_keys`",
                stacklevel=4,
            )
    return references


def read_folder(
    folder: Path, primary_keys: Mapping[str, str | Sequence[str]], foreign_keys: Sequence[Sequence[Any]]
) -> dict[str, Any]:
    """The tables of a folder: a Parquet or CSV file for each, or a folder of the Parquet files of one table.

    Args:
        folder: the folder.
        primary_keys, foreign_keys: as in `from_tables`: these columns of CSV files stay text, but for integers.

    Raises:
        ValueError: no such files, or two for one table.
        ModuleNotFoundError: pyarrow is missing.
    """
    tables: dict[str, Any] = {}
    of_csv: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), None)
        is_parts = path.is_dir() and any(path.glob("**/*.parquet"))
        if suffix is None and not is_parts:
            continue
        name = path.name.removesuffix(suffix or "")
        if name in tables:
            raise ValueError(
                f"tables must be one file each, got two of {name!r} in the folder {folder}, one of them {path.name}; "
                "move one away"
            )
        tables[name] = read_file(path)
        if _is_csv(path):
            of_csv[name] = path
    if not tables:
        raise ValueError(f"tables must be a folder with files {', '.join(_SUFFIXES)}, got {folder} without such files")
    return _csv.with_keys_as_text(tables, of_csv, primary_keys, foreign_keys) if of_csv else tables


def _is_csv(path: Path) -> bool:
    return path.name.endswith(_csv.SUFFIXES)


def read_file(path: Path, text: Collection[str] = ()) -> Any:
    """The table of a Parquet or CSV file, or of a folder of Parquet files, as a `pyarrow.Table`.

    Args:
        path: the file or folder.
        text: the names of columns that are read as text from a CSV file.

    Raises:
        ValueError: a file of another kind, or a damaged one.
        ModuleNotFoundError: pyarrow is missing.
    """
    if _is_csv(path):
        return _csv.read_csv(path, text=text)
    if not (path.is_dir() or path.name.endswith(_SUFFIXES[0])):
        raise ValueError(f"tables must be files {', '.join(_SUFFIXES)}, got {path.name}")
    with optional("pyarrow", of=f"reading {path}"):
        import pyarrow
        import pyarrow.parquet as parquet
    try:
        return parquet.read_table(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path} must be a Parquet file, got an error: {error}; write it again") from error
