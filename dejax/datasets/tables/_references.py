"""Foreign keys as edges between rows, where both columns have keys of one kind or can be converted exactly."""

from __future__ import annotations

import numbers
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.datasets.tables._columns import EXACT, Columns, ForeignKey, missing_in, objects_of, texts_of
from dejax.datasets.tables._known_from import time_of_text

_MIXED = "numbers and text"  # as of codes that a reader has made numbers of, one by one
_NANOSECONDS = {"W": 7 * 86_400 * 10**9, "D": 86_400 * 10**9, "h": 3600 * 10**9, "m": 60 * 10**9, "s": 10**9}
_NANOSECONDS |= {"ms": 10**6, "us": 10**3, "ns": 1}


@dataclass(frozen=True, eq=False)
class _Keys:
    """The keys of a column that are not missing.

    Attributes:
        name: "table.column".
        rows: the row of each key.
        values: the keys as Python values that can be compared.
        kind: "numbers", "text", "times", "durations", "bytes" or the names of other types.
    """

    name: str
    rows: np.ndarray
    values: list[Any]
    kind: str

    @classmethod
    def of(cls, name: str, column: np.ndarray) -> _Keys:
        rows = np.flatnonzero(~missing_in(column))
        column = column[rows]
        kind = column.dtype.kind
        if kind in "mM":
            return cls(name, rows, _nanoseconds(name, column), "times" if kind == "M" else "durations")
        if kind == "f" and (np.abs(column) >= EXACT).any():
            raise ValueError(
                f"the key {name} must have exact values, got floats from 2**53 on, which have lost digits; read the "
                "column as integers or as text"
            )
        values = column.tolist()
        if kind in "biuf":
            return cls(name, rows, values, "numbers")
        kinds = sorted({_kind_of(value) for value in values})
        return cls(name, rows, values, " and ".join(kinds))

    def as_text(self) -> list[Any] | None:
        """The keys as text, where they are text and integers; None otherwise."""
        if self.kind not in ("numbers", "text", _MIXED):
            return None
        whole = all(isinstance(value, str) or value == int(value) for value in self.values)
        return [value if isinstance(value, str) else str(int(value)) for value in self.values] if whole else None

    def as_kind(self, kind: str) -> list[Any] | None:
        """The keys as numbers or times, if each one of this text says exactly that; None otherwise."""
        if self.kind != "text":
            return None
        if kind == "numbers":
            numbers = [_exact_number(value) for value in self.values]
            return None if None in numbers else numbers
        times = [time_of_text(value) for value in self.values] if kind == "times" else [None]
        return None if None in times else _nanoseconds(self.name, np.array(times, "datetime64[us]"))


def _kind_of(value: Any) -> str:
    if isinstance(value, str):
        return "text"
    return "numbers" if isinstance(value, numbers.Number) else type(value).__name__


def _nanoseconds(name: str, values: np.ndarray) -> list[int]:
    unit, count = np.datetime_data(values.dtype)
    if unit in ("Y", "M") and values.dtype.kind == "M":
        values, unit, count = values.astype("datetime64[D]"), "D", 1
    if unit not in _NANOSECONDS:
        raise ValueError(f"the key {name} must have a unit from weeks to nanoseconds, got {values.dtype}; convert it")
    return [value * count * _NANOSECONDS[unit] for value in values.astype(np.int64).tolist()]


def with_joined_keys(
    columns: Mapping[str, Columns], keys: Mapping[str, Any], references: Sequence[Any]
) -> tuple[dict[str, Columns], dict[str, str], list[ForeignKey]]:
    """Tables with one column in place of each key of several columns: their values as text, with commas between.

    A comma within text has a backslash before it, so that no two keys have one text.

    Args:
        columns: the columns, by table.
        keys: table -> a column, or several.
        references: (table, a column or several, other table).

    Raises:
        ValueError: columns that do not exist; a key of another number of columns than the one that it refers to.
    """
    made = {table: dict(found) for table, found in columns.items()}

    def joined(what: str, table: str, key: Any) -> str:
        if isinstance(key, str) or table not in made:
            return key if isinstance(key, str) else ", ".join(key)
        for column in key:
            if column not in columns[table]:
                raise ValueError(f"{what} must name columns of {table!r}, {', '.join(columns[table])}; got {column!r}")
        parts = [_parts_of(columns[table][column]) for column in key]
        rows = [None if None in row else ", ".join(map(str, row)) for row in zip(*parts, strict=True)]
        made[table][", ".join(key)] = np.array([*rows, None], object)[:-1]
        return ", ".join(key)

    for table, column, other in (reference for reference in references if len(reference) == 3):
        own, of_other = (1 if isinstance(key, str) else len(key) for key in (column, keys.get(other, column)))
        if own != of_other:
            raise ValueError(
                f"foreign_keys must have as many columns as the primary key of {other!r}, {of_other}, got {own} of "
                f"{table!r}: {column!r}"
            )
    names = {table: joined("primary_keys", table, key) for table, key in keys.items()}
    return made, names, [(of[0], joined("foreign_keys", of[0], of[1]), *of[2:]) for of in references]


def _parts_of(values: np.ndarray) -> list[str | None]:
    """Values as parts of a key: equal values have equal text, whatever the unit of times or kind of numbers."""
    kind, unit = values.dtype.kind, np.datetime_data(values.dtype)[0] if values.dtype.kind in "mM" else ""
    if kind == "m":
        values = values.astype("timedelta64[ns]")
    elif kind == "M" and unit not in ("s", "ms", "us", "ns"):
        values = values.astype("datetime64[s]")
    texts = texts_of(values.astype(np.int8) if kind == "b" else values)  # booleans beside missing ones are numbers
    if kind == "M":
        texts = [text and _without_zeros(text) for text in texts]
    return [text and text.replace("\\", "\\\\").replace(",", "\\,") for text in texts]


def _without_zeros(time: str) -> str:
    """ISO 8601 text without zeros after the point, and of a midnight the date."""
    return (time.rstrip("0").rstrip(".") if "." in time else time).removesuffix("T00:00:00")


def with_added_rows(
    columns: Mapping[str, Columns], keys: Mapping[str, str], references: Sequence[ForeignKey]
) -> tuple[dict[str, Columns], dict[str, int]]:
    """Tables with a row for each key that is referred to and that no row has, at the end; and how many were added.

    All other columns of these rows are missing.

    Raises:
        ValueError: primary keys that are missing or repeated; foreign keys that cannot be converted to their type.
    """
    made, added = {table: dict(found) for table, found in columns.items()}, {}
    for other, key in keys.items():
        primary = _primary(f"{other}.{key}", columns[other][key])
        known: dict[Any, None] = {}
        for table, column, _ in (reference for reference in references if reference[2] == other):
            foreign = _Keys.of(f"{table}.{column}", columns[table][column])
            wanted, there = _comparable(foreign, primary)
            if there is not primary.values:
                raise ValueError(
                    f"the foreign key {foreign.name} must have keys of the type of {primary.name}, {primary.kind}, to "
                    f"add rows, got {foreign.kind} such as {foreign.values[0]!r}; convert one of the columns"
                )
            known.update(dict.fromkeys(wanted))
        own = set(primary.values)
        new = [value for value in known if value not in own]
        if new:
            added[other] = len(new)
            made[other] = {name: _lengthened(values, len(new)) for name, values in columns[other].items()}
            made[other][key] = _with_keys(columns[other][key], new)
    return made, added


def _with_keys(column: np.ndarray, more: list[Any]) -> np.ndarray:
    """A column of keys, and more values of `_Keys` at its end, in a dtype that has all of them exactly."""
    if column.dtype.kind == "O":
        return np.array([*column, *more, None], object)[:-1]
    is_time = column.dtype.kind in "mM"
    added = np.array(more, f"{column.dtype.kind}8[ns]" if is_time else None)  # `_Keys` has nanoseconds
    with np.errstate(invalid="ignore"):
        exact = added if added.dtype == object else added.astype(column.dtype)
    if is_time:
        return np.concatenate([column, exact if (exact == added).all() else added])
    return np.concatenate([column, exact]) if exact.tolist() == more else objects_of([*column.tolist(), *more])


def _lengthened(values: np.ndarray, more: int) -> np.ndarray:
    """The values, and as many missing ones at the end."""
    if values.dtype.kind == "O" or (values.dtype.kind in "iu" and values.size and np.abs(values).max() > EXACT):
        return np.concatenate([values.astype(object), np.full(more, None, object)])
    if values.dtype.kind in "mM":
        return np.concatenate([values, np.full(more, "NaT", values.dtype)])
    values = values if values.dtype.kind in "fc" else values.astype(np.float64)
    return np.concatenate([values, np.full((more, *values.shape[1:]), np.nan, values.dtype)])


def edges_of(
    columns: Mapping[str, Columns], keys: Mapping[str, str], references: Sequence[ForeignKey], dangling: str
) -> tuple[dict[ForeignKey, tuple[np.ndarray, np.ndarray]], dict[ForeignKey, int]]:
    """The rows of each foreign key and the rows that they refer to; and how many keys referred to no row.

    Raises:
        ValueError: primary keys that are missing or repeated; keys of kinds that cannot be compared; with `dangling` of
            "error", foreign keys that no row has.
    """
    for table, column in keys.items():
        _check_primary(f"{table}.{column}", columns[table][column])
    edges, lost = {}, {}
    for table, column, other in references:
        values = columns[table][column]
        there, found = rows_with_keys(
            f"{table}.{column}", values, f"{other}.{keys[other]}", columns[other][keys[other]]
        )
        dropped = found < 0
        if dropped.any() and dangling == "error":
            example = values[there[dropped][:1]].tolist()[0]
            raise ValueError(
                f"the foreign key {table}.{column} must refer to rows of {other!r}, got {int(dropped.sum())} values "
                f"without a row such as {example!r}; pass dangling='drop' to leave these edges out, or 'add' to add "
                "rows"
            )
        edges[table, column, other] = there[~dropped].astype(np.int32), found[~dropped]
        lost[table, column, other] = int(dropped.sum())
    return edges, lost


def rows_with_keys(
    name: str, given: np.ndarray, primary_name: str, primary: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The places of keys that are not missing; and int32[n], the row that has each of these, -1 for none.

    Raises:
        ValueError: keys of kinds that cannot be compared.
    """
    if given.dtype.kind == primary.dtype.kind and given.dtype.kind in "iu":  # millions of keys, without Python objects
        order = np.argsort(primary, kind="stable").astype(np.int32)
        ascending = primary[order]
        at = np.minimum(np.searchsorted(ascending, given), max(len(primary) - 1, 0))
        found = np.where(ascending[at] == given, order[at], -1) if len(primary) else np.full(len(given), -1)
        return np.arange(len(given)), found.astype(np.int32)
    foreign, known = _Keys.of(name, given), _Keys.of(primary_name, primary)
    wanted, there = _comparable(foreign, known)
    row_of = dict(zip(there, known.rows.tolist(), strict=True))
    return foreign.rows, np.array([row_of.get(value, -1) for value in wanted], np.int32).reshape(-1)


def rows_of_keys(name: str, given: np.ndarray, primary_name: str, primary: np.ndarray) -> np.ndarray:
    """int32[n], the row that has each key, -1 for none; keys must not be missing. Otherwise as `rows_with_keys`."""
    return rows_with_keys(name, given, primary_name, primary)[1]


def _check_primary(name: str, column: np.ndarray) -> None:
    if column.dtype.kind not in "iu" or len(np.unique(column)) < len(column):
        _primary(name, column)


def _primary(name: str, column: np.ndarray) -> _Keys:
    keys = _Keys.of(name, column)
    if len(keys.rows) != len(column):
        gone = int(missing_in(column).argmax())
        raise ValueError(
            f"the primary key {name} must have no missing values, got none in row {gone}; leave that row out, or name "
            "another key"
        )
    if len(set(keys.values)) != len(keys.values):
        repeated, count = Counter(keys.values).most_common(1)[0]
        raise ValueError(
            f"the primary key {name} must be unique, got {repeated!r} in {count} rows; remove the repeated rows, or "
            "name more columns as the key"
        )
    return keys


def _comparable(foreign: _Keys, primary: _Keys) -> tuple[list[Any], list[Any]]:
    """The values of both, of one kind. Text that says a number or a time exactly is converted."""
    if foreign.kind == primary.kind or not foreign.values or not primary.values:
        return foreign.values, primary.values
    if (converted := foreign.as_kind(primary.kind)) is not None:
        return converted, primary.values
    converted = primary.as_kind(foreign.kind)
    if converted is not None and len(set(converted)) == len(converted):
        return foreign.values, converted
    if _MIXED in (foreign.kind, primary.kind):
        texts, converted = foreign.as_text(), primary.as_text()
        if texts is not None and converted is not None and len(set(converted)) == len(converted):
            return texts, converted
    odd = next((value for value in foreign.values if _exact_number(value) is None), foreign.values[0])
    raise ValueError(
        f"the foreign key {foreign.name} must have keys of the type of {primary.name}, which has {primary.kind} such "
        f"as {primary.values[0]!r}, got {foreign.kind} such as {odd!r} that cannot all be converted exactly; convert "
        "one of the columns"
    )


def _exact_number(value: Any) -> int | None:
    """The integer that text says exactly, such as "12" and not "012" or "12.0"; None otherwise."""
    if not isinstance(value, str) or not value.isascii() or not value.removeprefix("-").isdecimal():
        return None
    return int(value) if str(int(value)) == value else None
