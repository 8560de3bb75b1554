"""Where the rows of a new table lie: fresh memory, a caller's array, or a file. Each function gives a leaf array."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import numpy as np
from jax import Array

from dejax import _native
from dejax._files import dtype_of_file
from dejax.host_gather._spec import TableSpec, device_or_default, ordinal_of
from dejax.host_gather.tables._memory import array_of, copy_rows, host_sharding, pin, zeros_on_cpu

_CPU_ALIGNMENT, _CUDA_ALIGNMENT = 64, 16  # bytes; jax copies CPU memory that is aligned to less than 64
_BLOCK_BYTES = 64 << 20  # copied at once where rows are converted on the way


def allocate(spec: TableSpec, device: jax.Device | None, what: str) -> Array:
    """Fresh memory; zeros on the CPU, unspecified on a GPU."""
    target = device_or_default(device)
    if spec.platform != "cuda":
        return zeros_on_cpu(spec, target, what)
    if not spec.nbytes:  # there is nothing to pin
        return jax.device_put(np.zeros(spec.leaf.shape, spec.leaf.dtype), host_sharding(target))
    ordinal = ordinal_of(spec, device)
    return array_of(pin(what, lambda module: module.HostMemory.allocate(spec.nbytes, ordinal)), spec, target)


def adopt(array: np.ndarray, spec: TableSpec, device: jax.Device | None, what: str) -> Array:
    """The memory of a numpy array, pinned on a GPU.

    Raises:
        ValueError: the memory cannot be used without a copy.
        MemoryError: the memory cannot be pinned.
    """
    target = device_or_default(device)
    if not array.dtype.isnative:
        raise ValueError(
            f"{what}: with copy=False `array` must be in this machine's byte order, got {array.dtype.str}; "
            "use copy=True"
        )
    if spec.platform == "cpu" and target != jax.local_devices(backend="cpu")[0]:
        raise ValueError(f"{what}: with copy=False `device` must be the first CPU device, got {target}; use copy=True")
    if not array.flags.c_contiguous:
        raise ValueError(
            f"{what}: `array` must be C-contiguous with copy=False, got strides {array.strides}; use copy=True"
        )
    needed = _CUDA_ALIGNMENT if spec.platform == "cuda" else _CPU_ALIGNMENT
    if array.ctypes.data % needed and array.size:
        raise ValueError(
            f"{what}: with copy=False `array` must begin at a multiple of {needed} bytes, got an address "
            f"{array.ctypes.data % needed} bytes after one; use copy=True"
        )
    address, nbytes, writeable = array.ctypes.data, array.nbytes, array.flags.writeable
    ordinal = ordinal_of(spec, device)
    memory = pin(what, lambda module: module.HostMemory.adopt(address, nbytes, writeable, ordinal, array))
    return array_of(memory, spec, target)


def open_file(
    path: str | os.PathLike[str], offset: int, dtype: np.dtype, spec: TableSpec, device: jax.Device | None, what: str
) -> Array:
    """The bytes of a file from `offset` on: mapped in place where that is possible, read into memory otherwise.

    Raises:
        ValueError: the file is too short.
        MemoryError: the memory cannot be pinned.
    """
    size = Path(path).stat().st_size
    if offset < 0 or size < offset + spec.nbytes:
        raise ValueError(
            f"{what}: shape {spec.shape} of {spec.dtype} after {offset} bytes needs a file of {offset + spec.nbytes} "
            f"bytes, this one has {size}"
        )
    if not spec.nbytes:
        return allocate(spec, device, what)
    if not dtype.isnative:
        return _read_swapped(path, offset, dtype, spec, device, what)
    module, ordinal = _native.extension(what), ordinal_of(spec, device)
    try:
        if offset % (_CPU_ALIGNMENT if ordinal is None else _CUDA_ALIGNMENT):
            raise RuntimeError("the rows do not begin at an aligned byte of the file")
        memory = module.HostMemory.map_file(os.fspath(path), offset, spec.nbytes, ordinal)
    except RuntimeError:
        memory = pin(what, lambda module: module.HostMemory.allocate(spec.nbytes, ordinal))
        try:
            memory.read_file(os.fspath(path), offset)
        except RuntimeError as error:
            raise OSError(f"{what}: {error}") from error
    return array_of(memory, spec, device_or_default(device))


def _read_swapped(
    path: str | os.PathLike[str], offset: int, dtype: np.dtype, spec: TableSpec, device: jax.Device | None, what: str
) -> Array:
    """A file of the other byte order, converted block by block."""
    leaf = allocate(spec, device, what)
    rows = np.memmap(path, dtype, "r", offset, spec.shape)
    block = max(1, _BLOCK_BYTES // spec.row_bytes)
    for start in range(0, spec.rows, block):
        copy_rows(leaf, spec, start, np.ascontiguousarray(rows[start : start + block], spec.dtype))
    return leaf


def fill(leaf: Array, spec: TableSpec, value: float) -> None:
    """Sets all elements to `value`, without a second copy of the table."""
    block = max(1, _BLOCK_BYTES // max(1, spec.row_bytes))
    rows = np.full((min(block, spec.rows), *spec.row), value, spec.dtype)
    for start in range(0, spec.rows, block):
        copy_rows(leaf, spec, start, rows[: spec.rows - start])


def npy_header(path: str | os.PathLike[str], what: str) -> tuple[tuple[int, ...], np.dtype, int]:
    """Shape, dtype and the offset of the first byte of the array in an `.npy` file.

    Raises:
        ValueError: no `.npy` file of a C-ordered array, or one that does not name its dtype.
    """
    with open(path, "rb") as file:
        try:
            version = np.lib.format.read_magic(file)
            reader = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
            shape, fortran, dtype = reader[version](file)
        except (ValueError, KeyError) as error:
            raise ValueError(
                f"{what}: the file must be an .npy file of version 1 or 2, got an error: {error}"
            ) from error
        offset = file.tell()
    if fortran and len(shape) > 1:
        raise ValueError(
            f"{what}: the array must be in C order, got Fortran order; save numpy.ascontiguousarray(array)"
        )
    return shape, dtype_of_file(path, dtype), offset
