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

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets import HeteroDataset, Task, from_tables, task_from_columns, task_of_events, task_of_rows
from dejax.datasets.tables._columns import columns_of
from dejax.datasets.tables._files import read_file

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
        try:
            data = from_tables(place, foreign_keys=references, **given)
        except TypeError as error:  # an unknown argument
            raise ValueError(
                f"[database] must have `path` and the arguments of from_tables, got an error: {error}"
            ) from None
        for name, task in self.tasks.items():
            data = data.with_task(_task(data, name, task, self.path.parent))
        return data


def _task(data: HeteroDataset, name: str, given: Mapping[str, Any], folder: Path) -> Task:
    make: Callable[..., Task] = task_of_events if "events" in given else task_of_rows
    arguments = {key: tuple(value) if key == "events" else value for key, value in given.items()}
    if "examples" in given:
        make, arguments = task_from_columns, _with_columns(name, arguments, folder)
    try:
        return make(data, name, **arguments)
    except TypeError as error:  # a missing or unknown argument
        raise ValueError(
            f"[tasks.{name}] must have the arguments of dejax.datasets.{make.__name__}, got an error: {error}"
        ) from None


def _mapped(path: Path) -> np.ndarray:
    if path.suffix != ".npy" or not path.is_file():
        raise FileNotFoundError(
            f"vectors must name .npy files with a vector for each row, got {path}, which is no such file"
        )
    found: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    return found


def _with_columns(name: str, given: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of `task_from_columns`, with columns of the file of examples in place of their names."""
    arguments = dict(given)
    path = folder / arguments.pop("examples")
    if not path.is_file():
        raise FileNotFoundError(
            f"examples of [tasks.{name}] must be a CSV or Parquet file, got {path}, which does not exist"
        )
    columns = columns_of(path.name, read_file(path))
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
