"""The leaf that functions of `jax.tree` see of a table: it can be passed on, but not be computed with.

The array inside a table holds the bits of its rows as unsigned integers, so that `jax.jit` takes it and `jax.grad`
refuses it. `jax.tree.map`, `optax.global_norm` or `optax.adam(...).init` would compute with those bits and give numbers
without meaning. jax has no dtype that jit takes and arithmetic refuses, except extended dtypes, which lose an array's
memory space. Therefore flattening depends on the caller: jax itself, about to call a compiled function, gets the array;
code that calls `jax.tree` gets a `TableLeaf`.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import jax
import numpy as np
from jax import Array
from jax.flatten_util import ravel_pytree

from dejax.host_gather._spec import TableSpec

_TREE_FILES = frozenset(
    function.__code__.co_filename
    for function in (jax.tree.map, jax.tree.leaves, jax.tree_util.tree_map, jax.tree_util.tree_leaves_with_path)
)
_RAVEL_FILE = ravel_pytree.__code__.co_filename  # the one file of jax that computes with what it flattens
_TRUSTED = (str(Path(jax.__file__).parent) + os.sep, str(Path(__file__).parents[2]) + os.sep)


def flattened_by_user(frame: FrameType | None) -> bool:
    """Whether `frame`, which flattens a table, is a function of `jax.tree` that was called from outside of jax."""
    if frame is None or frame.f_code.co_filename not in _TREE_FILES:
        return frame is not None and frame.f_code.co_filename == _RAVEL_FILE
    while frame is not None and frame.f_code.co_filename in _TREE_FILES:
        frame = frame.f_back
    if frame is None:
        return False
    file = frame.f_code.co_filename
    return file == _RAVEL_FILE or not file.startswith(_TRUSTED)


def given_a_device(frame: FrameType | None) -> bool:
    """Whether `frame`, which flattens a table, does so for `jax.device_put(tree, device)`."""
    while frame is not None and frame.f_code.co_filename in _TREE_FILES:
        frame = frame.f_back
    if frame is None or frame.f_code is not jax.device_put.__code__:
        return False
    return isinstance(frame.f_locals.get("device"), jax.Device)


DEVICE_PUT = (
    "jax.device_put(tree, device): `tree` must not have tables in host memory, got one: all of it would be copied to "
    "the device. Give jax.device_put(tree, dejax.host_gather.shardings(tree)), which leaves tables where they lie, or "
    "put the other leaves of the tree on the device and the table beside them"
)

_REMEDY = (
    "HostTable: jax.tree and optax cannot compute with a table: it lies in host memory, as bits. Use "
    "host_gather.scatter_add or host_gather.sgd, adagrad or adam for tables, and optax for the other parameters; or "
    "table.numpy() outside of jit. jax.jit takes the table itself, not its leaf"
)
_REMEDY_ON_DEVICE = (
    "DeviceTable: jax.tree and optax cannot compute with a table: its array has the bits of the rows. Keep rows that "
    "change in a jax array, or in a HostTable with host_gather.sgd, adagrad or adam. jax.jit takes the table "
    "itself, not its leaf"
)


def _refused(leaf: TableLeaf, *_: Any) -> NoReturn:
    raise TypeError(leaf._remedy)


class TableLeaf:
    """The one leaf of a `HostTable` or `DeviceTable`. `jax.tree` may pass it on, read its shape, or wait for it."""

    __slots__ = ("_remedy", "_shape", "array")
    __array_ufunc__ = None  # numpy's operators defer to the refusals below
    __hash__ = object.__hash__
    # Attributes that describe where the array lies, not its elements.
    _FORWARDED = frozenset({"sharding", "devices", "device", "is_deleted", "block_until_ready", "committed"})

    def __init__(self, array: Any, spec: TableSpec) -> None:
        self.array, self._shape = array, spec.shape
        self._remedy = _REMEDY_ON_DEVICE if spec.on_device else _REMEDY

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def ndim(self) -> int:
        return len(self._shape)

    @property
    def size(self) -> int:
        return int(np.prod(self._shape, dtype=object))

    def __len__(self) -> int:
        return self._shape[0]

    def __repr__(self) -> str:
        # Errors of other libraries show it: "accepts only arrays, got TableLeaf(...)".
        kind = self._remedy.partition(":")[0]
        return f"TableLeaf(shape={self._shape}, the bits of a {kind}: see host_gather.sgd, adagrad, adam)"

    def __getattr__(self, name: str) -> Any:
        if name in TableLeaf._FORWARDED:
            return getattr(self.array, name)
        if name.startswith("__") or not hasattr(Array, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        _refused(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """The unsigned integers that carry the rows, from which the leaf can be restored."""
        words = np.asarray(self.array)
        return np.array(words, dtype=dtype) if copy or (dtype is not None and dtype != words.dtype) else words

    @property
    def __jax_array__(self) -> NoReturn:
        # A property, since jax looks the method up before it raises its own TypeError about an unknown type. A
        # ValueError, since jax would replace a TypeError by its own.
        raise ValueError(self._remedy)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(f"{self._remedy.partition(':')[0]}: pickling would copy all of it; save table.numpy()")


class GoneLeaf:
    """The leaf that jax gets of a closed table, or of one to copy: it raises `error` when jax looks at its type.

    If flattening itself raised, jaxlib would lose a level of recursion for each container around the table; after some
    hundred such errors the thread would have none left.
    """

    __slots__ = ("array", "error")

    def __init__(self, array: Any, error: Exception) -> None:
        self.array, self.error = array, error

    @property
    def __jax_array__(self) -> NoReturn:
        raise self.error


_OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor", "lshift", "rshift",
    "divmod",
)  # fmt: skip
for _name in (
    *(f"__{side}{name}__" for name in _OPERATORS for side in ("", "r", "i") if (side, name) != ("i", "divmod")),
    *("__neg__", "__pos__", "__abs__", "__invert__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__float__"),
    *("__int__", "__getitem__", "__iter__", "__round__"),
):
    setattr(TableLeaf, _name, _refused)
