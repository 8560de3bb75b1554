"""Rows of arrays that a mesh divides: each device copies the rows of its own shards, as `_rows.py` does on one device.

The calls of a device are in the bodies of `jax.shard_map`, and the chain's ticket has a row on each device. So devices
wait for one another only where the arithmetic between the calls does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload import _disk_shards
from dejax.offload._rows import HostRows, Walk
from dejax.offload._state_store import DiskArray, is_on_disk


class ShardRows:
    """`HostRows` of all devices, as one.

    Args:
        arrays: in host memory or on disk, [rows, ...], all with as many rows.
        shardings: how each is divided: on one mesh, and not along the first axis.
        staging_bytes: cap of staging memory on each device.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding], staging_bytes: int) -> None:
        self.arrays = list(arrays)
        self._mesh = shardings[0].mesh
        self._specs = [sharding.spec for sharding in shardings]
        self._each = PartitionSpec(self._mesh.axis_names)
        shards: list[Any] = []
        for x, sharding in zip(arrays, shardings, strict=True):
            shape = sharding.shard_shape(x.shape)
            shards.append(x.shard(None) if is_on_disk(x) else jax.ShapeDtypeStruct(shape, x.dtype))
        marks = [_disk_shards.mark_of(x.sharding, x.shape) for x in arrays if is_on_disk(x)]
        self._rows = HostRows(shards, staging_bytes, marks)

    def begin(self, *, changes: bool = True) -> Array:
        """See `HostRows.begin`."""

        def body(rows: HostRows, _: Any, *arrays: Any) -> tuple[Array, list[Any]]:
            self._give(arrays)
            place = jax.lax.axis_index(self._mesh.axis_names)
            ticket = rows.begin(changes=changes, place=place)
            return ticket, self._near(rows.arrays)

        near = self._near(self._specs)
        ticket = jnp.zeros((self._mesh.size, 2), jnp.uint32)
        ticket, arrays = self._run(body, ticket, self._operands(), self._operand_specs(), near)
        self._take_back(arrays)
        return ticket

    def first_rows(self, ticket: Array, walk: Walk) -> Array:
        """See `HostRows.first_rows`."""
        return self._run(lambda rows, ticket: (rows.first_rows(ticket, walk), []), ticket)[0]

    def take(self, ticket: Array, walk: Walk) -> tuple[Array, list[Array]]:
        """See `HostRows.take`."""
        results = [self._row_spec(i) for i in walk.arrays]
        return self._run(lambda rows, ticket: rows.take(ticket, walk), ticket, results=results)

    def put(self, ticket: Array, walk: Walk, arrays: Sequence[int], values: Sequence[Array]) -> Array:
        """See `HostRows.put`."""

        def body(rows: HostRows, ticket: Array, *values: Array) -> tuple[Array, list[Any]]:
            return rows.put(ticket, walk, arrays, values), []

        return self._run(body, ticket, values, [self._row_spec(i) for i in arrays])[0]

    def finish(self, ticket: Array, after: Sequence[tuple[Array, Any]] = ()) -> list[Any]:
        """See `HostRows.finish`.

        Args:
            ticket: of the last call.
            after: values that are computed before the last call, each with its sharding.
        """
        specs = self._operand_specs()
        count = len(specs)

        def body(rows: HostRows, ticket: Array, *values: Any) -> tuple[Array, list[Any]]:
            self._give(values[:count])
            made = rows.finish(ticket, values[count:])
            return ticket, [x.ticket[None] if is_on_disk(x) else x for x in made]

        values, given = self._waited(after)
        _, arrays = self._run(body, ticket, [*self._operands(), *values], [*specs, *given], specs)
        self._take_back(arrays, all_of_them=True)
        return self.arrays

    def finish_reading(self, ticket: Array, after: Sequence[Array] = ()) -> None:
        """See `HostRows.finish_reading`."""

        def body(rows: HostRows, ticket: Array, *values: Array) -> tuple[Array, list[Any]]:
            rows.finish_reading(ticket, values)
            return ticket, []

        self._run(body, ticket, *self._waited([(x, None) for x in after]))

    def _waited(self, after: Sequence[tuple[Array, Any]]) -> tuple[list[Array], list[PartitionSpec]]:
        """Values that the last call waits for, and how they are divided.

        The CPU's devices run what does not depend on one another in orders of their own. If a call raised on one of
        them too early, another one would wait for it in a collective operation. So on CPUs the last call raises what
        any call refuses, and it waits for all of the step's results. A GPU's devices run programs in one order: there
        a call raises at once.
        """
        if self._mesh.devices.flat[0].platform != "cpu":
            return [], []
        values = [
            (x, at.spec if isinstance(at, NamedSharding) and at.mesh == self._mesh else PartitionSpec())
            for x, at in after
            if x.size and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        ]
        return [x for x, _ in values], [spec for _, spec in values]

    def _run(
        self,
        calls: Callable[..., tuple[Array, list[Any]]],
        ticket: Array,
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> tuple[Array, list[Any]]:
        """Makes calls on every device, `calls(rows, ticket, *shards of values)`; returns the ticket and the results.

        Args:
            calls: to a ticket and arrays.
            ticket: of all devices.
            values: divided as `given` says.
            given: of the values.
            results: of the results.
        """

        def body(ticket: Array, *shards: Any) -> Any:
            ticket, made = calls(self._rows, ticket[0], *shards)
            return ticket[None], list(made)

        specs = (self._each, *given)
        mapped = jax.shard_map(
            body, mesh=self._mesh, in_specs=specs, out_specs=(self._each, list(results)), check_vma=False
        )
        ticket, made = mapped(*_disk_shards.placed_as(self._mesh, (ticket, *values), specs))
        return ticket, made

    def _row_spec(self, i: int) -> PartitionSpec:
        return PartitionSpec(*self._specs[i][1:])

    def _near(self, values: Sequence[Any]) -> list[Any]:
        return [value for x, value in zip(self.arrays, values, strict=True) if not is_on_disk(x)]

    def _operands(self) -> list[Any]:
        """The arrays in host memory, and the tickets of those on disk."""
        return [x.ticket if is_on_disk(x) else x for x in self.arrays]

    def _operand_specs(self) -> list[PartitionSpec]:
        return [self._each if is_on_disk(x) else spec for x, spec in zip(self.arrays, self._specs, strict=True)]

    def _give(self, shards: Sequence[Any]) -> None:
        """Inside of a body: the device's own shards."""
        for i, (array, shard) in enumerate(zip(self.arrays, shards, strict=True)):
            self._rows.arrays[i] = array.shard(shard[0]) if is_on_disk(array) else shard

    def _take_back(self, made: Sequence[Any], all_of_them: bool = False) -> None:
        """After a body: the arrays that it has returned, in host memory or all."""
        rest = iter(made)
        for i, x in enumerate(self.arrays):
            if is_on_disk(x):
                if all_of_them:
                    self.arrays[i] = DiskArray(next(rest), x.shape, x.dtype, x.unit_bytes, x.store, x.sharding)
            else:
                self.arrays[i] = next(rest)


def rows_of(arrays: Sequence[Any], shardings: Sequence[Any], ahead: int) -> HostRows | ShardRows:
    """The calls that copy the rows of arrays, on one device or on those of a mesh.

    Args:
        arrays: in host memory or on disk, [rows, ...].
        shardings: of each; what is no `NamedSharding` on several devices is on one device.
        ahead: number of rows that are on their way to the device. Staging memory holds as many, and one more, each way.

    Raises:
        ValueError: not all arrays are on one mesh, or the mesh divides rows from one another.
    """
    row = sum(
        _disk_shards.shard_bytes(at, x.shape, x.dtype) // x.shape[0] for x, at in zip(arrays, shardings, strict=True)
    )
    staging_bytes = 2 * (ahead + 1) * row
    if not any(map(_disk_shards.divided, shardings)):
        return HostRows(arrays, staging_bytes)
    if why := why_no_rows(arrays, shardings):
        raise ValueError(f"stack_step: {why}")
    return ShardRows(arrays, shardings, staging_bytes)


def why_no_rows(arrays: Sequence[Any], shardings: Sequence[Any]) -> str | None:
    """What keeps the devices of a mesh from copying the rows of arrays, and the remedy; None where nothing does."""
    if _compat.on_several_devices():
        return (
            "the step must be called outside of jax.shard_map where a mesh divides its state, got a call inside of "
            "one; it makes its own"
        )
    for x, sharding in zip(arrays, shardings, strict=True):
        if not _disk_shards.divided(sharding):
            return f"`state` must be of one mesh, got an array of shape {x.shape} on one device"
        if not isinstance(sharding, NamedSharding):
            return (
                f"`state` must have a NamedSharding, got {type(sharding).__name__}; place parameters with "
                "jax.device_put(params, NamedSharding(mesh, spec))"
            )
        if why := _why_no_whole_rows(x, sharding):
            return why
    meshes = list(dict.fromkeys(sharding.mesh for sharding in shardings))
    return None if len(meshes) == 1 else f"`state` must be of one mesh, got arrays of {meshes[0]} and {meshes[1]}"


def require_whole_rows(x: Any, sharding: NamedSharding) -> None:
    """Raises ValueError where some devices hold other rows than others."""
    if why := _why_no_whole_rows(x, sharding):
        raise ValueError(f"stack_step: {why}")


def _why_no_whole_rows(x: Any, sharding: NamedSharding) -> str | None:
    if sharding.shard_shape(tuple(x.shape))[0] == x.shape[0]:
        return None
    return (
        "`layers` must be divided along other axes than the first one, because layers travel one by one, got "
        f"{sharding.spec} for an array of shape {tuple(x.shape)}; place it with PartitionSpec(None, ...)"
    )
