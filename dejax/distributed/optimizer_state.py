"""`divided`: an optimizer whose state is divided over the devices of a mesh, as in ZeRO's first stage."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, PartitionSpec

from dejax import _compat
from dejax.distributed._placing import check_axis, on_mesh

MULTIPLE = 64
"""Flat parameters are padded to a multiple of it, so that checkpoints have one shape on 1, 2, 4, ... 64 devices."""


class Divided(NamedTuple):
    """A pair of functions as in Optax.

    Attributes:
        init: `params -> state`, outside of `shard_map`: each device holds its share of each moment.
        update: `(gradients, state, params) -> (updates, state)`, inside of `shard_map` over the mesh.
    """

    init: Any
    update: Any


def divided(optimizer: Any, mesh: Mesh, *, axis: str = "data") -> Divided:
    """An optimizer of which each device holds and computes an equal part (ZeRO, stage 1).

    The gradients are equal on all devices, as `data_parallel` gives them. Each device updates its part of each
    parameter, and the updates are gathered. The result is that of `optimizer`.

    Args:
        optimizer: an Optax optimizer that treats each element on its own: SGD, Adam, AdamW, and chains of such. Not
            clipping by a global norm, which would see a part: clip the gradients before.
        mesh: the devices.
        axis: the axis of the mesh over which the state is divided.

    Raises:
        ValueError: a number of devices that does not divide 64.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.distributed import divided, make_mesh
    >>> optimizer = divided(optax.adam(1e-3), make_mesh(1))
    >>> state = optimizer.init({"w": jnp.ones((4, 4))})
    """
    devices = check_axis("divided", mesh, axis)
    if MULTIPLE % devices:
        raise ValueError(f"divided: the devices along `axis` must divide {MULTIPLE}, got {devices}")

    def init(params: Any) -> Any:
        flat = jax.tree.map(lambda x: np.asarray(_flat(jnp.asarray(x))), params)
        state = optimizer.init(jax.tree.map(jnp.asarray, flat))
        sizes = {leaf.shape for leaf in jax.tree.leaves(flat)}
        return jax.tree.map(
            lambda x: on_mesh(x, mesh, PartitionSpec(axis) if jnp.shape(x) in sizes else PartitionSpec()), state
        )

    def update(gradients: Any, state: Any, params: Any) -> tuple[Any, Any]:
        if axis not in _compat.manual_axes():
            raise ValueError(f"divided: `update` must run inside of jax.shard_map over the axis {axis!r}")

        def part(x: Array) -> Array:
            flat = _flat(x)
            size = flat.shape[0] // devices
            return jax.lax.dynamic_slice_in_dim(flat, jax.lax.axis_index(axis) * size, size)

        updates, after = optimizer.update(jax.tree.map(part, gradients), state, jax.tree.map(part, params))

        def whole(x: Array, like: Array) -> Array:
            flat = jax.lax.all_gather(x, axis, tiled=True)
            return flat[: math.prod(like.shape)].reshape(like.shape)

        return jax.tree.map(whole, updates, params), after

    return Divided(init, update)


def _flat(x: Array) -> Array:
    flat = x.reshape(-1)
    return jnp.pad(flat, (0, -flat.shape[0] % MULTIPLE))


__all__ = ["Divided", "divided"]
