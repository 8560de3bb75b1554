"""Jaxprs that are evaluated in parts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend import core


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among atoms, each once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, core.Literal)))


def part(jaxpr: core.Jaxpr, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> core.ClosedJaxpr:
    """Some equations of a jaxpr, in order, from some of its variables to others."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    own = jaxpr.replace(
        constvars=[], invars=list(inputs), eqns=list(eqns), outvars=list(outputs), debug_info=debug_info
    )
    return core.ClosedJaxpr(own, ())
