"""The engines of the disk tier side by side, in one run: overhead of a training step, bytes, and processor time.

    python -m benchmarks offload_engines --disk /nvme          # on a GPU, 60 to 80 s
    python -m benchmarks offload_engines --disk /tmp --small   # on a CPU: layers that hardly compute

A step is `value_and_grad` of a scan over layers whose inputs are offloaded. Each round runs a few steps of each engine
on each path, and of the program without offload. An overhead is the median over the rounds, relative to the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.provenance import Save
from dejax.offload import ActivationStore, offload

GIB = 1 << 30


def layer(w: Any, x: Any) -> Any:
    return x + (jax.nn.gelu(x @ w) @ w.T) * 0.1


def cheap_layer(w: Any, x: Any) -> Any:
    return x * w[0] + x * x * w[1]


def make(body: Callable[..., Any], ws: Any, x: Any) -> Any:
    def loss(ws: Any, x: Any) -> Any:
        out, _ = jax.lax.scan(lambda c, w: (body(w, c), None), x, ws)
        return (out.astype(jnp.float32) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss)).lower(ws, x).compile()


def timed(step: Any, ws: Any, x: Any, count: int) -> tuple[float, float]:
    """(seconds, processor seconds) per step, for steps that are dispatched together."""
    begin, processor = time.perf_counter(), time.process_time()
    for _ in range(count):
        out = step(ws, x)
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / count, (time.process_time() - processor) / count


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--disk", default="/tmp", help="folder on the drive")
    parser.add_argument(
        "--engines", nargs="*", default=["direct", "tensorstore"], help="which engines of the store to compare"
    )
    parser.add_argument("--threads", type=int, nargs="*", default=[8], help="I/O threads of each engine")
    parser.add_argument("--chunk-mib", type=int, nargs="*", default=[8], help="chunks of each engine")
    parser.add_argument("--ring", type=int, default=2, help="tensors in the device's ring")
    parser.add_argument("--host", type=int, default=3, help="tensors in host memory")
    parser.add_argument("--seconds", type=float, default=45, help="for all rounds together")
    parser.add_argument("--small", action="store_true", help="a small model: a trial of the benchmark itself")


def run(args: argparse.Namespace, save: Save) -> None:
    num, batch, width = (8, 4096, 2048) if args.small else (8, 8192, 16384)
    rows = 2 if args.small else width
    one = cheap_layer if args.small else layer
    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = (jax.random.normal(key_w, (num, rows, width)) * (1.3 / width**0.5)).astype(jnp.bfloat16)
    x = jax.random.normal(key_x, (batch, width)).astype(jnp.float32 if args.small else jnp.bfloat16)
    steps = {"inputs saved": make(jax.checkpoint(one), ws, x)}
    stores: dict[str, ActivationStore] = {}
    for path in ("/dev/shm", args.disk):
        for engine in args.engines:
            for threads in args.threads:
                for chunk in args.chunk_mib:
                    name = f"{engine}, {path}, {threads} threads, chunks of {chunk} MiB"
                    stores[name] = ActivationStore(
                        path,
                        device_bytes=args.ring * x.nbytes,
                        host_bytes=args.host * x.nbytes,
                        engine=engine,
                        io_threads=threads,
                        chunk_bytes=chunk << 20,
                    )
                    body = offload(jax.checkpoint(one), inputs=1, store=stores[name], min_bytes=1)
                    steps[name] = make(body, ws, x)
    for step in steps.values():  # warm-up: handles are read, files and memory are made
        timed(step, ws, x, 3)
    before = {name: store.stats() for name, store in stores.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    end = time.perf_counter() + args.seconds
    while len(times["inputs saved"]) < 3 or time.perf_counter() < end:
        for name, step in steps.items():
            times[name].append(timed(step, ws, x, 3))
    save(report(times, stores, before))
    for store in stores.values():
        store.close()


def report(times: dict[str, list[tuple[float, float]]], stores: Any, before: Any) -> list[dict[str, Any]]:
    saved = [seconds for seconds, _ in times["inputs saved"]]
    rows = []
    print(f"{len(saved)} rounds of 3 steps, {jax.devices()[0].device_kind}")
    print("| | step, ms | overhead, % | processor, ms a step | written, read, GiB a step |")
    print("| --- | --- | --- | --- | --- |")
    for name, found in times.items():
        seconds, processor = (statistics.median(column) for column in zip(*found, strict=True))
        overhead = statistics.median(100 * (mine / other - 1) for (mine, _), other in zip(found, saved, strict=True))
        row = {"name": name, "ms": 1e3 * seconds, "overhead_percent": overhead, "processor_ms": 1e3 * processor}
        if name in stores:
            now, then = stores[name].stats(), before[name]
            for key in ("written_bytes", "read_bytes"):
                row[key] = (getattr(now, key) - getattr(then, key)) / (now.runs - then.runs)
        rows.append(row)
        moved = f"{row.get('written_bytes', 0) / GIB:.3f}, {row.get('read_bytes', 0) / GIB:.3f}"
        print(f"| {name} | {row['ms']:.1f} | {overhead:.2f} | {row['processor_ms']:.0f} | {moved} |", flush=True)
    return rows
