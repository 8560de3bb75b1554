"""Rows of tables as float32 rows of a feature store: one row has all columns, and the times from which they are known.

Numbers stand standardised, NaN where missing: float32 would round those that lie far from 0. Codes of categories are
whole numbers, -1 where missing; a time is two numbers, whole days from the clock's day and seconds of the day, which
float32 has exactly. So a row is read by one gather, wherever it lies, and nothing in it depends on the cutoff:
`encoders.py` hides what is not known yet. Columns of one kind lie
side by side, and the times from which values are known at the end, so that an encoder needs few operations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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
        categories: the names of the categories that rows before `until` have; others are unknown.
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
    categories: tuple[str, ...] = ()
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    edges: tuple[float, ...] = ()
    seasons: bool = False
    apart: bool = False

    @property
    def codes(self) -> int:
        """The number of categories."""
        return len(self.categories)


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
    fitted: TablePlan | None = None,
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
        fitted: the plan of a run, whose order, statistics and categories are those of its parameters; `until` and
            `bins` do not matter then.

    Raises:
        ValueError: the columns are not those of `fitted`, or a column has too many categories.

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
    before = _of_same_columns(fitted, shown, text_width)
    order = list(before) or sorted(shown, key=lambda name: KINDS.index(_kind(shown[name])))
    for name in order:
        column, own, known = shown[name], before.get(name), None
        if column.known_at is not None:
            same = [np.array_equal(times, column.known_at) for times in known_times]
            known = same.index(True) if any(same) else len(known_times)
            if known == len(known_times):
                known_times.append(column.known_at)
        when = column.known_at if column.known_at is not None else known_from
        some = ~column.missing if until is None or when is None else ~column.missing & (when < until)
        if _is_apart(column):
            place = _place_apart(name, column, some) if own is None else own
            places.append(dataclasses.replace(place, known=known))
            continue
        if column.kind == "number":
            place = _place_of_numbers(name, column, some, bins) if own is None else own
            places.append(dataclasses.replace(place, first=width, known=known))
            parts.append(_standardised(column, place))
            width += 1
            continue
        if own is not None and own.categories:
            column = by_number(column, own.categories)
        longest = own.width if own is not None and column.kind == "categories" else most_of_a_list
        values = _values(column, text_width, longest, day)
        if own is not None and values.shape[1] < own.width:  # of lists that are all shorter
            more = np.full((len(values), own.width - values.shape[1]), -1, np.float32)
            values = np.concatenate([values, more], axis=1)
        if (
            column.offsets is not None
            and column.kind == "categories"
            and (lost := int(np.maximum(np.diff(column.offsets) - values.shape[1], 0).sum()))
        ):
            left_out.append((f"{name}: values of lists beyond {values.shape[1]}", lost))
        place = _place(name, column, values, some) if own is None else own
        places.append(dataclasses.replace(place, first=width, known=known))
        parts.append(values)
        width += values.shape[1]
    parts += [as_days(times, day) for times in known_times]
    rows = np.concatenate(parts, axis=1) if parts else np.zeros((len(next(iter(columns.values()), ())), 0), np.float32)
    return rows, TablePlan(tuple(places), rows.shape[1], width, tuple(left_out))


def _of_same_columns(
    fitted: TablePlan | None, columns: Mapping[str, Column], text_width: int
) -> dict[str, ColumnPlace]:
    """The places of a run's columns by name, in their order; {} without a run."""
    if fitted is None:
        return {}
    places = {place.name: place for place in fitted.columns}

    def told(name: str, kind: str, late: bool, width: int) -> str:
        return f"{name} ({kind}{f' of {width}' if kind == 'vector' else ''}{', known later' if late else ''})"

    now = {
        told(name, _kind(column), column.known_at is not None, np.shape(column.values)[-1])
        if column.kind == "vector"
        else told(name, _kind(column), column.known_at is not None, text_width)
        for name, column in columns.items()
    }
    then = {told(place.name, place.kind, place.known is not None, place.width) for place in places.values()}
    if now != then:
        raise ValueError(
            f"columns must be those that the model was trained on, got {', '.join(sorted(now - then)) or 'none'} in "
            f"place of {', '.join(sorted(then - now)) or 'none'}; train again, or undo the change"
        )
    return places


def by_number(column: Column, categories: Sequence[str]) -> Column:
    """A column with the numbers of given categories in place of its own, and the next number for all others."""
    number = {name: n for n, name in enumerate(categories)}
    names = _names(column, int(column.values.max(initial=-1)) + 1)
    numbers = np.array([*(number.get(name, len(number)) for name in names), -1], np.int32)
    return dataclasses.replace(column, values=numbers[column.values], categories=(*categories, "others"))


def _names(column: Column, count: int) -> tuple[str, ...]:
    """The names of a column's categories, `count` or more; those without a name have their number."""
    return (*column.categories, *map(str, range(len(column.categories), count)))


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


def _place_apart(name: str, column: Column, some: np.ndarray) -> ColumnPlace:
    """Mean and deviation of some rows, bool[rows]."""
    width = column.values.shape[1]

    def sums_of(part: np.ndarray, first: int) -> tuple[int, np.ndarray, np.ndarray]:
        own = part[some[first : first + len(part)]].astype(np.float32)
        return len(own), own.sum(0, dtype=np.float64), np.einsum("nw,nw->w", own, own, dtype=np.float64)

    parts = of_parts(sums_of, column.values)
    count = sum(part[0] for part in parts)
    sums, squares = (sum((part[n] for part in parts), np.zeros(width)) for n in (1, 2))
    mean = sums / max(count, 1)
    deviation = np.sqrt(np.maximum(squares / max(count, 1) - mean**2, 0.0))
    deviation = np.where(deviation > 1e-6 * np.maximum(1.0, np.abs(mean)), deviation, 1.0)
    return ColumnPlace(
        name, "vector", 0, width, None, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()), apart=True
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


_MOST = float(np.finfo(np.float32).max)
_FAR = 1e30  # whose squares, and whose differences, are finite


def _finite(column: Column) -> np.ndarray:
    """The numbers of a column as float32 can have them, NaN where missing."""
    return np.where(~column.missing & np.isfinite(column.values), np.clip(column.values, -_MOST, _MOST), np.nan)


def _standardised(column: Column, place: ColumnPlace) -> np.ndarray:
    """A column of numbers as float32[rows, 1]."""
    scaled = (_finite(column) - place.mean[0]) / place.deviation[0]
    return np.clip(scaled, -_FAR, _FAR).astype(np.float32)[:, None]


def _place_of_numbers(name: str, column: Column, some: np.ndarray, bins: int) -> ColumnPlace:
    """Mean, deviation and quantiles of some rows, bool[rows]."""
    found = _finite(column)[some]
    found = found[~np.isnan(found)]
    mean, deviation = (found.mean().item(), found.std().item()) if len(found) else (0.0, 1.0)
    deviation = deviation if deviation > 1e-12 * max(1.0, abs(mean)) else 1.0
    edges: tuple[float, ...] = ()
    if len(found):
        values = np.clip((found - mean) / deviation, -_FAR, _FAR).astype(np.float32)
        quantiles = np.quantile(values.astype(np.float64), np.linspace(0, 1, bins + 1))
        edges = tuple(np.unique(quantiles.astype(np.float32)).tolist())  # equal ends would divide by 0
    return ColumnPlace(name, "number", 0, 1, None, mean=(mean,), deviation=(deviation,), edges=edges)


def _place(name: str, column: Column, values: np.ndarray, fitted: np.ndarray) -> ColumnPlace:
    """What the values of some rows say, bool[rows], of a column other than numbers."""
    kind = _kind(column)
    width = values.shape[1]
    if kind in ("category", "categories"):
        some = values[fitted] if len(fitted) else values
        codes = int(some.max(initial=-1)) + 1
        if codes > _MOST_CODES:
            raise ValueError(f"column {name!r} must have at most {_MOST_CODES:,} categories, got {codes:,}; hash them")
        return ColumnPlace(name, kind, 0, width, None, categories=_names(column, codes)[:codes])
    some = values[fitted].astype(np.float64)
    if kind == "time":
        days = some[:, 0]
        return ColumnPlace(name, kind, 0, width, None, seasons=bool(len(days)) and bool(np.ptp(days) > 366))
    some = some[np.isfinite(some).all(1)]
    mean = some.mean(0) if len(some) else np.zeros(width)
    deviation = some.std(0) if len(some) else np.ones(width)
    deviation = np.where(deviation > 1e-12 * np.maximum(1.0, np.abs(mean)), deviation, 1.0)
    return ColumnPlace(name, kind, 0, width, None, mean=tuple(mean.tolist()), deviation=tuple(deviation.tolist()))


def plain(plan: TablePlan) -> list[dict[str, Any]]:
    """What the columns of a plan were fitted to, as plain values for JSON."""
    return [dataclasses.asdict(place) for place in plan.columns]


def plan_of(found: Sequence[Mapping[str, Any]]) -> TablePlan:
    """The plan of `plain`; of columns that are known later than their rows, without the times from which they are."""
    places: list[dict[str, Any]] = [
        {name: tuple(value) if isinstance(value, list) else value for name, value in place.items()} for place in found
    ]
    columns = tuple(ColumnPlace(**place) for place in places)
    width = sum(place.width for place in columns if not place.apart)
    return TablePlan(columns, width, width)
