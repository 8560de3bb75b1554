"""Disk tier, planner and optimizer state, for benchmarks/offload.py."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.offload_measuring import GIB, bandwidths, keep, overlap, same_bits, say

CHOICES = ("offload", "offload inputs", "recompute", "keep")


def drive(disk: str, gib: float = 4.0) -> dict[str, Any]:
    """Writing rate of the store on a drive, and of O_DIRECT on the same drive in the same minute."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore
    from dejax.offload.activations import calls

    chunk, count = 8 << 20, int(gib * GIB) // (8 << 20)
    memory = mmap.mmap(-1, chunk)
    memory.write(os.urandom(chunk))
    path = os.path.join(disk, "raw-write-test")
    found: dict[str, Any] = {"gib": gib}

    def raw() -> float:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
        try:
            os.posix_fallocate(descriptor, 0, chunk * count)
            begin = time.perf_counter()
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda i: os.pwrite(descriptor, memory, i * chunk), range(count)))
            return chunk * count / (time.perf_counter() - begin) / 1e9
        finally:
            os.close(descriptor)
            os.unlink(path)

    tensor = GIB >> 3
    x = jax.random.bits(jax.random.key(0), (tensor // 4,), jnp.uint32)
    put = jax.jit(lambda x: calls.store(x, binding=0, site=10**6, ring_bytes=2 * tensor))

    def through_store(engine: Any) -> float:
        with ActivationStore(disk, host_bytes=4 * tensor, engine=engine, io_threads=8) as store:
            begin = time.perf_counter()
            for _ in range(int(gib * GIB) // tensor):
                handle = put(x)
            jax.block_until_ready(handle)
            store.drain()
            stats = store.stats()
            found[f"{engine}_drive_gib"] = stats.drive_written_bytes / GIB
            return stats.written_bytes / (time.perf_counter() - begin) / 1e9

    found["o_direct_gb_s"] = raw()
    keep(found)
    for engine in ("direct", "tensorstore"):
        found[f"{engine}_gb_s"] = through_store(engine)
    found["o_direct_again_gb_s"] = raw()
    say(json.dumps(found))
    return found


def planned(
    num: int,
    batch: int,
    width: int,
    plot: str,
    others: list[tuple[int, ...]],
    budget_gib: float = 0.0,
    fewer_tensors: float = 0.0,
    passes: int = 1,
    choices: Sequence[str] = CHOICES,
    **tiers: Any,
) -> dict[str, Any]:
    """The planner's prediction, the measured time of its choice, and the time of other ways.

    The budget is given, or it is the memory of `jax.checkpoint` less so many of the layers' inputs. With more passes a
    layer computes more for each byte of its input.
    """
    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore, plan_stack
    from dejax.offload.plan.measure import scan_layers, training_step

    def layer(w: Any, x: Any) -> Any:
        for _ in range(passes):
            x = x + (jax.nn.gelu(x @ w) @ w.T) * 0.1
        return x

    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = (jax.random.normal(key_w, (num, width, width)) * (1.3 / width**0.5)).astype(jnp.bfloat16)
    x = jax.random.normal(key_x, (batch, width)).astype(jnp.bfloat16)
    if not budget_gib:
        step = training_step(functools.partial(scan_layers, jax.checkpoint(layer)))
        saved = step.lower(ws, x).compile().memory_analysis().temp_size_in_bytes
        budget_gib = (saved - fewer_tensors * x.nbytes) / GIB
    rows: list[dict[str, Any]] = []
    found: dict[str, Any] = {"num": num, "batch": batch, "width": width, "passes": passes, "rows": rows}
    found["budget_gib"] = budget_gib
    with ActivationStore(**tiers) as store:
        begin = time.perf_counter()
        plan = plan_stack(layer, ws, x, budget_bytes=int(budget_gib * GIB), store=store, choices=choices)
        found["planning_seconds"] = time.perf_counter() - begin
        found["tiers"] = dataclasses.asdict(plan.tiers)
        found["forward_ms"] = 1e3 * next(iter(plan.costs.values())).forward_seconds
        chosen = plan.chosen
        say(plan.table())
        for way in (chosen, *[w for w in plan.ways if tuple(w.choices.get(c, 0) for c in CHOICES) in others]):
            plan.chosen = way
            before = store.stats()
            peak, seconds = plan.measure(ws, x)
            stats = store.stats()
            rows.append(
                {
                    "layers": dict(way.choices),
                    "predicted_gib": way.device_bytes / GIB,
                    "peak_gib": peak / GIB,
                    "predicted_ms": 1e3 * way.seconds,
                    "ms": 1e3 * seconds,
                    "predicted_wait_ms": 1e3 * way.stall_seconds,
                    "predicted_disk_gib": way.disk_bytes / GIB,
                    "written_gib": (stats.written_bytes - before.written_bytes) / GIB,
                    "read_gib": (stats.read_bytes - before.read_bytes) / GIB,
                    "steps": stats.runs - before.runs,
                }
            )
            say(json.dumps(rows[-1]))
            keep(found)
            if way is chosen:
                plan.plot(plot)
    return found


def optimizer_state(gib: float, pieces: Sequence[tuple[int, int]] = ((32, 2), (64, 3))) -> dict[str, Any]:
    """AdamW on parameters of so many GiB in float32, with its moments on the device and on the host."""
    import jax
    import jax.numpy as jnp
    import optax

    from dejax.offload import optimizer

    count = 16
    rows = int(gib * GIB / count / 4 / 4096)
    keys = jax.random.split(jax.random.key(0), count)
    make = jax.jit(lambda: {f"w{i}": jax.random.normal(keys[i], (rows, 4096)) for i in range(count)})
    grads = jax.jit(lambda p: jax.tree.map(jnp.cos, p))(make())
    found: dict[str, Any] = {"parameters_gib": gib, "bus_gb_s": bandwidths()}
    found["floor_ms"] = (
        1e-6 * 2 * gib * GIB / min(found["bus_gb_s"].values())
    )  # the moments, in both directions at once
    say(json.dumps(found))
    want: Any = None
    mib = GIB >> 10
    ways = {"device": optax.adamw(1e-3), "xla": optimizer(optax.adamw(1e-3), streams=False)}
    for size, ahead in pieces:
        ways[f"pieces of {size}, {ahead} ahead"] = optimizer(
            optax.adamw(1e-3), streams=True, piece_bytes=size * mib, ahead=ahead
        )
    for name, tx in ways.items():
        params = make()
        state = tx.init(params)

        def step(params: Any, state: Any, grads: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        where = jax.tree.map(lambda leaf: leaf.sharding, (params, state, grads))
        jitted = jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where[:2])
        begin = time.perf_counter()
        compiled = jitted.lower(params, state, grads).compile()
        memory = compiled.memory_analysis()
        row = found[name] = {
            "compile_s": time.perf_counter() - begin,
            "temp_gib": memory.temp_size_in_bytes / GIB,
            "argument_gib": memory.argument_size_in_bytes / GIB,
            "host_argument_gib": getattr(memory, "host_argument_size_in_bytes", 0) / GIB,
        }
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            params, state = jax.block_until_ready(compiled(params, state, grads))
            times.append(time.perf_counter() - begin)
        row["ms"] = 1e3 * min(times)
        keep(found)
        last = {}

        def one(compiled: Any = compiled, now: Any = (params, state), last: Any = last) -> None:
            last["out"] = jax.block_until_ready(compiled(*now, grads))

        del params, state
        row["overlap"] = overlap(one)
        out = last.pop("out")
        if name == "device":
            want = out
        else:
            row["same_bits"] = same_bits(jax.device_put(out, jax.memory.Space.Device), want)
        say(name, json.dumps(row))
        keep(found)
        del out, one
    return found
