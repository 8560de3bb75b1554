"""Tables on a drive: the cache, the reads, bad files, faults of the drive, and lifetimes."""

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax import _native
from dejax.distributed import share
from dejax.host_gather import (
    CachedTable,
    DeviceTable,
    DriveTable,
    HostTable,
    SplitTable,
    TableClosedError,
    gather,
    gather_done,
    gather_start,
    prefetched_scan,
    scatter,
    shardings,
)
from dejax.minibatch import FeatureStore, infer_layers
from tests.host_gather.rows import IDS, ROWS, file_of, on_drive

RNG = np.random.default_rng(1)
ENGINES = {"ring": {}, "threads": {"io_uring": False, "threads": 3}, "page cache": {"direct": False}}
read = jax.jit(gather)


def faults(table: DriveTable):
    """Injects faults into the reads of a table."""
    return _native.extension("test").offload_testing.Interceptor.of_reader(table._reader("test"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((300, 6), np.float32),  # rows of one block, not aligned to it
        ((64, 1024), np.float32),  # as long as a block, across two of them
        ((5, 70_000), np.int8),  # across many blocks, and more than one read
        ((4, 50_000), np.float32),
        ((1000,), np.uint16),
        ((33, 2, 3), ml_dtypes.float8_e4m3fn),
    ],
)
def test_rows_of_all_sizes(engine: str, shape: tuple[int, ...], dtype: type) -> None:
    rows = RNG.integers(0, 100, shape).astype(dtype)
    path = file_of(np.frombuffer(rows.tobytes(), np.uint8).reshape(shape[0], -1))
    row_bytes = rows.nbytes // len(rows)
    table = DriveTable.from_file(path, shape, dtype, offset=128, cache_bytes=7 * row_bytes, **ENGINES[engine])
    for _ in range(3):
        ids = RNG.integers(0, len(rows), 20)
        np.testing.assert_array_equal(table[ids], rows[ids])
    np.testing.assert_array_equal(table[np.arange(len(rows))], rows)
    np.testing.assert_array_equal(table.numpy(), rows)
    stats = table.stats()
    assert stats["rows_in_cache"] == min(7, len(rows)) and ("io_uring" == stats["engine"]) == (engine == "ring")


def test_a_block_is_read_once_and_neighbours_together() -> None:
    rows = np.arange(4096 * 64, dtype=np.float32).reshape(4096, 64)  # 16 rows a block, 128 bytes before the first
    table = on_drive(rows, 4096)
    table[np.arange(0, 14)]
    assert table.stats()["reads"] == 1 and table.stats()["read_bytes"] == 4096
    table[np.arange(100, 500)]
    stats = table.stats()
    assert stats["reads"] == 2 and stats["read_bytes"] <= 4096 + 400 * 256 + 2 * 4096
    table[np.arange(100, 500)]
    assert table.stats()["reads"] == 2 and table.stats()["cache_rows"] == 400


def test_a_start_reads_while_the_step_computes() -> None:
    """With a slow drive, the reads of both starts are under way together."""
    table = on_drive(ROWS, 50, io_uring=False, threads=8)

    @jax.jit
    def step(table, ids, x):
        first, x = gather_start(table, ids, before=x)
        second, x = gather_start(table, ids + 20, before=x)
        y = x @ x
        return gather_done(first, after=y)[0], gather_done(second, after=y)[0]

    ids = jnp.arange(10)
    for k, got in enumerate(step(table, ids, jnp.eye(3))):
        np.testing.assert_array_equal(got, ROWS[20 * k : 20 * k + 10])
    assert table.stats()["requests_open"] == 0
    # A start without an end holds nothing back.
    alone = jax.jit(lambda table, ids: gather_start(table, ids).ticket)
    for _ in range(300):
        alone(table, ids).block_until_ready()
    assert table.stats()["requests_open"] <= 256
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)


def test_inference_reads_ahead() -> None:
    table, hot = on_drive(ROWS, 40), np.array([4, 0, 49])
    cold = np.setdiff1d(np.arange(50), hot)
    split = SplitTable.from_parts(on_drive(ROWS[cold], 40), DeviceTable.from_numpy(ROWS[hot]), hot)
    ids = np.array([3, -1, 49, 17, 4, 50, 30], np.int32)
    for some in (table, CachedTable.from_ids(on_drive(ROWS, 40), hot), split):
        ahead, reader = some._rows_ahead(), some._host_part
        number = ahead.begin(ids)
        read = reader.stats()["drive_rows"]
        np.testing.assert_array_equal(some[ids], gather(HostTable.from_numpy(ROWS), ids))
        assert reader.stats()["drive_rows"] == read
        ahead.end(number)
        assert reader.stats()["requests_open"] == 0
    assert HostTable.from_numpy(ROWS)._rows_ahead() is None

    def layer(weight, batch):
        return batch.own * weight

    table, store = on_drive(ROWS, 20), FeatureStore()
    found = infer_layers([layer], [2.0], {}, {"a": 50}, store.with_table("a", table), batch_size=8)
    np.testing.assert_array_equal(found["a"].numpy(), 2 * ROWS)
    stats = table.stats()
    assert stats["drive_rows"] == 50 and stats["cache_rows"] == 0 and stats["requests_open"] == 0


def test_loops_read_ahead() -> None:
    table, ids = on_drive(ROWS, 5), RNG.integers(-1, 51, (6, 8)).astype(np.int32)
    want = prefetched_scan(lambda c, rows, _: (c, rows), 0.0, HostTable.from_numpy(ROWS), ids)[1]
    for depth in (1, 3):
        got = prefetched_scan(lambda c, rows, _: (c, rows), 0.0, table, ids, depth=depth)[1]
        np.testing.assert_array_equal(got, want)
    assert table.stats()["requests_open"] == 0


def test_a_scan_leaves_rows_that_are_asked_for_often() -> None:
    rows = np.arange(2000, dtype=np.float32)[:, None].repeat(4, 1)
    table, often = on_drive(rows, 100), np.arange(0, 2000, 40)
    for _ in range(4):
        table[often]
    for start in range(0, 2000, 20):
        np.testing.assert_array_equal(table[np.arange(start, start + 20)], rows[start : start + 20])
    before = table.stats()["drive_rows"]
    table[often]
    assert table.stats()["drive_rows"] - before <= 5
    # Expected visits keep them from the first time on.
    visits = np.ones(2000)
    visits[often] = 9
    told = on_drive(rows, 60, visits=visits)
    told[often]
    for start in range(0, 2000, 5):
        told[np.arange(start, start + 5)]
    before = told.stats()["drive_rows"]
    told[often]
    assert told.stats()["drive_rows"] - before <= 5


def test_ids_out_of_range_and_scales() -> None:
    table, host = on_drive(ROWS, 3), HostTable.from_numpy(ROWS)
    scale = RNG.random(50).astype(np.float32)
    for options in (
        {"fill_value": 3.0, "scale": scale},
        {"mode": "clip"},
        {"scale": 0.5, "out_dtype": jnp.float16},
    ):
        np.testing.assert_array_equal(gather(table, IDS, **options), gather(host, IDS, **options))
        least = np.array(
            [-(2**31), 2**31 - 1, 7]
        )  # the least number is that of rows on the device, where there are some
        np.testing.assert_array_equal(gather(table, least, **options), gather(host, least, **options))
        cached = CachedTable.from_ids(table, [4, 49])
        np.testing.assert_array_equal(gather(cached, IDS, **options), gather(host, IDS, **options))
    # XLA averages rows from a drive, and a native call those in memory: they may round differently.
    options = {"reduce": "mean", "scale": scale, "fill_value": 7.0}
    for read_here in (table, cached):
        np.testing.assert_allclose(
            gather(read_here, IDS, **options), gather(host, IDS, **options), rtol=1e-6, atol=1e-7
        )
    with pytest.raises(Exception, match="id 50 is out of range for a table of 50 rows"):
        gather(table, np.array([3, 50]), mode="raise").block_until_ready()
    assert read(on_drive(np.zeros((0, 3), np.float32)), np.array([0])).tolist() == [[0, 0, 0]]
    assert read(on_drive(np.zeros((3, 0), np.float32)), np.array([0])).shape == (1, 0)


def test_writing_is_refused() -> None:
    table = on_drive(ROWS)
    with pytest.raises(ValueError, match=r"lies on a drive.*HostTable\.from_numpy"):
        scatter(table, np.array([0]), ROWS[:1])
    with pytest.raises(ValueError, match="read-only DriveTable"):
        FeatureStore().with_table("paper", table, trainable=True)


def test_bad_arguments(tmp_path: Path) -> None:
    path = file_of(ROWS)
    with pytest.raises(ValueError, match="`cache_bytes` must be at least 24"):
        DriveTable.from_npy(path, cache_bytes=23)
    with pytest.raises(ValueError, match=r"`visits` must be real\[50\]"):
        DriveTable.from_npy(path, cache_bytes=99, visits=np.ones(3))
    with pytest.raises(ValueError, match="byte order"):
        DriveTable.from_file(path, (2, 2), ">f4", cache_bytes=99)
    with pytest.raises(ValueError, match="`threads`"):
        DriveTable.from_npy(path, cache_bytes=99, threads=0)
    with pytest.raises(ValueError, match=r"needs a file of 1336 bytes.*copy or write it again"):
        DriveTable.from_file(path, (50, 6), np.float32, offset=8 + path.stat().st_size - 1200, cache_bytes=99).close()
    with pytest.raises(OSError, match="nothing"):
        DriveTable.from_npy(tmp_path / "nothing.npy", cache_bytes=99)


@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_files_that_change_while_they_are_used(engine: str) -> None:
    for change, why in (
        (lambda p: os.truncate(p, 500), "became shorter"),
        (lambda p: p.write_bytes(bytes(4000)), "was written"),
    ):
        path = file_of(ROWS)
        table = DriveTable.from_npy(path, cache_bytes=2400, **ENGINES[engine])
        np.testing.assert_array_equal(table[np.arange(4)], ROWS[:4])
        change(path)
        with pytest.raises(Exception, match=rf"row \d+: .*{path.name} {why}.*open the table again"):
            table[np.arange(30, 50)].block_until_ready()
        np.testing.assert_array_equal(table[np.arange(4)], ROWS[:4])  # what the cache has is right
        with pytest.raises(ValueError, match=rf"DriveTable.numpy: .*{path.name} {why}.*open the table again"):
            table.numpy()
    # A file that takes the place of another one leaves the open one as it is.
    path, other = file_of(ROWS), file_of(-ROWS)
    table = DriveTable.from_npy(path, cache_bytes=2400, **ENGINES[engine])
    os.replace(other, path)
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)
    np.testing.assert_array_equal(table.numpy(), ROWS)
    path.unlink()
    view = table.numpy()
    table.close()
    np.testing.assert_array_equal(view, ROWS)


@pytest.mark.parametrize("engine", ["ring", "threads"])
def test_read_errors_name_file_and_row(engine: str) -> None:
    table = on_drive(ROWS, 50, **ENGINES[engine])
    interceptor = faults(table)
    interceptor.inject("read", 1)
    with pytest.raises(Exception, match=r"row 7: .*injected fault"):
        table[np.array([7])].block_until_ready()
    np.testing.assert_array_equal(table[np.array([7])], ROWS[[7]])  # the next one reads it
    interceptor.slow(0.05)
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)
    assert table.stats()["wait_seconds"] > 0.04


def test_gathers_that_end_before_their_reads() -> None:
    """A gather with a bad id, or a start without an end, leaves reads under way. They reach no other rows."""
    rows = np.arange(400, dtype=np.float32)[:, None].repeat(6, 1)
    table, alone = on_drive(rows, 4, threads=4), jax.jit(lambda table, ids: gather_start(table, ids).ticket)
    interceptor = faults(table)
    for k in range(4):
        interceptor.slow(0.01)
        with pytest.raises(Exception, match="id 500 is out of range"):
            gather(table, np.append(np.arange(6) * 30 + k, 500), mode="raise").block_until_ready()
        alone(table, np.array([70 + k, 71 + k])).block_until_ready()
        interceptor.slow(0)
        ids = np.array([200 + k, 350 - k])
        for _ in range(3):
            np.testing.assert_array_equal(table[ids], rows[ids])
            time.sleep(0.02)


def test_threads_share_a_table() -> None:
    rows = RNG.standard_normal((3000, 16)).astype(np.float32)
    path, wrong = file_of(rows), []
    table = DriveTable.from_npy(path, cache_bytes=100 * 64)

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            ids = rng.integers(0, 3000, 200)
            if not np.array_equal(read(table, ids), rows[ids]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    [thread.start() for thread in threads]
    other = DriveTable.from_npy(path, cache_bytes=100 * 64)
    np.testing.assert_array_equal(other[np.arange(500)], rows[:500])
    [thread.join() for thread in threads]
    assert not wrong


def _in_child(table: DriveTable, connection) -> None:
    try:
        table[np.array([0])]
        connection.send("read")
    except TableClosedError as error:
        connection.send(str(error))


@pytest.mark.filterwarnings("ignore:os.fork")
def test_forked_children_get_an_error() -> None:
    table = on_drive(ROWS)
    np.testing.assert_array_equal(table[IDS[:1]], ROWS[IDS[:1]])
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    child = context.Process(target=_in_child, args=(table, theirs))
    child.start()
    assert ours.poll(60) and "before this process was forked" in ours.recv()
    child.join(60)
    assert child.exitcode == 0
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)


def test_closing_with_reads_under_way() -> None:
    rows = RNG.standard_normal((2000, 64)).astype(np.float32)
    ids = jnp.asarray(RNG.integers(0, 2000, 1000))
    for _ in range(5):
        table = on_drive(rows, 100)
        faults(table).slow(0.001)
        results = [read(table, ids) for _ in range(3)]
        jax.jit(lambda table, ids: gather_start(table, ids).ticket)(table, ids[::-1])
        table.close()
        with pytest.raises(TableClosedError):
            table[ids]
        with pytest.raises(TableClosedError):
            table.stats()
        del table
        for got in results:
            np.testing.assert_array_equal(got, rows[np.asarray(ids)])


_SECCOMP = """
import ctypes, struct
# Programs of the kernel's packet filter: a system call of these numbers fails with EPERM.
def instruction(code, yes, no, value):
    return struct.pack("HBBI", code, yes, no, value)
program = b"".join([
    instruction(0x20, 0, 0, 0),             # the call's number
    instruction(0x35, 0, 2, 425),           # from io_uring_setup ...
    instruction(0x25, 1, 0, 427),           # ... to io_uring_register
    instruction(0x06, 0, 0, 0x00050000 | 1),
    instruction(0x06, 0, 0, 0x7FFF0000),
])
class Filter(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("program", ctypes.c_char_p)]
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, ctypes.byref(Filter(5, program)), 0, 0) == 0
import numpy as np
from dejax.host_gather import DriveTable
table = DriveTable.from_npy({path!r}, cache_bytes=2400)
assert np.array_equal(table[np.arange(50)], np.load({path!r}))
print(table.stats()["engine"])
"""


def _printed(code: str, *arguments: str) -> str:
    """What a process of its own prints."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_io_uring_threads_read() -> None:
    """In many containers seccomp forbids io_uring. Here it does in another process, which shares the file."""
    path = file_of(ROWS)
    table = DriveTable.from_npy(path, cache_bytes=2400)
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)
    code = _SECCOMP.replace("{path!r}", repr(str(path)))
    assert "threads (no io_uring: io_uring_setup: Operation not permitted)" in _printed(code)


_LIMITED = """
import resource, sys
import jax, jax.numpy as jnp, numpy as np
from dejax.host_gather import DriveTable, HostTable, prefetched_scan
path, rows = sys.argv[1], 1 << 20
def step(w, x, _):
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w - 1).mean())(w)
    return w - 0.01 * gradient, loss
small = DriveTable.from_file(path, (4, 1024), np.float32, cache_bytes=1 << 14)
train = jax.jit(lambda w, table, ids: prefetched_scan(step, w, table, ids))
train(jnp.zeros(1024), small, np.zeros((8, 256), np.int32))
def held():
    return int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (held() + (1 << 30), -1))
try:
    HostTable.from_file(path, (rows, 1024), np.float32)
    raise SystemExit("the limit does not hold")
except (MemoryError, OSError, RuntimeError):
    pass
table = DriveTable.from_file(path, (rows, 1024), np.float32, cache_bytes=64 << 20)
w = jnp.zeros(1024)
for k in range(3):
    ids = np.random.default_rng(k).integers(0, rows, (8, 256)).astype(np.int32)
    w, losses = train(w, table, ids)
assert np.isfinite(losses).all() and table.stats()["drive_rows"] > 6000
print("trained")
"""


def test_a_table_larger_than_the_memory_of_a_process_trains(tmp_path: Path) -> None:
    """4 GiB in a process that may take 1 GiB more; the file has a hole in place of most rows."""
    path = tmp_path / "rows.bin"
    with open(path, "wb") as file:
        file.write(np.ones(1 << 20, np.float32).tobytes())
        file.truncate(4 << 30)
    assert "trained" in _printed(_LIMITED, str(path))


@pytest.mark.slow
def test_soak() -> None:
    """Random gathers with random faults: each gives the right rows, or an error."""
    rows = RNG.standard_normal((20_000, 40)).astype(np.float32)
    tables = [on_drive(rows, 700, **engine) for engine in ENGINES.values()]
    interceptors, failed = [faults(table) for table in tables], 0
    sizes = [RNG.integers(0, 20_000, size).astype(np.int32) for size in (1, 30, 200, 900)]
    started = jax.jit(lambda table, ids, x: gather_done(gather_start(table, ids), after=x + 1))
    for turn in range(100_000):
        which = turn % len(tables)
        table, interceptor = tables[which], interceptors[which]
        ids = RNG.integers(-5, 20_005, len(sizes[RNG.integers(0, 4)])).astype(np.int32)
        chance = RNG.random()
        if chance < 0.01:
            interceptor.inject("read", int(RNG.integers(1, 4)))
        interceptor.slow(0.0005 if 0.5 < chance < 0.505 else 0)
        try:
            got = np.asarray(read(table, ids) if chance < 0.5 else started(table, ids, 0.0)[0])
        except Exception as error:
            assert "injected fault" in str(error), error
            failed += 1
            interceptor.inject("read", 0)
            continue
        there = (ids >= 0) & (ids < 20_000)
        np.testing.assert_array_equal(got, np.where(there[:, None], rows[np.clip(ids, 0, 19_999)], 0))
    assert failed > 100
    for table in tables:
        assert table.stats()["requests_open"] <= 256
        table.close()


@pytest.mark.devices(4)
def test_a_mesh_shares_the_reader() -> None:
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    table = on_drive(ROWS, 20)
    shared = share(table, mesh)
    spec = jax.sharding.PartitionSpec
    ids = np.arange(40).reshape(4, 10)
    step = jax.jit(
        jax.shard_map(lambda table, ids: table[ids], mesh=mesh, in_specs=(spec(), spec("x")), out_specs=spec("x"))
    )
    np.testing.assert_array_equal(step(shared, ids), ROWS[:40].reshape(4, 10, 6))
    assert table.stats()["drive_rows"] >= 40


@pytest.mark.parametrize(
    "copy_of",
    [
        lambda table: jax.jit(lambda table: table, out_shardings=shardings(table))(table),
        pytest.param(
            lambda table: jax.device_put(table, jax.devices()[-1]),
            marks=pytest.mark.cpu_only("on a GPU device_put of a table in host memory is an error"),
        ),
    ],
    ids=["of a step", "of another device"],
)
def test_a_table_lives_as_long_as_a_copy_of_it(copy_of: Callable[[DriveTable], DriveTable]) -> None:
    copy = copy_of(on_drive(ROWS, 3))
    gc.collect()
    np.testing.assert_array_equal(jax.jit(gather)(copy, np.arange(50)), ROWS)
    reader = copy.stats()["reader"]
    del copy
    gc.collect()
    assert _native.extension("tests").RowReader.find(reader) is None


@pytest.mark.gpu
def test_a_copy_in_the_memory_of_a_gpu_is_an_error() -> None:
    table = on_drive(ROWS, 3)
    on_gpu = jax.device_put(table, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    with pytest.raises(Exception, match="must be read through its array in host memory"):
        jax.block_until_ready(jax.jit(gather)(on_gpu, np.arange(50)))


@pytest.mark.devices(2)
@pytest.mark.cpu_only("on a GPU the memory of a table is pinned for all devices")
def test_a_table_of_another_device_of_the_cpu() -> None:
    table = on_drive(ROWS, 3, device=jax.devices()[1])
    np.testing.assert_array_equal(table[np.arange(50)], ROWS)
