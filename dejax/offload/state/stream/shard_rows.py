"""Rows of arrays that a mesh divides: each device copies those of its own shards, as `rows.py` does on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload.state import disk_shards
from dejax.offload.state.store import is_on_disk
from dejax.offload.state.stream.chain import staging_bytes
from dejax.offload.state.stream.rows import HostRows, Walk
from dejax.offload.state.stream.shard_calls import ShardCalls, shapes_of_shards


class ShardRows(ShardCalls):
    """`HostRows` of all devices, as one.

    Args:
        arrays: in host memory or on disk, [rows, ...], all with as many rows.
        shardings: how each is divided: on one mesh, and not along the first axis.
        staging_bytes: cap of staging memory on each device.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding], staging_bytes: int) -> None:
        super().__init__(arrays, shardings)
        marks = [disk_shards.mark_of(x.sharding, x.shape) for x in arrays if is_on_disk(x)]
        self._rows = HostRows(shapes_of_shards(arrays, shardings), staging_bytes, marks)

    def begin(self, *, changes: bool = True) -> Array:
        """See `HostRows.begin`."""

        def body(_: Any, *operands: Any) -> tuple[Array, list[Any]]:
            self._rows.arrays = self._own(operands)
            ticket = self._rows.begin(changes=changes, place=self._place())
            return ticket, self._near(self._rows.arrays)

        near = self._near(self._specs)
        ticket, arrays = self._run(body, self._first_ticket(), self._operands(), self._operand_specs(), near)
        self._take_back(arrays)
        return ticket

    def first_rows(self, ticket: Array, walk: Walk) -> Array:
        """See `HostRows.first_rows`."""
        return self._run(lambda ticket: (self._rows.first_rows(ticket, walk), []), ticket)[0]

    def take(self, ticket: Array, walk: Walk) -> tuple[Array, list[Array]]:
        """See `HostRows.take`."""
        results = [self._row_spec(i) for i in walk.arrays]
        return self._run(lambda ticket: self._rows.take(ticket, walk), ticket, results=results)

    def put(self, ticket: Array, walk: Walk, arrays: Sequence[int], values: Sequence[Array]) -> Array:
        """See `HostRows.put`."""

        def body(ticket: Array, *values: Array) -> tuple[Array, list[Any]]:
            return self._rows.put(ticket, walk, arrays, values), []

        return self._run(body, ticket, values, [self._row_spec(i) for i in arrays])[0]

    def finish(self, ticket: Array, after: Sequence[tuple[Array, Any]] = ()) -> list[Any]:
        """See `HostRows.finish`.

        Args:
            ticket: of the last call.
            after: values that are computed before the last call, each with its sharding.
        """
        specs = self._operand_specs()
        count = len(specs)

        def body(ticket: Array, *values: Any) -> tuple[Array, list[Any]]:
            self._rows.arrays = self._own(values[:count])
            return ticket, self._returned(self._rows.finish(ticket, values[count:]))

        values, given = self._waited(after)
        _, arrays = self._run(body, ticket, [*self._operands(), *values], [*specs, *given], specs)
        self._take_back(arrays, all_of_them=True)
        return self.arrays

    def finish_reading(self, ticket: Array, after: Sequence[Array] = ()) -> None:
        """See `HostRows.finish_reading`."""

        def body(ticket: Array, *values: Array) -> tuple[Array, list[Any]]:
            self._rows.finish_reading(ticket, values)
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

    def _row_spec(self, i: int) -> PartitionSpec:
        return PartitionSpec(*self._specs[i][1:])


def rows_of(arrays: Sequence[Any], shardings: Sequence[Any], ahead: int) -> HostRows | ShardRows:
    """The calls that copy the rows of arrays, on one device or on those of a mesh.

    Args:
        arrays: in host memory or on disk, [rows, ...].
        shardings: of each; what is no `NamedSharding` on several devices is on one device.
        ahead: number of rows that are on their way to the device. Staging memory holds as many, and one more, each way.

    Raises:
        ValueError: not all arrays are on one mesh, or the mesh divides rows from one another.
    """
    row = [disk_shards.shard_bytes(at, x.shape, x.dtype) // x.shape[0] for x, at in zip(arrays, shardings, strict=True)]
    staging = staging_bytes(row, ahead, arrays[0].shape[0])
    if not any(map(disk_shards.divided, shardings)):
        return HostRows(arrays, staging)
    if why := why_no_rows(arrays, shardings):
        raise ValueError(f"stack_step: {why}")
    return ShardRows(arrays, shardings, staging)


def why_no_rows(arrays: Sequence[Any], shardings: Sequence[Any]) -> str | None:
    """What keeps the devices of a mesh from copying the rows of arrays, and the remedy; None where nothing does."""
    if _compat.on_several_devices():
        return (
            "the step must be called outside of jax.shard_map where a mesh divides its state, got a call inside of "
            "one; it makes its own"
        )
    for x, sharding in zip(arrays, shardings, strict=True):
        if not disk_shards.divided(sharding):
            return f"`state` must be of one mesh, got an array of shape {x.shape} on one device"
        if not isinstance(sharding, NamedSharding):
            return (
                f"`state` must have a NamedSharding, got {type(sharding).__name__}; place parameters with "
                "jax.device_put(params, NamedSharding(mesh, spec))"
            )
        if why := _why_no_whole_rows(x, sharding):
            return why
    return disk_shards.why_not_one_mesh(shardings)


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
