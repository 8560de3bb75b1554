"""The configuration of `dejax-train tables CONFIG`: tables, keys, times and tasks in one TOML file.

[database]
path = "shop"                            # a folder of CSV or Parquet files, or a SQLite file; beside this file
primary_keys = {customers = "id"}
foreign_keys = [["orders", "customer", "customers"]]
time_columns = {orders = "placed"}
known_at = {orders = {rating = "rated"}} # columns that are known later than their rows
vectors = {reviews = {text = "text.npy"}} # of each row, beside this file; they become that column

[tasks.return]
...                                      # the arguments of a task's maker: task_of_events if there are "events";
                                         # task_from_columns if there is a file of "examples", whose columns "keys",
                                         # "times", "labels" and "splits" name; otherwise task_of_rows

[settings]                               # fields of dejax.training.Settings; arguments go before them
epochs = 5
"""

from __future__ import annotations

import difflib
import inspect
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets import HeteroDataset, Task, from_tables, task_from_columns, task_of_events, task_of_rows
from dejax.datasets.tables._columns import columns_of
from dejax.datasets.tables._files import read_file
from dejax.datasets.tasks._events import duration

_SECTIONS = ("database", "tasks", "settings")


@dataclass(frozen=True, slots=True)
class TablesConfig:
    """A configuration as it was read, or a folder of `HeteroDataset.save` in its place.

    Attributes:
        path: the path of the configuration file, or of the folder.
        database: the arguments of `dejax.datasets.from_tables`, and its "path".
        tasks: by name, the arguments of their makers.
        settings: fields of `Settings`.
    """

    path: Path
    database: Mapping[str, Any]
    tasks: Mapping[str, Mapping[str, Any]]
    settings: Mapping[str, Any]

    def dataset(self) -> HeteroDataset:
        """The tables as a graph, with the tasks.

        Raises:
            ValueError, FileNotFoundError: as `from_tables` and the makers of tasks.
        """
        if not self.database:
            return HeteroDataset.open(self.path)
        given = dict(self.database)
        if "path" not in given:
            raise ValueError("[database] must have `path`, a folder of tables or a SQLite file, got none")
        place = self.path.parent / given.pop("path")
        references = [tuple(reference) for reference in given.pop("foreign_keys", ())] or None
        given["vectors"] = {
            table: {column: _mapped(self.path.parent / file) for column, file in of.items()}
            for table, of in given.get("vectors", {}).items()
        }
        given = {"fixed_features": False, "name": place.stem, **given}  # encoders read columns
        _check_names("[database]", self.database, from_tables, besides=("path",), without=("tables",))
        data = from_tables(place, foreign_keys=references, **given)
        for name, task in self.tasks.items():
            data = data.with_task(_task(data, name, task, self.path.parent))
        return data


def _task(data: HeteroDataset, name: str, given: Mapping[str, Any], folder: Path) -> Task:
    make: Callable[..., Task] = task_of_events if "events" in given else task_of_rows
    arguments = {key: tuple(value) if key == "events" else value for key, value in given.items()}
    if "examples" in given:
        make, arguments = task_from_columns, _with_columns(data, name, arguments, folder)
    elif "events" in given:
        arguments["cutoffs"] = _cutoffs(name, given, data.time_unit)
    _check_names(f"[tasks.{name}]", arguments, make, without=("data", "name"))
    try:
        return make(data, name, **arguments)
    except TypeError as error:  # a missing argument
        raise ValueError(
            f"[tasks.{name}] must have the arguments of dejax.datasets.{make.__name__}, got an error: {error}"
        ) from None


def _check_names(
    section: str,
    given: Mapping[str, Any],
    of: Callable[..., Any],
    *,
    besides: Sequence[str] = (),
    without: Sequence[str],
) -> None:
    """Raises a ValueError if a section has a name that is no argument of a function."""
    known = [*besides, *(name for name in inspect.signature(of).parameters if name not in without)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            raise ValueError(
                f"{section} must have the arguments of dejax.datasets.{of.__name__}, {', '.join(known)}; got {name}"
                f"{hint}"
            )


def _cutoffs(name: str, given: Mapping[str, Any], unit: str) -> Any:
    """The cutoffs of a task of events: a list, or a grid `{first, last, every}`."""
    lacking = [argument for argument in ("cutoffs", "window") if argument not in given]
    if lacking:
        raise ValueError(
            f"[tasks.{name}] with `events` must have `cutoffs`, the times as of which labels are predicted, and "
            f"`window`, the time after a cutoff in which events count, got no `{lacking[0]}`; for example cutoffs = "
            '{first = "2024-01-01", last = "2024-10-01", every = "30 days"} and window = "30 days"'
        )
    cutoffs = given["cutoffs"]
    if not isinstance(cutoffs, Mapping):
        return cutoffs
    if set(cutoffs) != {"first", "last", "every"}:
        raise ValueError(
            f"`cutoffs` of [tasks.{name}] must be a list of times or have `first`, `last` and `every`, got "
            f"{', '.join(cutoffs) or 'nothing'}"
        )
    every = duration(cutoffs["every"], unit, f"`every` of [tasks.{name}]")
    if unit != "s":
        return np.arange(cutoffs["first"], cutoffs["last"] + 1, every)
    first, last = (np.datetime64(cutoffs[end], "s") for end in ("first", "last"))
    return np.arange(first, last + np.timedelta64(1, "s"), np.timedelta64(every, "s"))


def _mapped(path: Path) -> np.ndarray:
    if path.suffix != ".npy" or not path.is_file():
        raise FileNotFoundError(
            f"vectors must name .npy files with a vector for each row, got {path}, which is no such file"
        )
    found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _with_columns(data: HeteroDataset, name: str, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `task_from_columns`, with columns of the file of examples in place of their names."""
    arguments = dict(given)
    path = folder / arguments.pop("examples")
    if not path.is_file():
        raise FileNotFoundError(
            f"examples of [tasks.{name}] must be a CSV or Parquet file, got {path}, which does not exist"
        )
    tables = {"keys": arguments.get("entity"), "labels": arguments.get("target")}
    of_text = [what for what, table in tables.items() if table in data.keys and data.keys[table].dtype.kind == "U"]
    text = {arguments[argument] for argument in of_text if argument in arguments}
    columns = columns_of(path.name, read_file(path, text))
    for argument in ("keys", "times", "labels", "splits"):
        column = arguments.get(argument)
        if column is None:
            continue
        if column not in columns:
            there = ", ".join(columns)
            raise ValueError(f"[tasks.{name}] must have a column of {path.name} as {argument}, {there}; got {column!r}")
        arguments[argument] = columns[column]
    return arguments


def read_config(path: str | Path) -> TablesConfig:
    """Reads a configuration; a folder of a saved data set, with tasks, needs none.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no TOML, has other sections, or lacks the database or a task.
    """
    path = Path(path)
    if (path / "dataset.json").is_file():
        return TablesConfig(path, {}, {}, {})
    if not path.is_file():
        raise FileNotFoundError(
            f"tables must be followed by a TOML file, or by a folder of HeteroDataset.save, got {path}, which is "
            "neither"
        )
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} must be a TOML file, got an error: {error}") from None
    for name in found:
        if name not in _SECTIONS:
            raise ValueError(f"{path} must have the sections {', '.join(_SECTIONS)}, got {name!r}")
    for name in _SECTIONS[:2]:
        if not found.get(name):
            raise ValueError(f"{path} must have a section [{name}], got none; dejax-train tables --help has an example")
    return TablesConfig(path, found["database"], found["tasks"], found.get("settings", {}))
