"""Where the segments of sorted ids begin: one kernel, a binary search for each segment."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, lanes
from dejax.pallas._tiles import both, broadcast, where

# Neighbouring segments are searched by one program: they read the same ids until the last steps.
_BLOCK = 256


def segment_offsets(sorted_ids: jax.Array, num_segments: int, *, interpret: bool | None = None) -> jax.Array:
    """Where each segment begins among sorted ids.

    Args:
      sorted_ids: int32[entries], ascending; ids outside of the segments are allowed.
      num_segments: number of segments.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      int32[num_segments + 1]: entry i is the number of ids below i.
    """
    entries = sorted_ids.shape[0]
    if entries == 0:
        return jnp.zeros(num_segments + 1, jnp.int32)
    (found,) = _triton.pallas_call(
        functools.partial(_search, entries=entries, queries=num_segments + 1),
        name="segment_offsets",
        num_programs=cdiv(num_segments + 1, _BLOCK),
        out_shape=[jax.ShapeDtypeStruct((num_segments + 1,), jnp.dtype(jnp.int32))],
        num_warps=4,
        num_stages=1,
        interpret=_triton.use_interpreter(interpret),
    )(sorted_ids)
    return found


def _search(ids: Any, out: Any, *, entries: int, queries: int) -> None:
    (program,) = _triton.program_ids()
    query = lax.add(lax.mul(program, np.int32(_BLOCK)), lanes(_BLOCK, 0, 1))
    inside = lax.lt(query, np.int32(queries))

    def halve(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        # The sum of two int32 may overflow; their difference does not.
        middle = lax.add(low, lax.div(lax.sub(high, low), np.int32(2)))
        open_ = lax.lt(low, high)
        below = both(open_, lax.lt(_triton.load(ids, (middle,), both(inside, open_)), query))
        stay = lax.bitwise_or(below, lax.bitwise_not(open_))
        return where(below, lax.add(middle, np.int32(1)), low), where(stay, high, middle)

    first = broadcast(lax.full((1,), np.int32(0)), (_BLOCK,)), broadcast(lax.full((1,), np.int32(entries)), (_BLOCK,))
    low, _ = _triton.fori_loop(np.int32(0), np.int32(entries.bit_length()), halve, first)
    _triton.store(out, (where(inside, query, np.int32(queries)),), low, inside)
