"""Functions that are traced in each call, and compiled once for each program that a trace gives."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import jax
from jax import Array
from jax.extend import core

_MOST = 64  # compiled programs that are kept, of all functions
_programs: dict[Any, Any] = {}
_lock = threading.Lock()


class TracedAnew:
    """A function of pytrees of arrays that returns one array, as `jax.jit` compiles it.

    Each instance traces the function again, because what the function closes over may have changed since another
    instance traced it. Instances whose traces give the same program share its compiled form: arrays that the function
    closes over are arguments of the program, and everything else that it read stands in the program's text.
    """

    def __init__(self, function: Callable[..., Array]) -> None:
        self.function = function
        self._found: dict[Any, tuple[Any, list[Any]]] = {}  # of this instance, by the types of the arguments

    def __call__(self, *arguments: Any) -> Array:
        leaves, tree = jax.tree.flatten(arguments)
        key = tree, tuple(map(jax.typeof, leaves))
        if key not in self._found:
            closed = jax.make_jaxpr(self.function)(*arguments)
            self._found[key] = _compiled(closed.jaxpr, closed.consts, leaves), closed.consts
        program, constants = self._found[key]
        (result,) = program(constants, leaves)
        found: Array = result
        return found


def _compiled(jaxpr: Any, constants: list[Any], leaves: list[Any]) -> Any:
    def run(constants: list[Any], leaves: list[Any]) -> list[Any]:
        return core.jaxpr_as_fun(core.ClosedJaxpr(jaxpr, constants))(*leaves)

    lowered = jax.jit(run).lower(constants, leaves)
    text = lowered.as_text()
    if "callback" in text:  # it holds an address of this trace's Python function
        return lowered.compile()
    places = tuple(getattr(x, "sharding", None) for x in (*constants, *leaves))
    key = hashlib.sha256(text.encode()).digest(), places, jax.config.values["jax_default_device"]
    with _lock:
        found = _programs.pop(key, None)
    found = lowered.compile() if found is None else found
    with _lock:
        _programs[key] = found  # the last one used is the last one to go
        while len(_programs) > _MOST:
            del _programs[next(iter(_programs))]
    return found
