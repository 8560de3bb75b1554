"""A split graph on disk: a folder for each part, with its edges, its halo lists and its rows of features."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dejax._files import mapped_npy, read_description, save_npy, unchanged, write_description
from dejax.distributed.full_graph._rounds import Round
from dejax.distributed.full_graph._sharded_graph import (
    ShardedGraph,
    assemble,
    axis_of,
    checked_owner,
    common_sizes,
    part_tables,
    whole_graph,
)
from dejax.distributed.full_graph._split import GraphPart, PartsLayout, part_fields, split
from dejax.rgnn.graphs.rel_graph import RelGraph

_FILE = "graph.json"
_FORMAT = 2


def save_parts(
    folder: str | os.PathLike[str],
    graph: RelGraph,
    owner: Any,
    parts: int,
    *,
    nodes: Mapping[str, Any] | None = None,
    edges: Mapping[str, Any] | None = None,
) -> None:
    """Divides a graph into parts and writes each part to its own folder, for `load_parts`.

    Args:
        folder: the folder in which `graph.json` and the folders `part_0` to `part_<parts - 1>` are made.
        graph: the whole graph.
        owner: int[nodes], the part of each node (`Partition.owner()`).
        parts: number of parts.
        nodes: arrays [nodes, ...] to store with the graph, by name; may be memory maps.
        edges: arrays [edges, ...] to store with the graph, by name; may be memory maps.

    Raises:
        TypeError, ValueError: as `ShardedGraph.from_graph`; a name is no identifier; an array has another number of
            rows.
    """
    layout, made = split(whole_graph(graph), checked_owner(owner, graph.num_nodes, parts), parts)
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    (path / _FILE).unlink(missing_ok=True)
    given = {"nodes": (nodes or {}, layout.num_nodes), "edges": (edges or {}, layout.num_edges)}
    for kind, (arrays, count) in given.items():
        for name, array in arrays.items():
            if not name.isidentifier():
                raise ValueError(f"names of `nodes` and `edges` must be identifiers, got {name!r}")
            if array.shape[:1] != (count,):
                raise ValueError(f"`{kind}[{name!r}]` must have {count} rows, got shape {array.shape}")
    for number, part in enumerate(made):
        here = path / f"part_{number}"
        here.mkdir(exist_ok=True)
        for name in part_fields():
            save_npy(here / f"{name}.npy", getattr(part, name))
        for kind, ids in (("nodes", part.node_ids), ("edges", part.edge_ids)):
            for name, array in given[kind][0].items():
                save_npy(here / f"{kind}_{name}.npy", np.asarray(array[ids]))
    sizes = common_sizes(layout, [part_tables(layout, part) for part in made])
    write_description(path / _FILE, _FORMAT, {"layout": asdict(layout), "sizes": list(sizes)})


def load_parts(
    folder: str | os.PathLike[str], mesh: Mesh, axis: str | None = None, *, loop_tables: bool | None = None
) -> ShardedGraph:
    """Opens a folder that `save_parts` wrote, as a `ShardedGraph`.

    Each process reads only the parts of its own devices.

    Args:
        folder: the folder that was given to `save_parts`.
        mesh: a mesh whose axis has as many devices as the graph has parts.
        axis: name of the axis; may be left out if the mesh has one axis.
        loop_tables: as in `ShardedGraph.from_graph`.

    Raises:
        FileNotFoundError: the folder or one of its files is missing.
        ValueError: the axis has another size, a file is cut short, or an older version of dejax wrote the folder.
    """
    with unchanged(Path(folder) / _FILE):
        return _loaded(folder, mesh, axis_of(mesh, axis), loop_tables)


def _loaded(folder: str | os.PathLike[str], mesh: Mesh, axis: str, loop_tables: bool | None) -> ShardedGraph:
    described = _described(folder)
    given = described["layout"]
    layout = PartsLayout(
        **{name: _static(given[name]) for name in (field.name for field in fields(PartsLayout)) if name != "rounds"},
        rounds=tuple(Round(_static(some["pairs"]), some["rows"], some["start"]) for some in given["rounds"]),
    )
    if mesh.shape[axis] != layout.parts:
        raise ValueError(
            f"the mesh axis {axis!r} must have {layout.parts} devices, one for each part of {folder}, got "
            f"{mesh.shape[axis]}; split the graph again"
        )
    parts = {
        number: GraphPart(**{name: _read(folder, number, name) for name in part_fields()})
        for number in own_parts(mesh, axis)
    }
    tables = {number: part_tables(layout, part) for number, part in parts.items()}
    return assemble(layout, parts, tables, tuple(described["sizes"]), mesh, axis, loop_tables)


def load_nodes(folder: str | os.PathLike[str], graph: ShardedGraph, name: str) -> Array:
    """Reads an array with a row for each node that `save_parts(..., nodes=...)` stored, onto the devices of a graph.

    Args:
        folder: the folder that was given to `save_parts`.
        graph: the graph that `load_parts` made of this folder.
        name: the name of the array in `nodes`.

    Returns:
        [rows, *F] in the layout of `ShardedGraph.shard_nodes`, sharded over the devices of `graph`.
    """
    return _load(folder, graph, f"nodes_{name}", graph.layout.rows)


def load_edges(folder: str | os.PathLike[str], graph: ShardedGraph, name: str) -> Array:
    """Reads an array with a row for each edge that `save_parts(..., edges=...)` stored, onto the devices of a graph.

    Args:
        folder: the folder that was given to `save_parts`.
        graph: the graph that `load_parts` made of this folder.
        name: the name of the array in `edges`.

    Returns:
        [edge rows, *F] in the layout of `ShardedGraph.shard_edges`, sharded over the devices of `graph`.

    >>> import tempfile, numpy as np
    >>> from dejax.distributed import make_mesh
    >>> from dejax.distributed.full_graph import load_edges, load_parts, save_parts
    >>> from dejax.rgnn import RelGraph
    >>> graph, folder = RelGraph.from_edges([0, 1], [2, 2], [0, 1], num_nodes=3), tempfile.mkdtemp()
    >>> save_parts(folder, graph, [0, 0, 0], 1, edges={"weight": np.array([0.5, 2.0], np.float32)})
    >>> load_edges(folder, load_parts(folder, make_mesh(1)), "weight")
    Array([0.5, 2. ], dtype=float32)
    """
    return _load(folder, graph, f"edges_{name}", graph.layout.edges)


def own_parts(mesh: Mesh, axis: str) -> tuple[int, ...]:
    """The places along a mesh axis of this process' devices."""
    at = mesh.axis_names.index(axis)
    mine = [index[at] for index, device in np.ndenumerate(mesh.devices) if device.process_index == jax.process_index()]
    return tuple(sorted(set(mine)))


def _load(folder: str | os.PathLike[str], graph: ShardedGraph, name: str, rows: int) -> Array:
    parts = {number: _read(folder, number, name) for number in own_parts(graph.mesh, graph.axis)}
    like = next(iter(parts.values()))
    dtype = jax.dtypes.canonicalize_dtype(like.dtype)

    def some(index: Any) -> np.ndarray:
        first, last, _ = index[0].indices(rows * graph.parts)
        found = np.zeros((last - first, *like.shape[1:]), dtype)
        for number in range(first // rows, last // rows):
            part = parts[number]
            found[number * rows - first : number * rows - first + part.shape[0]] = part
        return found

    return jax.make_array_from_callback((rows * graph.parts, *like.shape[1:]), graph.row_sharding(), some)


def _described(folder: str | os.PathLike[str]) -> dict[str, Any]:
    return read_description(Path(folder) / _FILE, _FORMAT, writer="save_parts", remedy="split the graph again")


def _static(value: Any) -> Any:
    """Lists as tuples."""
    return tuple(map(_static, value)) if isinstance(value, list) else value


def _read(folder: str | os.PathLike[str], number: int, name: str) -> np.ndarray:
    file = Path(folder) / f"part_{number}" / f"{name}.npy"
    if not file.exists():
        raise FileNotFoundError(f"{file} must exist, got no such file; split the graph again")
    return mapped_npy(file, "split the graph again")
