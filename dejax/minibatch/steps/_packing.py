"""Arrays that a loop passes on, side by side in one: XLA copies each array that moves to another place of its state."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array


class Packing:
    """Pytrees of one structure as few arrays: those of int32 are one, one after the other.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.minibatch.steps._packing import Packing
    >>> tree = {"a": jnp.array([1, 2]), "b": jnp.array([[3]]), "c": jnp.array([0.5])}
    >>> packing = Packing(tree)
    >>> packing.pack(tree)
    [Array([1, 2, 3], dtype=int32), Array([0.5], dtype=float32)]
    >>> packing.unpack(packing.pack(tree))["b"]
    Array([[3]], dtype=int32)
    """

    def __init__(self, like: Any) -> None:
        """Takes shapes and dtypes from `like`, a pytree of arrays, or of what has their shapes and dtypes."""
        self._like, self._tree = jax.tree.flatten(like)

    def pack(self, tree: Any) -> list[Array]:
        """The arrays of a pytree: the packed one, if there are any of int32, then the others in order."""
        leaves = jax.tree.leaves(tree)
        numbers = [leaf.reshape(-1) for leaf in leaves if leaf.dtype == jnp.int32]
        rest = [leaf for leaf in leaves if leaf.dtype != jnp.int32]
        return [jnp.concatenate(numbers), *rest] if numbers else rest

    def unpack(self, arrays: list[Array]) -> Any:
        """The pytree that `pack` made `arrays` of."""
        given, leaves, at = iter(arrays), [], 0
        numbers = next(given) if any(like.dtype == jnp.int32 for like in self._like) else None
        for like in self._like:
            if like.dtype != jnp.int32:
                leaves.append(next(given))
                continue
            assert numbers is not None
            leaves.append(numbers[at : at + like.size].reshape(like.shape))
            at += like.size
        return jax.tree.unflatten(self._tree, leaves)
