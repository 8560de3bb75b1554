"""Calls that copy the shards of arrays that a mesh divides.

Each device makes the calls for its own shards, in the bodies of `shard_map`s. The ticket of the devices' chains has a
row on each device. So devices wait for one another only where the arithmetic between the calls does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax.offload.state import disk_shards
from dejax.offload.state.store import DiskArray, is_on_disk


class ShardCalls:
    """The arrays and their devices.

    Args:
        arrays: in host memory or on disk.
        shardings: of each, on one mesh.
    """

    def __init__(self, arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> None:
        self.arrays = list(arrays)
        self._mesh = shardings[0].mesh
        self._specs = [sharding.spec for sharding in shardings]
        self._each = PartitionSpec(self._mesh.axis_names)

    def _first_ticket(self) -> Array:
        return jnp.zeros((self._mesh.size, 2), jnp.uint32)

    def _place(self) -> Any:
        """Inside of a body: of the device in the mesh."""
        return jax.lax.axis_index(self._mesh.axis_names)

    def _run(
        self,
        calls: Callable[..., tuple[Array, list[Any]]],
        ticket: Array,
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

        def body(ticket: Array, *shards: Any) -> Any:
            ticket, made = calls(ticket[0], *shards)
            return ticket[None], list(made)

        specs = (self._each, *given)
        mapped = jax.shard_map(
            body, mesh=self._mesh, in_specs=specs, out_specs=(self._each, list(results)), check_vma=False
        )
        ticket, made = mapped(*disk_shards.placed_as(self._mesh, (ticket, *values), specs))
        return ticket, made

    def _near(self, values: Sequence[Any]) -> list[Any]:
        return [value for x, value in zip(self.arrays, values, strict=True) if not is_on_disk(x)]

    def _operands(self) -> list[Any]:
        """The arrays in host memory, and the tickets of those on disk."""
        return [x.ticket if is_on_disk(x) else x for x in self.arrays]

    def _operand_specs(self) -> list[PartitionSpec]:
        return [self._each if is_on_disk(x) else spec for x, spec in zip(self.arrays, self._specs, strict=True)]

    def _own(self, operands: Sequence[Any]) -> list[Any]:
        """Inside of a body: the device's own shards, of `_operands`."""
        return [
            x.shard(operand[0]) if is_on_disk(x) else operand for x, operand in zip(self.arrays, operands, strict=True)
        ]

    def _returned(self, shards: Sequence[Any]) -> list[Any]:
        """Inside of a body: what it returns of the device's own shards."""
        return [x.ticket[None] if is_on_disk(x) else x for x in shards]

    def _take_back(self, made: Sequence[Any], all_of_them: bool = False) -> None:
        """After a body: the arrays that it has returned, in host memory or all."""
        rest = iter(made)
        for i, x in enumerate(self.arrays):
            if is_on_disk(x):
                if all_of_them:
                    self.arrays[i] = DiskArray(next(rest), x.shape, x.dtype, x.unit_bytes, x.store, x.sharding)
            else:
                self.arrays[i] = next(rest)


def shapes_of_shards(arrays: Sequence[Any], shardings: Sequence[NamedSharding]) -> list[Any]:
    """Of each array one device's shard, without its values."""
    return [
        x.shard(None) if is_on_disk(x) else jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)
        for x, sharding in zip(arrays, shardings, strict=True)
    ]
