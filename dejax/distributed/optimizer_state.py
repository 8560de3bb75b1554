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
    """The pair of functions that `divided` returns, like an Optax optimizer.

    Attributes:
        init: function `params -> state`, outside of `shard_map`. Each device holds its share of each moment.
        update: function `(gradients, state, params) -> (updates, state)`, inside of `shard_map` over the mesh.
    """

    init: Any
    update: Any


def divided(optimizer: Any, mesh: Mesh, *, axis: str = "data") -> Divided:
    """Divides the state of an Optax optimizer over the devices of a mesh, as ZeRO stage 1 does.

    Each device keeps 1/n of the optimizer's state (such as Adam's moments) and updates 1/n of each parameter. An
    all-gather then gives every device all updates. The numbers are those of `optimizer` itself. All devices must pass
    the same gradients, as `data_parallel` makes sure.

    Args:
        optimizer: an Optax optimizer that updates each element of a parameter independently of the others, such as SGD,
            Adam, AdamW or a chain of these. Clipping by a global norm is not: each device would see 1/n of the norm, so
            clip the gradients beforehand.
        mesh: the devices.
        axis: name of the mesh axis over which the state is divided.

    Returns:
        A pair like an Optax optimizer. `init(params) -> state` is called outside of `shard_map`;
        `update(gradients, state, params) -> (updates, state)` inside of `shard_map`, as in the `update` function of
        `data_parallel`.

    Raises:
        ValueError: the number of devices along `axis` is not 1, 2, 4, 8, 16, 32 or 64.

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
