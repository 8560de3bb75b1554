"""Kernels' text, compiled to binaries by Triton: in processes, and kept on disk for the next program.

Kernels are compiled while the rest of a program is still traced, and while XLA compiles it: `prepare` only asks for a
binary, `found` waits for it. What compiles is the process of `compiler`, for which threads wait.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from dejax._files import cache_folder, read_checked, write_checked
from dejax._optional import is_there, optional
from dejax.pallas.lowering import compiler
from dejax.pallas.lowering.compiler import received

_MOST_AT_ONCE = 32


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

    @property
    def key(self) -> int:
        """A signed 64-bit hash of the source, by which a compiled program names the kernel."""
        return int.from_bytes(hashlib.sha256(repr(self).encode()).digest()[:8], "little", signed=True)


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
_by_key: dict[int, Future[KernelBinary]] = {}


def prepare(source: KernelSource) -> Future[KernelBinary]:
    """Begins to compile a kernel, or to read it if it is on disk, unless that has begun already.

    The binary, or else a `ModuleNotFoundError` where Triton is not installed or a `KernelCompileError`, comes later.
    What has failed is tried again: the process that compiles may have ended for want of memory.
    """
    with _lock:
        known = _binaries.get(source)
        if known is None or (known.done() and known.exception() is not None):
            known = _binaries[source] = _by_key[source.key] = _threads().submit(_made, source)
        return known


def found(key: int) -> tuple[bytes, int]:
    """The image, and the bytes of shared memory, of the kernel with this `KernelSource.key`, for its first launch.

    Raises:
      KernelCompileError: Triton refuses it, or this process has not asked for it and it is not on disk.
      ModuleNotFoundError: it is not on disk, and Triton is not installed.
    """
    with _lock:
        coming = _by_key.get(key)
    made = coming.result() if coming else _read(_path(key))
    if made is None:
        raise KernelCompileError(f"it was compiled by another process and is not in {_path(key)}: trace it again")
    return made.image, made.shared_bytes


def is_kept(key: int) -> bool:
    """Whether `found` has the binary with this key, or will have it. A file that is not whole counts as none."""
    with _lock:
        if key not in _by_key and (made := _read(_path(key))) is not None:
            _by_key[key] = Future()
            _by_key[key].set_result(made)
        return key in _by_key


@functools.cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MOST_AT_ONCE, os.cpu_count() or 1), thread_name_prefix="dejax-kernels")


def _made(source: KernelSource) -> KernelBinary:
    path = _path(source.key)
    made = _read(path)
    if made is None:
        made = _compiled(source)
        _write(path, made)
    return made


# ------------------------------------------------------------------------------------------------ on disk


def _path(key: int) -> Path:
    return cache_folder() / "kernels" / f"{key & (2**64 - 1):016x}-{_version()}.kernel"


@functools.cache
def _version() -> str:
    """The version of what makes binaries of texts: the package triton and the file `compiler.py`."""
    from importlib import metadata  # takes time to import

    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "any"
    return f"{triton}-{hashlib.sha256(Path(compiler.__file__).read_bytes()).hexdigest()[:8]}"


def _read(path: Path) -> KernelBinary | None:
    data = read_checked(path)
    if data is None:
        return None
    head, _, image = data.partition(b"\n")
    try:
        return KernelBinary(image=image, **json.loads(head))
    except TypeError:  # of an earlier version, with other fields
        return None


def _write(path: Path, made: KernelBinary) -> None:
    """Writes a binary to disk. If the folder cannot be written, the next process compiles the binary again."""
    head = asdict(made)
    image = head.pop("image")
    write_checked(path, json.dumps(head).encode() + b"\n" + image)


# ------------------------------------------------------------------------------------------------ Triton


def _compiled(source: KernelSource) -> KernelBinary:
    with optional("triton", of="the lowering 'dejax' of kernels"):
        if not is_there("triton"):
            raise ModuleNotFoundError(name="triton")
    ours, theirs = socket.socketpair()
    answer = b""
    with ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
        with theirs:
            socket.send_fds(_compiler(), [b" "], [theirs.fileno()])
        ours.sendall(json.dumps(asdict(source)).encode())
        ours.shutdown(socket.SHUT_WR)
        answer = received(ours)
    line, _, image = answer.partition(b"\n")
    head = json.loads(line or b'{"error": "its process ended before it was done; stderr may say why"}')
    if "error" in head:
        raise KernelCompileError(f"Triton does not compile the kernel {source.name}: {head['error']}")
    return KernelBinary(image=image, **head)


_process: list[tuple[socket.socket, subprocess.Popen[bytes]]] = []
_process_lock = threading.Lock()


def _compiler() -> socket.socket:
    """A socket of the process of `compiler`, which ends when the socket does. The first kernel starts the process.

    The process has a session of its own, because Ctrl-C goes to all processes of the session in front. Where it has
    ended nevertheless, another one starts.
    """
    with _process_lock:  # several threads ask at once, for one process
        if _process and _process[0][1].poll() is not None:
            _process.pop()[0].close()
        if not _process:
            ours, theirs = socket.socketpair()
            with theirs:
                command = [sys.executable, compiler.__file__, str(theirs.fileno())]
                environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
                started = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], start_new_session=True)
                _process.append((ours, started))
        return _process[0][0]
