"""Writing rows of a table in place: `scatter`, `scatter_add`, and row-sparse SGD, Adagrad and Adam."""

from __future__ import annotations

import dataclasses
import enum
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _native
from dejax._dtypes import known_array, native_order
from dejax._native import ffi_call
from dejax._pytrees import named_pytree
from dejax.host_gather import _kernels, _spec
from dejax.host_gather._ids import checked_ids
from dejax.host_gather._operands import Table, table_of
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.gather import DEVICE_SMS, gather
from dejax.host_gather.gradient import RowGradient
from dejax.host_gather.tables import _sharing
from dejax.host_gather.tables._lifetime import reporting_closed
from dejax.host_gather.tables.table import LocalTable

# Reads and writes share the bus: 8 to 32 multiprocessors update sorted rows at 41.6 GB/s each way, 64 at 41.1, 4 at
# 40.8 (docs/performance/host_gather.md).
UPDATE_SMS = 16

Schedule = Callable[[Array], ArrayLike]
AnyTable = TypeVar("AnyTable", bound=Table)


class _UpdateKind(enum.IntEnum):
    """The operations of kernels/update.cu, with its numbers."""

    SET = 0
    ADD = 1
    SGD = 2
    ADAGRAD = 3
    ADAM = 4


def scatter(table: AnyTable, ids: ArrayLike, rows: ArrayLike, *, num_sms: int = UPDATE_SMS) -> AnyTable:
    """Writes rows into a table, in place, and returns the table.

    Inside of a jitted function, donate the table (`donate_argnums`), return the result of `scatter`, and pass
    `out_shardings=shardings(...)` to `jax.jit`, because XLA otherwise fails with "output location mismatch". Do not use
    the old table afterwards. Outside of jitted functions, `scatter` closes the table that it is given.

    Args:
        table: a table [rows, *row] that is not read-only. The copies of a CachedTable are updated as well. A table that
            is divided over a mesh is written inside of `jax.shard_map`, by all devices together.
        ids: int[...], the rows to write. Ids out of range are ignored; of equal ids the last one counts.
        rows: [*ids.shape, *row], converted to the table's dtype.
        num_sms: largest number of GPU multiprocessors to use.

    Returns:
        The table, in the same memory.

    Raises:
        ValueError: the table is read-only or shared, or `rows` have another shape.
        TypeError: `ids` are not integers.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.zeros((3, 2))
    >>> table = scatter(table, np.array([2, 2]), np.array([[1.0, 1.0], [5.0, 6.0]]))
    >>> table.numpy()
    array([[0., 0.],
           [0., 0.],
           [5., 6.]], dtype=float32)
    """
    return _scattered(_Update("scatter", _UpdateKind.SET, num_sms), table, ids, rows)


def scatter_add(table: AnyTable, ids: ArrayLike, rows: ArrayLike, *, num_sms: int = UPDATE_SMS) -> AnyTable:
    """Adds rows to rows of a table, in place, and returns the table. Rows of equal ids are summed in float32, in order.

    In a jitted function, donate the table and pass `out_shardings`, as for `scatter`.

    Args:
        table: a table [rows, *row] of float32, bfloat16 or float16 that is not read-only, as for `scatter`.
        ids: int[...], the rows to which is added. Ids out of range are ignored.
        rows: [*ids.shape, *row], floats; other dtypes are converted to float32.
        num_sms: largest number of GPU multiprocessors to use.

    Returns:
        The table, in the same memory.

    Raises:
        ValueError: the table is read-only or shared, or `rows` have another shape.
        TypeError: `ids` are not integers, or the table has another dtype.
    """
    return _scattered(_Update("scatter_add", _UpdateKind.ADD, num_sms), table, ids, rows)


def _scattered(call: _Update, table: AnyTable, ids: ArrayLike, rows: ArrayLike) -> AnyTable:
    def write(table: LocalTable, ids: Any, rows: Any) -> LocalTable:
        return _update(call, table, (), ids, rows)[0]

    written: AnyTable = table_of(call.what, table)._write(call.what, write, ids, rows)
    return written


@named_pytree
class OptimizerState(NamedTuple):
    """The state of a row-sparse optimizer: a step counter, and float32 tables of moments with the shape of the table.

    The tables of moments lie where the rows of the table lie: in host memory, on the device, or split in the same way.

    Attributes:
        step: int32 scalar on the device, number of steps so far.
        first: Adagrad's sum of squares, or Adam's first moment; None for SGD.
        second: Adam's second moment; otherwise None.

    >>> import numpy as np
    >>> from dejax.host_gather import HostTable, adagrad
    >>> state = adagrad(0.1).init(HostTable.from_numpy(np.ones((3, 2), np.float32)))
    >>> int(state.step), state.first.shape, state.second
    (0, (3, 2), None)
    """

    step: Array
    first: Table | None
    second: Table | None


class Optimizer(NamedTuple):
    """An optimizer for tables: a pair of functions, as in Optax. `sgd`, `adagrad` and `adam` make one.

    Attributes:
        init: function `table -> OptimizerState`. The table must not be read-only.
        update: function `(RowGradient, OptimizerState, table) -> (table, OptimizerState)`. It writes only the rows that
            have a gradient, in place; a jitted step must donate state and table.
    """

    init: Callable[[Any], OptimizerState]
    update: Callable[[RowGradient, OptimizerState, Any], tuple[Any, OptimizerState]]


def sgd(learning_rate: float | Schedule, *, weight_decay: float = 0.0, num_sms: int = UPDATE_SMS) -> Optimizer:
    """Stochastic gradient descent on the rows of a table that have a gradient: x <- x - rate (g + weight_decay x).

    Args:
        learning_rate: a scalar, or a function of the step count (from 0).
        weight_decay: factor of the row that is added to its gradient.
        num_sms: largest number of GPU multiprocessors to use.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.zeros((2, 2))
    >>> optimizer = sgd(0.5)
    >>> gradient = RowGradient(jnp.array([1, 1]), jnp.ones((2, 2)))
    >>> table, state = optimizer.update(gradient, optimizer.init(table), table)
    >>> table.numpy()
    array([[ 0.,  0.],
           [-1., -1.]], dtype=float32)
    """
    return _optimizer(_UpdateRule(_UpdateKind.SGD, weight_decay=weight_decay), learning_rate, num_sms)


def adagrad(
    learning_rate: float | Schedule,
    *,
    initial_accumulator: float = 0.1,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    num_sms: int = UPDATE_SMS,
) -> Optimizer:
    """Adagrad on the rows of a table that have a gradient: a <- a + g^2, x <- x - rate g / (sqrt(a) + eps).

    Args:
        learning_rate: a scalar, or a function of the step count (from 0).
        initial_accumulator: initial value of a in all rows.
        eps: added to the square root.
        weight_decay: factor of the row that is added to its gradient.
        num_sms: largest number of GPU multiprocessors to use.

    Returns:
        The optimizer. Its state has one float32 table of the table's shape.
    """
    rule = _UpdateRule(_UpdateKind.ADAGRAD, moments=1, initial=initial_accumulator, eps=eps, weight_decay=weight_decay)
    return _optimizer(rule, learning_rate, num_sms)


def adam(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    num_sms: int = UPDATE_SMS,
) -> Optimizer:
    """Lazy Adam: Adam on the rows of a table that have a gradient; the moments of all other rows do not decay.

    The bias correction uses the count of all steps, as in Adam on the whole table. Weight decay is decoupled, as in
    AdamW.

    Args:
        learning_rate: a scalar, or a function of the step count (from 0).
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the square root.
        weight_decay: `rate * weight_decay` times the row is subtracted from each row that has a gradient.
        num_sms: largest number of GPU multiprocessors to use.

    Returns:
        The optimizer. Its state has two float32 tables of the table's shape.
    """
    rule = _UpdateRule(_UpdateKind.ADAM, moments=2, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    return _optimizer(rule, learning_rate, num_sms)


@dataclasses.dataclass(frozen=True, slots=True)
class _UpdateRule:
    """An optimizer's update rule and its constants."""

    op: _UpdateKind
    moments: int = 0  # float32 tables in its state
    initial: float = 0.0  # first value of their elements
    b1: float = 0.0
    b2: float = 0.0
    eps: float = 0.0
    weight_decay: float = 0.0

    @property
    def name(self) -> str:
        return self.op.name.lower()

    def hyper(self, rate: ArrayLike, step: Array) -> Array:
        """float32[7], the operand `hyper` of kernels/update.cu."""
        values = (rate, self.b1, self.b2, self.eps, 1 - self.b1**step, 1 - self.b2**step, self.weight_decay)
        return jnp.stack([jnp.asarray(value, jnp.float32) for value in values])


def _optimizer(rule: _UpdateRule, learning_rate: float | Schedule, num_sms: int) -> Optimizer:
    what, call = f"{rule.name}.init", _Update(f"{rule.name}.update", rule.op, num_sms)

    def init(table: LocalTable) -> OptimizerState:
        spec = table._operands(what).spec
        if spec.is_split or spec.on_device:
            _check_writable(what, spec)
        moments = [table._moment(what, rule.initial) for _ in range(rule.moments)]
        return OptimizerState(jnp.zeros((), jnp.int32), *moments, *[None] * (2 - rule.moments))

    def update(gradient: RowGradient, state: OptimizerState, table: LocalTable) -> tuple[Any, OptimizerState]:
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        hyper = rule.hyper(rate, (state.step + 1).astype(jnp.float32))
        moments = tuple(x for x in (state.first, state.second) if x is not None)
        new, moments = _update(call, table, moments, gradient.ids, gradient.values, hyper)
        return new, OptimizerState(state.step + 1, *moments, *[None] * (2 - len(moments)))

    local = Optimizer(init, update)
    return Optimizer(
        lambda table: table_of(what, table)._new_state(local),
        lambda gradient, state, table: table_of(call.what, table)._after(local, gradient, state)[:2],
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Update:
    """The static part of a write that does not depend on the table."""

    what: str  # the caller's name, for errors
    op: _UpdateKind
    num_sms: int


def _update(
    call: _Update, table: LocalTable, moments: tuple[Any, ...], ids: Any, rows: Any, hyper: Array | None = None
) -> tuple[Any, tuple[Any, ...]]:
    """The table and the optimizer's moments after a write; of a shared table, with the rows of all devices."""
    what = call.what
    spec = table._operands(what).spec.plain
    _check_writable(what, spec)
    ids = checked_ids(what, ids, spec.rows)
    rows = _checked_rows(call, spec, ids, rows)
    for moment in moments:
        if moment.shape != table.shape or moment.dtype != np.float32 or moment.read_only:
            raise ValueError(f"{what}: the state must be float32 tables of shape {table.shape}, got {moment!r}")
    if spec.shared:
        ids, rows = _sharing.of_all_devices(what, ids, rows, spec.row)
    parts = [one._parts() for one in (table, *moments)]
    written = []
    for (part, *rest), own in zip(zip(*parts, strict=True), table._ids_in_parts(ids), strict=True):
        written.append(_write(call, part, tuple(rest), _sharing.own_rows(part._spec, own), rows, hyper))
    made = zip(*((new, *after) for new, after in written), strict=True)
    new, *after = (old._of_parts(own, ids) for old, own in zip((table, *moments), made, strict=True))
    return new, tuple(after)


def _write(
    call: _Update, table: Any, moments: tuple[Any, ...], ids: Array, rows: Array, hyper: Array | None
) -> tuple[Any, tuple[Any, ...]]:
    """A table whose rows lie in one memory, and the moments, after a write."""
    what = call.what
    _native.extension(f"dejax.host_gather.{what}")
    spec = table._spec.plain
    hyper = jnp.zeros((7,), jnp.float32) if hyper is None else hyper
    leaves = tuple(part._operands(what).leaf for part in (table, *moments))
    arrays = (ids.reshape(-1), rows.reshape(ids.size, *spec.row), hyper)
    if any(isinstance(x, jax.core.Tracer) for x in (*leaves, *arrays)):
        written = _native_update(call.op, spec, call.num_sms, leaves, *arrays)
        if spec.shared and spec.sharers > 1:
            written = _after_all_devices(call, table, written, arrays)
    else:
        with reporting_closed(leaves[0], what):
            written = _eager(call.op, spec, call.num_sms, tuple(x.sharding for x in leaves))(leaves, *arrays)
    new, *new_moments = (old._with(x) for x, old in zip(written, (table, *moments), strict=True))
    return new, tuple(new_moments)


def _after_all_devices(
    call: _Update, table: LocalTable, written: tuple[Array, ...], arrays: tuple[Array, Array, Array]
) -> tuple[Array, ...]:
    """The leaves once all devices of the process have written them: what reads them then reads all rows.

    The order is one of data: a read of what was written, a sum over the devices, and a write of no row.
    """
    ids, rows, hyper = arrays
    none = jnp.full((1,), -1, jnp.int32)
    nowhere = _sharing.id_after_all_devices(gather(table._with(written[0]), none))
    nothing = jnp.zeros((1, *rows.shape[1:]), rows.dtype)
    return _native_update(call.op, table._spec.plain, call.num_sms, written, nowhere.astype(ids.dtype), nothing, hyper)


def _check_writable(what: str, spec: TableSpec) -> None:
    if not spec.read_only:
        return
    if spec.on_drive:
        raise ValueError(
            f"{what}: the table lies on a drive, and is for reading: tables that are trained stay in memory; copy it "
            "with HostTable.from_numpy(table.numpy()) to write to it"
        )
    if spec.shared:
        raise ValueError(
            f"{what}: the table is shared by several devices for reading; use table.share(mesh, writable=True)"
        )
    why = "read-only (made from a file or a read-only array)"
    if spec.is_split or spec.on_device:
        why = "read-only: it has rows in device memory and was made without `writable=True`"
    raise ValueError(f"{what}: the table is {why}; copy it with HostTable.from_numpy(table.numpy()) to write to it")


def _checked_rows(call: _Update, spec: TableSpec, ids: Array, rows: Any) -> Array:
    """Rows to write, of a dtype that the native call takes."""
    what = call.what
    rows = native_order(known_array(rows))
    # jax would cut integers of 64 bits to 32 bits.
    wide = isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.dtype.itemsize == 8
    rows = jnp.asarray(rows.astype(spec.dtype) if wide and spec.dtype.itemsize <= 4 else rows)
    if rows.shape != ids.shape + spec.row:
        raise ValueError(f"{what}: rows for these ids must have shape {ids.shape + spec.row}, got {rows.shape}")
    if call.op == _UpdateKind.SET:
        if jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            raise TypeError(
                f"{what}: rows of {spec.dtype} need jax's 64-bit mode: jax.config.update('jax_enable_x64', True)"
            )
        return rows.astype(spec.dtype)
    if spec.dtype.name not in _spec.RESULT_CODES:
        raise TypeError(f"{what}: the table must be of float32, bfloat16 or float16, got {spec.dtype}")
    return rows if rows.dtype.name in _spec.RESULT_CODES else rows.astype(jnp.float32)


@functools.lru_cache(maxsize=256)
def _eager(op: _UpdateKind, spec: TableSpec, num_sms: int, shardings: tuple[Any, ...]) -> Any:
    """A write outside of jitted functions: the tables are donated to it."""
    return jax.jit(functools.partial(_native_update, op, spec, num_sms), donate_argnums=0, out_shardings=shardings)


def _native_update(
    op: _UpdateKind, spec: TableSpec, num_sms: int, leaves: tuple[Array, ...], ids: Array, rows: Array, hyper: Array
) -> tuple[Array, ...]:
    """The native call: the leaves of the table and the moments, written in place."""
    ids, perm = jax.lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
    codes = _spec.RESULT_CODES
    table_type = _spec.MOVE_BYTES if op == _UpdateKind.SET else codes[spec.dtype.name]
    values_type = _spec.MOVE_BYTES if op == _UpdateKind.SET else codes[rows.dtype.name]
    kernel = 0
    if spec.platform == "cuda":
        kernel = _kernels.prepare(
            "update.cu",
            ID="int" if ids.dtype == jnp.int32 else "long long",
            UNIT=_spec.store_unit(spec.row_bytes),
            OP=int(op),
            TABLE=table_type,
            VALUES=values_type,
        )
    # The results have the types of the operands, memory space included: a result in host memory must alias an operand
    # in host memory. A loop may take tables on the device from a stack, and stack them.
    aliases = {4 + k: k for k in range(len(leaves))}
    written = ffi_call(
        "dejax_table_update",
        [jax.typeof(x) for x in leaves],
        (ids, perm, rows, hyper, *leaves),
        fixed=() if spec.on_device else aliases,
        aliases=aliases,
        op=np.int64(op),
        table_type=np.int64(table_type),
        values_type=np.int64(values_type),
        row_bytes=np.int64(spec.row_bytes),
        kernel=np.int64(kernel),
        grid=np.int64(DEVICE_SMS if spec.on_device and num_sms == UPDATE_SMS else num_sms),
    )
    return tuple(written)
