"""The data of a run on mini-batches: any `HeteroDataset`, its topology, feature store and training nodes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dejax import datasets
from dejax.datasets import EntityDataset, HeteroDataset
from dejax.datasets._hetero import ALWAYS, LINK_TASK, NODE_TASK
from dejax.minibatch import FeatureStore, HeteroTopology, hot_rows
from dejax.training.sampled.settings import SampledSettings

SPLITS = ("train", "valid", "test")
IGB = tuple(f"igb-{size}" for size in ("tiny", "small", "medium", "large", "full"))
SYNTHETIC = "synthetic-igb"
RDF = ("aifb", "mutag", "bgs", "am")
NAMES = ("stdlib", *RDF, "ogbn-mag", *IGB, SYNTHETIC)
"""The names that `load` knows. Any folder of `HeteroDataset.save` may be given in place of a name."""
_META = "dataset.json"
Relation = tuple[str, str, str]
NODE = "node"
_SELF = "self"  # the name of self loops
_TASKS = (*NODE_TASK, *LINK_TASK)
_READ = ("node_times", "edge_times", "edge_weights")


def load(name: str | None, folder: str | None = None, *, typed_nodes: bool = False) -> HeteroDataset:
    """A data set with nodes to classify.

    | name | what | files |
    | --- | --- | --- |
    | stdlib | code graph of the running Python's standard library | none |
    | aifb, mutag, bgs, am | RDF graphs of the R-GCN paper | `folder`, $DEJAX_DATA, or one download |
    | ogbn-mag | papers, authors, institutions, fields | `folder` or $DEJAX_DATA |
    | igb-tiny, ... igb-full | the folders of IGB heterogeneous | `folder` |
    | synthetic-igb | a random graph of IGB's shape, with random labels: for the time of a step | none |
    | none | a folder that `HeteroDataset.save` wrote | `folder` |

    Args:
        name: one of `NAMES`; None for a folder of `HeteroDataset.save`, or for stdlib if no folder is given.
        folder: the folder of its files.
        typed_nodes: stdlib and RDF graphs: whether nodes keep their types. Then a relation that joins several types
            becomes one for each pair of types, so that there are more of them, and compilation takes longer.

    Raises:
        ValueError: an unknown name.
        FileNotFoundError: the folder lacks a file.
    """
    if name is None and folder is not None and (Path(folder) / _META).is_file():
        return HeteroDataset.open(folder, check=True)
    key = (name or "stdlib").lower()
    if key == "stdlib" or key in RDF:
        entity = datasets.load(key, folder)
        return HeteroDataset.from_entity(entity) if typed_nodes else one_type(entity)
    if key == "ogbn-mag":
        return datasets.load_mag_hetero(folder)
    if key in IGB:
        return datasets.load_igb(folder, size=key.removeprefix("igb-"))
    if key == SYNTHETIC:
        return datasets.synthetic_igb(1e-4, feature_width=64, feature_dtype="float32")
    raise ValueError(
        f"--dataset must be one of {', '.join(NAMES)}, got {name!r}; for a saved HeteroDataset give --data"
    )


def one_type(data: EntityDataset) -> HeteroDataset:
    """The same graph with one node type, "node", and the relations as they are."""
    order = np.argsort(data.edge_type, kind="stable")
    bounds = np.searchsorted(data.edge_type[order], np.arange(data.num_edge_types + 1))
    edges = {
        (NODE, name, NODE): (data.senders[order[start:stop]], data.receivers[order[start:stop]])
        for name, start, stop in zip(data.edge_type_names, bounds[:-1], bounds[1:], strict=True)
    }
    return HeteroDataset(
        name=data.name,
        num_nodes={NODE: data.num_nodes},
        edges=edges,
        features={} if data.features is None else {NODE: data.features},
        labels={NODE: data.labels},
        num_classes={NODE: data.num_classes},
        splits={split: {NODE: getattr(data, f"{split}_nodes")} for split in SPLITS},
        description=data.description,
        check=False,
    )


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """What a run reads.

    Attributes:
        data: with reverse relations and, for rgat, self loops.
        topology: its edges, as they are sampled: by relation, or all in one relation; with their times and weights.
        edge_type: int32[edges], the relation of each edge where all are in one relation; else None.
        edge_types: the relations, self loops included.
        features: tables of the types that have features, and embeddings of the others.
        targets: the types whose nodes are classified.
        num_classes: number of classes.
        splits: split -> type -> int32 ids.
        times: int[nodes] by target type, the times of nodes as seeds; None for data whose edges have no times.
        widths: the width of the features of each type that has some.
    """

    data: HeteroDataset
    topology: HeteroTopology
    edge_type: np.ndarray | None
    edge_types: tuple[tuple[str, str, str], ...]
    features: FeatureStore
    targets: tuple[str, ...]
    num_classes: int
    splits: dict[str, dict[str, np.ndarray]]
    times: dict[str, np.ndarray] | None
    widths: dict[str, int]

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


def prepare(data: HeteroDataset, settings: SampledSettings) -> Prepared:
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
        raise ValueError(f"dataset {data.name!r} has no labelled nodes to train on; choose one with training nodes")
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
    loops = [(kind, _SELF, kind) for kind in data.num_nodes] if settings.layer == "rgat" else []
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
    widths = {kind: data.features[kind].shape[1] for kind in features.types}
    return Prepared(data, topology, edge_type, edge_types, features, targets, classes.pop(), splits, times, widths)


def only_sampled(data: HeteroDataset) -> bool:
    """Whether results come from samples alone: all edges of a node would be of any time, and of equal weight."""
    return bool(data.edge_times or data.edge_weights)


def _seed_times(data: HeteroDataset, targets: tuple[str, ...]) -> dict[str, np.ndarray]:
    """The times of the nodes of the target types."""
    found = {}
    for kind in targets:
        if kind not in data.node_times:
            raise ValueError(
                f"dataset {data.name!r} must have node_times of {kind!r}, whose nodes are classified: its edges have "
                "times, and a node sees those up to its own time; to ignore the times: "
                "dataclasses.replace(data, edge_times={}, check=False)"
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

    def joined(of_edges: dict[Relation, np.ndarray], otherwise: int) -> dict[Relation, np.ndarray]:
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


def with_reverse(data: HeteroDataset) -> HeteroDataset:
    """With reverse relations, unless it has them; `cites` of IGB becomes symmetric with self loops, as in MLPerf."""
    if all(_reversed(relation) & data.edges.keys() for relation in data.edges):
        return data
    symmetric = ["cites"] if data.name.startswith(("igb", SYNTHETIC)) else []
    return data.with_reverse(symmetric=symmetric)


def _reversed(relation: Relation) -> set[Relation]:
    """What the reverse of a relation may be called."""
    source, name, destination = relation
    return {(destination, f"rev_{name}", source), (destination, name.removeprefix("rev_"), source)} - {relation}


def embeddings_of(prepared: Prepared, settings: SampledSettings, seed: int) -> FeatureStore:
    """New embeddings in host memory, for the types without features."""
    store = FeatureStore()
    for number, (kind, count) in enumerate(prepared.data.num_nodes.items()):
        if kind not in prepared.features:
            store = store.embedding(kind, count, settings.hidden, seed=(seed << 8) + number)
    return store


def _features(
    data: HeteroDataset, settings: SampledSettings, topology: HeteroTopology, train: dict[str, np.ndarray]
) -> FeatureStore:
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
