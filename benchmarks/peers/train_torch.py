"""One epoch of a two-layer model with Adam, in PyTorch, with the layers of `torch_layers`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device_time import profile_torch
from benchmarks.peers import case
from benchmarks.peers.case import Graph, Settings
from benchmarks.peers.timing import Limits, measure
from benchmarks.peers.torch_layers import DTYPES, LAYERS


def run_cell(
    cell: dict[str, Any], graph: Graph, folder: Path, settings: Settings, limits: Limits, device: torch.device
) -> dict[str, Any]:
    dtype, on_gpu = DTYPES[settings.dtype], device.type == "cuda"
    before = torch.cuda.memory_allocated() if on_gpu else 0
    layers = [
        LAYERS[cell["implementation"]](
            graph, cell["model"], settings, case.parameters(cell["model"], graph, settings, seed=i), device
        )
        for i in (0, 1)
    ]
    task = case.classification(graph, settings, cell["classes"])
    x = torch.from_numpy(np.array(case.features(graph, folder, settings))).to(device, dtype)
    head = torch.from_numpy(task.head).to(device, dtype).requires_grad_()
    nodes, labels = (torch.from_numpy(a).to(device, torch.int64) for a in (task.nodes, task.labels))
    params = [head, *(p for layer in layers for p in layer.params)]
    optimizer = torch.optim.Adam(params, lr=case.LEARNING_RATE, fused=on_gpu)
    losses: list[torch.Tensor] = []

    def epoch() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        logits = layers[1].function(torch.relu(layers[0].function(x)))[nodes] @ head
        value = torch.nn.functional.cross_entropy(logits.float(), labels)
        value.backward()
        optimizer.step()
        losses.append(value.detach())
        return value

    def synchronize(_: Any = None) -> None:
        if on_gpu:
            torch.cuda.synchronize()

    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    epoch()
    synchronize()
    found: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    found |= measure(epoch, synchronize, profile_torch, limits)
    if on_gpu:
        found["peak_bytes"] = torch.cuda.max_memory_allocated() - before
    return {"epoch": found, "losses": [float(value) for value in losses[:3]]}
