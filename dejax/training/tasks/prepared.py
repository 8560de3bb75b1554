"""The data of a run on mini-batches: the topology, the feature store and the training nodes of any `HeteroDataset`."""

from __future__ import annotations

import dataclasses

import numpy as np

from dejax.datasets import HeteroDataset
from dejax.datasets._hetero import ALWAYS, LINK_TASK, NODE_TASK
from dejax.minibatch import FeatureStore, HeteroTopology, hot_rows
from dejax.training.settings import Settings
from dejax.training.tasks.data import SPLITS, with_reverse

_Relation = tuple[str, str, str]
_Ids = dict[str, np.ndarray]
_SELF = "self"  # the name of self loops
_TASKS = (*NODE_TASK, *LINK_TASK)
_READ = ("node_times", "edge_times", "edge_weights")


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a run reads.

    Attributes:
        data: with reverse relations and, for rgat, self loops.
        topology: its edges, as they are sampled: by relation, or all in one relation; with their times and weights.
        edge_type: int32[edges], the relation of each edge where all are in one relation; else None.
        edge_types: the relations, self loops included.
        features: tables of the types that have features.
        targets: the types whose nodes are classified.
        num_classes: number of classes.
        splits: split -> type -> int32 ids.
        times: int[nodes] by target type, the times of nodes as seeds; None for data whose edges have no times.
    """

    data: HeteroDataset
    topology: HeteroTopology
    edge_type: np.ndarray | None
    edge_types: tuple[_Relation, ...]
    features: FeatureStore
    targets: tuple[str, ...]
    num_classes: int
    splits: dict[str, _Ids]
    times: _Ids | None

    def by_relation(self) -> HeteroTopology:
        """The edges by relation, in host memory, with self loops."""
        if self.edge_type is None:
            return self.topology
        edges = dict(self.data.edges)
        for relation in self.edge_types:
            if relation not in edges:
                loop = np.arange(self.data.num_nodes[relation[0]], dtype=np.int32)
                edges[relation] = (loop, loop)
        return HeteroTopology.from_edges(edges, self.data.num_nodes, on_host=True, keep_edge_ids=False)


def prepare(data: HeteroDataset, settings: Settings) -> Prepared:
    """Makes the topology and the feature store.

    Raises:
        ValueError: no training nodes, types whose numbers of classes differ, edges with times but training nodes
            without, or a field of the data set that the run would ignore: edge features, and with `full_batch` times
            and weights of edges.
        TypeError: times that are no integers.
    """
    if settings.full_batch:
        data.check_used("training on the whole graph (full_batch)", ("edges", "features", "node_times", *_TASKS))
    data.check_used("training on mini-batches", ("edges", "features", *_TASKS, *_READ))
    splits = {
        split: {kind: np.asarray(ids, np.int32) for kind, ids in data.splits.get(split, {}).items() if len(ids)}
        for split in SPLITS
    }
    targets = tuple(splits["train"])
    if not targets:
        raise ValueError(
            f"the data set must have labelled nodes to train on, got {data.name!r} without; choose one with training "
            "nodes"
        )
    classes = {data.num_classes[kind] for kind in targets}
    if len(classes) > 1:
        counts = ", ".join(f"{kind}: {data.num_classes[kind]}" for kind in targets)
        raise ValueError(
            f"all types with training nodes must have as many classes, got {counts}; leave out some splits"
        )
    if settings.reverse:
        data = with_reverse(data)
    times = _seed_times(data, targets) if data.edge_times else None
    edges = dict(data.edges)
    # RGAT has no root weight: a node sees its own value through a loop.
    loops = [(kind, _SELF, kind) for kind in data.num_nodes] if settings.model == "rgat" else []
    edge_type = None
    edge_types = (*edges, *loops)
    if settings.joint and not settings.full_batch:  # loops are added to the blocks
        sampled, edge_type = _in_one_relation(data)
    else:
        for kind, name, _ in loops:
            loop = np.arange(data.num_nodes[kind], dtype=np.int32)
            edges[kind, name, kind] = (loop, loop)
        sampled = dataclasses.replace(data, edges=edges, check=False)
    topology = HeteroTopology.from_dataset(
        sampled, on_host=settings.place != "device", keep_edge_ids=edge_type is not None
    )
    features = _features(data, settings, topology, splits["train"])
    return Prepared(data, topology, edge_type, edge_types, features, targets, classes.pop(), splits, times)


def only_sampled(data: HeteroDataset) -> bool:
    """Whether results come from samples alone: all edges of a node would be of any time, and of equal weight."""
    return bool(data.edge_times or data.edge_weights)


def _seed_times(data: HeteroDataset, targets: tuple[str, ...]) -> _Ids:
    """The times of the nodes of the target types."""
    found = {}
    for kind in targets:
        if kind not in data.node_times:
            raise ValueError(
                f"node_times must have the times of {kind!r}, whose nodes are classified, got none in {data.name!r}: "
                "its edges have times, and a node sees only edges up to its own time. To ignore the times: "
                f"dataclasses.replace(data, edge_times={{}}, check=False)"
            )
        found[kind] = np.asarray(data.node_times[kind])
        if found[kind].dtype.kind not in "iu":
            raise TypeError(f"node_times of {kind!r} must be integers, got {found[kind].dtype}; round them to a unit")
    return found


def _in_one_relation(data: HeteroDataset) -> tuple[HeteroDataset, np.ndarray]:
    """The data set with all edges in one relation, and the relation of each."""
    if len(data.num_nodes) != 1:
        raise ValueError(
            f"joint fan-outs must be for a graph with one node type, got {', '.join(data.num_nodes)}; leave out --joint"
        )
    kind = next(iter(data.num_nodes))
    senders, receivers = (
        np.concatenate([np.zeros(0, np.int32), *(np.asarray(pair[side]) for pair in data.edges.values())])
        for side in (0, 1)
    )
    sizes = {relation: len(pair[0]) for relation, pair in data.edges.items()}
    relation = (kind, "edge", kind)

    def joined(of_edges: dict[_Relation, np.ndarray], otherwise: int) -> dict[_Relation, np.ndarray]:
        """The values of all edges; those of relations without values get a common one."""
        parts = [of_edges.get(some, np.full(size, otherwise)) for some, size in sizes.items()]
        return {relation: np.concatenate(parts)} if of_edges else {}

    times, weights = joined(data.edge_times, ALWAYS), joined(data.edge_weights, 1)
    joint = dataclasses.replace(
        data,
        edges={relation: (senders, receivers)},
        edge_times=times,
        edge_weights=weights,
        **{name: type(getattr(data, name))() for name in LINK_TASK},  # they name relations
        check=False,
    )
    return joint, np.repeat(np.arange(len(sizes), dtype=np.int32), list(sizes.values()))


def _features(data: HeteroDataset, settings: Settings, topology: HeteroTopology, train: _Ids) -> FeatureStore:
    arrays = {kind: array for kind, array in data.features.items() if data.num_nodes[kind]}
    dtype = settings.feature_dtype
    scale = "row" if dtype in ("int8", "float8_e4m3fn") else None
    if settings.place != "split":
        return FeatureStore.from_arrays(arrays, dtype=dtype, scale=scale, on_device=settings.place == "device")
    visits = topology.expected_visits(train, settings.fan_outs)
    row_bytes = {
        kind: array.shape[1] * np.dtype("uint8" if scale else dtype or array.dtype).itemsize
        for kind, array in arrays.items()
    }
    hot = hot_rows({kind: visits[kind] for kind in arrays}, row_bytes, device_bytes=settings.device_bytes)
    return FeatureStore.from_arrays(arrays, dtype=dtype, scale=scale, on_device=hot)
