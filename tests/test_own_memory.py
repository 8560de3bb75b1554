"""What dejax makes of a caller's numpy arrays has memory of its own: a later write to the arrays changes nothing.

On a CPU `jax.device_put` and `jnp.asarray(array, dtype)` keep the memory of an array that begins at a multiple of 64
bytes.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
import pytest

from dejax import distributed, offload, rgnn
from dejax.host_gather import CachedTable, DeviceTable, HostTable, SplitTable
from dejax.host_gather.tables.table import LocalTable
from dejax.minibatch import FeatureStore, HeteroTopology, NegativePool, TrueEdges
from dejax.minibatch.topology._building import aligned

EDGE = ("a", "to", "a")
NODES, EDGES = 1000, 4096
RNG = np.random.default_rng(0)


def lying_well(values: Any, dtype: Any, shape: tuple[int, ...] | None = None) -> np.ndarray:
    array = aligned(np.shape(values) if shape is None else shape, dtype)
    array[...] = values
    return array


def inputs() -> dict[str, np.ndarray]:
    return {
        "rows": lying_well(RNG.standard_normal((NODES, 16)), np.float32),
        "words": lying_well(RNG.integers(0, 9, (NODES, 16)), np.uint32),
        "by_row": lying_well(RNG.random(NODES), np.float32),
        "by_column": lying_well(RNG.random(16), np.float32),
        "senders": lying_well(RNG.integers(0, NODES, EDGES), np.int32),
        "receivers": lying_well(np.sort(RNG.integers(0, NODES, EDGES)), np.int32),
        "starts": lying_well(np.linspace(0, EDGES, NODES + 1), np.int32),
        "types": lying_well(RNG.integers(0, 3, EDGES), np.int32),
        "kinds": lying_well(np.sort(RNG.integers(0, 3, NODES)), np.int32),
        "there": lying_well(True, np.bool_, (NODES,)),
        "valid": lying_well(RNG.random(EDGES) < 0.5, np.bool_),
        "weights": lying_well(RNG.random(EDGES), np.float32),
        "times": lying_well(RNG.integers(0, 9, EDGES), np.int32),
    }


def topology(x: dict[str, np.ndarray], on_host: bool, **options: str) -> HeteroTopology:
    given = {name: {EDGE: x[name]} for name in options}
    return HeteroTopology.from_edges({EDGE: (x["senders"], x["receivers"])}, {"a": NODES}, on_host=on_host, **given)


def graph(x: dict[str, np.ndarray]) -> Any:
    masks = {"node_mask": x["there"], "edge_mask": x["valid"]}
    ends = x["senders"], x["receivers"], x["types"]
    return rgnn.RelGraph.from_edges(*ends, num_nodes=NODES, node_type=x["kinds"], **masks)


def restored(x: dict[str, np.ndarray]) -> Any:
    state = offload.optimizer(optax.adam(1e-2)).init({"w": np.ones((NODES, 16), np.float32)})
    return offload.restore(
        state, jax.tree.map(lambda leaf: x["rows"] if leaf.ndim else np.zeros((), leaf.dtype), state)
    )


def on_disk(x: dict[str, np.ndarray]) -> np.ndarray:
    with offload.StateStore(tempfile.mkdtemp()) as store:
        array = store.put(x["rows"])
        x["rows"][...] = 0
        return np.asarray(array)


@functools.cache
def mesh() -> Any:
    return distributed.make_mesh(min(2, jax.device_count()))


MAKERS: dict[str, Callable[[dict[str, np.ndarray]], Any]] = {
    "HostTable": lambda x: HostTable.from_numpy(x["rows"]),
    "DeviceTable": lambda x: DeviceTable.from_numpy(x["words"]),
    "SplitTable": lambda x: SplitTable.from_numpy(x["words"], np.arange(7)),
    "CachedTable": lambda x: CachedTable.from_ids(HostTable.from_numpy(x["words"]), np.arange(7)),
    "ShardedTable": lambda x: distributed.ShardedTable.from_numpy(
        x["words"], mesh(), memory="device", hot=np.arange(5)
    ),
    "FeatureStore": lambda x: FeatureStore.from_arrays({"a": x["rows"], "b": x["words"]}, on_device={"b": True}),
    "row_scale": lambda x: FeatureStore().with_table("a", HostTable.zeros((NODES, 16)), row_scale=x["by_row"]),
    "column_scale": lambda x: FeatureStore().with_table("a", HostTable.zeros((NODES, 16)), column_scale=x["by_column"]),
    "topology": lambda x: topology(x, False),
    "topology with weights": lambda x: topology(x, False, weights=""),
    "topology in host memory": lambda x: topology(x, True, times=""),
    "lists": lambda x: HeteroTopology.from_csc({EDGE: (x["starts"], x["senders"])}, {"a": NODES}),
    "lists in host memory": lambda x: HeteroTopology.from_csc(
        {EDGE: (x["starts"], x["senders"])}, {"a": NODES}, on_host=True
    ),
    "RelGraph": graph,
    "NegativePool": lambda x: NegativePool.from_times(x["kinds"]),
    "TrueEdges": lambda x: TrueEdges.from_edges((x["senders"], x["receivers"])),
    "replicate": lambda x: distributed.replicate(x, mesh()),
    "share": lambda x: distributed.share({**x, "table": HostTable.from_numpy(x["rows"])}, mesh()),
    "offload.restore": restored,
    "StateStore.put": on_disk,
}


def values(made: Any) -> list[np.ndarray]:
    is_table = lambda leaf: isinstance(leaf, LocalTable)  # noqa: E731
    leaves = jax.tree.leaves(made, is_leaf=is_table)
    return [np.array(leaf.numpy() if is_table(leaf) else leaf) for leaf in leaves]


@pytest.mark.parametrize("name", MAKERS)
def test_a_later_write_to_the_callers_arrays_changes_nothing(name: str) -> None:
    given = inputs()
    expected = values(MAKERS[name]({key: array.copy() for key, array in given.items()}))
    made = MAKERS[name](given)
    for array in given.values():
        array[...] = 0
    for found, own in zip(values(made), expected, strict=True):
        np.testing.assert_array_equal(found, own)
