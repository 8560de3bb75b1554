"""Whether the memory of a table is still there, and the errors where it is not."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterator
from typing import Any

import jax
from jax import Array

from dejax import _compat
from dejax.host_gather._spec import TableSpec
from dejax.host_gather._tracing import closed_over
from dejax.host_gather.tables._memory import memory_of


class TableClosedError(RuntimeError):
    """A table was used after it was closed or donated, or in a forked child process.

    >>> import jax.numpy as jnp, numpy as np
    >>> from dejax.host_gather import HostTable, gather
    >>> table = HostTable.from_numpy(np.ones((3, 2), np.float32))
    >>> table.close()
    >>> gather(table, jnp.array([0]))  # raises
    Traceback (most recent call last):
        ...
    dejax.host_gather.tables._lifetime.TableClosedError: gather: the table was closed, or donated to a jitted ...
    """


_CLOSED = "the table was closed, or donated to a jitted function; use the table that the function returned"


_START = "start processes with multiprocessing's 'spawn' or 'forkserver'"


def is_concrete(leaf: Any) -> bool:
    return isinstance(leaf, Array) and not isinstance(leaf, jax.core.Tracer)


def is_closed(leaf: Any) -> bool:
    return is_concrete(leaf) and leaf.is_deleted()


def check_alive(leaf: Array, spec: TableSpec, what: str) -> None:
    """Checks that a concrete leaf can be read.

    Raises:
        TableClosedError: the table was closed, donated, or inherited by a forked child.
        OSError: its file became shorter.
    """
    if process_of(leaf) != os.getpid():  # first: a forked child hangs when it calls jax
        raise TableClosedError(
            f"{what}: the table was made before this process was forked, and a child has neither the memory nor "
            f"the device; {_START}, and make the table there"
        )
    if is_closed(leaf):
        raise TableClosedError(f"{what}: {_CLOSED}")
    if spec.read_only and not spec.on_device:
        with reporting_closed(leaf, what):
            memory = memory_of(leaf)
        if memory is not None and memory.truncated():
            raise OSError(
                f"{what}: the file of the table became shorter than the table while it was mapped; make the table "
                "again from the whole file"
            )


def check_computing(leaf: Array, spec: TableSpec, what: str) -> None:
    """Checks that a step can read a concrete leaf. Raises as `check_alive`."""
    check_alive(leaf, spec, what)
    if _compat.lacks_threads():
        raise TableClosedError(
            f"{what}: jax must compute in the process that reads the table, and this one is a fork of one that had "
            f"used jax, whose threads it lacks; {_START}"
        )


def checked_leaf(leaf: Any, spec: TableSpec, what: str) -> Any:
    """The leaf array of a table, checked for a native call. Raises as `Table._operands`."""
    if is_concrete(leaf):
        check_computing(leaf, spec, what)
        _check_mesh(leaf, what)
    check_array(what, leaf, spec.leaf)
    if not spec.on_device and closed_over(leaf):
        raise TypeError(
            f"{what}: a function that jax compiles closes over the table, which would make it a constant of the "
            "program. Pass it as an argument: jax.jit(lambda table, ids: table[ids])(table, ids)"
        )
    return leaf


def _check_mesh(leaf: Array, what: str) -> None:
    """Checks that jax computes where the table lies.

    Raises:
        ValueError: the caller has set a mesh of other devices.
    """
    devices = _compat.devices_of_the_mesh()
    if devices and devices != leaf.devices():
        raise ValueError(
            f"{what}: the table must lie on the devices of the mesh that jax.set_mesh has set, got a table of "
            f"{len(leaf.devices())} devices and a mesh of {len(devices)}; give dejax.distributed.share(table, mesh), "
            f"or call {what} outside of the mesh"
        )


def check_array(what: str, array: Any, expected: jax.ShapeDtypeStruct) -> None:
    """Checks that an array of a table came as it was made.

    Raises:
        ValueError: it has another shape or dtype.
    """
    if not hasattr(array, "shape") or (tuple(array.shape), array.dtype) != (expected.shape, expected.dtype):
        raise ValueError(
            f"{what}: the table was sliced or reshaped on its way (its array has shape {getattr(array, 'shape', None)} "
            f"instead of {expected.shape}). Do not give it as `xs` of a scan or as a mapped argument; use it as a "
            "constant inside"
        )


@contextlib.contextmanager
def reporting_closed(leaf: Any, what: str) -> Iterator[None]:
    """Turns jax's error about an array that another thread has deleted into a `TableClosedError`."""
    try:
        yield
    except (RuntimeError, ValueError) as error:
        if isinstance(error, TableClosedError) or not is_closed(leaf):
            raise
        raise TableClosedError(f"{what}: {_CLOSED}") from error


# -------------------------------------------------------------------------------------------- processes

_processes: dict[int, tuple[weakref.ref[Any], int]] = {}


def process_of(leaf: Array) -> int:
    """The process that made an array. Tables made of the array later, in a forked child too, get the same answer."""
    key = id(leaf)
    found = _processes.get(key)
    if found is not None and found[0]() is leaf:
        return found[1]
    process = os.getpid()
    _processes[key] = (weakref.ref(leaf, lambda gone: _forget(key, gone)), process)
    return process


def _forget(key: int, gone: Any) -> None:
    found = _processes.get(key)
    if found is not None and found[0] is gone:
        del _processes[key]
