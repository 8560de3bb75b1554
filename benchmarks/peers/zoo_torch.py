"""PyTorch Geometric's layers: their training times.

python benchmarks/peers/zoo_torch.py GRAPH.npz OUT.json gcn,sage WIDTH HEADS
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric.nn as pyg

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.clock import rounds


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
    times(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3].split(","), int(sys.argv[4]), int(sys.argv[5]))
