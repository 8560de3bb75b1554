"""`offload` for Flax nnx: one line around a module's call.

self.block = Block(...)
...
x = offload(Block.__call__)(self.block, x)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal

from flax import nnx

from dejax.offload._store import ActivationStore
from dejax.offload._transform import MIN_BYTES, Inputs, Options, Policy, wrap


def offload(
    fn: Callable[..., Any],
    *,
    policy: Policy | Iterable[str] | None = None,
    store: ActivationStore | Literal["device"] | None = None,
    inputs: Inputs = "auto",
    min_bytes: int = MIN_BYTES,
) -> Callable[..., Any]:
    """`dejax.offload.offload` for a function whose first argument is an nnx module, as `Block.__call__` is.

    Parameters stay on the device. State that the call changes (batch statistics, dropout's counts) is updated in the
    module; parameters may not be changed by it. Works inside `nnx.jit`, `nnx.grad`, `nnx.scan` and `nnx.vmap`.

    Args:
        fn: (module, *arrays) -> arrays.
        policy: see `dejax.offload.offload`; so too `store` and `min_bytes`.
        store: where to.
        inputs: which of the arrays after the module may be stored: "auto", "all", "none" or positions that count the
            module as 0.
        min_bytes: smaller tensors stay.
    """

    @functools.wraps(fn)
    def wrapped(module: Any, *args: Any) -> Any:
        graph, params, rest = nnx.split(module, nnx.Param, ...)

        def pure(state: Any, *args: Any) -> tuple[Any, Any]:
            module = nnx.merge(graph, *state)
            out = fn(module, *args)
            return out, nnx.state(module, nnx.Not(nnx.Param))

        out, changed = wrap(pure, Options.of(policy, store, inputs, min_bytes, (0,)))((params, rest), *args)
        nnx.update(module, changed)
        return out

    return wrapped
