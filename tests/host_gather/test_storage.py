"""Where the rows of a table lie: an array's own memory, files, and memory that cannot be allocated."""

from pathlib import Path

import jax
import numpy as np
import pytest

from dejax import _native
from dejax._files import to_save
from dejax.host_gather import HostTable, _spec, scatter
from dejax.host_gather.tables import _memory

ROWS = np.arange(40, dtype=np.float32).reshape(8, 5)


def aligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def test_a_table_in_the_memory_of_an_array() -> None:
    array = aligned(ROWS)
    table = HostTable.from_numpy(array, copy=False)
    array[3] = -1
    np.testing.assert_array_equal(table[np.array([3])], array[3:4])
    del array
    np.testing.assert_array_equal(table[np.array([3])], -np.ones((1, 5)))  # the table keeps the memory
    assert not table.read_only


def test_an_array_whose_memory_cannot_be_used_is_refused() -> None:
    with pytest.raises(ValueError, match="C-contiguous with copy=False"):
        HostTable.from_numpy(aligned(ROWS)[:, ::2], copy=False)
    raw = np.zeros(1 << 12, np.uint8)
    off = raw[(-raw.ctypes.data) % 64 + 4 :][: 40 * 4].view(np.float32).reshape(8, 5)
    with pytest.raises(ValueError, match="must begin at a multiple of"):
        HostTable.from_numpy(off, copy=False)


def test_npy_and_raw_files(tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", ROWS)
    table = HostTable.from_npy(tmp_path / "rows.npy")
    assert table.read_only
    np.testing.assert_array_equal(table[np.array([7, 0])], ROWS[[7, 0]])
    for offset in (0, 3, 4096, 8192 + 64):
        (tmp_path / "rows.bin").write_bytes(bytes(offset) + ROWS.tobytes())
        table = HostTable.from_file(tmp_path / "rows.bin", ROWS.shape, np.float32, offset=offset)
        np.testing.assert_array_equal(table[np.array([7, 0])], ROWS[[7, 0]])
    with pytest.raises(ValueError, match="read-only"):
        table.write(0, ROWS)
    with pytest.raises(ValueError, match=r"read-only .* copy it with HostTable.from_numpy"):
        scatter(table, np.array([0]), ROWS[:1])


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(ROWS.tobytes()[:-1])
    with pytest.raises(ValueError, match="needs a file of 160 bytes, this one has 159"):
        HostTable.from_file(tmp_path / "short.bin", ROWS.shape, np.float32)
    with pytest.raises(ValueError, match="must be an .npy file"):
        HostTable.from_npy(tmp_path / "short.bin")
    np.save(tmp_path / "short.npy", ROWS)
    content = (tmp_path / "short.npy").read_bytes()
    (tmp_path / "short.npy").write_bytes(content[:-8])
    with pytest.raises(ValueError, match="needs a file of"):
        HostTable.from_npy(tmp_path / "short.npy")
    np.save(tmp_path / "fortran.npy", np.asfortranarray(ROWS))
    with pytest.raises(ValueError, match="Fortran order"):
        HostTable.from_npy(tmp_path / "fortran.npy")
    with pytest.raises(FileNotFoundError):
        HostTable.from_npy(tmp_path / "none.npy")


def test_memory_that_cannot_be_pinned_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        class HostMemory:
            @staticmethod
            def allocate(*_: object) -> None:
                raise RuntimeError("cuMemHostAlloc of 160 bytes failed: CUDA_ERROR_OUT_OF_MEMORY")

    monkeypatch.setattr(_native, "extension", lambda what: Refuses)
    monkeypatch.setattr(_spec, "platform_of", lambda device: "cuda")
    with pytest.raises(MemoryError, match="OUT_OF_MEMORY.*cannot be swapped out"):
        HostTable.from_numpy(ROWS)


@pytest.mark.parametrize("dtype", [">f4", ">f2", ">i2", ">u4", ">c8", ">f8", "<f4"])
def test_every_byte_order(tmp_path: Path, dtype: str) -> None:
    rows = (ROWS * 3).astype(dtype)
    np.save(tmp_path / "rows.npy", rows)
    (tmp_path / "rows.bin").write_bytes(bytes(24) + rows.tobytes())
    with jax.enable_x64(True):
        for table in (
            HostTable.from_numpy(rows),
            HostTable.from_npy(tmp_path / "rows.npy"),
            HostTable.from_file(tmp_path / "rows.bin", rows.shape, dtype, offset=24),
            scatter(HostTable.zeros(rows.shape, dtype), np.arange(8), rows),
        ):
            assert table.dtype.isnative and table.dtype == np.dtype(dtype).newbyteorder("=")
            np.testing.assert_array_equal(table[np.array([7, 0])], rows[[7, 0]])
            np.testing.assert_array_equal(table.numpy(), rows)
        table = HostTable.empty(rows.shape, dtype)
        table.write(0, rows)
        np.testing.assert_array_equal(table[np.array([3])], rows[[3]])
    if dtype != "<f4":
        with pytest.raises(ValueError, match="byte order.*copy=True"):
            HostTable.from_numpy(aligned(rows), copy=False)


@pytest.mark.cpu_only("a GPU pins an array's own memory for any of its devices")
def test_only_the_first_cpu_device_uses_the_memory_of_an_array() -> None:
    with pytest.raises(ValueError, match="must be the first CPU device.*copy=True"):
        HostTable.from_numpy(aligned(ROWS), copy=False, device=jax.devices()[1])


def test_more_memory_than_the_machine_has_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (HostTable.zeros, HostTable.empty):
        with pytest.raises(MemoryError, match="bytes"):
            make((1 << 40, 128))
    monkeypatch.setattr(_memory.os, "sysconf", lambda name: 1 << 40)  # so that XLA is asked, and refuses
    with pytest.raises(MemoryError, match=r"could not be allocated|the machine has|bytes failed"):
        HostTable.zeros((1 << 40, 128))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_files_name_their_dtype(tmp_path: Path, dtype: str) -> None:
    rows, path = np.arange(6.0).reshape(3, 2).astype(jax.numpy.dtype(dtype)), tmp_path / "rows.npy"
    np.save(path, rows)  # as V2 or V1: numpy has no name for the dtype
    with pytest.raises(ValueError, match=r"rows.npy must name its dtype, got \|V"):
        HostTable.from_npy(path)
    with pytest.raises(TypeError, match=r"the dtype must be named, got \|V"):
        HostTable.from_numpy(np.load(path))
    want = rows[[2, 0]].astype(np.float32)
    table = HostTable.from_file(path, (3, 2), dtype, offset=128)
    np.testing.assert_array_equal(np.asarray(table[np.array([2, 0])], np.float32), want)
    np.save(path, to_save(rows))
    np.testing.assert_array_equal(np.asarray(HostTable.from_npy(path)[np.array([2, 0])], np.float32), want)
