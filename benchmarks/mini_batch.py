"""Mini-batch training on heterogeneous graphs in host memory: a step, its parts, and the floor of the bus.

    python -m benchmarks.mini_batch --out results.json            # correctness, tables, both steps
    python -m benchmarks.mini_batch --only tables

`step` trains R-GAT with two or three layers, 128 wide, 4 heads, Adam, 1,024 seeds, on random graphs with the published
counts of ogbn-mag and AM, both directions. Each part is also timed alone: `wall` as a caller sees it, `device` from the
profiler. The floor is the larger of the bytes of the gathered rows over the bus and of the layers alone.

Fan-outs are by relation. They are divided among the relations into a type so that they sum to 15, 10 (and 5) per node,
as in samplers that do not know relations.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.clock import rounds
from benchmarks.device_time import profile_jax
from benchmarks.provenance import save
from dejax import rgnn
from dejax.host_gather import HostTable, gather
from dejax.minibatch import HeteroTopology, find_capacities, make_blocks, sample_blocks
from dejax.rgnn import library
from dejax.rgnn.graphs.build_slots import graph_of_slots
from dejax.rgnn.graphs.slots import Slots, SlotSpec
from dejax.rgnn.nnx import RGATConv

MAG_NODES = {"paper": 736_389, "author": 1_134_649, "field": 59_965, "institution": 8_740}
MAG_EDGES = {
    ("author", "affiliated_with", "institution"): 1_043_998,
    ("author", "writes", "paper"): 7_145_660,
    ("paper", "cites", "paper"): 5_416_271,
    ("paper", "has_topic", "field"): 7_505_078,
}
AM_NODES, AM_EDGES, AM_RELATIONS, AM_TYPES = 1_885_136, 5_668_682, 54, 7
# The same steps composed by hand of a sampler for one node type, `RelGraph.build_traced`, a table and layers, without
# relations in the sampler, on an H200: milliseconds as a caller sees them.
BY_HAND = {
    "mag": {"whole": 2.32, "sampling": 0.53, "edge types": 0.11, "blocks": 1.08, "rows": 0.61, "layers": 0.97},
    "am": {"whole": 6.64, "sampling": 0.81, "edge types": 0.16, "blocks": 1.43, "rows": 2.90, "layers": 2.62},
}
BUS = 49e9  # bytes a second, pinned host memory to the device


def _ends(rng: np.random.Generator, count: int, edges: int, power: int) -> np.ndarray:
    return (count * rng.random(edges, np.float32) ** power).astype(np.int32).clip(max=count - 1)


def both_directions(edges: dict[Any, int], nodes: dict[str, int], scale: float) -> tuple[Any, dict[str, int]]:
    """Random edge lists with reverses; senders follow a power law."""
    rng = np.random.default_rng(0)
    counts = {name: max(2, int(count * scale)) for name, count in nodes.items()}
    found = {}
    for (source, name, target), size in edges.items():
        size = max(1, int(size * scale))
        ends = _ends(rng, counts[source], size, 3), _ends(rng, counts[target], size, 2)
        found[source, name, target] = ends
        found[target, f"rev_{name}", source] = ends[::-1]
    return found, counts


def am_counts() -> tuple[dict[Any, int], dict[str, int]]:
    """54 relations between seven node types; with reverses they are 108."""
    rng = np.random.default_rng(1)
    shares = rng.dirichlet(np.full(AM_TYPES, 2.0))
    nodes = {f"type{t}": max(1000, int(AM_NODES * share)) for t, share in enumerate(shares)}
    sizes = np.maximum(rng.dirichlet(np.full(AM_RELATIONS, 0.3)) * AM_EDGES, 10).astype(int)
    ends = rng.integers(0, AM_TYPES, (AM_RELATIONS, 2))
    return {(f"type{s}", f"r{n}", f"type{t}"): int(size) for n, ((s, t), size) in enumerate(zip(ends, sizes))}, nodes  # noqa: B905


def shared_fan_outs(topology: HeteroTopology, totals: list[int]) -> list[dict[Any, int]]:
    """Fan-outs that sum to about `totals` over the relations into each type."""
    into: dict[str, list[Any]] = {}
    for edge_type in topology.edge_types:
        into.setdefault(edge_type[2], []).append(edge_type)
    hops = []
    for total in totals:
        hop = {}
        for some in into.values():
            for n, edge_type in enumerate(some):
                hop[edge_type] = total * (n + 1) // len(some) - total * n // len(some)
        hops.append(hop)
    return hops


def timed(call: Callable[[], Any], calls: int = 30) -> dict[str, float]:
    """Milliseconds of a call: as the caller sees it, and on the device."""
    found = {"wall_ms": round(rounds(call, calls, warm_up=2)[0] * 1e3, 4)}
    device = profile_jax(call, 10)
    if device is not None:
        found |= {f"device_{k}": v for k, v in device.as_dict().items()}
    return found


# ------------------------------------------------------------------------------------------------ correctness


def correctness(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Samples against the edge lists in numpy, layers on blocks against float64 on the sampled edges."""
    del args
    edges, counts = both_directions(MAG_EDGES, MAG_NODES, 0.002)
    for on_host in (False, True):
        topology = HeteroTopology.from_edges(edges, counts, on_host=on_host)
        seeds = jnp.asarray(np.random.default_rng(2).integers(-1, counts["paper"], 256), jnp.int32)
        run = jax.jit(lambda key, t, s: sample_blocks(key, t, ("paper", s), [7, 5]))
        sample = run(jax.random.key(0), topology, seeds)
        lists = _check_sample(sample, topology)
        yield {"section": "sample", "on_host": on_host, "edges": sum(len(e) for e in lists.values()), "wrong": 0}
    full = rgnn.RelGraph.from_relations({t: (e[:, 0], e[:, 1]) for t, e in lists.items()}, counts)
    rng = np.random.default_rng(3)
    x = {name: rng.standard_normal((count, 32)) for name, count in counts.items()}
    for name, params in layer_parameters(rng, len(topology.edge_types), len(counts)).items():
        error = _against_float64(name, params, x, sample, full)
        yield {"section": "layer", "layer": name, **error}


def _check_sample(sample: Any, topology: HeteroTopology) -> dict[Any, np.ndarray]:
    """Raises where a sampled edge is none of the graph's, or where a receiver lacks some; returns the edges."""
    layout = sample.layout
    found: dict[Any, list[np.ndarray]] = {edge_type: [np.zeros((0, 2), np.int64)] for edge_type in layout.edge_types}
    for name, ids in sample.node_ids.items():
        valid = np.asarray(ids)[np.asarray(ids) >= 0]
        assert len(np.unique(valid)) == len(valid), name
    for piece, senders, positions in zip(layout.pieces, sample.senders, sample.edges, strict=True):
        edge_type = layout.edge_types[piece.relation]
        starts, sources, _ = topology.csc(edge_type)
        first = layout.first(piece.hop, piece.target)
        targets = np.asarray(sample.node_ids[edge_type[2]])[first : first + senders.shape[0]]
        mask, senders, positions = np.asarray(senders) >= 0, np.asarray(senders), np.asarray(positions)
        degree = np.where(targets >= 0, starts[targets + 1] - starts[targets], 0)
        assert (mask.sum(1) == np.minimum(degree, piece.fan_out)).all()
        rows = np.broadcast_to(targets[:, None], mask.shape)[mask]
        position = positions[mask]
        assert ((position >= starts[rows]) & (position < starts[rows + 1])).all()
        assert len(np.unique(position)) == len(position)
        nodes = np.asarray(sample.node_ids[edge_type[0]])[senders[mask]]
        assert (sources[position] == nodes).all()
        found[edge_type].append(np.stack([nodes, rows], axis=1))
    return {edge_type: np.concatenate(parts) for edge_type, parts in found.items()}


def layer_parameters(
    rng: np.random.Generator, relations: int, types: int, *, width: int = 32, heads: int = 4
) -> dict[str, dict[str, np.ndarray]]:
    """Parameters of RGCN, RGAT and HGT layers from rows of `width` to rows of `width`."""

    def draw(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape) / np.sqrt(shape[-2] if len(shape) > 1 else 1)

    r, t, h, k, d = relations, types, heads, width, width // heads
    hgt = {name: draw(t, h, k, d) for name in ("key", "query", "value")}
    hgt |= {f"relation_{name}": draw(r, h, d, d) for name in ("attention", "message")}
    return {
        "rgcn": {"weight": draw(r, k, k), "root": draw(k, k)},
        "rgat": {"weight": draw(r, h, k, d), "attention_src": draw(r, h, d), "attention_dst": draw(r, h, d)},
        "hgt": hgt | {"prior": np.ones((r, h)), "out": draw(t, k, k)},
    }


def _against_float64(name: str, params: Any, x: Any, sample: Any, full: rgnn.RelGraph) -> dict[str, float]:
    """The largest errors of outputs and gradients, relative to the largest element."""
    layer = getattr(library, name)
    seeds = sample.node_ids["paper"][: sample.seed_positions["paper"].shape[0]]

    def on_blocks(params: Any, x: Any, sample: Any) -> Any:
        local = {
            n: x[n].at[jnp.where(ids >= 0, ids, 2**30)].get(mode="fill", fill_value=0)
            for n, ids in sample.node_ids.items()
        }
        blocks = make_blocks(sample)
        h = blocks[0].join(local)
        for block in blocks:
            options = rgnn.Options(precision="f32")
            h = layer(block.bipartite, h, params, options=options)
        y = blocks[-1].split(h)["paper"][sample.seed_positions["paper"]]
        return (y**2).sum(), y

    def on_all(params: Any, x: Any, sample: Any) -> Any:
        h = jnp.concatenate([x[n] for n in full.node_type_names or ()])
        for _ in range(sample.num_layers):
            h = layer(full, h, params, options=rgnn.Options(backend="xla"))
        papers = h[full.node_slice("paper")]
        y = papers.at[jnp.where(seeds >= 0, seeds, 2**30)].get(mode="fill", fill_value=0)
        y = y[sample.seed_positions["paper"]]
        return (y**2).sum(), y

    single = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (params, x))
    got = jax.jit(jax.value_and_grad(on_blocks, (0, 1), has_aux=True))(*single, sample)
    got = jax.tree.map(lambda a: np.asarray(a, np.float64), got)
    with jax.enable_x64(True):
        double = jax.tree.map(lambda a: jnp.asarray(a, jnp.float64), (params, x))
        want = jax.jit(jax.value_and_grad(on_all, (0, 1), has_aux=True))(*double, sample)
        want = jax.tree.map(np.asarray, want)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    errors = [np.abs(a - b).max() / max(np.abs(b).max(), 1e-30) for a, b in pairs]
    assert max(errors) < 1e-3, (name, errors)
    return {"output_error": float(errors[1]), "largest_error": float(max(errors))}


# ------------------------------------------------------------------------------------------------ tables


def tables(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The tables of a graph, by `graph_of_slots` and by `build_traced`: all of them, and those of an RGAT step."""
    del args
    for edges in (100_000, 1_000_000):
        relations, fan_out, types = 8, 10, 4
        receivers = edges // (relations * fan_out)
        nodes = int(edges * 0.7)
        slots = tuple(Slots(r, (r % types) * receivers, receivers, fan_out) for r in range(relations))
        runs = (
            *((t, receivers) for t in range(types)),
            *((t, (nodes - types * receivers) // types) for t in range(types)),
        )
        names = tuple(map(str, range(relations)))
        spec = SlotSpec(slots, runs, tuple(r % types for r in range(relations)), names, names[:types])
        rng = np.random.default_rng(0)
        senders = [
            jnp.asarray(_ends(rng, spec.num_nodes, receivers * fan_out, 2).reshape(receivers, fan_out)) for _ in slots
        ]
        senders = [jnp.where(jnp.asarray(rng.random(s.shape) < 0.8), s, -1) for s in senders]
        mask = jnp.ones(spec.num_nodes, bool)
        flat = [jnp.concatenate([s.reshape(-1) for s in senders])]
        flat.append(jnp.concatenate([jnp.repeat(jnp.arange(s.first, s.first + s.count), fan_out) for s in slots]))
        flat.append(jnp.concatenate([jnp.full(s.count * fan_out, s.edge_type) for s in slots]))
        node_type = jnp.concatenate([jnp.full(count, t) for t, count in runs])

        def traced(senders: Any, receivers: Any, types_: Any, node_type: Any, n: int = spec.num_nodes) -> Any:
            return rgnn.RelGraph.build_traced(
                senders, receivers, types_, num_nodes=n, num_edge_types=8, node_type=node_type, num_node_types=4,
                edge_mask=senders >= 0,
            )  # fmt: skip

        ways = {
            "slots": (lambda senders, mask, spec=spec: graph_of_slots(senders, mask, spec)[0], (senders, mask)),
            "build_traced": (traced, (*flat, node_type)),
        }
        params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), layer_parameters(rng, relations, types)["rgat"])
        x = jnp.asarray(rng.standard_normal((spec.num_nodes, 32)), jnp.float32)
        for name, (make, arguments) in ways.items():
            run = jax.jit(make)
            graph = run(*arguments)
            yield {"section": "tables", "edges": edges, "way": name, **timed(partial(run, *arguments))}

            def loss(params: Any, x: Any, graph: Any) -> Any:
                return (library.rgat(graph, x, params) ** 2).sum()

            for what, wrt in (("parameters", 0), ("parameters and rows", (0, 1))):
                alone = jax.jit(jax.grad(loss, wrt))
                built = jax.jit(lambda p, x, *a, make=make, wrt=wrt: jax.grad(loss, wrt)(p, x, make(*a)))
                yield {
                    "section": "rgat gradient", "of": what, "edges": edges, "way": name,
                    "graph given": timed(partial(alone, params, x, graph)),
                    "graph made in the step": timed(partial(built, params, x, *arguments)),
                }  # fmt: skip


# ------------------------------------------------------------------------------------------------ step


def step(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The two steps of the table, whole and in parts."""
    if args.graph in (None, "mag"):
        mag = both_directions(MAG_EDGES, MAG_NODES, args.scale)
        yield from _step("mag", *mag, "paper", [15, 10], 128, args)
    if args.graph in (None, "am"):
        edges, nodes = am_counts()
        am = both_directions(edges, nodes, args.scale)
        yield from _step("am", *am, "type0", [15, 10, 5], 256, args)


def _table(rows: int, width: int) -> HostTable:
    table = HostTable.empty((rows, width), np.float32)
    block = np.random.default_rng(5).standard_normal((65_536, width), np.float32)
    for begin in range(0, rows, len(block)):
        table.write(begin, block[: rows - begin])
    return table


class Model(nnx.Module):
    """Layers and a linear map. Rows have one width: no projection, as in the table that this is compared with."""

    def __init__(self, layers: list[Any], head: nnx.Linear) -> None:
        self.num_layers, self.head = len(layers), head
        for number, layer in enumerate(layers):
            setattr(self, f"layer_{number}", layer)

    def __call__(self, blocks: Any, x: Any) -> Any:
        h = blocks[0].join(x)
        for number, block in enumerate(blocks):
            h = nnx.relu(getattr(self, f"layer_{number}")(block.bipartite, h))
        return blocks[-1].split(self.head(h))


def _step(
    name: str,
    edges: Any,
    counts: dict[str, int],
    seed_type: str,
    totals: list[int],
    width: int,
    args: argparse.Namespace,
) -> Iterator[dict[str, Any]]:
    begin = time.perf_counter()
    topology = HeteroTopology.from_edges(edges, counts, on_host=True, keep_edge_ids=False)
    features = {kind: _table(count, width) for kind, count in counts.items()}
    made_s = time.perf_counter() - begin
    fan_outs = shared_fan_outs(topology, totals)
    rng = np.random.default_rng(6)
    batches = [jnp.asarray(rng.integers(0, counts[seed_type], args.seeds), jnp.int32) for _ in range(20)]
    key = jax.random.key(0)
    capacities = find_capacities(key, topology, [(seed_type, seeds) for seeds in batches], fan_outs, print_table=None)
    rngs, relations, hidden = nnx.Rngs(0), len(topology.edge_types), 128
    layers = [
        RGATConv(hidden if n else width, hidden // 4, relations, num_heads=4, rngs=rngs) for n in range(len(totals))
    ]
    graphdef, params = nnx.split(Model(layers, nnx.Linear(hidden, 64, rngs=rngs)), nnx.Param)
    optimizer = optax.adam(1e-3)
    state = optimizer.init(params)
    labels = jnp.asarray(rng.integers(0, 64, counts[seed_type]), jnp.int32)

    def sampled(key: Any, topology: Any, seeds: Any) -> Any:
        return sample_blocks(key, topology, (seed_type, seeds), fan_outs, capacities=capacities)

    def gathered(features: Any, sample: Any) -> Any:
        return {kind: gather(features[kind], ids) for kind, ids in sample.node_ids.items()}

    def loss_of(params: Any, blocks: Any, x: Any, labels: Any, positions: Any) -> Any:
        outputs = nnx.merge(graphdef, params)(blocks, x)[seed_type][positions]
        return optax.softmax_cross_entropy_with_integer_labels(outputs, labels).mean()

    def update(params: Any, state: Any, blocks: Any, x: Any, labels: Any, positions: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, blocks, x, labels, positions)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def whole(params: Any, state: Any, key: Any, topology: Any, features: Any, labels: Any, seeds: Any) -> Any:
        sample = sampled(key, topology, seeds)
        x, blocks = gathered(features, sample), make_blocks(sample)
        return *update(params, state, blocks, x, labels[seeds], sample.seed_positions[seed_type]), sample.lost.sum()

    seeds = batches[0]
    run_whole = jax.jit(whole)
    begin = time.perf_counter()
    out = jax.block_until_ready(run_whole(params, state, key, topology, features, labels, seeds))
    first_s = time.perf_counter() - begin
    run_sample, run_gather, run_blocks, run_update = map(jax.jit, (sampled, gathered, make_blocks, update))
    sample = run_sample(key, topology, seeds)
    x, blocks = run_gather(features, sample), run_blocks(sample)
    parts = {
        "sampling": lambda: run_sample(key, topology, seeds),
        "blocks": lambda: run_blocks(sample),
        "rows": lambda: run_gather(features, sample),
        "layers": lambda: run_update(params, state, blocks, x, labels[seeds], sample.seed_positions[seed_type]),
        "whole": lambda: run_whole(params, state, key, topology, features, labels, seeds),
    }
    times = {part: timed(call) for part, call in parts.items()}
    rows = int(sum((np.asarray(ids) >= 0).sum() for ids in sample.node_ids.values()))
    slots = sum(senders.size for senders in sample.senders)
    valid = int(sum((np.asarray(senders) >= 0).sum() for senders in sample.senders))
    bus_ms = rows * width * 4 / BUS * 1e3
    yield {
        "section": "step", "graph": name, "relations": relations, "slots": slots, "edges": valid,
        "nodes": sum(len(ids) for ids in sample.node_ids.values()), "rows": rows, "bus_ms": round(bus_ms, 3),
        "floor_ms": round(max(bus_ms, times["layers"].get("device_span_ms", 0.0)), 3), "lost": int(out[3]),
        "loss": float(out[2]), "first_step_s": round(first_s, 1), "made_s": round(made_s, 1), "times": times,
        "by_hand_ms": BY_HAND[name],
    }  # fmt: skip


SECTIONS = {"correctness": correctness, "tables": tables, "step": step}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append", help="sections; by default all")
    parser.add_argument("--graph", choices=("mag", "am"), help="of `step`; by default both")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of nodes and edges of `step`")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of a step")
    parser.add_argument("--out", type=Path, help="a JSON file for the results")
    args = parser.parse_args(argv)
    results = []
    for name in args.only or SECTIONS:
        begin = time.perf_counter()
        for result in SECTIONS[name](args):
            results.append(result)
            print(json.dumps(result), flush=True)
            if args.out:
                save(args.out, results)
        print(f"# {name}: {time.perf_counter() - begin:.1f} s", flush=True)


if __name__ == "__main__":
    main()
