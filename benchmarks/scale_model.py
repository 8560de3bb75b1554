"""What training on several hosts would take: bytes a link, memory, time of a step and an epoch, from measured rates.

    python -m benchmarks scale_model                       # the table, for 1 to 64 hosts
    python -m benchmarks scale_model --json out.json --svg out.svg
    python -m benchmarks scale_model --measure 1 2 4       # CPU processes on loopback against the model

Two ways to train are modelled: mini-batches, data parallel, with feature tables sharded by row over the hosts' memory;
and full-graph layers over all GPUs. The rates are arguments. Their defaults: bus and HBM as measured on an H200
(docs/performance), NVLink and network as their makers state them, since no machine here has several.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import Save
from benchmarks.tables import columns

GB = 1e9


@dataclass(frozen=True, slots=True)
class Machine:
    """Hosts of equal kind.

    Attributes:
        gpus: GPUs a host.
        hbm: bytes of a GPU's memory.
        host_memory: bytes of a host's memory.
        bus: bytes a second from host memory to one GPU; measured.
        hbm_rate: bytes a second, read plus written; measured.
        nvlink: bytes a second that a GPU sends to others of its host; stated.
        network: bytes a second that a host sends to others; stated (8 links of 400 Gbit/s).
        gather_share: the part of the bus' rate that gathers of rows from large tables reach; measured, ids sorted.
        step_overhead: seconds of a step that depend on no size.
    """

    gpus: int = 8
    hbm: float = 141 * GB
    host_memory: float = 2048 * GB
    bus: float = 49.0 * GB
    hbm_rate: float = 4300 * GB
    nvlink: float = 450 * GB
    network: float = 400 * GB
    gather_share: float = 0.5
    step_overhead: float = 1e-3


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph by its counts.

    Attributes:
        nodes, edges: of all types.
        features: bytes of a node's features.
        train_nodes: seeds of an epoch.
    """

    name: str
    nodes: int
    edges: int
    features: int
    train_nodes: int

    @property
    def table(self) -> int:
        """Bytes of all features."""
        return self.nodes * self.features


# IGBH-full: arXiv 2302.13522, table 1; 60 % of the papers are training nodes. papers100M: its page at OGB.
GRAPHS = (
    Graph("papers100M", 111_059_956, 1_615_685_872, 128 * 4, 1_207_179),
    Graph("IGB-full", 547_306_935, 5_812_005_639, 1024 * 4, 161_607_704),
    Graph("1e10 edges", 1_000_000_000, 10_000_000_000, 256 * 4, 10_000_000),
)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Mini-batches on every GPU, and rows sharded over hosts.

    Attributes:
        batch: seeds a GPU and step.
        fan_outs: edges that a node draws in each hop.
        hidden: width of the hidden layers.
        parameters: bytes of the model, which are all-reduced.
        local: the part of the rows that lie on the reader's host beyond its share, by a partition; 0 for random owners.
        hot: the part of the reads that replicated hot rows serve in HBM.
        padding: capacity of the exchange over rows needed.
    """

    batch: int = 1024
    fan_outs: tuple[int, ...] = (15, 10)
    hidden: int = 256
    parameters: int = 4 * 2_000_000
    local: float = 0.0
    hot: float = 0.0
    padding: float = 1.1


@dataclass(frozen=True, slots=True)
class FullGraph:
    """Full-graph layers over all GPUs.

    Attributes:
        widths: of each layer's input, and of the last one's output.
        cut: the part of random owners' edges between parts that a partition leaves; see `replicas`.
        edge_bytes: bytes of the tables of an edge; measured: 61 with one edge type, 78 with four.
        passes: times that forward and backward together read or write a row of each edge.
        padding: rows sent over rows needed, from the rounds of the exchange.
    """

    widths: tuple[int, ...] = (256, 256, 256)
    cut: float = 0.5
    edge_bytes: int = 64
    passes: float = 6.0
    padding: float = 1.03


@dataclass(frozen=True, slots=True)
class Row:
    """The result for one graph and number of hosts; bytes and seconds of one step of one GPU or host.

    Attributes:
        way: "sampled" or "full".
        gpu_memory, host_memory: bytes needed on each.
        bus: bytes over the bus of a GPU.
        nvlink: bytes that a GPU sends to GPUs of its host.
        network: bytes that a host sends to other hosts.
        step: seconds.
        epoch: seconds; of full graphs a step is an epoch.
        bound: what the step waits for.
        fits: whether memory suffices.
    """

    graph: str
    way: str
    hosts: int
    gpu_memory: float
    host_memory: float
    bus: float
    nvlink: float
    network: float
    step: float
    epoch: float
    bound: str
    fits: bool


# ------------------------------------------------------------------------------------------------- counts of bytes


def unique_rows(graph: Graph, some: Sampled) -> tuple[float, float]:
    """Rows that a GPU's batch reads, each once, and the edges that it draws.

    Draws are as from all nodes alike, so graphs whose draws meet in few nodes read fewer rows than this.
    """
    frontier, rows, edges = float(some.batch), float(some.batch), 0.0
    degree = graph.edges / graph.nodes
    for fan_out in some.fan_outs:
        drawn = frontier * min(fan_out, degree)
        edges += drawn
        frontier = graph.nodes * -math.expm1(-drawn / graph.nodes)
        rows += frontier
    return min(rows, graph.nodes), edges


def all_to_all_bytes(parts: int, capacity: int, row_bytes: int) -> int:
    """Bytes that one part sends for one exchange of sharded rows: ids, and the rows for others' ids."""
    return (parts - 1) * capacity * (4 + row_bytes)


def all_reduce_bytes(parts: int, size: int) -> float:
    """Bytes that one part sends to reduce `size` bytes over parts in a ring."""
    return 2 * (parts - 1) / parts * size


def exchange_bytes(halo_rows: int, row_bytes: int, padding: float = 1.0) -> float:
    """Bytes that all parts together send in one halo exchange."""
    return halo_rows * row_bytes * padding


def replicas(graph: Graph, parts: int, cut: float) -> float:
    """Other parts that read a node, on average, where `cut` of the random edges between parts are left.

    A node with d outgoing edges to random parts is read by (parts - 1) (1 - (1 - 1 / parts)^d) others. A partition
    keeps edges within parts: only d * cut of them count.
    """
    degree = graph.edges / graph.nodes * cut
    return (parts - 1) * -math.expm1(degree * math.log1p(-1 / parts)) if parts > 1 else 0.0


# ------------------------------------------------------------------------------------------------- ways to train


def sampled(graph: Graph, hosts: int, machine: Machine, some: Sampled) -> Row:
    """A step of data-parallel mini-batches."""
    gpus = hosts * machine.gpus
    rows, edges = unique_rows(graph, some)
    cold = rows * (1 - some.hot)
    remote = cold * (hosts - 1) / hosts * (1 - some.local)
    capacity = math.ceil(remote * some.padding / max(hosts - 1, 1)) if hosts > 1 else 0
    network = machine.gpus * all_to_all_bytes(hosts, capacity, graph.features)
    reduce = all_reduce_bytes(gpus, some.parameters)
    network += all_reduce_bytes(hosts, some.parameters) if hosts > 1 else 0.0
    bus = cold * graph.features  # rows of this host for all, and as many as a GPU reads
    compute_bytes = edges * 4 * (graph.features + some.hidden * 4 * 2) + rows * graph.features * 2
    times = {
        "bus": bus / (machine.bus * machine.gather_share),
        "network": network / machine.network,
        "NVLink": reduce / machine.nvlink,
        "compute": compute_bytes / machine.hbm_rate,
    }
    gpu_memory = rows * (graph.features + some.hidden * 4 * 4) + edges * 48 + some.parameters * 4
    host_memory = (graph.table + graph.edges * 4 + graph.nodes * 8) / hosts
    step = _together(times, machine)
    steps = math.ceil(graph.train_nodes / (some.batch * gpus))
    fits = gpu_memory <= machine.hbm and host_memory <= machine.host_memory
    bound = max(times, key=lambda name: times[name])
    return Row(
        graph.name, "sampled", hosts, gpu_memory, host_memory, bus, reduce, network, step, step * steps, bound, fits
    )


def full(graph: Graph, hosts: int, machine: Machine, some: FullGraph) -> Row:
    """A step of full-graph layers, forward and backward."""
    gpus = hosts * machine.gpus
    own_nodes, own_edges = graph.nodes / gpus, graph.edges / gpus
    halo = own_nodes * replicas(graph, gpus, some.cut)
    away = (hosts - 1) * machine.gpus / max(gpus - 1, 1)  # of the other parts, those on other hosts
    widths = (graph.features // 4, *some.widths[1:])
    # The narrower side of a layer's product crosses; the first layer's features need no gradient.
    crossing = [4 * min(pair) for pair in itertools.pairwise(widths)]
    sent = sum(halo * row * some.padding * (1 if n == 0 else 2) for n, row in enumerate(crossing))
    nvlink, network = sent * (1 - away), sent * away * machine.gpus
    compute_bytes = sum(
        some.passes * own_edges * row + 8 * own_nodes * 4 * wide for row, wide in zip(crossing, widths[1:], strict=True)
    )
    times = {
        "NVLink": nvlink / machine.nvlink,
        "network": network / machine.network,
        "compute": compute_bytes / machine.hbm_rate,
    }
    rows = own_nodes * (graph.features + 4 * 3 * sum(widths[1:])) + halo * max(crossing)
    gpu_memory = rows + own_edges * some.edge_bytes
    # Exchanges wait for the layer before them: nothing here counts on overlap.
    step = sum(times.values()) + machine.step_overhead
    bound = max(times, key=lambda name: times[name])
    fits = gpu_memory <= machine.hbm
    return Row(graph.name, "full", hosts, gpu_memory, 0.0, 0.0, nvlink, network, step, step, bound, fits)


def _together(times: dict[str, float], machine: Machine) -> float:
    """Rows of the next batch arrive beside the layers of this one; the gradient's reduction comes after them."""
    return max(times["bus"], times["network"], times["compute"]) + times["NVLink"] + machine.step_overhead


def predict(
    machine: Machine = Machine(),
    hosts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64),
    graphs: Sequence[Graph] = GRAPHS,
    mini_batches: Sampled = Sampled(),
    full_graph: FullGraph = FullGraph(),
) -> list[Row]:
    """All cases."""
    found = []
    for graph in graphs:
        found += [sampled(graph, count, machine, mini_batches) for count in hosts]
        found += [full(graph, count, machine, full_graph) for count in hosts]
    return found


# ------------------------------------------------------------------------------------------------- what is shown


def table(rows: Sequence[Row]) -> str:
    """The results as text."""
    head = "graph,way,hosts,GPU GiB,host GiB,bus MB,NVLink MB,network MB,step,epoch,bound".split(",")
    lines = [head]
    for row in rows:
        gib = [f"{size / 2**30:,.0f}" for size in (row.gpu_memory, row.host_memory)]
        crossing = [f"{size / 1e6:,.0f}" for size in (row.bus, row.nvlink, row.network)]
        times = [_seconds(row.step), _seconds(row.epoch)]
        bound = row.bound if row.fits else "memory: does not fit"
        lines.append([row.graph, row.way, str(row.hosts), *gib, *crossing, *times, bound])
    return columns(lines, {0, 1, len(head) - 1})


def _seconds(value: float) -> str:
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 600 else f"{value / 60:.3g} min"


_INK, _GRID, _COLOURS = "#24292f", "#d8dee4", ("#1b6ac9", "#d1602b", "#2f8f4e")


def svg(rows: Sequence[Row]) -> str:
    """Time of an epoch by number of hosts, a panel for each way; dashed where memory does not suffice."""
    times = [row.epoch for row in rows]
    low, high = math.floor(math.log10(min(times))), math.ceil(math.log10(max(times)))
    most = math.log2(max(row.hosts for row in rows))
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 960 400" font-family="sans-serif" font-size="12">',
        '<rect width="960" height="400" fill="#ffffff"/>',
        _text(20, 22, "Predicted time of an epoch by number of hosts (8 GPUs each); dashed: does not fit", size=15),
    ]
    for panel, (way, title) in enumerate((("sampled", "mini-batches"), ("full", "full graph, one step an epoch"))):
        left = 70 + 470 * panel

        def x(hosts: float, left: int = left) -> float:
            return left + 300 * math.log2(hosts) / max(most, 1)

        def y(seconds: float) -> float:
            return 330 - 260 * (math.log10(seconds) - low) / max(high - low, 1)

        parts.append(_text(left, 48, title, size=13))
        for exponent in range(low, high + 1):
            at = y(10.0**exponent)
            parts.append(f'<line x1="{left}" x2="{left + 300}" y1="{at:.1f}" y2="{at:.1f}" stroke="{_GRID}"/>')
            parts.append(_text(left - 8, at + 4, f"{10.0**exponent:g} s", anchor="end"))
        for hosts in sorted({row.hosts for row in rows}):
            parts.append(_text(x(hosts), 348, str(hosts), anchor="middle"))
        parts.append(_text(left + 150, 370, "hosts", anchor="middle"))
        labels: list[tuple[float, str, str]] = []
        for colour, name in zip(_COLOURS, dict.fromkeys(row.graph for row in rows), strict=False):
            chosen = [row for row in rows if row.graph == name and row.way == way]
            for one, two in itertools.pairwise(chosen):
                dash = "" if one.fits else ' stroke-dasharray="4 4"'
                ends = (
                    f'x1="{x(one.hosts):.1f}" y1="{y(one.epoch):.1f}" x2="{x(two.hosts):.1f}" y2="{y(two.epoch):.1f}"'
                )
                parts.append(f'<line {ends} stroke="{colour}" stroke-width="2"{dash}/>')
            labels.append((y(chosen[-1].epoch) + 4, name, colour))
        lowest = -math.inf
        for at, name, colour in sorted(labels):  # names of curves that end side by side stand below each other
            lowest = max(at, lowest + 14)
            parts.append(_text(left + 306, lowest, name, colour=colour))
    return "\n".join([*parts, "</svg>", ""])


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start", colour: str = _INK) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" fill="{colour}">{text}</text>'


def arguments(parser: argparse.ArgumentParser) -> None:
    described = dict(re.findall(r"^ +(\w+): (.+)\.$", Machine.__doc__ or "", re.MULTILINE))
    for field in dataclasses.fields(Machine):
        kind: Any = int if field.name == "gpus" else float
        parser.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=kind,
            default=field.default,
            help=described[field.name],
        )
    parser.add_argument(
        "--hosts", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64], help="numbers of hosts to predict for"
    )
    parser.add_argument("--svg", type=Path, help="file for the plot")


def run(args: argparse.Namespace, save: Save) -> None:
    machine = Machine(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Machine)})
    rows = predict(machine, args.hosts)
    print(table(rows))
    save({"machine": asdict(machine), "rows": [asdict(row) for row in rows]})
    if args.svg:
        args.svg.write_text(svg(rows), encoding="utf-8")
