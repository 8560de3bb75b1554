"""`offload` for Flax linen: wraps a module class, or a function of a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

from dejax._optional import optional
from dejax.offload.activations.store import ActivationStore
from dejax.offload.activations.transform import MIN_BYTES, Inputs, OffloadOptions, Policy, wrap

with optional("flax", of="dejax.offload.linen"):
    import flax.linen as nn
    from flax.core import lift


def offload(
    target: Any,
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
    methods: Iterable[str] | None = None,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Sequence[str] = (),
) -> Any:
    """`dejax.offload.offload` as a lifted transformation, used like `nn.remat`.

    Variables stay on the device.

    Args:
        target: a module class, or a function of a module.
        policy, store, min_bytes: see `dejax.offload.offload`.
        inputs: which of the call's arrays may be stored: "auto", "all" or "none".
        methods: the methods of the class to transform; None: `__call__`.
        static_argnums: positions of arguments that are not arrays (flags, strings), as in `nn.remat`: the module is
            argument 0.
        static_argnames: names of keyword arguments that are not arrays.

    Raises:
        TypeError: by a call with an argument that is neither an array nor static.
        ValueError: `static_argnums` names the module.

    >>> Block = offload(nn.Dense)
    >>> issubclass(Block, nn.Module)
    True
    """
    static = (static_argnums,) if isinstance(static_argnums, int) else tuple(static_argnums)
    if 0 in static:
        raise ValueError("offload: `static_argnums` must not name the module, which is argument 0; count from 1")
    # `pure` has two arguments, the variables and the keys, in place of the module.
    shifted = tuple(i + 1 if i > 0 else i for i in static)

    def lifted(fn: Callable[..., Any]) -> Any:
        def inner(scope_fn: Any, repack: Any, variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
            def pure(variables: Any, rngs: Any, *args: Any, **kwargs: Any) -> Any:
                scope = scope_fn(variables, rngs)
                return fn(scope, *args, **kwargs), repack(scope)

            pure.__qualname__ = getattr(target, "__qualname__", pure.__qualname__)
            run = wrap(pure, OffloadOptions.of(policy, store, inputs, min_bytes, (0, 1)), shifted, static_argnames)
            return run(variables, rngs, *args, **kwargs)

        return lift.pack(inner, (True,), (True,), (True,), name="offload", enable_kwargs=True)

    return nn.transforms.lift_transform(lifted, target, methods=methods)
