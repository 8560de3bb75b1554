"""The native extension: loads it, registers its XLA FFI handlers, calls them, and gives its functions to dejax.

dejax imports without the extension. A function that needs it then raises a `NativeExtensionError` with the remedy.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import jax
from jax import Array

from dejax._optional import hidden_installation

if TYPE_CHECKING:
    from dejax import _dejax_native


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
            f"{what} needs dejax's native extension, which could not be loaded ({why}). {remedy()}"
        )
    return module


def remedy() -> str:
    """What to do where the extension cannot be loaded."""
    hidden = hidden_installation()
    if hidden is not None:
        return (
            f"{Path(__file__).parent}, a source tree, hides the dejax that is installed in {hidden}. Run Python in "
            "another folder; the commands `dejax` and `dejax-train` work in any folder."
        )
    return (
        "Install dejax instead of putting its source tree on the path: `pip install .` in the source tree, with a "
        "C++17 compiler. Install it again after a change of the Python or jaxlib version."
    )


def num_threads() -> int:
    """Threads that a CPU handler uses: DEJAX_NUM_THREADS as it was at first use, otherwise the number of cores."""
    return extension("num_threads").num_threads()


def ffi_call(
    target: str,
    results: Sequence[Any],
    operands: Sequence[Array],
    *,
    fixed: Collection[int] = (),
    fixed_results: Collection[int] = (),
    aliases: Mapping[int, int] | None = None,
    has_side_effect: bool = False,
    **attributes: Any,
) -> list[Array]:
    """The results of an FFI call, behind barriers, as its operands are.

    XLA folds slices into the calls that take or return them. In jax 0.11 it keeps the original call as well if that has
    side effects or if its result has another use: gathers of a loop ran twice, so that rows crossed the bus twice and
    the end of a gather found the rows of another start. It also forgets that results are aliased: tables were copied,
    and a loop that stacked what had passed through a call got zeros. XLA does not fold across barriers, which cost
    nothing. So a call of native code is made here, and the barriers are not the caller's business.

    Args:
        target: the name of the handler.
        results: shape and dtype of each result.
        operands: its operands.
        fixed: positions of operands that no barrier may stand before: arrays in host memory, with which XLA does not
            compute, and small ones that native code knows by their address.
        fixed_results: positions of such results. A result that is aliased to a fixed operand is one.
        aliases: operand -> result that is written in its memory.
        has_side_effect: whether the call must stay if its results are not used.
        attributes: the attributes of the call.
    """
    aliases = dict(aliases or {})
    given = list(operands)
    apart = [at for at in range(len(given)) if at not in fixed]
    for at, operand in zip(apart, jax.lax.optimization_barrier([given[at] for at in apart]), strict=True):
        given[at] = operand
    call = jax.ffi.ffi_call(target, tuple(results), has_side_effect=has_side_effect, input_output_aliases=aliases)
    found = list(call(*given, **attributes))
    bare = {*fixed_results, *(result for operand, result in aliases.items() if operand in fixed)}
    apart = [at for at in range(len(found)) if at not in bare]
    for at, result in zip(apart, jax.lax.optimization_barrier([found[at] for at in apart]), strict=True):
        found[at] = result
    return found


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
