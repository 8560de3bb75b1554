"""MLPerf's R-GAT on IGB's shape on several GPUs of one host: rates, rows by place, and what each GPU did.

    python -m benchmarks igb_mesh --scale 1 --gpus 4 --places divided --device-gb 100
    python -m benchmarks igb_mesh --scale 0.05 --gpus 1 2 4 --places host divided

The steps are those of `examples/igb_rgat.py`: pipelined, with edges in host memory once for all GPUs. `--places host`
has all rows of features in host memory, `divided` the most visited ones in the memory of the GPUs, which read each
other's over NVLink. Each GPU has `--seeds` seeds, so n GPUs would ideally have n times the rate of one.

On a machine without GPUs, CPU devices take small sizes, to check the benchmark:

    XLA_FLAGS=--xla_force_host_platform_device_count=2 python -m benchmarks igb_mesh --check
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.mini_batch_inputs import BUS
from benchmarks.mini_batch_pipeline import figures_of
from benchmarks.provenance import Save
from dejax import distributed
from dejax.host_gather import PeerTable
from dejax.minibatch import step_keys
from dejax.pallas.profile import record
from examples.igb_rgat import IGBData, Recipe, RGATConfig, RGATTrainer, random_data

LINK = 450e9
"""Bytes a second into a GPU by 18 links of NVLink 4, by the vendor's figures."""


def trainer_of(data: IGBData, mesh: Any, args: argparse.Namespace, capacities: Any) -> RGATTrainer:
    small: dict[str, Any] = {"hidden": 16, "backend": "xla", "dtype": "float32"} if args.check else {}
    config = RGATConfig(
        data.topology.edge_types, data.topology.node_types, in_features=data.width, classes=data.num_classes, **small
    )
    fan_outs = (3, 2, 2) if args.check else (15, 10, 5)
    return RGATTrainer(data, config, Recipe(args.seeds, fan_outs, pipeline=args.steps), mesh, capacities)


def arguments_of(trainer: RGATTrainer, first: int, steps: int) -> tuple[Any, ...]:
    """The arguments of a call after the state."""
    topology, features, labels = trainer.inputs
    keys = step_keys(jax.random.key(1), first, steps)
    return topology, features, keys, jnp.asarray(trainer.seeds(first, steps)), labels


def rows_by_place(trainer: RGATTrainer, batches: int = 2) -> dict[str, Any]:
    """Rows that the first GPU reads for a batch from its own memory, over NVLink and over the bus, and the floors."""
    data, found = trainer.data, {"own": 0, "other": 0, "host": 0}
    sample = jax.jit(lambda key, topology, seeds: trainer.sample(key, topology, seeds).node_ids)
    for number in range(batches):
        seeds = jnp.asarray(trainer.seeds(number, 1)[0, : trainer.recipe.batch])
        for name, ids in sample(jax.random.key(number), data.topology, seeds).items():
            table = data.features[name].table
            if isinstance(table, PeerTable):
                of_type = table.rows_by_place(ids)
            else:
                of_type = {"host": int((np.asarray(ids) >= 0).sum())}
            for place, count in of_type.items():
                found[place] += count
    width = next(iter(data.features.row_bytes.values()))
    rows = {place: count // batches for place, count in found.items()}
    return {
        "rows": rows,
        "bytes": {place: count * width for place, count in rows.items()},
        "bus_floor_ms": round(rows["host"] * width / BUS * 1e3, 3),
        "link_floor_ms": round(rows["other"] * width / LINK * 1e3, 3),
    }


def bytes_by_place(data: IGBData) -> dict[str, int]:
    """Bytes of features on devices and in host memory, and of edges in host memory."""
    found = {"features on devices": 0, "features in host memory": 0, "edges in host memory": 0}
    for node in data.features.types.values():
        total = node.table.nbytes
        own = node.table.table.nbytes if isinstance(node.table, PeerTable) else total
        found["features in host memory"] += own
        found["features on devices"] += total - own
    for lists in data.topology.lists:
        found["edges in host memory"] += lists.senders.size * lists.senders.dtype.itemsize
    return found | {"first edges on each device": data.topology.starts_nbytes}


def measured(name: str, trainer: RGATTrainer, run: Any, args: argparse.Namespace) -> dict[str, Any]:
    """Times of calls of a compiled program, and a profile of one call."""
    state = distributed.replicate(trainer.init(), trainer.mesh)
    lost, losses, times = 0, [], []
    for turn in range(args.repeats + 1):
        given = arguments_of(trainer, turn * args.steps, args.steps)
        jax.block_until_ready(given)
        begin = time.perf_counter()
        state, outs = run(state, *given)
        jax.block_until_ready(outs)
        times.append((time.perf_counter() - begin) / args.steps * 1e3)
        lost += int(np.asarray(outs["lost"]).sum())
        losses += np.asarray(outs["loss"]).tolist()
    ms = statistics.median(times[1:])
    rate = args.seeds / ms * 1e3
    result = {
        "case": name, "devices": trainer.devices, "step_ms": round(ms, 3), "all_ms": [round(t, 3) for t in times],
        "seeds_per_s": round(trainer.devices * rate), "seeds_per_s_and_gpu": round(rate),
        "lost": lost, "loss": [losses[0], losses[-1]],
    }  # fmt: skip
    if args.no_profile:
        return result
    print("timed", json.dumps(result), flush=True)  # a profile of several GPUs can take long, or fail
    given = arguments_of(trainer, 0, args.steps)
    records = record(lambda: jax.block_until_ready(run(state, *given)))
    devices = sorted({r.device for r in records})
    profiles = [figures_of([r for r in records if r.device == each], args.steps) for each in devices]
    return result | {"profile": profiles[0] if profiles else {}, "of_devices": [
        {key: each[key] for key in ("kernels_ms", "busy_ms", "gathers_ms", "collectives_ms")} for each in profiles
    ]}  # fmt: skip


def run(args: argparse.Namespace, save: Save) -> None:
    if args.check:
        args.scale, args.seeds, args.steps, args.repeats, args.width = 2e-6, 16, 4, 1, 16
        args.gpus = args.gpus or [n for n in (1, 2) if n <= jax.device_count()]
    gpus = args.gpus or [n for n in (1, 2, 4, 8) if n <= jax.device_count()]
    logging.basicConfig(format="# %(message)s")
    logging.getLogger("examples.igb_rgat").setLevel(logging.INFO)
    found: dict[str, Any] = {"scale": args.scale, "devices": jax.device_count(), "made": [], "results": []}

    def say(kind: str, what: dict[str, Any]) -> None:
        found.setdefault(kind, []).append(what)
        print(kind, json.dumps(what), flush=True)
        save(found)

    topology, capacities, cases = None, None, []
    for place in args.places:
        data = None
        for count in gpus:
            mesh, begin = distributed.make_mesh(count), time.perf_counter()
            if place == "divided" or data is None:
                room = int(args.device_gb * 1e9) if place == "divided" else 0
                fan_outs = (3, 2, 2) if args.check else (15, 10, 5)
                data = random_data(
                    args.scale, width=args.width, device_bytes=room, batch=args.seeds, fan_outs=fan_outs, mesh=mesh,
                    topology=topology, progress=False,
                )  # fmt: skip
                made = {"place": place, "devices": count, "seconds": round(time.perf_counter() - begin, 1)}
                say("made", made | {"parts": data.seconds} | bytes_by_place(data))
            begin = time.perf_counter()
            trainer = trainer_of(data, mesh, args, capacities)
            data, capacities = trainer.data, trainer.capacities
            topology = data.topology
            shared, begin = time.perf_counter() - begin, time.perf_counter()
            if not cases:
                say("sample", rows_by_place(trainer))
            state = distributed.replicate(trainer.init(), mesh)
            lowered = trainer.steps.trace(state, *arguments_of(trainer, 0, args.steps)).lower()
            say("traced", {"place": place, "devices": count, "capacities_and_sharing_s": round(shared, 1),
                           "trace_and_lower_s": round(time.perf_counter() - begin, 1)})  # fmt: skip
            cases.append((place, trainer, lowered))
            del state
    begin = time.perf_counter()
    with ThreadPoolExecutor(len(cases)) as pool:
        programs = list(pool.map(lambda case: case[2].compile(), cases))
    say("compiled", {"seconds": round(time.perf_counter() - begin, 1)})
    one: dict[str, float] = {}
    for (place, trainer, _), program in zip(cases, programs, strict=True):
        result = measured(place, trainer, program, args)
        one.setdefault(place, result["seeds_per_s"] / trainer.devices)
        if (memory := program.memory_analysis()) is not None:
            result["temporary_bytes"] = memory.temp_size_in_bytes
        say("results", result | {"times_one": round(result["seeds_per_s"] / one[place], 3)})


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=0.01, help="of IGB's numbers of nodes and edges")
    parser.add_argument("--gpus", type=int, nargs="+", help="numbers of GPUs; by default 1, 2, 4, ... as there are")
    parser.add_argument(
        "--places", nargs="+", choices=("host", "divided"), default=["host", "divided"], help="of the rows of features"
    )
    parser.add_argument("--device-gb", type=float, default=100.0, help="of features and slots on each GPU")
    parser.add_argument("--width", type=int, default=1024, help="elements of a row")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a GPU and step")
    parser.add_argument("--steps", type=int, default=24, help="steps of a program")
    parser.add_argument("--repeats", type=int, default=3, help="timings after the first call; the median counts")
    parser.add_argument("--no-profile", action="store_true", help="leave the profiler out: no times of kernels")
    parser.add_argument("--check", action="store_true", help="small sizes, to check the benchmark on a CPU")
