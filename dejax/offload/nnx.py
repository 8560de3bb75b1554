"""`offload` for Flax nnx: one line around a module's call.

self.block = Block(...)
...
x = offload(Block.__call__)(self.block, x)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dejax._optional import optional
from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import MIN_BYTES, Inputs, OffloadOptions, Policy, wrap

with optional("flax", of="dejax.offload.nnx"):
    from flax import nnx


def offload(
    fn: Callable[..., Any],
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """`dejax.offload.offload` for a function whose first argument is an nnx module, as `Block.__call__` has.

    Parameters stay on the device, and the call must not change them. Other state that it changes (batch statistics,
    dropout's counts) is updated in the module. Works inside `nnx.jit`, `nnx.grad`, `nnx.scan` and `nnx.vmap`.

    Args:
        fn: (module, *arrays, **arrays) -> arrays. The module may also be a variable, or a pytree of both.
        policy, store, min_bytes: see `dejax.offload.offload`.
        inputs: which of the arrays after the module may be stored: "auto", "all", "none" or positions, where the module
            is argument 0.
        static_argnums: positions of arguments that are not arrays (flags, strings), as in `nnx.remat`: the module is
            argument 0.
        static_argnames: names of keyword arguments that are not arrays.

    Raises:
        TypeError: an argument is neither an array nor static.
        ValueError: `static_argnums` names the module.
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if 0 in static:
        raise ValueError("offload: `static_argnums` must not name the module, which is argument 0; count from 1")

    @functools.wraps(fn)
    def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        # In a tuple: a variable alone is no graph.
        graph, params, rest = nnx.split((module,), nnx.Param, ...)

        def pure(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            held = nnx.merge(graph, *state)
            out = fn(held[0], *args, **kwargs)
            return out, nnx.state(held, nnx.Not(nnx.Param))

        pure.__qualname__ = getattr(fn, "__qualname__", pure.__qualname__)
        options = OffloadOptions.of(policy, store, inputs, min_bytes, (0,))
        out, changed = wrap(pure, options, static, static_argnames)((params, rest), *args, **kwargs)
        nnx.update((module,), changed)
        return out

    return wrapped
