"""`Block.bipartite`: what `Block.graph` gives at destinations, gradients included; padding rows may hold anything."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from dejax import rgnn
from dejax.minibatch import Capacities, HeteroTopology, make_blocks, make_typed_blocks, sample_blocks
from dejax.minibatch import linen as mb_linen
from dejax.minibatch import nnx as mb
from dejax.rgnn import library, zoo
from tests.minibatch.graphs import COUNTS, edge_lists, topology_of

KEY, SEEDS = jax.random.key(0), {"paper": jnp.array([4, 7, 7, -1, 2]), "author": jnp.array([3])}
BACKENDS = {"xla": rgnn.Options(backend="xla"), "kernels": rgnn.Options(backend="pallas", interpret=True)}
R, T, H, K = 4, 3, 2, 8


def block_of(edges=None):
    """The block of two hops; some of its nodes and edges are padding."""
    capacities = {"paper": (9, 9), "author": (9, 9)}
    capacities = capacities if edges is None else Capacities(capacities, edges=edges)
    run = jax.jit(lambda t: make_blocks(sample_blocks(KEY, t, SEEDS, [3, 2], capacities=capacities))[0])
    block = run(topology_of(edge_lists(120)))
    assert 0 < block.num_destinations < block.num_sources and not block.graph.node_mask.all()
    return block


def joint_block_of(loops, edges=None):
    """The block of two hops of a graph of one node type, sampled over all relations together."""
    rng = np.random.default_rng(7)
    kinds = jnp.asarray(rng.integers(0, R - loops, 120))
    topology = HeteroTopology.from_edges({("node", "edge", "node"): rng.integers(0, 30, (2, 120))}, {"node": 30})
    capacities = Capacities({"node": (9, 9)}, edges=edges)

    @jax.jit
    def run(topology, kinds):
        seeds = ("node", jnp.array([4, 7, 7, -1, 2]))
        sample = sample_blocks(KEY, topology, seeds, [3, 2], capacities=capacities)
        return make_typed_blocks(topology, sample, kinds, R - loops, add_self_loops=loops)[0]

    block = run(topology, kinds)
    assert 0 < block.num_destinations < block.num_sources and not block.graph.node_mask.all()
    return block


@rgnn.program
def everything(g, x, w, t):
    """Rows of all kinds: by source, by destination, by node, an extremum, the root of each node."""
    z = g.src(x) @ g.per_edge_type(w)
    score = rgnn.dot(z, g.dst(x) @ g.per_edge_type(w))
    y = g.sum_to_dst(rgnn.edge_softmax(score) * z) + g.max_to_dst(z)
    return rgnn.tanh(y) + g.node(x) @ g.per_node_type(t), g.mean_to_dst(z)


@rgnn.program
def of_nodes(g, x, t):
    """No edge is read, and a derivative is infinite at the zeros of padding."""
    return rgnn.sqrt(rgnn.abs(g.node(x))) @ g.per_node_type(t)


@rgnn.program
def biased(g, x, w, t, u):
    """The gradient of the biases is a sum of destinations alone."""
    y = g.sum_to_dst(g.src(x) @ g.per_edge_type(w)) + g.per_node_type(t)
    return rgnn.tanh(y) + g.per_node_type(u)


@rgnn.program
def scattered(g, x, w):
    """A sum over the edges of sources, which are padding in part."""
    return g.sum_to_src(g.dst(x) @ g.per_edge_type(w)) + g.sum_to_dst(g.src(x))


def drawn(*shape):
    return jnp.asarray(np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape) * 0.4, jnp.float32)


def rgat_parameters():
    d = K // H
    return {"weight": drawn(R, H, K, d), "attention_src": drawn(R, H, d), "attention_dst": drawn(R, H, d)}


def hgt_parameters():
    d = K // H
    own = {name: drawn(T, H, K, d) for name in ("key", "query", "value")}
    relation = {f"relation_{name}": drawn(R, H, d, d) for name in ("attention", "message")}
    return own | relation | {"prior": drawn(R, H), "out": drawn(T, K, K), "out_bias": drawn(T, K), "skip": drawn(T)}


PROGRAMS = {
    "everything": (everything, (drawn(R, K, K), drawn(T, K, K))),
    "of nodes": (of_nodes, (drawn(T, K, K),)),
    "biased": (biased, (drawn(R, K, K), drawn(T, K), drawn(T, K))),
    "scattered": (scattered, (drawn(R, K, K),)),
    "rgcn": (library.rgcn, ({"weight": drawn(R, K, K), "root": drawn(K, K), "bias": drawn(K)},)),
    "rgat": (library.rgat, (rgat_parameters(),)),
    "hgt": (library.hgt, (hgt_parameters(),)),
    "gatv2": (zoo.gatv2, ({"weight_src": drawn(H, K, 4), "attention": drawn(H, 4), "residual": drawn(K, K)},)),
}


CASES = {
    "slots": functools.cache(block_of),
    "bounded edges": functools.cache(lambda: block_of((25, 70))),
    "joint": functools.cache(lambda: joint_block_of(False, (9, 30))),
    "joint, loops": functools.cache(lambda: joint_block_of(True)),
}


def case_of(name, case):
    """The block, the program and its parameters: those of one node type where the block has one."""
    block, (program, params) = CASES[case](), PROGRAMS[name]
    if block.graph.num_node_types == 1:
        params = jax.tree.map(lambda w: w[:1] if w.shape[0] == T else w, params)
    return block, program, params


def rows_of(block, filling):
    """Features of the sources, and their padding."""
    x = np.random.default_rng(5).standard_normal((block.num_sources, K)).astype(np.float32)
    return jnp.where(block.graph.node_mask[:, None], x, filling)


def run(program, params, options, rows, graph, x):
    def loss(x, params):
        found = jax.tree.leaves(program(graph, x, *params, options=options))
        kept = [y[:rows] for y in found]
        return sum((y * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum() for y in kept), kept

    (_, found), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(x, params)
    return found, gradients


@functools.cache
def of_the_graph(name, case):
    """What the graph of a block gives at destinations, and its gradients."""
    block, program, params = case_of(name, case)
    at_destinations = functools.partial(run, program, params, BACKENDS["xla"], block.num_destinations)
    return jax.jit(at_destinations)(block.graph, rows_of(block, 0.0))


# Of each program the quarter that meets each backend and each kind of block; of these one is not slow.
_FAST = {("biased", "xla", "joint")}


@pytest.mark.parametrize(
    ("name", "backend", "case"),
    [
        pytest.param(*one, marks=() if one in _FAST else pytest.mark.slow)
        for i, name in enumerate(PROGRAMS)
        for j, backend in enumerate(BACKENDS)
        for one in [(name, backend, ("slots", "bounded edges", "joint", "joint, loops")[(i + 2 * j) % 4])]
    ],
)
def test_results_are_those_of_the_graph_at_destinations(name, backend, case):
    block, program, params = case_of(name, case)
    both = jax.jit(functools.partial(run, program, params, BACKENDS[backend], None))
    want, want_gradients = of_the_graph(name, case)
    for filling in (0.0, jnp.nan, jnp.inf):
        found, gradients = both(block.bipartite, rows_of(block, filling))
        assert [y.shape for y in found] == [y.shape for y in want]
        mask = np.asarray(block.graph.node_mask)
        assert not np.asarray(gradients[0])[~mask].any(), "padding has a gradient"
        for got, expected in zip(
            jax.tree.leaves((found, gradients)), jax.tree.leaves((want, want_gradients)), strict=True
        ):
            scale = float(jnp.abs(expected).max())
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-3 * scale)


@pytest.mark.slow  # padding of graphs as such: tests/rgnn/test_cases.py
@pytest.mark.parametrize(("name", "backend"), list(itertools.product(("everything", "rgat"), BACKENDS)))
def test_the_graph_itself_takes_any_padding(name, backend):
    block, program, params = case_of(name, "bounded edges")
    one = jax.jit(functools.partial(run, program, params, BACKENDS[backend], None))
    want, got = one(block.graph, rows_of(block, 0.0)), one(block.graph, rows_of(block, jnp.nan))
    assert jax.tree.leaves(got)[0].shape[0] == block.num_sources
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), got, want)


class Own(nnx.Module):
    """A layer of a user, which returns a row for each source."""

    def __init__(self, layer):
        self.layer = layer

    def __call__(self, graph, x):
        return self.layer(graph, x) + x


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.slow
def test_layers_of_flax_get_the_graph_that_they_take(dropout):
    capacities = {"paper": (9, 9), "author": (9, 9)}
    sample = jax.jit(lambda t: sample_blocks(KEY, t, SEEDS, [3, 2], capacities=capacities))(
        topology_of(edge_lists(120))
    )
    blocks, rngs = make_blocks(sample), nnx.Rngs(0)
    layers = [
        rgnn.nnx.RGCNConv(K, K, R, edge_dropout=dropout, self_loop_dropout=dropout, rngs=rngs),
        rgnn.nnx.HGTConv(K, K, T, R, num_heads=H, dropout=dropout, rngs=rngs),
    ]
    h = jnp.asarray(np.random.default_rng(0).standard_normal((blocks[0].num_sources, K)), jnp.float32)
    for layer, block in zip(layers, blocks, strict=True):
        whole, own = (layer(graph, h, rngs=nnx.Rngs(dropout=3)) for graph in (block.graph, block.bipartite))
        assert own.shape == (block.num_destinations, K)
        np.testing.assert_allclose(own, whole[: block.num_destinations], rtol=1e-5, atol=1e-5)
        h = own
    x = {name: jnp.ones((len(ids), 5)) for name, ids in sample.node_ids.items()}
    kinds = dict.fromkeys(COUNTS, 5)
    plain = mb.HeteroGNN(kinds, K, layers, rngs=nnx.Rngs(1))
    wrapped = mb.HeteroGNN(kinds, K, [Own(layer) for layer in layers], rngs=nnx.Rngs(1))
    for model in (plain, wrapped):
        model.eval()
        assert model(blocks, x)["paper"].shape == (5, K)
    linen = mb_linen.HeteroGNN(K, [rgnn.linen.RGCNConv(K), rgnn.linen.HGTConv(K, num_heads=H)])
    found, _ = linen.init_with_output(jax.random.key(0), blocks, x)
    assert found["paper"].shape == (5, K)
    assert isinstance(linen, nn.Module)
