"""The peer of `benchmarks/database.py`: PyTorch Geometric's NeighborLoader in time, and heterogeneous GraphSAGE.

    python benchmarks/peers/database_pyg.py FOLDER JOB

It prints one line of JSON. `NeighborLoader` samples with the times of edges, the latest first, one neighbourhood for
each seed; its processes read the rows, too. A dense encoder for each table, and a `SAGEConv` (mean) for each relation,
summed by `HeteroConv`, with `trim_to_layer`. Its encoders do less than ours: the packed numbers enter as they are,
standardised, with zeros for what is missing, and what is known later than the cutoff is not hidden. It needs pyg-lib,
without which torch_geometric samples no edges in time.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
from torch import nn
from torch_geometric.data import HeteroData
from torch_geometric.loader import NeighborLoader
from torch_geometric.nn import HeteroConv, SAGEConv
from torch_geometric.utils import trim_to_layer

WARM_UP = 20  # steps, in which the loader's processes start, too


def graph_of(folder: Path, job: dict[str, Any]) -> HeteroData:
    data = HeteroData()
    for table, count in job["tables"].items():
        path = folder / f"rows_{table}.npy"
        rows = np.load(path) if path.exists() else np.ones((count, 1), np.float32)
        mean, deviation = np.nanmean(rows, 0), np.nanstd(rows, 0)
        rows = np.nan_to_num((rows - mean) / np.where(deviation > 0, deviation, 1))
        data[table].x = torch.from_numpy(rows.astype(np.float32))
    for number, relation in enumerate(map(tuple, job["relations"])):
        ends, path = np.load(folder / f"ends_{number}.npy"), folder / f"times_{number}.npy"
        times = np.load(path) if path.exists() else np.zeros(ends.shape[1], np.int64)
        data[relation].edge_index = torch.from_numpy(ends)
        data[relation].time = torch.from_numpy(times)
    return data


class Model(nn.Module):
    """Encoders, two or more layers, and a linear map of the seeds."""

    def __init__(self, data: HeteroData, layers: int, hidden: int) -> None:
        super().__init__()
        self.encoders = nn.ModuleDict(
            {
                table: nn.Sequential(
                    nn.Linear(data[table].x.shape[1], hidden),
                    nn.LayerNorm(hidden),
                    nn.ReLU(),
                    nn.Linear(hidden, hidden),
                    nn.ReLU(),
                )
                for table in data.node_types
            }
        )
        self.layers = nn.ModuleList(
            HeteroConv({relation: SAGEConv((hidden, hidden), hidden) for relation in data.edge_types}, aggr="sum")
            for _ in range(layers)
        )
        self.head = nn.Linear(hidden, 1)

    def forward(self, batch: HeteroData, entity: str) -> torch.Tensor:
        x = {table: self.encoders[table](rows) for table, rows in batch.x_dict.items()}
        edges = batch.edge_index_dict
        for number, layer in enumerate(self.layers):
            x, edges, _ = trim_to_layer(number, batch.num_sampled_nodes_dict, batch.num_sampled_edges_dict, x, edges)
            x = {table: torch.relu(rows) for table, rows in layer(x, edges).items()}
        return self.head(x[entity][: batch[entity].batch_size])[:, 0]


def seeds_a_second(step: Callable[[], int], seconds: float, wait: Callable[[], None]) -> float:
    """Of a step that says how many seeds it had."""
    for _ in range(WARM_UP):
        step()
    wait()
    begin, seeds = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        seeds += step()
    wait()
    return round(seeds / (time.perf_counter() - begin), 1)


def main() -> None:
    folder, job = Path(sys.argv[1]), json.loads(sys.argv[2])
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    data, entity = graph_of(folder, job), job["entity"]
    seeds, cutoffs, labels = (
        torch.from_numpy(np.load(folder / f"{name}.npy")) for name in ("seeds", "cutoffs", "labels")
    )
    loader = NeighborLoader(
        data,
        num_neighbors=dict.fromkeys(data.edge_types, job["fan_outs"]),
        input_nodes=(entity, seeds),
        input_time=cutoffs,
        time_attr="time",
        temporal_strategy="last" if job["recent"] else "uniform",
        batch_size=job["batch"],
        shuffle=True,
        drop_last=True,
        num_workers=job["workers"],
        persistent_workers=job["workers"] > 0,
        filter_per_worker=job["workers"] > 0,
        pin_memory=device.type == "cuda",
    )
    batches: Iterator[HeteroData] = itertools.chain.from_iterable(itertools.repeat(loader))
    model = Model(data, len(job["fan_outs"]), job["hidden"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), job["lr"], fused=device.type == "cuda")
    loss_of, losses = nn.BCEWithLogitsLoss(), []

    def train(batch: HeteroData) -> int:
        wanted = labels[batch[entity].input_id.cpu()].to(device, non_blocking=True)
        loss = loss_of(model(batch, entity), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
        return len(wanted)

    there = [next(batches).to(device) for _ in range(4)]
    on_device = itertools.cycle(there)
    found: dict[str, Any] = {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "rows_of_a_batch": {table: len(there[0][table].x) for table in data.node_types},
        "model_seeds_per_s": seeds_a_second(lambda: train(next(on_device)), job["seconds"], wait),
        "loader_seeds_per_s": seeds_a_second(lambda: next(batches)[entity].batch_size, job["seconds"], wait),
        "seeds_per_s": seeds_a_second(lambda: train(next(batches).to(device, non_blocking=True)), job["seconds"], wait),
        "loss": [float(losses[0]), float(losses[-1])],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {
            "torch": torch.__version__,
            "torch_geometric": _version("torch_geometric"),
            "pyg_lib": _version("pyg_lib"),
        },
    }
    print(json.dumps(found))


def _version(name: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
