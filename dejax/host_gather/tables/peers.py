"""`PeerTable`: a table whose most used rows are divided over the memory of several devices of one host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _native
from dejax.host_gather._spec import TableSpec
from dejax.host_gather.tables._lifetime import is_concrete
from dejax.host_gather.tables._memory import address_of, is_kept_for, keep_for
from dejax.host_gather.tables.host import HostTable
from dejax.host_gather.tables.placed import DeviceTable, slots_of_split
from dejax.host_gather.tables.table import LocalTable, numpy_copy


class PeerTable(LocalTable):
    """A table with some rows divided over the memory of several devices of one host, and all others in host memory.

    Each device reads rows from its own memory, from the memory of the other devices, and from host memory, by one
    kernel that reads each row where it lies: there is no exchange, no capacity and no waiting for each other. Devices
    must be of one process, and GPUs must be able to read each other's memory, as those of one host with NVLink can. Use
    it wherever a `HostTable` can be read; `dejax.distributed.share` gives it to all devices of a mesh. It is read-only,
    and a pytree.

    In contrast, a `SplitTable` on a mesh keeps a copy of its device rows on every device, and the rows of a
    `dejax.distributed.ShardedTable` cross between devices by an exchange in which all take part.

    Attributes:
        table: the rows in host memory, by ascending id.
        addresses: uint32[devices, 2], the addresses of the blocks of rows in device memory.
        slots: int32[rows], the place of each row: i for row i // devices of block i % devices, `~k` for row k of
            `table`. It takes 4 bytes of device memory for each row.

    >>> table = HostTable.from_numpy(np.array([[0.0], [2.0]], np.float32))
    >>> block = DeviceTable.from_numpy(np.array([[1.0]], np.float32))
    >>> PeerTable.from_parts(table, [block], [1])[np.array([2, 1, -1])]
    Array([[2.],
           [1.],
           [0.]], dtype=float32)
    """

    __slots__ = ()
    _names: ClassVar[tuple[str, ...]] = ("rows", "addresses", "slots")

    table: Any = property(lambda self: self._host_part, doc="The rows in host memory, by ascending id.")
    addresses: Any = property(lambda self: self._hot, doc="uint32[devices, 2], the addresses of the blocks of rows.")
    slots: Any = property(lambda self: self._slots, doc="int32[rows], where each row lies.")

    @classmethod
    def from_parts(cls, table: HostTable, blocks: Sequence[DeviceTable], on_devices: ArrayLike) -> PeerTable:
        """Joins a table in host memory and blocks of rows in the memory of devices, which hold their rows already.

        Args:
            table: [host rows, *row], the rows whose ids are not in `on_devices`, by ascending id.
            blocks: for each device [block, *row], all of one size; row k of block d of n is row `on_devices[k * n + d]`
                of the result. Rows beyond the last id are padding.
            on_devices: int[device rows], distinct ids below the total number of rows.

        Raises:
            ValueError: the parts differ in the shape or dtype of a row, the blocks do not have one row for each of
                their ids, or an id is out of range, occurs twice or is missing.
            RuntimeError: a GPU cannot read the memory of another one.
        """
        ids, count = np.asarray(on_devices).reshape(-1), len(blocks)
        wanted = -(-len(ids) // max(1, count))
        if any(block.shape[1:] != table.shape[1:] or block.dtype != table.dtype for block in blocks):
            raise ValueError(
                f"PeerTable: all parts must have equal rows, got {table.shape[1:]} of {table.dtype} in host memory and "
                f"{[(block.shape[1:], str(block.dtype)) for block in blocks]} on devices"
            )
        if not count or not len(ids) or any(len(block) != wanted for block in blocks):
            raise ValueError(
                f"PeerTable: each of `blocks` must have {max(1, wanted)} rows, for {len(ids)} ids in {count} blocks, "
                f"got {[len(block) for block in blocks]} rows"
            )
        if table._spec.platform == "cuda":
            devices = [next(iter(block.words.devices())).local_hardware_id for block in blocks]
            if why := _native.extension("PeerTable").enable_peers(sorted(set(devices))):
                raise RuntimeError(f"PeerTable: {why}")
        _, slots = slots_of_split(len(table) + len(ids), ids)
        words = [block.words.block_until_ready() for block in blocks]
        addresses = np.array([address_of(each) for each in words], np.uint64).view(np.uint32).reshape(count, 2)
        leaf = table._concrete("PeerTable")
        device = next(iter(leaf.devices()))
        spec = table._spec.with_peers(len(slots), count)
        made = cls._of(leaf, spec, jax.device_put(addresses, device), jax.device_put(slots, device))
        _Blocks(words).keep_for(made._hot)
        return made

    @property
    def placement(self) -> str:
        """Text that says where the rows lie."""
        count = self.shape[0] - (self._spec.leaf_rows or 0)
        return f"host and the memory of {self._spec.peers} devices ({count:,} rows)"

    def numpy(self) -> np.ndarray:
        """Copies all rows, of host and devices, to a numpy array [rows, *row] in host memory."""
        leaf, spec = self._concrete("numpy"), self._spec
        rows, slots = self._host_part._host_rows(leaf), numpy_copy(self._slots)
        out, found, peers = np.empty(spec.shape, spec.dtype), _Blocks.at(self._hot), spec.peers
        out[slots < 0] = rows[~slots[slots < 0]]
        for number, block in enumerate(found.words):
            own = (slots >= 0) & (slots % peers == number)
            out[own] = spec.to_rows(np.asarray(block))[slots[own] // peers]
        return out

    def rows_by_place(self, ids: ArrayLike, device: int = 0) -> dict[str, int]:
        """How many of the ids' rows a device reads from its own memory, from that of other devices, and from the host.

        Args:
            ids: int[...]; ids out of range do not count.
            device: the number of the block that lies in the device's memory.

        Returns:
            Numbers of rows by "own", "other" and "host".
        """
        found = jnp.asarray(ids).reshape(-1)
        there = (found >= 0) & (found < len(self))
        places = np.asarray(jnp.where(there, self._slots[jnp.where(there, found, 0)], -(2**31)))
        on_devices = places[places >= 0]
        own = int((on_devices % self._spec.peers == device).sum())
        host = int(np.count_nonzero(np.asarray(there))) - len(on_devices)
        return {"own": own, "other": len(on_devices) - own, "host": host}

    @classmethod
    def tree_unflatten(cls, spec: TableSpec, children: tuple[Any, ...]) -> Self:
        """For `jax.tree_util`. A copy of the addresses, such as `jax.device_put` makes, keeps the blocks, too."""
        made = super().tree_unflatten(spec, children)
        if is_concrete(made._hot):
            _Blocks.keep_for_copy(made._hot)
        return made

    def _on_mesh(self, mesh: Any, put: Callable[[Array], Array], writable: bool) -> Self:
        made = super()._on_mesh(mesh, put, False)
        _Blocks.at(self._hot).keep_for(made._hot)
        return made

    def _of_first_device(self) -> Self:
        made = super()._of_first_device()
        _Blocks.at(self._hot).keep_for(made._hot)
        return made


class _Blocks:
    """The blocks of a table, which live as long as an array of their addresses does."""

    _known: ClassVar[weakref.WeakValueDictionary[bytes, _Blocks]] = weakref.WeakValueDictionary()

    def __init__(self, words: list[Array]) -> None:
        self.words = words

    @classmethod
    def at(cls, addresses: Array) -> _Blocks:
        return cls._known[numpy_copy(addresses).tobytes()]

    def keep_for(self, addresses: Array) -> None:
        self._known[numpy_copy(addresses).tobytes()] = self
        # Steps in flight may read the blocks: jax knows of no use by other devices.
        on_cpu = next(iter(self.words[0].devices())).platform == "cpu"
        keep_for(addresses, self, None if on_cpu else _native.extension("PeerTable").synchronize_all)

    @classmethod
    def keep_for_copy(cls, addresses: Array) -> None:
        """Keeps the blocks for an array that may be a copy of known addresses."""
        if is_kept_for(addresses) or addresses.is_deleted() or not addresses.is_fully_addressable:
            return
        blocks = cls._known.get(numpy_copy(addresses).tobytes())
        if blocks is not None:
            blocks.keep_for(addresses)
