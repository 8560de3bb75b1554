"""A jaxpr evaluated variable by variable, on demand. This cuts an optimizer's update into pieces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend import core

from dejax._jaxprs import part, variables

_DEVICE = jax.memory.Space.Device
ELEMENTWISE = frozenset(
    """abs add and atan2 cbrt ceil clamp convert_element_type copy cos cosh div eq erf exp exp2 expm1 floor ge gt
    integer_pow is_finite le log log1p logistic lt max min mul ne neg nextafter not or pow reduce_precision rem round
    rsqrt select_n sign sin sinh sqrt square stop_gradient sub tan tanh xor""".split()
)
"""Names of primitives that compute each element of a result from the same elements of the operands."""


class Demand:
    """Evaluates a jaxpr's variables when they are asked for, each once."""

    def __init__(self, closed: core.ClosedJaxpr) -> None:
        self.jaxpr = closed.jaxpr
        self._known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._far: dict[Any, Any] = {}
        self.producer = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def give(self, var: Any, value: Any, far: bool) -> None:
        """Sets an input. One that is far (on the host) is copied to the device on first use."""
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
                eqn = self.producer[at]
                missing = [v for v in eqn.invars if not isinstance(v, core.Literal) and v not in self._known]
                if missing:
                    stack.extend(missing)
                    continue
                out = _equation(self.jaxpr, eqn, self._read)
                self._known.update(zip(eqn.outvars, out, strict=True))
        return self._read(var)

    def _read(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self._known[var]


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same jaxpr with jitted functions inlined: Optax corrects the bias of all moments in one such function."""

    def run(jaxpr: core.Jaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known.update(zip(jaxpr.invars, args, strict=True))

        def read(var: Any) -> Any:
            return var.val if isinstance(var, core.Literal) else known[var]

        for eqn in jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit", "closed_call") and isinstance(inner, core.ClosedJaxpr):
                out = run(inner.jaxpr, inner.consts, *map(read, eqn.invars))
            else:
                out = _equation(jaxpr, eqn, read)
            known.update(zip(eqn.outvars, out, strict=True))
        return list(map(read, jaxpr.outvars))

    def flat(*args: Any) -> list[Any]:
        return run(closed.jaxpr, closed.consts, *args)

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in closed.jaxpr.invars
    ]
    return jax.make_jaxpr(flat)(*avals)


def _equation(jaxpr: core.Jaxpr, eqn: Any, read: Callable[[Any], Any]) -> list[Any]:
    """Evaluates one equation, of whatever kind."""
    inputs = variables(eqn.invars)
    return core.jaxpr_as_fun(part(jaxpr, [eqn], inputs, eqn.outvars))(*map(read, inputs))
