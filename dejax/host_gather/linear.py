"""`typed_linear`: rows of a table times the matrix of their type, read inside the kernel that multiplies them."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather import _types
from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._recording import recorded
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.gather import gather, parts
from dejax.host_gather.table import HostTable

_PRECISIONS = ("tf32", "f32", "bf16")


def typed_linear(
    table: HostTable | CachedTable,
    ids: ArrayLike,
    types: ArrayLike,
    w: Array,
    *,
    precision: str = "tf32",
    out_dtype: Any = None,
) -> Array:
    """`table[ids[i]] @ w[types[i]]` for each i: a relational layer's first product, without a gathered copy.

    On a GPU the kernel of `dejax.pallas.grouped_gemm` reads its rows from host memory itself, type by type and within a
    type by ascending row. It reads a row once for each id: where several ids name a row, `gather` distinct rows and
    multiply those. It reads rows that a `CachedTable` has on the device from host memory, too. Elsewhere rows are
    gathered and multiplied by XLA.

    The gradient of `w` reads the rows a second time. The table has none, except under `host_gather.value_and_grad`,
    where rows are gathered and kept.

    Args:
        table: HostTable or CachedTable [rows, k] of float32, bfloat16 or float16.
        ids: int[n]; one out of range is a row of zeros.
        types: int[n], the type of each id; one out of range gives zeros.
        w: float[types, k, m].
        precision: of float32 products on a GPU: `tf32`, `f32` or `bf16`.
        out_dtype: of the result; by default what the table and `w` promote to.

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
    host, _, _ = parts("typed_linear", table)
    leaf, spec = host._operand("typed_linear"), host._spec.plain
    if precision not in _PRECISIONS:
        raise ValueError(f"typed_linear: `precision` must be one of {_PRECISIONS}, {precision!r} was given")
    w = jnp.asarray(w)
    if len(spec.row) != 1 or spec.dtype.name not in _types.RESULT_CODES:
        raise TypeError(
            f"typed_linear: a table [rows, k] of float32, bfloat16 or float16 is needed, not {table!r}; gather with "
            "`out_dtype` and multiply the rows"
        )
    if w.ndim != 3 or w.shape[1] != spec.row[0]:
        raise ValueError(f"typed_linear: `w` must be [types, {spec.row[0]}, m], {w.shape} was given")
    ids = checked_ids("typed_linear", ids, spec.rows)
    types = checked_ids("typed_linear", types, w.shape[0], "types")
    if ids.ndim != 1 or types.shape != ids.shape:
        raise ValueError(f"typed_linear: `ids` and `types` must be [n], {ids.shape} and {types.shape} were given")
    if spec.rows >= 2**31:
        raise ValueError(f"typed_linear: the table has {spec.rows} rows, 2^31 - 1 is the most; gather the rows")
    dtype = jnp.dtype(out_dtype or jnp.promote_types(spec.dtype, w.dtype))
    # Rows that are not there, and types that are not there, come last and are left out.
    kept = in_range(ids, spec.rows) & in_range(types, w.shape[0])
    key = jnp.where(kept, types, w.shape[0]).astype(jnp.int32)
    row = jnp.where(kept, ids, -1).astype(jnp.int32)
    key, row, order = jax.lax.sort((key, row, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=2)
    offsets = jnp.searchsorted(key, jnp.arange(w.shape[0] + 1, dtype=jnp.int32)).astype(jnp.int32)
    if spec.platform == "cuda" and not recorded(host) and min(ids.size, spec.rows, *w.shape):
        # Compiled as one also outside of jit, where jax would take the kernel's operands for arrays of the device.
        return _compiled(spec, precision, dtype, leaf, row, order, offsets, w)
    rows = gather(table, row)
    wide = jnp.promote_types(rows.dtype, w.dtype)
    exact = jax.lax.Precision.HIGHEST if precision == "f32" else None
    product = jax.lax.ragged_dot(rows.astype(wide), w.astype(wide), jnp.diff(offsets), precision=exact)
    product = jnp.where((row >= 0)[:, None], product, 0).astype(dtype)
    return jnp.zeros_like(product).at[order].set(product, unique_indices=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _in_kernel(
    spec: TableSpec, precision: str, dtype: Any, leaf: Array, row: Array, order: Array, offsets: Array, w: Array
) -> Array:
    from dejax import pallas  # not before it is used: Triton's lowering takes its time to import

    n, (types, k, m) = row.size, w.shape
    block = pallas.gemm_block(k, m, n, types, precision)
    counts = jnp.diff(offsets)
    tiles = (counts + block - 1) // block
    end = jnp.cumsum(tiles, dtype=jnp.int32)
    number = jnp.arange(n // block + types, dtype=jnp.int32)
    tile_type = jnp.minimum(jnp.searchsorted(end, number, side="right"), types - 1).astype(jnp.int32)
    # A tile beyond the last one begins where its type has ended, and is unused.
    tile_start = offsets[tile_type] + (number - (end - tiles)[tile_type]) * block
    request = pallas.GroupedGemm(
        pallas.FloatBits.of(leaf, spec.dtype),
        w,
        pallas.GemmGroups(offsets, tile_type, tile_start.astype(jnp.int32), block, n),
        x_index=row,
        output=pallas.GemmOutput(index=order, dtype=dtype),
        precision=precision,
    )
    return pallas.grouped_gemm(request, interpret=False)


def _forward(
    spec: TableSpec, precision: str, dtype: Any, leaf: Array, row: Array, order: Array, offsets: Array, w: Array
) -> tuple[Array, Any]:
    # Of `w` only what its gradient needs to know: the dtype.
    kept = (leaf, row, order, offsets, jnp.zeros((0,), w.dtype))
    return _in_kernel(spec, precision, dtype, leaf, row, order, offsets, w), kept


def _backward(spec: TableSpec, precision: str, dtype: Any, kept: Any, cotangent: Array) -> tuple[Any, ...]:
    del dtype
    from dejax import pallas

    leaf, row, order, offsets, like = kept
    rows = gather(HostTable(leaf, spec), row)
    request = pallas.GroupedWeightGradient(
        rows, cotangent, offsets, row.size, y_index=order, precision=precision, dtype=like.dtype
    )
    gradient = pallas.grouped_weight_gradient(request, interpret=False)
    nothing = (np.zeros(x.shape, jax.dtypes.float0) for x in (leaf, row, order, offsets))
    return (*nothing, gradient)


_in_kernel.defvjp(_forward, _backward)
_compiled = jax.jit(_in_kernel, static_argnums=(0, 1, 2))
