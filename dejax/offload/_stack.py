"""Layers of a stack that are run in different ways, in loops that read their parameters where they are.

`jax.lax.scan` over a part of the parameters takes that part: XLA copies it, and puts the gradients of all parts
together in one more copy (on an H200 5.4 GiB for 4 GiB of parameters). Here each loop reads layer i of the whole and
writes layer i of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dejax.offload._residuals import Plan, make_plan

Body = Callable[[Any, Any], Any]


def scan_pieces(pieces: Sequence[tuple[Body, int]], params: Any, x: Any) -> Any:
    """Runs each body over its number of layers, one after the other.

    Args:
        pieces: (body, layers); body: (params of one layer, x) -> x of the same structure and types, floating-point.
        params: pytree of arrays [layers, ...].
        x: pytree of arrays.
    """
    weights, weights_tree = jax.tree.flatten(params)
    state, state_tree = jax.tree.flatten(x)
    num_weights = len(weights)
    # Those that have a gradient.
    real = [k for k, leaf in enumerate(weights) if jnp.issubdtype(leaf.dtype, jnp.inexact)]

    def flat(body: Body) -> Callable[..., list[Any]]:
        def run(*leaves: Any) -> list[Any]:
            layer = jax.tree.unflatten(weights_tree, leaves[:num_weights])
            return jax.tree.leaves(body(layer, jax.tree.unflatten(state_tree, leaves[num_weights:])))

        return run

    def layer(weights: Sequence[Any], i: Any) -> list[Any]:
        return [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in weights]

    begins = np.cumsum([0, *[count for _, count in pieces]])

    def indices(number: int) -> jax.Array:
        return jnp.arange(begins[number], begins[number + 1])

    @jax.custom_vjp
    def stack(weights: list[Any], state: list[Any]) -> list[Any]:
        for number, (body, _) in enumerate(pieces):

            def step(state: list[Any], i: Any, body: Body = body) -> tuple[list[Any], None]:
                return flat(body)(*layer(weights, i), *state), None

            state, _ = jax.lax.scan(step, state, indices(number))
        return state

    plans: list[Plan] = []  # forward makes them, backward uses them

    def forward(weights: list[Any], state: list[Any]) -> tuple[list[Any], Any]:
        plans.clear()
        kept = []
        for number, (body, _) in enumerate(pieces):
            avals = [*[jax.typeof(leaf) for leaf in layer(weights, 0)], *[jax.typeof(leaf) for leaf in state]]
            plan = make_plan(flat(body), avals, [False] * len(avals), lambda _: False)
            plans.append(plan)

            def step(state: list[Any], i: Any, plan: Plan = plan) -> tuple[list[Any], list[Any]]:
                values = core.jaxpr_as_fun(plan.jaxpr)(*layer(weights, i), *state)
                computed = iter(values[plan.num_outputs :])
                handed = []
                for source in plan.sources:
                    if source.argument is None:
                        handed.append(next(computed))
                    elif source.argument >= num_weights:
                        handed.append(state[source.argument - num_weights])
                return values[: plan.num_outputs], handed

            state, handed = jax.lax.scan(step, state, indices(number))
            kept.append(handed)
        return state, (weights, kept)

    def backward(residuals: Any, cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        weights, kept = residuals
        gradients = [jnp.zeros_like(weights[k]) for k in real]
        for number in reversed(range(len(pieces))):
            plan = plans[number]

            def step(carry: Any, xs: Any, plan: Plan = plan) -> tuple[Any, None]:
                cotangents, gradients = carry
                i, handed = xs
                own, rest = layer(weights, i), iter(handed)
                values = [
                    own[source.argument]
                    if source.argument is not None and source.argument < num_weights
                    else next(rest)
                    for source in plan.sources
                ]
                found = plan.rebuild(values)(cotangents)
                gradients = [
                    jax.lax.dynamic_update_index_in_dim(whole, found[k], i, 0)
                    for k, whole in zip(real, gradients, strict=True)
                ]
                return (list(found[num_weights:]), gradients), None

            (cotangents, gradients), _ = jax.lax.scan(
                step, (cotangents, gradients), (indices(number), kept[number]), reverse=True
            )
        whole: list[Any] = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in weights]
        for k, gradient in zip(real, gradients, strict=True):
            whole[k] = gradient
        return whole, cotangents

    stack.defvjp(forward, backward)
    return jax.tree.unflatten(state_tree, stack(weights, state))
