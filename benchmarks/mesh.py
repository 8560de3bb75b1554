"""What a mesh of one device costs: the same training step without a mesh, over a mesh of one, and with divided tables.

    python -m benchmarks mesh --out benchmarks/results/mesh.json

The step samples two hops, reads features in host memory, trains RGAT and embeddings in host memory with Adam. All
variants run in turns in one process. Also checked: equal losses, and a checkpoint that is written and read again.
"""

from __future__ import annotations

import argparse
import tempfile
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from benchmarks.provenance import Save
from dejax import distributed
from dejax.distributed import Part, ShardedTable, data_parallel
from dejax.host_gather import RowGradient, adam
from dejax.minibatch import FeatureStore, HeteroTopology, find_capacities, make_blocks, sample_blocks
from dejax.minibatch import nnx as mb
from dejax.rgnn.nnx import RGATConv

ROWS, OPTIMIZER = adam(0.01), optax.adam(1e-3)
FAN_OUTS, WIDTH, CLASSES = [10, 5], 128, 32


def graph(nodes: int, edges: int) -> tuple[HeteroTopology, dict[str, int]]:
    rng = np.random.default_rng(0)
    counts = {"paper": nodes, "author": nodes // 2}
    writes = rng.integers(0, counts["author"], edges), rng.integers(0, nodes, edges)
    lists = {
        ("author", "writes", "paper"): writes,
        ("paper", "rev_writes", "author"): writes[::-1],
        ("paper", "cites", "paper"): (rng.integers(0, nodes, edges), rng.integers(0, nodes, edges)),
    }
    return HeteroTopology.from_edges(lists, counts), counts


class Job:
    """The two halves of the step, and the state and data of a run."""

    def __init__(self, nodes: int, edges: int, batch: int) -> None:
        self.topology, self.counts = graph(nodes, edges)
        rng = np.random.default_rng(1)
        self.features = rng.standard_normal((nodes, WIDTH), np.float32).astype(np.float16)
        self.labels = jnp.asarray(rng.integers(0, CLASSES, nodes))
        self.batches = [rng.integers(0, nodes, batch).astype(np.int32) for _ in range(16)]
        seeds = [("paper", batch) for batch in self.batches]
        self.capacities = find_capacities(jax.random.key(0), self.topology, seeds, FAN_OUTS, print_table=None)
        rngs = nnx.Rngs(0)
        layers = [RGATConv(WIDTH, 32, 3, num_heads=4, rngs=rngs), RGATConv(WIDTH, CLASSES, 3, rngs=rngs)]
        model = mb.HeteroGNN({"paper": WIDTH, "author": WIDTH}, WIDTH, layers, rngs=rngs)
        self.graphdef, params = nnx.split(model, nnx.Param)
        self.params = jax.tree.map(np.asarray, params)

    def begin(self, mesh: jax.sharding.Mesh | None, divided: str | None = None) -> tuple[dict, dict]:
        """State and data; `divided`: the memory of divided feature tables."""
        params = jax.tree.map(jnp.asarray, self.params)
        store = FeatureStore().embedding("author", self.counts["author"], WIDTH)
        state = {"params": params, "opt": OPTIMIZER.init(params), "store": store, "moments": store.init(ROWS)}
        papers = (
            FeatureStore.from_arrays({"paper": self.features})
            if divided is None
            else ShardedTable.from_numpy(self.features, mesh, memory=divided)
        )
        data = {"topology": self.topology, "papers": papers, "labels": self.labels}
        if mesh is not None:
            state, data = distributed.share(state, mesh, writable=True), distributed.share(data, mesh)
        return state, data

    def gradients(self, state: dict, key: jax.Array, seeds: jax.Array, data: dict) -> Part:
        sample = sample_blocks(key, data["topology"], ("paper", seeds), FAN_OUTS, capacities=self.capacities)
        ids, papers = sample.node_ids, data["papers"]
        if isinstance(papers, ShardedTable):
            of_papers, lost = papers.gather(ids["paper"], dtype=jnp.float32)
        else:
            of_papers, lost = papers.gather({"paper": ids["paper"]}, dtype=jnp.float32)["paper"], jnp.zeros((), int)
        authors = state["store"].gather({"author": ids["author"]})["author"]
        blocks = make_blocks(sample)

        def loss_of(params: object, authors: jax.Array) -> jax.Array:
            x = {"paper": of_papers, "author": authors}
            outputs = nnx.merge(self.graphdef, params)(blocks, x)["paper"][sample.seed_positions["paper"]]
            return optax.softmax_cross_entropy_with_integer_labels(outputs, data["labels"][seeds]).mean()

        loss, (of_params, of_rows) = jax.value_and_grad(loss_of, (0, 1))(state["params"], authors)
        rows = {"author": RowGradient(ids["author"], of_rows)}
        return Part(loss, of_params, seeds.shape[0], rows, sample.lost.sum() + lost)

    def update(self, state: dict, mean: Part) -> dict:
        steps, opt = OPTIMIZER.update(mean.gradients, state["opt"], state["params"])
        rows = mean.rows["author"]
        given = {"author": rows.ids}, {"author": rows.values}
        store, moments = state["store"].update(ROWS, *given, state["moments"])
        return {"params": optax.apply_updates(state["params"], steps), "opt": opt, "store": store, "moments": moments}


class Variant:
    def __init__(self, job: Job, mesh: jax.sharding.Mesh | None, divided: str | None = None) -> None:
        self.job, self.losses, self.times, self.number = job, [], [], 0
        self.state, self.data = job.begin(mesh, divided)
        self.step = data_parallel(job.gradients, job.update, mesh)
        self.batches = [jnp.asarray(batch) for batch in job.batches]

    def run(self, steps: int, timed: bool = True) -> None:
        begin = time.perf_counter()
        for _ in range(steps):
            key = jax.random.key(self.number)
            batch = self.batches[self.number % len(self.batches)]
            self.state, report = self.step(self.state, key, batch, self.data)
            self.losses.append(report.loss)
            self.number += 1
        jax.block_until_ready(self.state["params"])
        if timed:
            self.times.append((time.perf_counter() - begin) / steps * 1e3)


def checkpoint(variant: Variant, job: Job, mesh: jax.sharding.Mesh) -> bool:
    """Whether a checkpoint gives the state again, bit by bit, tables included."""
    want = [np.asarray(leaf) for leaf in jax.tree.leaves(variant.state["params"])]
    rows = np.array(variant.state["store"]["author"].table.numpy())
    with tempfile.TemporaryDirectory() as folder:
        distributed.save(folder, variant.number, variant.state)
        state, step = distributed.restore(folder, job.begin(mesh)[0])
    same = all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(state["params"]), want, strict=True))
    return same and step == variant.number and np.array_equal(state["store"]["author"].table.numpy(), rows)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, default=200_000, help="nodes of the random graph")
    parser.add_argument("--edges", type=int, default=1_000_000, help="edges of the random graph")
    parser.add_argument("--batch", type=int, default=1024, help="seeds of a mini-batch")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--limit", type=float, default=25.0, help="seconds of turns")
    parser.add_argument(
        "--cases", type=int, default=4, help="how many of the four cases: the first two compare a mesh of one"
    )


def run(args: argparse.Namespace, save: Save) -> None:
    job, mesh = Job(args.nodes, args.edges, args.batch), distributed.make_mesh(1)
    cases: dict[str, tuple] = {
        "no mesh": (None,),
        "mesh of one": (mesh,),
        "mesh of one, features divided, host memory": (mesh, "host"),
        "mesh of one, features divided, device memory": (mesh, "device"),
    }
    variants = {}
    for name, arguments in list(cases.items())[: max(2, args.cases)]:
        variants[name] = Variant(job, *arguments)
        begin = time.perf_counter()
        variants[name].run(3, timed=False)
        print(f"{name}: first steps after {time.perf_counter() - begin:.1f} s", flush=True)
    end = time.monotonic() + args.limit
    for turn in range(100):
        if turn >= 3 and time.monotonic() > end:
            break
        for variant in list(variants.values())[:: 1 if turn % 2 == 0 else -1]:
            variant.run(args.steps)
    steps = min(len(v.losses) for v in variants.values())
    losses = {name: np.asarray(jnp.stack(v.losses[:steps])) for name, v in variants.items()}
    base = variants["no mesh"]
    found = {"cases": {}}
    for name, variant in variants.items():
        found["cases"][name] = {
            "step_ms": float(np.median(variant.times)),
            "least_ms": min(variant.times),
            "ratio": float(np.median(np.array(variant.times) / np.array(base.times))),
            "largest_loss_difference": float(np.abs(losses[name] - losses["no mesh"]).max()),
        }
        print(f"{name:46} {found['cases'][name]}", flush=True)
    found["first_loss"], found["last_loss"] = float(losses["no mesh"][0]), float(losses["no mesh"][-1])
    found["checkpoint_equal"] = checkpoint(variants["mesh of one"], job, mesh)
    print("checkpoint equal:", found["checkpoint_equal"], "loss:", found["first_loss"], found["last_loss"])
    save(found)
