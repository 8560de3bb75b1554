"""Numbers of dejax and of its callers: byte order, integers as int32, promotion by jax's defaults, dtypes of sums."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

INT32_MAX = 2**31 - 1
_Function = TypeVar("_Function", bound=Callable[..., Any])


def native_order(array: Any) -> Any:
    """A numpy array in this machine's byte order; other values unchanged."""
    if isinstance(array, np.ndarray | np.generic) and not array.dtype.isnative:
        return np.asarray(array, array.dtype.newbyteorder("="))
    return array


def known_array(value: Any) -> Any:
    """A tensor or table of another library, such as PyTorch or pandas, as a numpy array; other values unchanged."""
    known = isinstance(value, jax.Array | np.ndarray | np.generic) or hasattr(value, "__jax_array__")
    return value if known or not hasattr(value, "__array__") else np.asarray(value)


def numbers(name: str, value: Any) -> jax.Array:
    """Numbers of a caller as a jax array.

    Args:
        name: the argument's name, for the error.
        value: a jax or numpy array of any byte order, a list, or a tensor or table of another library.

    Raises:
        TypeError: text, times or Python objects.
    """
    value = native_order(known_array(value))
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "OSUmM":
        raise TypeError(f"{name} must be numbers, got dtype {value.dtype}; convert it with .astype(np.float32)")
    return jnp.asarray(value)


def clipped_to_int32(ids: Any) -> Any:
    """Ids as int32: an id that does not fit becomes -1 or 2**31 - 1, so it stays out of range of fewer rows than that.

    A cast alone drops upper bits, and 2**32 would become 0.

    Args:
        ids: int[...], a jax or numpy array.
    """
    bounds = np.iinfo(ids.dtype)
    if bounds.max > INT32_MAX:
        clip = jnp.clip if isinstance(ids, jax.Array) else np.clip
        ids = clip(ids, max(bounds.min, -1), INT32_MAX)
    return ids.astype(np.int32)


def entering_jit(what: str, tree: Any, *, ids_or_times: bool = False) -> Any:
    """A pytree for `jax.jit`, which drops the upper bits of numpy's 64-bit integers without jax's 64-bit mode.

    Every function of dejax that gives users' arrays to a jitted function of its own calls this first.

    Args:
        what: the caller's name, for the error.
        tree: the arrays.
        ids_or_times: whether integers that int32 does not have become the nearest int32: an id stays out of range, and
            a time stays later or earlier than all others. They raise otherwise.

    Raises:
        ValueError: an integer that does not fit, in arrays that are neither ids nor times.
    """
    leaves, structure = jax.tree.flatten(tree)
    if jax.config.values["jax_enable_x64"] or not any(_is_wide(leaf) for leaf in leaves):
        return tree
    least, most = -INT32_MAX - 1, INT32_MAX
    for place, leaf in enumerate(leaves):
        if not _is_wide(leaf):
            continue
        if not ids_or_times and leaf.size and (int(leaf.min()) < least or int(leaf.max()) > most):
            raise ValueError(
                f"{what}: integers must fit int32 without jax's 64-bit mode, got {leaf.min()} to {leaf.max()}; "
                "jax.config.update('jax_enable_x64', True) switches it on"
            )
        leaves[place] = np.clip(leaf, max(np.iinfo(leaf.dtype).min, least), most).astype(np.int32)
    return jax.tree.unflatten(structure, leaves)


def _is_wide(leaf: Any) -> bool:
    return isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind in "iu" and leaf.dtype.itemsize > 4


def broadcasting(function: _Function) -> _Function:
    """A function of dejax that runs no code of the caller, and may promote ranks and dtypes.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` find the caller's own mistakes. Without
    this a comparison of [n, 1] and [n] in dejax would raise, too.
    """

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **keywords)

    return run  # type: ignore[return-value]


def wide(tree: Any) -> Any:
    """Arrays in the dtype in which many of them are added: float32 for narrower floats, otherwise their own.

    A sum of 256 arrays of bfloat16 in bfloat16 loses three of its eight bits.
    """
    return jax.tree.map(lambda x: x.astype(wide_dtype(x.dtype)), tree)


def wide_dtype(dtype: Any) -> Any:
    narrow = jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
    return jnp.dtype(jnp.float32) if narrow else dtype


def narrowed(tree: Any, like: Any) -> Any:
    """Sums of `wide` arrays in the dtypes of `like`, rounded once."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), tree, like)


def zeros(shapes: Any) -> Any:
    """Where sums of arrays of these shapes begin."""
    return jax.tree.map(lambda x: jnp.zeros(x.shape, wide_dtype(x.dtype)), shapes)
