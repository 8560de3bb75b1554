"""Gathers from a table in host memory: GB/s of useful rows, the copy engine's rate and peers, in one run.

    python -m benchmarks host_gather --gib 1,8,24,48,80 --out benchmarks/results --plot
    python -m benchmarks host_gather --quick                # small sizes, for a machine without a GPU

Sections: `small` (latency), `sizes` (table size by number of ids), `host_compute` (a peer), `widths` (row width at 1
GiB), `sms` (number of SMs), `update` (scatter_add), `cached` (power-law ids), `overlap` (prefetched_scan alongside
matrix products) and `devices` (GPUs that share a table).

Peers: the zero-copy kernel with ids as given; torch's gather with all threads into pinned memory and a copy; numpy.take
and device_put; jnp.take under compute_on("device_host"); jnp.take of the pinned memory as device memory. All tables of
a run are in one block of host memory.

A rate is the requested rows over the time of a jitted call, including the sort: the median over repetitions of several
calls. The JSON is written after each cell. If a section fails or exceeds its limit, the JSON says so and the next one
runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.device_time import profile_jax
from benchmarks.peers import cpu_gather
from benchmarks.provenance import Save
from dejax import host_gather as hg

WIDTHS = (48, 100, 128, 256, 400, 512, 516, 640, 1000, 1024, 1028, 1152, 2048, 2052, 2176)  # bytes
GIB = 1 << 30
RNG = np.random.default_rng(0)
Cells = Iterator[dict[str, Any]]
Program = Callable[[hg.HostTable, jax.Array, jax.Array], jax.Array]


class Arena:
    """One block of host memory that the tables of a run share, filled by all threads: pinning 80 GiB is slow."""

    def __init__(self, size: int) -> None:
        room = np.empty(size + 4096, np.uint8)
        start = -room.ctypes.data % 4096
        self._memory = room[start : start + size]
        block = RNG.standard_normal(1 << 22).astype(np.float32).view(np.uint8)

        def fill(begin: int) -> None:
            part = self._memory[begin : begin + len(block)]
            part[:] = block[: len(part)]

        with ThreadPoolExecutor() as pool:
            list(pool.map(fill, range(0, size, len(block))))

    def table(self, rows: int, width: int) -> hg.HostTable:
        """A float32 table [rows, width]. Only one may exist at a time, since each pins the memory."""
        return hg.HostTable.from_numpy(
            self._memory[: rows * width * 4].view(np.float32).reshape(rows, width), copy=False
        )


def seconds(function: Callable[..., Any], *args: Any, calls: int = 10, repeats: int = 3) -> float:
    return statistics.median(rounds(functools.partial(function, *args), calls, fewest=repeats))


def once(function: Callable[[np.ndarray], Any], ids: np.ndarray, repeats: int = 3) -> float:
    """Seconds of a peer that waits for its result: the best of a few."""
    function(ids)
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        function(ids)
        found.append(time.perf_counter() - start)
    return min(found)


def random_ids(rows: int, count: int) -> np.ndarray:
    return RNG.integers(0, rows, count).astype(np.int32)


def gather(**options: Any) -> Callable[..., Any]:
    return jax.jit(lambda table, ids: hg.gather(table, ids, **options))


def copy_engine(args: argparse.Namespace) -> float:
    """GB/s of a copy from pinned memory to the device: B."""
    table = args.arena.table(args.width_bytes // 1024, 256)
    device = jax.devices()[0]
    target = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    rate = table.nbytes / seconds(lambda: jax.device_put(table._leaf, target), calls=4) / 1e9
    table.close()
    return rate


def sizes(args: argparse.Namespace) -> Cells:
    """Ids from the first so many GiB of one table: the number of pages that they touch decides the rate."""
    row = 512
    whole = args.arena.table(int(max(args.gib) * GIB) // row, row // 4)
    view = whole.numpy()
    for gib in args.gib:
        rows = int(gib * GIB) // row
        for count in args.ids if gib > 1 else (args.ids[0] * 3 // 8, args.ids[0], args.ids[0] * 4):
            ids = random_ids(rows, count)
            useful, calls = count * row / 1e9, max(2, args.calls * args.ids[0] // count)
            cell: dict[str, Any] = {"gib": gib, "ids": count}
            for order in ("given", "sorted", "auto"):
                cell[order] = useful / seconds(gather(order=order), whole, jnp.asarray(ids), calls=calls)
            peers: dict[str, Callable[[], Any]] = {
                "torch": functools.partial(cpu_gather.torch_select, view, count),
                "numpy": functools.partial(cpu_gather.numpy_take, view),
            }
            if count == args.ids[0]:
                peers["device_view"] = functools.partial(cpu_gather.device_view, whole)
            for name, make in peers.items():
                try:
                    peer = make()
                    cell[name] = useful / once(peer, ids) if peer else None
                except Exception as error:  # a failing peer is a result, too
                    cell[name], cell[f"{name}_failed"] = None, str(error).splitlines()[0][:200]
            yield cell
    whole.close()


def host_compute(args: argparse.Namespace) -> Cells:
    """XLA's own host gather, on a table of 1 GiB."""
    rows = args.width_bytes // 512
    table = args.arena.table(rows, 128)
    elapsed = once(cpu_gather.host_compute(table._leaf), random_ids(rows, args.ids[0]))
    yield {"ids": args.ids[0], "compute_on": args.ids[0] * 512 / 1e9 / elapsed}
    table.close()


def widths(args: argparse.Namespace) -> Cells:
    """Distinct ids, so that no row is read once for several ids."""
    for width in WIDTHS:
        rows = args.width_bytes // width
        table = args.arena.table(rows, width // 4)
        count = min(rows, args.width_bytes // 8 // width)
        ids = jnp.asarray(RNG.permutation(rows)[:count].astype(np.int32))
        cell: dict[str, Any] = {"row_bytes": width, "ids": count}
        for order in ("given", "sorted", "auto"):
            cell[order] = count * width / 1e9 / seconds(gather(order=order), table, ids, calls=args.calls)
        yield cell
        table.close()


def sms(args: argparse.Namespace) -> Cells:
    rows = args.width_bytes // 512
    table = args.arena.table(rows, 128)
    ids = jnp.asarray(random_ids(rows, args.ids[0]))
    for count in (1, 2, 3, 4, 8, 16, 64):
        cell = {"sms": count}
        for order in ("given", "sorted"):
            elapsed = seconds(gather(order=order, num_sms=count), table, ids, calls=args.calls)
            cell[order] = len(ids) * 512 / 1e9 / elapsed
        yield cell
    table.close()


def update(args: argparse.Namespace) -> Cells:
    """GB/s in each direction: a row is read and written."""
    rows, count = args.width_bytes // 512, args.ids[0]
    table = args.arena.table(rows, 128)
    ids = jnp.asarray(RNG.permutation(rows)[:count].astype(np.int32))
    values = jnp.ones((len(ids), 128))
    for number in (4, 8, 16, 32):
        step = jax.jit(
            lambda table, ids, values, number=number: hg.scatter_add(table, ids, values, num_sms=number),
            donate_argnums=0,
            out_shardings=hg.shardings(table),
        )
        table = jax.block_until_ready(step(table, ids, values))
        start = time.perf_counter()
        for _ in range(2 * args.calls):
            table = step(table, ids, values)
        jax.block_until_ready(table)
        elapsed = (time.perf_counter() - start) / args.calls / 2
        yield {"sms": number, "scatter_add": len(ids) * 512 / 1e9 / elapsed}
    table.close()


def cached(args: argparse.Namespace) -> Cells:
    """Ids by a power law, rank^-0.8. The cache has the fifth of the rows that other ids of that law name most often."""
    rows, count = args.width_bytes // 512, args.ids[0]
    table = args.arena.table(rows, 128)
    cumulative = np.cumsum(np.arange(1, rows + 1) ** -0.8)
    order = RNG.permutation(rows)

    def draw(number: int) -> np.ndarray:
        return order[np.searchsorted(cumulative, RNG.random(number) * cumulative[-1])].astype(np.int32)

    counts = np.bincount(draw(10 * count), minlength=rows)
    with_cache, ids = hg.CachedTable.from_counts(table, counts, rows // 5), draw(count)
    cell: dict[str, Any] = {"hit_rate": float(with_cache.hit_rate(ids)), "distinct": len(np.unique(ids)) / count}
    for kind in ("given", "sorted"):
        for name, source in (("uncached", table), ("cached", with_cache)):
            elapsed = seconds(gather(order=kind), source, jnp.asarray(ids), calls=args.calls)
            cell[f"{name}_{kind}"] = count * 512 / 1e9 / elapsed
    yield cell
    table.close()


def small(args: argparse.Namespace) -> Cells:
    rows = args.width_bytes // 1024
    table = args.arena.table(rows, 256)

    def loop(table: Any, ids: jax.Array) -> jax.Array:
        def body(shift: jax.Array, _: None) -> tuple[jax.Array, None]:
            got = hg.gather(table, ids + shift, order="given")
            return (got[0, 0] > 1e30).astype(jnp.int32), None  # the next ids depend on these rows

        return jax.lax.scan(body, jnp.int32(0), None, length=200)[0]

    alone = gather(order="given")
    for count in (1, 1000):
        ids = jnp.asarray(random_ids(rows, count))
        elapsed = seconds(jax.jit(loop), table, ids, calls=2) / 200
        cell = {"ids": count, "row_bytes": 1024, "loop_microseconds": elapsed * 1e6}
        jax.block_until_ready(alone(table, ids))
        found = profile_jax(lambda ids=ids: alone(table, ids), 20)
        yield {**cell, "device_microseconds": found and 1e3 * found.span_ms}
    table.close()


def layer() -> Callable[..., tuple[jax.Array, None]]:
    """A scan's step: four products with the carry, and a read of one gathered row."""

    def step(carry: jax.Array, rows: jax.Array, matrix: jax.Array) -> tuple[jax.Array, None]:
        for _ in range(4):
            carry = (carry @ matrix).astype(carry.dtype)
        return carry + rows[:1, :1].astype(carry.dtype), None

    return step


def programs(step: Callable[..., Any], **options: Any) -> dict[str, Program]:
    """Functions of a table, ids [steps, n] and a matrix: each part alone, both in turn, and both at once."""
    none = jnp.zeros((1, 1))

    def scan(body: Callable[..., Any], carry: Any, xs: Any) -> Any:
        return jax.lax.scan(body, carry, xs)[0]

    return {
        "compute": lambda t, i, w: scan(lambda c, _: step(c, none, w), w, i[:, 0]),
        "transfer": lambda t, i, w: scan(lambda s, i: (s + t[i][0, 0], None), 0.0, i),
        "serial": lambda t, i, w: scan(lambda c, i: step(c, t[i], w), w, i),
        "prefetched": lambda t, i, w: hg.prefetched_scan(lambda c, rows, _: step(c, rows, w), w, t, i, **options)[0],
    }


def one_more_step(
    timed: Callable[..., float],
    loops: dict[str, Program],
    whole: dict[str, float],
    table: hg.HostTable,
    ids: jax.Array,
    matrix: jax.Array,
) -> dict[str, float]:
    """The time that one step adds to a long loop, without one-time costs such as the first gather, which runs alone.

    Args:
        timed: the time of a program with its arguments.
        loops: the programs of `programs`, jitted.
        whole: `timed` of each program with all ids.
        table, ids, matrix: the arguments.
    """
    half = ids.shape[0] // 2
    found = {
        f"{name}_a_step": (whole[name] - timed(loops[name], table, ids[half:], matrix)) / half
        for name in ("compute", "transfer", "prefetched")
    }
    longer = max(found["compute_a_step"], found["transfer_a_step"])
    return found | {"ratio_a_step": found["prefetched_a_step"] / longer}


def overlap(args: argparse.Namespace) -> Cells:
    """Milliseconds of a loop: matrix products of a layer alongside the gather of the next step's rows."""
    on_gpu = jax.default_backend() == "gpu"
    rows, steps, size = args.width_bytes // 512, 48 if on_gpu else 4, 4096 if on_gpu else 256
    table = args.arena.table(rows, 128)
    ids = jnp.asarray(random_ids(rows, steps * args.ids[0] // 4).reshape(steps, -1))
    w = jnp.asarray(RNG.standard_normal((size, size)) / size**0.5, jnp.bfloat16)
    step = layer()
    ways = programs(step) | {"prefetched_8_sms": programs(step, num_sms=8)["prefetched"]}
    loops = {name: jax.jit(program) for name, program in ways.items()}

    def timed(program: Callable[..., Any], *args: Any) -> float:
        return 1e3 * seconds(program, *args, calls=2)

    found = {name: timed(loop, table, ids, w) for name, loop in loops.items()}
    yield {"steps": steps} | found | one_more_step(timed, loops, found, table, ids, w)
    table.close()


def devices(args: argparse.Namespace) -> Cells:
    """Total GB/s of devices that read one table, each with its own ids; and the host memory that sharing takes."""
    rows, spec = args.width_bytes // 512, jax.sharding.PartitionSpec
    table = args.arena.table(rows, 128)
    alone = None
    for count in sorted({1, len(jax.devices())}):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[:count]), ("device",))
        before = resident_bytes()
        shared, taken = table.share(mesh), resident_bytes() - before
        own = jax.sharding.NamedSharding(mesh, spec("device"))
        ids = jax.device_put(random_ids(rows, count * args.ids[0]).reshape(count, -1), own)
        cell: dict[str, Any] = {"devices": count, "ids_a_device": args.ids[0]}
        for order in ("given", "sorted"):
            each = jax.jit(
                jax.shard_map(
                    lambda t, i, order=order: hg.gather(t, i, order=order),
                    mesh=mesh,
                    in_specs=(spec(), spec("device")),
                    out_specs=spec("device"),
                    check_vma=False,
                )
            )
            got = np.asarray(each(shared, ids)[-1, :100])
            if not (got == table.numpy()[np.asarray(ids[-1, :100])]).all():
                raise AssertionError(f"rows of {count} devices differ from the table's")
            cell[order] = ids.size * 512 / 1e9 / seconds(each, shared, ids, calls=args.calls)
        cell["host_mib_for_sharing"] = taken / 2**20
        alone = alone or cell
        yield cell | {"of_one_device": cell["given"] / alone["given"]}
    table.close()


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


SECTIONS: dict[str, Callable[[argparse.Namespace], Cells]] = {
    f.__name__: f
    for f in (
        small,
        sizes,
        host_compute,
        widths,
        sms,
        update,
        cached,
        overlap,
        devices,
    )
}


def show(section: str, cell: dict[str, Any]) -> None:
    shown = (f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in cell.items())
    print(f"{section:8}", ", ".join(shown), flush=True)


_CURVES = {
    "auto": "dejax (sorts the ids)",
    "given": "dejax, ids as they come",
    "torch": "PyTorch, 16 threads, and a copy",
    "numpy": "numpy.take, and a copy",
    "device_view": "jnp.take of the mapped table",
}
"""How the plot calls what was measured."""


def plot(report: dict[str, Any], path: Path) -> None:
    """Rate against row width and against table size, with peers and the copy engine."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(13, 4), sharey=True, layout="constrained")
    for axes, section, x in ((left, "widths", "row_bytes"), (right, "sizes", "gib")):
        cells = report["sections"].get(section, [])
        if section == "sizes" and cells:
            cells = [cell for cell in cells if cell["ids"] == 262_144] or cells
        for name, label in _CURVES.items():
            points = sorted((cell[x], cell[name]) for cell in cells if cell.get(name))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=label)
        axes.axhline(report["copy_engine"], color="grey", linestyle=":", label="the bus: one large copy")
        axes.set(xscale="log", ylim=(0, None))
        axes.xaxis.set_major_formatter("{x:g}")
    left.set(xlabel="bytes of a row; a table of 1 GiB", ylabel="rows read, GB/s")
    right.set_xlabel("GiB of the table; rows of 512 bytes")
    figure.legend(*right.get_legend_handles_labels(), loc="outside right upper", fontsize=9, frameon=False)
    nameless = dict.fromkeys(("Creator", "Date", "Format", "Type")) if path.suffix == ".svg" else None
    figure.savefig(path, dpi=120, metadata=nameless)


def measure(args: argparse.Namespace, report: dict[str, Any], save: Save) -> None:
    for name in args.sections.split(","):
        cells: list[dict[str, Any]] = []
        begun = time.perf_counter()
        try:
            for cell in SECTIONS[name](args):
                cells.append(cell)
                report["sections"][name] = cells  # only once there is a result: the earlier one stays until then
                report["copy_engine_of"][name] = report["copy_engine"]
                show(name, cell)
                save(report)
                if time.perf_counter() - begun > args.limit:
                    report["notes"].append(f"{name}: stopped after {args.limit} s")
                    break
        except Exception as error:
            traceback.print_exc()
            report["notes"].append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:300]}")
        save(report)
        print(f"{name}: {time.perf_counter() - begun:.1f} s", flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    numbers = lambda text: [float(x) if "." in x else int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--gib", type=numbers, default=[1, 8, 24], help="table sizes; the memory must hold the largest")
    parser.add_argument("--ids", type=numbers, default=[262_144, 2_097_152], help="numbers of rows that a call reads")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="what to measure, with commas")
    parser.add_argument("--calls", type=int, default=20, help="calls in one repetition")
    parser.add_argument("--limit", type=float, default=60, help="seconds for a section")
    parser.add_argument("--plot", action="store_true", help="also draw the rates by size of the table, into --out")
    parser.add_argument("--keep", action="store_true", help="keep the other sections of the existing file")
    parser.add_argument("--quick", action="store_true", help="small sizes")


def run(args: argparse.Namespace, save: Save) -> None:
    args.width_bytes = GIB
    if args.quick:
        args.gib, args.ids, args.calls = [1 / 64], [4096], 2
        args.width_bytes = 1 << 23
    wanted = args.sections.split(",")
    tables = [max(args.gib) * GIB] * ("sizes" in wanted)
    begun = time.perf_counter()
    args.arena = Arena(int(max([args.width_bytes, *tables])))
    print(f"host memory filled in {time.perf_counter() - begun:.1f} s", flush=True)
    device = jax.devices()[0].device_kind
    report: dict[str, Any] = {
        "copy_engine": copy_engine(args),
        "copy_engine_of": {},  # the rate in the run that measured the section
        "sections": {},
        "notes": [],
    }
    print(f"{device}, jax {jax.__version__}; copy engine {report['copy_engine']:.1f} GB/s", flush=True)
    if args.keep and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))
        report["sections"], report["copy_engine_of"] = before["sections"], before["copy_engine_of"]
        report["notes"] = [note for note in before["notes"] if note.split(":")[0] not in wanted]
    measure(args, report, save)
    if args.plot:
        plot(report, args.out.with_suffix(".svg"))
