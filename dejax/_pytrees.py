"""Dataclasses as pytrees that `jax.export` can serialize: their static fields are written as JSON.

JSON and not pickle, because who loads an exported function should not run what its file says.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
from typing import Any, NoReturn, TypeVar

import jax
import jax.export
import numpy as np

_T = TypeVar("_T", bound=type)
_AS_THEY_ARE = (type(None), bool, int, float, str)


def pytree(cls: _T) -> _T:
    """Registers a dataclass as `jax.tree_util.register_dataclass` does, and for `jax.export`.

    A static field may hold what `_to_json` takes; another value is refused where an exported function is serialized.
    """
    jax.tree_util.register_dataclass(cls)
    fields = [field for field in dataclasses.fields(cls) if field.init]
    static = [field.name for field in fields if field.metadata.get("static", False)]
    data = [field.name for field in fields if field.name not in static]

    def write(values: tuple[Any, ...]) -> bytes:
        return json.dumps(
            {name: _to_json(value, f"{name} of {cls.__name__}") for name, value in zip(static, values, strict=True)}
        ).encode()

    def read(text: bytes) -> dict[str, Any]:
        return {name: _from_json(value) for name, value in json.loads(text).items()}

    def make(aux_data: Any, children: Any) -> Any:
        return _made(cls, aux_data | dict(zip(data, children, strict=True)))

    with _once():
        jax.export.register_pytree_node_serialization(
            cls, serialized_name=_name(cls), serialize_auxdata=write, deserialize_auxdata=read, from_children=make
        )
    return cls


def named_pytree(cls: _T) -> _T:
    """Registers a `NamedTuple`, which is a pytree, for `jax.export`."""
    with _once():
        jax.export.register_namedtuple_serialization(cls, serialized_name=_name(cls))
    return cls


def of_this_process(why: str) -> Any:
    """Decorates a pytree class that has no meaning in another process: `jax.export` refuses to serialize it."""

    def refused(cls: _T) -> _T:
        def refuse(_: Any) -> NoReturn:
            raise TypeError(f"a `{cls.__name__}` cannot be an argument or a result of a serialized function: {why}")

        with _once():
            jax.export.register_pytree_node_serialization(
                cls, serialized_name=_name(cls), serialize_auxdata=refuse, deserialize_auxdata=refuse
            )
        return cls

    return refused


def _once() -> Any:
    """Where a module is imported a second time, as notebooks do, the name stays with the first class."""
    return contextlib.suppress(ValueError)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _made(cls: type, values: dict[str, Any]) -> Any:
    """An instance with these fields, without the checks of `__init__`: leaves of a tree may be anything."""
    made: Any = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _to_json(value: Any, what: str) -> Any:
    """Numbers, strings, None, dtypes; tuples, dicts and dejax's dataclasses of such; structures of trees of such."""
    if isinstance(value, _AS_THEY_ARE):
        return value
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, tuple):
        return {"tuple": [_to_json(entry, what) for entry in value]}
    if isinstance(value, dict):
        return {"dict": [[_to_json(key, what), _to_json(entry, what)] for key, entry in value.items()]}
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if isinstance(value, jax.tree_util.PyTreeDef):
        return {"tree": _to_json(jax.tree.unflatten(value, range(value.num_leaves)), what)}
    if dataclasses.is_dataclass(value) and _name(type(value)).startswith("dejax."):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": [type(value).__module__, type(value).__qualname__], "fields": _to_json(fields, what)}
    raise TypeError(f"`{what}` must be of a type that jax.export can serialize, got {type(value).__name__}")


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if "tuple" in value:
        return tuple(map(_from_json, value["tuple"]))
    if "dict" in value:
        return {_from_json(key): _from_json(entry) for key, entry in value["dict"]}
    if "dtype" in value:
        return jax.numpy.dtype(value["dtype"])
    if "tree" in value:
        return jax.tree.structure(_from_json(value["tree"]))
    module, name = value["class"]
    cls = getattr(importlib.import_module(module), name) if module.startswith("dejax.") else None
    if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
        raise ValueError(
            f"the exported function must name classes of this dejax, got {module}.{name}; export the function again "
            "with this version"
        )
    return _made(cls, _from_json(value["fields"]))
