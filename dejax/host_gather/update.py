"""Writing rows of a table in place: `scatter`, `scatter_add`, and row-sparse SGD, Adagrad and Adam."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _native
from dejax.host_gather import _kernels, _types
from dejax.host_gather._ids import checked_ids
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.gather import parts
from dejax.host_gather.gradient import RowGradient
from dejax.host_gather.table import HostTable

# Reads and writes share the bus: with 8 to 32 SMs sorted rows went at 41.6 GB/s each way, with 64 at 41.1, with 4 at
# 40.8. What rows are asked for by, and their headers, take the rest of the way up.
UPDATE_SMS = 16
_SET, _ADD, _SGD, _ADAGRAD, _ADAM = range(5)

Schedule = Callable[[Array], ArrayLike]
Table = TypeVar("Table", HostTable, CachedTable)


def scatter(table: Table, ids: ArrayLike, rows: ArrayLike, *, num_sms: int = UPDATE_SMS) -> Table:
    """The table with `rows` at `ids`, written in place.

    Inside a jitted function, donate the table to it (`donate_argnums`), say where it comes out (`out_shardings`, see
    `shardings`; else XLA refuses with "output location mismatch"), and return what comes out of here; what went in must
    not be used afterwards. Outside of one it is donated here: the table given is closed.

    Args:
        table: HostTable or CachedTable [rows, *row], not read-only. Of a CachedTable the copies are written, too.
        ids: int[...]; ids out of range are left out. Of equal ids the last one counts.
        rows: [*ids.shape, *row], converted to the table's dtype.
        num_sms: multiprocessors to take at most.

    Returns:
        The table, in the same memory.

    Raises:
        ValueError: a read-only or shared table, or rows of another shape.
        TypeError: ids that are no integers.

    >>> table = HostTable.zeros((3, 2))
    >>> table = scatter(table, np.array([2, 2]), np.array([[1.0, 1.0], [5.0, 6.0]]))
    >>> table.numpy()
    array([[0., 0.],
           [0., 0.],
           [5., 6.]], dtype=float32)
    """
    table, _, _ = _update("scatter", _SET, table, None, None, ids, rows, None, num_sms)
    return table


def scatter_add(table: Table, ids: ArrayLike, rows: ArrayLike, *, num_sms: int = UPDATE_SMS) -> Table:
    """The table with `rows` added at `ids`, in place; rows of equal ids are summed in float32, in the order given.

    Donate the table and name where it comes out, as for `scatter`.

    Args:
        table: HostTable or CachedTable [rows, *row] of float32, bfloat16 or float16, not read-only.
        ids: int[...]; ids out of range are left out.
        rows: [*ids.shape, *row], floats; other numbers are converted to float32.
        num_sms: multiprocessors to take at most.

    Returns:
        The table, in the same memory.

    Raises:
        ValueError: a read-only or shared table, or rows of another shape.
        TypeError: ids that are no integers, or a table of another dtype.
    """
    table, _, _ = _update("scatter_add", _ADD, table, None, None, ids, rows, None, num_sms)
    return table


class OptimizerState(NamedTuple):
    """State of a row-sparse optimizer: a step counter on the device, and float32 tables beside the rows.

    Attributes:
        step: int32 scalar, steps so far.
        first: Adagrad's sum of squares, Adam's first moment; None for SGD.
        second: Adam's second moment; None otherwise.
    """

    step: Array
    first: HostTable | None
    second: HostTable | None


class Optimizer(NamedTuple):
    """A pair of functions, as in Optax, for tables.

    Attributes:
        init: table -> OptimizerState; the table is a HostTable or a CachedTable.
        update: (RowGradient, OptimizerState, table) -> (table, OptimizerState), all in place: donate state and table.
    """

    init: Callable[[Any], OptimizerState]
    update: Callable[[RowGradient, OptimizerState, Any], tuple[Any, OptimizerState]]


def sgd(learning_rate: float | Schedule, *, weight_decay: float = 0.0, num_sms: int = UPDATE_SMS) -> Optimizer:
    """x <- x - rate (g + weight_decay x), for the rows that have a gradient.

    Args:
        learning_rate: a number, or a function of the step count (from 0).
        weight_decay: added to the gradient of touched rows, as a multiple of the row.
        num_sms: multiprocessors to take at most.

    >>> table = HostTable.zeros((2, 2))
    >>> optimizer = sgd(0.5)
    >>> gradient = RowGradient(jnp.array([1, 1]), jnp.ones((2, 2)))
    >>> table, state = optimizer.update(gradient, optimizer.init(table), table)
    >>> table.numpy()
    array([[ 0.,  0.],
           [-1., -1.]], dtype=float32)
    """
    return _optimizer("sgd", _SGD, 0, 0.0, learning_rate, (0.0, 0.0, 0.0), weight_decay, num_sms)


def adagrad(
    learning_rate: float | Schedule,
    *,
    initial_accumulator: float = 0.1,
    eps: float = 1e-7,
    weight_decay: float = 0.0,
    num_sms: int = UPDATE_SMS,
) -> Optimizer:
    """a <- a + g^2, x <- x - rate g / (sqrt(a) + eps), for the rows that have a gradient.

    Args:
        learning_rate: a number, or a function of the step count (from 0).
        initial_accumulator: of a, for all rows.
        eps: added to the root.
        weight_decay: added to the gradient of touched rows, as a multiple of the row.
        num_sms: multiprocessors to take at most.

    Returns:
        The optimizer; its state is a float32 table of the table's shape.
    """
    return _optimizer(
        "adagrad", _ADAGRAD, 1, initial_accumulator, learning_rate, (0.0, 0.0, eps), weight_decay, num_sms
    )


def adam(
    learning_rate: float | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    num_sms: int = UPDATE_SMS,
) -> Optimizer:
    """Adam on the rows that have a gradient ("lazy": moments of other rows do not decay); decoupled weight decay.

    The bias correction goes by the count of all steps, as in Adam on the whole table.

    Args:
        learning_rate: a number, or a function of the step count (from 0).
        b1: decay of the first moment.
        b2: decay of the second moment.
        eps: added to the root.
        weight_decay: subtracts `rate * weight_decay` of a touched row from it, beside Adam's step.
        num_sms: multiprocessors to take at most.

    Returns:
        The optimizer; its state are two float32 tables of the table's shape.
    """
    return _optimizer("adam", _ADAM, 2, 0.0, learning_rate, (b1, b2, eps), weight_decay, num_sms)


def _optimizer(
    name: str,
    op: int,
    moments: int,
    initial: float,
    learning_rate: float | Schedule,
    constants: tuple[float, float, float],
    weight_decay: float,
    num_sms: int,
) -> Optimizer:
    b1, b2, eps = constants

    def init(table: HostTable | CachedTable) -> OptimizerState:
        leaf = parts(f"{name}.init", table)[0]._concrete(f"{name}.init")
        (device,) = leaf.devices()

        def moment() -> HostTable:
            found = HostTable.zeros(table.shape, np.float32, device=device)
            if initial:
                rows = max(1, (64 << 20) // max(1, found._spec.row_bytes))
                block = np.full((min(rows, len(table)), *table.shape[1:]), initial, np.float32)
                for start in range(0, len(table), rows):
                    found.write(start, block[: len(table) - start])
            return found

        return OptimizerState(
            jnp.zeros((), jnp.int32), moment() if moments > 0 else None, moment() if moments > 1 else None
        )

    def update(gradient: RowGradient, state: OptimizerState, table: Any) -> tuple[Any, OptimizerState]:
        rate = learning_rate(state.step) if callable(learning_rate) else learning_rate
        step = (state.step + 1).astype(jnp.float32)
        values = (rate, b1, b2, eps, 1 - b1**step, 1 - b2**step, weight_decay)
        hyper = jnp.stack([jnp.asarray(value, jnp.float32) for value in values])
        new, first, second = _update(
            f"{name}.update", op, table, state.first, state.second, gradient.ids, gradient.values, hyper, num_sms
        )
        return new, OptimizerState(state.step + 1, first, second)

    return Optimizer(init, update)


def _update(
    what: str,
    op: int,
    table: Any,
    first: HostTable | None,
    second: HostTable | None,
    ids: Any,
    rows: Any,
    hyper: Array | None,
    num_sms: int,
) -> tuple[Any, HostTable | None, HostTable | None]:
    parts(what, table)
    if isinstance(table, CachedTable):
        ids = checked_ids(what, ids, len(table))
        host, *moments = _update(what, op, table.table, first, second, ids, rows, hyper, num_sms)
        return table._written(host, ids), moments[0], moments[1]
    _native.extension(f"dejax.host_gather.{what}")
    leaf, spec = table._operand(what), table._spec.plain
    if spec.read_only:
        why = "shared by several devices" if spec.shared else "read-only (made from a file or a read-only array)"
        raise ValueError(f"{what}: the table is {why}; copy it with HostTable.from_numpy(table.numpy()) to write to it")
    ids = checked_ids(what, ids, spec.rows)
    rows = _rows(rows, spec)
    if rows.shape != ids.shape + spec.row:
        raise ValueError(
            f"{what}: rows of shape {ids.shape + spec.row} are needed for these ids, {rows.shape} was given"
        )
    if op == _SET:
        if jax.dtypes.canonicalize_dtype(spec.dtype) != spec.dtype:
            raise TypeError(
                f"{what}: rows of {spec.dtype} need jax's 64-bit mode: jax.config.update('jax_enable_x64', True)"
            )
        rows = rows.astype(spec.dtype)
    elif spec.dtype.name not in _types.RESULT_CODES:
        raise TypeError(
            f"{what}: only tables of float32, bfloat16 or float16 can be added to, this one has {spec.dtype}"
        )
    elif rows.dtype.name not in _types.RESULT_CODES:
        rows = rows.astype(jnp.float32)
    hyper = jnp.zeros((7,), jnp.float32) if hyper is None else hyper
    states = [state for state in (first, second) if state is not None]
    for state in states:
        if state.shape != table.shape or state.dtype != np.float32 or state.read_only:
            raise ValueError(f"{what}: the state must be float32 tables of shape {table.shape}, {state!r} was given")
    leaves = (leaf, *(state._operand(what) for state in states))
    operands = (ids.reshape(-1), rows.reshape(-1, *spec.row), hyper)
    if any(isinstance(x, jax.core.Tracer) for x in (*leaves, *operands)):
        written = _launch(op, spec, num_sms, leaves, *operands)
    else:
        with table._alive(what):
            written = _eager(op, spec, num_sms, tuple(x.sharding for x in leaves))(leaves, *operands)
    results = [HostTable(x, old._spec) for x, old in zip(written, (table, *states), strict=True)]
    return results[0], results[1] if len(results) > 1 else None, results[2] if len(results) > 2 else None


def _rows(rows: Any, spec: TableSpec) -> Array:
    """Rows as a jax array. Integers of 64 bits become the table's elements before jax would cut them to 32 bits."""
    rows = _types.native_order(rows)
    wide = isinstance(rows, np.ndarray) and rows.dtype.kind in "iu" and rows.dtype.itemsize == 8
    return jnp.asarray(rows.astype(spec.dtype) if wide and spec.dtype.itemsize <= 4 else rows)


@functools.lru_cache(maxsize=256)
def _eager(op: int, spec: TableSpec, num_sms: int, shardings: tuple[Any, ...]) -> Any:
    """A call outside of jit: the tables are donated to it."""
    return jax.jit(functools.partial(_launch, op, spec, num_sms), donate_argnums=0, out_shardings=shardings)


def _launch(
    op: int, spec: TableSpec, num_sms: int, leaves: tuple[Array, ...], ids: Array, rows: Array, hyper: Array
) -> tuple[Array, ...]:
    ids, perm = jax.lax.sort((ids, jnp.arange(ids.size, dtype=jnp.int32)), num_keys=1)
    codes = _types.RESULT_CODES
    table_type = _types.MOVE_BYTES if op == _SET else codes[spec.dtype.name]
    values_type = _types.MOVE_BYTES if op == _SET else codes[rows.dtype.name]
    kernel = 0
    if spec.platform == "cuda":
        kernel = _kernels.prepare(
            "update.cu",
            ID="int" if ids.dtype == jnp.int32 else "long long",
            UNIT=_types.store_unit(spec.row_bytes),
            OP=op,
            TABLE=table_type,
            VALUES=values_type,
        )
    # XLA folds slices into the calls that they are operands of, and forgets that the tables are written in place: it
    # may then put the results elsewhere. It does not look through barriers.
    ids, perm, rows, hyper = jax.lax.optimization_barrier((ids, perm, rows, hyper))
    # The results' types are the operands' own, memory space included: a host result must alias a host operand.
    call = jax.ffi.ffi_call(
        "dejax_table_update",
        tuple(jax.typeof(x) for x in leaves),
        input_output_aliases={4 + k: k for k in range(len(leaves))},
    )
    return tuple(
        call(
            ids,
            perm,
            rows,
            hyper,
            *leaves,
            op=np.int64(op),
            table_type=np.int64(table_type),
            values_type=np.int64(values_type),
            row_bytes=np.int64(spec.row_bytes),
            kernel=np.int64(kernel),
            grid=np.int64(num_sms),
        )
    )
