"""The folder of files that dejax keeps from one process to the next, and jax's cache of compiled programs in it."""

from __future__ import annotations

import os
import uuid
from pathlib import Path


def cache_folder() -> Path:
    """`$DEJAX_CACHE_DIR`, or `dejax` in the user's cache folder. It need not exist."""
    folder = os.environ.get("DEJAX_CACHE_DIR")
    if folder:
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "dejax"


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all; it replaces the one of this name.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # others may read it, unlike files of `tempfile`
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


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
