"""Compiles CUDA C++ by the NVRTC of the wheels that jax's CUDA plugin installs.

Compiled kernels are kept on disk in `DEJAX_CACHE_DIR` (by default `~/.cache/dejax`), named by a digest of source,
definitions, architecture and compiler.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from dejax._files import cache_folder, read_checked, write_checked


class KernelError(RuntimeError):
    """A CUDA kernel could not be compiled or loaded."""


def compiled(
    name: str, source: str, definitions: tuple[tuple[str, str | int], ...], capability: tuple[int, int]
) -> bytes:
    """The machine code of `source`, which errors call `name`: from disk, if a process has compiled it before.

    Raises:
        KernelError: there is no NVRTC, or it refuses the source.
    """
    library = nvrtc()
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    identity = repr((source, definitions, capability, major.value, minor.value))
    path = cache_folder() / "kernels" / f"{hashlib.sha256(identity.encode()).hexdigest()}.cubin"
    kept = read_checked(path)
    if kept is not None:
        return kept
    image = compile_source(library, source, name, definitions, capability)
    write_checked(path, image)
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
def nvrtc() -> ctypes.CDLL:
    """The library. Raises KernelError where there is none."""
    tried = []
    for path in _nvrtc_paths():
        try:
            return ctypes.CDLL(path)
        except OSError as error:
            tried.append(str(error))
    raise KernelError(
        "dejax found no NVRTC, which compiles its CUDA kernels; pip install 'jax[cuda13]' (or cuda12) installs "
        f"nvidia-cuda-nvrtc. Tried: {'; '.join(tried) or 'no library of that name'}"
    )


def _nvrtc_paths() -> Iterator[str]:
    # First those of the wheels, which fit jax's plugin. `nvidia` is a namespace package of many wheels.
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        found = [path for path in Path(folder).glob("*/lib/libnvrtc.so.*") if ".alt." not in path.name]
        yield from map(str, sorted(found, reverse=True))
    yield from ("libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so")
