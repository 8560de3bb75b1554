"""`HeteroDataset`: a graph with types of nodes and relations, as numpy arrays or memory maps by type."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dejax.datasets._dataset import UNLABELLED, EntityDataset
from dejax.datasets.columns import Column
from dejax.datasets.files._hetero_files import open_fields, save_fields
from dejax.datasets.tasks.task import Task

Relation = tuple[str, str, str]
"""(source type, name, destination type)."""
Ends = tuple[np.ndarray, np.ndarray]
"""The senders and the receivers of a relation's edges, numbered within their types."""

SPLITS = ("train", "valid", "test")
_CHUNK = 1 << 24  # elements at once, for memory maps
ALWAYS = -(2**31)  # the time of what was always known
_EDGES = ("edges", "valid_edges", "test_edges")
_BY_EDGE = ("edge_times", "edge_features", "edge_weights")
# Nothing that a model of `features` and `edges` would have to read: `features` encodes the columns that are no later
# than their rows, `edge_times` and `node_times` say from when on rows are known.
DESCRIPTIVE = ("name", "num_nodes", "node_names", "description", "left_out")
OF_TABLES = ("columns", "keys", "known_from", "tasks", "time_unit")
NODE_TASK = ("labels", "num_classes", "splits")
LINK_TASK = ("valid_edges", "test_edges", "target_relations")


@dataclass(frozen=True, eq=False)
class HeteroDataset:
    """A heterogeneous graph with its tasks, as numpy arrays or memory maps by node type and relation.

    Nodes are numbered within their type. Memory maps allow graphs that are larger than memory; nothing is on a device.
    Edges go from senders to receivers, as messages do; `with_reverse` adds the other direction. Only the first four
    attributes are needed for node classification without features.

    Attributes:
        name: name of the data set.
        num_nodes: number of nodes of each type.
        edges: for each (source type, name, destination type) the pair (senders, receivers), int[edges] each: the edges
            that messages may use. In a link prediction task these are the training edges.
        features: for some node types [nodes, d]; types without features are missing (learn an embedding).
        labels: for some node types int[nodes], the class of each node, -1 for none.
        num_classes: number of classes for each type in `labels`.
        splits: for node classification: for each of "train", "valid" and "test" a dict from node type to int[nodes of
            the split].
        valid_edges: for link prediction: edges to choose settings on, in the form of `edges`.
        test_edges: for link prediction: edges to report results on, in the form of `edges`.
        target_relations: for link prediction: the relations to predict.
        node_times: for some node types int or float [nodes]: when each node came to be, its time as a seed.
        edge_times: for some relations int or float [edges]: from when on each edge is known. Edges of other relations
            are always known.
        edge_features: for some relations [edges, ...].
        edge_weights: for some relations float[edges], not negative.
        node_names: for some node types a name for each node.
        description: a few sentences about the content, the source, and what was left out.
        left_out: what a reader left out, such as edges to rows that do not exist, with counts.
        columns: for data from tables: for each table a dict from column name to `Column`, for encoders inside of a
            model.
        keys: for data from tables: the primary keys of each table that has one, [nodes]; without one, where rows
            were left out, the numbers that the others had.
        known_from: for some node types int or float [nodes]: from when on each row is known, which is its own time, or
            the time of the latest row that it refers to. Rows of other types are always known.
        tasks: for data from tables: what to predict, a `Task` by name.
        time_unit: the unit of all times: "s" for seconds since 1970; "" for numbers in a unit of your own.
        check: whether all ids are compared with the counts, for which all edges are read once. Without it only shapes
            and dtypes are checked.

    >>> data = HeteroDataset("tiny", {"a": 2, "b": 3}, {("b", "to", "a"): (np.array([0, 2]), np.array([1, 1]))})
    >>> data
    HeteroDataset('tiny', nodes={'a': 2, 'b': 3}, edges=2, relations=1)
    """

    name: str
    num_nodes: dict[str, int]
    edges: dict[Relation, Ends]
    features: dict[str, np.ndarray] = field(default_factory=dict)
    labels: dict[str, np.ndarray] = field(default_factory=dict)
    num_classes: dict[str, int] = field(default_factory=dict)
    splits: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    valid_edges: dict[Relation, Ends] = field(default_factory=dict)
    test_edges: dict[Relation, Ends] = field(default_factory=dict)
    target_relations: tuple[Relation, ...] = ()
    node_times: dict[str, np.ndarray] = field(default_factory=dict)
    edge_times: dict[Relation, np.ndarray] = field(default_factory=dict)
    edge_features: dict[Relation, np.ndarray] = field(default_factory=dict)
    edge_weights: dict[Relation, np.ndarray] = field(default_factory=dict)
    node_names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    description: str = ""
    left_out: dict[str, int] = field(default_factory=dict)
    columns: dict[str, dict[str, Column]] = field(default_factory=dict)
    keys: dict[str, np.ndarray] = field(default_factory=dict)
    known_from: dict[str, np.ndarray] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    time_unit: str = ""
    check: dataclasses.InitVar[bool] = True

    def __post_init__(self, check: bool) -> None:
        for kind, count in self.num_nodes.items():
            if int(count) != count or count < 0:
                raise ValueError(f"num_nodes must be counts, got {count!r} for the type {kind!r}")
        for name in _EDGES:
            ends = {relation: _as_ends(name, relation, given) for relation, given in getattr(self, name).items()}
            object.__setattr__(self, name, ends)
            for relation, pair in ends.items():
                self._check_relation(name, relation, pair, check)
        for name in ("features", "labels", "node_times", "node_names", "keys", "known_from"):
            for kind, values in getattr(self, name).items():
                self._check_type(name, kind)
                if len(values) != self.num_nodes[kind]:
                    raise ValueError(
                        f"{name} must have an entry for each of the {self.num_nodes[kind]} nodes of type {kind!r}, "
                        f"got {len(values)}"
                    )
        for name in _BY_EDGE:
            for relation, values in getattr(self, name).items():
                if relation not in self.edges or len(values) != len(self.edges[relation][0]):
                    raise ValueError(
                        f"{name} must be given for relations of `edges`, with an entry for each edge, got {relation} "
                        f"with {len(values)} entries"
                    )
        for relation in (*self.target_relations, *self.valid_edges, *self.test_edges):
            if relation not in self.edges:
                raise ValueError(
                    "edges must have every relation of target_relations, valid_edges and test_edges, got none of "
                    f"{relation}; give empty lists where a relation has no edges"
                )
        for kind, columns in self.columns.items():
            self._check_type("columns", kind)
            for column, found in columns.items():
                if len(found) != self.num_nodes[kind]:
                    raise ValueError(
                        f"columns must have a value for each of the {self.num_nodes[kind]} rows of {kind!r}, got "
                        f"{len(found)} of {column!r}"
                    )
        for task in self.tasks.values():
            for kind in filter(None, (task.entity, task.target)):
                self._check_type(f"the task {task.name!r}", kind)
        self._check_labels(check)

    def _check_type(self, name: str, kind: str) -> None:
        if kind not in self.num_nodes:
            raise ValueError(
                f"{name} must name types of num_nodes, {', '.join(map(repr, self.num_nodes))}; got {kind!r}"
            )

    def _check_relation(self, name: str, relation: Relation, ends: Ends, check: bool) -> None:
        for kind, nodes, side in ((relation[0], ends[0], "senders"), (relation[2], ends[1], "receivers")):
            self._check_type(f"{name} of {relation}", kind)
            if check:
                _check_range(f"{side} of {relation}", nodes, self.num_nodes[kind], kind)

    def _check_labels(self, check: bool) -> None:
        for kind, labels in self.labels.items():
            if kind not in self.num_classes:
                raise ValueError(
                    f"num_classes must have the number of classes of each type that has labels, got none for {kind!r}"
                )
            if check:
                _check_range(f"labels of {kind!r}", labels, self.num_classes[kind], "class", low=UNLABELLED)
        for split, by_type in self.splits.items():
            if split not in SPLITS:
                raise ValueError(f"splits must be named {', '.join(SPLITS)}, got {split!r}")
            for kind, nodes in by_type.items():
                if kind not in self.labels:
                    raise ValueError(
                        f"splits must name types that have labels, got {kind!r} in {split!r}; give `labels` for this "
                        "type, or leave it out"
                    )
                if not check:
                    continue
                _check_range(f"the split {split!r} of {kind!r}", nodes, self.num_nodes[kind], kind)
                unlabelled = np.flatnonzero(np.asarray(self.labels[kind][nodes]) == UNLABELLED)
                if unlabelled.size:
                    node = nodes[unlabelled[0]]
                    raise ValueError(
                        f"nodes of splits must have labels, got node {node} of {kind!r} in {split!r} without one "
                        "(-1); leave it out"
                    )

    # -------------------------------------------------------------------------------------------- looking

    @property
    def relations(self) -> tuple[Relation, ...]:
        """The relations, as (source type, name, destination type)."""
        return tuple(self.edges)

    @property
    def num_edges(self) -> dict[Relation, int]:
        """Number of edges of each relation."""
        return {relation: len(ends[0]) for relation, ends in self.edges.items()}

    def triples(self, split: str = "train") -> np.ndarray:
        """The edges of a split of the link prediction task as triples, for `dejax.minibatch.link_ranks`.

        Args:
            split: "train", "valid" or "test".

        Returns:
            int64[n, 3], rows of (head, relation, tail): the sender, the number of the relation in `target_relations`,
            and the receiver.

        Raises:
            ValueError: the split is unknown.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        edges = {"train": self.edges, "valid": self.valid_edges, "test": self.test_edges}[split]
        parts = [
            np.stack([edges[relation][0], np.full(len(edges[relation][0]), number), edges[relation][1]], axis=1)
            for number, relation in enumerate(self.target_relations)
            if relation in edges
        ]
        return np.concatenate([np.zeros((0, 3), np.int64), *parts]).astype(np.int64)

    def check_used(self, what: str, used: Collection[str]) -> None:
        """Raises an error if the data set has fields that its reader ignores; ignored times would leak the future.

        Args:
            what: name of the reader, for the message.
            used: the fields that the reader uses, or ignores on purpose.

        Raises:
            ValueError: another field is not empty.
        """
        for found in dataclasses.fields(self):
            values = getattr(self, found.name)
            if found.name not in (*used, *DESCRIPTIVE, *OF_TABLES) and values:
                raise ValueError(
                    f"{what} must get a data set without {found.name}, which it does not read, got some of "
                    f"{next(iter(values))!r} in {self.name!r}; to ignore them: "
                    f"dataclasses.replace(data, {found.name}={{}}, check=False)"
                )

    def __repr__(self) -> str:
        return (
            f"HeteroDataset({self.name!r}, nodes={self.num_nodes}, edges={sum(self.num_edges.values())}, "
            f"relations={len(self.edges)})"
        )

    def summary(self) -> str:
        """A text table of the numbers of nodes and edges, and of the tasks."""
        lines = [f"{self.name}: {sum(self.num_nodes.values()):,} nodes, {sum(self.num_edges.values()):,} edges"]
        for kind, count in self.num_nodes.items():
            rows = self.features.get(kind)
            number = len(self.columns.get(kind, ()))
            width = f"{number} column{'s' * (number != 1)}" if number else "no features"
            if rows is not None:
                width = f"{' x '.join(map(str, rows.shape[1:]))} {rows.dtype}"
            task = f", {self.num_classes[kind]} classes" if kind in self.labels else ""
            lines.append(f"{count:>15,}  {kind}: {width}{task}")
        lines += [f"{count:>15,}  {' -> '.join(relation)}" for relation, count in self.num_edges.items()]
        for split in SPLITS:
            for kind, nodes in self.splits.get(split, {}).items():
                lines.append(f"{len(nodes):>15,}  {split} nodes of {kind}")
        for name in _EDGES[1:]:
            if found := getattr(self, name):
                lines.append(f"{sum(len(ends[0]) for ends in found.values()):>15,}  {name.replace('_', ' ')}")
        lines += [f"{count:>15,}  left out: {what}" for what, count in self.left_out.items()]
        for table, columns in self.columns.items():
            lines += [f"  {table}.{column}: {found.summary()}" for column, found in columns.items()]
        lines += [task.summary() for task in self.tasks.values()]
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------------- other graphs

    def with_task(self, task: Task) -> HeteroDataset:
        """The data set with an additional task. A task of the same name is replaced."""
        return dataclasses.replace(self, tasks={**self.tasks, task.name: task}, check=False)

    def with_reverse(self, *, symmetric: Sequence[str] = (), prefix: str = "rev_") -> HeteroDataset:
        """The data set with a reverse relation for each relation. The arrays are shared, not copied.

        Args:
            symmetric: names of relations within one node type that get their reverse edges in the same relation, and
                one self loop at each node in place of their own self loops, as MLPerf prepares `cites` of IGB. These
                edge lists are made anew. A reverse edge has the time and weight of its edge; self loops are always
                known and have weight 1.
            prefix: prefix of the names of reverse relations.

        Raises:
            ValueError: a symmetric relation does not exist, connects two node types, or has edge features (which self
                loops would lack); or the name of a reverse relation is taken.
        """
        edges = dict(self.edges)
        by_edge: dict[str, Any] = {name: dict(getattr(self, name)) for name in _BY_EDGE}
        for name in symmetric:
            found = [relation for relation in edges if relation[1] == name]
            if not found or any(relation[0] != relation[2] for relation in found):
                raise ValueError(
                    f"with_reverse: `symmetric` must name relations between nodes of one type, got {name!r}"
                )
            for relation in found:
                if relation in self.edge_features:
                    raise ValueError(
                        f"with_reverse: `symmetric` must name relations without edge_features, got {name!r}"
                    )
                count, kept = self.num_nodes[relation[0]], np.flatnonzero(np.not_equal(*edges[relation]))
                edges[relation] = _symmetric(edges[relation], kept, count)
                for of_loops, values in ((_always, by_edge["edge_times"]), (np.ones_like, by_edge["edge_weights"])):
                    if relation in values:
                        own = np.asarray(values[relation])[kept]
                        values[relation] = np.concatenate([own, own, of_loops(np.empty(count, own.dtype))])
        for (source, name, destination), (senders, receivers) in self.edges.items():
            if name in symmetric:
                continue
            reverse = (destination, f"{prefix}{name}", source)
            if reverse in edges:
                raise ValueError(
                    f"with_reverse: `prefix` must give names of relations that are new, got {prefix!r} and with it "
                    f"{reverse}, which exists already; choose another prefix"
                )
            edges[reverse] = (receivers, senders)
            for values in by_edge.values():
                if (source, name, destination) in values:
                    values[reverse] = values[source, name, destination]
        return dataclasses.replace(self, edges=edges, check=False, **by_edge)

    @classmethod
    def from_entity(cls, data: EntityDataset) -> HeteroDataset:
        """Converts an `EntityDataset`. Nodes are renumbered within their type, and keep their order.

        A relation that connects several node types becomes a relation for each pair of types. Node types whose features
        are all zero get no features.
        """
        kinds = data.node_type_names
        number = np.empty(data.num_nodes, np.int32)
        members = [np.flatnonzero(data.node_type == k) for k in range(len(kinds))]
        for nodes in members:
            number[nodes] = np.arange(len(nodes), dtype=np.int32)
        edges: dict[Relation, Ends] = {}
        triple = np.stack([data.node_type[data.senders], data.edge_type, data.node_type[data.receivers]], axis=1)
        unique, inverse = np.unique(triple, axis=0, return_inverse=True)
        order = np.argsort(inverse.reshape(-1), kind="stable")
        bounds = np.searchsorted(inverse.reshape(-1)[order], np.arange(len(unique) + 1))
        for (source, name, destination), start, stop in zip(unique.tolist(), bounds[:-1], bounds[1:], strict=True):
            own = order[start:stop]
            relation = (kinds[source], data.edge_type_names[name], kinds[destination])
            edges[relation] = (number[data.senders[own]], number[data.receivers[own]])
        features, labels, classes = {}, {}, {}
        splits: dict[str, dict[str, np.ndarray]] = {name: {} for name in SPLITS}
        for k, (kind, nodes) in enumerate(zip(kinds, members, strict=True)):
            rows = None if data.features is None else data.features[nodes]
            if rows is not None and rows.any():
                features[kind] = rows
            if (data.labels[nodes] != UNLABELLED).any():
                labels[kind], classes[kind] = data.labels[nodes], data.num_classes
                for split in SPLITS:
                    chosen = getattr(data, f"{split}_nodes")
                    splits[split][kind] = number[chosen[data.node_type[chosen] == k]]
        return cls(
            name=data.name,
            num_nodes={kind: len(nodes) for kind, nodes in zip(kinds, members, strict=True)},
            edges=edges,
            features=features,
            labels=labels,
            num_classes=classes,
            splits=splits if labels else {},
            description=data.description,
            check=False,
        )

    # -------------------------------------------------------------------------------------------- on disk

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes a folder of `.npy` files, for `open`. It replaces a folder that `save` wrote, and no other folder.

        Raises:
            FileExistsError: the folder exists and is no saved data set.
        """
        save_fields({f.name: getattr(self, f.name) for f in dataclasses.fields(self)}, Path(folder))

    @classmethod
    def open(cls, folder: str | os.PathLike[str], *, check: bool = False) -> HeteroDataset:
        """Opens a folder that `save` wrote. The arrays are memory maps.

        Args:
            folder: the folder.
            check: whether all ids are compared with the counts, for which all edges are read.

        Raises:
            FileNotFoundError: the folder or one of its files is missing.
            ValueError: the folder has another format, or a file is too short.
        """
        return cls(**open_fields(Path(folder)), check=check)


def _as_ends(name: str, relation: Any, given: Any) -> Ends:
    if not (isinstance(relation, tuple) and len(relation) == 3 and all(isinstance(part, str) for part in relation)):
        raise ValueError(f"{name} must be named (source type, name, destination type), got {relation!r}")
    if len(given) != 2:
        raise ValueError(f"{name} of {relation} must be (senders, receivers), got {len(given)} arrays")
    ends = []
    for side, nodes in zip(("senders", "receivers"), given, strict=True):
        array = nodes if isinstance(nodes, np.ndarray) else np.asarray(nodes)
        if array.size == 0 and array.dtype.kind == "f":
            array = array.astype(np.int32)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise ValueError(
                f"{side} of {relation} must be integers [edges], got shape {list(array.shape)} of {array.dtype}"
            )
        ends.append(array)
    if len(ends[0]) != len(ends[1]):
        raise ValueError(
            f"{name} of {relation} must have as many receivers as senders, got {len(ends[0])} senders and "
            f"{len(ends[1])} receivers"
        )
    return ends[0], ends[1]


def _check_range(what: str, values: np.ndarray, count: int, kind: str, low: int = 0) -> None:
    for start in range(0, len(values), _CHUNK):
        part = np.asarray(values[start : start + _CHUNK])
        if part.size and (part.min() < low or part.max() >= count):
            bad = part[(part < low) | (part >= count)][0]
            raise ValueError(f"{what} must be from {low} to {count - 1}, the numbers of {kind!r}, got {bad}")


def _symmetric(ends: Ends, kept: np.ndarray, count: int) -> Ends:
    dtype = np.int32 if count < 2**31 else np.int64
    senders, receivers = (np.asarray(nodes)[kept].astype(dtype) for nodes in ends)
    loops = np.arange(count, dtype=dtype)
    return np.concatenate([senders, receivers, loops]), np.concatenate([receivers, senders, loops])


def _always(like: np.ndarray) -> np.ndarray:
    """The earliest times of a dtype; of wide integers the earliest that fits int32, as most times do."""
    return np.full_like(like, -np.inf if like.dtype.kind == "f" else max(np.iinfo(like.dtype).min, ALWAYS))


def split_edges(ends: Ends, shares: Mapping[str, float], rng: np.random.Generator) -> dict[str, Ends]:
    """Distinct edges in random order, cut by shares: "train", "valid", "test" -> ends."""
    unique = np.unique(np.stack([np.asarray(ends[0]), np.asarray(ends[1])], axis=1), axis=0)
    unique = unique[rng.permutation(len(unique))].astype(np.int32)
    cuts = np.rint(np.cumsum([shares[name] for name in SPLITS])[:-1] * len(unique)).astype(int)
    return {
        name: (np.ascontiguousarray(part[:, 0]), np.ascontiguousarray(part[:, 1]))
        for name, part in zip(SPLITS, np.split(unique, cuts), strict=True)
    }
