"""`Column`: the values of one column of a table, typed, with what is missing and from when on each value is known."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

Kind = Literal["number", "category", "categories", "time", "text", "vector"]
KINDS: tuple[str, ...] = get_args(Kind)
NEVER = 2**63 - 1
"""The value in `Column.known_at` for values that must never be shown to a model."""


def hashes_of(text: str) -> np.ndarray:
    """uint32[words], the hashes of the words of a text, which are the same everywhere."""
    return np.array([zlib.crc32(word.encode("utf-8", "surrogatepass")) for word in text.lower().split()], np.uint32)


@dataclass(frozen=True, eq=False)
class Column:
    """One column of a table, in the form that encoders inside of a model read. Values are not standardised.

    | kind | `values` |
    | --- | --- |
    | "number" | float64[rows] |
    | "category" | int32[rows], the number of the category in `categories`; -1 where missing |
    | "categories" | int32[total], numbers of categories; row i has those from `offsets[i]` to `offsets[i + 1]` |
    | "time" | int64[rows], seconds since 1970, or numbers in the unit of the data set's times |
    | "text" | uint32[total], hashes of words; row i has those from `offsets[i]` to `offsets[i + 1]` |
    | "vector" | float[rows, width] of any precision |

    Categories are numbered in the order in which they came to be known (by name within one time). So the number of a
    category does not depend on later data, and the categories of training rows come first.

    Attributes:
        kind: one of the kinds above.
        values: the values, as above. Where a value is missing, the entry has no meaning (except -1 for categories).
        missing: bool[rows], whether each value is missing.
        offsets: for "categories" and "text": int64[rows + 1]. Otherwise None.
        categories: the names of the categories.
        known_at: int64[rows], the time from which on each value is known, in the unit of the data set's times and no
            earlier than its row; `NEVER` for values that must never be shown. None: all values are known with their
            rows.
        unit: the unit of numbers, for reports; for times "s" if they are seconds since 1970.
        oddities: what was odd about the given values, for summaries; "" for nothing.

    >>> codes = np.array([0, 1, -1], np.int32)
    >>> Column("category", codes, codes < 0, categories=("a", "b")).summary()
    'category, 2 different, 1 of 3 missing'
    """

    kind: Kind
    values: np.ndarray
    missing: np.ndarray
    offsets: np.ndarray | None = None
    categories: tuple[str, ...] = ()
    known_at: np.ndarray | None = None
    unit: str = ""
    oddities: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}")
        rows = len(self.missing)
        if (self.offsets is not None) != (self.kind in ("categories", "text")):
            raise ValueError(
                "offsets must be given for the kinds categories and text, and for no other kind, got "
                f"kind={self.kind!r} {'without' if self.offsets is None else 'with'} offsets"
            )
        found = {"values": len(self.values) if self.offsets is None else len(self.offsets) - 1}
        if self.known_at is not None:
            found["known_at"] = len(self.known_at)
        for name, count in found.items():
            if count != rows:
                raise ValueError(f"{name} must be of as many rows as missing, {rows}, got {count}")

    def __len__(self) -> int:
        return len(self.missing)

    def take(self, rows: np.ndarray) -> Column:
        """The column for some of the rows, given as int[n] or bool[rows]."""
        rows = np.flatnonzero(rows) if rows.dtype == bool else rows
        known_at = None if self.known_at is None else self.known_at[rows]
        if self.offsets is None:
            values, offsets = self.values[rows], None
        else:
            lengths = np.diff(self.offsets)[rows]
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            values = self.values[np.repeat(self.offsets[rows] - offsets[:-1], lengths) + np.arange(offsets[-1])]
        return Column(
            self.kind, values, self.missing[rows], offsets, self.categories, known_at, self.unit, self.oddities
        )

    def summary(self) -> str:
        """One line of text: the kind, the number of missing values and of values that are known late, and oddities."""
        parts: list[str] = [self.kind]
        if self.kind in ("category", "categories"):
            parts.append(f"{len(self.categories):,} different")
        if self.kind == "vector":
            parts.append(f"{self.values.shape[1]} {self.values.dtype}")
        if self.unit and self.kind == "number":
            parts.append(self.unit)
        if count := int(self.missing.sum()):
            parts.append(f"{count:,} of {len(self):,} missing")
        if self.known_at is not None:
            parts.append("known later than its row")
        return ", ".join(parts + ([self.oddities] if self.oddities else []))
