"""Jaxprs that are evaluated equation by equation, in order or on demand."""

from __future__ import annotations

from collections.abc import Sequence
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


def is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    """Whether an equation computes each element of its one result, of this shape, from those elements and scalars."""
    if eqn.primitive.name not in ELEMENTWISE or len(eqn.outvars) != 1 or eqn.outvars[0].aval.shape != shape:
        return False
    return all(v.aval.shape in (shape, ()) for v in eqn.invars)


class JaxprValues:
    """The values of those variables of a jaxpr that are known so far.

    Args:
        closed: the jaxpr.
        args: the values of its arguments. None: they are given one by one.
    """

    def __init__(self, closed: core.ClosedJaxpr, args: Sequence[Any] | None = None) -> None:
        self.jaxpr = closed.jaxpr
        self.known: dict[Any, Any] = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        if args is not None:
            self.known.update(zip(closed.jaxpr.invars, args, strict=True))

    def read(self, var: Any) -> Any:
        return var.val if isinstance(var, core.Literal) else self.known[var]

    def read_all(self, atoms: Sequence[Any]) -> list[Any]:
        return list(map(self.read, atoms))

    def set(self, eqn: Any, results: Sequence[Any]) -> None:
        """Sets the results of an equation."""
        self.known.update(zip(eqn.outvars, results, strict=True))

    def evaluate(self, eqn: Any) -> None:
        """Evaluates one equation, of whatever kind, whose operands are known."""
        inputs = variables(eqn.invars)
        self.set(eqn, core.jaxpr_as_fun(part(self.jaxpr, [eqn], inputs, eqn.outvars))(*self.read_all(inputs)))


class Demand(JaxprValues):
    """Evaluates variables of a jaxpr on demand, each at most once."""

    def __init__(self, closed: core.ClosedJaxpr) -> None:
        super().__init__(closed)
        self._on_host: dict[Any, Any] = {}
        self.producer = {var: eqn for eqn in closed.jaxpr.eqns for var in eqn.outvars}

    def give(self, var: Any, value: Any, on_host: bool) -> None:
        """Sets an input. One in host memory is copied to the device on first use."""
        (self._on_host if on_host else self.known)[var] = value

    def value(self, var: Any) -> Any:
        stack = [var]
        while stack:
            at = stack[-1]
            if isinstance(at, core.Literal) or at in self.known:
                stack.pop()
            elif at in self._on_host:
                self.known[at] = jax.device_put(self._on_host[at], _DEVICE)
            elif missing := [v for v in variables(self.producer[at].invars) if v not in self.known]:
                stack.extend(missing)
            else:
                self.evaluate(self.producer[at])
        return self.read(var)


def inlined(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """The same jaxpr with jitted functions inlined: Optax corrects the bias of all moments in one such function."""

    def run(closed: core.ClosedJaxpr, args: Sequence[Any]) -> list[Any]:
        values = JaxprValues(closed, args)
        for eqn in closed.jaxpr.eqns:
            inner = eqn.params.get("jaxpr")
            if eqn.primitive.name in ("jit", "pjit", "closed_call") and isinstance(inner, core.ClosedJaxpr):
                values.set(eqn, run(inner, values.read_all(eqn.invars)))
            else:
                values.evaluate(eqn)
        return values.read_all(closed.jaxpr.outvars)

    avals = [
        jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, weak_type=getattr(v.aval, "weak_type", False))
        for v in closed.jaxpr.invars
    ]
    return jax.make_jaxpr(lambda *args: run(closed, args))(*avals)
