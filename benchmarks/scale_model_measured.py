"""CPU processes on loopback against the formulas of `scale_model.py`: bytes of every connection, and times.

    python benchmarks/scale_model_measured.py ADDRESS PROCESSES NUMBER FILE      # one process; `measure` starts them

The bytes are those that the kernel counted on the process' own TCP connections (TCP_INFO), with what gloo adds.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NODES, EDGES, WIDTHS, CAPACITY, TABLE_WIDTH = 20_000, 60_000, (32, 32, 32), 8192, 128
REPEATS = 3
_ACKED, _RECEIVED = 120, 128  # places in the kernel's `struct tcp_info`


def measure(processes: Sequence[int]) -> list[dict[str, Any]]:
    """Starts each number of processes in turn; the results of the first process of each."""
    return [run(count, [sys.executable, str(Path(__file__))]) for count in processes]


def run(count: int, command: Sequence[str]) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(count)]
        running = [
            subprocess.Popen([*command, address, str(count), str(number), str(file)], env=env)
            for number, file in enumerate(files)
        ]
        codes = [process.wait() for process in running]
        if any(codes):
            raise RuntimeError(f"{count} processes must end well, got exit codes {codes}")
        each = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    found: dict[str, Any] = each[0]
    for name, case in found["cases"].items():  # all processes together
        case["bytes"] = sum(one["cases"][name]["bytes"] for one in each)
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """Measured and modelled bytes and milliseconds, for each number of processes and case."""
    lines = [f"{'processes':>9}  {'case':<24}{'bytes':>14}{'model':>14}{'ratio':>8}{'ms':>9}{'model':>9}"]
    for found in results:
        for name, case in found["cases"].items():
            ratio = case["bytes"] / case["model_bytes"] if case["model_bytes"] else float(case["bytes"] == 0)
            lines.append(
                f"{found['processes']:>9}  {name:<24}{case['bytes']:>14,.0f}{case['model_bytes']:>14,.0f}{ratio:>8.3f}"
                f"{1e3 * case['seconds']:>9.1f}{1e3 * case['model_seconds']:>9.1f}"
            )
    return "\n".join(lines)


class Connections:
    """Bytes that the process sent and got acknowledged over TCP."""

    def sent(self) -> int:
        total = 0
        for name in os.listdir("/proc/self/fd"):
            try:
                if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(name))) as connection:
                    if connection.family not in (socket.AF_INET, socket.AF_INET6):
                        continue
                    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                    total += struct.unpack_from("<Q", info, _ACKED)[0]
            except OSError:  # closed meanwhile, or no TCP
                continue
        return total


def timed(function: Callable[[], Any], repeats: int = REPEATS) -> tuple[int, float]:
    """Bytes of one call, and the median of its seconds."""
    import jax

    jax.block_until_ready(function())
    connections, seconds = Connections(), []
    time.sleep(0.05)
    before = connections.sent()
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(function())
        seconds.append(time.perf_counter() - start)
    time.sleep(0.2)  # the last acknowledgements
    return (connections.sent() - before) // repeats, statistics.median(seconds)


def process(address: str, count: int, number: int, file: Path) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    mesh = Mesh(np.array(jax.devices()), ("parts",))
    rate, latency = _link(mesh) if count > 1 else (float("inf"), 0.0)
    cases = {**_sampled(mesh, rate, latency), **_full(mesh, rate, latency)}
    found = {"processes": count, "bytes_a_second": rate, "latency": latency, "cases": cases}
    file.write_text(json.dumps(found), encoding="utf-8")


def _link(mesh: Any) -> tuple[float, float]:
    """Bytes a second of a `ppermute`, and its seconds for no bytes, from two sizes."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec

    parts = mesh.size
    pairs = [(p, (p + 1) % parts) for p in range(parts)]
    send = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.ppermute(x, "parts", pairs),
            mesh=mesh,
            in_specs=PartitionSpec("parts"),
            out_specs=PartitionSpec("parts"),
        )
    )
    seconds = []
    for size in (1 << 12, 1 << 23):
        x = jax.device_put(jnp.zeros(parts * size // 4), NamedSharding(mesh, PartitionSpec("parts")))
        seconds.append(timed(lambda x=x: send(x), 9)[1])
    return ((1 << 23) - (1 << 12)) / max(seconds[1] - seconds[0], 1e-9), seconds[0]


def _case(measured: tuple[int, float], model_bytes: float, model_seconds: float) -> dict[str, float]:
    """Bytes of this process (`run` adds up those of all), and the model's of all processes together."""
    return {
        "bytes": measured[0],
        "seconds": measured[1],
        "model_bytes": model_bytes,
        "model_seconds": model_seconds,
    }


def _sampled(mesh: Any, rate: float, latency: float) -> dict[str, Any]:
    """Rows of a table that is sharded by row: ids to their owners, and rows back; then the gradients of a model."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from scale_model import all_reduce_bytes, all_to_all_bytes

    parts, split = mesh.size, PartitionSpec("parts")
    model = 1_000_000

    def read(rows: Any, ids: Any) -> Any:
        asked = jax.lax.all_to_all(ids, "parts", 0, 0, tiled=True)
        return jax.lax.all_to_all(rows[asked.reshape(-1)].reshape(parts, CAPACITY, TABLE_WIDTH), "parts", 0, 0)

    over = {"mesh": mesh, "check_vma": False}
    fetch = jax.jit(jax.shard_map(read, in_specs=(split, split), out_specs=split, **over))
    reduce = jax.jit(jax.shard_map(lambda g: jax.lax.psum(g, "parts"), in_specs=split, out_specs=split, **over))
    there = NamedSharding(mesh, split)
    rows = jax.device_put(jnp.ones((parts * 20_000, TABLE_WIDTH)), there)
    ids = jax.device_put(jnp.zeros((parts * parts, CAPACITY), jnp.int32), there)
    gradients = jax.device_put(jnp.ones((parts * model,)), there)
    rows_bytes = all_to_all_bytes(parts, CAPACITY, 4 * TABLE_WIDTH)
    sum_bytes = all_reduce_bytes(parts, 4 * model)
    return {
        "rows of a sharded table": _case(
            timed(lambda: fetch(rows, ids)), parts * rows_bytes, rows_bytes / rate + 2 * latency
        ),
        "gradients": _case(timed(lambda: reduce(gradients)), parts * sum_bytes, sum_bytes / rate + latency),
    }


def _full(mesh: Any, rate: float, latency: float) -> dict[str, Any]:
    """One exchange, and a step of two R-GCN layers, of a random graph."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from scale_model import all_reduce_bytes, exchange_bytes

    from dejax.distributed.full_graph import ShardedGraph, over_mesh
    from dejax.rgnn import RelGraph, library, program

    rng, parts = np.random.default_rng(0), mesh.size
    ends = rng.integers(0, NODES, (2, EDGES))
    graph = ShardedGraph.from_graph(
        RelGraph.from_edges(*ends, rng.integers(0, 2, EDGES), num_nodes=NODES), np.arange(NODES) % parts, mesh
    )
    layer, first = over_mesh(library.rgcn), WIDTHS[0]
    x = graph.shard_nodes(rng.normal(size=(NODES, first)).astype(np.float32))
    params = [
        {"weight": jnp.asarray(rng.normal(size=(2, *pair)) * 0.1, jnp.float32)} for pair in itertools.pairwise(WIDTHS)
    ]

    def loss(params: Any, graph: Any, x: Any) -> Any:
        for some in params:
            x = jnp.tanh(layer(graph, x, some))
        return jnp.where(graph.node_mask[:, None], x, 0).sum()

    step = jax.jit(jax.grad(loss))
    padding = graph.layout.rows_sent / max(graph.layout.halo_rows, 1)
    rows = exchange_bytes(graph.layout.halo_rows, 4 * first, padding)
    # Two exchanges forward; the first layer's features need no gradient, so one back. Then the gradients, and the loss.
    gradients = sum(4 * 2 * a * b for a, b in itertools.pairwise(WIDTHS))
    whole = 3 * rows + parts * all_reduce_bytes(parts, gradients)
    one = over_mesh(program(lambda g, x: g.max_to_dst(g.src(x).max())))
    alone = jax.jit(lambda graph, x: one(graph, x))
    measured = timed(lambda: alone(graph, x))
    rounds = len(graph.layout.rounds)
    compute = _without_links(graph, x, one)
    narrow = exchange_bytes(graph.layout.halo_rows, 4, padding)
    cases = {"exchange of one column": _case(measured, narrow, narrow / parts / rate + rounds * latency + compute)}
    taken = timed(lambda: step(params, graph, x))
    local = _without_links(graph, x, layer, params) if parts > 1 else taken[1]
    cases["step of two layers"] = _case(
        taken, whole, local + whole / parts / rate + (3 * rounds + 2 * len(params)) * latency
    )
    return cases


def _without_links(graph: Any, x: Any, layer: Any, params: Any = None) -> float:
    """Seconds of the same computation on the same tables where no round of the exchange runs.

    Halo slots then hold zeros.
    """
    import dataclasses

    import jax
    import jax.numpy as jnp

    # Slots stay, so that shapes do; the pairs of each round go.
    rounds = tuple(dataclasses.replace(some, pairs=()) for some in graph.layout.rounds)
    silent = dataclasses.replace(graph, layout=dataclasses.replace(graph.layout, rounds=rounds))
    if params is None:
        function = jax.jit(lambda graph, x: layer(graph, x))
        return timed(lambda: function(silent, x))[1]

    def loss(params: Any, graph: Any, x: Any) -> Any:
        for some in params:
            x = jnp.tanh(layer(graph, x, some))
        return jnp.where(graph.node_mask[:, None], x, 0).sum()

    step = jax.jit(jax.grad(loss))
    return timed(lambda: step(params, silent, x))[1]


if __name__ == "__main__":
    process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
