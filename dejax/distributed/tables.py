"""`ShardedTable`: one table over the memory of all devices or hosts, each of which holds a block of its rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec
from jax.typing import ArrayLike

from dejax import _compat
from dejax._pytrees import pytree
from dejax.distributed._exchange import Route, route
from dejax.distributed._placing import check_axis, on_mesh
from dejax.distributed._shards import ShardSpec, make_shards
from dejax.host_gather import (
    DeviceTable,
    HostTable,
    Optimizer,
    OptimizerState,
    PendingRows,
    RowGradient,
    gather,
    scatter_add,
)
from dejax.host_gather._ids import checked_ids, in_range
from dejax.host_gather._operands import Table
from dejax.host_gather.gather import GatherOptions, gather_inside
from dejax.host_gather.pipeline import rows_there
from dejax.host_gather.tables.table import numpy_copy
from dejax.minibatch.features._embeddings import EmbeddingRows

_SPARE_DEVIATIONS = 5  # of a capacity above the mean, as in dejax.minibatch.find_capacities


@pytree
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ShardedTable(Table):
    """A table of rows that is divided over the devices of a mesh: each device holds one block of consecutive rows.

    The table has the shape [rows, *row], and all blocks have the same size. Inside of `jax.shard_map`, and so inside of
    the functions of `data_parallel`, each device reads any rows by their ids in the whole table. A read is one
    all-to-all exchange of ids and one of rows, in the table's own dtype. Each block lies in the host memory of its
    device's process, or in device memory.

    A `ShardedTable` is a pytree: pass it to a step as part of the state or of the data. Make one with `from_numpy`,
    `zeros` or `normal`.

    Attributes:
        words: uint[padded rows, words], the rows as unsigned integers, divided over the mesh.
        row_scale: float32[padded rows], the factor of each row, divided over the mesh; or None.
        column_scale: float32[*row], the factor of each column; or None.
        hot_ids: int32[hot], ascending ids of often used rows that every device holds a copy of; or None.
        hot_words: uint[hot, words], the copies of these rows; or None.
        hot_scale: float32[hot], the factors of these rows; or None.
        spec: shape, dtype and mesh of the table (static).
    """

    _is_divided: ClassVar[bool] = True

    words: Array
    row_scale: Array | None
    column_scale: Array | None
    hot_ids: Array | None
    hot_words: Array | None
    hot_scale: Array | None
    spec: ShardSpec = dataclasses.field(metadata={"static": True})

    # -------------------------------------------------------------------------------------------- making

    @classmethod
    def from_numpy(
        cls,
        array: ArrayLike,
        mesh: Mesh,
        *,
        axis: str = "data",
        dtype: Any = None,
        scale: str | None = None,
        memory: str = "host",
        hot: Any = (),
    ) -> ShardedTable:
        """Makes a table from a numpy array or memory map. Each process reads only the blocks of its own devices.

        Args:
            array: [rows, *row]; every process passes the same array.
            mesh: devices of one or several processes.
            axis: name of the mesh axis over which the rows are divided.
            dtype: dtype of the table, such as float32, bfloat16, float16, float8_e4m3fn or int8; by default the
                array's.
            scale: for int8 and FP8 rows: "row" or "column" stores a float32 factor for each row or column, see
                `NodeFeatures.from_numpy`. None stores no factors.
            memory: "host" (pinned where the device is a GPU) or "device".
            hot: int[hot], distinct ids of often used rows that every device keeps a copy of; `dejax.minibatch.hot_rows`
                chooses them. After each write an all-reduce brings the copies up to date.

        Raises:
            ValueError: `array` is a scalar, `scale` or `memory` is unknown, or `hot` has ids out of range or
                duplicates.
            TypeError: `gather` does not support the dtype.
            MemoryError: the host memory cannot be pinned.
        """
        given = array if isinstance(array, np.ndarray) else np.asarray(array)
        return cls._of_rows("ShardedTable.from_numpy", given, mesh, axis, dtype, scale, memory, hot)

    @classmethod
    def zeros(
        cls, shape: tuple[int, ...], mesh: Mesh, *, axis: str = "data", dtype: Any = np.float32, memory: str = "host"
    ) -> ShardedTable:
        """Makes a table of zeros. The arguments and errors are those of `from_numpy`."""
        # Without strides the array takes no memory.
        return cls.from_numpy(np.broadcast_to(np.zeros((), dtype), shape), mesh, axis=axis, memory=memory)

    @classmethod
    def normal(
        cls,
        shape: tuple[int, int],
        mesh: Mesh,
        *,
        seed: int = 0,
        stddev: float | None = None,
        axis: str = "data",
        dtype: Any = np.float32,
        memory: str = "host",
        hot: Any = (),
    ) -> ShardedTable:
        """Makes a table of normally distributed values, for example embeddings to train.

        The values depend on `seed` only, not on the number of devices, and are those of `FeatureStore.embedding` with
        the same seed. Each process makes only the rows of its own devices.

        Args:
            shape: (rows, width).
            mesh, axis, memory, hot: as in `from_numpy`.
            seed: seed of the values, whose mean is 0.
            stddev: standard deviation of the values; by default width^-1/2.
            dtype: float32, bfloat16 or float16. The optimizer's moments are always float32.

        Raises:
            ValueError, TypeError, MemoryError: as `FeatureStore.embedding` and `from_numpy`.
        """
        rows = EmbeddingRows.checked("ShardedTable.normal", *shape, seed=seed, stddev=stddev, dtype=dtype)
        return cls._of_rows("ShardedTable.normal", rows, mesh, axis, rows.dtype, None, memory, hot)

    @classmethod
    def _of_rows(cls, what: str, array: Any, mesh: Mesh, axis: str, *options: Any) -> ShardedTable:
        check_axis(what, mesh, axis)
        parts, spec = make_shards(what, array, mesh, axis, *options)
        return cls(**parts, spec=spec)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, *row), of the whole table."""
        return (self.spec.rows, *self.spec.row)

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the stored elements."""
        return self.spec.dtype

    @property
    def placement(self) -> str:
        """Text that says where the rows lie."""
        return "divided over devices"

    def numpy(self) -> np.ndarray:
        """Copies all rows to a numpy array in host memory, without multiplying them by their scales.

        Raises:
            ValueError: some rows lie on devices of other processes.
        """
        if not self.words.is_fully_addressable:
            raise ValueError(
                "ShardedTable.numpy: all rows must be in this process, got a table of several processes; save it "
                "with distributed.save"
            )
        return self.spec.local.to_rows(numpy_copy(self.words)[: self.spec.rows])

    def __repr__(self) -> str:
        hot = "" if self.hot_ids is None else f", {self.hot_ids.shape[0]:,} hot"
        return f"ShardedTable({self.shape}, {self.dtype}, {self.spec.devices} devices, {self.spec.memory}{hot})"

    # -------------------------------------------------------------------------------------------- reading

    def gather(self, ids: ArrayLike, *, capacity: int | None = None, dtype: Any = None) -> tuple[Array, Array]:
        """Reads rows by their ids, from whichever devices hold them.

        All devices call it together, inside of `shard_map`.

        Args:
            ids: int[...], the rows that this device wants. An id out of range, such as -1 for padding, gives a row of
                zeros.
            capacity: the largest number of rows that this device requests from any one device; `find_capacity` computes
                a good value. By default the number of ids, which is always enough but makes the exchange as large as
                `devices` times the number of ids.
            dtype: dtype of the result: float32, bfloat16 or float16. By default the table's dtype, or float32 if the
                rows are FP8 or have scales.

        Returns:
            The rows [*ids.shape, *row], multiplied by their scales; and an int32 scalar, the number of rows of this
            device that exceeded the capacity. Those rows are zeros; pass the number to `check_lost` to get an error
            instead.

        Raises:
            ValueError: the call is outside of `shard_map` over the table's axis, or `capacity` is below 1.
            TypeError: `ids` are not integers.
        """
        what, spec = "ShardedTable.gather", self.spec
        ids, shape, capacity = self._checked(what, ids, capacity)
        hot, place = self._hot(ids)
        owner = jnp.where(in_range(ids, spec.rows) & ~hot, ids // spec.block, spec.devices).astype(jnp.int32)
        here = jax.lax.axis_index(spec.axis) if spec.devices > 1 else 0
        mine = owner == here
        own_ids = jnp.where(mine, ids - here * spec.block, -1)
        lost = jnp.zeros((), jnp.int32)
        path, asked = None, None
        if spec.devices > 1:
            path = route(jnp.where(mine, spec.devices, owner), spec.devices, capacity, spec.axis)
            asked, lost = path.send(ids % spec.block, fill=-1), path.lost
        table, by_row = self._local(), self.row_scale
        read = gather if path is None else gather_inside
        words = _exchanged(lambda ids: read(table, ids), path, asked, own_ids)
        scales = None
        if by_row is not None:
            # Not mode="fill", for which -1 is the last row.
            scales = _exchanged(lambda ids: by_row[jnp.maximum(ids, 0)], path, asked, own_ids)
        if self.hot_words is not None:
            words = jnp.where(hot[:, None], self.hot_words[place], words)
            if self.hot_scale is not None and scales is not None:
                scales = jnp.where(hot, self.hot_scale[place], scales)
        rows = spec.rows_of(words, scales, self.column_scale, dtype)
        return rows.reshape(*shape, *spec.row), lost

    def find_capacity(self, batches: Iterable[ArrayLike], *, update: bool = False) -> int:
        """Computes a `capacity` for `gather` and `update` from the ids of some typical batches.

        For each batch it takes the largest number of ids that one device holds; the capacity is the mean of these
        numbers plus five standard deviations. As few batches say little about the deviation, it is taken to be at least
        the square root of the mean, which is the deviation of independent draws.

        Args:
            batches: int[...] arrays, the ids that one device requests in each batch.
            update: whether the capacity is for `update` alone, which also sends the gradients of hot rows.
        """
        hot = np.asarray(() if self.hot_ids is None or update else self.hot_ids)
        most, largest = [], 1
        for batch in batches:
            ids = np.asarray(batch).reshape(-1)
            largest = max(largest, ids.size)
            ids = ids[(ids >= 0) & (ids < self.spec.rows)]
            ids = ids[~np.isin(ids, hot)]
            most.append(np.bincount(ids // self.spec.block, minlength=self.spec.devices).max())
        if not most:
            raise ValueError("ShardedTable.find_capacity: `batches` must have at least one batch, got none")
        mean = float(np.mean(most))
        wanted = math.ceil(mean + _SPARE_DEVIATIONS * max(float(np.std(most)), math.sqrt(mean)))
        return max(1, min(largest, max(wanted, int(max(most)))))

    def exchange_bytes(self, ids: int, capacity: int | None = None) -> Mapping[str, int]:
        """Bytes of ids and of rows that one device sends to others in a `gather` of `ids` ids, padding included."""
        slots = (self.spec.devices - 1) * (ids if capacity is None else capacity)
        row = self.spec.row_bytes + (4 if self.row_scale is not None else 0)
        return {"ids": 4 * slots, "rows": row * slots}

    # -------------------------------------------------------------------------------------------- writing

    def init(self, optimizer: Optimizer) -> OptimizerState:
        """Makes the optimizer state for this table: its tables are divided over the devices as this table is.

        `optimizer` is one of `dejax.host_gather.sgd`, `adagrad` and `adam`.

        Raises:
            ValueError: the table has scales, so it cannot be trained.
        """
        self._check_writable("ShardedTable.init")
        states = [optimizer.init(self._block(shard.data)) for shard in self.words.addressable_shards]
        first, second = (self._joined([getattr(s, name) for s in states]) for name in ("first", "second"))
        mesh: Any = getattr(self.words.sharding, "mesh", None)
        return OptimizerState(on_mesh(states[0].step, mesh, PartitionSpec()), first, second)  # type: ignore[arg-type]

    def update(
        self, optimizer: Optimizer, gradient: RowGradient, state: OptimizerState, *, capacity: int | None = None
    ) -> tuple[ShardedTable, OptimizerState, Array]:
        """Applies the row gradients of all devices to the table, in place. All devices call it inside of `shard_map`.

        Each row gradient is sent to the device that holds the row. Gradients of equal ids are summed in the order of
        the devices in the mesh, and for one device in the given order. Ids out of range are ignored. The copies of hot
        rows are then brought up to date on all devices.

        Args:
            optimizer: the optimizer that was given to `init`.
            gradient: ids and gradients of the rows that this device has read.
            state: the state from `init` or from the last update. The step must donate the state and the table.
            capacity: as for `gather`, but hot rows count, too (`find_capacity(..., update=True)`).

        Returns:
            The new table, the new state, and an int32 scalar: the number of rows of this device that exceeded the
            capacity. The gradients of those rows are not applied.
        """
        ids, values, lost = self._to_owners("ShardedTable.update", gradient.ids, gradient.values, capacity)
        given: tuple[Any, Any] = (state.first, state.second)  # divided, where the tables of other states are not
        moments = [None if moment is None else moment._block(moment.words) for moment in given]
        local = OptimizerState(state.step, *moments)
        table, after = optimizer.update(RowGradient(ids, values), local, self._block(self.words))
        made: tuple[Any, Any] = (after.first, after.second)
        parts: list[Any] = [
            None if old is None else dataclasses.replace(old, words=new._leaf)
            for old, new in zip(given, made, strict=True)
        ]
        return self._written(table._leaf), OptimizerState(after.step, *parts), lost

    def scatter_add(self, ids: ArrayLike, rows: Array, *, capacity: int | None = None) -> tuple[ShardedTable, Array]:
        """Adds the rows of all devices to the table, in the order of the devices in the mesh.

        Returns the new table and the number of rows of this device that exceeded `capacity` and were not added.
        """
        return self._counted("ShardedTable.scatter_add", scatter_add, ids, rows, capacity)

    def _write(self, what: str, write: Callable[[Any, Any, Any], Any], ids: Any, rows: Any) -> ShardedTable:
        return self._counted(what, write, ids, rows, None)[0]

    def _counted(
        self, what: str, write: Callable[[Any, Any, Any], Any], ids: Any, rows: Any, capacity: int | None
    ) -> tuple[ShardedTable, Array]:
        """The table after owners wrote the rows of all devices, and how many of this device did not fit."""
        to, values, lost = self._to_owners(what, ids, rows, capacity)
        return self._written(write(self._block(self.words), to, values)._leaf), lost

    def _written(self, words: Array) -> ShardedTable:
        """The table with these words in its blocks, and with the copies of hot rows that follow from them."""
        made, spec = dataclasses.replace(self, words=words), self.spec
        if self.hot_ids is None or self.hot_words is None:
            return made
        first = jax.lax.axis_index(spec.axis) * spec.block
        mine = (self.hot_ids >= first) & (self.hot_ids < first + spec.block)
        rows = gather(made._local(), jnp.where(mine, self.hot_ids - first, -1))
        # Each row is zeros but on its owner, so that the sum has its bits. Of 32 bits: not every backend adds fewer.
        copies = jax.lax.psum(rows.astype(jnp.uint32), spec.axis).astype(rows.dtype)
        return dataclasses.replace(made, hot_words=copies)

    def _to_owners(self, what: str, ids: Any, rows: Any, capacity: int | None) -> tuple[Array, Array, Array]:
        """Ids within the owners' blocks, the rows, and how many did not fit."""
        spec = self.spec
        self._check_writable(what)
        ids, shape, capacity = self._checked(what, ids, capacity)
        rows = jnp.asarray(rows)
        if rows.shape != (*shape, *spec.row):
            raise ValueError(f"{what}: rows for these ids must have shape {(*shape, *spec.row)}, got {rows.shape}")
        rows = rows.reshape(ids.size, *spec.row)
        there = in_range(ids, spec.rows)
        if spec.devices == 1:
            return jnp.where(there, ids, -1), rows, jnp.zeros((), jnp.int32)
        path = route(
            jnp.where(there, ids // spec.block, spec.devices).astype(jnp.int32), spec.devices, capacity, spec.axis
        )
        return path.send(ids % spec.block, fill=-1), path.send(rows), path.lost

    # -------------------------------------------------------------------------------------------- for feature stores

    @property
    def _scales(self) -> tuple[Array | None, Array | None]:
        return self.row_scale, self.column_scale

    def _read(self, what: str, ids: Any, options: GatherOptions, capacity: int | None = None) -> tuple[Array, Array]:
        for name, given, only in (
            ("mode", options.mode, "fill"),
            ("fill_value", options.fill_value, 0),
            ("reduce", options.reduce, None),
            ("scale", options.scale, None),
        ):
            if given is not only:
                raise ValueError(
                    f"{what}: `{name}` must be {only!r} for a table that is divided over devices, got {given!r}"
                )
        return self.gather(ids, capacity=capacity, dtype=options.out_dtype)

    def _begin(self, what: str, ids: Any, before: Any, options: GatherOptions) -> tuple[PendingRows, Any]:
        """The rows at once: XLA overlaps the collectives."""
        return rows_there(self._read(what, ids, options)[0]), before

    def _new_state(self, optimizer: Any) -> OptimizerState:
        return self.init(optimizer)

    def _after(self, optimizer: Any, gradient: Any, state: Any, capacity: int | None = None) -> tuple[Any, Any, Array]:
        return self.update(optimizer, gradient, state, capacity=capacity)

    # -------------------------------------------------------------------------------------------- inside

    def _checked(self, what: str, ids: Any, capacity: int | None) -> tuple[Array, tuple[int, ...], int]:
        if self.spec.axis not in _compat.manual_axes():
            raise ValueError(
                f"{what}: a table that is divided over a mesh must be used inside of jax.shard_map over its axis "
                f"{self.spec.axis!r}, got a call outside; dejax.distributed.data_parallel makes such a step"
            )
        ids = checked_ids(what, ids, self.spec.rows)
        capacity = max(1, ids.size) if capacity is None else int(capacity)
        if capacity < 1:
            raise ValueError(f"{what}: `capacity` must be at least 1, got {capacity}")
        return ids.reshape(-1), ids.shape, min(capacity, max(1, ids.size))

    def _hot(self, ids: Array) -> tuple[Array, Array]:
        """Which ids are of hot rows, and the place of each among them."""
        if self.hot_ids is None:
            return jnp.zeros(ids.shape, bool), jnp.zeros(ids.shape, jnp.int32)
        place = jnp.minimum(jnp.searchsorted(self.hot_ids, ids, method="scan_unrolled"), self.hot_ids.shape[0] - 1)
        return self.hot_ids[place] == ids, place

    def _local(self) -> Any:
        """The block of this device, as a table of the unsigned integers."""
        words = self.spec.local.words
        return DeviceTable(self.words, words) if self.spec.memory == "device" else HostTable(self.words, words)

    def _block(self, words: Array) -> Any:
        """The block of one device, as a table to write."""
        return (DeviceTable if self.spec.memory == "device" else HostTable)(words, self.spec.local)

    def _joined(self, tables: list[Any]) -> ShardedTable | None:
        """The tables of this process's devices as one."""
        found = [table for table in tables if table is not None]
        if not found:
            return None
        spec = dataclasses.replace(self.spec, dtype=found[0].dtype)
        sharding = self.words.sharding
        blocks = [table._leaf for table in found]
        shape = (spec.devices * spec.block, blocks[0].shape[1])
        words = jax.make_array_from_single_device_arrays(shape, sharding, blocks)
        return ShardedTable(words, None, None, None, None, None, spec)

    def _check_writable(self, what: str) -> None:
        if self.row_scale is not None or self.column_scale is not None:
            raise ValueError(
                f"{what}: the table must be writable, got one that has scales; make it with float32, bfloat16 or "
                "float16 rows"
            )


def _exchanged(read: Callable[[Array], Array], path: Route | None, asked: Array | None, own_ids: Array) -> Array:
    """Rows for this device's ids: its own by `read`, those of other devices by an exchange of what they read.

    Args:
        read: with several devices it may give any values for an id below 0.
        path: the route of the ids that other devices hold; None with one device.
        asked: the ids that other devices ask for; -1 in empty slots.
        own_ids: the ids of own rows; -1 for others.
    """
    if path is None or asked is None:
        return read(own_ids)
    # The rows that others ask for are read first, so that they travel while this device reads its own.
    answers, own_ids = jax.lax.optimization_barrier((read(asked), own_ids))
    own, remote = read(own_ids), path.give_back(answers)
    there, here = path.slots < path.devices * path.capacity, own_ids >= 0
    row = (-1, *[1] * (own.ndim - 1))
    return jnp.where(there.reshape(row), remote, jnp.where(here.reshape(row), own, jnp.zeros_like(own)))


def check_lost(lost: ArrayLike, what: str = "an exchange of rows") -> None:
    """Raises an error if devices asked each other for more rows of a divided table than `capacity` allows.

    Rows beyond the capacity are not read (they come as zeros) and not written. Only their number comes back, because a
    compiled step cannot raise errors: check it outside of `jax.jit`.

    Args:
        lost: int[...], the numbers of such rows, as `ShardedTable.gather` or `update` returned them, or those in
            `StepReport.counts`.
        what: what the message calls the reads or writes.

    Raises:
        ValueError: a count is above 0.

    >>> import jax.numpy as jnp
    >>> from dejax.distributed import check_lost
    >>> check_lost(jnp.array([0, 0]))
    >>> check_lost(jnp.array([0, 3]))  # raises
    Traceback (most recent call last):
        ...
    ValueError: an exchange of rows: `capacity` must hold all rows that are asked for, got 3 rows more; ...
    """
    total = int(np.asarray(lost).sum())
    if total:
        raise ValueError(
            f"{what}: `capacity` must hold all rows that are asked for, got {total} rows more; give a larger "
            "`capacity` (ShardedTable.find_capacity)"
        )


__all__ = ["ShardedTable", "check_lost"]
