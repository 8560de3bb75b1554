"""Networks of tables beside each other that read other histories: counts alone, all numbers, and those that are chosen.

Invented databases: shops whose customers leave by what is named, what customers spend, machines whose sensors or wear
decide when they fail; and the flights' validation months. For example `python -m benchmarks.table_histories sums few 0
counts,chosen 4`, or `python -m benchmarks.table_histories FOLDER july 0 chosen 1`.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets import HeteroDataset, from_tables, task_of_events, task_of_rows
from dejax.training import Trainer, fit, resolve
from dejax.training.tables import relevance
from dejax.training.tables.history import RowHistory, differing
from dejax.training.tables.task import TableTask

START = np.datetime64("2022-01-01T00:00:00")


def at(days: Any) -> Any:
    """Times after so many days."""
    return START + (np.asarray(days) * 86_400).astype("timedelta64[s]")


def shop(decides: str, seed: int, customers: int = 1500, days: int = 540) -> HeteroDataset:
    """Orders of customers who leave by their sums, habits, returns or last product, or by chance."""
    rng = np.random.default_rng([seed, sum(map(ord, decides))])
    quality, price = rng.normal(size=60), rng.lognormal(3, 0.6, 60)
    pace = np.full(customers, 1 / 25.0)
    if decides in ("counts", "both", "drift"):
        pace = rng.lognormal(np.log(1 / 30), 0.8, customers)
    habit, rows = rng.normal(size=customers), []
    for c in range(customers):
        t = rng.random() * days * 0.8 if decides != "drift" else days * (1 - np.sqrt(rng.random())) * 0.9
        spent: list[tuple[float, float]] = []
        while t < days:
            p = int(rng.integers(60))
            amount = price[p] * np.exp(0.4 * rng.normal() + (0.7 * habit[c] if decides == "habits" else 0))
            sent_back = rng.random() < 0.15
            rows.append((c, p, t, amount, int(sent_back), 1 + rng.poisson(1.0), rng.normal()))
            spent.append((t, amount))
            leave = {"chance": 0.0, "returns": 0.05 + 0.5 * sent_back}.get(decides, 0.12)
            if decides in ("sums", "habits", "product", "both"):
                recent = sum(amount for when, amount in spent if t - when < 60)
                of = {"sums": 2.2 * (np.log(60) - np.log(recent)) + 0.2, "habits": 0.2 - 1.2 * habit[c]}
                leave = 1 / (1 + np.exp(2 - of.get(decides, -1.5 * quality[p])))
            if rng.random() < leave:
                break
            t += rng.exponential(1 / (pace[c] * ((1.6 if t < days * 0.6 else 0.7) if decides == "drift" else 1))) + 0.2
    c, p, t, amount, back, items, noise = map(np.array, zip(*sorted(rows, key=lambda row: row[2]), strict=True))
    orders = {
        "customer": c,
        "product": p,
        "placed": at(t),
        "amount": amount,
        "returned": back,
        "items": items,
        "noise": noise,
    }
    tables = {
        "customers": {
            "id": np.arange(customers),
            "country": rng.choice(["NL", "US", "DE"], customers),
            "age": rng.integers(18, 80, customers),
        },
        "products": {"id": np.arange(60), "price": price, "kind": rng.choice(list("abcdef"), 60)},
        "orders": orders,
    }
    references = [("orders", "customer", "customers"), ("orders", "product", "products")]
    keys = {"customers": "id", "products": "id"}
    return from_tables(tables, keys, references, {"orders": "placed"}, fixed_features=False, name=decides)


def machines(decides: str, seed: int, count: int = 800, days: int = 400) -> HeteroDataset:
    """Machines that fail by their sensors, or by their wear, of which only the failures tell."""
    rng = np.random.default_rng([seed, 77])
    site, wear, rows, fails = rng.integers(0, 20, count), rng.random(count), [], []
    for m in range(count):
        t, heat = 0.0, rng.normal()
        while t < days:
            heat = 0.9 * heat + 0.45 * rng.normal()
            rows.append(
                (
                    m,
                    t,
                    60 + 5 * heat + rng.normal(),
                    rng.normal(),
                    rng.normal() + site[m] * 0.1,
                    int(rng.random() < 0.1),
                )
            )
            odds = -4.2 + 1.3 * heat if decides == "sensors" else -3.8 + 2.5 * (wear[m] - 0.5)
            if rng.random() < 1 / (1 + np.exp(-odds)):
                fails.append((m, t + rng.random()))
            t += 2 + rng.exponential(2)
    m, t, heat, a, b, alarm = map(np.array, zip(*sorted(rows, key=lambda row: row[1]), strict=True))
    fm, ft = map(np.array, zip(*sorted(fails, key=lambda row: row[1]), strict=True))
    tables = {
        "sites": {"id": np.arange(20), "region": rng.choice(list("xyz"), 20)},
        "machines": {"id": np.arange(count), "site": site, "maker": rng.choice(["p", "q"], count)},
        "readings": {"machine": m, "at": at(t), "heat": heat, "a": a, "b": b, "alarm": alarm},
        "failures": {"machine": fm, "at": at(ft), "cost": rng.lognormal(size=len(fm))},
    }
    references = [
        ("machines", "site", "sites"),
        ("readings", "machine", "machines"),
        ("failures", "machine", "machines"),
    ]
    times = {"readings": "at", "failures": "at"}
    return from_tables(tables, {"sites": "id", "machines": "id"}, references, times, fixed_features=False, name=decides)


def database(name: str, size: str, seed: int) -> HeteroDataset:
    """A database with its task, of 1,000 or of 6,000 training examples; or the flights with some months."""
    if Path(name).is_dir():
        from examples import flights

        data = flights.database(Path(name))
        months = {"july": ("07", "09"), "sept": ("09", "11")}[size]
        splits = dict(zip(("valid_from", "test_from"), (f"2013-{m}-01T04:00:00" for m in months), strict=True))
        task = task_of_rows(data, "late", "flights", "arr_delay", above=30, **splits)
        return dataclasses.replace(data, tasks={"late": task}, check=False)
    if name in ("sensors", "wear"):
        data, train, begin = machines(name, seed), np.arange(60, 250, 15), 270
        how = {"events": ("failures", "machine"), "window": "10 days", "how": "any"}
    else:
        data, begin = shop(name.removeprefix("spend-"), seed), 390
        how = {"events": ("orders", "customer"), "window": "60 days", "how": "none", "active": "90 days"}
        train = np.arange(120, 330, 30) if size == "many" else np.array([180, 300])
        if name.startswith("spend-"):
            how |= {"window": "30 days", "how": "sum", "value": "amount"}
            train = np.arange(120, 360, 30) if size == "many" else train
    cutoffs = at(np.array([*train, *(begin + 30 * n for n in range(4))], float))
    task = task_of_events(data, "t", cutoffs=cutoffs, valid_from=at(begin), test_from=at(begin + 30), **how)
    some, most = task.splits["train"], {"few": 1000, "many": 6000}[size]
    if len(some) > most:
        some = np.sort(np.random.default_rng(seed).choice(some, most, replace=False))
    return data.with_task(dataclasses.replace(task, splits={**task.splits, "train": some}))


def wanted(side: str) -> Any:
    """`TableTask._wanted` of a side."""

    def chosen(task: TableTask, history: RowHistory, some: np.ndarray, numbers: np.ndarray) -> np.ndarray:
        if side == "counts":
            return history.are_counts
        if side == "chosen":
            return relevance.relevant(history, task.data, task.examples, some, numbers)
        asked = np.flatnonzero(differing(numbers) & ~history.are_counts)
        ranks = np.stack([relevance._ranks(numbers[:, n]) for n in asked], axis=1)
        found = history.are_counts.copy()
        found[asked[relevance._told_by_time(ranks, task.examples.times[some]) < relevance._MOST_BY_TIME]] = True
        return found

    return chosen


def main() -> None:
    """Prints a line of JSON for each side: the first measure of validation and test examples by seed."""
    name, size, seed, sides, seeds = sys.argv[1:]
    data = database(name, size, int(seed))
    (task,) = data.tasks.values()
    more = {"epochs": 1, "eval_rows": 10_000} if Path(name).is_dir() else {}
    for side in sides.split(","):
        TableTask._wanted = wanted(side)  # type: ignore[method-assign]
        trainer = Trainer(resolve(data.name, task="tables", examples=len(task.splits["train"]), **more), data)
        found: dict[str, list[float]] = {"valid": [], "test": []}
        for number in range(int(seeds)):
            predicted = trainer.task.predicted(trainer, trainer.on_one_device(fit(trainer, number).state))
            for split in found if not Path(name).is_dir() else ("valid",):  # test months of flights are not looked at
                found[split].append(next(iter(trainer.task.measures_of(split, predicted[split]).values())))
        kept = [place.name for of in trainer.task.histories.values() for place in of.plan.columns]
        print(
            json.dumps({"database": name, "size": size, "seed": int(seed), "side": side, "kept": kept, **found}),
            flush=True,
        )


if __name__ == "__main__":
    main()
