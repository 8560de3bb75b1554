"""What tells a kernel from all others: its functions with what they close over, its operands, and what compiles it."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jaxlib
import numpy as np

from dejax import _compat

# The modules and packages of dejax whose functions trace kernels. Others may change while these files do not.
_SOURCES = "_compat", "_jaxprs", "pallas", "rgnn.ir", "rgnn.lowering"
_PLAIN = bool, int, float, complex, str, bytes, type(None)


class NotToldError(Exception):
    """A kernel has a part of which nobody knows what tells it from others."""


def identity_of(*parts: Any) -> str:
    """A digest of values, of the sources of kernels, of jax and of its settings that change what is traced.

    A part is a number, a text, a dtype, a `jax.ShapeDtypeStruct`, a function of this package with what it closes over,
    a dataclass or a container of parts, or an object with a method `identity`, which returns a part that tells it.

    Raises:
      NotToldError: another kind of part.
    """
    told = _told(parts, ()), sources(), _compat.trace_settings()
    return hashlib.sha256(repr(told).encode()).hexdigest()


@functools.cache
def sources() -> str:
    """A digest of the files that kernels are written in, with the versions of jax and jaxlib."""
    digest = hashlib.sha256(f"{jax.__version__} {jaxlib.__version__}".encode())
    root = Path(__file__).parents[2]
    for name in _SOURCES:
        place = root.joinpath(*name.split("."))
        for path in sorted(place.rglob("*.py")) or [place.with_suffix(".py")]:
            text = path.read_bytes()
            digest.update(f"\n{str(path)[len(str(root)) :]} {len(text)}\n".encode() + text)
    return digest.hexdigest()


@functools.cache
def _is_ours(module: str) -> bool:
    return any(f"{module}.".startswith(f"dejax.{name}.") for name in _SOURCES)


def _told(part: Any, outer: tuple[int, ...]) -> Any:
    """A part as nested tuples of texts and numbers; `outer` are the objects that it is a part of."""
    kind = type(part)
    if kind in _PLAIN:
        return kind.__name__, part
    if kind in (tuple, list):
        return kind.__name__, _all(part, outer)
    if kind is dict:
        return "dict", tuple((_told(key, outer), _told(value, outer)) for key, value in part.items())
    if kind in (set, frozenset):
        return "set", tuple(sorted(repr(_told(p, outer)) for p in part))
    if isinstance(part, np.dtype):
        return "dtype", part.name
    if isinstance(part, np.generic):
        return "number", part.dtype.name, part.item()
    if kind is jax.ShapeDtypeStruct:
        return "array", tuple(part.shape), part.dtype.name
    if isinstance(part, type):
        return "type", part.__module__, part.__qualname__
    if isinstance(part, enum.Enum):
        return "enum", kind.__module__, kind.__qualname__, part.name
    if id(part) in outer:  # a function that calls itself
        return "outer", outer.index(id(part))
    outer = *outer, id(part)
    if kind is types.FunctionType:
        return _told_function(part, outer)
    if kind is types.MethodType:
        return "method", _all((part.__func__, part.__self__), outer)
    if kind is functools.partial:
        return "partial", _all((part.func, part.args, part.keywords), outer)
    if _is_ours(kind.__module__):
        name = kind.__module__, kind.__qualname__
        if hasattr(part, "identity"):
            return name, _told(part.identity(), outer)
        if dataclasses.is_dataclass(part):
            return name, _all([getattr(part, field.name) for field in dataclasses.fields(part)], outer)
    raise NotToldError(f"a {kind.__module__}.{kind.__qualname__}")


def _all(parts: Sequence[Any], outer: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(_told(p, outer) for p in parts)


def _told_function(function: types.FunctionType, outer: tuple[int, ...]) -> Any:
    if not _is_ours(function.__module__):
        raise NotToldError(f"the function {function.__module__}.{function.__qualname__}")
    place = function.__module__, function.__qualname__, _told_code(function.__code__)
    cells = [cell.cell_contents for cell in function.__closure__ or ()]
    return "function", place, _all((cells, function.__defaults__, function.__kwdefaults__), outer)


@functools.cache
def _told_code(code: types.CodeType) -> Any:
    """Two functions of one name, such as lambdas in one line, differ in this; what they call is among the sources."""
    constants = [_told_code(c) if isinstance(c, types.CodeType) else repr(c) for c in code.co_consts]
    return code.co_firstlineno, code.co_code, code.co_names, tuple(constants)
