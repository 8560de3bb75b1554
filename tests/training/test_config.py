"""The command's TOML: tables in files, and tasks by each of their makers."""

import csv

import numpy as np
import pytest

from dejax.training import resolve
from dejax.training.command.config import read_config

DATABASE = """
[database]
path = "shop"
primary_keys = {customers = "id", articles = "id"}
foreign_keys = [["orders", "customer", "customers"], ["orders", "article", "articles"]]
time_columns = {orders = "placed"}
numbers_since_1970 = "ms"
"""
SPLIT = 'valid_from = "2024-03-01"\ntest_from = "2024-04-01"\n'
START = np.datetime64("2024-01-01", "ms")


def write(path, columns):
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))


@pytest.fixture
def shop(tmp_path):
    pytest.importorskip("pyarrow")
    n = 120
    (tmp_path / "shop").mkdir()
    write(tmp_path / "shop" / "customers.csv", {"id": range(7, 12), "name": ["é", "", "x", "y", "z"]})
    write(tmp_path / "shop" / "articles.csv", {"id": ["a", "b"], "price": ["1,50", "1.200,00"]})
    placed = (START + np.arange(n) * np.timedelta64(1, "D")).astype(np.int64)
    orders = {"customer": [7 + i % 5 for i in range(n)], "article": ["ab"[i % 2] for i in range(n)]}
    write(tmp_path / "shop" / "orders.csv", {**orders, "placed": placed, "late": [i % 3 for i in range(n)]})
    days = ["2024-02-01", "2024-03-05", "2024-04-05"]
    write(
        tmp_path / "churn.csv",
        {"who": [c for _ in days for c in range(7, 13)], "at": [d for d in days for _ in range(6)], "gone": "yn" * 9},
    )
    write(tmp_path / "next.csv", {"who": [7, 7, 8], "at": [days[0]] * 3, "met": list("aba"), "part": ["train"] * 3})
    return tmp_path


def opened(folder, tasks):
    (folder / "shop.toml").write_text(DATABASE + tasks)
    return read_config(folder / "shop.toml").dataset()


def test_tasks_of_rows_of_events_and_of_files(shop):
    data = opened(
        shop,
        f'[tasks.late]\ntable = "orders"\nlabel = "late"\nkind = "classes"\n{SPLIT}'
        f'[tasks.more]\nevents = ["orders", "customer"]\ncutoffs = ["2024-02-01", "2024-03-01", "2024-04-01"]\n'
        f'window = "12 days"\nhow = "count"\n{SPLIT}'
        f'[tasks.churn]\nentity = "customers"\nexamples = "churn.csv"\nkeys = "who"\ntimes = "at"\nlabels = "gone"\n'
        f'missing_keys = "drop"\n{SPLIT}'
        '[tasks.next]\nentity = "customers"\nexamples = "next.csv"\nkeys = "who"\ntimes = "at"\nlabels = "met"\n'
        'target = "articles"\nsplits = "part"\n',
    )
    kinds = {name: task.kind for name, task in data.tasks.items()}
    assert kinds == {"late": "classes", "more": "regression", "churn": "binary", "next": "link"}
    assert data.time_unit == "s" and data.features == {}  # encoders read columns
    churn = data.tasks["churn"]
    assert len(churn) == 15 and churn.left_out == {"examples whose key customers lacks": 3}
    assert {split: len(places) for split, places in churn.splits.items()} == {"train": 5, "valid": 5, "test": 5}
    assert data.tasks["next"].labels.tolist() == [0, 1, 0] and data.tasks["next"].rows.tolist() == [0, 1]
    assert data.columns["articles"]["price"].values.tolist() == [1.5, 1200.0]


def test_mistakes_in_a_task_of_a_file(shop):
    task = '[tasks.churn]\nentity = "customers"\nexamples = "{}"\nkeys = "{}"\ntimes = "at"\nlabels = "gone"\n'
    with pytest.raises(FileNotFoundError, match="must be a CSV or Parquet file, got .* does not exist"):
        opened(shop, task.format("none.csv", "who") + SPLIT)
    with pytest.raises(ValueError, match="must have a column of churn.csv as keys, who, at, gone; got 'customer'"):
        opened(shop, task.format("churn.csv", "customer") + SPLIT)
    with pytest.raises(
        ValueError, match=r"must have the arguments of dejax.datasets.task_from_columns, entity, .*; got wrong$"
    ):
        opened(shop, task.format("churn.csv", "who") + SPLIT + "wrong = 1\n")


def test_cutoffs_as_a_grid(shop):
    task = '[tasks.more]\nevents = ["orders", "customer"]\nwindow = "7 days"\n'
    grid = 'cutoffs = {first = "2024-02-01", last = 2024-03-02, every = "15 days"}\n'
    made = opened(shop, task + grid + 'valid_from = "2024-02-16"\ntest_from = "2024-03-01"\n').tasks["more"]
    assert np.unique(made.times).astype("M8[s]").astype("M8[D]").astype(str).tolist() == [
        "2024-02-01",
        "2024-02-16",
        "2024-03-02",
    ]
    with pytest.raises(ValueError, match=r"must have `cutoffs`.* got no `cutoffs`; for example cutoffs = {first"):
        opened(shop, task + SPLIT)
    with pytest.raises(ValueError, match=r"must be a list of times or have `first`, `last` and `every`, got first"):
        opened(shop, task + 'cutoffs = {first = "2024-02-01"}\n' + SPLIT)


def test_mistakes_in_the_database_and_in_settings(shop):
    task = f'[tasks.late]\ntable = "orders"\nlabel = "late"\nkind = "classes"\n{SPLIT}'
    for wrong, message in (
        (DATABASE.replace('path = "shop"', ""), "must have `path`, a folder of tables or a SQLite file, got none"),
        (
            DATABASE.replace("primary_keys", "primary_key"),
            "the arguments of dejax.datasets.from_tables, path, .* got primary_key .did you mean primary_keys",
        ),
    ):
        (shop / "wrong.toml").write_text(wrong + task)
        with pytest.raises(ValueError, match=message):
            read_config(shop / "wrong.toml").dataset()
    for name, value, message in (
        ("epochs", "three", "epochs must be a whole number, got 'three'"),
        ("recent", 1, "recent must be True or False, got 1"),
        ("fan_outs", 16, "fan_outs must be whole numbers, one for each layer, got 16"),
    ):
        with pytest.raises(ValueError, match=message):
            resolve("shop", task="tables", **{name: value})
