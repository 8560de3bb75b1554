"""One step layer by layer, as it is traced: its loops over layers, and what travels in each of them."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _native
from dejax._dtypes import narrowed, wide, zeros
from dejax.offload.activations import calls
from dejax.offload.activations.store import binding_of
from dejax.offload.state.meshes import divided, why_no_rows
from dejax.offload.state.mixing import why_not_by_layers
from dejax.offload.state.placements import Shardings, tier_of
from dejax.offload.state.stack_settings import StackSettings, StackState
from dejax.offload.state.store import is_on_disk
from dejax.offload.state.stream.rows import HostRows, Walk

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
_SITE = 1 << 41
SCALE_PERIOD = 2000
"""Steps with finite gradients after which `loss_scale` doubles."""

# (carry, the layer's arrays by number, the iteration's own) -> (carry, new arrays by number, result)
Layer = Callable[[Any, dict[int, Any], Any], tuple[Any, dict[int, Any], Any]]


class Run:
    """The computation of one step. Arrays [layers, ...] are numbered: parameters, moments, then kept gradients.

    Args:
        config: the settings of the step.
        state: the state from which the step goes on.
        seen: how the arrays of the state are divided; None: unknown.
        certain: no doubt about that, and the step is traced.
    """

    def __init__(self, config: StackSettings, state: StackState, seen: Shardings | None, *, certain: bool) -> None:
        self.config = config
        self.state = state
        self.params = jax.tree.leaves(state.layers, is_leaf=is_on_disk)
        self.moments, self.moments_tree = jax.tree.flatten(state.layer_moments, is_leaf=is_on_disk)
        self.outer_split, self.split = config.split(state.outer, state.layers)
        self.length = count(self.params)
        trained = self.split.trained(self.params)
        places = [*config.places(config.params, state.layers), *config.places(config.moments, state.layer_moments)]
        kept: list[Any] = []
        if config.gradients == "host":
            kept = jax.tree.leaves(state.gradients)
            places += config.places("host", trained)
        elif config.gradients == "device":
            kept = [jnp.zeros(x.shape, x.dtype) for x in jax.tree.leaves(trained, is_leaf=is_on_disk)]
            places += ["device"] * len(kept)
        self.leaves: list[Any] = [*self.params, *self.moments, *kept]
        first = len(self.params) + len(self.moments)
        self.moment_numbers = list(range(len(self.params), first))
        self.kept_numbers = list(range(first, len(self.leaves)))
        self.away = [i for i, at in enumerate(places) if at != "device"]
        if wrong := [i for i, at in enumerate(places) if tier_of(self.leaves[i]) != at]:
            raise ValueError(
                f"stack_step: `state` must lie where `init` puts it, got an array of shape "
                f"{self.leaves[wrong[0]].shape} in {tier_of(self.leaves[wrong[0]])} memory; make the state with this "
                "step's init, or jit it with step.jit"
            )
        if "disk" in places and config.streams is False:
            raise ValueError(
                "stack_step: state on disk must be copied by dejax, got streams=False; leave `streams` at None"
            )
        known = itertools.repeat(None) if seen is None else iter(seen)
        outer, layers, outer_moments, moments, gradients = [[next(known) for _ in arrays] for arrays in state.arrays()]
        self.outer_shardings = [*outer, *outer_moments]
        divisions = itertools.zip_longest(self.leaves, [*layers, *moments, *gradients])
        self.shardings = [x.sharding if is_on_disk(x) else at for x, at in divisions]
        copied = ("host", "disk") if self._streams(certain) else ("disk",)
        self.moved = [i for i in self.away if places[i] in copied]
        self.rows: HostRows | None = None
        self.ticket = jnp.zeros((2,), jnp.uint32)
        self._begun: Walk | None = None  # the loop whose first rows are being copied already
        self._check_update(trained)

    def loss(self, batch: Any) -> Array:
        """Computes the loss only."""
        self.moved = [i for i in self.moved if i < len(self.params)]
        embedded, loss = self._ends(batch)
        outer = self.outer_split.trained(jax.tree.leaves(self.state.outer))
        self._open(changes=False)
        x, _ = self._forward(embedded(outer), keep=False)
        value = loss(outer, x)
        if self.rows is not None:
            ticket, value = jax.lax.optimization_barrier((self.ticket, value))
            self.rows.finish_loss(ticket, value)
        return value

    def _streams(self, certain: bool) -> bool:
        """Whether dejax copies the arrays in host memory; otherwise XLA does."""
        if self.config.streams is not None:
            return self.config.streams
        if _native.unavailable_reason() is not None:
            return False
        if jax.device_count() == 1:
            return True
        shardings = [self.shardings[i] for i in self.away]
        if not certain or not any(map(divided, shardings)):
            return False
        return why_no_rows([self.leaves[i] for i in self.away], shardings) is None

    def _ends(self, batch: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Array]]:
        """Trained outer parameters -> the first layer's input; these and the last layer's output -> loss."""
        config, parts = self.config, self.config.microbatches
        leaves = jax.tree.leaves(self.state.outer)
        trained = self.outer_split.trained(leaves)
        batches = jax.tree.map(self._divided, batch)

        # In each part of a batch, so that the parts' gradients are added in the dtype of `outer`.
        def with_frozen(outer: Any) -> Any:
            return self.outer_split.join(narrowed(outer, trained), leaves)

        def embedded(outer: Any) -> Any:
            return _each(lambda b: config.embed(with_frozen(outer), b), batches, parts)

        def loss(outer: Any, x: Any) -> Array:
            return jnp.mean(_each(lambda xb: config.head(with_frozen(outer), *xb), (x, batches), parts))

        return embedded, loss

    def step(self, batch: Any) -> tuple[StackState, Array]:
        """Computes a step: the new state, and the loss of the old one."""
        config = self.config
        leaves = jax.tree.leaves(self.state.outer)
        outer = self.outer_split.trained(leaves)
        embedded, loss = self._ends(batch)
        self._open(changes=True)
        self._begin_early()
        summed = outer if config.microbatches == 1 else wide(outer)
        x, back_to_outer = jax.vjp(embedded, summed)
        x, saved = self._forward(x)
        value, back = jax.vjp(loss, summed, x)
        one = jnp.ones_like(value)
        of_head, cotangent = back(one if config.loss_scale is None else one * self.state.scale.astype(one.dtype))
        if config.gradients == "freed":
            known = self._finished(of_head, outer)
            cotangent, squares, finite = self._backward(cotangent, saved, _squares(known), _is_finite(known))
        else:
            cotangent, squares, finite = self._gradients(cotangent, saved)
        gradient = self._finished(jax.tree.map(jnp.add, of_head, back_to_outer(cotangent)[0]), outer)
        norm = jnp.zeros(()) if config.clip_norm is None else jnp.sqrt(squares + _squares(gradient))
        finite &= _is_finite((gradient, norm))
        if config.gradients != "freed":
            self._update(norm, finite)
        gradient = self._clipped(gradient, norm if config.gradients != "freed" else self._likely(norm))
        updates, outer_moments = config.tx.update(gradient, self.state.outer_moments, outer)
        outer_moments = _if(finite, outer_moments, self.state.outer_moments)
        outer = self.outer_split.join(_if(finite, _add(outer, updates), outer), leaves)
        arrays = []
        if self.rows is not None:
            results = [*jax.tree.leaves((outer, outer_moments)), norm, value]
            arrays = self.rows.finish_step(
                self.ticket, list(zip(results, [*self.outer_shardings, None, None], strict=True))
            )
        for i, array in zip(self.moved, arrays, strict=True):
            self.leaves[i] = array
        return self._new_state(outer, outer_moments, norm, finite), value

    def _new_state(self, outer: Any, outer_moments: Any, norm: Array, finite: Array) -> StackState:
        first = self.moment_numbers[-1] + 1 if self.moment_numbers else len(self.params)
        kept = None
        if self.config.gradients == "host":
            kept = jax.tree.unflatten(jax.tree.structure(self.state.gradients), self.leaves[first:])
        scale, healthy = None, None
        if self.config.loss_scale is not None:
            scale, healthy = _next_scale(self.state.scale, self.state.healthy, finite)
        return StackState(
            outer,
            self.split.treedef.unflatten(self.leaves[: len(self.params)]),
            outer_moments,
            jax.tree.unflatten(self.moments_tree, self.leaves[len(self.params) : first]),
            None if self.config.clip_norm is None else jnp.where(finite, norm, self.state.norm),
            kept,
            self.state.skipped + (~finite).astype(jnp.int32),
            scale,
            healthy,
        )

    def _divided(self, x: Any) -> Any:
        parts = self.config.microbatches
        if parts == 1:
            return x
        if x.shape[0] % parts:
            raise ValueError(f"stack_step: `microbatches` must divide the batch, got {parts} for {x.shape[0]} examples")
        return x.reshape(parts, x.shape[0] // parts, *x.shape[1:])

    def _open(self, *, changes: bool) -> None:
        if not self.moved:
            return
        arrays = [self.leaves[i] for i in self.moved]
        self.rows = HostRows(arrays, [self.shardings[i] for i in self.moved], self.config.ahead)
        self.ticket = self.rows.begin(changes=changes)

    def _begin_early(self) -> None:
        """Begins to copy the first rows of the only loop that reads any, so that they come during the forward pass."""
        if self.rows is None or self.rows.mesh is not None or self.config.gradients == "host":
            return
        if any(i < len(self.params) for i in self.moved):
            return
        walk = self._walk(self.moment_numbers, reverse=True)
        if walk.arrays:
            self.ticket, self._begun = self.rows.first_rows(self.ticket, walk), walk

    def _walk(self, reads: Sequence[int], *, reverse: bool) -> Walk:
        """A loop that reads some arrays, among them those whose rows travel."""
        at = {number: position for position, number in enumerate(self.moved)}
        return Walk(tuple(at[i] for i in sorted(reads) if i in at), self.length, reverse, self.config.ahead)

    def _forward(self, x: Any, *, keep: bool = True) -> tuple[Any, Any]:
        """The last layer's output, and the inputs of all layers (or their handles) if they are kept."""

        def layer(x: Any, values: dict[int, Any], _: Any) -> Any:
            p = self.split.treedef.unflatten([jax.lax.optimization_barrier(values[i]) for i in sorted(values)])
            handle = self._put(x) if keep else None
            return _each(lambda x: self.config.body(p, x), x, self.config.microbatches), {}, handle

        return self._loop(range(len(self.params)), (), layer, x, None, reverse=False)

    def _backward(self, cotangent: Any, saved: Any, of_head: Array, finite: Array) -> tuple[Any, Array, Array]:
        """Updates each layer as soon as its gradient is there.

        Args:
            cotangent: the cotangent of the last layer's output.
            saved: inputs of the layers.
            of_head: the sum of squares of the head's gradient.
            finite: whether that gradient is finite.

        Returns:
            The cotangent of the first layer's input; the sum of squares of the layers' gradients; whether all gradients
            are finite. From the first layer on that has one which is not, layers stay as they are.
        """
        changed = [*self.split.numbers, *self.moment_numbers]

        def layer(carry: Any, values: dict[int, Any], handle: Any) -> Any:
            gradient, values, (cotangent, squares, finite) = self._gradient_of(carry, values, handle)
            if self.config.clip_norm is not None:
                norm = jnp.sqrt(of_head + squares)
                finite &= jnp.isfinite(norm)
                gradient = self._clipped(gradient, self._likely(norm))
            return (cotangent, squares, finite), self._new_values(values, gradient, finite), None

        reads = [*range(len(self.params)), *self.moment_numbers]
        found: tuple[Any, Array, Array] = self._loop(
            reads, changed, layer, (cotangent, jnp.zeros(()), finite), saved, reverse=True
        )[0]
        return found

    def _gradients(self, cotangent: Any, saved: Any) -> tuple[Any, Array, Array]:
        """Keeps each layer's gradient for a later update; returns the same as `_backward`."""

        def layer(carry: Any, values: dict[int, Any], handle: Any) -> Any:
            gradient, _, carry = self._gradient_of(carry, values, handle)
            return carry, dict(zip(self.kept_numbers, jax.tree.leaves(gradient), strict=True)), None

        first = (cotangent, jnp.zeros(()), jnp.array(True))
        reads = range(len(self.params))
        found: tuple[Any, Array, Array] = self._loop(reads, self.kept_numbers, layer, first, saved, reverse=True)[0]
        return found

    def _gradient_of(self, carry: Any, values: dict[int, Any], handle: Any) -> tuple[Any, dict[int, Any], Any]:
        """In backward: a layer's gradient, its arrays, and (cotangent, sum of squares, whether all are finite)."""
        cotangent, squares, finite = carry
        x = self._get(handle, cotangent)
        values = jax.lax.optimization_barrier(values)
        gradient, cotangent = self._gradient(values, x, cotangent)
        gradient = jax.lax.optimization_barrier(gradient)
        if self.config.clip_norm is not None:
            squares += _squares(gradient)
        return gradient, values, (cotangent, squares, finite & _is_finite(gradient))

    def _update(self, norm: Array, finite: Array) -> None:
        """Updates each layer by its kept gradient, if all are finite."""
        changed = [*self.split.numbers, *self.moment_numbers]

        def layer(carry: Any, values: dict[int, Any], _: Any) -> Any:
            values = jax.lax.optimization_barrier(values)
            leaves = [values.get(i) for i in range(len(self.params))]
            kept = [values[i] for i in self.kept_numbers]
            gradient = jax.tree.unflatten(jax.tree.structure(self.split.trained(leaves)), kept)
            return carry, self._new_values(values, self._clipped(gradient, norm), finite), None

        self._loop([*changed, *self.kept_numbers], changed, layer, (), None, reverse=True)

    def _loop(
        self, reads: Sequence[int], writes: Sequence[int], layer: Layer, carry: Any, given: Any, *, reverse: bool
    ) -> tuple[Any, Any]:
        """Calls `layer` for each layer with its rows of the arrays `reads`; writes new rows to the arrays `writes`.

        Args:
            reads, writes: numbers of arrays.
            layer: see `Layer`.
            carry: from one layer to the next one.
            given: arrays [layers, ...] that `layer` gets besides, or None.
            reverse: the last layer comes first.
        """
        rows, away, at = self.rows, set(self.away), {number: position for position, number in enumerate(self.moved)}
        walk, numbers = self._walk(reads, reverse=reverse), jnp.arange(self.length)
        taken, put = [self.moved[k] for k in walk.arrays], [i for i in sorted(writes) if i in at]
        if rows is not None and taken and walk != self._begun:
            self.ticket = rows.first_rows(self.ticket, walk)
        elif self._begun is not None and not taken:
            # XLA orders calls by what they read. The ticket holds zeros, which XLA does not know: this loop comes after
            # the call that begins the copies.
            numbers = numbers + self.ticket[0].astype(numbers.dtype)
        held = {i: self.leaves[i] for i in writes if i not in put}

        def one(carry: Any, xs: Any) -> tuple[Any, Any]:
            inner, held, ticket = carry
            k, own = xs
            values: dict[int, Any] = {}
            for i in sorted(set(reads) - set(taken)):
                row = _row(held.get(i, self.leaves[i]), k)
                values[i] = jax.device_put(row, _DEVICE) if i in away else row
            if rows is not None and taken:
                ticket, arrived = rows.take(ticket, walk)
                values.update(zip(taken, arrived, strict=True))
            inner, new, result = layer(inner, values, own)
            new = jax.lax.optimization_barrier(new)
            held = {i: _with_row(x, jax.device_put(new[i], _HOST) if i in away else new[i], k) for i, x in held.items()}
            if rows is not None and put:
                ticket = rows.put(ticket, walk, [at[i] for i in put], [new[i] for i in put])
            return (inner, held, ticket), result

        (carry, held, self.ticket), results = jax.lax.scan(
            one, (carry, held, self.ticket), (numbers, given), reverse=reverse
        )
        for i, x in held.items():
            self.leaves[i] = x
        return carry, results

    def _gradient(self, values: dict[int, Any], x: Any, cotangent: Any) -> tuple[Any, Any]:
        """The gradient of a layer's trained parameters, and the cotangent of its input."""
        leaves = [values[i] for i in range(len(self.params))]
        p = self.split.trained(leaves)

        def one(x: Any, ct: Any) -> tuple[Any, Any]:
            return jax.vjp(lambda p, x: self.config.body(self.split.join(p, leaves), x), p, x)[1](ct)

        if self.config.microbatches == 1:
            gradient, cotangent = one(x, cotangent)
            return self._finished(gradient, p), cotangent

        def add(total: Any, xs: Any) -> tuple[Any, Any]:
            gradient, cotangent = one(*xs)
            return jax.tree.map(jnp.add, total, wide(gradient)), cotangent

        gradient, cotangent = jax.lax.scan(add, zeros(p), (x, cotangent))
        return self._finished(gradient, p), cotangent

    def _finished(self, gradient: Any, params: Any) -> Any:
        """Divides the gradient of the scaled loss by its scale, in the dtypes of the parameters."""
        if self.config.loss_scale is not None:
            gradient = jax.tree.map(lambda g: g / self.state.scale.astype(g.dtype), wide(gradient))
        return narrowed(gradient, params)

    def _new_values(self, values: dict[int, Any], gradient: Any, finite: Array) -> dict[int, Any]:
        """New values of a layer's trained parameters and moments: the old ones where not all gradients are finite."""
        p = self.split.trained([values.get(i) for i in range(len(self.params))])
        m = jax.tree.unflatten(self.moments_tree, [values[i] for i in self.moment_numbers])
        updates, m = self.config.tx.update(gradient, m, p)
        new = dict(zip(self.split.numbers, jax.tree.leaves(_add(p, updates)), strict=True))
        new |= dict(zip(self.moment_numbers, jax.tree.leaves(m), strict=True))
        return _if(finite, new, {i: values[i] for i in new})

    def _likely(self, norm: Array) -> Array:
        """An estimate of the norm of all gradients: the larger one of the norm so far and the last step's norm."""
        return norm if self.config.clip_norm is None else jnp.maximum(norm, self.state.norm)

    def _clipped(self, gradient: Any, norm: Array) -> Any:
        limit = self.config.clip_norm
        if limit is None:
            return gradient
        return jax.tree.map(lambda g: jnp.where(norm < limit, g, g / norm.astype(g.dtype) * limit), gradient)

    def _put(self, x: Any) -> Any:
        if self.config.activations == "device":
            return x
        leaf = jax.typeof(x)
        nbytes = math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        return calls.store(x, binding=binding_of(self.config.store), site=self._site, ring_bytes=2 * nbytes)

    def _get(self, handle: Any, cotangent: Any) -> Any:
        if self.config.activations == "device":
            return handle
        after = [cotangent]
        like = jax.typeof(cotangent)
        return calls.fetch(handle, like, after, binding=binding_of(self.config.store), site=self._site)

    @functools.cached_property
    def _site(self) -> int:
        described = repr([(x.shape, str(x.dtype)) for x in self.leaves])
        return _SITE + sum(map(ord, described))

    def _check_update(self, trained: Any) -> None:
        """Raises where the update of one layer depends on other layers, or on what is outside of the stack."""
        outer = jax.tree.map(_shape, self.outer_split.trained(jax.tree.leaves(self.state.outer)))
        layer = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), trained, is_leaf=is_on_disk)
        if why := why_not_by_layers(self.config.tx, outer, layer):
            raise ValueError(f"stack_step: `tx` must update each layer by itself, got one that {why}")


def count(params: Sequence[Any]) -> int:
    """The number of layers. A row beyond an array's end would be its last one: JAX clamps indices.

    Raises:
        ValueError: the arrays have different numbers of layers, or none.
    """
    found = sorted({x.shape[0] if x.ndim else 0 for x in params})
    if len(found) != 1 or found[0] == 0:
        shapes = ", ".join(str(x.shape) for x in params)
        raise ValueError(
            f"stack_step: `layers` must be arrays [layers, ...] of equally many layers, at least one, got shapes "
            f"{shapes or 'of no array'}; stack the layers' parameters along a first axis"
        )
    return int(found[0])


def _each(fn: Callable[[Any], Any], x: Any, parts: int) -> Any:
    return fn(x) if parts == 1 else jax.lax.map(fn, x)


def _squares(tree: Any) -> Array:
    """The sum of squares of all elements, in float32."""
    return sum((jnp.sum(jnp.square(x.astype(jnp.float32))) for x in jax.tree.leaves(tree)), jnp.zeros(()))


def _is_finite(tree: Any) -> Array:
    return functools.reduce(jnp.logical_and, (jnp.isfinite(x).all() for x in jax.tree.leaves(tree)), jnp.array(True))


def _if(condition: Array, new: Any, old: Any) -> Any:
    return jax.tree.map(lambda new, old: jnp.where(condition, new, old), new, old)


def _next_scale(scale: Array, healthy: Array, finite: Array) -> tuple[Array, Array]:
    """The factor of the next step's loss, and the steps since it changed."""
    healthy = jnp.where(finite, healthy + 1, 0)
    grows = healthy >= SCALE_PERIOD
    factor = jnp.where(finite, jnp.where(grows, 2.0, 1.0), 0.5)
    return jnp.clip(scale * factor, 1.0, 2.0**60), jnp.where(grows, 0, healthy)


def _add(params: Any, updates: Any) -> Any:
    return jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)


def _shape(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _row(x: Any, k: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(x, k, keepdims=False)


def _with_row(x: Any, row: Any, k: Any) -> Any:
    return jax.lax.dynamic_update_index_in_dim(x, row, k, 0)
