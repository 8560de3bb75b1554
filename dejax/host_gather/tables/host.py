"""`HostTable`: rows in host memory that compiled steps read and write in place."""

from __future__ import annotations

import dataclasses
import operator
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import numpy as np
from jax.sharding import Mesh

from dejax.host_gather._spec import TableSpec, table_spec
from dejax.host_gather.tables import _sharing, _storage
from dejax.host_gather.tables._lifetime import reporting_closed
from dejax.host_gather.tables._memory import copy_rows, memory_of
from dejax.host_gather.tables.table import _TABLES, LocalTable

if TYPE_CHECKING:
    from jax.typing import ArrayLike


class HostTable(LocalTable):
    """A table [rows, *row] in host memory. Jitted functions read and write single rows without copying the table.

    On an NVIDIA GPU the memory is pinned and mapped, and kernels read it over the bus. On other platforms it is
    ordinary memory, read by CPU threads. Make a table with `from_numpy`, `from_npy`, `from_file`, `zeros` or `empty`.

    A table is a pytree with one array. Pass it as an argument to `jax.jit`; inside, `scan` and `cond` may close over
    it, and `jax.shard_map` takes a shared one (see `share`). Three uses raise an error or copy the table:

    * A jitted function that closes over the table would make it a constant of the program.
    * A jitted function that returns the table without donation copies it (see `shardings`).
    * A scan that takes the table as `xs`, and a `vmap` that maps over it, would slice it.

    The memory is freed when neither the table, nor an array made from it, nor a running step uses it any longer.
    `close`, or leaving the `with` block, frees it earlier.

    Attributes:
        shape: (rows, *row).
        dtype: dtype of the elements.

    >>> table = HostTable.from_numpy(np.arange(12.0, dtype=np.float32).reshape(6, 2))
    >>> table
    HostTable(shape=(6, 2), dtype=float32, platform=cpu)
    >>> table[np.array([5, 0])]
    Array([[10., 11.],
           [ 0.,  1.]], dtype=float32)
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("rows",)

    def __init__(self, leaf: Any, spec: TableSpec) -> None:
        """For dejax itself: use the constructors named above."""
        super().__init__(leaf, spec)

    # -------------------------------------------------------------------------------------------- constructors

    @classmethod
    def from_numpy(
        cls,
        array: ArrayLike,
        *,
        copy: bool = True,
        device: jax.Device | None = None,
    ) -> HostTable:
        """Makes a table from a numpy array.

        Args:
            array: [rows, *row], of any dtype whose elements are whole bytes, in any byte order.
            copy: False uses the array's own memory, so that later writes to the array change the table. (On the CPU,
                `scatter` moves such a table to memory of its own.) The array must be C-contiguous and begin at
                a multiple of 64 bytes (16 on a GPU). A read-only array gives a read-only table. Of several CPU devices
                only the first one can use an array's own memory.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: `array` is a scalar; or `copy=False`, and its memory cannot be used as it is.
            TypeError: elements of the dtype are not whole bytes.
            MemoryError: the memory cannot be pinned.
        """
        what = "HostTable.from_numpy"
        given = array.numpy() if isinstance(array, HostTable) else np.asarray(array)
        spec = table_spec(given.shape, given.dtype, device, what)
        if copy:
            table = cls(_storage.allocate(spec, device, what), spec)
            table.write(0, given)
            return table
        leaf = _storage.adopt(given, spec, device, what)
        return cls(leaf, dataclasses.replace(spec, read_only=not given.flags.writeable))

    @classmethod
    def from_npy(cls, path: str | os.PathLike[str], *, device: jax.Device | None = None) -> HostTable:
        """Opens an `.npy` file as a read-only table, without copying it if that is possible (see `from_file`).

        Raises:
            ValueError: the file is not an `.npy` file of a C-ordered array, or is shorter than its header says, or does
                not name its dtype. numpy does not name bfloat16 and FP8; use `from_file`, which takes the dtype.
            MemoryError: the memory cannot be pinned.
        """
        shape, dtype, offset = _storage.npy_header(path, f"HostTable.from_npy({os.fspath(path)!r})")
        return cls.from_file(path, shape, dtype, offset=offset, device=device)

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        shape: Sequence[int],
        dtype: Any,
        *,
        offset: int = 0,
        device: jax.Device | None = None,
    ) -> HostTable:
        """Opens a file of consecutive rows as a read-only table.

        On the CPU the file is mapped into memory, and its pages are read when rows are read. On a GPU the mapped file
        is pinned if the driver can pin pages of files; otherwise the file is read into pinned memory. A file in the
        other byte order is read and converted.

        A mapped file must not become shorter while the table is used. dejax raises an error for a table whose file did,
        but a step that is reading it at that moment ends the process (SIGBUS), which nothing can prevent.

        Args:
            path: the file.
            shape: (rows, *row).
            dtype: dtype of the elements, whole bytes in any byte order.
            offset: number of bytes in the file before the first row.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: the file is shorter than the shape.
            MemoryError: the memory cannot be pinned.
        """
        what = f"HostTable.from_file({os.fspath(path)!r})"
        spec = dataclasses.replace(table_spec(shape, dtype, device, what), read_only=True)
        return cls(_storage.open_file(path, offset, np.dtype(dtype), spec, device, what), spec)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any = np.float32, *, device: jax.Device | None = None) -> HostTable:
        """Makes a table of zeros. The arguments and errors are those of `empty`."""
        spec = table_spec(shape, dtype, device, "HostTable.zeros")
        leaf = _storage.allocate(spec, device, "HostTable.zeros")
        memory = memory_of(leaf)
        if memory is not None:
            memory.zero()
        return cls(leaf, spec)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: Any = np.float32, *, device: jax.Device | None = None) -> HostTable:
        """Makes a table with unspecified values, to be filled with `write`.

        Args:
            shape: (rows, *row).
            dtype: dtype of the elements, which are whole bytes.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: `shape` has no axis of rows or a negative size.
            TypeError: elements of the dtype are not whole bytes.
            MemoryError: the memory cannot be pinned.
        """
        spec = table_spec(shape, dtype, device, "HostTable.empty")
        return cls(_storage.allocate(spec, device, "HostTable.empty"), spec)

    def write(self, start: int, rows: ArrayLike) -> None:
        """Copies rows from numpy into the table, immediately. Use it to fill a table, not within a step.

        It does not wait for running steps that read the table; they may see old or new rows. If another thread closes
        or donates the table meanwhile, the rows are lost with it.

        Args:
            start: number of the first row to write.
            rows: [count, *row], converted to the table's dtype.

        Raises:
            ValueError: `rows` have another shape or reach beyond the table's end, or the table is read-only.
            TableClosedError: the table was closed or donated.
            TypeError: the call is inside a jitted function.
        """
        leaf = self._concrete("write")
        given = np.ascontiguousarray(
            rows.numpy() if isinstance(rows, HostTable) else np.asarray(rows), dtype=self.dtype
        )
        start = operator.index(start)
        if self.read_only:
            raise ValueError(
                "HostTable.write: the table must be writable, got a read-only one, made from a file or a read-only "
                "array; copy it with HostTable.from_numpy(table.numpy())"
            )
        if given.shape[1:] != self._spec.row or given.ndim != self.ndim:
            raise ValueError(f"HostTable.write: each of `rows` must have shape {self._spec.row}, got {given.shape[1:]}")
        if start < 0 or start + len(given) > len(self):
            raise ValueError(
                f"HostTable.write: `rows` must fit into the table of {len(self)} rows, got rows {start} to "
                f"{start + len(given) - 1}"
            )
        with reporting_closed(leaf, "HostTable.write"):
            for own in _sharing.leaves_to_write(leaf, self._spec):
                copy_rows(own, self._spec, start, given)

    def share(self, mesh: Mesh, *, writable: bool = False) -> HostTable:
        """Makes the table usable by all devices of a mesh, in `jax.shard_map` with the spec `PartitionSpec()`.

        The GPUs of one process share one table in memory; on other platforms each device gets a copy. With several
        processes, each process shares a table of its own, with equal rows. The memory lives as long as the result or
        `self`. For a pytree of tables, also cached and split ones, use `dejax.distributed.share`.

        A table that is shared for writing is written inside of `shard_map` by all devices together: `scatter_add` and
        the optimizers take the rows of all devices, in the order of the mesh, and write each row once.

        Args:
            mesh: the devices.
            writable: whether `scatter`, `scatter_add` and the optimizers may write the result. If so, do not use `self`
                afterwards.

        Raises:
            ValueError: the mesh has devices of another platform or none of this process; or `writable`, but the table
                is read-only.
        """
        leaf = self._concrete("share")
        with reporting_closed(leaf, "HostTable.share"):
            return HostTable(*_sharing.share_leaf(leaf, self._spec, mesh, writable))


_TABLES["host"] = HostTable
