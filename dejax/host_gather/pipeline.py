"""Gathers that overlap with compute: `gather_start` and `gather_done`, and `prefetched_scan` for loops."""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat
from dejax._dtypes import entering_jit
from dejax._native import ffi_call
from dejax._pytrees import pytree
from dejax.host_gather._drive_reads import drive_gather, drive_start
from dejax.host_gather._ids import checked_ids
from dejax.host_gather._native_call import GatherCall, memory_gather, native_arguments
from dejax.host_gather._operands import Table, TableOperands, table_of
from dejax.host_gather._tracing import is_recorded
from dejax.host_gather.gather import GatherOptions, gather, prepare_gather

Carry = TypeVar("Carry")
_sites = itertools.count(1)


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PendingRows:
    """A read of rows that is under way.

    `gather_start` returns it; pass it to `gather_done` once, in the same jitted function.

    Attributes:
        ticket: on a GPU a small array that orders the start before the end of the read and identifies it; on other
            platforms the rows themselves.
        held: the device arrays that the read needs until it is done; for a table on a drive all arrays that it needs.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, gather_done, gather_start
    >>> table = HostTable.from_numpy(np.arange(6, dtype=np.float32).reshape(3, 2))
    >>> @jax.jit
    ... def step(table, ids, w):
    ...     pending, w = gather_start(table, ids, before=w)
    ...     product = w @ w  # runs while the rows come
    ...     rows, product = gather_done(pending, after=product)
    ...     return rows @ product
    >>> step(table, jnp.array([2, 0]), jnp.eye(2))
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """

    ticket: Array
    held: tuple[Array, ...]
    site: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    # `ticket` has the rows: of tables in memory on the CPU, and outside of jit.
    there: bool = dataclasses.field(metadata={"static": True})
    of_drive: GatherCall | None = dataclasses.field(default=None, metadata={"static": True})  # a table on a drive


def gather_start(table: Table, ids: ArrayLike, *, before: Any = None, **options: Any) -> Any:
    """Begins to read rows of a table, so that the read overlaps with the computation until `gather_done`.

    Use it inside of jitted functions; outside, it reads the rows at once. Until `gather_done` the rows lie in device
    memory outside of jax's pool.

    Args:
        table: a table [rows, *row] of any kind. The rows of a table that is divided over a mesh are exchanged at once,
            because XLA overlaps collectives itself.
        ids: int[...], the rows to read.
        before: pytree of arrays that the overlapped computation uses. XLA orders operations by their data alone, so
            `gather_start` returns these arrays again, and a computation that uses the returned arrays runs after the
            start of the read.
        options: mode, fill_value, out_dtype, scale, order and num_sms, as in `gather`. The default of num_sms is 4, the
            fewest multiprocessors that saturate the bus; 8 or 16 if `out_dtype` makes rows two or four times as wide;
            and four times as many if some rows lie on the device. A DeviceTable is read by all multiprocessors.

    Returns:
        PendingRows; with `before`, a pair (PendingRows, before).

    Raises:
        TypeError: `table` is no table, `ids` are not integers, a dtype is not possible, or an option is unknown.
        ValueError: `mode` or `order` is unknown, `num_sms` is below 1, `reduce` is given, the table was sliced or
            mapped, or `value_and_grad` differentiates it.
        TableClosedError: the table was closed or donated.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, gather_done, gather_start
    >>> table = HostTable.from_numpy(np.arange(6, dtype=np.float32).reshape(3, 2))
    >>> jax.jit(lambda table, ids: gather_done(gather_start(table, ids)))(table, jnp.array([2, 0]))
    Array([[4., 5.],
           [0., 1.]], dtype=float32)
    """
    chosen = GatherOptions.of("gather_start", options)
    pending, before = table_of("gather_start", table)._begin("gather_start", ids, before, chosen)
    return pending if before is None else (pending, before)


def gather_done(pending: PendingRows, *, after: Any = None) -> Any:
    """Waits for the rows that `gather_start` began to read, and returns them.

    Args:
        pending: the PendingRows of `gather_start`.
        after: pytree of arrays, the results of the overlapped computation. The wait happens after they are computed.

    Returns:
        The rows [*ids.shape, *row]; with `after`, a pair (rows, after).

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, gather_done, gather_start
    >>> table = HostTable.from_numpy(np.arange(6, dtype=np.float32).reshape(3, 2))
    >>> @jax.jit
    ... def step(table, ids, x):
    ...     pending, x = gather_start(table, ids, before=x)
    ...     return gather_done(pending, after=jnp.sin(x))
    >>> rows, sines = step(table, jnp.array([1]), jnp.zeros(3))
    >>> rows, sines
    (Array([[2., 3.]], dtype=float32), Array([0., 0., 0.], dtype=float32))
    """
    last = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    if pending.there:
        rows = pending.ticket
    elif pending.of_drive is not None:
        rows = drive_gather(pending.of_drive, *pending.held, ticket=pending.ticket, site=pending.site, after=last)
    else:
        done = _Done.alone(pending.site, pending.shape, pending.dtype)
        rows = done([pending.ticket], [*last, *pending.held])
    return rows if after is None else (rows, after)


def gather_done_joined(
    pending: Sequence[PendingRows], pieces: Sequence[tuple[int, int, int]], *, after: Any = None
) -> Any:
    """Rows of several gathers in one array. It costs the copy that `gather_done` costs, and no other one.

    Args:
        pending: from `gather_start`, with rows of one shape and dtype.
        pieces: for each run of rows of the result the number of its gather, its first row there and its rows.
        after: as in `gather_done`.

    Returns:
        [rows, *row]; with `after`, (rows, after).
    """
    row, dtype = pending[0].shape[1:], pending[0].dtype
    last = [jnp.asarray(x) for x in jax.tree.leaves(after)]
    if pending[0].there or pending[0].of_drive is not None:
        found = [gather_done(some, after=last) for some in pending]
        rows = jnp.concatenate([found[n][0][first : first + count] for n, first, count in pieces])
        return rows if after is None else (rows, after)
    row_bytes = math.prod(row) * dtype.itemsize
    total = sum(count for _, _, count in pieces)
    done = _Done(
        tuple(some.site for some in pending),
        (total, *row),
        dtype,
        tuple((n, first * row_bytes, count * row_bytes) for n, first, count in pieces),
    )
    rows = done([some.ticket for some in pending], [*last, *(x for some in pending for x in some.held)])
    return rows if after is None else (rows, after)


def prefetched_scan(
    step: Callable[[Carry, Array, Any], tuple[Carry, Any]],
    init: Carry,
    table: Table,
    ids: ArrayLike,
    xs: Any = None,
    *,
    depth: int = 1,
    **options: Any,
) -> tuple[Carry, Any]:
    """`jax.lax.scan` over steps that read rows of a table: the rows of a step are read while earlier steps compute.

    Args:
        step: function `(carry, rows, x) -> (carry, y)`, with the rows [*ids.shape[1:], *row] of the step's ids.
        init: the first carry.
        table: a table [rows, *row] of any kind; the step must not write it.
        ids: int[steps, ...], the rows that each step reads.
        xs: pytree of arrays [steps, ...], or None.
        depth: number of steps by which reads are ahead; each takes device memory for its rows.
        options: the options of `gather_start`, with the same defaults; `mode` must be "fill".

    Returns:
        A pair (last carry, stacked ys), as from `jax.lax.scan`.

    Raises:
        TypeError: `table` is no table, `ids` are not integers, a dtype is not possible, or an option is unknown.
        ValueError: `mode` is not "fill", `order` is unknown, `depth` or `num_sms` is below 1, `ids` has no axis of
            steps, `reduce` is given, the table was sliced or mapped, or `value_and_grad` differentiates it.
        TableClosedError: the table was closed or donated.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> ids = np.array([[0], [2]])
    >>> total, _ = prefetched_scan(lambda c, rows, _: (c + rows.sum(), None), jnp.zeros(()), table, ids)
    >>> float(total)
    10.0
    """
    operands = table_of("prefetched_scan", table)._operands("prefetched_scan")
    ids = checked_ids("prefetched_scan", ids, len(table))
    init, xs = entering_jit("prefetched_scan", (init, xs))
    if ids.ndim == 0:
        raise ValueError("prefetched_scan: `ids` must have a leading axis of steps, got a scalar; give int[steps, ...]")
    if depth < 1:
        raise ValueError(f"prefetched_scan: `depth` must be at least 1, got {depth}")
    chosen = GatherOptions.of("prefetched_scan", options)
    if chosen.mode != "fill":
        raise ValueError(f"prefetched_scan: `mode` must be 'fill', got {chosen.mode!r}; clip the ids beforehand")
    if operands is None:
        return jax.lax.scan(lambda carry, x: step(carry, gather(table, x[0], **options), x[1]), init, (ids, xs))
    # Starts beyond the last step read nothing: their ids are out of range.
    padded = jnp.concatenate([ids, jnp.full((depth, *ids.shape[1:]), -1, ids.dtype)])
    source, _ = _prepare("prefetched_scan", operands, padded[0], chosen)
    everything = jax.tree.leaves((operands.leaf, operands.slots, operands.cache, chosen.scale, init, ids, xs))
    if not any(isinstance(x, jax.core.Tracer) for x in everything):
        return jax.jit(functools.partial(prefetched_scan, step, depth=depth, **options))(init, table, ids, xs)
    if operands.spec.on_drive:
        return _scan_ahead_on_drive(step, init, source, padded, xs, depth)
    if operands.spec.platform != "cuda":
        return jax.lax.scan(lambda carry, x: step(carry, gather(table, x[0], **options), x[1]), init, (ids, xs))
    return _scan_ahead(step, init, source, padded, xs, depth)


def _scan_ahead(
    step: Callable[[Any, Array, Any], tuple[Any, Any]],
    init: Any,
    source: GatherSource,
    padded: Array,
    xs: Any,
    depth: int,
) -> tuple[Any, Any]:
    """The loop of `prefetched_scan` on a GPU. `padded` has the ids of all steps and of `depth` steps after the last."""
    site, held = next(_sites), source.held
    done = _Done.alone(site, padded.shape[1:] + source.call.spec.row, source.call.out_dtype)

    def start(ticket: Array, ids: Array, place: _Place) -> Array:
        # The ticket passes through, so that starts keep the order of the loop.
        return _start(source, site, place, ids, [ticket])[1][0]

    ticket = jnp.zeros((2,), jnp.uint32)
    for k in range(depth):
        ticket = start(ticket, padded[k], _Place.NEXT if k else _Place.FIRST)

    def body(state: tuple[Any, Array], x: Any) -> tuple[tuple[Any, Array], Any]:
        carry, ticket = state
        ahead, x = x
        ticket = start(ticket, ahead, _Place.NEXT)
        rows = done([ticket], held)
        carry, y = step(carry, rows, x)
        return (carry, ticket), y

    (carry, ticket), ys = jax.lax.scan(body, (init, ticket), (padded[depth:], xs))
    last: list[Array] = []
    for _ in range(depth):  # frees the memory of the starts beyond the last step
        last = [done([ticket], [*last, *held])]
    return carry, ys


def _scan_ahead_on_drive(
    step: Callable[[Any, Array, Any], tuple[Any, Any]],
    init: Any,
    source: GatherSource,
    padded: Array,
    xs: Any,
    depth: int,
) -> tuple[Any, Any]:
    """The loop of `prefetched_scan` over a table on a drive; `padded` as in `_scan_ahead`."""
    site, call = next(_sites), source.call
    Open = tuple[tuple[Array, Array], ...]

    def start(open_reads: Open, ids: Array) -> Open:
        place = _Place.NEXT if open_reads else _Place.FIRST
        if not open_reads or call.spec.platform == "cuda":
            last = open_reads[-1][0] if open_reads else jnp.zeros((2,), jnp.uint32)
            ticket, _ = drive_start(call, source.leaf, ids, source.slots, site, place, [last])
            return (*open_reads, (ticket, ids))
        # The oldest ticket passes through the start: its gather would else come first, and wait before the start.
        (oldest, its_ids), *others = open_reads
        ticket, (oldest,) = drive_start(call, source.leaf, ids, source.slots, site, place, [oldest])
        return ((oldest, its_ids), *others, (ticket, ids))

    def done(open_reads: Open) -> tuple[Array, Open]:
        (first, ids), *others = open_reads
        # On a GPU the address of the last ticket finds the reads of the loop, elsewhere a number finds each of them.
        ticket = open_reads[-1][0] if call.spec.platform == "cuda" else first
        held = (source.leaf, ids, source.scale, source.slots, source.cache)
        return drive_gather(call, *held, ticket=ticket, site=site), tuple(others)

    open_reads: Open = ()
    for k in range(depth):
        open_reads = start(open_reads, padded[k])

    def body(state: tuple[Any, Open], x: Any) -> tuple[tuple[Any, Open], Any]:
        carry, open_reads = state
        ahead, x = x
        rows, rest = done(start(open_reads, ahead))
        carry, y = step(carry, rows, x)
        return (carry, rest), y

    (carry, open_reads), ys = jax.lax.scan(body, (init, open_reads), (padded[depth:], xs))
    while open_reads:  # those beyond the last step
        _, open_reads = done(open_reads)
    return carry, ys


# -------------------------------------------------------------------------------------------- start and done


class _Place(enum.IntEnum):
    """Whether a start stands alone or in a chain whose starts are done in order; `Place` of pending_sites.h."""

    ALONE = 0
    FIRST = 1
    NEXT = 2


def begin_read(
    what: str, operands: TableOperands, ids: Any, before: Any, options: GatherOptions
) -> tuple[PendingRows, Any]:
    """`gather_start` of a table of one device."""
    source, ids = _prepare(what, operands, ids, options)
    return start_alone(source, ids, before)


def rows_there(rows: Array) -> PendingRows:
    """Rows that were read at once, for `gather_done`."""
    return PendingRows(rows, (), 0, rows.shape, rows.dtype, True)


def start_alone(source: GatherSource, ids: Array, before: Any) -> tuple[PendingRows, Any]:
    """Begins a gather, whose arguments were checked; `before` as in `gather_start`."""
    through, tree = jax.tree.flatten(before)
    pending, through = _start(source, next(_sites), _Place.ALONE, ids, [jnp.asarray(x) for x in through])
    return pending, jax.tree.unflatten(tree, through)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class GatherSource:
    """The operands of an overlapped gather, except its ids."""

    call: GatherCall
    leaf: Array
    scale: Array
    slots: Array
    cache: Array

    @property
    def held(self) -> tuple[Array, ...]:
        """The arrays on the device that must live until the gather is done."""
        return tuple(x for x in (self.scale, self.slots, self.cache) if x.size)


def _prepare(what: str, operands: TableOperands, ids: Any, options: GatherOptions) -> tuple[GatherSource, Array]:
    """Checks the arguments of an overlapped gather."""
    if options.reduce is not None:
        raise ValueError(
            f"{what}: `reduce` must be None for a gather that is begun ahead, got another; reduce the rows that come "
            "back"
        )
    if is_recorded(operands.spec):
        raise ValueError(
            f"{what}: value_and_grad does not see gathers that are begun ahead; use `gather` in the loss, or read rows "
            "ahead outside of it and pass them on"
        )
    ids, call, scale = prepare_gather(what, operands, ids, options, overlapped=True)
    return GatherSource(call, operands.leaf, scale, operands.slots, operands.cache), ids


def _start(
    source: GatherSource, site: int, place: _Place, ids: Array, through: list[Array]
) -> tuple[PendingRows, list[Array]]:
    """Begins a gather. The call returns `through` unchanged, so that compute which uses it runs after the start."""
    call, scale, slots, cache = source.call, source.scale, source.slots, source.cache
    shape = ids.shape + call.spec.row
    if call.spec.on_drive and _compat.staging_trace() is not None:
        ticket, through = drive_start(call, source.leaf, ids, slots, site, place, through)
        held = (source.leaf, ids, scale, slots, cache)
        return PendingRows(ticket, held, site, shape, call.out_dtype, False, call), through
    if call.spec.platform != "cuda" or _compat.staging_trace() is None:
        read = drive_gather if call.spec.on_drive else functools.partial(memory_gather, fan_out=1)
        rows = read(call=call, leaf=source.leaf, ids=ids, scale=scale, slots=slots, cache=cache)
        return PendingRows(rows, (), site, shape, call.out_dtype, True), through
    arguments = native_arguments(call, 1, ids, slots.size > 0, ticket=True)
    types = [jax.typeof(x) for x in (source.leaf, arguments.ids, scale, slots, cache)]
    word = _compat.varying_result((2,), jnp.uint32, *types)
    # What is held until the gather is done is what the call reads, not another copy of it.
    scale, slots, cache = jax.lax.optimization_barrier((scale, slots, cache))
    ticket, _, *passed = ffi_call(
        "dejax_table_gather_start",
        (word, word, *(jax.typeof(x) for x in through)),
        (source.leaf, arguments.ids, arguments.perm, slots, cache, scale, *through),
        fixed=[0, 3, 4, 5],
        fixed_results=[0, 1],  # the address of a ticket identifies the start
        aliases={6 + k: 2 + k for k in range(len(through))},
        has_side_effect=True,
        **arguments.attributes,
        site=np.int64(site),
        place=np.int64(place),
        out_bytes=np.int64(math.prod(shape) * call.out_dtype.itemsize),
    )
    held = tuple(x for x in (scale, slots, cache) if x.size)
    return PendingRows(ticket, held, site, shape, call.out_dtype, False), passed


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    """Waits for starts, and copies their rows to one result.

    Attributes:
        sites: the numbers of the starts' places in the program.
        shape, dtype: the shape and dtype of the result.
        pieces: the result's parts in order: the number of a start, and the first byte and number of bytes there.
    """

    sites: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype
    pieces: tuple[tuple[int, int, int], ...]

    @classmethod
    def alone(cls, site: int, shape: tuple[int, ...], dtype: np.dtype) -> _Done:
        return cls((site,), shape, dtype, ((0, 0, math.prod(shape) * dtype.itemsize),))

    def __call__(self, tickets: Sequence[Array], after: Sequence[Array]) -> Array:
        """The rows; the wait comes after the arrays `after`, which live until then."""
        out = _compat.varying_result(self.shape, self.dtype, *map(jax.typeof, tickets))
        (rows,) = ffi_call(
            "dejax_table_gather_done",
            [out],
            [*tickets, *after],
            fixed=range(len(tickets)),
            has_side_effect=True,
            sites=np.asarray(self.sites, np.int64),
            pieces=np.asarray(self.pieces, np.int64).reshape(-1),
        )
        return rows
