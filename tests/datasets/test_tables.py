"""Relational tables as heterogeneous graphs."""

from __future__ import annotations

import datetime
import sqlite3
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejax.datasets import Label, from_tables

USERS = {"id": ["u1", "u2", "u3"], "age": [20, None, 40], "bio": ["a b", "c", None]}
ORDERS = {
    "user": ["u2", "u1", None, "u2"],
    "when": [datetime.datetime(2024, 1, day) for day in (1, 2, 3, 4)],
    "price": [1.0, 3.0, 100.0, 200.0],
    "paid": [True, False, True, True],
    "state": ["new", "old", "late", "new"],
}
KEYS: dict[str, Any] = {
    "primary_keys": {"users": "id"},
    "foreign_keys": [("orders", "user", "users")],
    "time_columns": {"orders": "when"},
}
TABLES = {"users": USERS, "orders": ORDERS}
PLACED = ("orders", "user", "users")


def test_edges_times_and_features() -> None:
    data = from_tables(TABLES, **KEYS)
    assert data.num_nodes == {"users": 3, "orders": 4}
    assert [side.tolist() for side in data.edges[PLACED]] == [[0, 1, 3], [1, 0, 1]]
    assert [side.tolist() for side in data.edges["users", "rev_user", "orders"]] == [[1, 0, 1], [0, 1, 3]]
    seconds = np.array(["2024-01-01", "2024-01-02", "2024-01-04"], "datetime64[s]").astype(np.int64)
    assert data.edge_times[PLACED].tolist() == seconds.tolist()
    assert data.edge_times["users", "rev_user", "orders"].tolist() == seconds.tolist()
    users = data.features["users"]  # age, whether it is missing, and the categories "a b" and "c"
    np.testing.assert_allclose(users, [[-1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0]])
    assert data.features["orders"].shape == (4, 1 + 1 + 3)
    np.testing.assert_allclose(data.features["orders"][:, 0].mean(), 0, atol=1e-6)


def test_a_label_splits_by_time_and_features_do_not_know_the_future() -> None:
    moment = datetime.datetime(2024, 1, 3)
    label = Label("orders", "paid", valid_from=moment, test_from=datetime.date(2024, 1, 4))
    data = from_tables(TABLES, **KEYS, label=label)
    assert {k: v["orders"].tolist() for k, v in data.splits.items()} == {"train": [0, 1], "valid": [2], "test": [3]}
    assert data.labels["orders"].tolist() == [1, 0, 1, 1] and data.num_classes == {"orders": 2}
    # Price: mean 2 and deviation 1 of the first two. The state "late" is not known before the third.
    np.testing.assert_allclose(data.features["orders"], [[-1, 1, 0], [1, 0, 1], [98, 0, 0], [198, 1, 0]])
    changed = {**TABLES, "orders": {**ORDERS, "price": [1.0, 3.0, -5.0, 7.0]}}
    again = from_tables(changed, **KEYS, label=label)
    np.testing.assert_array_equal(again.features["orders"][:2], data.features["orders"][:2])
    text = from_tables(TABLES, **KEYS, label=Label("users", "bio"))
    assert text.labels["users"].tolist() == [0, 1, -1] and text.splits == {}
    with pytest.raises(ValueError, match="time_columns the table 'users'"):
        from_tables(TABLES, **KEYS, label=Label("users", "bio", moment, moment))


def test_long_text_is_hashed_the_same_everywhere() -> None:
    words = {"id": list(range(60)), "text": [f"word{i} and more" for i in range(60)]}
    rows = from_tables({"t": words}, {"t": "id"}, max_categories=10, text_width=8).features["t"]
    assert rows.shape == (60, 8)
    np.testing.assert_allclose(np.linalg.norm(rows, axis=1), 1, rtol=1e-5)
    np.testing.assert_array_equal(
        rows, from_tables({"t": words}, {"t": "id"}, max_categories=10, text_width=8).features["t"]
    )


class _Frame:
    """As much of a pandas DataFrame as is read."""

    class Series:
        def __init__(self, values: list[Any]) -> None:
            self.values = np.empty(len(values), object)
            self.values[:] = values

        def isna(self) -> np.ndarray:
            return np.array([value is None for value in self.values])

        def to_numpy(self) -> np.ndarray:
            return np.array(["<NA>" if value is None else value for value in self.values], object)

    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns, self.columns = columns, list(columns)

    def __getitem__(self, column: str) -> Any:
        return self.Series(self._columns[column])


class _Arrow:
    def __init__(self, columns: dict[str, list[Any]]) -> None:
        self._columns, self.column_names = columns, list(columns)

    def column(self, name: str) -> Any:
        return SimpleNamespace(to_pylist=lambda: self._columns[name])


@pytest.mark.parametrize("kind", [_Frame, _Arrow])
def test_frames_and_arrow_tables(kind: Any) -> None:
    want, got = from_tables(TABLES, **KEYS), from_tables({k: kind(v) for k, v in TABLES.items()}, **KEYS)
    for table in TABLES:
        np.testing.assert_array_equal(got.features[table], want.features[table])
    assert [side.tolist() for side in got.edges[PLACED]] == [side.tolist() for side in want.edges[PLACED]]


def test_sqlite_by_its_own_keys(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute('CREATE TABLE "the users" (id TEXT PRIMARY KEY, age REAL)')
        db.execute('CREATE TABLE orders (user TEXT REFERENCES "the users"(id), day TEXT, price REAL)')
        db.executemany('INSERT INTO "the users" VALUES (?, ?)', [("u1", 20.0), ("u2", None)])
        db.executemany("INSERT INTO orders VALUES (?, ?, ?)", [("u2", "2024-01-02", 1.0), (None, "2024-01-03", 2.0)])
    data = from_tables(path, time_columns={"orders": "day"})
    assert data.num_nodes == {"the users": 2, "orders": 2}
    assert [side.tolist() for side in data.edges["orders", "user", "the users"]] == [[0], [1]]
    assert np.diff(data.node_times["orders"]).tolist() == [86400]
    with pytest.raises(ValueError, match="must have times as ISO 8601 text, got 'u2'"):
        from_tables(path, time_columns={"orders": "user"}, foreign_keys=[])
    with pytest.raises(FileNotFoundError, match="does not exist"):
        from_tables(tmp_path / "none.db")
    (tmp_path / "text.db").write_text("no database at all, but a long enough text", encoding="utf-8")
    with pytest.raises(ValueError, match="must be a SQLite file"):
        from_tables(tmp_path / "text.db")


def test_sqlite_keys_that_refer_to_no_primary_key(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE users (id INTEGER PRIMARY KEY, code INTEGER UNIQUE, UNIQUE (id, code))")
        db.execute("CREATE TABLE orders (user INTEGER REFERENCES users(code), buyer INTEGER REFERENCES users(ID))")
        db.execute("CREATE TABLE visits (id INTEGER, code INTEGER, FOREIGN KEY (id, code) REFERENCES users(id, code))")
        db.executemany("INSERT INTO users VALUES (?, ?)", [(1, 2), (2, 1)])
        db.execute("INSERT INTO orders VALUES (1, 1)")
    with pytest.warns(UserWarning, match=r"left out the foreign key \((user|id, code)\) of") as found:
        data = from_tables(path)
    assert len(found) == 2
    assert set(data.edges) == {("orders", "buyer", "users"), ("users", "rev_buyer", "orders")}
    assert data.edges["orders", "buyer", "users"][1].tolist() == [0]
    keys = {"users": "code"}, [("orders", "user", "users")]
    assert from_tables(path, *keys).edges["orders", "user", "users"][1].tolist() == [1]


def test_mistakes_are_named() -> None:
    def fails(message: str, tables: Any = TABLES, **changes: Any) -> None:
        with pytest.raises(ValueError, match=message):
            from_tables(tables, **{**KEYS, **changes})

    fails("primary_keys must name tables, 'users', 'orders'; got 'user'", primary_keys={"users": "id", "user": "id"})
    fails("primary_keys must have the table 'users', to which", primary_keys={})
    fails("foreign_keys must name a column of 'orders', .*; got 'usr'", foreign_keys=[("orders", "usr", "users")])
    fails("primary key users.id must be unique", {**TABLES, "users": {**USERS, "id": ["u1", "u1", "u2"]}})
    fails("primary key users.id must have no missing", {**TABLES, "users": {**USERS, "id": ["u1", None, "u2"]}})
    fails("columns of table 'users' must have one length", {**TABLES, "users": {**USERS, "age": [1]}})
    fails("dangling must be 'error' or 'drop', got 'skip'", dangling="skip")
    lost = {**TABLES, "orders": {**ORDERS, "user": ["u9", "u1", None, "u2"]}}
    fails("1 values such as 'u9' do not; pass dangling='drop'", lost)
    assert from_tables(lost, **KEYS, dangling="drop").num_edges[PLACED] == 2


def test_empty_tables() -> None:
    data = from_tables({"users": {"id": []}, "orders": {"user": []}}, {"users": "id"}, [PLACED])
    assert data.num_nodes == {"users": 0, "orders": 0} and data.num_edges[PLACED] == 0 and data.features == {}


def test_a_foreign_key_whose_name_begins_like_a_reverse() -> None:
    tables = {"users": {"id": [1, 2, 3], "joined": [10, 20, 30]}, "edits": {"rev_user": [3, 1], "day": [5, 6]}}
    keys = {"users": "id"}, [("edits", "rev_user", "users")], {"users": "joined", "edits": "day"}
    data = from_tables(tables, *keys)
    assert data.edge_times["edits", "rev_user", "users"].tolist() == [5, 6]
    assert data.edge_times["users", "rev_rev_user", "edits"].tolist() == [5, 6]


def test_keys_of_64_bits_stay_exact_beside_missing_ones() -> None:
    base = 2**60
    tables = {"users": {"id": [base, base + 1]}, "orders": {"user": [base + 1, None, base], "size": [base, None, 0]}}
    data = from_tables(tables, {"users": "id"}, [("orders", "user", "users")])
    assert [side.tolist() for side in data.edges["orders", "user", "users"]] == [[0, 2], [1, 0]]
    np.testing.assert_allclose(data.features["orders"], [[1, 0], [0, 1], [-1, 0]], atol=1e-6)
    times = {"orders": {"at": [base, None]}}
    assert from_tables(times, time_columns={"orders": "at"}).node_times["orders"].tolist() == [float(base), -np.inf]


def test_a_missing_duration_is_missing() -> None:
    data = from_tables({"rides": {"length": np.array([1, 3, "NaT"], "timedelta64[s]")}})
    np.testing.assert_array_equal(data.features["rides"], [[-1, 0], [1, 0], [0, 1]])


def test_decimals_and_durations_are_numbers() -> None:
    day = datetime.timedelta(days=1)
    columns = {"price": [Decimal("1.5"), None, Decimal("3.5")], "age": [day, 3 * day, None]}
    found = from_tables({"a": columns}).features["a"]
    np.testing.assert_array_equal(found, [[-1, 0, -1, 0], [0, 1, 1, 0], [1, 0, 0, 1]])
    keys = {"id": [2**60, 2**60 + 1]}, {"a": [Decimal(2**60 + 1), None]}
    edges = from_tables({"a": keys[0], "b": keys[1]}, {"a": "id"}, [("b", "a", "a")]).edges
    np.testing.assert_array_equal(edges["b", "a", "a"], [[0], [1]])


@pytest.mark.parametrize("values", [np.array([1j, 2]), np.array([np.inf, 1])])
def test_numbers_that_are_no_features_are_named(values: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"the column a\.x must (be finite, got infinity|have numbers, times or text)"):
        from_tables({"a": {"x": values}})


def test_splits_do_not_overlap() -> None:
    with pytest.raises(ValueError, match="`valid_from` no later than `test_from`, got 3 and 2"):
        from_tables({"a": {"t": [1, 2, 3], "y": [0, 1, 0]}}, time_columns={"a": "t"}, label=Label("a", "y", 3, 2))
