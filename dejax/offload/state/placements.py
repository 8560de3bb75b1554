"""Where arrays of a state lie: their tiers and shardings, and how a function has placed them.

Inside of `jax.jit` an array does not tell how a mesh divides it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dejax.offload.state.store import is_on_disk

Tier = Literal["device", "host", "disk"]
Shardings = tuple[Any, ...]


def shardings_of(moments: Any, params: Any) -> list[Any]:
    """For each array of an optimizer's state: the sharding of the parameter of its name and shape, or replicated."""
    known, mesh = {}, None
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding):
            mesh = sharding.mesh
            known[jax.tree_util.keystr(path), leaf.shape] = NamedSharding(mesh, sharding.spec)
    if mesh is None:
        return [None] * len(jax.tree.leaves(moments))
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(moments):
        names = [jax.tree_util.keystr(path[k:]) for k in range(len(path) + 1)]  # a single array has no name
        own = (known[name, leaf.shape] for name in names if (name, leaf.shape) in known)
        found.append(next(own, NamedSharding(mesh, PartitionSpec())))
    return found


def is_on_host(x: Any) -> bool:
    """Whether an array or a tracer lies in host memory. A numpy array counts as an array on the device."""
    return getattr(jax.typeof(x), "memory_space", None) == jax.memory.Space.Host


def tier_of(x: Any) -> Tier:
    return "disk" if is_on_disk(x) else "host" if is_on_host(x) else "device"


class Placements:
    """Remembers the shardings of arrays, each distinct placement once, by the arrays' shapes and dtypes."""

    def __init__(self) -> None:
        self._found: dict[Any, list[Shardings]] = {}

    def note(self, arrays: Sequence[Any]) -> Shardings:
        """Remembers the shardings of arrays outside of `jax.jit`; returns them, with None for arrays without one."""
        shardings = tuple(getattr(x, "sharding", None) for x in arrays)
        found = self._found.setdefault(_shapes(arrays), [])
        if shardings in found:
            found.remove(shardings)
        found.append(shardings)
        return shardings

    def of(self, arrays: Sequence[Any]) -> list[Shardings]:
        """The shardings that arrays of these shapes have had, the latest ones last."""
        return self._found.get(_shapes(arrays), [])


def explicit_shardings(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """The shardings of traced arrays, which their types tell if all mesh axes are explicit; None if one is unknown."""
    found = [getattr(jax.typeof(x), "sharding", None) for x in arrays]
    for at in found:
        if not isinstance(at, NamedSharding) or set(at.mesh.axis_types) != {AxisType.Explicit}:
            return None
    return tuple(found)


def _shapes(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((is_on_disk(x), getattr(x, "shape", None), str(getattr(x, "dtype", None))) for x in arrays)
