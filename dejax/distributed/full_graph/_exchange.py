"""The collectives of full-graph layers, inside `shard_map`: rows to the devices that read them, and sums back.

Both are static: each device sends the rows `send` in the rounds of the plan, and what it receives lies in its halo
slots in the same order. The transpose of one is the other.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from dejax.distributed.full_graph._rounds import Round
from dejax.rgnn.lowering.segments import extremum_at, where_rows, wide

Rounds = tuple[Round, ...]


def exchange(x: jax.Array, send: jax.Array, rounds: Rounds, axis: str) -> jax.Array:
    """The rows of a device followed by its halo: [owned + halo slots, *F].

    Args:
        x: [owned, *F], the rows that the device owns.
        send: int32[halo slots], the own row that goes out in each slot; at least `owned` where none does. In one round
            no two slots send the same row.
        rounds: the plan.
        axis: name of the mesh axis.

    Returns:
        The rows with the received ones; zeros in slots that nothing arrives in.
    """
    return exchange_beside(x, None, (), send, rounds, axis)[0]


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def exchange_beside(
    x: jax.Array, valid: jax.Array | None, beside: tuple[Any, ...], send: jax.Array, rounds: Rounds, axis: str
) -> tuple[jax.Array, tuple[Any, ...]]:
    """As `exchange`, while other values are computed.

    Args:
        x: [owned, *F], the rows that the device owns.
        valid: bool[owned], False for rows that are padding and may hold anything: they and their gradients become
            zeros, while own rows are copied. No such row is sent. None: all rows are copied as they are.
        beside: values, arrays or `RowScaled`, that need nothing of the exchange. They exist before the received rows
            are written behind `x`.
        send, rounds, axis: as for `exchange`.

    Returns:
        What `exchange` returns, and `beside`.
    """
    received = []
    for some in rounds:
        place = send[some.start : some.start + some.rows]
        out = x.at[place].get(mode="fill", fill_value=0, unique_indices=True)
        received.append(jax.lax.ppermute(out, axis, some.pairs))
    x = where_rows(valid, x)
    if not received:
        return x, beside
    # The copy of the own rows does not wait for the others, which are written behind them.
    room = jnp.pad(x, ((0, send.shape[0]), *((0, 0),) * (x.ndim - 1)))
    room, received, beside = jax.lax.optimization_barrier((room, received, beside))
    return jax.lax.dynamic_update_slice_in_dim(room, jnp.concatenate(received), x.shape[0], 0), beside


def _forward(
    x: jax.Array, valid: jax.Array | None, beside: tuple[Any, ...], send: jax.Array, rounds: Rounds, axis: str
) -> tuple[tuple[jax.Array, tuple[Any, ...]], tuple[jax.Array | None, jax.Array]]:
    return exchange_beside(x, valid, beside, send, rounds, axis), (valid, send)


def _backward(rounds: Rounds, axis: str, saved: Any, cotangents: Any) -> tuple[Any, None, Any, None]:
    (valid, send), (of_rows, of_beside) = saved, cotangents
    return _collected(of_rows, valid, send, rounds, axis), None, of_beside, None


exchange_beside.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def collect(x: jax.Array, send: jax.Array, rounds: Rounds, axis: str) -> jax.Array:
    """The transpose of `exchange`: halo rows go back to their owners, which add them to their own: [owned, *F].

    Rows are added in the order of the rounds, so that results are the same in every run.

    Args:
        x: [owned + halo slots, *F].
        send, rounds, axis: as for `exchange`.
    """
    return _collected(x, None, send, rounds, axis)


def _collected(x: jax.Array, valid: jax.Array | None, send: jax.Array, rounds: Rounds, axis: str) -> jax.Array:
    """As `collect`, with zeros in own rows that are not `valid`."""
    owned = x.shape[0] - send.shape[0]
    total = where_rows(valid, wide(x[:owned]))
    for some in rounds:
        back = tuple((receiver, sender) for sender, receiver in some.pairs)
        place = send[some.start : some.start + some.rows]
        rows = jax.lax.ppermute(jax.lax.slice_in_dim(x, owned + some.start, owned + some.start + some.rows), axis, back)
        total = total.at[place].add(rows.astype(total.dtype), mode="drop", unique_indices=True)
    return total.astype(x.dtype)


def _collect_forward(x: jax.Array, send: jax.Array, rounds: Rounds, axis: str) -> tuple[jax.Array, jax.Array]:
    return collect(x, send, rounds, axis), send


def _collect_backward(rounds: Rounds, axis: str, send: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, None]:
    return exchange(cotangent, send, rounds, axis), None


collect.defvjp(_collect_forward, _collect_backward)


def collect_extremum(x: jax.Array, send: jax.Array, rounds: Rounds, axis: str, sign: int) -> jax.Array:
    """Like `collect`, with the maximum (with `sign` -1 the minimum) instead of the sum; without gradient."""
    x = jax.lax.stop_gradient(x)
    owned = x.shape[0] - send.shape[0]
    found = x[:owned]
    for some in rounds:
        back = tuple((receiver, sender) for sender, receiver in some.pairs)
        place = send[some.start : some.start + some.rows]
        part = jax.lax.slice_in_dim(x, owned + some.start, owned + some.start + some.rows)
        rows = jax.lax.ppermute(part, axis, back)
        # Devices outside of the round receive zeros, and their slots send no row.
        found = extremum_at(found.at[place], rows, sign)
    return found
