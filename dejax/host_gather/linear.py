"""`typed_linear`: rows of a table times the matrix of their type, read inside the kernel that multiplies them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat
from dejax.host_gather import _types
from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._operands import ReadableTable, operands_of
from dejax.host_gather._recording import is_recorded
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.gather import gather
from dejax.host_gather.table import HostTable

_PRECISIONS = ("tf32", "f32", "bf16")


def typed_linear(
    table: ReadableTable,
    ids: ArrayLike,
    types: ArrayLike,
    w: Array,
    *,
    precision: str = "tf32",
    out_dtype: Any = None,
) -> Array:
    """`table[ids[i]] @ w[types[i]]` for each i: the first grouped GEMM of a relational layer, without a gathered copy.

    On a GPU the kernel of `dejax.pallas.grouped_gemm` reads its rows from host memory, ordered by type and then by row.
    It reads a row once for each id; if several ids name a row, `gather` distinct rows and multiply those. It does not
    use the cache of a `CachedTable`. On the CPU, rows are gathered and multiplied by XLA.

    The gradient of `w` reads the rows a second time. The table has no gradient, except under
    `host_gather.value_and_grad`, where rows are gathered and kept.

    Args:
        table: HostTable or CachedTable [rows, k] of float32, bfloat16 or float16.
        ids: int[n]; an id out of range means a row of zeros.
        types: int[n], the type of each id; a type out of range gives zeros.
        w: float[types, k, m].
        precision: of float32 products on a GPU: `tf32`, `f32` or `bf16`.
        out_dtype: of the result; by default the promoted dtype of the table and `w`.

    Returns:
        [n, m].

    Raises:
        TypeError: ids or types that are no integers, rows of another dtype.
        ValueError: an unknown precision; shapes that do not fit each other; more than 2^31 - 1 rows.

    >>> table = HostTable.from_numpy(np.array([[1.0, 2.0], [3.0, 4.0]], np.float32))
    >>> w = jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> typed_linear(table, np.array([1, 0, 1]), np.array([0, 1, 1]), w)
    Array([[ 3.,  4.],
           [10., 20.],
           [30., 40.]], dtype=float32)
    """
    operands = operands_of("typed_linear", table)
    spec, w = operands.spec.plain, jnp.asarray(w)
    ids, types = _checked(spec, ids, types, w, precision)
    static = _Static(spec, precision, jnp.dtype(out_dtype or jnp.promote_types(spec.dtype, w.dtype)))
    groups = _grouped(ids, types, spec.rows, w.shape[0])
    in_kernel = spec.platform == "cuda" and not spec.is_split and not is_recorded(operands.spec)
    if in_kernel and min(ids.size, spec.rows, *w.shape):
        # Jitted also when called eagerly: jax would take the operands of an eager kernel for arrays on the device.
        return _compiled(static, *_compat.varying_alike((operands.leaf, *groups, w)))
    return _by_xla(table, static, groups, w)


@dataclasses.dataclass(frozen=True, slots=True)
class _Static:
    """The static part of a product in the kernel."""

    spec: TableSpec
    precision: str
    out_dtype: np.dtype


def _checked(spec: TableSpec, ids: Any, types: Any, w: Array, precision: str) -> tuple[Array, Array]:
    """Ids and types as integer arrays of one shape [n]."""
    if precision not in _PRECISIONS:
        raise ValueError(f"typed_linear: `precision` must be one of {_PRECISIONS}, got {precision!r}")
    if len(spec.row) != 1 or spec.dtype.name not in _types.RESULT_CODES:
        raise TypeError(
            f"typed_linear: `table` must be [rows, k] of float32, bfloat16 or float16, got shape {spec.shape} of "
            f"{spec.dtype}; gather with `out_dtype` and multiply the rows"
        )
    if w.ndim != 3 or w.shape[1] != spec.row[0]:
        raise ValueError(f"typed_linear: `w` must be [types, {spec.row[0]}, m], got {w.shape}")
    ids = checked_ids("typed_linear", ids, spec.rows)
    types = checked_ids("typed_linear", types, w.shape[0], "types")
    if ids.ndim != 1 or types.shape != ids.shape:
        raise ValueError(f"typed_linear: `ids` and `types` must be [n], got {ids.shape} and {types.shape}")
    if spec.rows >= 2**31:
        raise ValueError(f"typed_linear: the table must have at most 2^31 - 1 rows, got {spec.rows}; gather the rows")
    return ids, types


def _grouped(ids: Array, types: Array, rows: int, num_types: int) -> tuple[Array, Array, Array]:
    """Sorts ids by type, then by row.

    Returns:
        int32[n] the row of each sorted position, -1 for none; int32[n] the result row of each; int32[num_types + 1] the
        first position of each type. Positions without a row or a type come last, after the end of the last type.
    """
    kept = in_range(ids, rows) & in_range(types, num_types)
    key = jnp.where(kept, types, num_types).astype(jnp.int32)
    row = jnp.where(kept, ids, -1).astype(jnp.int32)
    key, row, order = jax.lax.sort((key, row, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=2)
    offsets = jnp.searchsorted(key, jnp.arange(num_types + 1, dtype=jnp.int32), method="scan_unrolled").astype(
        jnp.int32
    )
    return row, order, offsets


def _by_xla(table: ReadableTable, static: _Static, groups: tuple[Array, Array, Array], w: Array) -> Array:
    row, order, offsets = groups
    rows = gather(table, row)
    wide = jnp.promote_types(rows.dtype, w.dtype)
    exact = jax.lax.Precision.HIGHEST if static.precision == "f32" else None
    product = jax.lax.ragged_dot(rows.astype(wide), w.astype(wide), jnp.diff(offsets), precision=exact)
    product = jnp.where((row >= 0)[:, None], product, 0).astype(static.out_dtype)
    return jnp.zeros_like(product).at[order].set(product, unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _in_kernel(static: _Static, leaf: Array, row: Array, order: Array, offsets: Array, w: Array) -> Array:
    from dejax import pallas  # imported on first use: Triton's lowering is slow to import

    n, (types, k, m) = row.size, w.shape
    block = pallas.gemm_block(k, m, n, types, static.precision)
    counts = jnp.diff(offsets)
    tiles = (counts + block - 1) // block
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(n // block + types, dtype=jnp.int32)
    tile_type = jnp.minimum(jnp.searchsorted(end, number, side="right", method="scan_unrolled"), types - 1).astype(
        jnp.int32
    )
    # A tile beyond the last one begins at the end of its type, and is unused.
    tile_start = offsets[tile_type] + (number - (end - tiles)[tile_type]) * block
    request = pallas.GroupedGemm(
        pallas.FloatBits.of(leaf, static.spec.dtype),
        w,
        pallas.GemmGroups(offsets, tile_type, tile_start.astype(jnp.int32), block, n),
        x_index=row,
        output=pallas.GemmOutput(index=order, dtype=static.out_dtype),
        precision=static.precision,
    )
    return pallas.grouped_gemm(request, interpret=False)


def _forward(
    static: _Static, leaf: Array, row: Array, order: Array, offsets: Array, w: Array
) -> tuple[Array, tuple[Array, ...]]:
    kept = (leaf, row, order, offsets, jnp.zeros((0,), w.dtype))  # the gradient of `w` needs only its dtype
    return _in_kernel(static, leaf, row, order, offsets, w), kept


def _backward(static: _Static, kept: tuple[Array, ...], cotangent: Array) -> tuple[Any, ...]:
    from dejax import pallas

    leaf, row, order, offsets, like = kept
    rows = gather(HostTable(leaf, static.spec), row)
    request = pallas.GroupedWeightGradient(
        rows, cotangent, offsets, row.size, y_index=order, precision=static.precision, dtype=like.dtype
    )
    gradient = pallas.grouped_weight_gradient(request, interpret=False)
    nothing = (np.zeros(x.shape, jax.dtypes.float0) for x in (leaf, row, order, offsets))
    return (*nothing, gradient)


_in_kernel.defvjp(_forward, _backward)
_compiled = jax.jit(_in_kernel, static_argnums=0)
