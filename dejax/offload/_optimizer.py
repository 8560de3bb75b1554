"""Optimizer state in pinned host memory, brought to the device piece by piece for the update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.extend import core

from dejax import _native
from dejax._optional import optional
from dejax.offload._evaluation import Demand, inlined
from dejax.offload._pieces import PIECE_BYTES, stream_state

_HOST = jax.memory.Space.Host


def optimizer(
    tx: Any,
    *,
    min_bytes: int = 1 << 16,
    streams: bool | None = None,
    piece_bytes: int = PIECE_BYTES,
    ahead: int = 2,
) -> Any:
    """Keeps the state of an Optax transformation (Adam's moments) in pinned host memory between steps.

    The update is `tx`'s own, to rounding. It is traced once and evaluated parameter by parameter: the state of each is
    copied to the device before its update and back after it. Values that all parameters share (a count, a norm of all
    gradients) are computed once. The bus sets the least time: AdamW moves 8 bytes each way for each float32 parameter.

    A jitted step that donates this state must say where its arguments and results lie: jax 0.10 to 0.12 may otherwise
    pair a donated array on the host with a result on the device, which ends the process. A step that does not donate
    the state copies it first.

        where = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)

    Wrap gradient accumulation in it, `optimizer(optax.MultiSteps(tx, 4))`, not the other way round: `MultiSteps` would
    choose between state on the host and state on the device, which XLA refuses.

    Args:
        tx: an `optax.GradientTransformation` whose `update` can be traced.
        min_bytes: smaller arrays of the state stay on the device.
        streams: True: dejax copies, on one stream for each direction and ahead of need, in pieces of a parameter where
            its update is elementwise. Both directions of the bus are busy at once, and no array of state is on the
            device as a whole. For state on one device, and not under `jax.vmap`. False: XLA copies, parameter by
            parameter, one direction after the other; works with sharded state. None: True where a GPU is jax's only
            device and dejax's native extension is there.
        piece_bytes: with `streams`: size of a piece of one array. Device memory for staging, outside of XLA's pool:
            `2 * (ahead + 1)` pieces of each array of state that a parameter has (two for Adam).
        ahead: with `streams`: number of pieces that are copied to the device before they are needed.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the same `init` and `update`; its state is a pytree like `tx`'s,
        whose large arrays lie in memory of kind "pinned_host".

    Raises:
        TypeError: `tx` has no `init` and `update`.
        ValueError: `piece_bytes` or `ahead` is not positive.
        NativeExtensionError: with `streams=True`, the extension is missing.
    """
    with optional("optax", of="offload.optimizer"):
        import optax

    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"offload.optimizer: `tx` must be an Optax transformation, got {type(tx).__name__}")
    if piece_bytes < 1 or ahead < 1:
        raise ValueError(
            f"offload.optimizer: `piece_bytes` and `ahead` must be at least 1, got {piece_bytes} and {ahead}"
        )
    tx = optax.with_extra_args_support(tx)
    moved = _Moved(min_bytes)

    def init(params: Any) -> Any:
        return jax.tree.map(moved.put, tx.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        traced = _trace_update(tx, state, (updates, params, extra))
        far = [moved.is_large(x) for x in traced.state]
        # Outside of jit one operation follows the other: nothing could overlap.
        own = _streams(streams) and any(isinstance(x, jax.core.Tracer) for x in (*traced.state, *traced.others))
        streamed = [
            own and is_far and x.ndim > 0 and _is_on_host(x) for x, is_far in zip(traced.state, far, strict=True)
        ]
        evaluation = traced.demand(far, streamed)
        outputs: list[Any] = [None] * len(traced.jaxpr.outvars)
        if any(streamed):
            stream_state(evaluation, traced.state, streamed, traced.num_updates, outputs, piece_bytes, ahead)
        for i in _order(traced.jaxpr, traced.num_updates, far):
            if outputs[i] is None:
                value = evaluation.value(traced.jaxpr.outvars[i])
                at = i - traced.num_updates
                outputs[i] = moved.put(value) if at >= 0 and far[at] else value
        return jax.tree.unflatten(traced.out_tree, outputs)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclass(frozen=True, slots=True)
class _Moved:
    """Which arrays of the state lie on the host."""

    min_bytes: int

    def is_large(self, x: Any) -> bool:
        return hasattr(x, "dtype") and hasattr(x, "size") and x.size * np.dtype(x.dtype).itemsize >= self.min_bytes

    def put(self, x: Any) -> Any:
        return jax.device_put(x, _HOST) if self.is_large(x) else x


@dataclass(frozen=True, slots=True)
class _TracedUpdate:
    """An update as a jaxpr: state, other arguments -> updates, new state."""

    closed: core.ClosedJaxpr
    state: list[Any]
    others: list[Any]
    num_updates: int
    out_tree: Any

    @property
    def jaxpr(self) -> core.Jaxpr:
        return self.closed.jaxpr

    def demand(self, far: Sequence[bool], streamed: Sequence[bool]) -> Demand:
        """An evaluation of the update with every input but the streamed ones."""
        evaluation = Demand(self.closed)
        for var, leaf, is_far, is_streamed in zip(self.jaxpr.invars, self.state, far, streamed, strict=False):
            if not is_streamed:
                evaluation.give(var, leaf, is_far)
        for var, leaf in zip(self.jaxpr.invars[len(self.state) :], self.others, strict=True):
            evaluation.give(var, leaf, False)
        return evaluation


def _trace_update(tx: Any, state: Any, others: tuple[Any, Any, Any]) -> _TracedUpdate:
    state_leaves, state_tree = jax.tree.flatten(state)
    other_leaves, others_tree = jax.tree.flatten(others)

    def flat(*leaves: Any) -> tuple[Any, Any]:
        state = jax.tree.unflatten(state_tree, leaves[: len(state_leaves)])
        updates, params, extra = jax.tree.unflatten(others_tree, leaves[len(state_leaves) :])
        return tx.update(updates, state, params, **extra)

    def shape(x: Any) -> Any:
        aval = jax.typeof(x)
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

    closed, out = jax.make_jaxpr(flat, return_shape=True)(*map(shape, (*state_leaves, *other_leaves)))
    num_updates = len(jax.tree.leaves(out[0]))
    return _TracedUpdate(inlined(closed), state_leaves, other_leaves, num_updates, jax.tree.structure(out))


def _streams(wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    return jax.default_backend() == "gpu" and jax.device_count() == 1 and _native.unavailable_reason() is None


def _is_on_host(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) == _HOST


def _order(jaxpr: core.Jaxpr, num_updates: int, far: Sequence[bool]) -> list[int]:
    """An order of the outputs in which those that need the same arrays of the host follow one another."""
    on_host = [var for var, is_far in zip(jaxpr.invars, far, strict=False) if is_far]
    needs: dict[Any, frozenset[int]] = {var: frozenset((i,)) for i, var in enumerate(on_host)}
    for eqn in jaxpr.eqns:
        found = frozenset().union(*(needs.get(v, frozenset()) for v in eqn.invars if not isinstance(v, core.Literal)))
        needs.update(dict.fromkeys(eqn.outvars, found))
    group: dict[int, int] = {}
    outs = [frozenset() if isinstance(v, core.Literal) else needs.get(v, frozenset()) for v in jaxpr.outvars]
    for i in range(num_updates):
        for need in outs[i]:
            group.setdefault(need, i)

    def place(i: int) -> tuple[int, int]:
        if i < num_updates:
            return (i, 0)
        return (min((group.get(need, num_updates) for need in outs[i]), default=num_updates), 1)

    return sorted(range(len(outs)), key=place)
