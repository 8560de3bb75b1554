"""What rounding does to a function: each operation of it is rounded at random (Monte Carlo arithmetic, Parker 1997).

And programs in float64 with the rewrites for products that are rounded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from dejax.rgnn.compiler import execute

# Operations that move or compare elements are exact.
_ROUNDED = frozenset(
    "add add_any sub mul div exp exp2 expm1 log log1p tanh logistic sqrt rsqrt cbrt pow integer_pow sin cos erf atan2 "
    "square dot_general ragged_dot_general reduce_sum cumsum scatter-add segment_sum".split()
)


DRAWS = 4  # one may be lucky: where a single number decides, one in ten errs by less than a tenth of the largest


def rounded(function: Callable[..., Any], relative: float) -> Callable[..., Any]:
    """`DRAWS` runs of `function` with a random relative error in each result of an operation that rounds.

    Args:
      function: of arrays, traceable. Operations inside of loops and conditionals are not disturbed.
      relative: the largest error, as a share of each element.

    Returns:
      A function of the same arguments, whose results have one more axis, [DRAWS, ...], at the beginning. The errors are
      constants, the same each time: random numbers made by XLA would take most of the time to compile.
    """

    def disturbed(*args: Any) -> Any:
        jaxpr, shape = jax.make_jaxpr(function, return_shape=True)(*args)
        rng, leaves = np.random.default_rng(0), jax.tree.leaves(args)

        def one(run: Any) -> list[Any]:
            return _evaluate(jaxpr.jaxpr, jaxpr.consts, leaves, functools.partial(_disturb, rng, relative, run))

        return jax.tree.unflatten(jax.tree.structure(shape), jax.lax.map(one, jnp.arange(DRAWS)))

    return disturbed


def _evaluate(jaxpr: Jaxpr, consts: list[Any], args: list[Any], disturb: Callable[[Any], Any]) -> list[Any]:
    values: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for equation in jaxpr.eqns:
        operands = [read(atom) for atom in equation.invars]
        inner = next((v for v in equation.params.values() if isinstance(v, ClosedJaxpr)), None)
        if inner is not None and len(inner.jaxpr.invars) == len(operands):
            results = _evaluate(inner.jaxpr, inner.consts, operands, disturb)
        else:
            found = equation.primitive.bind(*operands, **equation.params)
            results = list(found) if equation.primitive.multiple_results else [found]
            if equation.primitive.name in _ROUNDED:
                results = [disturb(x) for x in results]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _disturb(rng: np.random.Generator, relative: float, run: Any, x: Any) -> Any:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    return x * jnp.asarray(1 + relative * rng.uniform(-1, 1, (DRAWS, *x.shape)), x.dtype)[run]


@contextmanager
def as_with_rounded_products() -> Iterator[None]:
    """XLA runs what kernels would run with products of 11 bits, so that float64 checks the rewrites for these."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(execute.CompileTask, "exact", property(lambda task: False))
        _forget()
        try:
            yield
        finally:
            _forget()


def _forget() -> None:
    """A task stands for its program in all of these; the same task has another one here."""
    for function in (execute.optimised, execute.inference_kernels, execute.training_cut):
        function.cache_clear()
    execute.forget_compiled()
