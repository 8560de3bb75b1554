"""Forward and backward of a function that is more than one layer: tensors are stored and fetched one by one.

The equations are evaluated in order. A tensor is stored after the equation that computes it, and the next large
equation waits for the copy. It is fetched before the first equation of backward that uses it, which waits for the value
that backward computed last. Otherwise XLA could keep all tensors until forward ends, or fetch all as backward begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from dejax._jaxprs import variables
from dejax.offload._evaluation import JaxprValues
from dejax.offload.activations.calls import has_nan
from dejax.offload.activations.residuals import Derivative

# Elementwise equations do not wait: XLA fuses them.
_LARGE = frozenset(
    ("dot_general", "conv_general_dilated", "scan", "while", "cond", "jit", "pjit", "remat2", "checkpoint")
    + ("custom_vjp_call", "custom_jvp_call", "shard_map", "pallas_call", "dejax_kernel_call", "ffi_call")
)


def forward(
    derivative: Derivative, operands: Sequence[Any], put: Callable[[Array, int], Array], handles: dict[int, Any]
) -> list[Any]:
    """Evaluates `derivative.jaxpr`; adds the handles of stored tensors, by source, to `handles`."""
    values = JaxprValues(derivative.jaxpr, operands)
    known = values.known
    number_of = {s.var: i for i, s in enumerate(derivative.sources) if s.stored and s.argument is None}
    fresh: list[int] = []  # stored since the last large equation
    for eqn in values.jaxpr.eqns:
        waiting = next((var for var in variables(eqn.invars) if var.aval.ndim > 0), None)
        if fresh and waiting is not None and eqn.primitive.name in _LARGE:
            before = known[waiting]
            known[waiting], copied = jax.lax.optimization_barrier((before, [handles[i] for i in fresh]))
            handles.update(zip(fresh, copied, strict=True))
            fresh.clear()
            values.evaluate(eqn)
            known[waiting] = before
        else:
            values.evaluate(eqn)
        for var in eqn.outvars:
            if var in number_of:
                number = number_of[var]
                handles[number] = put(known[var], number)
                fresh.append(number)
    return values.read_all(values.jaxpr.outvars)


def backward(
    derivative: Derivative,
    handed: Sequence[Any],
    cotangents: Sequence[Any],
    fetch: Callable[[int, Array, Sequence[Array]], Array],
    guard: Callable[[Array, Sequence[Array]], Array],
) -> tuple[Any, ...]:
    """The cotangents of the operands. Sources that are stored are fetched at their first use."""
    arrays = [i for i, ct in enumerate(cotangents) if is_array(ct)]

    def run(values: list[Any], given: list[Any]) -> list[Any]:
        every = list(cotangents)
        for i, ct in zip(arrays, given, strict=True):
            every[i] = ct
        found.extend(derivative.rebuild(values)(every))
        return [ct for ct in found if is_array(ct)]

    found: list[Any] = []  # as traced
    avals = [source.var.aval for source in derivative.sources]
    closed = jax.make_jaxpr(run)(avals, [jax.typeof(cotangents[i]) for i in arrays])
    computed = JaxprValues(closed, [*handed, *(cotangents[i] for i in arrays)])
    jaxpr, known = closed.jaxpr, computed.known
    sources, given = jaxpr.invars[: len(avals)], jaxpr.invars[len(avals) :]
    away = {var: i for i, (var, source) in enumerate(zip(sources, derivative.sources, strict=True)) if source.stored}
    # Values that depend on a cotangent: they are there once backward has come so far.
    of_backward = set(given)
    last = given[0] if arrays else None

    def bring(atoms: Sequence[Any]) -> None:
        """Fetches those of the tensors that are stored; the fetch waits for the last value that backward computed."""
        for var in variables(atoms):
            if var not in away:
                continue
            number = away.pop(var)
            known[var] = fetch(number, handed[number], [] if last is None else [known[last]])
            if last is not None and not has_nan(derivative.sources[number].info.dtype):
                known[last] = guard(known[last], [known[var]])

    for eqn in jaxpr.eqns:
        bring(eqn.invars)
        computed.evaluate(eqn)
        if any(var in of_backward for var in variables(eqn.invars)):
            of_backward.update(eqn.outvars)
            last = next((v for v in eqn.outvars if jax.numpy.issubdtype(v.aval.dtype, jax.numpy.inexact)), last)
    bring(jaxpr.outvars)
    results = iter(computed.read_all(jaxpr.outvars))
    # A cotangent without values may be a tracer of what was traced above: of random keys that a scan takes apart.
    return tuple(next(results) if is_array(ct) else _without_values(ct) for ct in found)


def _without_values(ct: Any) -> Any:
    return np.zeros(ct.shape, jax.dtypes.float0) if hasattr(ct, "dtype") else ct


def is_array(ct: Any) -> bool:
    """Whether a cotangent is one of a floating-point value."""
    return getattr(ct, "dtype", jax.dtypes.float0) != jax.dtypes.float0
