"""Files of predictions: each row names the row of the table that it is about, and each column what it tells."""

import numpy as np
import pytest

from dejax.datasets import from_tables, task_of_events, task_of_rows
from dejax.training.command.predictions import as_columns


@pytest.mark.parametrize("table", ["time", "label", "split", "prediction", "users"])
def test_keys_stand_beside_columns_of_the_same_name(table):
    orders = {"by": ["a", "b", "c"] * 3, "day": np.arange(9)}
    tables = {table: {"id": ["a", "b", "c"]}, "orders": orders}
    data = from_tables(tables, {table: "id"}, [("orders", "by", table)], {"orders": "day"})
    task = task_of_events(data, "t", ("orders", "by"), [2, 4, 6], 2, valid_from=4, test_from=6)
    found = as_columns(data, task, np.zeros(3), task.splits["train"])
    assert list(found) == [table if table == "users" else f"key of {table}", "time", "split", "label", "prediction"]
    assert next(iter(found.values())).tolist() == ["a", "b", "c"]


def rows(labels):
    at = np.array(["2024-01-01", "NaT", "2024-01-02", "NaT", "2024-01-03", "2024-01-04", "2024-01-05"], "datetime64[D]")
    data = from_tables({"t": {"at": at, "y": labels}}, None, None, {"t": "at"}, missing_times="drop")
    return data, task_of_rows(data, "y", "t", "y", valid_from="2024-01-04", test_from="2024-01-05")


def test_rows_without_a_key_have_the_numbers_that_they_were_given_with():
    data, task = rows([0.5, 9, 1, 9, 0, 1, 0])
    found = as_columns(data, task, np.zeros(5), np.arange(5))
    assert found["t"].tolist() == [0, 2, 4, 5, 6] and found["label"].tolist() == [0.5, 1, 0, 1, 0]


@pytest.mark.parametrize(
    ("names", "zero"), [(["no", "x", "yes", "x", "no", "yes", "no"], "no"), ([0, 9, 1, 9, 0, 1, 0], 0)]
)
def test_classes_of_two_say_which_one_a_probability_is_of(names, zero):
    data, task = rows(names)
    found = as_columns(data, task, np.array([0.2, 0.9, 0.4, 0.6, 0.1]), np.arange(5))
    one = names[2]
    assert found["label"].tolist() == [zero, one, zero, one, zero]
    if zero == 0:
        assert found["prediction"].tolist() == [0.2, 0.9, 0.4, 0.6, 0.1]
    else:
        assert found["prediction"].tolist() == ["no", "yes", "no", "yes", "no"]
        assert found["probability of yes"].tolist() == [0.2, 0.9, 0.4, 0.6, 0.1]
        np.testing.assert_allclose(found["probability of no"], [0.8, 0.1, 0.6, 0.4, 0.9])
