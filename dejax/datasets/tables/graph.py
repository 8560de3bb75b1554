"""Relational tables as a graph: rows are nodes, foreign keys are edges (Fey et al., arXiv 2312.04615)."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets._hetero import Ends, HeteroDataset, Relation
from dejax.datasets.columns import NEVER, Column
from dejax.datasets.tables._column_kinds import RawColumn
from dejax.datasets.tables._columns import Columns, ForeignKey, columns_of, text_of
from dejax.datasets.tables._files import read_folder, read_sqlite, to_primary_keys
from dejax.datasets.tables._known_from import (
    KnownTimes,
    TimeColumn,
    beginning,
    boundary,
    read_times,
    since_1970,
    warn_of_mixed_zones,
    warn_of_unnamed_times,
)
from dejax.datasets.tables._labels import Label, labelled
from dejax.datasets.tables._references import edges_of, with_added_rows, with_joined_keys
from dejax.datasets.tables._row_features import features_of
from dejax.datasets.tables._vectors import with_vectors


def from_tables(
    tables: Mapping[str, Any] | str | os.PathLike[str],
    primary_keys: Mapping[str, str | Sequence[str]] | None = None,
    foreign_keys: Sequence[tuple[str, str | Sequence[str], str]] | None = None,
    time_columns: Mapping[str, str] | None = None,
    *,
    known_at: Mapping[str, Mapping[str, str]] | None = None,
    kinds: Mapping[str, Mapping[str, str]] | None = None,
    vectors: Mapping[str, Mapping[str, Any]] | None = None,
    label: Label | None = None,
    fit_before: Any = None,
    fixed_features: bool = True,
    max_categories: int = 50,
    text_width: int = 32,
    dangling: str = "error",
    missing_times: str = "error",
    numbers_since_1970: str | None = None,
    name: str = "tables",
) -> HeteroDataset:
    """Converts relational tables to a `HeteroDataset`: rows become nodes, and foreign keys become edges.

    The node type of a row is its table. A foreign key `column` of `table` becomes the relation
    `(table, column, other table)` and its reverse `(other table, "rev_" + column, table)`. Each other column becomes a
    `Column`, whose kind follows from its values:

    | values | kind |
    | --- | --- |
    | numbers, booleans, durations (in seconds) | number |
    | text of which nine in ten are numbers, such as 7.5, 7,5 or 1,234.50; all other text is then missing | number |
    | dates and times; text of which nine in ten are ISO 8601 times; all other text is then missing | time |
    | other text or bytes with up to `max_categories` different values, or at least ten rows for each value | category |
    | other text or bytes | text |
    | lists of texts or numbers | categories |
    | arrays of floats of one width | vector |

    Empty text is a missing value. `data.summary()` shows the kinds and what was odd about the values.

    Encoders inside of a model read `data.columns`. For models without encoders, `data.features` has the columns as
    float32 features: numbers and times are standardised and 0 where missing, with a second feature that marks missing
    values if there are any; categories (up to `max_categories`) are one-hot; words of text, and categories beyond that
    number, are `text_width` signed hashes with norm 1 (arXiv 0902.2206); vectors are unchanged. With `fit_before`,
    kinds, categories, means and deviations come only from rows that are known before that time. A category that occurs
    only later is all zeros in `features`.

    **Times.** A row is known from its own time on, but not before the rows that it refers to. Rows of tables without
    times are known from the beginning, or from the time on at which the rows that they refer to are known. An edge is
    known when both of its rows are. `edge_times` has this time for each edge, for the relations with an edge that is
    not always known. `node_times` has the time of each row as a seed: its own time, or the time from which it is known.
    So a sample with these times as `seed_times` contains no later row.

    A column that becomes known later than its row, such as the delay of a flight, is named in `known_at`. The time of
    each value is in `Column.known_at`, and the column is not part of `features`. For each column of such times (say
    `landed`) and each foreign key of the table (say `origin`) there is an additional relation `(table, "origin@landed",
    other table)`, whose edges are known from that time on. Its latest edges lead to the flights that landed last.

    Args:
        tables: for each table name a mapping of columns, a pandas DataFrame, or a table of Arrow's interchange
            (pyarrow, polars, DuckDB; needs pyarrow). Or the path of a folder with a Parquet or CSV file for each table
            (`read_csv`). Or the path of a SQLite file, whose own keys are the defaults of `primary_keys` and
            `foreign_keys`.
        primary_keys: for some tables, the column of unique keys; tables that others refer to need one. A key of several
            columns is a list of columns and becomes text, such as `"plane, seat"` for the columns plane and seat.
        foreign_keys: tuples (table, column, table that the column refers to). A key of several columns is a list in the
            order of the primary key. Missing values are no edges.
        time_columns: for some tables, the column with the time at which each row came to be. Times are counted in whole
            seconds since 1970. Columns of numbers stay as they are, so all of them need one unit.
        known_at: for each table a dict from a column to the column of the same table that has the time from which its
            values are known. These times themselves are known from then on, too. If the time is missing, the value is
            never shown.
        kinds: for each table a dict from a column to the kind to read it as, or "ignore". Keys become columns only if
            they are named here.
        vectors: for each table a dict from a column to vectors for it: an array float[rows, width] (a memory map is not
            read into memory here); or a function that is called once with the different texts of the column and returns
            a vector for each, such as `sentence_vectors` makes. A vector must depend on its own row only, so that it
            tells nothing about the future.
        label: the column to predict, for models that classify nodes. A `Task` can do more.
        fit_before: time before which rows determine kinds and features, as above; by default `label.valid_from`.
        fixed_features: whether to make `features`.
        max_categories: largest number of categories, as above.
        text_width: number of hashes for text, as above.
        dangling: what happens to a foreign key that refers to no row: "error" raises; "drop" leaves out the edge; "add"
            appends a row with this key, whose other columns are missing. `summary` counts them.
        missing_times: what happens to a row without a time in a table that has times: "error" raises; "drop" leaves out
            the row and its edges; "always known" takes it as known from the beginning.
        numbers_since_1970: "s", "ms", "us" or "ns": columns of times that are numbers (also those of `known_at`) are in
            this unit since 1970, as databases often store them.
        name: name of the data set.

    Warns:
        UserWarning: a table without a time column has a column of times that lie after the first time of the others: a
            model might see its rows before they came to be; or some columns of times have a zone and others have none,
            which are taken as UTC.

    Raises:
        ValueError: a table or column does not exist; columns have different lengths; primary keys are missing or
            repeated; no row has a foreign key, or its type cannot be converted exactly to that of the primary key;
            times are missing; one table has times and another numbers, or a column has times with and without zones; a
            label has no times to split by, `valid_from` after `test_from`, or either in another unit than the table's
            times; numbers are infinite or complex; or values cannot have the given kind.
        FileNotFoundError: there is no such SQLite file.
        ModuleNotFoundError: pyarrow is not installed, which files and Arrow's interchange need.

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
    tables, primary_keys, foreign_keys = _opened(tables, primary_keys, foreign_keys)
    if dangling not in ("error", "drop", "add"):
        raise ValueError(f"dangling must be 'error', 'drop' or 'add', got {dangling!r}")
    columns = with_vectors({table: columns_of(table, given) for table, given in tables.items()}, vectors or {})
    columns, keys, references = with_joined_keys(columns, primary_keys or {}, _triples(foreign_keys or ()))
    told = _Told(
        keys, references, dict(time_columns or {}), dict(known_at or {}), dict(kinds or {}), label, max_categories
    )
    told.check(columns)
    warn_of_mixed_zones(tables, told.columns_of_times)
    if numbers_since_1970 is not None:
        for table, column in told.columns_of_times:
            columns[table][column] = since_1970(columns[table][column], numbers_since_1970)
    times = read_times(columns, told.time_columns, missing_times)
    split_at = None if label is None else label.split_times(times)
    rows = _linked(columns, told, times, dangling, missing_times)
    known = KnownTimes.of(rows.columns, rows.times, rows.edges, told.known_at)
    if fit_before is not None:
        every = np.concatenate([np.zeros(0, np.int64), *(time.values[~time.missing] for time in rows.times.values())])
        fit_before = boundary("from_tables must have a `fit_before`", fit_before, every, known.unit, "the time columns")
    elif split_at is not None:
        fit_before = split_at[0]
    typed = told.typed(rows.columns, known, fit_before)
    warn_of_unnamed_times(typed, known)
    features = {}
    if fixed_features:
        fitted = {table: _before(fit_before, of_rows) for table, of_rows in known.rows.items()}
        features = _features(typed, told.not_features, fitted, max_categories, text_width)
    data = HeteroDataset(
        name,
        {table: _rows_of(found) for table, found in rows.columns.items()},
        rows.edges,
        features=features,
        node_times=known.late_rows | known.own,
        edge_times=known.late_edges(rows.edges),
        left_out={what: count for what, count in rows.left_out.items() if count},
        columns=typed,
        keys=rows.numbers | {table: _key_array(rows.columns[table][key]) for table, key in keys.items()},
        known_from=known.late_rows,
        time_unit=known.unit,
    ).with_reverse()
    data = _with_events(data, known.values)
    return data if label is None else labelled(data, rows.columns, label, split_at)


@dataclasses.dataclass(frozen=True, eq=False)
class _LinkedRows:
    """The rows of the tables and the edges between them, and what was left out of them.

    `numbers`: of tables that have lost rows, the numbers that the others had.
    """

    columns: dict[str, Columns]
    times: dict[str, TimeColumn]
    edges: dict[Relation, Ends]
    left_out: dict[str, int]
    numbers: dict[str, np.ndarray]


def _linked(
    columns: dict[str, Columns], told: _Told, times: dict[str, TimeColumn], dangling: str, missing_times: str
) -> _LinkedRows:
    """The rows with their edges, by what is to happen to keys that no row has, and to rows without a time."""
    left_out: dict[str, int] = {}
    if dangling == "add":
        columns, times = _with_rows_of_keys(columns, told.keys, told.references, times, left_out)
    edges, dangled = edges_of(columns, told.keys, told.references, dangling)
    left_out |= {f"edges {' -> '.join(r)}, whose key no row has": n for r, n in dangled.items()}
    numbers: dict[str, np.ndarray] = {}
    if missing_times == "drop":
        numbers = {table: np.flatnonzero(~time.missing) for table, time in times.items() if time.missing.any()}
        columns, times, edges = _without_rows_of_no_time(columns, times, edges, left_out)
    return _LinkedRows(columns, times, edges, left_out, numbers)


def _opened(
    tables: Any, primary_keys: Mapping[str, Any] | None, foreign_keys: Sequence[Any] | None
) -> tuple[Mapping[str, Any], Mapping[str, Any] | None, Sequence[Any] | None]:
    """The tables of a file or folder; of a SQLite file with its own keys, where none are given."""
    if not isinstance(tables, str | os.PathLike):
        if not isinstance(tables, Mapping):
            raise ValueError(
                "tables must be a dict of tables by name, a folder or a SQLite file, got "
                f"{type(tables).__name__}; give a table as {{'orders': table}}"
            )
        return tables, primary_keys, foreign_keys
    if Path(tables).is_dir():
        return read_folder(Path(tables), primary_keys or {}, _triples(foreign_keys or ())), primary_keys, foreign_keys
    tables, own_keys, declared = read_sqlite(Path(tables))
    primary_keys = own_keys if primary_keys is None else primary_keys
    return tables, primary_keys, to_primary_keys(declared, primary_keys) if foreign_keys is None else foreign_keys


def _rows_of(columns: Columns) -> int:
    return len(next(iter(columns.values()), ()))


def _with_rows_of_keys(
    columns: Mapping[str, Columns],
    keys: Mapping[str, str],
    references: Sequence[ForeignKey],
    times: Mapping[str, TimeColumn],
    left_out: dict[str, int],
) -> tuple[dict[str, Columns], dict[str, TimeColumn]]:
    """Columns and times with a row more for each key that only foreign keys name; `left_out` counts these rows."""
    longer, added = with_added_rows(columns, keys, references)
    left_out |= {f"columns of rows of {table} that only foreign keys name": n for table, n in added.items()}
    return longer, {table: time.lengthened(added.get(table, 0), beginning(times)) for table, time in times.items()}


def _without_rows_of_no_time(
    columns: Mapping[str, Columns],
    times: Mapping[str, TimeColumn],
    edges: Mapping[Relation, Ends],
    left_out: dict[str, int],
) -> tuple[dict[str, Columns], dict[str, TimeColumn], dict[Relation, Ends]]:
    """Columns, times and edges without the rows that have no time, in the tables that have times; `left_out` counts."""
    left_out |= {f"rows of {table} without a time": int(time.missing.sum()) for table, time in times.items()}
    kept = {t: ~times[t].missing if t in times else np.ones(_rows_of(found), bool) for t, found in columns.items()}
    left = {t: {name: values[kept[t]] for name, values in found.items()} for t, found in columns.items()}
    dated = {
        t: dataclasses.replace(time, values=time.values[kept[t]], missing=time.missing[kept[t]])
        for t, time in times.items()
    }
    between = {relation: _renumbered(ends, kept[relation[0]], kept[relation[2]]) for relation, ends in edges.items()}
    return left, dated, between


def _with_events(data: HeteroDataset, shown_at: Mapping[str, Mapping[str, np.ndarray]]) -> HeteroDataset:
    """The dataset with a relation from a table to each table that it refers to, whose edges are known when a value is.

    So the latest edges of a row lead to those rows of the table whose late values came to be known last.
    """
    edges, times = dict(data.edges), dict(data.edge_times)
    for relation, ends in data.edges.items():
        if (relation[2], f"rev_{relation[1]}", relation[0]) not in data.edges:
            continue  # a reverse relation
        for column, when in shown_at.get(relation[0], {}).items():
            ever = when[ends[0]] != NEVER
            event = (relation[0], f"{relation[1]}@{column}", relation[2])
            edges[event], times[event] = (ends[0][ever], ends[1][ever]), when[ends[0][ever]]
    return dataclasses.replace(data, edges=edges, edge_times=times, check=False)


@dataclasses.dataclass(frozen=True, eq=False)
class _Told:
    """What `from_tables` was told about columns, by the names of its arguments."""

    keys: Mapping[str, str]
    references: Sequence[ForeignKey]
    time_columns: Mapping[str, str]
    known_at: Mapping[str, Mapping[str, str]]
    kinds: Mapping[str, Mapping[str, str]]
    label: Label | None
    max_categories: int

    def check(self, columns: Mapping[str, Columns]) -> None:
        """Raises if a table or column does not exist, or a foreign key refers to a table without a primary key."""
        _check_references(self.keys, self.references)
        _check_names(
            columns,
            primary_keys=self.keys.items(),
            time_columns=self.time_columns.items(),
            known_at=((table, column) for table, of in self.known_at.items() for pair in of.items() for column in pair),
            kinds=((table, column) for table, of in self.kinds.items() for column in of),
            foreign_keys=(reference[:2] for reference in self.references),
            label=() if self.label is None else [(self.label.table, self.label.column)],
        )

    @property
    def columns_of_times(self) -> list[tuple[str, str]]:
        """(table, column) of the times from which rows or values are known."""
        late = ((table, by) for table, of in self.known_at.items() for by in of.values())
        return sorted({*self.time_columns.items(), *late})

    @property
    def not_features(self) -> set[tuple[str, str]]:
        """(table, column) of what is no fixed feature."""
        return {*self.time_columns.items(), *([(self.label.table, self.label.column)] if self.label else ())}

    def typed(
        self, columns: Mapping[str, Columns], known: KnownTimes, fit_before: int | float | None
    ) -> dict[str, dict[str, Column]]:
        """The typed columns of each table."""
        return {
            table: self._typed(table, found, known.rows[table], known.values.get(table, {}), fit_before, known.unit)
            for table, found in columns.items()
        }

    def _typed(
        self,
        table: str,
        columns: Columns,
        known: np.ndarray,
        shown_at: Mapping[str, np.ndarray],
        fit_before: int | float | None,
        unit: str,
    ) -> dict[str, Column]:
        """The typed columns of a table that are no keys, except for those whose kinds are given."""
        by = dict(self.known_at.get(table, {}))
        by |= {time: time for time in by.values()}  # the time itself tells as much as what is known then
        kinds = dict(self.kinds.get(table, {}))
        no_columns = {column for of, column, _ in self.references if of == table} | {self.keys.get(table)}
        of_times = {self.time_columns.get(table), *by.values()}
        found = {}
        for column, values in columns.items():
            kind = kinds.get(column, "time" if column in of_times else None)
            if kind == "ignore" or (column in no_columns and column not in kinds):
                continue
            if kind == "time" and column not in kinds and values.dtype.kind == "f" and _has_fractions(values):
                kind = "number"
            late = shown_at[by[column]] if column in by else None
            fitted = _before(fit_before, known if late is None else late)
            raw = RawColumn(f"{table}.{column}", values, known, fitted, self.max_categories, late, unit)
            typed = raw.typed(kind)
            if late is None and column != self.time_columns.get(table, column):
                typed = _with_later_times(typed, known, unit)
            found[column] = typed
        return found


def _with_later_times(column: Column, known: np.ndarray, unit: str) -> Column:
    """A column of a table with times; some that lie after their rows are an oddity, since they may tell the future."""
    if column.kind != "time" or column.unit != unit:
        return column
    later = int((~column.missing & (column.values > known)).sum())
    if not later:
        return column
    what = f"after its row in {later:,} of {len(column):,}: if it was not known by then, name it in known_at"
    return dataclasses.replace(column, oddities=", ".join(filter(None, (column.oddities, what))))


def _before(time: int | float | None, known: np.ndarray) -> np.ndarray:
    """bool[rows], which are known before a time; all of them if it is None."""
    return np.full(len(known), True) if time is None else known < time


def _has_fractions(values: np.ndarray) -> bool:
    there = values[np.isfinite(values)]
    return bool((there != np.rint(there)).any())


def _key_array(values: np.ndarray) -> np.ndarray:
    """Primary keys as numbers, times or text, which of bytes is hexadecimal."""
    return np.array(list(map(text_of, values.tolist())), str) if values.dtype.kind == "O" else values


def _features(
    columns: Mapping[str, Mapping[str, Column]],
    not_features: set[tuple[str, str]],
    fitted: Mapping[str, np.ndarray],
    max_categories: int,
    text_width: int,
) -> dict[str, np.ndarray]:
    """The fixed features of each table's rows, side by side, of the columns that are known as soon as their rows."""
    features = {}
    for table, found in columns.items():
        parts = [
            features_of(column, fitted[table], max_categories, text_width)
            for name, column in found.items()
            if (table, name) not in not_features and column.known_at is None
        ]
        if parts and sum(part.shape[1] for part in parts):
            features[table] = np.concatenate(parts, axis=1)
    return features


def _renumbered(ends: Ends, kept: np.ndarray, kept_others: np.ndarray) -> Ends:
    """The edges between rows that are kept, by the rows' new numbers."""
    there = kept[ends[0]] & kept_others[ends[1]]
    numbers = [np.cumsum(rows, dtype=np.int32) - 1 for rows in (kept, kept_others)]
    return numbers[0][ends[0][there]], numbers[1][ends[1][there]]


def _triples(foreign_keys: Any) -> Sequence[Any]:
    """The foreign keys as given; raises where they are not a list of triples."""
    for given in [foreign_keys] if isinstance(foreign_keys, str | Mapping) else foreign_keys:
        if isinstance(given, str | Mapping) or len(given) != 3:
            raise ValueError(f"foreign_keys must be a list of (table, column, other table), got {given!r}")
    triples: Sequence[Any] = foreign_keys
    return triples


def _check_references(keys: Mapping[str, str], references: Sequence[ForeignKey]) -> None:
    """Raises if a foreign key refers to a table without a primary key."""
    for reference in references:
        if reference[2] not in keys:
            raise ValueError(
                f"primary_keys must have a key of the table {reference[2]!r}, to which the foreign key "
                f"{'.'.join(reference[:2])} refers, got keys of {', '.join(map(repr, keys)) or 'no table'}"
            )


def _check_names(columns: Mapping[str, Columns], **named: Iterable[tuple[str, str]]) -> None:
    """Raises if an argument of `from_tables`, given by its name, names a table or a column that does not exist."""
    for what, pairs in named.items():
        for table, column in pairs:
            if table not in columns:
                raise ValueError(f"{what} must name tables, {', '.join(map(repr, columns))}; got {table!r}")
            if column not in columns[table]:
                raise ValueError(f"{what} must name a column of {table!r}, {', '.join(columns[table])}; got {column!r}")
