"""Large decoders on one GPU: the state of training in host memory, its peers, and the bus as their bound.

    python -m benchmarks offload_llm --out out/offload_llm.json                      # every case, about ten minutes
    python -m benchmarks offload_llm --cases large --size 12b --batch 8              # one decoder
    python -m benchmarks offload_llm --quick                                         # small forms of all, also on a CPU

Each case is a process of its own, with the memory settings that it needs.

state   350m: every place of the state, the same losses bit for bit, time of a step
large   one decoder: bytes, time, TFLOP/s of model FLOPs, beside what was predicted
update  the optimizer alone: its time over the bytes at the bus's measured rate, by pieces and by rows
peers   the same update and activations by others: JAX's memory kinds and policies, torch on the GPU and on the CPU
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.offload_measuring import GIB, QUICK, bandwidths, in_processes, keep, run_case, say, time_step
from benchmarks.provenance import Save

IN_OTHER_PROCESSES = True
CASES = ("state", "large", "update", "peers")
LIMITS = {"state": 120, "large": 240, "update": 90, "peers": 200}  # seconds
RATE = 620e12  # FLOP/s of the hardware that a bfloat16 decoder is predicted to reach on an H200


def _decoder(options: argparse.Namespace, size: str, **changes: Any) -> tuple[Any, Any, Any]:
    """(configuration, state, step) of a decoder whose state lies where the options say."""
    import jax
    import optax

    from dejax.offload import stack_step
    from examples import train_gpt as model
    from examples.train_gpt import SIZES

    how = {"params": "device", "moments": "host", "microbatches": 1, "activations": "device"} | changes
    config = SIZES["tiny" if QUICK else size]
    step = stack_step(
        lambda outer, tokens: model.embed(config, outer, tokens[:, :-1]),
        model.make_block(config),
        lambda outer, x, tokens: model.cross_entropy(model.logits(config, outer, x), tokens[:, 1:]),
        optax.adamw(1e-4, b2=0.95),
        streams=True,
        **how,
    )
    shapes = jax.eval_shape(lambda key: model.init_params(config, key), jax.random.key(0))

    @functools.partial(jax.jit, static_argnums=1)
    def leaf(key: Any, names: tuple[str, ...]) -> Any:
        return functools.reduce(lambda tree, name: tree[name], names, model.init_params(config, key))

    key = jax.random.key(0)
    outer = {name: leaf(key, (name,)) for name in shapes if name != "layers"}
    layers = {}
    for name in shapes["layers"]:
        value = leaf(key, ("layers", name))
        layers[name] = jax.device_put(value, jax.memory.Space.Host) if how["params"] == "host" else value
    return config, step.init(outer, layers), step


def _tokens(batch: int, sequence: int, at: int) -> Any:
    import jax
    import numpy as np

    rng = np.random.default_rng(at)
    return jax.device_put(rng.integers(97, 123, (batch, sequence + 1)).astype(np.int32))


def state(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    batch, sequence = (2, 64) if QUICK else (8, 2048)
    found: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "device": {"moments": "device"},
        "moments": {},
        "all": {"params": "host"},
        "all, inputs too": {"params": "host", "activations": "host"},
        "all, four microbatches": {"params": "host", "microbatches": 2 if QUICK else 4},
    }
    for name, how in ways.items():
        config, held, step = _decoder(options, "350m", **how)
        run = step.jit(held)
        losses, times = [], []
        for at in range(8):
            tokens = _tokens(batch, sequence, at)
            begin = time.perf_counter()
            held, value = run(held, tokens)
            losses.append(float(value))
            times.append(time.perf_counter() - begin)
        tflops = config.flops_per_token(sequence) * batch * sequence / min(times) / 1e12
        found[name] = {"losses": losses, "ms": 1e3 * min(times[2:]), "tflops": tflops}
        found[name]["same_losses"] = losses == found["device"]["losses"]
        say(name, {key: value for key, value in found[name].items() if key != "losses"})
        keep(found)
        del held, run
        jax.clear_caches()
    return found


def _free_bytes() -> float:
    """Bytes of XLA's pool of device memory that nothing holds; no limit where the backend does not say."""
    import jax

    stats = jax.devices()[0].memory_stats() or {}
    return stats["bytes_limit"] - stats["bytes_in_use"] if "bytes_limit" in stats else float("inf")


def large(options: argparse.Namespace) -> dict[str, Any]:
    import jax

    batch, sequence = (2, 64) if QUICK else (options.batch, 4096)
    moments: Any = options.moments
    if moments == "first":  # half of the bytes: only the first moments leave
        moments = lambda path, leaf: "host" if ".mu" in path else "device"  # noqa: E731
    if moments == "feed-forward":  # three quarters: those of attention stay
        moments = lambda path, leaf: "host" if any(n in path for n in ("gate", "up", "down")) else "device"  # noqa: E731
    begin = time.perf_counter()
    how = {"params": options.params, "moments": moments, "microbatches": options.microbatches}
    config, held, step = _decoder(options, options.size, **how)
    jax.block_until_ready(held)
    found: dict[str, Any] = {"init_s": time.perf_counter() - begin, "params": config.num_params, "options": str(how)}
    found |= {f"{tier}_gb": n / 1e9 for tier, n in step.bytes_by_tier(held.outer, held.layers).items()}
    begin = time.perf_counter()
    while True:
        compiled = step.jit(held).lower(held, _tokens(batch, sequence, 0)).compile()
        found |= {"batch": batch, "temp_gb": compiled.memory_analysis().temp_size_in_bytes / 1e9}
        found["compile_s"] = time.perf_counter() - begin
        say({name: found[name] for name in ("batch", "temp_gb", "compile_s")})
        if batch == 1 or 1e9 * found["temp_gb"] < _free_bytes():
            break
        batch //= 2
    model_flops = config.flops_per_token(sequence) * batch * sequence
    travels = found["host_gb"] * 1e9
    # Backward moves all that lies on the host each way, beside 3/4 of the arithmetic; forward brings the parameters.
    arithmetic = model_flops * 4 / 3 / RATE
    backward = max(0.75 * arithmetic, travels / 49e9)
    forward = max(0.25 * arithmetic, (config.num_params * 4 / 49e9) if options.params == "host" else 0.0)
    found["predicted_s"] = backward + forward
    found["predicted_tflops"] = model_flops / found["predicted_s"] / 1e12
    say({name: found[name] for name in ("predicted_s", "predicted_tflops")})
    keep(found)
    losses, times = [], []
    for at in range(2 if QUICK else options.steps):
        begin = time.perf_counter()
        held, value = compiled(held, _tokens(batch, sequence, at))
        losses.append(float(value))
        times.append(time.perf_counter() - begin)
        found |= {"losses": losses, "seconds": times, "s": min(times), "tflops": model_flops / min(times) / 1e12}
        say(f"step {at}: loss {losses[-1]:.4f}, {times[-1]:.3f} s, {model_flops / times[-1] / 1e12:.0f} TFLOP/s")
        keep(found)
    stats = jax.devices()[0].memory_stats() or {}
    found["peak_device_gb"] = stats.get("peak_bytes_in_use", 0) / 1e9
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(("VmHWM", "VmPin", "VmLck")):
            found[line.split(":")[0]] = line.split(":")[1].strip()
    return found


def _update_step(tx: Any, params: Any) -> tuple[Any, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    held = tx.init(params)
    where = jax.tree.map(lambda x: x.sharding, (params, held))

    def step(params: Any, held: Any) -> tuple[Any, Any]:
        updates, held = tx.update(jax.tree.map(jnp.cos, params), held, params)
        return optax.apply_updates(params, updates), held

    return jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where), held


def _time_donated(step: Callable[..., Any], params: Any, held: Any, count: int = 8) -> float:
    import jax

    times = []
    for at in range(count):
        begin = time.perf_counter()
        params, held = jax.block_until_ready(step(params, held))
        if at >= 2:
            times.append(time.perf_counter() - begin)
    return min(times)


def update(options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    from dejax.offload import optimizer, stack_step

    bus = bandwidths()
    nbytes = 2 * GIB
    rows = [jnp.full((2048, nbytes // 16 // 4 // 2048), 0.01 * i, jnp.float32) for i in range(1, 17)]
    floor = 2 * nbytes / min(bus.values()) / 1e9
    found: dict[str, Any] = {"bus_gb_s": bus, "floor_ms": 1e3 * floor, "pieces": {}}
    say(found)
    for mib, ahead in ((32, 2), (32, 4), (16, 4), (16, 8), (16, 16), (8, 8), (8, 24), (4, 32)):
        tx = optimizer(optax.adamw(1e-3), streams=True, piece_bytes=max(4096, mib * GIB // 1024), ahead=ahead)
        params = [jnp.copy(x) for x in rows]
        step, held = _update_step(tx, params)
        seconds = _time_donated(step, params, held)
        found["pieces"][f"{mib} MiB, {ahead} ahead"] = {"ms": 1e3 * seconds, "over_floor": seconds / floor}
        say(f"{mib} MiB, {ahead} ahead: {1e3 * seconds:.1f} ms, {seconds / floor:.3f} x floor")
        del held, params
        keep(found)
    # Row by row: the loop of a stack whose layers compute next to nothing.
    layers = 32
    stack = {"w": jnp.ones((layers, 2048, nbytes // layers // 4 // 2048)) * 0.01}
    cosine, mean = lambda p, x: x + jnp.cos(p["w"][:1, :8]), lambda outer, x, b: jnp.mean(x)
    step = stack_step(lambda outer, b: b, cosine, mean, optax.adamw(1e-3), streams=True, ahead=1)
    held = step.init({"a": jnp.zeros(1)}, jax.tree.map(jnp.copy, stack))
    run = step.jit(held)
    times = []
    for _ in range(6):
        begin = time.perf_counter()
        held, _ = jax.block_until_ready(run(held, jnp.zeros((1, 8))))
        times.append(time.perf_counter() - begin)
    seconds = min(times)
    found["rows, 1 ahead"] = {"ms": 1e3 * seconds, "over_floor": seconds / floor}
    say(f"rows of {nbytes // layers >> 20} MiB: {1e3 * seconds:.1f} ms, {seconds / floor:.3f} x floor")
    return found


def peers(options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp
    import optax

    from dejax.offload import ActivationStore, optimizer
    from examples import train_gpt as model
    from examples.train_gpt import SIZES, init_params, loss

    found: dict[str, Any] = {"update_ms": {}, "step_ms": {}}
    nbytes = GIB
    params = [jnp.full((2048, nbytes // 8 // 4 // 2048), 0.01 * i, jnp.float32) for i in range(1, 9)]
    ways = {"device": optax.adamw(1e-3), "dejax": optimizer(optax.adamw(1e-3), streams=True)}
    ways["JAX, memory_kind"] = optimizer(optax.adamw(1e-3), streams=False)
    for name, tx in ways.items():
        here = [jnp.copy(x) for x in params]
        step, held = _update_step(tx, here)
        found["update_ms"][name] = 1e3 * _time_donated(step, here, held)
        say("update", name, found["update_ms"][name])
        del held, here
    keep(found)
    # Activations of the 1b decoder: inputs of the blocks.
    config = SIZES["tiny" if QUICK else "1b"]
    weights = init_params(config, jax.random.key(0))
    tokens = _tokens(2, 64, 0) if QUICK else _tokens(8, 2048, 0)

    def step_of(block: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda p, t: loss(config, p, t, block)))

    from jax.ad_checkpoint import checkpoint_name

    from dejax.offload import offload

    plain = model.make_block(config)
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["input"],
        offload_src="device",
        offload_dst="pinned_host",
    )
    blocks = {
        "jax.checkpoint": jax.checkpoint(plain),
        "dejax, inputs": offload(jax.checkpoint(plain), inputs=1, min_bytes=1 << 12),
        "JAX, offload policy": jax.checkpoint(lambda p, x: plain(p, checkpoint_name(x, "input")), policy=policy),
    }
    for name, block in blocks.items():
        try:
            with ActivationStore():
                compiled = step_of(block).lower(weights, tokens).compile()
                found["step_ms"][name] = 1e3 * time_step(compiled, weights, tokens)
            say("step", name, found["step_ms"][name], compiled.memory_analysis().temp_size_in_bytes / GIB)
        except Exception as error:
            found["step_ms"][name] = f"{type(error).__name__}: {str(error)[:200]}"
            say("step", name, found["step_ms"][name])
        keep(found)
    try:
        found["torch"] = _torch(nbytes)
    except ImportError as error:
        found["torch"] = str(error)
    return found


def _torch(nbytes: int) -> dict[str, Any]:
    """AdamW of torch on the device, and as ZeRO-Offload does it: gradients out, Adam on the CPU, parameters back."""
    import torch

    if not torch.cuda.is_available():
        return {"error": "torch sees no GPU"}
    found: dict[str, Any] = {"threads": torch.get_num_threads()}
    shape = (2048, nbytes // 8 // 4 // 2048)
    here = [torch.full(shape, 0.01, device="cuda").requires_grad_() for _ in range(8)]
    for p in here:
        p.grad = torch.full_like(p, 0.1)
    tx = torch.optim.AdamW(here, lr=1e-3, fused=True)

    def timed(run: Callable[[], Any]) -> float:
        times = []
        for at in range(5):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            if at:
                times.append(time.perf_counter() - begin)
        return 1e3 * min(times)

    found["AdamW on the device, ms"] = timed(tx.step)
    far = [torch.full(shape, 0.01).pin_memory().requires_grad_() for _ in range(8)]
    for p in far:
        p.grad = torch.empty(shape).pin_memory()
    cpu = torch.optim.AdamW(far, lr=1e-3, fused=True)

    def zero() -> None:
        for a, b in zip(here, far, strict=True):
            b.grad.copy_(a.grad, non_blocking=True)
        torch.cuda.synchronize()
        cpu.step()
        with torch.no_grad():
            for a, b in zip(here, far, strict=True):
                a.copy_(b, non_blocking=True)

    found["CPU Adam, gradients out and parameters back, ms"] = timed(zero)
    say("torch", found)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES, help="which cases to measure")
    parser.add_argument("--size", default="12b", help="of the case large")
    parser.add_argument("--batch", type=int, default=8, help="sequences of a step; halved until the step fits")
    parser.add_argument("--microbatches", type=int, default=1, help="parts of a step, whose gradients are added")
    parser.add_argument("--steps", type=int, default=4, help="steps to time")
    parser.add_argument(
        "--params", choices=("device", "host"), default="device", help="where the parameters stay between uses"
    )
    parser.add_argument(
        "--moments",
        choices=("device", "host", "first", "feed-forward"),
        default="host",
        help="where the optimizer's moments stay: all, or those of some parameters on the host",
    )
    parser.add_argument("--limit", type=float, help="seconds for each case")
    parser.add_argument("--quick", action="store_true", help="every case in a small form")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Save) -> None:
    if args.child:
        run_case(lambda: globals()[args.child](args))
        return

    def environment(case: str) -> dict[str, str]:
        found = {
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "0.85",  # staging memory and torch are outside of XLA's pool
            "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "104",  # XLA's own limit is 64 GiB
        }
        return found | ({"XLA_PYTHON_CLIENT_PREALLOCATE": "false"} if case == "peers" else {})

    in_processes("offload_llm", args, save, lambda case: args.limit or LIMITS[case], environment)
