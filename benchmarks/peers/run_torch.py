"""Measures one PyTorch implementation of a layer."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.device_time import profile_torch
from benchmarks.peers import case
from benchmarks.peers.case import Graph, Settings
from benchmarks.peers.timing import Limits, measure
from benchmarks.peers.torch_layers import DTYPES, LAYERS, DoesNotApply, Layer, NotInstalled


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare(cache: str | None) -> dict[str, str]:
    del cache  # it is jax's
    torch.zeros(1, device=device())
    found = {"torch": torch.__version__}
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
    try:
        import torch_geometric
    except ImportError:
        return found
    return found | {"torch_geometric": torch_geometric.__version__}


def classify(error: BaseException) -> str:
    if isinstance(error, NotInstalled):
        return "absent"
    if isinstance(error, DoesNotApply):
        return "does not apply"
    return "OOM" if isinstance(error, (torch.OutOfMemoryError, MemoryError)) else "error"


def clean_up() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def synchronize(_: Any = None) -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def make(cell: dict[str, Any], graph: Graph, settings: Settings, params: dict[str, np.ndarray]) -> Layer:
    """The layer. `compiled` is `torch.compile` of the layer `cell["base"]`."""
    name = cell["implementation"]
    layer = LAYERS[cell["base"] if name == "compiled" else name](graph, cell["model"], settings, params, device())
    if name != "compiled":
        return layer
    torch._dynamo.reset()
    return Layer(torch.compile(layer.function), layer.params, layer.gradients)


def run_cell(cell: dict[str, Any], folder: Path, limits: Limits) -> dict[str, Any]:
    """Measures `cell["implementation"]` of `cell["model"]` on the graph in `folder`."""
    settings = Settings(**cell["settings"])
    torch.backends.cuda.matmul.allow_tf32 = settings.precision != "f32"
    graph = Graph.load(folder)
    if cell.get("task") == "train":
        from benchmarks.peers import train_torch

        return train_torch.run_cell(cell, graph, folder, settings, limits, device())
    on_gpu = torch.cuda.is_available()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    layer = make(cell, graph, settings, case.parameters(cell["model"], graph, settings))
    x = torch.from_numpy(np.array(case.features(graph, folder, settings))).to(device(), DTYPES[settings.dtype])
    cotangent = x.flip(0)
    x.requires_grad_()

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return layer.function(x)

    def training() -> tuple[torch.Tensor, Any]:
        y = layer.function(x)
        return y, torch.autograd.grad(y, [x, *layer.params], cotangent, allow_unused=True)

    found: dict[str, Any] = {"base": cell["base"]} if "base" in cell else {}
    for name, call in (("forward", forward), ("training", training)):
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        result = call()
        synchronize()
        found[name] = {"first_call_s": time.perf_counter() - start}
        if on_gpu:
            found[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
        if name == "training":
            y, (grad_x, *grads) = result
            rows = torch.from_numpy(case.sampled_rows(graph.num_nodes)).to(device())
            values = (_array(y[rows]), _array(grad_x[rows]))
            gradients = {key: _array(value) for key, value in layer.gradients(grads).items()}
            path = case.sample_path(folder, cell["model"], settings)
            found["agreement"] = case.agreement(path, *values, gradients)
            del y, grad_x, grads, gradients
        del result
        found[name] |= measure(call, synchronize, profile_torch, limits)
    return found


def _array(x: torch.Tensor) -> np.ndarray:
    return x.detach().float().cpu().numpy()
