"""Code of dejax promotes ranks and dtypes by jax's defaults, whatever the caller's configuration says."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

_Function = TypeVar("_Function", bound=Callable[..., Any])


def broadcasting(function: _Function) -> _Function:
    """A function of dejax that runs no code of the caller, and may promote ranks and dtypes.

    `jax_numpy_rank_promotion="raise"` and `jax_numpy_dtype_promotion="strict"` find the caller's own mistakes. Without
    this a comparison of [n, 1] and [n] in dejax would raise, too.
    """

    @functools.wraps(function)
    def run(*args: Any, **keywords: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*args, **keywords)

    return run  # type: ignore[return-value]
