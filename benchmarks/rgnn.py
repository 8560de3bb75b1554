"""One relational layer on eight graphs times three models: forward, and forward with gradients, beside the row bound.

    python benchmarks/rgnn.py --graphs aifb,am --models rgcn,rgat,hgt --out benchmarks/results

Graphs are synthetic with the published counts and skewed degrees (`dejax.datasets.synthetic`). The row bound is one
gathered
input row for each edge over the memory bandwidth. Times are medians over repetitions of several dispatches in a row.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from dejax import rgnn
from dejax.rgnn import library

GRAPHS = ("aifb", "mutag", "bgs", "fb15k", "biokg", "am", "mag", "wikikg2")
MODELS = ("rgcn", "rgat", "hgt")
BANDWIDTH = 4.3e12  # bytes per second, a device-to-device copy on an H200


def parameters(model: str, graph: rgnn.RelGraph, width: int, heads: int, dtype: Any, key: jax.Array) -> dict[str, Any]:
    """Random parameters of one layer, `width` in and out."""
    r, t, d = graph.num_edge_types, graph.num_node_types, width // heads
    shapes: dict[str, dict[str, tuple[int, ...]]] = {
        "rgcn": {"weight": (r, width, width)},
        "rgat": {"weight": (r, heads, width, d), "attention_src": (r, heads, d), "attention_dst": (r, heads, d)},
        "hgt": {
            **dict.fromkeys(("key", "query", "value"), (t, heads, width, d)),
            "relation_attention": (r, heads, d, d),
            "relation_message": (r, heads, d, d),
            "prior": (r, heads),
            "out": (t, width, width),
        },
    }
    keys = iter(jax.random.split(key, 16))
    return {name: jax.random.normal(next(keys), s, dtype) * width**-0.5 for name, s in shapes[model].items()}


def seconds(function: Any, *args: Any, target: float = 0.2, repeats: int = 5) -> float:
    """Median time of one call, dispatched many in a row so that only the device's time is left."""
    jax.block_until_ready(function(*args))
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    count = max(3, min(200, int(target / repeats / max(time.perf_counter() - start, 1e-6))))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            result = function(*args)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / count)
    return statistics.median(found)


def run_cell(graph: rgnn.RelGraph, model: str, args: argparse.Namespace) -> dict[str, Any]:
    dtype = jnp.dtype(args.dtype)
    key = jax.random.key(0)
    x = jax.random.normal(key, (graph.num_nodes, args.width), dtype)
    params = parameters(model, graph, args.width, args.heads, dtype, key)
    options = rgnn.Options(backend=args.backend, precision=args.precision)
    layer = getattr(library, model)
    forward = jax.jit(lambda g, x, p: layer(g, x, p, options=options))

    @jax.jit
    def training(g: rgnn.RelGraph, x: jax.Array, p: Any, ct: jax.Array) -> Any:
        y, pullback = jax.vjp(lambda x, p: layer(g, x, p, options=options), x, p)
        return y, pullback(ct)

    start = time.perf_counter()
    y = jax.block_until_ready(forward(graph, x, params))
    compile_forward = time.perf_counter() - start
    cotangent = jax.random.normal(jax.random.key(1), y.shape, y.dtype)
    start = time.perf_counter()
    jax.block_until_ready(training(graph, x, params, cotangent))
    compile_training = time.perf_counter() - start
    cell = {
        "compile_forward_s": compile_forward,
        "compile_training_s": compile_training,
        "forward_ms": seconds(forward, graph, x, params) * 1e3,
        "training_ms": seconds(training, graph, x, params, cotangent) * 1e3,
        "row_bound_ms": graph.num_edges * args.width * dtype.itemsize / BANDWIDTH * 1e3,
        "temp_bytes": training.lower(graph, x, params, cotangent).compile().memory_analysis().temp_size_in_bytes,
    }
    if args.check:
        reference = rgnn.Options(backend="xla", precision="f32")
        want = jax.jit(lambda g, x, p: layer(g, x, p, options=reference))(graph, x, params)
        cell["relative_difference_from_xla_f32"] = float(jnp.linalg.norm(y - want) / jnp.linalg.norm(want))
    return cell


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", default=",".join(GRAPHS))
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--precision", default="tf32", choices=("f32", "tf32", "bf16"))
    parser.add_argument("--backend", default="auto", choices=("auto", "pallas", "xla"))
    parser.add_argument("--check", action="store_true", help="compare with the XLA lowering in float32")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON")
    args = parser.parse_args()
    from dejax.datasets import synthetic

    results: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "options": {k: str(v) for k, v in vars(args).items() if k != "out"},
        "cells": {},
    }
    columns = ("forward ms", "+backward", "row bound", "x bound", "temp MiB", "compile s")
    print(f"{'graph':<10}{'model':<7}" + "".join(f"{name:>11}" for name in columns))
    for name in args.graphs.split(","):
        start = time.perf_counter()
        data = synthetic(name)
        made = time.perf_counter()
        graph = data.graph(add_reverse=False)
        jax.block_until_ready(graph)
        results["cells"].setdefault(name, {})["graph_s"] = time.perf_counter() - made
        print(
            f"{name}: edges in {made - start:.1f} s, RelGraph in {time.perf_counter() - made:.1f} s; {graph!r}",
            flush=True,
        )
        graph = jax.device_put(graph)
        for model in args.models.split(","):
            try:
                cell = run_cell(graph, model, args)
            except Exception as error:  # a cell that fails is a result
                cell = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
                print(f"{name:<10}{model:<7} {cell['error']}", flush=True)
            else:
                print(
                    f"{name:<10}{model:<7}{cell['forward_ms']:>11.3f}{cell['training_ms']:>11.3f}"
                    f"{cell['row_bound_ms']:>11.3f}{cell['forward_ms'] / cell['row_bound_ms']:>11.2f}"
                    f"{cell['temp_bytes'] / 2**20:>11.0f}"
                    f"{cell['compile_forward_s'] + cell['compile_training_s']:>11.1f}"
                    + (f"  diff {cell['relative_difference_from_xla_f32']:.1e}" if args.check else ""),
                    flush=True,
                )
            results["cells"][name][model] = cell
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"rgnn_{args.dtype}_{args.precision}_w{args.width}_h{args.heads}.json"
        path.write_text(json.dumps(results, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
