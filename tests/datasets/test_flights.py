"""A real database, the flights out of New York in 2013 (CC0): read, dated and asked about. It needs their files."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from dejax.datasets import NEVER, from_tables, read_csv, task_of_rows

FLIGHTS = Path(os.environ.get("DEJAX_DATA", Path(__file__).parents[3] / "shared" / "data")) / "flights"


@pytest.mark.skipif(not (FLIGHTS / "flights.csv.zip").is_file(), reason=f"no flights in {FLIGHTS}")
def test_flights_are_a_database_with_a_task() -> None:
    pytest.importorskip("pyarrow")
    tables = {name: read_csv(FLIGHTS / f"{name}.csv") for name in ("planes", "airlines", "airports", "weather")}
    raw = read_csv(FLIGHTS / "flights.csv.zip")
    hour, clock, delay = (raw[name].to_numpy() for name in ("time_hour", "sched_dep_time", "arr_delay"))
    scheduled = hour.astype("datetime64[s]") + (clock % 100 * 60).astype("timedelta64[s]")
    # Every flight lasts less than a day: the delay is known by then.
    told = np.where(np.isnan(delay), np.datetime64("NaT", "s"), scheduled + np.timedelta64(1, "D"))
    flights = {name: raw[name] for name in ("carrier", "tailnum", "origin", "dest", "distance", "arr_delay")}
    flights |= {"cutoff": scheduled - np.timedelta64(2, "h"), "told": told}
    data = from_tables(
        {**tables, "flights": flights},
        {"planes": "tailnum", "airlines": "carrier", "airports": "faa"},
        [
            ("flights", "tailnum", "planes"),
            ("flights", "carrier", "airlines"),
            ("flights", "origin", "airports"),
            ("flights", "dest", "airports"),
            ("weather", "origin", "airports"),
        ],
        {"flights": "cutoff", "weather": "time_hour"},
        known_at={"flights": {"arr_delay": "told"}},
        dangling="add",
        fit_before="2013-09-01",
        fixed_features=False,
    )
    assert data.num_nodes["flights"] == 336_776 and data.num_edges["flights", "tailnum", "planes"] == 334_264
    assert data.left_out == {
        "columns of rows of planes that only foreign keys name": 721,
        "columns of rows of airports that only foreign keys name": 4,
    }
    late = data.columns["flights"]["arr_delay"]
    assert late.known_at is not None and (late.known_at == NEVER).sum() == late.missing.sum() == 9_430
    kinds = {name: column.kind for name, column in data.columns["planes"].items()}
    assert kinds == {
        "year": "number", "type": "category", "manufacturer": "category", "model": "category", "engines": "number",
        "seats": "number", "speed": "number", "engine": "category",
    }  # fmt: skip
    task = task_of_rows(data, "late", "flights", "arr_delay", above=30, valid_from="2013-09-01", test_from="2013-11-01")
    shares = {split: round(100 * task.labels[places].mean(), 1) for split, places in task.splits.items()}
    assert shares == {"train": 17.5, "valid": 9.1, "test": 15.4}
    assert task.left_out == {"examples without a label": 9_430} and task.hidden == ()
