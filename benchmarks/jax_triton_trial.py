"""Kernels written in Triton's own language and called through jax-triton, next to the Pallas kernels of dejax.

    python -m benchmarks.jax_triton_trial --out benchmarks/results

Pallas' Triton lowering is deprecated, and Mosaic GPU has no gathered loads on Hopper (`benchmarks/mosaic_trial.py`).
This trial asks whether kernels that follow edges could move to the package jax-triton, which needs Python 3.12, jax
0.11 and triton. Two kernels gather rows through an index:

- the grouped GEMM: float32 rows of 64 or 128 features, times the matrix of their type, 64 types, products in TF32;
- the CSR segment reduction: sums of float32 rows of 64 features, ten per segment on average, 2 and 20 million entries.

Each is compared with float64 and then timed on the device (median), inside one jitted function. The floor is bytes read
and written over 4.3 TB/s, one row for each index.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_time import profile_jax
from provenance import save

from dejax import pallas as kernels
from dejax.pallas.segments.reduce import Segments, segment_reduce
from dejax.pallas.segments.schedule import chunk_of

TYPES = 64
UNIT = 256  # each type has a multiple of this many rows, so that no tile has rows of two types
HBM = 4.3e12  # bytes/s, a copy's reads plus writes
CALLS = 10


def product_by_pallas(x: Any, rows: Any, w: Any, offsets: Any, types: Any, starts: Any, *, block: int) -> jax.Array:
    groups = kernels.GemmGroups(offsets, types, starts, block, rows.shape[0])
    output = kernels.GemmOutput(covers_all=True)
    found: jax.Array = kernels.grouped_gemm(
        kernels.GroupedGemm(x, w, groups, x_index=rows, output=output, precision="tf32")
    )
    return found


def sums_by_pallas(x: Any, rows: Any, offsets: Any, first: Any, last: Any) -> jax.Array:
    return segment_reduce("sum", x, Segments(offsets, first, last, rows.shape[0]), rows=rows)


@dataclass(frozen=True)
class Case:
    """A name, the least bytes, float64 results of some rows, and functions without arguments by name."""

    name: str
    nbytes: int
    expected: np.ndarray
    at: np.ndarray
    ways: dict[str, Callable[[], jax.Array]]


def _bound(function: Callable[..., Any], *arrays: Any, **how: Any) -> Callable[[], jax.Array]:
    compiled = jax.jit(functools.partial(function, **how))
    return lambda: compiled(*arrays)


def product_case(theirs: Any, width: int, positions: int) -> Case:
    rng = np.random.default_rng(0)
    units = rng.multinomial(positions // UNIT, rng.dirichlet(np.full(TYPES, 0.7)))
    offsets = np.concatenate([[0], np.cumsum(units) * UNIT]).astype(np.int32)
    x = rng.standard_normal((positions // 4, width), np.float32)
    w = rng.standard_normal((TYPES, width, width), np.float32) / np.float32(width**0.5)
    rows = rng.integers(0, len(x), positions).astype(np.int32)
    at = rng.integers(0, positions, 2000)
    expected = np.einsum("ik,ikn->in", x[rows[at]].astype(float), w[np.repeat(np.arange(TYPES), units * UNIT)[at]])
    here, rows_here, w_here = jnp.asarray(x), jnp.asarray(rows), jnp.asarray(w)

    def types(size: int) -> jax.Array:
        return jnp.asarray(np.repeat(np.arange(TYPES, dtype=np.int32), units * (UNIT // size)))

    block = kernels.gemm_block(width, width, positions, TYPES, "tf32")
    starts = jnp.arange(0, positions, block, dtype=jnp.int32)
    ways = {
        "pallas": _bound(
            product_by_pallas, here, rows_here, w_here, jnp.asarray(offsets), types(block), starts, block=block
        )
    }
    for size, warps, stages in ((64, 4, 2), (128, 8, 2), (128, 4, 2)):
        ways[f"jax-triton, {size} rows, {warps} warps"] = _bound(
            theirs.product, here, rows_here, w_here, types(size), block=size, warps=warps, stages=stages
        )
    nbytes = positions * (8 * width + 4)
    return Case(f"grouped GEMM, {positions:,} rows, {width} to {width}", nbytes, expected, at, ways)


def sums_case(theirs: Any, entries: int, width: int = 64) -> Case:
    rng = np.random.default_rng(1)
    segments = entries // 10
    ids = np.sort(rng.integers(0, segments, entries)).astype(np.int32)
    offsets = np.searchsorted(ids, np.arange(segments + 1)).astype(np.int32)
    x = rng.standard_normal((segments, width), np.float32)
    rows = rng.integers(0, segments, entries).astype(np.int32)
    at = rng.integers(0, segments, 2000)
    expected = np.stack([x[rows[offsets[i] : offsets[i + 1]]].sum(0, dtype=float) for i in at])
    chunk = chunk_of(entries)
    last = ids[np.minimum(np.arange(chunk - 1, entries + chunk - 1, chunk), entries - 1)]
    arrays = [jnp.asarray(a) for a in (x, rows, offsets)]
    ways = {"pallas": _bound(sums_by_pallas, *arrays, jnp.asarray(ids[::chunk]), jnp.asarray(last))}
    for block, warps in ((4, 1), (8, 1), (16, 4)):
        ways[f"jax-triton, {block} segments, {warps} warps"] = _bound(theirs.sums, *arrays, block=block, warps=warps)
    nbytes = entries * (4 * width + 4) + segments * (4 * width + 4)
    return Case(f"segment sum, {entries:,} entries of {width}", nbytes, expected, at, ways)


def measure(case: Case) -> dict[str, Any]:
    floor = case.nbytes / HBM * 1e3
    found: dict[str, Any] = {"case": case.name, "floor_ms": floor, "ways": {}}
    print(f"{case.name}, floor {floor:.3f} ms", flush=True)
    for name, function in case.ways.items():
        try:
            got = np.asarray(function())[case.at].astype(float)
            error = float(np.abs(got - case.expected).max() / np.abs(case.expected).max())
            device = profile_jax(function, CALLS)
            found["ways"][name] = {"error": error, "device": None if device is None else device.as_dict()}
            print(f"  {name:36} {device and device.span_ms} ms, error {error:.1e}", flush=True)
        except Exception as error:
            found["ways"][name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
            print(f"  {name:36} {found['ways'][name]['failed']}", flush=True)
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of rows and entries")
    parser.add_argument("--out", type=Path, help="folder for the JSON, jax_triton_trial.json")
    args = parser.parse_args(argv)
    from peers import jax_triton_kernels as theirs

    size = int(args.scale * (1 << 21)) // UNIT * UNIT
    cases = [
        product_case(theirs, 64, size),
        product_case(theirs, 128, size),
        sums_case(theirs, size),
        sums_case(theirs, 10 * size),
    ]
    found = theirs.VERSIONS | {"cases": [measure(case) for case in cases]}
    if args.out is not None:
        save(args.out / "jax_triton_trial.json", found)


if __name__ == "__main__":
    main()
