"""Jaxprs that are evaluated in parts, and functions that are traced as one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
from jax.extend import core

_Function = TypeVar("_Function", bound=Callable[..., Any])


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


def traced_as_one(function: _Function) -> _Function:
    """A function of dejax that runs no code of the caller: inside of `jax.jit` it calls no jitted functions.

    Functions of `jax.numpy` and operators of arrays are jitted: jax traces, keeps and lowers each for new shapes, which
    takes longer than its two or three operations. Here they run as Python. Its loops are those of `loop`.
    """

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        if not any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves((args, keywords))):
            return function(*args, **keywords)
        with jax.disable_jit():
            return function(*args, **keywords)

    return run  # type: ignore[return-value]


def loop(lower: Any, upper: Any, step: Callable[[Any, Any], Any], init: Any) -> Any:
    """`jax.lax.fori_loop`, which would not stay a loop where `jit` is disabled; its step is `traced_as_one`."""
    with jax.disable_jit(False):
        return jax.lax.fori_loop(lower, upper, traced_as_one(step), init)
