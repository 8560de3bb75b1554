"""`NodeFeatures`: the features of one node type, in one of the places and formats that a gather reads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat
from dejax._drive_layout import DriveLayout
from dejax._pytrees import pytree
from dejax.datasets.files._narrow_rows import Encoder, block_rows
from dejax.datasets.files._work import for_blocks
from dejax.host_gather import (
    DeviceTable,
    DriveTable,
    HostTable,
    Optimizer,
    OptimizerState,
    RowGradient,
    SplitTable,
)
from dejax.host_gather._operands import Table
from dejax.host_gather.gather import GatherOptions
from dejax.host_gather.tables.table import LocalTable
from dejax.minibatch.features._formats import result_dtype, table_dtype, times_scales


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class NodeFeatures:
    """The features of one node type: a table of rows, and scales for rows in a narrow format such as int8.

    The features of node i are `table[i] * row_scale[i] * column_scale`. It is a pytree.

    Attributes:
        table: [nodes, *row], a HostTable, CachedTable, SplitTable, DeviceTable, DriveTable or
            `dejax.distributed.ShardedTable`.
        row_scale: float32[nodes], float32[] (one factor for all rows), or None.
        column_scale: float32[*row], or None.
        trainable: whether `FeatureStore.update` trains the table.

    >>> import numpy as np
    >>> from dejax.minibatch import FeatureStore
    >>> features = FeatureStore.from_arrays({"paper": np.ones((3, 2), np.float32)}).types["paper"]
    >>> features.table.shape, features.trainable
    ((3, 2), False)
    """

    table: Table
    row_scale: Array | None = None
    column_scale: Array | None = None
    trainable: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def from_numpy(
        cls,
        array: ArrayLike,
        *,
        dtype: Any = None,
        scale: str | None = None,
        on_device: bool | ArrayLike = False,
        device: jax.Device | None = None,
    ) -> NodeFeatures:
        """Copies a numpy array or memory map to a table, and converts it on the way, on all CPU cores.

        A progress bar is drawn if stderr is a terminal.

        Args:
            array: [nodes, *row].
            dtype: dtype of the table, such as float32, bfloat16, float16, float8_e4m3fn or int8; by default the
                array's.
            scale: for int8 and FP8: "row" or "column" multiplies each row or column so that its largest value becomes
                the largest value of the format, and stores the inverse factors. None stores the values as they are.
            on_device: False: the rows lie in host memory. True: on the device. int[rows]: these rows lie on the device,
                the others in host memory (`SplitTable`); `hot_rows` chooses them.
            device: the device whose steps read the rows; by default jax's default device.

        Raises:
            ValueError: `array` is a scalar or has values that the format cannot hold, `scale` is unknown, or ids in
                `on_device` are out of range or occur twice.
            TypeError: rows of the dtype cannot be gathered.
            MemoryError: the memory cannot be pinned.
        """
        return features_of("NodeFeatures.from_numpy", array, dtype, scale, on_device, device)

    @classmethod
    def from_drive(cls, folder: str | os.PathLike[str], *, cache_bytes: int, **options: Any) -> NodeFeatures:
        """Features that `dejax.datasets.write_drive_table` wrote, with their scales. Rows are read as steps need them.

        Args:
            folder: the folder of the table, or the first of several.
            cache_bytes, options: the arguments of `dejax.host_gather.DriveTable.open`, which documents them and
                the errors.

        >>> import tempfile
        >>> from dejax.datasets import write_drive_table
        >>> from dejax.minibatch import FeatureStore, NodeFeatures
        >>> folder = write_drive_table(tempfile.mkdtemp(), np.ones((3, 2)), dtype="int8", scale="row")
        >>> store = FeatureStore({"paper": NodeFeatures.from_drive(folder, cache_bytes=1 << 20)})
        >>> store.gather({"paper": np.array([1])})["paper"]
        Array([[1., 1.]], dtype=float32)
        """
        table, layout = DriveTable.open(folder, cache_bytes=cache_bytes, **options), DriveLayout.read(folder)
        scale = layout.scale()
        placed = None if scale is None else jax.device_put(scale, options.get("device"))
        by_row = layout.scales == "row"
        return cls(table, placed if by_row else None, None if by_row else placed)

    @property
    def num_nodes(self) -> int:
        """Number of nodes of the type, which is the number of rows."""
        return len(self.table)

    @property
    def result_dtype(self) -> np.dtype:
        """The default dtype of gathered rows: the table's, or float32 for narrow formats and rows with a scale."""
        scales = (self.row_scale, self.column_scale, *self.table._scales)
        return result_dtype(self.table.dtype, any(scale is not None for scale in scales))

    def gather(self, ids: ArrayLike, *, dtype: Any = None, **options: Any) -> Array:
        """Reads rows by their ids: [*ids.shape, *row].

        An id out of range gives a row of zeros. See `FeatureStore.gather`.
        """
        return self.exchange(ids, dtype=dtype, **options)[0]

    def exchange(
        self, ids: ArrayLike, *, dtype: Any = None, capacity: int | None = None, **options: Any
    ) -> tuple[Array, Array | int]:
        """Reads rows like `gather`. If the table is divided over devices, `capacity` limits the exchange of rows.

        Returns the rows, and the number of rows of this device that exceeded the capacity; those rows are zeros.
        """
        result, reading = self.reading(dtype)
        what = "FeatureStore.gather"
        rows, lost = self.table._read(what, ids, GatherOptions.of(what, reading | options), capacity)
        return self.scaled(rows, result), lost

    def reading(self, dtype: Any) -> tuple[np.dtype, dict[str, Any]]:
        """Options with which rows are gathered, for a result of dtype `dtype`; None means the default dtype.

        Returns:
            A pair: the dtype of the result, and options of `host_gather.gather`. `scaled` turns rows that were gathered
            with these options into the result.
        """
        result = self.result_dtype if dtype is None else np.dtype(dtype)
        read = result
        if self.column_scale is not None and (self.row_scale is not None or self.table.dtype.itemsize > 1):
            read = np.dtype(np.float32)  # one rounding at the end; 8 bits are exact in any result
        return result, {"out_dtype": read, "scale": self.row_scale}

    def scaled(self, rows: Array, result: np.dtype) -> Array:
        """Multiplies rows, gathered with the options of `reading`, by column scales, and converts them to `result`."""
        return times_scales(rows, result, None, self.column_scale)

    def init(self, optimizer: Optimizer) -> OptimizerState:
        """Makes the optimizer state of the table."""
        return self.table._new_state(optimizer)

    def update(
        self, optimizer: Optimizer, gradient: RowGradient, state: OptimizerState, capacity: int | None = None
    ) -> tuple[NodeFeatures, OptimizerState, Array | int]:
        """Applies an optimizer to the rows that have a gradient.

        Returns:
            The new features, the new optimizer state, and the number of rows of this device that exceeded `capacity`.
        """
        if isinstance(self.table, LocalTable) and _compat.manual_axes() and not self.table._spec.shared:
            raise ValueError(
                "FeatureStore.update: inside of jax.shard_map a table must be shared for writing, got one of a single "
                "device; use dejax.distributed.share(store, mesh, writable=True) before init"
            )
        new, after, lost = self.table._after(optimizer, gradient, state, capacity)
        return dataclasses.replace(self, table=new), after, lost

    @property
    def placement(self) -> str:
        """Text that says where the rows lie."""
        return self.table.placement


# -------------------------------------------------------------------------------------------- making tables


def features_of(
    what: str, array: ArrayLike, dtype: Any, scale: str | None, on_device: Any, device: jax.Device | None
) -> NodeFeatures:
    given = array if isinstance(array, np.ndarray) else np.asarray(array)
    if given.ndim == 0:
        raise ValueError(f"{what}: the array must be [nodes, *row], got a scalar")
    if given.dtype.hasobject or (given.dtype.kind in "SUVcmM" and given.dtype.name not in _NAMED):
        raise TypeError(f"{what}: the array must be real, got {given.dtype}")
    encoder = Encoder.of(what, given, table_dtype(what, given.dtype if dtype is None else dtype), scale)
    row_scale = np.ones(len(given), np.float32) if scale == "row" else None
    builder = table_builder(what, given.shape, encoder.dtype, on_device, device)

    def convert(_: int, start: int, stop: int) -> None:
        encoded, scales = encoder(np.asarray(given[start:stop]))
        builder.write(start, encoded)
        if row_scale is not None and scales is not None:
            row_scale[start:stop] = scales

    for_blocks(convert, len(given), block_rows(given), label="convert features")
    return NodeFeatures(
        builder.table(),
        None if row_scale is None else jax.device_put(row_scale, device),
        None if encoder.column_scale is None else jax.device_put(encoder.column_scale, device),
    )


# numpy's kind of these is "V" in some versions of ml_dtypes.
_NAMED = frozenset({"bfloat16", "float8_e4m3fn", "float8_e5m2"})


@dataclasses.dataclass(frozen=True, slots=True)
class TableBuilder:
    """Fills a table block by block, from several threads."""

    write: Callable[[int, np.ndarray], None]
    table: Callable[[], LocalTable]


def table_builder(
    what: str,
    shape: tuple[int, ...],
    dtype: np.dtype,
    on_device: Any,
    device: jax.Device | None,
    *,
    writable: bool = False,
) -> TableBuilder:
    """A table in one of the places, to be filled; one to be trained is `writable`."""
    if on_device is False:
        host = HostTable.empty(shape, dtype, device=device)
        return TableBuilder(host.write, lambda: host)
    if on_device is True:
        rows = np.empty(shape, dtype)

        def write(start: int, block: np.ndarray) -> None:
            rows[start : start + len(block)] = block

        return TableBuilder(write, lambda: DeviceTable.from_numpy(rows, device=device, writable=writable))
    ids = np.asarray(on_device).reshape(-1)
    if isinstance(on_device, np.bool_):
        return table_builder(what, shape, dtype, bool(on_device), device, writable=writable)
    if ids.size and (ids.dtype.kind not in "iu" or ids.min() < 0 or ids.max() >= shape[0]):
        raise ValueError(
            f"{what}: `on_device` must be True, False or ids of rows from 0 to {shape[0] - 1}, got {on_device!r}"
        )
    ids = np.unique(ids.astype(np.int64))
    cold = HostTable.empty((shape[0] - len(ids), *shape[1:]), dtype, device=device)
    hot = np.empty((len(ids), *shape[1:]), dtype)

    def write_split(start: int, block: np.ndarray) -> None:
        first, last = np.searchsorted(ids, [start, start + len(block)])
        inside = ids[first:last] - start
        hot[first:last] = block[inside]
        cold.write(start - int(first), np.delete(block, inside, axis=0))

    def split() -> SplitTable:
        return SplitTable.from_parts(cold, DeviceTable.from_numpy(hot, device=device, writable=writable), ids)

    return TableBuilder(write_split, split)
