"""Tables on a drive, in short turns with a plain loop of reads of blocks: rates as shares of the drive's own.

    python -m benchmarks drive --folder /fast/drive --gib 16

The file is written first, where it is not there. Reads go past the page cache; a virtual machine's host may still keep
blocks, so the file should be larger than what such a host keeps, and no block is read twice, by the loop or a table,
before all have been read. The loop, benchmarks/peers/drive_loop.cc, needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.provenance import Save
from dejax.host_gather import DriveTable, prefetched_scan
from dejax.minibatch import FeatureStore, infer_layers

PEER = Path(__file__).parent / "peers" / "graphbolt_disk.py"
ROW = 4096  # bytes
DEPTH = 128  # reads in flight
RUN = 128 << 10  # bytes of a read in a sequential pass


def plain_loop() -> Any:
    """`read_blocks` of drive_loop.cc."""
    source = Path(__file__).parent / "peers" / "drive_loop.cc"
    built = Path(tempfile.mkdtemp()) / "drive_loop.so"
    command = [os.environ.get("CXX", "c++"), "-O2", "-shared", "-fPIC", str(source), "-o", str(built)]
    subprocess.run(command, check=True)
    read = ctypes.CDLL(str(built)).read_blocks
    read.restype = ctypes.c_double
    read.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, ctypes.c_int64]
    return read


def write_file(path: Path, blocks: int) -> None:
    """A file of blocks, each of which begins with its number. It is written past the page cache."""
    if path.exists() and path.stat().st_size == blocks * ROW:
        return
    noise = np.random.default_rng(0).integers(0, 1 << 62, (1024, ROW // 8))
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT)

    def write(start: int) -> None:
        count = min(len(noise), blocks - start)
        with mmap.mmap(-1, count * ROW) as memory:
            rows = np.frombuffer(memory, np.int64).reshape(count, -1)
            np.bitwise_xor(noise[:count], start, out=rows)
            rows[:, 0] = np.arange(start, start + count)
            assert os.pwrite(file, memory, start * ROW) == count * ROW, "the drive is full"
            del rows

    try:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(write, range(0, blocks, len(noise))))
        os.fsync(file)
    finally:
        os.close(file)


class Drive:
    """One file, read by the loop and by tables."""

    def __init__(self, path: Path, blocks: int) -> None:
        self.path, self.blocks, self._loop = path, blocks, plain_loop()

    def loop_rate(self, blocks: np.ndarray, block_bytes: int = ROW, places: int = DEPTH) -> tuple[float, float]:
        """Bytes per second, and processor seconds per GB, of the plain loop, into memory of so many blocks."""
        given = np.ascontiguousarray(blocks, np.int64)
        cpu = time.process_time()
        seconds = self._loop(os.fsencode(self.path), block_bytes, given.ctypes.data, len(given), DEPTH, places)
        if seconds <= 0:
            raise OSError(f"the plain loop could not read {self.path} past the page cache")
        size = len(given) * block_bytes
        return float(size / seconds), (time.process_time() - cpu) / (size / 1e9)

    def table(self, cache_rows: int) -> DriveTable:
        return DriveTable.from_file(self.path, (self.blocks, ROW), np.uint8, cache_bytes=cache_rows * ROW)


@jax.jit
def first_bytes(table: DriveTable, ids: jax.Array) -> jax.Array:
    """The first eight bytes of the rows of several batches: all of a row is read, and little is left to do.

    Args:
        table: the table.
        ids: int32[batches, rows]. The rows of a batch are read while those of the batch before are gathered.
    """
    return prefetched_scan(lambda carry, rows, _: (carry, rows[:, :8]), 0, table, ids)[1]


def fill(table: DriveTable, rows: np.ndarray, batch: int) -> None:
    """Reads rows until the cache is full: its memory has been used then, as after the first steps of a training."""
    for start in range(0, len(rows) - batch + 1, batch):
        first_bytes(table, jnp.asarray(rows[None, start : start + batch], jnp.int32)).block_until_ready()


def table_rate(table: DriveTable, batches: list[np.ndarray]) -> tuple[float, float]:
    """Bytes of rows per second, and processor seconds per GB, of all batches after the first."""
    given = jnp.asarray(np.stack(batches[1:]), jnp.int32)
    same = jnp.full_like(given, int(batches[0][0]))
    first_bytes(table, same).block_until_ready()
    begin, cpu = time.perf_counter(), time.process_time()
    found = first_bytes(table, given).block_until_ready()
    seconds, used = time.perf_counter() - begin, time.process_time() - cpu
    assert np.array_equal(np.asarray(found).view(np.int64)[..., 0], given), "wrong rows"
    return given.size * ROW / seconds, used / (given.size * ROW / 1e9)


def cold(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """Random rows, none of which is in the cache; beside them a loop into as much memory as the cache.

    The plain loop reads into the same half of a MiB again and again, which caches of processors hold.
    """
    batches, cached = args.batches // 2, 4 * args.batch
    given, others = (shuffled(drive, args.turns, batches * args.batch, cached, seed) for seed in (1, 9))
    wide: list[float] = []

    def loop(turn: int) -> tuple[float, float]:
        wide.append(drive.loop_rate(others[turn], places=cached)[0])
        return drive.loop_rate(given[2 * turn])

    with drive.table(cached) as table:
        fill(table, np.arange(cached), args.batch)
        table_rate(table, [np.arange(args.batch)] * (batches + 1))  # compiles
        found = interleaved(
            args.turns,
            loop,
            lambda turn: table_rate(table, [np.arange(args.batch), *given[2 * turn + 1].reshape(batches, -1)]),
        )
        engine = table.stats()["engine"]
    for each, rate in zip(found, wide, strict=False):
        each["loop_into_as_much_memory"] = rate
    return {"engine": engine, **median(found)}


def sequential(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """All rows in order, as inference over all nodes reads them."""
    parts = parts_in_order(drive, args.turns, args.batches * args.batch)
    with drive.table(4 * args.batch) as table:
        fill(table, np.arange(4 * args.batch), args.batch)
        table_rate(table, [np.arange(args.batch)] * (args.batches + 1))  # compiles
        found = interleaved(
            args.turns,
            lambda turn: drive.loop_rate(parts[2 * turn][::32] // 32, RUN),
            lambda turn: table_rate(table, [np.arange(args.batch), *parts[2 * turn + 1].reshape(args.batches, -1)]),
        )
    return median(found)


def inference(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """All rows in order through `infer_layers`, with a layer of next to no work."""
    rows = 2 * args.batches * args.batch
    parts = parts_in_order(drive, args.turns, rows)

    def layer(_: Any, batch: Any) -> jax.Array:
        first: jax.Array = batch.own[:, :8]
        return first

    def once(part: np.ndarray) -> tuple[float, float]:
        """Bytes per second, and processor seconds per GB."""
        first = int(part[0])
        shape, options = (rows, ROW), {"cache_bytes": 4 * args.batch * ROW, "offset": first * ROW}
        with DriveTable.from_file(drive.path, shape, np.uint8, **options) as table:
            store = FeatureStore().with_table("node", table)
            begin, cpu = time.perf_counter(), time.process_time()
            out = infer_layers([layer], [None], {}, {"node": rows}, store, dtype=np.uint8, progress=False)
            seconds, used = time.perf_counter() - begin, time.process_time() - cpu
        got = np.asarray(out["node"].numpy()).view(np.int64)[:, 0]
        assert np.array_equal(got, np.arange(first, first + rows)), "wrong rows"
        return rows * ROW / seconds, used / (rows * ROW / 1e9)

    once(parts[-1])  # compiles
    return median(
        interleaved(
            args.turns,
            lambda turn: drive.loop_rate(parts[2 * turn][::32] // 32, RUN),
            lambda turn: once(parts[2 * turn + 1]),
        )
    )


def mostly_cached(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """Batches of which nine rows in ten are in the cache, next to batches of rows that all are."""
    rng, batches, misses = np.random.default_rng(2), 3 * args.batches, args.batch // 10
    hot, others = np.split(rng.permutation(drive.blocks)[: 8 * args.batch], 2)
    visits = np.zeros(drive.blocks)
    visits[hot] = 1
    fresh = shuffled(drive, args.turns, batches * misses, np.concatenate([hot, others]), seed=3)
    cache_bytes = (len(hot) + len(others)) * ROW
    stored = DriveTable.from_file(drive.path, (drive.blocks, ROW), np.uint8, cache_bytes=cache_bytes, visits=visits)
    found = []
    with stored as table:
        fill(table, np.concatenate([hot, others]), args.batch)
        some = [rng.choice(hot, args.batch, replace=False) for _ in range(batches + 1)]
        table_rate(table, some)  # compiles
        before = drive.loop_rate(fresh[0])[0]
        for turn in range(args.turns):
            cached = args.batch * ROW / table_rate(table, some)[0]
            new = fresh[2 * turn + 1].reshape(batches, -1)
            mixed = [np.concatenate([ids[misses:], own]) for ids, own in zip(some[1:], new, strict=True)]
            read = table.stats()["drive_rows"]
            took = args.batch * ROW / table_rate(table, [some[0], *mixed])[0]
            missed = (table.stats()["drive_rows"] - read) / (batches * args.batch)
            after = drive.loop_rate(fresh[2 * turn + 2])[0]
            own = misses * ROW * (1 / before + 1 / after) / 2
            found.append(
                {"cached_ms": 1e3 * cached, "drive_ms": 1e3 * own, "mixed_ms": 1e3 * took,
                 "times_bound": took / max(cached, own), "missed": missed}
            )  # fmt: skip
            before = after
    return median(found)


def skewed(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """Batches in which some rows come often, with a cache of a tenth of the rows; beside it GraphBolt, if it is given.

    The file is one of its own: an .npy file of float32 whose header takes a block.
    """
    rows, warm = drive.blocks // 2, args.batches
    path, ids_path = drive.path.with_suffix(".npy"), drive.path.with_suffix(".ids.npy")
    batches = skewed_batches(rows, args.batch, 3 * warm)
    np.save(ids_path, batches)
    write_npy(path, rows)
    given, measured = jnp.asarray(batches[warm:], jnp.int32), len(batches) - warm
    read = jax.jit(lambda table, ids: prefetched_scan(lambda carry, rows, _: (carry, rows[:, 0]), 0, table, ids)[1])
    found = []
    for _ in range(args.turns):
        with DriveTable.from_npy(path, cache_bytes=rows // 10 * ROW) as table:
            for ids in batches[:warm]:
                table[ids].block_until_ready()
            read(table, jnp.full_like(given, int(batches[0][0]))).block_until_ready()
            before, begin, cpu = table.stats()["drive_rows"], time.perf_counter(), time.process_time()
            first = read(table, given).block_until_ready()
            seconds, used = time.perf_counter() - begin, time.process_time() - cpu
            assert np.array_equal(first, given), "wrong rows"
            missed = (table.stats()["drive_rows"] - before) / given.size
        own = {"ms": 1e3 * seconds / measured, "cpu_ms": 1e3 * used / measured, "missed": missed}
        if args.graphbolt is not None:
            names = [args.graphbolt, path, ids_path, rows // 10, warm]
            command = [args.python, str(PEER), *map(str, names)]
            out = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            peer = json.loads(out.splitlines()[-1])
            own |= {f"graphbolt_{name}": value for name, value in peer.items()} | {"ratio": peer["ms"] / own["ms"]}
        found.append(own)
    path.unlink()
    ids_path.unlink()
    return median(found)


def skewed_batches(rows: int, batch: int, count: int) -> np.ndarray:
    """int64[count, batch], distinct ids in each batch; the k-th most frequent one has the weight k^-0.8."""
    rng, weights = np.random.default_rng(3), np.arange(1, rows + 1) ** -0.8
    order = rng.permutation(rows)
    return np.stack([order[rng.choice(rows, batch, False, weights / weights.sum())] for _ in range(count)])


def write_npy(path: Path, rows: int) -> None:
    """float32[rows, 1024], each of which begins with its number, after a header of a block."""
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({rows}, {ROW // 4}), }}".ljust(ROW - 11) + "\n"
    noise = np.random.default_rng(0).standard_normal((1024, ROW // 4)).astype(np.float32)
    with open(path, "wb") as file:
        file.write(b"\x93NUMPY\x01\x00" + (ROW - 10).to_bytes(2, "little") + header.encode())
        for start in range(0, rows, len(noise)):
            noise[:, 0] = np.arange(start, start + len(noise))
            file.write(noise[: rows - start].tobytes())
        os.fsync(file.fileno())


_MEMORY = """
import resource, sys
if sys.argv[5] != "0":
    resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[5]), -1))
import jax, jax.numpy as jnp, numpy as np
from dejax.host_gather import DriveTable, prefetched_scan
path, blocks, cache = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
table = DriveTable.from_file(path, (blocks, 1024), np.float32, cache_bytes=cache)
def step(w, rows, _):
    x = jnp.where(jnp.isfinite(rows), jnp.clip(rows, -1, 1), 0)
    loss, gradient = jax.value_and_grad(lambda w: jnp.square(x @ w - 1).mean())(w)
    return w - 0.01 * gradient, loss
train = jax.jit(lambda w, table, ids: prefetched_scan(step, w, table, ids))
w = jnp.zeros(1024)
for k in range(int(sys.argv[4])):
    ids = np.random.default_rng(k).integers(0, blocks, (8, 1024)).astype(np.int32)
    w, losses = train(w, table, ids)
losses.block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, float(losses[-1]))
"""


def memory(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """The most memory of a process that trains with a cache of a tenth of the table.

    On a CPU the process may take a fifth of the table's bytes, or 3 GiB if that is more: the kernel refuses it more.
    """
    cache, limit = drive.blocks * ROW // 10, 0
    if jax.default_backend() == "cpu":
        limit = max(drive.blocks * ROW // 5, 3 << 30)
    numbers = [drive.blocks, cache, args.memory_calls, limit]
    command = [sys.executable, "-c", _MEMORY, str(drive.path), *map(str, numbers)]
    out = subprocess.run(command, check=True, capture_output=True, text=True)
    peak, loss = out.stdout.split()[-2:]
    return {
        "table_bytes": drive.blocks * ROW,
        "cache_bytes": cache,
        "limit_bytes": limit or None,
        "peak_resident_bytes": int(peak),
        "loss": float(loss),
    }


def shuffled(drive: Drive, turns: int, count: int, without: Any, seed: int) -> np.ndarray:
    """Rows in random order, [2 * turns + 1, count]: the loop reads the even ones, a table the others.

    No row comes twice before all have come.

    Args:
        without: rows that do not come; an integer: the first ones.
    """
    free = np.setdiff1d(np.arange(drive.blocks), np.arange(without) if np.ndim(without) == 0 else without)
    order = np.random.default_rng(seed).permutation(free)
    return np.resize(order, (2 * turns + 1, count))


def parts_in_order(drive: Drive, turns: int, count: int) -> list[np.ndarray]:
    """Rows of 2 * turns + 1 parts of the file, one after the other, and again from its beginning."""
    parts = drive.blocks // count
    if parts < 2:
        raise ValueError(f"the file must have at least {2 * count * ROW / 2**30:g} GiB; give a larger --gib")
    numbers = np.arange(2 * turns + 1)
    # What the loop read in one round, a table reads in the next one.
    numbers = (numbers + (numbers // parts if parts % 2 == 0 else 0)) % parts
    return [np.arange(number * count, (number + 1) * count) for number in numbers]


def interleaved(
    turns: int, loop: Callable[[int], tuple[float, float]], table: Callable[[int], tuple[float, float]]
) -> list[dict[str, float]]:
    """Rates and processor times of a table and the loop, which read in turns: loop, table, loop, table, ..., loop.

    A virtual drive's rate wavers within seconds, so turns are short, and a table's share is that of the mean of the
    loop's turns before and after it.
    """
    found, (before, _) = [], loop(0)
    for turn in range(turns):
        rate, cpu = table(turn)
        after, own_cpu = loop(turn + 1)
        own = 2 / (1 / before + 1 / after)
        found.append(
            {"loop": own, "table": rate, "share": rate / own, "cpu_s_per_gb": cpu, "loop_cpu_s_per_gb": own_cpu}
        )
        before = after
    return found


def median(found: list[dict[str, float]]) -> dict[str, Any]:
    """The median and the quartiles of each figure over the turns, with all turns."""
    quartiles = {name: np.quantile([each[name] for each in found], [0.25, 0.5, 0.75]) for name in found[0]}
    return (
        {name: float(values[1]) for name, values in quartiles.items()}
        | {"quartiles": {name: [float(values[0]), float(values[2])] for name, values in quartiles.items()}}
        | {"turns": found}
    )


CASES = {
    "cold": cold,
    "sequential": sequential,
    "inference": inference,
    "mostly_cached": mostly_cached,
    "skewed": skewed,
    "memory": memory,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the drive: the file lies there")
    parser.add_argument("--gib", type=float, default=4, help="size of the file")
    parser.add_argument("--batch", type=int, default=16384, help="rows of a gather")
    parser.add_argument("--batches", type=int, default=8, help="gathers of a turn")
    parser.add_argument("--turns", type=int, default=9, help="how often each figure is taken; its median counts")
    parser.add_argument("--memory-calls", type=int, default=40, help="calls of 8 steps, of the case `memory`")
    parser.add_argument("--graphbolt", type=Path, help="GraphBolt's library, beside which `skewed` is measured")
    parser.add_argument("--python", default=sys.executable, help="the interpreter with torch, for --graphbolt")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES), help="which cases; default: all")


def run(args: argparse.Namespace, save: Save) -> None:
    blocks = int(args.gib * (1 << 30)) // ROW
    path = args.folder / "dejax_drive_benchmark.bin"
    write_file(path, blocks)
    drive = Drive(path, blocks)
    found: dict[str, Any] = {"gib": args.gib, "batch": args.batch, "depth": DEPTH, "cores": os.cpu_count()}
    for name in args.cases:
        found[name] = CASES[name](drive, args)
        print(name, {key: value for key, value in found[name].items() if key not in ("turns", "quartiles")}, flush=True)
        save(found)
    path.unlink()
