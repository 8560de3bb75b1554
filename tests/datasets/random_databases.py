"""Random databases with times, and the same ones with another future."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

CUTOFF = 10
_LAST = 20
_OTHER = 1_000_000.0


@dataclass(frozen=True)
class Database:
    """What `from_tables` takes. Circles of references and rows that refer to themselves occur.

    Attributes:
        tables: table -> column -> values, None where missing.
        references: foreign keys; every table has the primary key "id", which is the row's number.
        timed: the tables with the time column "at".
        late: table -> column -> the column of the times from which it is known.
    """

    tables: dict[str, dict[str, list[Any]]]
    references: list[tuple[str, str, str]]
    timed: list[str]
    late: dict[str, dict[str, str]]

    @property
    def arguments(self) -> dict[str, Any]:
        return {
            "tables": self.tables,
            "primary_keys": dict.fromkeys(self.tables, "id"),
            "foreign_keys": self.references,
            "time_columns": dict.fromkeys(self.timed, "at"),
            "known_at": self.late,
            "fit_before": CUTOFF + 1,
        }

    def known_from(self) -> dict[tuple[str, int], float]:
        """The latest time among a row and all rows that can be reached from it, row by row."""

        def reached(row: tuple[str, int], seen: set[tuple[str, int]]) -> set[tuple[str, int]]:
            if row not in seen:
                seen.add(row)
                for table, column, other in self.references:
                    if table == row[0] and self.tables[table][column][row[1]] is not None:
                        reached((other, self.tables[table][column][row[1]]), seen)
            return seen

        def time_of(table: str, row: int) -> float:
            return self.tables[table]["at"][row] if table in self.timed else -np.inf

        rows = [(table, row) for table, columns in self.tables.items() for row in range(len(columns["id"]))]
        return {row: max(time_of(*near) for near in reached(row, set())) for row in rows}

    def with_another_future(self, rng: np.random.Generator) -> Database:
        """The same until the cutoff. Whatever is known later has other values, times, keys, and more rows."""
        tables, known = copy.deepcopy(self.tables), self.known_from()
        for table, columns in tables.items():
            for row in range(len(columns["id"])):
                is_later = known[table, row] > CUTOFF
                for column, by in self.late.get(table, {}).items():
                    told = columns[by][row]
                    if is_later or told is None or told > CUTOFF:
                        columns[column][row] = _other_value(rng, column)
                for by in set(self.late.get(table, {}).values()):
                    if columns[by][row] is None or columns[by][row] > CUTOFF:
                        columns[by][row] = rng.choice([None, CUTOFF + 1, 2 * _LAST])
                if not is_later:
                    continue
                for column in _KINDS:
                    if column in columns:
                        columns[column][row] = _other_value(rng, column)
                if table in self.timed and columns["at"][row] > CUTOFF:
                    columns["at"][row] = int(rng.integers(CUTOFF + 1, 2 * _LAST))
                    for source, column, other in self.references:
                        if source == table:
                            columns[column][row] = int(rng.integers(0, len(self.tables[other]["id"])))
        for table in self.timed:
            for _ in range(rng.integers(0, 4)):
                self._add_row(tables, table, rng)
        return Database(tables, self.references, self.timed, self.late)

    def _add_row(self, tables: dict[str, dict[str, list[Any]]], table: str, rng: np.random.Generator) -> None:
        columns = tables[table]
        for column, values in columns.items():
            other = next((to for source, name, to in self.references if (source, name) == (table, column)), None)
            if column == "id":
                values.append(len(values))
            elif column in ("at", "told"):
                values.append(int(rng.integers(CUTOFF + 1, 2 * _LAST)))
            elif other is not None:
                values.append(int(rng.integers(0, len(self.tables[other]["id"]))))
            else:
                values.append(_other_value(rng, column))


_KINDS = ("number", "word", "text", "tags", "vector", "when", "secret", "outcome")


def _other_value(rng: np.random.Generator, column: str) -> Any:
    if column == "number" and rng.random() < 0.2:
        return "unknown"  # a number in the past, text from now on
    if column in ("number", "outcome"):
        return _OTHER * rng.random()
    if column == "tags":
        return ["later", "b"]
    if column == "vector":
        return np.full(2, _OTHER, np.float32)
    if column == "when":
        return np.datetime64("2500-01-01T00:00:00", "us").item()
    return str(rng.choice(["later", "A", "later still"]))  # "A" would be the first in order of names


def _value(rng: np.random.Generator, column: str) -> Any:
    if column == "vector":
        return rng.normal(size=2).astype(np.float32)
    if rng.random() < 0.15:
        return None
    if column in ("number", "outcome"):
        return float(rng.normal())
    if column == "text":
        return " ".join(rng.choice(["red", "green", "blue", "new", "old"], 4)) + f" {rng.integers(1000)}"
    if column == "tags":
        return rng.choice(["a", "b", "c"], rng.integers(0, 3)).tolist()
    if column == "when":
        return np.datetime64("2020-01-01T00:00:00", "us").item() + np.timedelta64(int(rng.integers(9**6)), "s").item()
    return str(rng.choice(["a", "b", "c"]))


def random_database(rng: np.random.Generator) -> Database:
    """Two to four tables of three to eight rows, with columns of all kinds, some known later than their rows."""
    names = [f"t{n}" for n in range(rng.integers(2, 5))]
    references = [
        (table, f"to_{other}_{n}", other)
        for table in names for other in names for n in range(2) if rng.random() < 0.35
    ]  # fmt: skip
    timed = [table for table in names if rng.random() < 0.6] or names[:1]
    sizes = {table: int(rng.integers(3, 9)) for table in names}
    late = {table: {"outcome": "told", "secret": "told"} for table in timed if rng.random() < 0.6}

    def drawn(table: str) -> dict[str, list[Any]]:
        count = sizes[table]
        columns: dict[str, list[Any]] = {"id": list(range(count))}
        for column in _KINDS[:6]:
            if rng.random() < 0.6:
                columns[column] = [_value(rng, column) for _ in range(count)]
        if table in timed:
            columns["at"] = [0, _LAST, *rng.integers(0, _LAST, count - 2).tolist()]
        if table in late:
            columns["told"] = [at + int(rng.integers(0, 8)) if rng.random() < 0.8 else None for at in columns["at"]]
            columns |= {column: [_value(rng, column) for _ in range(count)] for column in ("outcome", "secret")}
        for source, column, other in references:
            if source == table:
                keys = rng.integers(0, sizes[other], count).tolist()
                columns[column] = [None if rng.random() < 0.3 else key for key in keys]
        return columns

    return Database({table: drawn(table) for table in names}, references, timed, late)
