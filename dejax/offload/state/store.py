"""Files that hold a training state between steps: optimizer state and parameters beyond host memory.

`native/state/state_disk.h` says how arrays lie in files. In a state such an array is a `DiskArray`: its ticket, which
programs carry as data, says which array it is and which version.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import jax.extend.random
import jax.numpy as jnp
import numpy as np

from dejax import _compat, _native
from dejax._pytrees import of_this_process
from dejax.offload._resources import Store, StoreResources, check_sizes
from dejax.offload.state import disk_shards
from dejax.offload.state.meshes import divided, shard_bytes

_REMEDY = "read the array first: np.asarray(array), with is_leaf=lambda x: isinstance(x, DiskArray) in jax.tree.map"


class _Refuse:
    """The function that JAX calls to draw random numbers with a ticket: it raises an error, also if it is pickled."""

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise TypeError(f"DiskArray: a ticket must not be used as a value; {_REMEDY}")

    def __reduce__(self) -> Any:
        raise TypeError(f"DiskArray: an array on disk must not be pickled; {_REMEDY}")


@functools.cache
def _ticket_type(words: int) -> Any:
    """The type of tickets: a kind of random keys, because JAX refuses arithmetic and conversion of keys everywhere."""
    refuse = _Refuse()
    return jax.extend.random.define_prng_impl(
        key_shape=(words,),
        seed=refuse,
        split=refuse,
        random_bits=refuse,
        fold_in=refuse,
        name=f"dejax_disk_array_{words}",
        tag=f"ticket of a DiskArray; {_REMEDY}",
    )


@of_this_process("its ticket names an open store of this process. Export a function of the arrays")
@jax.tree_util.register_pytree_with_keys_class
class DiskArray:
    """An array of a training state that lies in the files of a `StateStore`.

    `np.asarray(array)` and `array[begin:end]` read it. A step that updates the state writes the next version of each
    array; the old version stays readable until the step after that.

    For JAX, a `DiskArray` is a pytree with one leaf, the ticket: a small array that identifies the array and its
    version. The ticket has a dtype of its own, so JAX can copy, donate and divide it, but arithmetic raises an error.
    To compute with the values, read the array first.

    Attributes:
        shape, dtype: shape and dtype of the array.
        ticket: uint32[4] on the device: numbers of the store, the array and the version, then 0. If a mesh divides the
            array: uint32[devices, 5], a row on each device for its shard; instead of 0 it has a mark that the array is
            divided, and the device's place in the mesh.
        unit_bytes: number of bytes of the array, or of each shard, that are read and written together.
        store: the `StateStore` that holds the files. They live as long as any array in them.
        sharding: a `NamedSharding` if the array is divided over several devices, otherwise None.
    """

    def __init__(
        self, ticket: Any, shape: tuple[int, ...], dtype: Any, unit_bytes: int, store: StateStore, sharding: Any = None
    ) -> None:
        words = None if ticket is None else jnp.asarray(ticket)
        self._leaf: Any = None if words is None else jax.random.wrap_key_data(words, impl=_ticket_type(words.shape[-1]))
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self.unit_bytes = unit_bytes
        self.store = store
        self.sharding = sharding

    def tree_flatten_with_keys(self) -> tuple[Any, Any]:
        """For `jax.tree_util`: the ticket under its key, and the static attributes."""
        return ((jax.tree_util.GetAttrKey("ticket"), self._leaf),), self.tree_flatten()[1]

    def tree_flatten(self) -> tuple[Any, Any]:
        """For `jax.tree_util`: the ticket, and the static attributes."""
        return (self._leaf,), (self.shape, self.dtype, self.unit_bytes, self.store, self.sharding)

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> DiskArray:
        """For `jax.tree_util`: the array with the static attributes `aux` and the ticket in `children`."""
        self = object.__new__(cls)
        (self._leaf,) = children
        self.shape, self.dtype, self.unit_bytes, self.store, self.sharding = aux
        return self

    def __reduce__(self) -> Any:
        raise TypeError(f"DiskArray: an array on disk must not be pickled; {_REMEDY}")

    def _refuse(self, *_: Any) -> Any:
        raise TypeError(f"DiskArray: an array on disk must not be used as a value; {_REMEDY}")

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __matmul__ = __rmatmul__ = _refuse
    __truediv__ = __rtruediv__ = __pow__ = __neg__ = __abs__ = __float__ = __int__ = __bool__ = _refuse

    @property
    def ticket(self) -> Any:
        """The numbers that identify the array and its version, as a uint32 array on the device."""
        return jax.random.key_data(self._leaf)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Size of the array in bytes."""
        return self.size * self.dtype.itemsize

    def next_version(self, ticket: Any) -> DiskArray:
        """The next version of the array, which a step has written.

        Args:
            ticket: the ticket of the present version, made to depend on the write, so that reads wait for the write.
        """
        ticket = ticket + np.array([0, 0, 1, *[0] * (ticket.shape[-1] - 3)], np.uint32)
        return self.with_ticket(ticket)

    def with_ticket(self, ticket: Any) -> DiskArray:
        """The version of the array that another ticket identifies, such as the ticket that a jitted step returned."""
        return DiskArray(ticket, self.shape, self.dtype, self.unit_bytes, self.store, self.sharding)

    def shard(self, ticket: Any) -> DiskArray:
        """The shard of one device as a `DiskArray` of its own.

        Args:
            ticket: uint32[5], that device's row of `ticket`.
        """
        return DiskArray(ticket, self.sharding.shard_shape(self.shape), self.dtype, self.unit_bytes, self.store)

    def shards(self) -> dict[Any, tuple[Any, DiskArray]]:
        """For each device of this process a pair: the index of its shard in the whole array, and the shard."""
        rows = disk_shards.rows_of_tickets(self.ticket, self.sharding)
        places = self.sharding.addressable_devices_indices_map(self.shape)
        return {device: (index, self.shard(rows[device])) for device, index in places.items()}

    def on_devices(self, memory_kind: str | None = None) -> jax.Array:
        """Reads the array into a `jax.Array` with the sharding of its parameter. Each device reads its own shard.

        Checkpoints of several processes can save the result.

        Args:
            memory_kind: "pinned_host" reads into host memory; None reads into the memory of the devices.
        """
        if self.sharding is None:
            device = jax.sharding.SingleDeviceSharding(next(iter(self.ticket.devices())), memory_kind=memory_kind)
            return jax.device_put(np.asarray(self), device)
        sharding = self.sharding if memory_kind is None else self.sharding.with_memory_kind(memory_kind)
        parts = []
        for device, (_, shard) in self.shards().items():
            place = jax.sharding.SingleDeviceSharding(device, memory_kind=sharding.memory_kind)
            parts.append(jax.device_put(np.asarray(shard), place))
        return jax.make_array_from_single_device_arrays(self.shape, sharding, parts)

    def __repr__(self) -> str:
        return f"DiskArray({self.dtype}{list(self.shape)})"

    def __len__(self) -> int:
        return self.shape[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if copy is False:
            raise ValueError("DiskArray: `copy` must not be False, got False: the array lies on a drive")
        if self.sharding is not None:
            whole = self._rows(0, self.shape[0])
        else:
            whole = self._read(0, self.nbytes).view(self.dtype).reshape(self.shape)
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def __getitem__(self, rows: int | slice) -> np.ndarray[Any, Any]:
        """Reads rows along the first axis: an int, or a slice with step 1."""
        if isinstance(rows, (int, np.integer)):
            at = range(self.shape[0])[rows]
            return self._rows(at, at + 1)[0]
        if not isinstance(rows, slice) or rows.step not in (None, 1):
            raise TypeError(
                f"DiskArray: rows must be an int or a slice with step 1, got {rows!r}; read np.asarray first"
            )
        begin, end, _ = rows.indices(self.shape[0])
        return self._rows(begin, max(begin, end))

    def _rows(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        if self.sharding is not None:
            if not self.sharding.is_fully_addressable:
                raise RuntimeError(
                    "DiskArray: an array must have all its shards in this process to be read as numpy, got shards in "
                    "several processes; read it with on_devices(), each process its own"
                )
            return disk_shards.read_rows(self.shards(), self.shape, self.dtype, begin, end)  # type: ignore[no-any-return]
        row = self.nbytes // max(1, self.shape[0])
        first = begin * row // self.unit_bytes * self.unit_bytes
        last = min(self.nbytes, -(-end * row // self.unit_bytes) * self.unit_bytes)
        units = self._read(first, last)[begin * row - first : end * row - first]
        return units.view(self.dtype).reshape(end - begin, *self.shape[1:])

    def _read(self, begin: int, end: int) -> np.ndarray[Any, Any]:
        out = np.empty(end - begin, np.uint8)
        _, array, version, *_ = map(int, np.asarray(self.ticket))
        if end > begin:
            self.store._require_open()
            self.store._native.get(
                array=array, version=version, offset=begin, address=out.ctypes.data, nbytes=end - begin
            )
        return out


class StateStore(Store):
    """Files on a fast drive that hold training state (optimizer state, parameters) between steps.

    Pass a store, or just its path, to `offload.optimizer(tx, path=...)` or `stack_step(..., path=...)`. The files are
    temporary: they are removed with the store or at the end of the process, so save checkpoints elsewhere. The files
    have room for two versions of each array, because the old version must stay valid until the new one is written. Host
    memory holds only what is being read or written. Each device of a process has its own threads and host memory; all
    devices share the files.

    Args:
        path: a folder, or several folders on several drives.
        disk_bytes: largest total size of the files; None means no limit.
        host_bytes: for each device, the largest amount of host memory for data that waits to be written. A step waits
            while the limit is reached. None means the size of a step's staging memory. Memory for reading ahead comes
            on top of it.
        io_threads: for each device, the number of simultaneous reads and writes; at most half of them are writes.
        chunk_bytes: size of a read or write, a multiple of 4,096.
        checksum: whether to verify all data that is read. A damaged file then raises an error.

    Raises:
        FileNotFoundError, NotADirectoryError, PermissionError: a path cannot be used.
        ValueError: a size is out of range.
        NativeExtensionError: dejax's native extension is missing.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, StateStore(folder, io_threads=2) as store:
    ...     store.stats()["disk_bytes"]
    0
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        *,
        disk_bytes: int | None = None,
        host_bytes: int | None = None,
        io_threads: int = 8,
        chunk_bytes: int = 8 << 20,
        checksum: bool = True,
    ) -> None:
        extension = _native.extension("StateStore")
        check_sizes("StateStore", chunk_bytes, io_threads, disk_bytes=disk_bytes, host_bytes=host_bytes)
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not paths:
            raise ValueError("StateStore: `path` must name at least one folder, got none")
        self.paths = tuple(Path(place) for place in paths)
        self._resources = StoreResources(self)
        try:
            folders = self._resources.claim(self.paths, "StateStore")
            self._resources.native = extension.StateDisk.open(
                folders=[str(folder) for folder in folders],
                disk_bytes=-1 if disk_bytes is None else disk_bytes,
                host_bytes=-1 if host_bytes is None else host_bytes,
                chunk_bytes=chunk_bytes,
                num_threads=io_threads,
                checksum=checksum,
            )
        except BaseException:
            self._resources.close()
            raise

    @property
    def _native(self) -> Any:
        return self._resources.native

    def __repr__(self) -> str:
        return f"StateStore({', '.join(map(str, self.paths))}{'' if self.is_open else ', closed'})"

    @property
    def is_open(self) -> bool:
        """Whether the store can be used: it is not closed, and this process has opened it."""
        return self._resources.is_open

    def __enter__(self) -> StateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def put(self, array: Any, unit_bytes: int | None = None, sharding: Any = None) -> DiskArray:
        """Writes an array to the files and returns it as a `DiskArray`.

        Args:
            array: a numpy or jax array, or a `DiskArray` to copy.
            unit_bytes: number of bytes that steps read and write together, as in `DiskArray`; None means the whole
                array.
            sharding: a `NamedSharding` that gives each of several devices its own shard, or None.

        Raises:
            RuntimeError: the drive is full, `disk_bytes` is reached, or a write failed.
        """
        if any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(array)):
            raise ValueError(
                "StateStore: a state on disk must be made outside of jax.jit, got traced arrays; call init without jit"
            )
        self._require_open()
        dtype, shape = np.dtype(array.dtype), tuple(array.shape)
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes == 0:
            raise ValueError(f"StateStore: `array` must have elements, got shape {shape}")
        nbytes = shard_bytes(sharding, shape, dtype)
        unit = min(nbytes, unit_bytes or nbytes)
        if divided(sharding):
            sharding = sharding.with_memory_kind(None)
            ticket = disk_shards.put_shards(self, array, sharding, lambda part, lane: self._write(part, unit, lane))
            return DiskArray(ticket, shape, dtype, unit, self, sharding)
        number = self._write(array, unit)
        ticket = jnp.asarray(np.array([self._native.number, number, 0, 0], np.uint32))
        return DiskArray(ticket, shape, dtype, unit, self)

    def _write(self, array: Any, unit: int, lane: int = 0) -> int:
        """Writes an array that is not divided over devices; returns the array's number."""
        nbytes = math.prod(array.shape) * np.dtype(array.dtype).itemsize
        number = int(self._native.create(nbytes=nbytes, unit_bytes=unit, lane=lane))
        try:
            for begin, part in _parts(array, unit):
                self._native.put(array=number, offset=begin, address=part.ctypes.data, nbytes=part.nbytes)
        except BaseException:
            self._native.remove(number)
            raise
        return number

    def _require_open(self) -> None:
        if not self.is_open:
            raise RuntimeError("StateStore: the store is closed; make another, and restore the state from a checkpoint")

    def remove(self, state: Any) -> None:
        """Frees the file space of all arrays of a state. No step may use the state afterwards."""
        for array in jax.tree.leaves(state, is_leaf=is_on_disk):
            if is_on_disk(array):
                for shard in [array] if array.sharding is None else [shard for _, shard in array.shards().values()]:
                    self._native.remove(int(np.asarray(shard.ticket)[1]))

    def drain(self) -> None:
        """Waits until all pending writes are finished.

        Raises:
            RuntimeError: a write failed, or on several devices a read of the last step failed.
        """
        self._native.drain()
        if why := _native.extension("StateStore").take_failure_of_shards():
            raise RuntimeError(why)

    def stats(self) -> dict[str, float]:
        """Counters: read_bytes, written_bytes, disk_bytes, peak_host_bytes, wait_seconds (waits for reads)."""
        return dict(self._native.stats())

    def close(self) -> None:
        """Waits for all reads and writes, then removes the files and the states in them. A second call does nothing."""
        self._resources.close()


def is_on_disk(x: Any) -> bool:
    return isinstance(x, DiskArray)


def restore(like: Any, arrays: Any) -> Any:
    """Copies a checkpoint into a training state, each array to its place: device, host memory or files.

    `like` is used up, as a donated state is: the space of its arrays on disk is freed.

    Args:
        like: a state with the wanted structure and placement, as `init` of the optimizer or of the step makes it.
        arrays: pytree of numpy or jax arrays, with an array in place of each `DiskArray` of `like`. Such a pytree is
            `jax.tree.map(np.asarray, state, is_leaf=lambda x: isinstance(x, DiskArray))`, which a checkpoint can save.

    Returns:
        The new state.

    Raises:
        ValueError: `arrays` has another structure, or an array another shape or dtype.
    """
    places, treedef = jax.tree.flatten(like, is_leaf=is_on_disk)
    values = jax.tree.leaves(arrays)
    found: Any = jax.tree.structure(arrays)
    if found != treedef:
        raise ValueError(
            f"offload.restore: `arrays` must have the structure of `like`, got {found} in place of {treedef}"
        )
    for place, value in zip(places, values, strict=True):  # all of them before the first file is freed
        if tuple(place.shape) != tuple(value.shape) or place.dtype != value.dtype:
            raise ValueError(
                f"offload.restore: `arrays` must be as in `like`, got {value.dtype}{list(value.shape)} in place of "
                f"{place.dtype}{list(place.shape)}"
            )
    return jax.tree.unflatten(treedef, map(_restored, places, values))


def _restored(place: Any, value: Any) -> Any:
    if is_on_disk(place):
        place.store.remove(place)
        return place.store.put(value, place.unit_bytes, place.sharding)
    if next(iter(place.sharding.device_set)).platform == "cpu":
        value = _compat.own_memory(value)
    # What `init` left where jax puts it, jit may move to the devices of the parameters.
    return jax.device_put(value, place.sharding if getattr(place, "committed", False) else None)


def store_at(path: Any) -> StateStore:
    """The `StateStore` that an argument `path` names: a store, or a new one in a folder."""
    return path if isinstance(path, StateStore) else StateStore(path)


def _parts(array: Any, unit: int) -> Any:
    """(offset, contiguous numpy array) of each unit, read from the device one by one."""
    row = array.nbytes // max(1, array.shape[0]) if array.ndim else array.nbytes
    if is_on_disk(array) or array.ndim == 0 or unit >= array.nbytes or unit % row:
        whole = np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)
        for begin in range(0, whole.size, unit):
            yield begin, whole[begin : begin + unit]
        return
    rows = unit // row
    for at in range(0, array.shape[0], rows):
        with _compat.on_devices(array.devices() if isinstance(array, jax.Array) else ()):
            part = array[at : at + rows]
        yield at * row, np.ascontiguousarray(np.asarray(part))
