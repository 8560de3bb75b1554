"""One table of several devices: its arrays, and what a write does in a `shard_map` over them.

GPUs of one process share one physical table. Each writes its part of the rows: two never write the same row, and no row
is written twice. On other platforms each device has a copy, and applies the rows of all devices to it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax import _compat
from dejax.host_gather._spec import TableSpec, platform_of
from dejax.host_gather.tables import _storage
from dejax.host_gather.tables._drive_files import keep_reader
from dejax.host_gather.tables._memory import array_of, copy_rows, memory_of, numpy_of


def share_leaf(leaf: Array, spec: TableSpec, mesh: Mesh, writable: bool) -> tuple[Array, TableSpec]:
    """The array of a table on every device of a mesh, and the spec of the shared table.

    Raises:
        ValueError: devices of another platform; a process without devices, or with devices at several places.
    """
    what = "HostTable.share"
    devices = list(mesh.devices.flat)
    own = [device for device in devices if device.process_index == jax.process_index()]
    if any(platform_of(device) != spec.platform for device in devices):
        raise ValueError(
            f"{what}: `mesh` must have {spec.platform} devices, where the table lies, got "
            f"{sorted({platform_of(device) for device in devices})}"
        )
    if not own:
        raise ValueError(f"{what}: `mesh` must have devices of this process, got {[d.id for d in devices]}")
    if writable and spec.read_only:
        raise ValueError(
            f"{what}: a table that is shared for writing must be writable, got a read-only one, made from a file or a "
            "read-only array; copy it with HostTable.from_numpy(table.numpy())"
        )
    memory = memory_of(leaf)
    if spec.platform == "cuda" and memory is not None:
        arrays, kind, sharers = [array_of(memory, spec, device) for device in own], "pinned_host", len(own)
    else:
        arrays, kind, sharers = [_copy(leaf, spec, device, writable) for device in own], None, 1
        kind = own[0].default_memory().kind
    if sharers > 1 and any(
        len({device.process_index for device in devices[first : first + sharers]}) > 1
        for first in range(0, len(devices), sharers)
    ):
        raise ValueError(
            f"{what}: in `mesh` the devices of a process must stand next to each other, {sharers} of each process, "
            f"got the processes {[device.process_index for device in devices]}; order the devices by process"
        )
    sharding = NamedSharding(mesh, PartitionSpec(), memory_kind=kind)
    whole = jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)
    if spec.on_drive:
        keep_reader(whole)
    return whole, dataclasses.replace(spec, read_only=not writable, shared=True, sharers=sharers)


def _copy(leaf: Array, spec: TableSpec, device: Any, writable: bool) -> Array:
    if not writable:
        return jax.device_put(numpy_of(leaf), device)
    # Memory of jax, which a donating step writes in place: see zeros_on_cpu.
    copy = _storage.zeros_on_cpu(spec, device, "HostTable.share")
    words = numpy_of(leaf)
    copy_rows(copy, spec, 0, words)
    return copy


def leaves_to_write(leaf: Array, spec: TableSpec) -> list[Array]:
    """The arrays of this process that a write from the host must change: each copy once."""
    if not spec.shared:
        return [leaf]
    own = [shard.data for shard in leaf.addressable_shards]
    return own[:1] if spec.sharers > 1 else own


def of_all_devices(what: str, ids: Array, rows: Array, row: tuple[int, ...]) -> tuple[Array, Array]:
    """Ids and rows of all devices, in the order of the mesh, as int[n] and [n, *row]: on each device the same.

    Raises:
        ValueError: outside of shard_map.
    """
    axes = _compat.manual_axes()
    if not axes:
        raise ValueError(
            f"{what}: a table that is shared for writing must be written inside of jax.shard_map over its mesh, got a "
            "call outside; dejax.distributed.data_parallel makes such a step"
        )
    ids, rows = ids.reshape(-1), rows.reshape(ids.size, *row)
    return jax.lax.all_gather(ids, axes, tiled=True), jax.lax.all_gather(rows, axes, tiled=True)


def own_rows(spec: TableSpec, ids: Array) -> Array:
    """The ids that this device writes; -1 for those that another one of the process writes."""
    if spec.sharers <= 1:
        return ids
    place = jax.lax.axis_index(_compat.manual_axes()) % spec.sharers
    return jnp.where(ids % spec.sharers == place, ids, -1)


def id_after_all_devices(read: Array) -> Array:
    """int32[1], an id that no row has, once all devices have come so far.

    XLA drops a barrier without a used result, and a sum over devices whose terms it knows. So this sum has a term that
    it cannot know, and is itself an argument: of the next write.

    Args:
        read: [...], zeros that were read from the table after the write, as XLA does not know.
    """
    term = jax.lax.axis_index(_compat.manual_axes()) + (read.reshape(-1)[0] != 0)
    return -1 - jax.lax.psum(term.astype(jnp.int32), _compat.manual_axes()).reshape(1)
