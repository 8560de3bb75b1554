"""`region`: a function of which every layer is offloaded, without a word in the layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

import jax
from jax.extend import core

from dejax import _compat
from dejax.offload._evaluation import JaxprValues
from dejax.offload.activations.options import OffloadKeywords, OffloadOptions
from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.transform import wrap

F = TypeVar("F", bound=Callable[..., Any])


def region(fn: F, **options: Unpack[OffloadKeywords]) -> F:
    """Offloads the activations of a whole model or loss function, so that no layer needs to be wrapped.

    `region` is to a function what `torch.autograd.graph.save_on_cpu` is to a block of code. Each residual (a tensor
    that the backward pass needs) leaves the device as soon as it is computed, and comes back just before the backward
    pass uses it. In contrast, `offload(fn)` treats `fn` as one layer, whose residuals leave and come back together.
    Each iteration of a `scan` is offloaded by itself, with the carried arrays as its inputs. A function under
    `jax.checkpoint` stores only its inputs, and the backward pass recomputes the rest.

    Args:
        fn: a function from pytrees of arrays to a pytree of arrays, as for `offload`.
        options: the keyword arguments of `offload`: policy, store, inputs, min_bytes, static_argnums, static_argnames.

    The errors are those of `offload`.

    >>> import jax, jax.numpy as jnp
    >>> from dejax.offload import ActivationStore, region
    >>> def loss(ws, x):
    ...     for w in ws:
    ...         x = jnp.sin(x @ w)
    ...     return x.sum()
    >>> with ActivationStore() as store:
    ...     gradient = jax.jit(jax.grad(region(loss, min_bytes=1)))([jnp.eye(3)] * 2, jnp.ones((2, 3)))
    ...     print(store.stats().stored_count)
    3
    """
    return wrap(fn, OffloadOptions(**options, on_demand=True, rewrite=_run))  # type: ignore[no-any-return]


def _run(closed: core.ClosedJaxpr, args: Sequence[Any], options: OffloadOptions) -> list[Any]:
    """Evaluates a jaxpr; bodies of its loops are offloaded, each by itself."""
    values = JaxprValues(closed, args)
    for eqn in closed.jaxpr.eqns:
        if eqn.primitive.name == "scan":
            values.set(eqn, _scan(eqn, values.read_all(eqn.invars), options))
        elif eqn.primitive.name in ("jit", "pjit") and _has_scan(_compat.closed_jaxpr(eqn.params["jaxpr"]).jaxpr):
            inner = _compat.closed_jaxpr(eqn.params["jaxpr"])
            values.set(eqn, _run(inner, values.read_all(eqn.invars), options))
        else:
            values.evaluate(eqn)
    return values.read_all(closed.jaxpr.outvars)


def _scan(eqn: Any, args: Sequence[Any], options: OffloadOptions) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(eqn)
    consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]

    def body(*args: Any) -> list[Any]:
        return _run(_compat.closed_jaxpr(params["jaxpr"]), args, options)

    def policy(residual: Residual) -> bool:  # not `Names`, which looks for all names: a layer need not have all
        return options.policy(residual)  # type: ignore[no-any-return, operator, misc]

    carried = tuple(range(num_consts, num_consts + num_carry))
    one = wrap(body, OffloadOptions(policy, options.store, carried, options.min_bytes, on_demand=True))

    def step(carry: Sequence[Any], xs: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        out = one(*consts, *carry, *xs)
        return out[:num_carry], out[num_carry:]

    carry, ys = jax.lax.scan(
        step, list(carry), list(xs), length=params["length"], reverse=params["reverse"], unroll=params["unroll"]
    )
    return [*carry, *ys]


def _has_scan(jaxpr: Any) -> bool:
    return any(
        eqn.primitive.name == "scan"
        or (eqn.primitive.name in ("jit", "pjit") and _has_scan(_compat.closed_jaxpr(eqn.params["jaxpr"]).jaxpr))
        for eqn in jaxpr.eqns
    )
