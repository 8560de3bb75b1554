"""Gathers from a table in host memory: GB/s of useful rows beside the copy engine's rate and beside peers, in one run.

    python benchmarks/host_gather.py --gib 1,8,24 --ids 262144,2097152 --out benchmarks/results
    python benchmarks/host_gather.py --quick                # small sizes, for a machine without a GPU

Sections: `sizes` (table size by number of ids), `widths` (row width at 1 GiB), `sms` (multiprocessors needed),
`update` (scatter_add), `cached` (power-law ids), `small` (latency in a loop), `overlap` (prefetched_scan beside matrix
products), `sampling` (10^5 seeds; fan-out 15, 10, 5). Peers: the zero-copy kernel with ids as given; numpy.take and
device_put; torch's CPU gather into pinned memory and a copy, where torch is there. Writes JSON and, with --plot, a PNG.
Rates count rows asked for over the time of a jitted call, sorting included: medians over repetitions of several calls.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import host_gather as hg

WIDTHS = (48, 100, 256, 400, 512, 516, 640, 1000, 1024, 1028, 1152, 2048, 2052, 2176)  # bytes
RNG = np.random.default_rng(0)


def seconds(function: Callable[..., Any], *args: Any, calls: int = 10, repeats: int = 3) -> float:
    jax.block_until_ready(function(*args))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(calls):
            result = function(*args)
        jax.block_until_ready(result)
        found.append((time.perf_counter() - start) / calls)
    return statistics.median(found)


def random_ids(rows: int, count: int) -> np.ndarray:
    return RNG.integers(0, rows, count).astype(np.int32)


def gather(**options: Any) -> Callable[..., Any]:
    return jax.jit(lambda table, ids: hg.gather(table, ids, **options))


def copy_engine(megabytes: int) -> float:
    """GB/s of a copy from pinned memory to the device: B."""
    table = hg.HostTable.zeros((megabytes << 10, 256))
    device = jax.devices()[0]
    target = jax.sharding.SingleDeviceSharding(device, memory_kind=device.default_memory().kind)
    rate = table.nbytes / seconds(lambda: jax.device_put(table._leaf, target), calls=4) / 1e9
    table.close()
    return rate


def torch_gather(view: np.ndarray, ids: np.ndarray) -> float | None:
    """Seconds of torch's CPU gather into pinned memory and a copy to the device; None without torch."""
    try:
        import torch
    except ImportError:
        return None
    source, index = torch.from_numpy(view), torch.from_numpy(ids.astype(np.int64))
    on_gpu = torch.cuda.is_available() and jax.default_backend() == "gpu"
    staging = torch.empty((len(ids), view.shape[1]), pin_memory=on_gpu)

    def run() -> None:
        torch.index_select(source, 0, index, out=staging)
        if on_gpu:
            staging.to("cuda", non_blocking=True)
            torch.cuda.synchronize()

    run()
    start = time.perf_counter()
    for _ in range(4):
        run()
    return (time.perf_counter() - start) / 4


def sizes(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for gib in args.gib:
        rows = int(gib * (1 << 30)) // 512
        table = hg.HostTable.empty((rows, 128))
        for count in args.ids:
            ids = random_ids(rows, count)
            useful = count * 512 / 1e9
            cell: dict[str, Any] = {"gib": gib, "ids": count}
            for order in ("given", "sorted", "auto"):
                cell[order] = useful / seconds(gather(order=order), table, jnp.asarray(ids), calls=args.calls)
            view = table.numpy()
            start = time.perf_counter()
            jax.block_until_ready(jax.device_put(np.take(view, ids, axis=0)))
            cell["numpy"] = useful / (time.perf_counter() - start)
            elapsed = torch_gather(view, ids)
            cell["torch"] = useful / elapsed if elapsed else None
            found.append(cell)
            show("sizes", cell)
        table.close()
    return found


def widths(args: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    for width in WIDTHS:
        rows = args.width_bytes // width
        table = hg.HostTable.empty((rows, width // 4))
        count = min(rows, args.width_bytes // 8 // width)
        ids = jnp.asarray(RNG.permutation(rows)[:count].astype(np.int32))
        cell: dict[str, Any] = {"row_bytes": width, "ids": count}
        for order in ("given", "sorted", "auto"):
            cell[order] = count * width / 1e9 / seconds(gather(order=order), table, ids, calls=args.calls)
        found.append(cell)
        show("widths", cell)
        table.close()
    return found


def sms(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = args.width_bytes // 512
    table, found = hg.HostTable.empty((rows, 128)), []
    ids = jnp.asarray(random_ids(rows, args.ids[0]))
    for count in (1, 2, 4, 8, 16, 64):
        cell = {"sms": count}
        for order in ("given", "sorted"):
            elapsed = seconds(gather(order=order, num_sms=count), table, ids, calls=args.calls)
            cell[order] = len(ids) * 512 / 1e9 / elapsed
        found.append(cell)
        show("sms", cell)
    table.close()
    return found


def update(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, count = args.width_bytes // 512, args.ids[0]
    table, found = hg.HostTable.zeros((rows, 128)), []
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
        for _ in range(args.calls):
            table = step(table, ids, values)
        jax.block_until_ready(table)
        elapsed = (time.perf_counter() - start) / args.calls
        found.append({"sms": number, "scatter_add": len(ids) * 512 / 1e9 / elapsed})
        show("update", found[-1])
    table.close()
    return found


def cached(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Ids by a power law, rank to the -0.8; the fifth of the rows that it makes the most frequent is cached."""
    rows, count = args.width_bytes // 512, args.ids[0]
    table = hg.HostTable.empty((rows, 128))
    weights = np.arange(1, rows + 1) ** -0.8
    order = RNG.permutation(rows)
    cumulative = np.cumsum(weights)
    ids = order[np.searchsorted(cumulative, RNG.random(count) * cumulative[-1])].astype(np.int32)
    with_cache = hg.CachedTable.from_ids(table, order[: rows // 5])
    cell: dict[str, Any] = {"hit_rate": float(with_cache.hit_rate(ids)), "distinct": len(np.unique(ids)) / count}
    for kind in ("given", "sorted"):
        for name, source in (("uncached", table), ("cached", with_cache)):
            elapsed = seconds(gather(order=kind), source, jnp.asarray(ids), calls=args.calls)
            cell[f"{name}_{kind}"] = count * 512 / 1e9 / elapsed
    show("cached", cell)
    table.close()
    return [cell]


def small(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = args.width_bytes // 1024
    table, found = hg.HostTable.zeros((rows, 256)), []

    def loop(table: Any, ids: jax.Array) -> jax.Array:
        def body(shift: jax.Array, _: None) -> tuple[jax.Array, None]:
            got = hg.gather(table, ids + shift, order="given")
            return (got[0, 0] > 1e30).astype(jnp.int32), None  # the next ids depend on these rows

        return jax.lax.scan(body, jnp.int32(0), None, length=200)[0]

    for count in (1, 1000):
        elapsed = seconds(jax.jit(loop), table, jnp.asarray(random_ids(rows, count)), calls=2) / 200
        found.append({"ids": count, "microseconds": elapsed * 1e6})
        show("small", found[-1])
    table.close()
    return found


def overlap(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows, steps, size = args.width_bytes // 512, 12, 4096 if jax.default_backend() == "gpu" else 256
    table = hg.HostTable.zeros((rows, 128))
    ids = jnp.asarray(random_ids(rows, steps * args.ids[0] // 4).reshape(steps, -1))
    w = jnp.full((size, size), 1e-3, jnp.bfloat16)

    def step(carry: jax.Array, got: jax.Array, _: Any) -> tuple[jax.Array, None]:
        for _ in range(4):
            carry = (carry @ w).astype(jnp.bfloat16)
        return carry + got[:1, :1].astype(jnp.bfloat16), None

    none = jnp.zeros((1, 1))
    programs = {
        "compute": (lambda t, i, c: jax.lax.scan(lambda c, _: step(c, none, None), c, None, length=steps)[0]),
        "transfer": (lambda t, i, c: jax.lax.scan(lambda s, i: (s + t[i][0, 0], None), 0.0, i)[0]),
        "serial": (lambda t, i, c: jax.lax.scan(lambda c, i: step(c, t[i], None), c, i)[0]),
        "prefetched": (lambda t, i, c: hg.prefetched_scan(step, c, t, i)[0]),
    }
    cell = {name: 1e3 * seconds(jax.jit(f), table, ids, w, calls=2) for name, f in programs.items()}
    show("overlap", cell)  # milliseconds
    table.close()
    return [cell]


def sampling(args: argparse.Namespace) -> list[dict[str, Any]]:
    nodes, edges, seeds = args.graph
    degrees = np.bincount((RNG.random(edges) ** 2 * nodes).astype(np.int64), minlength=nodes)
    starts = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    senders = RNG.integers(0, nodes, edges, dtype=np.int32)
    topology = hg.Topology.from_csc(starts, senders, num_nodes=nodes, on_host=True)
    chosen = jnp.asarray(RNG.permutation(nodes)[:seeds].astype(np.int32))
    sample = jax.jit(lambda key, topology, seeds: hg.sample_graph(key, topology, seeds, args.fan_outs))
    elapsed = seconds(sample, jax.random.key(0), topology, chosen, calls=1)
    cell = {"nodes": nodes, "edges": edges, "seeds": seeds, "fan_outs": args.fan_outs, "milliseconds": 1e3 * elapsed}
    show("sampling", cell)
    return [cell]


SECTIONS = {f.__name__: f for f in (sizes, widths, sms, update, cached, small, overlap, sampling)}


def show(section: str, cell: dict[str, Any]) -> None:
    shown = (f"{name} {value:.1f}" if isinstance(value, float) else f"{name} {value}" for name, value in cell.items())
    print(f"{section:9}", ", ".join(shown), flush=True)


def plot(report: dict[str, Any], path: Path) -> None:
    """Rate against row width and against table size, with peers and B."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4))
    for axes, section, x in ((left, "widths", "row_bytes"), (right, "sizes", "gib")):
        cells = report["sections"].get(section, [])
        if section == "sizes" and cells:
            cells = [cell for cell in cells if cell["ids"] == cells[0]["ids"]]
        for name in ("auto", "given", "torch", "numpy"):
            points = [(cell[x], cell[name]) for cell in cells if cell.get(name)]
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=name)
        axes.axhline(report["copy_engine"], color="grey", linestyle=":", label="copy engine (B)")
        axes.set(xscale="log", ylim=(0, None), ylabel="GB/s of rows")
    left.set_xlabel("bytes of a row, 1 GiB table")
    right.set_xlabel("GiB of the table, rows of 512 bytes")
    right.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [float(x) if "." in x else int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("--gib", type=numbers, default=[1, 8, 24])
    parser.add_argument("--ids", type=numbers, default=[262_144, 2_097_152])
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--calls", type=int, default=10, help="calls in one repetition")
    parser.add_argument("--out", type=Path, help="folder for the JSON and the plot")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--quick", action="store_true", help="small sizes")
    args = parser.parse_args(arguments)
    args.width_bytes, args.graph, args.fan_outs = 1 << 30, (10_000_000, 100_000_000, 100_000), [15, 10, 5]
    if args.quick:
        args.gib, args.ids, args.calls = [1 / 64], [4096], 2
        args.width_bytes, args.graph, args.fan_outs = 1 << 23, (2_000, 20_000, 50), [3, 2]
    report: dict[str, Any] = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "machine": platform.platform(),
        "copy_engine": copy_engine(16 if args.quick else 1024),
        "sections": {},
    }
    print(f"{report['device']}, jax {report['jax']}; copy engine {report['copy_engine']:.1f} GB/s")
    for name in args.sections.split(","):
        report["sections"][name] = SECTIONS[name](args)
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        stem = f"host_gather_{report['device'].replace(' ', '_').lower()}"
        (args.out / f"{stem}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if args.plot:
            plot(report, args.out / f"{stem}.png")
    return report


if __name__ == "__main__":
    main()
