"""Attention on homogeneous graphs, and layers where one node has nearly half of all edges.

    python -m benchmarks attention --out benchmarks/results
    python -m benchmarks attention --graphs small --models gatv2          # a part of it
    python -m benchmarks attention --turbo                                # next to turbo-gnn

First GATv2, which gets projected rows, and the graph transformer's attention, for three shapes of heads on two graphs
with skewed degrees: 169,343 nodes with 2.3 million edges, and 716,847 nodes with 20 million. Then five layers, 64 wide,
on 3 million edges of which one node has 44 %, next to the same number of edges without it. Times are a caller's, for
forward, and for forward with the gradients of all inputs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.attention_inputs import edges_of, rows_of
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
    return {name: jnp.asarray(x) for name, x in rows_of(model, nodes, heads, width).items()}


def skewed_graph(nodes: int, edges: int) -> rgnn.RelGraph:
    return rgnn.RelGraph.from_edges(*edges_of(nodes, edges), num_nodes=nodes)


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
    found, samples = [], []
    for name in args.graphs:
        nodes, edges = (max(2, int(n * args.scale)) for n in GRAPHS[name])
        graph = jax.block_until_ready(skewed_graph(nodes, edges))
        for model in args.models:
            for heads, width in HEADS:
                inputs = inputs_of(model, nodes, heads, width)
                ms = times(ATTENTION[model], graph, inputs, args.seconds)
                samples.append(np.asarray(ATTENTION[model](graph, inputs)[:: max(1, nodes // 100)]))
                found.append({"nodes": nodes, "edges": edges, "model": model, "heads": heads, "width": width, **ms})
                print(f"{_case(found[-1])}, {ms['training'] / ms['forward']:4.1f} x", flush=True)
    if args.turbo:
        add_peer(found, samples, args)
    return found


def _case(case: dict[str, Any]) -> str:
    return (
        f"{case['edges']:>10,} edges, {case['model']:11} {case['heads']} x {case['width']:<3}  "
        f"forward {case['forward']:8.3f} ms, training {case['training']:8.3f} ms"
    )


def add_peer(found: list[dict[str, Any]], samples: list[np.ndarray], args: argparse.Namespace) -> None:
    """Adds turbo-gnn to each case: its times, and how far some result rows are apart, relative to the largest."""
    cases = [{k: case[k] for k in ("nodes", "edges", "model", "heads", "width")} for case in found]
    peer = Path(__file__).resolve().parent / "peers" / "attention_turbo.py"
    command = [args.python, str(peer), json.dumps({"cases": cases, "seconds": args.seconds})]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for case, sample, line in zip(found, samples, process.stdout or (), strict=False):
            their = json.loads(line)
            theirs = np.asarray(their.pop("sample"))
            case["turbo_gnn"] = {k: their[k] for k in ("forward", "training", "autotuning_s")}
            case["difference"] = float(np.abs(sample - theirs).max() / np.abs(theirs).max())
            ratios = [their[k] / case[k] for k in ("forward", "training")]
            print(
                f"turbo-gnn {_case(their)}: {ratios[0]:.2f} x, {ratios[1]:.2f} x, {case['difference']:.1e}",
                flush=True,
            )


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
    parser.add_argument("--turbo", action="store_true", help="measure turbo-gnn, too, in a process of its own")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with turbo-gnn and torch")
    parser.add_argument("--skip-long", action="store_true", help="leave out the part with one node of many edges")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the nodes and edges, to try it out")
    parser.add_argument("--seconds", type=float, default=0.2, help="seconds to spend on a round of one function")


def run(args: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {"unit": "ms, a caller's time, the least of three rounds", "scale": args.scale}
    found["attention"] = measure_attention(args)
    if not args.skip_long:
        found["long_segments"] = measure_long_segments(args)
    save(found)
