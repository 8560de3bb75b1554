"""The magnitudes of the columns of arrays, as powers of two: one small kernel for all arrays of a program.

Row-scaled float16 and products in float16 divide columns by these (`row_scaled`). The powers are estimates from some
elements of each column. An estimate that is wrong by a factor of some thousands costs no digits.

Contract test: `tests/pallas/test_column_powers.py`, against maxima of numpy.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from dejax.pallas import _triton
from dejax.pallas._shapes import divide, lanes, next_power_of_two
from dejax.pallas._tiles import where
from dejax.pallas.formats.row_scaled import finite_magnitude, powers_of, powers_of_tile, whole_max

# Elements that a program reads: fewer where neighbours belong to one column, because each is then a memory sector of
# its own.
_ELEMENTS, _ELEMENTS_APART = 16384, 2048
_TOGETHER = 8  # float32 elements of a memory sector
MAX_COLUMNS = 4096  # that a program holds
_WARPS = 8


@dataclass(frozen=True, slots=True)
class _Request:
    """Static facts of one array: which of its axes are columns, and which elements of each column are read."""

    shape: tuple[int, ...]
    kept: tuple[int, ...]

    @property
    def columns(self) -> int:
        return math.prod(self.shape[a] for a in self.kept)

    @property
    def reduced(self) -> tuple[int, ...]:
        return tuple(a for a in range(len(self.shape)) if a not in self.kept)

    @property
    def size(self) -> int:
        """Elements of a column."""
        return math.prod(self.shape[a] for a in self.reduced)

    @property
    def together(self) -> int:
        """Elements of a column that are read side by side."""
        return 1 if len(self.shape) - 1 in self.kept or self.shape[-1] < _TOGETHER else _TOGETHER

    @property
    def sample(self) -> int:
        """Elements of a column that are read."""
        most = _ELEMENTS if self.together == 1 else _ELEMENTS_APART
        return min(next_power_of_two(self.size), max(most // next_power_of_two(self.columns), self.together))

    def offsets(self, index: jax.Array, axes: tuple[int, ...]) -> list[tuple[int, jax.Array]]:
        """The index of each of `axes`, for a flat index over them."""
        found = []
        for a in reversed(axes):
            index, here = divide(index, self.shape[a])
            found.append((a, here))
        return found


def column_powers(
    requests: Sequence[tuple[jax.Array, tuple[int, ...]]], *, interpret: bool | None = None
) -> list[tuple[jax.Array, jax.Array]]:
    """A power of two near the largest magnitude of each column.

    Args:
      requests: arrays, each with the axes that make its columns, in the order of the result.
      interpret: run the kernel interpreted; by default where there is no GPU.

    Returns:
      For each request float32[columns] and the same as bfloat16, powers of two from 2^-126 to 2^126. A column of which
      only zeros were read has the largest power of all columns, or 1 if all elements that were read are zeros.
      Infinities and NaN are left out.
    """
    found: dict[int, tuple[jax.Array, jax.Array]] = {}
    in_kernel: list[int] = []
    described = [_Request(array.shape, kept) for array, kept in requests]
    for i, ((array, _), request) in enumerate(zip(requests, described, strict=True)):
        if array.size and request.columns <= MAX_COLUMNS:
            in_kernel.append(i)
        elif array.size:
            largest = jnp.max(finite_magnitude(array), axis=request.reduced)
            order = [sorted(request.kept).index(a) for a in request.kept]
            powers = powers_of(jnp.transpose(largest, order).reshape(-1))
            found[i] = powers, powers.astype(jnp.bfloat16)
        else:
            found[i] = jnp.ones((request.columns,), jnp.float32), jnp.ones((request.columns,), jnp.bfloat16)
    if in_kernel:
        chosen = [described[i] for i in in_kernel]
        results = _triton.pallas_call(
            functools.partial(_kernel, requests=tuple(chosen)),
            name="column_powers",
            num_programs=len(chosen),
            out_shape=[
                jax.ShapeDtypeStruct((r.columns,), jnp.dtype(dtype))
                for dtype in (jnp.float32, jnp.bfloat16)
                for r in chosen
            ],
            num_warps=_WARPS,
            num_stages=1,
            interpret=_triton.use_interpreter(interpret),
        )(*(lax.stop_gradient(requests[i][0]) for i in in_kernel))
        n = len(in_kernel)
        found.update(zip(in_kernel, zip(results[:n], results[n:], strict=True), strict=True))
    return [found[i] for i in range(len(requests))]


def _kernel(*refs: Any, requests: tuple[_Request, ...]) -> None:
    (program,) = _triton.program_ids()
    n = len(requests)
    for i, request in enumerate(requests):
        one = functools.partial(_measure, refs[i], (refs[n + i], refs[2 * n + i]), request)
        if n == 1:
            one()
        else:
            _triton.when(program == i, one)


def _measure(array: Any, powers: tuple[Any, Any], r: _Request) -> None:
    column = lanes(next_power_of_two(r.columns), 1, 2)
    entry = lanes(r.sample, 0, 2)
    if r.size > r.sample:  # evenly spread, some of them side by side
        group, within_group = divide(entry, r.together)
        stride = np.float32((r.size // r.together - 1) / max(r.sample // r.together - 1, 1))
        entry = (group.astype(jnp.float32) * stride).astype(jnp.int32) * r.together + within_group
    inside = (column < r.columns) & (entry < r.size)
    at = dict(r.offsets(column, r.kept) + r.offsets(entry, r.reduced))
    index = tuple(at[a] for a in range(len(r.shape)))
    magnitude = finite_magnitude(_triton.load(array, index, inside))
    largest = lax.expand_dims(lax.reduce_max(magnitude, (0,)), (0,))
    found = powers_of_tile(largest, whole_max(largest))
    for ref in powers:
        _triton.store(ref, (where(column < r.columns, column, r.columns),), found, column < r.columns)
