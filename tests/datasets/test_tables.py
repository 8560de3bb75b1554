"""Relational tables as heterogeneous graphs."""

from __future__ import annotations

import datetime
import gzip
import io
import sqlite3
import zipfile
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dejax.datasets import NEVER, Label, from_tables, read_csv

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


def _read_twice(tables: Any) -> None:
    """The same as of mappings of lists."""
    want, got = from_tables(TABLES, **KEYS), from_tables(tables, **KEYS)
    for table in TABLES:
        np.testing.assert_array_equal(got.features[table], want.features[table])
        assert {name: column.kind for name, column in got.columns[table].items()} == {
            name: column.kind for name, column in want.columns[table].items()
        }
    assert [side.tolist() for side in got.edges[PLACED]] == [side.tolist() for side in want.edges[PLACED]]


def test_frames_without_arrow() -> None:
    _read_twice({table: _Frame(columns) for table, columns in TABLES.items()})


class _Stream:
    """A table of which only Arrow's interchange is known."""

    def __init__(self, table: Any) -> None:
        self.__arrow_c_stream__ = table.__arrow_c_stream__


def _duck(columns: dict[str, list[Any]]) -> Any:
    return pytest.importorskip("duckdb").from_arrow(pytest.importorskip("pyarrow").table(columns))


def test_columns_of_arrow_in_a_mapping() -> None:
    """Arrays and what else gives Arrow's interchange, such as a Series of polars, are read as columns of tables are."""
    arrow = pytest.importorskip("pyarrow")
    numbers = arrow.array([1, None, 3])
    given = {
        "keys": arrow.array(["x", "y", "z"]),
        "numbers": numbers,
        "stream": _Stream(arrow.chunked_array([numbers])),
    }
    columns = from_tables({"rows": given}, {"rows": "keys"}, [], fixed_features=False).columns["rows"]
    assert {name: column.kind for name, column in columns.items()} == {"numbers": "number", "stream": "number"}
    np.testing.assert_array_equal(columns["stream"].values[[0, 2]], [1, 3])


@pytest.mark.parametrize(
    "made",
    [
        lambda columns: _Stream(pytest.importorskip("pyarrow").table(columns)),
        lambda columns: pytest.importorskip("pandas").DataFrame(columns),
        lambda columns: pytest.importorskip("polars").DataFrame(columns),
        _duck,
    ],
    ids=["any", "pandas", "polars", "duckdb"],
)
def test_tables_of_arrows_interchange(made: Any) -> None:
    pytest.importorskip("pyarrow")
    _read_twice({table: made(columns) for table, columns in TABLES.items()})


@pytest.mark.parametrize("suffix", ["parquet", "csv", "csv.gz", "csv.zip"])
def test_folders_of_files(tmp_path: Path, suffix: str) -> None:
    arrow, csv = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.csv")
    for table, columns in TABLES.items():
        path = tmp_path / f"{table}.{suffix}"
        if suffix == "parquet":
            pytest.importorskip("pyarrow.parquet").write_table(arrow.table(columns), path)
            continue
        text = io.BytesIO()
        csv.write_csv(arrow.table(columns), text)
        if suffix.endswith("zip"):
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr(f"{table}.csv", text.getvalue())
        else:
            path.write_bytes(gzip.compress(text.getvalue()) if suffix.endswith("gz") else text.getvalue())
    (tmp_path / "notes.txt").write_text("no table", encoding="utf-8")
    _read_twice(tmp_path)
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="must be a folder with files .parquet, .csv"):
        from_tables(tmp_path / "none")


def test_a_csv_file_whose_last_value_is_no_number(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    rows = "\n".join(f"{n},{n / 2}" for n in range(200_000))
    (tmp_path / "t.csv").write_text(f"id,price\n{rows}\n200000,unknown\n", encoding="utf-8")
    data = from_tables({"t": read_csv(tmp_path / "t.csv")}, {"t": "id"})
    assert data.columns["t"]["price"].summary().startswith("number, 1 of 200,001 missing, text read as numbers, 1 of 2")
    assert data.keys["t"][-1] == 200_000


def test_newlines_in_a_large_csv_file(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    texts = [f'"{row}\n{row},b,{row}\nend"' for row in range(80_000)]  # pyarrow reads a megabyte at once
    (tmp_path / "t.csv").write_text("id,text,n\n" + "".join(f"{row},{text},1\n" for row, text in enumerate(texts)))
    table = read_csv(tmp_path / "t.csv")
    assert table["id"].to_pylist() == list(range(80_000))
    assert table["text"].to_pylist() == [text.strip('"') for text in texts]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a;b\n1;2\n", "must have commas between its columns, got the header 'a;b'"),
        ("a\tb\n1\t2\n", "must have commas between its columns"),
        ("a,b\n1\n", "must be a CSV file, got an error: CSV parse error: Expected 2 columns, got 1"),
        ("", "must be a CSV file, got an error: Empty CSV file"),
    ],
)
def test_files_that_are_no_csv_files_are_named(tmp_path: Path, text: str, why: str) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "orders.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"orders\.csv {why}"):
        from_tables(tmp_path)
    (tmp_path / "orders.csv").rename(tmp_path / "orders.parquet")
    with pytest.raises(ValueError, match=r"orders\.parquet must be a Parquet file, got an error: "):
        from_tables(tmp_path)


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
    fails("primary_keys must have a key of the table 'users', to which", primary_keys={})
    fails("foreign_keys must name a column of 'orders', .*; got 'usr'", foreign_keys=[("orders", "usr", "users")])
    triples = r"foreign_keys must be a list of \(table, column, other table\), got "
    fails(triples + "{'orders': 'user'}", foreign_keys={"orders": "user"})
    fails(triples + r"\('orders', 'user'\)", foreign_keys=[("orders", "user")])
    fails("tables must be a dict of tables by name, .*, got list; give a table as", [ORDERS])
    fails("got list for the table 'orders'; convert it to a dict of columns", {**TABLES, "orders": [1, 2]})
    lazy = SimpleNamespace(columns=["user"], collect=dict)
    fails(r"got SimpleNamespace for the table 'orders'; collect it with .collect\(\)", {**TABLES, "orders": lazy})
    fails("primary key users.id must be unique", {**TABLES, "users": {**USERS, "id": ["u1", "u1", "u2"]}})
    fails("primary key users.id must have no missing", {**TABLES, "users": {**USERS, "id": ["u1", None, "u2"]}})
    fails("columns of table 'users' must have one length", {**TABLES, "users": {**USERS, "age": [1]}})
    fails("dangling must be 'error', 'drop' or 'add', got 'skip'", dangling="skip")
    lost = {**TABLES, "orders": {**ORDERS, "user": ["u9", "u1", None, "u2"]}}
    fails("got 1 values without a row such as 'u9'; pass dangling='drop'", lost)
    assert from_tables(lost, **KEYS, dangling="drop").num_edges[PLACED] == 2


def test_empty_tables() -> None:
    data = from_tables({"users": {"id": []}, "orders": {"user": []}}, {"users": "id"}, [PLACED])
    assert data.num_nodes == {"users": 0, "orders": 0} and data.num_edges[PLACED] == 0 and data.features == {}


def test_a_foreign_key_whose_name_begins_like_a_reverse() -> None:
    tables = {"users": {"id": [1, 2, 3], "joined": [10, 20, 30]}, "edits": {"rev_user": [3, 1], "day": [5, 6]}}
    keys = {"users": "id"}, [("edits", "rev_user", "users")], {"users": "joined", "edits": "day"}
    data = from_tables(tables, *keys)
    # The users joined after their edits: the edges are known when both ends are.
    assert data.edge_times["edits", "rev_user", "users"].tolist() == [30, 10]
    assert data.edge_times["users", "rev_rev_user", "edits"].tolist() == [30, 10]


def test_keys_of_64_bits_stay_exact_beside_missing_ones() -> None:
    base = 2**60
    tables = {"users": {"id": [base, base + 1]}, "orders": {"user": [base + 1, None, base], "size": [base, None, 0]}}
    data = from_tables(tables, {"users": "id"}, [("orders", "user", "users")])
    assert [side.tolist() for side in data.edges["orders", "user", "users"]] == [[0, 2], [1, 0]]
    np.testing.assert_allclose(data.features["orders"], [[1, 0], [0, 1], [-1, 0]], atol=1e-6)
    times = {"orders": {"at": [base + 1, None]}}
    known = from_tables(times, time_columns={"orders": "at"}, missing_times="always known").node_times["orders"]
    assert known.tolist() == [base + 1, -(2**63)]


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


# --------------------------------------------------------------------------------------------------- times


SHOP: dict[str, Any] = {
    "tables": {
        "users": {"id": [0, 1], "joined": [1, 5]},
        "products": {"id": [0, 1], "size": [1.0, 2.0]},
        "orders": {"id": [0, 1, 2], "user": [0, 1, 1], "day": [2, 3, 9]},
        "lines": {"order": [2, 0, 1, None], "product": [0, 0, 1, 1], "count": [4.0, 1.0, 1.0, 2.0]},
        "refunds": {"line": [0, 3]},
    },
    "primary_keys": {"users": "id", "products": "id", "orders": "id"},
    "foreign_keys": [("orders", "user", "users"), ("lines", "order", "orders"), ("lines", "product", "products")],
    "time_columns": {"users": "joined", "orders": "day"},
}
ALWAYS = -(2**31)


def test_an_edge_is_known_when_both_ends_are() -> None:
    data = from_tables(**SHOP)
    assert data.edge_times["orders", "user", "users"].tolist() == [2, 5, 9]  # user 1 joined after order 1
    assert data.edge_times["lines", "order", "orders"].tolist() == [9, 2, 5]  # lines have no time of their own
    assert data.edge_times["lines", "product", "products"].tolist() == [9, 2, 5, ALWAYS]
    assert data.edge_times["products", "rev_product", "lines"].tolist() == [9, 2, 5, ALWAYS]
    assert data.node_times["lines"].tolist() == [9, 2, 5, ALWAYS] and data.node_times["orders"].tolist() == [2, 3, 9]
    assert "products" not in data.node_times
    # Means and deviations are those of the lines that are known before day 9: 1, 1 and 2.
    counts = from_tables(**SHOP, label=Label("orders", "user", 9, 10)).features["lines"][:, 0]
    np.testing.assert_allclose(counts * np.std([1, 1, 2]) + np.mean([1, 1, 2]), [4, 1, 1, 2], rtol=1e-6)


def test_a_question_is_not_known_before_the_answer_that_it_names() -> None:
    tables = {
        "questions": {"id": [0, 1], "day": [1, 2], "accepted": [11, None]},
        "answers": {"id": [10, 11], "question": [0, 0], "day": [3, 8]},
    }
    keys = {"questions": "id", "answers": "id"}
    references = [("questions", "accepted", "answers"), ("answers", "question", "questions")]
    data = from_tables(tables, keys, references, {"questions": "day", "answers": "day"})
    assert data.node_times["questions"].tolist() == [1, 2]  # a question is asked about at its own time
    assert data.edge_times["questions", "accepted", "answers"].tolist() == [8]
    assert data.edge_times["questions", "rev_question", "answers"].tolist() == [8, 8]


def test_missing_times_are_a_choice() -> None:
    tables = {**SHOP["tables"], "orders": {"id": [0, 1, 2], "user": [0, 1, 1], "day": [2, None, 9], "y": [0, 1, 1]}}
    given = {**SHOP, "tables": tables, "label": Label("orders", "y", 4, 5)}
    with pytest.raises(ValueError, match=r"orders\.day must have a time in every row, 1 of 3 rows .* first is row 1"):
        from_tables(**given)
    with pytest.raises(ValueError, match="missing_times must be 'error' or 'drop' or 'always known', got 'skip'"):
        from_tables(**given, missing_times="skip")
    data = from_tables(**given, missing_times="drop")
    assert data.num_nodes["orders"] == 2 and data.node_times["orders"].tolist() == [2, 9]
    assert [side.tolist() for side in data.edges["orders", "user", "users"]] == [[0, 1], [0, 1]]
    assert [side.tolist() for side in data.edges["lines", "order", "orders"]] == [[0, 1], [1, 0]]
    assert data.left_out == {"rows of orders without a time": 1} and "1  left out: rows of orders" in data.summary()
    data = from_tables(**given, missing_times="always known")
    assert data.node_times["orders"].tolist() == [2, ALWAYS, 9]
    assert data.edge_times["orders", "user", "users"].tolist() == [2, 5, 9]
    assert data.splits["train"]["orders"].tolist() == [0, 1]
    dates = [datetime.date(2024, 1, 1), None]
    known = from_tables({"t": {"at": dates}}, time_columns={"t": "at"}, missing_times="always known").node_times["t"]
    assert known.min() == ALWAYS  # it fits int32, as the dates do


@pytest.mark.parametrize(
    ("times", "boundary"),
    [
        ([datetime.date(2021 + n, 1, 1) for n in range(3)], 2022),  # a year against dates
        ([1_600_000_000_000 + 10**10 * n for n in range(3)], datetime.date(2022, 1, 1)),  # a date against milliseconds
        ([1_600_000_000_000 + 10**10 * n for n in range(3)], 1_640_000_000),  # seconds against milliseconds
        ([1_600_000_000 + 10**7 * n for n in range(3)], 1_620_000_000_000),
        ([2021, 2022, 2023], "2022-01-01"),
        (["2021-01-01", "2022-01-01", "2023-01-01"], 19_000),
    ],
)
def test_boundaries_are_of_the_kind_and_unit_of_their_column(times: list[Any], boundary: Any) -> None:
    with pytest.raises(ValueError, match=r"`valid_from` (of the kind|in the unit) of t\.at"):
        from_tables(
            {"t": {"at": times, "y": [0, 1, 0]}}, time_columns={"t": "at"}, label=Label("t", "y", boundary, boundary)
        )
    other = [n if isinstance(times[0], datetime.date | str) else datetime.date(2020, 1, 1 + n) for n in range(3)]
    with pytest.raises(ValueError, match="must all have times, or all numbers"):
        from_tables({"t": {"at": times}, "u": {"at": other}}, time_columns={"t": "at", "u": "at"})


# --------------------------------------------------------------------------------------------------- odd columns


def test_odd_columns_are_named() -> None:
    def warned(message: str, values: list[Any], **more: Any) -> Any:
        with pytest.warns(UserWarning, match=message):
            return from_tables({"t": {"x": values, "z": list(range(len(values)))}}, **more)

    data = warned(r"label t\.x has values such as 1\.5, 2\.5, 3\.5", [2.5, 1.5, 3.5], label=Label("t", "x"))
    assert data.num_classes == {"t": 3}
    warned(r"t\.x is read as categories, but 2 of 3 .* numbers, such as '1', and others such as 'x'", ["1", "2", "x"])
    warned(
        r"t\.x is read as categories, but 2 of 3 .* times, such as '2024-01-02', .* 'x'",
        ["2024-01-02", "2024-02-01", "x"],
    )
    columns = {
        "zip": ["01234", "00017"],
        "kind": ["a", "1"],
        "n": [True, None],
        "price": ["12.50", "3"],
        "tags": [["a", "b"], ["a"]],
    }
    found = from_tables({"t": columns}).columns["t"]  # no warning
    assert [column.kind for column in found.values()] == ["category", "category", "number", "number", "categories"]
    assert found["price"].values.tolist() == [12.5, 3] and found["price"].oddities == "text read as numbers"
    prices = [*(n + 0.25 for n in range(99)), "n/a"]
    price = from_tables({"t": {"price": prices}}).columns["t"]["price"]
    assert price.summary() == "number, 1 of 100 missing, 1 of 100 not numbers such as 'n/a', taken as missing"
    dates = [*(f"2024-01-{day:02}" for day in range(1, 31)), "soon"]
    day = from_tables({"t": {"day": dates}}).columns["t"]["day"]
    assert day.kind == "time" and day.missing.sum() == 1 and np.diff(day.values[:2]).tolist() == [86400]


# --------------------------------------------------------------------------------------------------- keys


DAYS = np.array(["2024-01-01", "2024-01-02"], "datetime64[D]")


@pytest.mark.parametrize(
    ("primary", "foreign"),
    [
        (DAYS, DAYS.astype("datetime64[ns]")),
        (DAYS, ["2024-01-01", "2024-01-02T00:00:00"]),
        (np.array([1, 2], "timedelta64[h]"), np.array([60, 120], "timedelta64[m]")),
        ([7, -8], ["7", "-8"]),
        (["7", "8"], np.array([7, 8], np.uint8)),
        ([7, 8], [Decimal(7), 8.0]),
        ([7, "04G"], ["7", "04G"]),
        (["7", "8"], [7, "8"]),
    ],
)
def test_keys_of_different_types_are_converted(primary: Any, foreign: Any) -> None:
    tables = {"a": {"id": primary}, "b": {"a": foreign}}
    for dangling in ("error", "drop"):
        data = from_tables(tables, {"a": "id"}, [("b", "a", "a")], dangling=dangling)
        assert [side.tolist() for side in data.edges["b", "a", "a"]] == [[0, 1], [0, 1]] and not data.left_out


@pytest.mark.parametrize(
    ("primary", "foreign"),
    [
        ([7, 8], ["7", "eight"]),
        ([7, 8], ["07", "8"]),
        (["u", "7"], [7, 8]),
        (DAYS, [1, 2]),
        (["u"], [b"u"]),
        ([1, "2"], [1, 2.5]),
    ],
)
def test_keys_that_cannot_be_converted_are_named(primary: Any, foreign: Any) -> None:
    with pytest.raises(ValueError, match=r"foreign key b\.a must have keys of the type of a\.id, which has .* such as"):
        from_tables({"a": {"id": primary}, "b": {"a": foreign}}, {"a": "id"}, [("b", "a", "a")], dangling="drop")


def test_floats_that_have_lost_digits_are_no_keys() -> None:
    with pytest.raises(ValueError, match=r"key b\.a must have exact values"):
        from_tables({"a": {"id": [2**53]}, "b": {"a": np.array([2.0**53])}}, {"a": "id"}, [("b", "a", "a")])


def test_dropped_edges_are_counted() -> None:
    tables = {"a": {"id": [1, 2]}, "b": {"a": [2, 3, 4, None]}}
    data = from_tables(tables, {"a": "id"}, [("b", "a", "a")], dangling="drop")
    assert "2  left out: edges b -> a -> a, whose key no row has" in data.summary()


# --------------------------------------------------------------------------------------------------- late columns


FLIGHTS: dict[str, Any] = {
    "tables": {
        "planes": {"tail": ["n1", "n2"], "seats": [50, 180]},
        "flights": {
            "tail": ["n1", "n2", "n1", "n9", None],
            "from": ["JFK", "LGA", "JFK", "EWR", "JFK"],
            "day": [1, 2, 5, 6, 7],
            "landed": [3, None, 6, 9, 8],
            "delay": [4.0, None, 7.0, 8.0, -1.0],
        },
    },
    "primary_keys": {"planes": "tail"},
    "foreign_keys": [("flights", "tail", "planes")],
    "time_columns": {"flights": "day"},
    "known_at": {"flights": {"delay": "landed"}},
    "dangling": "add",
}


def test_times_that_time_columns_do_not_name() -> None:
    """Rows of `reviews` came to be on the days `written`; dates of birth lie before all orders."""
    days = np.datetime64("2024-01-01") + np.arange(3)
    tables = {
        "users": {"id": [1, 2, 3], "born": days - np.timedelta64(9000, "D")},
        "orders": {"user": [1, 2, 3], "placed": days},
        "reviews": {"user": [1, 2, 3], "written": days + np.timedelta64(1, "D")},
    }
    keys = {"users": "id"}, [("orders", "user", "users"), ("reviews", "user", "users")]
    with pytest.warns(
        UserWarning, match=r"in reviews\.written, in 3 of 3 rows: .* reviews = 'written' to time_columns"
    ):
        from_tables(tables, *keys, {"orders": "placed"})
    from_tables(tables, *keys, {"orders": "placed", "reviews": "written"})
    from_tables(tables, *keys, {"orders": "placed"}, kinds={"reviews": {"written": "ignore"}})
    from_tables(tables, *keys)


def test_late_columns_are_events() -> None:
    data = from_tables(**FLIGHTS, kinds={"flights": {"from": "ignore", "tail": "category"}})
    columns = data.columns["flights"]
    assert {name: column.kind for name, column in columns.items()} == {
        "tail": "category", "day": "time", "landed": "time", "delay": "number",
    }  # fmt: skip
    assert columns["tail"].categories == ("n1", "n2", "n9")
    for name in ("delay", "landed"):
        late = columns[name].known_at
        assert late is not None and late.tolist() == [3, NEVER, 6, 9, 8]
    assert columns["day"].known_at is None and columns["day"].unit == "" == data.time_unit
    event = ("flights", "tail@landed", "planes")
    assert [side.tolist() for side in data.edges[event]] == [[0, 2, 3], [0, 0, 2]]
    assert data.edge_times[event].tolist() == [3, 6, 9]
    assert data.features["flights"].shape == (5, 3)  # the tail one-hot: neither delay nor the time of landing
    assert data.keys["planes"].tolist() == ["n1", "n2", "n9"]
    assert data.columns["planes"]["seats"].missing.tolist() == [False, False, True]
    assert "1  left out: columns of rows of planes that only foreign keys name" in data.summary()
    assert data.known_from["flights"].tolist() == [1, 2, 5, 6, 7] and "planes" not in data.known_from
    assert from_tables(**FLIGHTS, fixed_features=False).features == {}


def test_categories_are_in_the_order_in_which_they_came_to_be_known() -> None:
    table = {"at": [5, 1, 3, 3], "state": ["a", "z", "y", "x"]}
    data = from_tables({"t": table}, time_columns={"t": "at"}, fit_before=4)
    assert data.columns["t"]["state"].categories == ("z", "x", "y", "a")
    np.testing.assert_array_equal(data.features["t"], [[0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0]])
    later = from_tables({"t": {**table, "state": ["0", "z", "y", "x"]}}, time_columns={"t": "at"}, fit_before=4)
    np.testing.assert_array_equal(later.columns["t"]["state"].values, data.columns["t"]["state"].values)


def test_odd_times_and_kinds_are_named() -> None:
    def fails(message: str, **columns: Any) -> None:
        with pytest.raises(ValueError, match=message):
            from_tables({"t": columns}, time_columns={"t": "at"} if "at" in columns else {})

    aware = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    mixed = r"t\.at: times must all have a zone or none of them, got '2024-01-01T00:00:00\+00:00' and '2024-01-02T00"
    fails(mixed, at=[aware, datetime.datetime(2024, 1, 2)])
    fails(mixed, at=["2024-01-01T00:00:00+00:00", "2024-01-02T00:00:00"])
    fails(r"t\.at must have times as ISO 8601 text, got 'soon'", at=["2024-01-01", "soon"])
    with pytest.raises(ValueError, match="kinds must be number, time, .* got 'float' for the column t.x"):
        from_tables({"t": {"x": [1.0]}}, kinds={"t": {"x": "float"}})
    with pytest.raises(ValueError, match="known_at must name a column of 'flights', .*; got 'arrived'"):
        from_tables(**{**FLIGHTS, "known_at": {"flights": {"delay": "arrived"}}})
    with pytest.raises(ValueError, match="the column t.x must have numbers, got values such as 'a'"):
        from_tables({"t": {"x": ["a", "b"]}}, kinds={"t": {"x": "number"}})
    with pytest.raises(ValueError, match="primary key t.id must be unique, got 7 in 2 rows"):
        from_tables({"t": {"id": [7, 8, 7]}}, {"t": "id"})


def test_vectors_and_lists_keep_their_precision() -> None:
    rows = np.arange(6, dtype=np.float16).reshape(3, 2)
    data = from_tables({"t": {"v": rows, "tags": [["b", "a"], [], None]}})
    vector, tags = data.columns["t"]["v"], data.columns["t"]["tags"]
    assert vector.kind == "vector" and vector.values.dtype == np.float16
    assert tags.categories == ("a", "b") and tags.values.tolist() == [1, 0] and tags.missing.tolist() == [0, 0, 1]
    np.testing.assert_array_equal(data.features["t"], [[0, 1, 1, 1], [2, 3, 0, 0], [4, 5, 0, 0]])
