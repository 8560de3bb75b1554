"""The inputs that all implementations of a layer share: graph, features, parameters and cotangent."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np

BANDWIDTH = 4.3e12  # bytes per second, read plus written, of a device-to-device copy on an H200
LEARNING_RATE = 0.01
_ARRAYS = ("senders", "receivers", "edge_type", "node_type")
_SAMPLE = 16_384


@dataclass(frozen=True, slots=True)
class Settings:
    """Sizes and number formats of a layer.

    Attributes:
        width: width of the input and of the result.
        heads: attention heads; `width` is a multiple.
        dtype: dtype of features and parameters, `"float32"` or `"bfloat16"`.
        precision: precision of float32 products: `"f32"`, `"tf32"` or `"bf16"`.
    """

    width: int = 64
    heads: int = 1
    dtype: str = "float32"
    precision: str = "tf32"

    @property
    def itemsize(self) -> int:
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def name(self) -> str:
        return f"{self.dtype}_{self.precision}_w{self.width}_h{self.heads}"


@dataclass(frozen=True, eq=False)
class Graph:
    """Edge lists with edges sorted by type and nodes numbered by type; int32 arrays."""

    name: str
    senders: np.ndarray
    receivers: np.ndarray
    edge_type: np.ndarray
    node_type: np.ndarray
    num_nodes: int
    num_edge_types: int
    num_node_types: int

    @property
    def num_edges(self) -> int:
        return len(self.senders)

    @cached_property
    def edges_by_type(self) -> np.ndarray:
        return np.bincount(self.edge_type, minlength=self.num_edge_types)

    @cached_property
    def nodes_by_type(self) -> np.ndarray:
        return np.bincount(self.node_type, minlength=self.num_node_types)

    @cached_property
    def mean_scale(self) -> np.ndarray:
        """float32[edges], 1 / c for each edge, with c the number of edges of its type at its receiver."""
        key = self.receivers.astype(np.int64) * self.num_edge_types + self.edge_type
        if self.num_nodes * self.num_edge_types <= 10**8:
            return (1.0 / np.bincount(key)[key]).astype(np.float32)
        _, inverse, counts = np.unique(key, return_inverse=True, return_counts=True)
        return (1.0 / counts[inverse]).astype(np.float32)

    @cached_property
    def num_receivers(self) -> int:
        """Number of nodes with incoming edges."""
        reached = np.zeros(self.num_nodes, bool)
        reached[self.receivers] = True
        return int(reached.sum())

    def row_bound_ms(self, settings: Settings) -> float:
        """Time for one gathered row and two indices per edge, the weights, and one row per node with incoming edges."""
        row = settings.width * settings.itemsize
        moved = self.num_edges * (row + 8) + self.num_receivers * row + self.num_edge_types * settings.width * row
        return moved / BANDWIDTH * 1e3

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in _ARRAYS:
            np.save(folder / f"{name}.npy", getattr(self, name))
        counts = {key: getattr(self, key) for key in ("name", "num_nodes", "num_edge_types", "num_node_types")}
        (folder / "graph.json").write_text(json.dumps(counts), encoding="utf-8")

    @classmethod
    @lru_cache(maxsize=1)
    def load(cls, folder: Path) -> Graph:
        """The graph that `save` wrote; the last one stays loaded."""
        arrays = {name: np.load(folder / f"{name}.npy", mmap_mode="r") for name in _ARRAYS}
        return cls(**arrays, **json.loads((folder / "graph.json").read_text(encoding="utf-8")))


def make_graph(name: str, seed: int = 0) -> Graph:
    """A synthetic graph with published counts."""
    from dejax.datasets import synthetic

    data = synthetic(name, seed)
    arrays = {key: getattr(data, key) for key in _ARRAYS}
    return Graph(name, **arrays, **{k: getattr(data, k) for k in ("num_nodes", "num_edge_types", "num_node_types")})


def read_graph(path: Path) -> Graph:
    """A graph from an .npz file with `senders`, `receivers`, `edge_type` and `node_type_counts` or `node_type`.

    Without `node_type_counts` and `node_type`, all nodes have one type, and `num_nodes` is in the file or is the
    largest id plus one. Nodes are renumbered by type and edges are sorted by type, both stably.

    Raises:
        ValueError: an array is missing, or ids are out of range.
    """
    with np.load(path) as file:
        missing = [key for key in _ARRAYS[:3] if key not in file.files]
        if missing:
            raise ValueError(f"{path} must hold {', '.join(_ARRAYS[:3])}; it lacks {', '.join(missing)}")
        senders, receivers, edge_type = (file[key].astype(np.int32) for key in _ARRAYS[:3])
        if "node_type" in file.files:
            node_type = file["node_type"].astype(np.int32)
        elif "node_type_counts" in file.files:
            counts = file["node_type_counts"]
            node_type = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        else:
            known = int(file["num_nodes"]) if "num_nodes" in file.files else max(senders.max(), receivers.max()) + 1
            node_type = np.zeros(known, np.int32)
    for key, ids in (("senders", senders), ("receivers", receivers)):
        if ids.min() < 0 or ids.max() >= len(node_type):
            raise ValueError(f"{path}: {key} must lie in [0, {len(node_type)}), got {ids.min()} to {ids.max()}")
    by_type = np.argsort(node_type, kind="stable")
    position = np.empty_like(by_type)
    position[by_type] = np.arange(len(by_type))
    order = np.argsort(edge_type, kind="stable")
    return Graph(
        path.stem,
        position[senders[order]].astype(np.int32),
        position[receivers[order]].astype(np.int32),
        edge_type[order],
        node_type[by_type],
        num_nodes=len(node_type),
        num_edge_types=int(edge_type.max()) + 1,
        num_node_types=int(node_type.max()) + 1,
    )


def parameters(model: str, graph: Graph, settings: Settings, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 parameters in the layout of `dejax.rgnn.library`.

    RGAT's attention vectors are equal for all relations, as in PyTorch Geometric.
    """
    width, heads = settings.width, settings.heads
    r, t, d = graph.num_edge_types, graph.num_node_types, width // heads
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "rgcn": {"weight": (r, width, width)},
        "rgat": {"weight": (r, heads, width, d), "attention_src": (1, heads, d), "attention_dst": (1, heads, d)},
        "hgt": {
            **dict.fromkeys(("key", "query", "value"), (t, heads, width, d)),
            "relation_attention": (r, heads, d, d),
            "relation_message": (r, heads, d, d),
            "prior": (r, heads),
            "out": (t, width, width),
        },
    }
    rng = np.random.default_rng(seed)
    found = {name: rng.standard_normal(s, np.float32) * width**-0.5 for name, s in shapes[model].items()}
    return {k: np.repeat(v, r, 0) if k.startswith("attention_") else v for k, v in found.items()}


def features(graph: Graph, folder: Path, settings: Settings, seed: int = 0) -> np.ndarray:
    """float32[nodes, width], standard normal, written to the folder once. The cotangent is the same array, reversed."""
    path = folder / f"x_{settings.width}.npy"
    if not path.exists():
        rng = np.random.default_rng(seed)
        np.save(path, rng.standard_normal((graph.num_nodes, settings.width), np.float32))
    return np.load(path, mmap_mode="r")


@dataclass(frozen=True, slots=True)
class Task:
    """A classification task: random classes of a tenth of the nodes, and a matrix from width to classes."""

    nodes: np.ndarray
    labels: np.ndarray
    head: np.ndarray


def classification(graph: Graph, settings: Settings, classes: int) -> Task:
    rng = np.random.default_rng(2)
    nodes = np.sort(rng.permutation(graph.num_nodes)[: max(1, graph.num_nodes // 10)]).astype(np.int32)
    head = rng.standard_normal((settings.width, classes), np.float32) * settings.width**-0.5
    return Task(nodes, rng.integers(0, classes, len(nodes)).astype(np.int32), head)


def sampled_rows(num_nodes: int) -> np.ndarray:
    """The rows of results and of feature gradients to compare."""
    return np.unique(np.random.default_rng(1).integers(0, num_nodes, _SAMPLE))


def sample_path(folder: Path, model: str, settings: Settings) -> Path:
    """The file of our results on the graph in `folder`, with which peers are compared."""
    return folder / f"{model}_{settings.name}.npz"


def write_sample(path: Path, y: np.ndarray, grad_x: np.ndarray, grads: dict[str, np.ndarray]) -> None:
    np.savez(path, y=y, grad_x=grad_x, **{f"grad_{key}": value for key, value in grads.items()})


def agreement(path: Path, y: Any, grad_x: Any, grads: dict[str, Any]) -> dict[str, float] | None:
    """Relative differences (norm) from our sample: of the result, and the largest of all gradients.

    A gradient that a peer shares among relations, [1, ...], is compared with the sum of ours over relations. None if
    there is no sample.
    """
    if not path.exists():
        return None
    with np.load(path) as ours:
        worst = _difference(grad_x, ours["grad_x"])
        for key, value in grads.items():
            want = ours[f"grad_{key}"]
            if value.shape != want.shape:
                want = want.sum(0, keepdims=True)
            worst = max(worst, _difference(value, want))
        return {"forward": _difference(y, ours["y"]), "gradients": worst}


def _difference(got: Any, want: np.ndarray) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"a result has shape {got.shape}, ours {want.shape}")
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))
