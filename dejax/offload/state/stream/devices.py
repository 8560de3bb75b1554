"""Arrays that travel through the devices of a mesh, or through one device, which is a mesh of one.

Each device makes the calls of a chain (`chain.py`) for its own shards. On several devices the calls are in the bodies
of `shard_map`s, and the ticket of their chains has a row on each device. So devices wait for one another only where
the arithmetic between the calls does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload.state import disk_shards
from dejax.offload.state.store import DiskArray, is_on_disk
from dejax.offload.state.stream.chain import Chain, ChainUse


class Stream:
    """The chains of all devices, as one.

    Args:
        use: what they are made for.
        arrays: in host memory or on disk.
        shardings: of each, on one mesh; on one device anything that names no several devices.
        staging_bytes: cap of staging memory on each device.
    """

    def __init__(self, use: ChainUse, arrays: Sequence[Any], shardings: Sequence[Any], staging_bytes: int) -> None:
        self.arrays = list(arrays)
        self.mesh = shardings[0].mesh if any(map(disk_shards.divided, shardings)) else None
        self._specs = [PartitionSpec() if self.mesh is None else sharding.spec for sharding in shardings]
        self._each = PartitionSpec(() if self.mesh is None else self.mesh.axis_names)
        marks = None
        if self.mesh is not None:
            marks = [disk_shards.mark_of(x.sharding, x.shape) for x in arrays if is_on_disk(x)]
        self._chain = Chain(use, shapes_of_shards(arrays, shardings), staging_bytes, marks)

    def begin(self, *, changes: bool = True) -> Array:
        """See `Chain.begin`."""

        def body(_: Any, *operands: Any) -> tuple[Array, list[Any]]:
            self._chain.arrays = self._own(operands)
            place = None if self.mesh is None else jax.lax.axis_index(self.mesh.axis_names)
            return self._chain.begin(changes=changes, place=place), self._on_host(self._chain.arrays)

        first = None if self.mesh is None else jnp.zeros((self.mesh.size, 2), jnp.uint32)
        specs = self._on_host(self._specs)
        ticket, arrays = self._run(body, first, self._operands(), self._operand_specs(), specs)
        self._take_back(arrays)
        return ticket

    def finish(self, ticket: Array, after: Sequence[Array] = (), given: Sequence[PartitionSpec] = ()) -> list[Any]:
        """Waits for all copies; returns the arrays, in the memory that they came in.

        Args:
            ticket: of the last call.
            after: values that are computed before the last call.
            given: how they are divided.
        """
        specs = self._operand_specs()
        count = len(specs)

        def body(ticket: Array, *values: Any) -> tuple[Array, list[Any]]:
            self._chain.arrays = self._own(values[:count])
            return ticket, self._returned(self._chain.finish(ticket, values[count:]))

        _, arrays = self._run(body, ticket, [*self._operands(), *after], [*specs, *given], specs)
        self._take_back(arrays, all_of_them=True)
        return self.arrays

    def _run(
        self,
        calls: Callable[..., tuple[Array, Sequence[Any]]],
        ticket: Any,
        values: Sequence[Any] = (),
        given: Sequence[PartitionSpec] = (),
        results: Sequence[PartitionSpec] = (),
    ) -> tuple[Array, list[Any]]:
        """Makes calls on every device, `calls(ticket, *shards of values)`; returns the ticket and the results.

        Args:
            calls: to a ticket and a list of arrays.
            ticket: of all devices.
            values: divided as `given` says.
            given: of the values.
            results: of the results.
        """
        if self.mesh is None:
            ticket, made = calls(ticket, *values)
            return ticket, list(made)

        def body(ticket: Array, *shards: Any) -> Any:
            ticket, made = calls(ticket[0], *shards)
            return ticket[None], list(made)

        specs = (self._each, *given)
        mapped = jax.shard_map(
            body, mesh=self.mesh, in_specs=specs, out_specs=(self._each, list(results)), check_vma=False
        )
        ticket, made = mapped(*disk_shards.placed_as(self.mesh, (ticket, *values), specs))
        return ticket, made

    def _on_host(self, values: Sequence[Any]) -> list[Any]:
        return [value for x, value in zip(self.arrays, values, strict=True) if not is_on_disk(x)]

    def _operands(self) -> list[Any]:
        """What a body takes of the arrays: on several devices, tickets of those on disk."""
        return [x.ticket if self.mesh is not None and is_on_disk(x) else x for x in self.arrays]

    def _operand_specs(self) -> list[PartitionSpec]:
        return [self._each if is_on_disk(x) else spec for x, spec in zip(self.arrays, self._specs, strict=True)]

    def _own(self, operands: Sequence[Any]) -> list[Any]:
        """Inside of a body: the device's own shards, of `_operands`."""
        if self.mesh is None:
            return list(operands)
        return [
            x.shard(operand[0]) if is_on_disk(x) else operand for x, operand in zip(self.arrays, operands, strict=True)
        ]

    def _returned(self, shards: Sequence[Any]) -> list[Any]:
        """Inside of a body: what it returns of the device's own shards."""
        return [x.ticket[None] if self.mesh is not None and is_on_disk(x) else x for x in shards]

    def _take_back(self, made: Sequence[Any], all_of_them: bool = False) -> None:
        """After a body: the arrays that it has returned, in host memory or all."""
        rest = iter(made)
        for i, x in enumerate(self.arrays):
            if not is_on_disk(x):
                self.arrays[i] = next(rest)
            elif all_of_them:
                one = next(rest)
                if self.mesh is not None:
                    one = DiskArray(one, x.shape, x.dtype, x.unit_bytes, x.store, x.sharding)
                self.arrays[i] = one


def shapes_of_shards(arrays: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Of each array one device's shard, without its values; an array on one device as it is."""
    if not any(map(disk_shards.divided, shardings)):
        return list(arrays)
    return [
        x.shard(None) if is_on_disk(x) else jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]


def why_no_shards(caller: str, arrays: Sequence[Any], shardings: Sequence[Any]) -> str | None:
    """What keeps the devices of a mesh from copying their shards, and the remedy; None where nothing does.

    Args:
        caller: in the message, as "`update`".
        arrays: of which some lie on several devices.
        shardings: of each.
    """
    if _compat.on_several_devices():
        return (
            f"{caller} must be called outside of jax.shard_map where a mesh divides the state, got a call inside of "
            "one; it makes its own"
        )
    for x, sharding in zip(arrays, shardings, strict=True):
        if not disk_shards.divided(sharding):
            return (
                f"`state` must be of one mesh, got an array of shape {tuple(x.shape)} on one device; place all "
                "parameters on the mesh with jax.device_put(params, NamedSharding(mesh, spec)) before init"
            )
        if not isinstance(sharding, NamedSharding):
            return (
                f"`state` must have a NamedSharding, got {type(sharding).__name__}; place parameters with "
                "jax.device_put(params, NamedSharding(mesh, spec)) before init"
            )
    return disk_shards.why_not_one_mesh(shardings)
