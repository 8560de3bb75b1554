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

from dejax.offload._evaluation import Demand, inlined, is_elementwise
from dejax.offload.state.meshes import divided
from dejax.offload.state.placements import Tier, is_on_host, shardings_of, tier_of
from dejax.offload.state.store import StateStore

_HOST, _DEVICE = jax.memory.Space.Host, jax.memory.Space.Device


def first_state(
    init: Callable[[Any], Any],
    params: Any,
    tiers: Callable[[Any], Sequence[Tier]],
    put: Callable[[Any, Tier, Any], Any],
    unit: int,
) -> Any:
    """Runs `init(params)` and puts each array of the result in its place.

    Where `init` cannot be traced, or is being traced, it runs as it is, and its arrays are placed then.

    Args:
        init: the function `init` of an Optax transformation.
        params: its argument.
        tiers: a function from the state, of arrays or their shapes, to the tier of each array.
        put: a function from an array or a `LazyArray`, its tier and the sharding of its parameter (None: of no
            parameter) to the array in its place; `in_place` does most of it.
        unit: bytes of an array that are on the device at a time.
    """
    leaves, treedef = jax.tree.flatten(params)
    traced = _traced(init, leaves, treedef)
    if traced is None:
        state = init(params)
        values, tree = jax.tree.flatten(state)
        inside = any(isinstance(x, jax.core.Tracer) for x in values)
        shardings = [None] * len(values) if inside else shardings_of(state, params)
        return jax.tree.unflatten(tree, map(put, values, tiers(state), shardings))
    closed, kept, tree = traced
    device = _only_device(leaves)
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        roots = iter(closed.jaxpr.outvars)
        outputs = [next(roots) if x is None else x for x in kept]
        shapes = jax.tree.unflatten(tree, [x.aval if isinstance(x, (core.Var, core.Literal)) else x for x in outputs])
        small, mine = _demand(closed, leaves), {id(x) for x in leaves}
        made = []
        for given, root, tier, sharding in zip(kept, outputs, tiers(shapes), shardings_of(shapes, params), strict=True):
            if given is None and tier == "device":
                value = small.value(root)
                if not isinstance(value, jax.Array):  # a literal
                    value = jnp.asarray(value.item() if root.aval.weak_type else value, root.aval.dtype)
                given = jnp.copy(value) if id(value) in mine else value  # steps donate the state, not these parameters
            elif given is None:
                given = LazyArray(_demand(closed, leaves), root, leaves, unit)
            made.append(put(given, tier, sharding))
    return jax.tree.unflatten(tree, made)


def _traced(
    init: Callable[[Any], Any], leaves: Sequence[Any], treedef: Any
) -> tuple[core.ClosedJaxpr, list[Any], Any] | None:
    """The jaxpr of `init`; values that it returns unchanged, None for each computed result; and the tree of both."""
    if any(isinstance(x, jax.core.Tracer) for x in leaves) or not all(map(_is_array, leaves)):
        return None
    kept: list[Any] = []
    trees: list[Any] = []

    def run(*leaves: Any) -> list[Any]:
        values, tree = jax.tree.flatten(init(jax.tree.unflatten(treedef, leaves)))
        trees[:] = [tree]
        kept[:] = [None if isinstance(x, jax.core.Tracer) else x for x in values]
        return [x for x in values if isinstance(x, jax.core.Tracer)]

    try:
        return inlined(jax.make_jaxpr(run)(*map(_shape, leaves))), kept, trees[0]
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError):
        return None


def in_place(
    x: Any, tier: Tier, sharding: Any, *, disk: Callable[[], StateStore] | None = None, unit_bytes: int | None = None
) -> Any:
    """Puts an array of the state in its tier, on each device its shard.

    Args:
        x: the array, or a `LazyArray`.
        tier: where it is to lie. An array that lies there already stays as it is.
        sharding: the sharding of its parameter, or None.
        disk: the store of arrays on disk.
        unit_bytes: the bytes of a unit of an array on disk, or of its shards.
    """
    several = divided(sharding)
    if tier == "disk":
        assert disk is not None
        if isinstance(x, LazyArray) and several:
            x = x.on_devices() if x.constant is None else np.broadcast_to(np.asarray(x.constant, x.dtype), x.shape)
        return disk().put(x, unit_bytes, sharding if several else None)
    if isinstance(x, jax.Array) and tier_of(x) == tier and (not several or divided(x.sharding)):
        return x
    if sharding is None:
        return jax.device_put(np.asarray(x) if isinstance(x, LazyArray) else x, _HOST if tier == "host" else _DEVICE)
    if tier == "host":
        sharding = sharding.with_memory_kind("pinned_host")
    if isinstance(x, LazyArray):
        if (value := x.constant) is not None:
            return filled(value, x.shape, x.dtype, sharding)
        x = x.on_devices()
    if sharding.is_fully_addressable or not getattr(x, "is_fully_addressable", True):
        return jax.device_put(x, sharding)
    if getattr(x, "weak_type", False):
        return x
    held = np.asarray(x)  # jax.device_put would compare it between the processes
    return jax.make_array_from_callback(held.shape, sharding, lambda at: held[at])


def filled(value: Any, shape: Sequence[int], dtype: Any, sharding: Any) -> jax.Array:
    """An array whose elements are all equal, with each shard made on its own device."""

    def part(index: Any) -> np.ndarray[Any, Any]:
        return np.full([len(range(*at.indices(size))) for at, size in zip(index, shape, strict=True)], value, dtype)

    return jax.make_array_from_callback(tuple(shape), sharding, part)


def _only_device(leaves: Sequence[Any]) -> Any:
    """The device of all parameters, if they lie on one device; else None."""
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
        """Number of rows in a unit."""
        return max(1, self._unit // max(1, self.nbytes // self.shape[0])) if self.shape else 1

    @property
    def constant(self) -> Any:
        """The value that all elements have, as a numpy scalar, or None."""
        root = self._root
        while not isinstance(root, core.Literal) and (eqn := self._evaluation.producer.get(root)) is not None:
            if eqn.primitive.name != "broadcast_in_dim":
                return None
            root = eqn.invars[0]
            if root.aval.shape == ():
                return np.asarray(self._evaluation.value(root))
        return None

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
        elif is_elementwise(eqn, self.shape):
            part = eqn.primitive.bind(*(self._part(v, begin, end, known) for v in eqn.invars), **eqn.params)
        else:
            part = self._evaluation.value(var)[begin:end]
        known[var] = part
        return part


def _rows(x: Any, begin: int, end: int) -> Any:
    if not isinstance(x, jax.Array) or not is_on_host(x):
        return x[begin:end]
    return _rows_of_host(x, begin, end - begin)


@functools.partial(jax.jit, static_argnums=2)
def _rows_of_host(x: Any, begin: int, count: int) -> Any:
    return jax.device_put(jax.lax.dynamic_slice_in_dim(x, begin, count), _DEVICE)


def _shape(x: Any) -> Any:
    aval = jax.typeof(x)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def _demand(closed: core.ClosedJaxpr, leaves: Sequence[Any]) -> Demand:
    evaluation = Demand(closed)
    for var, leaf in zip(closed.jaxpr.invars, leaves, strict=True):
        evaluation.give(var, leaf, is_on_host(leaf))
    return evaluation


def _is_array(x: Any) -> bool:
    return isinstance(x, (jax.Array, np.ndarray))
