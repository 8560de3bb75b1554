"""Rows of tables as float32 rows of a feature store: one row has all columns, and the times from which they are known.

Numbers stand standardised, NaN where missing: float32 would round those that lie far from 0. Codes of categories are
whole numbers, -1 where missing; a time is two numbers, whole days from the clock's day and seconds of the day, which
float32 has exactly. So a row is read by one gather, wherever it lies, and nothing in it depends on the cutoff:
`encoders.py` hides what is not known yet. Columns of one kind lie
side by side, and the times from which values are known at the end, so that an encoder needs few operations.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from dejax.datasets import Column
from dejax.datasets.tables._columns import of_parts
from dejax.training.tables.seed_times import DAY

KINDS = ("number", "time", "category", "categories", "vector")
"""The kinds of packed columns, in their order in a row; text is a vector."""
APART = 32
_MOST_CODES = 1 << 24  # float32 has all integers up to here


@dataclass(frozen=True, slots=True)
class ColumnPlace:
    """Where a column stands in the rows of its table, and what its encoder was fitted to.

    Attributes:
        name: the name of the column.
        kind: as `Column.kind`; text is "vector" here.
        first: the first of its numbers in a row.
        width: how many there are.
        known: which of the row's times its value is known from (`TablePlan.known`); None: known as its row.
        codes: number of categories that rows before `until` have; others are unknown.
        mean, deviation: the mean and deviation of numbers and vectors.
        edges: quantiles of standardised numbers, ascending, each once as float32.
        seasons: whether rows before `until` span more than a year, so that the day of the year means something.
        apart: whether its values are not packed but a table of their own, in the precision in which they were given:
            vectors of `APART` numbers or more, which would make rows wide, and four bytes of each number.
    """

    name: str
    kind: str
    first: int
    width: int
    known: int | None
    codes: int = 0
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    edges: tuple[float, ...] = ()
    seasons: bool = False
    apart: bool = False


@dataclass(frozen=True, slots=True)
class TablePlan:
    """The columns of a table in its packed rows.

    Attributes:
        columns: the columns, by kind.
        width: numbers of a row.
        known: where the times begin from which values are known; they are the last of a row.
        left_out: what did not fit in a row -> how many.
    """

    columns: tuple[ColumnPlace, ...]
    width: int
    known: int
    left_out: tuple[tuple[str, int], ...] = ()

    def of_kind(self, *kinds: str) -> list[ColumnPlace]:
        """The packed columns of these kinds; those of one kind lie side by side."""
        return [place for place in self.columns if place.kind in kinds and not place.apart]

    @property
    def apart(self) -> list[ColumnPlace]:
        """The columns whose values are tables of their own."""
        return [place for place in self.columns if place.apart]


def pack(
    columns: Mapping[str, Column],
    known_from: np.ndarray | None,
    until: int | float | None,
    *,
    hidden: Collection[str] = (),
    bins: int = 16,
    text_width: int = 32,
    most_of_a_list: int = 16,
    day: int = 0,
) -> tuple[np.ndarray, TablePlan]:
    """The rows of a table as float32[rows, width], and where its columns stand in them.

    Args:
        columns: the columns, by name; all of one length.
        known_from: int64[rows], from when on rows are known; None: always.
        until: means, deviations, quantiles and categories are those of values that are known before this time; None:
            of all.
        hidden: columns that are left out.
        bins: quantiles of a number.
        text_width: width of a text's vector: signed hashes of its words fall into this many sums, with norm 1 (arXiv
            0902.2206).
        most_of_a_list: values of a row of several categories; further ones are left out and counted.
        day: the day since 1970 from which days are counted (`Clock.day`).

    >>> import numpy as np
    >>> from dejax.datasets import Column
    >>> age = Column("number", np.array([30.0, 50.0]), np.array([False, True]))
    >>> rows, plan = pack({"age": age}, None, None)
    >>> rows, plan.columns[0].mean
    (array([[ 0.],
           [nan]], dtype=float32), (30.0,))
    """
    parts: list[np.ndarray] = []
    places: list[ColumnPlace] = []
    left_out: list[tuple[str, int]] = []
    known_times: list[np.ndarray] = []
    width = 0
    shown = {name: column for name, column in columns.items() if name not in hidden}
    for name, column in sorted(shown.items(), key=lambda item: KINDS.index(_kind(item[1]))):
        known = None
        if column.known_at is not None:
            same = [np.array_equal(times, column.known_at) for times in known_times]
            known = same.index(True) if any(same) else len(known_times)
            if known == len(known_times):
                known_times.append(column.known_at)
        when = column.known_at if column.known_at is not None else known_from
        fitted = ~column.missing if until is None or when is None else ~column.missing & (when < until)
        if _is_apart(column):
            places.append(_place_apart(name, column, fitted, known))
            continue
        if column.kind == "number":
            place, values = _standardised(name, column, fitted, width, known, bins)
            places.append(place)
            parts.append(values)
            width += 1
            continue
        values = _values(column, text_width, most_of_a_list, day)
        if (
            column.offsets is not None
            and column.kind == "categories"
            and (lost := int(np.maximum(np.diff(column.offsets) - values.shape[1], 0).sum()))
        ):
            left_out.append((f"{name}: values of lists beyond {values.shape[1]}", lost))
        places.append(_place(name, column, values, fitted, width, known))
        parts.append(values)
        width += values.shape[1]
    parts += [as_days(times, day) for times in known_times]
    rows = np.concatenate(parts, axis=1) if parts else np.zeros((len(next(iter(columns.values()), ())), 0), np.float32)
    return rows, TablePlan(tuple(places), rows.shape[1], width, tuple(left_out))


def _is_apart(column: Column) -> bool:
    return column.kind == "vector" and column.values.shape[1] >= APART


def apart(columns: Mapping[str, Column], plan: TablePlan) -> dict[str, np.ndarray]:
    """The values of a table's columns that are not in its packed rows, as they were given, NaN where missing."""
    found = {}
    for place in plan.apart:
        column = columns[place.name]
        values = column.values
        if _has_finite_rows(values, column.missing):
            values = np.where(column.missing[:, None], np.array(np.nan, values.dtype), values)
        found[place.name] = values
    return found


def _has_finite_rows(values: np.ndarray, some: np.ndarray) -> bool:
    """Whether some of an array's rows are finite."""
    return any(of_parts(lambda part, at: np.isfinite(part[some[at : at + len(part)]]).all(axis=1).any(), values))


def _place_apart(name: str, column: Column, fitted: np.ndarray, known: int | None) -> ColumnPlace:
    """Mean and deviation of the fitted rows."""
    width = column.values.shape[1]

    def sums_of(part: np.ndarray, first: int) -> tuple[int, np.ndarray, np.ndarray]:
        some = part[fitted[first : first + len(part)]].astype(np.float32)
        return len(some), some.sum(0, dtype=np.float64), np.einsum("nw,nw->w", some, some, dtype=np.float64)

    parts = of_parts(sums_of, column.values)
    count = sum(part[0] for part in parts)
    sums, squares = (sum((part[n] for part in parts), np.zeros(width)) for n in (1, 2))
    mean = sums / max(count, 1)
    deviation = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0.0))
    deviation = np.where(deviation > 1e-6 * np.maximum(1.0, np.abs(mean)), deviation, 1.0)
    return ColumnPlace(
        name, "vector", 0, width, known, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()), apart=True
    )


def as_days(times: np.ndarray, day: int = 0) -> np.ndarray:
    """Times in seconds as float32[n, 2], whole days from a day on and seconds of the day."""
    days, seconds = np.divmod(np.asarray(times, np.int64), DAY)
    return np.stack([days - day, seconds], axis=1).astype(np.float32)


def _kind(column: Column) -> str:
    return "vector" if column.kind == "text" else column.kind


def _values(column: Column, text_width: int, most_of_a_list: int, day: int) -> np.ndarray:
    """The values of a column other than numbers as float32[rows, width]."""
    if column.kind == "category":
        return np.where(column.missing, -1, column.values).astype(np.float32)[:, None]
    if column.kind == "time":
        return np.where(
            column.missing[:, None], np.float32(np.nan), as_days(np.where(column.missing, 0, column.values), day)
        )
    if column.kind == "vector":
        return np.where(column.missing[:, None], np.float32(np.nan), column.values.astype(np.float32))
    assert column.offsets is not None
    counts = np.diff(column.offsets)
    row = np.repeat(np.arange(len(column)), counts)
    if column.kind == "text":
        found = _hashed(row, column.values, len(column), text_width)
        return np.where(column.missing[:, None], np.float32(np.nan), found)
    place = np.arange(len(row)) - column.offsets[row]
    found = np.full((len(column), max(1, min(most_of_a_list, int(counts.max(initial=1))))), -1, np.float32)
    kept = place < found.shape[1]
    found[row[kept], place[kept]] = column.values[kept]
    return found


def _hashed(row: np.ndarray, words: np.ndarray, rows: int, width: int) -> np.ndarray:
    """Sums of signed words by row, with norm 1."""
    words = words.astype(np.uint64)
    signs = 1.0 - 2.0 * ((words >> np.uint64(31)) & np.uint64(1)).astype(np.float64)
    flat = row * width + (words % np.uint64(width)).astype(np.int64)
    sums = np.bincount(flat, weights=signs, minlength=rows * width).reshape(rows, width)
    return (sums / np.maximum(np.linalg.norm(sums, axis=1, keepdims=True), 1e-12)).astype(np.float32)


def _standardised(
    name: str, column: Column, fitted: np.ndarray, first: int, known: int | None, bins: int
) -> tuple[ColumnPlace, np.ndarray]:
    """A column of numbers: its place, and float32[rows, 1]."""
    most, far = float(np.finfo(np.float32).max), 1e30  # whose squares, and whose differences, are finite
    finite = ~column.missing & np.isfinite(column.values)
    found = np.where(finite, np.clip(column.values, -most, most), np.nan)
    some = found[fitted & finite]
    mean, deviation = (some.mean().item(), some.std().item()) if len(some) else (0.0, 1.0)
    deviation = deviation if deviation > 1e-12 * max(1.0, abs(mean)) else 1.0
    values = np.clip((found - mean) / deviation, -far, far).astype(np.float32)
    edges: tuple[float, ...] = ()
    if len(some):
        quantiles = np.quantile(values[fitted & finite].astype(np.float64), np.linspace(0, 1, bins + 1))
        edges = tuple(np.unique(quantiles.astype(np.float32)).tolist())  # equal ends would divide by 0
    place = ColumnPlace(name, "number", first, 1, known, mean=(mean,), deviation=(deviation,), edges=edges)
    return place, values[:, None]


def _place(
    name: str, column: Column, values: np.ndarray, fitted: np.ndarray, first: int, known: int | None
) -> ColumnPlace:
    kind = _kind(column)
    width = values.shape[1]
    if kind in ("category", "categories"):
        some = values[fitted] if len(fitted) else values
        codes = int(some.max(initial=-1)) + 1
        if codes > _MOST_CODES:
            raise ValueError(f"column {name!r} must have at most {_MOST_CODES:,} categories, got {codes:,}; hash them")
        return ColumnPlace(name, kind, first, width, known, codes=codes)
    some = values[fitted].astype(np.float64)
    if kind == "time":
        days = some[:, 0]
        return ColumnPlace(name, kind, first, width, known, seasons=bool(len(days)) and np.ptp(days) > 366)
    some = some[np.isfinite(some).all(1)]
    mean = some.mean(0) if len(some) else np.zeros(width)
    deviation = some.std(0) if len(some) else np.ones(width)
    deviation = np.where(deviation > 1e-12 * np.maximum(1.0, np.abs(mean)), deviation, 1.0)
    return ColumnPlace(name, kind, first, width, known, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))
