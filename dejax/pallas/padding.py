"""Zeros in padding rows of arrays, in place.

A kernel that writes the valid rows only would need zeros in the whole array beforehand, which is as many bytes as the
result. This writes the padding rows alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import cdiv, lanes, next_power_of_two
from dejax.pallas._tiles import both, broadcast, steps, where
from dejax.pallas.machine import machine

# Elements that a program sets in a step, and the most elements of a row among them.
_TILE, _MOST_COLUMNS = 4096, 1024
# Programs on a multiprocessor: stores of this many programs fill the memory's queues.
_PROGRAMS = 8


def clear_rows(
    arrays: Sequence[jax.Array], offsets: Any, *, order: Any = None, interpret: bool | None = None
) -> list[jax.Array]:
    """The arrays with zeros in the rows at positions from `offsets[-1]` on, by one kernel. It touches no other rows.

    Args:
      arrays: [rows, *features] each, of which the rows at these positions may hold anything.
      offsets: int32[segments + 1], whose last element is the number of valid positions.
      order: int32[positions], the row at each position; None where rows are in order. Rows that the arrays do not have
        are left out.
      interpret: run the kernel interpreted; by default where there is no GPU.

    >>> clear_rows([jnp.ones((4, 2))], jnp.array([0, 3]), interpret=True)[0][:, 0]
    Array([1., 1., 1., 0.], dtype=float32)
    """
    rows = arrays[0].shape[0]
    flat = [x.reshape(rows, math.prod(x.shape[1:])) for x in arrays]
    some = [i for i, x in enumerate(flat) if x.shape[1]]
    if not rows or not some:
        return list(arrays)
    widths = tuple(flat[i].shape[1] for i in some)
    columns = min(next_power_of_two(max(widths)), _MOST_COLUMNS)
    height, parts = _TILE // columns, cdiv(max(widths), columns)
    positions = rows if order is None else order.shape[0]
    programs = min(cdiv(positions, height), cdiv(_PROGRAMS * machine().multiprocessors, parts))
    tables = [offsets] if order is None else [offsets, order]
    cleared = _triton.pallas_call(
        functools.partial(
            _kernel, programs=programs, positions=positions, rows=rows, widths=widths, height=height, columns=columns
        ),
        name="clear_rows",
        num_programs=programs * parts,
        out_shape=[jax.ShapeDtypeStruct(flat[i].shape, flat[i].dtype) for i in some],
        aliases={len(tables) + n: n for n in range(len(some))},
        num_warps=4,
        num_stages=1,
        interpret=_triton.use_interpreter(interpret),
    )(*tables, *(flat[i] for i in some))
    found = dict(zip(some, cleared, strict=True))
    return [found[i].reshape(x.shape) if i in found else x for i, x in enumerate(arrays)]


def _kernel(
    *refs: Any, programs: int, positions: int, rows: int, widths: tuple[int, ...], height: int, columns: int
) -> None:
    """Writes zeros into the rows of each array from the last offset on; with an index, into the rows that it names."""
    offsets, outs = refs[0], refs[-len(widths) :]  # before them come references to the same memory
    block, part = _triton.program_ids(cdiv(max(widths), columns))
    last = _triton.load(offsets, (lanes(1, 0, 2) + (offsets.shape[0] - 1),))
    valid = lax.clamp(np.int32(0), last.reshape(()), np.int32(positions))
    tiles = steps(np.int32(positions) - valid, height)

    def clear(n: jax.Array, _: None) -> None:
        row = valid + (block + n * programs) * height + lanes(height, 0, 2)  # the position, first
        padding = row < positions
        if len(refs) > 1 + 2 * len(widths):
            row = _triton.load(refs[1], (row,), padding)
            padding = both(padding, row < rows) if rows < positions else padding
        for out, width in zip(outs, widths, strict=True):
            size = min(columns, next_power_of_two(width))
            column = part * size + lanes(size, 1, 2)
            mask = both(padding, column < width)
            place = where(mask, row, rows), broadcast(column, (height, size))
            _triton.store(out, place, jnp.zeros((height, size), out.dtype), mask)

    _triton.fori_loop(np.int32(0), steps(lax.max(tiles - block, np.int32(0)), programs), clear, None)
