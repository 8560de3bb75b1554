"""A clear error where a compiled program is differentiated in forward mode.

JAX's error for a `custom_vjp` names neither the program nor a remedy, and under `jit` it complains that a primitive has
no lowering. Each input goes through an identity whose derivative is a linear primitive. Reverse mode transposes that
primitive; forward mode evaluates it, which raises the error.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dejax.rgnn.compiler.frontend import ProgramError


class ForwardModeError(ProgramError, TypeError):
    """A compiled program was differentiated in forward mode, which it does not support."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ForwardModeError(
        "forward-mode derivatives (jax.jvp, jax.jacfwd, jax.hessian, jax.linearize) are not supported by a compiled "
        "rgnn.program, whose backward pass is generated; use program.with_options(disable=('backward',)), which "
        "JAX differentiates in both modes, or use reverse mode: jax.grad, jax.vjp, jax.jacrev"
    )


_input = Primitive("rgnn_input")
_input.def_impl(lambda x: x)
_input.def_abstract_eval(lambda x: x)
mlir.register_lowering(_input, lambda ctx, x: [x])
batching.defvectorized(_input)

_tangent = Primitive("rgnn_tangent")
_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda t: t)
mlir.register_lowering(_tangent, _refuse)
batching.primitive_batchers[_tangent] = _refuse  # as the tangents of a custom_vjp, which follow
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])


def _jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    return _input.bind(x), t if type(t) is ad.Zero else _tangent.bind(t)


ad.primitive_jvps[_input] = _jvp


def reverse_only(x: jax.Array) -> jax.Array:
    """The same array; differentiating it in forward mode raises `ForwardModeError`."""
    return _input.bind(x)
