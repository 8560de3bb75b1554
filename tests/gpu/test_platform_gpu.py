"""On a machine with a GPU, what is called for the CPU runs there: by its default device, or by where arguments lie."""

import contextlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import rgnn, segment
from dejax.host_gather import CachedTable, DeviceTable, HostTable, SplitTable, prefetched_scan
from dejax.minibatch import FeatureStore, HeteroTopology, make_blocks, pipelined_steps, sample_blocks, step_keys
from dejax.offload import ActivationStore, offload
from dejax.rgnn.nnx import RGATConv

pytestmark = pytest.mark.gpu

RNG = np.random.default_rng(0)
X, WEIGHTS = RNG.normal(size=(60, 16)).astype("f4"), RNG.normal(size=(2, 16, 16)).astype("f4") / 8
ENDS = RNG.integers(0, 60, (2, 500)).astype("i4")
NODES = {"paper": 60, "author": 40}
WRITES = RNG.integers(0, 40, 300), RNG.integers(0, 60, 300)
EDGES = {("author", "writes", "paper"): WRITES, ("paper", "written", "author"): WRITES[::-1]}


class Place:
    """Where arguments lie: on the CPU that is jax's default device, or committed to a CPU that is not."""

    def __init__(self, name):
        self.cpu = jax.devices("cpu")[0]
        self.default = contextlib.nullcontext() if name != "default" else jax.default_device(self.cpu)
        self.device = self.cpu if name == "committed" else None

    def __call__(self, tree):
        return jax.device_put(tree, self.device) if self.device else jax.tree.map(jnp.asarray, tree)


@rgnn.program
def mean_by_relation(g, x, w):
    return rgnn.relu(g.mean_to_dst(g.src(x) @ g.per_edge_type(w)))


def program(put):
    graph = rgnn.RelGraph.from_edges(*ENDS, ENDS.sum(0) % 2, num_nodes=60)
    loss = jax.jit(jax.grad(lambda w, graph, x: (mean_by_relation(graph, x, w) ** 2).sum()))
    return loss(put(WEIGHTS), put(graph) if put.device else graph, put(X)), mean_by_relation(graph, *put((X, WEIGHTS)))


def layer(put):
    graphdef, params = nnx.split(RGATConv(16, 4, 2, num_heads=2, rngs=nnx.Rngs(0)), nnx.Param)
    graph = rgnn.RelGraph.from_edges(*ENDS, ENDS.sum(0) % 2, num_nodes=60)
    graph = put(graph) if put.device else graph
    return jax.jit(jax.grad(lambda p, graph, x: (nnx.merge(graphdef, p)(graph, x) ** 2).sum()))(
        put(params), graph, put(X)
    )


def segments(put):
    x, senders, receivers = put((X, *ENDS))
    plan = segment.edge_plan(senders, receivers, 60)

    @jax.jit
    def all_of(x, senders, receivers, plan):
        rows = x[senders]
        return (
            segment.segment_sum(rows, receivers, 60),
            segment.segment_softmax(rows, receivers, 60, deterministic=True),
            jax.grad(lambda x: (segment.gather_segment_sum(x, None, None, plan=plan) ** 2).sum())(x),
        )

    return all_of(x, senders, receivers, plan)


def tables(put):
    host = HostTable.from_numpy(X, device=put.device)
    ids = put(ENDS[0])
    some = [
        host,
        DeviceTable.from_numpy(X, device=put.device),
        SplitTable.from_numpy(X, on_device=np.arange(9), device=put.device),
        CachedTable.from_counts(host, put(np.arange(60, dtype="i4")), cached_rows=9),
    ]
    scan = jax.jit(lambda w, t, i: prefetched_scan(lambda w, rows, _: (w + rows.mean(0), rows.sum()), w, t, i))
    return [jax.jit(lambda t, i: t[i])(t, ids) for t in some], scan(put(X[0]), host, ids.reshape(10, 50))


def pipelined(put):
    with jax.default_device(put.device or jax.config.values["jax_default_device"]):
        topology = HeteroTopology.from_edges(EDGES, NODES, on_host=True)
    features = FeatureStore.from_arrays({n: np.ones((c, 16), "f4") for n, c in NODES.items()}, device=put.device)

    def update(w, batch):
        def loss(w):
            h = batch.blocks[0].join(batch.x)
            for block in batch.blocks:
                h = mean_by_relation(block.bipartite, h, w)
            return (h**2).sum()

        value, gradient = jax.value_and_grad(loss)(w)
        return w - 1e-3 * gradient, value

    def sample(key, topology, seeds):
        return sample_blocks(key, topology, ("paper", seeds), [3, 2])

    seeds = np.arange(32, dtype="i4").reshape(4, 8)
    return pipelined_steps(update, sample)(
        put(WEIGHTS), topology, features, put(step_keys(jax.random.key(0), 0, 4)), put(seeds)
    )


def sampled(put):
    topology = HeteroTopology.from_edges(EDGES, NODES)
    topology = put(topology) if put.device else topology
    sample = jax.jit(lambda key, topology, seeds: sample_blocks(key, topology, ("paper", seeds), [3, 2]))
    found = sample(put(jax.random.key(0)), topology, put(np.arange(8, dtype="i4")))
    return found.node_ids, [block.graph.senders for block in make_blocks(found)]


def offloaded(put):
    layer = offload(jax.checkpoint(lambda w, x: x + jnp.tanh(x @ w) @ w.T), min_bytes=1)

    @jax.jit
    def loss(ws, x):
        return (jax.lax.scan(lambda x, w: (layer(w, x), None), x, ws)[0] ** 2).mean()

    with ActivationStore():
        return jax.block_until_ready(jax.grad(loss)(*put((WEIGHTS, X))))


@pytest.mark.parametrize("name", ["default", "committed"])
@pytest.mark.parametrize("run", [program, layer, segments, tables, sampled, pipelined, offloaded])
def test_on_the_cpu(run, name):
    want, put = run(Place("gpu")), Place(name)
    with put.default, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*kernels are interpreted")
        found = run(put)
    assert {d.platform for x in jax.tree.leaves(found) for d in x.devices()} == {"cpu"}
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
        scale = np.abs(np.asarray(other, "f8")).max()
        np.testing.assert_allclose(np.asarray(one, "f8"), np.asarray(other, "f8"), rtol=1e-2, atol=5e-3 * scale)
