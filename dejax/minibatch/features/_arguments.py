"""Checks of a feature store's arguments, which are given by node type."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax import Array

from dejax import _compat
from dejax.host_gather._operands import Table
from dejax.minibatch.features._formats import RESULTS


def by_type(what: str, option: str, value: Any, names: Iterable[str], default: Any) -> dict[str, Any]:
    """An option of each type, from one value or a mapping."""
    names = list(names)
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    if unknown := [name for name in value if name not in names]:
        raise ValueError(f"{what}: `{option}` must name types of the arrays, {', '.join(names)}; got {unknown[0]!r}")
    return {name: value.get(name, default) for name in names}


def checked_scale(what: str, argument: str, value: Any, shapes: list[tuple[int, ...]]) -> Array | None:
    if value is None:
        return None
    scale = jnp.asarray(_compat.own_memory(value), jnp.float32)
    if scale.shape not in shapes:
        raise ValueError(f"{what}: `{argument}` must have shape {' or '.join(map(str, shapes))}, got {scale.shape}")
    return scale


def check_trainable(what: str, table: Table, row_scale: Any, column_scale: Any) -> None:
    if row_scale is not None or column_scale is not None:
        raise ValueError(
            f"{what}: a table to train must have no `row_scale` or `column_scale`, got one; store the rows as "
            "float32, bfloat16 or float16"
        )
    if table.dtype.name not in RESULTS:
        raise TypeError(f"{what}: a table to train must have rows of {', '.join(RESULTS)}, got {table.dtype}")
    if table.read_only:
        raise ValueError(
            f"{what}: a table to train must be one to write, got a read-only {type(table).__name__}; make it with "
            "writable=True, or copy its rows with HostTable.from_numpy(table.numpy())"
        )


class naming:
    """A context that adds the node type to an error."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            error.add_note(f"for the node type {self._name!r}")
