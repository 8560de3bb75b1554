"""The mag step of `benchmarks.mini_batch` as a loader of CPU threads with PyTorch Geometric's layers: a peer.

    python -m benchmarks mini_batch_peer --out peer.json

16 threads make batches: a C++ sampler of typed graphs, then a C++ gather of rows into pinned memory. One batch per
thread, as the workers of a loader do, so that no thread waits for another. The main thread copies a batch on a side
stream while the layers of the batch before run. Two ways to write R-GAT with PyTorch Geometric: `gat` has a `GATConv`
for each relation, as `HeteroConv` has, and sums their results; `rgat` has an `RGATConv`. Layer 2 reads only the nodes
and edges of hop 1. It prints the time of a step, and of each part alone. Needs torch and torch_geometric.
"""

from __future__ import annotations

import argparse
import json
import queue
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.peers.hetero_sampler import EdgeType, HeteroSampler, compiled
from benchmarks.provenance import Save

NODES = {"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740}
EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field"): 7_505_078,
}
WIDTH, HIDDEN, HEADS, CLASSES, TOTALS = 128, 128, 4, 64, (15, 10)


def make_graph(scale: float) -> tuple[dict[EdgeType, tuple[np.ndarray, np.ndarray]], dict[str, int]]:
    """CSC by relation of the random graph of `benchmarks.mini_batch`, both directions."""
    rng = np.random.default_rng(0)
    counts = {name: max(2, int(count * scale)) for name, count in NODES.items()}
    found = {}
    for (source, name, target), size in EDGES.items():
        size = max(1, int(size * scale))
        ends = [
            (counts[kind] * rng.random(size, np.float32) ** power).astype(np.int32).clip(max=counts[kind] - 1)
            for kind, power in ((source, 3), (target, 2))
        ]
        found[source, name, target] = _csc(ends[0], ends[1], counts[target])
        found[target, f"rev_{name}", source] = _csc(ends[1], ends[0], counts[source])
    return found, counts


def _csc(senders: np.ndarray, receivers: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    order = np.argsort(receivers, kind="stable")
    starts = np.zeros(count + 1, np.int32)
    np.cumsum(np.bincount(receivers, minlength=count), out=starts[1:])
    return starts, np.ascontiguousarray(senders[order])


def shared_fan_outs(relations: list[EdgeType], totals: tuple[int, ...]) -> list[dict[EdgeType, int]]:
    """Fan-outs that sum to `totals` over the relations into each type, as in `benchmarks.mini_batch`."""
    into: dict[str, list[EdgeType]] = {}
    for relation in relations:
        into.setdefault(relation[2], []).append(relation)
    return [
        {r: total * (n + 1) // len(some) - total * n // len(some) for some in into.values() for n, r in enumerate(some)}
        for total in totals
    ]


@dataclass(frozen=True, slots=True)
class Slot:
    """Pinned memory of one batch."""

    rows: dict[str, torch.Tensor]
    edges: dict[EdgeType, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """A sampled batch, in a slot or on the device.

    Attributes:
        rows: float32[nodes, width] by type.
        edges: int64[2, edges] by relation, those of hop 1 first.
        nodes: [hops + 1] by type, nodes after each hop.
        hop1: edges of hop 1 by relation.
        labels: int64[seeds].
        slot: where it lies.
    """

    rows: dict[str, torch.Tensor]
    edges: dict[EdgeType, torch.Tensor]
    nodes: dict[str, list[int]]
    hop1: dict[EdgeType, int]
    labels: torch.Tensor
    slot: Slot


class Loader:
    """Threads that fill slots with batches."""

    def __init__(self, csc: Any, counts: dict[str, int], seeds: int, threads: int, pinned: bool) -> None:
        library = compiled()
        self.seeds = seeds
        self.csc, self.counts, self.relations = csc, counts, list(csc)
        self.fan_outs = shared_fan_outs(self.relations, TOTALS)
        rng = np.random.default_rng(5)
        self.tables = {kind: rng.standard_normal((count, WIDTH), np.float32) for kind, count in counts.items()}
        self.labels = torch.from_numpy(rng.integers(0, CLASSES, counts["paper"]))
        self._samplers: queue.SimpleQueue[HeteroSampler] = queue.SimpleQueue()
        for _ in range(threads):
            self._samplers.put(HeteroSampler(csc, counts, self.fan_outs, library))
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        # The most edges of a relation: each seed's and each first-hop node's full fan-out.
        edges = seeds * (1 + TOTALS[0]) * max(TOTALS)
        rows = {kind: min(count, seeds * (1 + TOTALS[0] + TOTALS[0] * TOTALS[1])) for kind, count in counts.items()}
        for _ in range(threads + 4):
            self.free.put(
                Slot(
                    {kind: torch.empty((count, WIDTH), pin_memory=pinned) for kind, count in rows.items()},
                    {r: torch.empty((2, edges), dtype=torch.int64, pin_memory=pinned) for r in self.relations},
                )
            )
        self.pool = ThreadPoolExecutor(threads)

    def submit(self, key: int) -> Future[Batch]:
        return self.pool.submit(self.make, key)

    def make(self, key: int) -> Batch:
        sampler, slot = self._samplers.get(), self.free.get()
        seeds = np.random.default_rng(key).integers(0, self.counts["paper"], self.seeds).astype(np.int32)
        seeds = np.unique(seeds)
        sample = sampler("paper", seeds, {r: edges.numpy() for r, edges in slot.edges.items()}, key)
        for kind, ids in sample.nodes.items():
            sampler.gather(self.tables[kind], ids, slot.rows[kind].numpy())
        self._samplers.put(sampler)
        edges = {r: slot.edges[r][:, : sample.edge_counts[-1, k]] for k, r in enumerate(self.relations)}
        return Batch(
            {kind: slot.rows[kind][: len(ids)] for kind, ids in sample.nodes.items()},
            edges,
            {kind: sample.node_counts[:, k].tolist() for k, kind in enumerate(sampler.types)},
            {r: int(sample.edge_counts[0, k]) for k, r in enumerate(self.relations)},
            self.labels[torch.from_numpy(seeds.astype(np.int64))],
            slot,
        )


class GAT(nn.Module):
    """A GATConv for each relation, summed: `HeteroConv` without its dicts."""

    def __init__(self, relations: list[EdgeType]) -> None:
        from torch_geometric.nn import GATConv

        super().__init__()
        self.relations = relations
        self.convs = nn.ModuleList(
            nn.ModuleList(
                GATConv((width, width), HIDDEN // HEADS, heads=HEADS, add_self_loops=False, bias=False)
                for _ in relations
            )
            for width in (WIDTH, HIDDEN)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.rows
        for layer, convs in enumerate(self.convs):
            kept = {kind: counts[1 - layer] for kind, counts in batch.nodes.items()}
            found: dict[str, torch.Tensor] = {}
            for relation, conv in zip(self.relations, convs, strict=True):  # type: ignore[arg-type]
                source, _, target = relation
                edges = batch.edges[relation] if layer == 0 else batch.edges[relation][:, : batch.hop1[relation]]
                if not kept[target] or not edges.shape[1]:
                    continue
                out = conv((x[source], x[target][: kept[target]]), edges)
                found[target] = found[target] + out if target in found else out
            x = {kind: torch.relu(rows) for kind, rows in found.items()}
        return self.head(x["paper"])


class RGAT(nn.Module):
    """An RGATConv on all types together."""

    def __init__(self, relations: list[EdgeType]) -> None:
        from torch_geometric.nn import RGATConv

        super().__init__()
        self.relations = relations
        self.convs = nn.ModuleList(
            RGATConv(width, HIDDEN // HEADS, len(relations), heads=HEADS, bias=False) for width in (WIDTH, HIDDEN)
        )
        self.head = nn.Linear(HIDDEN, CLASSES)

    def forward(self, batch: Batch) -> torch.Tensor:
        x = batch.rows
        for layer, conv in enumerate(self.convs):
            first, total = {}, 0
            for kind, rows in x.items():
                first[kind], total = total, total + rows.shape[0]
            ends, types = [], []
            for number, relation in enumerate(self.relations):
                edges = batch.edges[relation] if layer == 0 else batch.edges[relation][:, : batch.hop1[relation]]
                if edges.shape[1]:
                    ends.append(torch.stack([edges[0] + first[relation[0]], edges[1] + first[relation[2]]]))
                    types.append(torch.full((edges.shape[1],), number, device=edges.device))
            h = torch.relu(conv(torch.cat(list(x.values())), torch.cat(ends, 1), torch.cat(types)))
            kept = {kind: counts[1 - layer] for kind, counts in batch.nodes.items()}
            x = {kind: h[first[kind] : first[kind] + kept[kind]] for kind in x}
        return self.head(x["paper"])


MODELS = {"gat": GAT, "rgat": RGAT}


class Pipeline:
    """Batches to the device on a side stream, and training steps."""

    def __init__(self, loader: Loader, model: nn.Module, device: torch.device) -> None:
        self.loader, self.model, self.device = loader, model, device
        self.optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=device.type == "cuda")
        self.side = torch.cuda.Stream() if device.type == "cuda" else None
        self._in_flight: deque[tuple[Any, Slot]] = deque()

    def to_device(self, batch: Batch) -> tuple[Batch, Any]:
        if self.side is None:
            self._in_flight.append((None, batch.slot))
            return batch, None
        with torch.cuda.stream(self.side):
            rows = {kind: x.to(self.device, non_blocking=True) for kind, x in batch.rows.items()}
            edges = {r: x.to(self.device, non_blocking=True) for r, x in batch.edges.items()}
            labels = batch.labels.to(self.device, non_blocking=True)
            copied = torch.cuda.Event()
            copied.record()
        self._in_flight.append((copied, batch.slot))
        return Batch(rows, edges, batch.nodes, batch.hop1, labels, batch.slot), copied

    def recycle(self) -> None:
        """Gives slots back whose copies are over; the oldest of three is waited for."""
        while self._in_flight:
            copied, slot = self._in_flight[0]
            if copied is not None and not copied.query() and len(self._in_flight) <= 2:
                return
            self._in_flight.popleft()
            if copied is not None:
                copied.synchronize()
            self.loader.free.put(slot)

    def step(self, batch: Batch, copied: Any) -> torch.Tensor:
        if copied is not None:
            current = torch.cuda.current_stream()
            current.wait_event(copied)
            for tensor in (*batch.rows.values(), *batch.edges.values(), batch.labels):
                tensor.record_stream(current)
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(batch), batch.labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def run(self, steps: int, first_key: int, ahead: int) -> tuple[float, float]:
        """Seconds of a step, and the last loss."""
        waiting = deque(self.loader.submit(first_key + k) for k in range(ahead))
        following = self.to_device(waiting.popleft().result())
        begin, loss = 0.0, torch.zeros(())
        warm = max(1, steps // 4)
        for k in range(warm + steps):
            if k == warm:
                _synchronize(self.device)
                begin = time.perf_counter()
            current = following
            waiting.append(self.loader.submit(first_key + ahead + k))
            following = self.to_device(waiting.popleft().result())
            loss = self.step(*current)
            self.recycle()
        _synchronize(self.device)
        seconds = (time.perf_counter() - begin) / steps
        for future in waiting:
            self.loader.free.put(future.result().slot)
        while self._in_flight:
            self.loader.free.put(self._in_flight.popleft()[1])
        return seconds, float(loss)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _parts(pipeline: Pipeline, loader: Loader, steps: int, threads: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of a batch: on the CPU's threads alone, as copies alone, as layers alone."""
    begin = time.perf_counter()
    for future in [loader.submit(10_000 + k) for k in range(max(steps, threads))]:
        loader.free.put(future.result().slot)
    found = {"cpu_threads_ms": (time.perf_counter() - begin) / max(steps, threads) * 1e3}
    batch = loader.make(7)
    moved = pipeline.to_device(batch)
    for name, call in (
        ("copy_ms", lambda: pipeline.to_device(batch)),
        ("layers_ms", lambda: pipeline.step(*moved)),
    ):
        call()
        _synchronize(device)
        begin = time.perf_counter()
        for _ in range(min(steps, 20)):
            call()
        _synchronize(device)
        found[name] = (time.perf_counter() - begin) / min(steps, 20) * 1e3
        pipeline._in_flight.clear()
    found["rows"] = sum(x.shape[0] for x in batch.rows.values())
    found["edges"] = sum(x.shape[1] for x in batch.edges.values())
    loader.free.put(batch.slot)
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of nodes and edges")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a step")
    parser.add_argument("--threads", type=int, default=16, help="threads of the CPU that sample and gather")
    parser.add_argument("--steps", type=int, default=100, help="steps to time")
    parser.add_argument("--model", choices=MODELS, action="append", help="by default both")


def run(args: argparse.Namespace, save: Save) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.backends.cuda.matmul.allow_tf32 = True
    begin = time.perf_counter()
    csc, counts = make_graph(args.scale)
    loader = Loader(csc, counts, args.seeds, args.threads, device.type == "cuda")
    made_s = time.perf_counter() - begin
    results = []
    for name in args.model or MODELS:
        torch.manual_seed(0)
        pipeline = Pipeline(loader, MODELS[name](loader.relations).to(device), device)
        seconds, loss = pipeline.run(args.steps, 1, args.threads)
        result = {
            "peer": f"{args.threads} CPU threads, PyTorch Geometric, {name}", "graph": "mag", "scale": args.scale,
            "step_ms": seconds * 1e3, "loss": loss, "made_s": made_s,
            **_parts(pipeline, loader, args.steps, args.threads, device),
        }  # fmt: skip
        results.append({key: round(v, 3) if isinstance(v, float) else v for key, v in result.items()})
        print(json.dumps(results[-1]), flush=True)
    save(results)
