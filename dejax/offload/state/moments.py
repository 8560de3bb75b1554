"""Places and shardings of an optimizer's state."""

from __future__ import annotations

from typing import Any, Literal

import jax

from dejax.offload.state.store import is_on_disk

_HOST = jax.memory.Space.Host
Tier = Literal["device", "host", "disk"]


def shardings_of(moments: Any, params: Any) -> list[Any]:
    """For each array of an optimizer's state: the sharding of the parameter of its name and shape, or replicated."""
    known, mesh = {}, None
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, jax.sharding.NamedSharding):
            mesh = sharding.mesh
            known[jax.tree_util.keystr(path), leaf.shape] = sharding.spec
    if mesh is None:
        return [None] * len(jax.tree.leaves(moments))
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        names = [jax.tree_util.keystr(path[k:]) for k in range(len(path) + 1)]  # a single array has no name
        spec = next((known[name, leaf.shape] for name in names if (name, leaf.shape) in known), None)
        found.append(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec() if spec is None else spec))
    return found


def tier_of(x: Any) -> Tier:
    if is_on_disk(x):
        return "disk"
    return "host" if getattr(jax.typeof(x), "memory_space", None) == _HOST else "device"
