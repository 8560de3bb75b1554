"""One of several processes that train a full graph; run by test_processes.py.

python full_graph_process.py ADDRESS PROCESSES NUMBER FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from dejax.distributed.full_graph import load_nodes, load_parts
from dejax.rgnn import library


def main(address: str, processes: int, number: int, folder: Path) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, processes, number)
    mesh = Mesh(np.array(jax.devices()), ("parts",))
    graph = load_parts(folder, mesh)
    x, labels = (load_nodes(folder, graph, name) for name in ("x", "labels"))
    with np.load(folder / "params.npz") as file:
        params: Any = [{name: jnp.asarray(file[f"{name}_{n}"]) for name in ("weight", "root")} for n in range(2)]
    optimizer = optax.adam(0.03)

    def loss(params: Any, graph: Any, x: Any, labels: Any) -> Any:
        logits = library.rgcn(graph, jnp.tanh(library.rgcn(graph, x, params[0])), params[1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.where(graph.node_mask, losses, 0.0).sum() / graph.layout.num_nodes

    @jax.jit
    def step(params: Any, state: Any, *given: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *given)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, value

    losses, state = [], optimizer.init(params)
    for _ in range(5):
        params, state, value = step(params, state, graph, x, labels)
        losses.append(float(value))
    opened = sorted(
        {
            line.split("/")[-2]
            for line in Path("/proc/self/maps").read_text().splitlines()
            if str(folder) in line and "part_" in line
        }
    )
    ones = graph.unshard_nodes(graph.shard_nodes(np.arange(graph.layout.num_nodes)))
    whole = bool((ones == np.arange(graph.layout.num_nodes)).all())
    (folder / f"result_{number}.json").write_text(json.dumps({"losses": losses, "opened": opened, "whole": whole}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
