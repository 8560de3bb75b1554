"""Measures one JAX implementation of a layer, ours included."""

from __future__ import annotations

import gc
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device_time import profile_jax
from benchmarks.peers import case, jax_layers
from benchmarks.peers.case import Graph, Settings
from benchmarks.peers.jax_layers import LAYERS, Layer, NotInstalled
from benchmarks.peers.timing import Limits, measure

_PRECISIONS = {"f32": "highest", "tf32": None, "bf16": "bfloat16"}  # None: jax's own default, TF32 on a GPU


def prepare(cache: str | None) -> dict[str, str]:
    """Turns the persistent compilation cache on and starts the device; returns the device's name."""
    if cache:
        jax.config.update("jax_compilation_cache_dir", cache)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    jax.block_until_ready(jnp.ones((64, 64)) @ jnp.ones((64, 64)))
    return {"jax": jax.__version__, "device": jax.devices()[0].device_kind}


def classify(error: BaseException) -> str:
    if isinstance(error, NotInstalled):
        return "absent"
    return "OOM" if "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error) else "error"


def clean_up() -> None:
    gc.collect()
    jax.clear_caches()


def run_cell(cell: dict[str, Any], folder: Path, limits: Limits) -> dict[str, Any]:
    """Measures `cell["implementation"]` of `cell["model"]` on the graph in `folder`.

    With `cell["task"] == "compile"` only the first calls are timed. In a new process, on a persistent cache that
    another process filled, this is the time of a warm start.
    """
    settings = Settings(**cell["settings"])
    graph = Graph.load(folder)
    if cell.get("task") == "build":
        return {"build": _build(graph, cell["edges"], limits)}
    if cell.get("task") == "train":
        from benchmarks.peers import train_jax

        return train_jax.run_cell(cell, graph, folder, settings, limits)
    with jax.default_matmul_precision(_PRECISIONS[settings.precision]):
        layer = LAYERS[cell["implementation"]](graph, cell["model"], settings)
        return _Cell(layer, graph, cell, settings, folder).run(limits)


def _build(graph: Graph, count: int, limits: Limits) -> dict[str, Any]:
    """Makes a batch's graph inside jit, as after sampling: `count` random edges, with renumbered nodes."""
    from dejax.rgnn import RelGraph

    edges = np.random.default_rng(0).integers(0, graph.num_edges, count)
    nodes, ends = np.unique(np.stack([graph.senders[edges], graph.receivers[edges]]), return_inverse=True)
    arrays = [jnp.asarray(a, jnp.int32) for a in (*ends.reshape(2, -1), graph.edge_type[edges], graph.node_type[nodes])]

    @jax.jit
    def build(senders: Any, receivers: Any, edge_type: Any, node_type: Any) -> Any:
        sizes = {
            "num_nodes": len(nodes),
            "num_edge_types": graph.num_edge_types,
            "num_node_types": graph.num_node_types,
        }
        return RelGraph.build_traced(senders, receivers, edge_type, node_type=node_type, **sizes)

    jax.block_until_ready(build(*arrays))
    return {"nodes": len(nodes), **measure(lambda: build(*arrays), jax.block_until_ready, profile_jax, limits)}


class _Cell:
    def __init__(self, layer: Layer, graph: Graph, cell: dict[str, Any], settings: Settings, folder: Path) -> None:
        dtype = jnp.dtype(settings.dtype)
        self.graph, self.cell, self.settings, self.folder = graph, cell, settings, folder
        self.tables = layer.tables
        params = case.parameters(cell["model"], graph, settings)
        self.params = {name: jnp.asarray(value, dtype) for name, value in params.items()}
        self.x = jnp.asarray(case.features(graph, folder, settings), dtype)
        self.cotangent = self.x[::-1]
        self.ours = cell["implementation"] == "dejax"

        def forward(tables: Any, x: Any, params: Any) -> Any:
            return layer.function(tables, x, params)

        def training(tables: Any, x: Any, params: Any, cotangent: Any) -> Any:
            y, pullback = jax.vjp(lambda x, p: layer.function(tables, x, p), x, params)
            return y, pullback(cotangent)

        self.jitted = {"forward": jax.jit(forward), "training": jax.jit(training)}
        inputs = (self.tables, self.x, self.params)
        self.args = {"forward": inputs, "training": (*inputs, self.cotangent)}

    def run(self, limits: Limits) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in ("forward", "training"):
            start = time.perf_counter()
            compiled = self.jitted[name].lower(*self.args[name]).compile()
            result = jax.block_until_ready(compiled(*self.args[name]))
            found[name] = {"first_call_s": time.perf_counter() - start}
            if self.cell.get("task") == "compile":
                continue
            memory = compiled.memory_analysis()
            if memory is not None:
                found[name] |= self._memory(memory)
            call = lambda name=name: self.jitted[name](*self.args[name])  # noqa: E731
            jax.block_until_ready(call())
            if name == "training":
                found |= self._compare(result)
            del result
            found[name] |= measure(call, jax.block_until_ready, profile_jax, limits)
        if self.ours:
            found["graph_s"] = jax_layers.rel_graph(self.graph)[1]
        return found

    def _memory(self, memory: Any) -> dict[str, int]:
        """Peak bytes, and the bytes that every implementation needs: inputs, outputs and one compacted tensor."""
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        pairs = self.tables.num_source_pairs if self.ours else 0
        needed = held + pairs * self.settings.width * self.settings.itemsize
        return {"peak_bytes": held + memory.temp_size_in_bytes} | ({"needed_bytes": needed} if self.ours else {})

    def _compare(self, result: Any) -> dict[str, Any]:
        y, (grad_x, grads) = result
        rows = case.sampled_rows(self.graph.num_nodes)
        values = [np.asarray(jnp.asarray(a[rows], jnp.float32)) for a in (y, grad_x)]
        shared = {k: np.asarray(v.astype(jnp.float32)) for k, v in grads.items()}
        path = case.sample_path(self.folder, self.cell["model"], self.settings)
        if self.ours:
            case.write_sample(path, *values, shared)
        else:
            for name in shared:
                if name.startswith("attention_"):  # only the first relation is read, since the vectors are shared
                    shared[name] = shared[name].sum(0, keepdims=True)
        return {"agreement": case.agreement(path, *values, shared)} if not self.ours else {}
