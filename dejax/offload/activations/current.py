"""Which store a step uses: the one that was current in the thread that dispatched it.

JAX dispatches a compiled function without running Python, and passes it nothing but its arguments. So a program carries
a *binding*: a small number that is the same in every process and stands for a store while the program runs. Threads
that are inside `with` at the same time have different bindings, and `jax.make_user_context` makes the binding a part of
`jax.jit`'s cache key: a function that two such threads share is compiled for each binding. Before a binding changes its
store, the thread waits for the steps that it has dispatched. `docs/performance/offload.md` has the alternatives.
"""

from __future__ import annotations

import functools
import hashlib
import threading
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from dejax import _compat, _native

DEFAULT = 1
"""The binding of the process's own store (native/activations/current.h)."""
_HOME = 0
"""The binding of a thread that entered a `with` while no other was in one, and of all threads while none is."""
_FIRST_OWN = 1 << 32  # kFirstOwnBinding of native/activations/current.h

_context = jax.make_user_context(_HOME)
_lock = threading.RLock()
_local = threading.local()


class _ThreadBinding:
    """A thread's binding, and the stores of its nested `with` blocks."""

    def __init__(self, binding: int) -> None:
        self.binding = binding
        self.stores: list[Any] = []
        self.context: Any = None
        self.abandoned: Any = None

    def rebind(self) -> None:
        _native.extension("ActivationStore").bind_offload_store(self.binding, self.stores[-1].id if self.stores else 0)


_thread_bindings: weakref.WeakValueDictionary[int, _ThreadBinding] = weakref.WeakValueDictionary()


def current_binding() -> int:
    """The binding of a program that is traced now."""
    return _context.value


def innermost() -> Any:
    """The store of this thread's innermost `with`; None outside of any."""
    held = getattr(_local, "held", None)
    return held.stores[-1] if held is not None and held.stores else None


def bind_default(store: Any) -> None:
    """Makes a store current for programs and threads without a store of their own."""
    _native.extension("ActivationStore").bind_offload_store(DEFAULT, store.id)


def enter(store: Any) -> None:
    """Makes a store current in this thread."""
    wait_for_steps()
    with _lock:
        held = getattr(_local, "held", None)
        if held is None:
            held = _local.held = _take_binding()
        held.stores.append(store)
        held.rebind()


def leave(store: Any) -> None:
    """Undoes the last `enter` of a store, if possible one of this thread. The caller has waited for steps."""
    with _lock:
        own = getattr(_local, "held", None)
        # A generator or a task may end in another thread than it began in.
        candidates = [own, *_thread_bindings.values()] if own is not None else list(_thread_bindings.values())
        held = next((held for held in candidates if store in held.stores), None)
        if held is not None:
            _remove(held, store)


def forget(store: Any) -> None:
    """Removes a closed store from all threads."""
    with _lock:
        for held in list(_thread_bindings.values()):
            while store in held.stores:
                _remove(held, store)
        for binding, owner in list(_own.items()):
            if owner is store:
                _own.pop(binding, None)  # the native side unbinds closed stores itself


def after_fork() -> None:
    """In a forked child: forgets its parent's stores, and locks that other threads held."""
    global _lock
    _lock = threading.RLock()
    _thread_bindings.clear()
    _own.clear()
    _local.__dict__.clear()
    _context.set_global(_HOME)


def _remove(held: _ThreadBinding, store: Any) -> None:
    last = len(held.stores) - 1 - held.stores[::-1].index(store)
    del held.stores[last]
    held.rebind()
    if not held.stores and held is getattr(_local, "held", None):  # another thread's goes with that thread
        held.context.__exit__(None, None, None)
        del _local.held
        held.abandoned.detach()
        _free_binding(held.binding)


def _take_binding() -> _ThreadBinding:
    taken = {DEFAULT, *_thread_bindings}
    binding = next(number for number in range(len(taken) + 1) if number not in taken)
    held = _thread_bindings[binding] = _ThreadBinding(binding)
    held.context = _context(binding)
    held.context.__enter__()
    if binding == _HOME:
        # Other threads' steps must not use this store. They are compiled once more while it is current.
        _context.set_global(DEFAULT)
    held.abandoned = weakref.finalize(held, _free_binding, binding)  # a thread that ended inside `with`
    held.abandoned.atexit = False
    return held


def _free_binding(binding: int) -> None:
    with _lock:
        _thread_bindings.pop(binding, None)
        _native.extension("ActivationStore").bind_offload_store(binding, 0)
        if binding == _HOME:
            _context.set_global(_HOME)


# ------------------------------------------------------------------------------------------ stores named by programs

_own: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def own_binding(store: Any, options: Hashable) -> int:
    """The binding of programs that are traced with `store=`.

    It is a hash of the store's options, so it is the same in every process, and a process that runs an exported program
    finds the store that was opened for it. Open stores with equal options are numbered in the order of opening.
    """
    with _lock:
        for count in range(len(_own) + 1):
            digest = hashlib.blake2b(f"{options!r} {count}".encode(), digest_size=8).digest()
            binding = _FIRST_OWN + int.from_bytes(digest, "little") % (2**62)
            if binding not in _own:
                break
        _own[binding] = store
        _native.extension("ActivationStore").bind_offload_store(binding, store.id)
        return binding


# ---------------------------------------------------------------------------------------------------------- waiting


def wait_for_steps() -> None:
    """Waits for the steps that this thread has dispatched, and for all live arrays; ignores their errors.

    A step whose results nobody kept has no array to wait for. But a device runs what one thread dispatches in order, so
    a computation that is dispatched now ends after it.
    """
    if _compat.lacks_threads() or not _compat.backends_are_initialized():
        return
    with jax.ensure_compile_time_eval():
        for devices in _device_groups():
            try:
                jax.block_until_ready(_after_all(devices))
            except Exception:  # a device that failed has no steps left to wait for
                continue
        for array in jax.live_arrays():
            try:
                array.block_until_ready()
            except Exception:  # deleted meanwhile, or of a failed step, whose error shows where the result is used
                continue


def _device_groups() -> list[tuple[Any, ...]]:
    return [tuple(backend.local_devices()) for backend in _compat.backends().values() if backend.local_devices()]


def _after_all(devices: tuple[Any, ...]) -> list[Any]:
    # The CPU has separate queues for programs of one device and of several.
    groups = [devices, *((device,) for device in devices if len(devices) > 1)]
    results = []
    for group in groups:
        sharding, increment = _increment(group)
        parts = [jax.device_put(np.ones(1, np.int32), device) for device in group]
        results.append(increment(jax.make_array_from_single_device_arrays((len(group),), sharding, parts)))
    return results


@functools.cache
def _increment(devices: tuple[Any, ...]) -> tuple[Any, Any]:
    sharding = NamedSharding(Mesh(np.array(devices), ("device",)), PartitionSpec("device"))
    return sharding, jax.jit(lambda x: x + 1, in_shardings=sharding, out_shardings=sharding)
