"""The tables of a graph that only GPU kernels read. `RelGraph.with_loop_tables` describes them.

Graphs are `Any` here: `RelGraph`, which calls these functions, lies above them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.rgnn.graphs.building.sorting import in_threads
from dejax.rgnn.graphs.packed import pack
from dejax.rgnn.graphs.segments import Segments

GROUPINGS = {
    "src": "by_sender",
    "dst": "by_receiver",
    "source_pair": "by_source_pair",
    "destination_pair": "by_destination_pair",
    "etype": "by_edge_type",
    "source_pair.node": "source_pair_by_node",
    "source_pair.etype": "source_pair_by_type",
    "destination_pair.node": "destination_pair_by_node",
    "destination_pair.etype": "destination_pair_by_type",
    "ntype": "by_node_type",
    "source_type": "edge_type_by_source",
}
"""For each map between spaces, by its name in the IR (`ir.inter.VIAS`), the attribute that groups rows by it."""

# Kernels that reduce over the first grouping read rows by the second map.
_LOOP_TABLES = (
    ("dst", "src"),
    ("dst", "source_pair"),
    ("dst", "destination_pair"),
    ("dst", "etype"),
    ("source_pair", "dst"),
    ("source_pair", "destination_pair"),
)
# Groupings with many segments, over which kernels reduce.
LOOPS = (
    "by_sender",
    "by_receiver",
    "by_source_pair",
    "by_destination_pair",
    "source_pair_by_node",
    "destination_pair_by_node",
)
# Groupings by destination, whose first rows alone have entries in a part of a divided graph.
_BY_DESTINATION = ("by_receiver", "destination_pair_by_node")
# Groupings by type whose entries are sorted by type and node, and the node of each entry.
_NEAR: tuple[tuple[str, Callable[[Any], Array]], ...] = (
    ("by_edge_type", lambda graph: graph.receivers),
    ("source_pair_by_type", lambda graph: graph.source_pair_by_node.index),
    ("destination_pair_by_type", lambda graph: graph.destination_pair_by_node.index),
)


def with_loop_tables(graph: Any, long_segment_chunk: int) -> Any:
    """The graph with `loop_tables` and `packed`; see `RelGraph.with_loop_tables`."""
    if graph.packed is not None:
        return graph
    made = on_device(with_packed(graph, loop_groupings(graph, long_segment_chunk)))
    with jax.ensure_compile_time_eval():
        return dataclasses.replace(made, loop_tables=loop_tables_of(made))


def loop_groupings(graph: Any, long_segment_chunk: int) -> dict[str, Segments]:
    """The groupings of a graph of numpy arrays, with `loop`, `near_tiles` and `near_splits`, by name."""
    first = {} if graph.num_destinations is None else dict.fromkeys(_BY_DESTINATION, graph.num_destinations)
    makers: dict[str, Callable[[], Segments]] = {
        name: partial(getattr(graph, name).with_loop, long_segment_chunk, first.get(name)) for name in LOOPS
    }
    makers |= {name: partial(getattr(graph, name).with_near_tiles, node(graph)) for name, node in _NEAR}
    groups: dict[str, Segments] = dict(zip(makers, in_threads([*makers.values()], graph.num_edges), strict=True))
    groups["by_node_type"] = graph.by_node_type
    if graph.edge_type_by_source is not None:
        groups["edge_type_by_source"] = graph.edge_type_by_source
    return groups


def with_packed(graph: Any, groups: dict[str, Segments]) -> Any:
    """The graph with these groupings, whose tables for kernels are in `packed`."""
    rest, packed = pack(groups)
    return dataclasses.replace(graph, packed=packed, **rest)


def loop_tables_of(graph: Any, xp: ModuleType = jnp) -> dict[str, Any]:
    """`loop_tables`, computed on the device that holds the graph, or with numpy for a graph of numpy arrays."""
    tables = {}
    for loop, via in _LOOP_TABLES:
        group, target = (graph.grouping(GROUPINGS[name]) for name in (loop, via))
        order = (group.loop or group).order
        if order is not None:
            tables[f"{loop}:{via}"] = target.index[xp.asarray(order)]
    counts = xp.append(graph.by_destination_pair.counts().astype(np.float32), np.float32(0))  # 0 for padding edges
    for loop in ("dst", "source_pair"):
        if f"{loop}:destination_pair" in tables:
            tables[f"{loop}:#destination_pair"] = counts[tables[f"{loop}:destination_pair"]]
    return tables


def on_device(graph: Any) -> Any:
    """The graph with jax arrays in place of numpy arrays, all moved in one call; an array in two tables is moved once.

    The jax arrays are concrete even if the graph is made while tracing.
    """
    unique = {id(leaf): leaf for leaf in jax.tree.leaves(graph)}
    with jax.ensure_compile_time_eval():
        moved = dict(zip(unique, jax.device_put(list(unique.values())), strict=True))
    return jax.tree.map(lambda leaf: moved[id(leaf)], graph)
