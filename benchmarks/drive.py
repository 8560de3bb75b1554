"""Tables on a drive, next to a plain loop of reads of the same blocks, in turns: rates as shares of the drive's own.

    python -m benchmarks drive --folder /fast/drive --gib 16

The file is written first, where it is not there. Reads go past the page cache; a virtual machine's host may still keep
blocks, so the file should be larger than what such a host keeps, and the loop reads the same blocks as the table. The
loop, benchmarks/peers/drive_loop.cc, needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
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
    read.argtypes = [ctypes.c_char_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int]
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

    def loop_rate(self, blocks: np.ndarray, block_bytes: int = ROW) -> tuple[float, float]:
        """Bytes per second, and processor seconds per GB, of the plain loop."""
        given = np.ascontiguousarray(blocks, np.int64)
        cpu = time.process_time()
        seconds = self._loop(os.fsencode(self.path), block_bytes, given.ctypes.data, len(given), DEPTH)
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
    """Random rows, none of which is in the cache."""
    rng, found = np.random.default_rng(1), []
    cached = 4 * args.batch
    for _ in range(args.turns):
        order = cached + rng.permutation(drive.blocks - cached)[: args.batch * (args.batches + 1)]
        order = order.reshape(-1, args.batch)
        with drive.table(cached) as table:
            fill(table, np.arange(cached), args.batch)
            taken = beside(drive, order[1:].reshape(-1), ROW, functools.partial(table_rate, table, list(order)))
            found.append(taken)
            engine = table.stats()["engine"]
    return {"engine": engine, **median(found)}


def sequential(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """All rows in order, as inference over all nodes reads them."""
    found, blocks = [], min(drive.blocks, args.batch * args.batches * 4) // 32 * 32
    for turn in range(args.turns):
        first = turn * blocks % max(1, drive.blocks - blocks + 1) // 32 * 32
        ids = np.arange(first, first + blocks)
        batches = [ids[-args.batch :], *np.split(ids, range(args.batch, blocks, args.batch))]
        with drive.table(4 * args.batch) as table:
            runs = np.arange(first // 32, (first + blocks) // 32)
            found.append(beside(drive, runs, RUN, functools.partial(table_rate, table, batches)))
    return median(found)


def inference(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """All rows in order through `infer_layers`, with a layer of next to no work."""

    def layer(_: Any, batch: Any) -> jax.Array:
        first: jax.Array = batch.own[:, :8]
        return first

    def once(first: int) -> tuple[float, float]:
        """Bytes per second, and processor seconds per GB, of the rows from `first` on."""
        shape, options = (rows, ROW), {"cache_bytes": 4 * args.batch * ROW, "offset": first * ROW}
        with DriveTable.from_file(drive.path, shape, np.uint8, **options) as table:
            store = FeatureStore().with_table("node", table)
            begin, cpu = time.perf_counter(), time.process_time()
            out = infer_layers([layer], [None], {}, {"node": rows}, store, dtype=np.uint8, progress=False)
            seconds, used = time.perf_counter() - begin, time.process_time() - cpu
        got = np.asarray(out["node"].numpy()).view(np.int64)[:, 0]
        assert np.array_equal(got, np.arange(first, first + rows)), "wrong rows"
        return rows * ROW / seconds, used / (rows * ROW / 1e9)

    found, rows = [], min(drive.blocks, args.batch * args.batches * 4) // 32 * 32
    starts = [turn * rows % max(1, drive.blocks - rows + 1) // 32 * 32 for turn in range(args.turns)]
    once(starts[-1])  # compiles
    for first in starts:
        runs = np.arange(first // 32, (first + rows) // 32)
        found.append(beside(drive, runs, RUN, functools.partial(once, first)))
    return median(found)


def mostly_cached(drive: Drive, args: argparse.Namespace) -> dict[str, Any]:
    """Batches of which nine rows in ten are in the cache, next to batches of rows that all are."""
    rng, found = np.random.default_rng(2), []
    hot, misses = args.batch * 4, args.batch // 10
    for _ in range(args.turns):
        order = rng.permutation(drive.blocks)
        warm, fresh = order[:hot], order[hot : hot + misses * (args.batches + 1)].reshape(-1, misses)
        others = order[-4 * args.batch :]
        visits = np.zeros(drive.blocks)
        visits[warm] = 1
        some = [rng.choice(warm, args.batch, replace=False) for _ in range(args.batches + 1)]
        mixed = [np.concatenate([ids[misses:], new]) for ids, new in zip(some, fresh, strict=True)]
        own, _ = drive.loop_rate(fresh[1:].reshape(-1))
        cache = hot + 4 * args.batch
        stored = DriveTable.from_file(drive.path, (drive.blocks, ROW), np.uint8, cache_bytes=cache * ROW, visits=visits)
        with stored as table:
            fill(table, np.concatenate([warm, others]), args.batch)
            cached = args.batch * ROW / table_rate(table, some)[0]
            before = table.stats()
            took = args.batch * ROW / table_rate(table, mixed)[0]
            after = table.stats()
        bound = max(cached, misses * ROW / own)
        rows = after["drive_rows"] - before["drive_rows"]
        found.append(
            {"cached_ms": 1e3 * cached, "drive_ms": 1e3 * misses * ROW / own, "mixed_ms": 1e3 * took,
             "times_bound": took / bound, "missed": rows / (len(mixed) * args.batch)}
        )  # fmt: skip
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


def beside(
    drive: Drive, blocks: np.ndarray, block_bytes: int, measure: Callable[[], tuple[float, float]]
) -> dict[str, float]:
    """A table's rate and processor time with those of the loop: the faster one of before and after the table.

    A host that keeps blocks gives them faster the second time.
    """
    before = drive.loop_rate(blocks, block_bytes)
    rate, cpu = measure()
    own, own_cpu = max(before, drive.loop_rate(blocks, block_bytes))
    return {"loop": own, "table": rate, "share": rate / own, "cpu_s_per_gb": cpu, "loop_cpu_s_per_gb": own_cpu}


def median(found: list[dict[str, float]]) -> dict[str, Any]:
    """The median of each figure over the turns, with all turns."""
    return {name: float(np.median([each[name] for each in found])) for name in found[0]} | {"turns": found}


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
    parser.add_argument("--turns", type=int, default=3, help="how often each figure is taken; its median counts")
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
        print(name, {key: value for key, value in found[name].items() if key != "turns"}, flush=True)
        save(found)
    path.unlink()
