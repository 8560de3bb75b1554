"""Optimizer state in pinned host memory, brought to the device piece by piece for the update."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core

from dejax import _native
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

    The update is `tx`'s own, to rounding. It is traced once and evaluated in pieces, one parameter after the other: the
    state that it needs is copied to the device before it and copied back after it. What all parameters share
    (a count, a norm of all gradients) is computed once. The bus sets the least time: AdamW on N parameters in float32
    moves 8 N bytes each way.

    A jitted step that donates this state must say where its arguments and results lie: jax 0.10 to 0.12 may otherwise
    pair a donated array on the host with a result on the device, and ends the process. One that does not donate it
    copies it first.

        where = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)

    It goes around what accumulates gradients, `optimizer(optax.MultiSteps(tx, 4))`: inside, `MultiSteps` would choose
    between state on the host and state on the device, which XLA refuses.

    Args:
        tx: an `optax.GradientTransformation` whose `update` can be traced.
        min_bytes: smaller arrays of the state stay on the device.
        streams: True: dejax copies, on a stream for each direction and ahead of need, in pieces of a parameter where
            its update is elementwise: both directions of the bus are busy at once, and no array of state is on the
            device as a whole. For state on one device, and not under `jax.vmap`. False: XLA copies, parameter by
            parameter, one direction after the other; works with sharded state. None: True where a GPU is jax's only
            device and dejax's native extension is there.
        piece_bytes: with `streams`: of one array that travels at a time. Device memory for staging: `2 * (ahead + 1)`
            pieces of each array of state that a parameter has (of two for Adam), outside of XLA's pool.
        ahead: with `streams`: pieces that are brought before the one that is worked on.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the same `init` and `update`; its state is a pytree like `tx`'s,
        whose large arrays lie in memory of kind "pinned_host".

    Raises:
        TypeError: `tx` has no `init` and `update`.
        ValueError: `piece_bytes` or `ahead` is not positive.
        NativeExtensionError: with `streams=True`, the extension is not there.
    """
    import optax

    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"offload.optimizer: `tx` is an Optax transformation; {type(tx).__name__} was given")
    if piece_bytes < 1 or ahead < 1:
        raise ValueError(
            f"offload.optimizer: `piece_bytes` and `ahead` are at least 1; {piece_bytes} and {ahead} were given"
        )
    tx = optax.with_extra_args_support(tx)

    def moves(x: Any) -> bool:
        return hasattr(x, "dtype") and hasattr(x, "size") and x.size * np.dtype(x.dtype).itemsize >= min_bytes

    def put(x: Any) -> Any:
        return jax.device_put(x, _HOST) if moves(x) else x

    def init(params: Any) -> Any:
        return jax.tree.map(put, tx.init(params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        state_leaves, state_tree = jax.tree.flatten(state)
        others, others_tree = jax.tree.flatten((updates, params, extra))
        # Outside of jit one operation follows the other: nothing could overlap.
        own = _streams(streams) and any(isinstance(x, jax.core.Tracer) for x in (*state_leaves, *others))
        on_host = [moves(x) for x in state_leaves]

        def flat(*leaves: Any) -> tuple[Any, Any]:
            state = jax.tree.unflatten(state_tree, leaves[: len(state_leaves)])
            updates, params, extra = jax.tree.unflatten(others_tree, leaves[len(state_leaves) :])
            return tx.update(updates, state, params, **extra)

        def shape(x: Any) -> Any:
            aval = jax.typeof(x)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

        closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(*map(shape, (*state_leaves, *others)))
        closed = inlined(closed)
        jaxpr = closed.jaxpr
        num_updates = len(jax.tree.leaves(out_shape[0]))
        streamed = [own and far and x.ndim > 0 and _is_on_host(x) for x, far in zip(state_leaves, on_host, strict=True)]
        evaluation = Demand(closed)
        for var, leaf, far, own_stream in zip(jaxpr.invars, state_leaves, on_host, streamed, strict=False):
            if not own_stream:
                evaluation.give(var, leaf, far)
        for var, leaf in zip(jaxpr.invars[len(state_leaves) :], others, strict=True):
            evaluation.give(var, leaf, False)
        outputs: list[Any] = [None] * len(jaxpr.outvars)
        if any(streamed):
            stream_state(evaluation, state_leaves, streamed, num_updates, outputs, piece_bytes, ahead)
        order = _pieces(jaxpr, num_updates, [v for v, far in zip(jaxpr.invars, on_host, strict=False) if far])
        for i in order:
            if outputs[i] is None:
                value = evaluation.value(jaxpr.outvars[i])
                outputs[i] = put(value) if i >= num_updates and on_host[i - num_updates] else value
        return jax.tree.unflatten(jax.tree.structure(out_shape), outputs)

    return optax.GradientTransformationExtraArgs(init, update)


def _streams(wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    # Two GiB of parameters under AdamW on an H200: 89.8 ms and 0.25 GiB of temporaries, by XLA's copies 154.6 and 4.25.
    return jax.default_backend() == "gpu" and jax.device_count() == 1 and _native.unavailable_reason() is None


def _is_on_host(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) == _HOST


def _pieces(jaxpr: core.Jaxpr, num_updates: int, large: list[Any]) -> list[int]:
    """An order of the outputs in which those that need the same large inputs follow one another."""
    number = {var: i for i, var in enumerate(large)}
    needs: dict[Any, frozenset[int]] = {var: frozenset((i,)) for var, i in number.items()}
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
