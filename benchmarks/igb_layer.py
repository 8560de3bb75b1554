"""The first layer of MLPerf's R-GAT alone, on the block of a sample of a graph of IGB's shape.

    python -m benchmarks igb_layer --out results.json

The layer maps 1,024 bfloat16 features to 4 heads of 128. "gradient" is forward and backward of the parameters; features
need no gradient. Times are milliseconds as a caller sees them, and the time in which any kernel ran.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import rounds
from benchmarks.mini_batch_pipeline import profiled
from benchmarks.provenance import Save
from dejax.minibatch import make_blocks
from examples import igb_rgat as model
from examples.igb_rgat import Recipe, RGATConfig, RGATTrainer, random_data


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", type=float, default=0.01, help="of IGB's counts")
    parser.add_argument("--seeds", type=int, default=1024, help="seeds of the sample")
    parser.add_argument("--width", type=int, default=1024, help="features of a node")
    parser.add_argument("--hidden", type=int, default=512, help="width of the layer")
    parser.add_argument("--repeats", type=int, default=20, help="timed calls, one after the other")


def run(args: argparse.Namespace, save: Save) -> None:
    data = random_data(args.scale, width=16, batch=args.seeds)  # features are made below
    config = RGATConfig(data.topology.edge_types, data.topology.node_types, args.width, args.hidden)
    trainer = RGATTrainer(data, config, Recipe(batch=args.seeds))
    seeds = jnp.asarray(np.random.default_rng(1).choice(data.train, args.seeds), jnp.int32)
    sample = jax.jit(trainer.sample)(jax.random.key(0), data.topology, seeds)
    block = jax.jit(lambda sample: make_blocks(sample)[0])(sample)
    graph = block.bipartite
    x = jax.random.normal(jax.random.key(1), (graph.num_nodes, args.width), jnp.bfloat16)
    params = jax.jit(lambda key: model.init(key, config)["layers"][0])(jax.random.key(2))
    towards = jax.random.normal(jax.random.key(3), (block.num_destinations, args.hidden), jnp.bfloat16)

    def forward(graph: Any, x: Any, params: Any, towards: Any) -> Any:
        del towards
        return model.layer(config, graph, x, params)

    def gradient(graph: Any, x: Any, params: Any, towards: Any) -> Any:
        def product(params: Any) -> Any:
            return (model.layer(config, graph, x, params).astype(jnp.float32) * towards).sum()

        return jax.grad(product)(params)

    results: list[dict[str, Any]] = [
        {
            "section": "block", "scale": args.scale, "nodes": int((sample.nodes >= 0).sum()),
            "rows": graph.num_nodes, "edges": int(sample.edges_found[-1]), "edge_slots": graph.num_edges,
            "source_pairs": sample.layout.source_pairs[-1] if sample.layout.source_pairs else None,
            "relations": len(config.edge_types), "destinations": block.num_destinations,
        }
    ]  # fmt: skip
    for name, function in (("forward", forward), ("gradient", gradient)):
        results.append({"section": name, **measured(jax.jit(function), (graph, x, params, towards), args.repeats)})
    for result in results:
        print(json.dumps(result), flush=True)
    save(results)


def measured(call: Callable[..., Any], operands: tuple[Any, ...], repeats: int) -> dict[str, Any]:
    """Milliseconds of a call, and what a profile says of it."""

    def several() -> Any:
        return [call(*operands) for _ in range(repeats)][-1]

    wall = min(rounds(lambda: call(*operands), repeats, fewest=3))
    return {"wall_ms": round(wall * 1e3, 4), **profiled(several, repeats)}
