"""Where arrays lie on a mesh: replicated or divided, also where a mesh has devices of several processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax import _compat
from dejax.host_gather.tables.table import LocalTable


def make_mesh(devices: int | None = None, *, axis: str = "data") -> Mesh:
    """Makes a mesh with one axis over the first `devices` devices of all processes.

    Args:
        devices: number of devices; by default all.
        axis: name of the axis.

    Raises:
        ValueError: there are fewer devices, or the mesh would have more devices of one process than of another.

    >>> make_mesh(1).shape["data"]
    1
    """
    known = jax.devices()
    count = len(known) if devices is None else devices
    if not 1 <= count <= len(known):
        raise ValueError(
            f"make_mesh: `devices` must be 1 to {len(known)}, the devices that jax sees, got {devices}; on the CPU "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={devices} makes them"
        )
    if jax.process_count() > 1 and count != len(known):
        raise ValueError(f"make_mesh: with several processes `devices` must be all {len(known)}, got {devices}")
    return jax.make_mesh((count,), (axis,), (jax.sharding.AxisType.Auto,), devices=known[:count])


def lies_on(value: Any, mesh: Mesh) -> bool:
    """Whether a value is an array of the mesh."""
    sharding = getattr(value, "sharding", None)
    return isinstance(sharding, NamedSharding) and (sharding.mesh is mesh or sharding.mesh == mesh)


def all_on_mesh(values: Sequence[Any], mesh: Mesh, spec: PartitionSpec) -> list[Array]:
    """The values as arrays of the mesh. Arrays that lie on it stay as they are.

    Without devices of other processes this is one `device_put` for all others. With them, each process gives the whole
    of each value.
    """
    found = list(values)
    away = [place for place, value in enumerate(found) if not lies_on(value, mesh)]
    if not away:
        return found
    wanted = NamedSharding(mesh, spec)
    if wanted.is_fully_addressable:
        moved = jax.device_put([found[place] for place in away], wanted)
    else:
        moved = [_from_all_processes(found[place], wanted) for place in away]
    for place, array in zip(away, moved, strict=True):
        found[place] = array
    return found


def _from_all_processes(value: Any, wanted: NamedSharding) -> Array:
    if isinstance(value, Array) and jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = _from_all_processes(jax.random.key_data(value), wanted)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(value))
    whole = np.asarray(value)
    return jax.make_array_from_callback(whole.shape, wanted, lambda index: whole[index])


def on_mesh(value: Any, mesh: Mesh, spec: PartitionSpec) -> Array:
    """`value` as an array of the mesh: see `all_on_mesh`."""
    return all_on_mesh([value], mesh, spec)[0]


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Copies each array of a pytree to every device of a mesh.

    Arrays that already lie on the mesh are returned as they are. A later write to a numpy array changes no copy.

    In a job of several processes, every process must pass the same values.

    >>> import jax.numpy as jnp
    >>> from dejax.distributed import make_mesh, replicate
    >>> replicate({"w": jnp.ones(2)}, make_mesh(1))["w"].sharding.is_fully_replicated
    True
    """
    return jax.tree.map(lambda value: _copied(value, mesh), tree)


def _copied(value: Any, mesh: Mesh) -> Array:
    """A replicated array with memory of its own: jax leaves a numpy array where it lies if the mesh has CPU devices."""
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    return on_mesh(_compat.own_memory(value) if on_cpu else value, mesh, PartitionSpec())


def share(tree: Any, mesh: Mesh, *, writable: bool = False) -> Any:
    """Makes tables and arrays usable by every device of a mesh: feature stores, topologies, tables, optimizer states.

    A table in host memory is not copied: the GPUs of a process read and write the same rows. Only the rows that a
    cached or split table keeps on a device are copied to each device. Tables in device memory and plain arrays are
    replicated. Values that already lie on the mesh are returned as they are.

    Args:
        tree: pytree of tables and arrays, such as a `FeatureStore`, the state of its optimizer, or a `HeteroTopology`.
        mesh: devices of one or several processes. Every process must pass the same rows.
        writable: whether steps will write the tables. If so, do not use the tables in `tree` afterwards.

    Raises:
        ValueError: the mesh has devices of another platform than the tables; or `writable`, but a table is read-only.
    """

    def everywhere(value: Any) -> Array:
        return _copied(value, mesh)

    def shared(value: Any) -> Any:
        return value._on_mesh(mesh, everywhere, writable) if isinstance(value, LocalTable) else everywhere(value)

    return jax.tree.map(shared, tree, is_leaf=_is_table)


def local(tree: Any) -> Any:
    """Returns the copies of replicated arrays and shared tables that lie on this process's first device.

    Use it to read a state outside of the step, for example to evaluate. Nothing is copied, so use the result before the
    next step reuses the memory of the state. The tables of the result are read-only.

    >>> import jax.numpy as jnp
    >>> from dejax.distributed import local, make_mesh, replicate
    >>> params = replicate({"w": jnp.ones(2)}, make_mesh(1))
    >>> local(params)
    {'w': Array([1., 1.], dtype=float32)}
    """

    def of_first(value: Any) -> Any:
        if isinstance(value, LocalTable):
            return value._of_first_device()
        return value.addressable_shards[0].data if isinstance(value, Array) else value

    return jax.tree.map(of_first, tree, is_leaf=_is_table)


def _is_table(value: Any) -> bool:
    return isinstance(value, LocalTable)


def spec_of(value: Any, mesh: Mesh) -> PartitionSpec:
    """How an array lies on the mesh; replicated if it does not lie on it yet."""
    return value.sharding.spec if lies_on(value, mesh) else PartitionSpec()


def check_axis(what: str, mesh: Mesh, axis: str) -> int:
    """The number of devices along `axis`."""
    if axis not in mesh.shape:
        names: Sequence[str] = [str(name) for name in mesh.axis_names]
        raise ValueError(f"{what}: `axis` must be one of the mesh's axes, {', '.join(names)}, got {axis!r}")
    return mesh.shape[axis]
