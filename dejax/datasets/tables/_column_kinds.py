"""Columns of tables as `Column`: their kinds are inferred from values, or given."""

from __future__ import annotations

import numbers
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from dejax.datasets.columns import NEVER, Column, Kind, hashes_of
from dejax.datasets.tables._columns import as_numbers, float_of, missing_in, of_parts, text_of, texts_of
from dejax.datasets.tables._known_from import TimeColumn, time_of_text, times_of_texts

_LOOKED_AT = 1000  # values of a text column that are tried as numbers and times
_MOST = 0.9  # the share of them from which on the column is of that kind, and the others are taken as missing
_ROWS_PER_CATEGORY = 10  # on average, from which on text of many different values is categories nevertheless
_NUMBERS = {
    ".": re.compile(r"[+-]?(0|[1-9]\d*|[1-9]\d?\d?(,\d{3})+)?(\.\d+)?(e[+-]?\d+)?", re.IGNORECASE),
    ",": re.compile(r"[+-]?(0|[1-9]\d*|[1-9]\d?\d?(\.\d{3})+)?(,\d+)?(e[+-]?\d+)?", re.IGNORECASE),
    ".,": re.compile(r"[+-]?(0|[1-9]\d*)?([.,]\d+)?(e[+-]?\d+)?", re.IGNORECASE),
}
"""Numbers as text, by their decimal sign. Where both signs are decimal, none stands between thousands. Text with
leading zeros is a name, such as a postcode."""
_DECIMALS = re.compile(r"(?P<point>[.,])\d+(e[+-]?\d+)?$", re.IGNORECASE)
_CODE = re.compile(r"\s*0\d+\s*")
"""Of such text, as of postcodes, a column has names, however many of the others could be numbers."""
_SIGNS = re.compile(r"[^\w\s]*\s*\d[\d\s.,:/'-]*[^\w\s]*")
"""Text of digits and signs, such as "12 %" and "31.12.2023"."""


@dataclass(frozen=True, eq=False)
class RawColumn:
    """A column as it was given, and what is known about its rows.

    Attributes:
        name: "table.column", for errors and warnings.
        values: numbers, booleans, times, rows of numbers, or objects with None where missing.
        known: int or float [rows], from when on each row is known.
        fitted: bool[rows], the rows whose values decide about kinds.
        max_categories: the most different values of text that are categories however few rows have each.
        known_at: int64[rows], from when on each value is known; None: with its row.
        time_unit: the unit of the data set's times.
    """

    name: str
    values: np.ndarray
    known: np.ndarray
    fitted: np.ndarray
    max_categories: int
    known_at: np.ndarray | None = None
    time_unit: str = "s"

    def typed(self, kind: str | None = None) -> Column:
        """The column by its kind, which is inferred if it is None.

        Raises:
            ValueError: values that cannot be of the kind; infinite numbers; lists of several kinds.
        """
        values = as_numbers(self.values)
        if values.dtype.kind not in "biufmMO":
            raise ValueError(
                f"the column {self.name} must have numbers, times or text, got {values.dtype}; convert the column, or "
                "give it the kind 'ignore'"
            )
        kind = self._inferred(values) if kind is None else kind
        makers = {
            "number": self._numbers,
            "time": self._times,
            "category": self._category,
            "categories": self._categories,
            "text": self._text,
            "vector": self._vectors,
        }
        if kind not in makers:
            raise ValueError(f"kinds must be {', '.join(makers)} or ignore, got {kind!r} for the column {self.name}")
        if kind in ("category", "text") and values is not self.values:  # integers that float64 would round
            values = self.values
        return makers[kind](values)

    def _column(self, kind: str, values: np.ndarray, missing: np.ndarray, **more: Any) -> Column:
        return Column(cast(Kind, kind), values, missing, known_at=self.known_at, **more)

    # ------------------------------------------------------------------------------------------ kinds

    def _inferred(self, values: np.ndarray) -> str:
        """The kind of a column that follows from its values."""
        if values.ndim == 2:
            return "vector"
        if values.dtype.kind != "O":
            return "time" if values.dtype.kind == "M" else "number"
        known = self._that_decide(values)
        if len(known) and all(isinstance(value, list | tuple | set | np.ndarray) for value in known[:_LOOKED_AT]):
            is_row = isinstance(known[0], np.ndarray) and known[0].dtype.kind == "f"
            return "vector" if is_row or _is_row_of_floats(known) else "categories"
        some = known[:: max(1, len(known) // _LOOKED_AT)].tolist()
        others = len({text_of(value) for value in known.tolist()})
        few = others <= max(self.max_categories, len(known) // _ROWS_PER_CATEGORY)
        is_number = _Numerals.of(some).reads
        code = next((value for value in known.tolist() if isinstance(value, str) and _CODE.fullmatch(value)), None)
        for kind, what, reads in (("number", "numbers", is_number), ("time", "times", _is_time)):
            fit = [value for value in some if reads(value)]
            are_codes = kind == "number" and code is not None
            if len(fit) >= _MOST * len(some) and fit and not are_codes:
                return kind
            if 2 * len(fit) > len(some):
                odd = code if are_codes else next(value for value in some if not reads(value))
                warnings.warn(
                    f"the column {self.name} is read as {'categories' if few else 'text'}, but {len(fit)} of "
                    f"{len(some)} of its values are {what}, such as {fit[0]!r}, and others such as {odd!r}; convert "
                    f"the column to {what}, with None for missing values, or give its kind, if they are names",
                    stacklevel=6,
                )
                break
        return "category" if few else "text"

    def _that_decide(self, values: np.ndarray) -> np.ndarray:
        """The values that decide about kinds: those of the fitted rows, or of all where these have none."""
        rows = np.flatnonzero(self.fitted & ~missing_in(values))
        return values[rows if len(rows) else np.flatnonzero(~missing_in(values))]

    def _numbers(self, values: np.ndarray) -> Column:
        missing, oddities = missing_in(values), ""
        if values.ndim != 1 or values.dtype.kind == "M":
            raise ValueError(
                f"the column {self.name} must have one number in each row, got {values.dtype}{list(values.shape)}; "
                "convert the column, or leave its kind out"
            )
        if values.dtype.kind == "O":
            known = self._that_decide(values).tolist()
            numerals = _Numerals.of(known[:: max(1, len(known) // _LOOKED_AT)])
            found = np.array([np.nan if value is None else numerals.number(value) for value in values], np.float64)
            oddities = ", ".join(filter(None, (self._odd(values, np.isnan(found), "numbers"), numerals.oddity)))
            missing = np.isnan(found)
        elif values.dtype.kind == "m":
            found = np.where(missing, np.nan, values / np.timedelta64(1, "s"))
        else:
            found = values.astype(np.float64)
        if np.isinf(found).any():
            raise ValueError(
                f"the column {self.name} must be finite, got infinity; replace it by NaN where it means missing"
            )
        return self._column("number", found, missing, oddities=oddities, unit="s" if values.dtype.kind == "m" else "")

    def _times(self, values: np.ndarray) -> Column:
        oddities = ""
        if values.dtype.kind == "O":
            found = times_of_texts(self.name, values)
            oddities = self._odd(values, np.isnat(found), "times")
            values = found
        read = TimeColumn.of(self.name, values)
        if read.values.dtype.kind == "f":
            raise ValueError(f"the column {self.name} must have whole numbers as times, got fractions; round them")
        unit = "s" if read.unit == "s" else self.time_unit
        return self._column("time", read.values, read.missing, unit=unit, oddities=oddities)

    def _odd(self, values: np.ndarray, unread: np.ndarray, what: str) -> str:
        known = ~missing_in(values)
        odd = np.flatnonzero(known & unread)
        if len(odd) == known.sum() and len(odd):
            raise ValueError(
                f"the column {self.name} must have {what}, got values such as {values[odd[0]]!r}; convert the column, "
                "or leave its kind out"
            )
        parts = [f"text read as {what}"] if all(isinstance(value, str) for value in values[known]) else []
        if len(odd):
            shown = f"{len(odd):,} of {known.sum():,} not {what} such as {values[odd[0]]!r}"
            parts.append(f"{shown}, taken as missing")
        return ", ".join(parts)

    # ------------------------------------------------------------------------------------------ words

    def _category(self, values: np.ndarray) -> Column:
        names, codes = _distinct(texts_of(values))
        categories, place = self._in_order(names, codes, np.arange(len(codes)))
        codes = np.append(place, -1)[codes].astype(np.int32)
        oddities = _signs_in(names) if values.dtype.kind == "O" else ""
        return self._column("category", codes, codes < 0, categories=categories, oddities=oddities)

    def _categories(self, values: np.ndarray) -> Column:
        rows, lengths, missing = _flat_lists(self.name, values)
        names, codes = _distinct([text_of(value) for value in rows])
        categories, place = self._in_order(names, codes, np.repeat(np.arange(len(values)), lengths))
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        codes = place[codes].astype(np.int32) if len(names) else codes
        return self._column("categories", codes, missing, categories=categories, offsets=offsets)

    def _in_order(
        self, names: Sequence[str], codes: np.ndarray, rows: np.ndarray
    ) -> tuple[tuple[str, ...], np.ndarray]:
        """Categories in the order in which they came to be known, and the place of each name there."""
        when = self.known if self.known_at is None else np.maximum(self.known, self.known_at)
        is_float = when.dtype.kind == "f"
        first = np.full(len(names), np.inf if is_float else NEVER, when.dtype)
        there = codes >= 0
        np.minimum.at(first, codes[there], when[rows[there]])
        order = np.lexsort((np.array(names, str), first)) if len(names) else np.zeros(0, np.int64)
        place = np.empty(len(names), np.int64)
        place[order] = np.arange(len(names))
        return tuple(names[k] for k in order), place

    def _text(self, values: np.ndarray) -> Column:
        names, codes = _distinct(texts_of(values))
        words = [hashes_of(name) for name in names]
        starts = np.cumsum([0, *(len(part) for part in words)])  # of each name's words, one name after the other
        lengths = np.where(codes >= 0, np.diff(starts)[codes] if len(names) else 0, 0)
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        every = np.concatenate([np.zeros(0, np.uint32), *words])
        own = every[np.repeat(starts[codes] - offsets[:-1], lengths) + np.arange(offsets[-1])]
        return self._column("text", own, codes < 0, offsets=offsets, oddities=_signs_in(names))

    def _vectors(self, values: np.ndarray) -> Column:
        missing = missing_in(values)
        if values.ndim == 1 and values.dtype.kind == "O":
            widths = {len(value) for value in values[~missing]}
            if len(widths) != 1:
                raise ValueError(
                    f"the column {self.name} must have vectors of one width, got the widths {sorted(widths)[:5]}; pad "
                    "the vectors, or give the column the kind 'ignore'"
                )
            none = np.zeros(widths.pop(), np.float32)
            values = np.stack([none if value is None else np.asarray(value) for value in values])
        if values.ndim != 2 or values.dtype.kind not in "biuf":
            raise ValueError(
                f"the column {self.name} must have a vector of numbers in each row, got "
                f"{values.dtype}{list(values.shape)}; convert the column, or leave its kind out"
            )
        values = values if values.dtype.kind == "f" else values.astype(np.float32)
        if any(of_parts(lambda part, _: bool(np.isinf(part).any()), values)):
            raise ValueError(
                f"the column {self.name} must be finite, got infinity; replace infinity by a finite number, or the "
                "whole vector by None"
            )
        return self._column("vector", values, missing)


def _distinct(texts: Sequence[str | None]) -> tuple[list[str], np.ndarray]:
    """The different texts, and the number of each one; -1 for None."""
    index: dict[str, int] = {}
    codes = [-1 if text is None else index.setdefault(text, len(index)) for text in texts]
    return list(index), np.array(codes, np.int64).reshape(-1)


def _flat_lists(name: str, values: np.ndarray) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """The entries of lists, their lengths, and which rows have None. Entries that are None are left out."""
    missing = missing_in(values)
    rows: list[list[Any]] = []
    for value in values.tolist():
        if value is not None and not isinstance(value, list | tuple | set | frozenset | np.ndarray):
            raise ValueError(
                f"the column {name} must have a list of categories in each row, got {value!r}; convert the column, or "
                "leave its kind out"
            )
        found = [] if value is None else [entry for entry in value if entry is not None]
        rows.append(sorted(found, key=str) if isinstance(value, set | frozenset) else found)
    return [entry for row in rows for entry in row], np.array([len(row) for row in rows], np.int64), missing


def _is_row_of_floats(values: np.ndarray) -> bool:
    lists = [value for value in values[:_LOOKED_AT] if isinstance(value, list | tuple)]
    widths = {len(value) for value in lists}
    return len(widths) == 1 and widths != {0} and all(isinstance(n, float) for value in lists for n in value)


def _is_time(value: object) -> bool:
    return time_of_text(value) is not None


@dataclass(frozen=True)
class _Numerals:
    """How a column writes numbers as text.

    Attributes:
        decimal: the decimal sign, "." or ","; ".," where both are.
        oddity: what readers of a summary should know about it.
    """

    decimal: str
    oddity: str = ""

    @classmethod
    def of(cls, values: Sequence[Any]) -> _Numerals:
        """Finds out from values. A sign before more or fewer than three digits, or after a single zero, is decimal."""
        decimal, commas = set(), False
        for value in values:
            text = value.strip() if isinstance(value, str) else ""
            found = _DECIMALS.search(text)
            if found is None:
                continue
            point, before = found["point"], text[: found.start()].lstrip("+-")
            digits = sum(sign.isdecimal() for sign in text[found.start() :].lower().split("e")[0])
            other = "," if point == "." else "."
            if before.count(point):  # 1,234,567
                decimal.add(other)
            elif digits != 3 or before in ("", "0") or other in before or len(before) > 3:
                decimal.add(point)
            commas |= "," in text
        if decimal == {","}:
            return cls(",", "commas read as decimal signs")
        if decimal == {".", ","}:
            return cls(".,", "points and commas read as decimal signs")
        return cls(".", "commas read as signs between thousands" if commas else "")

    def reads(self, value: object) -> bool:
        if not isinstance(value, str):
            return isinstance(value, numbers.Number) and not isinstance(value, complex)
        text = value.strip()
        return any(sign.isdecimal() for sign in text) and _NUMBERS[self.decimal].fullmatch(text) is not None

    def number(self, value: Any) -> float:
        """The number; nan of what is none."""
        if not self.reads(value):
            return np.nan
        if not isinstance(value, str):
            return float_of(value)
        if self.decimal != ".,":
            value = value.replace("," if self.decimal == "." else ".", "")
        return float(value.replace(",", "."))


def _signs_in(names: Sequence[str]) -> str:
    """A remark for summaries if nine of ten names have only digits and signs; "" if not."""
    some = names[:: max(1, len(names) // _LOOKED_AT)]
    fit = [name for name in some if not name.isdecimal() and _SIGNS.fullmatch(name.strip())]
    if not fit or len(fit) < _MOST * len(some):
        return ""
    return f"digits and signs such as {fit[0]!r} read as names: convert the column if these are numbers or times"
