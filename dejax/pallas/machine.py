"""Figures of the device that schedules, passes and the cost model ask."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from dejax._platform import default_device, described_device, on_gpu


@dataclass(frozen=True, slots=True)
class Machine:
    """A device; the defaults were measured on an NVIDIA H200.

    Attributes:
      multiprocessors: number of multiprocessors.
      shared_bytes: shared memory that a program may have.
      cache_bytes: the size of the L2 cache.
      bytes_per_second: rate of a copy, in bytes read plus written.
      gather_bytes_per_second: rate at which traversals read rows of 64 features by an index.
      step_seconds: time of a traversal's step that waits for an index and then for a row.
      many_programs: number of programs that the device starts in about 4 us, whatever they do.
    """

    multiprocessors: int = 132
    shared_bytes: int = 227 * 1024
    cache_bytes: float = 60e6
    bytes_per_second: float = 4.3e12
    gather_bytes_per_second: float = 2.5e12
    step_seconds: float = 0.45e-6
    many_programs: int = 6000


H200 = Machine()
# Shared memory of a multiprocessor by compute capability; other devices count as the smallest of these.
_SHARED_BYTES = {80: 163 * 1024, 87: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024, 103: 227 * 1024}
_LEAST_SHARED_BYTES = 99 * 1024


def machine() -> Machine:
    """The device that programs are traced for, or an H200 if it is no GPU.

    All figures except the shared memory are those of an H200.
    """
    capability = compute_capability()
    return H200 if capability is None else _machine(capability)


@functools.cache
def _machine(capability: int) -> Machine:
    return Machine(shared_bytes=_SHARED_BYTES.get(capability, _LEAST_SHARED_BYTES))


# Compute capabilities (10 x major + minor) for which programs may be lowered on a machine without such a device.
_CAPABILITIES = {"A100": 80, "H100": 90, "H200": 90, "GH200": 90, "B200": 100, "GB200": 100, "B300": 103, "GB300": 103}


def compute_capability() -> int | None:
    """The compute capability of the GPU for which programs are traced, 10 x major + minor; None without a GPU.

    That of the abstract device of `jax.sharding.use_abstract_mesh`, else the default device's.
    """
    words = str(getattr(described_device(), "device_kind", "")).split()
    known = [number for name, number in _CAPABILITIES.items() if name in words]
    if known:
        return known[0]
    if not on_gpu():
        return None
    found = getattr(default_device(), "compute_capability", None)
    return None if found is None else int(str(found).replace(".", ""))
