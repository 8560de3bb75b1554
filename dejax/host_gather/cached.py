"""`CachedTable`: a table whose most used rows also lie on the device."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax.host_gather.table import HostTable


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CachedTable:
    """A `HostTable` and a copy of some of its rows in device memory; `gather` takes either.

    Which rows are cached is fixed when it is made. Hit or miss is settled inside the kernel, row by row: shapes are
    static, nothing is synchronised, and results are those of the table. Writing to the table makes the copies
    stale: make the cache again.

    A pytree. On the CPU, where there is one memory, the cache is kept but not read.

    Attributes:
        table: the table.
        cache: uint[cached, words], the cached rows as the table carries them, on the device.
        slots: int32[rows], the row of `cache` that holds a row of the table, -1 where none does. It takes 4 bytes a
            row.
    """

    table: HostTable
    cache: Array
    slots: Array

    @classmethod
    def from_ids(cls, table: HostTable, ids: ArrayLike) -> CachedTable:
        """Caches the rows `ids`, int[cached], distinct.

        Raises:
            ValueError: an id that is out of range or occurs twice.
        """
        hot = np.asarray(ids).reshape(-1)
        if hot.size and (hot.dtype.kind not in "iu" or hot.min() < 0 or hot.max() >= len(table)):
            raise ValueError(f"CachedTable: `ids` must be integers from 0 to {len(table) - 1}")
        from dejax.host_gather.gather import gather

        hot = hot.astype(np.int64)
        slots = np.full(len(table), -1, np.int32)
        order = np.arange(hot.size, dtype=np.int32)
        slots[hot] = order
        if not np.array_equal(slots[hot], order):
            raise ValueError("CachedTable: `ids` must be distinct")
        leaf = table._operand("CachedTable")
        words = dataclasses.replace(table._spec, row=leaf.shape[1:], dtype=np.dtype(leaf.dtype))
        cache = gather(HostTable(leaf, words), hot)  # the bits of the rows, as the table carries them
        return cls(table, cache, jnp.asarray(slots))

    @classmethod
    def from_counts(cls, table: HostTable, counts: ArrayLike, cached_rows: int) -> CachedTable:
        """Caches the rows with the highest counts.

        Args:
            table: the table.
            counts: number[rows]: out-degrees of a graph's nodes, given frequencies, or a profile (`count_ids`).
            cached_rows: how many rows to cache.
        """
        weights = np.asarray(counts)
        if weights.shape != (len(table),):
            raise ValueError(f"CachedTable: `counts` must have shape ({len(table)},), {weights.shape} was given")
        if not 0 <= cached_rows <= len(table):
            raise ValueError(f"CachedTable: `cached_rows` must be from 0 to {len(table)}, {cached_rows} was given")
        hot = np.argpartition(-weights, cached_rows - 1)[:cached_rows] if cached_rows else np.zeros(0, np.int64)
        return cls.from_ids(table, hot)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.table.shape

    @property
    def dtype(self) -> np.dtype:
        return self.table.dtype

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, ids: Any) -> Array:
        from dejax.host_gather.gather import gather

        return gather(self, ids)

    def hit_rate(self, ids: ArrayLike) -> Array:
        """float32 scalar, on the device: the part of `ids` in range whose rows are cached. For jit or outside of it."""
        ids = jnp.asarray(ids)
        inside = (ids >= 0) & (ids < len(self))
        hits = inside & (self.slots.at[jnp.where(inside, ids, 0)].get(mode="fill", fill_value=-1) >= 0)
        return hits.sum() / jnp.maximum(inside.sum(), 1).astype(jnp.float32)


def count_ids(counts: ArrayLike, ids: ArrayLike) -> Array:
    """A profile: `counts`, int32[rows], with one added for each of `ids` in range. For jit or outside of it.

    Args:
        counts: int32[rows], the counts so far; begin with zeros.
        ids: int[...], any shape; those out of range are not counted.

    Returns:
        int32[rows], for `CachedTable.from_counts`.
    """
    counts, ids = jnp.asarray(counts), jnp.asarray(ids).reshape(-1)
    return counts.at[jnp.where(ids < 0, counts.shape[0], ids)].add(1, mode="drop")
