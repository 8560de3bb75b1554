"""Graphs and inputs of `attention.py`, of NumPy alone: its peer makes the same ones in a process of its own."""

from __future__ import annotations

import numpy as np


def edges_of(nodes: int, edges: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Senders are uniform; the r-th receiver has a share of the edges that falls as r^(-0.6)."""
    rng = np.random.default_rng(seed)
    receivers = (nodes * rng.random(edges) ** 2.5).astype(np.int32)
    return rng.integers(0, nodes, edges, dtype=np.int32), rng.permutation(nodes).astype(np.int32)[receivers]


def rows_of(model: str, nodes: int, heads: int, width: int) -> dict[str, np.ndarray]:
    """Projected rows [nodes, heads, width] by name; for GATv2 the shared vector "attention" [heads, width], too."""
    names = ("source", "destination") if model == "gatv2" else ("query", "key", "value")
    found = {
        name: np.random.default_rng(i).standard_normal((nodes, heads, width), dtype=np.float32)
        for i, name in enumerate(names)
    }
    if model == "gatv2":
        found["attention"] = np.random.default_rng(9).standard_normal((heads, width), dtype=np.float32)
    return found
