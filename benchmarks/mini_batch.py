"""Mini-batch training on heterogeneous graphs in host memory: a step, its parts, and the floor of the bus.

    python -m benchmarks mini_batch --out results.json

It trains R-GAT with two or three layers, 128 wide, 4 heads, Adam, 1,024 seeds, on random graphs with the published
counts of ogbn-mag and AM, both directions. Each part is also timed alone: `wall` as a caller sees it, `device` from the
profiler. The floor is the larger of the bytes of the gathered rows over the bus and of the layers alone.

Fan-outs are by relation. They are divided among the relations into a type so that they sum to 15, 10 (and 5) per node,
as in samplers that do not know relations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.clock import rounds
from benchmarks.device_time import profile_jax
from benchmarks.provenance import Save
from dejax.host_gather import HostTable, gather
from dejax.minibatch import HeteroTopology, find_capacities, make_blocks, sample_blocks
from dejax.rgnn.nnx import RGATConv

MAG_NODES = {"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740}
MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field"): 7_505_078,
}
AM_NODES, AM_EDGES, AM_RELATIONS, AM_TYPES = 1_885_136, 5_668_682, 54, 7
# The same steps composed by hand of a sampler for one node type, `RelGraph.build_traced`, a table and layers, without
# relations in the sampler, on an H200: milliseconds as a caller sees them.
BY_HAND = {
    "mag": {"whole": 2.32, "sampling": 0.53, "edge types": 0.11, "blocks": 1.08, "rows": 0.61, "layers": 0.97},
    "am": {"whole": 6.64, "sampling": 0.81, "edge types": 0.16, "blocks": 1.43, "rows": 2.90, "layers": 2.62},
}
BUS = 49e9  # bytes a second, pinned host memory to the device


def _ends(rng: np.random.Generator, count: int, edges: int, power: int) -> np.ndarray:
    return (count * rng.random(edges, np.float32) ** power).astype(np.int32).clip(max=count - 1)


def both_directions(edges: dict[Any, int], nodes: dict[str, int], scale: float) -> tuple[Any, dict[str, int]]:
    """Random edge lists with reverses; senders follow a power law."""
    rng = np.random.default_rng(0)
    counts = {name: max(2, int(count * scale)) for name, count in nodes.items()}
    found = {}
    for (source, name, target), size in edges.items():
        size = max(1, int(size * scale))
        ends = _ends(rng, counts[source], size, 3), _ends(rng, counts[target], size, 2)
        found[source, name, target] = ends
        found[target, f"rev_{name}", source] = ends[::-1]
    return found, counts


def am_counts() -> tuple[dict[Any, int], dict[str, int]]:
    """54 relations between seven node types; with reverses they are 108."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.full(AM_TYPES, 2.0))
    nodes = {f"type{t}": max(1000, int(AM_NODES * share)) for t, share in enumerate(shares)}
    sizes = np.maximum(rng.dirichlet(np.full(AM_RELATIONS, 0.3)) * AM_EDGES, 10).astype(int)
    ends = rng.integers(0, AM_TYPES, (AM_RELATIONS, 2))
    return {(f"type{s}", f"r{n}", f"type{t}"): int(size) for n, ((s, t), size) in enumerate(zip(ends, sizes))}, nodes  # noqa: B905


def shared_fan_outs(topology: HeteroTopology, totals: list[int]) -> list[dict[Any, int]]:
    """Fan-outs that sum to about `totals` over the relations into each type."""
    into: dict[str, list[Any]] = {}
    for edge_type in topology.edge_types:
        into.setdefault(edge_type[2], []).append(edge_type)
    hops = []
    for total in totals:
        hop = {}
        for some in into.values():
            for n, edge_type in enumerate(some):
                hop[edge_type] = total * (n + 1) // len(some) - total * n // len(some)
        hops.append(hop)
    return hops


def timed(call: Callable[[], Any], calls: int = 30) -> dict[str, float]:
    """Milliseconds of a call: as the caller sees it, and on the device."""
    found = {"wall_ms": round(rounds(call, calls, warm_up=2)[0] * 1e3, 4)}
    device = profile_jax(call, 10)
    if device is not None:
        found |= {f"device_{k}": v for k, v in device.as_dict().items()}
    return found


def step(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The two steps of the table, whole and in parts."""
    if args.graph in (None, "mag"):
        mag = both_directions(MAG_EDGES, MAG_NODES, args.scale)
        yield from _step("mag", *mag, "paper", [15, 10], 128, args)
    if args.graph in (None, "am"):
        edges, nodes = am_counts()
        am = both_directions(edges, nodes, args.scale)
        yield from _step("am", *am, "type0", [15, 10, 5], 256, args)


def _table(rows: int, width: int) -> HostTable:
    table = HostTable.empty((rows, width), np.float32)
    block = np.random.default_rng(5).standard_normal((65_536, width), np.float32)
    for begin in range(0, rows, len(block)):
        table.write(begin, block[: rows - begin])
    return table


class Model(nnx.Module):
    """Layers and a linear map. Rows have one width: no projection, as in the table that this is compared with."""

    def __init__(self, layers: list[Any], head: nnx.Linear) -> None:
        self.num_layers, self.head = len(layers), head
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)

    def __call__(self, blocks: Any, x: Any) -> Any:
        h = blocks[0].join(x)
        for number, block in enumerate(blocks):
            h = nnx.relu(getattr(self, f"layer_{number}")(block.bipartite, h))
        return blocks[-1].split(self.head(h))


def _step(
    name: str,
    edges: Any,
    counts: dict[str, int],
    seed_type: str,
    totals: list[int],
    width: int,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    topology = HeteroTopology.from_edges(edges, counts, on_host=True, keep_edge_ids=False)
    features = {kind: _table(count, width) for kind, count in counts.items()}
    made_s = time.perf_counter() - begin
    fan_outs = shared_fan_outs(topology, totals)
    rng = np.random.default_rng(6)
    batches = [jnp.asarray(rng.integers(0, counts[seed_type], args.seeds), jnp.int32) for _ in range(20)]
    key = jax.random.key(0)
    capacities = find_capacities(key, topology, [(seed_type, seeds) for seeds in batches], fan_outs, print_table=None)
    rngs, relations, hidden = nnx.Rngs(0), len(topology.edge_types), 128
    layers = [
        RGATConv(hidden if n else width, hidden // 4, relations, num_heads=4, rngs=rngs) for n in range(len(totals))
    ]
    graphdef, params = nnx.split(Model(layers, nnx.Linear(hidden, 64, rngs=rngs)), nnx.Param)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    labels = jnp.asarray(rng.integers(0, 64, counts[seed_type]), jnp.int32)

    def sampled(key: Any, topology: Any, seeds: Any) -> Any:
        return sample_blocks(key, topology, (seed_type, seeds), fan_outs, capacities=capacities)

    def gathered(features: Any, sample: Any) -> Any:
        return {kind: gather(features[kind], ids) for kind, ids in sample.node_ids.items()}

    def loss_of(params: Any, blocks: Any, x: Any, labels: Any, positions: Any) -> Any:
        outputs = nnx.merge(graphdef, params)(blocks, x)[seed_type][positions]
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    def update(params: Any, state: Any, blocks: Any, x: Any, labels: Any, positions: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, blocks, x, labels, positions)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def whole(params: Any, state: Any, key: Any, topology: Any, features: Any, labels: Any, seeds: Any) -> Any:
        sample = sampled(key, topology, seeds)
        x, blocks = gathered(features, sample), make_blocks(sample)
        return *update(params, state, blocks, x, labels[seeds], sample.seed_positions[seed_type]), sample.lost.sum()

    seeds = batches[0]
    run_whole = jax.jit(whole)
    begin = time.perf_counter()
    out = jax.block_until_ready(run_whole(params, state, key, topology, features, labels, seeds))
    first_s = time.perf_counter() - begin
    run_sample, run_gather, run_blocks, run_update = map(jax.jit, (sampled, gathered, make_blocks, update))
    sample = run_sample(key, topology, seeds)
    x, blocks = run_gather(features, sample), run_blocks(sample)
    parts = {
        "sampling": lambda: run_sample(key, topology, seeds),
        "blocks": lambda: run_blocks(sample),
        "rows": lambda: run_gather(features, sample),
        "layers": lambda: run_update(params, state, blocks, x, labels[seeds], sample.seed_positions[seed_type]),
        "whole": lambda: run_whole(params, state, key, topology, features, labels, seeds),
    }
    times = {part: timed(call) for part, call in parts.items()}
    rows = int(sum((np.asarray(ids) >= 0).sum() for ids in sample.node_ids.values()))
    slots = sum(senders.size for senders in sample.senders)
    valid = int(sum((np.asarray(senders) >= 0).sum() for senders in sample.senders))
    bus_ms = rows * width * 4 / BUS * 1e3
    yield {
        "section": "step", "graph": name, "relations": relations, "slots": slots, "edges": valid,
        "nodes": sum(len(ids) for ids in sample.node_ids.values()), "rows": rows, "bus_ms": round(bus_ms, 3),
        "floor_ms": round(max(bus_ms, times["layers"].get("device_span_ms", 0.0)), 3), "lost": int(out[3]),
        "loss": float(out[2]), "first_step_s": round(first_s, 1), "made_s": round(made_s, 1), "times": times,
        "by_hand_ms": BY_HAND[name],
    }  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", choices=("mag", "am"), help="which graph; by default both")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of nodes and edges")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a step")


def run(args: argparse.Namespace, save: Save) -> None:
    results = []
    for result in step(args):
        results.append(result)
        print(json.dumps(result), flush=True)
        save(results)
