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

from dejax.host_gather import _sharing, _storage
from dejax.host_gather._lifetime import reporting_closed
from dejax.host_gather._memory import copy_rows, memory_of
from dejax.host_gather._spec import TableSpec, table_spec
from dejax.host_gather.table import _TABLES, LocalTable

if TYPE_CHECKING:
    from jax.typing import ArrayLike


class HostTable(LocalTable):
    """A table [rows, *row] in host memory, of which jitted functions read single rows without copying the table.

    On an NVIDIA GPU the memory is pinned and mapped, and kernels read it over the bus. Elsewhere it is ordinary memory,
    and the same calls run on the CPU's threads. Make a table with `from_numpy`, `from_npy`, `from_file`, `zeros` or
    `empty`.

    A table is a pytree with one array. Pass it as an argument to `jax.jit`; inside, `scan` and `cond` may close over
    it, and `jax.shard_map` takes a shared one (see `share`). Three uses are refused or copy the table:

    * A jitted function that closes over it would make it a constant of the program.
    * A jitted function that returns it without donation copies it (see `shardings`).
    * A scan that takes it as `xs`, and a `vmap` that maps over it, would slice it.

    The memory lives as long as the table, an array made from it, or a step in flight that reads it. `close`, or
    leaving the `with` block, releases it earlier.

    Attributes:
        shape: (rows, *row).
        dtype: of the elements.

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
        """A table with the rows of a numpy array.

        Args:
            array: [rows, *row], any dtype of whole bytes, in any byte order.
            copy: False pins the array's own memory, so that later writes to the array change the table. (On the CPU
                `scatter` moves such a table to memory of its own.) The array must be C-contiguous and begin at
                a multiple of 64 bytes (16 on a GPU). A read-only array gives a read-only table. Of several CPU devices
                only the first one can use an array's own memory.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: a scalar, or, without `copy`, memory that cannot be used as it is.
            TypeError: a dtype that is not of whole bytes.
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
        """A read-only table with the array of an `.npy` file, in place where that is possible.

        Raises:
            ValueError: no `.npy` file of a C-ordered array, or one that is shorter than its header says, or that does
                not name its dtype, as numpy writes of bfloat16 and FP8: `from_file` takes the dtype.
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
        """A read-only table with the bytes of a file.

        On the CPU the file is mapped, and its pages are read when rows are. On a GPU the mapped file is pinned if the
        driver can pin pages of files; otherwise all threads read the file into pinned memory. A file of the other byte
        order is read and converted.

        A mapped file must not become shorter while the table is used. dejax refuses a table whose file did. A step that
        is reading it at that moment ends the process (SIGBUS), which nothing can prevent.

        Args:
            path: the file.
            shape: (rows, *row).
            dtype: of whole bytes, in any byte order.
            offset: bytes before the first row.
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
        """A table of zeros. Raises as `empty`."""
        spec = table_spec(shape, dtype, device, "HostTable.zeros")
        leaf = _storage.allocate(spec, device, "HostTable.zeros")
        memory = memory_of(leaf)
        if memory is not None:
            memory.zero()
        return cls(leaf, spec)

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: Any = np.float32, *, device: jax.Device | None = None) -> HostTable:
        """A table to be filled with `write`. Its elements are unspecified before.

        Args:
            shape: (rows, *row).
            dtype: of whole bytes.
            device: the device whose steps read the table; by default jax's default device.

        Raises:
            ValueError: no axis of rows, or a negative size.
            TypeError: a dtype that is not of whole bytes.
            MemoryError: the memory cannot be pinned.
        """
        spec = table_spec(shape, dtype, device, "HostTable.empty")
        return cls(_storage.allocate(spec, device, "HostTable.empty"), spec)

    def write(self, start: int, rows: ArrayLike) -> None:
        """Copies rows from the host into the table, at once. Use it to fill a table, not within a step.

        It does not wait for steps in flight that read the table: they may see old rows or new ones. If another thread
        closes or donates the table meanwhile, the rows are lost with it.

        Args:
            start: the first row written.
            rows: [count, *row], converted to the table's dtype.

        Raises:
            ValueError: rows of another shape or beyond the table's end, or a read-only table.
            TableClosedError: the table was closed or donated.
            TypeError: inside a jitted function.
        """
        leaf = self._concrete("write")
        given = np.ascontiguousarray(
            rows.numpy() if isinstance(rows, HostTable) else np.asarray(rows), dtype=self.dtype
        )
        start = operator.index(start)
        if self.read_only:
            raise ValueError("HostTable.write: the table is read-only (made from a file or a read-only array)")
        if given.shape[1:] != self._spec.row or given.ndim != self.ndim:
            raise ValueError(f"HostTable.write: each of `rows` must have shape {self._spec.row}, got {given.shape[1:]}")
        if start < 0 or start + len(given) > len(self):
            raise ValueError(f"HostTable.write: rows {start} to {start + len(given)} do not fit in {len(self)} rows")
        with reporting_closed(leaf, "HostTable.write"):
            for own in _sharing.leaves_to_write(leaf, self._spec):
                copy_rows(own, self._spec, start, given)

    def share(self, mesh: Mesh, *, writable: bool = False) -> HostTable:
        """The same rows as an array of every device of a mesh, for `jax.shard_map` with the spec `PartitionSpec()`.

        GPUs of one process share one physical table. On other platforms each device gets a copy. The result lives as
        long as it or `self` does. With devices of several processes, each process shares a table of equal rows.
        `dejax.distributed.share` shares the tables of a tree, cached and split ones too.

        A table that is shared for writing is written inside of `shard_map`, by all devices together: `scatter_add` and
        the optimizers take the rows of all devices, in the order of the mesh, and write each row once.

        Args:
            mesh: the devices.
            writable: whether `scatter`, `scatter_add` and the optimizers take the result. Do not use `self` afterwards.

        Raises:
            ValueError: devices of another platform, or none of this process; a read-only table to write.
        """
        leaf = self._concrete("share")
        with reporting_closed(leaf, "HostTable.share"):
            return HostTable(*_sharing.share_leaf(leaf, self._spec, mesh, writable))


_TABLES["host"] = HostTable
