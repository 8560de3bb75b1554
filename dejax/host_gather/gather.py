"""`gather`: rows of a table in host memory, by ids, inside a compiled step."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.custom_batching import custom_vmap
from jax.typing import ArrayLike

from dejax import _native
from dejax.host_gather import _cost, _spec
from dejax.host_gather._drive_reads import drive_gather
from dejax.host_gather._ids import checked_ids, in_range, nearest
from dejax.host_gather._native_call import GatherCall, memory_gather
from dejax.host_gather._operands import Table, TableOperands, table_of
from dejax.host_gather._spec import TableSpec
from dejax.host_gather._tracing import is_recorded, record
from dejax.host_gather.tables._lifetime import reporting_closed

Mode = Literal["fill", "clip", "raise"]
Order = Literal["auto", "given", "sorted"]

# Four multiprocessors saturate the bus with rows of 512 bytes; eight keep a margin.
SORTED_SMS = 8
UNSORTED_SMS = 16
# Rows whose elements become four times as wide, as fp8 to float32: stores of eight multiprocessors take 1.5 times as
# long as the reads.
WIDENING_SMS = 16
# Rows in device memory: as many multiprocessors as there are. The grid is cut where there is less work.
DEVICE_SMS = 132
# Multiprocessors that an overlapped gather takes from compute: the fewest that saturate the bus.
OVERLAP_SMS = 4
# Factor of the number of multiprocessors if some rows lie on the device. One multiprocessor copies 13 GB/s of these
# rows: four would take longer for them than the bus takes for the others.
MIXED = 4


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GatherOptions:
    """The keyword arguments of `gather`, which documents them."""

    mode: str = "fill"
    fill_value: Any = 0
    out_dtype: Any = None
    scale: Any = None
    reduce: str | None = None
    order: str = "auto"
    num_sms: int | None = None

    @classmethod
    def of(cls, what: str, given: dict[str, Any]) -> GatherOptions:
        """The options of a caller's keyword arguments."""
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := set(given).difference(known):
            raise TypeError(f"{what}: options must be of {sorted(known)}, got {sorted(unknown)}")
        return cls(**given)


def gather(
    table: Table,
    ids: ArrayLike,
    *,
    mode: Mode = "fill",
    fill_value: Any = 0,
    out_dtype: Any = None,
    scale: ArrayLike | None = None,
    reduce: Literal["mean"] | None = None,
    order: Order = "auto",
    num_sms: int | None = None,
) -> Array:
    """Reads rows of a table by their ids, without copying the table.

    It works inside and outside of `jax.jit`, `scan`, `cond`, `vmap` over ids, and `shard_map`. The gathered rows have
    no derivative with respect to the table; `host_gather.value_and_grad` gives that gradient. With respect to
    everything else, a loss can be differentiated as usual.

    Args:
        table: a table [rows, *row] of any kind. A table that is divided over a mesh (`dejax.distributed.ShardedTable`)
            is read inside of `jax.shard_map`; of the arguments below it supports `out_dtype` only.
        ids: int[...], the rows to read; int64 needs jax's 64-bit mode. Negative ids are out of range: they do not count
            from the end.
        mode: what an id out of range gives. "fill": a row of `fill_value`. "clip": the nearest row. "raise": an error.
            On the CPU this call raises it. On a GPU a later gather of this mode or `check_errors` raises it, and this
            gather gives a row of `fill_value`.
        fill_value: a scalar of the result's dtype.
        out_dtype: dtype to which elements are converted as they are read: float32, bfloat16 or float16. By default the
            table's own.
        scale: float, () or [rows]: factor of the converted rows (for int8 and FP8 tables). It is not differentiated.
        reduce: "mean" averages over the last axis of `ids` in float32. Ids out of range do not count (unless
            `mode="clip"`); if all are out of range, the result is `fill_value`. Rows must be floats or be converted to
            floats.
        order: "given" reads rows in the order of `ids`. "sorted" sorts the ids in the step and reads each row once,
            which helps for large tables and ids with many duplicates. "auto" chooses by a cost model. The result is the
            same.
        num_sms: largest number of GPU multiprocessors to use. By default 8 or 16, which saturate the bus; four times as
            many if some rows lie on the device (CachedTable, SplitTable); all for a DeviceTable.

    Returns:
        [*ids.shape, *row], or [*ids.shape[:-1], *row] with `reduce`, of `out_dtype`.

    Raises:
        TypeError: `table` is no table, `ids` are not integers, a dtype is not possible, or a jitted function closes
            over the table.
        ValueError: `mode`, `order` or `reduce` is unknown, or the table was sliced or mapped.
        TableClosedError: the table was closed or donated.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> jax.jit(gather)(table, jnp.array([2, 0, 7]))
    Array([[4., 5.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    """
    options = GatherOptions(mode, fill_value, out_dtype, scale, reduce, order, num_sms)
    return table_of("gather", table)._read("gather", ids, options)[0]


def read_rows(what: str, operands: TableOperands, ids: Any, options: GatherOptions) -> Array:
    """`gather` of a table of one device."""
    recorded = is_recorded(operands.spec)
    if recorded and options.scale is not None:
        raise ValueError(
            f"{what}: rows must be gathered without `scale` inside of value_and_grad, which has no gradient of scaled "
            "rows; multiply the gathered rows instead"
        )
    ids, call, factor = prepare_gather(what, operands, ids, options)
    leaf, cache, slots = operands.leaf, operands.cache, operands.slots
    if call.mean and not (call.ordered or recorded or call.spec.on_drive):
        with reporting_closed(leaf, what):
            return batched_gather(call, ids.shape[-1])(leaf, cache, slots, ids, factor)
    plain = dataclasses.replace(call, mean=False, fill_value=0.0) if call.mean else call
    if call.mean and call.spec.on_drive:
        plain = dataclasses.replace(plain, out_dtype=np.dtype(np.float32))
    with reporting_closed(leaf, what):
        rows = batched_gather(plain, 1)(leaf, cache, slots, ids, factor)
    rows = record(operands.spec, leaf, nearest(ids, call.spec.rows) if call.clip else ids, rows)
    return _mean(call, rows, ids) if call.mean else rows


def gather_inside(table: Table, ids: Array) -> Array:
    """`gather` of a table of one device without a row for ids out of range: their result rows hold any values.

    For results of which the caller drops these rows. The few multiprocessors that saturate the bus would fill them at
    only a few times the rate of the bus.
    """
    what = "gather"
    operands = table._operands(what)
    assert operands is not None, "of one device"
    ids, call, factor = prepare_gather(what, operands, ids, GatherOptions())
    call = dataclasses.replace(call, skips=True)
    with reporting_closed(operands.leaf, what):
        return batched_gather(call, 1)(operands.leaf, operands.cache, operands.slots, ids, factor)


def check_errors() -> None:
    """Raises an error if a `gather(..., mode="raise")` on a GPU met an id out of range. Call it after the step is done.

    The call clears the error, so that the next call reports later gathers only.

    Raises:
        IndexError: a gather met an id out of range; the message has one of these ids.
        NativeExtensionError: dejax's native extension is missing.

    >>> import jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, check_errors, gather
    >>> rows = gather(HostTable.from_numpy(np.ones((3, 2), np.float32)), jnp.array([2]), mode="raise")
    >>> check_errors()  # nothing was out of range
    """
    found = _native.extension("check_errors").take_gather_error()
    if found is not None:
        raise IndexError(
            f"dejax.host_gather.gather: id {found} was out of range; with mode='raise' ids must be rows of the table"
        )


# -------------------------------------------------------------------------------------------- checks


def prepare_gather(
    what: str, operands: TableOperands, ids: Any, options: GatherOptions, *, overlapped: bool = False
) -> tuple[Array, GatherCall, Array]:
    """Checks the arguments of a gather. Returns ids, the static call and the scale as float32[0], [1] or [rows].

    Args:
        what: the caller's name.
        operands: the operands of the table.
        ids: int[...].
        options: the options of the gather.
        overlapped: whether it runs beside compute.
    """
    _native.extension(f"dejax.host_gather.{what}")
    spec = operands.spec.plain
    ids = checked_ids(what, ids, spec.rows)
    _check_choices(what, options)
    mean = options.reduce == "mean"
    if mean and (ids.ndim == 0 or ids.shape[-1] == 0):
        raise ValueError(
            f"{what}: with reduce='mean' `ids` must have a last axis to average over, got shape {ids.shape}"
        )
    result = _result_dtype(what, spec, options.out_dtype, mean, options.scale is not None)
    convert = mean or options.scale is not None or result != spec.dtype
    if convert and spec.dtype.name not in _spec.ELEMENT_CODES:
        raise TypeError(
            f"{what}: rows of {spec.dtype} must be gathered without `reduce`, `scale` and another `out_dtype`, "
            "because they cannot be converted; leave these out"
        )
    factor = _scale(what, spec, options.scale)
    fill = np.asarray(options.fill_value)
    if fill.ndim:
        raise ValueError(f"{what}: `fill_value` must be a scalar, got shape {fill.shape}")
    pattern = fill.astype(spec.dtype).tobytes() if not convert else b""
    ordered = options.order == "sorted"
    if options.order == "auto":
        on_bus = spec.platform == "cuda" and spec.host_bytes > 0
        ordered = on_bus and _cost.sorting_pays(spec.host_bytes, spec.row_bytes, ids.size)
    call = GatherCall(
        spec=spec,
        out_dtype=result,
        convert=convert,
        mean=mean,
        clip=options.mode == "clip",
        raises=options.mode == "raise",
        fill_value=float(fill) if convert else 0.0,
        fill=(pattern * 16)[:16] or bytes(16),
        ordered=ordered and spec.platform == "cuda",
        num_sms=options.num_sms or _default_sms(spec, result, ordered, overlapped, mixed=operands.slots.size > 0),
    )
    return ids, call, factor


def _default_sms(spec: TableSpec, result: np.dtype, ordered: bool, overlapped: bool, *, mixed: bool) -> int:
    """The fewest multiprocessors that saturate the bus, more for rows on the device, or all.

    Args:
        spec: the static part of the table.
        result: dtype of the result.
        ordered: whether ids are sorted.
        overlapped: whether the gather runs beside compute.
        mixed: whether some rows lie on the device.
    """
    if spec.on_device:
        return DEVICE_SMS
    wider = max(1, result.itemsize // spec.dtype.itemsize)
    if overlapped:
        # Stores of rows that become wider take more: eight store 138 GB/s of float32 rows made of fp8.
        for_bus = OVERLAP_SMS * min(wider, 4)
    elif wider >= 4:
        for_bus = WIDENING_SMS
    else:
        for_bus = SORTED_SMS if ordered else UNSORTED_SMS
    return for_bus * (MIXED if mixed else 1)


def _check_choices(what: str, options: GatherOptions) -> None:
    for name, value, known in (
        ("mode", options.mode, ("fill", "clip", "raise")),
        ("order", options.order, ("auto", "given", "sorted")),
        ("reduce", options.reduce, (None, "mean")),
    ):
        if value not in known:
            raise ValueError(f"{what}: `{name}` must be one of {known}, got {value!r}")
    if options.num_sms is not None and options.num_sms < 1:
        raise ValueError(f"{what}: `num_sms` must be at least 1, got {options.num_sms}")


def _result_dtype(what: str, spec: TableSpec, out_dtype: Any, mean: bool, scaled: bool) -> np.dtype:
    if out_dtype is None:
        convertible = spec.dtype.name in _spec.RESULT_CODES
        result = spec.dtype if convertible or not (mean or scaled) else np.dtype(np.float32)
    else:
        result = np.dtype(out_dtype)
        if result != spec.dtype and result.name not in _spec.RESULT_CODES:
            raise TypeError(
                f"{what}: `out_dtype` must be float32, bfloat16, float16 or the table's {spec.dtype}, got {result}"
            )
    if (mean or scaled) and result.name not in _spec.RESULT_CODES:
        raise TypeError(
            f"{what}: with `reduce` or `scale` the result must be float32, bfloat16 or float16, got {result}; give "
            "`out_dtype`"
        )
    if jax.dtypes.canonicalize_dtype(result) != result:
        raise TypeError(
            f"{what}: rows of {result} need jax's 64-bit mode: jax.config.update('jax_enable_x64', True), or give "
            "out_dtype=jnp.float32"
        )
    return result


def _scale(what: str, spec: TableSpec, scale: Any) -> Array:
    if scale is None:
        return jnp.zeros((0,), jnp.float32)
    factor = jax.lax.stop_gradient(jnp.asarray(scale, jnp.float32))
    if factor.shape not in ((), (1,), (spec.rows,)):
        raise ValueError(f"{what}: `scale` must have shape () or ({spec.rows},), got {factor.shape}")
    return factor.reshape(-1)


def _mean(call: GatherCall, rows: Array, ids: Array) -> Array:
    """The mean of gathered rows over the last axis of ids, where the native call did not average."""
    total = rows.astype(jnp.float32).sum(axis=ids.ndim - 1)
    row = (1,) * (rows.ndim - ids.ndim)
    if call.clip:
        return (total / ids.shape[-1]).astype(call.out_dtype)
    count = in_range(ids, call.spec.rows).sum(axis=-1).reshape(ids.shape[:-1] + row)
    mean = total / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, call.fill_value).astype(call.out_dtype)


# -------------------------------------------------------------------------------------------- the native call


@functools.lru_cache(maxsize=1024)
def batched_gather(call: GatherCall, fan_out: int) -> Any:
    """The native call as a function that `vmap` can map."""

    # The arguments have the order of a CachedTable's leaves. If two threads took its arrays in different orders, one of
    # them to donate them, they would deadlock.
    @custom_vmap
    @jax.jit
    def rows_of(leaf: Array, cache: Array, slots: Array, ids: Array, scale: Array) -> Array:
        if call.spec.on_drive:
            return drive_gather(call, leaf, ids, scale, slots, cache)
        return memory_gather(call, fan_out, leaf, ids, scale, slots, cache)

    @rows_of.def_vmap
    def over_ids(
        size: int, batched: Any, leaf: Array, cache: Array, slots: Array, ids: Array, scale: Array
    ) -> tuple[Array, bool]:
        *others, _, scale_batched = batched
        if not (any(others) or scale_batched):
            return rows_of(leaf, cache, slots, ids, scale), batched[3]
        # A `cond` by a mapped predicate: JAX gives each example a table of its own, all of them equal. One call for
        # each, because XLA takes one example of a broadcast for the table itself, and so copies nothing.
        given = [leaf, cache, slots, ids, scale]
        examples = [[x[n] if mapped else x for x, mapped in zip(given, batched, strict=True)] for n in range(size)]
        return jnp.stack([rows_of(*example) for example in examples]), True

    return rows_of
