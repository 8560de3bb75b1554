"""Reads of tables on a drive: the native calls, and the operations of XLA on the rows that they return.

The native calls read rows from files and from their cache in host memory. If some rows of the table lie on the device
(`CachedTable`, `SplitTable`), the program gathers these rows, too, and selects between the two; if rows have scales, it
multiplies by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat
from dejax._native import ffi_call
from dejax.host_gather._ids import in_range, nearest
from dejax.host_gather._native_call import GatherCall, memory_gather, native_arguments


def drive_gather(
    call: GatherCall,
    leaf: Array,
    ids: Array,
    scale: Array,
    slots: Array,
    cache: Array,
    *,
    ticket: Array | None = None,
    site: int = 0,
    after: Sequence[Array] = (),
) -> Array:
    """Rows of a table on a drive, [*ids.shape, *row].

    Args:
        call: the static part of the gather.
        leaf: uint32[2], the number of the table's reader, in host memory.
        ids: int[...].
        scale: float32[0], [1] or [rows].
        slots, cache: rows on the device, as in `TableOperands`.
        ticket: the ticket of the start that began the read; None: the read begins here.
        site: the number of that start's place in the program.
        after: arrays that must be there first.
    """
    on_drive, places = _where(call, ids, slots)
    by_row = scale.size > 1
    read = dataclasses.replace(call, spec=call.spec.host_part.plain, ordered=False, mean=False)
    if by_row:
        read = dataclasses.replace(read, out_dtype=np.dtype(np.float32))
    factor = jnp.zeros((0,), jnp.float32) if by_row else scale
    rows = _native_rows(read, leaf, on_drive, factor, ticket, site, after)
    if places is not None:
        rows = jnp.where(_beside(places >= 0, rows), _rows_on_device(read, cache, places, factor), rows)
    if by_row:
        there = in_range(ids, call.spec.rows) | call.clip
        factors = scale[nearest(ids, call.spec.rows)]
        rows = jnp.where(_beside(there, rows), rows * _beside(factors, rows), rows).astype(call.out_dtype)
    return rows


def drive_start(
    call: GatherCall, leaf: Array, ids: Array, slots: Array, site: int, place: int, through: Sequence[Array]
) -> tuple[Array, list[Array]]:
    """Begins to read. Returns the ticket, and `through`, which depends on the start then."""
    on_drive, _ = _where(call, ids, slots)
    word = _compat.varying_result((2,), jnp.uint32, *(jax.typeof(x) for x in (leaf, on_drive)))
    ticket, *passed = ffi_call(
        "dejax_drive_start",
        (word, *(jax.typeof(x) for x in through)),
        (leaf, on_drive.reshape(-1), *through),
        fixed=[0],
        fixed_results=[0],
        aliases={2 + k: 1 + k for k in range(len(through))},
        has_side_effect=True,
        clip=call.clip,
        site=np.int64(site),
        place=np.int64(place),
    )
    return ticket, passed


def _native_rows(
    call: GatherCall,
    leaf: Array,
    ids: Array,
    scale: Array,
    ticket: Array | None,
    site: int,
    after: Sequence[Array],
) -> Array:
    arguments = native_arguments(call, 1, ids, cached=False)
    if ticket is None:
        ticket = jnp.zeros((0,), jnp.uint32)
    types = [jax.typeof(x) for x in (leaf, ids, scale)]
    (rows,) = ffi_call(
        "dejax_drive_gather",
        [_compat.varying_result(arguments.shape, call.out_dtype, *types)],
        [ticket, leaf, arguments.ids, scale, *after],
        fixed=[0, 1],
        has_side_effect=bool(ticket.size),
        **arguments.attributes,
        site=np.int64(site),
    )
    return rows.reshape(ids.shape + call.spec.row)


def _where(call: GatherCall, ids: Array, slots: Array) -> tuple[Array, Array | None]:
    """The ids of rows on the drive, and the places of rows on the device: -1 for none; None where no rows lie there.

    On the drive, the least number of the ids' dtype stands for a row that the device has.
    """
    rows, least = call.spec.rows, np.iinfo(ids.dtype).min
    if not slots.size:  # where nothing is on the device, the least number is an id as others
        return jnp.maximum(ids, least + 1) if call.clip or call.raises else ids, None
    ids = nearest(ids, rows) if call.clip else jnp.maximum(ids, least + 1)
    there = in_range(ids, rows)
    slot = jnp.where(there, slots[jnp.where(there, ids, 0)], -1)
    own = (~slot).astype(ids.dtype) if call.spec.is_split else ids
    return jnp.where(slot >= 0, least, jnp.where(there, own, ids)), slot


def _rows_on_device(call: GatherCall, cache: Array, places: Array, scale: Array) -> Array:
    spec = call.spec.device_part(cache.shape[0])
    own = dataclasses.replace(call, spec=spec, clip=False, raises=False)
    nothing = jnp.zeros((0,), jnp.int32)
    return memory_gather(own, 1, cache, places, scale, nothing, jnp.zeros((0,), cache.dtype))


def _beside(values: Array, rows: Array) -> Array:
    """Values [...] of rows [..., *row], to be combined with them."""
    return values.reshape(values.shape + (1,) * (rows.ndim - values.ndim))
