"""Two kernels that gather rows, in Triton's own language, called through jax-triton (`jax_triton_trial.py`)."""

from __future__ import annotations

from typing import Any

import jax
import triton
import triton.language as tl
from triton.backends.nvidia import driver

# triton 3.6 lacks it. jax-triton 0.4.1 imports it for tensor descriptors, which these kernels do not use.
driver.TMA_TF32 = getattr(driver, "TMA_TF32", 0)

import jax_triton  # noqa: E402

VERSIONS = {"jax_triton": jax_triton.__version__, "triton": triton.__version__}


@triton.jit
def _product(x, rows, w, types, y, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    tile = tl.program_id(0)
    position = tile * BLOCK + tl.arange(0, BLOCK)
    features = tl.arange(0, WIDTH)
    row = tl.load(rows + position)
    left = tl.load(x + row[:, None] * WIDTH + features[None, :])
    matrix = tl.load(types + tile) * WIDTH * WIDTH
    right = tl.load(w + matrix + features[:, None] * WIDTH + features[None, :])
    out = tl.dot(left, right, input_precision="tf32")
    tl.store(y + position[:, None] * WIDTH + features[None, :], out)


@triton.jit
def _sums(x, rows, offsets, y, SEGMENTS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    segment = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = segment < SEGMENTS
    features = tl.arange(0, WIDTH)
    start = tl.load(offsets + segment, mask=inside, other=0)
    length = tl.load(offsets + segment + 1, mask=inside, other=0) - start
    total = tl.zeros((BLOCK, WIDTH), tl.float32)
    for at in range(tl.max(length, 0)):
        here = at < length
        row = tl.load(rows + start + at, mask=here, other=0)
        total += tl.load(x + row[:, None] * WIDTH + features[None, :], mask=here[:, None], other=0.0)
    tl.store(y + segment[:, None] * WIDTH + features[None, :], total, mask=inside[:, None])


def product(x: Any, rows: Any, w: Any, types: Any, *, block: int, warps: int, stages: int) -> jax.Array:
    """Rows `rows` of `x` times the matrix of their tile's type."""
    out = jax.ShapeDtypeStruct((rows.shape[0], x.shape[1]), x.dtype)
    found: jax.Array = jax_triton.triton_call(
        x,
        rows,
        w,
        types,
        kernel=_product,
        out_type=out,
        grid=(rows.shape[0] // block,),
        num_warps=warps,
        num_stages=stages,
        WIDTH=x.shape[1],
        BLOCK=block,
    )
    return found


def sums(x: Any, rows: Any, offsets: Any, *, block: int, warps: int) -> jax.Array:
    """Sums over the segments of the rows `rows` of `x`."""
    segments = offsets.shape[0] - 1
    found: jax.Array = jax_triton.triton_call(
        x,
        rows,
        offsets,
        kernel=_sums,
        out_type=jax.ShapeDtypeStruct((segments, x.shape[1]), x.dtype),
        grid=(-(-segments // block),),
        num_warps=warps,
        num_stages=1,
        SEGMENTS=segments,
        WIDTH=x.shape[1],
        BLOCK=block,
    )
    return found
