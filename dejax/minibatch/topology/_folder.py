"""The folder of a `HeteroTopology`: one `.npy` file a list, and `topology.json`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dejax._files import read_description, save_npy, unchanged, write_description
from dejax.host_gather import HostTable

_FILE = "topology.json"
_FORMAT = 1
_DTYPES = {
    "starts": (np.int32, np.int64),
    "senders": (np.int32,),
    "edge_ids": (np.int32, np.int64),
    "alias": (np.int32,),
    "logs": (np.float32,),
    "times": (np.int32, np.int64),
}


def begin(folder: str | os.PathLike[str]) -> None:
    """Makes the folder, and takes `topology.json` away until its lists are complete."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / _FILE).unlink(missing_ok=True)


def list_path(folder: str | os.PathLike[str], number: int, name: str) -> Path:
    """The file of a list."""
    return Path(folder) / f"{number}_{name}.npy"


def write(folder: str | os.PathLike[str], number: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes the arrays of one `EdgeLists`."""
    for name, array in arrays.items():
        save_npy(list_path(folder, number, name), array)


def describe(
    folder: str | os.PathLike[str], relations: Sequence[Any], counts: Mapping[str, int], names: Sequence[Sequence[str]]
) -> None:
    """Writes `topology.json`, last: a folder without it is not complete."""
    found = {
        "num_nodes": dict(counts),
        "lists": [list(some) for some in names],
        "relations": [
            {
                "edge_type": list(relation.edge_type),
                "lists": relation.lists,
                "first_group": relation.first_group,
                "first_edge": relation.first_edge,
                "num_edges": relation.num_edges,
                "max_degree": relation.max_degree,
            }
            for relation in relations
        ],
    }
    write_description(Path(folder) / _FILE, _FORMAT, found)


def load(folder: str | os.PathLike[str]) -> tuple[list[dict[str, HostTable]], list[tuple[Any, ...]], dict[str, int]]:
    """The tables of each `EdgeLists` by name, the fields of each `Relation`, the number of nodes by type."""
    with unchanged(Path(folder) / _FILE):
        return _opened(folder)


def _opened(folder: str | os.PathLike[str]) -> tuple[list[dict[str, HostTable]], list[tuple[Any, ...]], dict[str, int]]:
    found = read_description(
        Path(folder) / _FILE, _FORMAT, writer="HeteroTopology.save", remedy="save the topology again"
    )
    tables = []
    for number, names in enumerate(found["lists"]):
        here = [relation for relation in found["relations"] if relation["lists"] == number]
        edges = sum(relation["num_edges"] for relation in here)
        groups = sum(found["num_nodes"][relation["edge_type"][2]] + 1 for relation in here)
        tables.append(
            {name: _table(list_path(folder, number, name), name, groups if name == "starts" else edges)
             for name in names}
        )  # fmt: skip
    relations = [
        (tuple(r["edge_type"]), r["lists"], r["first_group"], r["first_edge"], r["num_edges"], r["max_degree"])
        for r in found["relations"]
    ]
    return tables, relations, found["num_nodes"]


def _table(path: Path, name: str, rows: int) -> HostTable:
    if not path.exists():
        raise FileNotFoundError(
            f"{path} must exist, because {_FILE} names this file, got none; save the topology again"
        )
    table = HostTable.from_npy(path)
    shape = (rows, 2) if name == "alias" else (rows,)
    if table.shape != shape or table.dtype not in _DTYPES[name]:
        allowed = " or ".join(np.dtype(dtype).name for dtype in _DTYPES[name])
        raise ValueError(f"{path}: must have shape {shape} of {allowed}, got {table.shape} of {table.dtype}")
    return table
