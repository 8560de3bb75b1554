"""One relational layer on eight graphs times three models, with the row bound and other libraries.

    python -m benchmarks rgnn                                     # dejax, all 24 cells
    python -m benchmarks rgnn --peers all --out benchmarks/results
    python -m benchmarks rgnn --graphs am --peers pyg,grouped --update benchmarks/results/FILE.json
    python -m benchmarks rgnn --graphs am,mag --sweep             # and other widths, heads, bfloat16, float32 products

Times forward, and forward with gradients of features and weights. Graphs are synthetic with the published counts and
skewed degrees (`dejax.datasets.synthetic`), or read from a file. Each implementation runs in a process of its own. All
get the same edges, features, parameters and cotangent, and their results are compared with those of dejax.

`ms` is a caller's time: one call among many that are dispatched in a row. `device` is the profiler's time of one call:
from the first kernel's start to the last one's end, the sum of the kernels, and their number. Below about 0.1 ms, a
dispatch takes longer than the device. The row bound is the time to move one gathered row and two indices for each edge,
the weights, and one row for each node with incoming edges, at the bandwidth of a copy.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import rgnn_report
from benchmarks.peers import case, runner
from benchmarks.peers.case import Settings
from benchmarks.peers.timing import Limits
from benchmarks.provenance import Save

GRAPHS = ("aifb", "mutag", "bgs", "fb15k", "biokg", "am", "mag", "wikikg2")
MODELS = ("rgcn", "rgat", "hgt")
IN_OTHER_PROCESSES = True
PEERS = tuple(name for name in runner.FRAMEWORKS if name != "dejax")
SWEEP: dict[str, dict[str, Any]] = {
    **{f"width{width}": {"width": width} for width in (32, 100, 128, 256)},
    **{f"heads{heads}": {"heads": heads} for heads in (4, 8)},
    "bfloat16": {"dtype": "bfloat16"},
    "f32": {"precision": "f32"},
}
"""Further settings, by the names that `--sweep` takes."""


def names(text: str, known: tuple[str, ...], what: str) -> list[str]:
    """The names in a comma-separated list; `all` stands for all names, an empty text for none."""
    chosen = list(known) if text == "all" else [name for name in text.split(",") if name]
    unknown = [name for name in chosen if name not in known]
    if unknown:
        raise SystemExit(f"{what}: unknown {', '.join(unknown)}; known are {', '.join(known)}")
    return chosen


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graphs", default="all", help=f"comma-separated, of {', '.join(GRAPHS)}")
    parser.add_argument("--graph-file", type=Path, help="a graph from an .npz file (see peers/case.py, read_graph)")
    parser.add_argument("--models", default="all", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--peers", default="", help=f"all, or of {', '.join(PEERS)}")
    parser.add_argument("--no-ours", action="store_true", help="measure the peers only")
    parser.add_argument("--width", type=int, default=64, help="features of a node, before and after the layer")
    parser.add_argument("--heads", type=int, default=1, help="heads of attention")
    parser.add_argument(
        "--dtype", default="float32", choices=("float32", "bfloat16"), help="dtype of features and parameters"
    )
    parser.add_argument("--precision", default="tf32", choices=("f32", "tf32", "bf16"), help="of float32 products")
    parser.add_argument(
        "--sweep", nargs="?", const="all", default="", help=f"other settings, too: all, or {', '.join(SWEEP)}"
    )
    parser.add_argument(
        "--compile", action="store_true", help="also time the first call on the persistent compilation cache"
    )
    parser.add_argument("--batch", type=int, default=0, help="edges of RelGraph.build_traced, to time it, too")
    parser.add_argument("--target", type=float, default=0.2, help="seconds to spend on the repetitions of one function")
    parser.add_argument("--cut", type=float, default=5.0, help="a function slower than this (seconds) is called once")
    parser.add_argument(
        "--limit", type=float, default=120.0, help="seconds after which an implementation is stopped in a cell"
    )
    parser.add_argument("--python", default=sys.executable, help="the interpreter with PyTorch, for the peers")
    parser.add_argument("--update", type=Path, help="JSON of an earlier run to update; its other results are kept")


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with lists of names."""
    args.graphs = [] if args.graph_file else names(args.graphs, GRAPHS, "--graphs")
    args.models = names(args.models, MODELS, "--models")
    args.peers = names(args.peers, PEERS, "--peers")
    args.sweep = names(args.sweep, tuple(SWEEP), "--sweep")
    if args.width % args.heads:
        raise SystemExit(f"--width must be a multiple of --heads, got {args.width} and {args.heads}")
    if args.update and not args.update.exists():
        raise SystemExit(f"--update: {args.update} does not exist")
    return args


class Benchmark:
    """Cells, their results so far, and one line of output for each."""

    def __init__(self, args: argparse.Namespace, folder: Path, save: Save) -> None:
        self.args, self.folder, self.save = args, folder, save
        self.earlier = json.loads(args.update.read_text(encoding="utf-8")) if args.update else None
        self.limits = Limits(args.target, args.cut, args.limit)
        self.base = Settings(args.width, args.heads, args.dtype, args.precision)
        sweep = [Settings(**{**self.base_dict, **SWEEP[name]}) for name in args.sweep]
        self.settings = [self.base, *(s for s in sweep if s != self.base)]
        self.graphs: dict[str, dict[str, Any]] = {}
        self.results: list[dict[str, Any]] = []
        self.done = self.total = 0
        self.start = time.monotonic()

    @property
    def base_dict(self) -> dict[str, Any]:
        return asdict(self.base)

    def make_graphs(self) -> None:
        for name in self.args.graphs or [None]:
            start = time.perf_counter()
            graph = case.make_graph(name) if name else case.read_graph(self.args.graph_file)
            graph.save(self.folder / graph.name)
            for width in {s.width for s in self.settings}:
                case.features(graph, self.folder / graph.name, Settings(width))
            bounds = {s.name: graph.row_bound_ms(s) for s in self.settings}
            self.graphs[graph.name] = {
                "nodes": graph.num_nodes,
                "edges": graph.num_edges,
                "edge_types": graph.num_edge_types,
                "node_types": graph.num_node_types,
                "row_bound_ms": bounds,
            }
            print(f"{graph.name}: {graph.num_edges:,} edges made in {time.perf_counter() - start:.1f} s", flush=True)

    def cells(self, implementations: list[str], **more: Any) -> list[dict[str, Any]]:
        return [
            {"graph": g, "model": m, "implementation": i, "settings": asdict(s), **more}
            for g in self.graphs
            for s in (self.settings if "dejax" in implementations else [self.base])
            for m in self.args.models
            for i in implementations
        ]

    def run(self) -> dict[str, str]:
        versions: dict[str, str] = {"python": platform.python_version()}
        cache = str(self.folder / "cache")
        stages: list[tuple[str, list[dict[str, Any]], str | None]] = []
        if not self.args.no_ours:
            stages.append(("jax", self.cells(["dejax"]), cache))
            if self.args.batch:
                stages.append(("jax", [self.batch_cell()], None))
            if self.args.compile:
                stages.append(("jax", self.cells(["dejax"], task="compile"), cache))
        for framework in ("jax", "torch"):
            chosen = [name for name in self.args.peers if runner.FRAMEWORKS[name] == framework]
            if chosen:
                stages.append((framework, self.cells(chosen), cache))
        self.total = sum(len(cells) for _, cells, _ in stages)
        print(rgnn_report.PROGRESS_HEADER)
        for framework, cells, cache_folder in stages:
            python = self.args.python if framework == "torch" else sys.executable
            versions |= runner.run(framework, cells, self.folder, self.limits, self.report, cache_folder, python)
        return versions

    def batch_cell(self) -> dict[str, Any]:
        graph = next(iter(self.graphs))
        return {
            "graph": graph, "model": "-", "implementation": "dejax", "settings": self.base_dict,
            "task": "build", "edges": self.args.batch,
        }  # fmt: skip

    def report(self, cell: dict[str, Any], result: dict[str, Any]) -> None:
        self.done += 1
        if cell.get("task") == "compile":
            self.add_warm_start(cell, result)
        else:
            self.results.append({**cell, **result})
        seconds = time.monotonic() - self.start
        self.save(self.merged({}))
        bound = self.graphs[cell["graph"]]["row_bound_ms"][Settings(**cell["settings"]).name]
        print(
            f"{self.done:>4}/{self.total} {seconds:>5.0f} s  " + rgnn_report.progress(cell, result, bound), flush=True
        )

    def merged(self, versions: dict[str, str]) -> dict[str, Any]:
        """The results so far, merged with the other results of the file that is updated."""
        run = {"versions": versions, "date": time.strftime("%Y-%m-%d")}
        results = {"graphs": self.graphs, "results": [{**r, "run": run} for r in self.results]}
        return rgnn_report.merge(self.earlier, results) if self.earlier else results

    def add_warm_start(self, cell: dict[str, Any], result: dict[str, Any]) -> None:
        for known in self.results:
            if all(known[key] == cell[key] for key in rgnn_report.KEYS) and "forward" in known and "forward" in result:
                for name in ("forward", "training"):
                    known[name]["first_call_cached_s"] = result[name]["first_call_s"]


def run(args: argparse.Namespace, save: Save) -> None:
    args = checked(args)
    if args.update:
        args.out = args.update
    folder = Path(tempfile.mkdtemp(prefix="rgnn_benchmark_"))
    try:
        benchmark = Benchmark(args, folder, save)
        benchmark.make_graphs()
        results = benchmark.merged(benchmark.run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print("\n" + rgnn_report.text(results, benchmark.base))
    save(results)
