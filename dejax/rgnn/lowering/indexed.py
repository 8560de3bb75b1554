"""Rows of tables read by integers (`lookup`), and rows added up by integers (`place`), by plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.ir.forms import wide
from dejax.rgnn.ir.inter import Op, Space
from dejax.rgnn.lowering.segments import (
    extremum_at,
    lowest,
    num_rows,
    segments,
    valid_rows,
    where_rows,
    zero_if_none,
)


def lookup(op: Op, graph: RelGraph, table: jax.Array, index: jax.Array) -> jax.Array:
    """`table[r, index[i]]` for each row i, where r is the row of the table that the map leads to."""
    size = table.shape[1]
    if size == 0 or table.shape[0] == 0:
        return jnp.zeros((index.shape[0], *op.shape), table.dtype)
    row, column = _row(op, graph, index), _inside(index, size, op.attr("outside"))
    found = table.at[row, column].get(mode="fill", fill_value=0)
    if op.attr("outside") != "clip":
        return found
    # As in jax.numpy, what was clipped has no gradient.
    inside = (_inside(index, size, "wrap") < size).reshape(*index.shape, *(1,) * (found.ndim - index.ndim))
    return jnp.where(inside, found, jax.lax.stop_gradient(found))


def place(op: Op, graph: RelGraph, space: Space, x: jax.Array, index: jax.Array) -> jax.Array:
    """The sum, maximum or minimum of the rows x that have one index, for each row that the map leads to.

    Args:
      op: the operator.
      graph: the graph.
      space: the space of the rows.
      x: [rows, *shape of an index, ...].
      index: integer[rows, *shape of an index].
    """
    rows, size = num_rows(graph, op.space), op.attr("size")
    row, column = _row(op, graph, index), _inside(index, size, op.attr("outside"))
    valid = valid_rows(graph, space)
    if valid is not None:  # padding goes nowhere
        column = where_rows(valid, column, size)
    shape = (rows, size, *x.shape[index.ndim :])
    if op.attr("op") == "sum":
        added = wide(x)
        return jnp.zeros(shape, added.dtype).at[row, column].add(added, mode="drop").astype(x.dtype)
    sign = 1 if op.attr("op") == "max" else -1
    found = extremum_at(jnp.full(shape, lowest(x.dtype, sign), x.dtype).at[row, column], x, sign)
    some = (
        jnp.zeros(shape[:2], bool).at[row, column].set(True, mode="drop").reshape(*shape[:2], *(1,) * (len(shape) - 2))
    )
    return zero_if_none(found, some, sign)


def _row(op: Op, graph: RelGraph, index: jax.Array) -> jax.Array:
    """The row of the coarse value for each index; out of range for padding."""
    via, entries = op.attr("via"), index.shape[0]
    if via == "all":
        row = jnp.zeros((entries,), jnp.int32)
    elif via == "self":
        row = jnp.arange(entries, dtype=jnp.int32)
    else:
        row = segments(graph, via).index
    return row.reshape(-1, *(1,) * (index.ndim - 1))


def _inside(index: jax.Array, size: int, outside: str) -> jax.Array:
    """Indices in range, or `size` for those that go nowhere.

    Negative ones count from the end, but with `drop`; those still out of range go nowhere, but with `clip`.
    """
    if index.dtype in (jnp.uint32, jnp.uint64):  # those past the end stay there, and become no negative numbers
        index = jnp.minimum(index, jnp.asarray(size, index.dtype))
    index = index.astype(jnp.int64 if index.dtype in (jnp.int64, jnp.uint64) else jnp.int32)
    if outside != "drop":
        index = jnp.where(index < 0, index + size, index)
    if outside == "clip":
        return jnp.clip(index, 0, max(size - 1, 0))
    return jnp.where((index >= 0) & (index < size), index, size)
