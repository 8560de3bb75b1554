"""`CachedTable`: a table whose most used rows also lie on the device."""

from __future__ import annotations

import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat
from dejax.host_gather._ids import checked_ids, distinct_ids, in_range
from dejax.host_gather.gather import gather
from dejax.host_gather.tables.drive import DriveTable
from dejax.host_gather.tables.host import HostTable
from dejax.host_gather.tables.table import LocalTable


class CachedTable(LocalTable):
    """A `HostTable` or `DriveTable` with copies of its most used rows in device memory, for use as any other table.

    The set of cached rows is fixed when the table is made. Reads give the same results as reads of the table; kernels
    decide for each row which copy to read, so shapes stay static and nothing is synchronised. `scatter`, `scatter_add`
    and the optimizers update the cached copies, too, and return a CachedTable. Do not write the table inside on its
    own, because the copies would then be out of date.

    A CachedTable is a pytree. On the CPU, where there is one memory, the cache is kept but not read.

    Attributes:
        table: the table in host memory or on a drive.
        cache: uint[cached, words], the cached rows as unsigned integers, on the device.
        slots: int32[rows], for each row of the table its row in `cache`, or -1 if it is not cached. It takes 4 bytes of
            device memory for each row.
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("rows", "cache", "slots")

    def __init__(self, table: HostTable | DriveTable, cache: Array, slots: Array) -> None:
        super().__init__(table._leaf, table._spec, cache, slots)

    table: Any = property(operator.attrgetter("_host_part"))
    cache: Any = property(operator.attrgetter("_hot"))
    slots: Any = property(operator.attrgetter("_slots"))

    @classmethod
    def from_ids(cls, table: HostTable | DriveTable, ids: ArrayLike) -> CachedTable:
        """Caches the rows with the given ids, int[cached], which must be distinct.

        Raises:
            ValueError: an id is out of range or occurs twice.
        """
        hot = distinct_ids("CachedTable", "ids", ids, len(table))
        slots = np.full(len(table), -1, np.int32)
        slots[hot] = np.arange(hot.size, dtype=np.int32)
        leaf = table._concrete("CachedTable")
        places = jnp.asarray(slots) if table._spec.shared else jax.device_put(slots, next(iter(leaf.devices())))
        with _compat.on_devices(leaf.devices()):
            return cls(table, _rows(table, hot), places)

    @classmethod
    def from_counts(cls, table: HostTable | DriveTable, counts: ArrayLike, cached_rows: int) -> CachedTable:
        """Caches the rows with the highest counts.

        Args:
            table: the table.
            counts: real[rows], how often each row is expected to be read, such as the out-degrees of a graph's nodes,
                or counts of real reads (`count_ids`).
            cached_rows: number of rows to cache.

        Raises:
            TypeError: `counts` are not real numbers.
            ValueError: `counts` have another shape or a NaN, or `cached_rows` is larger than the number of rows.
        """
        weights = np.asarray(counts)
        if weights.dtype.kind not in "biuf" and not jnp.issubdtype(weights.dtype, jnp.floating):
            raise TypeError(f"CachedTable: `counts` must be real, got {weights.dtype}")
        if weights.shape != (len(table),):
            raise ValueError(f"CachedTable: `counts` must have shape ({len(table)},), got {weights.shape}")
        if not 0 <= cached_rows <= len(table):
            raise ValueError(f"CachedTable: `cached_rows` must be from 0 to {len(table)}, got {cached_rows}")
        if np.isnan(weights).any():
            raise ValueError("CachedTable: `counts` must be numbers, got NaN; replace NaN by 0")
        if not cached_rows:
            return cls.from_ids(table, np.zeros(0, np.int64))
        # Not by the negated counts: unsigned ones would wrap.
        cold = len(weights) - cached_rows
        return cls.from_ids(table, np.argpartition(weights, cold)[cold:] if cold else np.arange(len(weights)))

    def hit_rate(self, ids: ArrayLike) -> Array:
        """The share of `ids` whose rows are cached, as a float32 scalar on the device. Ids out of range do not count.

        It works inside of `jax.jit`, too.

        Raises:
            TypeError: `ids` are not integers.
        """
        ids = checked_ids("CachedTable.hit_rate", ids, len(self))
        hits = self._places(ids) >= 0
        return hits.sum() / jnp.maximum(in_range(ids, len(self)).sum(), 1).astype(jnp.float32)


def _rows(table: HostTable | DriveTable, ids: np.ndarray) -> Array:
    """uint[ids, words]: rows as unsigned integers; of a drive as many at once as its cache holds."""
    words = table._words()
    most = table._rows_at_once() if ids.size else 0
    if not 0 < most < ids.size:
        return gather(words, ids)
    return jnp.concatenate([gather(words, ids[start : start + most]) for start in range(0, ids.size, most)])


def count_ids(counts: ArrayLike, ids: ArrayLike) -> Array:
    """Counts how often rows are read: adds 1 to `counts[id]` for each id, for `CachedTable.from_counts`.

    It works inside of `jax.jit`, too. Ids out of range do not count.

    Args:
        counts: int32[rows], the counts so far; begin with zeros.
        ids: int[...], of any shape.

    Returns:
        int32[rows], the new counts.

    Raises:
        TypeError: `ids` are not integers.
        ValueError: `counts` does not have one axis.
    """
    counts = jnp.asarray(counts)
    if counts.ndim != 1:
        raise ValueError(f"count_ids: `counts` must be [rows], got {counts.shape}")
    if not counts.size:
        return counts
    ids = checked_ids("count_ids", ids, counts.size).reshape(-1)
    there = in_range(ids, counts.size)
    return counts.at[jnp.where(there, ids, 0)].add(there.astype(counts.dtype))
