"""Typed columns of tables, tasks, and their folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dejax.datasets import NEVER, Column, HeteroDataset, Task

TEXT = Column(
    "text",
    np.array([7, 8, 9], np.uint32),
    np.array([False, True, False]),
    offsets=np.array([0, 2, 2, 3]),
    known_at=np.array([1, NEVER, 2]),
)
BOUGHT = Task(
    "next",
    "link",
    "users",
    np.array([0, 1, 0]),
    np.array([10, 10, 20]),
    np.array([2, 0, 1], np.int32),
    {"train": np.array([0, 1]), "test": np.array([2])},
    offsets=np.array([0, 1, 1, 3]),
    target="users",
)


def same(got: Any, want: Any) -> None:
    for found in dataclasses.fields(want):
        one, other = getattr(got, found.name), getattr(want, found.name)
        if isinstance(other, dict):
            assert one.keys() == other.keys()
            for key in other:
                np.testing.assert_array_equal(one[key], other[key])
        else:
            np.testing.assert_array_equal(one, other)


def test_columns_and_tasks_are_saved(tmp_path: Path) -> None:
    code = Column("category", np.array([1, -1, 0], np.int32), np.array([False, True, False]), categories=("a", "b"))
    data = HeteroDataset("x", {"users": 3}, {}, columns={"users": {"bio": TEXT, "state": code}}, time_unit="s")
    data = dataclasses.replace(data, keys={"users": np.array(["u1", "u2", "u3"])}).with_task(BOUGHT)
    data.save(tmp_path / "x")
    found = HeteroDataset.open(tmp_path / "x")
    for name, column in data.columns["users"].items():
        same(found.columns["users"][name], column)
    same(found.tasks["next"], BOUGHT)
    assert found.keys["users"].tolist() == ["u1", "u2", "u3"] and found.time_unit == "s"
    assert "users.state: category, 2 different, 1 of 3 missing" in found.summary()
    assert "1  test, 2.00 links each" in found.summary()


def test_rows_of_a_column_and_examples_of_a_task() -> None:
    some = TEXT.take(np.array([2, 0]))
    assert some.values.tolist() == [9, 7, 8] and some.offsets is not None and some.offsets.tolist() == [0, 1, 3]
    assert some.known_at is not None and some.known_at.tolist() == [2, 1]
    kept = BOUGHT.with_kept(np.array([False, True, True]), "not known yet")
    assert kept.labels.tolist() == [0, 1] and kept.offsets is not None and kept.offsets.tolist() == [0, 0, 2]
    assert {k: v.tolist() for k, v in kept.splits.items()} == {"train": [0], "test": [1]}
    assert kept.left_out == {"not known yet": 1}


def test_fields_that_do_not_fit_are_named() -> None:
    with pytest.raises(ValueError, match="kind must be one of number, category"):
        dataclasses.replace(TEXT, kind="numbers")
    with pytest.raises(ValueError, match="offsets must be given for the kinds categories and text"):
        dataclasses.replace(TEXT, kind="number")
    with pytest.raises(ValueError, match="known_at must be of as many rows as missing, 3, got 2"):
        dataclasses.replace(TEXT, known_at=np.zeros(2))
    with pytest.raises(ValueError, match="offsets and target must be given for tasks of the kind 'link'"):
        dataclasses.replace(BOUGHT, kind="binary")
    with pytest.raises(ValueError, match="must have one length, got 3, 2 and 3"):
        dataclasses.replace(BOUGHT, times=np.zeros(2))
    with pytest.raises(ValueError, match="'train' of task 'next' must have places from 0 to 2"):
        dataclasses.replace(BOUGHT, splits={"train": np.array([3])})
    with pytest.raises(ValueError, match="columns must have a value for each of the 2 rows of 'users', got 3 of 'bio'"):
        HeteroDataset("x", {"users": 2}, {}, columns={"users": {"bio": TEXT}})
