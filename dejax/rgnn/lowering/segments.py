"""The groupings of a graph by the compiler's maps, and reductions over their rows by plain XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from dejax._compat import reduce_extremum
from dejax.pallas import TableSlice
from dejax.rgnn.graphs.building.sorting_traced import take_or
from dejax.rgnn.graphs.loop_tables import GROUPINGS
from dejax.rgnn.graphs.rel_graph import RelGraph
from dejax.rgnn.graphs.segments import Segments
from dejax.rgnn.ir.forms import wide
from dejax.rgnn.ir.inter import TYPE_VIA, VIAS, Space


def segments(graph: RelGraph, via: str) -> Segments:
    """The grouping of the graph that a map stands for."""
    name = GROUPINGS[via]
    if getattr(graph, name) is None:
        raise ValueError(f"the graph has no grouping {via!r}: its edge types have sources of several node types")
    return graph.grouping(name)


def num_rows(graph: RelGraph, space: Space) -> int:
    return {
        Space.NODE: graph.num_nodes,
        Space.EDGE: graph.num_edges,
        Space.SOURCE_PAIR: graph.num_source_pairs,
        Space.DESTINATION_PAIR: graph.num_destination_pairs,
        Space.EDGE_TYPE: graph.num_edge_types,
        Space.NODE_TYPE: graph.num_node_types,
        Space.GRAPH: 1,
    }[space]


def valid_rows(graph: RelGraph, space: Space) -> jax.Array | None:
    """Which rows of a space are not padding; None where all are."""
    if space == Space.EDGE:
        return graph.edge_mask
    if space == Space.NODE:
        return graph.node_mask
    if space in (Space.SOURCE_PAIR, Space.DESTINATION_PAIR) and graph.edge_mask is not None:
        via = TYPE_VIA[space]
        return segments(graph, via).index < num_rows(graph, VIAS[via].coarse)
    return None


def first_rows(table: Any, count: int | None) -> Any:
    """The first elements of a table, or all of them."""
    if table is None or count is None or table.shape[0] == count:
        return table
    return dataclasses.replace(table, length=count) if isinstance(table, TableSlice) else table[:count]


def where_rows(mask: jax.Array | None, x: jax.Array, other: float = 0) -> jax.Array:
    return x if mask is None else jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), x, jnp.asarray(other, x.dtype))


def take_rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `x`; an index past the end (padding) reads zeros."""
    return take_or(x, index, 0)


# Sums over types read everything once for each row: wikikg2's 535 weights of 64 by 64 are 2^21 elements.
_MASKED_SUM = 2**26


def segment_sum(x: jax.Array, group: Segments) -> jax.Array:
    """Sums of each row's entries.

    Sums over types (weights of edge types by node type, say) have one order of additions everywhere. The others are
    scattered additions, whose order changes from run to run on a GPU; there the kernels make them.
    """
    entries = wide(x)
    if group.num_rows <= 64 and group.num_rows * x.size <= _MASKED_SUM:
        member = group.index == jnp.arange(group.num_rows, dtype=group.index.dtype)[:, None]
        total = jnp.where(member.reshape(*member.shape, *(1,) * (x.ndim - 1)), entries, 0).sum(1)
    else:
        places = jnp.zeros((group.num_rows, *x.shape[1:]), entries.dtype).at[group.index]
        total = places.add(entries, mode="drop", wrap_negative_indices=False)
    return total.astype(x.dtype)


SegmentSum = Callable[[jax.Array, Segments], jax.Array]


def lowest(dtype: jnp.dtype, sign: int = 1) -> float:
    """The lowest value of a dtype, or (`sign` of -1) the highest."""
    if dtype == jnp.bool_:
        return sign < 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -sign * jnp.inf
    return jnp.iinfo(dtype).min if sign > 0 else jnp.iinfo(dtype).max


def segment_extremum(x: jax.Array, group: Segments, sign: int) -> jax.Array:
    """The maximum of each row's entries, or (`sign` of -1) the minimum; 0 where there is none, or none is finite."""
    start = jnp.full((group.num_rows, *x.shape[1:]), lowest(x.dtype, sign), x.dtype)
    some = (group.offsets[1:] > group.offsets[:-1]).reshape(-1, *(1,) * (x.ndim - 1))
    return zero_if_none(extremum_at(start.at[group.index], x, sign), some, sign)


def extremum_at(places: Any, x: jax.Array, sign: int) -> jax.Array:
    """The array of `places` (`array.at[index]`), each the maximum (`sign` of -1: minimum) of itself and the rows x."""
    put = places.max if sign > 0 else places.min
    return put(x, mode="drop", wrap_negative_indices=False)


def extremum_of_all(x: jax.Array, sign: int) -> jax.Array:
    """The maximum (`sign` of -1: minimum) of all rows, as one row; `lowest` where there are no rows."""
    return reduce_extremum("max" if sign > 0 else "min", x, 0, keepdims=True, initial=lowest(x.dtype, sign))


def zero_if_none(found: jax.Array, some: jax.Array, sign: int) -> jax.Array:
    """Extrema with 0 where there is no entry, or none is finite, as in the kernels."""
    if jnp.issubdtype(found.dtype, jnp.floating):
        some = some & (found != lowest(found.dtype, sign))
    return jnp.where(some, found, jnp.zeros((), found.dtype))
