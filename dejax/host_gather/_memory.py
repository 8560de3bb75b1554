"""A table's memory: as a jax.Array without a copy, found again by its address, seen by numpy."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import _native
from dejax.host_gather import _types
from dejax.host_gather._spec import TableSpec

_DLPACK_CPU, _DLPACK_CUDA_HOST = 1, 3


def host_sharding(device: Any) -> jax.sharding.Sharding:
    return jax.sharding.SingleDeviceSharding(device, memory_kind="pinned_host")


def pin(what: str, make: Any) -> Any:
    """What `make` makes of the native module; MemoryError where the driver refuses."""
    try:
        return make(_native.extension(what))
    except RuntimeError as error:
        raise MemoryError(
            f"{what}: {error}. Pinned memory cannot be swapped out: it must fit in the machine's free memory and "
            "under the limits of the process or container (ulimit -l, memory.max)"
        ) from error


class Exporter:
    """DLPack's protocol for the memory."""

    def __init__(self, memory: Any, spec: TableSpec, device: Any) -> None:
        self._memory, self._spec = memory, spec
        self._device = (_DLPACK_CUDA_HOST, device.local_hardware_id) if spec.platform == "cuda" else (_DLPACK_CPU, 0)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device

    def __dlpack__(self, **_: Any) -> Any:
        shape = list(self._spec.leaf.shape)
        return self._memory.dlpack(shape, _types.word_bits(self._spec.dtype), *self._device)


def array_of(memory: Any, spec: TableSpec, device: Any) -> Array:
    """The memory as a jax.Array of `device`, without a copy."""
    array = jax.dlpack.from_dlpack(Exporter(memory, spec, device))
    # jax takes memory of the CPU for its first CPU device only; another one gets a copy.
    return array if device in array.devices() else jax.device_put(array, device)


def on_cpu(spec: TableSpec, device: Any, what: str) -> Array:
    """Zeros in jax's own memory: it is the only kind that jax's CPU backend writes in place when it is donated.

    Raises:
        MemoryError: there is not so much memory.
    """
    leaf, wanted = spec.leaf, spec.rows * spec.row_bytes
    # Beyond the machine's memory the system may say yes, and kill the process when the pages are written.
    there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if wanted > there:
        raise MemoryError(f"{what}: {wanted} bytes are asked for, and the machine has {there}")
    sharding = jax.sharding.SingleDeviceSharding(device)
    try:
        return jax.jit(lambda: jnp.zeros(leaf.shape, leaf.dtype), out_shardings=sharding)().block_until_ready()
    except RuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error) and "ut of memory" not in str(error):
            raise
        raise MemoryError(f"{what}: {wanted} bytes could not be had: {error}") from error


def address_of(leaf: Array) -> int:
    return leaf.addressable_data(0).unsafe_buffer_pointer()


def memory_of(leaf: Array) -> Any:
    """The memory of ours that an array lies in, whichever function it came out of; None for memory of jax."""
    if not leaf.size:
        return None
    return _native.extension("HostTable").HostMemory.find(address_of(leaf))


def hold(leaf: Array) -> Any:
    """As `memory_of`, where memory of jax is held, too: until the result goes, whatever happens to the array."""
    memory = memory_of(leaf)
    if memory is not None:
        leaf.unsafe_buffer_pointer()  # an array that was deleted since might have left its address to another one
        return memory
    module = _native.extension("HostTable.write")
    if next(iter(leaf.devices())).platform != "cpu":  # a copy that XLA made in pinned memory of its own
        return module.HostMemory.adopt(address_of(leaf), leaf.nbytes, True, None, leaf)
    # By DLPack rather than numpy.asarray, which jax keeps beside the array: donating it would then copy it.
    held = np.from_dlpack(leaf)  # type: ignore[arg-type]
    return module.HostMemory.adopt(held.ctypes.data, held.nbytes, True, None, held)


class View:
    """What numpy keeps as the base of a view: the memory."""

    def __init__(self, memory: Any, leaf: Array) -> None:
        self._memory, self._shape, self._type = memory, leaf.shape, np.dtype(leaf.dtype).str

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"version": 3, "shape": self._shape, "typestr": self._type, "data": (self._memory.address, True)}

    def array(self) -> np.ndarray:
        return np.asarray(self)
