"""Checks of the arguments of a graph's constructors; every message names the argument, its value and the remedy."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax._dtypes import clipped_to_int32

MAX_ENTRIES = 2**31 - 2
"""The most nodes, edges or types of a graph: ids, and the bound itself as the padding id, are int32."""


def is_traced(*values: object) -> bool:
    """Whether any of `values` is a tracer, whose value is unknown while Python runs."""
    return any(isinstance(value, jax.core.Tracer) for value in values)


def check_count(value: Any, name: str, *, remedy: str = "") -> int:
    """`value` as a Python int from 0 to `MAX_ENTRIES`."""
    try:
        count = operator.index(value)
    except TypeError:  # floats, None, and tracers, whose error is a TypeError too
        given = "a traced value" if is_traced(value) else f"{value!r} ({type(value).__name__})"
        raise TypeError(f"{name} must be a Python int known before jit, got {given}{remedy}") from None
    if not 0 <= count <= MAX_ENTRIES:
        raise ValueError(f"{name} must be from 0 to {MAX_ENTRIES} (ids are int32), got {count}")
    return count


def check_size(node_type: Any, num_nodes: int) -> Any:
    """`node_type`; raises ValueError unless it has an entry for each node."""
    if node_type.shape[0] != num_nodes:
        raise ValueError(f"node_type must have num_nodes = {num_nodes} entries, got {node_type.shape[0]}")
    return node_type


def check_edge_count(count: int) -> None:
    """Raises ValueError where `count` edges, added ones included, are more than int32 can number."""
    if count > MAX_ENTRIES:
        raise ValueError(
            f"the graph must have at most {MAX_ENTRIES} edges (int32 numbers them), got {count} (reverse edges "
            "and self loops included); split it"
        )


_NAMES = "number names with names, ids = np.unique(names, return_inverse=True)"
_HINTS = {"b": "give a mask as edge_mask or node_mask", "U": _NAMES, "S": _NAMES, "T": _NAMES}
"""What to do with ids of a wrong dtype, by numpy's letter for the kind of dtype."""


def _check_form(array: Any, name: str) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        hint = _HINTS.get(array.dtype.kind, "convert them with .astype(np.int32)")
        if array.dtype.kind == "f" and not is_traced(array) and np.isnan(array).any():
            hint = "leave out the entries without an id (NaN), then convert the others with .astype(np.int32)"
        raise TypeError(f"{name} must hold integer ids, got dtype {array.dtype}; {hint}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {tuple(array.shape)}; flatten it first")


def as_ids(value: Any, name: str) -> np.ndarray:
    """`value` as a numpy array of integers of rank 1, any integer dtype; not copied where it is one."""
    if is_traced(value):
        raise TypeError(
            f"{name} must be concrete, got a traced array (inside jit, grad or vmap); build the graph outside, or use "
            "RelGraph.build_traced, which needs only static bounds"
        )
    array = np.asarray(value)
    if array.size == 0 and array.ndim == 1 and not hasattr(value, "dtype"):
        return np.zeros(0, np.int32)  # numpy gives an empty list a float dtype
    _check_form(array, name)
    return array


def as_traced_ids(value: Any, name: str) -> jax.Array:
    """`value` as an int32 jax array of rank 1; only its shape and dtype can be checked."""
    if isinstance(value, list | tuple) and len(value):
        value = jnp.asarray(value)  # may hold traced scalars
    elif not isinstance(value, jax.Array):  # which tracers are too
        value = as_ids(value, name)
    _check_form(value, name)
    return jnp.asarray(clipped_to_int32(value))


def as_mask(value: Any, name: str, size: int, *, traced: bool = False) -> Any:
    """`value` as a bool array of length `size`, or None."""
    if value is None:
        return None
    if not traced and is_traced(value):
        raise TypeError(f"{name} must be concrete, got a traced array; use RelGraph.build_traced")
    array = jnp.asarray(value) if traced else np.asarray(value)
    if array.dtype != bool:
        raise TypeError(f"{name} must be a bool array (True: valid, False: padding), got dtype {array.dtype}")
    if array.shape != (size,):
        raise ValueError(f"{name} must have shape ({size},), got {tuple(array.shape)}")
    return array


def as_traced_mask(mask: Any, num_valid: Any, kind: str, size: int) -> jax.Array | None:
    """The mask of `kind` ("edge" or "node"): the given mask, or that of the first `num_valid` entries."""
    if num_valid is None:
        return as_mask(mask, f"{kind}_mask", size, traced=True)
    name = f"num_valid_{kind}s"
    if mask is not None:
        raise ValueError(f"{name} and {kind}_mask must not be given together, got both; give one of them")
    if not is_traced(num_valid):
        number = np.asarray(num_valid)
        if number.shape != () or not np.issubdtype(number.dtype, np.integer):
            raise TypeError(f"{name} must be an integer scalar, got {num_valid!r}")
        if not 0 <= int(number) <= size:
            raise ValueError(f"{name} must be from 0 to {size}, the static bound given by the arrays, got {number}")
    elif num_valid.shape != () or not jnp.issubdtype(num_valid.dtype, jnp.integer):
        raise TypeError(f"{name} must be an integer scalar, got {num_valid.dtype}{list(num_valid.shape)}")
    return jnp.arange(size, dtype=jnp.int32) < num_valid


def check_lengths(arrays: dict[str, Any]) -> None:
    """Raises ValueError unless all of `arrays` have one length."""
    lengths = {name: array.shape[0] for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        given = ", ".join(f"{name} {length}" for name, length in lengths.items())
        raise ValueError(f"{', '.join(lengths)} must have one length (an entry for each edge), got {given}")


def check_range(ids: np.ndarray, name: str, bound: int, bound_name: str, mask: np.ndarray | None = None) -> None:
    """Raises IndexError where a valid entry of `ids` is not from 0 to `bound - 1`; names the first one."""
    if ids.size == 0 or (int(ids.min()) >= 0 and int(ids.max()) < bound):
        return
    wrong = (ids < 0) | (ids >= bound)
    if mask is not None:
        wrong &= mask
    if not wrong.any():
        return
    position = int(wrong.argmax())
    more = int(wrong.sum()) - 1
    allowed = f"ids go from 0 to {bound - 1}" if bound else "no id is valid"
    raise IndexError(
        f"{name}[{position}] = {int(ids[position])} is out of range: {bound_name} is {bound}, so {allowed}"
        + (f" ({more} more such entries)" if more else "")
    )


def check_edges_avoid_padding(ids: np.ndarray, name: str, node_mask: np.ndarray, edge_mask: np.ndarray | None) -> None:
    """Raises ValueError where a valid edge ends at a padding node."""
    wrong = ~node_mask[ids if edge_mask is None else np.where(edge_mask, ids, 0)]
    if edge_mask is not None:
        wrong &= edge_mask
    if wrong.any():
        position = int(wrong.argmax())
        raise ValueError(
            f"{name}[{position}] = {int(ids[position])} is a padding node (node_mask is False there), but the edge is "
            "valid; mask the edge with edge_mask or the node as valid"
        )


def check_names(names: Sequence[str] | None, name: str, count: int, count_name: str) -> tuple[str, ...] | None:
    """`names` as a tuple of `count` distinct strings, or None."""
    if names is None:
        return None
    if isinstance(names, str) or not all(isinstance(entry, str) for entry in names):
        raise TypeError(f"{name} must be a sequence of strings, got {names!r}")
    result = tuple(names)
    if len(result) != count:
        raise ValueError(f"{name} must have a name for each of the {count_name} = {count} types, got {len(result)}")
    if len(set(result)) != count:
        twice = next(entry for entry in result if result.count(entry) > 1)
        raise ValueError(f"{name} must be distinct, got {twice!r} more than once")
    return result
