"""A training step of a stack of equal layers, layer by layer.

Backward goes through the stack once. As soon as a layer's gradient is there, its parameters are updated, and the
gradient's memory is free: no gradient of the whole model ever exists. Parameters and the optimizer's state of a layer
may lie in host memory; they travel one layer ahead of their use, in both directions of the bus at once.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend import core

from dejax import _compat, _native
from dejax.offload import _calls
from dejax.offload._moments import Tier, depends_on_inputs, needs_of, shardings_of, tier_of
from dejax.offload._rows import HostRows, Walk
from dejax.offload._store import ActivationStore, binding_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_SPACE = {"device": _DEVICE, "host": _HOST}
Place = Tier | Callable[[str, Any], Tier]
_SITE = 1 << 41
_STAGED_LAYERS = 4  # two on their way to the device and two on their way back


class StackState(NamedTuple):
    """What a training step changes.

    Attributes:
        outer: parameters outside of the stack (embeddings, the last norm).
        layers: parameters of the stack, arrays [layers, ...].
        outer_moments: the optimizer's state of `outer`.
        layer_moments: the optimizer's state of each layer, arrays [layers, ...].
    """

    outer: Any
    layers: Any
    outer_moments: Any
    layer_moments: Any


@dataclass(frozen=True, eq=False)  # jax.jit keeps it by identity, in a weak reference
class StackStep:
    """A training step, made by `stack_step`: (state, batch) -> (state, loss).

    Attributes:
        embed, body, head, tx, params, moments, activations, microbatches, streams, store, min_bytes, ahead: as given.
    """

    embed: Callable[[Any, Any], Any]
    body: Callable[[Any, Any], Any]
    head: Callable[[Any, Any, Any], Any]
    tx: Any
    params: Place = "device"
    moments: Place = "host"
    activations: Tier = "device"
    microbatches: int = 1
    streams: bool | None = None
    store: ActivationStore | None = None
    min_bytes: int = 1 << 16
    ahead: int = 1

    def init(self, outer: Any, layers: Any) -> StackState:
        """The state of the first step, each array in its place.

        The optimizer's state is made array by array, so that the device holds one that belongs on the host at a time.
        The parameters that lie in their place already become part of the state, and so of what `jit` gives away.

        Args:
            outer: parameters outside of the stack.
            layers: pytree of arrays [layers, ...]; those that belong on the host may lie there.
        """
        outer, layers = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, (outer, layers))
        _length(jax.tree.leaves(layers))
        make = jax.vmap(self.tx.init)
        layer_shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layers)
        shapes = jax.eval_shape(make, layer_shapes)
        leaves, treedef = jax.tree.flatten(shapes)
        places = self._places(self.moments, shapes)
        by_values = depends_on_inputs(make, layer_shapes)
        shardings = shardings_of(shapes, layers)
        made = []
        for i, (leaf, place) in enumerate(zip(leaves, places, strict=True)):
            if by_values[i]:  # a copy of the parameters, for example
                here = jax.tree.map(lambda x: jax.device_put(x, _DEVICE), layers)
                # `jit` returns an argument's own memory as a result, and a state is given away array by array.
                value = jax.jit(lambda p, i=i: jnp.copy(jax.tree.leaves(make(p))[i]))(here)
            else:
                one = jax.tree.map(lambda x: jnp.zeros(x.shape[1:], x.dtype), layer_shapes)
                first = jax.tree.leaves(self.tx.init(one))[i]
                value = jnp.broadcast_to(first, leaf.shape)
            if shardings[i] is not None:
                value = jax.device_put(value, shardings[i])
            made.append(jax.device_put(value, _HOST) if place == "host" else value)
        moments = jax.tree.unflatten(treedef, made)
        flat, layers_tree = jax.tree.flatten(layers)
        where = self._places(self.params, layers)
        flat = [x if tier_of(x) == at else jax.device_put(x, _SPACE[at]) for x, at in zip(flat, where, strict=True)]
        outside, outside_tree = jax.tree.flatten(self.tx.init(outer))
        mine = {id(x) for x in jax.tree.leaves(outer)}
        outside = [jnp.copy(x) if id(x) in mine else x for x in outside]
        near = shardings_of(jax.tree.unflatten(outside_tree, outside), outer)
        outside = [x if at is None else jax.device_put(x, at) for x, at in zip(outside, near, strict=True)]
        return StackState(
            outer, jax.tree.unflatten(layers_tree, flat), jax.tree.unflatten(outside_tree, outside), moments
        )

    def jit(self, state: StackState) -> Any:
        """The step, jitted for a state that is donated: the new state takes the memory of the old one."""
        where = jax.tree.map(lambda x: x.sharding, state)
        return jax.jit(self, donate_argnums=0, in_shardings=(where, None), out_shardings=(where, None))

    def __call__(self, state: StackState, batch: Any) -> tuple[StackState, Array]:
        """One step: the new state, and the loss (mean over microbatches) before it."""
        run = _Run(self, state)
        inside = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((state, batch)))
        if run.streams and not inside and _compat.staging_trace() is None:
            raise ValueError(
                "stack_step: a step with state in host memory must run in jax.jit, got arrays outside of it; call "
                "step.jit(state), or give streams=False"
            )
        return run.step(batch)

    def bytes_by_tier(self, outer: Any, layers: Any) -> dict[str, int]:
        """Bytes of the state on the device and in host memory; arguments are arrays or their shapes."""
        shapes = jax.eval_shape(jax.vmap(self.tx.init), layers)
        total = {"device": 0, "host": 0}
        for tree, place in ((layers, self.params), (shapes, self.moments)):
            for leaf, at in zip(jax.tree.leaves(tree), self._places(place, tree), strict=True):
                total[at] += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves((outer, jax.eval_shape(self.tx.init, outer))):
            total["device"] += math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        return total

    def _places(self, place: Place, tree: Any) -> list[Tier]:
        """For each array of a tree: where it lies. Rows of less than `min_bytes` stay on the device."""
        found: list[Tier] = []
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            row = math.prod(leaf.shape[1:]) * np.dtype(leaf.dtype).itemsize
            wanted = place(jax.tree_util.keystr(path), leaf) if callable(place) else place
            if wanted not in ("device", "host"):
                raise ValueError(f"stack_step: a place must be 'device' or 'host', got {wanted!r}")
            found.append("host" if wanted == "host" and row >= max(1, self.min_bytes) else "device")
        return found


def stack_step(
    embed: Callable[[Any, Any], Any],
    body: Callable[[Any, Any], Any],
    head: Callable[[Any, Any, Any], Any],
    tx: Any,
    *,
    params: Place = "device",
    moments: Place = "host",
    activations: Tier = "device",
    microbatches: int = 1,
    streams: bool | None = None,
    store: ActivationStore | None = None,
    min_bytes: int = 1 << 16,
    ahead: int = 1,
) -> StackStep:
    """A training step of `head(scan(body, embed(batch)))` whose state lies on the device or in host memory.

    Forward keeps the input of each layer. Backward computes a layer again, takes its gradient, and updates its
    parameters at once with `tx`. So the gradient of the whole stack never exists. A layer's arrays in host memory come
    to the device `ahead` layers before they are needed, and go back while the next layer computes. Where arrays lie
    changes the memory and the time of a step, but not its numbers.

    `tx` updates each layer as a model of its own, and `outer` as another one. So it must not mix parameters: clip
    gradients by value or by the norm of each parameter, not by the norm of all gradients.

    Args:
        embed: (outer, batch) -> x, the first layer's input: an array.
        body: (parameters of one layer, x) -> x.
        head: (outer, x, batch) -> loss, a scalar.
        tx: an Optax transformation.
        params: where the parameters of the stack lie: "device", "host", or a function that returns one of these for
            an array's path (as `jax.tree_util.keystr` writes it) and the array.
        moments: likewise, for the optimizer's state.
        activations: where the layers' inputs lie between forward and backward. "host": in the store.
        microbatches: number of parts of a batch, along the first axis of its arrays. Each layer computes one part after
            the other and adds their gradients. So parameters travel once for the whole batch.
        streams: who copies between host and device. True: dejax, for state on one device. False: XLA, also for sharded
            state. None: True if jax has one device and the native extension is installed.
        store: for activations; None: the current one.
        min_bytes: arrays with fewer bytes per layer stay on the device.
        ahead: number of layers whose arrays are on their way to the device at one time.

    Returns:
        The step: `state = step.init(outer, layers)`, `run = step.jit(state)`, then `state, loss = run(state, batch)`.

    Raises:
        TypeError: `tx` is no Optax transformation.
        ValueError: a number or a place is out of range; as it is traced: `tx` mixes parameters, the batch cannot be
            divided, the stack has no layers or not equally many in each array, or the state lies elsewhere. The step
            runs outside of `jit`, with state in host memory.
        NativeExtensionError: with `streams=True`, the extension is missing.
    """
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"stack_step: `tx` must be an Optax transformation, got {type(tx).__name__}")
    for name, value in (("params", params), ("moments", moments), ("activations", activations)):
        if not callable(value) and value not in ("device", "host"):
            raise ValueError(f"stack_step: `{name}` must be 'device' or 'host', got {value!r}")
    if microbatches < 1 or ahead < 1:
        raise ValueError(f"stack_step: `microbatches` and `ahead` must be at least 1, got {microbatches} and {ahead}")
    return StackStep(
        embed, body, head, tx, params, moments, activations, microbatches, streams, store, min_bytes, ahead
    )


class _Run:
    """One step as it is traced."""

    def __init__(self, config: StackStep, state: StackState) -> None:
        self.config = config
        self.state = state
        self.params, self.params_tree = jax.tree.flatten(state.layers)
        self.moments, self.moments_tree = jax.tree.flatten(state.layer_moments)
        self.length = _length(self.params)
        leaves = [*self.params, *self.moments]
        places = [*config._places(config.params, state.layers), *config._places(config.moments, state.layer_moments)]
        self.far = [i for i, at in enumerate(places) if at == "host"]
        self.near = [i for i, at in enumerate(places) if at == "device"]
        self.leaves = leaves
        if wrong := [i for i, at in enumerate(places) if tier_of(leaves[i]) != at]:
            raise ValueError(
                f"stack_step: `state` must lie where `init` puts it, got an array of shape {leaves[wrong[0]].shape} in "
                f"{tier_of(leaves[wrong[0]])} memory; make the state with this step's init, or jit it with step.jit"
            )
        self.streams = bool(self.far) and _streams(config.streams)
        self._check_update()

    @property
    def far_params(self) -> list[int]:
        return [i for i in self.far if i < len(self.params)]

    def step(self, batch: Any) -> tuple[StackState, Array]:
        config, count = self.config, self.config.microbatches
        outer = self.state.outer
        batches = jax.tree.map(self._divided, batch)
        rows = self._open()
        embedded = lambda p: _each(lambda b: config.embed(p, b), batches, count)  # noqa: E731
        x, back_to_outer = jax.vjp(embedded, outer)
        x, saved, ticket = self._forward(rows, x)

        def loss(outer: Any, x: Any) -> Array:
            return jnp.mean(_each(lambda xb: config.head(outer, *xb), (x, batches), count))

        value, back = jax.vjp(loss, outer, x)
        gradient, cotangent = back(jnp.ones_like(value))
        leaves, cotangent = self._backward(rows, ticket, cotangent, saved)
        (other,) = back_to_outer(cotangent)
        gradient = jax.tree.map(jnp.add, gradient, other)
        updates, outer_moments = config.tx.update(gradient, self.state.outer_moments, outer)
        layers = jax.tree.unflatten(self.params_tree, leaves[: len(self.params)])
        moments = jax.tree.unflatten(self.moments_tree, leaves[len(self.params) :])
        return StackState(_add(outer, updates), layers, outer_moments, moments), value

    def _divided(self, x: Any) -> Any:
        count = self.config.microbatches
        if count == 1:
            return x
        if x.shape[0] % count:
            raise ValueError(f"stack_step: `microbatches` must divide the batch, got {count} for {x.shape[0]} examples")
        return x.reshape(count, x.shape[0] // count, *x.shape[1:])

    def _open(self) -> HostRows | None:
        if not self.streams:
            return None
        arrays = [self.leaves[i] for i in self.far]
        layer = sum(math.prod(x.shape[1:]) * np.dtype(x.dtype).itemsize for x in arrays)
        return HostRows(arrays, _STAGED_LAYERS * (self.config.ahead + 1) // 2 * layer)

    def _walk(self, numbers: Sequence[int], reverse: bool) -> Walk:
        return Walk(tuple(self.far.index(i) for i in numbers), self.length, reverse, self.config.ahead)

    def _forward(self, rows: HostRows | None, x: Any) -> tuple[Any, Any, Any]:
        """The last layer's output, the inputs of all layers (or their handles), and the ticket."""
        far, walk = self.far_params, self._walk(self.far_params, False)
        ticket = jnp.zeros((2,), jnp.uint32)
        if rows is not None:
            ticket = rows.begin()
            if far:
                ticket = rows.first_rows(ticket, walk)

        def layer(carry: Any, k: Array) -> tuple[Any, Any]:
            x, ticket = carry
            values = {i: _row(self.leaves[i], k) for i in self.near if i < len(self.params)}
            if rows is not None and far:
                ticket, taken = rows.take(ticket, walk)
                values.update(zip(far, taken, strict=True))
            elif far:
                values.update((i, jax.device_put(_row(self.leaves[i], k), _DEVICE)) for i in far)
            p = jax.tree.unflatten(self.params_tree, [jax.lax.optimization_barrier(values[i]) for i in sorted(values)])
            handle = self._put(x)
            x = _each(lambda x: self.config.body(p, x), x, self.config.microbatches)
            return (x, ticket), handle

        (x, ticket), saved = jax.lax.scan(layer, (x, ticket), jnp.arange(self.length))
        return x, saved, ticket

    def _backward(self, rows: HostRows | None, ticket: Any, cotangent: Any, saved: Any) -> tuple[list[Any], Any]:
        """The new parameters and moments of the stack, and the cotangent of its input."""
        walk = self._walk(self.far, True)
        if rows is not None:
            ticket = rows.first_rows(ticket, walk)
        here = [self.leaves[i] for i in self.near]
        there = [] if rows is not None else [self.leaves[i] for i in self.far]

        def layer(carry: Any, xs: Any) -> tuple[Any, None]:
            cotangent, here, there, ticket = carry
            k, handle = xs
            old: dict[int, Any] = {i: _row(x, k) for i, x in zip(self.near, here, strict=True)}
            if rows is not None:
                ticket, taken = rows.take(ticket, walk)
                old.update(zip(self.far, taken, strict=True))
            else:
                old.update((i, jax.device_put(_row(x, k), _DEVICE)) for i, x in zip(self.far, there, strict=True))
            x = self._get(handle, cotangent)
            values = jax.lax.optimization_barrier([old[i] for i in range(len(self.leaves))])
            new, cotangent = self._layer_update(values, x, cotangent)
            new = jax.lax.optimization_barrier(new)
            here = [_with_row(x, new[i], k) for i, x in zip(self.near, here, strict=True)]
            if rows is not None:
                ticket = rows.put(ticket, walk, walk.arrays, [new[i] for i in self.far])
            else:
                there = [_with_row(x, jax.device_put(new[i], _HOST), k) for i, x in zip(self.far, there, strict=True)]
            return (cotangent, here, there, ticket), None

        carry = (cotangent, here, there, ticket)
        (cotangent, here, there, ticket), _ = jax.lax.scan(layer, carry, (jnp.arange(self.length), saved), reverse=True)
        if rows is not None:
            there = rows.finish(ticket)
        leaves: list[Any] = list(self.leaves)
        for numbers, values in ((self.near, here), (self.far, there)):
            for i, value in zip(numbers, values, strict=True):
                leaves[i] = value
        return leaves, cotangent

    def _layer_update(self, values: list[Any], x: Any, cotangent: Any) -> tuple[list[Any], Any]:
        """New values of a layer's parameters and moments, and the cotangent of its input."""
        count = len(self.params)
        p = jax.tree.unflatten(self.params_tree, values[:count])
        m = jax.tree.unflatten(self.moments_tree, values[count:])

        def one(x: Any, ct: Any) -> tuple[Any, Any]:
            return jax.vjp(self.config.body, p, x)[1](ct)

        if self.config.microbatches == 1:
            gradient, cotangent = one(x, cotangent)
        else:

            def add(total: Any, xs: Any) -> tuple[Any, Any]:
                gradient, cotangent = one(*xs)
                return jax.tree.map(jnp.add, total, gradient), cotangent

            gradient, cotangent = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, p), (x, cotangent))
        gradient = jax.lax.optimization_barrier(gradient)
        updates, m = self.config.tx.update(gradient, m, p)
        return [*jax.tree.leaves(_add(p, updates)), *jax.tree.leaves(m)], cotangent

    def _put(self, x: Any) -> Any:
        if self.config.activations == "device":
            return x
        leaf = jax.typeof(x)
        nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        return _calls.store(x, store_id=binding_of(self.config.store), site=self._site, ring_bytes=2 * nbytes)

    def _get(self, handle: Any, cotangent: Any) -> Any:
        if self.config.activations == "device":
            return handle
        after = [cotangent]
        like = jax.typeof(cotangent)
        return _calls.fetch(handle, like, after, store_id=binding_of(self.config.store), site=self._site)

    @functools.cached_property
    def _site(self) -> int:
        described = repr([(x.shape, str(x.dtype)) for x in self.leaves])
        return _SITE + sum(map(ord, described))

    def _check_update(self) -> None:
        """Raises where the update of one parameter depends on the gradient of another one."""
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.state.layers)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), self.state.layer_moments)
        closed = jax.make_jaxpr(lambda g, s, p: self.config.tx.update(g, s, p)[0])(layer, state, layer)
        gradients = closed.jaxpr.invars[: len(self.params)]
        needs = {var: frozenset((i,)) for i, var in enumerate(gradients)}
        for eqn in closed.jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            found = needs_of(eqn, inner, needs)
            needs.update(zip(eqn.outvars, found, strict=True))
        outputs = [needs.get(v, frozenset()) for v in closed.jaxpr.outvars if not isinstance(v, core.Literal)]
        if any(len(need) > 1 for need in outputs):
            raise ValueError(
                "stack_step: `tx` must update each parameter from its own gradient, got one that mixes them (a norm of "
                "all gradients); use optax.clip or adaptive_grad_clip, or plain autodiff with offload.optimizer"
            )


def _each(fn: Callable[[Any], Any], x: Any, count: int) -> Any:
    return fn(x) if count == 1 else jax.lax.map(fn, x)


def _length(params: Sequence[Any]) -> int:
    """The number of layers. A row beyond an array's end would be its last one: JAX clamps indices."""
    found = sorted({x.shape[0] if x.ndim else 0 for x in params})
    if len(found) != 1 or found[0] == 0:
        shapes = ", ".join(str(x.shape) for x in params)
        raise ValueError(
            f"stack_step: `layers` must be arrays [layers, ...] of equally many layers, at least one, got shapes "
            f"{shapes or 'of no array'}; stack the layers' parameters along a first axis"
        )
    return int(found[0])


def _add(params: Any, updates: Any) -> Any:
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def _row(x: Any, k: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(x, k, keepdims=False)


def _with_row(x: Any, row: Any, k: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, row, k, 0)


def _streams(wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    return jax.device_count() == 1 and _native.unavailable_reason() is None
