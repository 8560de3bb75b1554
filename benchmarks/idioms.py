"""Idioms of messages next to the same functions in the form by hand: forward and training.

    python -m benchmarks idioms --predict                               # by the cost model, on any machine
    python -m benchmarks idioms --compile-threads 14 --out benchmarks/results

The idioms are those of `tests/rgnn/passes/idioms.py`, on a random graph of 100,000 nodes, 3,000,000 edges and 20 edge
types. Forms are measured in turn, and the smaller of two rounds counts. `--seconds` ends a run early.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.provenance import Save
from dejax.rgnn import Options, RelGraph
from tests.rgnn.passes.idioms import IDIOMS, Idiom

FORMS = ("written", "by_hand")


def make_graph(nodes: int, edges: int, types: int) -> RelGraph:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, edges))
    return RelGraph.from_edges(*ends, rng.integers(0, types, edges), num_nodes=nodes, num_edge_types=types)


def predicted(program: Any, graph: RelGraph, shapes: list[tuple[int, ...]]) -> dict[str, float]:
    """Milliseconds by the cost model of an H200."""
    out = io.StringIO()
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program.explain(graph, *arrays, options=Options(backend="pallas", interpret=False), summary=True, file=out)
    _, forward, backward = (float(t) for t in re.findall(r"^total .* ([\d.]+) us$", out.getvalue(), re.MULTILINE))
    return {"forward": forward / 1e3, "training": (forward + backward) / 1e3}


def compiled(program: Any, graph: RelGraph, arrays: list[Any]) -> dict[str, Callable[..., Any]] | str:
    """The calls "forward" and "training" of a program, or why it could not be compiled."""

    def forward(graph: RelGraph, *arrays: Any) -> Any:
        return program(graph, *arrays)

    def training(graph: RelGraph, *arrays: Any) -> Any:
        y, pull = jax.vjp(lambda *a: program(graph, *a), *arrays)
        return y, pull(y)

    try:
        both = {"forward": forward, "training": training}
        return {key: jax.jit(f).lower(graph, *arrays).compile() for key, f in both.items()}
    except Exception as error:  # a form that fails is a result
        return f"{type(error).__name__}: {str(error)[:200]}"


def milliseconds(call: Callable[[], Any], seconds: float) -> float:
    once = rounds(call)[0]
    return rounds(call, max(2, min(30, int(seconds / max(once, 1e-6)))), warm_up=0)[0] * 1e3


def draw(case: Idiom, graph: RelGraph) -> list[jax.Array]:
    shapes = case.shapes(graph)
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [0.3 * jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]


def measure(names: list[str], graph: RelGraph, args: argparse.Namespace, ends: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with ThreadPoolExecutor(args.compile_threads) as pool:
        arrays = {name: draw(IDIOMS[name], graph) for name in names}
        waiting = {
            (name, form): pool.submit(compiled, getattr(IDIOMS[name], form), graph, arrays[name])
            for name in names
            for form in FORMS
        }
        # Compiling tries kernels on the device: nothing is measured before all is compiled.
        made = {}
        for count, (key, one) in enumerate(waiting.items(), 1):
            made[key] = one.result()
            print(f"\r  {count} of {len(waiting)} forms are compiled", end="", file=sys.stderr, flush=True)
    for name in names:
        if time.perf_counter() > ends:
            print(f"{name}: not begun, the time is over", flush=True)
            continue
        calls = {form: made[name, form] for form in FORMS}
        failed = {form: calls[form] for form in FORMS if isinstance(calls[form], str)}
        found[name] = failed or _in_turn(calls, graph, arrays.pop(name))
        print(_line(name, found[name]), flush=True)
    return found


def _in_turn(calls: dict[str, Any], graph: RelGraph, arrays: list[Any]) -> dict[str, dict[str, float]]:
    times: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for _ in range(2):
        for form in FORMS:
            for key, call in calls[form].items():
                took = milliseconds(lambda call=call: call(graph, *arrays), 0.02)
                times[form][key] = min(took, times[form].get(key, took))
    return times


def _line(name: str, found: dict[str, Any]) -> str:
    if any(isinstance(part, str) for part in found.values()):
        return f"{name:32} {found}"
    cells = []
    for key in ("forward", "training"):
        mine, hand = found["written"][key], found["by_hand"][key]
        cells.append(f"{key} {mine:7.3f} ms, by hand {hand:7.3f}, {mine / hand:5.2f} x")
    return f"{name:32} {'; '.join(cells)}"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--names", default="", help="idioms, separated by commas; all by default")
    parser.add_argument("--counts", default="100000,3000000,20", help="nodes, edges, edge types")
    parser.add_argument("--predict", action="store_true", help="times of the cost model")
    parser.add_argument("--compile-threads", type=int, default=8, help="threads that compile")
    parser.add_argument("--seconds", type=float, default=110.0, help="no idiom is begun after so many seconds")


def run(args: argparse.Namespace, save: Save) -> None:
    ends = time.perf_counter() + args.seconds
    names = args.names.split(",") if args.names else list(IDIOMS)
    graph = make_graph(*(int(n) for n in args.counts.split(",")))
    if args.predict:
        found = {}
        for name in names:
            case = IDIOMS[name]
            found[name] = {f: predicted(getattr(case, f), graph, case.shapes(graph)) for f in FORMS}
            print(_line(name, found[name]), flush=True)
    else:
        found = measure(names, jax.block_until_ready(graph), args, ends)
    save(found)
