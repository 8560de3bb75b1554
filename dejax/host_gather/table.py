"""`HostTable`: rows in host memory that compiled steps read and write in place."""

from __future__ import annotations

import dataclasses
import operator
import os
import sys
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, Self

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh

from dejax import _compat
from dejax._pytrees import of_this_process
from dejax.host_gather import _sharing, _storage
from dejax.host_gather._leaf import GoneLeaf, TableLeaf, flattened_by_user
from dejax.host_gather._lifetime import (
    TableClosedError,
    check_alive,
    checked_leaf,
    is_closed,
    is_concrete,
    process_of,
    reporting_closed,
)
from dejax.host_gather._memory import View, copy_rows, delete, memory_of, numpy_of
from dejax.host_gather._operands import ReadableTable, TableOperands
from dejax.host_gather._spec import TableSpec, table_spec
from dejax.host_gather.gather import gather
from dejax.host_gather.pipeline import gather_start

if TYPE_CHECKING:
    from jax.typing import ArrayLike

__all__ = ["HostTable", "TableClosedError", "shardings"]


NATIVE_CALLS = "the calls that read it hold addresses of this process. Export a function of the gathered rows"
"""Why tables are not serialized."""


class IndexedTable(ReadableTable):
    """A table whose rows `table[ids]` gives, and which may have rows in a `HostTable`."""

    __slots__ = ()

    @property
    def _in_host(self) -> HostTable | None:
        """The table in host memory inside, or None."""
        return None

    def __getitem__(self, ids: Any) -> Array:
        """Rows by integer ids of any shape: `gather(table, ids)`."""
        check_index(ids)
        return gather(self, ids)

    def _read(self, ids: Any, *, capacity: int | None = None, **options: Any) -> tuple[Array, int]:
        self._check_whole(capacity)
        return gather(self, ids, **options), 0

    def _begin(self, ids: Any, before: Any, **options: Any) -> tuple[Any, Any]:
        started = gather_start(self, ids, before=before, **options)
        return (started, None) if before is None else started

    def _new_state(self, optimizer: Any) -> Any:
        return optimizer.init(self)

    def _after(self, optimizer: Any, gradient: Any, state: Any, capacity: int | None) -> tuple[Any, Any, int]:
        self._check_whole(capacity)
        if _compat.manual_axes() and not self._spec.shared:
            raise ValueError(
                "FeatureStore.update: inside of jax.shard_map a table must be shared for writing, got one of a single "
                "device; use dejax.distributed.share(store, mesh, writable=True) before init"
            )
        return *optimizer.update(gradient, state, self), 0

    def _check_whole(self, capacity: int | None) -> None:
        if capacity is not None:
            raise ValueError(
                f"`capacity` must be of a table that is divided over devices, got one on: {self.placement}"
            )

    def close(self) -> None:
        """As `HostTable.close`. Rows on the device stay until nothing refers to them."""
        if self._in_host is not None:
            self._in_host.close()

    def is_closed(self) -> bool:
        """As `HostTable.is_closed`."""
        return self._in_host is not None and self._in_host.is_closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@of_this_process(NATIVE_CALLS)
@jax.tree_util.register_pytree_with_keys_class
class HostTable(IndexedTable):
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

    __slots__ = ("_leaf", "_spec")
    _spec: TableSpec
    _differentiable: ClassVar[bool] = True
    # jnp functions look at it first. The user then gets the error of `__jax_array__`, not one about an unknown type.
    __array_priority__ = 1000

    def __init__(self, leaf: Any, spec: TableSpec) -> None:
        """For dejax itself: use the constructors named above."""
        self._leaf, self._spec = leaf, spec
        if is_concrete(leaf):
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

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of the array inside, for the `out_shardings` of a jitted function that returns the table."""
        return self._concrete("sharding").sharding

    def __repr__(self) -> str:
        spec = self._spec
        marks = ", read-only" * spec.read_only + ", shared" * spec.shared + ", closed" * self.is_closed()
        return f"HostTable(shape={self.shape}, dtype={spec.dtype}, platform={spec.platform}{marks})"

    # -------------------------------------------------------------------------------------------- reading and writing

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "HostTable: pickling or deep copying would copy the whole table. Save table.numpy(), and make the table "
            "again by HostTable.from_npy or from_numpy; give it to other processes as a file"
        )

    def __copy__(self) -> HostTable:
        return HostTable(self._leaf, self._spec)

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "HostTable: the table lies in host memory, and jax.numpy would copy all of it to the device. Use "
            "table[ids] or dejax.host_gather.gather(table, ids) for single rows, or table.numpy() outside of jit"
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        view = self.numpy()
        return np.array(view, dtype=dtype) if copy or (dtype is not None and dtype != view.dtype) else view

    def numpy(self) -> np.ndarray:
        """A read-only view of the memory, after the steps in flight that write the table. Later writes show in it.

        Raises:
            TableClosedError: the table was closed, donated, or made before a fork.
            TypeError: inside a jitted function.
        """
        leaf = self._concrete("numpy")
        with reporting_closed(leaf, "HostTable.numpy"):
            leaf.block_until_ready()
            memory = memory_of(leaf)
            words = numpy_of(leaf) if memory is None else View(memory, leaf).array()
        view = words.reshape(len(self), -1).view(self.dtype) if self.size else np.empty(self.shape, self.dtype)
        view = view.reshape(self.shape)
        view.flags.writeable = False
        return view

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

    # -------------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Releases the memory, after the steps in flight and after the last view. Closing twice does nothing."""
        if is_concrete(self._leaf) and not self.is_closed():
            delete(self._leaf)

    def is_closed(self) -> bool:
        """Whether the memory was released, or went to another table by donation."""
        return is_closed(self._leaf)

    # -------------------------------------------------------------------------------------------- several devices

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

    # -------------------------------------------------------------------------------------------- pytree

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any]], TableSpec]:
        return ((jax.tree_util.GetAttrKey("rows"), self._child(sys._getframe(1))),), self._spec

    def tree_flatten(self) -> tuple[tuple[Any], TableSpec]:
        return (self._child(sys._getframe(1)),), self._spec

    @classmethod
    def tree_unflatten(cls, spec: TableSpec, leaves: tuple[Any]) -> HostTable:
        leaf = leaves[0]
        return cls(leaf.array if isinstance(leaf, TableLeaf | GoneLeaf) else leaf, spec)

    def _child(self, caller: FrameType) -> Any:
        """The leaf for the function that flattens the table: a `TableLeaf` for users of jax.tree, else the array."""
        leaf = self._leaf
        if not isinstance(leaf, Array):
            return leaf
        if flattened_by_user(caller):
            return TableLeaf(leaf, self._spec)
        if is_concrete(leaf):
            try:
                check_alive(leaf, self._spec, "HostTable")
            except (TableClosedError, OSError) as error:
                return GoneLeaf(leaf, error)
        return leaf

    # -------------------------------------------------------------------------------------------- for dejax itself

    def _operands(self, what: str) -> TableOperands:
        return TableOperands.of_leaf(self._spec, self._checked_leaf(what))

    def _checked_leaf(self, what: str) -> Any:
        return checked_leaf(self._leaf, self._spec, what)

    def _concrete(self, what: str) -> Array:
        """The array inside, outside of jitted functions."""
        if not is_concrete(self._leaf):
            raise TypeError(f"HostTable.{what}: only outside of jitted functions; inside one use gather and scatter")
        check_alive(self._leaf, self._spec, f"HostTable.{what}")
        leaf: Array = self._leaf
        return leaf

    @property
    def placement(self) -> str:
        return "host"

    @property
    def _in_host(self) -> HostTable:
        return self

    def _moment(self, what: str, value: float) -> HostTable:
        sharding: Any = self._concrete(what).sharding
        made = HostTable.zeros(self.shape, np.float32, device=next(iter(sharding.addressable_devices)))
        if value:
            _storage.fill(made._leaf, made._spec, value)
        return made.share(sharding.mesh, writable=True) if self._spec.shared else made

    def _with_marks(self, marks: tuple[tuple[int, int], ...]) -> HostTable:
        return HostTable(self._leaf, dataclasses.replace(self._spec, marks=marks))

    def _words(self) -> HostTable:
        """The same memory as a table of the unsigned integers that carry the rows."""
        return HostTable(self._leaf, self._spec.words)


def check_index(ids: Any) -> None:
    """Refuses indices that jax arrays take and tables do not."""
    if isinstance(ids, slice | tuple) or ids is None or ids is Ellipsis:
        raise TypeError(
            "HostTable: the index must be one array of row ids; a slice would be copied to the device. Use "
            "table[jnp.arange(start, stop)] for those rows, or table.numpy()[...] outside of jit"
        )


def shardings(tree: Any) -> Any:
    """The `out_shardings` for jitting a function that returns tables: by default XLA expects results on the device.

    Args:
        tree: a pytree of the structure that the function returns, such as its arguments. Leaves that are no tables may
            be anything.

    Returns:
        The tree with a sharding for each table, and None, which leaves the choice to XLA, for everything else.

    >>> table = HostTable.zeros((4, 2))
    >>> step = jax.jit(lambda table, x: (table, x + 1), donate_argnums=0, out_shardings=shardings((table, 0)))
    >>> table, x = step(table, 1)
    """
    return jax.tree.map(
        lambda value: value.sharding if isinstance(value, HostTable) else None,
        tree,
        is_leaf=lambda value: isinstance(value, HostTable),
    )
