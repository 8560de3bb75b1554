"""What decides whether a gather runs beside compute: `prefetched_scan` in one process for each case, about 5 s each.

    python tests/gpu/overlap_trial.py

Each line has milliseconds of compute alone, gathers alone, one after the other, and prefetched; then, of a profile, the
part of the gathers' time in which another stream had a kernel at work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CASES: list[dict[str, Any]] = [
    {"name": "as it is"},
    {"name": "sorted ids", "order": "sorted"},
    {"name": "32 hardware queues", "connections": "32"},
    {"name": "1 hardware queue", "connections": "1"},
    {"name": "torch at work before", "torch": True},
    {"name": "without preallocation", "preallocate": "false"},
    # cuBLAS gives a product one block for each multiprocessor, each with its fixed share: where a gather holds four of
    # these, four blocks wait for the others, and the product takes twice as long, well as it overlaps.
    {"name": "Triton's products", "flags": "--xla_gpu_triton_gemm_any=true --xla_gpu_cublas_fallback=false"},
    {"name": "compute in many small blocks", "compute": "elementwise"},
]


def overlapped(run: Callable[[], Any]) -> float:
    """The part of gather kernels' time in which a kernel of another stream ran, by jax's profiler."""
    import jax

    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(run())
        gathers, others = [], []
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                if plane.name.startswith("/device:GPU"):
                    for line in plane.lines:
                        if line.name.startswith("Stream"):
                            for event in line.events:
                                span = (event.start_ns, event.start_ns + event.duration_ns)
                                (gathers if "dejax_gather" in event.name else others).append(span)
    shared = sum(max(0.0, min(b, d) - max(a, c)) for a, b in gathers for c, d in others)
    return shared / max(1.0, sum(b - a for a, b in gathers))


def trial(case: dict[str, Any]) -> dict[str, Any]:
    if case.get("torch"):
        import torch

        torch.ones(1 << 20).pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    import jax
    import jax.numpy as jnp
    import numpy as np

    from dejax.host_gather import HostTable, prefetched_scan

    on_gpu = jax.default_backend() == "gpu"
    rows, steps, count, size = (1 << 20, 24, 1 << 16, 4096) if on_gpu else (1 << 10, 3, 64, 64)
    table = HostTable.zeros((rows, 128))
    ids = jnp.asarray(np.random.default_rng(0).integers(0, rows, (steps, count), np.int32))
    w = jnp.full((size, size), 1e-3, jnp.bfloat16)
    options = {"order": case["order"]} if "order" in case else {}

    def step(carry: jax.Array, got: jax.Array, _: Any) -> tuple[jax.Array, None]:
        if case.get("compute") == "elementwise":
            for _ in range(300):
                carry = jnp.sin(carry + 1)
        for _ in range(0 if "compute" in case else 4):
            carry = (carry @ w).astype(jnp.bfloat16)
        return carry + got[:1, :1].astype(jnp.bfloat16), None

    none = jnp.zeros((1, 1))
    programs: dict[str, Callable[..., Any]] = {
        "compute": lambda t, i, c: jax.lax.scan(lambda c, _: step(c, none, None), c, None, length=steps)[0],
        "transfer": lambda t, i, c: jax.lax.scan(lambda s, i: (s + t[i][0, 0], None), 0.0, i)[0],
        "serial": lambda t, i, c: jax.lax.scan(lambda c, i: step(c, t[i], None), c, i)[0],
        "prefetched": lambda t, i, c: prefetched_scan(step, c, t, i, **options)[0],
    }
    found: dict[str, Any] = {"case": case["name"]}
    for name, program in programs.items():
        compiled = jax.jit(program)
        jax.block_until_ready(compiled(table, ids, w))
        times = []
        for _ in range(3):
            start = time.perf_counter()
            jax.block_until_ready(compiled(table, ids, w))
            times.append(1e3 * (time.perf_counter() - start))
        found[name] = round(min(times), 2)
    found["gathers_beside_others"] = round(overlapped(lambda: compiled(table, ids, w)), 2)
    return found


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(trial(json.loads(sys.argv[1]))), flush=True)
        return
    for case in CASES:
        environment = dict(os.environ)
        for key, name in (
            ("flags", "XLA_FLAGS"),
            ("connections", "CUDA_DEVICE_MAX_CONNECTIONS"),
            ("preallocate", "XLA_PYTHON_CLIENT_PREALLOCATE"),
        ):
            if key in case:
                environment[name] = case[key]
        subprocess.run([sys.executable, __file__, json.dumps(case)], env=environment, check=False, timeout=120)


if __name__ == "__main__":
    main()
