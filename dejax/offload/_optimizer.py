"""Optimizer state in pinned host memory, brought to the device piece by piece for the update."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.extend import core

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def optimizer(tx: Any, *, min_bytes: int = 1 << 16) -> Any:
    """Keeps the state of an Optax transformation (Adam's moments) in pinned host memory between steps.

    The update is `tx`'s own, bit for bit. It is traced once and evaluated in pieces: one parameter after the other, the
    state that this parameter needs copied to the device before it, and copied back after it. What all parameters share
    (a count, a norm of all gradients) is computed once. Copies are XLA's, which run beside what does not need them.

    A jitted step that donates this state must say where its arguments and results lie: jax 0.10 to 0.12 may otherwise
    pair a donated array on the host with a result on the device, and ends the process.

        where = jax.tree.map(lambda x: x.sharding, (params, state))
        step = jax.jit(step, donate_argnums=(0, 1), in_shardings=where, out_shardings=where)

    Args:
        tx: an `optax.GradientTransformation` whose `update` can be traced.
        min_bytes: smaller arrays of the state stay on the device.

    Returns:
        An `optax.GradientTransformationExtraArgs` with the same `init` and `update`; its state is a pytree like `tx`'s,
        whose large arrays lie in memory of kind "pinned_host".

    Raises:
        TypeError: `tx` has no `init` and `update`.
    """
    import optax

    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"offload.optimizer: `tx` is an Optax transformation; {type(tx).__name__} was given")
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
        on_host = [moves(x) for x in state_leaves]

        def flat(*leaves: Any) -> tuple[Any, Any]:
            state = jax.tree.unflatten(state_tree, leaves[: len(state_leaves)])
            updates, params, extra = jax.tree.unflatten(others_tree, leaves[len(state_leaves) :])
            return tx.update(updates, state, params, **extra)

        def shape(x: Any) -> Any:
            aval = jax.typeof(x)
            return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))

        closed, out_shape = jax.make_jaxpr(flat, return_shape=True)(*map(shape, (*state_leaves, *others)))
        num_updates = len(jax.tree.leaves(out_shape[0]))
        evaluation = _Demand(closed)
        for var, leaf, far in zip(closed.jaxpr.invars, state_leaves, on_host, strict=False):
            evaluation.give(var, leaf, far)
        for var, leaf in zip(closed.jaxpr.invars[len(state_leaves) :], others, strict=True):
            evaluation.give(var, leaf, False)

        outputs: list[Any] = [None] * len(closed.jaxpr.outvars)
        order = _pieces(
            closed.jaxpr, num_updates, [v for v, far in zip(closed.jaxpr.invars, on_host, strict=False) if far]
        )
        for i in order:
            value = evaluation.value(closed.jaxpr.outvars[i])
            outputs[i] = put(value) if i >= num_updates and on_host[i - num_updates] else value
        return jax.tree.unflatten(jax.tree.structure(out_shape), outputs)

    return optax.GradientTransformationExtraArgs(init, update)


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


class _Demand:
    """Evaluates a jaxpr's variables when they are asked for, each once."""

    def __init__(self, closed: core.ClosedJaxpr) -> None:
        self._known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._jaxpr, self._debug_info = closed.jaxpr, closed.jaxpr.debug_info.with_unknown_names()
        self._far: dict[Any, Any] = {}
        self._producer = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def give(self, var: Any, value: Any, far: bool) -> None:
        """An input. One that is far, on the host, comes to the device when it is first asked for."""
        (self._far if far else self._known)[var] = value

    def value(self, var: Any) -> Any:
        stack = [var]
        while stack:
            at = stack[-1]
            if isinstance(at, core.Literal) or at in self._known:
                stack.pop()
            elif at in self._far:
                self._known[at] = jax.device_put(self._far[at], _DEVICE)
                stack.pop()
            else:
                eqn = self._producer[at]
                missing = [v for v in eqn.invars if not isinstance(v, core.Literal) and v not in self._known]
                if missing:
                    stack.extend(missing)
                    continue
                inputs = list(dict.fromkeys(v for v in eqn.invars if not isinstance(v, core.Literal)))
                one = self._jaxpr.replace(
                    constvars=[], invars=inputs, eqns=[eqn], outvars=eqn.outvars, debug_info=self._debug_info
                )
                out = core.jaxpr_as_fun(core.ClosedJaxpr(one, ()))(*map(self._read, inputs))
                self._known.update(zip(eqn.outvars, out, strict=True))
        return self._read(var)

    def _read(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self._known[var]
