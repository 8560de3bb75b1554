"""Small data sets for the tests of training."""

import numpy as np

from dejax.datasets import HeteroDataset

WRITES = ("author", "writes", "paper")


def community_graph(seed: int = 0, per_group: int = 20) -> HeteroDataset:
    """Papers whose class is the group of their authors; only edges and authors' features reveal it."""
    rng = np.random.default_rng(seed)
    groups, papers, authors = 3, 3 * per_group, 30
    label = np.arange(papers) % groups
    author_of = np.stack([rng.integers(0, authors // groups, papers) * groups + label for _ in range(3)], axis=1)
    edges = {WRITES: (author_of.reshape(-1), np.repeat(np.arange(papers), 3))}
    order = rng.permutation(papers)
    return HeteroDataset(
        name="communities",
        num_nodes={"author": authors, "paper": papers, "venue": 4},
        edges={**edges, ("venue", "has", "paper"): (rng.integers(0, 4, papers), np.arange(papers))},
        features={"author": np.eye(groups, dtype=np.float32)[np.arange(authors) % groups] + np.float32(0.1)},
        labels={"paper": label},
        num_classes={"paper": groups},
        splits={"train": {"paper": order[:30]}, "valid": {"paper": order[30:45]}, "test": {"paper": order[45:]}},
    )


def one_type_of(data: HeteroDataset) -> HeteroDataset:
    """The same graph with the nodes of all types side by side as one type; features are zeros where there are none."""
    first = dict(zip(data.num_nodes, np.cumsum([0, *data.num_nodes.values()]), strict=False))
    count, width = sum(data.num_nodes.values()), next(iter(data.features.values())).shape[1]
    features = np.zeros((count, width), np.float32)
    for kind, rows in data.features.items():
        features[first[kind] : first[kind] + len(rows)] = rows
    labels = np.full(count, -1)
    for kind, own in data.labels.items():
        labels[first[kind] : first[kind] + len(own)] = own
    return HeteroDataset(
        name=data.name,
        num_nodes={"node": count},
        edges={("node", r[1], "node"): (u + first[r[0]], v + first[r[2]]) for r, (u, v) in data.edges.items()},
        features={"node": features},
        labels={"node": labels},
        num_classes={"node": max(data.num_classes.values())},
        splits={name: {"node": ids["paper"] + first["paper"]} for name, ids in data.splits.items()},
    )


def links(**changes):
    """Two node types with features, two relations to predict."""
    rng = np.random.default_rng(0)
    calls, uses = ("function", "calls", "function"), ("function", "uses", "class")
    other = ("class", "has", "function")
    edges = {
        calls: (rng.integers(0, 20, 60), rng.integers(0, 20, 60)),
        other: (rng.integers(0, 8, 30), rng.integers(0, 20, 30)),
        uses: (rng.integers(0, 20, 40), rng.integers(0, 8, 40)),
    }
    held = {calls: (rng.integers(0, 20, 9), rng.integers(0, 20, 9)), uses: (np.arange(5), np.arange(5))}
    fields = {
        "features": {"function": rng.standard_normal((20, 6)).astype(np.float32)},
        "target_relations": (calls, uses),
        "valid_edges": held,
        "test_edges": held,
    }
    return HeteroDataset("small", {"class": 8, "function": 20}, edges, **{**fields, **changes})
