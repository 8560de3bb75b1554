"""`HostTable`: rows in host memory that compiled steps read and write in place."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax import _native
from dejax.host_gather._leaf import GoneLeaf, TableLeaf, asked_from_outside, process_of
from dejax.host_gather._memory import View, array_of, hold, host_sharding, memory_of, on_cpu, pin
from dejax.host_gather._spec import TableSpec, device_or_default, ordinal_of, platform_of, table_spec
from dejax.host_gather._tracing import closed_over

if TYPE_CHECKING:
    from jax.typing import ArrayLike

_ALIGNMENT = 64  # bytes; what jax needs to take memory of the CPU as it is


class TableClosedError(RuntimeError):
    """A table was used after it was closed, donated or, in a forked process, inherited."""


_CLOSED = "the table was closed, or donated to a jitted function; use the table that the function returned"


@jax.tree_util.register_pytree_with_keys_class
class HostTable:
    """A table [rows, *row] in host memory, which jitted functions read row by row without a copy of it.

    On an NVIDIA GPU the memory is pinned and mapped, and kernels read it over the bus; elsewhere it is ordinary
    memory, and the same calls run on the CPU's threads. Make one with `from_numpy`, `from_npy`, `from_file`, `zeros`
    or `empty`.

    A pytree with one array, so pass it as an argument: to `jax.jit`, as the closed-over constant of `scan` and `cond`
    inside it, through `jax.shard_map` (see `share`). Do not close over it in a jitted function (it would become a
    constant of the program; dejax refuses), do not return it from one unless it is donated (see `shardings`; XLA
    copies what it returns), and do not give it as `xs` of a scan or map over it by `vmap`: both slice it.

    The memory lives as long as the table, an array made from it, or a step in flight that reads it. `close`, or
    leaving the `with` block, gives it back earlier.

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

    __slots__ = ("_leaf", "_spec")
    # jnp functions ask for it first, and get the error with the remedy rather than one about an unknown type.
    __array_priority__ = 1000

    def __init__(self, leaf: Any, spec: TableSpec) -> None:
        """For dejax itself: use the constructors named above."""
        self._leaf, self._spec = leaf, spec
        if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer):
            process_of(leaf)

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
            copy: False pins the array's own memory, which stays the array's: what is written to it is seen in the
                table. (On the CPU `scatter` moves such a table to memory of its own.) The array must be C-contiguous
                and begin at a multiple of 64 bytes (16 on a GPU); a read-only one gives a read-only table. Among
                several CPU devices only the first one reads an array's own memory.
            device: whose steps will read it; by default jax's default device.

        Raises:
            ValueError: a scalar, or, without `copy`, memory that cannot be used as it is.
            TypeError: a dtype that is not of whole bytes.
            MemoryError: the memory cannot be pinned.
        """
        what = "HostTable.from_numpy"
        given = array.numpy() if isinstance(array, HostTable) else np.asarray(array)
        spec = table_spec(given.shape, given.dtype, device, what)
        if copy:
            table = cls._allocate(spec, device, what)
            table.write(0, given)
            return table
        if not given.dtype.isnative:
            raise ValueError(
                f"{what}: with copy=False `array` must be in this machine's byte order, {given.dtype.str} was given; "
                "use copy=True"
            )
        if spec.platform == "cpu" and device_or_default(device) != jax.local_devices(backend="cpu")[0]:
            raise ValueError(
                f"{what}: with copy=False `device` must be the first CPU device, {device_or_default(device)} was "
                "given; use copy=True"
            )
        if not given.flags.c_contiguous:
            raise ValueError(f"{what}: with copy=False `array` must be C-contiguous; use copy=True")
        needed = 16 if spec.platform == "cuda" else _ALIGNMENT
        if given.ctypes.data % needed and given.size:
            raise ValueError(
                f"{what}: with copy=False `array` must begin at a multiple of {needed} bytes, it begins "
                f"{given.ctypes.data % needed} after one; use copy=True"
            )
        spec = dataclasses.replace(spec, read_only=not given.flags.writeable)
        memory = pin(
            what,
            lambda module: module.HostMemory.adopt(
                given.ctypes.data, given.nbytes, given.flags.writeable, ordinal_of(spec, device), given
            ),
        )
        return cls(array_of(memory, spec, device_or_default(device)), spec)

    @classmethod
    def from_npy(cls, path: str | os.PathLike[str], *, device: jax.Device | None = None) -> HostTable:
        """A read-only table with the array of an `.npy` file, in place where that is possible.

        Raises:
            ValueError: no `.npy` file of a C-ordered array, or one that is shorter than its header says.
            MemoryError: the memory cannot be pinned.
        """
        what = f"HostTable.from_npy({os.fspath(path)!r})"
        with open(path, "rb") as file:
            try:
                version = np.lib.format.read_magic(file)
                reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
                shape, fortran, dtype = reader[version](file)
            except (ValueError, KeyError) as error:
                raise ValueError(f"{what}: not an .npy file of version 1 or 2: {error}") from error
            offset = file.tell()
        if fortran and len(shape) > 1:
            raise ValueError(f"{what}: the array is in Fortran order; save numpy.ascontiguousarray(array)")
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

        On the CPU the file is mapped, and read when rows are. On a GPU it is mapped and pinned where the driver can pin
        pages of files; where it cannot, the file is read into pinned memory, by all threads. A file of the other byte
        order is read and turned around.

        A file that is mapped must not become shorter while the table is used. A table whose file did is refused when it
        is used next; a step that reads it at that moment ends the process (SIGBUS), which nothing can prevent.

        Args:
            path: the file.
            shape: (rows, *row).
            dtype: of whole bytes, in any byte order.
            offset: bytes before the first row.
            device: whose steps will read it.

        Raises:
            ValueError: the file is shorter than the shape.
            MemoryError: the memory cannot be pinned.
        """
        what = f"HostTable.from_file({os.fspath(path)!r})"
        spec = dataclasses.replace(table_spec(shape, dtype, device, what), read_only=True)
        wanted, there = spec.rows * spec.row_bytes, Path(path).stat().st_size
        given = np.dtype(dtype)
        if offset < 0 or there < offset + wanted:
            raise ValueError(
                f"{what}: shape {(spec.rows, *spec.row)} of {spec.dtype} after {offset} bytes needs a file of "
                f"{offset + wanted} bytes, this one has {there}"
            )
        if not wanted:
            return HostTable(cls._allocate(spec, device, what)._leaf, spec)
        if not given.isnative:  # read and turned around, in parts
            table = cls._allocate(dataclasses.replace(spec, read_only=False), device, what)
            rows = np.memmap(path, given, "r", offset, (spec.rows, *spec.row))
            block = max(1, (64 << 20) // spec.row_bytes)
            for start in range(0, spec.rows, block):
                table.write(start, rows[start : start + block])
            return HostTable(table._leaf, spec)
        module, ordinal = _native.extension(what), ordinal_of(spec, device)
        try:
            if offset % (_ALIGNMENT if ordinal is None else 16):
                raise RuntimeError("the rows do not begin at a multiple of 16 bytes of the file")
            memory = module.HostMemory.map_file(os.fspath(path), offset, wanted, ordinal)
        except RuntimeError:
            memory = pin(what, lambda module: module.HostMemory.allocate(wanted, ordinal))
            try:
                memory.read_file(os.fspath(path), offset)
            except RuntimeError as error:
                raise OSError(f"{what}: {error}") from error
        return cls(array_of(memory, spec, device_or_default(device)), spec)

    @classmethod
    def zeros(cls, shape: Sequence[int], dtype: Any = np.float32, *, device: jax.Device | None = None) -> HostTable:
        """A table of zeros. Raises as `empty`."""
        table = cls._allocate(table_spec(shape, dtype, device, "HostTable.zeros"), device, "HostTable.zeros")
        memory = memory_of(table._leaf)
        if memory is not None:
            memory.zero()
        return table

    @classmethod
    def empty(cls, shape: Sequence[int], dtype: Any = np.float32, *, device: jax.Device | None = None) -> HostTable:
        """A table to be filled with `write`; what it holds before is unspecified.

        Args:
            shape: (rows, *row).
            dtype: of whole bytes.
            device: whose steps will read it.

        Raises:
            ValueError: no axis of rows, or a negative size.
            TypeError: a dtype that is not of whole bytes.
            MemoryError: the memory cannot be pinned.
        """
        return cls._allocate(table_spec(shape, dtype, device, "HostTable.empty"), device, "HostTable.empty")

    @classmethod
    def _allocate(cls, spec: TableSpec, device: jax.Device | None, what: str) -> HostTable:
        if spec.platform == "cuda" and spec.rows * spec.row_bytes:
            ordinal = ordinal_of(spec, device)
            memory = pin(what, lambda module: module.HostMemory.allocate(spec.rows * spec.row_bytes, ordinal))
            return cls(array_of(memory, spec, device_or_default(device)), spec)
        if spec.platform == "cuda":  # without an element there is no memory, and jax can have it as it likes
            nothing = np.zeros(spec.leaf.shape, spec.leaf.dtype)
            return cls(jax.device_put(nothing, host_sharding(device_or_default(device))), spec)
        # jax's own memory: it is the only kind that jax's CPU backend writes in place when it is donated.
        return cls(on_cpu(spec, device_or_default(device), what), spec)

    # -------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._spec.rows, *self._spec.row)

    @property
    def dtype(self) -> np.dtype:
        return self._spec.dtype

    @property
    def ndim(self) -> int:
        return 1 + len(self._spec.row)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self._spec.rows * self._spec.row_bytes

    @property
    def read_only(self) -> bool:
        return self._spec.read_only

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """Where the array inside lies: what `out_shardings` of a jitted function needs for a table that it returns."""
        return self._concrete("sharding").sharding

    def __len__(self) -> int:
        return self._spec.rows

    def __repr__(self) -> str:
        spec = self._spec
        marks = ", read-only" * spec.read_only + ", shared" * spec.shared + ", closed" * self.is_closed()
        return f"HostTable(shape={self.shape}, dtype={spec.dtype}, platform={spec.platform}{marks})"

    # -------------------------------------------------------------------------------------------- reading and writing

    def __getitem__(self, ids: Any) -> Array:
        """Rows by integer ids of any shape: `gather(table, ids)`."""
        from dejax.host_gather.gather import gather

        self._checked_index(ids)
        return gather(self, ids)

    @staticmethod
    def _checked_index(ids: Any) -> None:
        if isinstance(ids, slice | tuple) or ids is None or ids is Ellipsis:
            raise TypeError(
                "HostTable: it is indexed by one array of row ids; a slice would be copied to the device. Use "
                "table[jnp.arange(start, stop)] for those rows, or table.numpy()[...] outside of jit"
            )

    def __iter__(self) -> NoReturn:
        # Without it Python would ask for rows 0, 1, ... until an IndexError, and ids out of range give rows of zeros.
        raise TypeError(
            "HostTable: it cannot be iterated over, which would be a gather for each row. Use `for row in "
            "table.numpy()` outside of jit, or table[jnp.arange(len(table))]"
        )

    def __contains__(self, value: Any) -> NoReturn:
        raise TypeError("HostTable: `in` would read all of it; use `value in table.numpy()` outside of jit")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "HostTable: pickling or deep copying would copy all of it without a word. Save table.numpy(), and make "
            "the table again by HostTable.from_npy or from_numpy; give it to other processes as a file"
        )

    def __copy__(self) -> HostTable:
        return HostTable(self._leaf, self._spec)

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "HostTable: it lies in host memory, and jax.numpy would copy all of it to the device. Use table[ids] or "
            "dejax.host_gather.gather(table, ids) for the rows that are needed, or table.numpy() outside of jit"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        view = self.numpy()
        return np.array(view, dtype=dtype) if copy or (dtype is not None and dtype != view.dtype) else view

    def numpy(self) -> np.ndarray:
        """A read-only view of the memory, after the steps that write it; of the table as it is now, not as it will be.

        Raises:
            TableClosedError: the table is closed, was donated, or comes from before a fork.
            TypeError: inside a jitted function.
        """
        leaf = self._concrete("numpy")
        with self._alive("HostTable.numpy"):
            leaf.block_until_ready()
            memory = memory_of(leaf)
            words = np.asarray(leaf) if memory is None else View(memory, leaf).array()
        view = (
            words.reshape(self._spec.rows, -1).view(self._spec.dtype) if self.size else np.empty(self.shape, self.dtype)
        )
        view = view.reshape(self.shape)
        view.flags.writeable = False
        return view

    def write(self, start: int, rows: ArrayLike) -> None:
        """Copies rows into the table, from the host, at once: for filling a table, not for use within a step.

        Steps in flight that read the table are not waited for: they may see old rows or new ones. Nor is another thread
        that closes the table or donates it: then the rows are lost with it.

        Args:
            start: the first row written.
            rows: [count, *row], converted to the table's dtype.

        Raises:
            ValueError: other rows than the table's, or beyond its end, or the table is read-only.
            TableClosedError: the table is closed or was donated.
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
            raise ValueError(f"HostTable.write: rows of shape {self._spec.row} are needed, {given.shape[1:]} was given")
        if start < 0 or start + len(given) > len(self):
            raise ValueError(f"HostTable.write: rows {start} to {start + len(given)} do not fit in {len(self)} rows")
        if not given.nbytes:
            return
        with self._alive("HostTable.write"):
            leaf.block_until_ready()
            memory = hold(leaf)  # until the rows are there, whoever closes the table meanwhile
        memory.copy_in(start * self._spec.row_bytes, given.ctypes.data, given.nbytes)

    # -------------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Gives the memory back: after the steps in flight, and after the last view. Closing twice does nothing."""
        if isinstance(self._leaf, Array) and not isinstance(self._leaf, jax.core.Tracer) and not self.is_closed():
            self._leaf.delete()

    def is_closed(self) -> bool:
        """Whether the memory was given back, or went to another table by donation."""
        leaf = self._leaf
        return isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer) and leaf.is_deleted()

    def __enter__(self) -> HostTable:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # -------------------------------------------------------------------------------------------- several devices

    def share(self, mesh: Mesh) -> HostTable:
        """The same memory as an array of every device of a mesh, for `jax.shard_map` with the spec `PartitionSpec()`.

        On GPUs of one host they share one physical table. On other platforms each device gets a copy. The result is
        read-only, and lives as long as it or `self` does.

        Raises:
            ValueError: the mesh has devices of other processes or of another platform.
        """
        leaf = self._concrete("share")
        devices = list(mesh.devices.flat)
        if any(device.process_index != jax.process_index() for device in devices):
            raise ValueError("HostTable.share: the mesh must have devices of this process only")
        if any(platform_of(device) != self._spec.platform for device in devices):
            raise ValueError(f"HostTable.share: the mesh must have {self._spec.platform} devices")
        with self._alive("HostTable.share"):
            memory = memory_of(leaf)
        if self._spec.platform == "cuda" and memory is not None:
            parts = [array_of(memory, self._spec, device) for device in devices]
            kind = "pinned_host"
        else:
            parts = [jax.device_put(np.asarray(leaf), device) for device in devices]
            kind = devices[0].default_memory().kind
        sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
        whole = jax.make_array_from_single_device_arrays(leaf.shape, sharding, parts)
        return HostTable(whole, dataclasses.replace(self._spec, read_only=True, shared=True))

    # -------------------------------------------------------------------------------------------- pytree

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], TableSpec]:
        return ((jax.tree_util.GetAttrKey("rows"), self._child(sys._getframe(1))),), self._spec

    def tree_flatten(self) -> tuple[tuple[Any], TableSpec]:
        return (self._child(sys._getframe(1)),), self._spec

    @classmethod
    def tree_unflatten(cls, spec: TableSpec, leaves: tuple[Any]) -> HostTable:
        leaf = leaves[0]
        return cls(leaf.array if isinstance(leaf, TableLeaf | GoneLeaf) else leaf, spec)

    def _child(self, asker: FrameType) -> Any:
        """The leaf, for whoever asks: the array for jax, a `TableLeaf` for code that calls jax.tree."""
        leaf = self._leaf
        if not isinstance(leaf, Array):
            return leaf
        if asked_from_outside(asker):
            return TableLeaf(leaf, self._spec)
        if not isinstance(leaf, jax.core.Tracer):
            try:
                self._check_alive("HostTable")
            except (TableClosedError, OSError) as error:
                return GoneLeaf(leaf, error)
        return leaf

    # -------------------------------------------------------------------------------------------- for dejax itself

    def _operand(self, what: str) -> Any:
        """The array inside, checked: what handlers are called with."""
        leaf = self._leaf
        if isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer):
            self._check_alive(what)
        if not hasattr(leaf, "shape") or (tuple(leaf.shape), leaf.dtype) != (
            self._spec.leaf.shape,
            self._spec.leaf.dtype,
        ):
            raise ValueError(
                f"{what}: the table was sliced or reshaped on its way (its array has shape "
                f"{getattr(leaf, 'shape', None)}, {self._spec.leaf.shape} is expected). Do not give it as `xs` of a "
                "scan or as a mapped argument; use it as a constant inside"
            )
        if closed_over(leaf):
            raise TypeError(
                f"{what}: the table is closed over by a function that jax compiles, which would make it a constant "
                "of the program. Pass it as an argument: jax.jit(lambda table, ids: table[ids])(table, ids)"
            )
        return leaf

    def _concrete(self, what: str) -> Array:
        leaf = self._leaf
        if not isinstance(leaf, Array) or isinstance(leaf, jax.core.Tracer):
            raise TypeError(f"HostTable.{what}: only outside of jitted functions; inside one use gather and scatter")
        self._check_alive(f"HostTable.{what}")
        return leaf

    def _check_alive(self, what: str) -> None:
        if process_of(self._leaf) != os.getpid():  # asked first: a child that calls jax hangs
            raise TableClosedError(
                f"{what}: the table was made before this process was forked, and a child has neither the memory nor "
                "the device; make the table in the child, or start it with multiprocessing's 'spawn'"
            )
        if self.is_closed():
            raise TableClosedError(f"{what}: {_CLOSED}")
        if self._spec.read_only:
            with self._alive(what):
                memory = memory_of(self._leaf)
            if memory is not None and memory.truncated():
                raise OSError(
                    f"{what}: the file of the table became shorter than the table while it was mapped; make the table "
                    "again from the whole file"
                )

    @contextlib.contextmanager
    def _alive(self, what: str) -> Iterator[None]:
        """jax's error about an array that another thread has deleted, as ours."""
        try:
            yield
        except (RuntimeError, ValueError) as error:
            if isinstance(error, TableClosedError) or not self.is_closed():
                raise
            raise TableClosedError(f"{what}: {_CLOSED}") from error

    def _words(self) -> HostTable:
        """The table as one of the unsigned integers that carry its rows."""
        words = dataclasses.replace(self._spec, row=self._spec.leaf.shape[1:], dtype=self._spec.leaf.dtype)
        return HostTable(self._leaf, words)


def shardings(tree: Any) -> Any:
    """What `jax.jit` needs as `out_shardings` to return a pytree with tables: XLA would look for them on the device.

    Args:
        tree: a pytree of the structure that the function returns, such as its arguments; leaves that are no table may
            be anything.

    Returns:
        The tree with a sharding for each table and None, which leaves it to XLA, for everything else.

    >>> table = HostTable.zeros((4, 2))
    >>> step = jax.jit(lambda table, x: (table, x + 1), donate_argnums=0, out_shardings=shardings((table, 0)))
    >>> table, x = step(table, 1)
    """
    return jax.tree.map(
        lambda value: value.sharding if isinstance(value, HostTable) else None,
        tree,
        is_leaf=lambda value: isinstance(value, HostTable),
    )
