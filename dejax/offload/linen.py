"""`offload` for Flax linen: wraps a module class, or a function of a module."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Unpack

from dejax._optional import optional
from dejax.offload.activations.options import OffloadKeywords, as_tuple, of_module
from dejax.offload.activations.transform import wrap

with optional("flax", of="dejax.offload.linen"):
    import flax.linen as nn
    from flax.core import lift


def offload(target: Any, *, methods: Iterable[str] | None = None, **options: Unpack[OffloadKeywords]) -> Any:
    """`dejax.offload.offload` for a linen module class or a function of a module. Use it like `nn.remat`.

    The module's variables stay on the device.

    Args:
        target: a module class, or a function whose first argument is a module.
        methods: names of the methods of the class to transform; None means `__call__`.
        options: the keyword arguments of `dejax.offload.offload`: policy, store, inputs ("auto", "all" or "none"),
            min_bytes, static_argnums, static_argnames. Positions count the module as argument 0, as in `nn.remat`.

    Returns:
        A module class, or a function.

    Raises:
        TypeError: when called: an argument is neither an array nor static.
        ValueError: `static_argnums` names the module.

    >>> Block = offload(nn.Dense)
    >>> issubclass(Block, nn.Module)
    True
    """
    checked = of_module(options)
    # `pure` has two arguments, the variables and the keys, in place of the module.
    shifted = tuple(i + 1 if i > 0 else i for i in as_tuple(checked.static_argnums))
    checked = dataclasses.replace(checked, static_argnums=shifted, kept_argnums=(0, 1))

    def lifted(fn: Callable[..., Any]) -> Any:
        def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs), repack(scope)

            pure.__qualname__ = getattr(target, "__qualname__", pure.__qualname__)
            return wrap(pure, checked)(variables, rngs, *args, **kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name="offload", enable_kwargs=True)

    return nn.transforms.lift_transform(lifted, target, methods=methods)
