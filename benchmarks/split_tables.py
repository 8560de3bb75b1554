"""Overlapped reads of tables with rows in both memories: device time by the share in host memory and multiprocessors.

    python -m benchmarks split_tables --out results.json

524,288 ascending ids of a table of 24 GB in host memory with copies of 6 million rows on the device. Rows of 512 bytes
are moved, rows of 1,024 bytes are converted from fp8 to bfloat16.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from benchmarks.provenance import Save
from dejax.host_gather import CachedTable, HostTable, gather_done, gather_start
from dejax.pallas.profile import record


def _wait(run: Callable[..., Any], *given: Any) -> None:
    jax.block_until_ready(run(*given))


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=48_000_000, help="of 512 bytes; half as many of 1,024 bytes")
    parser.add_argument("--ids", type=int, default=524_288, help="rows that are read")


def run(args: argparse.Namespace, save: Save) -> None:
    rng, results = np.random.default_rng(0), []
    for width, dtype, out in ((128, np.float32, None), (1024, ml_dtypes.float8_e4m3fn, jnp.bfloat16)):
        rows = args.rows * 512 // (width * np.dtype(dtype).itemsize)
        table = HostTable.empty((rows, width), np.dtype(dtype))
        hot = np.arange(0, rows // 2, 4)
        cached = CachedTable.from_ids(table, hot)
        cold = np.setdiff1d(np.arange(rows), hot, assume_unique=True)
        for share in (0.01, 0.05, 0.13, 0.5, 1.0):
            far = int(args.ids * share)
            chosen = [rng.choice(cold, far, replace=False), rng.choice(hot, args.ids - far, replace=False)]
            ids = jnp.asarray(np.sort(np.concatenate(chosen)), jnp.int32)
            for count in (4, 8, 16, 32):

                @jax.jit
                def read(table: Any, ids: Any, count: int = count, out: Any = out) -> Any:
                    return gather_done(gather_start(table, ids, num_sms=count, out_dtype=out))

                for _ in range(2):
                    jax.block_until_ready(read(cached, ids))
                records = record(functools.partial(_wait, read, cached, ids))
                ms = sum(r.duration_ns for r in records if "dejax_gather" in r.name) / 1e6
                row_bytes = width * np.dtype(dtype).itemsize
                results.append({"row_bytes": row_bytes, "on_host": share, "multiprocessors": count, "ms": round(ms, 3)})
                print(json.dumps(results[-1]), flush=True)
        table.close()
    save(results)
