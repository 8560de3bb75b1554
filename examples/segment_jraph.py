"""A graph network of jraph on the operators of dejax: only the import of the operators changes.

    python examples/segment_jraph.py                    # operators of dejax.segment
    python examples/segment_jraph.py --operators jraph  # those of jraph, with equal results

The network must tell which nodes of random graphs have a neighbour with a mark. Batches of graphs are padded to one
shape, as jraph does it. On a GPU the operators are kernels or a scatter of XLA, whichever is faster.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import optax

import dejax.segment

OPERATORS = {"dejax": dejax.segment, "jraph": jraph}
Parameters = dict[str, jax.Array]


def random_graph(rng: np.random.Generator) -> jraph.GraphsTuple:
    """Some nodes with a mark or none, and edges among them."""
    nodes = int(rng.integers(5, 12))
    edges = int(rng.integers(2 * nodes, 3 * nodes))
    marks = (rng.random((nodes, 1)) < 0.3).astype(np.float32)
    senders, receivers = rng.integers(0, nodes, (2, edges)).astype(np.int32)
    counts = np.array([nodes], np.int32), np.array([edges], np.int32)
    return jraph.GraphsTuple(marks, np.ones((edges, 1), np.float32), receivers, senders, None, *counts)


def batch(rng: np.random.Generator, graphs: int) -> tuple[jraph.GraphsTuple, np.ndarray]:
    """Graphs as one, padded, and the answer at each node: whether a neighbour has a mark."""
    tuples = jraph.batch_np([random_graph(rng) for _ in range(graphs)])
    padded = jraph.pad_with_graphs(tuples, 12 * graphs + 1, 36 * graphs, graphs + 1)
    answer = np.zeros(padded.nodes.shape[0], np.float32)
    np.maximum.at(answer, padded.receivers, padded.nodes[padded.senders, 0])
    return padded, answer


def network(parameters: Parameters, operators: Any) -> Any:
    """A round of jraph.GraphNetwork whose sums and softmaxes are `operators`'."""

    def node(features: jax.Array, sent: jax.Array, received: jax.Array, _: Any) -> jax.Array:
        return jax.nn.relu(jnp.concatenate([features, received], axis=-1) @ parameters["node"])

    def edge(features: jax.Array, sent: jax.Array, received: jax.Array, _: Any) -> jax.Array:
        return jax.nn.relu(jnp.concatenate([sent, received], axis=-1) @ parameters["edge"])

    block = jraph.GraphNetwork(
        update_edge_fn=edge,
        update_node_fn=node,
        attention_logit_fn=lambda e, s, r, _: e @ parameters["attention"],
        attention_normalize_fn=operators.segment_softmax,
        attention_reduce_fn=lambda e, weight: e * weight,
        aggregate_edges_for_nodes_fn=operators.segment_sum,
    )

    def apply(graph: jraph.GraphsTuple) -> jax.Array:
        graph = graph._replace(nodes=graph.nodes @ parameters["embed"])
        return (block(graph).nodes @ parameters["out"])[:, 0]

    return apply


def initial(width: int, key: jax.Array) -> Parameters:
    shapes = {
        "embed": (1, width),
        "edge": (2 * width, width),
        "node": (2 * width, width),
        "attention": (width, 1),
        "out": (width, 1),
    }
    keys = dict(zip(shapes, jax.random.split(key, len(shapes)), strict=True))
    return {name: jax.random.normal(keys[name], s) / s[0] ** 0.5 for name, s in shapes.items()}


def main(arguments: list[str] | None = None) -> float:
    """Trains, and gives the share of right answers on other graphs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--operators", choices=sorted(OPERATORS), default="dejax", help="whose segment operators")
    parser.add_argument("--steps", type=int, default=200, help="training steps")
    parser.add_argument("--graphs", type=int, default=32, help="graphs of a batch")
    options = parser.parse_args(arguments)
    for name, value in vars(options).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")
    rng = np.random.default_rng(0)
    parameters = initial(16, jax.random.key(0))
    optimizer = optax.adam(0.01)
    state = optimizer.init(parameters)
    operators = OPERATORS[options.operators]

    @jax.jit
    def step(parameters: Parameters, state: Any, graph: jraph.GraphsTuple, answer: jax.Array) -> tuple[Any, ...]:
        mask = jraph.get_node_padding_mask(graph)

        def loss(parameters: Parameters) -> jax.Array:
            found = network(parameters, operators)(graph)
            return jnp.where(mask, optax.sigmoid_binary_cross_entropy(found, answer), 0).sum() / mask.sum()

        value, gradient = jax.value_and_grad(loss)(parameters)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(parameters, updates), state, value

    for number in range(options.steps):
        parameters, state, value = step(parameters, state, *batch(rng, options.graphs))
        if number % 50 == 0:
            print(f"step {number}: loss {value:.3f}")
    graph, answer = batch(rng, options.graphs)
    mask = np.asarray(jraph.get_node_padding_mask(graph))
    right = float((np.asarray(network(parameters, operators)(graph) > 0) == (answer > 0))[mask].mean())
    print(f"{100 * right:.1f} % of the nodes of other graphs, with the operators of {options.operators}")
    return right


if __name__ == "__main__":
    main()
