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
from dejax.host_gather import _cost, _kernels, _types
from dejax.host_gather._ids import checked_ids, in_range, nearest
from dejax.host_gather._recording import record, recorded
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.table import HostTable

Mode = Literal["fill", "clip", "raise"]
Order = Literal["auto", "given", "sorted"]

# Four SMs saturate the bus with rows of 512 bytes; eight keep a margin.
SORTED_SMS = 8
UNSORTED_SMS = 16
_LINE = 128  # bytes of one request over the bus


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """What is static about one gather: attributes of the native call."""

    spec: TableSpec
    out_dtype: np.dtype
    convert: bool
    mean: bool
    clip: bool
    raises: bool
    fill_value: float
    fill: bytes  # 16 bytes of repeated elements
    ordered: bool
    num_sms: int


def gather(
    table: HostTable | CachedTable,
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
    """Rows of a table by ids, read in place: inside or outside `jax.jit`, `scan`, `cond`, `vmap` over ids, `shard_map`.

    The table has no derivative: a loss that uses gathered rows can be differentiated with respect to everything else,
    and `host_gather.value_and_grad` gives the gradient of the rows.

    Args:
        table: HostTable or CachedTable [rows, *row].
        ids: int[...], any shape; int64 needs jax's 64-bit mode. There is no counting from the end: below 0 is out of
            range.
        mode: what an id out of range gives. "fill": a row of `fill_value`. "clip": the nearest row. "raise": an
            error, on the CPU from this call; on a GPU from a later gather of this mode, or from `check_errors`, and
            until then a row of `fill_value`.
        fill_value: a scalar of the result's dtype.
        out_dtype: float32, bfloat16 or float16: elements are converted as they are read. By default the table's own.
        scale: float, () or [rows]: multiplies the converted rows (for int8 and fp8 tables). Not differentiated.
        reduce: "mean" averages over the last axis of `ids` in float32, leaving ids out of range out (unless
            `mode="clip"`); `fill_value` where all are. Rows must be of floats or converted.
        order: "given" reads rows in the order of `ids`; "sorted" sorts the ids inside the step, and reads equal ones
            once: for large tables and for ids with many duplicates; "auto" lets a cost model decide from sizes. The
            result is the same.
        num_sms: multiprocessors that the read may take, at most; by default 8 or 16, which saturate the bus.

    Returns:
        [*ids.shape, *row], or [*ids.shape[:-1], *row] with `reduce`, of `out_dtype`.

    Raises:
        TypeError: no HostTable, ids that are no integers, a dtype that cannot be had, a table that is closed over.
        ValueError: an unknown mode, order or reduction; a table that was sliced on its way; a mapped table.
        TableClosedError: the table was closed or donated.

    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> jax.jit(gather)(table, jnp.array([2, 0, 7]))
    Array([[4., 5.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    """
    host, slots, cache = parts("gather", table)
    noted = recorded(host)
    if noted and scale is not None:
        raise ValueError("gather: the gradient of scaled rows is not defined; multiply the gathered rows instead")
    leaf, ids, call, factor = prepared("gather", host, ids, mode, fill_value, out_dtype, scale, reduce, order, num_sms)
    if call.mean and not (call.ordered or noted):
        with host._alive("gather"):
            return mapped_call(call, ids.shape[-1])(leaf, cache, slots, ids, factor)
    plain = dataclasses.replace(call, mean=False, fill_value=0.0) if call.mean else call
    with host._alive("gather"):
        rows = mapped_call(plain, 1)(leaf, cache, slots, ids, factor)
    rows = record(host, nearest(ids, call.spec.rows) if call.clip else ids, rows)
    return _mean(call, rows, ids) if call.mean else rows


def parts(what: str, table: Any) -> tuple[HostTable, Array, Array]:
    """The table in host memory, and what of it lies on the device: slots and cache, both empty for a HostTable.

    Raises:
        TypeError: neither a HostTable nor a CachedTable.
        TableClosedError: the table was closed, donated, or inherited by a forked child.
    """
    host = table.table if isinstance(table, CachedTable) else table
    if not isinstance(host, HostTable):
        raise TypeError(
            f"{what}: `table` must be a HostTable, {type(table).__name__} was given; see HostTable.from_numpy"
        )
    host._operand(what)  # before anything is asked of jax, on which a forked child hangs
    if isinstance(table, CachedTable):
        return host, table.slots, table.cache
    return host, jnp.zeros((0,), jnp.int32), jnp.zeros((0,), table._spec.leaf.dtype)


def check_errors() -> None:
    """Says whether a gather of mode "raise" met an id out of range on a GPU; call it after the step is done.

    What it reports it forgets: the next call is about later gathers.

    Raises:
        IndexError: one did; the message names an id.
        NativeExtensionError: the extension is not there.
    """
    found = _native.extension("check_errors").take_gather_error()
    if found is not None:
        raise IndexError(f"dejax.host_gather.gather: id {found} was out of range")


def prepared(
    what: str,
    table: HostTable,
    ids: Any,
    mode: str,
    fill_value: Any,
    out_dtype: Any,
    scale: Any,
    reduce: str | None,
    order: str,
    num_sms: int | None,
) -> tuple[Any, Array, Call, Array]:
    """Checked arguments of a gather."""
    _native.extension(f"dejax.host_gather.{what}")
    leaf = table._operand(what)
    spec = table._spec.plain
    ids = checked_ids(what, ids, spec.rows)
    for name, value, known in (
        ("mode", mode, ("fill", "clip", "raise")),
        ("order", order, ("auto", "given", "sorted")),
        ("reduce", reduce, (None, "mean")),
    ):
        if value not in known:
            raise ValueError(f"{what}: `{name}` must be one of {known}, {value!r} was given")
    if num_sms is not None and num_sms < 1:
        raise ValueError(f"{what}: `num_sms` must be at least 1, {num_sms} was given")
    mean = reduce == "mean"
    if mean and (ids.ndim == 0 or ids.shape[-1] == 0):
        raise ValueError(
            f"{what}: with reduce='mean' `ids` must have a last axis to average over, its shape is {ids.shape}"
        )
    result = _result_dtype(what, spec, out_dtype, mean, scale is not None)
    convert = mean or scale is not None or result != spec.dtype
    if convert and spec.dtype.name not in _types.ELEMENT_CODES:
        raise TypeError(f"{what}: rows of {spec.dtype} cannot be converted; gather them as they are")
    factor = _scale(what, spec, scale)
    fill = np.asarray(fill_value)
    if fill.ndim:
        raise ValueError(f"{what}: `fill_value` must be a scalar, shape {fill.shape} was given")
    pattern = fill.astype(spec.dtype).tobytes() if not convert else b""
    ordered = order == "sorted"
    if order == "auto":
        ordered = spec.platform == "cuda" and _cost.sorting_pays(spec.rows * spec.row_bytes, spec.row_bytes, ids.size)
    call = Call(
        spec=spec,
        out_dtype=result,
        convert=convert,
        mean=mean,
        clip=mode == "clip",
        raises=mode == "raise",
        fill_value=float(fill) if convert else 0.0,
        fill=(pattern * 16)[:16] or bytes(16),
        ordered=ordered and spec.platform == "cuda",
        num_sms=num_sms or (SORTED_SMS if ordered else UNSORTED_SMS),
    )
    return leaf, ids, call, factor


def _result_dtype(what: str, spec: TableSpec, out_dtype: Any, mean: bool, scaled: bool) -> np.dtype:
    if out_dtype is None:
        convertible = spec.dtype.name in _types.RESULT_CODES
        result = spec.dtype if convertible or not (mean or scaled) else np.dtype(np.float32)
    else:
        result = np.dtype(out_dtype)
        if result != spec.dtype and result.name not in _types.RESULT_CODES:
            raise TypeError(
                f"{what}: `out_dtype` must be float32, bfloat16, float16 or the table's {spec.dtype}; {result} was "
                f"given"
            )
    if (mean or scaled) and result.name not in _types.RESULT_CODES:
        raise TypeError(
            f"{what}: with `reduce` or `scale` the result must be a float of 16 or 32 bits; give `out_dtype`"
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
        raise ValueError(f"{what}: `scale` must have shape () or ({spec.rows},), {factor.shape} was given")
    return factor.reshape(-1)


def _mean(call: Call, rows: Array, ids: Array) -> Array:
    """The mean of gathered rows over the last axis of ids, for rows that were gathered in sorted order."""
    total = rows.astype(jnp.float32).sum(axis=ids.ndim - 1)
    row = (1,) * (rows.ndim - ids.ndim)
    if call.clip:
        return (total / ids.shape[-1]).astype(call.out_dtype)
    count = in_range(ids, call.spec.rows).sum(axis=-1).reshape(ids.shape[:-1] + row)
    mean = total / jnp.maximum(count, 1)
    return jnp.where(count > 0, mean, call.fill_value).astype(call.out_dtype)


@functools.lru_cache(maxsize=1024)
def mapped_call(call: Call, fan_out: int) -> Any:
    """The native call as a function that `vmap` maps over ids, and over nothing else."""

    # In the order of a CachedTable's leaves: two threads that take its arrays in different orders, one of them to
    # donate them, would wait for each other for ever.
    @custom_vmap
    @jax.jit
    def rows_of(leaf: Array, cache: Array, slots: Array, ids: Array, scale: Array) -> Array:
        return launch(call, fan_out, leaf, ids, scale, slots, cache)

    @rows_of.def_vmap
    def over_ids(
        size: int, batched: Any, leaf: Array, cache: Array, slots: Array, ids: Array, scale: Array
    ) -> tuple[Array, bool]:
        del size
        *tables_batched, ids_batched, scale_batched = batched
        if any(tables_batched) or scale_batched:
            raise ValueError(
                "gather: jax.vmap maps over ids only; give the table (and scale or cache) with in_axes=None, since "
                "to map over it would copy it to the device"
            )
        return rows_of(leaf, cache, slots, ids, scale), ids_batched

    return rows_of


def flat_call(
    call: Call, fan_out: int, leaf: Array, ids: Array, slots: Array, *, ticket: bool = False
) -> tuple[Array, Array, dict[str, Any], tuple[int, ...]]:
    """Flat ids, their order, the attributes of the native call and the shape of its result.

    Sorted ids are taken by ticket; others where `ticket` says so.
    """
    spec = call.spec
    flat = ids.reshape(-1)
    ordered = call.ordered and flat.size > 1
    perm = jnp.zeros((0,), jnp.int32)
    if ordered:
        flat, perm = jax.lax.sort((flat, jnp.arange(flat.size, dtype=jnp.int32)), num_keys=1)
    source = _types.ELEMENT_CODES[spec.dtype.name] if call.convert else _types.MOVE_BYTES
    result = _types.RESULT_CODES[call.out_dtype.name] if call.convert else _types.MOVE_BYTES
    unit = _types.store_unit(spec.row_bytes)
    kernel = 0
    if spec.platform == "cuda":
        if call.raises:
            _kernels.prepare_errors()
        kernel = _kernels.prepare(
            "gather.cu",
            ID="int" if flat.dtype == jnp.int32 else "long long",
            UNIT=unit,
            SORTED=int(ordered),
            TICKET=int(ordered or ticket),
            CACHED=int(slots.size > 0),
            SOURCE=source,
            RESULT=result,
            MEAN=int(call.mean),
        )
    attributes = {
        "source": np.int64(source),
        "result": np.int64(result),
        "row_bytes": np.int64(spec.row_bytes),
        "fan_out": np.int64(fan_out),
        "mean": call.mean,
        "clip": call.clip,
        "raises": call.raises,
        "fill_value": np.float32(call.fill_value),
        "fill": np.frombuffer(call.fill, np.uint8),
        "kernel": np.int64(kernel),
        "grid": np.int64(call.num_sms),
        # Short rows gain nothing from whole lines: most of a line would be other rows.
        "align": np.int64(_LINE if spec.row_bytes >= 2 * _LINE and spec.row_bytes % _LINE else 16),
    }
    shape = (flat.size // fan_out, *spec.row) if call.mean else (flat.size, *spec.row)
    return flat, perm, attributes, shape


def launch(call: Call, fan_out: int, leaf: Array, ids: Array, scale: Array, slots: Array, cache: Array) -> Array:
    """The native call itself."""
    flat, perm, attributes, shape = flat_call(call, fan_out, leaf, ids, slots)
    out = jax.ShapeDtypeStruct(shape, call.out_dtype)
    scratch = jax.ShapeDtypeStruct((2,), jnp.uint32)
    # XLA folds slices into the calls that they are operands or results of, and in jax 0.11 keeps the call that it
    # replaces where its rows are used elsewhere too, as in a loop that saves them for its backward pass: they crossed
    # the bus twice. It does not look through barriers.
    flat, slots, cache, scale = jax.lax.optimization_barrier((flat, slots, cache, scale))
    rows, _ = jax.ffi.ffi_call("dejax_table_gather", (out, scratch))(
        leaf, flat, perm, slots, cache, scale, **attributes
    )
    rows = jax.lax.optimization_barrier(rows)
    lead = ids.shape[:-1] if call.mean else ids.shape
    return rows.reshape(lead + call.spec.row)
