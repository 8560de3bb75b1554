"""Databases as people have them: empty text, numbers of several countries, keys of several columns, odd times."""

from __future__ import annotations

import contextlib
import datetime
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejax.datasets import from_tables, task_from_columns, task_of_events, task_of_rows
from dejax.datasets.tables._column_kinds import _Numerals


@pytest.mark.parametrize(
    ("texts", "numbers"),
    [
        (["1,5", "12,25", "1.234,56"], [1.5, 12.25, 1234.56]),
        (["1,234.50", "999.00", "1,234,567"], [1234.5, 999.0, 1234567.0]),
        (["1,234", "12,500"], [1234.0, 12500.0]),
        (["0,125", "1,250"], [0.125, 1.25]),
        (["1.234", "5.678"], [1.234, 5.678]),
        (["1,5", "1.5", "-3e2"], [1.5, 1.5, -300.0]),
        (["01234", "1.2.3", "7", "x"], [np.nan, np.nan, 7.0, np.nan]),
    ],
)
def test_numbers_as_text_are_read_as_their_column_writes_them(texts: list[str], numbers: list[float]) -> None:
    numerals = _Numerals.of(texts)
    np.testing.assert_array_equal([numerals.number(text) for text in texts], numbers)


def test_how_numbers_are_written_is_not_decided_by_the_future() -> None:
    past = {"at": [1, 2, 3, 4], "price": ["1,234", "5,678", "9,012", "2,345"]}
    for late in ("3,4", "4,321"):
        both = {"at": [*past["at"], 9], "price": [*past["price"], late]}
        found = from_tables({"o": both}, None, None, {"o": "at"}, fit_before=5, fixed_features=False)
        np.testing.assert_array_equal(found.columns["o"]["price"].values[:4], [1234, 5678, 9012, 2345])


def test_empty_text_is_missing_in_sqlite_too(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    with sqlite3.connect(path) as db:
        db.executescript(
            'CREATE TABLE "the staff" (id TEXT PRIMARY KEY, boss TEXT REFERENCES "the staff"(id), "a.b/c €" TEXT);'
            'CREATE TABLE orders (no INTEGER PRIMARY KEY, by TEXT REFERENCES "the staff"(id), at TEXT, price TEXT, '
            "paid TEXT);"
        )
        db.executemany('INSERT INTO "the staff" VALUES (?, ?, ?)', [("ä", "", "x"), ("b", "ä", ""), ("c", "ä", "y")])
        rows = [(n, "äbc"[n % 3], f"2024-01-{n + 1:02d} 10:00:00+02:00", "" if n % 4 else f"{n},50") for n in range(20)]
        db.executemany("INSERT INTO orders VALUES (?, ?, ?, ?, ?)", [(*r, ["yes", "no", " "][r[0] % 3]) for r in rows])
    data = from_tables(path, time_columns={"orders": "at"}, fixed_features=False)
    assert data.edges["the staff", "boss", "the staff"][1].tolist() == [0, 0]
    price = data.columns["orders"]["price"]
    assert price.kind == "number" and price.missing.sum() == 15 and "commas read as decimal signs" in price.summary()
    assert data.node_times["orders"][0] == np.datetime64("2024-01-01T08:00:00").astype(np.int64)
    task = task_of_rows(data, "paid", "orders", "paid", valid_from="2024-01-10", test_from="2024-01-15")
    assert task.kind == "binary" and task.classes == ("no", "yes") and task.left_out == {"examples without a label": 6}


def test_text_of_digits_and_signs_is_pointed_out() -> None:
    data = from_tables(
        {"o": {"day": ["31.12.2023", "1.1.2024"] * 9, "share": ["5 %", "7 %"] * 9, "name": ["a", "b"] * 9}}
    )
    assert "such as '31.12.2023' read as names" in data.columns["o"]["day"].summary()
    assert "such as '5 %' read as names" in data.columns["o"]["share"].summary()
    assert data.columns["o"]["name"].oddities == ""
    with pytest.raises(ValueError, match="got '31.12.2023'; convert the column to such as 2024-12-31"):
        from_tables({"o": {"day": ["31.12.2023", "1.1.2024"]}}, time_columns={"o": "day"})


def test_keys_of_several_columns(tmp_path: Path) -> None:
    path = tmp_path / "planes.db"
    with sqlite3.connect(path) as db:
        db.executescript(
            "CREATE TABLE seats (plane TEXT, no INTEGER, wide REAL, PRIMARY KEY (plane, no));"
            "CREATE TABLE bookings (seat INTEGER, at TEXT, plane TEXT, "
            "FOREIGN KEY (seat, plane) REFERENCES seats (no, plane));"
        )
        db.executemany("INSERT INTO seats VALUES (?, ?, ?)", [("p", 1, 1.0), ("p", 2, 2.0), ("q", 1, 3.0)])
        db.executemany("INSERT INTO bookings VALUES (?, ?, ?)", [(1, "2024-01-01", "q"), (2, "2024-01-02", "p")])
    declared = from_tables(path, time_columns={"bookings": "at"}, fixed_features=False)
    tables = {
        "seats": {"plane": ["p", "p", "q"], "no": [1, 2, 1]},
        "bookings": {"seat": [1.0, 2.0, np.nan], "plane": ["q", "p", "p"]},
    }
    given = from_tables(
        tables, {"seats": ["plane", "no"]}, [("bookings", ["plane", "seat"], "seats")], fixed_features=False
    )
    for data in (declared, given):
        (relation,) = (r for r in data.edges if r[0] == "bookings")
        assert relation == ("bookings", "plane, seat", "seats")
        assert [ends.tolist() for ends in data.edges[relation]] == [[0, 1], [2, 1]]
        assert data.keys["seats"].tolist() == ["p, 1", "p, 2", "q, 1"]
    with pytest.raises(ValueError, match="as many columns as the primary key of 'seats', 2, got 1 of 'bookings'"):
        from_tables(tables, {"seats": ["plane", "no"]}, [("bookings", "seat", "seats")])
    with pytest.raises(ValueError, match="primary_keys must name columns of 'seats', plane, no; got 'row'"):
        from_tables(tables, {"seats": ["plane", "row"]})


def test_numbers_and_keys_beyond_64_bits() -> None:
    big = from_tables({"o": {"n": [2**70, 2**71, 3]}}, fixed_features=False).columns["o"]["n"]
    assert big.kind == "number" and big.values.tolist() == [2.0**70, 2.0**71, 3.0]
    keys = [2**64 - 1 - n for n in range(3)]
    tables = {"c": {"id": np.array(keys, np.uint64)}, "o": {"c": [keys[2], keys[0], None]}}
    data = from_tables(tables, {"c": "id"}, [("o", "c", "c")], fixed_features=False)
    assert data.edges["o", "c", "c"][1].tolist() == [2, 0]


def test_numbers_beyond_floats_are_named() -> None:
    for beyond in (10**400, "1e400"):
        with pytest.raises(ValueError, match=r"column o\.n must be finite, got infinity"):
            from_tables({"o": {"n": [1, beyond, 3]}})


@pytest.mark.parametrize("size", [5e-324, 1e-300, 1e-13, 1.0, 1e300, np.finfo(np.float64).max])
def test_fixed_features_of_numbers_of_any_size(size: float) -> None:
    numbers = {"x": [-size, size] * 10, "at": range(20)}
    made = from_tables({"t": numbers}, None, None, {"t": "at"}).features["t"][:, 0]
    np.testing.assert_allclose(made, [-1.0, 1.0] * 10, rtol=1e-6)
    late = {"x": [*numbers["x"], np.finfo(np.float64).max], "at": range(21)}
    assert np.isfinite(from_tables({"t": late}, None, None, {"t": "at"}, fit_before=20).features["t"]).all()
    rows = {"x": np.full((4, 3), size)}
    assert np.isfinite(from_tables({"t": rows}, kinds={"t": {"x": "vector"}}).features["t"]).all()


def test_a_key_that_cannot_be_converted_is_shown() -> None:
    with pytest.raises(ValueError, match=r"got text such as '3.0' that cannot all be converted exactly"):
        from_tables({"c": {"id": [1, 2, 3]}, "o": {"c": ["1", "3.0"]}}, {"c": "id"}, [("o", "c", "c")])


@pytest.mark.parametrize(("unit", "scale"), [("s", 1), ("ms", 1000), ("ns", 10**9)])
def test_times_as_numbers_since_1970(unit: str, scale: int) -> None:
    at = (1_700_000_000 + np.arange(9) * 86_400) * scale
    tables = {"o": {"at": at, "late": [int(time) + scale for time in at[:-1]] + [None], "y": np.arange(9.0)}}
    data = from_tables(
        tables, None, None, {"o": "at"}, known_at={"o": {"y": "late"}}, numbers_since_1970=unit, fixed_features=False
    )
    assert data.time_unit == "s" and data.node_times["o"].tolist() == (at // scale).tolist()
    assert data.columns["o"]["y"].known_at[:8].tolist() == (at[:-1] // scale + 1).tolist()
    assert data.columns["o"]["at"].kind == "time" and data.columns["o"]["at"].unit == "s"
    with pytest.raises(
        ValueError, match="numbers_since_1970 must be 's', 'ms', 'us' or 'ns', the unit of the numbers, got 'minutes'"
    ):
        from_tables(tables, None, None, {"o": "at"}, numbers_since_1970="minutes")


def test_a_task_of_an_empty_table_names_the_table() -> None:
    data = from_tables(
        {"o": {"at": [], "y": []}, "c": {"id": [1]}}, {"c": "id"}, None, {"o": "at"}, fixed_features=False
    )
    with pytest.raises(ValueError, match="task 't' must have rows, got the empty table 'o'"):
        task_of_rows(data, "t", "o", "y", valid_from="2024-01-01", test_from="2024-01-02")


def test_examples_with_empty_text_have_no_label_and_one_cutoff_may_stand_alone() -> None:
    days = np.datetime64("2024-01-01") + np.arange(60)
    tables = {"u": {"id": ["a", "b"]}, "o": {"u": ["a", "b", "b"] * 20, "at": days}}
    data = from_tables(tables, {"u": "id"}, [("o", "u", "u")], {"o": "at"}, fixed_features=False)
    split = {"valid_from": "2024-02-01", "test_from": "2024-02-20"}
    times = ["2024-01-05", "2024-01-06", "2024-01-07", "2024-02-25"]
    task = task_from_columns(data, "t", "u", ["a", "b", "a", "b"], times, ["yes", "", "no", "no"], **split)
    assert task.kind == "binary" and task.left_out == {"examples without a label": 1}
    with pytest.raises(ValueError, match="keys of task 't' must not be missing, got none for example 1"):
        task_from_columns(data, "t", "u", ["a", ""], times[:2], ["yes", "no"], **split)
    asked = task_of_events(
        data, "e", ("o", "u"), "2024-01-05", "9 days", valid_from="2024-01-20", test_from="2024-01-30"
    )
    assert asked.labels.tolist() == [3, 6] and len(asked.splits["train"]) == 2


def test_links_of_one_row_each_are_lists() -> None:
    """As a CSV file has them: several rows of an entity and a cutoff are one example."""
    days = [datetime.date(2024, 1, day) for day in (1, 1, 2)]
    tables = {"u": {"id": [7, 8]}, "i": {"id": list("abc")}, "o": {"u": [7, 7, 8], "i": list("abc"), "at": days}}
    keys = {"u": "id", "i": "id"}, [("o", "u", "u"), ("o", "i", "i")], {"o": "at"}
    data = from_tables(tables, *keys, fixed_features=False)
    times = [datetime.date(2024, 1, day) for day in (2, 3, 2, 2, 2)]
    task = task_from_columns(
        data, "t", "u", [7, 8, 7, 7, 8], times, ["a", "c", "b", "z", "a"],
        target="i", splits=["train", "test", "train", "train", "train"], missing_keys="drop",
    )  # fmt: skip
    assert task.rows.tolist() == [0, 1, 1] and task.offsets is not None and task.offsets.tolist() == [0, 2, 3, 4]
    assert task.labels.tolist() == [0, 1, 0, 2] and {s: p.tolist() for s, p in task.splits.items()} == {
        "train": [0, 1], "valid": [], "test": [2],
    }  # fmt: skip
    assert task.left_out == {"links whose key i lacks": 1}


def test_sqlite_columns_keep_their_values_beside_generated_ones(tmp_path: Path) -> None:
    path = tmp_path / "shop.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "create table Users(id integer primary key, a int, twice int generated always as (a * 2), b int);"
        "insert into Users(id, a, b) values (1, 10, 7), (2, 20, 8);"
        "create table orders(id integer primary key, user int references users(id));"
        "insert into orders values (1, 2);"
    )
    connection.close()
    data = from_tables(path)
    values = {name: column.values.tolist() for name, column in data.columns["Users"].items()}
    assert values == {"a": [10, 20], "twice": [20, 40], "b": [7, 8]}
    assert data.edges["orders", "user", "Users"][1].tolist() == [1]  # names have no upper and lower case there


@pytest.mark.parametrize("year", [1850, 1960, 2020])
def test_windows_end_with_the_data_in_any_century(year: int) -> None:
    days = np.datetime64(f"{year}-01-01") + np.arange(12)
    orders = {"user": [7, 8, 7, 7, 7, 8, 7, 7, 8, 7, 8, 7], "day": days}
    keys = {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    data = from_tables({"users": {"id": [7, 8]}, "orders": orders}, *keys)
    task = task_of_events(
        data, "t", ("orders", "user"), days[[1, 4, 7, 10]], "2 days", valid_from=days[4], test_from=days[7]
    )
    assert task.labels.tolist() == [2, 0, 1, 1, 1, 1]
    assert task.left_out == {"cutoffs whose window ends after the data": 1}


def test_columns_of_one_name_surrogates_and_equal_values() -> None:
    pa = pytest.importorskip("pyarrow")
    with pytest.raises(ValueError, match="columns of table 't' must have different names, got 'a' more than once"):
        from_tables({"t": pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])})
    text = from_tables({"t": {"x": [f"\ud800 {n}" for n in range(60)]}}).columns["t"]["x"]
    assert text.kind == "text" and len(text.values) == 120
    later = {"x": [0.1] * 20 + [0.2], "at": range(21)}  # the mean of equal values is not exactly 0.1
    assert abs(from_tables({"t": later}, None, None, {"t": "at"}, fit_before=20).features["t"][-1, 0]) < 1
    names = from_tables({"t": {"x": [1e300, np.inf, -np.inf, 1.0]}}, kinds={"t": {"x": "category"}}).columns["t"]["x"]
    assert len(names.categories) == 4


def test_a_label_whose_edges_tell_it_is_an_error_and_a_path_may_end() -> None:
    tables = {"a": {"id": [1, 2]}, "b": {"a": [1, 2, 2, 1], "t": [1, 2, 3, 4]}}
    data = from_tables(tables, {"a": "id"}, [("b", "a", "a")], {"b": "t"}, kinds={"b": {"a": "category"}})
    with pytest.raises(ValueError, match="label of task 't' must not be a foreign key, whose edges tell it, got b.a"):
        task_of_rows(data, "t", "b", "a", valid_from=3, test_from=4)
    none = np.zeros(0, np.int64)
    tables = {"c": {"id": [1]}, "o": {"id": none, "c": none}, "l": {"o": [1, 2], "t": [1, 2]}}
    keys = {"c": "id", "o": "id"}, [("o", "c", "c"), ("l", "o", "o")], {"l": "t"}
    data = from_tables(tables, *keys, dangling="drop")
    with pytest.raises(ValueError, match="cutoffs of task 't' must be at least 1 before the end of the data"):
        task_of_events(data, "t", ("l", "o.c"), [1], 1)


def joins(primary, foreign, dangling="error"):
    """The row of `p` that each row of `f` refers to, and the keys of `p`; a key has a column for each list."""
    names = [f"k{i}" for i in range(len(primary))]
    of = [{**dict(zip(names, key, strict=True)), "x": np.arange(len(key[0]))} for key in (primary, foreign)]
    key = names[0] if len(names) == 1 else tuple(names)
    data = from_tables(
        dict(zip("pf", of, strict=True)), primary_keys={"p": key}, foreign_keys=[("f", key, "p")], dangling=dangling
    )
    (rows, ends), *_ = (found for relation, found in data.edges.items() if relation[0] == "f")
    return np.bincount(rows, ends + 1, len(of[1]["x"])).astype(int) - 1, data.keys["p"]


def test_keys_of_several_columns_are_equal_where_each_column_is():
    primary, foreign = (["x, y", "x", "x\\"], ["z", "y, z", ", z"]), (["x", "x\\", "x, y"], ["y, z", ", z", "z"])
    assert joins(primary, foreign)[0].tolist() == [1, 2, 0]
    none = joins((["x, y"], ["z"]), (["x", "x, y"], ["y, z", "z"]), "drop")[0]
    assert none.tolist() == [-1, 0]
    days = np.array(["2020-01-01", "2020-01-02"], "M8[D]")
    for times in (days.astype("M8[ns]"), days.astype("M8[us]").tolist(), [str(day) for day in days]):
        assert joins((days, [1, 2]), (times, [1.0, 2.0]))[0].tolist() == [0, 1]
    assert joins(([True, False], [1, 2]), ([False, None], [2, 1]))[0].tolist() == [1, -1]


@pytest.mark.parametrize(
    ("primary", "foreign"),
    [
        (np.array([1, 2], np.int32), [2**40, 2]),
        (np.array([1, 2], np.uint8), [-3, 2]),
        (np.array([2**63 + 5, 2], np.uint64), np.array([2**63 + 6, 2], np.uint64)),
        ([7, 2], [7.5, 2]),
        ([False, True], [5, 1]),
        (np.array(["2020-01-01", "2020-01-02"], "M8[D]"), np.array(["2020-01-01T12", "2020-01-02T00"], "M8[us]")),
    ],
)
def test_rows_are_added_for_keys_that_the_column_of_keys_cannot_hold(primary, foreign):
    ends, keys = joins((primary,), (foreign,), "add")
    assert ends.tolist() == [2, 1] and len(keys) == 3


def test_text_of_sqlite_that_is_no_utf8_stays_apart(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "a.db")) as file:
        file.execute("create table t (id integer primary key, city text)")
        file.executescript(
            "insert into t values (1, cast(x'4be46c6e' as text)), (2, cast(x'4be56c6e' as text)), (3, 'K')"
        )
    city = from_tables(tmp_path / "a.db").columns["t"]["city"]
    assert sorted(city.categories) == ["K", "K\\xe4ln", "K\\xe5ln"]


def test_times_that_lie_after_their_rows_are_said_to_do_so():
    repairs = {"reported": ["2024-01-01", "2024-01-05"], "finished": ["2024-01-03", "2024-01-05"], "cost": [1.0, 2.0]}
    given = {"repairs": repairs}
    data = from_tables(given, time_columns={"repairs": "reported"})
    assert "after its row in 1 of 2" in data.columns["repairs"]["finished"].oddities
    assert not data.columns["repairs"]["reported"].oddities.count("after its row")
    late = from_tables(given, time_columns={"repairs": "reported"}, known_at={"repairs": {"cost": "finished"}})
    assert "after its row" not in late.columns["repairs"]["finished"].oddities
    assert "after its row" not in from_tables(given).columns["repairs"]["finished"].oddities


def test_an_index_of_pandas_is_a_key_if_it_has_a_name(tmp_path):
    pandas = pytest.importorskip("pandas")
    users = pandas.DataFrame({"id": [7, 8], "age": [30.0, 40.0]}).set_index("id")
    orders = pandas.DataFrame({"user": [7, 8, 8], "price": [1.0, 2.0, 3.0]})
    data = from_tables({"users": users, "orders": orders}, {"users": "id"}, [("orders", "user", "users")])
    assert data.keys["users"].tolist() == [7, 8] and list(data.columns["users"]) == ["age"]
    orders.to_csv(tmp_path / "orders.csv")
    for given in (tmp_path, {"orders": pandas.read_csv(tmp_path / "orders.csv")}):
        with pytest.warns(UserWarning, match="of table 'orders' is left out, since it has no name"):
            assert list(from_tables(given).columns["orders"]) == ["user", "price"]


def test_nuls_at_the_end_of_text_keep_no_keys_and_labels_apart() -> None:
    """Fields of a fixed width end with NULs, which numpy's text cannot: labels became one class, keys lost rows."""
    orders = {"user": ["a\0\0", "b", "a"], "at": [1, 2, 3], "note": ["\0", "x\0", "x"]}
    data = from_tables(
        {"users": {"id": ["a", "b\0"]}, "orders": orders},
        {"users": "id"},
        [("orders", "user", "users")],
        {"orders": "at"},
    )
    assert data.edges["orders", "user", "users"][1].tolist() == [0, 1, 0]
    note = data.columns["orders"]["note"]
    assert note.categories == ("x",) and note.values.tolist() == [-1, 0, 0]
    times, labels = [1, 2, 3, 4], ["yes\0", "no", "yes", "no"]
    task = task_from_columns(data, "t", "users", ["b\0", "a", "b", "a\0"], times, labels, valid_from=3, test_from=4)
    assert task.rows.tolist() == [1, 0, 1, 0] and task.classes == ("no", "yes") and task.labels.tolist() == [1, 0, 1, 0]
    with pytest.raises(ValueError, match="must be unique, got 'a' in 2 rows"):
        from_tables({"users": {"id": ["a", "a\0"]}}, {"users": "id"})


@pytest.mark.parametrize("missing", [[], [None]])
def test_integers_beyond_floats_are_different_categories_and_classes(missing: list[None]) -> None:
    big = [2**60, 2**60 + 1, 2**60 + 2]
    table = {"session": [*big, *missing], "at": np.arange(3 + len(missing))}
    data = from_tables({"visits": table}, None, None, {"visits": "at"}, kinds={"visits": {"session": "category"}})
    assert data.columns["visits"]["session"].categories == tuple(map(str, big))
    times, labels = np.arange(6 + 2 * len(missing)), [*big, *missing] * 2
    rows = times % len(table["at"])
    task = task_from_columns(data, "t", "visits", rows, times, labels, kind="classes", valid_from=3, test_from=5)
    assert task.classes == tuple(map(str, big)) and task.labels.tolist() == [0, 1, 2] * 2


def _as_given(times: list[str], how: str) -> Any:
    stamps = [datetime.datetime.fromisoformat(time) for time in times]
    if how == "text":
        return times
    if how == "datetimes":
        return stamps
    if how == "pandas":
        return pytest.importorskip("pandas").Series(stamps)
    return pytest.importorskip("pyarrow").chunked_array([pytest.importorskip("pyarrow").array(stamps)])


@pytest.mark.parametrize("first", ["text", "datetimes", "pandas", "arrow"])
@pytest.mark.parametrize("second", ["text", "datetimes", "pandas", "arrow"])
def test_columns_with_and_without_zones_are_pointed_out(first: str, second: str) -> None:
    """Between them lie hours: a model might see rows before they came to be."""
    plain = ["2024-01-01T08:00:00", "2024-01-02T08:00:00"]
    zone = [f"{time}-05:00" for time in plain]

    def read(a: list[str], b: list[str]) -> Any:
        tables = {"a": {"at": _as_given(a, first)}, "b": {"at": _as_given(b, second)}}
        return from_tables(tables, time_columns={"a": "at", "b": "at"})

    with pytest.warns(
        UserWarning, match=r"times of a\.at have a zone and those of b\.at have none, which are taken as UTC"
    ):
        data = read(zone, plain)
    assert (data.node_times["a"] - data.node_times["b"]).tolist() == [5 * 3600] * 2
    read(plain, plain)
    read(zone, zone)
