"""`plan_step` on models that it was not made with: memory and time as predicted and as measured, for several budgets.

    python -m benchmarks offload_plans --out out/plans.json
    python -m benchmarks offload_plans --quick      # small forms, also on a CPU

A budget is a share of what the step takes with all state on the device. Adam, float32 parameters, bfloat16 arithmetic.
With `--random 20` twenty other ways within each budget are measured, too, drawn from all that the planner considers.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import math
import os
import random
import time
from collections.abc import Callable
from typing import Any

from benchmarks.provenance import Save

os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.85")  # staging memory is outside of XLA's pool
os.environ.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", "104")


def models(quick: bool) -> dict[str, Callable[[], tuple[Any, Any, Any]]]:
    """By name: () -> (body, parameters of the stack, input of the first layer)."""
    import jax
    import jax.numpy as jnp

    key = jax.random.key(0)
    half = jnp.bfloat16

    def weights(shapes: dict[str, tuple[int, ...]], layers: int) -> dict[str, Any]:
        return {
            name: jax.random.normal(jax.random.fold_in(key, i), (layers, *shape)) * 0.02
            for i, (name, shape) in enumerate(shapes.items())
        }

    def feed_forward() -> tuple[Any, Any, Any]:
        layers, width, tokens = (4, 32, 64) if quick else (24, 4096, 16384)

        def body(p: Any, x: Any) -> Any:
            return x + jax.nn.gelu(x @ p["up"].astype(half)) @ p["down"].astype(half)

        return (
            body,
            weights({"up": (width, 2 * width), "down": (2 * width, width)}, layers),
            jnp.ones((tokens, width), half),
        )

    def experts() -> tuple[Any, Any, Any]:
        layers, width, count, tokens = (4, 32, 4, 64) if quick else (16, 2048, 8, 16384)

        def body(p: Any, x: Any) -> Any:
            gates = jax.nn.softmax((x @ p["route"].astype(half)).astype(jnp.float32))
            best, chosen = jax.lax.top_k(gates, 2)
            order = jnp.argsort(chosen.reshape(-1), stable=True)  # equal parts: an expert takes the next one's surplus
            rows = jnp.repeat(x, 2, 0)[order].reshape(count, -1, x.shape[1])
            hidden = jax.nn.silu(jnp.einsum("etd,edh->eth", rows, p["up"].astype(half)))
            out = jnp.einsum("eth,ehd->etd", hidden, p["down"].astype(half)).reshape(-1, x.shape[1])
            back = jnp.zeros_like(out).at[order].set(out).reshape(x.shape[0], 2, -1)
            return x + jnp.einsum("tkd,tk->td", back, best.astype(half))

        shapes = {"route": (width, count), "up": (count, width, width), "down": (count, width, width)}
        return body, weights(shapes, layers), jnp.ones((tokens, width), half)

    def convolutions() -> tuple[Any, Any, Any]:
        layers, width, side, batch = (4, 8, 8, 2) if quick else (32, 512, 32, 32)

        def body(p: Any, x: Any) -> Any:
            names = ("NHWC", "HWIO", "NHWC")
            y = jax.lax.conv_general_dilated(x, p["in"].astype(half), (1, 1), "SAME", dimension_numbers=names)
            y = jax.lax.conv_general_dilated(
                jax.nn.relu(y), p["out"].astype(half), (1, 1), "SAME", dimension_numbers=names
            )
            return x + y

        shapes = {"in": (3, 3, width, width), "out": (3, 3, width, width)}
        return body, weights(shapes, layers), jnp.ones((batch, side, side, width), half)

    def decoder() -> tuple[Any, Any, Any]:
        from examples import train_gpt as gpt

        config = gpt.SIZES["tiny" if quick else "350m"]
        batch, sequence = (2, 32) if quick else (4, 4096)
        return (
            gpt.make_block(config),
            gpt.init_params(config, key)["layers"],
            jnp.ones((batch, sequence, config.width), half),
        )

    return {"feed-forward": feed_forward, "experts": experts, "convolutions": convolutions, "decoder": decoder}


def plans(name: str, make: Callable[[], tuple[Any, Any, Any]], shares: list[float], others: int) -> dict[str, Any]:
    """Plans a model, and measures the plan for each budget, and some other ways within it."""
    import jax
    import jax.numpy as jnp
    import optax

    from dejax.offload import plan_step

    body, layers, x = make()
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), layers)
    del layers
    begin = time.perf_counter()
    plan = plan_step(
        lambda outer, x: x,
        body,
        lambda outer, x, batch: jnp.mean(jnp.square(x.astype(jnp.float32))),
        optax.adam(1e-4),
        {"unused": jnp.zeros(1)},
        shapes,
        x,
        device_bytes=1 << 50,
        min_bytes=1 << 10,
        streams=True,
    )
    everything = max(way.device_bytes for way in plan.ways)
    found: dict[str, Any] = {"planning_s": time.perf_counter() - begin, "all_on_the_device_gb": everything / 1e9}
    rates = {name: value for name, value in dataclasses.asdict(plan.tiers).items() if value and math.isfinite(value)}
    found |= {"measured_tiers": rates, "measured_cost": dataclasses.asdict(plan.costs[1])}
    for share in shares:
        try:
            part = plan.within(device_bytes=share * everything)
        except ValueError as error:
            found[str(share)] = {"error": str(error)}
            print(name, share, error, flush=True)
            continue
        near, seconds = measured(part, make()[1], x)
        row = {
            "moved": sorted(what for what, at in part.chosen.choices.items() if at == "host" and what != "inputs"),
            "inputs": part.chosen.choices["inputs"],
            "predicted_gb": part.chosen.device_bytes / 1e9,
            "measured_gb": near / 1e9,
            "memory_off": part.chosen.device_bytes / near - 1,
            "predicted_ms": 1e3 * part.chosen.seconds,
            "measured_ms": 1e3 * seconds,
            "time_off": part.chosen.seconds / seconds - 1,
        }
        fitting = [way for way in plan.ways if all(getattr(way, name) <= most for name, most in part.budgets.items())]
        drawn = random.Random(0).sample(fitting, min(others, len(fitting)))
        if drawn:
            chosen, row["others_ms"] = part.chosen, []
            for part.chosen in drawn:
                row["others_ms"].append(1e3 * measured(part, make()[1], x)[1])
            part.chosen = chosen
            # Once more after the others, so that other work on the machine during the first time does not count.
            row["measured_ms"] = min(row["measured_ms"], 1e3 * measured(part, make()[1], x)[1])
            row["time_off"] = row["predicted_ms"] / row["measured_ms"] - 1
            row["over_best_other"] = row["measured_ms"] / min(row["others_ms"])
        found[str(share)] = row
        print(name, share, {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    return found


def measured(plan: Any, layers: Any, x: Any) -> tuple[float, float]:
    """Device bytes and seconds of a step as planned."""
    import jax.numpy as jnp

    state = plan.apply().init({"unused": jnp.zeros(1)}, layers)
    seen: tuple[float, float] = plan.measure(state, x)
    del state
    gc.collect()
    return seen


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="*", help="which models to plan for; all if not given")
    parser.add_argument(
        "--shares",
        nargs="*",
        type=float,
        default=[1.0, 0.6, 0.3],
        help="budgets, as shares of the memory that a step takes without offload",
    )
    parser.add_argument("--seconds", type=float, default=1e9, help="no further model begins after them")
    parser.add_argument("--random", type=int, default=0, help="other ways within each budget to measure, too")
    parser.add_argument("--quick", action="store_true", help="small forms")


def run(args: argparse.Namespace, save: Save) -> None:

    import jax

    from dejax.offload import ActivationStore

    known = models(args.quick)
    found: dict[str, Any] = {}
    began = time.perf_counter()
    for name in args.models or known:
        if time.perf_counter() - began > args.seconds:
            break
        try:
            with ActivationStore():
                found[name] = plans(name, known[name], args.shares, args.random)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
            print(name, found[name], flush=True)
        save(found)
        jax.clear_caches()
        gc.collect()
