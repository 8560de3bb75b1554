"""`offload` for Flax nnx: one line around a module's call.

self.block = Block(...)
...
x = offload(Block.__call__)(self.block, x)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Unpack

from dejax._optional import optional
from dejax.offload.activations.options import OffloadKeywords, of_module
from dejax.offload.activations.transform import wrap

with optional("flax", of="dejax.offload.nnx"):
    from flax import nnx


def offload(fn: Callable[..., Any], **options: Unpack[OffloadKeywords]) -> Callable[..., Any]:
    """`dejax.offload.offload` for a function whose first argument is an nnx module, such as `Block.__call__`.

    Parameters stay on the device, and the call must not change them. Other state of the module that the call changes
    (batch statistics, the counts of dropout) is updated. Works inside `nnx.jit`, `nnx.grad`, `nnx.scan` and `nnx.vmap`.

    Args:
        fn: function `(module, *arrays, **arrays) -> arrays`. In place of a module it may take an nnx variable, or a
            pytree of modules and variables.
        options: the keyword arguments of `dejax.offload.offload`: policy, store, inputs, min_bytes, static_argnums,
            static_argnames. Positions count the module as argument 0, as in `nnx.remat`.

    Raises:
        TypeError: an argument is neither an array nor static.
        ValueError: `static_argnums` names the module.
    """
    checked = of_module(options)

    @functools.wraps(fn)
    def wrapped(module: Any, *args: Any, **kwargs: Any) -> Any:
        # The variables stand in a tuple, because flax does not split a single variable.
        graph, params, rest = nnx.split((module,), nnx.Param, ...)

        def pure(state: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            held = nnx.merge(graph, *state)
            out = fn(held[0], *args, **kwargs)
            return out, nnx.state(held, nnx.Not(nnx.Param))

        pure.__qualname__ = getattr(fn, "__qualname__", pure.__qualname__)
        out, changed = wrap(pure, checked)((params, rest), *args, **kwargs)
        nnx.update((module,), changed)
        return out

    return wrapped
