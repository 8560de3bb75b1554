"""Folders of the disk tier: each store has its own in every path that it was given, locked while its process lives."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

_PREFIX = "dejax-offload-"
_OWNER = "owner"


@dataclass(frozen=True, slots=True)
class Claim:
    """A folder of our own.

    Attributes:
        folder: where.
        lock: descriptor of its owner file, under an exclusive lock that the kernel takes away when the process ends.
    """

    folder: Path
    lock: int

    def release(self) -> None:
        """Removes the folder, then gives the lock up."""
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self.lock)


def claim(path: Path) -> Claim:
    """Makes a folder in `path`, after removing those whose owners are dead.

    Raises:
        FileNotFoundError: `path` is not there.
        NotADirectoryError: it is not a folder.
        PermissionError: it cannot be written to.
    """
    if not path.exists():
        raise FileNotFoundError(f"ActivationStore: path {path} does not exist; create it, or give another")
    if not path.is_dir():
        raise NotADirectoryError(f"ActivationStore: path {path} is not a folder; give the folder to write into")
    remove_abandoned(path)
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=path))
        lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PermissionError(
                f"ActivationStore: path {path} cannot be written to ({error.strerror}); give another"
            ) from error
        raise
    fcntl.flock(lock, fcntl.LOCK_EX)
    return Claim(folder, lock)


def remove_abandoned(path: Path) -> list[Path]:
    """Removes folders of stores whose process has ended without closing them; gives what was removed."""
    removed = []
    for folder in path.glob(f"{_PREFIX}*"):
        try:
            lock = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            continue  # being made, or being removed, or not ours to touch
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            continue  # its owner lives
        else:
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder)
        finally:
            os.close(lock)
    return removed


def sectors_written(path: Path) -> int | None:
    """Bytes that the drive under `path` has been asked to write since the machine started; None where nothing tells."""
    device = os.stat(path).st_dev
    try:
        fields = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text(encoding="ascii").split()
        return int(fields[6]) * 512  # that file counts in sectors of 512 bytes, whatever the drive's are
    except (OSError, IndexError, ValueError):
        return None
