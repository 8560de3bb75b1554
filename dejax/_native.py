"""The native extension: loads it, registers its XLA FFI handlers, and gives its functions to the rest of dejax.

dejax imports without the extension. A function that needs it then raises a `NativeExtensionError` with the remedy.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

from dejax import _compat

if TYPE_CHECKING:
    from dejax import _dejax_native

POINTER_KINDS = ("host", "device", "pinned", "managed", "empty")  # native/pointer_kind.h
_SUB_BYTE = {"int2", "uint2", "int4", "uint4", "int1", "uint1", "float4_e2m1fn"}


class NativeExtensionError(ImportError):
    """The native extension could not be loaded."""


@functools.cache
def _load() -> tuple[ModuleType | None, str]:
    """The extension with its handlers registered, or None and the reason; once per process."""
    try:
        from dejax import _dejax_native
    except ImportError as error:
        return None, f"{type(error).__name__}: {error}"
    runtime = _jaxlib_ffi_version()
    if runtime is not None and runtime < tuple(_dejax_native.ffi_api_version):
        # With its handlers registered, jax could not start its CPU client.
        return None, (
            f"it was built for version {_version(_dejax_native.ffi_api_version)} of XLA's FFI, the installed jaxlib "
            f"{jax.lib.__version__} has {_version(runtime)}"
        )
    for name, platform, handler in _dejax_native.handlers():
        # Without the plugin of a platform, jax keeps the registration and never uses it.
        jax.ffi.register_ffi_target(name, handler, platform=platform)
    return _dejax_native, ""


def _version(parts: tuple[int, ...]) -> str:
    return ".".join(map(str, parts))


def _jaxlib_ffi_version() -> tuple[int, int] | None:
    """Version of XLA's FFI in the installed jaxlib, from its header: no function returns it. None if not found."""
    try:
        header = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text(encoding="utf-8")
    except OSError:
        return None
    found = dict(re.findall(r"^#define XLA_FFI_API_(MAJOR|MINOR) (\d+)", header, re.MULTILINE))
    return (int(found["MAJOR"]), int(found["MINOR"])) if len(found) == 2 else None


def unavailable_reason() -> str | None:
    """Why the extension cannot be used; None if it can."""
    return _load()[1] or None


def extension(what: str) -> Any:
    """The extension module, with its handlers registered.

    Args:
        what: the caller's name, for the error.

    Raises:
        NativeExtensionError: the extension cannot be loaded; the message has the cause and the remedy.
    """
    module, why = _load()
    if module is None:
        raise NativeExtensionError(
            f"{what} needs dejax's native extension, which could not be loaded ({why}). Install dejax instead of "
            "putting its source tree on the path: `pip install .` in the source tree, with a C++17 compiler. Install "
            "it again after a change of the Python or jaxlib version."
        )
    return module


def num_threads() -> int:
    """Threads that a CPU handler uses: DEJAX_NUM_THREADS as it was at first use, otherwise the number of cores."""
    return extension("num_threads").num_threads()


# ------------------------------------------------------------------------------------------------ CPU row gather


def row_gather(
    table: ArrayLike, ids: ArrayLike, mode: Literal["fill", "clip"] = "fill", *, fill_value: Any = 0
) -> Array:
    """Gather rows, `table[ids]`, with several threads on the CPU.

    It works under `jit` and `vmap` (over table, ids or both, without copying an unbatched argument), and from several
    threads at once. On other platforms it is XLA's own gather. It has no derivative.

    Args:
        table: [rows, *row], any dtype of whole bytes.
        ids: int32 or int64, any shape. Negative ids are out of range: they do not count from the end.
        mode: "fill": an id out of range gives a row of `fill_value`. "clip": it gives the nearest row; if the table has
            no rows, a row of `fill_value`.
        fill_value: a scalar, converted to the table's dtype.

    Returns:
        [*ids.shape, *row] of the table's dtype.

    Raises:
        ValueError: `table` is a scalar, or `mode` is unknown.
        TypeError: `ids` is neither int32 nor int64, or the table's dtype is narrower than a byte.
        NativeExtensionError: the extension is missing.

    >>> row_gather(jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0, 7]))
    Array([[4., 5.],
           [0., 1.],
           [0., 0.]], dtype=float32)
    """
    extension("row_gather")
    table, ids = jnp.asarray(table), jnp.asarray(ids)
    if table.ndim == 0:
        raise ValueError("row_gather: `table` must have an axis of rows, [rows, *row], got a scalar")
    if ids.dtype not in (jnp.int32, jnp.int64):
        raise TypeError(f"row_gather: `ids` must be int32 or int64, got {ids.dtype}; use ids.astype(jnp.int32)")
    if mode not in ("fill", "clip"):
        raise ValueError(f"row_gather: `mode` must be 'fill' or 'clip', got {mode!r}")
    if table.dtype.name in _SUB_BYTE or jnp.issubdtype(table.dtype, jax.dtypes.extended):
        raise TypeError(
            f"row_gather: `table` must have a dtype of whole bytes, got {table.dtype}; use "
            "table.astype(jnp.int8) or the like, or jax.random.key_data for keys"
        )
    fill = np.asarray(fill_value).astype(table.dtype)
    if fill.ndim:
        raise ValueError(f"row_gather: `fill_value` must be a scalar, got shape {fill.shape}")

    out = _compat.varying_result(ids.shape + table.shape[1:], table.dtype, *map(jax.typeof, (table, ids)))
    native = functools.partial(
        # "expand_dims" gives an unbatched argument a batch axis of size 1, which the handler reads with stride 0.
        jax.ffi.ffi_call("dejax_row_gather", out, vmap_method="expand_dims"),
        ids_rank=np.int64(ids.ndim),
        clip=mode == "clip",
        fill=np.frombuffer(fill.tobytes(), np.uint8),
    )
    xla = functools.partial(_xla_row_gather, clip=mode == "clip", fill=fill)
    return jax.lax.platform_dependent(table, ids, cpu=native, default=xla)


def _xla_row_gather(table: Array, ids: Array, *, clip: bool, fill: np.ndarray) -> Array:
    rows = table.shape[0]
    if rows == 0:
        return jnp.full(ids.shape + table.shape[1:], fill)
    outside = (ids < 0) | (ids >= rows)
    gathered = table[jnp.clip(ids, 0, rows - 1)]
    if clip:
        return gathered
    return jnp.where(outside.reshape(ids.shape + (1,) * (table.ndim - 1)), fill, gathered)


# ------------------------------------------------------------------------------------------------ memory of an operand


def pointer_kind_code(x: ArrayLike) -> Array:
    """The kind of memory of `x` in a handler, as an int32 scalar that indexes `POINTER_KINDS`. For `jit`."""
    extension("pointer_kind")
    call = jax.ffi.ffi_call("dejax_pointer_kind", jax.ShapeDtypeStruct((), jnp.int32), vmap_method="sequential")
    return call(x)


@functools.cache
def _jitted_pointer_kind_code() -> Any:
    return jax.jit(pointer_kind_code)


def pointer_kind(x: ArrayLike) -> str:
    """The kind of memory in which a handler gets `x`, an argument of a jitted function.

    Args:
        x: a concrete array in any memory.

    Returns:
        "host" (pageable), "device", "pinned" (page-locked host memory, readable by the GPU), "managed", or "empty" for
        an array without elements, which has no memory.

    Raises:
        NativeExtensionError: the extension is missing.
    """
    return POINTER_KINDS[int(_jitted_pointer_kind_code()(x))]


# ------------------------------------------------------------------------------------------------ CUDA driver


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """One CUDA device, as its driver describes it."""

    name: str
    compute_capability: tuple[int, int]
    total_memory: int  # bytes
    multiprocessors: int
    l2_cache: int  # bytes
    can_map_host_memory: bool  # kernels can read pinned host memory in place
    can_use_registered_host_pointer: bool  # by the CPU's own pointer
    pageable_memory_access: bool  # kernels can read ordinary host memory
    integrated: bool  # device and host share memory


@dataclass(frozen=True, slots=True)
class CudaDriver:
    """The CUDA driver of this machine."""

    version: tuple[int, int]  # the newest CUDA that it supports
    devices: tuple[CudaDevice, ...]


def cuda_driver() -> tuple[CudaDriver | None, str | None]:
    """The CUDA driver and None, or None and why it cannot be used.

    It asks the driver itself, without jax, and respects CUDA_VISIBLE_DEVICES. The first call initialises the driver in
    this process.

    Raises:
        NativeExtensionError: the extension is missing.
    """
    info: _dejax_native.DriverInfo = extension("cuda_driver").probe_cuda_driver()
    if info.unavailable:
        return None, info.unavailable
    devices = tuple(
        CudaDevice(
            name=device.name,
            compute_capability=device.compute_capability,
            total_memory=device.total_memory,
            multiprocessors=device.multiprocessors,
            l2_cache=device.l2_cache,
            can_map_host_memory=device.can_map_host_memory,
            can_use_registered_host_pointer=device.can_use_registered_host_pointer,
            pageable_memory_access=device.pageable_memory_access,
            integrated=device.integrated,
        )
        for device in info.devices
    )
    return CudaDriver((info.version // 1000, info.version % 1000 // 10), devices), None
