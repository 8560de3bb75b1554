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
from dejax.offload.state.first_state import first_state, in_place
from dejax.offload.state.meshes import divided, require_one_mesh, require_whole_rows, shard_bytes
from dejax.offload.state.placements import Placements, Shardings, Tier, shardings_of
from dejax.offload.state.stack_loops import Run, count
from dejax.offload.state.stack_settings import Kept, Place, StackSettings, StackState
from dejax.offload.state.store import StateStore, is_on_disk
from dejax.offload.state.stream.cut import PIECE_BYTES

_DEVICE = jax.memory.Space.Device


@dataclass(frozen=True, eq=False)
class StackStep(StackSettings):
    """A training step `(state, batch) -> (state, loss)`, as `stack_step` makes it. Its attributes are the arguments.

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
        """Makes the first state, with each array in its place: device, host memory or disk.

        Optimizer state that belongs on the host is made one array at a time, so that the device never holds all of it.
        A parameter that already lies in its place becomes part of the state without a copy, and the donating step of
        `jit` will reuse its memory.

        Args:
            outer: parameters outside of the stack.
            layers: parameters of the stack, pytree of arrays [layers, ...]. Arrays that belong on the host may lie
                there.
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
        """Puts an array [layers, ...] in its place, on each device its shard."""
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
        """Compiles the step for a donated state like `state`: the new state reuses the memory of the old one."""
        seen = self._seen.note(_leaves(state))
        where = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(self._step_of(seen), donate_argnums=0, in_shardings=(where, None), out_shardings=(where, None))

    def __call__(self, state: StackState, batch: Any) -> tuple[StackState, Array]:
        """One step: the new state, and the loss (mean over microbatches) before it."""
        return self._traced(state, batch).step(batch)

    def _step_of(self, seen: Shardings) -> Callable[[StackState, Any], tuple[StackState, Array]]:
        """The step for states with these shardings, always the same function, so that `jit` traces it once for them."""
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
        """The placements of the states that `init` has made or that `jit` was given."""
        return Placements()

    def loss(self, state: StackState, batch: Any) -> Array:
        """Computes the loss of a batch by a forward pass, for validation, and leaves the state as it is.

        Parameters in host memory come to the device layer by layer, as in a step. Call it as
        `jax.jit(step.loss)(state, batch)`.
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
        """Runs the step on a copy of the state on the device, where JAX calls it to locate a NaN (`jax_debug_nans`)."""
        gradients: Kept = "freed" if self.gradients == "freed" else "device"
        here = dataclasses.replace(
            self, params="device", moments="device", gradients=gradients, streams=False, path=None
        )
        copies = jax.tree.map(
            lambda x: x.on_devices() if is_on_disk(x) else jax.device_put(x, _DEVICE), state, is_leaf=is_on_disk
        )
        return here._traced(copies, batch)

    def bytes_by_tier(self, outer: Any, layers: Any) -> dict[str, int]:
        """Bytes of the state on the device, in host memory and on disk, for parameters or for their shapes."""
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
    """Makes a training step for a stack of equal layers whose parameters and optimizer state do not fit on the device.

    The model is `head(scan(body, embed(batch)))`. The forward pass keeps the input of each layer. The backward pass
    recomputes one layer at a time, takes its gradient, and updates its parameters with `tx` at once, so that the
    gradient of the whole stack never exists. Arrays of a layer that lie in host memory or on disk are copied to the
    device `ahead` layers before they are needed, and back while the next layer computes. Where the arrays lie changes
    the memory and time of a step, but not its numbers.

    `tx` updates each layer as a model of its own, and `outer` as another. So the update of a layer must not depend on
    other layers. Norms of single arrays (LAMB, Adafactor) and `optax.MultiSteps` are fine; a norm of all gradients,
    `optax.apply_if_finite` and noise raise an error. To limit the norm of all gradients, use `clip_norm` in place of
    `optax.clip_by_global_norm`:

    - By default the limit is exact: the gradients of the stack are kept (`gradients="device"` or `"host"`) until all
      are known, and a second loop updates the layers. This loop waits for the bus, as it has no other work to do
      meanwhile.
    - With `gradients="freed"`, a layer is updated as soon as its gradient is known. The norm is then estimated: the
      norm of the last step, or of the gradients so far if it is larger. A sudden large gradient is scaled down too
      little.

    A step with a gradient that is not finite is skipped, as by `optax.apply_if_finite`: parameters and optimizer state
    stay as they are, and `state.skipped` counts the step. With `gradients="freed"`, layers that were updated before the
    bad gradient appeared stay updated; the backward pass begins with the last layers.

    Args:
        embed: function `(outer, batch) -> x`, an array, the input of the first layer.
        body: function `(parameters of one layer, x) -> x`.
        head: function `(outer, x, batch) -> loss`, a scalar.
        tx: an Optax transformation.
        params: where the parameters of the stack lie between steps: "device", "host" or "disk"; or a function
            `(path, array) -> place` that decides for each array, with the path as `jax.tree_util.keystr` writes it.
        moments: where the optimizer's state lies, in the same form. None means "disk" if `path` is given, else "host".
        activations: where the inputs of the layers lie between forward and backward pass: "device", or "host", which
            puts them into `store`.
        microbatches: number of parts into which a batch is cut along its first axis. Each layer computes one part after
            the other and adds the gradients, so its parameters are copied to the device once for the whole batch.
            Gradients of 16-bit dtypes are added in float32 and rounded once.
        clip_norm: largest norm of all gradients; larger gradients are scaled down to it. `state.norm` is the last
            step's.
        loss_scale: initial factor of the loss, so that float16 gradients do not underflow. The optimizer gets the
            gradients divided by the factor, in float32. Each skipped step halves the factor, and 2,000 steps in a row
            without a skip double it. `state.scale` is the current factor. None means no factor.
        gradients: "freed": a layer's gradient is freed after the layer's update, during the backward pass. "device" or
            "host": the gradients of the stack are kept there until the backward pass ends. None means "device" with
            `clip_norm`, else "freed".
        frozen: function `(path, array) -> bool`, True for parameters that are not trained. Paths begin with "outer" or
            "layers", such as "layers['w']". A frozen parameter has no gradient and no optimizer state, may have any
            dtype, and is never written back to host memory.
        streams: who copies between host memory and device. True: dejax, each device its own shards; it needs the native
            extension. False: XLA. None: dejax if it can, else XLA. On several devices dejax also needs a state that
            this step's `init` has placed on one mesh or that was given to `jit`, a call inside of `jax.jit` and outside
            of `jax.shard_map`, and a mesh that does not divide the first axis. If this step has seen states of equal
            shapes on two meshes, use `jit`. Arrays on disk are always copied by dejax.
        store: the `ActivationStore` for activations; None means the current one.
        min_bytes: arrays with fewer bytes per layer stay on the device.
        ahead: number of layers whose arrays are copied to the device in advance.
        path: place of arrays on disk: a folder on a fast drive, several folders, or a `StateStore`. If a mesh divides
            an array, each device reads and writes its own shards.

    Returns:
        A `StackStep`. Use it as `state = step.init(outer, layers)`, `run = step.jit(state)`, and then for each batch
        `state, loss = run(state, batch)`.

    Raises:
        TypeError: `tx` is no Optax transformation.
        ValueError: a number or a place is out of range. By `init`, with `path` or `streams=True`: parameters on several
            devices have no mesh in common, or the mesh divides the first axis of `layers`. When the step is traced:
            `tx` mixes layers, the batch cannot be cut into `microbatches`, the arrays of the stack have no layers or
            different numbers of layers, the state lies elsewhere, the step runs outside of `jit` with state in host
            memory, or it runs inside of `jax.shard_map` with state that a mesh divides.
        FileNotFoundError, PermissionError: by `init`: `path` cannot be used.
        RuntimeError: by `init`: the drive is full.
        NativeExtensionError: with `streams=True` or `path`: dejax's native extension is missing.
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
