"""EntityDataset: a typed graph with a node classification task, as plain numpy arrays."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dejax._files import replacing

if TYPE_CHECKING:
    from dejax.rgnn import RelGraph

UNLABELLED = -1
_FORMAT = 1  # of the .npz files of `save`; raise it when a field changes its meaning
_ID_FIELDS = ("senders", "receivers", "edge_type", "node_type", "labels", "train_nodes", "valid_nodes", "test_nodes")
_ARRAYS = (*_ID_FIELDS, "features")


@dataclass(frozen=True, eq=False)
class EntityDataset:
    """A graph for node classification, as numpy arrays: typed edges, typed nodes, labels and splits.

    Nodes are numbered 0 .. num_nodes - 1 over all node types, classes 0 .. num_classes - 1. The edges are those of the
    source, in their own direction; `graph()` has options to add reverse relations and self loops. Nothing is on a
    device before `graph()` is called.

    Attributes:
        name: name of the data set for `load`, such as "aifb".
        senders: int32 [edges], the source node of each edge (the subject of an RDF triple).
        receivers: int32 [edges], the destination node of each edge (the object of an RDF triple).
        edge_type: int32 [edges], the relation of each edge, 0 .. num_edge_types - 1.
        node_type: int32 [num_nodes], the type of each node, 0 .. num_node_types - 1; all 0 if the source has no types.
        num_nodes: number of nodes, including nodes without edges.
        num_edge_types: number of relations, without reverse relations and self loops.
        num_node_types: number of node types.
        edge_type_names: a name for each relation.
        node_type_names: a name for each node type.
        features: float32 [num_nodes, d], input features; None if nodes have no features (learn an embedding).
        labels: int32 [num_nodes], the class of each node, -1 for none. Every node of a split has a class.
        train_nodes: int32 [train], the nodes to train on.
        valid_nodes: int32 [valid], the nodes to choose settings on; empty if the standard split has none.
        test_nodes: int32 [test], the nodes to report results on.
        num_classes: number of classes; 0 for a graph without a task.
        class_names: a name for each class.
        description: a few sentences about the content, the source, and relations that were left out.

    >>> from dejax import datasets
    >>> data = datasets.load("stdlib")  # doctest: +SKIP
    >>> graph = data.graph(add_reverse=True)  # doctest: +SKIP
    >>> graph.num_nodes == data.num_nodes, data.labels[data.train_nodes].min() >= 0  # doctest: +SKIP
    """

    name: str
    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    node_type: np.ndarray
    num_nodes: int
    num_edge_types: int
    num_node_types: int
    edge_type_names: tuple[str, ...]
    node_type_names: tuple[str, ...]
    features: np.ndarray | None
    labels: np.ndarray
    train_nodes: np.ndarray
    valid_nodes: np.ndarray
    test_nodes: np.ndarray
    num_classes: int
    class_names: tuple[str, ...]
    description: str = ""

    def __post_init__(self) -> None:
        for name in _ID_FIELDS:
            object.__setattr__(self, name, _as_ids(name, getattr(self, name)))
        if self.features is not None:
            features = np.asarray(self.features, np.float32)
            if features.ndim != 2 or features.shape[0] != self.num_nodes:
                raise ValueError(
                    f"features must have shape [num_nodes, d] = [{self.num_nodes}, d], got {list(features.shape)}; "
                    "give one row for each node (zeros where a node has none)"
                )
            object.__setattr__(self, "features", features)
        self._check_lengths()
        for name, bound in (
            ("senders", "num_nodes"),
            ("receivers", "num_nodes"),
            ("edge_type", "num_edge_types"),
            ("node_type", "num_node_types"),
            ("train_nodes", "num_nodes"),
            ("valid_nodes", "num_nodes"),
            ("test_nodes", "num_nodes"),
        ):
            _check_range(name, getattr(self, name), 0, getattr(self, bound), bound)
        _check_range("labels", self.labels, UNLABELLED, self.num_classes, "num_classes")
        self._check_splits()

    def _check_lengths(self) -> None:
        for name, expected in (("receivers", "senders"), ("edge_type", "senders")):
            if len(getattr(self, name)) != len(self.senders):
                raise ValueError(
                    f"{name} must have one entry for each edge ({len(self.senders)}, as {expected} has), "
                    f"got {len(getattr(self, name))}"
                )
        for name in ("node_type", "labels"):
            if len(getattr(self, name)) != self.num_nodes:
                raise ValueError(
                    f"{name} must have one entry for each of the {self.num_nodes} nodes, got {len(getattr(self, name))}"
                )
        for name, count in (
            ("edge_type_names", self.num_edge_types),
            ("node_type_names", self.num_node_types),
            ("class_names", self.num_classes),
        ):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{name} must have {count} entries, got {len(getattr(self, name))}")

    def _check_splits(self) -> None:
        seen = np.zeros(self.num_nodes, bool)
        for split in ("train", "valid", "test"):
            nodes = getattr(self, f"{split}_nodes")
            unlabelled = np.flatnonzero(self.labels[nodes] == UNLABELLED)
            if unlabelled.size:
                raise ValueError(
                    f"nodes of {split}_nodes must have labels, got node {nodes[unlabelled[0]]} without one (-1); "
                    "leave it out"
                )
            if len(np.unique(nodes)) != len(nodes) or seen[nodes].any():
                raise ValueError(
                    f"nodes of {split}_nodes must be distinct, and in no other split, got a node twice; remove it"
                )
            seen[nodes] = True

    @property
    def num_edges(self) -> int:
        """Number of edges, without reverses and self loops."""
        return len(self.senders)

    @property
    def train_labels(self) -> np.ndarray:
        """int32 [train]: `labels[train_nodes]`."""
        return self.labels[self.train_nodes]

    @property
    def valid_labels(self) -> np.ndarray:
        """int32 [valid]: `labels[valid_nodes]`."""
        return self.labels[self.valid_nodes]

    @property
    def test_labels(self) -> np.ndarray:
        """int32 [test]: `labels[test_nodes]`."""
        return self.labels[self.test_nodes]

    @property
    def majority_accuracy(self) -> float:
        """The test accuracy of always predicting the most frequent class of the training nodes; NaN without a task."""
        if not len(self.train_nodes) or not len(self.test_nodes):
            return float("nan")
        majority = np.bincount(self.train_labels, minlength=self.num_classes).argmax()
        return float(np.mean(self.test_labels == majority))

    def graph(self, *, add_reverse: bool = True, add_self_loops: bool = False, **options: Any) -> RelGraph:
        """Makes a `dejax.rgnn.RelGraph` of the nodes and edges. It imports JAX.

        Args:
            add_reverse: whether to add a reverse relation for each relation (type + num_edge_types), so that messages
                flow both ways.
            add_self_loops: whether to add one relation with an edge from each node to itself.
            options: further keyword arguments of `RelGraph.from_edges`.

        Returns:
            A RelGraph with the same node numbers, so that `labels` and the splits fit it.
        """
        from dejax.rgnn.graphs.rel_graph import RelGraph

        return RelGraph.from_edges(
            self.senders,
            self.receivers,
            self.edge_type,
            num_nodes=self.num_nodes,
            num_edge_types=self.num_edge_types,
            node_type=self.node_type,
            num_node_types=self.num_node_types,
            add_reverse=add_reverse,
            add_self_loops=add_self_loops,
            edge_type_names=self.edge_type_names,
            node_type_names=self.node_type_names,
            **options,
        )

    def split_summary(self) -> str:
        """One line for each split: its size and the share of each class."""
        width = max((len(name) for name in self.class_names), default=0)
        lines = [f"{'split':>8} {'nodes':>8}  " + "  ".join(f"{name:>{max(width, 6)}}" for name in self.class_names)]
        for split in ("train", "valid", "test"):
            labels = getattr(self, f"{split}_labels")
            counts = np.bincount(labels, minlength=self.num_classes)[: self.num_classes]
            shares = [f"{100 * count / len(labels):.1f}%" if len(labels) else "-" for count in counts]
            lines.append(f"{split:>8} {len(labels):>8}  " + "  ".join(f"{s:>{max(width, 6)}}" for s in shares))
        return "\n".join(lines)

    def summary(self, *, rows: int = 12) -> str:
        """A text table of the counts, the most frequent relations and node types (`rows` of each), and the splits."""
        features = "none" if self.features is None else f"{self.features.shape[1]} a node"
        lines = [
            f"{self.name}: {self.num_nodes:,} nodes of {self.num_node_types} types, {self.num_edges:,} edges of "
            f"{self.num_edge_types} types, {self.num_classes} classes, features: {features}",
            *_ranked("edges", self.edge_type, self.edge_type_names, rows),
            *_ranked("nodes", self.node_type, self.node_type_names, rows),
        ]
        if self.num_classes and self.num_classes <= 16:
            lines.append(self.split_summary())
        elif self.num_classes:
            sizes = (f"{split} {len(getattr(self, f'{split}_nodes')):,}" for split in ("train", "valid", "test"))
            lines.append("  " + ", ".join(sizes))
        return "\n".join(lines)

    def __repr__(self) -> str:
        return (
            f"EntityDataset({self.name!r}, nodes={self.num_nodes}, edges={self.num_edges}, "
            f"edge_types={self.num_edge_types}, node_types={self.num_node_types}, classes={self.num_classes})"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the data set to one .npz file. The file appears when it is complete."""
        path = Path(path)
        arrays = {name: getattr(self, name) for name in _ARRAYS if getattr(self, name) is not None}
        rest = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name not in _ARRAYS}
        header = np.frombuffer(json.dumps({"format": _FORMAT, **rest}).encode(), np.uint8)
        with replacing(path) as temporary, temporary.open("wb") as file:
            np.savez(file, header=header, **arrays)

    @classmethod
    def restore(cls, path: str | os.PathLike[str]) -> EntityDataset:
        """Reads a file that `save` wrote. Raises ValueError if the file is damaged or has another format version."""
        try:
            with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
                header: dict[str, Any] = json.loads(file["header"].tobytes())
                if header.pop("format", None) != _FORMAT:
                    raise ValueError(f"the file is not of format {_FORMAT}")
                fields: dict[str, Any] = {name: file[name] for name in file.files if name != "header"}
        except FileNotFoundError:
            raise
        except Exception as error:  # a truncated zip raises many types
            raise ValueError(
                f"{path} must be a file that EntityDataset.save wrote, got another or a damaged one ({error}); save "
                "the data set again"
            ) from error
        names = {key: tuple(value) for key, value in header.items() if isinstance(value, list)}
        return cls(**{"features": None, **header, **names, **fields})


def _as_ids(name: str, values: Any) -> np.ndarray:
    values = np.asarray(values)
    if values.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {list(values.shape)}; flatten it first")
    if values.dtype == np.int32:
        return values
    if values.size and not np.issubdtype(values.dtype, np.integer):
        raise TypeError(f"{name} must have an integer dtype, got {values.dtype}; cast the ids with .astype(np.int32)")
    if values.size and (values.max() > np.iinfo(np.int32).max or values.min() < np.iinfo(np.int32).min):
        raise ValueError(f"{name} must fit int32, got values from {values.min()} to {values.max()}")
    return values.astype(np.int32)


def _check_range(name: str, values: np.ndarray, low: int, high: int, bound: str) -> None:
    if not values.size or (values.min() >= low and values.max() < high):
        return
    position = int(np.flatnonzero((values < low) | (values >= high))[0])
    raise IndexError(f"{name}[{position}] must be from {low} to {bound} - 1 = {high - 1}, got {values[position]}")


def _ranked(what: str, ids: np.ndarray, names: tuple[str, ...], rows: int) -> list[str]:
    counts = np.bincount(ids, minlength=len(names))
    order = np.argsort(-counts, kind="stable")
    lines = [f"  {counts[i]:>12,} {what}  {names[i]}" for i in order[:rows]]
    if len(names) > rows:
        lines.append(f"  {counts[order[rows:]].sum():>12,} {what}  in {len(names) - rows} more types")
    return lines
