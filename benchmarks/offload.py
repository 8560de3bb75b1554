"""Cost and savings of offload, with the peers, the bounds and the machine in one run.

    python -m benchmarks offload --cases layers24 layers12 --out out/offload.json
    python -m benchmarks offload --quick        # every case in a small form, also on a CPU: checks that it runs

Each case runs in a process of its own and has its own time limit. Tables are printed and JSON is written as results
come, so that a case that exceeds its limit leaves the results it has.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.offload_measuring import GIB, QUICK, bandwidths, in_processes, run_case
from benchmarks.offload_tiers import planned
from benchmarks.offload_training import gpt, gpt_plan, largest_batch, layers
from benchmarks.provenance import Save

IN_OTHER_PROCESSES = True


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


def stack(case: str, default: str, args: Any) -> dict[str, Any]:
    num, batch, width = SIZES[case]
    return layers(num, batch, width, words(case.upper(), default), args.disk)


def plan(case: str, others: str, args: Any, **how: Any) -> dict[str, Any]:
    num, batch, width = SIZES[case]
    ways = [tuple(num if choice == other else 0 for choice in "oirk") for other in others]
    plot = args.out.with_suffix(f".{case}.svg")
    return planned(num, batch, width, str(plot), ways, **how)


CASES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "bandwidths": lambda args: bandwidths(),
    "layers24": lambda args: stack("layers24", "host: host:8 jax", args),
    "layers12": lambda args: stack("layers12", "host: host:2 host:1 jax", args),
    "shards": lambda args: stack("shards", "host:2 mesh:2 shard_map:2", args),
    "deep": lambda args: stack("deep", "host:1", args),
    "gpt": lambda args: gpt(*SIZES["gpt"], words("GPT", "saved remat inputs all names jax-inputs jax-names")),
    "gpt_plan": lambda args: gpt_plan(*SIZES["gpt"], 0.6 if QUICK else 0.4),
    "batch": lambda args: largest_batch(*SIZES["batch"]),
    "nvme": lambda args: stack(
        "nvme", "shm:3,4,direct shm:3,4,tensorstore disk:3,4,direct disk:3,4,tensorstore host:2", args
    ),
    "plan": lambda args: plan("plan", "oi", args, budget_gib=40.0 if QUICK else 2.5),
    # Layers that give a drive time (5.5 GB/s in forward), and host memory for four of their inputs: how many go depends
    # on the drive.
    "plan_disk": lambda args: plan(
        "plan_disk",
        "ir",
        args,
        fewer_tensors=(1 if QUICK else 6) - 0.1,
        passes=4,
        choices=("offload inputs", "recompute"),
        path=args.disk,
        host_bytes=4 * GIB if QUICK else GIB // 2,
    ),
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES), help="which cases to measure")
    parser.add_argument(
        "--disk", default=tempfile.gettempdir(), help="folder on the drive that stands for the NVMe tier"
    )
    parser.add_argument("--limit", type=float, default=120, help="seconds for each case")
    parser.add_argument("--quick", action="store_true", help="every case in a small form")
    parser.add_argument("--child", choices=CASES, help=argparse.SUPPRESS)


def run(args: argparse.Namespace, save: Save) -> None:
    if args.child:
        faulthandler.dump_traceback_later(max(1.0, args.limit - 1), exit=True)  # shows where the time went
        run_case(lambda: CASES[args.child](args))
        return
    in_processes(
        "offload", args, save, lambda case: args.limit, lambda case: {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    )
