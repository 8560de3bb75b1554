"""What offload costs and saves, with the peers, the ceilings and the machine in the same run.

    python benchmarks/offload.py --cases layers24 layers12 --out out/offload.json

Each case runs in a process of its own. Prints tables and writes JSON.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 2**30


def say(*words: Any) -> None:
    print(*words, flush=True)


# ------------------------------------------------------------------------------------------------ measuring


def time_step(
    step: Callable[..., Any], *args: Any, seconds: float = 1.5, fewest: int = 3, dispatched: int = 3
) -> float:
    """Seconds a step: the median of groups of steps dispatched together, after two that are not counted."""
    import jax

    for _ in range(3):
        jax.block_until_ready(step(*args))
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < fewest or time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(dispatched):
            out = step(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / dispatched)
    return statistics.median(times)


def same_bits(a: Any, b: Any) -> bool:
    import jax

    return all(bool((x == y).all()) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def bandwidths(nbytes: int = 1 << 30) -> dict[str, float]:
    """GB/s of the copy engine, device to pinned host and back."""
    import jax
    import jax.numpy as jnp

    device = jax.devices()[0]
    host = jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")
    near = jax.sharding.SingleDeviceSharding(device, memory_kind="device")
    x = jax.block_until_ready(jnp.ones(nbytes // 4, jnp.float32))
    y = jax.block_until_ready(jax.device_put(x, host))
    found = {}
    for name, value, to in (("device_to_host", x, host), ("host_to_device", y, near)):
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            jax.block_until_ready(jax.device_put(value, to))
            times.append(time.perf_counter() - begin)
        found[name] = nbytes / min(times) / 1e9
    return found


def measure(
    name: str, step: Any, args: tuple[Any, ...], store: Any = None, reference: Any = None, **how: Any
) -> dict[str, Any]:
    """Compiles, runs and times a jitted step; a row of the table."""
    row: dict[str, Any] = {"name": name}
    try:
        compiled = step.lower(*args).compile()
        row["temp_gib"] = compiled.memory_analysis().temp_size_in_bytes / GIB
        out = compiled(*args)
        before = store.stats() if store else None
        row["ms"] = 1e3 * time_step(compiled, *args, **how)
        if reference is not None:
            row["same_bits"] = same_bits(compiled(*args), reference)
        if store and before:
            stats = store.stats()
            runs = max(1, stats.runs - before.runs)
            row["ring_gib"] = stats.ring_bytes / GIB
            row["host_gib"] = stats.host_bytes / GIB
            row["disk_gib"] = stats.disk_bytes / GIB
            for key in ("stored", "copied_out", "ring_hit", "prefetched", "demand", "written", "read", "cancelled"):
                row[f"{key}_gib"] = (getattr(stats, f"{key}_bytes") - getattr(before, f"{key}_bytes")) / runs / GIB
            row["launch_us"] = (
                1e6
                * (stats.launch_seconds - before.launch_seconds)
                / max(1, stats.fetched_count + stats.stored_count - before.fetched_count - before.stored_count)
            )
            row["store_stall_ms"] = 1e3 * (stats.store_stall_seconds - before.store_stall_seconds) / runs
            row["fetch_stall_ms"] = 1e3 * (stats.fetch_stall_seconds - before.fetch_stall_seconds) / runs
            row["device_stall_ms"] = (
                1e3
                * (
                    stats.device_store_stall_seconds
                    + stats.device_fetch_stall_seconds
                    - before.device_store_stall_seconds
                    - before.device_fetch_stall_seconds
                )
                / runs
            )
            row["value_reads"] = stats.value_reads - before.value_reads
        row["out"] = out
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        traceback.print_exc()
    return row


def table(rows: list[dict[str, Any]]) -> None:
    keys = [
        "name",
        "ms",
        "temp_gib",
        "ring_gib",
        "host_gib",
        "same_bits",
        "copied_out_gib",
        "ring_hit_gib",
        "prefetched_gib",
        "demand_gib",
        "launch_us",
        "store_stall_ms",
        "fetch_stall_ms",
        "device_stall_ms",
        "written_gib",
        "read_gib",
    ]
    keys = [key for key in keys if any(key in row for row in rows)]
    say("| " + " | ".join(keys) + " |")
    say("|" + " --- |" * len(keys))
    for row in rows:
        cells = []
        for key in keys:
            value = row.get(key, "")
            cells.append(f"{value:.3f}" if isinstance(value, float) else str(value))
        say("| " + " | ".join(cells) + (f" | {row['error']}" if "error" in row else " |"))


# ------------------------------------------------------------------------------------------------ a stack of layers


def layers(num: int, batch: int, width: int, variants: list[str], disk: str) -> dict[str, Any]:
    """`value_and_grad` of a scan over residual layers, of which backward needs each one's input."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    from dejax.offload import ActivationStore, offload

    def layer(w: Any, x: Any) -> Any:
        return x + (jax.nn.gelu(x @ w) @ w.T) * 0.1

    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = (jax.random.normal(key_w, (num, width, width)) * (1.3 / width**0.5)).astype(jnp.bfloat16)
    x = jax.random.normal(key_x, (batch, width)).astype(jnp.bfloat16)

    def make(body: Callable[..., Any]) -> Any:
        def loss(ws: Any, x: Any) -> Any:
            out, _ = jax.lax.scan(lambda c, w: (body(w, c), None), x, ws)
            return (out.astype(jnp.float32) ** 2).mean()

        return jax.jit(jax.value_and_grad(loss))

    def named(w: Any, x: Any) -> Any:
        return layer(w, checkpoint_name(x, "input"))

    own = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    rows = []
    saved = measure("inputs saved", make(jax.checkpoint(layer)), (ws, x))
    reference = saved.pop("out", None)
    rows.append(saved)
    tensor = batch * width * 2
    for variant in variants:
        kind, _, size = variant.partition(":")
        if kind == "jax":
            rows.append(measure("JAX's own offload", make(jax.checkpoint(named, policy=own)), (ws, x), None, reference))
        elif kind == "plain":
            rows.append(measure("all residuals saved", make(layer), (ws, x), None, None))
        elif kind == "host":
            with ActivationStore(device_bytes=int(float(size) * tensor) if size else None) as store:
                step = make(offload(jax.checkpoint(layer), inputs=1))
                rows.append(measure(f"offload, host, ring of {size or 'auto'}", step, (ws, x), store, reference))
        elif kind == "value":
            with ActivationStore(device_bytes=int(float(size) * tensor) if size else None) as store:
                store._native.set_prediction(1)
                step = make(offload(jax.checkpoint(layer), inputs=1))
                rows.append(
                    measure(f"the same, handles read, ring of {size or 'auto'}", step, (ws, x), store, reference)
                )
        elif kind in ("shm", "disk"):
            place = "/dev/shm" if kind == "shm" else disk
            ring, host, engine = size.split(",")
            with ActivationStore(
                place,
                device_bytes=int(float(ring) * tensor),
                host_bytes=int(float(host) * tensor),
                engine=engine,
                checksum=os.environ.get("CHECKSUM", "1") == "1",
                io_threads=int(os.environ.get("IO_THREADS", "12")),
            ) as store:
                step = make(offload(jax.checkpoint(layer), inputs=1))
                rows.append(measure(f"offload, {kind} ({variant})", step, (ws, x), store, reference))
        rows[-1].pop("out", None)
    table(rows)
    return {"num": num, "batch": batch, "width": width, "tensor_bytes": tensor, "rows": rows}


# ------------------------------------------------------------------------------------------------ a GPT


def gpt_model(num: int, batch: int, sequence: int, width: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(block, params, x, bodies): transformer blocks in bf16, cuDNN attention, and the ways to run one by name."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name

    from dejax.offload import offload

    heads = width // 128
    attention = "cudnn" if jax.default_backend() == "gpu" else "xla"

    def norm(x: Any) -> Any:
        wide = x.astype(jnp.float32)
        return (wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + 1e-6)).astype(x.dtype)

    def block(p: Any, x: Any) -> Any:
        shape = x.shape
        x = checkpoint_name(x, "input")
        q, k, v = (checkpoint_name(part, "qkv") for part in jnp.split(norm(x) @ p["qkv"], 3, axis=-1))
        q, k, v = (part.reshape(*shape[:2], heads, 128) for part in (q, k, v))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention).reshape(shape)
        x = x + checkpoint_name(mixed, "mixed") @ p["out"]
        up = checkpoint_name(norm(x) @ p["up"], "up")
        return x + jax.nn.gelu(up) @ p["down"]

    def weights(key: Any, rows: int, columns: int) -> Any:
        make = jax.jit(lambda key: jax.random.normal(key, (num, rows, columns), jnp.bfloat16) / rows**0.5)
        return make(key)

    keys = jax.random.split(jax.random.key(0), 5)
    params = {
        "qkv": weights(keys[0], width, 3 * width),
        "out": weights(keys[1], width, width),
        "up": weights(keys[2], width, 4 * width),
        "down": weights(keys[3], 4 * width, width),
    }
    x = jax.random.normal(keys[4], (batch, sequence, width), jnp.bfloat16)
    policies = jax.checkpoint_policies

    def own(*names: str) -> Any:
        return policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=list(names),
            offload_src="device",
            offload_dst="pinned_host",
        )

    some = jax.checkpoint(block, policy=policies.save_only_these_names(*NAMES))
    bodies = {
        "saved": block,
        "remat": jax.checkpoint(block),
        "inputs": offload(jax.checkpoint(block), inputs=1),
        "inputs-cut": offload(jax.checkpoint(block), inputs=1, store="device"),
        "all": offload(block, inputs=1),
        "names": offload(some, inputs=1),
        "saved-names": some,
        "jax-inputs": jax.checkpoint(block, policy=own("input")),
        "jax-names": jax.checkpoint(block, policy=own(*NAMES)),
    }
    return block, params, x, bodies


NAMES = ("input", "qkv", "mixed", "up")
STORING = ("inputs", "all", "names")


def gradient_step(body: Callable[..., Any], **options: Any) -> Any:
    """A jitted `value_and_grad` of a scan over blocks."""
    import jax
    import jax.numpy as jnp

    def loss(params: Any, x: Any) -> Any:
        out, _ = jax.lax.scan(lambda c, p: (body(p, c), None), x, params)
        return (out.astype(jnp.float32) ** 2).mean()

    return jax.jit(jax.value_and_grad(loss), **options)


def gpt(num: int, batch: int, sequence: int, width: int, variants: list[str]) -> dict[str, Any]:
    """`value_and_grad` of transformer blocks under a scan; "NAME:GIB" gives the ring's size."""
    from dejax.offload import ActivationStore

    _, params, x, bodies = gpt_model(num, batch, sequence, width)
    rows = []
    reference = None
    for variant in variants:
        kind, _, ring = variant.partition(":")
        how: dict[str, Any] = {"seconds": 0.5, "dispatched": 1}
        if kind in STORING:
            with ActivationStore(device_bytes=int(float(ring) * GIB) if ring else None, host_bytes=100 * GIB) as store:
                row = measure(variant, gradient_step(bodies[kind]), (params, x), store, reference, **how)
        else:
            row = measure(variant, gradient_step(bodies[kind]), (params, x), None, reference, **how)
        out = row.pop("out", None)
        reference = out if reference is None and kind == "remat" else reference
        rows.append(row)
    table(rows)
    return {"num": num, "batch": batch, "sequence": sequence, "width": width, "rows": rows}


def gpt_plan(num: int, batch: int, sequence: int, width: int, share: float) -> dict[str, Any]:
    """Named tensors of GPT blocks as the planner chooses within a share of what saving everything takes."""
    from dejax.offload import ActivationStore, plan_names

    block, params, x, _ = gpt_model(num, batch, sequence, width)
    saved = measure("saved", gradient_step(block), (params, x), seconds=0.5, dispatched=1)
    saved.pop("out", None)
    say(json.dumps(saved))
    with ActivationStore(host_bytes=100 * GIB) as store:
        begin = time.perf_counter()
        budget = int(share * saved["temp_gib"] * GIB)
        plan = plan_names(block, params, x, names=NAMES[1:], budget_bytes=budget, store=store)
        took = time.perf_counter() - begin
        peak, seconds = plan.measure(params, x)
        say(plan.table())
        ways = [
            {
                "saved": None if way.saved is None else sorted(way.saved),
                "offloaded": sorted(way.offloaded),
                "peak_gib": way.peak_bytes / GIB,
                "ms": 1e3 * way.seconds,
                "wait_ms": 1e3 * way.stall_seconds,
            }
            for way in plan.ways
        ]
    return {
        "saved": saved,
        "share": share,
        "choices": {name: plan.chosen.choice(name) for name in plan.bytes_of},
        "bytes_of": plan.bytes_of,
        "predicted_gib": plan.chosen.peak_bytes / GIB,
        "peak_gib": peak / GIB,
        "predicted_ms": 1e3 * plan.chosen.seconds,
        "ms": 1e3 * seconds,
        "planning_seconds": took,
        "table": plan.table(),
        "ways": ways,
    }


def largest_batch(num: int, batch: int, sequence: int, width: int) -> dict[str, Any]:
    """The batch that offloading named tensors allows in the memory that saving everything takes at `batch`."""
    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore
    from dejax.offload._profile import residuals_of, ring_of

    _, params, x, bodies = gpt_model(num, batch, sequence, width)
    limit = gradient_step(bodies["saved"]).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    def compiled(size: int) -> tuple[Any, int]:
        wider = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
        made = gradient_step(bodies["names"]).lower(params, wider).compile()
        residuals, flops = residuals_of(bodies["saved-names"], params, wider, 1 << 20)
        ring = ring_of(None, [residual.nbytes for residual in residuals], flops)
        return made, made.memory_analysis().temp_size_in_bytes + ring

    found: dict[str, Any] = {"batch": batch, "limit_gib": limit / GIB}
    with ActivationStore(host_bytes=100 * GIB) as store:
        sizes = {size: compiled(size)[1] for size in (batch, 3 * batch)}
        slope = (sizes[3 * batch] - sizes[batch]) / (2 * batch)
        size = int(batch + (limit - sizes[batch]) / slope)
        while True:
            step, peak = compiled(size)
            if peak <= limit:
                break
            size -= 1
        wide = jnp.broadcast_to(x[:1], (size, *x.shape[1:])) + 0
        found |= {"largest": size, "peak_gib": peak / GIB}
        found["ms"] = 1e3 * time_step(step, params, wide, seconds=0.5, dispatched=1)
        found["ring_gib"] = store.stats().ring_bytes / GIB
    say(json.dumps(found))
    return found


# ------------------------------------------------------------------------------------------------ bits


def bits(dump: str | None) -> dict[str, Any]:
    """Which programs give the same bits as which, and under which of the compiler's freedoms."""
    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore, offload

    free: dict[str, Any] = {
        "default": {},
        "deterministic": {"xla_gpu_exclude_nondeterministic_ops": True},
        "fixed": {
            "xla_gpu_exclude_nondeterministic_ops": True,
            "xla_gpu_autotune_level": 0,
            "xla_gpu_enable_triton_gemm": False,
            "xla_allow_excess_precision": False,
        },
    }
    found: dict[str, Any] = {}
    _, params, x, bodies = gpt_model(4, 2, 1024, 2048)
    for name, flags in free.items():
        try:
            run = {k: gradient_step(bodies[k], compiler_options=flags) for k in ("remat", "inputs", "inputs-cut")}
            with ActivationStore():
                once, again = run["remat"](params, x), run["remat"](params, x)
                fresh = gradient_step(jax.checkpoint(bodies["saved"]), compiler_options=flags)(params, x)
                away, away_again, cut = run["inputs"](params, x), run["inputs"](params, x), run["inputs-cut"](params, x)
                found[f"gpt {name}"] = {
                    "remat twice": same_bits(once, again),
                    "remat compiled twice": same_bits(once, fresh),
                    "offload twice": same_bits(away, away_again),
                    "offload and remat": same_bits(away, once),
                    "offload and its cuts alone": same_bits(away, cut),
                }
        except Exception as error:
            found[f"gpt {name}"] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        say(name, json.dumps(found[f"gpt {name}"]))

    def layer(w: Any, x: Any) -> Any:
        return x + 0.1 * (jax.nn.gelu(x @ w) @ w.T)

    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = (jax.random.normal(key_w, (12, 512, 512)) / 512**0.5).astype(jnp.bfloat16)
    x = jax.random.normal(key_x, (256, 512)).astype(jnp.bfloat16)
    free["no fusion"] = {**free["fixed"], "xla_disable_hlo_passes": "priority-fusion,multi_output_fusion,gemm-rewriter"}
    for name, flags in free.items():
        try:
            variants = {"saved": layer, "offload": offload(layer, min_bytes=1)}
            variants["cut"] = offload(layer, min_bytes=1, store="device")
            results = {}
            with ActivationStore():
                for key, body in variants.items():
                    step = gradient_step(body, compiler_options=flags).lower(ws, x).compile()
                    results[key] = step(ws, x)
                    if dump and name == "fixed":
                        Path(f"{dump}.{key}.hlo.txt").write_text(step.as_text())
            found[f"layer {name}"] = {
                "offload and saved": same_bits(results["offload"], results["saved"]),
                "offload and its cuts alone": same_bits(results["offload"], results["cut"]),
            }
        except Exception as error:
            found[f"layer {name}"] = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        say(name, json.dumps(found[f"layer {name}"]))
    return found


# ------------------------------------------------------------------------------------------------ the drive


def drive(disk: str, gib: float = 4.0) -> dict[str, Any]:
    """Writing rate of the store on a drive, and of O_DIRECT on the same drive in the same minute."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore, _calls

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

    tensor = 128 << 20
    x = jax.random.bits(jax.random.key(0), (tensor // 4,), jnp.uint32)
    put = jax.jit(lambda x: _calls.store(x, store_id=0, site=10**6, ring_bytes=2 * tensor))

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
    for engine in ("direct", "tensorstore"):
        found[f"{engine}_gb_s"] = through_store(engine)
    found["o_direct_again_gb_s"] = raw()
    say(json.dumps(found))
    return found


# ------------------------------------------------------------------------------------------------ torch


def torch_layers(num: int, batch: int, width: int) -> dict[str, Any]:
    """The stack of layers in PyTorch: saved, checkpointed, `save_on_cpu` on pinned memory."""
    import torch
    from torch.utils.checkpoint import checkpoint

    torch.manual_seed(0)
    ws = [
        (torch.randn(width, width, device="cuda") * (1.3 / width**0.5)).bfloat16().requires_grad_() for _ in range(num)
    ]
    x = torch.randn(batch, width, device="cuda").bfloat16()

    def layer(w: Any, x: Any) -> Any:
        return x + (torch.nn.functional.gelu(x @ w, approximate="tanh") @ w.T) * 0.1

    def saved(w: Any, x: Any) -> Any:
        return layer(w, x)

    def again(w: Any, x: Any) -> Any:
        return checkpoint(layer, w, x, use_reentrant=False)

    rows = []
    for name, body, on_cpu in (
        ("torch, all saved", saved, False),
        ("torch, checkpoint", again, False),
        ("torch, checkpoint, save_on_cpu", again, True),
        ("torch, save_on_cpu", saved, True),
    ):

        def step(body: Any = body, on_cpu: bool = on_cpu) -> None:
            import contextlib

            hooks = torch.autograd.graph.save_on_cpu(pin_memory=True) if on_cpu else contextlib.nullcontext()
            with hooks:
                out = x
                for w in ws:
                    out = body(w, out)
                loss = (out.float() ** 2).mean()
            loss.backward()
            for w in ws:
                w.grad = None

        row: dict[str, Any] = {"name": name}
        try:
            step()
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            times = []
            for _ in range(3):
                begin = time.perf_counter()
                step()
                torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            row["ms"] = 1e3 * statistics.median(times)
            grads = num * width * width * 2  # jax counts gradients as outputs, not as temporaries
            row["temp_gib"] = (torch.cuda.max_memory_allocated() - before - grads) / GIB
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error)[:200]}"
        rows.append(row)
    table(rows)
    return {"rows": rows}


# ------------------------------------------------------------------------------------------------ planner, optimizer


def planned(
    num: int, batch: int, width: int, budget_gib: float, plot: str, others: list[tuple[int, ...]], **tiers: Any
) -> dict[str, Any]:
    """The planner's prediction beside what its choice then takes."""
    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore, plan_stack

    def layer(w: Any, x: Any) -> Any:
        return x + (jax.nn.gelu(x @ w) @ w.T) * 0.1

    key_w, key_x = jax.random.split(jax.random.key(0))
    ws = (jax.random.normal(key_w, (num, width, width)) * (1.3 / width**0.5)).astype(jnp.bfloat16)
    x = jax.random.normal(key_x, (batch, width)).astype(jnp.bfloat16)
    rows = []
    with ActivationStore(**tiers) as store:
        begin = time.perf_counter()
        plan = plan_stack(layer, ws, x, budget_bytes=int(budget_gib * GIB), store=store)
        took = time.perf_counter() - begin
        for way in (plan.chosen, *[w for w in plan._ways if w.layers in others]):
            plan.chosen = way
            peak, seconds = plan.measure(ws, x)
            rows.append(
                {
                    "layers": way.layers,
                    "predicted_gib": way.peak_bytes / GIB,
                    "peak_gib": peak / GIB,
                    "predicted_ms": 1e3 * way.seconds,
                    "ms": 1e3 * seconds,
                    "predicted_wait_ms": 1e3 * way.stall_seconds,
                    "predicted_disk_gib": way.placement.disk_bytes / GIB,
                }
            )
            say(rows[-1])
            if len(rows) == 1:
                say(plan.table())
                plan.plot(plot)
        stats = store.stats()
        tiers_found = dataclasses.asdict(plan.tiers)
    return {
        "rows": rows,
        "tiers": tiers_found,
        "written_gib": stats.written_bytes / GIB,
        "planning_seconds": took,
        "budget_gib": budget_gib,
    }


def optimizer_state(gib: float) -> dict[str, Any]:
    """AdamW on parameters of so many GiB in float32, with its moments on the device and on the host."""
    import jax
    import jax.numpy as jnp
    import optax

    from dejax.offload import optimizer

    count = 16
    rows = int(gib * GIB / count / 4 / 4096)
    params = {f"w{i}": jnp.full((rows, 4096), 0.1 * i) for i in range(count)}
    grads = jax.jit(lambda p: jax.tree.map(jnp.cos, p))(params)
    found: dict[str, Any] = {"parameters_gib": gib}
    want: Any = None
    ways = {"device": optax.adamw(1e-3), "xla": optimizer(optax.adamw(1e-3), streams=False)}
    for mib, ahead in ((32, 2), (64, 2), (32, 4)):
        ways[f"pieces of {mib}, {ahead} ahead"] = optimizer(optax.adamw(1e-3), piece_bytes=mib << 20, ahead=ahead)
    found["floor_ms"] = 1e3 * 2 * gib * GIB / 49e9  # the moments, each way, both ways at once
    for name, tx in ways.items():
        state = tx.init(params)

        def step(params: Any, state: Any, grads: Any, tx: Any = tx) -> Any:
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        where = jax.tree.map(lambda leaf: leaf.sharding, (params, state, grads))
        jitted = jax.jit(step, donate_argnums=(1,), in_shardings=where, out_shardings=where[:2])
        compiled = jitted.lower(params, state, grads).compile()
        memory = compiled.memory_analysis()
        found[name] = {
            "temp_gib": memory.temp_size_in_bytes / GIB,
            "argument_gib": memory.argument_size_in_bytes / GIB,
            "host_argument_gib": getattr(memory, "host_argument_size_in_bytes", 0) / GIB,
        }
        times = []
        for _ in range(4):
            begin = time.perf_counter()
            out, state = jax.block_until_ready(compiled(params, state, grads))
            times.append(time.perf_counter() - begin)
        found[name]["ms"] = 1e3 * min(times)
        if name == "device":
            want = out, state
        else:
            state = jax.tree.map(lambda leaf: jax.device_put(leaf, jax.memory.Space.Device), state)
            found[name]["same_bits"] = same_bits((out, state), want)
        say(name, json.dumps(found[name]))
        del out, state
    say(json.dumps(found))
    return found


def words(variable: str, default: str) -> list[str]:
    return os.environ.get(variable, default).split()


CASES: dict[str, Callable[[str], Any]] = {
    "bandwidths": lambda disk: bandwidths(),
    "layers24": lambda disk: layers(24, 16384, 4096, words("LAYERS24", "host: host:8 value:6 jax"), disk),
    "layers12": lambda disk: layers(12, 8192, 8192, words("LAYERS12", "host: host:6 value:2 jax plain"), disk),
    "gpt": lambda disk: gpt(6, 4, 2048, 8192, words("GPT", "saved remat inputs all names jax-inputs jax-names")),
    "gpt_plan": lambda disk: gpt_plan(6, 4, 2048, 8192, 0.4),
    "batch": lambda disk: largest_batch(6, 4, 2048, 8192),
    "bits": lambda disk: bits(os.environ.get("DUMP")),
    "nvme": lambda disk: layers(
        8, 8192, 16384, words("NVME", "host: shm:3,4,direct shm:3,4,tensorstore disk:3,6,direct"), disk
    ),
    "drive": lambda disk: drive(disk),
    "plan": lambda disk: planned(
        12, 8192, 8192, 2.5, os.environ.get("PLOT", "out/offload_plan.svg"), [(12, 0, 0, 0), (0, 12, 0, 0)]
    ),
    "plan_disk": lambda disk: planned(
        16,
        8192,
        16384,
        4.0,
        os.environ.get("PLOT_DISK", "out/offload_plan_disk.svg"),
        [(0, 16, 0, 0), (0, 0, 16, 0)],
        path=disk,
        host_bytes=GIB,
    ),
    "optimizer": lambda disk: optimizer_state(4.0),
    "torch12": lambda disk: torch_layers(12, 8192, 8192),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--out", type=Path, default=Path("out/offload.json"))
    parser.add_argument("--disk", default="/tmp", help="folder on the drive that stands for the NVMe tier")
    parser.add_argument("--limit", type=float, default=120, help="seconds for each case")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
        result = CASES[options.cases[0]](options.disk)
        options.out.write_text(json.dumps(result, default=str))
        return 0
    options.out.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {"machine": platform.platform(), "python": platform.python_version(), "cases": {}}
    for case in options.cases:
        say(f"== {case}")
        part = options.out.with_suffix(f".{case}.json")
        command = [sys.executable, __file__, "--child", "--cases", case, "--out", str(part), "--disk", options.disk]
        try:
            subprocess.run(command, timeout=options.limit, check=True)
            report["cases"][case] = json.loads(part.read_text())
            part.unlink()
            say(json.dumps(report["cases"][case]) if case == "bandwidths" else "")
        except (subprocess.SubprocessError, OSError) as error:
            report["cases"][case] = {"error": str(error)}
            say(f"{case}: {error}")
        options.out.write_text(json.dumps(report, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
