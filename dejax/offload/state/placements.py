"""How a function has placed arrays: inside of `jax.jit` an array does not tell how a mesh divides it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import jax
from jax.sharding import AxisType, NamedSharding

from dejax.offload.state.store import is_on_disk

Value = TypeVar("Value")


class Placements(Generic[Value]):
    """Remembers a value for each distinct placement, by the shapes and dtypes of the arrays."""

    def __init__(self) -> None:
        self._found: dict[Any, list[Value]] = {}

    def note(self, arrays: Sequence[Any], value: Value) -> None:
        """Remembers that arrays of such shapes were placed as `value` says."""
        found = self._found.setdefault(_shapes(arrays), [])
        if value in found:
            found.remove(value)
        found.append(value)

    def of(self, arrays: Sequence[Any]) -> list[Value]:
        """All values for arrays of such shapes, the latest one last."""
        return self._found.get(_shapes(arrays), [])


def shardings_in(arrays: Sequence[Any]) -> tuple[Any, ...]:
    """The sharding of each array outside of `jax.jit`; None where there is none."""
    return tuple(getattr(x, "sharding", None) for x in arrays)


def explicit_shardings(arrays: Sequence[Any]) -> tuple[Any, ...] | None:
    """Of traced arrays whose types tell, because all axes of their meshes are explicit; None where one does not."""
    found = [getattr(jax.typeof(x), "sharding", None) for x in arrays]
    for at in found:
        if not isinstance(at, NamedSharding) or set(at.mesh.axis_types) != {AxisType.Explicit}:
            return None
    return tuple(found)


def _shapes(arrays: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((is_on_disk(x), getattr(x, "shape", None), str(getattr(x, "dtype", None))) for x in arrays)
