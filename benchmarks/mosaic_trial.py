"""Pallas' Mosaic GPU lowering against the Triton lowering that dejax uses, for kernels that Mosaic can express.

    python benchmarks/mosaic_trial.py --out benchmarks/results

Two kernels that read only contiguous rows. On Hopper, Mosaic can express no other kernel of dejax:

- the grouped GEMM: 2,097,152 rows of 64, 128 or 256 bfloat16 in segments of 64 types, times the matrix of their type,
  with loads and stores by the tensor memory accelerator (TMA) and products by warpgroups, against
  `dejax.pallas.grouped_gemm`;
- the wide-row reduction: sums over every 8 rows of 256, 512 or 1,024 float32, against `dejax.pallas.traverse`, a small
  kernel of the Triton lowering and XLA.

Each kernel is first compared with XLA's float32 result and then timed on the device (median). The floor is bytes read
and written once over 4.3 TB/s. If a kernel fails, only its line is missing.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import importlib
import math
import re
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from device_time import profile_jax
from jax import lax
from provenance import save

from dejax import pallas as kernels
from dejax.pallas import _triton

ROWS = 2_097_152
TYPES = 64
UNIT = 256  # every segment has a multiple of this many rows, so that each tile of each kernel has one type
SEGMENT = 8  # rows of a sum
SUMS_BYTES = 2**30
SUMS_UNIT = 2**17  # every tile of sums divides this many bytes
HBM = 4.3e12  # bytes/s, a copy's reads plus writes
SMS = 132
CALLS = 5
COMPILERS = 8
TOLERANCE = {"bfloat16": 1e-2, "float32": 1e-5}  # of the largest element

# The lowering's interface changes between releases. With a jax that lacks it, each line gives the reason.
try:
    plgpu: Any = importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    MOSAIC_ERROR = None
except Exception as error:
    plgpu, MOSAIC_ERROR = None, f"{type(error).__name__}: {error}"


def num_sms() -> int:
    """Number of SMs of the GPU, or of an H200 without a GPU (kernels can be lowered without one)."""
    return getattr(jax.devices()[0], "core_count", None) or SMS if jax.default_backend() == "gpu" else SMS


# --- the Mosaic kernels


@dataclass(frozen=True, slots=True)
class Product:
    """Shape of the grouped GEMM's kernel.

    A block of threads goes through consecutive tiles of `rows` rows and keeps the matrix of the current type in shared
    memory, so that matrices are read about once per block instead of once per tile. Without `specialized`, one
    warpgroup loads, multiplies and stores. With it, two warpgroups compute one half of the tile each (`split` says
    whether rows or columns), and a third warpgroup loads.
    """

    rows: int
    columns: int
    stages: int
    out_stages: int = 2
    blocks_per_sm: int = 1
    specialized: bool = False
    split: str = "rows"

    @property
    def name(self) -> str:
        how = f"2 warpgroups by {self.split}" if self.specialized else f"{self.blocks_per_sm} blocks an SM"
        return f"{self.rows} x {self.columns}, {self.stages} stages, {how}"


PRODUCTS = {
    64: (
        Product(128, 64, 3, blocks_per_sm=2),
        Product(64, 64, 3, blocks_per_sm=4),
        Product(256, 64, 4, specialized=True),
    ),
    128: (
        Product(64, 128, 3, blocks_per_sm=2),
        Product(128, 128, 4, specialized=True, split="columns"),
    ),
    256: (
        Product(64, 128, 3),
        Product(64, 256, 2, out_stages=1, specialized=True, split="columns"),
    ),
}


@dataclass(frozen=True, slots=True)
class Sums:
    """Shape of the reduction's kernel: sums per tile, tiles in flight, blocks of one warpgroup per SM."""

    segments: int
    stages: int
    blocks_per_sm: int

    @property
    def name(self) -> str:
        return f"{self.segments} sums a tile, {self.stages} stages, {self.blocks_per_sm} blocks an SM"


# Tiles of 32 and of 16 KiB (a sum of 1,024 columns reads 32), about 200 KiB of them in all.
SUMS = {
    256: (Sums(4, 3, 2), Sums(2, 3, 4)),
    512: (Sums(2, 3, 2), Sums(1, 3, 4)),
    1024: (Sums(1, 3, 2), Sums(1, 2, 3)),
}


def _compiler_params() -> Any:
    """Operations of whole warpgroups with inferred layouts in shared memory; the default since jax 0.11."""
    return plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def mosaic_product(
    x: jax.Array, w: jax.Array, tile_type: jax.Array, *, shape: Product, interpret: Any = None
) -> jax.Array:
    """Rows of each tile times the matrix of its type.

    Args:
      x: bfloat16[tiles * shape.rows, k].
      w: bfloat16[types, k, n].
      tile_type: int32[tiles].
      shape: shape of the kernel.
      interpret: parameters of Mosaic's interpreter.

    Returns:
      bfloat16[tiles * shape.rows, n].
    """
    (num_rows, k), n, tiles = x.shape, w.shape[2], tile_type.shape[0]
    columns_of_blocks = n // shape.columns
    blocks = min(num_sms() * shape.blocks_per_sm, tiles * columns_of_blocks)
    ranges = blocks // columns_of_blocks
    by_rows = shape.specialized and shape.split == "rows"
    by_columns = shape.specialized and shape.split == "columns"
    group_rows = shape.rows // 2 if by_rows else shape.rows
    group_columns = shape.columns // 2 if by_columns else shape.columns
    groups = 2 if shape.specialized else 1
    # Waits count groups of copies. The specialized pipeline closes an empty group of its own in each step,
    # which the interpreter does not count.
    groups_of_step = 2 if shape.specialized and interpret is None else 1

    def body(x_gmem: Any, w_gmem: Any, type_gmem: Any, y_gmem: Any, w_smem: Any, y_smem: Any, loaded: Any) -> None:
        block = lax.axis_index("block")
        # Neighbouring blocks share rows of x; each range of tiles has at least one.
        here, column = lax.div(block, columns_of_blocks), lax.rem(block, columns_of_blocks)
        first = lax.div(here * tiles, ranges)
        count = lax.div((here + 1) * tiles, ranges) - first
        group = lax.axis_index("warpgroup") if shape.specialized else 0
        row_in_tile = group * group_rows if by_rows else 0
        n_slice = pl.ds(column * shape.columns + (group * group_columns if by_columns else 0), group_columns)

        def step(indices: Any, x_smem: Any, carry: Any) -> Any:
            current, t = carry
            tile = first + indices[0]
            # Read one step ahead, so that no load waits for it.
            following = type_gmem[jnp.minimum(tile + 1, tiles - 1)]

            @pl.when(t != current)
            def load_matrix() -> None:
                plgpu.copy_gmem_to_smem(w_gmem.at[t, :, n_slice], w_smem.at[group], loaded.at[group])
                plgpu.barrier_wait(loaded.at[group])

            def multiply(total: Any) -> Any:
                plgpu.wgmma(total, x_smem.at[pl.ds(row_in_tile, group_rows)], w_smem.at[group])
                return total[...]

            y = pl.run_scoped(multiply, plgpu.ACC((group_rows, group_columns)))
            slot = lax.rem(indices[0], shape.out_stages)
            plgpu.wait_smem_to_gmem((shape.out_stages - 1) * groups_of_step, wait_read_only=True)
            y_smem[group, slot] = y.astype(y_smem.dtype)
            plgpu.commit_smem()
            start = tile * shape.rows + row_in_tile
            plgpu.copy_smem_to_gmem(y_smem.at[group, slot], y_gmem.at[pl.ds(start, group_rows), n_slice])
            return t, following

        spec = plgpu.BlockSpec((shape.rows, k), lambda i: (first + i, 0))
        start = (jnp.int32(-1), type_gmem[first])
        if shape.specialized:
            plgpu.emit_pipeline_warp_specialized(
                step,
                grid=(count,),
                in_specs=[spec],
                max_concurrent_steps=shape.stages,
                memory_registers=40,
                wg_axis="warpgroup",
                num_compute_wgs=2,
                compute_context=lambda pipeline: pipeline(start),
            )(x_gmem)
        else:
            plgpu.emit_pipeline(
                step, grid=(count,), in_specs=[spec], max_concurrent_steps=shape.stages, init_carry=start
            )(x_gmem)
        plgpu.wait_smem_to_gmem(0)

    threads = {"num_threads": 3, "thread_name": "warpgroup"} if shape.specialized else {}
    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows, n), x.dtype),
        scratch_types=[
            plgpu.SMEM((groups, k, group_columns), w.dtype),
            plgpu.SMEM((groups, shape.out_stages, group_rows, group_columns), x.dtype),
            plgpu.Barrier(num_barriers=groups),
        ],
        grid=(ranges * columns_of_blocks,),
        grid_names=("block",),
        compiler_params=_compiler_params(),
        interpret=interpret,
        kernel_name="mosaic_product",
        **threads,
    )(x, w, tile_type)


def mosaic_sums(x: jax.Array, *, shape: Sums, interpret: Any = None) -> jax.Array:
    """Sums over every `SEGMENT` rows of float32[rows, width]: float32[rows // SEGMENT, width]."""
    num_rows, width = x.shape
    part = min(width, 256)  # the most elements along one axis of a TMA copy
    parts = width // part
    tiles = num_rows // (shape.segments * SEGMENT)
    blocks = min(num_sms() * shape.blocks_per_sm, tiles)

    def body(x_gmem: Any, y_gmem: Any, y_smem: Any) -> None:
        block = lax.axis_index("block")
        first = lax.div(block * tiles, blocks)
        count = lax.div((block + 1) * tiles, blocks) - first

        def step(indices: Any, x_smem: Any) -> None:
            slot = lax.rem(indices[0], shape.stages)
            plgpu.wait_smem_to_gmem(shape.stages - 1, wait_read_only=True)
            for s in range(shape.segments):
                total = x_smem[s * SEGMENT]
                for row in range(1, SEGMENT):
                    total = total + x_smem[s * SEGMENT + row]
                y_smem[slot, s] = total
            plgpu.commit_smem()
            start = (first + indices[0]) * shape.segments
            plgpu.copy_smem_to_gmem(y_smem.at[slot], y_gmem.at[pl.ds(start, shape.segments)])

        spec = plgpu.BlockSpec((shape.segments * SEGMENT, parts, part), lambda i: (first + i, 0, 0))
        plgpu.emit_pipeline(step, grid=(count,), in_specs=[spec], max_concurrent_steps=shape.stages)(x_gmem)
        plgpu.wait_smem_to_gmem(0)

    sums = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((num_rows // SEGMENT, parts, part), x.dtype),
        scratch_types=[plgpu.SMEM((shape.stages, shape.segments, parts, part), x.dtype)],
        grid=(blocks,),
        grid_names=("block",),
        compiler_params=_compiler_params(),
        interpret=interpret,
        kernel_name="mosaic_sums",
    )(x.reshape(num_rows, parts, part))
    return sums.reshape(-1, width)


# --- the same by the Triton lowering


def triton_product(
    x: jax.Array,
    w: jax.Array,
    offsets: jax.Array,
    tile_type: jax.Array,
    tile_start: jax.Array,
    *,
    block: int,
    schedule: kernels.GemmSchedule | None,
) -> jax.Array:
    """`grouped_gemm` as a program of dejax calls it; its segments need not end with a tile."""
    groups = kernels.GemmGroups(offsets, tile_type, tile_start, block, x.shape[0])
    request = kernels.GroupedGemm(x, w, groups, output=kernels.GemmOutput(covers_all=True))
    return kernels.grouped_gemm(request, schedule=schedule)


def triton_traverse(x: jax.Array, offsets: jax.Array) -> jax.Array:
    """The sums by the traversal template, which reads the segments from a table of offsets."""
    (sums,), _ = kernels.traverse(
        lambda tile: ((tile,), ()),
        None,
        [x],
        [kernels.Operand("entry")],
        reductions=[kernels.Reduction("sum", (x.shape[1],))],
        segments=kernels.Segments(offsets=offsets, num_entries=x.shape[0], num_rows=offsets.shape[0] - 1),
    )
    return sums


def _sums_kernel(x: Any, y: Any, *, segments: int, width: int) -> None:
    (program,) = _triton.program_ids()
    segment = program * segments + lax.broadcasted_iota(jnp.int32, (segments, 1), 0)
    columns = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    total = _triton.load(x, (segment * SEGMENT, columns))
    for row in range(1, SEGMENT):
        total = total + _triton.load(x, (segment * SEGMENT + row, columns))
    _triton.store(y, (segment, columns), total)


def triton_sums(x: jax.Array, *, segments: int) -> jax.Array:
    """The result of `mosaic_sums`, by loads into registers."""
    rows, width = x.shape
    (sums,) = _triton.pallas_call(
        functools.partial(_sums_kernel, segments=segments, width=width),
        name="triton_sums",
        num_programs=rows // (SEGMENT * segments),
        out_shape=[jax.ShapeDtypeStruct((rows // SEGMENT, width), x.dtype)],
        num_warps=4,
        num_stages=1,
        interpret=_triton.use_interpreter(None),
    )(x)
    return sums


# --- and from XLA, in float32


def xla_product(x: jax.Array, w: jax.Array, unit_type: jax.Array) -> jax.Array:
    """float32[rows, n], some segments at a time."""
    steps = max(1, unit_type.shape[0] // 512)
    if unit_type.shape[0] % steps:
        steps = 1

    def step(part: tuple[jax.Array, jax.Array]) -> jax.Array:
        rows, types = part
        matrices = w[types].astype(jnp.float32)
        return jnp.einsum("urk,ukn->urn", rows.astype(jnp.float32), matrices, precision=lax.Precision.HIGHEST)

    y = lax.map(step, (x.reshape(steps, -1, UNIT, x.shape[1]), unit_type.reshape(steps, -1)))
    return y.reshape(x.shape[0], w.shape[2])


def xla_sums(x: jax.Array) -> jax.Array:
    return jnp.sum(x.reshape(-1, SEGMENT, x.shape[1]), axis=1)


# --- cases


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation: a function of some arrays of a case. `risk`, 0 to 2: of a fault that ends the program."""

    lowering: str
    name: str
    function: Callable[..., jax.Array]
    arguments: tuple[str, ...]
    risk: int = 0


@dataclass(frozen=True, slots=True)
class Case:
    """One shape: its arrays, the reference, and the implementations to compare."""

    name: str
    bytes: int
    dtype: str
    tables: dict[str, np.ndarray]
    floats: dict[str, tuple[int, ...]]
    reference: Kernel
    kernels: tuple[Kernel, ...]

    @property
    def floor_ms(self) -> float:
        return self.bytes / HBM * 1e3

    @property
    def elements(self) -> int:
        return sum(math.prod(shape) for shape in self.floats.values())

    def structs(self, kernel: Kernel) -> list[jax.ShapeDtypeStruct]:
        found = {key: jax.ShapeDtypeStruct(shape, self.dtype) for key, shape in self.floats.items()}
        found |= {key: jax.ShapeDtypeStruct(table.shape, table.dtype) for key, table in self.tables.items()}
        return [found[a] for a in kernel.arguments]

    def arrays(self, values: jax.Array) -> dict[str, jax.Array]:
        """The arrays by name. Float arrays are consecutive parts of `values`."""
        found, start = {key: jnp.asarray(table) for key, table in self.tables.items()}, 0
        for key, shape in self.floats.items():
            end = start + math.prod(shape)
            found[key] = values[start:end].reshape(shape).astype(self.dtype)
            start = end
        return found


def _interpreter() -> Any:
    """Parameters of the interpreter for Mosaic kernels without a GPU; None on a GPU."""
    if plgpu is None or jax.default_backend() == "gpu":
        return None
    private = "jax._src.pallas.mosaic_gpu.interpret.params"  # public from 0.12 on
    module = plgpu if hasattr(plgpu, "InterpretGPUParams") else importlib.import_module(private)
    return module.InterpretGPUParams(detect_races=True)


def segment_units(units: int, types: int) -> np.ndarray:
    """Number of units of `UNIT` rows of each type: skewed, some zero."""
    rng = np.random.default_rng(0)
    return rng.multinomial(units, rng.dirichlet(np.full(types, 0.7)))


def product_case(width: int, rows: int) -> Case:
    """The grouped GEMM from `width` to `width`."""
    units = segment_units(rows // UNIT, TYPES)
    block = kernels.gemm_block(width, width, rows, TYPES, "bf16")
    tables = {
        "offsets": np.concatenate([[0], np.cumsum(units) * UNIT]).astype(np.int32),
        "start": np.arange(0, rows, block, dtype=np.int32),
    }
    for size in {UNIT, block} | {shape.rows for shape in PRODUCTS[width]}:
        tables[f"type of {size} rows"] = np.repeat(np.arange(TYPES, dtype=np.int32), units * (UNIT // size))
    interpreter = _interpreter()
    found = []
    for schedule in (None, kernels.GemmSchedule(64, width, 8, 3)):
        name = f"grouped_gemm, {'heuristic schedule' if schedule is None else f'{block} x {width}, 8 warps'}"
        function = functools.partial(triton_product, block=block, schedule=schedule)
        arguments = ("x", "w", "offsets", f"type of {block} rows", "start")
        found.append(Kernel("triton", name, function, arguments))
    for shape in PRODUCTS[width]:
        product = functools.partial(mosaic_product, shape=shape, interpret=interpreter)
        arguments = ("x", "w", f"type of {shape.rows} rows")
        found.append(Kernel("mosaic", shape.name, product, arguments, risk=1 + shape.specialized))
    return Case(
        name=f"grouped GEMM, {rows:,} rows, {TYPES} types, {width} to {width}, bf16",
        bytes=2 * (2 * rows * width + TYPES * width * width),
        dtype="bfloat16",
        tables=tables,
        floats={"x": (rows, width), "w": (TYPES, width, width)},
        reference=Kernel("xla", "float32", xla_product, ("x", "w", f"type of {UNIT} rows")),
        kernels=tuple(found),
    )


def sums_case(width: int, num_bytes: int) -> Case:
    """Sums of every `SEGMENT` rows of `width`."""
    rows = num_bytes // 4 // width
    segments = max(1, 1024 // width)
    interpreter = _interpreter()
    found = [
        Kernel("xla", "reshape and sum", xla_sums, ("x",)),
        Kernel("triton", "traverse", triton_traverse, ("x", "offsets")),
        Kernel("triton", f"{segments} sums a program", functools.partial(triton_sums, segments=segments), ("x",)),
    ]
    for shape in SUMS[width]:
        sums = functools.partial(mosaic_sums, shape=shape, interpret=interpreter)
        found.append(Kernel("mosaic", shape.name, sums, ("x",), risk=1))
    return Case(
        name=f"sums of {SEGMENT} rows, {rows:,} rows of {width}, f32",
        bytes=num_bytes + num_bytes // SEGMENT,
        dtype="float32",
        tables={"offsets": np.arange(0, rows + 1, SEGMENT, dtype=np.int32)},
        floats={"x": (rows, width)},
        reference=Kernel("xla", "float32", xla_sums, ("x",)),
        kernels=tuple(found),
    )


# --- running them


@dataclass(frozen=True, slots=True)
class Job:
    """A compiled implementation of a case with its arguments."""

    case: Case
    kernel: Kernel
    executable: Any
    arrays: dict[str, jax.Array]
    reference: Any


def lower(case: Case, kernel: Kernel) -> Any:
    """The lowered function, or the error that it raised."""
    try:
        if kernel.lowering == "mosaic" and plgpu is None:
            raise ImportError(MOSAIC_ERROR)
        return jax.jit(kernel.function).lower(*case.structs(kernel))
    except Exception as error:
        return error


def compiled(lowered: Any) -> Any:
    """The executable, or the error that lowering or compiling raised."""
    try:
        return lowered if isinstance(lowered, Exception) else lowered.compile()
    except Exception as error:
        return error


def call(executable: Any, kernel: Kernel, arrays: dict[str, jax.Array]) -> jax.Array:
    if isinstance(executable, Exception):
        raise executable
    return executable(*(arrays[a] for a in kernel.arguments))


def reference_of(case: Case, executable: Any, arrays: dict[str, jax.Array]) -> Any:
    """The reference's result, or the error that it raised."""
    try:
        return jax.block_until_ready(call(executable, case.reference, arrays))
    except Exception as error:
        return error


@jax.jit
def relative_error(y: jax.Array, reference: jax.Array) -> jax.Array:
    """Largest difference over the largest element; NaN if there is a NaN."""
    difference = jnp.max(jnp.abs(y.astype(jnp.float32) - reference))
    return difference / jnp.max(jnp.abs(reference))


def run_job(job: Job) -> dict[str, Any]:
    """Checks one implementation and then times it."""
    row: dict[str, Any] = {"lowering": job.kernel.lowering, "kernel": job.kernel.name}
    try:
        if isinstance(job.reference, Exception):
            raise job.reference
        y = call(job.executable, job.kernel, job.arrays)
        row["error"] = float(relative_error(y, job.reference))
        if not row["error"] <= TOLERANCE[job.case.dtype]:
            raise ValueError(f"wrong result: relative error {row['error']:.2e}")
        if jax.default_backend() == "gpu":
            measured = profile_jax(lambda: call(job.executable, job.kernel, job.arrays), CALLS)
            row["device"] = None if measured is None else measured.as_dict()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        row["failed"] = f"{type(error).__name__}: {lines[0][:300]}"
    return row


def prepare(cases: Sequence[Case]) -> list[Job]:
    """Compiles all implementations in parallel. Jobs with the least risk come first: a fault loses the GPU."""
    pairs = [(case, kernel) for case in cases for kernel in (case.reference, *case.kernels)]
    lowered = [lower(case, kernel) for case, kernel in pairs]  # one by one, since Mosaic's lowering has global state
    with ThreadPoolExecutor(COMPILERS) as pool:
        executables = iter(list(pool.map(compiled, lowered)))
    elements = max(case.elements for case in cases)
    values = jax.jit(lambda key: jax.random.normal(key, (elements,), jnp.bfloat16))(jax.random.key(0))
    jobs = []
    for case in cases:
        arrays = case.arrays(values)
        reference = reference_of(case, next(executables), arrays)
        jobs += [Job(case, kernel, next(executables), arrays, reference) for kernel in case.kernels]
    return sorted(jobs, key=lambda job: job.kernel.risk)


def summary(case: Case, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The JSON entry of a case."""

    def best(lowering: str) -> float | None:
        return min(
            (r["device"]["span_ms"] for r in rows if r["lowering"] == lowering and r.get("device")), default=None
        )

    found = {lowering: best(lowering) for lowering in ("mosaic", "triton", "xla")}
    mosaic, triton = found["mosaic"], found["triton"]
    return {
        "bytes": case.bytes,
        "floor_ms": case.floor_ms,
        "best_ms": found,
        "mosaic_over_triton": mosaic / triton if mosaic and triton else None,
        "kernels": list(rows),
    }


def line(row: dict[str, Any], floor_ms: float) -> str:
    """One implementation as a line of the table."""
    text = f"  {row['lowering']:<8}{row['kernel']:<48}"
    if row.get("device"):
        ms = row["device"]["span_ms"]
        text += f"{ms:8.3f} ms {ms / floor_ms:6.2f} x floor  {row['device']['launches']:.0f} launches"
    return text + (f"  {row['failed']}" if "failed" in row else f"  error {row['error']:.1e}")


def table(cells: dict[str, Any]) -> str:
    lines = []
    for name, cell in cells.items():
        lines.append(f"{name}: floor {cell['floor_ms']:.3f} ms")
        lines += [line(row, cell["floor_ms"]) for row in cell["kernels"]]
        if cell["mosaic_over_triton"] is not None:
            lines.append(f"  best of Mosaic over best of Triton: {cell['mosaic_over_triton']:.3f}")
    return "\n".join(lines)


def output_path(folder: Path, device: str) -> Path:
    slug = re.sub(r"nvidia|geforce", "", device.lower()).strip().replace(" ", "_")
    return folder / f"mosaic_trial_{slug}.json"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--widths", default=",".join(map(str, PRODUCTS)), help="widths of the grouped GEMM; empty for none"
    )
    parser.add_argument("--sums", default=",".join(map(str, SUMS)), help="widths of the sums; empty for none")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"rows of the grouped GEMM, a multiple of {UNIT}")
    parser.add_argument("--bytes", type=int, default=SUMS_BYTES, help=f"that a sum reads, a multiple of {SUMS_UNIT}")
    parser.add_argument("--limit", type=float, default=120, help="seconds after which the program ends itself")
    parser.add_argument("--out", type=Path, default=None, help="folder for the JSON")
    args = parser.parse_args(arguments)
    chosen = []
    for name, text, known in (("--widths", args.widths, PRODUCTS), ("--sums", args.sums, SUMS)):
        chosen.append([int(w) for w in text.split(",") if w.strip().isdecimal()])
        if not set(filter(None, text.split(","))) <= set(map(str, known)):
            parser.error(f"{name} must be among {', '.join(map(str, known))}, got {text!r}")
    if args.rows <= 0 or args.rows % UNIT:
        parser.error(f"--rows must be a positive multiple of {UNIT}, got {args.rows}")
    if args.bytes <= 0 or args.bytes % SUMS_UNIT:
        parser.error(f"--bytes must be a positive multiple of {SUMS_UNIT}, got {args.bytes}")
    cases = [product_case(w, args.rows) for w in chosen[0]] + [sums_case(w, args.bytes) for w in chosen[1]]
    if not cases:
        parser.error("--widths and --sums are both empty: nothing to run")

    faulthandler.dump_traceback_later(args.limit, exit=True, file=sys.__stderr__)  # a kernel may wait forever
    try:
        return run(cases, args.out)
    finally:
        faulthandler.cancel_dump_traceback_later()


def run(cases: Sequence[Case], out: Path | None) -> dict[str, Any]:
    """Runs all cases, prints the table and writes the JSON."""
    start = time.perf_counter()
    device = jax.devices()[0].device_kind
    cells = {case.name: summary(case, []) for case in cases}
    results = {"types": TYPES, "segment": SEGMENT, "cells": cells}
    jobs = prepare(cases)
    print(f"{len(jobs)} kernels compiled, {time.perf_counter() - start:.1f} s", flush=True)
    for job in jobs:
        row = run_job(job)
        print(line(row, job.case.floor_ms), flush=True)
        cells[job.case.name] = summary(job.case, [*cells[job.case.name]["kernels"], row])
        if out is not None:  # after each kernel: the next one may end the program
            save(output_path(out, device), results)
    print(f"\n{table(cells)}\n{time.perf_counter() - start:.1f} s in all")
    return results


if __name__ == "__main__":
    main()
