"""Histories of seeds: what the host computes before the first step, against plain loops, and what a network reads."""

import dataclasses
import warnings

import numpy as np
import pytest

from dejax.datasets import HeteroDataset, Task, from_tables, task_from_columns
from dejax.training.tables.history import HistoryReader, RowHistory, as_bits
from dejax.training.tables.importance import with_permuted
from dejax.training.tables.relevance import relevant
from dejax.training.tables.rows import pack
from dejax.training.tables.seed_times import DAY, Clock, topology_in_time
from tests.datasets.random_databases import CUTOFF, random_database

WINDOWS = (30, 90, 365)


def random_relations(rng):
    """Edges to the table "a" by relation, half of them with times, of days or of seconds; and the length of a day."""
    day = int(rng.choice([1, DAY]))
    counts = {"a": int(rng.integers(1, 20)), "b": int(rng.integers(1, 30))}
    edges, times = {}, {}
    for number in range(int(rng.integers(1, 5))):
        size, source = int(rng.integers(0, 300)), str(rng.choice(["a", "b"]))
        relation = (source, f"r{number}", "a")
        edges[relation] = rng.integers(0, counts[source], size), rng.integers(0, counts["a"], size)
        if rng.random() < 0.7:
            known = rng.integers(-500, 500, size) * day + rng.integers(0, day, size)
            times[relation] = np.where(rng.random(size) < 0.1, rng.choice([2**40, -(2**40)], size), known)
    return day, counts, edges, times


def dataset(day, counts, edges, times):
    return HeteroDataset("random", counts, edges, edge_times=times, time_unit="s" if day == DAY else None)


def reader(data, clock, on_host):
    topology = topology_in_time(data, clock, latest=True, on_host=on_host)
    return HistoryReader(RowHistory.of(data, topology, "a"), topology, data, {})


def fitted(read, rows, cutoffs):
    """The reader of a network, whose numbers are those of some rows that differ."""
    history = read.history.fitted(read.numbers(rows, cutoffs), read.history.are_counts, 4)
    copied = object.__new__(HistoryReader)
    copied.__dict__.update(read.__dict__, history=history)
    return copied


def plain_count(day, edges, times, row, cutoff, always):
    """The numbers of one row, by integers and float64, and -1 for log of what is none; by relations with edges."""
    found = []
    for relation, (_, receivers) in edges.items():
        if not len(receivers):
            continue
        known = times.get(relation, np.full(len(receivers), always))[receivers == row]
        known = np.maximum(known[known <= cutoff], always)
        found.append(len(known))
        if relation in times:
            some = len(known) and known.max() > always
            found.append((cutoff - int(known.max())) / day if some else np.nan)
            found += [int((known > max(cutoff - days * day, always)).sum()) for days in WINDOWS]
    return found


@pytest.mark.parametrize("on_host", [False, True])
def test_numbers_are_those_of_a_plain_count(on_host):
    for seed in range(8):
        rng = np.random.default_rng(seed)
        day, counts, edges, times = random_relations(rng)
        clock = Clock(int(rng.integers(-100, 100)) if day == DAY else 0)
        read = reader(dataset(day, counts, edges, times), clock, on_host)
        rows = rng.integers(-1, counts["a"], 40)
        given = rng.integers(-600, 600, 40) * day + rng.integers(0, day, 40)
        found = read.numbers(rows, clock.cutoffs(given))
        always = -(2**31) + clock.day * DAY
        wanted = [plain_count(day, edges, times, *of, always) for of in zip(rows.tolist(), given.tolist(), strict=True)]
        wanted = np.array(wanted, np.float64).reshape(found.shape)
        whole = np.array(["days since" not in name for name in read.history.names], bool)
        np.testing.assert_array_equal(np.expm1(found[:, whole].astype(np.float64)).round(), wanted[:, whole])
        np.testing.assert_allclose(found, np.log1p(wanted), rtol=1e-6, atol=1e-7)
        at = clock.cutoffs(given)
        of_network = fitted(read, rows, at)
        plan = of_network.history.plan
        kept = [read.history.names.index(place.name) for place in plan.columns]
        mean, deviation = (np.array([getattr(c, name)[0] for c in plan.columns]) for name in ("mean", "deviation"))
        packed = of_network.packed(rows, at)
        np.testing.assert_allclose(packed, (found[:, kept] - mean) / deviation, rtol=1e-5, atol=1e-5)


def test_rows_later_than_a_cutoff_change_no_bit_of_a_history():
    for seed in range(5):
        rng = np.random.default_rng(seed)
        day, counts, edges, times = random_relations(rng)
        if not times or not all(len(own) for own in times.values()):
            continue
        clock, rows = Clock(), rng.integers(0, counts["a"], 40)
        for relation in times:  # some row stays, so that the relation has numbers
            times[relation][0] = -700 * day
        whole = reader(dataset(day, counts, edges, times), clock, True)
        for cutoff in (-100, 300):
            at = clock.cutoffs(np.full(40, cutoff * day))
            early = {relation: own <= cutoff * day for relation, own in times.items()}
            every = {
                relation: tuple(ends[early[relation]] for ends in both) if relation in early else both
                for relation, both in edges.items()
            }
            cut = dataset(day, counts, every, {relation: own[early[relation]] for relation, own in times.items()})
            topology = topology_in_time(cut, clock, latest=True, on_host=True)
            of_cut = HistoryReader(RowHistory.of(cut, topology, "a"), topology, cut, {})
            assert of_cut.history.names == whole.history.names
            np.testing.assert_array_equal(
                of_cut.numbers(rows, at).view(np.int32), whole.numbers(rows, at).view(np.int32)
            )
            of_cut, of_whole = fitted(of_cut, rows, at), fitted(whole, rows, at)
            assert of_cut.history.plan == of_whole.history.plan
            np.testing.assert_array_equal(as_bits(of_cut.packed(rows, at)), as_bits(of_whole.packed(rows, at)))


def prepared(data, until):
    """Topology and plans of a data set, as a task has them."""
    plans = {t: pack(data.columns[t], data.known_from.get(t), until, bins=4)[1] for t in data.num_nodes}
    return topology_in_time(data, Clock(), latest=True, on_host=True), plans


def numbers_by_name(data, topology, plans, table, rows, cutoffs):
    history = RowHistory.of(data, topology, table, plans)
    found = HistoryReader(history, topology, data, plans).numbers(rows, cutoffs)
    return dict(zip(history.names, found.T, strict=True))


def test_means_and_sums_are_those_of_values_that_are_known_by_the_cutoff():
    """Of a column that is known with its row, of one that is known later, and of the row that a key leads to."""
    rng = np.random.default_rng(0)
    users, orders = {"id": [0, 1, 2]}, {"user": rng.integers(0, 2, 60), "day": rng.integers(0, 900, 60)}
    orders |= {"price": np.where(rng.random(60) < 0.2, np.nan, rng.normal(size=60)) + 1e9, "cost": rng.normal(size=60)}
    orders |= {"settled": orders["day"] + rng.integers(0, 50, 60), "paid": rng.choice(["yes", "no"], 60)}
    keys = {"users": "id"}, [("orders", "user", "users")], {"orders": "day"}
    data = from_tables({"users": users, "orders": orders}, *keys, known_at={"orders": {"cost": "settled"}})
    topology, plans = prepared(data, 1000)
    rows, cutoffs = np.repeat([0, 1, 2], 3), np.tile([300, 600, 899], 3)
    found = numbers_by_name(data, topology, plans, "users", rows, cutoffs)
    places = {place.name: place for place in plans["orders"].columns}
    paid = np.array([places["paid"].categories.index(one) for one in orders["paid"]], float)
    for name, given, when, relation in (
        ("price", orders["price"], "day", "user"),
        ("cost", orders["cost"], "settled", "user@settled"),
        ("paid", paid, "day", "user"),
    ):
        place = places[name]
        values, at = (given - place.mean[0]) / place.deviation[0], orders[when]
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
    of_orders = numbers_by_name(data, topology, plans, "orders", np.arange(60), np.full(60, 899))
    of_users = numbers_by_name(data, topology, plans, "users", orders["user"], np.full(60, 899))
    name = "orders, user, users: mean price"
    np.testing.assert_array_equal(of_orders[f"user: {name}"], of_users[name])


def test_categories_of_two_keep_their_values_in_data_that_number_them_otherwise():
    """New rows of a table without times are known from the beginning, so their category gets the first number."""
    flags, found, given = np.random.default_rng(0).choice(["yes", "no"], 40).tolist(), [], None
    for new in ([], ["a"] * 4):
        items = {"id": np.arange(40 + len(new)), "owner": np.arange(40 + len(new)) % 4, "flag": flags + new}
        tables = {"users": {"id": [0, 1, 2, 3]}, "items": items}
        data = from_tables(tables, {"users": "id", "items": "id"}, [("items", "owner", "users")])
        topology, plans = prepared(data, None)
        given = given or plans
        found.append(numbers_by_name(data, topology, given, "users", np.arange(4), np.zeros(4, np.int32)))
    assert data.columns["items"]["flag"].categories[0] == "a"
    name = "items, owner, users: mean flag"
    np.testing.assert_allclose(found[1][name], found[0][name], atol=1e-6)


@pytest.mark.parametrize(
    "seeds", [range(20), pytest.param(range(20, 400), marks=pytest.mark.slow)], ids=["some", "four hundred"]
)
def test_nothing_later_than_a_cutoff_changes_a_history(seeds):
    for seed in seeds:
        rng = np.random.default_rng(seed)
        database = random_database(rng)
        other = database.with_another_future(rng)
        rows = {}
        for (table, row), time in database.known_from().items():
            if time <= CUTOFF:
                rows[table] = np.append(rows.get(table, np.zeros(0, np.int32)), np.int32(row))
        numbers = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for one in (database, other):
                data = from_tables(**one.arguments)
                of = prepared(data, CUTOFF + 1)
                numbers.append(
                    {
                        (table, name): own
                        for table, known in rows.items()
                        for name, own in numbers_by_name(data, *of, table, known, np.full(len(known), CUTOFF)).items()
                    }
                )
        before, after = numbers
        for name in before.keys() & after.keys():
            np.testing.assert_array_equal(before[name], after[name], err_msg=str(name))
        for name in before.keys() ^ after.keys():  # a relation of which nothing is known yet
            only = (before | after)[name]
            assert (np.isnan(only) | (only == 0)).all(), name


def visits(seed, *, decides, cutoffs=(100, 120, 140, 160, 180, 200, 250), users=200):
    """Visits with amounts and noise of users, and the task whether what decides is above the others' middle.

    "chance": labels are drawn for users, not for examples. "time": labels become more frequent.
    """
    rng = np.random.default_rng(seed)
    pace, habit = rng.lognormal(2, 0.7, users), rng.normal(size=users)
    user = np.repeat(np.arange(users), rng.poisson(pace) + 1)
    day = rng.integers(0, 300, len(user))
    tables = {
        "users": {"id": np.arange(users)},
        "visits": {"user": user, "day": day, "amount": habit[user] + rng.normal(size=len(user))},
    }
    tables["visits"] |= {f"noise {n}": rng.normal(size=len(user)) for n in range(3)} | {"date": day * 1.0}
    data = from_tables(tables, {"users": "id"}, [("visits", "user", "users")], {"visits": "day"}, fixed_features=False)
    at, who = np.repeat(cutoffs, users), np.tile(np.arange(users), len(cutoffs))
    chance = 5 * rng.normal(size=users)
    told = {"pace": np.log(pace)[who] - 2, "amount": habit[who], "chance": chance[who], "time": (at - 150) / 30}[
        decides
    ]
    labels = (told + 0.7 * rng.normal(size=len(who)) > 0).astype(np.int32)
    return data.with_task(task_from_columns(data, "t", "users", who, at, labels, valid_from=250, test_from=300))


def names_that_are_read(data):
    task = data.tasks["t"]
    topology, plans = prepared(data, 250)
    history = RowHistory.of(data, topology, "users", plans)
    some = task.splits["train"]
    numbers = HistoryReader(history, topology, data, plans).numbers(task.rows[some], task.times[some].astype(np.int32))
    read = relevant(history, data, task, some, numbers)
    assert read[history.are_counts].all()
    return [name for name, own in zip(history.names, read & ~history.are_counts, strict=True) if own]


def test_a_network_reads_means_and_sums_that_tell_more_than_counts():
    for seed in range(3):
        assert "visits, user, users: mean amount" in names_that_are_read(visits(seed, decides="amount"))


@pytest.mark.parametrize("decides", ["pace", "chance", "time"])
def test_a_network_reads_counts_alone_where_columns_tell_no_more(decides):
    """In a twentieth of such databases a number is kept by chance. The examples of a user count as one, and numbers
    that tell the date are not asked."""
    kept = [bool(names_that_are_read(visits(seed, decides=decides))) for seed in range(40)]
    assert sum(kept) <= 6  # more has a probability of 1 %


@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_numbers_are_chosen_for_amounts_and_classes(kind):
    data = visits(0, decides="amount")
    task = data.tasks["t"]
    labels = task.labels * 30.0 + 1e6 if kind == "regression" else task.labels + np.arange(len(task)) % 2
    classes = () if kind == "regression" else ("a", "b", "c")
    own = Task("t", kind, "users", task.rows, task.times, labels, task.splits, classes=classes)
    assert "visits, user, users: mean amount" in names_that_are_read(
        dataclasses.replace(data, tasks={"t": own}, check=False)
    )


def test_a_column_whose_values_are_permuted_changes_the_numbers_of_that_column_alone():
    data = visits(0, decides="amount")
    order = np.random.default_rng(0).permutation(data.num_nodes["visits"])
    other = with_permuted(data, "visits", "amount", order)
    of = prepared(data, 250)
    rows, cutoffs = np.arange(50), np.full(50, 200)
    before, after = (numbers_by_name(one, *of, "users", rows, cutoffs) for one in (data, other))
    for name, own in before.items():
        assert np.array_equal(own, after[name], equal_nan=True) == ("amount" not in name), name
    values = data.columns["visits"]["amount"].values
    np.testing.assert_array_equal(other.columns["visits"]["amount"].values, values[order])
