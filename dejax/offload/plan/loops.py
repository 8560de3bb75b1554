"""Layers of a stack that run in several ways, in loops that read their parameters in place.

`jax.lax.scan` over a part of the parameters takes a slice: XLA copies it, and copies the gradients of all parts again
to join them. Here each loop reads layer i of the whole and writes layer i of the whole gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dejax.offload.activations.residuals import Derivative, make_derivative

Body = Callable[[Any, Any], Any]


def scan_pieces(pieces: Sequence[tuple[Body, int]], params: Any, x: Any) -> Any:
    """Runs each body over its number of layers, one after the other.

    Args:
        pieces: (body, layers); body: (params of one layer, x) -> x of the same structure and types, floating-point.
        params: pytree of arrays [layers, ...].
        x: pytree of arrays.
    """
    return _Stack(pieces, params, x).run(params, x)


class _Stack:
    """The pieces of a stack as a function of flat lists of arrays, with a derivative."""

    def __init__(self, pieces: Sequence[tuple[Body, int]], params: Any, x: Any) -> None:
        weights, self._weights_tree = jax.tree.flatten(params)
        self._state_tree = jax.tree.structure(x)
        self._num_weights = len(weights)
        self._differentiable = [k for k, leaf in enumerate(weights) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
        bounds = np.cumsum([0, *[count for _, count in pieces]])
        self._pieces = [(body, range(bounds[i], bounds[i + 1])) for i, (body, _) in enumerate(pieces)]
        self._derivatives: list[Derivative] = []  # of the pieces: forward makes them, backward uses them

    def run(self, params: Any, x: Any) -> Any:
        stack = jax.custom_vjp(self._evaluate)
        stack.defvjp(self._forward, self._backward)
        return jax.tree.unflatten(self._state_tree, stack(jax.tree.leaves(params), jax.tree.leaves(x)))

    def _flat(self, body: Body) -> Callable[..., list[Any]]:
        def run(*leaves: Any) -> list[Any]:
            layer = jax.tree.unflatten(self._weights_tree, leaves[: self._num_weights])
            return jax.tree.leaves(body(layer, jax.tree.unflatten(self._state_tree, leaves[self._num_weights :])))

        return run

    def _evaluate(self, weights: list[Any], state: list[Any]) -> list[Any]:
        for body, layers in self._pieces:

            def step(state: list[Any], i: Any, body: Body = body) -> tuple[list[Any], None]:
                return self._flat(body)(*_layer(weights, i), *state), None

            state, _ = jax.lax.scan(step, state, jnp.arange(layers.start, layers.stop))
        return state

    def _forward(self, weights: list[Any], state: list[Any]) -> tuple[list[Any], Any]:
        self._derivatives.clear()
        kept = []
        for body, layers in self._pieces:
            avals = [jax.typeof(leaf) for leaf in (*_layer(weights, 0), *state)]
            derivative = make_derivative(self._flat(body), avals, [False] * len(avals), lambda _: False)
            self._derivatives.append(derivative)

            def step(state: list[Any], i: Any, derivative: Derivative = derivative) -> tuple[list[Any], list[Any]]:
                values = core.jaxpr_as_fun(derivative.jaxpr)(*_layer(weights, i), *state)
                computed = iter(values[derivative.num_outputs :])
                handed = []
                for source in derivative.sources:
                    if source.argument is None:
                        handed.append(next(computed))
                    elif source.argument >= self._num_weights:
                        handed.append(state[source.argument - self._num_weights])
                return values[: derivative.num_outputs], handed

            state, handed = jax.lax.scan(step, state, jnp.arange(layers.start, layers.stop))
            kept.append(handed)
        return state, (weights, kept)

    def _backward(self, residuals: Any, cotangents: list[Any]) -> tuple[list[Any], list[Any]]:
        weights, kept = residuals
        gradients = [jnp.zeros_like(weights[k]) for k in self._differentiable]
        for (_, layers), derivative, handed in reversed(list(zip(self._pieces, self._derivatives, kept, strict=True))):

            def step(carry: Any, xs: Any, derivative: Derivative = derivative) -> tuple[Any, None]:
                cotangents, gradients = carry
                i, handed = xs
                found = self._cotangents(derivative, _layer(weights, i), handed, cotangents)
                gradients = [
                    jax.lax.dynamic_update_index_in_dim(whole, found[k], i, 0)
                    for k, whole in zip(self._differentiable, gradients, strict=True)
                ]
                return (found[self._num_weights :], gradients), None

            (cotangents, gradients), _ = jax.lax.scan(
                step, (cotangents, gradients), (jnp.arange(layers.start, layers.stop), handed), reverse=True
            )
        whole: list[Any] = [np.zeros(leaf.shape, jax.dtypes.float0) for leaf in weights]
        for k, gradient in zip(self._differentiable, gradients, strict=True):
            whole[k] = gradient
        return whole, cotangents

    def _cotangents(
        self, derivative: Derivative, layer: list[Any], handed: list[Any], cotangents: list[Any]
    ) -> list[Any]:
        rest = iter(handed)
        values = [
            layer[source.argument] if source.argument is not None and source.argument < len(layer) else next(rest)
            for source in derivative.sources
        ]
        return list(derivative.rebuild(values)(cotangents))


def _layer(weights: Sequence[Any], i: Any) -> list[Any]:
    return [jax.lax.dynamic_index_in_dim(leaf, i, keepdims=False) for leaf in weights]
