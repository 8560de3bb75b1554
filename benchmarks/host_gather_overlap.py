"""Gathers alongside compute: the time of `prefetched_scan`, and of each kernel alone and alongside a gather.

    python -m benchmarks.host_gather_overlap                     # all cases, about 20 s on a GPU
    python -m benchmarks.host_gather_overlap --cases "as it is"
    XLA_FLAGS="--xla_gpu_triton_gemm_any=true --xla_gpu_cublas_fallback=false" python -m benchmarks.host_gather_overlap

The last command uses Triton's products, which have one block per tile. Within a process, XLA keeps its autotuner's
first choice for a product, whatever the options of later compilations. A new process chooses anew.

Each case prints milliseconds of compute alone, of gathers alone, of both in turn, and prefetched, and the ratio to the
longer of the two: for the loop, and for one more step of it. Then it prints figures of a profile: the gathers' mean
duration, the share of it in which a kernel of another stream ran, and the longest kernels with the resources that one
of their blocks takes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from dejax.host_gather import HostTable, prefetched_scan
from dejax.pallas.profile import Record, record

Program = Callable[[HostTable, jax.Array, jax.Array], jax.Array]

CASES: dict[str, dict[str, Any]] = {
    "as it is": {},
    "8 multiprocessors": {"options": {"num_sms": 8}},
    "16 multiprocessors": {"options": {"num_sms": 16}},
    "two steps ahead": {"options": {"depth": 2}},
    "sorted ids": {"options": {"order": "sorted"}},
    "elementwise": {"elementwise": True},
}


def layer(elementwise: bool = False) -> Callable[..., tuple[jax.Array, None]]:
    """A scan's step: four products with the carry, or elementwise work, and a read of one gathered row."""

    def step(carry: jax.Array, rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(40 if elementwise else 0):
            carry = jnp.sin(carry + 1)
        for _ in range(0 if elementwise else 4):
            carry = (carry @ matrix).astype(carry.dtype)
        return carry + rows[:1, :1].astype(carry.dtype), None

    return step


def programs(step: Callable[..., Any], **options: Any) -> dict[str, Program]:
    """Functions of a table, ids [steps, n] and a matrix: each part alone, both in turn, and both at once."""
    none = jnp.zeros((1, 1))

    def scan(body: Callable[..., Any], carry: Any, xs: Any) -> Any:
        return jax.lax.scan(body, carry, xs)[0]

    return {
        "compute": lambda t, i, w: scan(lambda c, _: step(c, none, w), w, i[:, 0]),
        "transfer": lambda t, i, w: scan(lambda s, i: (s + t[i][0, 0], None), 0.0, i),
        "serial": lambda t, i, w: scan(lambda c, i: step(c, t[i], w), w, i),
        "prefetched": lambda t, i, w: prefetched_scan(lambda c, rows, _: step(c, rows, w), w, t, i, **options)[0],
    }


def one_more_step(
    timed: Callable[..., float],
    loops: Mapping[str, Program],
    whole: Mapping[str, float],
    table: HostTable,
    ids: jax.Array,
    matrix: jax.Array,
) -> dict[str, float]:
    """The time that one step adds to a long loop, without one-time costs such as the first gather, which runs alone.

    Args:
        timed: the time of a program with its arguments.
        loops: the programs of `programs`, jitted.
        whole: `timed` of each program with all ids.
        table, ids, matrix: the arguments.
    """
    half = ids.shape[0] // 2
    found = {
        f"{name}_a_step": (whole[name] - timed(loops[name], table, ids[half:], matrix)) / half
        for name in ("compute", "transfer", "prefetched")
    }
    longer = max(found["compute_a_step"], found["transfer_a_step"])
    return found | {"ratio_a_step": found["prefetched_a_step"] / longer}


def overlap_of(records: Sequence[Record]) -> dict[str, Any]:
    """Durations in a profile: of gathers, and of other kernels alone and alongside a gather."""
    gathers = [r for r in records if "dejax_gather" in r.name]
    others: dict[tuple[str, str], list[tuple[float, float]]] = {}  # (duration, share of it alongside a gather)
    covered = 0.0
    for r in records:
        if "dejax_gather" in r.name:
            continue
        shared = sum(
            max(0.0, min(r.start_ns + r.duration_ns, g.start_ns + g.duration_ns) - max(r.start_ns, g.start_ns))
            for g in gathers
        )
        covered += shared
        others.setdefault((r.name, r.details), []).append((r.duration_ns, shared / max(1.0, r.duration_ns)))

    def mean(found: list[float]) -> float | None:
        return round(statistics.mean(found) / 1e3, 1) if found else None

    longest = sorted(others.items(), key=lambda item: -sum(duration for duration, _ in item[1]))[:4]
    ends = [r.start_ns + r.duration_ns for r in records]
    return {
        "span_ms": round((max(ends) - min(r.start_ns for r in records)) / 1e6, 2) if records else None,
        "gather_microseconds": mean([r.duration_ns for r in gathers]),
        "gather": gathers[0].details if gathers else None,
        "gathers_alongside_others": round(covered / max(1.0, sum(r.duration_ns for r in gathers)), 2),
        "kernels": [
            {
                "name": name[:90],
                "details": details,
                "calls": len(found),
                "alone_microseconds": mean([duration for duration, part in found if part < 0.1]),
                "alongside_microseconds": mean([duration for duration, part in found if part > 0.9]),
            }
            for (name, details), found in longest
        ],
    }


def milliseconds(compiled: Callable[..., Any], *args: Any, repeats: int = 3) -> float:
    """The best time of a few runs."""
    return round(1e3 * min(rounds(partial(compiled, *args), fewest=repeats)), 2)


def trial(case: dict[str, Any], table: HostTable, ids: jax.Array, matrix: jax.Array) -> dict[str, Any]:
    """The figures of one case."""
    step = layer(case.get("elementwise", False))
    loops = {name: jax.jit(program) for name, program in programs(step, **case.get("options", {})).items()}
    found: dict[str, Any] = {name: milliseconds(loop, table, ids, matrix) for name, loop in loops.items()}
    more = one_more_step(milliseconds, loops, found, table, ids, matrix)
    found["ratio"] = round(found["prefetched"] / max(found["compute"], found["transfer"]), 3)
    found |= {name: round(value, 3) for name, value in more.items()}
    return found | overlap_of(record(lambda: jax.block_until_ready(loops["prefetched"](table, ids, matrix))))


def inputs(steps: int, count: int, rows: int, size: int) -> tuple[HostTable, jax.Array, jax.Array]:
    ids = np.random.default_rng(0).integers(0, rows, (steps, count), np.int32)
    matrix = np.random.default_rng(1).standard_normal((size, size)) / size**0.5
    return HostTable.zeros((rows, 128)), jnp.asarray(ids), jnp.asarray(matrix, jnp.bfloat16)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=";".join(CASES), help="which cases to time, with semicolons")
    args = parser.parse_args(arguments)
    if jax.default_backend() != "gpu":
        print("host_gather_overlap needs a GPU: gathers run alongside compute on its streams", file=sys.stderr)
        return 1
    given = inputs(24, 1 << 16, 1 << 20, 4096)
    for name in args.cases.split(";"):
        print(json.dumps({"case": name, **trial(CASES[name], *given)}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
