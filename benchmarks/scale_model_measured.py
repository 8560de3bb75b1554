"""CPU processes on loopback against the formulas of `scale_model.py`: bytes of every connection, and times.

    python benchmarks/scale_model_measured.py ADDRESS PROCESSES NUMBER FILE TURNS    # one process of `measure`

The bytes are those that the kernel counted on the process' own TCP connections (TCP_INFO), with what gloo adds.

The times of the model are sums: what a process computes by itself, measured without exchanges while all processes do
the same, and a time for each collective operation. That is read off a curve for its kind, measured at other sizes. All
measurements take turns, so that other work on the machine slows cases and model alike.
"""

from __future__ import annotations

import dataclasses
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


def measure(processes: Sequence[int], turns: int = REPEATS) -> list[dict[str, Any]]:
    """Starts each number of processes in turn; `turns` is how often each time is measured, at least 2."""
    return [run(count, [sys.executable, str(Path(__file__))], turns) for count in processes]


def run(count: int, command: Sequence[str], turns: int) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if "device_count" not in flag]
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags), "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{number}.json" for number in range(count)]
        running = [
            subprocess.Popen([*command, address, str(count), str(number), str(file), str(turns)], env=env)
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


class Stopwatch:
    """Seconds of several functions, which take turns: what else runs on the machine then slows all of them alike."""

    def __init__(self) -> None:
        self.functions: dict[Any, Callable[[], Any]] = {}
        self.seconds: dict[Any, float] = {}

    def add(self, name: Any, function: Callable[[], Any]) -> None:
        self.functions[name] = function

    def run(self, turns: int) -> None:
        """Fills `seconds` with lower quartiles: other work on the machine only adds to them."""
        import jax

        taken: dict[Any, list[float]] = {name: [] for name in self.functions}
        for turn in range(turns + 1):
            for name, function in self.functions.items():
                start = time.perf_counter()
                jax.block_until_ready(function())
                if turn:  # not the first call, which compiles
                    taken[name].append(time.perf_counter() - start)
        self.seconds = {name: statistics.quantiles(some, n=4)[0] for name, some in taken.items()}


@dataclasses.dataclass(slots=True)
class Case:
    """A computation whose bytes and seconds are predicted.

    Attributes:
        function: runs it once.
        model_bytes: that all processes send together.
        model_seconds: after the stopwatch has run.
    """

    function: Callable[[], Any]
    model_bytes: float
    model_seconds: Callable[[], float]

    def found(self, seconds: float) -> dict[str, float]:
        """The bytes of this process, which `run` adds up, and its seconds."""
        import jax

        connections = Connections()
        time.sleep(0.2)  # acknowledgements of what ran before
        before = connections.sent()
        for _ in range(3):
            jax.block_until_ready(self.function())
        time.sleep(0.2)
        return {
            "bytes": (connections.sent() - before) // 3,
            "seconds": seconds,
            "model_bytes": self.model_bytes,
            "model_seconds": self.model_seconds(),
        }


def process(address: str, count: int, number: int, file: Path, turns: int) -> None:
    import jax
    import numpy as np
    from jax.sharding import Mesh

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, count, number)
    mesh, watch = Mesh(np.array(jax.devices()), ("parts",)), Stopwatch()
    links = Links(mesh, watch)
    cases = _sampled(mesh, links) | _full(mesh, links)
    for name, case in cases.items():
        watch.add(name, case.function)
    watch.run(turns)
    found = {
        "processes": count,
        "call": watch.seconds["call"],
        "curves": links.curves(),
        "cases": {name: case.found(watch.seconds[name]) for name, case in cases.items()},
    }
    file.write_text(json.dumps(found), encoding="utf-8")


class Links:
    """Seconds of collective operations by the bytes that a process sends, measured at the sizes of CURVE.

    "call" is a compiled call that does nothing. What a case computes by itself is added as "... alone".
    """

    def __init__(self, mesh: Any, watch: Stopwatch) -> None:
        import jax

        self.mesh, self.watch, parts, axis = mesh, watch, mesh.size, "parts"
        self.kinds: tuple[str, ...] = ()
        self._add("call", lambda x: x + 1, parts)
        if parts == 1:
            return
        ring = [(p, (p + 1) % parts) for p in range(parts)]
        to_all = partial(jax.lax.all_to_all, axis_name=axis, split_axis=0, concat_axis=0, tiled=True)
        functions: dict[str, tuple[Callable[[Any], Any], float]] = {  # and the part of an array that is sent
            "permute": (lambda x: jax.lax.ppermute(x, axis, ring), 1.0),
            "all-to-all": (lambda x: to_all(x.reshape(parts, -1)), (parts - 1) / parts),
            "all-reduce": (lambda x: jax.lax.psum(x, axis), 2 * (parts - 1) / parts),
        }
        self.kinds = tuple(functions)
        for kind, (function, sent) in functions.items():
            for size in CURVE:
                self._add((kind, size), function, parts * max(1, round(size / 4 / sent / parts)))

    def _add(self, name: Any, function: Callable[[Any], Any], elements: int) -> None:
        import jax
        import jax.numpy as jnp
        from jax.sharding import NamedSharding, PartitionSpec

        split = PartitionSpec("parts")
        over = jax.jit(jax.shard_map(function, mesh=self.mesh, in_specs=split, out_specs=split, check_vma=False))
        x = jax.device_put(jnp.zeros(self.mesh.size * elements), NamedSharding(self.mesh, split))
        self.watch.add(name, lambda: over(x))

    def curves(self) -> dict[str, list[float]]:
        """Seconds beyond those of a call, by kind."""
        seconds = self.watch.seconds
        return {kind: [max(0.0, seconds[kind, size] - seconds["call"]) for size in CURVE] for kind in self.kinds}

    def seconds(self, kind: str, size: float) -> float:
        """Of one operation in which each process sends `size` bytes."""
        import numpy as np

        return float(np.interp(size, CURVE, self.curves()[kind])) if self.kinds else 0.0


def _sampled(mesh: Any, links: Links) -> dict[str, Case]:
    """Rows of a table that is sharded by row: ids to their owners, and rows back; then the gradients of a model."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding, PartitionSpec
    from scale_model import all_reduce_bytes, all_to_all_bytes

    parts, split, watch = mesh.size, PartitionSpec("parts"), links.watch
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
    reduce, copy = (
        jax.jit(jax.shard_map(some, in_specs=split, out_specs=split, **over))
        for some in (lambda g: jax.lax.psum(g, "parts"), jnp.copy)
    )
    there = NamedSharding(mesh, split)
    rows = jax.device_put(jnp.ones((parts * 20_000, TABLE_WIDTH)), there)
    ids = jax.device_put(jnp.zeros((parts * parts, CAPACITY), jnp.int32), there)
    gradients = jax.device_put(jnp.ones((parts * parameters,)), there)
    watch.add("rows alone", lambda: alone(rows, ids))
    watch.add("gradients alone", lambda: copy(gradients))
    rows_bytes = all_to_all_bytes(parts, CAPACITY, 4 * TABLE_WIDTH)
    ids_bytes, sum_bytes = (parts - 1) * CAPACITY * 4, all_reduce_bytes(parts, 4 * parameters)

    def of_rows() -> float:
        sizes = ids_bytes, rows_bytes - ids_bytes
        return watch.seconds["rows alone"] + sum(links.seconds("all-to-all", size) for size in sizes)

    def of_gradients() -> float:
        alone = watch.seconds["gradients alone" if parts == 1 else "call"]  # where nothing is sent, it is a copy
        return alone + links.seconds("all-reduce", sum_bytes)

    return {
        "rows of a sharded table": Case(lambda: fetch(rows, ids), parts * rows_bytes, of_rows),
        "gradients": Case(lambda: reduce(gradients), parts * sum_bytes, of_gradients),
    }


def _full(mesh: Any, links: Links) -> dict[str, Case]:
    """One exchange, and a step of two R-GCN layers, of a random graph."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from scale_model import all_reduce_bytes, exchange_bytes

    from dejax.distributed.full_graph import ShardedGraph
    from dejax.rgnn import RelGraph, library, program

    rng, parts, watch = np.random.default_rng(0), mesh.size, links.watch
    ends = rng.integers(0, NODES, (2, EDGES))
    graph = ShardedGraph.from_graph(
        RelGraph.from_edges(*ends, rng.integers(0, 2, EDGES), num_nodes=NODES), np.arange(NODES) % parts, mesh
    )
    first = WIDTHS[0]
    x = graph.shard_nodes(rng.normal(size=(NODES, first)).astype(np.float32))
    params = [
        {"weight": jnp.asarray(rng.normal(size=(2, *pair)) * 0.1, jnp.float32)} for pair in itertools.pairwise(WIDTHS)
    ]
    largest = program(lambda g, x: g.max_to_dst(g.src(x).max()))

    def loss(params: Any, graph: Any, x: Any) -> Any:
        for some in params:
            x = jnp.tanh(library.rgcn(graph, x, some))
        return jnp.where(graph.node_mask[:, None], x, 0).sum()

    one, step = jax.jit(lambda graph, x: largest(graph, x)), jax.jit(jax.grad(loss))
    silent = _without_links(graph)
    watch.add("exchange alone", lambda: one(silent, x))
    watch.add("step alone", lambda: step(params, silent, x))
    padding = graph.layout.rows_sent / max(graph.layout.halo_rows, 1)
    narrow, wide = (exchange_bytes(graph.layout.halo_rows, 4 * width, padding) for width in (1, first))
    # Two exchanges forward; the first layer's features need no gradient, so one back. Then the gradients, and the loss.
    gradients = sum(4 * 2 * a * b for a, b in itertools.pairwise(WIDTHS))
    whole = 3 * wide + parts * all_reduce_bytes(parts, gradients)

    def exchange(row_bytes: int) -> float:
        return sum(links.seconds("permute", some.rows * row_bytes) for some in graph.layout.rounds)

    return {
        "exchange of one column": Case(
            lambda: one(graph, x), narrow, lambda: watch.seconds["exchange alone"] + exchange(4)
        ),
        # The sums of gradients run without the exchanges, too.
        "step of two layers": Case(
            lambda: step(params, graph, x), whole, lambda: watch.seconds["step alone"] + 3 * exchange(4 * first)
        ),
    }


def _without_links(graph: Any) -> Any:
    """The same tables, where no round of the exchange runs: halo slots then hold zeros."""
    # Slots stay, so that shapes do; the pairs of each round go.
    rounds = tuple(dataclasses.replace(some, pairs=()) for some in graph.layout.rounds)
    return dataclasses.replace(graph, layout=dataclasses.replace(graph.layout, rounds=rounds))


if __name__ == "__main__":
    process(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5]))
