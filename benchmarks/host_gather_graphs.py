"""Sections of benchmarks/host_gather.py about graphs: neighbour sampling, and mini-batch training of GraphSAGE.

Each way trains the same model on the same samples. The features come from a table in host memory in four ways: the step
reads them; the step reads them ahead of their use; the step reads them through a cache of a fifth of the rows; or the
CPU's threads (torch or numpy) gather them into pinned memory and copy them while the device trains on the batch before.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.peers.cpu_gather import numpy_take, torch_select
from benchmarks.peers.neighbor_sampler import NeighborSampler
from dejax import host_gather as hg

Run = Callable[[Any, jax.Array], Any]  # (carry, keys of the steps) -> (carry, the last loss)
_SCATTER = 2_654_435_761  # a prime: rank -> node spreads popular nodes over the whole table


def _in_parts(count: int, fill: Callable[[int, int, np.random.Generator], None], parts: int = 64) -> None:
    """Calls fill(begin, end, generator) for parts of [0, count) on all threads; numpy releases the interpreter lock."""
    bounds = np.linspace(0, count, parts + 1).astype(np.int64)
    seeds = np.random.SeedSequence(0).spawn(parts)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda b, e, s: fill(int(b), int(e), np.random.default_rng(s)), bounds[:-1], bounds[1:], seeds))


def power_law_graph(nodes: int, edges: int, active: int) -> tuple[np.ndarray, np.ndarray]:
    """Starts and senders of a graph. Its `active` most popular nodes receive all edges; senders follow a power law.

    The sender of an edge has rank nodes * u^3: the fifth of the nodes that sends most sends 58 % of the edges.
    Receivers have ranks below `active` and Poisson degrees.
    """
    degrees = np.zeros(nodes, np.int32)
    drawn = np.random.default_rng(1).poisson(edges / active, active).astype(np.int32)
    degrees[np.arange(active, dtype=np.int64) * _SCATTER % nodes] = drawn
    starts = np.concatenate([[0], np.cumsum(degrees, dtype=np.int64)]).astype(np.int32)
    senders = np.empty(int(starts[-1]), np.int32)

    def fill(begin: int, end: int, rng: np.random.Generator) -> None:
        rank = (nodes * rng.random(end - begin) ** 3).astype(np.int64)
        senders[begin:end] = rank * _SCATTER % nodes

    _in_parts(len(senders), fill)
    return starts, senders


def sampling(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Sampling and numbering, compared with a sampler on the CPU's threads."""
    nodes, edges, seeds = args.graph
    starts, senders = power_law_graph(nodes, edges, nodes)
    topology = hg.Topology.from_csc(starts, senders, num_nodes=nodes, on_host=True)
    chosen = np.random.default_rng(2).permutation(nodes)[:seeds].astype(np.int32)

    @jax.jit
    def sample(key: jax.Array, topology: hg.Topology, seeds: jax.Array) -> hg.LocalGraph:
        return hg.sample_graph(key, topology, seeds, args.fan_outs)

    def timed(call: Callable[[int], Any], repeats: int = 5) -> float:
        jax.block_until_ready(call(0))
        start = time.perf_counter()
        for k in range(repeats):
            result = call(k + 1)
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / repeats

    seeds_there = jnp.asarray(chosen)
    graph = sample(jax.random.key(0), topology, seeds_there)
    cell: dict[str, Any] = {"nodes": nodes, "edges": len(senders), "seeds": seeds, "fan_outs": args.fan_outs}
    cell |= {"sampled_nodes": int(graph.node_mask.sum()), "sampled_edges": int(graph.edge_mask.sum())}
    del graph
    cell["milliseconds"] = timed(lambda k: sample(jax.random.key(k), topology, seeds_there))
    peer = NeighborSampler(starts, senders)
    node_ids, peer_edges, _ = peer(chosen, args.fan_outs, 0)
    cell |= {"cpu_nodes": len(node_ids), "cpu_edges": len(peer_edges), "cpu_threads": peer.threads}
    cell["cpu_milliseconds"] = timed(lambda k: peer(chosen, args.fan_outs, k)[0].sum())
    yield cell
    on_device = hg.Topology.from_csc(starts, senders, num_nodes=nodes)
    milliseconds = timed(lambda k: sample(jax.random.key(k), on_device, seeds_there))
    yield {"nodes": nodes, "lists": "on the device", "milliseconds": milliseconds}


# ---------------------------------------------------------------------------------------------------- GraphSAGE


def _init(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
    normal = jax.nn.initializers.glorot_normal()
    return [
        {name: normal(jax.random.fold_in(key, 2 * k + i), shape) for i, name in enumerate(("own", "other"))}
        for k, shape in enumerate(itertools.pairwise(sizes))
    ]


def _graphsage(
    layers: list[dict[str, jax.Array]], graph: hg.LocalGraph, x: jax.Array, fan_outs: list[int]
) -> jax.Array:
    """Each layer computes the rows that later layers need. Edges of a hop are [nodes, fan_out]: their mean is dense."""
    blocks = [edges // fan_out for edges, fan_out in zip(graph.hop_edges, fan_outs, strict=True)]
    for k, layer in enumerate(layers):
        hops, means, first = len(fan_outs) - k, [], 0
        for block, fan_out in zip(blocks[:hops], fan_outs[:hops], strict=True):
            here = slice(first, first + block * fan_out)
            messages = x.at[graph.senders[here].reshape(block, fan_out)].get(mode="fill", fill_value=0)
            count = graph.edge_mask[here].reshape(block, fan_out, 1).sum(1)
            means.append(messages.sum(1) / jnp.maximum(count, 1))
            first += block * fan_out
        x = x[: sum(blocks[:hops])] @ layer["own"] + jnp.concatenate(means) @ layer["other"]
        x = jax.nn.relu(x) if k + 1 < len(layers) else x
    return x


def _bounds(masks: list[np.ndarray], seeds: int, fan_outs: list[int]) -> tuple[int, ...]:
    """`max_nodes` of each hop. New nodes come after the bounds of earlier hops, even if these are not full."""
    found, start, end, frontier = [seeds], 0, seeds, seeds
    for fan_out in fan_outs:
        start, frontier = end, frontier * fan_out
        end = min(end + frontier, masks[0].shape[0])
        new = max(int(mask[start:end].sum()) for mask in masks)
        found.append(found[-1] + min(-(-new * 11 // 10 // 1024) * 1024, end - start))
    return tuple(found[1:])


@dataclass(frozen=True, eq=False)
class _Training:
    """What all ways to gather the features share.

    Attributes:
      sample: (key, topology, `max_nodes` or None) -> a local graph.
      train: (carry, local graph, its features, labels) -> (carry, loss).
      bounds: `max_nodes` of `sample`.
      topology: of the graph.
      labels: int32[nodes].
    """

    sample: Callable[..., hg.LocalGraph]
    train: Callable[..., tuple[Any, jax.Array]]
    bounds: tuple[int, ...]
    topology: hg.Topology
    labels: jax.Array

    def one_by_one(self, features: Any) -> Run:
        """Each step samples, reads rows of `features` and trains."""

        @jax.jit
        def step(carry: Any, key: jax.Array, topology: Any, features: Any, labels: jax.Array) -> Any:
            graph = self.sample(key, topology, self.bounds)
            return self.train(carry, graph, features[graph.node_ids], labels)

        def run(carry: Any, keys: jax.Array) -> Any:
            for key in keys:
                carry, value = step(carry, key, self.topology, features, self.labels)
            return carry, value

        return run

    def ahead(self, features: Any) -> Run:
        """Many steps in one: the next batch's rows are read while this one's layers run."""

        @jax.jit
        def steps(carry: Any, keys: jax.Array, topology: Any, features: Any, labels: jax.Array) -> Any:
            def body(state: Any, key: jax.Array) -> Any:
                carry, graph, x = state
                following = self.sample(key, topology, self.bounds)
                pending, carry = hg.gather_start(features, following.node_ids, before=carry)
                carry, value = self.train(carry, graph, x, labels)
                rows, carry = hg.gather_done(pending, after=carry)
                return (carry, following, rows), value

            graph = self.sample(keys[0], topology, self.bounds)
            (carry, graph, x), _ = jax.lax.scan(body, (carry, graph, features[graph.node_ids]), keys[1:])
            return self.train(carry, graph, x, labels)

        return lambda carry, keys: steps(carry, keys, self.topology, features, self.labels)

    def by_cpu(self, rows_of: Callable[[np.ndarray], Any]) -> Run:
        """The CPU's threads gather the next batch's rows while the device trains on this one."""
        sample, train = jax.jit(self.sample, static_argnums=2), jax.jit(self.train)

        def fetch(graph: Any, ids: jax.Array, places: jax.Array) -> jax.Array:
            rows = rows_of(np.asarray(ids))
            return _placed(rows if isinstance(rows, jax.Array) else jnp.from_dlpack(rows), places, graph)

        def run(carry: Any, keys: jax.Array) -> Any:
            graph = sample(keys[0], self.topology, self.bounds)
            x = fetch(graph, *_packed(graph))
            value = None
            for key in [*keys[1:], None]:
                following = None if key is None else sample(key, self.topology, self.bounds)
                wanted = None if following is None else _packed(following)
                carry, value = train(carry, graph, x, self.labels)  # the device works while the CPU gathers
                if following is not None:
                    graph, x = following, fetch(following, *wanted)
            return carry, value

        return run


@jax.jit
def _packed(graph: hg.LocalGraph) -> tuple[jax.Array, jax.Array]:
    """The valid ids and their places: the rows that a CPU has to gather."""
    bound = graph.node_ids.shape[0]
    places = jnp.nonzero(graph.node_mask, size=bound, fill_value=bound)[0]
    return graph.node_ids.at[places].get(mode="fill", fill_value=0), places


@jax.jit
def _placed(rows: jax.Array, places: jax.Array, graph: hg.LocalGraph) -> jax.Array:
    return jnp.zeros((graph.node_ids.shape[0], rows.shape[1])).at[places].set(rows, mode="drop")


def _trainer(optimizer: optax.GradientTransformation, batch: int, fan_outs: list[int]) -> Callable[..., Any]:
    """A step of the optimizer on a local graph whose first `batch` nodes are the seeds."""

    def train(carry: Any, graph: hg.LocalGraph, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        layers, state = carry
        target = labels[jnp.maximum(graph.node_ids[:batch], 0)]

        def loss(layers: Any) -> jax.Array:
            logits = _graphsage(layers, graph, x, fan_outs)[:batch]
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, target)
            return jnp.where(graph.node_mask[:batch], losses, 0).mean()

        value, gradient = jax.value_and_grad(loss)(layers)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(layers, updates), state), value

    return train


def _timed(run: Run, carry: Any, keys: jax.Array) -> dict[str, Any]:
    """Steps per second of the second of two runs, and how many cores were busy."""
    jax.block_until_ready(run(carry, keys))
    start, busy = time.perf_counter(), time.process_time()
    _, value = jax.block_until_ready(run(carry, keys))
    elapsed, busy = time.perf_counter() - start, time.process_time() - busy
    return {"steps_per_second": len(keys) / elapsed, "cores_busy": busy / elapsed, "loss": float(value)}


def epoch(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps per second of GraphSAGE, three layers, features of 100 floats, for each way to gather the features."""
    nodes, edges, active, batch, steps = args.epoch
    width, classes, fan_outs = 100, 64, args.fan_outs
    starts, senders = power_law_graph(nodes, edges, active)
    topology = hg.Topology.from_csc(starts, senders, num_nodes=nodes, on_host=True)
    features = args.arena.table(nodes, width)
    labels = jnp.asarray(np.random.default_rng(3).integers(0, classes, nodes, np.int32))
    layers = _init(jax.random.key(0), [width, *[128] * (len(fan_outs) - 1), classes])
    optimizer = optax.adam(1e-3)
    carry = (layers, optimizer.init(layers))

    def sample(key: jax.Array, topology: hg.Topology, most: tuple[int, ...] | None) -> hg.LocalGraph:
        rank = jax.random.randint(key, (batch,), 0, active)
        seeds = _modular_product(rank, nodes)
        return hg.sample_graph(key, topology, seeds, fan_outs, max_nodes=most)

    keys = jax.random.split(jax.random.key(7), steps)
    sample_only = jax.jit(sample, static_argnums=2)
    # Bounds as a user would set them: for each hop, a tenth more rows than the largest of a few batches.
    probe = [np.asarray(sample_only(key, topology, None).node_mask) for key in keys[:4]]
    valid = [int(mask.sum()) for mask in probe]
    bounds = _bounds(probe, batch, fan_outs)
    graph = sample_only(keys[0], topology, bounds)
    bound, dropped = graph.node_ids.shape[0], int(graph.dropped)
    del probe, graph
    common = {"nodes": nodes, "edges": len(senders), "table_gib": features.nbytes / 2**30, "batch": batch,
              "fan_outs": fan_outs, "rows_a_step": float(np.mean(valid)), "padded_rows": bound, "dropped": dropped,
              "hot_rows": None}  # fmt: skip
    ways = _Training(sample, _trainer(optimizer, batch, fan_outs), bounds, topology, labels)

    def timed(name: str, run: Run, keys: jax.Array) -> dict[str, Any]:
        return {**common, "pipeline": name, **_timed(run, carry, keys)}

    yield timed("table in host memory", ways.one_by_one(features), keys)
    yield timed("the same, rows read ahead", ways.ahead(features), keys)
    by_torch = torch_select(features.numpy(), bound)
    if by_torch is not None:
        yield timed("torch gathers", ways.by_cpu(by_torch), keys)
    yield timed("numpy gathers", ways.by_cpu(numpy_take(features.numpy())), keys[: max(2, steps // 4)])
    hot = nodes // 5
    common["hot_rows"] = hot
    rows = np.arange(hot, dtype=np.int64) * _SCATTER % nodes  # those that send most
    cached = hg.CachedTable.from_ids(features, rows)
    yield timed("table in host memory, a fifth cached", ways.one_by_one(cached), keys)


def _modular_product(rank: jax.Array, nodes: int) -> jax.Array:
    """rank * _SCATTER % nodes in 32 bits: by halves of the factor, doubling."""
    factor, total, power = _SCATTER % nodes, jnp.zeros_like(rank, jnp.uint32), rank.astype(jnp.uint32) % nodes
    while factor:
        if factor & 1:
            total = (total + power) % nodes
        power, factor = (power * 2) % nodes, factor >> 1
    return total.astype(jnp.int32)
