"""Meshes that divide the arrays of a state: what a device holds of an array, and the divisions that are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dejax import _compat


def divided(sharding: Any) -> bool:
    """Whether a sharding has several devices."""
    return sharding is not None and bool(sharding.num_devices > 1)


def shard_bytes(sharding: Any, shape: Sequence[int], dtype: Any) -> int:
    """Number of bytes of one device's shard, or of an array that is not divided."""
    shape = sharding.shard_shape(tuple(shape)) if divided(sharding) else shape
    return math.prod(shape) * np.dtype(dtype).itemsize


def placed_as(mesh: Any, values: Sequence[Any], specs: Sequence[PartitionSpec]) -> list[Any]:
    """Divides values as a `shard_map` takes them, if axes of the mesh are explicit. Otherwise XLA divides them."""
    if AxisType.Explicit not in mesh.axis_types:
        return list(values)
    return [jax.sharding.reshard(x, NamedSharding(mesh, spec)) for x, spec in zip(values, specs, strict=True)]


def require_one_mesh(params: Any, caller: str, when: str) -> None:
    """Raises ValueError where parameters on several devices have no mesh in common.

    Args:
        params: a pytree.
        caller: for the message.
        when: when the rule holds, as "with a path".
    """
    arrays = [x for x in jax.tree.leaves(params) if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)]
    shardings = [x.sharding for x in arrays]
    if any(map(divided, shardings)) and (why := _why_not_one_mesh(f"`params` must {{}} {when}", shardings)):
        raise ValueError(f"{caller}: {why}")


def why_no_shards(caller: str, arrays: Sequence[Any], shardings: Sequence[Any]) -> str | None:
    """The reason why the devices of a mesh cannot copy their shards, and the remedy; None if they can.

    Args:
        caller: in the message, as "`update`".
        arrays: the arrays, some of which lie on several devices.
        shardings: the sharding of each array.
    """
    if _compat.on_several_devices():
        return (
            f"{caller} must be called outside of jax.shard_map where a mesh divides the state, got a call inside of "
            "one; it makes its own"
        )
    for x, sharding in zip(arrays, shardings, strict=True):
        if not divided(sharding):
            return (
                f"`state` must be of one mesh, got an array of shape {tuple(x.shape)} on one device; place all "
                "parameters on the mesh with jax.device_put(params, NamedSharding(mesh, spec)) before init"
            )
    return _why_not_one_mesh("`state` must {}", shardings)


def why_no_rows(arrays: Sequence[Any], shardings: Sequence[Any]) -> str | None:
    """The reason why the devices of a mesh cannot copy rows of arrays, and the remedy; None if they can."""
    if why := why_no_shards("the step", arrays, shardings):
        return why
    found = (_why_no_whole_rows(x, at) for x, at in zip(arrays, shardings, strict=True))
    return next((why for why in found if why), None)


def require_whole_rows(x: Any, sharding: NamedSharding) -> None:
    """Raises ValueError if the devices do not all hold the same rows."""
    if why := _why_no_whole_rows(x, sharding):
        raise ValueError(f"stack_step: {why}")


def _why_no_whole_rows(x: Any, sharding: NamedSharding) -> str | None:
    if sharding.shard_shape(tuple(x.shape))[0] == x.shape[0]:
        return None
    return (
        "`layers` must be divided along other axes than the first one, because layers travel one by one, got "
        f"{sharding.spec} for an array of shape {tuple(x.shape)}; place it with PartitionSpec(None, ...)"
    )


def _why_not_one_mesh(must: str, shardings: Sequence[Any]) -> str | None:
    for sharding in shardings:
        if divided(sharding) and not isinstance(sharding, NamedSharding):
            return (
                f"{must.format('have a NamedSharding')}, got {type(sharding).__name__}; place parameters with "
                "jax.device_put(params, NamedSharding(mesh, spec)) before init"
            )
    meshes = list(dict.fromkeys(at.mesh for at in shardings if isinstance(at, NamedSharding)))
    if len(meshes) < 2:
        return None
    return f"{must.format('be of one mesh')}, got arrays of {meshes[0]} and {meshes[1]}; place all parameters on one"
