"""Pipelined training steps on sampled batches, with edges and features in host memory.

    python -m benchmarks mini_batch_pipeline --out results.json
    python -m benchmarks mini_batch_pipeline --only igb --scale 0.1 --device-gb 30

- `mag`, `am`: R-GAT of two and three layers on their counts, single and pipelined.
- `igb`: MLPerf's R-GAT on a random graph with IGB's counts times `--scale`: FP8 rows of 1 KiB, 1,024 seeds.

For each: milliseconds of a step as a caller sees it, the busy share of a CPU core, rows and bytes over the bus and its
floor, seeds a second, and from a profile the kernels' times by name and the time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.mini_batch_inputs import (
    BUS,
    MAG_EDGES,
    MAG_NODES,
    Model,
    _table,
    am_counts,
    both_directions,
    shared_fan_outs,
)
from benchmarks.provenance import Save
from dejax.host_gather import CachedTable, SplitTable
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    MiniBatch,
    find_capacities,
    pipelined_steps,
    sample_blocks,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.pallas.profile import Record, record
from dejax.rgnn.nnx import RGATConv
from examples.igb_rgat import Recipe, RGATConfig, RGATTrainer, random_data


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A training job.

    Attributes:
        topology, features, nodes: the graph, its features, and the training nodes.
        seeds: of a step.
        update, sample: as `pipelined_steps` takes them.
        state: makes the first state.
        rest: further arguments.
        made_s: seconds to make the data.
        dtype: of gathered rows.
        about: figures of the case.
    """

    topology: HeteroTopology
    features: FeatureStore
    nodes: np.ndarray
    seeds: int
    update: Callable[..., Any]
    sample: Callable[..., Any]
    state: Callable[[], Any]
    rest: tuple[Any, ...]
    made_s: float
    dtype: Any = None
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def measured(name: str, case: Case, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The figures of a case: single steps, pipelined steps, a profile of each."""
    count = args.steps
    order: list[np.ndarray] = []
    while len(order) < count:
        order += list(seed_batches(case.nodes, case.seeds, seed=0, epoch=len(order)))
    seeds, keys = jnp.asarray(np.stack(order[:count])), step_keys(jax.random.key(1), 0, count)
    base = {"case": name, "made_s": round(case.made_s, 1), "seeds": case.seeds, **case.about}
    yield {"section": "data", **base}
    inputs = case.topology, case.features
    losses, bus_ms = {}, None

    def update(state: Any, batch: MiniBatch, *rest: Any) -> tuple[Any, Any]:
        state, loss = case.update(state, batch, *rest)
        return state, (loss, batch.sample.node_ids)

    for way in args.ways.split(","):
        piped, (kind, _, whole) = way.startswith("pipelined"), way.partition("/")
        sms = kind.partition(":")[2]
        options = {"num_sms": int(sms) if sms else None, "edges_ahead": False if whole else None}
        make = functools.partial(pipelined_steps, **options) if piped else sampled_step
        several = (keys, seeds) if piped else (keys[0], seeds[0])
        state, begin = case.state(), time.perf_counter()
        lowered = (
            make(update, case.sample, dtype=case.dtype, joined=True).trace(state, *inputs, *several, *case.rest).lower()
        )
        lowered_s, begin = time.perf_counter() - begin, time.perf_counter()
        run = lowered.compile()
        compiled_s = time.perf_counter() - begin
        yield {"section": "compile", "case": name, "way": way, "trace_and_lower_s": round(lowered_s, 1),
               "compile_s": round(compiled_s, 1)}  # fmt: skip

        def steps(state: Any, run: Any = run, piped: bool = piped) -> tuple[Any, Any]:
            if piped:
                return run(state, *inputs, keys, seeds, *case.rest)
            outs = []
            for n in range(count):
                state, out = run(state, *inputs, keys[n], seeds[n], *case.rest)
                outs.append(out)
            return state, outs

        state, outs = steps(state)
        losses[way] = np.asarray([float(loss) for loss, _ in outs] if way == "single" else outs[0])
        if bus_ms is None:
            ids = outs[0][1] if way == "single" else jax.tree.map(lambda some: some[0], outs[1])
            rows = _rows(ids, case)
            bus_ms = rows["bus_ms"]
            yield {"section": "sample", **base, **rows}
        del outs
        times, cpu = [], time.process_time()
        began = time.perf_counter()
        for _ in range(args.repeats):
            begin = time.perf_counter()
            state, out = steps(state)
            jax.block_until_ready(out)
            times.append((time.perf_counter() - begin) / count * 1e3)
        cores = (time.process_time() - cpu) / (time.perf_counter() - began)
        wall = min(times)
        result = {
            "section": "steps", "case": name, "way": way, "steps": count, "wall_ms": round(wall, 4),
            "all_wall_ms": [round(t, 4) for t in times], "seeds_per_s": round(case.seeds / wall * 1e3),
            "cpu_cores": round(cores, 2), "bus_ms": bus_ms,
            "loss": [float(losses[way][0]), float(losses[way][-1])],
        }  # fmt: skip
        yield result
        if not args.no_profile:
            yield {"section": "profile", "case": name, "way": way, **profiled(lambda: steps(state)[1], count)}  # noqa: B023
    if "single" in losses and "pipelined" in losses:
        difference = float(np.abs(losses["single"] - losses["pipelined"]).max())
        yield {"section": "equal", "case": name, "largest_difference_of_losses": difference}


def _rows(ids: dict[str, Any], case: Case) -> dict[str, Any]:
    """Rows of a batch, and the bytes that cross the bus."""
    rows = bus = device = 0
    for kind, some in ids.items():
        if kind not in case.features:
            continue
        found = np.asarray(some)
        found = found[found >= 0]
        rows += len(found)
        on_device = 0
        table = case.features[kind].table
        if isinstance(table, SplitTable | CachedTable):
            on_device = int((np.asarray(table.slots[found]) >= 0).sum())
        bus += (len(found) - on_device) * case.features.row_bytes[kind]
        device += on_device * case.features.row_bytes[kind]
    return {"rows": rows, "bus_bytes": bus, "device_bytes": device, "bus_ms": round(bus / BUS * 1e3, 3),
            "slots": sum(len(some) for some in ids.values())}  # fmt: skip


def profiled(call: Callable[[], Any], count: int, top: int = 14) -> dict[str, Any]:
    """Figures of one step from a profile: launches, sum of kernels, time in which any ran, and the longest by name."""
    return figures_of(record(lambda: jax.block_until_ready(call())), count, top)


def figures_of(records: Sequence[Record], count: int, top: int = 14) -> dict[str, Any]:
    """The figures of `profiled`, of what one device did in `count` steps."""
    if not records:
        return {}
    by_name: dict[str, list[float]] = {}
    for r in records:
        by_name.setdefault(r.name, []).append(r.duration_ns / 1e6)
    spans = sorted((r.start_ns, r.start_ns + r.duration_ns) for r in records)
    busy, end = 0.0, 0.0
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    gathers = [(r.start_ns, r.start_ns + r.duration_ns) for r in records if "dejax_gather" in r.name]
    collectives = sum(r.duration_ns for r in records if "nccl" in r.name.lower())
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:top]
    return {
        "launches": round(len(records) / count, 1),
        "kernels_ms": round(sum(map(sum, by_name.values())) / count, 4),
        "busy_ms": round(busy / count / 1e6, 4),
        "span_ms": round((end - spans[0][0]) / count / 1e6, 4),
        "gathers_ms": round(sum(b - a for a, b in gathers) / count / 1e6, 4),
        "collectives_ms": round(collectives / count / 1e6, 4),
        "longest": {n[:70]: [round(sum(t) / count, 4), round(len(t) / count, 1)] for n, t in longest},
    }


# ------------------------------------------------------------------------------------------------ cases


def relational(name: str, args: argparse.Namespace) -> Case:
    """A step on mag's or am's counts."""
    begin = time.perf_counter()
    if name == "mag":
        edges, counts = both_directions(MAG_EDGES, MAG_NODES, args.scale_of_mag)
        seed_type, totals, width = "paper", [15, 10], 128
    else:
        found, nodes = am_counts()
        edges, counts = both_directions(found, nodes, args.scale_of_mag)
        seed_type, totals, width = "type0", [15, 10, 5], 256
    topology = HeteroTopology.from_edges(edges, counts, on_host=True, keep_edge_ids=False)
    features = FeatureStore()
    for kind, count in counts.items():
        features = features.with_table(kind, _table(count, width))
    made_s = time.perf_counter() - begin
    fan_outs = shared_fan_outs(topology, totals)
    rng, hidden, relations = np.random.default_rng(6), 128, len(topology.edge_types)
    batches = [(seed_type, rng.integers(0, counts[seed_type], args.seeds)) for _ in range(20)]
    capacities = find_capacities(jax.random.key(0), topology, batches, fan_outs, print_table=None)
    rngs = nnx.Rngs(0)
    layers = [
        RGATConv(hidden if n else width, hidden // 4, relations, num_heads=4, rngs=rngs) for n in range(len(totals))
    ]
    graphdef, params = nnx.split(Model(layers, nnx.Linear(hidden, 64, rngs=rngs)), nnx.Param)
    optimizer = optax.adam(1e-3)
    labels = jnp.asarray(rng.integers(0, 64, counts[seed_type]), jnp.int32)

    def sample(key: Any, topology: Any, seeds: Any) -> Any:
        return sample_blocks(key, topology, (seed_type, seeds), fan_outs, capacities=capacities)

    def update(state: Any, batch: MiniBatch, labels: Any) -> tuple[Any, Any]:
        params, moments = state
        blocks = batch.blocks

        def loss_of(params: Any) -> Any:
            outputs = nnx.merge(graphdef, params)(blocks, batch.x)[seed_type][batch.sample.seed_positions[seed_type]]
            return optax.softmax_cross_entropy_with_integer_labels(outputs, labels[batch.seeds]).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    def state() -> Any:
        return jax.tree.map(jnp.copy, (params, optimizer.init(params)))

    nodes = np.arange(counts[seed_type])
    about = {"relations": relations}
    return Case(topology, features, nodes, args.seeds, update, sample, state, (labels,), made_s, about=about)


def igb(args: argparse.Namespace) -> Case:
    """MLPerf's R-GAT on a random graph of IGB's shape."""
    begin = time.perf_counter()
    device_bytes = int(args.device_gb * 1e9)
    data = random_data(args.scale, dtype=args.dtype, device_bytes=device_bytes, batch=args.seeds, width=args.igb_width)
    made_s = time.perf_counter() - begin
    config = RGATConfig(
        data.topology.edge_types, data.topology.node_types, in_features=data.width, hidden=args.igb_hidden,
        classes=data.num_classes,
    )  # fmt: skip
    trainer = RGATTrainer(data, config, Recipe(batch=args.seeds))

    def update(state: Any, batch: MiniBatch, labels: Any) -> tuple[Any, Any]:
        state, out = trainer.update(state, batch, labels)
        return state, out["loss"]

    about = {
        "scale": args.scale, "nodes": sum(data.topology.num_nodes.values()),
        "edges": sum(data.topology.num_edges.values()), "dtype": args.dtype, "device_gb": args.device_gb,
    }  # fmt: skip
    return Case(
        data.topology, data.features, data.train, args.seeds, update, trainer.sample, trainer.init, (data.labels,),
        made_s, config.dtype, about,
    )  # fmt: skip


CASES: dict[str, Callable[[argparse.Namespace], Case]] = {
    "mag": lambda args: relational("mag", args),
    "am": lambda args: relational("am", args),
    "igb": igb,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=CASES, action="append", help="cases; by default all")
    parser.add_argument(
        "--ways",
        default="single,pipelined",
        help="single, pipelined, pipelined:N with N multiprocessors for rows, pipelined/whole with samples that read "
        "edges in one iteration; with commas",
    )
    parser.add_argument("--steps", type=int, default=24, help="steps of a program")
    parser.add_argument("--repeats", type=int, default=2, help="timings of each way, one after the other")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a step")
    parser.add_argument("--scale", type=float, default=0.04, help="of igb")
    parser.add_argument("--device-gb", type=float, default=0.0, help="of igb: features on the device")
    parser.add_argument("--dtype", default="float8_e4m3fn", help="of igb's features")
    parser.add_argument("--igb-width", type=int, default=1024, help="features of a node of the igb graph")
    parser.add_argument("--igb-hidden", type=int, default=512, help="width of the layers on the igb graph")
    parser.add_argument(
        "--scale-of-mag", type=float, default=1.0, help="of the numbers of nodes and edges of `mag` and `am`"
    )
    parser.add_argument("--no-profile", action="store_true", help="leave the profiler out: no times of kernels")


def run(args: argparse.Namespace, save: Save) -> None:
    results: list[dict[str, Any]] = []
    for name in args.only or CASES:
        begin = time.perf_counter()
        for result in measured(name, CASES[name](args), args):
            results.append(result)
            print(json.dumps(result), flush=True)
            save(results)
        print(f"# {name}: {time.perf_counter() - begin:.1f} s", flush=True)
