"""Link prediction of `examples/link_prediction.py` beside a plain JAX R-GCN + DistMult of the same setting.

    python -m benchmarks link_prediction --scale 0.05 --seeds 3 --out results.json

Both train on `synthetic_triples`: a planted structure, at scale 1 of FB15k-237's size. Batches, negatives per edge,
loss, widths, layers, bases, optimizer and epochs are the same. Ours trains twice: on samples, and on the whole graph at
each step, as the plain one does. The plain one is gather, product by basis, `segment_sum`. It prints filtered MRR and
Hits@10 of the test triples by seed, and training edges a second.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.provenance import Save
from dejax.datasets import synthetic_triples
from dejax.minibatch import link_ranks, softmax_cross_entropy
from dejax.rgnn import Options
from dejax.training import Settings, Trainer, resolve
from dejax.training.link_graph import LinkGraph
from dejax.training.links import LinkTask
from dejax.training.report import machine_kind


def ours(graph: LinkGraph, settings: Settings, seed: int) -> dict[str, float]:
    """Ranks of the test triples, and training edges a second without the first epoch."""
    trainer = Trainer(settings, graph.data)
    state, seconds = trainer.init(seed), []
    for now, found in trainer.run(state, settings.epochs):
        state = now
        seconds += [] if found is None else [found.seconds]
    ranks = trainer.task.ranks(trainer, state, "test", progress=False)
    return _result(ranks, len(graph.train), seconds)


def plain(graph: LinkGraph, settings: Settings, seed: int) -> dict[str, float]:
    """The same with `jnp` alone."""
    edges, nodes, kinds = len(graph.edge_type), graph.num_nodes, 2 * graph.num_relations
    senders, receivers, types = map(jnp.asarray, (graph.senders, graph.receivers, graph.edge_type))
    task = LinkTask(settings.replace(full_batch=True), graph, Options())  # its batches, and its negatives
    params = _init(jax.random.key(seed), nodes, kinds, graph.num_relations, settings)
    optimizer = optax.adam(settings.lr)
    state = optimizer.init(params)

    def encode(params: Any, mask: Any) -> Any:
        h = params["embedding"]
        pair = receivers * kinds + types
        weight = mask / jnp.maximum(jax.ops.segment_sum(mask, pair, nodes * kinds), 1)[pair]
        for number in range(settings.layers):
            layer, x = params[f"layer_{number}"], jax.nn.relu(h) if number else h
            out = x @ layer["root"] + layer["bias"]
            for basis in range(settings.bases or 1):
                scaled = weight * layer["coefficients"][types, basis]
                sums = jax.ops.segment_sum(x[senders] * scaled[:, None], receivers, nodes)
                out += sums @ layer["bases"][basis]
            h = out + h
        return h

    @jax.jit
    def step(params: Any, state: Any, seeds: Any, key: Any) -> Any:
        kept, true, relation = seeds["kept"], seeds["true"], seeds["relation"]
        mask = kept >= 0
        draw_key, dropout_key = jax.random.split(key)
        where, there = task.negatives.places(draw_key, true, seeds["kind"], seeds["wrong"])
        candidates = jnp.concatenate([true, seeds["wrong"]])
        gone = jnp.where(mask, seeds["edge"], edges)
        on = jnp.ones(edges).at[jnp.concatenate([gone, gone + edges // 2])].set(0, mode="drop")

        def loss_of(params: Any) -> Any:
            h = encode(params, on)
            keep = jax.random.bernoulli(dropout_key, 1 - settings.dropout, h.shape)
            h = jnp.where(keep, h / (1 - settings.dropout), 0)
            query = h[kept] * params["relations"][relation]
            positive = (query * h[true]).sum(-1)
            negative = (query[:, None] * h[candidates][where]).sum(-1)
            return softmax_cross_entropy(positive, negative, mask=mask, negative_mask=there & mask[:, None])

        updates, state = optimizer.update(jax.grad(loss_of)(params), state, params)
        return optax.apply_updates(params, updates), state

    seconds, key = [], jax.random.key(seed + 1)
    for epoch in range(settings.epochs):
        begin = time.perf_counter()
        order = task.order(seed, epoch)
        for number in range(task.steps_per_epoch):
            seeds = {name: some[number] for name, some in order.items()}
            params, state = step(params, state, seeds, jax.random.fold_in(key, epoch * task.steps_per_epoch + number))
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - begin)
    h = jax.jit(encode)(params, jnp.ones(edges))
    known = np.concatenate([graph.train, *graph.splits.values()])
    test = graph.splits["test"]
    ranks = link_ranks("distmult", h, params["relations"], h, test, known=known, progress=False)
    return _result(ranks, len(graph.train), seconds)


def _init(key: Any, nodes: int, kinds: int, relations: int, settings: Settings) -> dict[str, Any]:
    """Glorot uniform matrices, as the layers of dejax have them; embeddings and relations as in the command."""
    keys = iter(jax.random.split(key, 2 + 3 * settings.layers))
    d, bases = settings.hidden, settings.bases or 1

    def glorot(*shape: int) -> Any:
        return jax.nn.initializers.glorot_uniform()(next(keys), shape)

    params = {
        "embedding": jax.random.normal(next(keys), (nodes, d)) * d**-0.5,
        "relations": jax.random.uniform(next(keys), (relations, d), minval=-1.0, maxval=1.0) * d**-0.5,
    }
    for number in range(settings.layers):
        params[f"layer_{number}"] = {
            "bases": glorot(bases, d, d),
            "coefficients": glorot(kinds, bases),
            "root": glorot(d, d),
            "bias": jnp.zeros(d),
        }
    return params


def _result(ranks: Any, edges: int, seconds: list[float]) -> dict[str, float]:
    later = seconds[1:] or seconds
    return {"mrr": ranks.mrr, "hits@10": ranks.hits(10), "edges_per_s": edges / statistics.median(later)}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=0.05, help="of FB15k-237's counts")
    parser.add_argument("--seeds", type=int, default=3, help="number of runs, each from another seed")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of a run")
    parser.add_argument("--hidden", type=int, default=64, help="width of the layers")
    parser.add_argument("--batch-size", type=int, default=1024, help="edges of a mini-batch")
    parser.add_argument("--lr", type=float, default=0.01, help="learning rate")


def run(args: argparse.Namespace, save: Save) -> None:
    graph = LinkGraph.of(synthetic_triples(args.scale))
    settings = resolve(
        "synthetic-triples", task="links", epochs=args.epochs, hidden=args.hidden, batch_size=args.batch_size,
        lr=args.lr, eval_every=args.epochs, eval_edges=1,
    )  # fmt: skip
    ways = {
        "plain JAX, whole graph": lambda seed: plain(graph, settings, seed),
        "dejax, whole graph": lambda seed: ours(graph, settings.replace(full_batch=True), seed),
        "dejax, sampled": lambda seed: ours(graph, settings, seed),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for seed in range(args.seeds):
        for name, way in ways.items():
            found[name].append(way(seed))
            print(json.dumps({"way": name, "seed": seed, **found[name][-1]}), flush=True)
    results = {
        "scale": args.scale, "nodes": graph.num_nodes, "train": len(graph.train), "test": len(graph.splits["test"]),
        "relations": graph.num_relations, "settings": settings.as_dict(), "runs": found, "machine": machine_kind(),
        "mean_mrr": {name: statistics.fmean(run["mrr"] for run in runs) for name, runs in found.items()},
    }  # fmt: skip
    for name, runs in found.items():
        mrr = [run["mrr"] for run in runs]
        spread = statistics.stdev(mrr) if len(mrr) > 1 else 0.0
        rate = statistics.median(run["edges_per_s"] for run in runs)
        print(f"{name:<24} MRR {statistics.fmean(mrr):.4f} ± {spread:.4f}, {rate:,.0f} training edges a second")
    save(results)
