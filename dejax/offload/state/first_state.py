"""An optimizer's first state, made unit by unit in host memory or in files.

`tx.init` would make the whole state on the device, where a large model's state does not fit. So it is traced, and each
of its arrays is evaluated on its own: zeros and other constants never reach the device, and copies of parameters pass
through it a few rows at a time.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from dejax.offload._evaluation import ELEMENTWISE, Demand, inlined
from dejax.offload.state.moments import shardings_of

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def first_state(
    init: Callable[[Any], Any], params: Any, is_large: Callable[[Any], bool], put: Callable[[Any, Any], Any], unit: int
) -> Any:
    """`init(params)`; its large arrays are what `put` makes of them.

    Args:
        init: of a transformation.
        params: its argument.
        is_large: whether an array of the state, given by its shape and dtype, goes to `put`.
        put: from a `LazyArray` and the sharding of its parameter (None: of no parameter) to an array elsewhere.
        unit: bytes of an array that are on the device at a time.

    Returns:
        None where `init` cannot be traced, or is being traced.
    """
    leaves, treedef = jax.tree.flatten(params)
    if any(isinstance(x, jax.core.Tracer) for x in leaves) or not all(map(_is_array, leaves)):
        return None
    kept: list[Any] = []  # what `init` returns: results of the trace are None, others stay as they are
    found: list[Any] = []

    def traced(*leaves: Any) -> list[Any]:
        values, tree = jax.tree.flatten(init(jax.tree.unflatten(treedef, leaves)))
        found[:] = [tree]
        kept[:] = [None if isinstance(x, jax.core.Tracer) else x for x in values]
        return [x for x in values if isinstance(x, jax.core.Tracer)]

    try:
        closed = inlined(jax.make_jaxpr(traced)(*map(_shape, leaves)))
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return None
    device = _only_device(leaves)
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        made = _made(closed, leaves, kept, found[0], params, is_large, put, unit)
    return jax.tree.unflatten(found[0], made)


def _made(
    closed: core.ClosedJaxpr,
    leaves: Sequence[Any],
    kept: Sequence[Any],
    tree: Any,
    params: Any,
    is_large: Callable[[Any], bool],
    put: Callable[[Any, Any], Any],
    unit: int,
) -> list[Any]:
    """The arrays of the state. `kept`: what the trace left as it was, None for its results."""
    roots = iter(closed.jaxpr.outvars)
    outputs = [next(roots) if x is None else x for x in kept]
    shapes = [x.aval if isinstance(x, (core.Var, core.Literal)) else x for x in outputs]
    shardings = shardings_of(jax.tree.unflatten(tree, shapes), params)
    small = _demand(closed, leaves)
    made = []
    for kept_value, root, shape, sharding in zip(kept, outputs, shapes, shardings, strict=True):
        if kept_value is not None:
            made.append(put(kept_value, sharding) if is_large(kept_value) else kept_value)
        elif is_large(shape):
            made.append(put(LazyArray(_demand(closed, leaves), root, leaves, unit), sharding))
        else:
            value = small.value(root)
            if not isinstance(value, jax.Array):  # a literal
                value = jnp.asarray(value.item() if shape.weak_type else value, shape.dtype)
            made.append(value if sharding is None else placed(value, sharding))
    return made


def placed(value: Any, sharding: Any) -> Any:
    """A small array on the devices of the parameters."""
    if sharding.is_fully_addressable or not value.is_fully_addressable:
        return jax.device_put(value, sharding)
    if value.weak_type:
        return value
    held = np.asarray(value)  # jax.device_put would compare it between the processes
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])


def _only_device(leaves: Sequence[Any]) -> Any:
    """The device of all parameters, if it is one."""
    devices = {device for x in leaves if isinstance(x, jax.Array) for device in x.sharding.device_set}
    return devices.pop() if len(devices) == 1 else None


class LazyArray:
    """A variable of a jaxpr that is computed when it is read. `array[begin:end]` and `np.asarray(array)` read it."""

    def __init__(self, evaluation: Demand, root: Any, inputs: Sequence[Any], unit: int) -> None:
        self._evaluation, self._root, self._unit = evaluation, root, unit
        self._inputs = dict(zip(evaluation.jaxpr.invars, inputs, strict=True))
        self.shape: tuple[int, ...] = root.aval.shape
        self.dtype = np.dtype(root.aval.dtype)
        self.size = math.prod(self.shape)
        self.ndim = len(self.shape)
        self.nbytes = self.size * self.dtype.itemsize

    @property
    def rows(self) -> int:
        """Rows of a unit."""
        return max(1, self._unit // max(1, self.nbytes // self.shape[0])) if self.shape else 1

    @property
    def constant(self) -> Any:
        """The value that all elements have, as a numpy scalar, or None."""
        if isinstance(self._root, core.Literal):
            return None
        eqn = self._evaluation.producer.get(self._root)
        if eqn is None or eqn.primitive.name != "broadcast_in_dim" or eqn.invars[0].aval.shape != ():
            return None
        return np.asarray(self._evaluation.value(eqn.invars[0]))

    def on_devices(self) -> Any:
        """The whole array, on the devices of its parameters."""
        return self._evaluation.value(self._root)

    def __getitem__(self, rows: slice) -> np.ndarray[Any, Any]:
        begin, end, _ = rows.indices(self.shape[0])
        if (value := self.constant) is not None:
            return np.full((end - begin, *self.shape[1:]), value, self.dtype)
        return np.asarray(self._part(self._root, begin, end, {}), self.dtype)  # a parameter may be float64 of numpy

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        if (value := self.constant) is not None:
            whole = np.full(self.shape, value, self.dtype)
        elif self.ndim == 0:
            whole = np.asarray(self.on_devices())
        else:
            whole = np.empty(self.shape, self.dtype)
            for at in range(0, self.shape[0], self.rows):
                whole[at : at + self.rows] = self[at : at + self.rows]
        return whole if dtype is None else whole.astype(dtype, copy=False)

    def _part(self, var: Any, begin: int, end: int, known: dict[Any, Any]) -> Any:
        """Rows of a variable with the array's shape, or a scalar. What is not elementwise is computed whole."""
        if isinstance(var, core.Literal) or var.aval.shape == ():
            return self._evaluation.value(var)
        if var in known:
            return known[var]
        eqn = self._evaluation.producer.get(var)
        if eqn is None:
            part = (
                _rows(self._inputs[var], begin, end) if var in self._inputs else self._evaluation.value(var)[begin:end]
            )
        elif eqn.primitive.name == "broadcast_in_dim" and eqn.invars[0].aval.shape == ():
            part = jnp.broadcast_to(self._evaluation.value(eqn.invars[0]), (end - begin, *self.shape[1:]))
        elif _is_elementwise(eqn, self.shape):
            part = eqn.primitive.bind(*(self._part(v, begin, end, known) for v in eqn.invars), **eqn.params)
        else:
            part = self._evaluation.value(var)[begin:end]
        known[var] = part
        return part


def _rows(x: Any, begin: int, end: int) -> Any:
    if not isinstance(x, jax.Array) or not _is_on_host(x):
        return x[begin:end]
    return _rows_of_host(x, begin, end - begin)


@functools.partial(jax.jit, static_argnums=2)
def _rows_of_host(x: Any, begin: int, count: int) -> Any:
    return jax.device_put(jax.lax.dynamic_slice_in_dim(x, begin, count), _DEVICE)


def _is_on_host(x: Any) -> bool:
    return getattr(jax.typeof(x), "memory_space", None) == _HOST


def _shape(x: Any) -> Any:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _is_elementwise(eqn: Any, shape: tuple[int, ...]) -> bool:
    return (
        eqn.primitive.name in ELEMENTWISE
        and len(eqn.outvars) == 1
        and all(v.aval.shape in (shape, ()) for v in eqn.invars)
    )


def _demand(closed: core.ClosedJaxpr, leaves: Sequence[Any]) -> Demand:
    evaluation = Demand(closed)
    for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True):
        evaluation.give(var, leaf, _is_on_host(leaf))
    return evaluation


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))
