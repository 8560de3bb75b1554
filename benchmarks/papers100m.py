"""GraphSAGE on batches of a random graph with the counts of papers100M: a whole epoch, for several placements.

    python -m benchmarks papers100m --out out/papers100m.json
    python -m benchmarks papers100m --scale 0.001 --steps 4    # also on a CPU

The graph has 111 million nodes with 128 floats each (57 GB), 1.6 billion edges and 1.2 million training nodes. The
model has three layers 256 wide, fan-outs 15, 10, 5 and 1,024 seeds a step. Placements:

- `host`: edges and rows in host memory.
- `rows`: the rows that batches visit most, `--device-gb` of them, and the first edge of each node on the device, too.
- `edges`: as `rows`, with the edges on the device.

An epoch is timed as it runs, with all its batches; nothing is extrapolated.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.mini_batch_pipeline import Case, measured
from benchmarks.provenance import Save
from benchmarks.scale_model import GRAPHS
from dejax import rgnn
from dejax.datasets import fill_rows
from dejax.host_gather import HostTable
from dejax.minibatch import (
    FeatureStore,
    MiniBatch,
    find_capacities,
    hot_rows,
    pipelined_steps,
    random_topology,
    sample_blocks,
    seed_batches,
    step_keys,
)

PAPERS = next(graph for graph in GRAPHS if graph.name == "papers100M")
CLASSES, WIDTH, HIDDEN = 172, 128, 256
FAN_OUTS = [15, 10, 5]


@rgnn.program
def sage(g: Any, x: Any, own: Any, other: Any, bias: Any) -> Any:
    return g.node(x) @ g.shared(own) + g.mean_to_dst(g.src(x)) @ g.shared(other) + g.shared(bias)


def cases(args: argparse.Namespace) -> Iterator[tuple[str, Case]]:
    """The placements, one after the other, of one graph."""
    begin = time.perf_counter()
    nodes, edges = int(PAPERS.nodes * args.scale), int(PAPERS.edges * args.scale)
    topology = random_topology({"node": nodes}, {("node", "to", "node"): edges})
    edges_s = time.perf_counter() - begin
    table = HostTable.empty((nodes, WIDTH), np.float32)
    fill_rows(table)
    features = FeatureStore().with_table("node", table)
    train = np.arange(max(1, int(PAPERS.train_nodes * args.scale)))
    rng = np.random.default_rng(3)
    labels = jnp.asarray(rng.integers(0, CLASSES, nodes), jnp.int32)
    made_s = time.perf_counter() - begin
    batches = [("node", rng.choice(train, args.seeds)) for _ in range(20)]
    optimizer = optax.adam(3e-3)
    capacities = find_capacities(jax.random.key(0), topology, batches, FAN_OUTS, print_table=None)

    def sample(key: Any, topology: Any, seeds: Any) -> Any:
        return sample_blocks(key, topology, ("node", seeds), FAN_OUTS, capacities=capacities)

    def update(state: Any, batch: MiniBatch, labels: Any) -> tuple[Any, Any]:
        params, moments = state

        def loss_of(params: Any) -> Any:
            h = batch.blocks[0].join(batch.x)
            for number, (block, own) in enumerate(zip(batch.blocks, params, strict=True)):
                h = sage(block.bipartite, h, *own)
                h = jax.nn.relu(h) if number + 1 < len(batch.blocks) else h
            logits = h[batch.sample.seed_positions["node"]]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels[batch.seeds])
            return jnp.where(batch.seeds >= 0, losses, 0).sum() / jnp.maximum((batch.seeds >= 0).sum(), 1)

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def state() -> Any:
        key, glorot, params = jax.random.key(0), jax.nn.initializers.glorot_normal(), []
        for number, dims in enumerate([(WIDTH, HIDDEN), (HIDDEN, HIDDEN), (HIDDEN, CLASSES)]):
            own, other = jax.random.split(jax.random.fold_in(key, number))
            params.append((glorot(own, dims), glorot(other, dims), jnp.zeros(dims[1])))
        return params, optimizer.init(params)

    split = None
    for placement in args.placements.split(","):
        about: dict[str, Any] = {"nodes": nodes, "edges": edges, "edges_s": round(edges_s, 1)}
        here, rows = topology, features
        if placement != "host":
            if split is None:
                begin = time.perf_counter()
                visits = topology.expected_visits({"node": train}, FAN_OUTS, batch_size=args.seeds)
                about["visits_s"], begin = round(time.perf_counter() - begin, 1), time.perf_counter()
                hot = hot_rows(visits, features.row_bytes, int(args.device_gb * 1e9))
                about["hot_rows_s"], begin = round(time.perf_counter() - begin, 1), time.perf_counter()
                split = features.cached(hot)
                about |= {"hot_rows": len(hot["node"]), "copied_s": round(time.perf_counter() - begin, 1)}
            rows = split
            here = topology.with_starts_on_device()
        if placement == "edges":
            # The benchmark's own: users say `on_host=False`.
            moved = (dataclasses.replace(some, senders=jnp.asarray(some.senders.numpy())) for some in here.lists)
            here = dataclasses.replace(here, lists=tuple(moved))
        yield placement, Case(here, rows, train, args.seeds, update, sample, state, (labels,), made_s, about=about)
        del here


def epochs(case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole epochs, `--steps` steps a program; the last program is padded by batches without seeds."""
    run = pipelined_steps(case.update, case.sample, joined=True)
    state = case.state()
    for number in range(args.epochs + 1):  # the first compiles
        begin = time.perf_counter()
        batches = seed_batches(case.nodes, case.seeds, seed=0, epoch=number)
        count = len(batches) if number else 1
        losses = []
        for first in range(0, count, args.steps):
            some = np.full((args.steps, case.seeds), -1, np.int32)
            some[: len(batches[first : first + args.steps])] = batches[first : first + args.steps]
            keys = step_keys(jax.random.key(number), first, args.steps)
            state, found = run(state, case.topology, case.features, keys, jnp.asarray(some), *case.rest)
            losses.append(found)
        jax.block_until_ready(losses)
        seconds = time.perf_counter() - begin
        if number == 0:
            yield {"section": "compile", "compile_and_first_program_s": round(seconds, 1)}
            continue
        mean = np.concatenate(losses)[:count].mean()
        yield {"section": "epoch", "batches": count, "epoch_s": round(seconds, 3),
               "ms_per_step": round(seconds / count * 1e3, 3), "mean_loss": float(mean)}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=1.0, help="counts, as a share of papers100M's")
    parser.add_argument("--placements", default="host,rows,edges", help="with commas in between")
    parser.add_argument("--device-gb", type=float, default=30.0, help="of rows on the device")
    parser.add_argument("--steps", type=int, default=131, help="steps of a program")
    parser.add_argument("--epochs", type=int, default=2, help="timed epochs of each placement")
    parser.add_argument("--repeats", type=int, default=2, help="timings of a program alone")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a step")
    parser.add_argument("--profile", action="store_true", help="times of kernels from a profile of one program")


def run(args: argparse.Namespace, save: Save) -> None:
    args.ways, args.no_profile = "pipelined", False
    results: list[dict[str, Any]] = []

    def keep(placement: str, result: dict[str, Any]) -> None:
        results.append({"placement": placement, **result})
        print(json.dumps(results[-1]), flush=True)
        save(results)

    for placement, case in cases(args):
        keep(placement, {"section": "data", "made_s": round(case.made_s, 1), "seeds": case.seeds, **case.about})
        for result in epochs(case, args):
            keep(placement, result)
        if args.profile:
            for result in measured("papers", case, argparse.Namespace(**{**vars(args), "steps": 24})):
                keep(placement, result)
        del case
