"""Whether two functions compute the same, so that one can use the other's trace.

Two functions are equal if their code is equal, and all values that they close over, name or have for defaults. Arrays
are not compared: a function that closes over one is traced in each call. So is one that uses an object with state,
draws random numbers of numpy or Python, reads the clock, or looks values up by names that its code does not show.
"""

from __future__ import annotations

import dis
import enum
import functools
import types
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np

_MOST = 4000  # values compared; beyond, tracing is cheaper
# Their functions do not change while a program runs.
_LIBRARIES = frozenset(
    ("builtins", "collections", "dejax", "einops", "flax", "functools", "itertools", "jax", "jaxlib", "math")
    + ("numpy", "operator", "optax", "typing")
)
# What they give differs from call to call.
_CHANGING = frozenset(("datetime", "numpy.random", "random", "secrets", "time", "uuid"))
# They reach values whose names are not in the code.
_LOOK_UPS = frozenset(
    ("__dict__", "__import__", "attrgetter", "eval", "exec", "getattr", "globals", "import_module", "locals")
    + ("methodcaller", "vars")
)
_PLAIN = (str, bytes, bool, int, float, complex, type(None), type(Ellipsis), np.dtype, np.generic, enum.Enum, range)


class _Unknown(Exception):
    """A value that cannot be compared."""


def identity_of(value: Any) -> Hashable | None:
    """A key that is equal for equal functions and values; None where they cannot be compared.

    Args:
        value: a function, number, string, or a tuple, list or dict of such.
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
        if isinstance(value, (*_PLAIN, tuple, list, frozenset, set, dict, functools.partial)):
            if getattr(value, "__dict__", None) and not isinstance(value, enum.Enum):
                raise _Unknown  # attributes of a subclass
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
            return self.function(value, names)
        if isinstance(value, functools.partial):
            return functools.partial, self.read(value.func), self.read(value.args), self.read(value.keywords)
        if isinstance(value, types.MethodType):
            names = _names_of(value.__func__)
            return types.MethodType, self.read(value.__self__, names), self.read(value.__func__)
        if isinstance(value, (types.ModuleType, type)):
            return self.namespace(value, names)
        return self.other(value, names)

    def function(self, fn: types.FunctionType, asked: tuple[str, ...]) -> Hashable:
        cells = [_content(cell) for cell in fn.__closure__ or ()]
        module = fn.__globals__.get("__name__")  # functools.wraps changes fn.__module__
        names, used = _names(fn.__code__), []
        if not _is_library(module):
            if _is_dynamic(fn.__code__):
                raise _Unknown
            used = [(name, fn.__globals__[name]) for name in names if name in fn.__globals__]
        held = [(name, fn.__dict__[name]) for name in dict.fromkeys((*names, *asked)) if name in fn.__dict__]
        return (
            "function",
            module,
            fn.__code__,
            self.read(fn.__defaults__),
            self.read(fn.__kwdefaults__),
            *(self.read(content, names) for content in cells),
            *((name, self.read(content, names)) for name, content in (*used, *held)),
        )

    def namespace(self, value: Any, names: tuple[str, ...]) -> Hashable:
        """The attributes of a module or class that a function can use: those that it has names for."""
        module = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        if module in _CHANGING or (module == "numpy" and isinstance(value, types.ModuleType) and "random" in names):
            raise _Unknown
        if _is_library(module):
            return value
        if "__getattr__" in vars(value):
            raise _Unknown
        bases = () if isinstance(value, types.ModuleType) else (*value.__mro__[1:], *type(value).__mro__)
        owners = [value, *(base for base in bases if not _is_library(base.__module__))]
        held: dict[tuple[int, str], Any] = {}
        asked = list(names)
        for name in asked:  # grows by what the methods found ask for: `cls.helper()` may read `cls.scale`
            for at, owner in enumerate(owners):
                if name in vars(owner):
                    held[at, name] = vars(owner)[name]
                    if not isinstance(value, types.ModuleType):
                        asked += [new for new in _names_of(held[at, name]) if new not in asked]
        return value, *((key, self.read(part, tuple(asked))) for key, part in held.items())

    def other(self, value: Any, names: tuple[str, ...]) -> Hashable:
        kind = type(value)
        if kind is types.BuiltinFunctionType:
            owner = value.__self__  # of a method, such as that of a generator of random numbers
            if value.__module__ in _CHANGING or not isinstance(owner, (*_PLAIN, types.ModuleType, type, np.ufunc)):
                raise _Unknown
            return value
        if kind is types.MethodWrapperType:
            raise _Unknown
        if kind is np.ufunc:
            return value
        if isinstance(value, (staticmethod, classmethod)):
            return self.read(value.__func__)
        if isinstance(value, (jax.custom_vjp, jax.custom_jvp)):
            return value, *(self.read(part) for part in vars(value).values() if isinstance(part, types.FunctionType))
        if _is_library(kind.__module__) and callable(getattr(value, "__wrapped__", None)):
            return value  # a jitted function itself uses its first trace for good
        if any(getattr(kind, how) in (None, getattr(object, how)) for how in ("__eq__", "__hash__")):
            raise _Unknown  # it compares by identity, so its state could change unseen
        if _is_library(kind.__module__):
            return value
        # It compares by value, but its parts may have state.
        slots = [slot for owner in kind.__mro__ for slot in vars(owner).get("__slots__", ()) if hasattr(value, slot)]
        parts = getattr(value, "__dict__", {}) | {slot: getattr(value, slot) for slot in slots}
        return value, self.namespace(kind, names), *((name, self.read(part, names)) for name, part in parts.items())


def _names_of(value: Any) -> tuple[str, ...]:
    """The names that a function or method uses."""
    code = getattr(getattr(value, "__func__", value), "__code__", None)
    return _names(code) if isinstance(code, types.CodeType) else ()


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES


@functools.lru_cache(_MOST)
def _is_dynamic(code: types.CodeType) -> bool:
    """Whether a function or one inside of it looks values up by other means than names of globals and attributes."""
    inner = any(_is_dynamic(const) for const in code.co_consts if isinstance(const, types.CodeType))
    imported = [step.argval for step in dis.get_instructions(code) if step.opname == "IMPORT_NAME"]
    return inner or not _LOOK_UPS.isdisjoint(code.co_names) or not all(map(_is_library, imported))


@functools.lru_cache(_MOST)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """All names that a function and the functions defined inside of it use."""
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _names(const)]
    return (*code.co_names, *inner)


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None
