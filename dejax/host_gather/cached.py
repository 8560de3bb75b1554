"""`CachedTable`: a table whose most used rows also lie on the device."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather._ids import checked_ids, distinct_ids, in_range
from dejax.host_gather.gather import gather
from dejax.host_gather.host import HostTable
from dejax.host_gather.table import LocalTable


class CachedTable(LocalTable):
    """A `HostTable` and a copy of some of its rows in device memory. All functions that take tables take both.

    The set of cached rows is fixed when the table is made. The kernel decides row by row whether a row is cached, so
    shapes are static and nothing is synchronised. Results are those of the table. `scatter`, `scatter_add` and the
    optimizers also update the cached copies, and return a CachedTable. Writing only the table inside makes them stale.

    A pytree. On the CPU, where there is one memory, the cache is kept but not read.

    Attributes:
        table: the table.
        cache: uint[cached, words], the cached rows as unsigned integers, on the device.
        slots: int32[rows], the row of `cache` that holds each row of the table, -1 for none. It takes 4 bytes a row.
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("rows", "cache", "slots")

    def __init__(self, table: HostTable, cache: Array, slots: Array) -> None:
        super().__init__(table._leaf, table._spec, cache, slots)

    table: Any = property(operator.attrgetter("_host_part"))
    cache: Any = property(operator.attrgetter("_hot"))
    slots: Any = property(operator.attrgetter("_slots"))

    @classmethod
    def from_ids(cls, table: HostTable, ids: ArrayLike) -> CachedTable:
        """Caches the rows `ids`, int[cached], distinct.

        Raises:
            ValueError: an id that is out of range or occurs twice.
        """
        hot = distinct_ids("CachedTable", "ids", ids, len(table))
        slots = np.full(len(table), -1, np.int32)
        slots[hot] = np.arange(hot.size, dtype=np.int32)
        leaf = table._concrete("CachedTable")
        places = jnp.asarray(slots) if table._spec.shared else jax.device_put(slots, next(iter(leaf.devices())))
        return cls(table, gather(table._words(), hot), places)

    @classmethod
    def from_counts(cls, table: HostTable, counts: ArrayLike, cached_rows: int) -> CachedTable:
        """Caches the rows with the highest counts.

        Args:
            table: the table.
            counts: real[rows]: out-degrees of a graph's nodes, given frequencies, or a profile (`count_ids`).
            cached_rows: how many rows to cache.

        Raises:
            TypeError: counts that are not real.
            ValueError: counts of another shape, or with NaN; more cached rows than rows.
        """
        weights = np.asarray(counts)
        if weights.dtype.kind not in "biuf" and not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"CachedTable: `counts` must be real, got {weights.dtype}")
        if weights.shape != (len(table),):
            raise ValueError(f"CachedTable: `counts` must have shape ({len(table)},), got {weights.shape}")
        if not 0 <= cached_rows <= len(table):
            raise ValueError(f"CachedTable: `cached_rows` must be from 0 to {len(table)}, got {cached_rows}")
        if np.isnan(weights).any():
            raise ValueError("CachedTable: `counts` must not have NaN")
        if not cached_rows:
            return cls.from_ids(table, np.zeros(0, np.int64))
        # Not by the negated counts: unsigned ones would wrap.
        cold = len(weights) - cached_rows
        return cls.from_ids(table, np.argpartition(weights, cold)[cold:] if cold else np.arange(len(weights)))

    def hit_rate(self, ids: ArrayLike) -> Array:
        """The fraction of `ids` in range whose rows are cached: a float32 scalar on the device. It may be jitted.

        Raises:
            TypeError: ids that are no integers.
        """
        ids = checked_ids("CachedTable.hit_rate", ids, len(self))
        hits = self._places(ids) >= 0
        return hits.sum() / jnp.maximum(in_range(ids, len(self)).sum(), 1).astype(jnp.float32)


def count_ids(counts: ArrayLike, ids: ArrayLike) -> Array:
    """Adds one to `counts` for each of `ids` in range: a profile for `CachedTable.from_counts`. It may be jitted.

    Args:
        counts: int32[rows], the counts so far; begin with zeros.
        ids: int[...], any shape.

    Returns:
        int32[rows].

    Raises:
        TypeError: ids that are no integers.
        ValueError: counts that do not have one axis.
    """
    counts = jnp.asarray(counts)
    if counts.ndim != 1:
        raise ValueError(f"count_ids: `counts` must be [rows], got {counts.shape}")
    if not counts.size:
        return counts
    ids = checked_ids("count_ids", ids, counts.size).reshape(-1)
    there = in_range(ids, counts.size)
    return counts.at[jnp.where(there, ids, 0)].add(there.astype(counts.dtype))
