"""Tables: rows are packed exactly, encoders hide what is not known yet, and a task learns from the past alone."""

import csv
import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.datasets import Column, HeteroDataset, Task, from_tables, task_from_columns, task_of_events, task_of_rows
from dejax.datasets.columns import NEVER
from dejax.training import Fitted, Trainer, fit, resolve
from dejax.training.command import cli, predictions
from dejax.training.command.page import calibration, write_page
from dejax.training.command.report import summarise, table
from dejax.training.fitting import best_report, stops
from dejax.training.metrics import auroc
from dejax.training.state import History
from dejax.training.tables.encoders import TableEncoder
from dejax.training.tables.history import HistoryReader, RowHistory, differing
from dejax.training.tables.importance import importance
from dejax.training.tables.linear import linear_baseline
from dejax.training.tables.rows import apart, as_days, pack
from dejax.training.tables.seed_times import Clock, is_latest, topology_in_time
from tests.training.test_contract import check_equal, stopped_and_whole

DAY = 86_400
NOW = 15_706 * DAY + 4_321  # a second of 2013


def shop(seed=0, customers=40, visits=40):
    """Customers of two habits: some return their orders, some keep them. It is known of each order a day later.

    So whether an order will be returned only the late column of the customer's earlier orders tells.
    """
    rng = np.random.default_rng(seed)
    count = customers * visits
    customer = np.tile(np.arange(customers, dtype=np.int32), visits)
    times = NOW + np.repeat(np.arange(visits), customers) * 3 * DAY + rng.integers(0, DAY, count)
    habit = rng.integers(0, 2, customers)
    returned = (habit[customer] ^ (rng.random(count) < 0.05)).astype(np.int32)
    known_at = times + DAY
    none = np.zeros(count, bool)
    orders = {
        "price": Column("number", rng.lognormal(size=count), rng.random(count) < 0.1),
        "placed": Column("time", times, none),
        "returned": Column("number", returned.astype(float), none, known_at=known_at),
        "kind": Column("category", rng.integers(0, 3, count).astype(np.int32), none, categories=("a", "b", "c")),
        "note": Column("vector", rng.normal(size=(count, 33)).astype(np.float16), none),
    }
    edges = {
        ("orders", "customer", "customers"): (np.arange(count, dtype=np.int32), customer),
        ("customers", "rev_customer", "orders"): (customer, np.arange(count, dtype=np.int32)),
        ("orders", "customer@known", "customers"): (np.arange(count, dtype=np.int32), customer),
    }
    parts = np.searchsorted(times[::customers], NOW + np.array([60, 90]) * DAY) * customers
    splits = dict(zip(("train", "valid", "test"), np.split(np.arange(count), parts), strict=True))
    task = Task("returns", "binary", "orders", np.arange(count, dtype=np.int32), times, returned, splits)
    return HeteroDataset(
        "shop",
        {"orders": count, "customers": customers},
        edges,
        edge_times=dict(zip(edges, (times, times, known_at), strict=True)),
        node_times={"orders": times},
        known_from={"orders": times},
        keys={"orders": np.arange(count) + 1000},
        columns={"orders": orders},
        tasks={"returns": task},
        time_unit="s",
    )


@nnx.jit
def encoded(encoder, *arrays):
    """What an encoder makes of rows, compiled at once and not operator by operator."""
    return encoder(*arrays)


def settings(**given):
    return resolve(
        "shop",
        task="tables",
        **{
            "fan_outs": (1, 4),
            "hidden": 16,
            "batch_size": 128,
            "epochs": 6,
            "lr": 0.01,
            "bins": 4,
            "warmup": 5,
            **given,
        },
    )


@pytest.fixture(scope="module")
def trained():
    """A run with early stopping: data, trainer, and what `fit` gives."""
    data = shop()
    trainer = Trainer(settings(), data)
    return data, trainer, fit(trainer, 0)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_numbers(tmp_path):
    """With so many categories that their vectors are gathered; the gradient adds in a fixed order on GPUs, too."""
    data = shop()
    count = data.num_nodes["orders"]
    names = tuple(str(code) for code in range(300))
    codes = np.random.default_rng(1).integers(0, 300, count).astype(np.int32)
    product = Column("category", codes, np.zeros(count, bool), categories=names)
    columns = {"orders": {**data.columns["orders"], "product": product}}
    trainer = Trainer(settings(epochs=3), dataclasses.replace(data, columns=columns))
    check_equal(stopped_and_whole(trainer, 3, 1, tmp_path))


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e25])
def test_numbers_and_labels_far_from_0_are_not_rounded_away(scale, tmp_path):
    """Quantiles that float32 cannot tell apart were bins of width 0, and gave NaN."""
    rng = np.random.default_rng(0)
    near = rng.normal(size=(200)) * scale
    far = near + 1e9 * scale
    packed = [
        pack({"x": Column("number", values, np.zeros(200, bool))}, None, None) for values in (near - near.mean(), far)
    ]
    np.testing.assert_allclose(packed[0][0], packed[1][0], atol=1e-5)
    odd = np.array([far[0], 1e300, -1e300, np.nan, np.inf])
    rows, plan = pack({"x": Column("number", odd, np.isnan(odd))}, None, None)
    for packed_rows, own in (packed[1], (rows, plan)):
        encoder = TableEncoder(own, 8, numbers="piecewise", rngs=nnx.Rngs(0))
        assert np.isfinite(encoded(encoder, jnp.asarray(packed_rows), jnp.zeros(len(packed_rows), jnp.int32))).all()

    data = from_tables({"o": {"at": np.arange(200), "y": far}}, None, None, {"o": "at"}, fixed_features=False)
    task = task_of_rows(data, "y", "o", "y", valid_from=100, test_from=150)
    np.testing.assert_array_equal(task.labels, far)
    own = resolve("far", task="tables", fan_outs=(1,), hidden=4, epochs=1, batch_size=32, bins=2)
    made = Trainer(own, data.with_task(task)).task
    wanted = np.asarray(made.world.data["labels"])
    np.testing.assert_allclose(made.labels.in_units(wanted[:, None]), far, rtol=1e-12)
    path = tmp_path / "p.csv"
    predictions.write(path, {"o": np.array(["\ud800"] * 200), "prediction": far})
    with path.open(encoding="utf-8") as file:
        written = [float(row["prediction"]) for row in csv.DictReader(file)]
    np.testing.assert_allclose(written, far, rtol=1e-14)


def test_rows_hold_values_exactly_and_statistics_are_of_what_was_known():
    times = np.array([NOW, -5, 2**40, 7])
    late = np.array([NOW, NOW + 9, NEVER, NOW])
    columns = {
        "number": Column("number", np.array([1.0, 3.0, 100.0, 0.0]), np.array([False, False, False, True])),
        "late": Column("number", np.array([5.0, 6.0, 7.0, 8.0]), np.zeros(4, bool), known_at=late),
        "time": Column("time", times, np.array([False, False, False, True])),
        "code": Column("category", np.array([0, 1, 5, -1], np.int32), np.array([False, False, False, True])),
        "words": Column("text", np.array([3, 3, 8], np.uint32), np.zeros(4, bool), np.array([0, 2, 3, 3, 3])),
        "tags": Column("categories", np.array([1, 0, 2], np.int32), np.zeros(4, bool), np.array([0, 3, 3, 3, 3])),
        "vector": Column("vector", np.arange(8.0).reshape(4, 2), np.array([True, False, False, False])),
    }
    rows, plan = pack(columns, np.array([0, 1, 50, 2]), 10, most_of_a_list=2, text_width=8)
    place = {found.name: found for found in plan.columns}

    def of(name):
        return rows[:, place[name].first : place[name].first + place[name].width]

    assert rows.dtype == np.float32 and rows.shape == (4, plan.width)
    np.testing.assert_array_equal(of("number")[:, 0], [-1, 1, 98, np.nan])
    days = of("time")[:3].astype(np.int64)
    np.testing.assert_array_equal(days[:, 0] * DAY + days[:, 1], times[:3])
    assert place["late"].known == 0 and place["number"].known is None
    np.testing.assert_array_equal(rows[:, plan.known :], as_days(late))
    assert place["number"].mean == (2.0,) and place["number"].deviation == (1.0,)  # the third row came too late
    assert place["late"].edges == ()  # none of its values was known before 10
    assert place["code"].codes == 2 and place["vector"].mean == (4.0, 5.0)
    np.testing.assert_array_equal(of("tags")[0], [1, 0])
    assert plan.left_out == (("tags: values of lists beyond 2", 1),)
    np.testing.assert_allclose(np.linalg.norm(of("words"), axis=1), [1, 1, 0, 0])
    hidden, _ = pack(columns, None, None, hidden=["late", "vector"], text_width=8)
    assert hidden.shape[1] < rows.shape[1]


@pytest.mark.parametrize("numbers", ["standard", "piecewise", "periodic"])
def test_an_encoder_reads_no_value_that_is_known_after_the_cutoff(numbers):
    rng = np.random.default_rng(0)
    known_at = np.array([NOW - 1, NOW, NOW + 1, NEVER])

    def of(later):
        values = np.array([1.0, 2.0, 3.0, 4.0]) + later * (known_at > NOW)
        codes = np.array([0, 1, 2, 0], np.int32) + (later * (known_at > NOW)).astype(np.int32)
        times = np.array([NOW - 5, NOW, NOW, NOW]) + (later * (known_at > NOW)).astype(np.int64)
        none = np.zeros(4, bool)
        columns = {
            "number": Column("number", values, none, known_at=known_at),
            "code": Column("category", codes, none, known_at=known_at),
            "time": Column("time", times, none, known_at=known_at),
            "vector": Column("vector", np.stack([values, values], 1), none, known_at=known_at),
            "tags": Column("categories", codes, none, np.arange(5), known_at=known_at),
            "known": Column("number", rng.normal(size=4) * 0 + 1, none),
        }
        rows, plan = pack(columns, None, NOW + 1)
        encoder = TableEncoder(plan, 8, numbers=numbers, rngs=nnx.Rngs(0))
        return np.asarray(encoded(encoder, jnp.asarray(rows), jnp.full(4, NOW, jnp.int32)))

    before, after = of(0.0), of(1.0)
    np.testing.assert_array_equal(before, after)
    assert np.isfinite(before).all() and len(np.unique(before.round(5), axis=0)) == 3  # the last two show as missing


def test_wide_vectors_stay_apart_in_their_own_precision():
    rng = np.random.default_rng(0)
    given = rng.normal(3.0, 2.0, (5, 40)).astype(np.float16)
    missing = np.array([False, True, False, False, False])
    late = np.array([NOW, NOW, NOW + 1, NOW, NOW])
    columns = {"text": Column("vector", given, missing, known_at=late), "x": Column("number", np.ones(5), missing)}
    rows, plan = pack(columns, np.array([0, 0, 0, 0, 99]), NOW + 1)
    (place,) = plan.apart
    assert rows.shape == (5, 3) and plan.known == 1  # a number, and when the text is known
    fitted = given[[0, 3, 4]].astype(np.float64)
    np.testing.assert_allclose(place.mean, fitted.mean(0), rtol=1e-3)
    np.testing.assert_allclose(place.deviation, fitted.std(0), rtol=1e-3)
    vectors = apart(columns, plan)["text"]
    assert vectors.dtype == np.float16 and np.isnan(vectors[1]).all()
    assert (
        apart({**columns, "text": dataclasses.replace(columns["text"], missing=~missing & False)}, plan)["text"]
        is given
    )
    encoder = TableEncoder(plan, 8, rngs=nnx.Rngs(0))
    cutoffs = jnp.full(5, NOW, jnp.int32)
    before = encoder(jnp.asarray(rows), cutoffs, {"text": jnp.asarray(vectors, jnp.float32)})
    changed = jnp.asarray(vectors, jnp.float32).at[2].set(9.0)
    np.testing.assert_array_equal(before, encoder(jnp.asarray(rows), cutoffs, {"text": changed}))  # not known yet
    assert np.isfinite(np.asarray(before)).all()


def test_times_enter_relative_to_the_cutoff():
    columns = {"time": Column("time", np.array([NOW, NOW + 7 * DAY]), np.zeros(2, bool))}
    rows, plan = pack(columns, None, None)
    encoder = TableEncoder(plan, 8, rngs=nnx.Rngs(0))
    week_apart = encoded(encoder, jnp.asarray(rows), jnp.asarray([NOW + DAY, NOW + 8 * DAY], jnp.int32))
    np.testing.assert_allclose(week_apart[0], week_apart[1], atol=1e-5)  # of the same hour and weekday
    later = encoded(encoder, jnp.asarray(rows), jnp.asarray([NOW + DAY, NOW + 9 * DAY], jnp.int32))
    assert not np.allclose(later[0], later[1], atol=1e-3)


def test_a_task_is_learnt_from_rows_of_the_past(trained):
    _, trainer, fitted = trained
    final = trainer.final(fitted.state)
    assert final["auroc"] > 0.9 and set(final) == {"auroc", "average_precision", "accuracy", "f1"}
    valid = fitted.history.measures["valid"]
    assert fitted.best_epoch == fitted.history.epochs[int(np.argmax(valid))]
    assert trainer.task._outputs._cache_size() == 1  # for the state of a step, and for the best one, which was put away
    assert int(fitted.state.lost) == 0


def test_the_latest_row_of_each_relation_stands_apart_from_the_mean(trained):
    _, trainer, _ = trained
    task = trainer.task
    relations = {name: fan_out for (_, name, _), fan_out in task.fan_outs[1].items()}
    assert relations == {
        "customer": 4,
        "rev_customer": 4,  # an order has one customer
        "customer@known": 4,
        "customer, latest": 1,
        "customer@known, latest": 1,
    }
    assert {fan_out for relation, fan_out in task.fan_outs[0].items() if is_latest(relation)} == {0}
    topology, seeds = task.world.topology, jax.tree.map(lambda x: jnp.asarray(x[-1]), task.order(0, 0))
    sample = jax.jit(task.sample)(jax.random.key(0), topology, seeds)
    pieces = zip(sample.layout.pieces, sample.senders, strict=True)
    senders = {sample.layout.edge_types[piece.relation][1]: own for piece, own in pieces if piece.hop}
    for name in ("customer", "customer@known"):
        np.testing.assert_array_equal(senders[f"{name}, latest"][:, 0], senders[name][:, 0])


def test_nothing_that_lies_after_a_cutoff_changes_a_prediction(trained):
    data, trainer, fitted = trained
    task = trainer.task
    places = task.splits["valid"][:64]
    cutoff = int(task.examples.times[places].max())
    before = task.predict(trainer, fitted.state, places)
    rows = data.columns["orders"]
    later = data.known_from["orders"] > cutoff
    late = rows["returned"].known_at > cutoff
    changed = {
        **rows,
        "price": dataclasses.replace(rows["price"], values=np.where(later, 1e6, rows["price"].values)),
        "returned": dataclasses.replace(rows["returned"], values=np.where(late, 7.0, rows["returned"].values)),
    }
    packed, plan = pack(changed, data.known_from["orders"], task.examples.times[task.splits["train"]].max() + 1, bins=4)
    assert plan == task.plans["orders"]  # nothing in it was fitted to what came later
    store = type(task.world.features).from_arrays({"orders": packed})
    world = dataclasses.replace(task.world, features=task.world.features | store)
    assert (np.nan_to_num(packed) != np.nan_to_num(task.packed["orders"])).any()
    np.testing.assert_array_equal(before, task.predict(trainer, fitted.state, places, world=world))


def test_what_contributes_is_the_late_column_and_its_relation(trained):
    _, trainer, fitted = trained
    found = importance(trainer, fitted.state, examples=200)
    assert next(iter(found["columns"])) == "orders.returned" and found["columns"]["orders.returned"] > 0.2
    assert found["columns"]["orders.kind"] < 0.1
    assert found["relations"]["customers, rev_customer, orders"] > 0.2  # without it a seed sees nothing


def test_predictions_have_keys_and_times_and_new_cutoffs_need_no_labels(trained, tmp_path):
    data, trainer, fitted = trained
    task = trainer.task
    places = task.splits["test"][:5]
    values = task.predict(trainer, fitted.state, places)
    predictions.write(tmp_path / "p.csv", predictions.as_columns(data, task.examples, values, places))
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["orders"] for row in rows] == [str(1000 + place) for place in places]
    assert rows[0]["time"] == f"{task.examples.times[places[0]].astype('datetime64[s]')}Z"
    assert rows[0]["split"] == "test" and float(rows[0]["prediction"]) == pytest.approx(values[0], rel=1e-6)
    cutoff = predictions.time_of("2013-01-10T00:00:00Z", "s")
    new = predictions.known_rows(data, task.examples, cutoff)
    assert len(new) == (data.known_from["orders"] <= cutoff).sum() > 0
    assert np.isfinite(task.predict(trainer, fitted.state, examples=new)).all()
    with pytest.raises(ValueError, match="must be a time at which rows of 'orders' are known"):
        predictions.known_rows(data, task.examples, 5)
    with pytest.raises(ValueError, match="--at must be a time such as"):
        predictions.time_of("soon", "s")
    with pytest.raises(ValueError, match=r"must be written to a file that ends with .csv or .parquet"):
        predictions.write(tmp_path / "p.txt", {})


@pytest.mark.parametrize("ending", predictions.FORMATS)
def test_predictions_are_written_whole_or_not_at_all(tmp_path, monkeypatch, ending):
    path = tmp_path / f"p.{ending}"
    predictions.write(path, {"row": np.arange(3)})
    before = path.read_bytes()
    write = getattr(predictions, f"_write_{ending}")

    def interrupted(path, columns):
        write(path, columns)
        raise KeyboardInterrupt

    monkeypatch.setattr(predictions, f"_write_{ending}", interrupted)
    with pytest.raises(KeyboardInterrupt):
        predictions.write(path, {"row": np.arange(5)})
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_the_report_shows_measures_curves_calibration_and_what_contributes(trained, tmp_path):
    from dejax.training.command.report import draw_curves

    _, trainer, fitted = trained
    task = trainer.task
    predicted = task.predicted(trainer, fitted.state)
    final = task.measures_of("test", predicted["test"])
    results = summarise(
        trainer, [fitted.history], [final], lost=[0], skipped=[0], total_seconds=1.0, argv=["tables", "shop.toml"]
    )
    draw_curves(tmp_path / "curves.png", results, [fitted.history])
    contributes = {"columns": {"orders.returned": 0.3}, "relations": {"a, b, c": 0.1}}
    write_page(tmp_path / "report.html", results, task.examples, predicted, contributes)
    page = (tmp_path / "report.html").read_text()
    assert f"{final['auroc']:.4f}" in page and "orders.returned" in page and "calibration" in page
    assert page.count("data:image/png;base64,") == 2 and "auroc, test" in page
    assert "average_precision" in table(results, {}) and "linear" not in table(results, {})
    results["baselines"]["linear"] = {"auroc": 0.625}
    write_page(tmp_path / "report.html", results, task.examples, predicted, None)
    page = (tmp_path / "report.html").read_text()
    assert "a linear model of counts and times</td>" in page and "0.6250" in page
    for better in (True, False):
        results["baselines"]["linear"] = {"auroc": final["auroc"] + (0.01 if better else -0.01)}
        shown = table(results, {})
        assert "auroc, a linear model of counts and times" in shown
        assert ("The linear model is better:" in shown) == better
    assert sum(
        count for _, _, count in calibration(task.examples.labels[task.splits["test"]], predicted["test"])
    ) == len(predicted["test"])


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


def test_the_linear_baseline_reads_counts_and_recency_up_to_the_cutoff():
    def baseline(**given):
        data = users_who_stop(**given)
        task = data.tasks["gone"]
        clock = Clock.of(task.times, "cutoffs")
        topology = topology_in_time(data, clock, latest=False, on_host=False)
        read = HistoryReader(RowHistory.of(data, topology, task.entity), topology, data, {})
        numbers = lambda rows, cutoffs: read.numbers(rows, clock.cutoffs(cutoffs))  # noqa: E731
        return task.labels[task.splits["test"]], linear_baseline(data, task, task.splits["test"], numbers)

    labels, found = baseline()
    assert auroc(labels, found) > 0.8 and (0 <= found).all() and (found <= 1).all()
    np.testing.assert_array_equal(baseline(later=40)[1], found)


def test_the_network_reads_counts_and_recency_up_to_the_cutoff():
    data = users_who_stop()
    trainer = Trainer(settings(epochs=8, batch_size=32, fan_outs=(2,)), data)  # events have no further relation
    state = fit(trainer, 0).state
    found = trainer.task.predict(trainer, state, trainer.task.splits["test"])
    assert trainer.task.measures_of("test", found)["auroc"] > trainer.task.linear_measures()["auroc"] - 0.03
    later = Trainer(trainer.settings, users_who_stop(later=40))
    assert later.task.layout_of_data == trainer.task.layout_of_data
    np.testing.assert_array_equal(later.task.predict(later, state, later.task.splits["test"]), found)


@pytest.mark.parametrize("on_host", [False, True])
def test_counts_of_a_relation_by_time(on_host):
    receivers, known = np.array([0, 2, 0, 0, 2]), np.array([5, 1, 2, 9, 7])
    rows, cutoffs = np.array([0, 0, 1, 2]), np.array([5, 100, 9, 0])
    to, without, own = ("b", "x", "a"), ("b", "y", "a"), ("b", "rev_z", "a")
    edges = {relation: (np.zeros(5, int), receivers) for relation in (to, without, own, ("a", "z", "b"))}
    data = HeteroDataset("counts", {"a": 3, "b": 3}, edges, edge_times={to: known})
    topology = topology_in_time(data, Clock(), latest=True, on_host=on_host)
    history = RowHistory.of(data, topology, "a")
    assert [name for name in history.names if "days" not in name] == ["b, x, a: rows", "b, y, a: rows"]
    found = np.expm1(HistoryReader(history, topology, data, {}).numbers(rows, cutoffs))
    np.testing.assert_array_equal(found[:, 0].round(), [2, 3, 0, 0])
    np.testing.assert_allclose(found[:, 1], [0, 91, np.nan, np.nan])  # since the last edge
    np.testing.assert_array_equal(found[:, 2].round(), [2, 0, 0, 0])  # within 30
    np.testing.assert_array_equal(found[:, 4].round(), [2, 3, 0, 0])  # within 365
    np.testing.assert_array_equal(found[:, 5].round(), [3, 3, 0, 2])  # a relation without times
    assert history.are_counts.all() and differing(found).all() and not differing(found[:1]).any()
    assert history.fitted(found, history.are_counts, 4).kept == (0, 1, 2, 3, 4, 5)
    assert not history.fitted(found[:1], history.are_counts, 4).kept


def with_labels(data, kind):
    """The data set with its task as one of amounts or of two classes."""
    task = data.tasks["returns"]
    labels = (task.labels * 40.0 - 7.0).astype(np.float32) if kind == "regression" else task.labels
    classes = () if kind == "regression" else ("no", "yes")
    own = dataclasses.replace(task, kind=kind, labels=labels, unit="euros", classes=classes)
    return dataclasses.replace(data, tasks={"returns": own}, check=False)


@pytest.mark.slow  # the command below trains on amounts
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_amounts_and_classes(kind):
    data = with_labels(shop(customers=20), kind)
    task = data.tasks["returns"]
    trainer = Trainer(settings(epochs=3, class_weights="balanced" if kind == "classes" else "none"), data)
    fitted: Fitted = fit(trainer, 0)
    final, predicted = trainer.final(fitted.state), trainer.task.predicted(trainer, fitted.state)["test"]
    if kind == "regression":
        spread = float(task.labels[task.splits["test"]].std())
        assert list(final) == ["mae", "rmse", "r2"] and final["mae"] < spread and trainer.task.lower_is_better
    else:
        assert predicted.shape[1] == 2 and predicted.sum(1) == pytest.approx(1.0) and final["accuracy"] > 0.6
        columns = predictions.as_columns(data, task, predicted, task.splits["test"])
        assert set(columns["prediction"]) <= {"no", "yes"} and "probability of yes" in columns


def test_a_task_without_later_examples_trains_and_reports(trained, tmp_path, capsys):
    data, _, _ = trained
    first = next(iter(data.tasks.values()))
    task = dataclasses.replace(first, splits={"train": first.splits["train"]})
    dataclasses.replace(data, tasks={}).with_task(task).save(tmp_path / "data")
    words = ["tables", str(tmp_path / "data"), "--out", str(tmp_path / "out"), "--epochs", "1", "--seeds", "1"]
    assert cli.main([*words, "--fan-outs", "2", "--hidden", "4", "--batch-size", "512"]) == 0
    assert "no test examples" in capsys.readouterr().out


def test_early_stopping_waits_for_a_better_measure():
    history = History(epochs=[1, 2, 3, 4], measures={"valid": [0.5, float("nan"), 0.7, 0.6]})
    assert best_report(history, lower=False) == 2 and best_report(history, lower=True) == 0
    assert stops(history, 1, lower=False) and not stops(history, 2, lower=False) and stops(history, 2, lower=True)
    assert best_report(History(), lower=False) is None and not stops(History(), 1, lower=False)


def test_mistakes_are_named():
    data = shop(customers=5, visits=5)
    task = data.tasks["returns"]
    for change, message in (
        ({"labels": np.ones_like(task.labels)}, "must differ in training, got 1 in all"),
        ({"splits": {"train": np.zeros(0, np.int64)}}, "must have training examples, got none"),
    ):
        with pytest.raises(ValueError, match=message):
            Trainer(
                settings(),
                dataclasses.replace(data, tasks={"returns": dataclasses.replace(task, **change)}, check=False),
            )
    with pytest.raises(ValueError, match="target must be one of the tasks returns, got 'churn'"):
        Trainer(settings(target="churn"), data)
    with pytest.raises(ValueError, match="must have a task, got none"):
        Trainer(settings(), dataclasses.replace(data, tasks={}, check=False))
    with pytest.raises(ValueError, match="numbers must be one of standard, piecewise, periodic, got 'bins'"):
        settings(numbers="bins")


def test_the_command_trains_evaluates_and_predicts_for_a_new_time(tmp_path, capsys):
    with_labels(shop(customers=10, visits=34), "regression").save(tmp_path / "shop")
    out = tmp_path / "run"
    words = ["--out", str(out), "--epochs", "1", "--hidden", "8", "--fan-outs", "2", "--batch-size", "64"]
    assert cli.main(["tables", str(tmp_path / "shop"), *words, "--importance", "0"]) == 0
    assert "mae, test" in capsys.readouterr().out
    found = json.loads((out / "results.json").read_text())
    assert found["task"] == "tables" and 0 < found["test"]["mae"]["mean"] < 100 and found["measure"] == "mae"
    assert (out / "predictions-seed0.csv").stat().st_size and (out / "report.html").stat().st_size
    assert cli.main(["tables", str(tmp_path / "shop"), "--evaluate", str(out), "--at", "2013-02-01"]) == 0
    assert "predictions in" in capsys.readouterr().out and (out / "predictions-at-2013-02-01-seed0.csv").exists()
    data = HeteroDataset.open(tmp_path / "shop")
    orders = dict(data.columns["orders"])
    for column, error in (("kind", "got none in place of kind (category)"), ("price", "price (category) in place of")):
        of = {name: values for name, values in orders.items() if name != column}
        of |= {"price": orders["kind"]} if column == "price" else {}
        changed = dataclasses.replace(data, columns={**data.columns, "orders": of})
        changed.save(tmp_path / column)
        assert cli.main(["tables", str(tmp_path / column), "--evaluate", str(out)]) == 2
        assert error in capsys.readouterr().err
    task = data.tasks["returns"]
    later = dict(
        zip(("train", "valid", "test"), np.split(np.arange(len(task)), [len(task) // 3, len(task) // 2]), strict=True)
    )
    moved = dataclasses.replace(data, tasks={"returns": dataclasses.replace(task, splits=later)})
    moved.save(tmp_path / "moved")  # test examples were trained on
    assert cli.main(["tables", str(tmp_path / "moved"), "--evaluate", str(out)]) == 2
    assert "must be given the data that it was trained on" in capsys.readouterr().err
    assert cli.main(["tables", str(tmp_path / "none.toml")]) == 2
    assert "must be followed by a TOML file" in capsys.readouterr().err
    assert cli.main(["--evaluate", str(out)]) == 2
    assert "must be given with tables CONFIG" in capsys.readouterr().err


def growing(users, *, order=1):
    """Orders of users, whose table has no times, so that new users shift means, quantiles and categories."""
    rng = np.random.default_rng(0)
    count, start = 300, np.datetime64("2024-01-01T00:00:00")
    placed = start + np.sort(rng.integers(0, 300 * 24, count)).astype("timedelta64[h]")
    names = [("NL", "US")[n % 2] for n in range(6)] + ["AT"] * (users - 6)
    tables = {
        "users": {
            "id": np.arange(users)[::order],
            "income": (10.0 ** np.arange(users))[::order],
            "country": names[::order],
            "tags": [["x"] * (1 + (n > 5)) + ["aa"] * (n > 5) for n in range(users)][::order],
        },
        "orders": {
            "user": rng.integers(0, 6, count),
            "placed": placed,
            "returned": rng.integers(0, 2, count),
            "decided": placed + np.timedelta64(3, "D"),
        },
    }
    data = from_tables(
        tables,
        {"users": "id"},
        [("orders", "user", "users")],
        {"orders": "placed"},
        known_at={"orders": {"returned": "decided"}},
        fixed_features=False,
        name="growing",
    )
    splits = {"valid_from": "2024-07-01", "test_from": "2024-09-01"}
    task = task_of_rows(data, "returns", "orders", "returned", **splits)
    months = [f"2024-{month:02d}-01" for month in range(2, 10)]
    active = task_of_events(data, "orders", ("orders", "user"), months, "20 days", active="300 days", **splits)
    return data.with_task(task).with_task(active)


@pytest.mark.parametrize(("target", "orders"), [("returns", (1, -1)), ("orders", (1,))])
def test_predictions_stay_when_tables_without_times_get_rows(target, orders):
    """Means, quantiles and categories are those of the training: new users changed them, and so all predictions.

    The rows of the target "orders" have a history: its plan, too, must be that of the training.
    """
    given = {"fan_outs": (2,), "hidden": 8, "batch_size": 64, "epochs": 1, "target": target}
    data = growing(6)
    trainer = Trainer(resolve("growing", task="tables", **given), data)
    assert bool(trainer.task.histories) == (target == "orders")
    state = trainer.init(0)
    places = data.tasks[target].splits["test"]
    wanted = trainer.task.predict(trainer, state, places)
    fitted = json.loads(json.dumps(trainer.task.fitted))
    for other in (growing(9, order=order) for order in orders):
        again = Trainer(trainer.settings, other, fitted=fitted)
        assert again.task.fitted == trainer.task.fitted and again.task.layout_of_data == trainer.task.layout_of_data
        np.testing.assert_allclose(
            again.task.predict(again, again.imported(trainer.exported(state)), places), wanted, atol=1e-6
        )
    assert Trainer(trainer.settings, growing(9)).task.fitted != trainer.task.fitted
