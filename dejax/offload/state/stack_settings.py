"""What a step layer by layer is told: its functions, where arrays lie, and which parameters are trained."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from dejax.offload.activations.store import ActivationStore
from dejax.offload.state.placements import Tier
from dejax.offload.state.store import StateStore, is_on_disk, store_at

Place = Tier | Callable[[str, Any], Tier]
Kept = Literal["freed", "device", "host"]


class StackState(NamedTuple):
    """The training state of `stack_step`: parameters, optimizer state and counters.

    Attributes:
        outer: parameters outside of the stack of layers (embeddings, the last norm).
        layers: parameters of the stack, arrays [layers, ...].
        outer_moments: optimizer state of `outer`.
        layer_moments: optimizer state of the layers, arrays [layers, ...].
        norm: with `clip_norm`: float32, the norm of all gradients before clipping, in the last step whose gradients
            were finite; 0 at first. Otherwise None.
        gradients: with `gradients="host"`: the memory for the gradients, arrays [layers, ...]. Otherwise None.
        skipped: int32, number of steps that were skipped because a gradient was not finite.
        scale: with `loss_scale`: float32, the factor of the next step's loss. Otherwise None.
        healthy: with `loss_scale`: int32, number of steps since the factor changed. Otherwise None.

    >>> import jax.numpy as jnp, optax
    >>> from dejax.offload import StackState, stack_step
    >>> step = stack_step(
    ...     lambda outer, x: x * outer["scale"],
    ...     lambda w, x: x + jnp.tanh(x @ w),
    ...     lambda outer, x, batch: jnp.mean(x**2),
    ...     optax.sgd(0.1),
    ...     moments="device",
    ... )
    >>> state = step.init({"scale": jnp.ones(())}, jnp.ones((4, 8, 8)) / 8)
    >>> isinstance(state, StackState), state.layers.shape
    (True, (4, 8, 8))
    """

    outer: Any
    layers: Any
    outer_moments: Any
    layer_moments: Any
    norm: Any = None
    gradients: Any = None
    skipped: Any = None
    scale: Any = None
    healthy: Any = None

    def arrays(self) -> list[list[Any]]:
        """Fields whose arrays a mesh may divide: `outer`, `layers`, `outer_moments`, `layer_moments`, `gradients`."""
        return [jax.tree.leaves(tree, is_leaf=is_on_disk) for tree in (*self[:4], self.gradients)]


@dataclass(frozen=True, eq=False)  # jax.jit keeps it by identity, in a weak reference
class StackSettings:
    """The arguments of `stack_step`."""

    embed: Callable[[Any, Any], Any]
    body: Callable[[Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]
    tx: Any
    params: Place = "device"
    moments: Place = "host"
    activations: Tier = "device"
    microbatches: int = 1
    clip_norm: float | None = None
    loss_scale: float | None = None
    gradients: Kept = "freed"
    frozen: Callable[[str, Any], bool] | None = None
    streams: bool | None = None
    store: ActivationStore | None = None
    min_bytes: int = 1 << 16
    ahead: int = 1
    path: Any = None

    @functools.cached_property
    def disk(self) -> StateStore:
        """The `StateStore` of the arrays on disk."""
        return store_at(self.path)

    def check(self) -> None:
        """Raises an error for settings that `stack_step` refuses."""
        if not (hasattr(self.tx, "init") and hasattr(self.tx, "update")):
            raise TypeError(f"stack_step: `tx` must be an Optax transformation, got {type(self.tx).__name__}")
        for name, value in (("params", self.params), ("moments", self.moments)):
            if not callable(value) and value not in ("device", "host", "disk"):
                raise ValueError(f"stack_step: `{name}` must be 'device', 'host' or 'disk', got {value!r}")
            if value == "disk" and self.path is None:
                raise ValueError(f"stack_step: `path` must name a folder with {name}='disk', got None")
        if self.activations not in ("device", "host"):
            raise ValueError(f"stack_step: `activations` must be 'device' or 'host', got {self.activations!r}")
        if self.gradients not in ("freed", "device", "host"):
            raise ValueError(
                f"stack_step: `gradients` must be 'freed', 'device', 'host' or None, got {self.gradients!r}"
            )
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"stack_step: `clip_norm` must be positive or None, got {self.clip_norm}")
        if self.loss_scale is not None and not 1 <= self.loss_scale < math.inf:
            raise ValueError(f"stack_step: `loss_scale` must be at least 1 or None, got {self.loss_scale}")
        if self.microbatches < 1 or self.ahead < 1:
            counts = f"{self.microbatches} and {self.ahead}"
            raise ValueError(f"stack_step: `microbatches` and `ahead` must be at least 1, got {counts}")

    def places(self, place: Place, tree: Any) -> list[Tier]:
        """For each array of a tree: where it lies. Rows of less than `min_bytes` stay on the device."""
        found: list[Tier] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_on_disk):
            row = math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize
            wanted = place(jax.tree_util.keystr(path), leaf) if callable(place) else place
            if wanted not in ("device", "host", "disk"):
                raise ValueError(f"stack_step: a place must be 'device', 'host' or 'disk', got {wanted!r}")
            if wanted == "disk" and self.path is None:
                raise ValueError("stack_step: `path` must name a folder for arrays on disk, got None")
            found.append(wanted if row >= max(1, self.min_bytes) else "device")
        return found

    def split(self, outer: Any, layers: Any) -> tuple[TrainedArrays, TrainedArrays]:
        """Which parameters are trained, those outside of the stack and those in it."""
        return _split("outer", outer, self.frozen), _split("layers", layers, self.frozen)


@dataclass(frozen=True)
class TrainedArrays:
    """Which arrays of a pytree are trained.

    Attributes:
        treedef: the tree structure of the pytree.
        frozen: for each array.
    """

    treedef: Any
    frozen: tuple[bool, ...]

    @property
    def numbers(self) -> list[int]:
        """Positions of the trained arrays among all."""
        return [i for i, frozen in enumerate(self.frozen) if not frozen]

    def trained(self, leaves: Sequence[Any]) -> Any:
        """The pytree with None in the place of each frozen array."""
        return self.treedef.unflatten([None if no else x for x, no in zip(leaves, self.frozen, strict=True)])

    def join(self, trained: Any, leaves: Sequence[Any]) -> Any:
        """The pytree of trained arrays, as `trained` gives it, and of the frozen ones of `leaves`."""
        rest = iter(jax.tree.leaves(trained))
        return self.treedef.unflatten([x if no else next(rest) for x, no in zip(leaves, self.frozen, strict=True)])


def _split(name: str, tree: Any, frozen: Callable[[str, Any], bool] | None) -> TrainedArrays:
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_on_disk):
        no = frozen is not None and bool(frozen(name + jax.tree_util.keystr(path), leaf))
        if not no and not jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact):
            where = name + jax.tree_util.keystr(path)
            raise ValueError(
                f"stack_step: a trained parameter must have a floating-point dtype, got {leaf.dtype} for {where}; name "
                "it in `frozen`"
            )
        found.append(no)
    return TrainedArrays(jax.tree.structure(tree, is_leaf=is_on_disk), tuple(found))
