"""Disk tier, planner and optimizer state, for benchmarks/offload.py."""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.offload_measuring import GIB, keep, say

CHOICES = ("offload", "offload inputs", "recompute", "keep")


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
