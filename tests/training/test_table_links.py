"""Tasks of links on tables: candidates exist at the cutoff, ranks are over all of them, and nothing later is read."""

import csv
import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import Task, from_tables, task_of_events
from dejax.training import Trainer, fit, metrics, resolve
from dejax.training.command import predictions
from dejax.training.command.page import write_page
from dejax.training.command.report import summarise
from dejax.training.tables.importance import importance
from dejax.training.tables.links import _among_links
from dejax.training.tables.rows import pack

BEGIN = np.datetime64("2024-01-01")


def day(number):
    return BEGIN + np.asarray(number).astype("timedelta64[D]")


def purchases(users=40, items=24, orders=900, seed=0, *, timed=True, new=0):
    """Users buy items of their own group; a third of the items come later than the others. `new`: items at the end."""
    rng = np.random.default_rng(seed)
    group, user = rng.integers(0, 3, users), rng.integers(0, users, orders)
    since = np.where(np.arange(items) % 3 == 0, rng.integers(60, 240, items), 0)
    at = np.sort(rng.integers(1, 280, orders))
    choices = [[i for i in range(items) if i % 3 == group[u] or rng.random() < 0.05] for u in range(users)]
    item = []
    for u, when in zip(user, at, strict=True):
        there = [i for i in choices[u] if since[i] <= when] or [1]
        item.append(there[rng.integers(len(there))])
    tables = {
        "users": {"id": np.arange(users) + 100},
        "items": {
            "id": [f"i{i}" for i in range(items + new)],
            "since": day([*since, *[0] * new]),
            "price": [*rng.random(items), *[9.0] * new],
        },
        "orders": {"user": user + 100, "item": [f"i{i}" for i in item], "at": day(at)},
    }
    data = from_tables(
        tables,
        {"users": "id", "items": "id"},
        [("orders", "user", "users"), ("orders", "item", "items")],
        {"orders": "at", "items": "since"} if timed else {"orders": "at"},
        kinds={} if timed else {"items": {"since": "ignore"}},
        fixed_features=False,
        name="purchases",
    )
    return data.with_task(
        task_of_events(
            data,
            "next",
            ("orders", "user"),
            [day(d) for d in range(40, 250, 30)],
            "30 days",
            target="item",
            valid_from=day(190),
            test_from=day(220),
        )
    )


def settings(**given):
    small = {"fan_outs": (6, 1), "hidden": 16, "batch_size": 64, "epochs": 6, "lr": 0.02, "bins": 4, "warmup": 5}
    return resolve("purchases", task="tables", **{**small, "patience": 0, "top": 5, **given})


@pytest.fixture(scope="module")
def trained():
    data, shown = purchases(), []
    trainer = Trainer(settings(), data, print_table=shown.append)
    return data, trainer, fit(trainer, 0), shown


def test_what_an_entity_meets_next_is_learnt(trained):
    data, trainer, fitted, shown = trained
    final = trainer.final(fitted.state)
    assert list(final) == ["map@5", "mrr", "recall@5"] and trainer.task.measure == "map@5"
    known = (data.known_from["items"] <= data.tasks["next"].times.max()).sum()
    assert final["recall@5"] > 2 * 5 / known
    assert int(fitted.state.lost) == 0
    assert "training links lead to rows of items that are not known by their cutoffs: left out" in shown[0]


def test_candidates_of_training_exist_at_the_cutoff(trained):
    data, trainer, _, _ = trained
    task, known = trainer.task, data.known_from["items"]
    order = task.order(0, 0)
    targets, times = order["targets"], np.broadcast_to(order["times"][..., None], order["targets"].shape)
    assert (known[targets[targets >= 0]] <= times[targets >= 0]).all()
    there = order["examples"] >= 0
    assert there.sum() == task.seeds_per_epoch == len(task._train)
    links = {(e, r) for e, r in zip(task._example.tolist(), task.examples.labels.tolist(), strict=True)}
    assert all(pair in links for pair in zip(order["examples"][there], targets[..., 0][there], strict=True))
    some = np.array([0, 5, -1], np.int32)
    wrong = np.arange(12, dtype=np.int32).reshape(3, 4)
    expected = [[[(e, r) in links for r in row] for row in wrong.tolist()] for e in some.tolist()]
    np.testing.assert_array_equal(_among_links(task.world.data, jnp.asarray(some), jnp.asarray(wrong)), expected)


def test_ranks_are_over_all_candidates_of_the_cutoff(trained):
    data, trainer, fitted, _ = trained
    task, examples = trainer.task, trainer.task.examples
    places = task.splits["test"]
    found = task.predict(trainer, fitted.state, places)
    cutoff = examples.times[places[0]]
    candidates = np.flatnonzero(data.known_from["items"] <= cutoff)
    some = places[examples.times[places] == cutoff]
    entities, targets, count = task._both(
        trainer, fitted.state, task.world, task._readers, examples.rows[some], candidates, int(cutoff)
    )
    scores = entities @ np.asarray(targets)[:count].T
    wanted = [examples.labels[a:b] for a, b in zip(examples.offsets[some], examples.offsets[some + 1], strict=True)]
    for row, (own, links) in enumerate(zip(scores, wanted, strict=True)):
        at = np.flatnonzero(places == some[row])[0]
        np.testing.assert_allclose(found.scores[at], np.sort(own)[::-1][:5], rtol=1e-4, atol=1e-5)
        ranks = [1 + (own > own[list(candidates).index(link)]).sum() for link in links if link in candidates]
        assert found.first[at] == pytest.approx(min(ranks, default=np.inf))
    listed = [examples.labels[a:b] for a, b in zip(examples.offsets[places], examples.offsets[places + 1], strict=True)]
    measured = task.measures_of("test", found)
    assert measured["map@5"] == pytest.approx(metrics.map_at_k(listed, found.rows, 5))
    assert measured["recall@5"] == pytest.approx(metrics.recall_at_k(listed, found.rows, 5))
    asked = [number for number, links in enumerate(listed) if len(links)]
    assert measured["mrr"] == pytest.approx(np.mean(1 / found.first[asked]))


def test_nothing_later_changes_a_list(trained):
    data, trainer, fitted, _ = trained
    task = trainer.task
    places = task.splits["valid"]
    cutoff = int(task.examples.times[places].max())
    items = data.columns["items"]
    later = data.known_from["items"] > cutoff
    assert later.any()
    changed = {
        **items,
        "price": dataclasses.replace(items["price"], values=np.where(later, 9.0, items["price"].values)),
    }
    packed, _ = pack(changed, data.known_from["items"], task.until, bins=4)
    store = type(task.world.features).from_arrays({**task.packed, "items": packed})
    before = task.predict(trainer, fitted.state, places)
    after = task.predict(trainer, fitted.state, places, world=dataclasses.replace(task.world, features=store))
    np.testing.assert_array_equal(before.rows, after.rows)
    np.testing.assert_array_equal(before.scores, after.scores)
    assert (data.known_from["items"][before.rows] <= cutoff).all()


def test_predictions_report_and_new_cutoffs(trained, tmp_path):
    data, trainer, fitted, _ = trained
    task = trainer.task
    predicted = task.predicted(trainer, fitted.state)
    final = task.measures_of("test", predicted["test"])
    columns = predictions.as_columns(data, task.examples, predicted["test"], task.splits["test"])
    predictions.write(tmp_path / "p.csv", columns)
    with (tmp_path / "p.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["users", "time", "split", "label", "rank", "items", "score"]
    assert [row["rank"] for row in rows[:5]] == list("12345") and rows[0]["items"].startswith("i")
    assert sum(int(row["label"]) for row in rows) == predicted["test"].hits.sum() > 0
    cutoff = predictions.time_of("2024-03-01", "s")
    new = predictions.known_rows(data, task.examples, cutoff)
    lists = task.predict(trainer, fitted.state, examples=new)
    found = predictions.as_columns(data, new, lists, None)
    assert len(found["score"]) == 5 * len(new) and "label" not in found
    assert (data.known_from["items"][lists.rows] <= cutoff).all()
    results = summarise(trainer, [fitted.history], [final], lost=[0], skipped=[0], total_seconds=1.0, argv=["tables"])
    (tmp_path / "curves.png").write_bytes(b"")
    contributes = importance(trainer, fitted.state, examples=10)
    assert "items, rev_item, orders" in contributes["relations"]
    write_page(tmp_path / "report.html", results, task.examples, predicted, contributes)
    page = (tmp_path / "report.html").read_text()
    assert f"{final['map@5']:.4f}" in page and "Recall and ranks" in page and "recall@5, test" in page


def test_learned_vectors_stay_with_their_rows(trained):
    """Rows may come at the end of a table; others have the vectors of other rows, which a digest tells."""
    data, trainer, fitted, _ = trained
    plain = trainer.exported(fitted.state)
    (kind,) = plain["tables"]

    def with_rows(rows):
        moments = {kind: {name: x[:rows] if name != "step" else x for name, x in plain["moments"][kind].items()}}
        return {**plain, "tables": {kind: plain["tables"][kind][:rows]}, "moments": moments}

    found = trainer.imported(with_rows(20)).embeddings[kind].table.numpy()
    np.testing.assert_array_equal(found[:20], plain["tables"][kind][:20])
    longer = {**plain, "tables": {kind: np.concatenate([plain["tables"][kind]] * 2)}}
    with pytest.raises(
        ValueError, match="the state must be of the data of this trainer, got 48 rows of 'vectors of it"
    ):
        trainer.imported(longer)
    turned = dataclasses.replace(data, keys={**data.keys, "items": data.keys["items"][::-1]})
    assert Trainer(trainer.settings, turned).task.layout_of_data != trainer.task.layout_of_data


def test_links_that_no_cutoff_knows_are_an_error():
    data = purchases(users=5, orders=200)
    task = data.tasks["next"]
    early = dataclasses.replace(task, times=np.full_like(task.times, int(day(0).astype("datetime64[s]").astype(int))))
    only = np.flatnonzero(data.known_from["items"] > early.times[0])[:1].astype(np.int32)
    early = dataclasses.replace(early, labels=np.repeat(only, len(task.labels)))
    with pytest.raises(ValueError, match="training links to rows of 'items' that are known by their cutoffs, got none"):
        Trainer(settings(), data.with_task(early))


@pytest.mark.slow
def test_links_within_a_table():
    """Entities and candidates are rows of one table, so they are seeds of one type."""
    rng = np.random.default_rng(0)
    people = {"id": np.arange(30), "side": rng.integers(0, 2, 30).astype(float)}
    data = from_tables({"people": people}, {"people": "id"}, [], fixed_features=False, name="friends")
    side = people["side"]
    links = [rng.permutation(np.flatnonzero(side == side[p]))[:4].astype(np.int32) for p in range(30)]
    splits = dict(zip(("train", "valid", "test"), np.split(np.arange(30), [20, 25]), strict=True))
    offsets = np.arange(31) * 4
    task = Task(
        *("friends", "link", "people", np.arange(30, dtype=np.int32), np.zeros(30, np.int64), np.concatenate(links)),
        splits,
        offsets=offsets,
        target="people",
    )
    edges = {("people", "to", "people"): (np.arange(29, dtype=np.int32), np.arange(1, 30, dtype=np.int32))}
    data = dataclasses.replace(data, edges=edges).with_task(task)
    trainer = Trainer(settings(epochs=30, batch_size=32), data)
    fitted = fit(trainer, 0)
    found = trainer.task.predict(trainer, fitted.state)
    assert np.mean(side[found.rows] == side[:, None]) > 0.9
    columns = predictions.as_columns(data, task, found, np.arange(30))
    assert "people" in columns and "candidate" in columns


def test_new_rows_of_a_target_without_times_are_candidates_without_a_learned_vector():
    """They count as known from the beginning: only the run's own number of rows tells that they are new."""
    given = settings(epochs=1, top=40, hidden=8, fan_outs=(6,))
    trainer = Trainer(given, purchases(timed=False))
    state, places = trainer.init(0), trainer.task.splits["test"][:20]  # drawn vectors do as well as learned ones
    before = trainer.task.predict(trainer, state, places)
    fitted = json.loads(json.dumps(trainer.task.fitted))
    again = Trainer(given, purchases(timed=False, new=2), fitted=fitted)
    assert again.task.fitted == trainer.task.fitted
    after = again.task.predict(again, again.imported(trainer.exported(state)), places)
    old, new = (
        [
            dict(zip(rows, scores, strict=True))
            for rows, scores in zip(of.rows.tolist(), of.scores.tolist(), strict=True)
        ]
        for of in (before, after)
    )
    for then, now in zip(old, new, strict=True):
        assert {24, 25} <= now.keys() and not {24, 25} & then.keys()
        assert now[24] == pytest.approx(now[25], abs=1e-6)  # all that tells them apart is a vector that none has
        assert {row: now[row] for row in range(24)} == pytest.approx({row: then[row] for row in range(24)}, abs=1e-5)
    fewer = Trainer(given, purchases(items=23, timed=False), fitted=fitted)
    assert fewer.task.layout_of_data != trainer.task.layout_of_data
