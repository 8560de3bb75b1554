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
from dejax.minibatch import HeteroTopology, SampledBlocks, sample_blocks

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
    topology = HeteroTopology.from_csc((starts, senders), nodes, on_host=True)
    chosen = np.random.default_rng(2).permutation(nodes)[:seeds].astype(np.int32)

    @jax.jit
    def draw(key: jax.Array, topology: HeteroTopology, seeds: jax.Array) -> SampledBlocks:
        return sample_blocks(key, topology, seeds, args.fan_outs)

    def timed(call: Callable[[int], Any], repeats: int = 5) -> float:
        jax.block_until_ready(call(0))
        start = time.perf_counter()
        for k in range(repeats):
            result = call(k + 1)
        jax.block_until_ready(result)
        return 1e3 * (time.perf_counter() - start) / repeats

    seeds_there = jnp.asarray(chosen)
    sample = draw(jax.random.key(0), topology, seeds_there)
    cell: dict[str, Any] = {"nodes": nodes, "edges": len(senders), "seeds": seeds, "fan_outs": args.fan_outs}
    cell |= {"sampled_nodes": int(sample.found.sum()), "sampled_edges": int(sample.edges_found[-1])}
    del sample
    cell["milliseconds"] = timed(lambda k: draw(jax.random.key(k), topology, seeds_there))
    peer = NeighborSampler(starts, senders)
    node_ids, peer_edges, _ = peer(chosen, args.fan_outs, 0)
    cell |= {"cpu_nodes": len(node_ids), "cpu_edges": len(peer_edges), "cpu_threads": peer.threads}
    cell["cpu_milliseconds"] = timed(lambda k: peer(chosen, args.fan_outs, k)[0].sum())
    yield cell
    on_device = HeteroTopology.from_csc((starts, senders), nodes)
    milliseconds = timed(lambda k: draw(jax.random.key(k), on_device, seeds_there))
    yield {"nodes": nodes, "lists": "on the device", "milliseconds": milliseconds}


# ---------------------------------------------------------------------------------------------------- GraphSAGE


def _init(key: jax.Array, sizes: list[int]) -> list[dict[str, jax.Array]]:
    normal = jax.nn.initializers.glorot_normal()
    return [
        {name: normal(jax.random.fold_in(key, 2 * k + i), shape) for i, name in enumerate(("own", "other"))}
        for k, shape in enumerate(itertools.pairwise(sizes))
    ]


def _graphsage(layers: list[dict[str, jax.Array]], sample: SampledBlocks, x: jax.Array) -> jax.Array:
    """Each layer computes the rows that later layers need. Edges of a hop are [nodes, fan_out]: their mean is dense."""
    for k, layer in enumerate(layers):
        hops, means = sample.num_layers - k, []
        for numbers in sample.numbers[:hops]:
            messages = x.at[numbers].get(mode="fill", fill_value=0, wrap_negative_indices=False)
            count = (numbers >= 0).sum(1, keepdims=True)
            means.append(messages.sum(1) / jnp.maximum(count, 1))
        x = x[: sample.layout.count(hops - 1)] @ layer["own"] + jnp.concatenate(means) @ layer["other"]
        x = jax.nn.relu(x) if k + 1 < len(layers) else x
    return x


def _bounds(found: list[np.ndarray], most: tuple[int, ...]) -> tuple[int, ...]:
    """The most new nodes of each hop: a tenth more than the largest of some batches.

    Args:
        found: int[hops], how many nodes each hop of a batch found.
        most: how many it can find.
    """
    largest = np.max(found, axis=0).tolist()
    return tuple(min(-(-new * 11 // 10 // 1024) * 1024, size) for new, size in zip(largest, most, strict=True))


@dataclass(frozen=True, eq=False)
class _Training:
    """What all ways to gather the features share.

    Attributes:
      sample: (key, topology, `capacities` or None) -> a sample.
      train: (carry, sample, its features, labels) -> (carry, loss).
      bounds: `capacities` of `sample`.
      topology: of the graph.
      labels: int32[nodes].
    """

    sample: Callable[..., SampledBlocks]
    train: Callable[..., tuple[Any, jax.Array]]
    bounds: tuple[int, ...]
    topology: HeteroTopology
    labels: jax.Array

    def one_by_one(self, features: Any) -> Run:
        """Each step samples, reads rows of `features` and trains."""

        @jax.jit
        def step(carry: Any, key: jax.Array, topology: Any, features: Any, labels: jax.Array) -> Any:
            sample = self.sample(key, topology, self.bounds)
            return self.train(carry, sample, features[sample.nodes], labels)

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
                carry, sample, x = state
                following = self.sample(key, topology, self.bounds)
                pending, carry = hg.gather_start(features, following.nodes, before=carry)
                carry, value = self.train(carry, sample, x, labels)
                rows, carry = hg.gather_done(pending, after=carry)
                return (carry, following, rows), value

            sample = self.sample(keys[0], topology, self.bounds)
            (carry, sample, x), _ = jax.lax.scan(body, (carry, sample, features[sample.nodes]), keys[1:])
            return self.train(carry, sample, x, labels)

        return lambda carry, keys: steps(carry, keys, self.topology, features, self.labels)

    def by_cpu(self, rows_of: Callable[[np.ndarray], Any]) -> Run:
        """The CPU's threads gather the next batch's rows while the device trains on this one."""
        sample, train = jax.jit(self.sample, static_argnums=2), jax.jit(self.train)

        def fetch(drawn: Any, ids: jax.Array, places: jax.Array) -> jax.Array:
            rows = rows_of(np.asarray(ids))
            return _placed(rows if isinstance(rows, jax.Array) else jnp.from_dlpack(rows), places, drawn)

        def run(carry: Any, keys: jax.Array) -> Any:
            drawn = sample(keys[0], self.topology, self.bounds)
            x = fetch(drawn, *_packed(drawn))
            value = None
            for key in [*keys[1:], None]:
                following = None if key is None else sample(key, self.topology, self.bounds)
                wanted = None if following is None else _packed(following)
                carry, value = train(carry, drawn, x, self.labels)  # the device works while the CPU gathers
                if following is not None:
                    drawn, x = following, fetch(following, *wanted)
            return carry, value

        return run


@jax.jit
def _packed(sample: SampledBlocks) -> tuple[jax.Array, jax.Array]:
    """The valid ids and their places: the rows that a CPU has to gather."""
    bound = sample.nodes.shape[0]
    places = jnp.nonzero(sample.nodes >= 0, size=bound, fill_value=bound)[0]
    return sample.nodes.at[places].get(mode="fill", fill_value=0), places


@jax.jit
def _placed(rows: jax.Array, places: jax.Array, sample: SampledBlocks) -> jax.Array:
    return jnp.zeros((sample.nodes.shape[0], rows.shape[1])).at[places].set(rows, mode="drop")


def _trainer(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """A step of the optimizer on a sample of one node type."""

    def train(carry: Any, sample: SampledBlocks, x: jax.Array, labels: jax.Array) -> tuple[Any, jax.Array]:
        layers, state = carry
        seeds = sample.nodes[: sample.layout.count(0)]
        target = labels[jnp.maximum(seeds, 0)]

        def loss(layers: Any) -> jax.Array:
            losses = optax.softmax_cross_entropy_with_integer_labels(_graphsage(layers, sample, x), target)
            return jnp.where(seeds >= 0, losses, 0).mean()

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
    topology = HeteroTopology.from_csc((starts, senders), nodes, on_host=True)
    features = args.arena.table(nodes, width)
    labels = jnp.asarray(np.random.default_rng(3).integers(0, classes, nodes, np.int32))
    layers = _init(jax.random.key(0), [width, *[128] * (len(fan_outs) - 1), classes])
    optimizer = optax.adam(1e-3)
    carry = (layers, optimizer.init(layers))

    def sample(key: jax.Array, topology: HeteroTopology, most: tuple[int, ...] | None) -> SampledBlocks:
        rank = jax.random.randint(key, (batch,), 0, active)
        seeds = _modular_product(rank, nodes)
        return sample_blocks(key, topology, seeds, fan_outs, capacities=most)

    keys = jax.random.split(jax.random.key(7), steps)
    sample_only = jax.jit(sample, static_argnums=2)
    # Bounds as a user would set them: for each hop, a tenth more rows than the largest of a few batches.
    probe = [sample_only(key, topology, None) for key in keys[:4]]
    found = [np.asarray(one.found)[:, 0] for one in probe]
    bounds = _bounds([one[1:] for one in found], tuple(size for (size,) in probe[0].layout.sizes[1:]))
    cut = sample_only(keys[0], topology, bounds)
    bound, dropped = cut.nodes.shape[0], int(cut.lost.sum())
    valid = [int(one.sum()) for one in found]
    del probe, cut
    common = {"nodes": nodes, "edges": len(senders), "table_gib": features.nbytes / 2**30, "batch": batch,
              "fan_outs": fan_outs, "rows_a_step": float(np.mean(valid)), "padded_rows": bound, "dropped": dropped,
              "hot_rows": None}  # fmt: skip
    ways = _Training(sample, _trainer(optimizer), bounds, topology, labels)

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
