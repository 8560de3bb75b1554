"""dejax's own lowering of kernels beside Pallas': each kernel of training steps, at equal schedules in one process.

    python -m benchmarks lowering --out benchmarks/results/lowering_h200.json

The graph has 10^6 nodes, 4 x 10^6 edges and 40 types; errors are those of a graph of 20,000 edges.
"""

from __future__ import annotations

import argparse
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.case import Graph, Settings, parameters
from benchmarks.provenance import Save
from dejax import rgnn
from dejax.pallas.lowering.choice import LOWERINGS
from dejax.pallas.profile import record
from dejax.rgnn import library

NEEDS_GPU = True
RUNS = 8
LEAST_MS = 0.01  # shorter kernels are not compared: starting one takes as long
SIZES = {"large": (1_000_000, 4_000_000, 40), "small": (3_000, 20_000, 7)}


def graph_of(size: str) -> tuple[rgnn.RelGraph, Graph]:
    """Nodes and types with many edges and with few, as in real graphs."""
    nodes, edges, types = SIZES[size]
    rng = np.random.default_rng(0)
    skewed = lambda power, n: (rng.random(edges) ** power * n).astype(np.int32)  # noqa: E731
    senders, receivers, edge_type = skewed(2, nodes), skewed(1.5, nodes), skewed(2, types)
    order = np.argsort(edge_type, kind="stable")
    senders, receivers, edge_type = senders[order], receivers[order], edge_type[order]
    node_type = np.sort(rng.integers(0, 4, nodes)).astype(np.int32)
    graph = rgnn.RelGraph.from_edges(
        senders, receivers, edge_type, num_nodes=nodes, num_edge_types=types, node_type=node_type, num_node_types=4
    )
    return graph.with_loop_tables(), Graph(size, senders, receivers, edge_type, node_type, nodes, types, 4)


def training_step(model: str, graph: rgnn.RelGraph, options: rgnn.Options) -> Callable[..., Any]:
    def loss(x: jax.Array, weights: Any, graph: rgnn.RelGraph) -> jax.Array:
        return (getattr(library, model)(graph, x, weights, options=options).astype(x.dtype) ** 2).sum()

    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    return lambda x, weights: step(x, weights, graph)


def inputs(model: str, data: Graph, width: int) -> tuple[jax.Array, dict[str, jax.Array]]:
    weights = parameters(model, data, Settings(width, 1, "float32", "tf32"))
    x = np.random.default_rng(1).normal(size=(data.num_nodes, width))
    return jnp.asarray(x, jnp.float32), {name: jnp.asarray(w, jnp.float32) for name, w in weights.items()}


def first_call(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run())
    return time.perf_counter() - start


def kernel_ms(run: Callable[[], Any]) -> dict[str, float]:
    """Device time of a step's kernels by name: medians over runs, summed where a step has several of one name."""

    def repeat() -> None:
        for _ in range(RUNS):
            jax.block_until_ready(run())

    found: dict[str, list[float]] = {}
    for kernel in record(repeat):  # XLA numbers kernels of one name
        found.setdefault(re.sub(r"__\d+$", "", kernel.name), []).append(kernel.duration_ns / 1e6)
    total = {}
    for name, times in found.items():
        each = len(times) // RUNS
        if each * RUNS == len(times):
            total[name] = sum(statistics.median(times[i::each]) for i in range(each))
    return total


def compared(model: str, width: int, graph: rgnn.RelGraph, data: Graph) -> dict[str, Any]:
    x, weights = inputs(model, data, width)
    options = {how: rgnn.Options(backend="pallas", precision="tf32", lowering=how) for how in LOWERINGS}
    steps = {how: training_step(model, graph, o) for how, o in options.items()}
    seconds = {how: first_call(lambda how=how: steps[how](x, weights)) for how in LOWERINGS}
    rounds: dict[str, list[dict[str, float]]] = {how: [] for how in LOWERINGS}
    for _ in range(2):
        for how in LOWERINGS:
            rounds[how].append(kernel_ms(lambda how=how: steps[how](x, weights)))
    best = {how: {k: min(r.get(k, math.inf) for r in rounds[how]) for k in rounds[how][0]} for how in LOWERINGS}
    theirs, ours = (best[how] for how in LOWERINGS)
    kernels = {
        name: {
            "pallas_ms": theirs[name],
            "dejax_ms": ours[name],
            "ratio": ours[name] / theirs[name],
            "compared": name.startswith((model, "column_powers")) and theirs[name] > LEAST_MS,
        }
        for name in theirs
        if name in ours
    }
    ratios = [kernel["ratio"] for kernel in kernels.values() if kernel["compared"]]
    same = jax.tree.map(
        lambda a, b: bool(jnp.array_equal(a, b, equal_nan=True)), *(steps[how](x, weights) for how in LOWERINGS)
    )
    return {
        "model": model, "width": width, "size": dict(zip(("nodes", "edges", "types"), SIZES[data.name], strict=True)),
        "first_call_s": seconds, "compared": len(ratios), "worst": max(ratios, default=None),
        "geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))) if ratios else None,
        "sum_ms": {how: sum(best[how].values()) for how in LOWERINGS}, "equal_bits": jax.tree.leaves(same),
        "only_one": sorted(set(theirs) ^ set(ours)), "kernels": kernels,
    }  # fmt: skip


def against_float64(model: str, width: int, graph: rgnn.RelGraph, data: Graph) -> dict[str, Any]:
    """Largest errors of the loss and its gradients, each relative to its largest element."""
    x, weights = inputs(model, data, width)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), (x, weights))
        exact = [
            np.asarray(a) for a in jax.tree.leaves(training_step(model, graph, rgnn.Options(backend="xla"))(*wide))
        ]
    errors = {}
    for how in LOWERINGS:
        step = training_step(model, graph, rgnn.Options(backend="pallas", precision="tf32", lowering=how))
        found = [np.asarray(a, np.float64) for a in jax.tree.leaves(step(x, weights))]
        errors[how] = [float(np.abs(a - b).max() / np.abs(b).max()) for a, b in zip(found, exact, strict=True)]
    return {"model": model, "width": width, "errors": errors, "worst": {how: max(e) for how, e in errors.items()}}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default="rgcn/64,rgat/64,hgt/64,rgat/128", help="models and widths")


def run(args: argparse.Namespace, save: Save) -> None:
    found: dict[str, Any] = {"kernels": [], "accuracy": []}
    cases = [(model, int(width)) for model, width in (case.split("/") for case in args.cases.split(","))]
    small, large = (graph_of(size) for size in ("small", "large"))
    for model, width in cases:
        found["kernels"].append(compared(model, width, *large))
        save(found)
        print({key: value for key, value in found["kernels"][-1].items() if key != "kernels"}, flush=True)
        found["accuracy"].append(against_float64(model, width, *small))
        print(model, width, "largest errors", found["accuracy"][-1]["worst"], flush=True)
    ratios = [k["ratio"] for case in found["kernels"] for k in case["kernels"].values() if k["compared"]]
    found |= {"geometric_mean": math.exp(statistics.fmean(map(math.log, ratios))), "worst": max(ratios)}
    save(found)
    print("geometric mean", found["geometric_mean"], "of", len(ratios), "worst", found["worst"])
