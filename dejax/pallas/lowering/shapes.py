"""Dtypes, numbers and shapes in Triton's language."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np


def type_name(dtype: Any) -> str:
    """A dtype in Triton's language."""
    return "tl.int1" if np.dtype(dtype) == np.bool_ else f"tl.{np.dtype(dtype).name}"


def is_float(dtype: Any) -> bool:
    """Whether a dtype is floating point, bfloat16 included."""
    return jax.numpy.issubdtype(dtype, jax.numpy.floating)


def literal(value: Any, dtype: Any) -> str:
    """A number as text of Triton's language, with its dtype."""
    if not is_float(dtype):
        return f"tl.full((), {int(value)}, {type_name(dtype)})"
    number = float(value)
    text = repr(number) if math.isfinite(number) else f'float("{number}")'
    return f"tl.full((), {text}, {type_name(dtype)})"


def expanded(x: str, axes: Sequence[int]) -> str:
    """`x` with axes of size 1 at these places of the result."""
    if not axes:
        return x
    return f"tl.expand_dims({x}, {axes[0] if len(axes) == 1 else tuple(axes)})"


def broadcast(x: str, old: Sequence[int], new: Sequence[int]) -> str:
    """`x`, whose axes of size 1 are broadcast to make one shape of the other."""
    return x if tuple(old) == tuple(new) else f"tl.broadcast_to({x}, {tuple(new)})"


def lanes(shape: Sequence[int], axis: int) -> str:
    """0, 1, ... along an axis."""
    size = shape[axis]
    line = expanded(f"tl.arange(0, {size})", [a for a in range(len(shape)) if a != axis])
    return broadcast(line, [size if a == axis else 1 for a in range(len(shape))], shape)


def inserted_axes(old: Sequence[int], new: Sequence[int]) -> list[int] | None:
    """Where axes of size 1 are to be inserted to make one shape of the other; None if more changes than that."""
    axes, place = [], 0
    for axis, size in enumerate(new):
        if place < len(old) and old[place] == size:
            place += 1
        elif size == 1:
            axes.append(axis)
        else:
            return None
    return axes if place == len(old) else None


def merged_axes(old: Sequence[int], new: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """The sizes of the axes that a reshape merges, by the size of what they become."""
    found: dict[int, tuple[int, ...]] = {}
    rest = [size for size in old if size != 1]
    for size in new:
        parts: list[int] = []
        while rest and math.prod(parts) < size:
            parts.append(rest.pop(0))
        if math.prod(parts) != size:
            return found
        if len(parts) > 1:
            found[size] = tuple(parts)
    return found


def reshaped(x: str, old: Sequence[int], new: Sequence[int]) -> str:
    """`x`, with another shape of as many elements, or a number as a tile."""
    old, new = tuple(old), tuple(new)
    if old == new:
        return x
    if not old:
        return broadcast(x, old, new)
    if not new:
        for _ in old:
            x = f"tl.reduce({x}, 0, _add)"
        return x
    axes = inserted_axes(old, new)
    if axes is not None:
        return expanded(x, axes)
    wide = [size for size in old if size != 1]
    axes = inserted_axes(wide, new)
    if axes is None or not wide:
        return f"tl.reshape({x}, {new})"
    for axis in reversed(range(len(old))):
        if old[axis] == 1:
            x = f"tl.reduce({x}, {axis}, _add)"
    return expanded(x, axes)
