"""Kernels' text, compiled to binaries by Triton: in threads, and kept on disk for the next process.

Threads compile while the rest of a program is still traced: `prepare` only asks for a binary, `binary` waits for it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import linecache
import os
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dejax._cache import cache_folder, write_whole
from dejax._optional import optional

_MOST_THREADS = 16
_POINTERS = {"float": "fp", "bfloat": "bf", "int": "i", "uint": "u"}


class KernelCompileError(RuntimeError):
    """Triton does not compile a kernel, or made a binary of it that dejax does not launch."""


@dataclass(frozen=True, slots=True)
class KernelSource:
    """The source of a kernel's binary: its text, and the settings with which Triton compiles it.

    Attributes:
      text: a module in Triton's language.
      name: the name of the function in it that is the kernel.
      dtypes: the dtypes of the arrays to which its parameters point.
      num_warps: the number of warps of each program.
      num_stages: into how many stages the compiler divides loops, to load ahead.
      capability: the GPU's compute capability: ten times the major number, plus the minor one.
    """

    text: str
    name: str
    dtypes: tuple[str, ...]
    num_warps: int
    num_stages: int
    capability: int


@dataclass(frozen=True, slots=True)
class KernelBinary:
    """The binary of a kernel, as the driver loads it, and what its launch needs.

    Attributes:
      image: what the driver loads.
      name: the name of the function in it.
      threads: the number of threads of each program.
      shared_bytes: shared memory of each program.
    """

    image: bytes
    name: str
    threads: int
    shared_bytes: int


_lock = threading.Lock()
_binaries: dict[KernelSource, Future[KernelBinary]] = {}


def prepare(source: KernelSource) -> Future[KernelBinary]:
    """Begins to compile a kernel, or to read it if it is on disk, unless that has begun already."""
    with _lock:
        if source not in _binaries:
            _binaries[source] = _threads().submit(_made, source)
        return _binaries[source]


def binary(source: KernelSource) -> KernelBinary:
    """The binary of a kernel.

    Raises:
      ModuleNotFoundError: it is not on disk, and Triton is not installed.
      KernelCompileError: Triton refuses it.
    """
    return prepare(source).result()


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1), thread_name_prefix="dejax-kernels")


def _made(source: KernelSource) -> KernelBinary:
    path = _path(source)
    found = _read(path)
    if found is None:
        found = _compiled(source)
        _write(path, found)
    return found


# ------------------------------------------------------------------------------------------------ on disk


def _path(source: KernelSource) -> Path:
    from importlib import metadata  # takes time to import

    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:  # binaries of any version serve
        version = ""
    digest = hashlib.sha256(repr((source, version)).encode()).hexdigest()[:32]
    return cache_folder() / "kernels" / f"{digest}.kernel"


def _read(path: Path) -> KernelBinary | None:
    try:
        head, _, image = path.read_bytes().partition(b"\n")
        return KernelBinary(image=image, **json.loads(head))
    except (OSError, ValueError, TypeError):  # not there, or not whole
        return None


def _write(path: Path, found: KernelBinary) -> None:
    """Writes a binary to disk. If the folder cannot be written, the next process compiles the binary again."""
    head = asdict(found)
    image = head.pop("image")
    with contextlib.suppress(OSError):
        write_whole(path, json.dumps(head).encode() + b"\n" + image)


# ------------------------------------------------------------------------------------------------ Triton


def _compiled(source: KernelSource) -> KernelBinary:
    with optional("triton", of="the lowering 'dejax' of kernels"):
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    parameters = [f"r{i}" for i in range(len(source.dtypes))]
    # XLA's arrays begin at multiples of 16 bytes at least. Products and sums are not fused, as in Pallas' lowering:
    # what is equal in exact arithmetic is often equal in floats, and kernels that shall fuse do it by an instruction.
    ast = ASTSource(
        fn=_function(source),
        signature={p: _pointer(d) for p, d in zip(parameters, source.dtypes, strict=True)},
        constexprs={},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(parameters))},
    )
    options = {"num_warps": source.num_warps, "num_stages": source.num_stages, "enable_fp_fusion": False}
    try:
        compiled = triton.compile(ast, target=GPUTarget("cuda", source.capability, 32), options=options)
    except Exception as error:
        raise KernelCompileError(f"Triton does not compile the kernel {source.name}: {error}") from error
    made = compiled.metadata
    if getattr(made, "global_scratch_size", 0) or getattr(made, "profile_scratch_size", 0):
        raise KernelCompileError(f"the kernel {source.name} wants memory for all programs, which dejax does not give")
    return KernelBinary(compiled.asm["cubin"], source.name, 32 * source.num_warps, made.shared)


def _function(source: KernelSource) -> Any:
    """The kernel as Triton's decorator makes it, which reads the text from Python's cache of lines."""
    file = f"<dejax kernel {hashlib.sha256(source.text.encode()).hexdigest()[:16]}>"
    linecache.cache[file] = (len(source.text), None, source.text.splitlines(True), file)
    names: dict[str, Any] = {"__name__": f"dejax_kernel_{source.name}"}
    exec(compile(source.text, file, "exec"), names)
    return names[source.name]


def _pointer(dtype: str) -> str:
    """Triton's name of the type of a pointer."""
    if dtype == "bool":
        return "*i1"
    kind = dtype.rstrip("0123456789")
    return f"*{_POINTERS[kind]}{dtype[len(kind) :]}"
