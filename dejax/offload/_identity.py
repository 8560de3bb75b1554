"""When two functions compute the same, so that a trace of one serves the other.

A function is traced once for arguments of some shapes only where what it computes follows from what is compared here:
its code, and by value all that it closes over, names or has for defaults. Arrays are not compared: a function that
closes over one is traced in each call, and so is one that uses an object whose state cannot be told.
"""

from __future__ import annotations

import enum
import functools
import types
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

_MOST = 4000  # parts; beyond, tracing is cheaper
# What these offer does not change while a program runs.
_LIBRARIES = frozenset(
    ("builtins", "collections", "dejax", "einops", "flax", "functools", "itertools", "jax", "jaxlib", "math")
    + ("numpy", "operator", "optax", "typing")
)
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis), np.dtype, np.generic, enum.Enum, range)


class _Unknown(Exception):
    """It cannot be told whether it is what it was before."""


def identity_of(value: Any) -> Hashable | None:
    """Equal for equal functions and values, whatever they are part of; None where it cannot be told.

    Args:
        value: a function, or what it is made with: numbers, strings, tuples, lists, dicts, other functions.
    """
    try:
        result = _Reader().read(value)
        hash(result)
    except (_Unknown, TypeError, ValueError, RecursionError):
        return None
    return result


class _Reader:
    def __init__(self) -> None:
        self.count = 0
        self.seen: dict[int, int] = {}

    def read(self, value: Any, names: tuple[str, ...] = ()) -> Hashable:
        self.count += 1
        if self.count > _MOST:
            raise _Unknown
        if isinstance(value, _PLAIN):
            return type(value), repr(value)  # -0.0 is not 0.0
        if isinstance(value, (jax.Array, np.ndarray)):
            raise _Unknown
        if id(value) in self.seen:  # a function that calls itself
            return "seen", self.seen[id(value)]
        self.seen[id(value)] = len(self.seen)
        if isinstance(value, (tuple, list, frozenset, set)):
            parts = sorted(value, key=repr) if isinstance(value, (frozenset, set)) else value
            return type(value), *map(self.read, parts)
        if isinstance(value, dict):
            return type(value), *((self.read(key), self.read(part)) for key, part in value.items())
        if isinstance(value, types.FunctionType):
            return self.function(value)
        if isinstance(value, functools.partial):
            return functools.partial, self.read(value.func), self.read(value.args), self.read(value.keywords)
        if isinstance(value, types.MethodType):
            return types.MethodType, self.read(value.__self__), self.read(value.__func__)
        if isinstance(value, (types.ModuleType, type)):
            return self.namespace(value, names)
        return self.other(value)

    def function(self, fn: types.FunctionType) -> Hashable:
        names = _names(fn.__code__)
        cells = [_content(cell) for cell in fn.__closure__ or ()]
        used = [(name, fn.__globals__[name]) for name in names if name in fn.__globals__]
        if _is_library(fn.__module__):
            used = []
        return (
            "function",
            fn.__module__,
            fn.__code__,
            self.read(fn.__defaults__),
            self.read(fn.__kwdefaults__),
            *(self.read(content, names) for content in cells),
            *((name, self.read(content, names)) for name, content in used),
        )

    def namespace(self, value: Any, names: tuple[str, ...]) -> Hashable:
        """A module or a class, of which a function can use what it has names for."""
        if _is_library(value.__name__ if isinstance(value, types.ModuleType) else value.__module__):
            return value
        held = vars(value)
        return value, *((name, self.read(held[name], names)) for name in names if name in held)

    def other(self, value: Any) -> Hashable:
        kind = type(value)
        if kind is types.BuiltinFunctionType or kind is np.ufunc:
            return value
        if isinstance(value, (staticmethod, classmethod)):
            return self.read(value.__func__)
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            return value, *(self.read(part) for part in vars(value).values() if isinstance(part, types.FunctionType))
        if _is_library(kind.__module__) and callable(getattr(value, "__wrapped__", None)):
            return value  # a jitted function keeps its first trace itself
        if any(getattr(kind, how) in (None, getattr(object, how)) for how in ("__eq__", "__hash__")):
            raise _Unknown  # compared by what it is, not by what is in it
        return value


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


def _names(code: types.CodeType) -> tuple[str, ...]:
    """All names that a function and those defined inside of it use."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return (*code.co_names, *inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
