"""Makes `pyg_layers.npz` next to this file: layers of PyTorch Geometric as they are, with their results, in float64.

Run by hand, with a CPU build of PyTorch (the tests need neither torch nor torch_geometric):

    pip install torch==2.13.0 torch_geometric==2.8.1 numpy
    python tests/rgnn/layers/data/make_pyg_layers.py

For each case: the layer's class, its plain attributes and the classes of its parts as JSON, its parameters and buffers
by their names there, and its result. The test builds a stand-in with these attributes and names.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg

HERE = Path(__file__).parent
N, E, R, C, K, D = 12, 40, 3, 2, 6, 4


def perceptron(bias: bool = True) -> Any:
    return torch.nn.Sequential(torch.nn.Linear(K, 5, bias=bias), torch.nn.ReLU(), torch.nn.Linear(5, D, bias=bias))


def make_cases() -> dict[str, tuple[Any, str]]:
    """Name -> (layer, the arguments of its call)."""
    no_loops: dict[str, Any] = {"add_self_loops": False}
    cases: dict[str, tuple[Any, str]] = {
        "rgcn": (pyg.RGCNConv(K, D, R), "typed"),
        "rgcn_bases": (pyg.RGCNConv(K, D, R, num_bases=2), "typed"),
        "rgcn_blocks": (pyg.RGCNConv(K, D, R, num_blocks=2), "typed"),
        "rgcn_sum": (pyg.FastRGCNConv(K, D, R, aggr="add", root_weight=False, bias=False), "typed"),
        "rgat": (pyg.RGATConv(K, D, R, heads=2), "typed"),
        "rgat_within": (pyg.RGATConv(K, D, R, heads=3, concat=False, attention_mechanism="within-relation"), "typed"),
        "rgat_bases": (pyg.RGATConv(K, D, R, num_bases=2, bias=False), "typed"),
        "rgat_product": (pyg.RGATConv(K, D, R, attention_mode="multiplicative-self-attention"), "typed"),
        "rgat_edges": (pyg.RGATConv(K, D, R, heads=2, edge_dim=C), "typed edges"),
        "hgt": (pyg.HGTConv(K, D, METADATA, heads=2), "hetero"),
        "hgt_skip": (pyg.HGTConv(K, K, METADATA, heads=3), "hetero"),
        "gcn": (pyg.GCNConv(K, D), "plain"),
        "gcn_weights": (pyg.GCNConv(K, D, bias=False), "weights"),
        "gcn_no_loops": (pyg.GCNConv(K, D, add_self_loops=False), "plain"),
        "sage": (pyg.SAGEConv(K, D), "plain"),
        "sage_max": (pyg.SAGEConv(K, D, aggr="max", root_weight=False, bias=False), "plain"),
        "sage_sum": (pyg.SAGEConv(K, D, aggr="sum", normalize=True), "plain"),
        "sage_project": (pyg.SAGEConv(K, D, project=True), "plain"),
        "sage_pair": (pyg.SAGEConv((K, 5), D), "pair"),
        "gin": (pyg.GINConv(perceptron()), "plain"),
        "gin_epsilon": (pyg.GINConv(perceptron(bias=False), train_eps=True), "plain"),
        "gine": (pyg.GINEConv(perceptron(), edge_dim=C), "edges"),
        "gat_pair": (pyg.GATConv((K, 5), D, heads=2, **no_loops), "pair"),
        "gatv2_pair": (pyg.GATv2Conv((K, 5), D, heads=2, **no_loops), "pair"),
        "gatv2_shared": (pyg.GATv2Conv(K, D, heads=2, share_weights=True, **no_loops), "plain"),
        "transformer": (pyg.TransformerConv(K, D, heads=2), "plain"),
        "transformer_mean": (pyg.TransformerConv(K, D, heads=3, concat=False, root_weight=False), "plain"),
        "transformer_gate": (pyg.TransformerConv(K, D, heads=2, beta=True, bias=False), "plain"),
        "transformer_edges": (pyg.TransformerConv(K, D, edge_dim=C), "edges"),
        "gated_gcn": (pyg.ResGatedGraphConv(K, D), "plain"),
        "gated_gcn_no_root": (pyg.ResGatedGraphConv(K, D, root_weight=False), "plain"),
        "gated_graph": (pyg.GatedGraphConv(K, 1), "plain"),
        "gated_graph_no_bias": (pyg.GatedGraphConv(K, 1, bias=False), "plain"),
    }
    for name, layer in (("gat", pyg.GATConv), ("gatv2", pyg.GATv2Conv)):
        cases[name] = (layer(K, D, heads=2, bias=False, negative_slope=0.1, **no_loops), "plain")
        cases[f"{name}_mean"] = (layer(K, D, heads=3, concat=False, residual=True, **no_loops), "plain")
        cases[f"{name}_edges"] = (layer(K, D, heads=2, edge_dim=C, **no_loops), "edges")
        cases[f"{name}_loops"] = (layer(K, D, heads=2), "plain")
    return cases


METADATA = (["a", "b"], [("a", "x", "b"), ("b", "y", "b"), ("b", "z", "a")])
FIRST = 5  # nodes of type "a"


def is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return isinstance(value, str | int | float | bool | None)


def described(layer: Any) -> dict[str, Any]:
    """Class and plain attributes of the layer and of its parts, by their paths."""
    found = {}
    for path, part in layer.named_modules():
        values = {k: v for k, v in vars(part).items() if not k.startswith("_") and is_plain(v)}
        if isinstance(getattr(part, "in_channels", None), dict):
            values["in_channels"] = part.in_channels
        absent = {k: None for k, v in part._parameters.items() if v is None}
        found[path] = {"class": type(part).__name__, "values": values | absent}
    if getattr(layer, "share_weights", False):
        found[""]["shared"] = ["lin_l", "lin_r"]
    return found


def make_graph(rng: np.random.Generator) -> dict[str, np.ndarray]:
    senders, receivers = rng.integers(0, N, E), rng.integers(3, N, E)  # three nodes without edges
    kept = senders != receivers
    graph = {"senders": senders[kept], "receivers": receivers[kept]}
    graph["edge_type"] = rng.integers(0, R, kept.sum())
    graph["features"] = rng.normal(size=(kept.sum(), C))
    graph["weights"] = rng.uniform(0.5, 2, kept.sum())
    ranges = {"a": (0, FIRST), "b": (FIRST, N)}
    ends = [[rng.integers(*ranges[kind], 15) for kind in (u, v)] for u, _, v in METADATA[1]]
    graph["hetero_edges"] = np.stack([np.stack(pair) for pair in ends])  # [relation, end, edge]
    return graph | {"x": rng.normal(size=(N, K)), "x_destinations": rng.normal(size=(N, 5))}


def call(layer: Any, how: str, graph: dict[str, np.ndarray]) -> np.ndarray:
    t = {name: torch.as_tensor(value) for name, value in graph.items()}
    edges = torch.stack([t["senders"], t["receivers"]])
    if how == "hetero":
        offset = {"a": 0, "b": FIRST}
        lists = {
            (u, r, v): pair - torch.as_tensor([[offset[u]], [offset[v]]])
            for (u, r, v), pair in zip(METADATA[1], t["hetero_edges"], strict=True)
        }
        out = layer({"a": t["x"][:FIRST], "b": t["x"][FIRST:]}, lists)
        return np.concatenate([out[kind].detach().numpy() for kind in METADATA[0]])
    x = (t["x"], t["x_destinations"]) if how == "pair" else t["x"]
    more = {
        "typed": (t["edge_type"],),
        "typed edges": (t["edge_type"], t["features"]),
        "edges": (t["features"],),
        "weights": (t["weights"],),
    }.get(how, ())
    found: np.ndarray = layer(x, edges, *more).detach().numpy()
    return found


def main() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    graph = make_graph(np.random.default_rng(0))
    arrays = {f"graph/{name}": value for name, value in graph.items()}
    for name, (layer, how) in make_cases().items():
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            if name == "gine":
                layer.lin.bias.zero_()
        arrays |= {f"{name}/state/{key}": value.numpy() for key, value in layer.state_dict().items()}
        arrays[f"{name}/out"] = call(layer.eval(), how, graph)
        arrays[f"{name}/about"] = np.array(json.dumps({"call": how, "parts": described(layer)}))
    np.savez_compressed(HERE / "pyg_layers.npz", **arrays)


if __name__ == "__main__":
    main()
