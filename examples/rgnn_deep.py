"""A deep relational model whose activations do not fit: offload around its layers, in one compiled step.

    python examples/rgnn_deep.py                                        # small: seconds on a CPU
    python examples/rgnn_deep.py --offload none                         # every layer's residuals stay on the device
    python examples/rgnn_deep.py --nodes 1000000 --edges 10000000 --layers 100 --width 128   # 50 GB of layers' inputs

Residual R-GCN layers, as deep models of graphs have them: `x + rgcn(norm(x))`. Each layer keeps its input, a row for
each node, and 100 layers of a million nodes keep 51 GB. Offloaded, they lie in host memory between forward and
backward. One line differs:

    -    layer = jax.checkpoint(layer)
    +    layer = offload(jax.checkpoint(layer), inputs=1)

The graph is synthetic. The class of a node is a random function of its own features and its neighbours'.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax.offload import ActivationStore, offload
from dejax.rgnn import RelGraph, library


def make_data(options: argparse.Namespace) -> tuple[RelGraph, jax.Array, jax.Array]:
    """A graph, features [nodes, width], and labels [nodes] that depend on neighbours."""
    rng = np.random.default_rng(0)
    senders = rng.integers(0, options.nodes, options.edges)
    receivers = rng.integers(0, options.nodes, options.edges)
    kinds = rng.integers(0, options.relations, options.edges)
    graph = RelGraph.from_edges(senders, receivers, kinds, num_nodes=options.nodes, num_edge_types=options.relations)
    x = rng.standard_normal((options.nodes, options.width)).astype(np.float32)
    seen = x.copy()
    np.add.at(seen[:, :8], receivers, x[senders, :8])
    labels = (seen[:, :8] @ rng.standard_normal((8, options.classes))).argmax(-1)
    return graph, jnp.asarray(x), jnp.asarray(labels)


def init(key: jax.Array, options: argparse.Namespace) -> dict[str, Any]:
    """Parameters; those of the layers are stacked."""
    width = options.width
    scale = (width * options.layers) ** -0.5
    relations, own, out = jax.random.split(key, 3)
    shape = (options.layers, options.relations, width, width)
    return {
        "layers": {
            "weight": scale * jax.random.normal(relations, shape),
            "root": scale * jax.random.normal(own, (options.layers, width, width)),
        },
        "out": jax.random.normal(out, (width, options.classes)) * width**-0.5,
    }


def make_loss(mode: str, graph: RelGraph) -> Any:
    """(params, x, labels) -> mean cross-entropy."""

    def layer(p: Any, x: jax.Array) -> jax.Array:
        normed = x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)
        return x + jax.nn.relu(library.rgcn(graph, normed, p))

    if mode != "none":
        layer = jax.checkpoint(layer)
    if mode == "inputs":
        layer = offload(layer, inputs=1, min_bytes=1)

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (layer(p, x), None), x, params["layers"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["out"], labels).mean()

    return loss


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The command; returns losses and what was stored."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--offload", choices=("none", "remat", "inputs"), default="inputs", help="what happens to residuals"
    )
    sizes = {"nodes": 500, "edges": 3000, "relations": 4, "width": 32, "layers": 12, "classes": 4, "steps": 20}
    for name, value in sizes.items():
        parser.add_argument(
            f"--{name}", type=int, default=value, help=f"{name} of the model or its data; {value} by default"
        )
    parser.add_argument("--host-bytes", type=int, help="limit of host memory for activations")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    graph, x, labels = make_data(options)
    params = init(jax.random.key(0), options)
    tx = optax.adam(1e-3)
    state = tx.init(params)
    loss = make_loss(options.offload, graph)

    @jax.jit
    def step(params: Any, state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradient = jax.value_and_grad(loss)(params, x, labels)
        updates, state = tx.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, value

    found: dict[str, Any] = {"losses": [], "stored_bytes": 0}
    with contextlib.ExitStack() as stack:
        store = stack.enter_context(ActivationStore(host_bytes=options.host_bytes))
        compiled = step.lower(params, state, x, labels).compile()
        found["temp_bytes"] = compiled.memory_analysis().temp_size_in_bytes
        begin = time.perf_counter()
        for _ in range(options.steps):
            params, state, value = compiled(params, state, x, labels)
            found["losses"].append(float(value))
        seconds = (time.perf_counter() - begin) / options.steps
        found["stored_bytes"] = store.stats().stored_bytes
        megabytes = found["temp_bytes"] / 1e6
        print(
            f"{options.layers} layers, {options.nodes:,} nodes, {options.offload}: loss {found['losses'][0]:.3f} to "
            f"{found['losses'][-1]:.3f}, {1e3 * seconds:.1f} ms a step, {megabytes:.1f} MB of temporaries"
        )
        if options.offload == "inputs":
            print(store.summary())
    return found


if __name__ == "__main__":
    main()
