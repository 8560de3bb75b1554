"""Folders of the disk tier: each store has its own folder in every path that it was given.

A folder holds an owner file with an exclusive lock, which the kernel releases when the process ends. A process that
gets the lock may remove the folder. It removes the owner file last, so that any process can finish an interrupted
removal. A new folder has no lock for a moment, in which another process may remove it. Its maker notices that and
makes another.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from dejax import _compat

_PREFIX = "dejax-offload-"
_OWNER = "owner"
_ATTEMPTS = 100  # one fails only if another process cleans up at that very moment


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder that this process owns.

    Attributes:
        folder: its path.
        lock: descriptor of its locked owner file.
        device: number of its drive.
    """

    folder: Path
    lock: int
    device: int

    def release(self) -> None:
        """Removes the folder, then releases the lock."""
        _remove(self.folder)
        self.forget()

    def forget(self) -> None:
        """Closes the descriptor only, as in a forked child."""
        with contextlib.suppress(OSError):
            os.close(self.lock)


def claim(path: Path, owner: str = "ActivationStore") -> Claim:
    """Makes a folder in `path`, after removing folders of processes that have ended. `owner` begins error messages.

    Raises:
        FileNotFoundError: `path` does not exist.
        NotADirectoryError: `path` is not a folder.
        PermissionError: `path` cannot be written to.
        OSError: another reason, such as a full file system, or one without locks.
    """
    if not path.exists():
        raise FileNotFoundError(
            f"{owner}: `path` must be an existing folder, got {path}, which does not exist; create it, or give another"
        )
    if not path.is_dir():
        raise NotADirectoryError(f"{owner}: `path` must be a folder to write into, got {path}, which is a file")
    remove_abandoned(path)
    try:
        for _ in range(_ATTEMPTS):
            folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{_compat.process_index()}-{os.getpid()}-", dir=path))
            try:
                lock = _lock(folder / _OWNER)
            except BaseException:
                _remove(folder)
                raise
            if lock is not None:
                return Claim(folder, lock, os.fstat(lock).st_dev)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionError(
                f"{owner}: path {path} cannot be written to ({error.strerror}); give another"
            ) from error
        if error.errno in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP):
            raise OSError(
                error.errno, f"{owner}: path {path} is on a file system without locks; give a local one"
            ) from error
        raise OSError(error.errno, f"{owner}: path {path} cannot be used ({error.strerror}); give another") from error
    raise OSError(errno.EBUSY, f"{owner}: other processes keep removing new folders in {path}; give another")


def remove_abandoned(path: Path) -> list[Path]:
    """Removes folders of processes that ended without closing their stores; returns the removed ones."""
    removed = []
    for folder in path.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            # A new folder, or the rest of an interrupted removal: only an empty one is removed.
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        except OSError:
            continue  # another user's
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, folder / _OWNER) and _remove(folder):
                removed.append(folder)
        except OSError:
            continue  # the process that owns it still runs
        finally:
            os.close(lock)
    return removed


def lock_new_file(folder: Path, prefix: str) -> tuple[Path, int]:
    """Makes a file in `folder` with a lock that ends with the process; returns its path and descriptor."""
    for _ in range(_ATTEMPTS):
        descriptor, name = tempfile.mkstemp(prefix=prefix, dir=folder)
        os.close(descriptor)
        path = Path(name)
        lock = _lock(path)
        if lock is not None:
            return path, lock
    raise OSError(errno.EBUSY, f"other processes keep removing new files in {folder}")


def is_locked(path: Path) -> bool:
    """Whether the process that locked a file still runs. Removes the file of a process that has ended."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, path):
            path.unlink(missing_ok=True)
        return False
    except OSError:
        return True
    finally:
        os.close(descriptor)


def sectors_written(device: int) -> int | None:
    """Bytes written to a drive since the machine started; None where the system does not tell."""
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text(encoding="ascii").split()
        return int(fields[6]) * 512  # the file counts sectors of 512 bytes, whatever the drive's size is
    except (OSError, IndexError, ValueError):
        return None


def _lock(path: Path) -> int | None:
    """Opens or makes the file and locks it. None where another process removed it meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:  # the folder is gone
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, path):
            return descriptor
    except BaseException:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except OSError:
        return False


def _remove(folder: Path) -> bool:
    """Removes a folder, its owner file last. False where some file cannot be removed: then the owner file stays."""
    try:
        names = [name for name in os.listdir(folder) if name != _OWNER]
    except OSError:
        return not folder.exists()
    for name in names:
        place = folder / name
        if place.is_dir() and not place.is_symlink():
            shutil.rmtree(place, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                place.unlink()
    try:
        if set(os.listdir(folder)) - {_OWNER}:
            return False
        (folder / _OWNER).unlink(missing_ok=True)
        folder.rmdir()
    except OSError:
        return not folder.exists()
    return True
