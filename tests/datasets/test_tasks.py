"""Makers of tasks: kinds, keys, cutoffs, splits, and what is left out."""

from __future__ import annotations

import datetime
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest

from dejax.datasets import from_tables, task_from_columns, task_from_function, task_of_events, task_of_rows

TABLES: dict[str, Any] = {
    "users": {"id": ["u1", "u2", "u3"], "joined": [1, 2, 30]},
    "items": {"id": [10, 11]},
    "orders": {
        "user": ["u1", "u2", "u2", "u1", "u1", "u3"],
        "item": [10, 11, 10, 10, None, 11],
        "day": [2, 4, 8, 9, 14, 31],
        "price": [1.0, 2.0, None, 4.0, 5.0, 6.0],
        "returned": [True, False, False, None, True, False],
        "told": [3, 9, 12, None, 20, 40],
    },
}
DATA = from_tables(
    TABLES,
    {"users": "id", "items": "id"},
    [("orders", "user", "users"), ("orders", "item", "items")],
    {"users": "joined", "orders": "day"},
    known_at={"orders": {"returned": "told"}},
)
SPLIT: dict[str, Any] = {"valid_from": 8, "test_from": 10}


def of_columns(keys: Any, times: Any, labels: Any, **more: Any) -> Any:
    return task_from_columns(DATA, "t", "users", keys, times, labels, **{**SPLIT, **more})


def test_kinds_of_labels() -> None:
    keys, times = ["u1", "u2", "u1", "u2"], [3, 3, 8, 11]
    task = of_columns(keys, times, [True, False, None, True])
    assert (task.kind, task.labels.tolist(), task.classes) == ("binary", [1, 0, 1], ("0", "1"))
    assert {k: v.tolist() for k, v in task.splits.items()} == {"train": [0, 1], "valid": [], "test": [2]}
    assert task.left_out == {"examples without a label": 1} and task.rows.tolist() == [0, 1, 1]
    task = of_columns(keys, times, ["b", "a", "c", "a"])
    assert (task.kind, task.labels.tolist(), task.classes) == ("classes", [1, 0, 2, 0], ("a", "b", "c"))
    assert of_columns(keys, times, ["b", "a", "b", "a"]).kind == "binary"
    task = of_columns(keys, times, [2.5, 1, np.nan, 7], unit="euros")
    assert (task.kind, task.labels.tolist(), task.labels.dtype) == ("regression", [2.5, 1, 7], np.float64)
    assert "2  train, mean 1.75, deviation 0.75" in task.summary() and "in euros" in task.summary()
    assert of_columns(keys, times, [4, 2, 3, 4], kind="classes").classes == ("2", "3", "4")
    task = of_columns(keys, times, [[10], [], [11, 10], [11]], target="items")
    assert (task.kind, task.labels.tolist(), task.offsets.tolist()) == ("link", [0, 1, 0, 1], [0, 1, 1, 3, 4])


def test_what_cannot_be_asked_is_left_out_and_counted() -> None:
    task = of_columns(["u1", "u2", "u2", "u9", "u3"], [0, 1, 8, 8, 8], [1, 0, 0, 1, 1], missing_keys="drop")
    # Day 0 is before all data; u2 joined on day 2, u3 on day 30; there is no u9.
    assert task.rows.tolist() == [1] and task.times.tolist() == [8]
    assert task.left_out == {
        "examples whose key users lacks": 1,
        "examples with a cutoff before all data": 1,
        "examples whose row of users is not known then": 2,
    }
    links = of_columns(["u1", "u2"], [3, 8], [[10, 99], [11]], target="items", missing_keys="drop")
    assert links.labels.tolist() == [0, 1] and links.left_out == {"links whose key items lacks": 1}


def test_mistakes_are_named() -> None:
    def fails(message: str, keys: Any = ("u1", "u2"), times: Any = (3, 4), labels: Any = (0, 1), **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            of_columns(list(keys), list(times), list(labels), **more)

    fails("values of the primary key of 'users', got 1 of 2 that are none, such as 'u9'", keys=["u1", "u9"])
    fails("keys of the type of users's keys, which has text such as 'u1', got numbers such as 1", keys=[1, 2])
    fails("must not all be before the data, which begins at 1; got -5", times=[-5, -4], valid_from=-4, test_from=-4)
    late = {"valid_from": 22, "test_from": 22}
    fails("every row is later than its cutoff, such as 20", keys=["u3"] * 2, times=[20, 22], **late)
    fails("must differ in training, all 2 are '1'", labels=[1, 1])
    fails("must have one length, got 2, 2 and 3", labels=[0, 1, 1])
    fails("must be numbers, as those of 'tables', got times such as", times=[datetime.date(2024, 1, n) for n in (1, 2)])
    fails("must have `valid_from` and `test_from`", valid_from=None)
    fails("`valid_from` no later than `test_from`, got 4 and 3", valid_from=4, test_from=3)
    fails("must have a `valid_from` in the unit of the data's times", valid_from=2024, test_from=2025)
    fails("must follow each other in time, got a cutoff 3 in test and 4 in train", splits=["test", "train"])
    fails("must have a cutoff for each example, got none for example 1", times=[3, None])
    fails("must fit its kind, 'binary'", keys=["u1"] * 3, times=[3] * 3, labels=[1, 2, 3], kind="binary")
    with pytest.raises(ValueError, match="must name a table, one of 'users', 'items', 'orders'; got 'user'"):
        task_from_columns(DATA, "t", "user", ["u1"], [3], [1])
    empty = from_tables({"a": {"id": []}}, {"a": "id"})
    with pytest.raises(ValueError, match="must have examples, got none; 'a' has 0 rows"):
        task_from_columns(empty, "t", "a", [], [], [])


def test_data_without_times_is_split_at_random() -> None:
    data = from_tables({"a": {"id": list(range(50)), "y": [n % 2 for n in range(50)]}}, {"a": "id"})
    task = task_of_rows(data, "y", "a", "y")
    assert [len(task.splits[split]) for split in ("train", "valid", "test")] == [40, 5, 5]
    assert task.hidden == (("a", "y"),) and sorted(np.concatenate(list(task.splits.values()))) == list(range(50))


def test_labels_of_rows() -> None:
    task = task_of_rows(DATA, "returned", "orders", "returned", valid_from=9, test_from=14)
    assert (task.kind, task.rows.tolist(), task.labels.tolist()) == ("binary", [0, 1, 2, 4, 5], [1, 0, 0, 1, 0])
    assert task.times.tolist() == [2, 4, 8, 14, 31] and task.hidden == ()  # it shows itself when it is told
    with pytest.raises(ValueError, match="known after its cutoff, got 5 of 5 rows of 'orders'"):
        task_of_rows(DATA, "returned", "orders", "returned", cutoff="told", valid_from=9, test_from=14)
    with pytest.raises(
        ValueError, match="must be a column of numbers, which are compared with `above`, got orders.day"
    ):
        task_of_rows(DATA, "late", "orders", "day", above=3, **SPLIT)
    price = task_of_rows(DATA, "price", "orders", "price", **SPLIT)
    assert price.kind == "regression" and price.hidden == (("orders", "price"),)
    assert price.left_out == {"examples without a label": 1}


def test_events_after_each_cutoff() -> None:
    def made(**more: Any) -> Any:
        options = {"valid_from": 22, "test_from": 24, **more}
        return task_of_events(DATA, "t", ("orders", "user"), [2, 3, 8, 22, 30], 7, **options)

    day, user = np.array(TABLES["orders"]["day"]), np.array(TABLES["orders"]["user"])
    counts = made()
    examples = list(zip(counts.rows.tolist(), counts.times.tolist(), strict=True))
    assert examples == [(row, time) for time in (2, 3, 8, 22) for row in (0, 1)]  # u3 joins on day 30
    wanted = [((user == f"u{row + 1}") & (day > time) & (day <= time + 7)).sum() for row, time in examples]
    assert counts.labels.tolist() == wanted and counts.kind == "regression"
    assert counts.left_out == {"cutoffs whose window ends after the data": 1}
    np.testing.assert_array_equal(made(how="any").labels, counts.labels > 0)
    np.testing.assert_array_equal(made(how="none").labels, counts.labels == 0)
    sums, means = made(how="sum", value="price"), made(how="mean", value="price")
    assert sums.labels.tolist() == [4, 2, 4, 2, 9, 0, 0, 0] and means.labels.tolist() == [4, 2, 4, 2, 4.5]
    assert means.left_out["examples without a label"] == 3
    active = made(active=6)
    assert list(zip(active.rows.tolist(), active.times.tolist(), strict=True)) == [(0, 2), (0, 3), (1, 8)]
    links = made(target="item")
    assert (links.kind, links.target) == ("link", "items")
    assert np.split(links.labels, links.offsets[1:-1])[1].tolist() == [0, 1]  # u2 from day 3 to 9: items 11, then 10
    assert np.diff(links.offsets).tolist() == [1, 2, 1, 2, 1, 0, 0, 0]  # an order without an item is no link
    # The week after day 3 reaches the time of validation.
    early = made(valid_from=8, test_from=24)
    assert early.left_out["training examples whose window reaches validation"] == 4


def test_events_along_a_path_of_foreign_keys() -> None:
    tables = {
        "users": {"id": [1, 2]},
        "items": {"id": [7, 8]},
        "orders": {"id": [0, 1, 2, 3], "user": [1, 1, 2, 1], "day": [1, 3, 6, 8]},
        "lines": {"order": [3, 2, 2, 1], "item": [8, 7, 8, 7]},  # known from the days of their orders
    }
    keys = [("orders", "user", "users"), ("lines", "order", "orders"), ("lines", "item", "items")]
    data = from_tables(tables, {"users": "id", "items": "id", "orders": "id"}, keys, {"orders": "day"})
    made = partial(task_of_events, data, "t", ("lines", "order.user"), [2, 5], 3, valid_from=5, test_from=5)
    assert made().labels.tolist() == [1, 0, 1, 2] and made().entity == "users"
    links = made(target="item")
    assert [own.tolist() for own in np.split(links.labels, links.offsets[1:-1])] == [[0], [], [1], [0, 1]]


def test_mistakes_of_events_are_named() -> None:
    def fails(message: str, events: Any = ("orders", "user"), window: Any = 7, **more: Any) -> None:
        with pytest.raises(ValueError, match=message):
            task_of_events(DATA, "t", events, [2, 3], window, **{**SPLIT, **more})

    fails("must name a foreign key, orders.user, orders.item, or a path of them .* got orders.day", ("orders", "day"))
    fails("got orders.user.item", ("orders", "user.item"))
    fails("must be a whole number in the unit of the times, above 0, got '30 days'", window="30 days")
    fails("at least 99 before the end of the data, got 2 that are all later", window=99)
    fails("how of task 't' must be one of any, none, count, sum, mean, got 'all'", how="all")
    fails("value of task 't' must be a column of numbers of 'orders', got 'day'", how="sum", value="day")


def test_a_function_of_cutoffs_and_dates() -> None:
    orders = {"user": [1, 2, 1], "day": np.array(["2024-01-01", "2024-01-05", "2024-02-01"], "datetime64[D]")}
    data = from_tables(
        {"users": {"id": [1, 2]}, "orders": orders}, {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    )
    cutoffs = [datetime.date(2024, 1, day) for day in (2, 4, 6)]
    task = task_from_function(
        data,
        "t",
        "users",
        lambda cutoff: ([1, 2], [cutoff.day, 0]),
        cutoffs,
        valid_from="2024-01-04",
        test_from="2024-01-06",
    )
    assert task.labels.tolist() == [2, 0, 4, 0, 6, 0] and len(task.splits["valid"]) == 2
    same = task_of_events(
        data, "t", ("orders", "user"), cutoffs, "2 days", how="any", valid_from=cutoffs[2], test_from=cutoffs[2]
    )
    assert same.labels.tolist() == [0, 0, 0, 1, 0, 0] and (np.diff(same.times) % 86400 == 0).all()
    with pytest.raises(ValueError, match="must give as many labels as keys, got 1 and 2 at 3"):
        task_from_function(data, "t", "users", lambda cutoff: ([1, 2], [0]), [3])


@pytest.mark.parametrize(
    ("column", "tells"),
    [
        (lambda y, rng: y, True),
        (lambda y, rng: 3.0 - 2 * y, True),
        (lambda y, rng: np.where(y, "sent back", "kept"), True),
        (lambda y, rng: [["worn", "small", "late"][k % 3] if back else None for k, back in enumerate(y)], True),
        (lambda y, rng: np.where(y, rng.lognormal(size=len(y)), np.nan), True),  # the amount that was paid back
        (lambda y, rng: 100 * y + rng.normal(size=len(y)), True),
        (lambda y, rng: y + rng.normal(size=len(y)), False),
        (lambda y, rng: np.where(rng.random(len(y)) < 0.05, 1 - y, y), False),
        (lambda y, rng: [f"order {k}" for k in range(len(y))], False),
    ],
)
@pytest.mark.parametrize("late", [False, True])
def test_a_column_that_tells_the_label_is_pointed_out(column: Any, tells: bool, late: bool) -> None:
    rng, n = np.random.default_rng(0), 400
    y = rng.integers(0, 2, n)
    orders = {"at": np.arange(n), "told": np.arange(n) + 3, "y": y, "x": column(y, rng)}
    known_at = {"orders": {"y": "told", **({"x": "told"} if late else {})}}
    data = from_tables({"orders": orders}, time_columns={"orders": "at"}, known_at=known_at)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        task_of_rows(data, "t", "orders", "y", valid_from=300, test_from=350)
    assert len(found) == (tells and not late)
    assert all("the column orders.x tells nearly all 300 training labels" in str(one.message) for one in found)


def test_amounts_and_classes_that_a_column_tells_are_pointed_out() -> None:
    rng, n = np.random.default_rng(0), 300
    amount = rng.lognormal(size=n)
    orders = {"at": np.arange(n), "told": np.arange(n) + 3, "y": amount, "x": np.log(amount), "z": rng.normal(size=n)}
    data = from_tables({"orders": orders}, time_columns={"orders": "at"}, known_at={"orders": {"y": "told"}})
    with pytest.warns(UserWarning, match=r"orders\.x tells nearly all 200 training labels"):
        task_of_rows(data, "t", "orders", "y", valid_from=200, test_from=250)
    color = rng.choice(["red", "green", "blue"], n)
    orders |= {"y": color, "x": np.char.upper(color)}
    data = from_tables({"orders": orders}, time_columns={"orders": "at"}, known_at={"orders": {"y": "told"}})
    with pytest.warns(UserWarning, match=r"orders\.x tells nearly all 200 training labels"):
        task_of_rows(data, "t", "orders", "y", valid_from=200, test_from=250)
