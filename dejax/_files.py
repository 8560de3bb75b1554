"""Files that dejax keeps: its folder of caches, files that are written whole, and folders of arrays.

A folder of arrays has `.npy` files, also of dtypes that numpy lacks, and a JSON file that describes them. `numpy.save`
writes elements of bfloat16 and FP8 as bytes without a name. Here a file has elements of one field, with the name of the
dtype and the bits as unsigned integers.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import types
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np


def cache_folder() -> Path:
    """`$DEJAX_CACHE_DIR`, or `dejax` in the user's cache folder. It need not exist."""
    folder = os.environ.get("DEJAX_CACHE_DIR")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dejax"


_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a drive, a quota or the largest size of a file is used up


def is_full(error: BaseException) -> bool:
    """Whether an error says that a drive, a quota or the largest size of a file is used up."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], remedy: str = "make room on the drive") -> Iterator[None]:
    """Names the file or folder in errors of the block, which writes it: Python's errors of `write` name none.

    Args:
        path: the file or folder.
        remedy: what an error of a full drive ends with.

    Raises:
        OSError: as in the block, with the path. Also where the drive is full in place of another library's error, such
            as TensorStore's ValueError of hundreds of words.
    """
    try:
        yield
    except Exception as error:
        code = (
            error.errno
            if isinstance(error, OSError)
            else next((c for c in _FULL if os.strerror(c) in str(error)), None)
        )
        if code is None or getattr(error, "filename", None) is not None:
            raise
        raise OSError(code, os.strerror(code) + f"; {remedy}" * (code in _FULL), os.fspath(path)) from error


def _temporary(path: Path) -> Path:
    """A name beside `path` that no other process takes. Others may read it, unlike what `tempfile` makes.

    It tells the process. What processes that were killed have left in the folder goes.
    """
    begin = f".dejax-{_machine()}-"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent not in _cleaned:
        _cleaned.add(path.parent)
        for left in path.parent.glob(f"{begin}*"):
            process = left.name.removeprefix(begin).partition("-")[0]
            if process.isdigit() and not _runs(int(process)):
                shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
    return path.with_name(f"{begin}{os.getpid()}-{uuid.uuid4().hex}-{path.name}")


_cleaned: set[Path] = set()
"""Folders that this process has looked through."""


@functools.cache
def _machine() -> str:
    """What the numbers of processes are numbers of: this boot of this machine, and the container."""
    try:
        told = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        told = uuid.uuid4().hex
    return hashlib.blake2b(told.encode(), digest_size=6).hexdigest()


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # another user's
        return True
    return True


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary place for a file, which replaces the one at `path` when the block ends without an error.

    Other processes see the old file or the new one, each whole. Arrays that are mapped from the old file keep their
    contents.

    Raises:
        OSError: the folder cannot be made or written, or its drive is full.
    """
    temporary = _temporary(path)
    try:
        with writing(path):
            yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder, which replaces the one at `path` when the block ends without an error.

    Other processes see the old folder or the new one, and for a moment none. Of several that do this at once, the last
    one's folder stays.

    Raises:
        OSError: the folder cannot be made or written, or its drive is full.
    """
    work = _temporary(path)
    former = path.with_name(f".{path.name}-former-{uuid.uuid4().hex}")  # of a process that is killed, it may be all
    work.mkdir()
    try:
        with writing(path):
            yield work
        _move(work, path, former)
    except BaseException:
        with contextlib.suppress(OSError):  # it was not moved away, or another process has put its folder there
            former.replace(path)
        raise
    finally:
        shutil.rmtree(former, ignore_errors=True)
        shutil.rmtree(work, ignore_errors=True)


def _move(work: Path, path: Path, former: Path) -> None:
    while True:
        with contextlib.suppress(FileNotFoundError):  # moved away first: a process that ends here leaves one of the two
            path.replace(former)
        try:
            work.replace(path)
            return
        except OSError as error:
            if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                raise
        shutil.rmtree(former, ignore_errors=True)  # another process has put its folder there meanwhile


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Waits for other processes and threads that have locked the folder, where its file system has locks."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all; it replaces the one of this name.

    Raises:
        OSError: the folder cannot be made or written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def write_checked(path: Path, data: bytes) -> None:
    """Writes a file for `read_checked`. Where the folder cannot be written, the next process makes the data again."""
    with contextlib.suppress(OSError):
        write_whole(path, hashlib.sha256(data).digest() + data)


def read_checked(path: Path) -> bytes | None:
    """What `write_checked` wrote; None if the file is not there, or is not as it was written."""
    try:
        kept = path.read_bytes()
    except OSError:
        return None
    digest, data = kept[:32], kept[32:]
    return data if hashlib.sha256(data).digest() == digest else None


def programs_are_kept() -> bool:
    """Whether jax keeps compiled programs on disk, by the user's choice or by `keep_compiled_programs`."""
    import jax

    values = jax.config.values
    return bool(values["jax_enable_compilation_cache"] and values["jax_compilation_cache_dir"])


def keep_compiled_programs() -> None:
    """Turns on jax's cache of compiled programs on disk, in `cache_folder()`, unless the user has chosen a folder.

    dejax's commands call it before they compile anything: the second run of a command then reads the programs that the
    first one has compiled. Programs that compile in less than 50 ms are not kept.
    """
    import jax  # here, since readers of data sets write files without it

    if jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "programs"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)


def to_save(array: np.ndarray) -> np.ndarray:
    """The array as `numpy.save` takes it: as it is, or with elements of a field that names the dtype."""
    if array.dtype.type.__module__ == "numpy":
        return array
    return np.ascontiguousarray(array).view([(array.dtype.name, f"u{array.dtype.itemsize}")])


@contextlib.contextmanager
def _new(path: Path) -> Iterator[Path]:
    """A new file, which the block fills; nothing is left of it after an error.

    Arrays that are mapped from a former file at `path` keep their contents. To write over a mapped file would change
    these arrays, or end the process with SIGBUS.
    """
    path.unlink(missing_ok=True)
    try:
        with writing(path):
            yield path
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def save_npy(path: Path, array: np.ndarray) -> None:
    """Writes an `.npy` file, also of dtypes that numpy lacks.

    Raises:
        OSError: the file cannot be written, such as on a full drive. `numpy.save` then gives no reason.
    """
    with _new(path), path.open("wb") as file:
        # Something that is no file: to a file numpy writes by a function of C that gives no reason for an error.
        stream: Any = types.SimpleNamespace(write=file.write)
        np.lib.format.write_array(stream, to_save(array), allow_pickle=False)


def new_npy(path: Path, dtype: Any, shape: tuple[int, ...]) -> np.ndarray:
    """A new `.npy` file as a memory map to be filled, of zeros, with its space on the drive taken.

    Without its space, a write to the map would end the process with SIGBUS when the drive is full.

    Raises:
        OSError: the file cannot be made, such as on a full drive.
    """
    with _new(path):
        array: np.ndarray = np.lib.format.open_memmap(path, "w+", np.dtype(dtype), shape)
        with path.open("r+b") as file:
            _reserve(file.fileno(), path.stat().st_size)
    return array


def _reserve(descriptor: int, nbytes: int) -> None:
    """Takes the space of a file on its drive, or checks that there is room, where the file system cannot take it."""
    code = _fallocate(descriptor, nbytes)
    while code == errno.EINTR:
        code = _fallocate(descriptor, nbytes)
    if code in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
        there = os.fstatvfs(descriptor)
        code = errno.ENOSPC if there.f_bavail * there.f_frsize < nbytes else 0
    if code:
        raise OSError(code, os.strerror(code))


def _fallocate(descriptor: int, nbytes: int) -> int:
    """The system's `fallocate`: 0 or an error's number. `os.posix_fallocate` would write each block where it fails."""
    begin, size = ctypes.c_int64(0), ctypes.c_int64(nbytes)
    return ctypes.get_errno() if ctypes.CDLL(None, use_errno=True).fallocate(descriptor, 0, begin, size) else 0


def dtype_of_file(path: str | os.PathLike[str], dtype: np.dtype) -> np.dtype:
    """The dtype of the elements of a file, from the one in its header.

    Raises:
        ValueError: bytes without a name, as `numpy.save` writes of a dtype that it lacks.
    """
    if dtype.type is not np.void:
        return dtype
    name = dtype.names[0] if dtype.names and len(dtype.names) == 1 else ""
    if not hasattr(ml_dtypes, name):
        raise ValueError(
            f"{os.fspath(path)} must name its dtype, got {dtype}, which numpy.save writes of dtypes that it lacks, "
            "such as bfloat16; save float32, or read the file with the dtype that it was saved from: "
            "numpy.load(path).view(jnp.bfloat16)"
        )
    return np.dtype(getattr(ml_dtypes, name))


def mapped_npy(path: str | os.PathLike[str], remedy: str = "write the file again with numpy.save") -> np.ndarray:
    """The array of an `.npy` file as a read-only memory map. Messages of incomplete files end with `remedy`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: no whole `.npy` file, or one that does not name its dtype.
    """
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError:
        raise
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{os.fspath(path)} must be a complete .npy file, got an error: {error}; {remedy}") from error
    return array.view(dtype_of_file(path, array.dtype))


@contextlib.contextmanager
def unchanged(description: Path) -> Iterator[None]:
    """For a block that opens the files of a folder: they are those of one writer.

    A writer takes the folder's description away before it changes a file, or replaces the folder.

    Raises:
        ValueError: the folder was written again meanwhile.
    """
    before = _identity(description)
    try:
        yield
    finally:
        if before != _identity(description):
            raise ValueError(
                f"{description.parent} must stay as it is while it is opened, got a folder that is written at the same "
                "time; open it again"
            )


def _identity(path: Path) -> tuple[int, ...] | None:
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def write_description(path: Path, form: int, found: Mapping[str, Any]) -> None:
    """Writes the JSON file of a folder of arrays. It is written last: a folder without it is not complete.

    Args:
        path: the file.
        form: the version of its format.
        found: its content, which JSON can hold.
    """
    write_whole(path, json.dumps({"format": form, **found}, indent=1).encode())


def read_description(path: Path, form: int, *, writer: str, remedy: str) -> dict[str, Any]:
    """The content of a file that `write_description` wrote.

    Args:
        path: the file.
        form: the version of its format.
        writer: the function that writes such folders, for errors.
        remedy: what the user may do, for errors.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file of another format.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{path.parent} must have {path.name}, which {writer} writes last, got none: the folder is incomplete; "
            f"{remedy}"
        )
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if found.get("format") != form:
        raise ValueError(f"{path} must have format {form}, got {found.get('format')!r}; {remedy}")
    return found
