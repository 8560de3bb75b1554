"""Training times of published layers: dejax, PyTorch Geometric, and JAX as people write it.

    python -m benchmarks zoo --graphs am,mag --out benchmarks/results
    python -m benchmarks zoo --graphs am --models gat,gatv2 --peers jax

Graphs are synthetic with published counts and skewed degrees (`dejax.datasets.synthetic`); edge types are not read. One
layer, 64 -> 64 float32 (products in TF32), attention with 4 heads of 16; gradients of features and of all parameters.
PyTorch Geometric gets its edges as a tensor and as an `EdgeIndex` with cached CSR and CSC, and the faster one counts.
Edges of the plain JAX form are sorted by receiver, and it is told so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.peers import zoo_jax
from benchmarks.provenance import Save
from benchmarks.tables import markdown
from dejax.rgnn import Options, RelGraph, zoo

TORCH = Path(__file__).resolve().parent / "peers" / "zoo_torch.py"
MAIN = ("gcn", "sage", "gin", "gat", "gatv2", "transformer")
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "gcn": zoo.gcn,
    "sage": zoo.graphsage,
    "gin": zoo.gin,
    "gated_gcn": zoo.gated_gcn,
    "gat": zoo.gat,
    "gatv2": zoo.gatv2,
    "transformer": zoo.graph_transformer,
    "rggnn": zoo.rggnn,
}


def shapes(model: str, k: int, h: int) -> dict[str, tuple[int, ...]]:
    """The parameters of a layer of equal widths."""
    d = k // h
    heads, vectors, square, gates = (h, k, d), (h, d), (k, k), (3, k, k)
    return {
        "gcn": {"weight": square, "bias": (k,)},
        "sage": {"neighbour": square, "root": square, "bias": (k,)},
        "gin": {"weight_1": square, "bias_1": (k,), "weight_2": square, "bias_2": (k,)},
        "gated_gcn": dict.fromkeys(("gate_dst", "gate_src", "value", "root"), square)
        | dict.fromkeys(("gate_bias", "value_bias", "bias"), (k,)),
        "gat": {"weight": heads, "attention_src": vectors, "attention_dst": vectors, "bias": (k,)},
        "gatv2": {"weight_src": heads, "weight_dst": heads, "bias_src": vectors, "bias_dst": vectors}
        | {"attention": vectors, "bias": (k,)},
        "transformer": dict.fromkeys(("query", "key", "value"), heads)
        | dict.fromkeys(("query_bias", "key_bias", "value_bias"), vectors)
        | {"root": square, "root_bias": (k,)},
        "rggnn": {"weight": square, "input": gates, "hidden": gates, "input_bias": (3, k), "hidden_bias": (3, k)},
    }[model]


def milliseconds(step: Callable[[], Any]) -> float:
    """The time of one call among many that are dispatched in a row."""
    once = rounds(step)[0]
    count = 1 if once > 2.0 else max(2, min(50, int(0.3 / max(once, 1e-6))))
    return rounds(step, count, warm_up=0)[0] * 1e3


@dataclass(frozen=True)
class Compiled:
    """A layer's forward and training step, compiled for its arguments, or why it could not be."""

    forward: Callable[..., Any] | None = None
    training: Callable[..., Any] | None = None
    seconds: float = 0.0
    error: str = ""


def compiled(layer: Callable[..., Any], *given: Any) -> Compiled:
    """Compiles a layer for a graph, features, parameters and a cotangent."""

    def training(graph: Any, x: Any, params: Any, cotangent: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: layer(graph, x, p), x, params)
        return y, pull(cotangent)

    try:
        start = time.perf_counter()
        both = jax.jit(training).lower(*given).compile()
        seconds = time.perf_counter() - start
        return Compiled(jax.jit(layer).lower(*given[:3]).compile(), both, seconds)
    except Exception as error:  # out of memory is a result
        return Compiled(error=_told(error))


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:120]}"


def timed(layer: Compiled, *given: Any) -> dict[str, Any]:
    """Forward and training time of a layer, and its first results."""
    if layer.forward is None or layer.training is None:
        return {"error": layer.error}
    forward, training = layer.forward, layer.training
    try:
        y, gradients = jax.block_until_ready(training(*given))
        kept = [np.asarray(part[:1000]) for part in (y, gradients[0])]
        del y, gradients
        times = {"training": milliseconds(lambda: training(*given))}
        times["forward"] = milliseconds(lambda: forward(*given[:3]))
        return times | {"compile_s": layer.seconds, "kept": kept}
    except Exception as error:
        return {"error": _told(error)}


def measure_graph(name: str, models: list[str], peers: list[str], args: argparse.Namespace, ends: float) -> list[dict]:
    from benchmarks.peers.case import make_graph

    data = make_graph(name)
    order = np.argsort(data.receivers, kind="stable")
    senders, receivers = np.ascontiguousarray(data.senders[order]), np.ascontiguousarray(data.receivers[order])
    start = time.perf_counter()
    graph = jax.block_until_ready(RelGraph.from_edges(senders, receivers, num_nodes=data.num_nodes))
    print(
        f"{name}: {data.num_nodes:,} nodes, {data.num_edges:,} edges; graph made in {time.perf_counter() - start:.1f} s"
    )
    rng = np.random.default_rng(0)
    x, cotangent = (jnp.asarray(rng.normal(size=(data.num_nodes, args.width)), jnp.float32) for _ in range(2))
    theirs: dict[str, Any] = {}
    if "pyg" in peers:
        theirs = run_torch(senders, receivers, data.num_nodes, models, args)
    parts: dict[tuple[str, str], tuple[Callable[..., Any], Any, Any]] = {}
    segments = (jnp.asarray(senders), jnp.asarray(receivers))
    for model in models:
        params = {
            key: jnp.asarray(rng.normal(size=shape) / math.sqrt(args.width), jnp.float32)
            for key, shape in shapes(model, args.width, args.heads).items()
        }
        options = Options(precision="tf32")
        run = lambda g, x, p, f=FUNCTIONS[model], o=options: f(g, x, p, options=o)  # noqa: E731
        parts[model, "dejax"] = run, graph, params
        if "jax" in peers:
            plain, nodes = zoo_jax.LAYERS[model], data.num_nodes
            written = lambda g, x, p, f=plain, n=nodes: f(zoo_jax.Segments(*g, n), x, p)  # noqa: E731
            parts[model, "jax"] = written, segments, params
    with ThreadPoolExecutor(args.compile_threads) as pool:
        waiting = {key: pool.submit(compiled, run, g, x, p, cotangent) for key, (run, g, p) in parts.items()}
        ready = {key: found.result() for key, found in waiting.items()}
    rows = []
    for model in models:
        if time.perf_counter() > ends:
            print(f"{model}: not begun, the time is over")
            continue
        row: dict[str, Any] = {"graph": name, "model": model}
        for part in ("dejax", "jax"):
            if (model, part) in parts:
                _, g, params = parts[model, part]
                row[part] = timed(ready[model, part], g, x, params, cotangent)
        if "jax" in row:
            row["difference"] = difference(row["dejax"].get("kept"), row["jax"].get("kept"))
        for part in ("dejax", "jax"):
            row.get(part, {}).pop("kept", None)
        if model in theirs:
            good = {form: t for form, t in theirs[model].items() if "training" in t}
            best = min(good, key=lambda form: good[form]["training"]) if good else next(iter(theirs[model]))
            row["pyg"] = theirs[model][best] | {"form": best}
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def difference(mine: list[np.ndarray] | None, other: list[np.ndarray] | None) -> list[float] | None:
    """Norms of the differences of results and gradients, over the norms."""
    if mine is None or other is None:
        return None
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(mine, other, strict=True)]


def run_torch(senders: Any, receivers: Any, nodes: int, models: list[str], args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        graph, out = Path(folder, "graph.npz"), Path(folder, "times.json")
        np.savez(graph, senders=senders, receivers=receivers, num_nodes=nodes)
        command = [sys.executable, str(TORCH), str(graph), str(out)]
        ran = subprocess.run([*command, ",".join(models), str(args.width), str(args.heads)], check=False)
        return json.loads(out.read_text(encoding="utf-8")) if ran.returncode == 0 else {}


def table(rows: list[dict]) -> str:
    """One row for each graph and layer: training times, and how much faster than the better peer."""
    lines, ratios = [], []
    for row in rows:
        cells = [row.get(part, {}) for part in ("dejax", "jax", "pyg")]
        shown = [f"{c['training']:.2f}" if "training" in c else _failure(c) for c in cells]
        peers = [c["training"] for c in cells[1:] if "training" in c]
        ratio = min(peers) / cells[0]["training"] if peers and "training" in cells[0] else None
        ratios += [] if ratio is None else [ratio]
        lines.append([row["graph"], row["model"], *shown, "" if ratio is None else f"{ratio:.1f}x"])
    text = markdown("graph | layer | dejax, ms | JAX, ms | PyTorch Geometric, ms | faster", lines)
    if ratios:
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        text += f"\n\nGeometric mean {mean:.1f}x, least {min(ratios):.1f}x."
    return text


def _failure(cell: dict[str, Any]) -> str:
    error = cell.get("error", "")
    return "out of memory" if "memory" in error.lower() or "RESOURCE_EXHAUSTED" in error else "failed" if error else ""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", default="am,mag", help="graphs whose counts to use, with commas")
    parser.add_argument("--models", default=",".join(MAIN), help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--peers", default="jax,pyg", help="peers to measure beside, with commas")
    parser.add_argument("--width", type=int, default=64, help="features of a node, before and after the layer")
    parser.add_argument("--heads", type=int, default=4, help="heads of attention")
    parser.add_argument("--compile-threads", type=int, default=1, help="with more, compile times are longer")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds after which no further layer is begun")


def run(args: argparse.Namespace, save: Save) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # PyTorch needs memory, too
    ends = time.perf_counter() + args.limit
    rows: list[dict] = []
    for name in args.graphs.split(","):
        rows += measure_graph(name, args.models.split(","), args.peers.split(","), args, ends)
    print(table(rows))
    save(rows)
