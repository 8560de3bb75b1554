"""Checks of what users give: names of types and relations, counts, edge lists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from dejax._dtypes import INT32_MAX

EdgeType: TypeAlias = tuple[str, str, str]
"""A relation: (source type, name, destination type)."""
EdgeList: TypeAlias = tuple[np.ndarray, np.ndarray]
"""Senders and receivers, int[edges] each."""

ONE_RELATION: EdgeType = ("node", "to", "node")
"""The relation of a graph of one node type that is given without names."""


def with_names(num_nodes: Any, *by_relation: Any) -> tuple[Any, ...]:
    """Arguments by name, from those of a graph of one node type: a number of nodes, and values of its only relation."""
    if isinstance(num_nodes, bool) or not isinstance(num_nodes, int | np.integer):
        return num_nodes, *by_relation
    named = (v if v is None or isinstance(v, Mapping) else {ONE_RELATION: v} for v in by_relation)
    return {ONE_RELATION[0]: num_nodes}, *named


def of_the_only(names: Sequence[Any], value: Any) -> Any:
    """A dict by name as it is; another value as that of the only name, where there is one."""
    if value is None or isinstance(value, Mapping) or len(names) != 1:
        return value
    return {names[0]: value}


def checked_counts(num_nodes: Mapping[str, int]) -> dict[str, int]:
    """The number of nodes of each type, as Python ints."""
    if not isinstance(num_nodes, Mapping):
        raise TypeError(f"`num_nodes` must be a dict of counts by node type, got {type(num_nodes).__name__}")
    found: dict[str, int] = {}
    for name, count in num_nodes.items():
        if not isinstance(name, str):
            raise TypeError(f"`num_nodes` must have names of node types as keys, got {name!r}")
        if isinstance(count, bool) or not isinstance(count, int | np.integer):
            raise TypeError(f"`num_nodes[{name!r}]` must be an integer, got {count!r}")
        if not 0 <= count <= INT32_MAX:
            raise ValueError(f"`num_nodes[{name!r}]` must be from 0 to 2**31 - 1, got {count}")
        found[name] = int(count)
    return found


def checked_edge_type(edge_type: Any, counts: Mapping[str, int]) -> EdgeType:
    """`edge_type`, if it is a relation between known node types."""
    is_triple = isinstance(edge_type, tuple) and len(edge_type) == 3
    if not is_triple or not all(isinstance(part, str) for part in edge_type):
        raise TypeError(f"a relation must be (source type, name, destination type), got {edge_type!r}")
    for end in (edge_type[0], edge_type[2]):
        if end not in counts:
            raise ValueError(
                f"relation {edge_type}: node type must be one of {list(counts)}, got {end!r}; give its count in "
                "`num_nodes`"
            )
    return edge_type


def checked_relations(edges: Mapping[EdgeType, Any], counts: Mapping[str, int]) -> dict[EdgeType, EdgeList]:
    """Edge lists as pairs of numpy arrays of integers of one length; their values are not looked at."""
    if not isinstance(edges, Mapping):
        raise TypeError(f"`edges` must be a dict of edge lists by relation, got {type(edges).__name__}")
    found: dict[EdgeType, EdgeList] = {}
    for edge_type, pair in edges.items():
        checked_edge_type(edge_type, counts)
        if len(pair) != 2:
            raise ValueError(
                f"edges of {edge_type} must be (senders, receivers), got {len(pair)} rows; transpose an array of "
                "[edges, 2]"
            )
        senders, receivers = (ids_of(f"{name} of {edge_type}", ids) for name, ids in zip(_ENDS, pair, strict=True))
        if senders.shape != receivers.shape:
            raise ValueError(
                f"senders and receivers of {edge_type} must be of one length, got {len(senders)} and {len(receivers)}"
            )
        found[edge_type] = senders, receivers
    return found


_ENDS = ("senders", "receivers")


def ids_of(name: str, ids: Any) -> np.ndarray:
    """A list of ids as a numpy array, not copied."""
    array = ids if isinstance(ids, np.ndarray) else np.asarray(ids)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int32)
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    return array


def check_range(name: str, ids: np.ndarray, count: int) -> None:
    """Raises ValueError where an id, maybe of a memory map, is not from 0 to count - 1."""
    for some in pieces(len(ids)):
        part = np.asarray(ids[some])
        if part.min() < 0 or part.max() >= count:
            wrong = part[(part < 0) | (part >= count)][0]
            raise ValueError(f"{name} must be from 0 to {count - 1}, got {int(wrong)}")


def pieces(size: int, length: int = 1 << 23) -> Iterator[slice]:
    """Slices of up to `length` elements, for lists that may be longer than memory."""
    for start in range(0, size, length):
        yield slice(start, min(start + length, size))


def one_for_each(
    name: str, values: Mapping[EdgeType, Any] | None, edges: Mapping[EdgeType, Sequence[Any]]
) -> dict[EdgeType, np.ndarray]:
    """Values by relation, one for each edge."""
    found = {}
    for edge_type, given in (values or {}).items():
        if edge_type not in edges:
            raise ValueError(f"`{name}`: relation must be one of {list(edges)}, got {edge_type!r}")
        array = np.asarray(given)
        length = edges[edge_type][0].shape[0]
        if array.shape != (length,):
            raise ValueError(f"`{name}` of {edge_type} must have shape ({length},), got {array.shape}")
        (_check_times if name == "times" else _check_weights)(edge_type, array)
        found[edge_type] = array
    return found


def _check_times(edge_type: EdgeType, times: np.ndarray) -> None:
    if not times.size:
        return
    if times.dtype.kind not in "iu":
        raise TypeError(f"`times` of {edge_type} must be integers, got {times.dtype}; round them to a unit")
    if int(times.max()) >= 2**63:
        raise ValueError(f"`times` of {edge_type} must be below 2**63, got {times.max()}; subtract the first time")


def _check_weights(edge_type: EdgeType, weights: np.ndarray) -> None:
    if weights.dtype != np.bool_ and not jnp.issubdtype(weights.dtype, np.integer):
        if not jnp.issubdtype(weights.dtype, np.floating):
            raise TypeError(f"`weights` of {edge_type} must be real numbers, got {weights.dtype}")
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise ValueError(
            f"`weights` of {edge_type} must be finite and at least 0, got {weights.min()} to {weights.max()}"
        )


def need_wide(arrays: Sequence[Any]) -> None:
    """Raises ValueError where positions or times need 64 bits that jax does not have."""
    if any(array.dtype.itemsize > 4 for array in arrays) and not jax.config.values["jax_enable_x64"]:
        raise ValueError(
            "a relation must have fewer than 2**31 edges, and times must fit in 32 bits, got more; switch on jax's "
            "64-bit mode: jax.config.update('jax_enable_x64', True)"
        )
