"""CSV files: keys and codes come back as they are written, and numbers, times and missing values are read."""

import csv
import warnings

import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from dejax.datasets import from_tables, read_csv, task_of_events
from dejax.training.command import predictions
from dejax.training.command.config import read_config

NAMES = {
    "zeros": ["007", "7", "0070", "100"],
    "signs": ["+31612345678", "+2", "3", "-4"],
    "hexadecimal": ["0x1F", "31", "0xA", "1"],
    "exponents": ["12E4", "1e5", "100000", "2"],
    "huge": ["18446744073709551616", "18446744073709551617", "9223372036854775807", "3"],
    "fractions": ["1.10", "1.1", "0.12345678901234567", "2.0"],
    "dates": ["2024-01-05", "2024-02-05", "2024-03-05", "2024-04-05"],
    "times": ["2024-01-05 10:00:00", "2024-01-05T11:00:00+01:00", "2024-01-05T12:00:00Z", "2024-01-05 13:00:00.5"],
    "clocks": ["10:00", "11:00:00", "12:00", "13:00"],
    "booleans": ["true", "false", "TRUE", "False"],
    "missing": ["NA", "nan", "NULL", "DE"],
    "infinite": ["inf", "-inf", "1", "2"],
    "spaces": [" a", "a", "b ", "c d"],
    "quotes": ['a"b', "a,b", "a\nb", "a'b"],
    "unicode": ["Zoë", "Zoe\u0308", "東京", "😀"],
}


def lines(path, *rows, encoding="utf-8"):
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file).writerows(rows)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_keys_of_predictions_are_those_of_the_file(tmp_path, names):
    orders = [(name, f"2024-01-{1 + n:02d}") for n, name in enumerate(names * 3)]
    lines(tmp_path / "users.csv", ("id", "age"), *zip(names, range(4), strict=True))
    lines(tmp_path / "orders.csv", ("user", "at"), *orders)
    data = from_tables(tmp_path, {"users": "id"}, [("orders", "user", "users")], {"orders": "at"})
    assert data.edges["orders", "user", "users"][1].tolist() == [0, 1, 2, 3] * 3
    cutoffs = ["2024-01-02", "2024-01-03", "2024-01-04"]
    task = task_of_events(data, "t", ("orders", "user"), cutoffs, "1 day", valid_from=cutoffs[1], test_from=cutoffs[2])
    columns = predictions.as_columns(data, predictions.known_rows(data, task, 1_800_000_000), np.zeros(4), None)
    predictions.write(tmp_path / "predictions.csv", columns)
    with (tmp_path / "predictions.csv").open(newline="", encoding="utf-8") as file:
        assert [row["users"] for row in csv.DictReader(file)] == names


@pytest.mark.parametrize(("keys", "kept"), [(["7", "8"], [7, 8]), (["A1", "8"], ["A1", "8"])])
def test_foreign_keys_are_read_as_the_keys_that_they_refer_to(tmp_path, keys, kept):
    """pandas writes integers beside missing ones as 8.0, and a column may have only those names that are numbers."""
    lines(tmp_path / "users.csv", ("id", "age"), *zip(keys, (1, 2), strict=True))
    lines(tmp_path / "orders.csv", ("user", "price"), ("8.0" if kept[0] == 7 else "8", 1), ("NA", 2), ("", 3))
    data = from_tables(tmp_path, {"users": "id"}, [("orders", "user", "users")])
    assert data.keys["users"].tolist() == kept
    assert [ends.tolist() for ends in data.edges["orders", "user", "users"]] == [[0], [1]]


def test_keys_of_csv_beside_parquet_of_several_columns_and_of_chains(tmp_path):
    parquet.write_table(pa.table({"code": ["007", "8"], "city": ["x", "y"]}), tmp_path / "sites.parquet")
    lines(tmp_path / "wards.csv", ("site", "no", "beds"), ("007", "1", 3), ("8", "01", 4))
    lines(tmp_path / "heads.csv", ("site", "no", "age"), ("8", "01", 30), ("007", "1", 40))
    keys = {"sites": "code", "wards": ["site", "no"], "heads": ["site", "no"]}
    references = [("wards", "site", "sites"), ("heads", ["site", "no"], "wards")]
    data = from_tables(tmp_path, keys, references)
    assert data.keys["wards"].tolist() == ["007, 1", "8, 01"] and data.keys["heads"].tolist() == ["8, 01", "007, 1"]
    assert data.edges["wards", "site", "sites"][1].tolist() == [0, 1]
    assert data.edges["heads", "site, no", "wards"][1].tolist() == [1, 0]


def test_columns_of_codes_stay_text_and_numbers_do_not(tmp_path):
    head = ("code", "long", "hex", "plus", "count", "price", "share", "at", "none")
    lines(
        tmp_path / "t.csv",
        head,
        ("007", "12345678901234567890", "0x1F", "+1", "-12", "1.50", "1e-5", "2024-01-05", ""),
        ("70", "1", "5", "2", " 7", "0.5", "2", "2024-01-06", "NA"),
    )
    types = dict(zip(head, map(str, read_csv(tmp_path / "t.csv").schema.types), strict=True))
    assert [name for name in head if types[name] == "string"] == ["code", "long", "hex"]
    assert types["count"] == "int64" and types["price"] == types["share"] == types["plus"] == "double"
    assert read_csv(tmp_path / "t.csv", text=["none", "at"])["none"].to_pylist() == [None, "NA"]
    with pytest.raises(ValueError, match="columns that are read as text, .* are there; got 'x'"):
        read_csv(tmp_path / "t.csv", text=["x"])


def test_a_column_with_leading_zeros_has_names(tmp_path):
    """A twelfth of the postcodes begin with a zero: as numbers, these were missing."""
    codes = ["01234", *["98765", "99999"] * 6]
    with pytest.warns(UserWarning, match="numbers, such as '98765', and others such as '01234'"):
        data = from_tables({"t": {"zip": codes, "n": [str(n) for n in range(13)]}}, fixed_features=False)
    assert data.columns["t"]["zip"].kind == "category" and not data.columns["t"]["zip"].missing.any()
    assert data.columns["t"]["n"].kind == "number"


def test_text_of_another_encoding_stays_text(tmp_path):
    lines(tmp_path / "users.csv", ("id", "city"), ("Zoë", "Köln"), ("Bo", "Bonn"), encoding="latin-1")
    data = from_tables(tmp_path, {"users": "id"})
    assert data.keys["users"].tolist() == ["Zo\\xeb", "Bo"]
    assert set(data.columns["users"]["city"].categories) == {"K\\xf6ln", "Bonn"}


def test_bytes_are_keys():
    keys = [b"\x9b\x01", b"\x00", b"ab"]
    tables = {"users": {"id": keys}, "orders": {"user": [keys[2], keys[0], None]}}
    data = from_tables(tables, {"users": "id"}, [("orders", "user", "users")])
    assert data.keys["users"].tolist() == ["9b01", "00", "6162"]
    assert data.edges["orders", "user", "users"][1].tolist() == [2, 0]


def test_examples_of_a_file_have_keys_as_they_are_written(tmp_path):
    lines(tmp_path / "users.csv", ("id", "since"), *((f"00{n}", f"2024-01-{n + 1:02d}") for n in range(1, 9)))
    lines(tmp_path / "churn.csv", ("user", "at", "left"), *((f"00{n}", f"2024-02-{n:02d}", n % 2) for n in range(1, 9)))
    (tmp_path / "c.toml").write_text(
        '[database]\npath = "."\nprimary_keys = {users = "id"}\ntime_columns = {users = "since"}\n'
        '[tasks.churn]\nentity = "users"\nexamples = "churn.csv"\nkeys = "user"\ntimes = "at"\nlabels = "left"\n'
        'valid_from = "2024-02-05"\ntest_from = "2024-02-07"\n'
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the examples are a table of the folder, too
        task = read_config(tmp_path / "c.toml").dataset().tasks["churn"]
    assert task.rows.tolist() == list(range(8)) and task.labels.tolist() == [1, 0] * 4


def test_keys_that_are_floats_or_dates_are_written_whole(tmp_path):
    found = {"day": np.array(["2024-01-05"], "datetime64[D]"), "at": np.array(["2024-01-05"], "datetime64[s]")}
    predictions.write(tmp_path / "p.csv", found)
    assert (tmp_path / "p.csv").read_text().splitlines() == ["day,at", "2024-01-05,2024-01-05T00:00:00Z"]
    data = from_tables({"t": {"id": [0.12345678901234567, 2.5], "at": [1, 2]}}, {"t": "id"}, time_columns={"t": "at"})
    assert predictions._keys(data, "t", np.array([0])).tolist() == [0.12345678901234567]
