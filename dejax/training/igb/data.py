"""Graph, features and labels of a run: IGB's folder, or a random graph with IGB's counts at any scale."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax.datasets import IGBShape, fill_rows, load_igb, random_rows_on_device
from dejax.datasets._hetero import NODE_TASK
from dejax.host_gather import DeviceTable, HostTable, SplitTable
from dejax.minibatch import FeatureStore, HeteroTopology, hot_rows, random_topology
from dejax.minibatch._formats import table_dtype
from dejax.training.igb.model import SEED_TYPE

SYMMETRIC = "cites"
NUM_CLASSES = 2983
# Of the device's memory, for the first edge of each receiver and relation.
_STARTS_SHARE = 1 / 16
_TRAIN_SHARE, _VALID_SHARE = 94_605_581 / 269_346_174, 0.1


@dataclass(frozen=True, slots=True, eq=False)
class IGBData:
    """What a run trains on.

    Attributes:
        name: for reports.
        topology: all relations and their reverses, in host memory.
        features: a table for each node type.
        labels: int32[papers] on the device, -1 for none.
        num_classes: number of classes.
        train: int[training papers].
        valid: int[validation papers].
    """

    name: str
    topology: HeteroTopology
    features: FeatureStore
    labels: Array
    num_classes: int
    train: np.ndarray
    valid: np.ndarray

    @property
    def width(self) -> int:
        """Elements of a row of features."""
        return next(iter(self.features.types.values())).table.shape[1]


def relation_counts(shape: IGBShape) -> dict[tuple[str, str, str], int]:
    """Edges of each relation as MLPerf takes them: `cites` symmetric with self loops, and reverses of the others."""
    found = {}
    for (source, name, target), count in shape.num_edges.items():
        if name == SYMMETRIC:
            found[source, name, target] = 2 * count + shape.num_nodes[source]
        else:
            found[source, name, target] = count
            found[target, f"rev_{name}", source] = count
    return found


def random_data(
    scale: float,
    *,
    width: int = 1024,
    dtype: Any = "float8_e4m3fn",
    device_bytes: int = 0,
    batch: int = 1024,
    fan_outs: Sequence[int] = (15, 10, 5),
    seed: int = 0,
    progress: bool | None = None,
) -> IGBData:
    """A random graph with IGB's counts times `scale`, random features and labels: for measurements of speed.

    Args:
        scale: 1 for the full graph.
        width: elements of a row.
        dtype: of the tables.
        device_bytes: of rows that lie on the device: those that some sampled batches visit most.
        batch, fan_outs: of these batches.
        seed: of everything random.
        progress: draw bars; None draws on a terminal only.
    """
    shape = IGBShape.of(scale)
    topology = random_topology(shape.num_nodes, relation_counts(shape), seed=seed, progress=progress)
    topology = _with_starts(topology)
    papers = shape.num_nodes[SEED_TYPE]
    train = np.arange(max(1, round(papers * _TRAIN_SHARE)), dtype=np.int32)
    valid = np.arange(len(train), len(train) + max(1, round(papers * _VALID_SHARE)), dtype=np.int32)
    found = table_dtype("random_data", dtype)
    hot: dict[str, np.ndarray] = {}
    if device_bytes:
        visits = topology.expected_visits({SEED_TYPE: train}, fan_outs, batch_size=batch)
        row_bytes = dict.fromkeys(visits, width * found.itemsize)
        hot = _rows_for_the_device(visits, row_bytes, device_bytes)
    store = FeatureStore()
    for number, (name, count) in enumerate(shape.num_nodes.items()):
        ids = hot.get(name, np.zeros(0, np.int64))
        host = HostTable.empty((count - len(ids), width), found)
        fill_rows(host, seed * 64 + number, label=name, progress=progress)
        table: HostTable | SplitTable = host
        if len(ids):
            rows = random_rows_on_device(len(ids), width, found, seed * 64 + number)
            table = SplitTable.from_parts(host, DeviceTable.from_array(rows, found), ids)
        store = store.with_table(name, table)
    labels = jax.random.randint(jax.random.key(seed), (papers,), 0, NUM_CLASSES, jnp.int32)
    return IGBData(f"random graph, {scale:g} of IGB", topology, store, labels, NUM_CLASSES, train, valid)


def folder_data(
    folder: str | os.PathLike[str],
    *,
    size: str | None = None,
    num_classes: int = NUM_CLASSES,
    dtype: Any = "float8_e4m3fn",
    device_bytes: int = 0,
    batch: int = 1024,
    fan_outs: Sequence[int] = (15, 10, 5),
    cache: str | os.PathLike[str] | None = None,
    check: bool = True,
) -> IGBData:
    """IGB's heterogeneous graph from its folder, with the relations as MLPerf takes them.

    Args:
        folder, size, num_classes, check: as in `dejax.datasets.load_igb`.
        dtype: of the tables; float8 and int8 rows get a scale each.
        device_bytes, batch, fan_outs: as in `random_data`.
        cache: a folder for the sorted lists; a later run opens them instead of sorting again.
    """
    data = load_igb(folder, size=size, num_classes=num_classes, check=check)
    data.check_used("training on IGB", ("edges", "features", *NODE_TASK))
    prepared = data.with_reverse(symmetric=[SYMMETRIC])
    if cache is not None and os.path.exists(os.path.join(cache, "topology.json")):
        topology = HeteroTopology.load(cache)
    else:
        topology = HeteroTopology.from_edges(
            prepared.edges, prepared.num_nodes, keep_edge_ids=False, on_host=True, folder=cache
        )
    topology = _with_starts(topology)
    found = table_dtype("folder_data", dtype)
    train = data.splits["train"][SEED_TYPE].astype(np.int32)
    on_device: Any = False
    if device_bytes:
        visits = topology.expected_visits({SEED_TYPE: train}, fan_outs, batch_size=batch)
        visits = {name: visits[name] for name in data.features}
        row_bytes = {name: rows.shape[1] * found.itemsize for name, rows in data.features.items()}
        on_device = _rows_for_the_device(visits, row_bytes, device_bytes)
    store = FeatureStore.from_arrays(
        data.features, dtype=found, scale="row" if found.itemsize == 1 else None, on_device=on_device
    )
    store.check_counts(topology.num_nodes)
    valid = data.splits["valid"][SEED_TYPE].astype(np.int32)
    labels = jnp.asarray(data.labels[SEED_TYPE])
    return IGBData(data.name, topology, store, labels, num_classes, train, valid)


def _with_starts(topology: HeteroTopology) -> HeteroTopology:
    """The topology with the first edge of each receiver on the device, if these numbers take little of its memory."""
    memory = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    fits = memory is None or topology.starts_nbytes <= _STARTS_SHARE * memory
    return topology.with_starts_on_device() if fits else topology


def _rows_for_the_device(
    visits: dict[str, np.ndarray], row_bytes: dict[str, int], device_bytes: int
) -> dict[str, np.ndarray]:
    """The rows that batches read most, then further ones while there is room: those need no host memory then."""
    return hot_rows({name: counts + 1 for name, counts in visits.items()}, row_bytes, device_bytes)
