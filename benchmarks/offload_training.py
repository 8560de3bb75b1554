"""Training steps with offload and without, for benchmarks/offload.py: stacks of layers, GPT blocks, PyTorch."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from typing import Any

from benchmarks.offload_measuring import GIB, keep, measure, say, table, time_step


def layers(num: int, batch: int, width: int, variants: list[str], disk: str) -> dict[str, Any]:
    """`value_and_grad` of a scan over residual layers. Backward needs the input of each layer."""
    import jax
    import jax.numpy as jnp
    from jax.ad_checkpoint import checkpoint_name
    from jax.sharding import AxisType, NamedSharding
    from jax.sharding import PartitionSpec as P

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
    bodies = {
        "saved": jax.checkpoint(layer),
        "offload": offload(jax.checkpoint(layer), inputs=1),
        "jax": jax.checkpoint(named, policy=own),
        "plain": layer,
    }

    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    places: dict[str, Any] = {"mesh": (NamedSharding(mesh, P(None, "data")), NamedSharding(mesh, P("data")))}

    def placed(kind: str) -> Any:
        return jax.device_put((ws, x), places[kind]) if kind in places else (ws, x)

    @functools.cache  # one program for all stores: they differ only at run time
    def compiled(kind: str) -> Any:
        step = make(bodies["offload" if kind in ("mesh", "shard_map") else kind])
        if kind == "shard_map":
            step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False))
        return step.lower(*placed(kind)).compile()

    def run(name: str, kind: str, store: Any = None, reference: Any = None) -> dict[str, Any]:
        # Deep stacks take a second per step.
        how = {} if num * batch * width < 1 << 32 else {"seconds": 0.0, "dispatched": 1}
        return measure(name, functools.partial(compiled, kind), placed(kind), store, reference, **how)

    rows: list[dict[str, Any]] = []
    tensor = batch * width * 2
    found = {"num": num, "batch": batch, "width": width, "tensor_bytes": tensor, "rows": rows}
    saved = run("inputs saved", "saved")
    reference = saved.pop("out", None)
    rows.append(saved)
    for variant in variants:
        kind, _, size = variant.partition(":")
        if kind == "jax":
            rows.append(run("JAX's own offload", "jax", None, reference))
        elif kind == "plain":
            rows.append(run("all residuals saved", "plain"))
        elif kind in ("mesh", "shard_map"):
            with ActivationStore(device_bytes=int(float(size) * tensor)) as store:
                rows.append(run(f"offload, {kind} of one device, ring of {size}", kind, store, reference))
        elif kind == "host":
            with ActivationStore(device_bytes=int(float(size) * tensor) if size else None) as store:
                rows.append(run(f"offload, host, ring of {size or 'auto'}", "offload", store, reference))
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
                rows.append(run(f"offload, {kind} ({variant})", "offload", store, reference))
        rows[-1].pop("out", None)
        keep(found)
    table(rows)
    return found


# ------------------------------------------------------------------------------------------------ a GPT


def gpt_model(num: int, batch: int, sequence: int, width: int) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(block, params, x, bodies): transformer blocks in bf16, cuDNN attention, and ways to run a block by name."""
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
    """`value_and_grad` of transformer blocks in a scan; "NAME:GIB" gives the size of the ring."""
    from dejax.offload import ActivationStore

    _, params, x, bodies = gpt_model(num, batch, sequence, width)
    rows: list[dict[str, Any]] = []
    found = {"num": num, "batch": batch, "sequence": sequence, "width": width, "rows": rows}
    reference = None

    @functools.cache  # one program for rings of all sizes
    def compiled(kind: str) -> Any:
        return gradient_step(bodies[kind]).lower(params, x).compile()

    for variant in variants:
        kind, _, ring = variant.partition(":")
        how: dict[str, Any] = {"seconds": 0.5, "dispatched": 1}
        if kind in STORING:
            with ActivationStore(device_bytes=int(float(ring) * GIB) if ring else None, host_bytes=100 << 30) as store:
                row = measure(variant, functools.partial(compiled, kind), (params, x), store, reference, **how)
        else:
            row = measure(variant, functools.partial(compiled, kind), (params, x), None, reference, **how)
        out = row.pop("out", None)
        reference = out if reference is None and kind == "remat" else reference
        rows.append(row)
        keep(found)
    table(rows)
    return found


def gpt_plan(num: int, batch: int, sequence: int, width: int, share: float) -> dict[str, Any]:
    """Named tensors of GPT blocks, chosen by the planner within a share of the memory of saving everything."""
    from dejax.offload import ActivationStore, plan_names

    block, params, x, _ = gpt_model(num, batch, sequence, width)
    saved = measure(
        "saved", lambda: gradient_step(block).lower(params, x).compile(), (params, x), seconds=0.5, dispatched=1
    )
    saved.pop("out", None)
    say(json.dumps(saved))
    with ActivationStore(host_bytes=100 << 30) as store:
        begin = time.perf_counter()
        budget = int(share * saved["temp_gib"] * GIB)
        plan = plan_names(block, params, x, names=NAMES[1:], budget_bytes=budget, store=store)
        took = time.perf_counter() - begin
        peak, seconds = plan.measure(params, x)
        say(plan.table())
        ways = [
            {
                "choices": dict(way.choices),
                "peak_gib": way.device_bytes / GIB,
                "ms": 1e3 * way.seconds,
                "wait_ms": 1e3 * way.stall_seconds,
            }
            for way in plan.ways
        ]
    return {
        "saved": saved,
        "share": share,
        "choices": dict(plan.chosen.choices),
        "bytes_of": plan.bytes_of,
        "predicted_gib": plan.chosen.device_bytes / GIB,
        "peak_gib": peak / GIB,
        "predicted_ms": 1e3 * plan.chosen.seconds,
        "ms": 1e3 * seconds,
        "planning_seconds": took,
        "table": plan.table(),
        "ways": ways,
    }


def largest_batch(num: int, batch: int, sequence: int, width: int) -> dict[str, Any]:
    """The batch size that offloading named tensors allows in the memory that saving everything takes at `batch`."""
    import jax
    import jax.numpy as jnp

    from dejax.offload import ActivationStore
    from dejax.offload.plan.measure import residuals_of, ring_of

    _, params, x, bodies = gpt_model(num, batch, sequence, width)
    # Autotuning matrix products for each size would take most of the time.
    untuned = {"compiler_options": {"xla_gpu_autotune_level": 0}} if jax.default_backend() == "gpu" else {}

    def compiled(size: int) -> tuple[Any, int]:
        wider = jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype)
        made = gradient_step(bodies["names"], **untuned).lower(params, wider).compile()
        residuals, flops = residuals_of(bodies["saved-names"], params, wider, 1 << 20)
        ring = ring_of(None, [residual.nbytes for residual in residuals], flops)
        return made, made.memory_analysis().temp_size_in_bytes + ring

    how: dict[str, Any] = {"seconds": 0.0, "fewest": 2, "dispatched": 1, "unseen": 1}
    saved = gradient_step(bodies["saved"], **untuned).lower(params, x).compile()
    limit = saved.memory_analysis().temp_size_in_bytes
    found: dict[str, Any] = {"batch": batch, "limit_gib": limit / GIB}
    found["saved_ms"] = 1e3 * time_step(saved, params, x, **how)
    keep(found)
    with ActivationStore(host_bytes=100 << 30) as store:
        sizes = {size: compiled(size)[1] for size in (batch, 2 * batch)}
        found["tried_gib"] = {size: peak / GIB for size, peak in sizes.items()}
        slope = (sizes[2 * batch] - sizes[batch]) / batch
        size = int(batch + (limit - sizes[batch]) / slope)
        say(json.dumps(found), "trying", size)
        while True:
            step, peak = compiled(size)
            if peak <= limit:
                break
            size -= 1
        found |= {"largest": size, "peak_gib": peak / GIB}
        keep(found)
        wide = jnp.broadcast_to(x[:1], (size, *x.shape[1:])) + 0
        found["ms"] = 1e3 * time_step(step, params, wide, **how)
        found["ring_gib"] = store.stats().ring_bytes / GIB
    tokens = sequence * 1e3
    found["saved_tokens_a_second"] = batch * tokens / found["saved_ms"]
    found["tokens_a_second"] = size * tokens / found["ms"]
    say(json.dumps(found))
    return found
