"""Arrays on disk that are divided among the devices of a mesh: each device's shard is an array of its own in the files.

The ticket of a divided array has a row on each device. So each device's chain of calls opens its own shard. Devices of
this process that hold the same part, as of a replicated parameter, share its files: the first one writes, each reads. A
row ends with a mark of the division and the device's place in the mesh. So state that comes with another division, or
from another mesh, is an error and never a wrong number.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload.state.meshes import divided


def mark_of(sharding: NamedSharding, shape: Sequence[int]) -> int:
    """A hash of which part of an array each device of the mesh holds; positive, 32 bits."""
    _, parts = _compat.shard_grid(sharding, len(shape))
    devices = [device.id for device in sharding.mesh.devices.flat]
    text = repr((tuple(shape), sharding.shard_shape(tuple(shape)), devices, sorted(parts.items())))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") | 1


def ticket_sharding(mesh: Any) -> NamedSharding:
    """The sharding of tickets [devices, 5]: a row on each device."""
    return NamedSharding(mesh, PartitionSpec(mesh.axis_names))


def put_shards(store: Any, array: Any, sharding: NamedSharding, write: Callable[[Any, int], int]) -> Any:
    """Writes the shards of this process's devices; returns the ticket.

    Args:
        store: a `StateStore`.
        array: numpy, jax, or a `DiskArray`.
        sharding: how the array is divided.
        write: a function from a shard and the number of its device among those of this process to the number of a new
            array.
    """
    shard = _shards_of(array, sharding)
    devices = list(sharding.mesh.devices.flat)
    lanes = {device: lane for lane, device in enumerate(jax.local_devices(backend=devices[0].platform))}
    numbers: dict[Any, int] = {}
    written: dict[Any, int] = {}  # by part
    try:
        for device, index in sharding.addressable_devices_indices_map(tuple(array.shape)).items():
            part = _bounds(index, array.shape)
            if part in written:
                numbers[device] = store._native.share(written[part], lanes[device])
            else:
                numbers[device] = written[part] = write(shard(device, index), lanes[device])
    except BaseException:
        for number in numbers.values():
            store._native.remove(number)
        raise
    store._native.join(list(numbers.values()))
    mark = mark_of(sharding, array.shape)

    def rows(index: Any) -> np.ndarray[Any, Any]:
        places = range(len(devices))[index[0]]
        return np.array([[store._native.number, numbers[devices[at]], 0, mark, at] for at in places], np.uint32)

    return jax.make_array_from_callback((len(devices), 5), ticket_sharding(sharding.mesh), rows)


def rows_of_tickets(ticket: Any, sharding: NamedSharding) -> dict[Any, np.ndarray[Any, Any]]:
    """The ticket's row of each device of this process."""
    devices = list(sharding.mesh.devices.flat)
    if isinstance(ticket, jax.Array) and not ticket.is_fully_addressable:
        rows: dict[Any, np.ndarray[Any, Any]] = {}
        for shard in ticket.addressable_shards:
            held = np.asarray(shard.data)
            rows.update(zip(devices[shard.index[0]], held, strict=True))
        return rows
    return dict(zip(devices, np.asarray(ticket), strict=True))


def _shards_of(array: Any, sharding: NamedSharding) -> Callable[[Any, Any], Any]:
    """A function from a device and its index into the array to the device's shard."""
    shape = tuple(array.shape)
    if isinstance(array, jax.Array):
        if not _same_parts(array.sharding, sharding, shape):
            array = jax.device_put(array, sharding)
        held = {shard.device: shard.data for shard in array.addressable_shards}
        return lambda device, index: held[device]
    if hasattr(array, "shards"):  # a DiskArray
        if divided(array.sharding) and _same_parts(array.sharding, sharding, shape):
            parts = array.shards()
            return lambda device, index: np.asarray(parts[device][1])
        array = np.asarray(array)
    return lambda device, index: array[index]


def _same_parts(a: Any, b: Any, shape: tuple[int, ...]) -> bool:
    return bool(a.devices_indices_map(shape) == b.devices_indices_map(shape))


def distinct(parts: dict[Any, tuple[Any, Any]], shape: Sequence[int]) -> list[tuple[tuple[slice, ...], Any]]:
    """One shard for each distinct part of an array, as pairs (index without None, shard)."""
    found: dict[tuple[Any, ...], tuple[tuple[slice, ...], Any]] = {}
    for index, shard in parts.values():
        bounds = _bounds(index, shape)
        found.setdefault(bounds, (tuple(slice(*pair) for pair in bounds), shard))
    return list(found.values())


def _bounds(index: Any, shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The begin and the end of a shard along each axis."""
    return tuple(at.indices(size)[:2] for at, size in zip(index, shape, strict=True))


def read_rows(parts: dict[Any, tuple[Any, Any]], shape: tuple[int, ...], dtype: Any, begin: int, end: int) -> Any:
    """Rows `begin` to `end` of an array, from its shards."""
    out = np.empty((end - begin, *shape[1:]), dtype)
    for (rows, *others), shard in distinct(parts, shape):
        first, last = max(begin, rows.start), min(end, rows.stop)
        if first < last:
            out[(slice(first - begin, last - begin), *others)] = shard[first - rows.start : last - rows.start]
    return out
