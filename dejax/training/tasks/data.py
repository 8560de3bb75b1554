"""The data of a run, by task and name, and its training, validation and test nodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dejax import datasets
from dejax.datasets import EntityDataset, HeteroDataset

SPLITS = ("train", "valid", "test")
IGB = tuple(f"igb-{size}" for size in ("tiny", "small", "medium", "large", "full"))
SYNTHETIC_IGB = "synthetic-igb"
RDF = ("aifb", "mutag", "bgs", "am")
NODES = ("stdlib", *RDF, "ogbn-mag", *IGB, SYNTHETIC_IGB)
TRIPLES = ("wn18rr", "fb15k-237", "wn18", "fb15k", "yago3-10")
SYNTHETIC_TRIPLES = "synthetic-triples"
LINKS = ("stdlib", *TRIPLES, SYNTHETIC_TRIPLES)
NODE = "node"
"""The type of all nodes of a graph with one list of nodes."""
_META = "dataset.json"
# Synthetic graphs have neither features nor a task. A run on one measures time; its accuracy is that of guessing.
_SYNTHETIC = "synthetic-"
_SYNTHETIC_TASK = {"feature_width": 64, "num_classes": 8}
_Relation = tuple[str, str, str]


def load(task: str, name: str | None, folder: str | None = None, *, typed_nodes: bool = False) -> Any:
    """The data set of a run: for the task "nodes" an `EntityDataset`, otherwise a `HeteroDataset`.

    | task | name | what | files |
    | --- | --- | --- | --- |
    | nodes | a name of `dejax.datasets.NAMES` | synthetic graphs get random features and labels | `folder` |
    | samples | stdlib | code graph of the running Python's standard library | none |
    | | aifb, mutag, bgs, am | RDF graphs of the R-GCN paper | `folder`, $DEJAX_DATA, or a download |
    | | ogbn-mag | papers, authors, institutions, fields | `folder` or $DEJAX_DATA |
    | | igb-tiny, ... igb-full | the folders of IGB heterogeneous | `folder` |
    | | synthetic-igb | a random graph of IGB's shape, with random labels: for the time of a step | none |
    | | none | a folder that `HeteroDataset.save` wrote | `folder` |
    | links | stdlib | the standard library's code graph; `calls` edges are predicted | none |
    | | wn18rr, fb15k-237, ... | triples | `folder` or $DEJAX_DATA |
    | | synthetic-triples, synthetic-triples-0.01 | planted structure, the size of FB15k-237 times a number | none |
    | | none | a folder of `HeteroDataset.save`, or of triples as `load_triples` reads them | `folder` |

    Args:
        task: one of `TASKS`.
        name: the name; None for a folder of the user's own, or for stdlib if no folder is given.
        folder: the folder of its files.
        typed_nodes: "samples", stdlib and RDF graphs: whether nodes keep their types. Then a relation that joins
            several types becomes one for each pair of types, so that compilation takes longer.

    Raises:
        ValueError: an unknown name.
        FileNotFoundError: the folder lacks a file.
    """
    key = (name or "stdlib").lower()
    if task == "nodes":
        options: dict[str, Any] = _SYNTHETIC_TASK if key.startswith(_SYNTHETIC) else {}
        return datasets.load(key, folder, **options)
    if name is None and folder is not None:
        if (Path(folder) / _META).is_file():
            return HeteroDataset.open(folder, check=True)
        if task == "links":
            return datasets.load_triples(Path(folder).resolve().name, folder)
    return _nodes(key, folder, typed_nodes) if task == "samples" else _links(key, folder)


def is_known(task: str, name: str) -> bool:
    """Whether a data set has this name; otherwise it is that of a folder of the user's own."""
    return task == "nodes" or name in (NODES if task == "samples" else LINKS) or name.startswith(SYNTHETIC_TRIPLES)


def _nodes(key: str, folder: str | None, typed_nodes: bool) -> HeteroDataset:
    if key == "stdlib" or key in RDF:
        entity = datasets.load(key, folder)
        return HeteroDataset.from_entity(entity) if typed_nodes else one_type(entity)
    if key == "ogbn-mag":
        return datasets.load_mag_hetero(folder)
    if key in IGB:
        return datasets.load_igb(folder, size=key.removeprefix("igb-"))
    if key == SYNTHETIC_IGB:
        return datasets.synthetic_igb(1e-4, feature_width=64, feature_dtype="float32")
    raise ValueError(
        f"--dataset must be one of {', '.join(NODES)}, got {key!r}; for a saved HeteroDataset give --data alone"
    )


def _links(key: str, folder: str | None) -> HeteroDataset:
    if key == "stdlib":
        return datasets.load_stdlib_links(folder)
    if key in TRIPLES:
        return datasets.load_triples(key, folder)
    if key == SYNTHETIC_TRIPLES or key.startswith(f"{SYNTHETIC_TRIPLES}-"):
        scale = key.removeprefix(SYNTHETIC_TRIPLES).removeprefix("-") or "1"
        try:
            return datasets.synthetic_triples(float(scale))
        except ValueError:
            raise ValueError(
                f"--dataset must be {SYNTHETIC_TRIPLES}-<scale> with a positive number, got {key!r}"
            ) from None
    raise ValueError(f"--dataset must be one of {', '.join(LINKS)}, got {key!r}; for other triples give --data alone")


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


def needs_reverse(data: EntityDataset) -> bool:
    """Whether to add reverse relations. The published counts of the synthetic graphs include them already."""
    return not data.name.startswith(_SYNTHETIC)


def with_reverse(data: HeteroDataset) -> HeteroDataset:
    """With reverse relations, unless it has them; `cites` of IGB becomes symmetric with self loops, as in MLPerf."""
    if all(_reversed(relation) & data.edges.keys() for relation in data.edges):
        return data
    symmetric = ["cites"] if data.name.startswith(("igb", SYNTHETIC_IGB)) else []
    return data.with_reverse(symmetric=symmetric)


def _reversed(relation: _Relation) -> set[_Relation]:
    """What the reverse of a relation may be called."""
    source, name, destination = relation
    return {(destination, f"rev_{name}", source), (destination, name.removeprefix("rev_"), source)} - {relation}


def split_nodes(data: EntityDataset, holdout: float = 0.0, fold: int = 0) -> dict[str, np.ndarray]:
    """The nodes of each split, with a share of the training nodes moved to validation.

    Args:
        data: the data set.
        holdout: the share. The same nodes are drawn each time, so that seeds and settings see the same nodes.
        fold: the number of the share, for cross-validation; shares 0, 1, .. are disjoint.

    Raises:
        ValueError: the data set has a validation split, no training node is left, or there is no such fold.
    """
    splits = {name: getattr(data, f"{name}_nodes") for name in SPLITS}
    if not holdout:
        return splits
    if len(splits["valid"]):
        raise ValueError(f"holdout must be 0 for {data.name!r}, which has a validation split; got {holdout}")
    shuffled = np.random.default_rng(0).permutation(splits["train"])
    count = max(1, round(holdout * len(shuffled)))
    if count >= len(shuffled):
        raise ValueError(
            f"holdout must leave training nodes, got {holdout}, which takes all {len(shuffled)} of them; give a "
            "smaller share"
        )
    start = fold * count
    if start + count > len(shuffled):
        raise ValueError(f"fold must be less than {len(shuffled) // count} with holdout={holdout}, got {fold}")
    train = np.concatenate([shuffled[:start], shuffled[start + count :]])
    return {"train": train, "valid": shuffled[start : start + count], "test": splits["test"]}
