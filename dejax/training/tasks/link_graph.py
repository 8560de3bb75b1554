"""The graph of link prediction: a `HeteroDataset` whose nodes are numbered over all types."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dejax.datasets import HeteroDataset
from dejax.datasets._hetero import LINK_TASK, NODE_TASK
from dejax.minibatch import HeteroTopology
from dejax.training.tasks.data import NODE

EDGE = (NODE, "edge", NODE)


@dataclass(frozen=True, slots=True, eq=False)
class LinkGraph:
    """A graph with one list of nodes, type after type, and one of edges with their relations.

    Relations are numbered as in the data set; the reverse of relation r has the number r + num_relations. All edges
    are sampled together: a fan-out is over all relations, as usual for knowledge graphs with hundreds of them. Of equal
    edges of a relation to predict, one is kept.

    Attributes:
        data: the data set.
        first: for each node type the number of its first node, and at the end the number of nodes.
        topology: one relation, `EDGE`, with all edges and their reverses.
        edge_type: int32[2 edges], the relation of each edge, in the order of the lists; reverses follow the edges.
        senders, receivers: int32[2 edges], likewise.
        train: int32[n, 3], triples to train on: head, relation, tail.
        train_edge: int32[n], the place of each triple among the edges.
        splits: "valid" and "test" triples, likewise.
        num_relations: relations without reverses.
        features: float32[nodes, d], zeros for types without features; None if there are none.
        node_type: int32[nodes].
    """

    data: HeteroDataset
    first: np.ndarray
    topology: HeteroTopology
    edge_type: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    train: np.ndarray
    train_edge: np.ndarray
    splits: dict[str, np.ndarray]
    num_relations: int
    features: np.ndarray | None
    node_type: np.ndarray

    @property
    def num_nodes(self) -> int:
        """Nodes of all types."""
        return int(self.first[-1])

    @classmethod
    def of(cls, data: HeteroDataset, *, on_host: bool = True) -> LinkGraph:
        """Joins the types and relations of a data set.

        Raises:
            ValueError: the data set has no relations to predict, or no edges of them to train on, or times, weights or
                features of edges, which would be ignored.
        """
        data.check_used("link prediction", ("edges", "features", *LINK_TASK, *NODE_TASK))
        if not data.target_relations or not sum(len(data.edges[r][0]) for r in data.target_relations):
            raise ValueError(
                f"the data set must have edges to predict, got {data.name!r} without; give one with target_relations"
            )
        kinds = list(data.num_nodes)
        first = np.cumsum([0, *data.num_nodes.values()]).astype(np.int32)
        at = dict(zip(kinds, first.tolist(), strict=False))
        senders, receivers, numbers = [], [], []
        places = {}
        count = 0
        for number, (relation, ends) in enumerate(data.edges.items()):
            if relation in data.target_relations:  # a second copy would show a step the edge that it must predict
                distinct = np.unique(np.stack([np.asarray(x, np.int32) for x in ends]), axis=1)
                ends = (distinct[0], distinct[1])
            places[relation] = (number, count, len(ends[0]))
            count += len(ends[0])
            senders.append(np.asarray(ends[0], np.int32) + np.int32(at[relation[0]]))
            receivers.append(np.asarray(ends[1], np.int32) + np.int32(at[relation[2]]))
            numbers.append(np.full(len(ends[0]), number, np.int32))
        s, r, t = (np.concatenate(parts) for parts in (senders, receivers, numbers))
        both = (np.concatenate([s, r]), np.concatenate([r, s]))
        types = np.concatenate([t, t + np.int32(len(data.edges))])
        train_edge = np.concatenate(
            [places[relation][1] + np.arange(places[relation][2]) for relation in data.target_relations]
        ).astype(np.int32)

        def triples(edges: dict) -> np.ndarray:
            rows = [
                np.stack(
                    [ends[0] + at[relation[0]], np.full(len(ends[0]), places[relation][0]), ends[1] + at[relation[2]]],
                    axis=1,
                )
                for relation, ends in edges.items()
                if len(ends[0])
            ]
            return np.concatenate([np.zeros((0, 3), np.int32), *rows]).astype(np.int32)

        return cls(
            data=data,
            first=first,
            topology=HeteroTopology.from_edges({EDGE: both}, {NODE: int(first[-1])}, on_host=on_host),
            edge_type=types,
            senders=both[0],
            receivers=both[1],
            train=np.stack([s[train_edge], t[train_edge], r[train_edge]], axis=1),
            train_edge=train_edge,
            splits={"valid": triples(data.valid_edges), "test": triples(data.test_edges)},
            num_relations=len(data.edges),
            features=_features(data, first),
            node_type=np.repeat(np.arange(len(kinds), dtype=np.int32), np.diff(first)),
        )


def _features(data: HeteroDataset, first: np.ndarray) -> np.ndarray | None:
    widths = {kind: rows.shape[1] for kind, rows in data.features.items()}
    if not widths:
        return None
    if len(set(widths.values())) > 1:
        raise ValueError(f"features of all types must have one width, got {widths}; project them first")
    found = np.zeros((int(first[-1]), next(iter(widths.values()))), np.float32)
    for number, kind in enumerate(data.num_nodes):
        if kind in data.features:
            found[first[number] : first[number + 1]] = data.features[kind]
    return found
