"""The first call of a layer in a new process: tracing, lowering, compiling, and the call, without and with a cache.

    python -m benchmarks first_calls --out benchmarks/results
    python -m benchmarks first_calls --models gat,rgat --graph aifb
    python -m benchmarks first_calls --models mag,mag/pipelined,am/pipelined --out first_calls_sampled_h200.json

One training step of each layer of `benchmarks/zoo.py` and of RGCN, RGAT and HGT, 64 to 64; or a step on sampled batches
of `benchmarks/mini_batch_pipeline.py` (igb at a hundredth), or its pipelined program of eight steps, with the launches
of a step. Each runs in two new processes that share a folder for JAX's and dejax's compiled programs: the first finds
it empty, the second finds its program. The device is ready before the clock starts. The function is called as users
call it; jax tells the seconds of the parts, and `run` is what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.provenance import Save

RELATIONAL = ("rgcn", "rgat", "hgt")
SAMPLED = ("mag", "am", "igb")
ZOO = ("gcn", "sage", "gin", "gated_gcn", "gat", "gatv2", "transformer", "rggnn")
LIMIT = 120.0  # seconds of a process
STEPS = 8  # of a pipelined program
EVENTS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}


def _step(name: str, model: str) -> tuple[Any, tuple[Any, ...]]:
    """A training step and its arguments."""
    import jax
    import jax.numpy as jnp

    from benchmarks.peers.case import Settings, make_graph, parameters
    from benchmarks.zoo import FUNCTIONS, shapes
    from dejax.rgnn import RelGraph, library

    data = make_graph(name)
    if model in RELATIONAL:
        from benchmarks.peers.jax_layers import rel_graph

        layer, graph = getattr(library, model), rel_graph(data)[0]
        params = {key: jnp.asarray(a) for key, a in parameters(model, data, Settings()).items()}
    else:
        layer = FUNCTIONS[model]
        graph = RelGraph.from_edges(data.senders, data.receivers, num_nodes=data.num_nodes)
        params = {key: jnp.zeros(shape) for key, shape in shapes(model, 64, 4).items()}
    x = jnp.zeros((data.num_nodes, 64), jnp.float32)

    def training(graph: Any, x: Any, params: Any) -> Any:
        y, pull = jax.vjp(lambda x, p: layer(graph, x, p), x, params)
        return y, pull(y)

    return training, (graph, x, params)


def _sampled(model: str) -> tuple[Any, tuple[Any, ...], int]:
    """A program of steps on sampled batches, its arguments, and how many steps it has."""
    import jax
    import jax.numpy as jnp

    from benchmarks import mini_batch_pipeline as sampled
    from dejax.minibatch import pipelined_steps, sampled_step, step_keys

    name, _, way = model.partition("/")
    parser = argparse.ArgumentParser()
    sampled.arguments(parser)
    case = sampled.CASES[name](parser.parse_args(["--scale", "0.01"]))
    keys, seeds = step_keys(jax.random.key(1), 0, STEPS), jnp.arange(STEPS * case.seeds).reshape(STEPS, -1)
    count, make = (STEPS, pipelined_steps) if way else (1, sampled_step)
    keys, seeds = (keys, jnp.asarray(case.nodes)[seeds]) if way else (keys[0], jnp.asarray(case.nodes)[seeds[0]])
    step = make(case.update, case.sample, dtype=case.dtype, joined=True)
    return step, (case.state(), case.topology, case.features, keys, seeds, *case.rest), count


def child(name: str, model: str) -> dict[str, float]:
    """Seconds of the parts of the first call in this process; of steps on sampled batches also a step's launches."""
    import jax

    steps = 0
    if model.partition("/")[0] in SAMPLED:
        training, given, steps = _sampled(model)
    else:
        training, given = _step(name, model)
        training = jax.jit(training)
    jax.block_until_ready((given, jax.jit(lambda x: x + 1)(1.0)))
    found = dict.fromkeys((*EVENTS.values(), "run"), 0.0)

    def note(event: str, seconds: float, **_: Any) -> None:
        if part := EVENTS.get(event):  # the program's own is the longest: it has those of the functions that it calls
            found[part] = max(found[part], seconds)

    jax.monitoring.register_event_duration_secs_listener(note)
    start = time.perf_counter()
    state = jax.block_until_ready(training(*given))[0]
    whole = time.perf_counter() - start
    found |= {"run": whole - sum(found.values()), "all": whole}
    if steps:
        from benchmarks.mini_batch_pipeline import profiled

        found |= {"launches": profiled(lambda: training(state, *given[1:])[1], steps).get("launches", 0)}
    return found


def measure(name: str, model: str) -> dict[str, Any]:
    found: dict[str, Any] = {"graph": name, "model": model}
    with tempfile.TemporaryDirectory() as cache:
        environment = os.environ | {
            "JAX_COMPILATION_CACHE_DIR": cache,
            "DEJAX_CACHE_DIR": cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        for way in ("cold", "cached"):
            command = [sys.executable, "-m", "benchmarks", "first_calls", "--graph", name, "--child", model]
            try:
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=LIMIT, check=True
                )
                found[way] = json.loads(done.stdout.splitlines()[-1])
            except subprocess.SubprocessError as error:
                found[way] = {"error": f"{error}: {str(getattr(error, 'stderr', ''))[-300:]}"}
    print(f"{model:<12}", *(f"{way}: {_shown(found[way])}" for way in ("cold", "cached")), sep="  ", flush=True)
    return found


def _shown(parts: dict[str, Any]) -> str:
    if "error" in parts:
        return parts["error"]
    inner = ", ".join(f"{key} {value:.2f}" for key, value in parts.items() if key != "all")
    return f"{parts['all']:.2f} s ({inner})"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--graph", default="bgs", help="graph whose counts to use")
    parser.add_argument("--models", default=",".join((*ZOO, *RELATIONAL)), help="layers or steps, with commas")
    parser.add_argument("--child", help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Save) -> None:
    if args.child:
        print(json.dumps(child(args.graph, args.child)))
        return
    found = [measure(args.graph, model) for model in args.models.split(",")]
    save({"results": found})
