"""`region`: a function of which every layer is offloaded, without a word in the layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeVar

import jax
from jax.extend import core

from dejax import _compat
from dejax.offload._evaluation import _equation
from dejax.offload.activations.residuals import Residual
from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import MIN_BYTES, Inputs, OffloadOptions, Policy, wrap

F = TypeVar("F", bound=Callable[..., Any])


def region(
    fn: F,
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> F:
    """Offloads the residuals of a whole model or loss, so that no layer needs to be wrapped.

    It does for a function what `torch.autograd.graph.save_on_cpu` does for a block of code. `offload(fn)` treats `fn`
    as one layer: all its residuals leave together after forward, and come back together. `region(fn)` moves each
    residual by itself: it leaves as soon as it is computed, and comes back just before backward uses it. Each iteration
    of a `scan` is offloaded by itself, with the carried arrays as its inputs. A function under `jax.checkpoint` stores
    only its inputs, and backward recomputes the rest.

    Args:
        fn: as for `offload`.
        policy, store, inputs, min_bytes, static_argnums, static_argnames: as for `offload`.

    Raises:
        What `offload` raises.

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
    options = OffloadOptions.of(policy, store, inputs, min_bytes, on_demand=True)
    return wrap(fn, options, static_argnums, static_argnames, rewrite=_run)  # type: ignore[no-any-return]


def _run(closed: core.ClosedJaxpr, args: Sequence[Any], options: OffloadOptions) -> list[Any]:
    """Evaluates a jaxpr; bodies of its loops are offloaded, each by itself."""
    jaxpr = closed.jaxpr
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    known.update(zip(jaxpr.invars, args, strict=True))

    def read(var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else known[var]

    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            out = _scan(eqn, [read(var) for var in eqn.invars], options)
        elif eqn.primitive.name in ("jit", "pjit") and _has_scan(_compat.closed_jaxpr(eqn.params["jaxpr"]).jaxpr):
            out = _run(_compat.closed_jaxpr(eqn.params["jaxpr"]), [read(var) for var in eqn.invars], options)
        else:
            out = _equation(jaxpr, eqn, read)
        known.update(zip(eqn.outvars, out, strict=True))
    return [read(var) for var in jaxpr.outvars]


def _scan(eqn: Any, args: Sequence[Any], options: OffloadOptions) -> list[Any]:
    params = eqn.params
    num_consts, num_carry = _compat.scan_counts(eqn)
    consts, carry, xs = args[:num_consts], args[num_consts : num_consts + num_carry], args[num_consts + num_carry :]

    def body(*args: Any) -> list[Any]:
        return _run(_compat.closed_jaxpr(params["jaxpr"]), args, options)

    carried = tuple(range(num_consts, num_consts + num_carry))

    def policy(residual: Residual) -> bool:  # not `Names`, which looks for all names: a layer need not have all
        return options.policy(residual)

    one = wrap(body, OffloadOptions(policy, options.min_bytes, options.store, carried, on_demand=True))

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
