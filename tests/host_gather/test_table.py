"""`HostTable`: constructors, lifetime, and a readable error for every way of misusing one."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax import _native
from dejax.host_gather import HostTable, TableClosedError, gather, scatter

pytestmark = pytest.mark.skipif(
    _native.unavailable_reason() is not None, reason=f"no native extension: {_native.unavailable_reason()}"
)
ROWS = np.arange(40, dtype=np.float32).reshape(8, 5)


def aligned(array: np.ndarray) -> np.ndarray:
    raw = np.empty(array.nbytes + 64, np.uint8)
    start = -raw.ctypes.data % 64
    copy = raw[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "float64", "complex64", "bfloat16", "float8_e5m2"]
)
def test_from_numpy_keeps_every_bit(dtype: str) -> None:
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    array = np.random.default_rng(0).integers(0, 2, (7, 3, 2)).astype(kind)
    with HostTable.from_numpy(array) as table:
        assert table.shape == array.shape and table.dtype == array.dtype and table.nbytes == array.nbytes
        assert len(table) == 7 and table.ndim == 3
        assert table.numpy().tobytes() == array.tobytes()
        assert np.asarray(table).tobytes() == array.tobytes()


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0), (1,), (3,)])
def test_shapes_without_elements_or_without_row_axes(shape: tuple[int, ...]) -> None:
    table = HostTable.zeros(shape, np.int32)
    assert table.numpy().shape == shape
    got = table[np.array([0, -1])]
    assert got.shape == (2, *shape[1:])
    assert not np.asarray(got).any()


def test_write_and_read_back() -> None:
    table = HostTable.zeros((4, 3))
    table.write(1, np.ones((2, 3)))
    np.testing.assert_array_equal(table.numpy().sum(1), [0, 3, 3, 0])
    np.testing.assert_array_equal(table[np.array([2, 3])].sum(1), [3, 0])
    with pytest.raises(ValueError, match="rows 3 to 5 do not fit in 4 rows"):
        table.write(3, np.ones((2, 3)))
    with pytest.raises(ValueError, match=r"`rows` must have shape \(3,\), got \(4,\)"):
        table.write(0, np.ones((1, 4)))
    with pytest.raises(ValueError, match="read-only"):
        table.numpy()[0] = 1


def test_in_place_memory_is_the_arrays() -> None:
    array = aligned(ROWS)
    table = HostTable.from_numpy(array, copy=False)
    array[3] = -1
    np.testing.assert_array_equal(table[np.array([3])], array[3:4])
    del array
    np.testing.assert_array_equal(table[np.array([3])], -np.ones((1, 5)))  # the table keeps it
    assert not table.read_only


def test_in_place_memory_that_cannot_be_used() -> None:
    with pytest.raises(ValueError, match="C-contiguous; use copy=True"):
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


def test_files_that_are_no_table(tmp_path: Path) -> None:
    (tmp_path / "short.bin").write_bytes(ROWS.tobytes()[:-1])
    with pytest.raises(ValueError, match="needs a file of 160 bytes, this one has 159"):
        HostTable.from_file(tmp_path / "short.bin", ROWS.shape, np.float32)
    with pytest.raises(ValueError, match="not an .npy file"):
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


def test_arguments_of_the_wrong_kind() -> None:
    assert HostTable.zeros(3).shape == (3,)
    with pytest.raises(TypeError, match=r"the shape must be integers \[rows, \*row\], got"):
        HostTable.zeros((3, 2.5))
    with pytest.raises(TypeError, match=r"one of jax.devices\(\), got 'gpu'"):
        HostTable.zeros((3, 2), device="gpu")
    with pytest.raises(ValueError, match=r"the shape must be \[rows, \*row\], got \(\)"):
        HostTable.from_numpy(np.float32(1))
    with pytest.raises(ValueError, match="shape"):
        HostTable.zeros((-1, 3))
    for dtype in (np.dtype("O"), np.dtype("M8[s]"), np.dtype(ml_dtypes.int4), np.dtype("S3")):
        with pytest.raises(TypeError, match="the dtype must"):
            HostTable.zeros((2,), dtype)


@pytest.mark.parametrize(
    ("misuse", "error", "message"),
    [
        (lambda t: jnp.take(t, jnp.array([0]), axis=0), TypeError, r"Use table\[ids\]"),
        (lambda t: jnp.sum(t), TypeError, r"Use table\[ids\]"),
        (lambda t: t[1:3], TypeError, "a slice would be copied"),
        (lambda t: t[0, 1], TypeError, "one array of row ids"),
        (lambda t: jax.jit(lambda ids: t[ids])(jnp.array([0])), TypeError, "Pass it as an argument"),
        (lambda t: jax.lax.scan(lambda c, row: (c, row[jnp.array([0])]), 0, t), ValueError, "`xs` of a scan"),
        (lambda t: jax.vmap(lambda t: t[jnp.array([0])])(t), ValueError, "sliced"),
        (lambda t: gather(ROWS, jnp.array([0])), TypeError, "must be a HostTable, got ndarray"),
        (lambda t: jax.grad(lambda t: t[jnp.array([0])].sum())(t), TypeError, "uint32"),
        (lambda t: jax.jit(lambda t: t.numpy())(t), TypeError, "only outside of jitted functions"),
    ],
    ids=lambda value: None,
)
def test_misuse_is_a_readable_error(misuse: Callable, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        misuse(HostTable.from_numpy(ROWS))


def test_a_stack_of_tables_cannot_be_mapped_over() -> None:
    tables = jax.tree.map(lambda x: jnp.stack([np.asarray(x)] * 2), HostTable.from_numpy(ROWS))
    with pytest.raises((ValueError, TypeError), match="sliced|in_axes=None"):
        jax.vmap(lambda t: t[jnp.array([0])])(tables)


def test_closing() -> None:
    table = HostTable.from_numpy(ROWS)
    view = table.numpy()
    f = jax.jit(lambda table, ids: table[ids])
    got = f(table, jnp.array([3]))
    table.close()
    table.close()
    assert table.is_closed() and "closed" in repr(table)
    np.testing.assert_array_equal(got, ROWS[[3]])
    np.testing.assert_array_equal(view, ROWS)  # a view keeps the memory
    for use in (lambda: table[np.array([0])], table.numpy, lambda: table.write(0, ROWS)):
        with pytest.raises(TableClosedError, match="closed, or donated"):
            use()
    with HostTable.from_numpy(ROWS) as table:
        assert not table.is_closed()
    assert table.is_closed()


def test_closing_while_steps_are_in_flight() -> None:
    rows = np.random.default_rng(0).random((4096, 256), np.float32)
    ids = jnp.asarray(np.random.default_rng(1).integers(0, len(rows), 8192, np.int32))
    f = jax.jit(lambda table, ids: table[ids])
    for _ in range(5):
        table = HostTable.from_numpy(rows)
        results = [f(table, ids) for _ in range(4)]
        table.close()
        del table
        for got in results:
            np.testing.assert_array_equal(got, rows[np.asarray(ids)])


def test_control_flow_and_pytrees() -> None:
    table = HostTable.from_numpy(ROWS)
    blocks = jnp.array([[0, 7], [3, 3]])

    @jax.jit
    def f(table: HostTable, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
        total, rows = jax.lax.scan(lambda c, ids: (c + table[ids].sum(), table[ids]), 0.0, blocks)
        other = jax.lax.cond(total > 0, lambda t: t[blocks[0]], lambda t: t[blocks[1]], table)
        return rows, other

    rows, other = f(table, blocks)
    np.testing.assert_array_equal(rows, ROWS[np.asarray(blocks)])
    np.testing.assert_array_equal(other, ROWS[[0, 7]])
    assert jax.tree.structure(table) == jax.tree.structure(HostTable.from_numpy(ROWS))
    ((path, _),) = jax.tree_util.tree_leaves_with_path({"features": table})
    assert jax.tree_util.keystr(path) == "['features'].rows"


def test_shared_by_the_devices_of_a_mesh() -> None:
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    table = HostTable.from_numpy(ROWS)
    shared = table.share(mesh)
    assert shared.read_only and "shared" in repr(shared)
    spec = jax.sharding.PartitionSpec
    ids = jnp.asarray(np.random.default_rng(0).integers(0, 8, (len(devices), 6), np.int32))
    f = jax.jit(
        jax.shard_map(lambda t, i: t[i], mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x"), check_vma=False)
    )
    np.testing.assert_array_equal(f(shared, ids), ROWS[np.asarray(ids)])
    with pytest.raises(ValueError, match="shared by several devices"):
        scatter(shared, np.array([0]), ROWS[:1])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_forked_child_gets_an_error() -> None:
    code = """
import os, sys, warnings
warnings.simplefilter("ignore")
import numpy as np
from dejax.host_gather import HostTable, TableClosedError
table = HostTable.from_numpy(np.ones((4, 4), np.float32))
child = os.fork()
if child == 0:
    try:
        table[np.array([0])]
    except TableClosedError as error:
        os._exit(7 if "spawn" in str(error) else 8)
    os._exit(9)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, timeout=60
    )
    assert ran.returncode == 7, ran.stderr.decode()


def test_memory_that_cannot_be_pinned_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from dejax.host_gather import _spec

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
def test_every_byte_order_gives_the_numbers(tmp_path: Path, dtype: str) -> None:
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


def test_results_land_on_the_device_that_was_asked_for() -> None:
    from dejax.host_gather import CachedTable, RowGradient, adam, prefetched_scan, typed_linear

    for device in jax.devices()[-1:]:
        table = HostTable.from_numpy(ROWS, device=device)
        with jax.default_device(device):
            assert HostTable.zeros((2, 2))._leaf.devices() == {device}
        ids = np.array([3, 1])
        cached = CachedTable.from_ids(table, [3])
        for got in (
            table[ids],
            jax.jit(gather)(table, ids),
            cached[ids],
            cached.cache,
            cached.slots,
            gather(table, ids, scale=np.ones(8, np.float32)),
            typed_linear(table, ids, ids % 2, jnp.ones((2, 5, 3))),
            prefetched_scan(lambda c, rows, _: (c + rows.sum(), None), 0.0, table, ids[:, None])[0],
            HostTable.zeros((2, 2), device=device)[ids],
        ):
            assert got.devices() == {device}
        optimizer = adam(0.1)
        state = optimizer.init(table)
        table, state = optimizer.update(RowGradient(ids, jnp.ones((2, 5))), state, table)
        assert {d for x in (table, state.first, state.second) for d in x._leaf.devices()} == {device}
        assert scatter(table, ids, jnp.ones((2, 5)))[ids].devices() == {device}


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="a GPU pins an array's own memory for any of its devices")
def test_in_place_memory_is_for_the_first_cpu_device() -> None:
    if len(jax.devices()) < 2:
        pytest.skip("one device")
    with pytest.raises(ValueError, match="must be the first CPU device.*copy=True"):
        HostTable.from_numpy(aligned(ROWS), copy=False, device=jax.devices()[1])


def test_memory_that_is_not_there_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for make in (HostTable.zeros, HostTable.empty):
        with pytest.raises(MemoryError, match="bytes"):
            make((1 << 40, 128))
    from dejax.host_gather import _memory

    monkeypatch.setattr(_memory.os, "sysconf", lambda name: 1 << 40)  # XLA is asked, and refuses
    with pytest.raises(MemoryError, match="could not be allocated|the machine has"):
        HostTable.zeros((1 << 40, 128))
