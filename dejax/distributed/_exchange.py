"""Which device gets which ids: the routes of an exchange between owners of rows, in static shapes, inside shard_map."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array

_COMPARED = 64  # devices up to which every entry is compared with each


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Route:
    """Where each of n entries goes: a slot of the device that owns it.

    Attributes:
        slots: int32[n], the entry's slot among [devices * capacity]; beyond them for an entry that is not sent.
        lost: int32 scalar, entries that did not fit.
        devices: how many, along `axis`.
        capacity: the slots of each.
        axis: the name of the mesh axis.
    """

    slots: Array
    lost: Array
    devices: int
    capacity: int
    axis: str

    def send(self, values: Array, fill: int = 0) -> Array:
        """[devices * capacity, ...]: the values that the other devices send to this one, in the order of the mesh.

        Args:
            values: [n, ...], one for each entry.
            fill: what empty slots hold.
        """
        size = self.devices * self.capacity
        slots = jnp.full((size, *values.shape[1:]), fill, values.dtype).at[self.slots].set(values, mode="drop")
        return _to_all(slots, self.axis)

    def give_back(self, answers: Array) -> Array:
        """[n, ...]: for each entry the answer of its owner; zeros for an entry that was not sent.

        Args:
            answers: [devices * capacity, ...], one for each value that `send` gave.
        """
        return _to_all(answers, self.axis).at[self.slots].get(mode="fill", fill_value=0)


def route(owners: Array, devices: int, capacity: int, axis: str) -> Route:
    """Groups entries by owner. Entries of an owner keep their order, and the first `capacity` of them are sent.

    Args:
        owners: int32[n], the device that owns each entry; `devices` for an entry that is not sent.
        devices: along `axis`.
        capacity: the most entries that one device sends to another one.
        axis: the name of the mesh axis.
    """
    count = owners.shape[0]
    in_order, order = jax.lax.sort((owners, jnp.arange(count, dtype=jnp.int32)), num_keys=1)
    # Comparisons with each device are one kernel; a binary search is a loop of some launches a step.
    how = "compare_all" if devices <= _COMPARED else "scan"
    starts = jnp.searchsorted(in_order, jnp.arange(devices + 1, dtype=owners.dtype), method=how).astype(jnp.int32)
    rank = jnp.arange(count, dtype=jnp.int32) - starts[in_order]
    sent = in_order < devices
    fits = sent & (rank < capacity)
    places = jnp.where(fits, in_order * capacity + rank, devices * capacity)
    slots = jnp.zeros(count, jnp.int32).at[order].set(places.astype(jnp.int32), unique_indices=True)
    return Route(slots, jnp.sum(sent & ~fits, dtype=jnp.int32), devices, capacity, axis)


def _to_all(slots: Array, axis: str) -> Array:
    return jax.lax.all_to_all(slots, axis, 0, 0, tiled=True)
