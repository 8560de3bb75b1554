"""The section `full_graph` of `benchmarks/several_gpus.py`: a layer on a divided graph, and what bounds its time.

For each layer and number of devices, forward and backward:

- `step_ms`: the layer on the divided graph.
- `peer_copies_ms`: the same step, compiled so that GPUs copy rows from each other's memory (`PEER_COPIES`).
- `part_ms`: the layer on the graph of the largest part by itself, on one device: its nodes, its halo and its edges,
  with nothing exchanged and nothing padded.
- `exchange_ms`: the exchange of a layer's rows and its transpose by themselves, and `exchange_gb_s`, the bytes that the
  busiest device sends and receives over that time.
- `rest_ms`: `step_ms` less both: what padding, copies between stages and waiting cost. Where exchange and kernels
  overlap it is negative.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from benchmarks.clock import milliseconds
from dejax.distributed import replicate
from dejax.distributed.full_graph import ShardedGraph, over_mesh
from dejax.distributed.full_graph._exchange import exchange
from dejax.rgnn import RelGraph, library

Tree = Any
NODE_TYPES = 4
PEER_COPIES = {"xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY"}
"""The option of a step whose devices are of one process: GPUs copy what a `ppermute` sends, without NCCL."""


def layer_parameters(
    rng: np.random.Generator, relations: int, types: int, *, width: int = 32, heads: int = 4
) -> dict[str, dict[str, np.ndarray]]:
    """Parameters of RGCN, RGAT and HGT layers from rows of `width` to rows of `width`."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)

    r, t, h, k, d = relations, types, heads, width, width // heads
    hgt = {name: draw(t, h, k, d) for name in ("key", "query", "value")}
    hgt |= {f"relation_{name}": draw(r, h, d, d) for name in ("attention", "message")}
    return {
        "rgcn": {"weight": draw(r, k, k), "root": draw(k, k)},
        "rgat": {"weight": draw(r, h, k, d), "attention_src": draw(r, h, d), "attention_dst": draw(r, h, d)},
        "hgt": hgt | {"prior": np.ones((r, h)), "out": draw(t, k, k)},
    }


def local_graph(args: argparse.Namespace) -> RelGraph:
    """Mag's number of nodes and edges, four types and relations; the ends of an edge are near, as after a partition.

    Senders lie within `--reach` of the nodes after the receiver, but for one edge in a hundred, which leads anywhere.
    """
    rng, relations = np.random.default_rng(0), 4
    receivers = rng.integers(0, args.nodes, args.edges)
    near = receivers + rng.integers(0, max(1, int(args.reach * args.nodes)), args.edges)
    senders = np.where(rng.random(args.edges) < 0.01, rng.integers(0, args.nodes, args.edges), near) % args.nodes
    return RelGraph.from_edges(
        senders,
        receivers,
        rng.integers(0, relations, args.edges),
        num_nodes=args.nodes,
        num_edge_types=relations,
        node_type=rng.integers(0, NODE_TYPES, args.nodes),
        num_node_types=NODE_TYPES,
    )


@dataclass(frozen=True)
class Divided:
    """A graph over some devices.

    Attributes:
        graph: the graph.
        rows: the features of its nodes.
        part: the largest part as a graph of one device.
        seconds: that the division took.
    """

    graph: ShardedGraph
    rows: jax.Array
    part: RelGraph
    seconds: float


def divided(graph: RelGraph, x: np.ndarray, devices: int) -> Divided:
    mesh = Mesh(np.array(jax.devices()[:devices]), ("parts",))
    begin = time.perf_counter()
    owner = np.arange(graph.num_nodes) * devices // graph.num_nodes
    made = ShardedGraph.from_graph(graph, owner, mesh)
    seconds = time.perf_counter() - begin
    return Divided(made, made.shard_nodes(x), largest_part(made), seconds)


def largest_part(graph: ShardedGraph) -> RelGraph:
    """The part with most edges, without padding edges; halo nodes are ordinary nodes here."""
    counts = np.asarray(graph.local.by_edge_type.offsets)[:, -1]
    number = int(counts.argmax())
    senders, receivers, edge_type, node_type = (
        np.asarray(a[number])
        for a in (graph.local.senders, graph.local.receivers, graph.local.edge_type, graph.local.node_type)
    )
    valid = slice(0, int(counts[number]))
    return RelGraph.from_edges(
        senders[valid],
        receivers[valid],
        edge_type[valid],
        num_nodes=graph.local.num_nodes,
        num_edge_types=graph.num_edge_types,
        node_type=np.minimum(node_type, graph.num_node_types - 1),
        num_node_types=graph.num_node_types,
    )


def training(call: Callable[..., Any], size: int, compiler_options: Any = None) -> Callable[..., Any]:
    """A jitted function (params, graph, rows) -> loss and gradients."""

    def step(params: Tree, graph: Any, rows: Any) -> Any:
        def loss(params: Tree, rows: Any) -> Any:
            y = call(graph, rows, params)
            mask = 1.0 if isinstance(graph, RelGraph) else graph.node_mask[:, None]
            return (y**2 * mask).sum() / size

        return jax.value_and_grad(loss, (0, 1))(params, rows)

    return jax.jit(step, compiler_options=compiler_options)


def exchange_ms(graph: ShardedGraph, width: int, calls: int) -> float:
    """The time of an exchange of rows of float32 and of its transpose."""
    split = PartitionSpec(graph.axis)

    def both(x: jax.Array, send: jax.Array) -> jax.Array:
        found, pull = jax.vjp(lambda x: exchange(x, send[0], graph.layout.rounds, graph.axis), x)
        (back,) = pull(found)
        return back

    run = jax.jit(jax.shard_map(both, mesh=graph.mesh, in_specs=(split, split), out_specs=split, check_vma=False))
    x = jax.device_put(jnp.ones((graph.num_rows, width)), graph.row_sharding())
    return milliseconds(lambda: run(x, graph.send), calls)


def busiest_rows(graph: ShardedGraph) -> int:
    """The rows that the device with most traffic sends and receives in one exchange."""
    traffic = np.zeros(graph.parts, np.int64)
    for some in graph.layout.rounds:
        for sender, receiver in some.pairs:
            traffic[sender] += some.rows
            traffic[receiver] += some.rows
    return int(traffic.max())


def full_graph(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    graph, k = local_graph(args), args.width
    size = args.nodes * k
    x = np.random.default_rng(1).normal(size=(args.nodes, k)).astype(np.float32)
    graphs = {devices: divided(graph, x, devices) for devices in args.devices if devices > 1}
    drawn = layer_parameters(np.random.default_rng(0), NODE_TYPES, 4, width=k, heads=1)
    for name, params in jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), drawn).items():
        layer, one, want = getattr(library, name), 0.0, None
        for devices in args.devices:
            more: dict[str, Any] = {}
            if devices == 1:
                given: Any = graph
                rows, call = jnp.asarray(x), layer
            else:
                some = graphs[devices]
                given, rows, call = some.graph, some.rows, over_mesh(layer)
            # As the state of a trainer: a call would copy weights of one device to all others first.
            held = params if devices == 1 else replicate(params, given.mesh)
            value, ms = timed(training(call, size), held, given, rows, args.calls)
            want = value if want is None else want
            one = one or ms * devices
            if devices > 1:
                same, peer_ms = timed(training(call, size, PEER_COPIES), held, given, rows, args.calls)
                more = {"peer_copies_ms": peer_ms, "peer_copies_times_one": one / peer_ms}
                more["peer_copies_loss_difference"] = abs(same - want) / abs(want)
                more |= bounds_of(some, layer, params, ms, args)
            yield {
                "layer": name, "devices": devices, "step_ms": ms, "times_one": one / ms,
                "loss_difference": abs(value - want) / abs(want), **more,
            }  # fmt: skip


def timed(run: Callable[..., Any], params: Tree, graph: Any, rows: jax.Array, calls: int) -> tuple[float, float]:
    """The loss of a step, and its time in ms."""
    return float(run(params, graph, rows)[0]), milliseconds(lambda: run(params, graph, rows), calls)


def bounds_of(some: Divided, layer: Any, params: Tree, step_ms: float, args: argparse.Namespace) -> dict[str, Any]:
    """The times of a part and of the exchange by themselves."""
    run, graph = training(layer, args.nodes * args.width), some.graph
    rows = jnp.ones((some.part.num_nodes, args.width))
    part_ms = milliseconds(lambda: run(params, some.part, rows), args.calls)
    row_bytes = over_mesh(layer).plan(graph, some.rows, params).exchanged_bytes
    exchanged = exchange_ms(graph, row_bytes // 4, args.calls)
    return {
        "part_ms": part_ms,
        "exchange_ms": exchanged,
        "exchange_gb_s": 2 * busiest_rows(graph) * row_bytes / exchanged / 1e6,
        "rest_ms": step_ms - part_ms - exchanged,
        "divided_s": some.seconds,
        "halo_rows": graph.layout.halo_rows,
        "forward_bytes": row_bytes * graph.layout.rows_sent,
    }
