"""Tables with rows in device memory: all rows, or a chosen part of them."""

from __future__ import annotations

import dataclasses
import operator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat
from dejax.host_gather._ids import distinct_ids
from dejax.host_gather._spec import TableSpec, device_or_default, table_spec
from dejax.host_gather.tables.host import HostTable
from dejax.host_gather.tables.table import _TABLES, LocalTable

_BLOCK_BYTES = 64 << 20  # of rows that are converted at once


class DeviceTable(LocalTable):
    """A table whose rows all lie in device memory. Use it wherever a `HostTable` can be read.

    `table[ids]` is `gather(table, ids)`: ids out of range, which include negative ones, give rows of zeros. The table
    is read-only unless it is made with `writable=True`; then `scatter`, `scatter_add` and the optimizers write it in
    place, if the jitted step donates it. A DeviceTable is a pytree: functions of `jax.tree` may pass it on, but cannot
    compute with it.

    Attributes:
        words: uint[rows, words], the rows as unsigned integers, on the device.
        spec: shape and dtype (static).

    >>> table = DeviceTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2))
    >>> table[np.array([2, -1])]
    Array([[4., 5.],
           [0., 0.]], dtype=float32)
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("words",)

    def __init__(self, words: Array, spec: TableSpec) -> None:
        super().__init__(words, spec)

    words: Any = property(operator.attrgetter("_leaf"))
    spec: Any = property(operator.attrgetter("_spec"))

    @classmethod
    def from_numpy(cls, array: ArrayLike, *, device: jax.Device | None = None, writable: bool = False) -> DeviceTable:
        """Copies a numpy array to the device as a table.

        Args:
            array: [rows, *row], of any dtype whose elements are whole bytes.
            device: the device; by default jax's default device.
            writable: whether steps may write the table.

        Raises:
            ValueError: `array` is a scalar.
            TypeError: elements of the dtype are not whole bytes.
        """
        given = np.asarray(array)
        spec = _device_spec(table_spec(given.shape, given.dtype, device, "DeviceTable.from_numpy"), writable)
        words = spec.to_words(given)
        if np.may_share_memory(words, given):
            words = _compat.own_memory(words)
        return cls(jax.device_put(words, device_or_default(device)), spec)

    @classmethod
    def from_array(cls, array: Array, dtype: Any = None, *, writable: bool = False) -> DeviceTable:
        """Makes a table from an array that already lies on the device.

        Args:
            array: [rows, *row]. The table holds a second copy of it, unless the array is unsigned integers [rows,
                width].
            dtype: dtype of the table's rows, if `array` holds their bits as unsigned integers of the same width; by
                default the dtype of `array`.
            writable: whether steps may write the table.

        Raises:
            ValueError: `array` is a scalar, or its integers have another width than `dtype`.
            TypeError: elements of the dtype are not whole bytes.
        """
        device, what = next(iter(array.devices())), "DeviceTable.from_array"
        found = array.dtype if dtype is None else jnp.dtype(dtype)
        if dtype is not None and (array.dtype.kind != "u" or array.dtype.itemsize != found.itemsize):
            raise ValueError(f"{what}: `array` must be unsigned integers as wide as {found}, got {array.dtype}")
        spec = _device_spec(table_spec(array.shape, found, device, what), writable)
        return cls(_bits(array, spec), spec)


class SplitTable(LocalTable):
    """A table with some rows in device memory and all others in host memory, so that it may be larger than either.

    Use it wherever a `HostTable` can be read; kernels decide for each row where to read it. In contrast, a
    `CachedTable` keeps all rows in host memory, and copies of some on the device. A SplitTable is read-only unless it
    is made with `writable=True`; then `scatter`, `scatter_add` and the optimizers write both parts in place, if the
    jitted step donates it. It is a pytree.

    Attributes:
        table: the rows in host memory, by ascending id.
        hot: uint[device rows, words], the rows on the device, as unsigned integers.
        slots: int32[rows], the place of each row: i for row i of `hot`, `~k` for row k of `table`. It takes 4 bytes for
            each row.
        writable: whether steps may write the table.

    >>> table = SplitTable.from_numpy(np.arange(6.0, dtype=np.float32).reshape(3, 2), [1])
    >>> table[np.array([2, 1, -1])]
    Array([[4., 5.],
           [2., 3.],
           [0., 0.]], dtype=float32)
    """

    __slots__ = ()

    def __init__(self, table: HostTable, hot: Array, slots: Array, writable: bool = False) -> None:
        host = table._spec
        spec = dataclasses.replace(
            host, rows=slots.shape[0], leaf_rows=host.rows, read_only=host.read_only or not writable
        )
        super().__init__(table._leaf, spec, hot, slots)

    table: Any = property(operator.attrgetter("_host_part"))
    hot: Any = property(operator.attrgetter("_hot"))
    slots: Any = property(operator.attrgetter("_slots"))
    writable: Any = property(lambda self: not self.read_only, doc="Whether steps may write the table.")

    @classmethod
    def from_numpy(
        cls, array: ArrayLike, on_device: ArrayLike, *, device: jax.Device | None = None, writable: bool = False
    ) -> SplitTable:
        """Makes a table from a numpy array or memory map, with the rows `on_device` in device memory.

        The rows are copied block by block, so a memory map may be larger than the free memory.

        Args:
            array: [rows, *row], of any dtype whose elements are whole bytes.
            on_device: int[device rows], distinct ids of the rows that go to the device. `CachedTable.from_counts` tells
                how to choose them.
            device: the device whose steps read the table; by default jax's default device.
            writable: whether steps may write the table.

        Raises:
            ValueError: an id is out of range or occurs twice, or `array` is a scalar.
            TypeError: elements of the dtype are not whole bytes.
            MemoryError: the host memory cannot be pinned.
        """
        given = array if isinstance(array, np.ndarray) else np.asarray(array)
        spec = table_spec(given.shape, given.dtype, device, "SplitTable.from_numpy")
        hot_ids, slots = slots_of_split(spec.rows, on_device)
        cold_ids = np.flatnonzero(slots < 0)
        table = HostTable.empty((len(cold_ids), *spec.row), spec.dtype, device=device)
        block = max(1, _BLOCK_BYTES // max(1, spec.row_bytes))
        for start in range(0, len(cold_ids), block):
            table.write(start, given[cold_ids[start : start + block]])
        target = device_or_default(device)
        hot = jax.device_put(spec.to_words(given[hot_ids]), target)
        return cls(table, hot, jax.device_put(slots, target), writable)

    @classmethod
    def from_parts(cls, table: HostTable, hot: DeviceTable, on_device: ArrayLike) -> SplitTable:
        """Joins a table in host memory and a table in device memory, which both hold their rows already.

        The result may be written if both parts may be written.

        Args:
            table: [host rows, *row], the rows whose ids are not in `on_device`, by ascending id.
            hot: [device rows, *row], of the same dtype; row i of `hot` is row `on_device[i]` of the result.
            on_device: int[device rows], distinct ids below the total number of rows.

        Raises:
            ValueError: the parts differ in the shape or dtype of a row, or an id is out of range, occurs twice or is
                missing.
        """
        if table.shape[1:] != hot.shape[1:] or table.dtype != hot.dtype:
            raise ValueError(
                f"SplitTable: both parts must have equal rows, got {table.shape[1:]} of {table.dtype} in host memory "
                f"and {hot.shape[1:]} of {hot.dtype} on the device"
            )
        ids = np.asarray(on_device).reshape(-1)
        if len(ids) != len(hot):
            raise ValueError(f"SplitTable: `on_device` must have an id for each of {len(hot)} rows, got {len(ids)}")
        _, slots = slots_of_split(len(table) + len(hot), ids)
        writable = not (table.read_only or hot.read_only)
        return cls(table, hot.words, jax.device_put(slots, next(iter(hot.words.devices()))), writable)


_TABLES["device"] = DeviceTable


def _device_spec(spec: TableSpec, writable: bool) -> TableSpec:
    return dataclasses.replace(spec, on_device=True, read_only=not writable)


def slots_of_split(rows: int, on_device: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """(int64[device rows], int32[rows]): the ids as given, and the slots of all rows."""
    hot = distinct_ids("SplitTable", "on_device", on_device, rows)
    is_hot = np.zeros(rows, bool)
    is_hot[hot] = True
    slots = np.empty(rows, np.int32)
    slots[~is_hot] = ~np.arange(rows - hot.size, dtype=np.int32)
    slots[hot] = np.arange(hot.size, dtype=np.int32)
    return hot, slots


def _bits(array: Array, spec: TableSpec) -> Array:
    if array.dtype == spec.leaf.dtype:
        return array.reshape(spec.leaf.shape)
    if array.dtype.itemsize > 4 or array.dtype == jnp.bool_ or not spec.nbytes:
        return jax.device_put(spec.to_words(np.asarray(array)), next(iter(array.devices())))
    bits: Array = jax.lax.bitcast_convert_type(array, spec.leaf.dtype)
    return bits.reshape(spec.leaf.shape)
