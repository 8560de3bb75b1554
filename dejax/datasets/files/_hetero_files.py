"""Folders of `HeteroDataset.save`: its arrays as `.npy` files, and all else as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import mapped_npy, replacing_folder, save_npy, unchanged
from dejax.datasets.columns import Column
from dejax.datasets.tasks.task import Task

_FORMAT = 1
_META = "dataset.json"
_PAIRS = ("edges", "valid_edges", "test_edges")
_RECORDS = {"columns": Column, "tasks": Task}
_SPLIT = "splits: "  # before the name of a split of a task


def save_fields(fields: Mapping[str, Any], folder: Path) -> None:
    """Writes the fields of a dataset. A folder that exists is replaced if this function wrote it.

    Raises:
        FileExistsError: the folder exists and is no saved dataset.
    """
    if folder.exists() and not (folder / _META).is_file() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} must be new, empty or a saved HeteroDataset; give another folder")
    with replacing_folder(folder) as work:
        meta: dict[str, Any] = {"format": _FORMAT, "records": []}
        files: list[tuple[list[Any], str]] = []
        for path, value in _leaves(fields):
            if isinstance(value, np.ndarray):
                save_npy(work / f"{len(files)}.npy", value)
                files.append((path, f"{len(files)}.npy"))
            elif path[0] in _RECORDS:
                meta["records"].append((path, value))
            else:
                meta[path[0]] = value
        (work / _META).write_text(json.dumps({**meta, "files": files}, default=_plain), encoding="utf-8")


def _plain(value: Any) -> Any:
    """A number of numpy, as JSON writes it."""
    return value.item()


def _leaves(fields: Mapping[str, Any]) -> Iterator[tuple[list[Any], Any]]:
    """([field, keys ...], an array, or what JSON writes) of all fields."""
    for name, value in fields.items():
        if name in _PAIRS:
            for relation, ends in value.items():
                yield from (([name, relation, side], np.asarray(ends[side])) for side in (0, 1))
        elif name == "splits":
            for split, by_type in value.items():
                yield from (([name, split, kind], np.asarray(nodes)) for kind, nodes in by_type.items())
        elif name == "tasks":
            for task in value.values():
                yield from (([name, task.name, *path], leaf) for path, leaf in _of_record(task))
        elif name == "columns":
            for table, columns in value.items():
                for column, found in columns.items():
                    yield from (([name, table, column, *path], leaf) for path, leaf in _of_record(found))
        elif isinstance(value, dict) and any(getattr(array, "ndim", 0) for array in value.values()):
            yield from (([name, key], np.asarray(array)) for key, array in value.items())
        else:
            yield [name], value


def _of_record(record: Any) -> Iterator[tuple[list[str], Any]]:
    for found in dataclasses.fields(record):
        value = getattr(record, found.name)
        if found.name == "splits":
            yield from (([_SPLIT + split], np.asarray(places)) for split, places in value.items())
        elif value is not None:
            yield [found.name], dict(value) if isinstance(value, Mapping) else value


def open_fields(folder: Path) -> dict[str, Any]:
    """The fields of a dataset that `save_fields` wrote, with arrays as memory maps.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: another format, a file is short, or another process writes the folder meanwhile.
    """
    with unchanged(folder / _META):
        return _opened(folder)


def _opened(folder: Path) -> dict[str, Any]:
    meta = json.loads((folder / _META).read_text(encoding="utf-8"))
    if meta.pop("format", None) != _FORMAT:
        raise ValueError(f"{folder} must be a HeteroDataset of format {_FORMAT}, got another one")
    records: dict[tuple[str, ...], dict[str, Any]] = {}
    for path, value in meta.pop("records", ()):
        records.setdefault(tuple(path[:-1]), {})[path[-1]] = _with_tuples(value)
    fields: dict[str, Any] = {}
    for path, file in meta.pop("files"):
        array = mapped_npy(folder / file)
        name: str = path[0]
        key: Any = tuple(path[1]) if isinstance(path[1], list) else path[1]
        if name in _RECORDS:
            records[tuple(path[:-1])][path[-1]] = array
        elif name == "splits":
            fields.setdefault(name, {}).setdefault(key, {})[path[2]] = array
        elif name in _PAIRS:
            fields.setdefault(name, {}).setdefault(key, []).append(array)
        else:
            fields.setdefault(name, {})[key] = array
    for name in _PAIRS:
        fields[name] = {relation: tuple(ends) for relation, ends in fields.get(name, {}).items()}
    for path, found in records.items():
        if path[0] == "tasks":
            found["splits"] = {k.removeprefix(_SPLIT): found.pop(k) for k in list(found) if k.startswith(_SPLIT)}
            fields.setdefault("tasks", {})[path[1]] = Task(**found)
        else:
            fields.setdefault("columns", {}).setdefault(path[1], {})[path[2]] = Column(**found)
    meta["target_relations"] = tuple(tuple(relation) for relation in meta["target_relations"])
    meta["node_names"] = {kind: tuple(names) for kind, names in meta["node_names"].items()}
    return {**meta, **fields}


def _with_tuples(value: Any) -> Any:
    return tuple(_with_tuples(part) for part in value) if isinstance(value, list) else value
