"""Training on several GPUs of one host: the rates of 1, 2, 4, ... GPUs, and what crosses between them.

    python -m benchmarks several_gpus --out results.json                       # all sections, on all GPUs
    python -m benchmarks several_gpus --only full_graph --devices 1 2 --nodes 200000 --edges 2000000

`mini_batch`: data-parallel R-GAT steps with ogbn-mag's counts (`igb_mesh` has MLPerf's R-GAT). Each GPU has its own
seeds, so the ideal is n times the rate of one. Features lie in one table in host memory, which all GPUs read, or are
divided over the memory of the GPUs, which exchange rows.

`full_graph`: one layer of RGCN, RGAT and HGT, forward and backward, on a graph that is divided over the GPUs, with the
times of a part by itself and of the exchange by itself (`benchmarks/divided_graphs.py`).

`tables`: two processes with a GPU each read a table that is divided between them, half of the rows remote, and the same
number of rows where all are local.

`decoder`: a GPT whose parameters are divided (FSDP), with and without offload: time and collectives of a step.

On a machine without GPUs the sections run on CPU devices, with small sizes, to check them:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks several_gpus --check
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.clock import milliseconds
from benchmarks.divided_graphs import full_graph
from benchmarks.mini_batch_inputs import MAG_EDGES, MAG_NODES, Model, both_directions, shared_fan_outs
from benchmarks.provenance import Save
from dejax import distributed
from dejax.distributed import Part, ShardedTable, data_parallel, link_bytes
from dejax.host_gather import HostTable
from dejax.minibatch import FeatureStore, HeteroTopology, find_capacities, make_blocks, sample_blocks
from dejax.rgnn.nnx import RGATConv

OPTIMIZER = optax.adam(1e-3)
Tree = Any


# ------------------------------------------------------------------------------------------------ mini-batches


@dataclass(frozen=True)
class Job:
    """A graph with features and a model.

    Attributes:
        topology, features, labels: the data; features as numpy arrays or tables in host memory, by node type.
        seed_type: the node type of the seeds.
        fan_outs: of each hop.
        params: the first parameters.
        loss_of: (params, blocks, x, positions, labels, key) -> loss.
    """

    topology: HeteroTopology
    features: dict[str, Any]
    labels: Any
    seed_type: str
    fan_outs: list[Any]
    params: Tree
    loss_of: Callable[..., Any]


def mag_job(args: argparse.Namespace) -> Job:
    """Two layers of R-GAT, 128 wide, 4 heads, float32 features."""
    edges, counts = both_directions(MAG_EDGES, MAG_NODES, args.scale)
    topology = HeteroTopology.from_edges(edges, counts, on_host=True, keep_edge_ids=False)
    rng = np.random.default_rng(5)
    features = {kind: rng.standard_normal((count, 128), np.float32) for kind, count in counts.items()}
    rngs, relations = nnx.Rngs(0), len(topology.edge_types)
    layers = [RGATConv(128, 32, relations, num_heads=4, rngs=rngs) for _ in range(2)]
    graphdef, params = nnx.split(Model(layers, nnx.Linear(128, 64, rngs=rngs)), nnx.Param)

    def loss_of(params: Tree, blocks: Any, x: Any, positions: Any, labels: Any, key: Any) -> Any:
        del key
        outputs = nnx.merge(graphdef, params)(blocks, x)["paper"][positions]
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    labels = rng.integers(0, 64, counts["paper"]).astype(np.int32)
    return Job(topology, features, labels, "paper", shared_fan_outs(topology, [15, 10]), params, loss_of)


def capacities_of(job: Job, store: FeatureStore, draws: list[Any], capacities: Any) -> dict[str, int]:
    """For each divided table the most rows that a device asks of another one, from some batches."""

    @jax.jit
    def ids_of(key: Any, topology: HeteroTopology, seeds: Any) -> Any:
        return sample_blocks(key, topology, (job.seed_type, seeds), job.fan_outs, capacities=capacities).node_ids

    asked = [jax.device_get(ids_of(jax.random.key(n), job.topology, d)) for n, d in enumerate(draws)]
    return {
        name: node.table.find_capacity([ids[name] for ids in asked])
        for name, node in store.types.items()
        if isinstance(node.table, ShardedTable)
    }


def training(job: Job, devices: int, memory: str, args: argparse.Namespace) -> dict[str, Any]:
    """A data-parallel step with features in `memory`: "host" or "device"."""
    mesh = distributed.make_mesh(devices)
    count, rng = job.topology.num_nodes[job.seed_type], np.random.default_rng(6)
    draws = [rng.integers(0, count, args.seeds).astype(np.int32) for _ in range(12)]
    capacities = find_capacities(
        jax.random.key(0), job.topology, [(job.seed_type, d) for d in draws], job.fan_outs, print_table=None
    )
    store = FeatureStore()
    for name, rows in job.features.items():
        if memory == "device":
            values = rows.numpy() if isinstance(rows, HostTable) else rows
            store = store.with_table(name, ShardedTable.from_numpy(values, mesh, memory="device"))
        else:
            store = store.with_table(name, rows if isinstance(rows, HostTable) else HostTable.from_numpy(rows))
    exchanged = capacities_of(job, store, draws[:4], capacities) if devices > 1 else {}
    data = {"topology": job.topology, "features": store, "labels": jnp.asarray(job.labels)}
    data = distributed.share(data, mesh)
    # Copies: the step takes over the memory of its state.
    params = jax.tree.map(jnp.array, job.params)
    state = distributed.share({"params": params, "moments": OPTIMIZER.init(params)}, mesh)

    def gradients(state: Any, key: Any, seeds: Any, data: Any) -> Part:
        sample = sample_blocks(key, data["topology"], (job.seed_type, seeds), job.fan_outs, capacities=capacities)
        x, lost = data["features"].gather_counted(sample.node_ids, capacity=exchanged, dtype=jnp.float32)
        blocks, positions = make_blocks(sample), sample.seed_positions[job.seed_type]
        labels = data["labels"][seeds]
        loss, found = jax.value_and_grad(lambda p: job.loss_of(p, blocks, x, positions, labels, key))(state["params"])
        return Part(loss, found, seeds.shape[0], counts=sample.lost.sum() + lost)

    def update(state: Any, mean: Part) -> Any:
        changes, moments = OPTIMIZER.update(mean.gradients, state["moments"], state["params"])
        return {"params": optax.apply_updates(state["params"], changes), "moments": moments}

    per_call = min(args.per_call or args.steps, args.steps)
    step = data_parallel(gradients, update, mesh, steps=per_call)
    batches = [np.concatenate([draws[(n + d) % 12] for d in range(devices)]) for n in range(12)]

    def given(first: int) -> tuple[Any, Any]:
        numbers = range(first, first + per_call)
        keys, seeds = jnp.stack([jax.random.key(n) for n in numbers]), np.stack([batches[n % 12] for n in numbers])
        return (keys, jnp.asarray(seeds)) if per_call > 1 else (keys[0], jnp.asarray(seeds[0]))

    calls = args.steps // per_call
    ready = [given(call * per_call) for call in range(calls * (args.turns + 1))]
    begin, reports, times = time.perf_counter(), [], []
    for turn in range(args.turns + 1):
        for call in range(calls):
            state, report = step(state, *ready[turn * calls + call], data)
            reports.append(report)
        jax.block_until_ready(report)
        times.append((time.perf_counter() - begin) / (calls * per_call))
        begin = time.perf_counter()
    seconds = statistics.median(times[1:])
    assert all(np.isfinite(report.loss).all() for report in reports)
    crossed = link_bytes(step.lower(state, *ready[0], data).compile(), devices)
    return {
        "step_ms": seconds * 1e3,
        "seeds_per_s": devices * args.seeds / seconds,
        "steps_per_call": per_call,
        "first_turn_s": times[0] * calls * per_call,
        "crossed_bytes": crossed,
        "lost": sum(int(np.sum(report.counts)) for report in reports),
    }


def mini_batch(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    job = mag_job(args)
    for memory in ("host", "device"):
        one = 0.0
        for devices in args.devices:
            found = training(job, devices, memory, args)
            one = one or found["seeds_per_s"] / devices
            yield {
                "shape": "mag",
                "features": memory,
                "devices": devices,
                "times_one": found["seeds_per_s"] / one,
            } | found


# ------------------------------------------------------------------------------------------------ two processes


def tables(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Starts two processes with a device each; their results come back in the output of the first."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for process in range(2):
        environment = {**os.environ, "DEJAX_PROCESS": str(process), "DEJAX_PORT": str(port)}
        environment |= {"CUDA_VISIBLE_DEVICES": str(process), "XLA_FLAGS": ""}
        command = [sys.executable, "-m", "benchmarks", "several_gpus", "--only", "tables"]
        command += [*(["--check"] if args.check else []), "--rows", str(args.rows), "--calls", str(args.calls)]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=args.limit)[0] for process in started]
    if any(process.returncode for process in started):
        raise RuntimeError(f"a process of `tables` ended with {[p.returncode for p in started]}; its errors are above")
    yield from (json.loads(line) for line in texts[0].splitlines() if line.startswith("{"))


def table_process(args: argparse.Namespace) -> None:
    """One of two processes: prints a line of JSON for each case."""
    process = int(os.environ["DEJAX_PROCESS"])
    distributed.initialize(f"127.0.0.1:{os.environ['DEJAX_PORT']}", num_processes=2, process_id=process)
    mesh, width, count = distributed.make_mesh(), 128, args.rows // 8
    spec = jax.sharding.PartitionSpec("data")
    values = np.arange(args.rows, dtype=np.float32)[:, None]
    for memory in ("host", "device"):
        table = ShardedTable.from_numpy(np.broadcast_to(values, (args.rows, width)), mesh, memory=memory)
        times, specs = {}, jax.tree.map(lambda leaf: leaf.sharding.spec, table)
        for name, remote in (("local", 0.0), ("half remote", 0.5)):
            rng, half = np.random.default_rng(3), args.rows // 2
            ids = rng.integers(0, half, (2, count)) + np.array([[0], [half]])  # of one's own rows
            other = rng.random(ids.shape) < remote
            ids = np.where(other, (ids + half) % args.rows, ids).astype(np.int32).reshape(-1)
            capacity = max(1, int(1.1 * count * remote)) if remote else 1

            def read(table: Any, ids: Any, capacity: int = capacity) -> Any:
                rows, lost = table.gather(ids, capacity=capacity)
                return rows, lost[None]

            run = jax.jit(
                jax.shard_map(read, mesh=mesh, in_specs=(specs, spec), out_specs=(spec, spec), check_vma=False)
            )
            everywhere = jax.make_array_from_callback(
                ids.shape, jax.sharding.NamedSharding(mesh, spec), lambda index, ids=ids: ids[index]
            )
            rows, lost = run(table, everywhere)
            own = np.asarray(rows.addressable_shards[0].data)
            mine = ids[process * count : (process + 1) * count]
            assert int(np.asarray(lost.addressable_shards[0].data)[0]) == 0 and (own == mine[:, None]).all()
            times[name] = milliseconds(lambda run=run, t=table, e=everywhere: run(t, e), args.calls)
        rates = {f"{name} GB/s": count * width * 4 / ms / 1e6 for name, ms in times.items()}
        if process == 0:
            share = times["local"] / times["half remote"]
            print(json.dumps({"memory": memory, "rows_read": count, "share_of_local_rate": share} | rates), flush=True)


# ------------------------------------------------------------------------------------------------ decoder


def decoder(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A step with parameters divided over the devices; offload keeps the inputs of blocks in host memory."""
    from examples.train_gpt import SIZES, Recipe, make_mesh, make_trainer

    devices, base = max(args.devices), None
    config, sequence = SIZES["tiny" if args.check else "1b"], 32 if args.check else 2048
    for offload in ("remat", "inputs"):
        recipe = Recipe(batch=2 * devices, steps=100, offload=offload, min_bytes=1 << 4 if args.check else 1 << 20)
        trainer = make_trainer(config, recipe, mesh=make_mesh(devices))
        state = trainer.init(jax.random.key(0))
        tokens = trainer.put(np.random.default_rng(0).integers(0, 256, (2 * devices, sequence + 1)).astype(np.int32))
        text = trainer.step.lower(state, tokens).compile().as_text()
        kinds = re.findall(r" (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(", text)
        losses, times = [], []
        for _ in range(args.turns + 1):
            begin, found = time.perf_counter(), []
            for _ in range(args.steps):
                state, loss = trainer.step(state, tokens)
                found.append(loss)
            losses += [float(loss) for loss in found]
            times.append((time.perf_counter() - begin) / args.steps * 1e3)
        ms = statistics.median(times[1:])
        base = base or ms
        yield {
            "offload": offload, "devices": devices, "step_ms": ms, "times_remat": ms / base,
            "collectives": {kind: kinds.count(kind) for kind in sorted(set(kinds))}, "losses": losses,
        }  # fmt: skip


SECTIONS = {"mini_batch": mini_batch, "full_graph": full_graph, "tables": tables, "decoder": decoder}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=SECTIONS, action="append", help="sections; by default all")
    parser.add_argument(
        "--devices", type=int, nargs="+", help="numbers of devices; by default 1, 2, 4, ... as there are"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="of mag's numbers of nodes and edges")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a device and step")
    parser.add_argument("--nodes", type=int, default=1_939_743, help="of `full_graph`")
    parser.add_argument("--edges", type=int, default=21_111_007, help="of `full_graph`")
    parser.add_argument("--reach", type=float, default=0.05, help="how far edges of `full_graph` lead, of all nodes")
    parser.add_argument("--width", type=int, default=64, help="of rows of `full_graph`")
    parser.add_argument("--rows", type=int, default=1 << 22, help="of the table of `tables`, a power of two")
    parser.add_argument("--steps", type=int, default=10, help="training steps of a turn")
    parser.add_argument("--per-call", type=int, help="steps of a call, of `mini_batch`; by default all of a turn")
    parser.add_argument("--turns", type=int, default=5, help="turns of training steps; the median counts")
    parser.add_argument("--calls", type=int, default=20, help="calls of a turn, of `full_graph` and `tables`")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that `tables` may take")
    parser.add_argument("--check", action="store_true", help="small sizes, to check the sections on a CPU")


def run(args: argparse.Namespace, save: Save) -> None:
    if args.check:
        args.scale, args.seeds, args.nodes, args.edges = 0.002, 32, 400, 3000
        args.rows, args.width, args.steps, args.turns, args.calls = 512, 8, 2, 1, 1
    if "DEJAX_PROCESS" in os.environ:
        table_process(args)
        return
    if args.devices is None:
        args.devices = [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    found: dict[str, Any] = {"devices": jax.device_count()}
    for name in args.only or SECTIONS:
        found[name] = []
        begin = time.perf_counter()
        for result in SECTIONS[name](args):
            found[name].append(result)
            print(name, json.dumps(result), flush=True)
            save(found)
        print(f"# {name}: {time.perf_counter() - begin:.1f} s", flush=True)
