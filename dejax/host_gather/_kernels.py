"""The CUDA kernels of gathers and writes, compiled on first use (`dejax.cuda.nvrtc`).

The sources are in kernels/ and dejax/include/; preprocessor definitions specialise them.
"""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

import jax

import dejax
from dejax import _native
from dejax.cuda.nvrtc import KernelError, compiled

_KERNELS = Path(__file__).parent / "kernels"
_INCLUDE = Path(dejax.__file__).parent / "include"  # headers that native/ includes, too
_HEADERS = (_INCLUDE / "element_types.h", _INCLUDE / "kernel_params.h", _KERNELS / "words.h")
_NAMES = {"gather.cu": "dejax_gather", "update.cu": "dejax_update"}


@functools.cache
def _source(file: str) -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in (*_HEADERS, _KERNELS / file))


def key(file: str, definitions: tuple[tuple[str, str | int], ...]) -> int:
    """The key by which native handlers find the kernel of `file` with these definitions."""
    digest = hashlib.sha256(repr((_source(file), definitions)).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def prepare(file: str, **definitions: str | int) -> int:
    """The key of a kernel, compiled and loaded on the CUDA devices that jax uses, if there are any.

    Raises:
        KernelError: there is a device, but no NVRTC, or NVRTC refuses the source.
    """
    ordered = tuple(sorted(definitions.items()))
    number = key(file, ordered)
    module = _native.extension("dejax.host_gather")
    for capability, ordinals in _devices():
        if not module.has_kernel(number, ordinals):
            image = compiled(file, _source(file), ordered, capability)
            if failed := module.add_kernel(number, image, _NAMES[file], ordinals):
                raise KernelError(f"dejax.host_gather: {failed}")
    return number


def prepare_errors() -> None:
    """Allocates the memory into which kernels report ids out of range.

    Raises:
        MemoryError: there is a device, but no pinned memory.
    """
    for _, ordinals in _devices():
        if not _native.extension("dejax.host_gather").prepare_gather_errors(ordinals[0]):
            raise MemoryError(
                "gather: the 64 bytes of pinned memory into which mode='raise' reports ids out of range could not be "
                "allocated"
            )
        return  # all devices report into the same memory


@functools.cache
def _devices() -> list[tuple[tuple[int, int], list[int]]]:
    """The CUDA devices that jax uses in this process, by compute capability.

    The driver may list more devices. With one process per GPU, each process would hold memory on all of them.
    """
    driver, _ = _native.cuda_driver()
    try:
        used = jax.local_devices(backend="cuda")
    except RuntimeError:
        return []
    found: dict[tuple[int, int], list[int]] = {}
    if driver is None:
        return []
    for device in used:
        ordinal = device.local_hardware_id
        found.setdefault(driver.devices[ordinal].compute_capability, []).append(ordinal)
    return sorted(found.items())
