"""`LocalTable`: the table of one device, whose rows lie in host memory, on the device, on a drive, or in two places."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, ClassVar, NoReturn, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat
from dejax._pytrees import of_this_process
from dejax.host_gather._ids import in_range
from dejax.host_gather._operands import Table, TableOperands, check_whole
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.gather import gather, read_rows
from dejax.host_gather.pipeline import begin_read
from dejax.host_gather.tables import _sharing, _storage
from dejax.host_gather.tables._drive_files import RowsAhead, keep_reader
from dejax.host_gather.tables._leaf import DEVICE_PUT, GoneLeaf, TableLeaf, flattened_by_user, given_a_device
from dejax.host_gather.tables._lifetime import (
    TableClosedError,
    check_alive,
    check_array,
    check_computing,
    checked_leaf,
    is_closed,
    is_concrete,
    process_of,
    reporting_closed,
)
from dejax.host_gather.tables._memory import View, delete, memory_of, numpy_of

NATIVE_CALLS = "the calls that read it hold addresses of this process. Export a function of the gathered rows"
"""Why tables are not serialized."""


class LocalTable(Table):
    """A table of one device. Its subclasses are its constructors, one for each placement.

    A pytree of up to three arrays, which say where a row lies. Kernels read all of them by the same call.

    Attributes of instances, for dejax itself:
        _leaf: uint[rows, words] in host memory, or of a `DeviceTable` in device memory; of rows on a drive uint32[2] in
            host memory, the number of their reader.
        _hot: uint[hot rows, words] in device memory, or None.
        _slots: int32[rows], the row of `_hot` that holds each row; below 0 where none does: -1 of a `CachedTable`, `~k`
            for row k of `_leaf` of a `SplitTable`. None without `_hot`.
        _spec: the static part.
    """

    __slots__ = ("_hot", "_leaf", "_slots", "_spec")
    _leaf: Any
    _hot: Any
    _slots: Any
    _spec: TableSpec
    _names: ClassVar[tuple[str, ...]] = ("rows", "hot", "slots")  # of the arrays, in paths of trees
    # jnp functions look at it first. The user then gets the error of `__jax_array__`, not one about an unknown type.
    __array_priority__ = 1000

    def __init_subclass__(cls) -> None:
        jax.tree_util.register_pytree_with_keys_class(cls)
        of_this_process(NATIVE_CALLS)(cls)

    def __init__(self, leaf: Any, spec: TableSpec, hot: Any = None, slots: Any = None) -> None:
        self._leaf, self._spec, self._hot, self._slots = leaf, spec, hot, slots
        if is_concrete(leaf):
            process_of(leaf)

    @classmethod
    def _of(cls, leaf: Any, spec: TableSpec, hot: Any = None, slots: Any = None) -> Self:
        """A table of these parts, whatever the arguments of its constructor."""
        made = object.__new__(cls)
        LocalTable.__init__(made, leaf, spec, hot, slots)
        return made

    def _with(self, leaf: Any = None, spec: TableSpec | None = None, hot: Any = None) -> Self:
        """The table with some of its parts replaced."""
        return self._of(
            self._leaf if leaf is None else leaf,
            self._spec if spec is None else spec,
            self._hot if hot is None else hot,
            self._slots,
        )

    # -------------------------------------------------------------------------------------------- what it is

    @property
    def shape(self) -> tuple[int, ...]:
        return self._spec.shape

    @property
    def dtype(self) -> np.dtype:
        return self._spec.dtype

    @property
    def read_only(self) -> bool:
        return self._spec.read_only

    @property
    def placement(self) -> str:
        if self._spec.on_device:
            return "device"
        place = "drive, cached in host memory" if self._spec.on_drive else "host"
        if self._hot is None:
            return place
        rows = f"({self._hot.shape[0]:,} rows)"
        return f"{place} and device {rows}" if self._spec.is_split else f"{place}, cached on the device {rows}"

    @property
    def sharding(self) -> jax.sharding.Sharding:
        """The sharding of the array of rows, for the `out_shardings` of a jitted function that returns the table."""
        return self._concrete("sharding").sharding

    def __repr__(self) -> str:
        spec = self._spec
        where = f", {self.placement}" * (self._hot is not None)
        marks = ", read-only" * spec.read_only + ", shared" * spec.shared + ", closed" * self.is_closed()
        kind = type(self).__name__
        return f"{kind}(shape={self.shape}, dtype={spec.dtype}, platform={spec.platform}{where}{marks})"

    @property
    def _host_part(self) -> LocalTable:
        """The rows in host memory, or on a drive, as a table of their own."""
        return _TABLES["drive" if self._spec.on_drive else "host"]._of(self._leaf, self._spec.host_part)

    @property
    def _device_part(self) -> LocalTable:
        """The rows of a split table on the device as a table of their own."""
        return _TABLES["device"]._of(self._hot, self._spec.device_part(self._hot.shape[0]))

    @property
    def _on_device(self) -> tuple[Array, ...]:
        """The arrays in device memory."""
        arrays = (self._leaf,) if self._spec.on_device else (self._hot, self._slots)
        return tuple(array for array in arrays if array is not None)

    # -------------------------------------------------------------------------------------------- reading

    def __getitem__(self, ids: Any) -> Array:
        """Rows by integer ids of any shape: `gather(table, ids)`."""
        if isinstance(ids, slice | tuple) or ids is None or ids is Ellipsis:
            raise TypeError(
                "HostTable: the index must be one array of row ids; a slice would be copied to the device. Use "
                "table[jnp.arange(start, stop)] for those rows, or table.numpy()[...] outside of jit"
            )
        return gather(self, ids)

    def numpy(self) -> np.ndarray:
        """The rows in host memory, after the steps in flight that write the table.

        A read-only view, in which later writes show, of rows that all lie in host memory; else a copy.

        Raises:
            TableClosedError: the table was closed, donated, or made before a fork.
            TypeError: inside a jitted function.
        """
        leaf, spec = self._concrete("numpy"), self._spec
        if spec.on_device:
            return spec.to_rows(numpy_copy(leaf))
        rows = self._host_part._host_rows(leaf)
        if not spec.is_split:
            return rows
        out, slots = np.empty(spec.shape, spec.dtype), numpy_copy(self._slots)
        out[slots < 0] = rows[~slots[slots < 0]]
        out[slots >= 0] = spec.to_rows(numpy_copy(self._hot))[slots[slots >= 0]]
        return out

    def _host_rows(self, leaf: Array) -> np.ndarray:
        """A read-only view of the rows in host memory, or in files."""
        with reporting_closed(leaf, "HostTable.numpy"):
            leaf.block_until_ready()
            memory = memory_of(leaf)
            words = numpy_of(leaf) if memory is None else View(memory, leaf).array()
        view = self._spec.to_rows(words)
        view.flags.writeable = False
        return view

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        view = self.numpy()
        return np.array(view, dtype=dtype) if copy or (dtype is not None and dtype != view.dtype) else view

    def __jax_array__(self) -> NoReturn:
        raise TypeError(
            "HostTable: the table lies in host memory, and jax.numpy would copy all of it to the device. Use "
            "table[ids] or dejax.host_gather.gather(table, ids) for single rows, or table.numpy() outside of jit"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        if self._spec.on_device:
            return super().__reduce_ex__(protocol)
        raise TypeError(
            "HostTable: pickling or deep copying would copy the whole table. Save table.numpy(), and make the table "
            "again by HostTable.from_npy or from_numpy; give it to other processes as a file"
        )

    def __copy__(self) -> Self:
        return self._with()

    def _operands(self, what: str) -> TableOperands:
        spec, leaf = self._spec, checked_leaf(self._leaf, self._spec, what)
        if self._hot is None:
            return TableOperands(spec, leaf, jnp.zeros((0,), spec.words.dtype), jnp.zeros((0,), jnp.int32))
        if spec.leaf_rows is not None and not spec.peers:
            check_array(what, self._hot, spec.device_part(spec.rows - spec.leaf_rows).leaf)
        return TableOperands(spec, leaf, self._hot, self._slots)

    def _read(self, what: str, ids: Any, options: Any, capacity: int | None = None) -> tuple[Array, int]:
        check_whole(self, capacity)
        return read_rows(what, self._operands(what), ids, options), 0

    def _begin(self, what: str, ids: Any, before: Any, options: Any) -> tuple[Any, Any]:
        return begin_read(what, self._operands(what), ids, before, options)

    # -------------------------------------------------------------------------------------------- writing

    def _write(self, what: str, write: Callable[[Any, Any, Any], Any], ids: Any, rows: Any) -> Any:
        return write(self, ids, rows)

    def _new_state(self, optimizer: Any) -> Any:
        return optimizer.init(self)

    def _after(self, optimizer: Any, gradient: Any, state: Any, capacity: int | None = None) -> tuple[Any, Any, int]:
        check_whole(self, capacity)
        return *optimizer.update(gradient, state, self), 0

    def _parts(self) -> tuple[LocalTable, ...]:
        """The rows as tables of one array each, for writes."""
        if self._hot is None:
            return (self,)
        return (self._host_part, self._device_part) if self._spec.is_split else (self._host_part,)

    def _ids_in_parts(self, ids: Array) -> tuple[Array, ...]:
        """For each part the row there of each id; -1 where another part has the row."""
        if not self._spec.is_split:
            return (ids,)
        place = self._places(ids)
        there = in_range(ids, len(self))
        return jnp.where(there & (place < 0), ~place, -1), jnp.where(there & (place >= 0), place, -1)

    def _of_parts(self, parts: Sequence[Any], ids: Array) -> Self:
        """The table after its parts were written at `ids`."""
        leaf = parts[0]._leaf
        if self._hot is None:
            return self._with(leaf)
        if self._spec.is_split:
            return self._with(leaf, hot=parts[1]._leaf)
        if not self._hot.shape[0]:
            return self._with(leaf)
        # A cached table reads the copies of the rows again.
        places = self._places(ids.reshape(-1))
        rows = gather(parts[0]._words(), jnp.where(places >= 0, ids.reshape(-1), -1))
        hot = self._hot.at[jnp.where(places >= 0, places, self._hot.shape[0])].set(rows, mode="drop")
        return self._with(leaf, hot=hot)

    def _places(self, ids: Array) -> Array:
        """The slot of each id's row, -1 out of range."""
        if not len(self):
            return jnp.full(ids.shape, -1, jnp.int32)
        there = in_range(ids, len(self))
        return jnp.where(there, self._slots[jnp.where(there, ids, 0)], -1)

    def _moment(self, what: str, value: float) -> LocalTable:
        """A float32 table of the same shape, which lies where the rows lie, with one value in all elements."""
        spec = dataclasses.replace(self._spec, dtype=np.dtype(np.float32), marks=())
        if spec.is_split:
            host, hot = self._host_part._moment(what, value), self._device_part._moment(what, value)
            # Slots of its own: a step cannot donate one array twice.
            return self._of(host._leaf, spec, hot._leaf, jnp.copy(self._slots))
        if spec.on_device:
            word = np.float32(value).view(np.uint32)
            fill = jax.jit(lambda: jnp.full(spec.leaf.shape, word, spec.leaf.dtype), out_shardings=self._leaf.sharding)
            with _compat.on_devices(self._leaf.devices()):
                return self._of(fill(), spec)
        sharding: Any = self._concrete(what).sharding
        made = _TABLES["host"].zeros(self.shape, np.float32, device=next(iter(sharding.addressable_devices)))
        if value:
            _storage.fill(made._leaf, made._spec, value)
        return made.share(sharding.mesh, writable=True) if spec.shared else made

    # -------------------------------------------------------------------------------------------- lifetime and devices

    def close(self) -> None:
        """Releases the host memory, after the steps in flight and after the last view. Closing twice does nothing.

        Rows on the device stay until nothing refers to them.
        """
        if is_concrete(self._leaf) and not self._spec.on_device and not self.is_closed():
            delete(self._leaf)

    def is_closed(self) -> bool:
        """Whether the memory was released, or went to another table by donation."""
        return is_closed(self._leaf)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _on_mesh(self, mesh: Any, put: Callable[[Array], Array], writable: bool) -> Self:
        """The table for every device of a mesh: see `dejax.distributed.share`.

        Args:
            mesh: the devices.
            put: gives an array of the device to all devices of the mesh.
            writable: whether steps write it, unless its rows on the device are for reading.
        """
        leaf, spec = self._leaf, self._spec
        if spec.on_device:
            leaf = put(leaf)
            if not (spec.shared or spec.read_only):
                spec = dataclasses.replace(spec, shared=writable, read_only=not writable)
        elif not spec.shared:
            leaf = self._concrete("share")
            with reporting_closed(leaf, "HostTable.share"):
                leaf, spec = _sharing.share_leaf(leaf, spec, mesh, writable and not (spec.is_split and spec.read_only))
        return self._of(leaf, spec, *(None if x is None else put(x) for x in (self._hot, self._slots)))

    def _of_first_device(self) -> Self:
        """The part of a shared table that this process's first device reads."""
        spec = dataclasses.replace(self._spec, shared=False, sharers=1, read_only=True)
        first = [None if x is None else x.addressable_shards[0].data for x in (self._leaf, self._hot, self._slots)]
        return self._of(first[0], spec, *first[1:])

    def _concrete(self, what: str) -> Array:
        """The array of rows, outside of jitted functions."""
        if not is_concrete(self._leaf):
            raise TypeError(
                f"HostTable.{what}: must be called outside of jitted functions; use gather and scatter inside of them"
            )
        check_alive(self._leaf, self._spec, f"HostTable.{what}")
        leaf: Array = self._leaf
        return leaf

    # -------------------------------------------------------------------------------------------- pytree

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], TableSpec]:
        children = self._children(sys._getframe(1))
        return tuple((jax.tree_util.GetAttrKey(n), x) for n, x in zip(self._names, children, strict=False)), self._spec

    def tree_flatten(self) -> tuple[tuple[Any, ...], TableSpec]:
        return self._children(sys._getframe(1)), self._spec

    @classmethod
    def tree_unflatten(cls, spec: TableSpec, children: tuple[Any, ...]) -> Self:
        leaf, *others = children
        leaf = leaf.array if isinstance(leaf, TableLeaf | GoneLeaf) else leaf
        if (
            spec.on_drive
            and is_concrete(leaf)
            and (spec.platform != "cuda" or leaf.sharding.memory_kind == "pinned_host")
        ):
            keep_reader(leaf)
        return cls._of(leaf, spec, *others)

    def _children(self, caller: FrameType) -> tuple[Any, ...]:
        child = self._child(caller)
        return (child, self._hot, self._slots) if len(self._names) > 1 else (child,)

    def _child(self, caller: FrameType) -> Any:
        """The rows for the function that flattens the table: a `TableLeaf` for users of jax.tree, else the array."""
        leaf = self._leaf
        if not isinstance(leaf, Array):
            return leaf
        if flattened_by_user(caller):
            return TableLeaf(leaf, self._spec)
        if is_concrete(leaf) and not self._spec.on_device:
            try:
                check_computing(leaf, self._spec, "HostTable")
            except (TableClosedError, OSError) as error:
                return GoneLeaf(leaf, error)
            if leaf.sharding.memory_kind == "pinned_host" and given_a_device(caller):
                return GoneLeaf(leaf, ValueError(DEVICE_PUT))
        return leaf

    # -------------------------------------------------------------------------------------------- for dejax itself

    def _rows_at_once(self) -> int:
        """How many rows one gather should read at most; 0: any number."""
        return 0

    def _rows_ahead(self) -> RowsAhead | None:
        if not self._spec.on_drive or self._spec.shared:
            return None
        slots = None if self._slots is None else numpy_copy(self._slots)
        return RowsAhead(self._concrete("gather"), slots, self._spec.is_split)

    def _with_marks(self, marks: tuple[tuple[int, int], ...]) -> Self:
        return self._with(spec=dataclasses.replace(self._spec, marks=marks))

    def _words(self) -> LocalTable:
        """The same rows of one memory as a table of the unsigned integers that carry them."""
        return self._with(spec=self._spec.words)


_TABLES: dict[str, Any] = {}
"""The tables of one array, by the place of their rows: `HostTable`, `DeviceTable`, `DriveTable` enter themselves."""


def numpy_copy(array: Array) -> np.ndarray:
    """The values in host memory, of an array that this process has whole.

    Shard by shard: `np.asarray` of the whole leaves views of the shards with jax, and then XLA refuses to donate memory
    on the host.
    """
    found = np.empty(array.shape, array.dtype)
    for shard in array.addressable_shards[:1] if array.is_fully_replicated else array.addressable_shards:
        found[shard.index] = np.asarray(shard.data)
    return found


def shardings(tree: Any) -> Any:
    """The `out_shardings` argument for `jax.jit` of a function that returns tables in host memory.

    Without it, XLA expects all results in device memory and fails.

    Args:
        tree: pytree with the structure that the function returns, for example its arguments. Leaves that are not tables
            may be anything.

    Returns:
        The pytree with a sharding for each table in host memory, and None (XLA decides) for everything else.

    >>> from dejax.host_gather import HostTable
    >>> table = HostTable.zeros((4, 2))
    >>> step = jax.jit(lambda table, x: (table, x + 1), donate_argnums=0, out_shardings=shardings((table, 0)))
    >>> table, x = step(table, 1)
    """

    def of_leaf(value: Any) -> Any:
        if not is_table_of_host(value):
            return None
        return value.sharding if value._hot is None else value._of(value.sharding, value._spec)

    return jax.tree.map(of_leaf, tree, is_leaf=is_table_of_host)


def is_table_of_host(value: Any) -> bool:
    """Whether a value is a table with rows in host memory."""
    return isinstance(value, LocalTable) and not value._spec.on_device
