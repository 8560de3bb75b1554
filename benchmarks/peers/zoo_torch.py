"""PyTorch Geometric's layers: their results on small graphs with our parameters, and their training times.

    python benchmarks/peers/zoo_torch.py agree OUT.npz
    python benchmarks/peers/zoo_torch.py time GRAPH.npz PARAMS.npz OUT.json gcn,sage

`agree` writes for each layer its inputs, its parameters by our names, its result and the gradient of x, in float64.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clock import rounds

Arrays = dict[str, np.ndarray]
K, D, H, C, R, T = 6, 4, 3, 2, 4, 3  # input width, a head's width, heads, edge features, edge and node types


def array(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().numpy().copy()


def matrix(linear: Any) -> np.ndarray:
    return array(linear.weight).T.copy()


def by_head(weight: torch.Tensor) -> np.ndarray:
    """[H * d, k] as [H, k, d]."""
    return array(weight).reshape(H, -1, weight.shape[1]).transpose(0, 2, 1).copy()


def gcn(m: Any) -> Arrays:
    return {"weight": matrix(m.lin), "bias": array(m.bias)}


def sage(m: Any) -> Arrays:
    return {"neighbour": matrix(m.lin_l), "bias": array(m.lin_l.bias), "root": matrix(m.lin_r)}


def gin(m: Any) -> Arrays:
    found = {f"weight_{i}": matrix(m.nn[2 * (i - 1)]) for i in (1, 2)}
    found |= {f"bias_{i}": array(m.nn[2 * (i - 1)].bias) for i in (1, 2)} | {"epsilon": array(m.eps).reshape(())}
    if hasattr(m, "lin") and m.lin is not None:
        found["edge"] = matrix(m.lin)
    return found


def gated_gcn(m: Any) -> Arrays:
    return {
        "gate_dst": matrix(m.lin_key),
        "gate_src": matrix(m.lin_query),
        "gate_bias": array(m.lin_key.bias + m.lin_query.bias),
        "value": matrix(m.lin_value),
        "value_bias": array(m.lin_value.bias),
        "root": matrix(m.lin_skip),
        "bias": array(m.bias),
    }


def pna(m: Any) -> Arrays:
    pre, post = [t[0] for t in m.pre_nns], [t[0] for t in m.post_nns]
    rows = [array(t.weight).T for t in pre]  # x_i, then x_j
    update = [array(t.weight).T for t in post]
    return {
        "message_dst": np.stack([w[:K] for w in rows]),
        "message_src": np.stack([w[K : 2 * K] for w in rows]),
        "message_bias": np.stack([array(t.bias) for t in pre]),
        "update": np.stack([w[:K] for w in update]),
        "update_bias": np.stack([array(t.bias) for t in post]),
        "aggregate": np.stack([[w[K + 4 * K * s : K + 4 * K * (s + 1)] for w in update] for s in range(3)]),
        "out": matrix(m.lin),
        "bias": array(m.lin.bias),
    }


def gat(m: Any) -> Arrays:
    return {
        "weight": by_head(m.lin.weight),
        "attention_src": array(m.att_src)[0],
        "attention_dst": array(m.att_dst)[0],
        "weight_edge": by_head(m.lin_edge.weight),
        "attention_edge": array(m.att_edge)[0],
        "bias": array(m.bias),
    }


def gatv2(m: Any) -> Arrays:
    return {
        "weight_src": by_head(m.lin_l.weight),
        "bias_src": array(m.lin_l.bias).reshape(H, -1),
        "weight_dst": by_head(m.lin_r.weight),
        "bias_dst": array(m.lin_r.bias).reshape(H, -1),
        "attention": array(m.att)[0],
        "weight_edge": by_head(m.lin_edge.weight),
        "bias": array(m.bias),
    }


def transformer(m: Any) -> Arrays:
    found = {name: by_head(getattr(m, f"lin_{name}").weight) for name in ("query", "key", "value")}
    found |= {
        f"{name}_bias": array(getattr(m, f"lin_{name}").bias).reshape(H, -1) for name in ("query", "key", "value")
    }
    return found | {
        "edge": by_head(m.lin_edge.weight),
        "root": matrix(m.lin_skip),
        "root_bias": array(m.lin_skip.bias),
        "gate": array(m.lin_beta.weight).reshape(3, -1),
    }


def rggnn(m: Any) -> Arrays:
    def gates(weight: torch.Tensor) -> np.ndarray:
        return array(weight).reshape(3, K, K).transpose(0, 2, 1).copy()

    return {
        "weight": array(m.weight)[0],
        "input": gates(m.rnn.weight_ih),
        "hidden": gates(m.rnn.weight_hh),
        "input_bias": array(m.rnn.bias_ih).reshape(3, K),
        "hidden_bias": array(m.rnn.bias_hh).reshape(3, K),
    }


def rgat(m: Any) -> Arrays:
    return {
        "weight": array(m.weight),
        "query": array(m.q),
        "key": array(m.k),
        "weight_edge": matrix(m.lin_edge),
        "attention_edge": array(m.e),
        "bias": array(m.bias),
    }


def heat(m: Any) -> Arrays:
    att, n = matrix(m.att), m.out_channels
    u = m.edge_type_emb.weight.shape[1]
    value = matrix(m.lin)
    return {
        "weight": array(m.hetero_lin.weight),
        "node_bias": array(m.hetero_lin.bias),
        "edge_embedding": array(m.edge_type_emb.weight),
        "weight_edge": matrix(m.edge_attr_emb),
        "attention_dst": att[:n],
        "attention_src": att[n : 2 * n],
        "attention_type": att[2 * n : 2 * n + u],
        "attention_edge": att[2 * n + u :],
        "value": value[:n],
        "value_edge": value[n:],
        "value_bias": array(m.lin.bias),
    }


def _perceptron() -> Any:
    return torch.nn.Sequential(torch.nn.Linear(K, 5), torch.nn.ReLU(), torch.nn.Linear(5, D))


def _pna(degrees: np.ndarray) -> Any:
    names = (["mean", "max", "min", "std"], ["identity", "amplification", "attenuation"])
    module = pyg.PNAConv(K, 2 * D, *names, deg=torch.as_tensor(np.bincount(degrees)), towers=2).double()
    module.aggr_module.avg_deg_log.fill_(np.log(degrees + 1.0).mean())  # PyTorch Geometric computes it in float32
    return module


Call = Callable[[Any, Any, dict[str, Any]], Any]
_PLAIN: Call = lambda m, x, g: m(x, g["edges"])  # noqa: E731
_WITH_EDGES: Call = lambda m, x, g: m(x, g["edges"], g["features"])  # noqa: E731
_TYPED: Call = lambda m, x, g: m(x, g["edges"], g["edge_type"], g["features"])  # noqa: E731
_HETERO: Call = lambda m, x, g: m(x, g["edges"], g["node_type"], g["edge_type"], g["features"])  # noqa: E731
# Name in the file -> our function, the module, our parameters of it, its call.
CASES: dict[str, tuple[str, Callable[[np.ndarray], Any], Callable[[Any], Arrays], Call]] = {
    "gcn": ("gcn", lambda _: pyg.GCNConv(K, D), gcn, _PLAIN),
    "sage_mean": ("graphsage", lambda _: pyg.SAGEConv(K, D), sage, _PLAIN),
    "sage_max": ("graphsage", lambda _: pyg.SAGEConv(K, D, aggr="max"), sage, _PLAIN),
    "gin": ("gin", lambda _: pyg.GINConv(_perceptron(), train_eps=True), gin, _PLAIN),
    "gine": ("gin", lambda _: pyg.GINEConv(_perceptron(), train_eps=True, edge_dim=C), gin, _WITH_EDGES),
    "gated_gcn": ("gated_gcn", lambda _: pyg.ResGatedGraphConv(K, D), gated_gcn, _PLAIN),
    "pna": ("pna", _pna, pna, _PLAIN),
    "gat": ("gat", lambda _: pyg.GATConv(K, D, H, add_self_loops=False, edge_dim=C), gat, _WITH_EDGES),
    "gatv2": ("gatv2", lambda _: pyg.GATv2Conv(K, D, H, add_self_loops=False, edge_dim=C), gatv2, _WITH_EDGES),
    "transformer": (
        "graph_transformer",
        lambda _: pyg.TransformerConv(K, D, H, beta=True, edge_dim=C),
        transformer,
        _WITH_EDGES,
    ),
    "rggnn": ("rggnn", lambda _: pyg.GatedGraphConv(K, 1), rggnn, _PLAIN),
    "rgat_across": (
        "rgat_shared",
        lambda _: pyg.RGATConv(K, D, R, heads=H, edge_dim=C, attention_mechanism="across-relation"),
        rgat,
        _TYPED,
    ),
    "rgat_within": (
        "rgat_shared",
        lambda _: pyg.RGATConv(K, D, R, heads=H, edge_dim=C, attention_mechanism="within-relation"),
        rgat,
        _TYPED,
    ),
    "rgat_multiplicative": (
        "rgat_shared",
        lambda _: pyg.RGATConv(
            K,
            D,
            R,
            heads=H,
            edge_dim=C,
            attention_mechanism="across-relation",
            attention_mode="multiplicative-self-attention",
        ),
        rgat,
        _TYPED,
    ),
    "heat": ("heat", lambda _: pyg.HEATConv(K, D, T, R, 3, C, 5, heads=H), heat, _HETERO),
}


def agree(out: Path) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    nodes, edges = 40, 200
    senders, receivers = rng.integers(0, nodes, edges), rng.integers(3, nodes, edges)  # three nodes without edges
    kept = senders != receivers  # GCNConv counts a loop that is there once, the paper twice
    senders, receivers = senders[kept], receivers[kept]
    order = np.argsort(receivers, kind="stable")
    graph: Arrays = {"senders": senders[order], "receivers": receivers[order]}
    graph["edge_type"] = rng.integers(0, R, len(order))
    graph["node_type"] = rng.integers(0, T, nodes)
    graph["features"] = rng.normal(size=(len(order), C))
    found = {f"graph/{key}": value for key, value in graph.items()}
    given = {key: torch.as_tensor(value) for key, value in graph.items()}
    given["edges"] = torch.stack([given["senders"], given["receivers"]])
    for name, (_, make, mapping, call) in CASES.items():
        try:
            module = make(np.bincount(graph["receivers"], minlength=nodes)).double()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.copy_(torch.randn_like(parameter) * 0.4)
                if name == "gine":
                    module.lin.bias.zero_()  # ours has none
            x = torch.randn(nodes, K, dtype=torch.float64, requires_grad=True)
            y = call(module, x, given)
            cotangent = torch.randn_like(y)
            (y * cotangent).sum().backward()
        except Exception:
            print(f"{name}: PyTorch Geometric failed\n{traceback.format_exc()}", flush=True)
            continue
        arrays = {"x": array(x), "y": array(y), "cotangent": array(cotangent), "gradient": array(x.grad)}
        found |= {f"{name}/{key}": value for key, value in arrays.items()}
        found |= {f"{name}/param_{key}": value for key, value in mapping(module).items()}
    np.savez(out, **found)


def modules(width: int, heads: int) -> dict[str, Callable[[], Any]]:
    """The timed layers; attention has heads of width / heads."""
    d = width // heads
    mlp = lambda: torch.nn.Sequential(  # noqa: E731
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, width)
    )
    return {
        "gcn": lambda: pyg.GCNConv(width, width),
        "sage": lambda: pyg.SAGEConv(width, width),
        "gin": lambda: pyg.GINConv(mlp()),
        "gated_gcn": lambda: pyg.ResGatedGraphConv(width, width),
        "gat": lambda: pyg.GATConv(width, d, heads, add_self_loops=False),
        "gatv2": lambda: pyg.GATv2Conv(width, d, heads, add_self_loops=False),
        "transformer": lambda: pyg.TransformerConv(width, d, heads),
        "rggnn": lambda: pyg.GatedGraphConv(width, 1),
    }


def _milliseconds(step: Callable[[], Any]) -> float:
    wait = lambda _: torch.cuda.synchronize()  # noqa: E731
    once = rounds(step, wait=wait)[0]
    if once > 2.0:
        return once * 1e3
    return rounds(step, max(2, min(30, int(0.3 / once))), warm_up=0, wait=wait)[0] * 1e3


def times(graph_file: Path, out: Path, chosen: list[str], width: int, heads: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    with np.load(graph_file) as file:
        nodes = int(file["num_nodes"])
        edges = torch.as_tensor(np.stack([file["senders"], file["receivers"]]).astype(np.int64), device="cuda")
    forms: dict[str, Any] = {"edge list": edges}
    try:
        from torch_geometric import EdgeIndex

        forms["EdgeIndex"] = EdgeIndex(edges, sparse_size=(nodes, nodes), sort_order="col").fill_cache_()
    except Exception as error:
        print(f"no EdgeIndex: {error}", flush=True)
    found: dict[str, dict[str, Any]] = {}
    for name in chosen:
        for form, index in forms.items():
            try:
                module = modules(width, heads)[name]().cuda()
                x = torch.randn(nodes, width, device="cuda", requires_grad=True)
                cotangent = torch.randn(nodes, width, device="cuda")
                forward = _milliseconds(lambda m=module, x=x, e=index: m(x, e))
                wanted = [x, *module.parameters()]
                train = _milliseconds(
                    lambda m=module, x=x, e=index, c=cotangent, w=wanted: torch.autograd.grad(
                        m(x, e), w, c, allow_unused=True
                    )
                )
                found.setdefault(name, {})[form] = {"forward": forward, "training": train}
            except Exception as error:
                found.setdefault(name, {})[form] = {"error": f"{type(error).__name__}: {str(error)[:120]}"}
            print(name, form, found[name][form], flush=True)
            module = x = cotangent = wanted = None
            torch.cuda.empty_cache()
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1] == "agree":
        agree(Path(sys.argv[2]))
    else:
        times(Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4].split(","), int(sys.argv[5]), int(sys.argv[6]))
