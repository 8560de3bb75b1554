"""Attention on homogeneous graphs, and layers where one node has nearly half of all edges.

    python -m benchmarks attention --out benchmarks/results
    python -m benchmarks attention --graphs small --models gatv2          # a part of it

First GATv2, which gets projected rows, and the graph transformer's attention, for three shapes of heads on two graphs
with skewed degrees: 169,343 nodes with 2.3 million edges, and 716,847 nodes with 20 million. Then five layers, 64 wide,
on 3 million edges of which one node has 44 %, next to the same number of edges without it. Times are a caller's, for
forward, and for forward with the gradients of all inputs.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.provenance import Save
from dejax import rgnn

GRAPHS = {"small": (169_343, 2_300_000), "large": (716_847, 20_000_000)}
HEADS = ((1, 64), (4, 32), (1, 128))
LONG = (100_000, 3_000_000)
SHARE = 0.44  # of the edges that end at one node
TYPES = 20


@rgnn.program
def gatv2(g: Any, rows: dict[str, Any]) -> Any:
    """e_ij = a . LeakyReLU(s_j + d_i); the sum of softmax(e)_ij s_j."""
    source = g.src(rows["source"])
    score = rgnn.dot(rgnn.leaky_relu(source + g.dst(rows["destination"]), 0.2), g.shared(rows["attention"]))
    return g.sum_to_dst(rgnn.edge_softmax(score)[..., None] * source)


@rgnn.program
def transformer(g: Any, rows: dict[str, Any]) -> Any:
    """e_ij = q_i . k_j / sqrt(d); the sum of softmax(e)_ij v_j."""
    score = rgnn.dot(g.src(rows["key"]), g.dst(rows["query"])) * rows["key"].shape[-1] ** -0.5
    return g.sum_to_dst(rgnn.edge_softmax(score)[..., None] * g.src(rows["value"]))


ATTENTION = {"gatv2": gatv2, "transformer": transformer}


def inputs_of(model: str, nodes: int, heads: int, width: int) -> dict[str, jax.Array]:
    """Projected rows [nodes, heads, width] by name; for GATv2 the shared vector "attention" [heads, width], too."""
    rng = np.random.default_rng(0)
    names = ("source", "destination") if model == "gatv2" else ("query", "key", "value")
    found = {name: jnp.asarray(rng.standard_normal((nodes, heads, width), dtype=np.float32)) for name in names}
    if model == "gatv2":
        found["attention"] = jnp.asarray(rng.standard_normal((heads, width), dtype=np.float32))
    return found


def skewed_graph(nodes: int, edges: int) -> rgnn.RelGraph:
    """Senders are uniform; the r-th receiver has a share of the edges that falls as r^(-0.6)."""
    rng = np.random.default_rng(0)
    receivers = (nodes * rng.random(edges) ** 2.5).astype(np.int32)
    senders = rng.integers(0, nodes, edges, dtype=np.int32)
    return rgnn.RelGraph.from_edges(senders, rng.permutation(nodes).astype(np.int32)[receivers], num_nodes=nodes)


def graph_of_one(nodes: int, edges: int, share: float, seed: int = 0) -> rgnn.RelGraph:
    """Random edges of `TYPES` types, of which a share ends at node 0."""
    rng = np.random.default_rng(seed)
    receivers = np.where(rng.random(edges) < share, 0, rng.integers(0, nodes, edges))
    types = rng.integers(0, TYPES, edges)
    return rgnn.RelGraph.from_edges(
        rng.integers(0, nodes, edges), receivers, types, num_nodes=nodes, num_edge_types=TYPES
    )


def times(program: Callable[..., Any], graph: rgnn.RelGraph, inputs: Any, seconds: float) -> dict[str, float]:
    """Milliseconds of "forward" and "training"."""

    def training(graph: rgnn.RelGraph, inputs: Any) -> Any:
        y, pull = jax.vjp(lambda a: program(graph, a), inputs)
        return y, pull(y)

    found = {}
    for name, function in (("forward", program), ("training", training)):
        call = jax.jit(function)
        once = rounds(lambda call=call: call(graph, inputs), warm_up=1)[0]
        calls = max(2, min(50, int(seconds / max(once, 1e-6))))
        found[name] = min(rounds(lambda call=call: call(graph, inputs), calls, fewest=3, warm_up=0)) * 1e3
    return found


def measure_attention(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for name in args.graphs:
        nodes, edges = (max(2, int(n * args.scale)) for n in GRAPHS[name])
        graph = jax.block_until_ready(skewed_graph(nodes, edges))
        for model in args.models:
            for heads, width in HEADS:
                inputs = inputs_of(model, nodes, heads, width)
                ms = times(ATTENTION[model], graph, inputs, args.seconds)
                found.append({"nodes": nodes, "edges": edges, "model": model, "heads": heads, "width": width, **ms})
                case = f"{edges:>10,} edges, {model:11} {heads} x {width:<3}"
                print(f"{case}  forward {ms['forward']:8.3f} ms, training {ms['training']:8.3f} ms", flush=True)
    return found


def layers(nodes: int) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Five layers, 64 wide, with their inputs."""
    normal = lambda i, *shape: 0.1 * jax.random.normal(jax.random.key(i), shape)  # noqa: E731
    x, by_type, by_node = normal(0, nodes, 64), (TYPES, 1, 64, 64), (1, 1, 64, 64)
    vectors = {"attention_src": normal(1, TYPES, 1, 64), "attention_dst": normal(2, TYPES, 1, 64)}
    hgt = {name: normal(i, *by_node) for i, name in enumerate(("key", "query", "value"), 3)}
    hgt |= {"relation_attention": normal(6, *by_type), "relation_message": normal(7, *by_type)}
    hgt |= {"prior": normal(8, TYPES, 1), "out": normal(9, 1, 64, 64)}
    rgcn = {"weight": normal(10, TYPES, 64, 64), "root": normal(11, 64, 64)}
    found: dict[str, tuple[Callable[..., Any], Any]] = {
        "rgcn": (lambda g, a: rgnn.library.rgcn(g, *a), (x, rgcn)),
        "rgat": (lambda g, a: rgnn.library.rgat(g, *a), (x, {"weight": normal(12, *by_type), **vectors})),
        "hgt": (lambda g, a: rgnn.library.hgt(g, *a), (x, hgt)),
    }
    return found | {name: (program, inputs_of(name, nodes, 1, 64)) for name, program in ATTENTION.items()}


def measure_long_segments(args: argparse.Namespace) -> list[dict[str, Any]]:
    nodes, edges = (max(2, int(n * args.scale)) for n in LONG)
    graphs = {"even": graph_of_one(nodes, edges, 0.0), "one_node": graph_of_one(nodes, edges, SHARE)}
    found = []
    for name, (program, inputs) in layers(nodes).items():
        ms = {kind: times(program, graph, inputs, args.seconds) for kind, graph in graphs.items()}
        ratios = {phase: ms["one_node"][phase] / ms["even"][phase] for phase in ("forward", "training")}
        found.append({"layer": name, **ms, "ratio": ratios})
        print(f"{name:12} one node / even: forward {ratios['forward']:.2f} x, training {ratios['training']:.2f} x")
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", nargs="*", default=list(GRAPHS), choices=GRAPHS, help="graphs of the first part")
    parser.add_argument("--models", nargs="*", default=list(ATTENTION), choices=ATTENTION, help="its models")
    parser.add_argument("--skip-long", action="store_true", help="leave out the part with one node of many edges")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the nodes and edges, to try it out")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds to spend on a round of one function")


def run(args: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {"unit": "ms, a caller's time, the least of three rounds", "scale": args.scale}
    found["attention"] = measure_attention(args)
    if not args.skip_long:
        found["long_segments"] = measure_long_segments(args)
    save(found)
