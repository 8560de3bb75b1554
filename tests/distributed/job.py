"""A training job on a mesh: sampled batches, trainable embeddings, features, checkpoints. Also a program of its own.

    python tests/distributed/job.py PROCESS PROCESSES PORT FOLDER SETTINGS(JSON)

It writes FOLDER/losses-PROCESS.jsonl, a line for each step as it is done.
"""

import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from dejax import distributed, rgnn
from dejax.distributed import Part, ShardedTable
from dejax.host_gather import RowGradient, adam
from dejax.minibatch import FeatureStore, HeteroTopology, make_blocks, sample_blocks

WIDTH, CLASSES, BATCH, PARTS = 8, 4, 32, 4
COUNTS = {"paper": 300, "author": 120}
ROWS = adam(0.02)
OPTIMIZER = optax.adam(0.02)


@rgnn.program
def mean_by_relation(g, x, w):
    return g.mean_to_dst(g.src(x) @ g.per_edge_type(w))


def graph():
    rng = np.random.default_rng(0)
    writes = rng.integers(0, 120, 900), rng.integers(0, 300, 900)
    cites = rng.integers(0, 300, 900), rng.integers(0, 300, 900)
    edges = {("author", "writes", "paper"): writes, ("paper", "cites", "paper"): cites}
    return HeteroTopology.from_edges(edges, COUNTS)


def arrays():
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((COUNTS["paper"], WIDTH)).astype(np.float32)
    w = rng.standard_normal((2, WIDTH, WIDTH)).astype(np.float32) / 3
    out = rng.standard_normal((2 * WIDTH, CLASSES)).astype(np.float32) / 3
    return rows, {"w": w, "out": out}, rng.integers(0, CLASSES, COUNTS["paper"])


def build(mesh, tables="shared", optimizer=OPTIMIZER):
    """(state, data) of a new run. tables: "shared", "sharded", or "plain" for divided tables without a graph."""
    rows, params, labels = arrays()
    embeddings = FeatureStore().embedding("author", COUNTS["author"], WIDTH)
    topology, labels = None if tables == "plain" else graph(), jnp.asarray(labels)
    papers = FeatureStore.from_arrays({"paper": rows})
    if tables != "shared":
        authors = ShardedTable.from_numpy(embeddings["author"].table.numpy(), mesh)
        trained, moments = authors, authors.init(ROWS)
        if tables == "sharded":  # by the store, as shared ones
            trained = FeatureStore().with_table("author", authors, trainable=True)
            moments = trained.init(ROWS)
        papers = ShardedTable.from_numpy(rows, mesh, hot=[1, 7, 200])
    else:
        trained, moments = embeddings, embeddings.init(ROWS)
    params = jax.tree.map(jnp.asarray, params)
    state = {"params": params, "opt": optimizer.init(params), "authors": trained, "moments": moments}
    data = {"topology": topology, "papers": papers, "labels": labels}
    if mesh is not None:
        state, data = distributed.share(state, mesh, writable=True), distributed.share(data, mesh)
    return state, data


def rows_of(store, name, ids):
    if isinstance(store, ShardedTable):
        return store.gather(ids)
    rows, lost = store.gather_counted({name: ids}, capacity={})
    return rows[name], lost


def gradients(state, key, seeds, data):
    sample = sample_blocks(key, data["topology"], ("paper", seeds), [3])
    blocks = make_blocks(sample)
    ids = sample.node_ids
    authors, lost = rows_of(state["authors"], "author", ids["author"])
    papers, lost_too = rows_of(data["papers"], "paper", ids["paper"])
    real = seeds >= 0

    def loss_of(params, authors):
        h = blocks[0].join({"author": authors, "paper": papers})
        first = h
        for block in blocks:
            h = jnp.tanh(mean_by_relation(block.graph, h, params["w"])[: block.num_destinations])
        here = sample.seed_positions["paper"]
        both = jnp.concatenate([blocks[-1].split(h)["paper"][here], blocks[0].split(first)["paper"][here]], 1)
        losses = optax.softmax_cross_entropy_with_integer_labels(both @ params["out"], data["labels"][seeds])
        return jnp.where(real, losses, 0).sum() / real.sum()

    loss, (of_params, of_authors) = jax.value_and_grad(loss_of, (0, 1))(state["params"], authors)
    lost = lost + lost_too + sample.lost.sum()
    return Part(loss, of_params, real.sum(), {"author": RowGradient(ids["author"], of_authors)}, lost)


def plain_gradients(state, key, seeds, data):
    """Without samples and blocks: quick to compile, for jobs that start many times."""
    ids = jnp.where(seeds >= 0, seeds % COUNTS["author"], -1)
    authors, lost = state["authors"].gather(ids)
    papers, lost_too = data["papers"].gather(seeds)
    real = seeds >= 0

    def loss_of(params, authors):
        both = jnp.concatenate([jnp.tanh(authors @ params["w"][0]), papers @ params["w"][1]], 1)
        noise = jax.random.normal(key, (both.shape[0], CLASSES)) * 0.1
        losses = optax.softmax_cross_entropy_with_integer_labels(both @ params["out"] + noise, data["labels"][seeds])
        return jnp.where(real, losses, 0).sum() / real.sum()

    loss, (of_params, of_authors) = jax.value_and_grad(loss_of, (0, 1))(state["params"], authors)
    return Part(loss, of_params, real.sum(), {"author": RowGradient(ids, of_authors)}, lost + lost_too)


def update_with(optimizer):
    def update(state, mean):
        steps, opt = optimizer.update(mean.gradients, state["opt"], state["params"])
        rows, authors, moments = mean.rows["author"], state["authors"], state["moments"]
        if isinstance(authors, ShardedTable):
            authors, moments, _ = authors.update(ROWS, rows, moments)
        else:
            authors, moments = authors.update(ROWS, {"author": rows.ids}, {"author": rows.values}, moments)
        params = optax.apply_updates(state["params"], steps)
        return {"params": params, "opt": opt, "authors": authors, "moments": moments}

    return update


def batch(step):
    seeds = np.random.default_rng([2, step]).integers(0, COUNTS["paper"], BATCH).astype(np.int32)
    seeds[-(step % 12) - 1 :] = -1  # the last part is smaller, and sometimes empty
    return seeds


def run(mesh, steps, tables="shared", optimizer=OPTIMIZER, state=None, first=0, each=None):
    """(losses, state) after `steps` steps; `each(step, loss, state)` is called after each."""
    fresh, data = build(mesh, tables, optimizer)
    state = fresh if state is None else state(fresh)
    half = plain_gradients if tables == "plain" else gradients
    step = distributed.data_parallel(half, update_with(optimizer), mesh, parts=PARTS)
    losses = []
    for number in range(first, steps):
        state, report = step(state, jax.random.key(number), batch(number), data)
        assert int(report.counts) == 0
        losses.append(float(report.loss))
        if each is not None:
            each(number, losses[-1], state)
    return losses, state


def main(process, processes, port, folder, steps=50, tables="shared", every=0, timeout=20.0, pause=0.0):
    folder = Path(folder)
    if processes > 1:
        distributed.initialize(f"127.0.0.1:{port}", processes, process, timeout=timeout)
        distributed.check_agreement(steps=steps, tables=tables, arrays=arrays())
    mesh = distributed.make_mesh()
    print("begins", flush=True)
    first, checkpoints = 0, folder / "checkpoints"

    def begin(fresh):
        return distributed.restore(checkpoints, fresh)[0] if first else fresh

    with open(folder / f"losses-{process}.jsonl", "a") as file:

        def each(number, loss, state):
            file.write(json.dumps([number, loss]) + "\n")
            file.flush()
            if every and (number + 1) % every == 0:
                distributed.save(checkpoints, number + 1, state)
            time.sleep(pause)

        first = (distributed.latest_step(checkpoints) or 0) if every else 0
        run(mesh, steps, tables, state=begin, first=first, each=each)
    print("finished", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], **json.loads(sys.argv[5]))
