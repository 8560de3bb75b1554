"""The memory of a table: as a jax.Array without a copy, found again by its address, seen by numpy."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _compat, _native
from dejax.host_gather._spec import TableSpec

_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3
# jax's export of an array crashes if another thread deletes the array meanwhile (jaxlib 0.12: a segmentation fault in
# one of some thousand closes).
_exporting = threading.RLock()


def _renew_lock() -> None:
    global _exporting
    _exporting = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)  # a thread that the child lacks may hold it


def host_sharding(device: Any) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def pin(what: str, make: Callable[[Any], Any]) -> Any:
    """The result of `make(native module)`. Raises MemoryError where the driver refuses."""
    try:
        return make(_native.extension(what))
    except RuntimeError as error:
        raise MemoryError(
            f"{what}: {error}. Pinned memory cannot be swapped out: it must fit in the machine's free memory and "
            "under the limits of the process or container (ulimit -l, memory.max)"
        ) from error


class Exporter:
    """DLPack's protocol for a native `HostMemory`."""

    def __init__(self, memory: Any, spec: TableSpec, device: Any) -> None:
        self._memory, self._spec = memory, spec
        self._device = (_DLPACK_CUDA_HOST, device.local_hardware_id) if spec.platform == "cuda" else (_DLPACK_CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        leaf = self._spec.leaf
        return self._memory.dlpack(list(leaf.shape), 8 * leaf.dtype.itemsize, *self._device)


def array_of(memory: Any, spec: TableSpec, device: Any) -> Array:
    """The memory as a jax.Array of `device`, without a copy."""
    array = jax.dlpack.from_dlpack(Exporter(memory, spec, device))
    # jax assigns CPU memory to its first CPU device only; other CPU devices get a copy.
    return array if device in array.devices() else jax.device_put(array, device)


def zeros_on_cpu(spec: TableSpec, device: Any, what: str) -> Array:
    """Zeros in memory that jax allocates: jax's CPU backend updates only its own memory in place when it is donated.

    Raises:
        MemoryError: the machine has less memory.
    """
    leaf, wanted = spec.leaf, spec.nbytes
    # The system may grant more than the machine's memory, and then kill the process when it writes the pages.
    available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > available:
        raise MemoryError(f"{what}: the table needs {wanted} bytes, and the machine has {available}")
    sharding = jax.sharding.SingleDeviceSharding(device)
    try:
        with _compat.on_devices([device]):
            return _zeros(leaf.shape, leaf.dtype, sharding)().block_until_ready()
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "ut of memory" not in str(error):
            raise
        raise MemoryError(f"{what}: {wanted} bytes could not be allocated: {error}") from error


@functools.lru_cache(maxsize=256)
def _zeros(shape: tuple[int, ...], dtype: Any, sharding: Any) -> Any:
    """A compiled function without arguments. `jnp.zeros(device=...)` makes the array twice on other CPU devices."""
    return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)


def delete(leaf: Array) -> None:
    """Deletes an array, not during an export by another thread."""
    with _exporting:
        leaf.delete()


def address_of(leaf: Array) -> int:
    with _exporting:
        return leaf.addressable_data(0).unsafe_buffer_pointer()


def numpy_of(leaf: Array) -> np.ndarray:
    """A view of an array in memory that jax allocated."""
    with _exporting:
        return np.asarray(leaf)


def memory_of(leaf: Array) -> Any:
    """The native `HostMemory` that an array lies in, whichever function returned it; None for memory of jax."""
    if not leaf.size:
        return None
    return _native.extension("HostTable").HostMemory.find(address_of(leaf))


def hold(leaf: Array) -> Any:
    """A native `HostMemory` that keeps the array's memory alive, also memory of jax, even if the array is deleted."""
    with _exporting:
        memory = memory_of(leaf)
        if memory is not None:
            leaf.unsafe_buffer_pointer()  # raises if the array was donated meanwhile: another one may have its address
            return memory
        module = _native.extension("HostTable.write")
        if next(iter(leaf.devices())).platform != "cpu":  # a copy that XLA made in pinned memory of its own
            return module.HostMemory.adopt(address_of(leaf), leaf.nbytes, True, None, leaf)
        # Not numpy.asarray, whose result jax caches: donating the array would then copy it.
        held = np.from_dlpack(leaf)  # type: ignore[arg-type]
        return module.HostMemory.adopt(held.ctypes.data, held.nbytes, True, None, held)


_kept_for: set[int] = set()  # ids of the arrays for which something is kept


def is_kept_for(leaf: Array) -> bool:
    """Whether `keep_for` keeps something for this array."""
    return id(leaf) in _kept_for


def keep_for(leaf: Array, what: Any, before_release: Callable[[], Any] | None = None) -> None:
    """Keeps `what` as long as an array lives; `before_release` is called between the two ends."""
    _kept_for.add(id(leaf))
    weakref.finalize(leaf, _let_go, id(leaf), [what], before_release).atexit = False


def _let_go(key: int, last: list[Any], before_release: Callable[[], Any] | None) -> None:
    _kept_for.discard(key)  # at once: a new array may have this id
    if before_release is not None:
        before_release()
    last.clear()


def copy_rows(leaf: Array, spec: TableSpec, start: int, rows: np.ndarray) -> None:
    """Copies contiguous rows of the table's dtype into the table from row `start` on."""
    if not rows.nbytes:
        return
    leaf.block_until_ready()
    memory = hold(leaf)  # until the rows are copied, even if another thread closes the table
    memory.copy_in(start * spec.row_bytes, rows.ctypes.data, rows.nbytes)


class View:
    """The base of a numpy view: it keeps the memory alive."""

    def __init__(self, memory: Any, leaf: Array) -> None:
        self._memory, self._shape, self._type = memory, leaf.shape, np.dtype(leaf.dtype).str

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self._shape, "typestr": self._type, "data": (self._memory.address, True)}

    def array(self) -> np.ndarray:
        return np.asarray(self)
