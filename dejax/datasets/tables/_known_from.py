"""When rows of tables are known: the times of their columns, and those of the rows that they refer to.

A row is known when it came to be and every row that it refers to is known. An edge is known when both of its ends are.
Rows without a time of their own, in tables without a time column, are known from the beginning on, unless a row that
they refer to is known later.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dejax.datasets._hetero import ALWAYS, Ends, Relation
from dejax.datasets.columns import NEVER, Column
from dejax.datasets.tables._columns import Columns, as_numbers, check_zones, missing_in, moment_of, objects_of

MISSING_TIMES = ("error", "drop", "always known")
_MOMENTS, _NUMBERS = "times", "numbers"


@dataclass(frozen=True, eq=False)
class TimeColumn:
    """A column of times.

    Attributes:
        name: "table.column".
        values: int64[rows], seconds since 1970 of times, and numbers as they are; float64 if some number is no integer.
            The value of a missing time has no meaning.
        missing: bool[rows].
        kind: "times" or "numbers"; None if all are missing.
    """

    name: str
    values: np.ndarray
    missing: np.ndarray
    kind: str | None

    def lengthened(self, more: int, begin: int | float) -> TimeColumn:
        """The column with more rows at its end, of the time `begin`."""
        values = np.concatenate([self.values, np.full(more, begin)])  # of fractions where `begin` is -inf
        return dataclasses.replace(self, values=values, missing=np.concatenate([self.missing, np.zeros(more, bool)]))

    @property
    def unit(self) -> str:
        """The unit: "s" for seconds since 1970, "" for numbers of a unit that only the user knows."""
        return "" if self.kind == _NUMBERS else "s"

    @classmethod
    def of(cls, name: str, column: np.ndarray) -> TimeColumn:
        """Reads a column.

        Raises:
            ValueError: values that are neither times nor numbers, text that is no time, or infinite numbers.
        """
        missing = missing_in(column)
        if missing.all():
            return cls(name, np.zeros(len(column), np.int64), missing, None)
        if column.dtype.kind == "O" and as_numbers(column) is column:
            times = times_of_texts(name, column)
            if (np.isnat(times) & ~missing).any():
                bad = column[np.isnat(times) & ~missing][0]
                raise ValueError(
                    f"the time column {name} must have times as ISO 8601 text, got {bad!r}; convert the column to such "
                    "as 2024-12-31 or 2024-12-31T18:30:00Z, with None where a time is missing"
                )
            column = times
        if column.dtype.kind == "M":
            return cls(name, np.where(missing, 0, column.astype("datetime64[s]").astype(np.int64)), missing, _MOMENTS)
        if column.dtype.kind not in "iufO":
            raise ValueError(f"the time column {name} must have times or numbers, got {column.dtype}")
        numbers = np.where(missing, 0, column)
        if column.dtype.kind == "f" and not np.isfinite(numbers).all():
            raise ValueError(f"the time column {name} must have finite numbers, got infinity")
        whole = numbers.dtype.kind in "iu" or all(number == int(number) for number in numbers)
        if whole and -(2**63) <= numbers.min() and numbers.max() < 2**63:
            return cls(name, numbers.astype(np.int64), missing, _NUMBERS)
        return cls(name, numbers.astype(np.float64), missing, _NUMBERS)


def times_of_texts(name: str, values: np.ndarray) -> np.ndarray:
    """datetime64[us] of ISO 8601 texts, NaT for other values.

    Raises:
        ValueError: some times have a zone, and others have none.
    """
    read: dict[str, Any] = {}
    for text in set(map(str, values.tolist())):
        with contextlib.suppress(ValueError):
            read[text] = datetime.datetime.fromisoformat(text)
    try:
        check_zones(list(read.values()))
    except ValueError as error:
        raise ValueError(f"the column {name}: {error}") from None
    moments = {text: moment_of(time) for text, time in read.items()}
    return np.array([moments.get(str(value), "NaT") for value in values.tolist()], "datetime64[us]").reshape(-1)


def time_of_text(value: Any) -> np.datetime64 | None:
    """The time of ISO 8601 text; None if it is none."""
    try:
        return moment_of(datetime.datetime.fromisoformat(str(value)))
    except ValueError:
        return None


def since_1970(values: np.ndarray, unit: str) -> np.ndarray:
    """A column of times, of numbers in a unit since 1970; other values as they are.

    Raises:
        ValueError: an unknown unit, or infinity.
    """
    if unit not in ("s", "ms", "us", "ns"):
        raise ValueError(f"numbers_since_1970 must be 's', 'ms', 'us' or 'ns', the unit of the numbers, got {unit!r}")
    whole = values.dtype.kind == "O" and all(value is None or isinstance(value, int) for value in values)
    if not whole and values.dtype.kind not in "iuf":
        return values
    missing = missing_in(values)
    if values.dtype.kind == "f" and np.isinf(values).any():
        raise ValueError("times since 1970 must be finite, got infinity; replace it by NaN where it means missing")
    found = np.where(missing, 0, values).astype(np.int64).astype(f"datetime64[{unit}]")
    found[missing] = np.array("NaT", found.dtype)
    return found


def read_times(
    columns: Mapping[str, Columns], time_columns: Mapping[str, str], missing_times: str
) -> dict[str, TimeColumn]:
    """The time columns by table.

    Raises:
        ValueError: as `TimeColumn.of`; an unknown choice; missing times, unless the choice says what they mean.
    """
    if missing_times not in MISSING_TIMES:
        raise ValueError(f"missing_times must be {' or '.join(map(repr, MISSING_TIMES))}, got {missing_times!r}")
    found = {
        table: TimeColumn.of(f"{table}.{column}", columns[table][column]) for table, column in time_columns.items()
    }
    for time in found.values():
        if missing_times == "error" and time.missing.any():
            rows = np.flatnonzero(time.missing)
            raise ValueError(
                f"the time column {time.name} must have a time in every row, {len(rows)} of {len(time.missing)} rows "
                f"have none, the first is row {rows[0]}; pass missing_times='drop' to leave these rows out, or "
                "'always known' if they may be seen at any time"
            )
    return found


def common_unit(times: Iterable[TimeColumn]) -> str:
    """The unit of all times: "s" for seconds since 1970, "" for numbers.

    Raises:
        ValueError: times in one column and numbers in another, which cannot be compared.
    """
    kinds = {time.kind: time.name for time in times if time.kind}
    if len(kinds) > 1:
        raise ValueError(
            f"time_columns must all have times, or all numbers of one unit, got times in {kinds[_MOMENTS]} and numbers "
            f"in {kinds[_NUMBERS]}; convert one of them"
        )
    return "" if _NUMBERS in kinds else "s"


def beginning(times: Mapping[str, TimeColumn]) -> int | float:
    """The time of what was always known, no later than any time: the least int32, or the least int64 or float."""
    given = [time.values[~time.missing] for time in times.values()]
    if any(values.dtype.kind == "f" for values in given):
        return -np.inf
    narrow = all(-(2**31) <= values.min(initial=0) and values.max(initial=0) < 2**31 for values in given)
    return ALWAYS if narrow else -(2**63)


def known_from(
    own: Mapping[str, np.ndarray],
    counts: Mapping[str, int],
    edges: Mapping[tuple[str, str, str], tuple[np.ndarray, np.ndarray]],
    begin: int | float,
) -> dict[str, np.ndarray]:
    """The time from which each row is known: the latest of its own and of all rows that it refers to, directly or not.

    Rows may refer to each other in circles: then all of a circle are known when its last row is.

    Args:
        own: the rows' own times, by table; tables without times are missing.
        counts: rows by table.
        edges: (table, column, other table) -> the rows that refer, each once, and the rows that they refer to.
        begin: the time of rows that were always known.
    """
    dtype = np.float64 if isinstance(begin, float) else np.int64
    known = {t: own[t].astype(dtype) if t in own else np.full(n, begin, dtype) for t, n in counts.items()}
    changes = True
    while changes:
        changes = False
        for (table, _, other), (rows, referred) in edges.items():
            times = known[other][referred]
            later = times > known[table][rows]
            if later.any():
                known[table][rows[later]] = times[later]
                changes = True
    return known


@dataclass(frozen=True, eq=False)
class KnownTimes:
    """From when on rows, edges and values are known.

    Attributes:
        unit: the unit of all times.
        beginning: the time of what is known from the beginning.
        own: the times of the rows of tables that have times.
        rows: for each table: from when on its rows are known.
        values: the same for values that become known later than their rows: by table, and by the column that has their
            times.
    """

    unit: str
    beginning: int | float
    own: dict[str, np.ndarray]
    rows: dict[str, np.ndarray]
    values: dict[str, dict[str, np.ndarray]]

    @classmethod
    def of(
        cls,
        columns: Mapping[str, Columns],
        times: Mapping[str, TimeColumn],
        edges: Mapping[Relation, Ends],
        known_at: Mapping[str, Mapping[str, str]],
    ) -> KnownTimes:
        late = {
            table: {by: TimeColumn.of(f"{table}.{by}", columns[table][by]) for by in sorted(set(of.values()))}
            for table, of in known_at.items()
        }
        unit = common_unit([*times.values(), *(time for of in late.values() for time in of.values())])
        begin = beginning(times)
        own = {table: np.where(time.missing, begin, time.values) for table, time in times.items()}
        rows = known_from(
            own, {table: len(next(iter(found.values()), ())) for table, found in columns.items()}, edges, begin
        )
        return cls(unit, begin, own, rows, {table: _shown_at(rows[table], of) for table, of in late.items()})

    @property
    def late_rows(self) -> dict[str, np.ndarray]:
        """`rows` of the tables with a row that is not always known."""
        return {table: rows for table, rows in self.rows.items() if (rows > self.beginning).any()}

    def late_edges(self, edges: Mapping[Relation, Ends]) -> dict[Relation, np.ndarray]:
        """From when on edges are known, for the relations with an edge that is not always known.

        A row is known no earlier than the rows that it refers to: it is the end of each edge that is known last.
        """
        found = {relation: self.rows[relation[0]][ends[0]] for relation, ends in edges.items()}
        return {relation: times for relation, times in found.items() if (times > self.beginning).any()}


def _shown_at(known: np.ndarray, late: Mapping[str, TimeColumn]) -> dict[str, np.ndarray]:
    """From when on the values of each row are known that are known at the times of a column, by that column."""
    found = {}
    for column, time in late.items():
        if "f" in (time.values.dtype.kind, known.dtype.kind):
            raise ValueError(
                f"known_at must name columns of whole numbers or times, got {time.name}, which has fractions; round "
                "them"
            )
        found[column] = np.where(time.missing, NEVER, np.maximum(time.values, known))
    return found


def boundary(what: str, value: Any, times: np.ndarray, unit: str, of: str) -> int | float:
    """A time at which rows are split, in the unit of their times.

    Args:
        what: the argument, for errors.
        value: a date, text or number.
        times: the times of the rows.
        unit: the unit of the times, "s" for seconds since 1970.
        of: whose times they are, for errors.

    Raises:
        ValueError: a boundary of another kind than the times (a year for dates, a date for milliseconds), or so far
            from all of them that it must be of another unit.
    """
    try:
        time = TimeColumn.of(what, objects_of([value]))
    except ValueError:
        example = "such as 2024-12-31 or 2024-12-31T18:30:00Z" if unit == "s" else "as a finite number"
        raise ValueError(f"{what} that is a time {example}, got {value!r}") from None
    if time.kind is None or time.unit != unit:
        expected = "a time, such as a date" if unit == "s" else "a number in the unit of the column"
        raise ValueError(
            f"{what} of the kind of {of}, which has {_MOMENTS if unit == 's' else _NUMBERS}, got {value!r}; give "
            f"{expected}"
        )
    found: int | float = time.values[0].item()
    least, most = (times.min().item(), times.max().item()) if times.size else (0, 0)
    if most > least and not 2 * least - most <= found <= 2 * most - least:
        shown = [str(np.datetime64(end, "s")) if unit == "s" else end for end in (least, most)]
        raise ValueError(
            f"{what} in the unit of {of}, which runs from {shown[0]} to {shown[1]}, got {value!r}: all rows would be "
            "in one split"
        )
    return found


def warn_of_unnamed_times(columns: Mapping[str, Mapping[str, Column]], known: KnownTimes) -> None:
    """Warns of tables whose rows have times that `time_columns` does not name.

    Such rows are known from the beginning. Dates that lie before all events, as of birth, are no such times.
    """
    if not known.own:
        return
    first = min(int(times[times > known.beginning].min(initial=NEVER)) for times in known.own.values())
    for table, found in columns.items():
        if table in known.own:
            continue
        for name, column in found.items():
            if column.kind != "time" or column.known_at is not None or column.unit != known.unit:
                continue
            there = ~column.missing & (column.values > np.maximum(first, known.rows[table]))
            if there.any():
                warnings.warn(
                    f"rows of {table} count as known before the time that stands in {table}.{name}, in {there.sum():,} "
                    f"of {len(there):,} rows: a model may see the future. Add {table} = {name!r} to time_columns if "
                    f"a row came to be at that time; or {{{table!r}: {{{name!r}: 'ignore'}}}} to kinds",
                    stacklevel=3,
                )


def warn_of_mixed_zones(tables: Mapping[str, Any], of_times: Iterable[tuple[str, str]]) -> None:
    """Warns if some columns of times have a zone and others have none: what is compared may be hours apart.

    Args:
        tables: the tables as they were given: as arrays their times have lost their zones.
        of_times: (table, column) of times.
    """
    found: dict[bool, str] = {}
    for table, column in of_times:
        try:
            zone = _has_zone(tables[table][column])
        except (KeyError, TypeError):  # a level of an index, or a table of DuckDB
            continue
        if zone is not None:
            found.setdefault(zone, f"{table}.{column}")
    if len(found) > 1:
        warnings.warn(
            f"times of {found[True]} have a zone and those of {found[False]} have none, which are taken as UTC; give "
            "all columns of times a zone, or none after converting them to UTC",
            stacklevel=3,
        )


def _has_zone(values: Any) -> bool | None:
    """Whether a column of times has a zone; None if it cannot tell, as of dates, numbers and arrays of numpy."""
    if isinstance(values, np.ndarray) and values.dtype.kind != "O":
        return None
    kind: Any = getattr(values, "type", getattr(values, "dtype", None))  # of Arrow, or of pandas and numpy
    for name in ("tz", "time_zone"):
        if hasattr(kind, name):
            return getattr(kind, name) is not None
    if getattr(kind, "kind", "O") == "M":
        return None if np.datetime_data(kind)[0] in "YMWD" else False
    if getattr(kind, "kind", "O") not in "OUT":
        return None
    first: Any = next((value for value in values if value is not None and value == value and str(value).strip()), None)
    first = first.as_py() if hasattr(first, "as_py") else first
    if isinstance(first, str):
        text, first = first.strip(), None
        with contextlib.suppress(ValueError):
            first = datetime.datetime.fromisoformat(text) if len(text) > len("2024-12-31") else None
    return first.tzinfo is not None if isinstance(first, datetime.datetime) else None
