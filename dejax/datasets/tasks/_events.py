"""Events of a table in time, for tasks about what follows a cutoff."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from dejax.datasets._hetero import HeteroDataset

How = Literal["any", "none", "count", "sum", "mean"]
_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86_400, "week": 604_800}
_SECONDS |= {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 604_800}
_DURATION = re.compile(r"(\d+) *([a-z]+?)s?", re.IGNORECASE)


def duration(given: Any, unit: str, what: str) -> int:
    """A length of time in the unit of a dataset's times.

    Raises:
        ValueError: no length, or not above 0; a length of time for times that are numbers, or the reverse.
    """
    found: int | None = None
    if isinstance(given, str) and unit == "s":
        match = _DURATION.fullmatch(given.strip())
        name = match[2].lower() if match else ""
        found = int(match[1]) * _SECONDS[name] if match and name in _SECONDS else None
    elif isinstance(given, datetime.timedelta) and unit == "s":
        found = int(given.total_seconds())
    elif isinstance(given, np.timedelta64) and unit == "s":
        found = int(given / np.timedelta64(1, "s"))
    elif isinstance(given, int | np.integer) and unit == "":
        found = int(given)
    if found is None or found <= 0:
        expected = "a timedelta or text as '30 days'" if unit == "s" else "a whole number in the unit of the times"
        raise ValueError(f"{what} must be {expected}, above 0, got {given!r}")
    return found


@dataclass(frozen=True, eq=False)
class Events:
    """Rows of a table that refer to an entity, in order of time.

    Attributes:
        table: their table.
        entity: the table that they refer to.
        target: another table that they refer to, or None.
        times: int64[events], ascending.
        rows: int32[events], rows of their table.
        entities: int32[events], rows of the entity table.
        ends: int32[events], rows of the target table; without one, the entities.
    """

    table: str
    entity: str
    target: str | None
    times: np.ndarray
    rows: np.ndarray
    entities: np.ndarray
    ends: np.ndarray

    @classmethod
    def of(cls, data: HeteroDataset, task: str, events: tuple[str, str], target: str | None) -> Events:
        """The events of a foreign key, or of a path of foreign keys.

        Raises:
            ValueError: a foreign key that does not exist, or a table without times.
        """
        table, path = events
        entity_of, entity = _followed(data, task, table, path)
        end_of, other = (entity_of, None) if target is None else _followed(data, task, table, target)
        if table not in data.node_times:
            raise ValueError(
                f"events of task {task!r} must have times, got the table {table!r} without times; name its column in "
                "`time_columns` of from_tables"
            )
        rows = np.flatnonzero((entity_of >= 0) & (end_of >= 0)).astype(np.int32)
        times = np.asarray(data.node_times[table])[rows]
        order = np.argsort(times, kind="stable")
        rows = rows[order]
        return cls(table, entity, other, times[order], rows, entity_of[rows], end_of[rows])

    def within(self, after: int, until: int) -> slice:
        """The events later than one time, up to another."""
        first, last = np.searchsorted(self.times, [after, until], side="right").tolist()
        return slice(first, last)

    def amounts(self, data: HeteroDataset, task: str, value: str | None) -> np.ndarray:
        """float64[events], the values of a column of numbers, NaN for missing ones.

        Raises:
            ValueError: no column of numbers of that name.
        """
        column = data.columns.get(self.table, {}).get(value or "")
        if column is None or column.kind != "number":
            raise ValueError(f"value of task {task!r} must be a column of numbers of {self.table!r}, got {value!r}")
        return np.where(column.missing, np.nan, column.values)[self.rows]


def _followed(data: HeteroDataset, task: str, table: str, path: str) -> tuple[np.ndarray, str]:
    """The row to which each row of a table leads by a path of foreign keys, int32[rows], -1 for none; and its table."""
    names = {relation[1] for relation in data.edges}
    references = {relation[:2]: relation for relation in data.edges if f"rev_{relation[1]}" in names}
    found, at = np.arange(data.num_nodes[table] if table in data.num_nodes else 0, dtype=np.int32), table
    for column in [path] if (table, path) in references else path.split("."):
        if (at, column) not in references:
            shown = ", ".join(repr(".".join(key)) if "," in key[1] else ".".join(key) for key in references)
            raise ValueError(
                f"task {task!r} must name a foreign key, {shown}, or a path of them such as order.customer; got "
                f"{table}.{path}"
            )
        rows, ends = data.edges[references[at, column]]
        end_of = np.full(data.num_nodes[at] + 1, -1, np.int32)  # the last one is that of no row, -1
        end_of[rows] = ends
        found, at = end_of[found], references[at, column][2]
    return found, at


def label_of(how: str, entities: np.ndarray, amounts: np.ndarray | None, count: int) -> np.ndarray:
    """[entities of the table] labels, of the events of a window."""
    if amounts is not None:
        there = ~np.isnan(amounts)
        entities, amounts = entities[there], amounts[there]
        sums = np.bincount(entities, amounts, minlength=count)
        if how == "sum":
            return sums
        number = np.bincount(entities, minlength=count)
        return np.where(number, sums / np.maximum(number, 1), np.nan)
    number = np.bincount(entities, minlength=count)
    return {"count": number, "any": number > 0, "none": number == 0}[how]


def links_of(entities: np.ndarray, ends: np.ndarray, asked: np.ndarray) -> list[np.ndarray]:
    """The distinct rows that each entity of `asked` meets in a window."""
    pairs = np.unique(np.stack([entities, ends], axis=1), axis=0)
    first, last = (np.searchsorted(pairs[:, 0], asked, side=side) for side in ("left", "right"))
    return [pairs[a:b, 1] for a, b in zip(first, last, strict=True)]
