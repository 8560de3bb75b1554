"""Full-batch training of two-layer models on graphs with the counts of am and mag: epoch time and peak memory.

    python -m benchmarks rgnn_training --out benchmarks/results
    python -m benchmarks rgnn_training --graphs am --models rgcn --peers pyg,grouped

Two layers of 64 with a ReLU between them, a matrix to the classes, cross-entropy on a tenth of the nodes, Adam. All
implementations begin with the same parameters, so their first losses are equal. The classes are random. RGAT has one
attention vector per relation in dejax and one for all relations in PyTorch Geometric, so later losses differ. Each
implementation runs in a process of its own.
"""

from __future__ import annotations

import argparse
import math
import platform
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import rgnn
from benchmarks.peers import case, runner
from benchmarks.peers.case import Settings
from benchmarks.peers.timing import Limits
from benchmarks.provenance import Save
from benchmarks.tables import markdown

CLASSES = {"aifb": 4, "mutag": 2, "bgs": 2, "am": 11, "mag": 349}
"""Number of classes of the real graphs; others get 16."""
IN_OTHER_PROCESSES = True


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", default="am,mag", help=f"comma-separated, of {', '.join(rgnn.GRAPHS)}")
    parser.add_argument("--models", default="all", help=f"of {', '.join(rgnn.MODELS)}")
    parser.add_argument("--peers", default="pyg", help=f"of {', '.join(rgnn.PEERS)}")
    parser.add_argument("--width", type=int, default=64, help="features of a node, before and after the layer")
    parser.add_argument("--heads", type=int, default=1, help="heads of attention")
    parser.add_argument("--precision", default="tf32", choices=("f32", "tf32", "bf16"), help="precision of products")
    parser.add_argument("--target", type=float, default=0.5, help="seconds to spend on repetitions")
    parser.add_argument(
        "--limit", type=float, default=180.0, help="seconds after which an implementation is stopped in a cell"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter with PyTorch")


def run(args: argparse.Namespace, save: Save) -> None:
    args.graphs = rgnn.names(args.graphs, rgnn.GRAPHS, "--graphs")
    args.models = rgnn.names(args.models, rgnn.MODELS, "--models")
    args.peers = rgnn.names(args.peers, rgnn.PEERS, "--peers")
    settings = Settings(args.width, args.heads, "float32", args.precision)
    results: list[dict[str, Any]] = []

    def report(cell: dict[str, Any], result: dict[str, Any]) -> None:
        results.append({**cell, **result})
        print(line(results[-1]), flush=True)

    versions: dict[str, str] = {"python": platform.python_version()}
    folder = Path(tempfile.mkdtemp(prefix="rgnn_training_"))
    try:
        for name in args.graphs:
            graph = case.make_graph(name)
            graph.save(folder / name)
            case.features(graph, folder / name, settings)
        print(f"{'graph':<9}{'model':<6}{'implementation':<15}{'epoch ms':>10}{'device':>9}{'MiB':>9}  first losses")
        for framework in ("jax", "torch"):
            chosen = [n for n in ("dejax", *args.peers) if runner.FRAMEWORKS[n] == framework]
            cells = [
                {
                    "task": "train", "graph": g, "model": m, "implementation": i, "settings": asdict(settings),
                    "classes": CLASSES.get(g, 16),
                }
                for g in args.graphs for m in args.models for i in chosen
            ]  # fmt: skip
            python = args.python if framework == "torch" else sys.executable
            limits = Limits(args.target, cell_s=args.limit)
            versions |= runner.run(framework, cells, folder, limits, report, None, python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + table(results))
    save({"versions": versions, "results": results})


def line(result: dict[str, Any]) -> str:
    head = f"{result['graph']:<9}{result['model']:<6}{result['implementation']:<15}"
    if result["status"] != "ok":
        return f"{head}{result['status']}: {result.get('message', '')[:150]}"
    epoch = result["epoch"]
    device = f"{epoch['device']['span_ms']:.2f}" if epoch["device"] else "-"
    losses = " ".join(f"{value:.5f}" for value in result["losses"])
    return f"{head}{epoch['ms']:>10.2f}{device:>9}{epoch.get('peak_bytes', math.nan) / 2**20:>9.0f}  {losses}"


def table(results: list[dict[str, Any]]) -> str:
    """A Markdown table: a row for each graph and model, epoch ms and peak MiB of each implementation."""
    names = list(dict.fromkeys(r["implementation"] for r in results))
    rows = []
    for graph, model in dict.fromkeys((r["graph"], r["model"]) for r in results):
        row = [graph, model]
        for name in names:
            found = [r for r in results if (r["graph"], r["model"], r["implementation"]) == (graph, model, name)]
            row.append(_cell(found[0]) if found else "-")
        rows.append(row)
    return markdown(["graph", "model", *names], rows)


def _cell(result: dict[str, Any]) -> str:
    if result["status"] != "ok":
        return result["status"]
    epoch = result["epoch"]
    memory = f", {epoch['peak_bytes'] / 2**20:,.0f} MiB" if "peak_bytes" in epoch else ""
    return f"{epoch['ms']:.3g} ms{memory}"
