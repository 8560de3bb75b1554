"""CUDA kernels, compiled on first use by the NVRTC of the wheels that jax's CUDA plugin installs.

The sources are in kernels/ and dejax/include/; preprocessor definitions specialise them. Compiled kernels are kept on
disk in `DEJAX_CACHE_DIR` (by default `~/.cache/dejax`), named by a digest of source, definitions, architecture and
compiler.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import jax

import dejax
from dejax import _native
from dejax._cache import cache_folder, write_whole

_KERNELS = Path(__file__).parent / "kernels"
_INCLUDE = Path(dejax.__file__).parent / "include"  # headers that native/ includes, too
_HEADERS = (_INCLUDE / "element_types.h", _INCLUDE / "kernel_params.h", _KERNELS / "words.h")
_NAMES = {"gather.cu": "dejax_gather", "update.cu": "dejax_update"}


class KernelError(RuntimeError):
    """A CUDA kernel could not be compiled or loaded."""


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
            image = _compiled(file, ordered, capability)
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


def _compiled(file: str, definitions: tuple[tuple[str, str | int], ...], capability: tuple[int, int]) -> bytes:
    library = _nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    identity = repr((_source(file), definitions, capability, major.value, minor.value))
    path = cache_folder() / "kernels" / f"{hashlib.sha256(identity.encode()).hexdigest()}.cubin"
    with contextlib.suppress(OSError):
        kept = path.read_bytes()
        digest, image = kept[:32], kept[32:]
        if hashlib.sha256(image).digest() == digest:  # otherwise the file was cut short
            return image
    image = compile_source(library, _source(file), file, definitions, capability)
    with contextlib.suppress(OSError):  # without a cache each process compiles
        write_whole(path, hashlib.sha256(image).digest() + image)
    return image


def compile_source(
    library: ctypes.CDLL,
    source: str,
    name: str,
    definitions: tuple[tuple[str, str | int], ...],
    capability: tuple[int, int],
) -> bytes:
    """The machine code of `source`. Raises KernelError with the compiler's log."""
    program = ctypes.c_void_p()

    def check(code: int, call: str) -> None:
        if code:
            library.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise KernelError(f"{call} failed for {name}: {library.nvrtcGetErrorString(code).decode()}{log()}")

    def log() -> str:
        size = ctypes.c_size_t()
        if not program or library.nvrtcGetProgramLogSize(program, ctypes.byref(size)):
            return ""
        text = ctypes.create_string_buffer(size.value)
        library.nvrtcGetProgramLog(program, text)
        return f"\n{text.value.decode(errors='replace')}"

    created = library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), name.encode(), 0, None, None)
    check(created, "nvrtcCreateProgram")
    try:
        options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17", "-default-device"]
        options += [f"-D{key}={value}" for key, value in definitions]
        encoded = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        check(library.nvrtcCompileProgram(program, len(options), encoded), "nvrtcCompileProgram")
        size = ctypes.c_size_t()
        check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        image = ctypes.create_string_buffer(size.value)
        check(library.nvrtcGetCUBIN(program, image), "nvrtcGetCUBIN")
        return image.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


@functools.cache
def _nvrtc() -> ctypes.CDLL:
    tried = []
    for path in _nvrtc_paths():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    raise KernelError(
        "dejax.host_gather found no NVRTC, which compiles its kernels; pip install 'jax[cuda13]' (or cuda12) installs "
        f"nvidia-cuda-nvrtc. Tried: {'; '.join(tried) or 'no library of that name'}"
    )


def _nvrtc_paths() -> Iterator[str]:
    # First those of the wheels, which fit jax's plugin. `nvidia` is a namespace package of many wheels.
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = [path for path in Path(folder).glob("*/lib/libnvrtc.so.*") if ".alt." not in path.name]
        yield from map(str, sorted(found, reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
