"""Cost and savings of offload, with the peers, the bounds and the machine in one run.

    python benchmarks/offload.py --cases layers24 layers12 --out out/offload.json
    python benchmarks/offload.py --quick        # every case in a small form, also on a CPU: checks that it runs

Each case runs in a process of its own and has its own time limit. Tables are printed and JSON is written as results
come, so that a case that exceeds its limit leaves the results it has.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if "--quick" in sys.argv:
    os.environ["DEJAX_BENCHMARK_QUICK"] = "1"

from offload_measuring import GIB, QUICK, bandwidths, keep, say
from offload_tiers import drive, optimizer_state, planned
from offload_training import gpt, gpt_plan, largest_batch, layers
from provenance import save


def words(variable: str, default: str) -> list[str]:
    return os.environ.get(variable, default).split()


# Layers, batch and width of stacks; layers, batch, sequence and width of GPTs.
SIZES: dict[str, tuple[int, ...]] = {
    "layers24": (24, 16384, 4096),
    "layers12": (12, 8192, 8192),
    "shards": (12, 8192, 8192),
    "deep": (128, 4096, 8192),
    "nvme": (8, 8192, 16384),
    "plan": (12, 8192, 8192),
    "plan_disk": (8, 4096, 16384),
    "gpt": (6, 4, 2048, 8192),
    "batch": (4, 4, 2048, 8192),
}
if QUICK:
    SIZES = {name: (4, 2, 512, 512) if name in ("gpt", "batch") else (4, 1024, 512) for name in SIZES}


def stack(case: str, default: str, disk: str) -> dict[str, Any]:
    num, batch, width = SIZES[case]
    return layers(num, batch, width, words(case.upper(), default), disk)


def plan(case: str, others: str, **how: Any) -> dict[str, Any]:
    num, batch, width = SIZES[case]
    ways = [tuple(num if choice == other else 0 for choice in "oirk") for other in others]
    plot = Path(os.environ["DEJAX_BENCHMARK_PART"]).with_suffix(".svg")
    return planned(num, batch, width, str(plot), ways, **how)


CASES: dict[str, Callable[[str], Any]] = {
    "bandwidths": lambda disk: bandwidths(),
    "optimizer": lambda disk: optimizer_state(8.0 if QUICK else 2.0),
    "layers24": lambda disk: stack("layers24", "host: host:8 jax", disk),
    "layers12": lambda disk: stack("layers12", "host: host:2 host:1 jax", disk),
    "shards": lambda disk: stack("shards", "host:2 mesh:2 shard_map:2", disk),
    "deep": lambda disk: stack("deep", "host:1", disk),
    "gpt": lambda disk: gpt(*SIZES["gpt"], words("GPT", "saved remat inputs all names jax-inputs jax-names")),
    "gpt_plan": lambda disk: gpt_plan(*SIZES["gpt"], 0.6 if QUICK else 0.4),
    "batch": lambda disk: largest_batch(*SIZES["batch"]),
    "nvme": lambda disk: stack(
        "nvme", "shm:3,4,direct shm:3,4,tensorstore shm:2,3,direct shm:2,3,tensorstore host:2", disk
    ),
    "drive": lambda disk: drive(disk, 16 if QUICK else 4),
    "plan": lambda disk: plan("plan", "oi", budget_gib=40.0 if QUICK else 2.5),
    # Layers that give a drive time (5.5 GB/s in forward), and host memory for four of their inputs: how many go depends
    # on the drive.
    "plan_disk": lambda disk: plan(
        "plan_disk",
        "ir",
        fewer_tensors=(1 if QUICK else 6) - 0.1,
        passes=4,
        choices=("offload inputs", "recompute"),
        path=disk,
        host_bytes=4 * GIB if QUICK else GIB // 2,
    ),
}


def child(case: str, disk: str, part: str, limit: float) -> None:
    faulthandler.dump_traceback_later(max(1.0, limit - 1), exit=True)  # shows where the time went
    os.environ["DEJAX_BENCHMARK_PART"] = part
    keep(CASES[case](disk))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="which cases to measure")
    parser.add_argument("--out", type=Path, default=Path("out/offload.json"), help="file for the JSON")
    parser.add_argument(
        "--disk", default=tempfile.gettempdir(), help="folder on the drive that stands for the NVMe tier"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for each case")
    parser.add_argument("--quick", action="store_true", help="every case in a small form")
    options = parser.parse_args()
    options.out.parent.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    # Workers fork from a process that has done the slow imports and has no device yet.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload(["jax.numpy", "optax", "dejax.offload"])
    report: dict[str, Any] = {"cases": {}}
    for case in options.cases:
        say(f"== {case}")
        part = options.out.with_suffix(f".{case}.json")
        begin = time.perf_counter()
        process = processes.Process(target=child, args=(case, options.disk, str(part), options.limit))
        process.start()
        process.join(options.limit)
        found: dict[str, Any] = {}
        if process.exitcode is None:
            found["error"] = f"its {options.limit:.0f} s were over"
            process.kill()
            process.join()
        elif process.exitcode:
            over = time.perf_counter() - begin > options.limit - 1
            found["error"] = f"its {options.limit:.0f} s were over" if over else f"exit status {process.exitcode}"
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(part.read_text()) | found
            part.unlink()
        found["seconds"] = time.perf_counter() - begin
        say(f"{case}: {found.get('error', 'done')}, {found['seconds']:.1f} s")
        report["cases"][case] = found
        save(options.out, report, device=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
