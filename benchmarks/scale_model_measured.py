"""CPU processes on loopback against the formulas of `scale_model.py`: bytes of every connection, and times.

    python benchmarks/scale_model_measured.py ADDRESS PROCESSES NUMBER FILE      # one process; `measure` starts them

The bytes are those that the kernel counted on the process' own TCP connections (TCP_INFO), with what gloo adds.

The times of the model are sums: what a process computes by itself, measured without exchanges while all processes do
the same, and a time for each collective operation. That is read off a curve for its kind, measured at other sizes.
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
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NODES, EDGES, WIDTHS, CAPACITY, TABLE_WIDTH = 20_000, 60_000, (32, 32, 32), 8192, 128
REPEATS = 16
CURVE = (1 << 10, 1 << 14, 1 << 17, 3 << 19, 3 << 21)  # bytes that one process sends; no case sends as many
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
    for name, case in found["cases"].items():  # all processes together; the slowest one decides how long it takes
        case["bytes"] = sum(one["cases"][name]["bytes"] for one in each)
        for key in ("seconds", "model_seconds"):
            case[key] = max(one["cases"][name][key] for one in each)
    return found


def table(results: Sequence[dict[str, Any]]) -> str:
    """Measured and modelled bytes and milliseconds, for each number of processes and case."""
    lines = [f"{'processes':>9}  {'case':<24}{'bytes':>14}{'model':>14}{'ratio':>8}{'ms':>9}{'model':>9}{'ratio':>8}"]
    for found in results:
        for name, case in found["cases"].items():
            ratio = case["bytes"] / case["model_bytes"] if case["model_bytes"] else float(case["bytes"] == 0)
            lines.append(
                f"{found['processes']:>9}  {name:<24}{case['bytes']:>14,.0f}{case['model_bytes']:>14,.0f}{ratio:>8.3f}"
                f"{1e3 * case['seconds']:>9.1f}{1e3 * case['model_seconds']:>9.1f}"
                f"{case['seconds'] / case['model_seconds']:>8.2f}"
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
    """Bytes of one call, and the lower quartile of its seconds: other work on the machine only adds to them."""
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
    return (connections.sent() - before) // repeats, statistics.quantiles(seconds, n=4)[0]


def process(address: str, count: int, number: int, file: Path) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    mesh = Mesh(np.array(jax.devices()), ("parts",))
    links = Links(mesh)
    cases = {**_sampled(mesh, links), **_full(mesh, links)}
    found = {"processes": count, "call": links.call, "curves": links.curves, "cases": cases}
    file.write_text(json.dumps(found), encoding="utf-8")


class Links:
    """Seconds of collective operations by the bytes that a process sends, measured.

    Attributes:
        call: seconds of a compiled call that does nothing.
        curves: by kind, seconds beyond `call` for each size of CURVE.
    """

    def __init__(self, mesh: Any) -> None:
        import jax

        parts, axis = mesh.size, "parts"
        ring = [(p, (p + 1) % parts) for p in range(parts)]
        self.call = self._seconds(mesh, lambda x: x + 1, parts)
        self.curves: dict[str, list[float]] = {}
        if parts == 1:
            return
        kinds: dict[str, tuple[Callable[[Any], Any], Callable[[int], float]]] = {  # and elements for some bytes
            "permute": (lambda x: jax.lax.ppermute(x, axis, ring), lambda size: size / 4),
            "all-to-all": (
                lambda x: jax.lax.all_to_all(x.reshape(parts, -1), axis, 0, 0, tiled=True),
                lambda size: size / 4 * parts / (parts - 1),
            ),
            "all-reduce": (lambda x: jax.lax.psum(x, axis), lambda size: size / 4 * parts / (2 * (parts - 1))),
        }
        for kind, (function, elements) in kinds.items():
            sizes = [parts * max(1, round(elements(size) / parts)) for size in CURVE]
            self.curves[kind] = [max(0.0, self._seconds(mesh, function, size) - self.call) for size in sizes]

    def _seconds(self, mesh: Any, function: Callable[[Any], Any], elements: int) -> float:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        split = PartitionSpec("parts")
        over = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
        x = jax.device_put(jnp.zeros(mesh.size * elements), NamedSharding(mesh, split))
        return timed(lambda: over(x))[1]

    def seconds(self, kind: str, size: float) -> float:
        """Of one operation in which each process sends `size` bytes."""
        import numpy as np

        return float(np.interp(size, CURVE, self.curves[kind])) if self.curves else 0.0


def _case(measured: tuple[int, float], model_bytes: float, model_seconds: float) -> dict[str, float]:
    """Bytes of this process (`run` adds up those of all), and the model's of all processes together."""
    return {
        "bytes": measured[0],
        "seconds": measured[1],
        "model_bytes": model_bytes,
        "model_seconds": model_seconds,
    }


def _sampled(mesh: Any, links: Links) -> dict[str, Any]:
    """Rows of a table that is sharded by row: ids to their owners, and rows back; then the gradients of a model."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from scale_model import all_reduce_bytes, all_to_all_bytes

    parts, split = mesh.size, PartitionSpec("parts")
    parameters = 1_000_000

    def to_all(x: Any) -> Any:
        return jax.lax.all_to_all(x, "parts", 0, 0, tiled=True)

    def read(send: Callable[[Any], Any], rows: Any, ids: Any) -> Any:
        return send(rows[send(ids).reshape(-1)].reshape(parts, CAPACITY, TABLE_WIDTH))

    over = {"mesh": mesh, "check_vma": False}
    fetch, alone = (
        jax.jit(jax.shard_map(partial(read, send), in_specs=(split, split), out_specs=split, **over))
        for send in (to_all, lambda x: x)
    )
    reduce = jax.jit(jax.shard_map(lambda g: jax.lax.psum(g, "parts"), in_specs=split, out_specs=split, **over))
    there = NamedSharding(mesh, split)
    rows = jax.device_put(jnp.ones((parts * 20_000, TABLE_WIDTH)), there)
    ids = jax.device_put(jnp.zeros((parts * parts, CAPACITY), jnp.int32), there)
    gradients = jax.device_put(jnp.ones((parts * parameters,)), there)
    rows_bytes = all_to_all_bytes(parts, CAPACITY, 4 * TABLE_WIDTH)
    sum_bytes = all_reduce_bytes(parts, 4 * parameters)
    sums = links.call + links.seconds("all-reduce", sum_bytes)
    if parts == 1:  # nothing is sent: a copy
        sums = timed(lambda: jax.jit(jnp.copy)(gradients))[1]
    ids_bytes = (parts - 1) * CAPACITY * 4
    model = timed(lambda: alone(rows, ids))[1]
    model += links.seconds("all-to-all", ids_bytes) + links.seconds("all-to-all", rows_bytes - ids_bytes)
    return {
        "rows of a sharded table": _case(timed(lambda: fetch(rows, ids)), parts * rows_bytes, model),
        "gradients": _case(timed(lambda: reduce(gradients)), parts * sum_bytes, sums),
    }


def _full(mesh: Any, links: Links) -> dict[str, Any]:
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
    narrow = exchange_bytes(graph.layout.halo_rows, 4, padding)

    def exchange(row_bytes: int) -> float:
        return sum(links.seconds("permute", some.rows * row_bytes) for some in graph.layout.rounds)

    cases = {"exchange of one column": _case(measured, narrow, exchange(4) + _without_links(graph, x, one))}
    taken = timed(lambda: step(params, graph, x))
    # The sums of gradients run without the exchanges, too.
    cases["step of two layers"] = _case(taken, whole, 3 * exchange(4 * first) + _without_links(graph, x, layer, params))
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
