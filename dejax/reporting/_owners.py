"""The owner of each argument of a step: parameters, optimizer state, tables, graphs or inputs."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from dejax._platform import platform
from dejax.host_gather.tables.drive import DriveTable
from dejax.host_gather.tables.table import LocalTable
from dejax.host_gather.update import OptimizerState

PARAMETERS, OPTIMIZER, TABLES, GRAPHS, INPUTS = "parameters", "optimizer state", "tables", "graphs", "inputs"
OWNERS = (PARAMETERS, OPTIMIZER, TABLES, GRAPHS, INPUTS)
_OPTIMIZER_NAMES = re.compile(
    r"(^|[._\[\]'\"])(opt|opt_state|optimizer|moments?|\w*_moments|mu|nu|momentum)($|[._\[\]'\"])"
)
_PARAMETER_NAMES = re.compile(
    r"(^|[._\[\]'\"])(\w*params?|\w*parameters|weights?|model|kernel|bias|embedding|ws?|outer|layers)($|[._\[\]'\"])"
)
_HLO_NAMES = {"float": "f", "bfloat": "bf", "int": "s", "uint": "u", "bool": "pred", "complex": "c"}


@dataclass(frozen=True, slots=True)
class Leaf:
    """One array among the arguments of a step, in a report.

    Attributes:
        path: the path of the array in the arguments, such as `params['w']`.
        owner: one of `OWNERS`, such as "parameters".
        shape: dtype and shape in XLA's notation.
        nbytes: size in bytes.
        on_host: whether the array lies in host memory while the step runs.
        floating: whether its elements are floating-point numbers.

    >>> import dejax, jax, jax.numpy as jnp
    >>> step = jax.jit(lambda params, x: (x @ params["w"]).sum())
    >>> page = dejax.report(step, {"w": jnp.ones((8, 8))}, jnp.ones((4, 8)), calls=0)
    >>> leaf = page.leaves[0]
    >>> leaf.path, leaf.owner, leaf.shape, leaf.nbytes
    ("params['w']", 'parameters', 'f32[8,8]', 256)
    """

    path: str
    owner: str
    shape: str
    nbytes: int
    on_host: bool
    floating: bool = True


def hlo_shape(dtype: Any, shape: Sequence[int]) -> str:
    """Dtype and sizes as XLA writes them.

    >>> hlo_shape(np.float32, (8, 16))
    'f32[8,16]'
    """
    name = jax.numpy.dtype(dtype).name if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else "key"
    kind = re.match(r"[a-z]+", name)
    letters = _HLO_NAMES.get(kind[0], name) if kind else name
    bits = name[kind.end() :] if kind and kind[0] in _HLO_NAMES and kind[0] != "bool" else ""
    return f"{letters}{bits}[{','.join(map(str, shape))}]"


def leaves_of(
    names: Sequence[str],
    args: Sequence[Any],
    results: Counter[str],
    owners: Mapping[str, str],
) -> list[Leaf]:
    """The arrays of the arguments with their owners.

    An optax state, a table and a graph are known by their types, and variables of nnx by theirs. Otherwise names
    decide: `params`, `opt_state`. An argument whose arrays the step returns has parameters, too.

    Args:
        names: the names of the arguments.
        args: the arguments.
        results: shapes of what the step returns.
        owners: owners that the caller gives, by the argument's name.
    """
    found: list[Leaf] = []
    for name, arg in zip(names, args, strict=True):
        given = owners.get(name)
        mine = [replace(leaf, owner=given) if given else leaf for leaf in _walk(name, arg, None)]
        unknown = [leaf for leaf in mine if leaf.owner == INPUTS]
        floating = [leaf for leaf in unknown if leaf.floating and leaf.shape[-2:] != "[]"]
        returned = floating and not (Counter(leaf.shape for leaf in unknown) - results)
        if returned and given is None:
            mine = [replace(leaf, owner=PARAMETERS) if leaf.owner == INPUTS else leaf for leaf in mine]
        found += mine
    moments = {leaf.shape for leaf in found if leaf.owner == OPTIMIZER and leaf.shape[-2:] != "[]"}
    return [
        replace(leaf, owner=PARAMETERS)
        if leaf.owner == INPUTS and leaf.floating and leaf.shape in moments and not _given(leaf, owners)
        else leaf
        for leaf in found
    ]


def _given(leaf: Leaf, owners: Mapping[str, str]) -> bool:
    return any(leaf.path == name or leaf.path.startswith((f"{name}[", f"{name}.")) for name in owners)


def _kind(value: Any) -> str | None:
    """The owner by type; None for values that say nothing."""
    if isinstance(value, LocalTable):
        return TABLES
    if isinstance(value, OptimizerState):
        return OPTIMIZER
    module = type(value).__module__
    if module.startswith("optax"):
        return OPTIMIZER
    if module.startswith(("dejax.rgnn.graphs", "dejax.minibatch.topology", "jraph")):
        return GRAPHS
    nnx = sys.modules.get("flax.nnx")
    if nnx is not None and isinstance(value, nnx.Variable):
        if any(c.__name__ in ("OptState", "OptVariable", "OptArray") for c in type(value).__mro__):
            return OPTIMIZER
        return PARAMETERS if isinstance(value, nnx.Param) else INPUTS
    return None


def _walk(path: str, value: Any, owner: str | None) -> Iterator[Leaf]:
    """The arrays below a value; the outermost known type decides, but a table stays a table."""
    kind = _kind(value)
    owner = kind if kind == TABLES or owner is None else owner
    if owner == TABLES and isinstance(value, LocalTable):
        yield from _table(path, value)
        return
    if jax.tree_util.all_leaves([value]) or not jax.tree_util.tree_leaves(value):
        if hasattr(value, "dtype") and hasattr(value, "shape"):
            yield _leaf(path, value, owner)
        return
    for key, below in _children(value):
        yield from _walk(f"{path}{key}", below, owner)


def _children(value: Any) -> list[tuple[str, Any]]:
    """The parts of a pytree node with their keys."""
    inside = lambda part: part is not value  # noqa: E731
    entries, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=inside)
    return [(jax.tree_util.keystr(path), part) for path, part in entries]


def _leaf(path: str, value: Any, owner: str | None) -> Leaf:
    floating = bool(jax.numpy.issubdtype(value.dtype, jax.numpy.inexact))
    if owner is None:
        owner = INPUTS
        if _OPTIMIZER_NAMES.search(path):
            owner = OPTIMIZER
        elif floating and _PARAMETER_NAMES.search(path):
            owner = PARAMETERS
    nbytes = int(np.prod(value.shape, dtype=np.int64)) * _itemsize(value.dtype)
    return Leaf(path, owner, hlo_shape(value.dtype, value.shape), nbytes, on_host(value), floating=floating)


def _itemsize(dtype: Any) -> int:
    return int(getattr(dtype, "itemsize", 0))


def on_host(value: Any) -> bool:
    """Whether an array lies in host memory, where the device has a memory of its own."""
    sharding = getattr(value, "sharding", None)
    kind = getattr(sharding, "memory_kind", None)
    return kind in ("pinned_host", "unpinned_host") and platform() != "cpu"


def _table(path: str, table: LocalTable) -> Iterator[Leaf]:
    spec = table._spec
    text = hlo_shape(spec.dtype, spec.shape)
    if spec.host_bytes:
        yield Leaf(path, TABLES, text, spec.host_bytes, True, floating=False)
    for stored in drive_tables(table):
        rows = stored.stats()["cache_rows_capacity"]
        shape = hlo_shape(spec.dtype, (rows, *spec.row))
        yield Leaf(f"{path}, cache of a drive", TABLES, shape, rows * spec.row_bytes, True, floating=False)
    for name in ("cache", "slots", "words", "hot"):
        part = getattr(table, name, None)
        if isinstance(part, jax.Array) and part.size:
            leaf = _leaf(f"{path}.{name}", part, TABLES)
            yield replace(leaf, on_host=False, floating=False)


def drive_tables(tree: Any) -> list[DriveTable]:
    """The tables on a drive among the arguments of a step, each reader once."""
    found = jax.tree.leaves(tree, is_leaf=lambda value: isinstance(value, LocalTable))
    parts = [value._host_part for value in found if isinstance(value, LocalTable) and value._spec.on_drive]
    stored = [part for part in parts if isinstance(part, DriveTable)]
    concrete = [table for table in stored if isinstance(table._leaf, jax.Array) and not table.is_closed()]
    return list({table.stats()["reader"]: table for table in concrete}.values())


def by_owner(leaves: Sequence[Leaf], *, on_host: bool) -> dict[str, int]:
    """Bytes by owner in one of the memories."""
    found: Counter[str] = Counter()
    for leaf in leaves:
        if leaf.on_host == on_host:
            found[leaf.owner] += leaf.nbytes
    return {owner: found[owner] for owner in OWNERS if found[owner]}
