"""Gathers that run beside compute: `gather_start` and `gather_done`, and `prefetched_scan` over a loop."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather._ids import checked_ids
from dejax.host_gather._recording import recorded
from dejax.host_gather.cached import CachedTable
from dejax.host_gather.gather import Call, flat_call, gather, launch, parts, prepared
from dejax.host_gather.table import HostTable

Carry = TypeVar("Carry")
_sites = itertools.count(1)

BESIDE_SMS = 4
"""Multiprocessors that a gather takes from the compute beside it: the fewest that saturate the bus."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PendingRows:
    """A gather under way. Give it to `gather_done`, once, in the same jitted function.

    Attributes:
        ticket: on a GPU a small array that orders start before done, and by whose place done knows its start; elsewhere
            the rows themselves.
        held: what the gather reads on the device until it is done.
    """

    ticket: Array
    held: tuple[Array, ...]
    site: int = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    there: bool = dataclasses.field(metadata={"static": True})  # the ticket is the rows: nothing runs ahead on the CPU


def gather_start(table: HostTable | CachedTable, ids: ArrayLike, *, before: Any = None, **options: Any) -> Any:
    """Begins a gather on a stream of its own, so that what comes before `gather_done` runs beside it.

    Inside a jitted function. The rows go to memory outside of jax's pool until `gather_done` takes them.

    Args:
        table: HostTable or CachedTable [rows, *row].
        ids: int[...].
        before: a pytree of arrays on which the compute that is to overlap depends. XLA orders calls by data alone: it
            comes back tied to the start, and compute that uses it runs after the start.
        options: those of `gather`: mode, fill_value, out_dtype, scale, order, num_sms, which is 4 by default
            (`BESIDE_SMS`): the fewest multiprocessors that saturate the bus.

    Returns:
        PendingRows; with `before`, (PendingRows, before).

    Raises:
        TypeError: no HostTable, ids that are no integers, a dtype that cannot be had, an option that is none of these.
        ValueError: an unknown mode or order, `num_sms` under 1, `reduce`, a table that was sliced or mapped, or one
            that `value_and_grad` differentiates by.
        TableClosedError: the table was closed or donated.
    """
    source, ids = _source("gather_start", table, ids, options)
    through, tree = jax.tree.flatten(before)
    pending, through = _start(source, next(_sites), _ALONE, ids, [jnp.asarray(x) for x in through])
    return pending if before is None else (pending, jax.tree.unflatten(tree, through))


def gather_done(pending: PendingRows, *, after: Any = None) -> Any:
    """The rows of a gather that was begun.

    Args:
        pending: from `gather_start`.
        after: a pytree of arrays, results of the overlapped compute: the wait comes after them.

    Returns:
        [*ids.shape, *row]; with `after`, (rows, after).
    """
    if pending.there:
        rows = pending.ticket
    else:
        last = [jnp.asarray(x) for x in jax.tree.leaves(after)]
        rows = _done(pending.site, pending.shape, pending.dtype, pending.ticket, [*last, *pending.held])
    return rows if after is None else (rows, after)


def prefetched_scan(
    step: Callable[[Carry, Array, Any], tuple[Carry, Any]],
    init: Carry,
    table: HostTable | CachedTable,
    ids: ArrayLike,
    xs: Any = None,
    *,
    depth: int = 1,
    **options: Any,
) -> tuple[Carry, Any]:
    """`jax.lax.scan` whose step gets the rows of its ids, read while earlier steps compute.

    Args:
        step: (carry, rows, x) -> (carry, y), with rows [*ids.shape[1:], *row].
        init: the first carry.
        table: HostTable or CachedTable [rows, *row]; the step must not write it.
        ids: int[steps, ...], of all steps.
        xs: a pytree of arrays [steps, ...], or None.
        depth: how many steps ahead rows are read; each takes device memory for its rows.
        options: those of `gather_start`, with the same defaults, `num_sms` of 4 among them; `mode` must be "fill".

    Returns:
        (last carry, stacked ys), as `jax.lax.scan`.

    Raises:
        TypeError: no HostTable, ids that are no integers, a dtype that cannot be had, an option that is none of these.
        ValueError: another mode than "fill", an unknown order, `depth` or `num_sms` under 1, ids without an axis of
            steps, `reduce`, a table that was sliced or mapped, or one that `value_and_grad` differentiates by.
        TableClosedError: the table was closed or donated.

    >>> table = HostTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> ids = np.array([[0], [2]])
    >>> total, _ = prefetched_scan(lambda c, rows, _: (c + rows.sum(), None), jnp.zeros(()), table, ids)
    >>> float(total)
    10.0
    """
    host, slots, cache = parts("prefetched_scan", table)
    ids = checked_ids("prefetched_scan", ids, len(host))
    if ids.ndim == 0:
        raise ValueError("prefetched_scan: `ids` must have a leading axis of steps")
    if depth < 1:
        raise ValueError(f"prefetched_scan: `depth` must be at least 1, {depth} was given")
    chosen = _checked_options("prefetched_scan", options)
    if chosen["mode"] != "fill":
        raise ValueError("prefetched_scan: only mode='fill'; clip the ids beforehand")
    # What is started beyond the last step reads nothing: its ids are out of range.
    padded = jnp.concatenate([ids, jnp.full((depth, *ids.shape[1:]), -1, ids.dtype)])
    source, _ = _source("prefetched_scan", table, padded[0], options)
    everything = jax.tree.leaves((host, slots, cache, chosen["scale"], init, ids, xs))
    if not any(isinstance(x, jax.core.Tracer) for x in everything):
        return jax.jit(functools.partial(prefetched_scan, step, depth=depth, **options))(init, table, ids, xs)
    if host._spec.platform != "cuda":
        return jax.lax.scan(lambda carry, x: step(carry, gather(table, x[0], **options), x[1]), init, (ids, xs))

    steps, site = ids.shape[0], next(_sites)
    held = [x for x in (source.scale, source.slots, source.cache) if x.size]

    def start(ticket: Array, at: Array, place: int) -> Array:
        # The ticket passes through, so that starts come in the order of the loop.
        return _start(source, site, place, at, [ticket])[1][0]

    ticket = jnp.zeros((2,), jnp.uint32)
    for k in range(depth):
        ticket = start(ticket, padded[k], _NEXT if k else _FIRST)
    shape, dtype = ids.shape[1:] + host.shape[1:], source.call.out_dtype

    def body(state: tuple[Any, Array], x: Any) -> tuple[tuple[Any, Array], Any]:
        carry, ticket = state
        ahead, x = x
        ticket = start(ticket, ahead, _NEXT)
        rows = _done(site, shape, dtype, ticket, held)
        carry, y = step(carry, rows, x)
        return (carry, ticket), y

    (carry, ticket), ys = jax.lax.scan(body, (init, ticket), (padded[depth : depth + steps], xs))
    last: list[Array] = []
    for _ in range(depth):  # frees what was started beyond the end
        last = [_done(site, shape, dtype, ticket, [*last, *held])]
    return carry, ys


# Where a start stands among those of its site: by itself, or in a chain of starts that are done in their order.
_ALONE, _FIRST, _NEXT = range(3)


@dataclasses.dataclass(frozen=True, slots=True)
class _Source:
    """What a gather that is begun reads, but for its ids."""

    call: Call
    leaf: Array
    scale: Array
    slots: Array
    cache: Array


def _source(what: str, table: Any, ids: Any, options: dict[str, Any]) -> tuple[_Source, Array]:
    """Checked arguments of a gather that is begun."""
    host, slots, cache = parts(what, table)
    if recorded(host):
        raise ValueError(
            f"{what}: value_and_grad does not see gathers that are begun ahead; use `gather` in the loss, or read rows "
            "ahead outside of it and pass them on"
        )
    chosen = _checked_options(what, options)
    leaf, ids, call, scale = prepared(
        what, host, ids, chosen["mode"], chosen["fill_value"], chosen["out_dtype"], chosen["scale"], None,
        chosen["order"], chosen["num_sms"],
    )  # fmt: skip
    return _Source(call, leaf, scale, slots, cache), ids


def _checked_options(what: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a gather that is begun, with their defaults."""
    if options.get("reduce") is not None:
        raise ValueError(f"{what}: `reduce` is not supported; reduce the rows that come back")
    rest = {"mode": "fill", "fill_value": 0, "out_dtype": None, "scale": None, "order": "auto", "num_sms": BESIDE_SMS}
    if unknown := set(options) - set(rest) - {"reduce"}:
        raise TypeError(f"{what}: unknown options {sorted(unknown)}; it takes {sorted(rest)}")
    return {**rest, **options}


def _start(source: _Source, site: int, place: int, ids: Array, through: list[Array]) -> tuple[PendingRows, list[Array]]:
    """Begins a gather; `through` comes back as it was, from the call, so that what uses it runs after the start."""
    call, scale, slots, cache = source.call, source.scale, source.slots, source.cache
    shape = ids.shape + call.spec.row
    if call.spec.platform != "cuda":
        rows = launch(call, 1, source.leaf, ids, scale, slots, cache)
        return PendingRows(rows, (), site, shape, call.out_dtype, True), through
    flat, perm, attributes, _ = flat_call(call, 1, source.leaf, ids, slots, ticket=True)
    word = jax.ShapeDtypeStruct((2,), jnp.uint32)
    # XLA folds slices into the calls that they are operands or results of, and in jax 0.11 keeps the call that it
    # replaces where that has side effects: every gather of a loop ran twice, and a done found the wrong one. It does
    # not look through barriers, which cost nothing.
    flat, scale, slots, cache, *through = jax.lax.optimization_barrier((flat, scale, slots, cache, *through))
    started = jax.ffi.ffi_call(
        "dejax_table_gather_start",
        (word, word, *(jax.typeof(x) for x in through)),
        has_side_effect=True,
        input_output_aliases={6 + k: 2 + k for k in range(len(through))},
    )
    ticket, _, *through = started(
        source.leaf,
        flat,
        perm,
        slots,
        cache,
        scale,
        *through,
        **attributes,
        site=np.int64(site),
        place=np.int64(place),
        out_bytes=np.int64(math.prod(shape) * call.out_dtype.itemsize),
    )
    held = tuple(x for x in (scale, slots, cache) if x.size)
    return PendingRows(ticket, held, site, shape, call.out_dtype, False), through


def _done(site: int, shape: tuple[int, ...], dtype: np.dtype, ticket: Array, after: list[Array] | None = None) -> Array:
    out = jax.ShapeDtypeStruct(shape, dtype)
    done = jax.ffi.ffi_call("dejax_table_gather_done", out, has_side_effect=True)
    last = jax.lax.optimization_barrier(tuple(after or ()))  # as in _start
    return jax.lax.optimization_barrier(done(ticket, *last, site=np.int64(site)))
