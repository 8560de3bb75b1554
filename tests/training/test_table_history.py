"""Histories of rows: what they say, and that nothing later than a cutoff changes them or the linear model."""

import warnings

import numpy as np
import pytest

from dejax.datasets import HeteroDataset, Task, from_tables, task_from_columns
from dejax.training.metrics import auroc
from dejax.training.tables.history import HistoryReader, RowHistory
from dejax.training.tables.labels import Labels
from dejax.training.tables.prepared import PreparedTables
from dejax.training.tables.rows import TablePlan
from dejax.training.tables.seed_inputs import SeedInputs
from dejax.training.tables.seed_times import Clock, topology_in_time
from tests.datasets.random_databases import CUTOFF, random_database


def users_who_stop(users=200, later=0):
    """Users of whom each has 12 events until some day, and the task which of them are gone by a cutoff.

    `later`: days by which events after day 300, the last cutoff, come later.
    """
    rng = np.random.default_rng(0)
    last = rng.integers(100, 350, users)  # after that day a user has no events any more
    rows = [(user, day) for user in range(users) for day in rng.integers(0, last[user], 12)]
    day = np.array([day for _, day in rows])
    events = {"user": np.array([user for user, _ in rows]), "day": np.where(day > 300, day + later, day)}
    given = {"users": {"id": np.arange(users), "age": rng.normal(size=users)}, "events": events}
    data = from_tables(given, {"users": "id"}, [("events", "user", "users")], {"events": "day"}, name="stops")
    at = np.repeat([150, 200, 250, 300], users)
    who = np.tile(np.arange(users), 4)
    labels = (at > last[who]).astype(np.int32)
    return data.with_task(task_from_columns(data, "gone", "users", who, at, labels, valid_from=250, test_from=300))


def seed_inputs(data, name):
    """The `SeedInputs` of a task, without a trainer."""
    task = data.tasks[name]
    clock = Clock.of(task.times, "cutoffs")
    until = task.times[task.splits["train"]].max() + 1
    tables = PreparedTables.of(data, clock, until, hidden=task.hidden, bins=4, latest=False, on_host=True)
    return SeedInputs(data, tables, clock, task, Labels(task), bins=4)


def test_the_linear_model_reads_counts_and_recency_up_to_the_cutoff():
    data = users_who_stop()
    task, inputs = data.tasks["gone"], seed_inputs(data, "gone")
    test = task.splits["test"]
    assert auroc(task.labels[test], inputs.own.offsets[test, 0]) > 0.8
    later = seed_inputs(users_who_stop(later=40), "gone")
    np.testing.assert_array_equal(later.own.offsets, inputs.own.offsets)
    np.testing.assert_array_equal(later.own.history, inputs.own.history)


@pytest.mark.parametrize("on_host", [False, True])
def test_counts_of_a_relation_by_time(on_host):
    receivers, known = np.array([0, 2, 0, 0, 2]), np.array([5, 1, 2, 9, 7])
    rows, cutoffs = np.array([0, 0, 1, 2, -1]), np.array([5, 100, 9, 0, 5])
    to, without, own = ("b", "x", "a"), ("b", "y", "a"), ("b", "rev_z", "a")
    edges = {relation: (np.zeros(5, int), receivers) for relation in (to, without, own, ("a", "z", "b"))}
    data = HeteroDataset("counts", {"a": 3, "b": 3}, edges, edge_times={to: known})
    topology = topology_in_time(data, Clock(), latest=True, on_host=on_host)
    plans = dict.fromkeys("ab", TablePlan((), 0, 0))
    history = RowHistory.of(data, topology, "a", plans, referred=False)
    assert [name for name in history.names if "days" not in name] == ["b, x, a: rows", "b, y, a: rows"]
    found = np.expm1(HistoryReader(history, data, topology, plans)(rows, cutoffs))
    np.testing.assert_array_equal(found[:, 0].round(), [2, 3, 0, 0, 0])
    np.testing.assert_allclose(found[:, 1], [0, 91, np.nan, np.nan, np.nan])  # since the last edge
    np.testing.assert_array_equal(found[:, 2].round(), [2, 0, 0, 0, 0])  # within 30
    np.testing.assert_array_equal(found[:, 4].round(), [2, 3, 0, 0, 0])  # within 365
    np.testing.assert_array_equal(found[:, 5].round(), [3, 3, 0, 2, 0])  # a relation without times
    assert history.fitted(found, 4).kept == (0, 1, 2, 3, 4, 5) and not history.fitted(found[:1], 4).kept


def test_history_has_means_and_sums_of_columns_from_when_they_are_known():
    """Of a column that is known with its row, of one that is known later, and of the row that a key leads to."""
    rng = np.random.default_rng(0)
    users, orders = {"id": [0, 1, 2]}, {"user": rng.integers(0, 2, 60), "day": rng.integers(0, 900, 60)}
    orders |= {"price": np.where(rng.random(60) < 0.2, np.nan, rng.normal(size=60)) + 1e9, "cost": rng.normal(size=60)}
    orders["settled"] = orders["day"] + rng.integers(0, 50, 60)
    keys = {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    data = from_tables({"users": users, "orders": orders}, *keys, known_at={"orders": {"cost": "settled"}})
    task = task_from_columns(data, "t", "users", [0, 1], [500, 500], [0, 1], valid_from=600, test_from=700)
    tables = PreparedTables.of(data, Clock(), 1000, hidden=task.hidden, bins=4, latest=True, on_host=True)

    def numbers(table, rows, cutoffs):
        history = RowHistory.of(data, tables.topology, table, tables.plans)
        found = HistoryReader(history, data, tables.topology, tables.plans)(rows, cutoffs)
        return dict(zip(history.names, found.T, strict=True))

    rows, cutoffs = np.repeat([0, 1, 2], 3), np.tile([300, 600, 899], 3)
    found = numbers("users", rows, cutoffs)
    for name, when, relation in (("price", "day", "user"), ("cost", "settled", "user@settled")):
        place = next(place for place in tables.plans["orders"].columns if place.name == name)
        values, at = (orders[name] - place.mean[0]) / place.deviation[0], orders[when]
        for back, label in ((10**6, ""), (90, " of the last 90 days")):
            wanted = []
            for row, cutoff in zip(rows, cutoffs, strict=True):
                own = (orders["user"] == row) & (at <= cutoff) & (at > cutoff - back) & ~np.isnan(values)
                total = values[own].sum() + own.sum() * place.mean[0] / place.deviation[0]
                mean = values[own].mean() if own.any() else np.nan
                wanted.append((mean, np.sign(total) * np.log1p(abs(total))))
            means, sums = np.transpose(wanted)
            np.testing.assert_allclose(found[f"orders, {relation}, users: mean {name}{label}"], means, atol=1e-5)
            np.testing.assert_allclose(found[f"orders, {relation}, users: sum of {name}{label}"], sums, atol=1e-5)
    assert not [name for name in found if "user@settled" in name and "price" in name]
    of_orders = numbers("orders", np.arange(60), np.full(60, 899))
    of_users = numbers("users", orders["user"], np.full(60, 899))
    name = "orders, user, users: mean price"
    np.testing.assert_array_equal(of_orders[f"user: {name}"], of_users[name])


def inputs_at_the_cutoff(data, rows):
    """The numbers of known rows by table and name, and the inputs of a task of the first table's, as of the cutoff."""
    tables = PreparedTables.of(data, Clock(), CUTOFF + 1, hidden=(), bins=4, latest=True, on_host=True)
    found = {}
    for table, known in rows.items():
        history = RowHistory.of(data, tables.topology, table, tables.plans)
        numbers = HistoryReader(history, data, tables.topology, tables.plans)(known, np.full(len(known), CUTOFF))
        found |= {(table, name): own for name, own in zip(history.names, numbers.T, strict=True)}
    table, known = next(iter(rows.items()))
    splits = {"train": np.arange(len(known))}
    task = Task("t", "binary", table, known, np.full(len(known), CUTOFF), np.arange(len(known)) % 2, splits)
    return found, SeedInputs(data, tables, Clock(), task, Labels(task), 4).own.offsets


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=["some", "four hundred"]
)
def test_nothing_later_than_a_cutoff_changes_a_history_or_the_linear_model(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        database = random_database(rng)
        other = database.with_another_future(rng)
        rows = {}
        for (table, row), time in database.known_from().items():
            if time <= CUTOFF:
                rows[table] = np.append(rows.get(table, np.zeros(0, np.int32)), np.int32(row))
        rows = {table: known for table, known in rows.items() if len(known) > 1}
        if not rows:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before, after = (inputs_at_the_cutoff(from_tables(**one.arguments), rows) for one in (database, other))
        for name in before[0].keys() & after[0].keys():
            np.testing.assert_array_equal(before[0][name], after[0][name], err_msg=str(name))
        for name in before[0].keys() ^ after[0].keys():  # a relation of which nothing is known yet
            only = (before[0] | after[0])[name]
            assert (np.isnan(only) | (only == 0)).all(), name
        np.testing.assert_array_equal(before[1], after[1])
