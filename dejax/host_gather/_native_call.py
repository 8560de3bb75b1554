"""The native call of a gather: its static part, its operands and attributes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat
from dejax._native import ffi_call
from dejax.cuda import ordering
from dejax.host_gather import _kernels, _spec
from dejax.host_gather._ids import in_range
from dejax.host_gather._spec import TableSpec

_LINE = 128  # bytes of one request over the bus


@dataclasses.dataclass(frozen=True, slots=True)
class GatherCall:
    """The static part of one gather, from which the attributes of the native call follow."""

    spec: TableSpec
    out_dtype: np.dtype
    convert: bool  # elements, rather than move bytes
    mean: bool
    clip: bool
    raises: bool
    fill_value: float  # where elements are converted
    fill: bytes  # 16 bytes of repeated elements, where bytes are moved
    ordered: bool
    num_sms: int
    skips: bool = False  # a GPU leaves the result rows of ids out of range as they are


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NativeArguments:
    """Arguments of a native call that start and synchronous gathers share."""

    ids: Array  # flat
    perm: Array  # the result row of each id, for sorted ids; else int32[0]
    attributes: dict[str, Any]
    shape: tuple[int, ...]  # of the result


def native_arguments(
    call: GatherCall, fan_out: int, ids: Array, cached: bool, *, ticket: bool = False
) -> NativeArguments:
    """Sorts the ids if the call says so, and compiles the kernel.

    Args:
        call: the static part of the gather.
        fan_out: ids of one result row.
        ids: int[...].
        cached: whether the table has a cache.
        ticket: whether warps of a kernel for unsorted ids take their work by ticket, as those for sorted ids do.
    """
    spec = call.spec
    flat = ids.reshape(-1)
    ordered = call.ordered and flat.size > 1
    perm = jnp.zeros((0,), jnp.int32)
    if ordered:
        flat, perm = _sorted(flat, None if call.clip or call.raises else spec.rows)
    source = _spec.ELEMENT_CODES[spec.dtype.name] if call.convert else _spec.MOVE_BYTES
    result = _spec.RESULT_CODES[call.out_dtype.name] if call.convert else _spec.MOVE_BYTES
    kernel = 0
    if spec.platform == "cuda":
        if call.raises:
            _kernels.prepare_errors()
        kernel = _kernels.prepare(
            "gather.cu",
            ID="int" if flat.dtype == jnp.int32 else "long long",
            UNIT=_spec.store_unit(spec.row_bytes),
            SORTED=int(ordered),
            TICKET=int(ordered or ticket),
            CACHED=int(cached),
            SPLIT=int(spec.is_split),
            PEERS=spec.peers,
            SKIP=int(call.skips),
            SOURCE=source,
            RESULT=result,
            MEAN=int(call.mean),
            POSITION="int" if flat.size * (spec.row_bytes // 16 + 16) < 2**31 else "long long",
        )
    attributes = {
        "source": np.int64(source),
        "result": np.int64(result),
        "row_bytes": np.int64(spec.row_bytes),
        "fan_out": np.int64(fan_out),
        "mean": call.mean,
        "clip": call.clip,
        "raises": call.raises,
        "split": spec.is_split,
        "fill_value": np.float32(call.fill_value),
        "fill": np.frombuffer(call.fill, np.uint8),
        "kernel": np.int64(kernel),
        "grid": np.int64(call.num_sms),
        "peers": np.int64(spec.peers),
        # Short rows gain nothing from whole lines: most of a line would be other rows.
        "align": np.int64(_LINE if spec.row_bytes >= 2 * _LINE and spec.row_bytes % _LINE else 16),
    }
    shape = (flat.size // fan_out, *spec.row) if call.mean else (flat.size, *spec.row)
    return NativeArguments(flat, perm, attributes, shape)


def _sorted(ids: Array, num_rows: int | None) -> tuple[Array, Array]:
    """Ids in ascending order, and int32[ids], the place of each before.

    Args:
        ids: int[ids].
        num_rows: ids out of this range may become others; None: no id may change.
    """

    def by_xla(ids: Array) -> tuple[Array, Array]:
        found, place = jax.lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
        return found, place

    if num_rows is None or ids.dtype != jnp.int32 or num_rows >= 2**31 - 1:
        return by_xla(ids)
    return ordering.sort_pairs(jnp.where(in_range(ids, num_rows), ids, num_rows), None, num_rows.bit_length(), by_xla)


def memory_gather(
    call: GatherCall, fan_out: int, leaf: Array, ids: Array, scale: Array, slots: Array, cache: Array
) -> Array:
    """The synchronous native call for rows in host memory, on the device, or in both."""
    arguments = native_arguments(call, fan_out, ids, slots.size > 0)
    types = [jax.typeof(x) for x in (leaf, ids, scale, slots, cache)]
    out = _compat.varying_result(arguments.shape, call.out_dtype, *types)
    scratch = _compat.varying_result((2,), jnp.uint32, *types)
    operands = leaf, arguments.ids, arguments.perm, slots, cache, scale
    rows, _ = ffi_call("dejax_table_gather", (out, scratch), operands, fixed=[0], **arguments.attributes)
    lead = ids.shape[:-1] if call.mean else ids.shape
    return rows.reshape(lead + call.spec.row)
