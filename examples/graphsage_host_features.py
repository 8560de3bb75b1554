"""GraphSAGE in mini-batches with features in host memory: one compiled step samples, gathers, computes and updates.

    python examples/graphsage_host_features.py                                   # small: takes seconds on a CPU
    python examples/graphsage_host_features.py --nodes 60000000 --edges 100000000 --batch 1024   # 24 GB of features
    python examples/graphsage_host_features.py --pipeline cpu                    # numpy gathers the rows

From plain JAX, with the features on the device, two lines change:

    -    features = jnp.asarray(features)
    +    features = HostTable.from_numpy(features)
         ...
    -    x = features.at[sample.nodes].get(mode="fill", fill_value=0)
    +    x = features[sample.nodes]

The graph is synthetic: edges are random, and the class of a node follows from its features and its neighbours'
features.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax import rgnn
from dejax.host_gather import HostTable
from dejax.minibatch import Block, HeteroTopology, SampledBlocks, make_blocks, sample_blocks


def make_graph(nodes: int, edges: int, width: int, classes: int) -> tuple[HeteroTopology, HostTable, jax.Array]:
    """A graph whose senders lie near their receivers, features in host memory, and classes."""
    rng = np.random.default_rng(0)
    receivers = np.sort(rng.integers(0, nodes, edges, dtype=np.int64))
    senders = ((receivers + rng.geometric(1e-2, edges)) % nodes).astype(np.int32)
    starts = np.searchsorted(receivers, np.arange(nodes + 1)).astype(np.int32 if edges < 2**31 else np.int64)
    topology = HeteroTopology.from_csc((starts, senders), nodes, on_host=True)
    labels = (np.arange(nodes) // max(1, nodes // (8 * classes)) % classes).astype(np.int32)
    centres = rng.standard_normal((classes, width)).astype(np.float32)
    features = HostTable.empty((nodes, width))
    block = max(1, (1 << 28) // (4 * width))
    for start in range(0, nodes, block):  # in blocks, so that there is no second copy of the table
        chosen = labels[start : start + block]
        noise = rng.standard_normal((len(chosen), width), dtype=np.float32)
        features.write(start, 0.3 * centres[chosen] + noise)
    return topology, features, jnp.asarray(labels)


def init(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
    layers = []
    for k, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        own, other = jax.random.split(jax.random.fold_in(key, k))
        normal = jax.nn.initializers.glorot_normal()
        layers.append(
            {"own": normal(own, (inner, outer)), "other": normal(other, (inner, outer)), "bias": jnp.zeros(outer)}
        )
    return layers


@rgnn.program
def mean_of_neighbours(g: rgnn.RelGraph, x: jax.Array) -> jax.Array:
    return g.mean_to_dst(g.src(x))


def graphsage(layers: list[dict[str, jax.Array]], blocks: list[Block], x: jax.Array) -> jax.Array:
    """Mean aggregation: x <- relu(x W + mean of x over incoming edges W' + b), and no relu after the last layer."""
    for k, (layer, block) in enumerate(zip(layers, blocks, strict=True)):
        mean = mean_of_neighbours(block.bipartite, x)
        x = x[: block.num_destinations] @ layer["own"] + mean @ layer["other"] + layer["bias"]
        x = jax.nn.relu(x) if k + 1 < len(layers) else x
    return x


def main(arguments: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20_000, help="nodes of the random graph")
    parser.add_argument("--edges", type=int, default=200_000, help="its edges")
    parser.add_argument("--width", type=int, default=100, help="features of a node")
    parser.add_argument("--hidden", type=int, default=64, help="width of the layers")
    parser.add_argument("--classes", type=int, default=8, help="classes to predict")
    parser.add_argument("--batch", type=int, default=256, help="seeds of a batch")
    parser.add_argument(
        "--fan-outs",
        type=lambda text: [int(x) for x in text.split(",")],
        default=[10, 5, 5],
        help="neighbours drawn for each node, hop by hop",
    )
    parser.add_argument("--steps", type=int, default=60, help="training steps")
    parser.add_argument(
        "--pipeline",
        choices=("dejax", "cpu"),
        default="dejax",
        help="dejax: the compiled step gathers the features; cpu: numpy does",
    )
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if isinstance(value, int) and value < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {value}")

    topology, features, labels = make_graph(args.nodes, args.edges, args.width, args.classes)
    print(f"{args.nodes} nodes, {args.edges} edges, {features}: {features.nbytes / 1e9:.2f} GB")
    hidden = [args.hidden] * (len(args.fan_outs) - 1)
    layers = init(jax.random.key(0), [args.width, *hidden, args.classes])
    optimizer = optax.adam(3e-3)
    # As a step's results lie, which are committed to the table's device: the second step compiles nothing.
    layers, state = jax.device_put((layers, optimizer.init(layers)), jax.devices()[0])

    def draw(key: jax.Array, topology: HeteroTopology) -> tuple[jax.Array, SampledBlocks]:
        seeds = jax.random.randint(key, (args.batch,), 0, args.nodes)
        return seeds, sample_blocks(key, topology, seeds, args.fan_outs)

    def train(
        layers: Any, state: Any, seeds: jax.Array, sample: SampledBlocks, x: jax.Array, labels: jax.Array
    ) -> tuple[Any, Any, Any]:
        target, blocks = labels[seeds], make_blocks(sample)

        def loss(layers: Any) -> tuple[jax.Array, jax.Array]:
            logits = graphsage(layers, blocks, x)[sample.seed_positions["node"]]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return losses.mean(), (logits.argmax(-1) == target).mean()

        (_, accuracy), gradient = jax.value_and_grad(loss, has_aux=True)(layers)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(layers, updates), state, accuracy

    @jax.jit
    def step(
        layers: Any, state: Any, key: jax.Array, topology: HeteroTopology, features: HostTable, labels: jax.Array
    ) -> Any:
        seeds, sample = draw(key, topology)
        x = features[sample.nodes]
        return train(layers, state, seeds, sample, x, labels)

    draw_only, train_only = jax.jit(draw), jax.jit(train)
    view = features.numpy()

    def cpu_step(
        layers: Any, state: Any, key: jax.Array, topology: HeteroTopology, _: HostTable, labels: jax.Array
    ) -> Any:
        seeds, sample = draw_only(key, topology)
        ids = np.asarray(sample.nodes)
        rows = np.where(ids[:, None] >= 0, view[np.maximum(ids, 0)], np.float32(0))
        return train_only(layers, state, seeds, sample, jnp.asarray(rows), labels)

    run = step if args.pipeline == "dejax" else cpu_step
    accuracies, start, busy = [], 0.0, 0.0
    for k in range(args.steps + 1):
        layers, state, accuracy = run(layers, state, jax.random.key(k), topology, features, labels)
        accuracies.append(accuracy)
        if k == 0:  # the first step compiled
            jax.block_until_ready(accuracy)
            start, busy = time.perf_counter(), time.process_time()
    jax.block_until_ready(accuracies)
    elapsed, busy = time.perf_counter() - start, time.process_time() - busy
    last = float(np.mean(np.asarray(accuracies[-max(1, args.steps // 4) :])))
    result = {"accuracy": last, "steps_per_second": args.steps / elapsed, "cpu_cores_busy": busy / elapsed}
    print(
        f"{args.pipeline}: {result['steps_per_second']:.1f} steps/s, {result['cpu_cores_busy']:.2f} CPU cores busy, "
        f"accuracy of the last quarter {last:.3f} (by chance {1 / args.classes:.3f})"
    )
    return result


if __name__ == "__main__":
    main()
