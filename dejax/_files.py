"""Files that dejax keeps: its folder of caches, files that are written whole, and folders of arrays.

A folder of arrays has `.npy` files, also of dtypes that numpy lacks, and a JSON file that describes them. `numpy.save`
writes elements of bfloat16 and FP8 as bytes without a name. Here a file has elements of one field, with the name of the
dtype and the bits as unsigned integers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
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


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary place for a file, which replaces the one at `path` when the block ends without an error.

    Other processes see the old file or the new one, each whole.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # others may read it, unlike files of `tempfile`
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file that other processes see whole or not at all; it replaces the one of this name.

    Raises:
        OSError: the folder cannot be made or written.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(data)


def without_former(path: Path) -> Path:
    """`path`, without the file that was there: arrays that are mapped from that file keep their contents.

    To write over a mapped file would change these arrays, or end the process with SIGBUS.
    """
    path.unlink(missing_ok=True)
    return path


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
