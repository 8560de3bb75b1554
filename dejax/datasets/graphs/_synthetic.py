"""Synthetic graphs with the published counts of eight heterogeneous graphs and skewed degrees, to measure speed.

The counts are those of the Hector paper's table of data sets (arXiv 2301.06284). The rest is random, by seed:

- The sizes of relations fall as 1 / rank^1.1, the sizes of node types as 1 / rank^0.7.
- Each relation joins two random node types.
- An end point within its type of m nodes has rank floor(m u^2.5), u uniform. The order of ranks is permuted once for
  each type, so that the same few nodes have long segments in every relation of that type.

An edge may occur twice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dejax.datasets._dataset import UNLABELLED, EntityDataset

PREFIX = "synthetic-"
_RELATION_POWER = 1.1
_NODE_TYPE_POWER = 0.7
_MIN_TYPE_NODES = 8


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Published counts of a graph."""

    nodes: int
    node_types: int
    edges: int
    edge_types: int


COUNTS = {
    "aifb": GraphCounts(7_262, 7, 48_810, 104),
    "mutag": GraphCounts(27_163, 5, 148_100, 50),
    "bgs": GraphCounts(94_806, 27, 672_884, 122),
    "biokg": GraphCounts(93_773, 5, 4_762_678, 51),
    "am": GraphCounts(1_885_136, 7, 5_668_682, 108),
    "mag": GraphCounts(1_939_743, 4, 21_111_007, 4),
    "wikikg2": GraphCounts(2_500_604, 1, 16_109_182, 535),
    "fb15k": GraphCounts(14_541, 1, 620_232, 474),
}
"""The published counts of eight graphs, by name. They include reverse relations if the source counts these."""


def synthetic(
    name: str, seed: int = 0, *, feature_width: int | None = None, num_classes: int = 0, labelled_share: float = 0.1
) -> EntityDataset:
    """Makes a random graph with the published counts of a real one, for speed measurements.

    The counts are `COUNTS[name]`. Nodes are numbered by type, and edges are sorted by relation. The same seed gives the
    same graph with one version of numpy.

    Args:
        name: one of `COUNTS`.
        seed: random seed.
        feature_width: width of standard normal features, float32 [num_nodes, feature_width]; None for no features.
        num_classes: number of classes; 0 for no task. Labels are random, so that nothing can be learned from them.
        labelled_share: share of the nodes that have a label, split 60 / 20 / 20 into training, validation and test.

    Raises:
        ValueError: the name is unknown, or a number is out of range.
    """
    if name not in COUNTS:
        raise ValueError(f"name must be one of {', '.join(COUNTS)}, got {name!r}")
    if feature_width is not None and feature_width < 1:
        raise ValueError(f"feature_width must be at least 1, or None for no features, got {feature_width}")
    if num_classes < 0 or not 0.0 <= labelled_share <= 1.0:
        raise ValueError(
            f"num_classes must be at least 0 and labelled_share in [0, 1], got {num_classes} and {labelled_share}"
        )
    counts = COUNTS[name]
    # One random stream per purpose, so that asking for features or labels does not change the graph.
    structure, order, feature_rng, label_rng = map(np.random.default_rng, np.random.SeedSequence(seed).spawn(4))
    relation_sizes = _sizes(structure, counts.edges, counts.edge_types, _RELATION_POWER, at_least=1)
    type_sizes = _sizes(structure, counts.nodes, counts.node_types, _NODE_TYPE_POWER, at_least=_MIN_TYPE_NODES)
    first = np.concatenate([[0], np.cumsum(type_sizes)])
    permuted = [
        (start + order.permutation(size)).astype(np.int32) for start, size in zip(first[:-1], type_sizes, strict=True)
    ]
    ends = structure.integers(0, counts.node_types, (2, counts.edge_types))
    nodes = np.empty((2, counts.edges), np.int32)
    for side in (0, 1):
        start = 0
        for relation, size in enumerate(relation_sizes):
            nodes[side, start : start + size] = _end_points(structure, permuted[ends[side, relation]], int(size))
            start += size
    labels, splits = _labels(label_rng, counts.nodes, num_classes, labelled_share)
    features = None
    if feature_width is not None:
        features = feature_rng.standard_normal((counts.nodes, feature_width), np.float32)
    return EntityDataset(
        name=PREFIX + name,
        senders=nodes[0],
        receivers=nodes[1],
        edge_type=np.repeat(np.arange(counts.edge_types, dtype=np.int32), relation_sizes),
        node_type=np.repeat(np.arange(counts.node_types, dtype=np.int32), type_sizes),
        num_nodes=counts.nodes,
        num_edge_types=counts.edge_types,
        num_node_types=counts.node_types,
        edge_type_names=tuple(f"relation {i}" for i in range(counts.edge_types)),
        node_type_names=tuple(f"type {i}" for i in range(counts.node_types)),
        features=features,
        labels=labels,
        train_nodes=splits[0],
        valid_nodes=splits[1],
        test_nodes=splits[2],
        num_classes=num_classes,
        class_names=tuple(f"class {i}" for i in range(num_classes)),
        description=f"Random graph with the published counts of {name} and skewed degrees, seed {seed}; random labels.",
    )


def _sizes(rng: np.random.Generator, total: int, parts: int, power: float, *, at_least: int) -> np.ndarray:
    weights = 1.0 / np.arange(1, parts + 1) ** power
    return rng.multinomial(total - parts * at_least, weights / weights.sum()) + at_least


def _end_points(rng: np.random.Generator, permuted: np.ndarray, count: int) -> np.ndarray:
    chunk = 1 << 18  # the temporaries stay in the cache
    out = np.empty(count, np.int32)
    for start in range(0, count, chunk):
        u = rng.random(min(chunk, count - start))
        skewed = u * u * np.sqrt(u)  # u ** 2.5 without a power function
        skewed *= len(permuted)
        position = np.minimum(skewed.astype(np.int32), len(permuted) - 1)
        out[start : start + chunk] = permuted[position]
    return out


def _labels(
    rng: np.random.Generator, num_nodes: int, num_classes: int, share: float
) -> tuple[np.ndarray, list[np.ndarray]]:
    labels = np.full(num_nodes, UNLABELLED, np.int32)
    count = round(num_nodes * share) if num_classes else 0
    nodes = rng.permutation(num_nodes)[:count].astype(np.int32) if count else np.zeros(0, np.int32)
    labels[nodes] = rng.integers(0, num_classes, count) if count else 0
    return labels, [np.sort(part) for part in np.split(nodes, [round(0.6 * count), round(0.8 * count)])]
