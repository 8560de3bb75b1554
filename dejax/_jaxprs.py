"""Jaxprs that are evaluated in parts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend import core


def variables(atoms: Sequence[Any]) -> list[Any]:
    """The variables among atoms, each once."""
    return list(dict.fromkeys(atom for atom in atoms if not isinstance(atom, core.Literal)))


def nested(eqn: Any) -> Iterator[core.Jaxpr]:
    """The jaxprs among the parameters of an equation: bodies of loops, branches, jitted functions."""
    for value in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(value, "eqns"):
            yield getattr(value, "jaxpr", value)


def part(jaxpr: core.Jaxpr, eqns: Sequence[Any], inputs: Sequence[Any], outputs: Sequence[Any]) -> core.ClosedJaxpr:
    """Some equations of a jaxpr, in order, from some of its variables to others."""
    debug_info = jaxpr.debug_info.with_unknown_names()
    own = jaxpr.replace(
        constvars=[], invars=list(inputs), eqns=list(eqns), outvars=list(outputs), debug_info=debug_info
    )
    return core.ClosedJaxpr(own, ())
