"""Graphs of PyTorch Geometric and DGL as `HeteroDataset`. Neither library is imported: their objects are read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from dejax.datasets._hetero import Ends, HeteroDataset, Relation

_SPLITS = {"train_mask": "train", "val_mask": "valid", "test_mask": "test"}
_ONE_TYPE = "node"


def from_pyg(data: Any, *, name: str = "pyg") -> HeteroDataset:
    """Converts a `torch_geometric.data.HeteroData` or `Data` to a `HeteroDataset`.

    | attribute of a node type | becomes | | attribute of an edge type | becomes |
    | --- | --- | --- | --- | --- |
    | `x` | `features` | | `edge_index` | `edges` |
    | `y`, integers | `labels`, `num_classes` | | `edge_attr` | `edge_features` |
    | `train_mask`, `val_mask`, `test_mask` | `splits` | | `edge_weight` | `edge_weights` |
    | `time` | `node_times` | | `time` | `edge_times` |

    A `Data` has one node type, `"node"`. If it has an `edge_type`, each value becomes a relation, such as `("node",
    "0", "node")`; otherwise its only relation is `("node", "to", "node")`. A warning names the attributes that are left
    out.

    Args:
        data: the graph. Tensors may lie on any device; those in host memory are shared if possible.
        name: name of the data set.

    Raises:
        TypeError: `data` is neither a HeteroData nor a Data.
        ValueError: `y` is not one integer for each node; a mask is not bool[nodes] (for example because it holds
            several splits); the number of nodes of a type is not known; or a relation has no `edge_index`.
    """
    if hasattr(data, "node_types") and hasattr(data, "edge_types"):
        nodes = {kind: _attributes(data[kind]) for kind in data.node_types}
        edges = {tuple(relation): _attributes(data[relation]) for relation in data.edge_types}
        counts = {kind: data[kind].num_nodes for kind in nodes}
    elif hasattr(data, "edge_index"):
        found = _attributes(data)
        by_edge = ("edge_index", "edge_attr", "edge_weight", "edge_type")
        edge = {key: found.pop(key) for key in by_edge if key in found}
        counts, nodes, edges = {_ONE_TYPE: data.num_nodes}, {_ONE_TYPE: found}, _by_relation(edge)
    else:
        raise TypeError(f"data must be a HeteroData or Data of PyTorch Geometric, got {type(data).__name__}")
    for kind, count in counts.items():
        if count is None:
            raise ValueError(f"data must have the number of nodes of {kind!r}, got None; set data[{kind!r}].num_nodes")
        nodes[kind].pop("num_nodes", None)
    keys = {"x": "features", "y": "labels", "time": "node_times"}
    edge_keys = {"edge_attr": "edge_features", "edge_weight": "edge_weights", "time": "edge_times"}
    ends = {relation: _ends(relation, values.pop("edge_index", None)) for relation, values in edges.items()}
    return _dataset(name, counts, ends, _renamed(nodes, keys, _SPLITS), _renamed(edges, edge_keys))


def from_dgl(
    graph: Any, *, features: str = "feat", labels: str = "label", edge_features: str = "feat", name: str = "dgl"
) -> HeteroDataset:
    """Converts a `dgl.DGLGraph` with any number of node types and relations to a `HeteroDataset`.

    It reads the data of nodes and edges under the keys that the arguments name; for nodes also `train_mask`,
    `val_mask`, `test_mask` and `time`, and for edges also `weight` and `time`. A warning names the data that are left
    out. Edges keep their order.

    Args:
        graph: the graph.
        features: key of the node features.
        labels: key of the labels, integers [nodes].
        edge_features: key of the edge features.
        name: name of the data set.

    Raises:
        TypeError: `graph` is no DGLGraph.
        ValueError: labels are not one integer for each node, or a mask is not bool[nodes].
    """
    if not (hasattr(graph, "canonical_etypes") and hasattr(graph, "ntypes")):
        raise TypeError(f"graph must be a DGLGraph, got {type(graph).__name__}")
    nodes = {kind: dict(graph.nodes[kind].data) for kind in graph.ntypes}
    relations = [tuple(relation) for relation in graph.canonical_etypes]
    ends = {r: tuple(_numpy(side) for side in graph.edges(etype=r, order="eid")) for r in relations}
    edges = {relation: dict(graph.edges[relation].data) for relation in relations}
    counts = {kind: graph.num_nodes(kind) for kind in graph.ntypes}
    keys = {features: "features", labels: "labels", "time": "node_times"}
    edge_keys = {edge_features: "edge_features", "weight": "edge_weights", "time": "edge_times"}
    return _dataset(name, counts, ends, _renamed(nodes, keys, _SPLITS), _renamed(edges, edge_keys))


# --------------------------------------------------------------------------------------------------- parts


def _attributes(store: Any) -> dict[str, Any]:
    """The attributes that are stored for a node or edge type."""
    return {key: store[key] for key in (store.keys() if callable(store.keys) else store.keys)}


def _renamed(
    by_type: Mapping[Any, Mapping[str, Any]], keys: Mapping[str, str], masks: Iterable[str] = ()
) -> dict[Any, dict[str, Any]]:
    """The values under the names that `HeteroDataset` has for them; a warning names the others."""
    known = {*keys, *masks}
    left_out = [f"{kind}: {key}" for kind, values in by_type.items() for key in values if key not in known]
    if left_out:
        warnings.warn(f"left out of the dataset: {', '.join(left_out)}", stacklevel=3)
    return {
        kind: {keys.get(key, key): _numpy(value) for key, value in values.items() if key in known}
        for kind, values in by_type.items()
    }


def _numpy(value: Any) -> np.ndarray:
    """A tensor as a numpy array; bfloat16, which numpy lacks, as float32."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if str(value.dtype) == "torch.bfloat16" else value
        value = value.numpy()
    return np.asarray(value)


def _ends(relation: Any, index: Any) -> Ends:
    if index is None:
        raise ValueError(f"the edges of {relation} must be an `edge_index` [2, edges], got none (a sparse `adj_t`?)")
    ends = _numpy(index)
    if ends.ndim != 2 or ends.shape[0] != 2:
        raise ValueError(f"`edge_index` of {relation} must be [2, edges], got {list(ends.shape)}")
    return ends[0], ends[1]


def _by_relation(edge: dict[str, Any]) -> dict[Any, dict[str, Any]]:
    """The edges of a `Data`, by the types in `edge_type` if it has them."""
    if "edge_type" not in edge:
        return {(_ONE_TYPE, "to", _ONE_TYPE): edge}
    kind = _numpy(edge.pop("edge_type"))
    index = _numpy(edge.pop("edge_index"))
    if kind.shape != index.shape[1:] or (kind.size and kind.dtype.kind not in "iu"):
        raise ValueError(
            f"`edge_type` must be one integer an edge, [{index.shape[1]}], got {kind.dtype}{list(kind.shape)}"
        )
    if kind.size and kind.min() < 0:
        raise ValueError(f"`edge_type` must be at least 0, got {kind.min()}")
    others = {key: _numpy(value) for key, value in edge.items()}
    found = {}
    for number in range(_count(kind)):
        own = np.flatnonzero(kind == number)
        found[_ONE_TYPE, str(number), _ONE_TYPE] = {"edge_index": index[:, own]} | {
            k: v[own] for k, v in others.items()
        }
    return found


def _dataset(
    name: str,
    counts: Mapping[str, int],
    ends: Mapping[Relation, Any],
    nodes: Mapping[str, dict[str, np.ndarray]],
    edges: Mapping[Relation, dict[str, np.ndarray]],
) -> HeteroDataset:
    """The data set of arrays by field of `HeteroDataset` for each node type and relation, and of masks for splits."""

    def gathered(by_type: Mapping[Any, dict[str, np.ndarray]], key: str) -> dict[Any, np.ndarray]:
        return {kind: values[key] for kind, values in by_type.items() if key in values}

    labels = {kind: _classes(kind, values) for kind, values in gathered(nodes, "labels").items()}
    splits = {}
    for mask, split in _SPLITS.items():
        found = {kind: _members(kind, mask, values) for kind, values in gathered(nodes, mask).items()}
        if found:
            splits[split] = found
    return HeteroDataset(
        name,
        {kind: int(count) for kind, count in counts.items()},
        dict(ends),
        features={kind: x.reshape(len(x), math.prod(x.shape[1:])) for kind, x in gathered(nodes, "features").items()},
        labels=labels,
        num_classes={kind: _count(values) for kind, values in labels.items()},
        splits=splits,
        node_times=gathered(nodes, "node_times"),
        edge_times=gathered(edges, "edge_times"),
        edge_features=gathered(edges, "edge_features"),
        edge_weights={relation: w.reshape(-1) for relation, w in gathered(edges, "edge_weights").items()},
    )


def _count(numbers: np.ndarray) -> int:
    """How many numbers from 0 there are up to the greatest one."""
    return max(int(numbers.max()) + 1, 0) if numbers.size else 0


def _classes(kind: str, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise ValueError(
            f"the labels of {kind!r} must be one integer a node, got {labels.dtype}{list(labels.shape)}; "
            "take them from the object and give them to your own loss"
        )
    return labels


def _members(kind: str, mask: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or values.dtype != np.bool_:
        raise ValueError(f"`{mask}` of {kind!r} must be bool[nodes], one split, got {values.dtype}{list(values.shape)}")
    return np.flatnonzero(values)
