"""Forward mode through `offload` raises an error that names the remedy, not JAX's about `custom_vjp`.

JAX implements reverse mode as forward mode that is transposed before it runs. So the tangents of an offloaded
function's arguments go through a linear operator that can be transposed, but raises when it is evaluated.
"""

from __future__ import annotations

from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.extend import core
from jax.interpreters import ad, batching, mlir

_tangent = core.Primitive("offload_tangent")


FORWARD_MODE = (
    "offload: forward mode was asked for (jax.jvp, jacfwd, hessian, linearize, also through a while_loop), but stored "
    "tensors come back in reverse mode only. Use the function without offload there, or take jax.checkpoint; for "
    "reverse mode through a loop use scan, or fori_loop with fixed bounds"
)


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotImplementedError(FORWARD_MODE)


_tangent.def_impl(_refuse)
_tangent.def_abstract_eval(lambda aval: aval)
mlir.register_lowering(_tangent, _refuse)
ad.deflinear2(_tangent, lambda cotangent, _: [cotangent])
batching.primitive_batchers[_tangent] = lambda args, dims: (_tangent.bind(*args), dims[0])


@jax.custom_jvp
def _marked(x: Any) -> Any:
    return x


@_marked.defjvp
def _marked_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    return primals[0], _tangent.bind(tangents[0])


def refuse_forward_mode(x: Any) -> Any:
    """`x`, with a tangent that can be transposed but not evaluated."""
    return _marked(x) if jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact) else x
