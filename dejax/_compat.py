"""What differs between the supported versions of jax (>= 0.10.2, < 0.13), in one place."""

from typing import Any

import jax
import jax.extend.backend
import jax.extend.core
from jax._src import effects as jax_effects
from jax._src import xla_bridge

JAX_VERSION: tuple[int, ...] = jax.__version_info__
"""jax's version as integers, for comparisons such as `JAX_VERSION >= (0, 11)`."""

SUPPORTED_JAX = ((0, 10, 2), (0, 13))
"""The first supported version of jax, and the first one beyond the supported range."""


def computed_once(x: jax.Array, true: jax.Array) -> jax.Array:
    """`x`, which XLA does not compute again, with other roundings, for another reader.

    XLA of jax 0.10 computes across a barrier for the CPU, but not across a branch that it cannot decide: `true` is a
    scalar that is true, of which the compiler does not know it.
    """
    x = jax.lax.optimization_barrier(x)
    return x if JAX_VERSION >= (0, 11) else jax.lax.cond(true, lambda x: x, jax.numpy.negative, x)


def unsupported_jax() -> str | None:
    """Why the installed jax is outside the supported range; None where it is inside."""
    first, beyond = SUPPORTED_JAX
    if first <= JAX_VERSION < beyond:
        return None
    wanted = f">={'.'.join(map(str, first))},<{'.'.join(map(str, beyond))}"
    return f"jax {jax.__version__} is installed, dejax supports {wanted}: pip install 'jax{wanted}'"


def backends() -> dict[str, Any]:
    """jax's clients by platform; makes them where they are not made yet."""
    return jax.extend.backend.backends()


def backends_are_initialized() -> bool:
    """Whether jax has made its clients; asking does not make them."""
    return bool(getattr(xla_bridge, "backends_are_initialized", lambda: True)())


def staging_trace() -> Any:
    """The innermost trace that makes a jaxpr of what runs now (`jit`, the body of a loop), or None: it runs at once."""
    trace = getattr(jax.extend.core.get_opaque_trace_state(), "_trace_ref", lambda: None)()
    while trace is not None and not hasattr(trace, "frame"):
        trace = getattr(trace, "parent_trace", None)
    return trace


def without_consts(closed: Any) -> Any:
    """A closed jaxpr without values, whose constants are its first arguments."""
    jaxpr = closed.jaxpr
    bare = jaxpr.replace(
        constvars=[], invars=[*jaxpr.constvars, *jaxpr.invars], debug_info=jaxpr.debug_info.with_unknown_names()
    )
    return jax.extend.core.ClosedJaxpr(bare, [])


def effects_refused_under_derivatives(effects: Any) -> list[Any]:
    """Those that `custom_vjp` does not take."""
    allowed = getattr(jax_effects, "custom_derivatives_allowed_effects", None)
    return [] if allowed is None else list(allowed.filter_not_in(effects))
