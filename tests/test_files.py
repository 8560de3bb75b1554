"""Files that dejax writes: whole or not at all, with their place on the drive taken, and errors that name them."""

from __future__ import annotations

import ast
import contextlib
import errno
import os
import resource
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from dejax import _files
from dejax.datasets import write_drive_table
from dejax.host_gather import DriveTable, HostTable
from dejax.minibatch import HeteroTopology

PACKAGE = Path(_files.__file__).parent
ROWS = np.arange(100_000, dtype=np.float32).reshape(-1, 4)
ENDS = np.random.default_rng(0).integers(0, 1000, (2, 50_000))
EDGES = {("a", "to", "a"): ENDS}


@contextlib.contextmanager
def small_drive(nbytes: int = 1 << 16) -> Iterator[None]:
    """Files may have this many bytes: a write beyond fails, as on a full drive."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


WRITERS: dict[str, Callable[[Path], Any]] = {
    "save_npy": lambda folder: _files.save_npy(folder / "rows.npy", ROWS),
    "new_npy": lambda folder: _files.new_npy(folder / "rows.npy", np.float32, ROWS.shape),
    "write_whole": lambda folder: _files.write_whole(folder / "rows", ROWS.tobytes()),
    "write_drive_table": lambda folder: write_drive_table(folder, ROWS),
    "HeteroTopology.save": lambda folder: HeteroTopology.from_edges(EDGES, {"a": 1000}).save(folder),
    "HeteroTopology.from_edges": lambda folder: HeteroTopology.from_edges(EDGES, {"a": 1000}, folder=folder),
}


@pytest.mark.parametrize("name", WRITERS)
def test_the_error_of_a_full_drive_names_the_file_and_the_file_goes(name: str, tmp_path: Path) -> None:
    with small_drive(), pytest.raises(OSError, match="make room on the drive") as caught:
        WRITERS[name](tmp_path)
    place = Path(caught.value.filename)
    assert place.parent == tmp_path and not place.exists()
    assert _files.is_full(caught.value)
    WRITERS[name](tmp_path)  # what is left of the first time does not matter


def test_a_map_to_be_filled_has_its_space_on_the_drive(tmp_path: Path) -> None:
    """A write to a map without space ends the process with SIGBUS when the drive is full."""
    rows = _files.new_npy(tmp_path / "rows.npy", np.float32, ROWS.shape)
    assert (tmp_path / "rows.npy").stat().st_blocks * 512 >= ROWS.nbytes
    rows[:] = ROWS
    former = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for again in (_files.new_npy, lambda path, dtype, shape: _files.save_npy(path, np.zeros(shape, dtype))):
        again(tmp_path / "rows.npy", np.int8, (2,))
        np.testing.assert_array_equal(former, ROWS)  # and is still there: no SIGBUS
    assert not np.load(tmp_path / "rows.npy").any()


def test_a_file_system_that_cannot_reserve(tmp_path: Path, monkeypatch: Any) -> None:
    """Then there must be room as the file is made, and a signal does not matter."""
    codes = iter([errno.EINTR, errno.EOPNOTSUPP, errno.EOPNOTSUPP])
    monkeypatch.setattr(_files, "_fallocate", lambda descriptor, nbytes: next(codes))
    assert not _files.new_npy(tmp_path / "rows.npy", np.float32, ROWS.shape).any()
    nothing = types.SimpleNamespace(f_bavail=9, f_frsize=512)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: nothing)
    with pytest.raises(OSError, match="No space left on device; make room on the drive"):
        _files.new_npy(tmp_path / "rows.npy", np.float32, ROWS.shape)


@pytest.mark.skipif(os.getuid() != 0, reason="needs a small file system of its own")
def test_a_full_file_system_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    if os.system(f"mount -t tmpfs -o size=256k tmpfs {tmp_path} 2> {os.devnull}") != 0:
        pytest.skip("cannot mount")
    try:
        for name in ("HeteroTopology.from_edges", "write_drive_table"):
            with pytest.raises(OSError, match=r"No space left on device; make room on the drive: '.*\.(npy|bin)'"):
                WRITERS[name](tmp_path / name)
    finally:
        assert os.system(f"umount --lazy {tmp_path}") == 0  # errors hold maps of files there


@pytest.mark.parametrize(
    "array",
    [
        ROWS,
        ROWS[:, ::2].T,
        np.zeros((0, 3), np.int64),
        np.float32(3.0).reshape(()),
        np.arange(5).astype(ml_dtypes.bfloat16),
        np.ones((2, 3), ml_dtypes.float8_e4m3fn),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_npy_file_comes_back(array: np.ndarray, tmp_path: Path) -> None:
    _files.save_npy(tmp_path / "x.npy", array)
    found = _files.mapped_npy(tmp_path / "x.npy")
    assert found.dtype == array.dtype
    np.testing.assert_array_equal(found, array)


def test_an_interrupted_table_leaves_room_for_the_next(tmp_path: Path) -> None:
    """Not a folder that "has a table already"."""
    with small_drive(), pytest.raises(OSError, match="make room"):
        write_drive_table(tmp_path, ROWS)
    with DriveTable.open(write_drive_table(tmp_path, ROWS), cache_bytes=1 << 20) as table:
        np.testing.assert_array_equal(table.numpy(), ROWS)


def test_several_replace_one_folder_at_once(tmp_path: Path) -> None:
    def replace(number: int) -> None:
        for _ in range(100):
            with _files.replacing_folder(tmp_path / "folder") as work:
                for name in "ab":
                    (work / name).write_text(str(number))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(replace, range(4)))
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert len({path.read_text() for path in (tmp_path / "folder").iterdir()}) == 1
    with pytest.raises(KeyboardInterrupt), _files.replacing_folder(tmp_path / "folder") as work:
        (work / "a").write_text("half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert sorted(path.name for path in (tmp_path / "folder").iterdir()) == ["a", "b"]


KILLED = """
import os, signal, sys
from pathlib import Path
from dejax import _files
here = Path(sys.argv[1])
with _files.replacing(here / "file.csv") as file, _files.replacing_folder(here / "folder") as folder:
    file.write_text("half")
    (folder / "a").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


WRITES = """
import sys
from pathlib import Path
from dejax._files import write_whole
write_whole(Path(sys.argv[1]), b"x")
"""


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    """But not what one that runs is writing."""
    with _files.replacing(tmp_path / "running") as running:
        running.write_text("half")
        subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False)
        assert len(list(tmp_path.iterdir())) == 3
        subprocess.run([sys.executable, "-c", WRITES, str(tmp_path / "other")], check=True)
        assert {path.name for path in tmp_path.iterdir()} == {running.name, "other"}
    assert {path.name for path in tmp_path.iterdir()} == {"running", "other"}


@pytest.mark.parametrize("again", [False, True])
def test_a_folder_that_is_written_while_it_is_opened(again: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """The lists of a graph are all those of one writer, or none."""
    first, second = (HeteroTopology.from_edges({("a", "to", "a"): ends}, {"a": 1000}) for ends in (ENDS, ENDS[::-1]))
    first.save(tmp_path)
    opened, calls = HostTable.from_npy, []

    def slowly(path: Path) -> HostTable:
        calls.append(path)
        if again and len(calls) == 2:
            second.save(tmp_path)
        return opened(path)

    monkeypatch.setattr(HostTable, "from_npy", slowly)
    with (
        pytest.raises(ValueError, match="must stay as it is while it is opened") if again else contextlib.nullcontext()
    ):
        HeteroTopology.load(tmp_path)
    assert len(calls) > 2


def test_arrays_are_written_to_files_at_one_place() -> None:
    """`numpy.save` gives no reason for an error, and a map of `open_memmap` has no space on the drive."""
    for path in PACKAGE.rglob("*.py"):
        if path.name == "_files.py":
            continue
        called = {
            ast.unparse(node.func) for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        }
        assert not called & {"np.save", "np.lib.format.open_memmap"}, path
