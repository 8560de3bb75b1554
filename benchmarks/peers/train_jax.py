"""One epoch of a two-layer model with Adam, in JAX: ours, or layers in plain JAX."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.device_time import profile_jax
from benchmarks.peers import case
from benchmarks.peers.case import Graph, Settings
from benchmarks.peers.jax_layers import LAYERS
from benchmarks.peers.timing import Limits, measure


def run_cell(cell: dict[str, Any], graph: Graph, folder: Path, settings: Settings, limits: Limits) -> dict[str, Any]:
    dtype = jnp.dtype(settings.dtype)
    layer = LAYERS[cell["implementation"]](graph, cell["model"], settings)
    task = case.classification(graph, settings, cell["classes"])
    x = jnp.asarray(case.features(graph, folder, settings), dtype)
    params: Any = {f"layer{i}": case.parameters(cell["model"], graph, settings, seed=i) for i in (0, 1)}
    params = jax.tree.map(lambda p: jnp.asarray(p, dtype), {**params, "head": task.head})
    optimizer = optax.adam(case.LEARNING_RATE)

    def loss(params: Any, tables: Any, x: Any, nodes: Any, labels: Any) -> Any:
        h = jax.nn.relu(layer.function(tables, x, params["layer0"]))
        logits = layer.function(tables, h, params["layer1"])[nodes] @ params["head"]
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()

    def step(params: Any, state: Any, *data: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *data)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    data = (layer.tables, x, jnp.asarray(task.nodes), jnp.asarray(task.labels))
    state = (params, optimizer.init(params))
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*state, *data).compile()
    losses = []

    def epoch() -> Any:
        nonlocal state
        *following, value = compiled(*state, *data)
        state = tuple(following)
        losses.append(value)
        return value

    jax.block_until_ready(epoch())
    found: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    memory = compiled.memory_analysis()
    if memory is not None:
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        found["peak_bytes"] = held + memory.temp_size_in_bytes
    found |= measure(epoch, jax.block_until_ready, profile_jax, limits)
    return {"epoch": found, "losses": [float(value) for value in losses[:3]]}
