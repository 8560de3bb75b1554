"""Layers under both lowerings of kernels, on one GPU: the 24 cells of `benchmarks rgnn`, and the zoo on am and mag.

    python -m benchmarks lowering_cells --out benchmarks/results/lowering_cells_h100.json
    python -m benchmarks lowering_cells --cases aifb,zoo/am

Each graph has a process, which makes its programs, forward and training, with `Options(lowering=)` of either kind.
These processes compile side by side; then one after another measures, and calls of the two lowerings take turns. `ms`
is one call among many that are dispatched in a row; `span_ms` and `kernels_ms` are the device's, by the profiler.
`difference` is the norm of the difference of results and of gradients over their norm.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import IO, Any

from benchmarks.peers.runner import GRAPHS_IN_PROFILES
from benchmarks.provenance import Save
from benchmarks.tables import markdown

IN_OTHER_PROCESSES = True
LOWERINGS = ("pallas", "dejax")
RELATIONAL = ("rgcn", "rgat", "hgt")
CASES = ("wikikg2", "mag", "am", "zoo/mag", "zoo/am", "biokg", "fb15k", "bgs", "mutag", "aifb")
"""The graphs of `benchmarks rgnn`, and those of the zoo, those first that take longest to compile."""
MEASURED = ("ms", "span_ms", "kernels_ms")
TURNS = 5
Pair = dict[str, Future[Callable[[], Any]]]
"""Calls of one program, by lowering."""


def layers(case: str) -> tuple[Any, dict[str, tuple[Callable[..., Any], Any]], Any]:
    """The graph, each layer as a function of graph, features, parameters and options, with parameters, and features."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks import zoo
    from benchmarks.peers.case import Settings, make_graph, parameters
    from benchmarks.peers.jax_layers import rel_graph
    from dejax.rgnn import RelGraph, library

    kind, _, name = case.rpartition("/")
    data, rng = make_graph(name), np.random.default_rng(0)
    if kind:
        graph = jax.device_put(RelGraph.from_edges(data.senders, data.receivers, num_nodes=data.num_nodes))
        shapes = {model: zoo.shapes(model, 64, 4) for model in zoo.MAIN}
        weights = {model: {k: rng.normal(size=s) / 8 for k, s in each.items()} for model, each in shapes.items()}
        functions = zoo.FUNCTIONS
    else:
        graph = rel_graph(data)[0]
        weights = {model: parameters(model, data, Settings()) for model in RELATIONAL}
        functions = {model: getattr(library, model) for model in RELATIONAL}
    as_arrays = lambda p: jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), p)  # noqa: E731
    x = jnp.asarray(rng.standard_normal((data.num_nodes, 64), np.float32))
    return graph, {model: (functions[model], as_arrays(p)) for model, p in weights.items()}, x


def programs(case: str, threads: int) -> dict[tuple[str, str], Pair]:
    """Calls by model and direction, all of them compiled."""
    import jax

    from dejax.rgnn import Options

    graph, known, x = layers(case)
    threads *= max(1, len(known) // len(RELATIONAL))  # the zoo has more layers

    def compiled(model: str, direction: str, how: str) -> Callable[[], Any]:
        layer, params = known[model]
        options = Options(precision="tf32", lowering=how)

        def forward(graph: Any, x: Any, params: Any) -> Any:
            return layer(graph, x, params, options=options)

        def training(graph: Any, x: Any, params: Any) -> Any:
            y, pull = jax.vjp(lambda x, p: layer(graph, x, p, options=options), x, params)
            return y, pull(x[::-1])

        function = {"forward": forward, "training": training}[direction]
        program = jax.jit(function).lower(graph, x, params).compile()
        return lambda: program(graph, x, params)

    with ThreadPoolExecutor(threads) as pool:
        waiting = {
            (model, direction): {how: pool.submit(compiled, model, direction, how) for how in LOWERINGS}
            for model in known
            for direction in ("training", "forward")
        }
        wait(call for pair in waiting.values() for call in pair.values())
    return waiting


def measured(program: Pair, kernels: bool) -> dict[str, Any]:
    """Times of one program under both lowerings, which take turns, and how far their results lie apart."""
    import jax
    import numpy as np

    from benchmarks.clock import rounds
    from benchmarks.device_time import kernels_jax, profile_jax

    pair = {how: call.result() for how, call in program.items()}
    first = {how: [np.asarray(part[:1000]) for part in jax.tree.leaves(call())] for how, call in pair.items()}
    once = max(min(rounds(call, fewest=2)) for call in pair.values())
    count = max(1, min(100, int(0.02 / once)))
    seconds: dict[str, list[float]] = {how: [] for how in pair}
    for _ in range(TURNS):
        for how, call in pair.items():
            seconds[how] += rounds(call, count, warm_up=0)
    found: dict[str, Any] = {how: {"ms": 1e3 * statistics.median(each)} for how, each in seconds.items()}
    for _ in range(2):
        for how, call in pair.items():
            device = profile_jax(call, 10 if once < 0.005 else 3)
            for key, value in (device.as_dict() if device else {}).items():
                found[how][key] = min(value, found[how].get(key, math.inf))
    if kernels:
        for how, call in pair.items():
            found[how]["kernels"] = kernels_jax(call, 5)
    apart = [
        float(np.linalg.norm(np.subtract(a, b, dtype=np.float64)) / max(float(np.linalg.norm(b)), 1e-30))
        for a, b in zip(*first.values(), strict=True)
    ]
    return found | {"difference": max(apart)}


def child(case: str, threads: int, kernels: bool) -> None:
    """Compiles, says so, and measures when told to: one line of JSON for each program."""
    import jax

    start = time.perf_counter()
    known = programs(case, threads)
    ready = {"prepared_s": time.perf_counter() - start, "device": str(jax.devices()[0].device_kind)}
    print(json.dumps(ready), flush=True)
    sys.stdin.readline()
    for (model, direction), program in known.items():
        row: dict[str, Any] = {"case": case, "model": model, "direction": direction}
        try:
            row |= measured(program, kernels)
        except Exception as error:  # another program may do better
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        print(json.dumps(row), flush=True)


def started(case: str, threads: int, kernels: bool) -> subprocess.Popen[str]:
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} {GRAPHS_IN_PROFILES}".strip(),
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share the device
    }
    command = [sys.executable, "-m", "benchmarks", "lowering_cells", "--threads", str(threads), "--child", case]
    command += ["--kernels"] if kernels else []
    return subprocess.Popen(command, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def result(lines: IO[str]) -> dict[str, Any] | None:
    """The next result of a process; None at its end."""
    for line in iter(lines.readline, ""):
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    return None


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Geometric means, worst programs, and how many take more than 1.15 times as long, of dejax's over Pallas'."""
    found = {}
    for key in MEASURED:
        ratios = {
            f"{row['case']} {row['model']} {row['direction']}": row["dejax"][key] / row["pallas"][key]
            for row in rows
            if row.get("pallas", {}).get(key)
        }
        if ratios:
            worst = max(ratios, key=lambda name: ratios[name])
            mean = math.exp(statistics.fmean(map(math.log, ratios.values())))
            slow = sum(ratio > 1.15 for ratio in ratios.values())
            found[key] = {"geometric_mean": mean, "worst": [worst, ratios[worst]], "above_1.15": slow}
    return found


def shown(row: dict[str, Any]) -> list[str]:
    if "error" in row:
        return [row["case"], row["model"], row["direction"], row["error"], "", "", ""]
    times = [f"{row['pallas'][key]:.3f} -> {row['dejax'][key]:.3f}" if key in row["pallas"] else "" for key in MEASURED]
    return [row["case"], row["model"], row["direction"], *times, f"{row['difference']:.1e}"]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", default=",".join(CASES), help="graphs, those of the zoo as zoo/NAME, with commas")
    parser.add_argument("--threads", type=int, default=3, help="of each process, which compile")
    parser.add_argument("--prepare", type=float, default=600.0, help="seconds after which a process must have compiled")
    parser.add_argument("--kernels", action="store_true", help="also each kernel's time")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Save) -> None:
    if args.child:
        child(args.child, args.threads, args.kernels)
        return
    found: dict[str, Any] = {"prepared_s": {}, "failed": {}, "programs": []}
    deadline = time.monotonic() + args.prepare
    workers = {case: started(case, args.threads, args.kernels) for case in args.cases.split(",")}
    with ThreadPoolExecutor(len(workers)) as readers:
        coming = {case: readers.submit(result, worker.stdout) for case, worker in workers.items()}  # type: ignore[arg-type]
        for case, ready in coming.items():
            try:
                first = ready.result(max(deadline - time.monotonic(), 0.0))
                why = None if first else f"ended with {workers[case].wait()}"
            except TimeoutError:
                first, why = None, f"not compiled in {args.prepare:.0f} s"
                workers[case].kill()  # so that its reader ends
            if first:
                found["prepared_s"][case], found["device"] = first["prepared_s"], first["device"]
            else:
                found["failed"][case] = why
            print(case, why or f"prepared in {found['prepared_s'][case]:.0f} s", flush=True)
    for case in found["prepared_s"]:
        worker, rows = workers[case], 0
        with contextlib.suppress(BrokenPipeError):
            print("measure", file=worker.stdin, flush=True)
        while row := result(worker.stdout):  # type: ignore[arg-type]
            found["programs"].append(row)
            found["summary"] = summary(found["programs"])
            save(found)
            rows += 1
            print(*shown(row), sep="  ", flush=True)
        if worker.wait():
            found["failed"][case] = f"ended with {worker.returncode} after {rows} programs"
            print(case, found["failed"][case], flush=True)
    save(found)
    print(markdown(" | ".join(["graph", "layer", "direction", *MEASURED, "difference"]), map(shown, found["programs"])))
    print(json.dumps(found.get("summary", {})), json.dumps(found["failed"]))
