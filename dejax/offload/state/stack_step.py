"""A training step of a stack of equal layers, layer by layer.

Backward goes through the stack once. As soon as a layer's gradient is there, its parameters are updated, and the
gradient's memory is free: no gradient of the whole model ever exists. Parameters and the optimizer's state of a layer
may lie in host memory; they travel one layer ahead of their use, in both directions of the bus at once. With an exact
limit of the norm of all gradients, these are kept, and a second loop updates the layers.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from dejax import _compat
from dejax.offload.activations.store import ActivationStore
from dejax.offload.state.disk_shards import divided, require_one_mesh, shard_bytes
from dejax.offload.state.first_state import first_state, in_place
from dejax.offload.state.placements import Placements, Shardings, Tier, shardings_of
from dejax.offload.state.stack_loops import Run, count
from dejax.offload.state.stack_settings import Kept, Place, StackSettings, StackState
from dejax.offload.state.store import StateStore, is_on_disk
from dejax.offload.state.stream.cut import PIECE_BYTES
from dejax.offload.state.stream.rows import require_whole_rows

_DEVICE = jax.memory.Space.Device


@dataclass(frozen=True, eq=False)
class StackStep(StackSettings):
    """A training step, made by `stack_step`: (state, batch) -> (state, loss). Its attributes are the arguments.

    >>> import jax, jax.numpy as jnp, optax
    >>> from dejax.offload import stack_step
    >>> step = stack_step(
    ...     lambda outer, x: x * outer["scale"],
    ...     lambda w, x: x + jnp.tanh(x @ w),
    ...     lambda outer, x, batch: jnp.mean(x**2),
    ...     optax.sgd(0.1),
    ...     moments="device",
    ... )
    >>> state = step.init({"scale": jnp.ones(())}, jnp.ones((4, 8, 8)) / 8)
    >>> state, loss = step.jit(state)(state, jnp.ones((2, 8)))
    >>> loss.shape
    ()
    """

    def init(self, outer: Any, layers: Any) -> StackState:
        """The state of the first step, each array in its place.

        The optimizer's state is made array by array, so that the device holds one that belongs on the host at a time.
        The parameters that lie in their place already become part of the state, and so of what `jit` gives away.

        Args:
            outer: parameters outside of the stack.
            layers: pytree of arrays [layers, ...]; those that belong on the host may lie there.
        """
        outer, layers = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (outer, layers))
        if self.streams or self.path is not None:
            why = "with streams=True" if self.path is None else "with a path"
            require_one_mesh((outer, layers), "stack_step", why)
        flat, layers_tree = jax.tree.flatten(layers)
        count(flat)
        outer_split, split = self.split(outer, layers)
        where = self.places(self.params, layers)
        known = shardings_of(layers, layers)
        flat = [self._put(x, at, sharding) for x, at, sharding in zip(flat, where, known, strict=True)]
        outside = first_state(self.tx.init, outer_split.trained(jax.tree.leaves(outer)), _on_device, in_place, 0)
        trained = split.trained(jax.tree.leaves(layers))
        make = jax.vmap(self.tx.init) if jax.tree.leaves(trained) else self.tx.init
        moments = first_state(make, trained, functools.partial(self.places, self.moments), self._put, PIECE_BYTES)
        mesh = next((at.mesh for at in known if at is not None), None)
        scalar = functools.partial(_zeros, (), at=None if mesh is None else NamedSharding(mesh, PartitionSpec()))
        scaled = self.loss_scale is not None
        state = StackState(
            outer,
            jax.tree.unflatten(layers_tree, flat),
            outside,
            moments,
            None if self.clip_norm is None else scalar(jnp.float32),
            self._kept(trained) if self.gradients == "host" else None,
            scalar(jnp.int32),
            scalar(jnp.float32) + self.loss_scale if scaled else None,
            scalar(jnp.int32) if scaled else None,
        )
        self._seen.note(_leaves(state))
        return state

    def _put(self, x: Any, tier: Tier, sharding: Any) -> Any:
        """An array [layers, ...] in its place, in which each device has its shard."""
        if divided(sharding) and (tier == "disk" or (tier == "host" and self.streams)):
            require_whole_rows(x, sharding)
        row = shard_bytes(sharding, x.shape, x.dtype) // x.shape[0]
        return in_place(x, tier, sharding, disk=lambda: self.disk, unit_bytes=row)

    def _kept(self, trained: Any) -> Any:
        """Memory for the gradients of the trained parameters, in host memory where their rows are large enough."""
        leaves, treedef = jax.tree.flatten(trained)
        places = zip(leaves, self.places("host", trained), shardings_of(trained, trained), strict=True)
        return jax.tree.unflatten(
            treedef, [self._put(_zeros(x.shape, x.dtype, at), tier, at) for x, tier, at in places]
        )

    def jit(self, state: StackState) -> Any:
        """The step, jitted for a state that is donated: the new state takes the memory of the old one."""
        seen = self._seen.note(_leaves(state))
        where = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(self._step_of(seen), donate_argnums=0, in_shardings=(where, None), out_shardings=(where, None))

    def __call__(self, state: StackState, batch: Any) -> tuple[StackState, Array]:
        """One step: the new state, and the loss (mean over microbatches) before it."""
        return self._traced(state, batch).step(batch)

    def _step_of(self, seen: Shardings) -> Callable[[StackState, Any], tuple[StackState, Array]]:
        """The step for states that are divided so, always the same function: `jit` traces it once for them."""
        if not any(map(divided, seen)):
            return self

        def step(state: StackState, batch: Any) -> tuple[StackState, Array]:
            return self._traced(state, batch, seen).step(batch)

        return self._steps.setdefault(seen, step)

    @functools.cached_property
    def _steps(self) -> dict[Shardings, Callable[[StackState, Any], tuple[StackState, Array]]]:
        return {}

    @functools.cached_property
    def _seen(self) -> Placements:
        """Of the states that `init` has made or `jit` got."""
        return Placements()

    def loss(self, state: StackState, batch: Any) -> Array:
        """The loss of a batch, for validation: forward alone. The state stays as it is.

        Parameters in host memory travel layer by layer, as in a step. Call it as `jax.jit(step.loss)(state, batch)`.
        """
        return self._traced(state, batch).loss(batch)

    def _traced(self, state: StackState, batch: Any, seen: Shardings | None = None) -> Run:
        found = self._seen.of(_leaves(state)) if seen is None else [seen]
        traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, batch)))
        inside = traced or _compat.staging_trace() is not None
        run = Run(self, state, found[-1] if found else None, certain=inside and len(found) == 1)
        if run.moved and not inside:
            if _compat.searches_for_nan():
                return self._on_the_device(state, batch)
            raise ValueError(
                "stack_step: a step with state in host memory must run in jax.jit, got arrays outside of it; call "
                "step.jit(state) or jax.jit(step.loss), or give streams=False"
            )
        return run

    def _on_the_device(self, state: StackState, batch: Any) -> Run:
        """With a copy of the state on the device: how JAX, which has found a NaN, calls the step to say where."""
        gradients: Kept = "freed" if self.gradients == "freed" else "device"
        here = dataclasses.replace(
            self, params="device", moments="device", gradients=gradients, streams=False, path=None
        )
        copies = jax.tree.map(
            lambda x: x.on_devices() if is_on_disk(x) else jax.device_put(x, _DEVICE), state, is_leaf=is_on_disk
        )
        return here._traced(copies, batch)

    def bytes_by_tier(self, outer: Any, layers: Any) -> dict[str, int]:
        """Bytes of the state on the device, in host memory and on disk; arguments are arrays or their shapes."""
        outer_split, split = self.split(outer, layers)
        trained = split.trained(jax.tree.leaves(layers))
        shapes = jax.eval_shape(jax.vmap(self.tx.init), trained)
        total = {"device": 0, "host": 0, "disk": 0}
        trees: list[tuple[Any, Place]] = [(layers, self.params), (shapes, self.moments)]
        if self.gradients == "host":
            trees.append((trained, "host"))
        for tree, place in trees:
            for leaf, at in zip(jax.tree.leaves(tree), self.places(place, tree), strict=True):
                total[at] += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        outer_trained = outer_split.trained(jax.tree.leaves(outer))
        for leaf in jax.tree.leaves((outer, jax.eval_shape(self.tx.init, outer_trained))):
            total["device"] += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        return total


def stack_step(
    embed: Callable[[Any, Any], Any],
    body: Callable[[Any, Any], Any],
    head: Callable[[Any, Any, Any], Any],
    tx: Any,
    *,
    params: Place = "device",
    moments: Place | None = None,
    activations: Literal["device", "host"] = "device",
    microbatches: int = 1,
    clip_norm: float | None = None,
    loss_scale: float | None = None,
    gradients: Kept | None = None,
    frozen: Callable[[str, Any], bool] | None = None,
    streams: bool | None = None,
    store: ActivationStore | None = None,
    min_bytes: int = 1 << 16,
    ahead: int = 1,
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | StateStore | None = None,
) -> StackStep:
    """A training step of `head(scan(body, embed(batch)))` whose state lies on the device, in host memory or on disk.

    Forward keeps the input of each layer. Backward computes a layer again, takes its gradient, and updates its
    parameters at once with `tx`. So the gradient of the whole stack never exists. A layer's arrays in host memory come
    to the device `ahead` layers before they are needed, and go back while the next layer computes. Where arrays lie
    changes the memory and the time of a step, but not its numbers.

    `tx` updates each layer as a model of its own, and `outer` as another one: it gets the arrays of one layer, without
    their first axis. So the update of a layer must not depend on other layers or on `outer`. Norms of one array (LAMB,
    Adafactor) and `optax.MultiSteps` do not; a norm of all gradients, `optax.apply_if_finite` and noise do, and are an
    error. Limit the norm of all gradients with `clip_norm`, in place of `optax.clip_by_global_norm`:

    - By default the limit is exact. Gradients of the stack are kept until all are known (`gradients="device"`, or
      "host"), and a second loop updates the layers. In it nothing hides the time of the bus.
    - With `gradients="freed"` a layer is still updated as soon as its gradient is there. The norm is then taken to be
      that of the last step, or of the gradients so far if it is larger. A sudden large gradient is scaled too little.

    A step whose gradients are not all finite is skipped, as by `optax.apply_if_finite`: parameters and the optimizer's
    state stay as they are, and `state.skipped` counts it. With `gradients="freed"` the layers whose gradients come
    first, the last ones of the stack, are already updated when a later gradient is not finite; the others are skipped.

    Args:
        embed: (outer, batch) -> x, the first layer's input: an array.
        body: (parameters of one layer, x) -> x.
        head: (outer, x, batch) -> loss, a scalar.
        tx: an Optax transformation.
        params: where the parameters of the stack lie: "device", "host", "disk", or a function that returns one of these
            for an array's path (as `jax.tree_util.keystr` writes it) and the array.
        moments: likewise, for the optimizer's state. None: "disk" with `path`, else "host".
        activations: where the layers' inputs lie between forward and backward. "host": in the store.
        microbatches: number of parts of a batch, along the first axis of its arrays. Each layer computes one part after
            the other and adds their gradients. So parameters travel once for the whole batch. Gradients of narrower
            dtypes are added in float32 and rounded once: one layer's and those of `outer` then take 4 bytes each.
        clip_norm: the largest norm of all gradients; larger ones are scaled to it. `state.norm` has the last step's.
        loss_scale: the first factor by which the loss is multiplied, so that gradients of float16 do not become 0. The
            optimizer gets the gradients of the loss itself, divided in float32. Steps that are skipped halve the
            factor; 2,000 others in a row double it. `state.scale` has it. None: no factor.
        gradients: "freed": a gradient lives until its layer is updated, in backward. "device", "host": gradients of the
            stack are kept there until backward ends. None: "device" with `clip_norm`, else "freed".
        frozen: (path, array) -> whether a parameter stays as it is. Paths begin with "outer" or "layers", as
            "layers['w']". A frozen parameter has no gradient and no optimizer state, may have any dtype, and is never
            written back to host memory.
        streams: who copies between host memory and device. True: dejax; where a mesh divides the state, each device its
            shards. False: XLA. None: dejax where it can, else XLA. dejax needs the native extension. On several devices
            it also needs a state that this step's `init` has placed on one mesh, or that `jit` got, and a call inside
            of `jax.jit` and outside of `jax.shard_map`; the mesh divides other axes than the first one. If this step
            has seen states of equal shapes on two meshes, call `jit`. What is on disk dejax always copies.
        store: for activations; None: the current one.
        min_bytes: arrays with fewer bytes per layer stay on the device.
        ahead: number of layers whose arrays are on their way to the device at one time.
        path: of arrays on disk: a folder on a fast drive, several folders, or a `StateStore`. Of arrays that a mesh
            divides each device reads and writes its own shards.

    Returns:
        The step: `state = step.init(outer, layers)`, `run = step.jit(state)`, then `state, loss = run(state, batch)`.

    Raises:
        TypeError: `tx` is no Optax transformation.
        ValueError: a number or a place is out of range; as `init` runs, with `path` or `streams=True`: parameters on
            several devices have no mesh in common, or one that divides the first axis of `layers`; as it is traced:
            `tx` mixes layers, the batch cannot be divided, the stack has no layers or not equally many in each
            array, or the state lies elsewhere. The step runs outside of `jit`, with state in host memory, or inside of
            `jax.shard_map`, with state that a mesh divides.
        FileNotFoundError, PermissionError: as `init` runs: `path` cannot be used.
        RuntimeError: as `init` runs: the drive is full.
        NativeExtensionError: with `streams=True` or `path`, the extension is missing.
    """
    step = StackStep(
        embed=embed,
        body=body,
        head=head,
        tx=tx,
        params=params,
        moments=("host" if path is None else "disk") if moments is None else moments,
        activations=activations,
        microbatches=microbatches,
        clip_norm=None if clip_norm is None else float(clip_norm),
        loss_scale=None if loss_scale is None else float(loss_scale),
        gradients=gradients or ("freed" if clip_norm is None else "device"),
        frozen=frozen,
        streams=streams,
        store=store,
        min_bytes=min_bytes,
        ahead=ahead,
        path=path,
    )
    step.check()
    return step


def _leaves(state: StackState) -> list[Any]:
    return list(itertools.chain.from_iterable(state.arrays()))


def _on_device(state: Any) -> list[Tier]:
    return ["device"] * len(jax.tree.leaves(state))


def _zeros(shape: Sequence[int], dtype: Any, at: Any = None) -> Any:
    return jnp.zeros(shape, dtype) if at is None else jax.device_put(jnp.zeros(shape, dtype), at)
