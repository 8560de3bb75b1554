"""The peer of `benchmarks/entity.py`: two R-GCN layers of PyTorch Geometric on a graph without node features.

    python benchmarks/peers/entity_pyg.py FOLDER JOB

It prints one line of JSON. The variants of JOB: `rgcn` has `RGCNConv`, `fast` has `FastRGCNConv` (more memory, less
time on small graphs), both with a weight for each node and relation, as our model; `fast-30` has `FastRGCNConv` with 30
bases, as the library's own example for this data set.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_geometric
from torch import nn
from torch_geometric.nn import FastRGCNConv, RGCNConv


class Model(nn.Module):
    """Two layers; the first has no input."""

    def __init__(self, job: dict[str, Any], relations: int) -> None:
        super().__init__()
        kind, _, bases = job["variant"].partition("-")
        layer = RGCNConv if kind == "rgcn" else FastRGCNConv
        own = {"num_bases": int(bases) if bases else None}
        self.first = layer(job["nodes"], job["hidden"], relations, **own)
        self.second = layer(job["hidden"], job["classes"], relations, **own)

    def forward(self, edge_index: torch.Tensor, edge_type: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(None, edge_index, edge_type))
        return self.second(x, edge_index, edge_type)


def train(job: dict[str, Any], arrays: dict[str, torch.Tensor], seed: int) -> tuple[float, int]:
    """The test accuracy after training with a seed, and the number of parameters."""
    torch.manual_seed(seed)
    edges = arrays["edge_index"], arrays["edge_type"]
    model = Model(job, int(edges[1].max()) + 1).to(edges[0].device)
    optimizer = torch.optim.Adam(model.parameters(), job["lr"], weight_decay=job["l2"], fused=True)
    for _ in range(job["epochs"]):
        optimizer.zero_grad()
        logits = model(*edges)[arrays["train_nodes"]]
        nn.functional.cross_entropy(logits, arrays["train_labels"]).backward()
        optimizer.step()
    with torch.no_grad():
        right = model(*edges)[arrays["test_nodes"]].argmax(-1) == arrays["test_labels"]
    return float(right.float().mean()), sum(parameter.numel() for parameter in model.parameters())


def main() -> None:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")  # TF32, as ours on a GPU
    arrays = {path.stem: torch.from_numpy(np.load(path)).to(device) for path in folder.glob("*.npy")}
    torch.ones(8, device=device).sum().item()  # the device is ready
    seconds, of_cpu, accuracies, parameters = [], [], [], 0
    for seed in range(job["seeds"]):
        begin, cpu = time.perf_counter(), time.process_time()
        accuracy, parameters = train(job, arrays, seed)
        accuracies.append(accuracy)
        seconds.append(time.perf_counter() - begin)
        of_cpu.append(time.process_time() - cpu)
    found = {
        "parameters": parameters,
        "seconds": seconds,
        "cpu_seconds": of_cpu,
        "test": accuracies,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "versions": {"torch": torch.__version__, "torch_geometric": torch_geometric.__version__},
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
