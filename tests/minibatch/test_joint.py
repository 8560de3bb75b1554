"""Blocks of samples of all relations together: layers equal those on the full graph."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.minibatch import Capacities, HeteroTopology, edge_ids, make_typed_blocks, sample_blocks

EDGE = ("node", "edge", "node")
NODES, KINDS = 12, 5


@rgnn.program
def typed_sum(g, x, w):
    return g.sum_to_dst(g.src(x) * g.per_edge_type(w))


def graph(seed=0, edges=40):
    rng = np.random.default_rng(seed)
    return (*rng.integers(0, NODES, (2, edges)), rng.integers(0, KINDS, edges))


@functools.partial(jax.jit, static_argnums=2)
def sampled(topology, seeds, fan_out):
    return sample_blocks(jax.random.key(0), topology, ("node", seeds), [fan_out])


@pytest.mark.parametrize(
    ("loops", "edges"),
    [
        (True, (9, 37)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in [(False, None), (True, None), (False, (11, 40))]),
    ],
)
@pytest.mark.slow
def test_two_layers_with_all_edges_equal_the_full_graph(loops, edges):
    senders, receivers, kinds = graph()
    topology = HeteroTopology.from_edges({EDGE: (senders, receivers)}, {"node": NODES})
    seeds = jnp.array([3, 7, 3, -1])
    rng = np.random.default_rng(1)
    x, w = rng.standard_normal((NODES, 4)), rng.standard_normal((KINDS + loops, 4))

    @jax.jit
    def on_blocks(x, w, topology, kinds):
        capacities = Capacities({}, edges=edges)
        sample = sample_blocks(jax.random.key(0), topology, ("node", seeds), [-1, -1], capacities=capacities)
        ids = sample.node_ids["node"]
        h = jnp.where((ids >= 0)[:, None], x[jnp.maximum(ids, 0)], 0)
        for block in make_typed_blocks(topology, sample, kinds, KINDS, add_self_loops=loops):
            own = block.bipartite if loops == (edges is None) else block.graph
            h = typed_sum(own, h[: block.num_sources], w)
            assert h.shape[0] == (block.num_destinations if own.only_destinations else block.num_sources)
            h = h[: block.num_destinations]
        return h[sample.seed_positions["node"]], sample.seed_positions["node"], sample.lost_edges

    found, places, lost = on_blocks(jnp.float32(x), jnp.float32(w), topology, jnp.asarray(kinds))
    h = x
    for _ in range(2):
        out = h * w[KINDS] if loops else np.zeros_like(h)
        np.add.at(out, receivers, h[senders] * w[kinds])
        h = out
    np.testing.assert_allclose(found[:3], h[[3, 7, 3]], rtol=2e-5, atol=1e-5)
    assert places[0] == places[2] and int(lost) == 0


@pytest.mark.slow
def test_edges_that_do_not_fit_are_left_out_and_counted():
    senders, receivers, kinds = graph()
    topology = HeteroTopology.from_edges({EDGE: (senders, receivers)}, {"node": NODES})

    def block_of(edges):
        capacities = Capacities({}, edges=edges)
        sample = sample_blocks(jax.random.key(0), topology, ("node", jnp.arange(6)), [3], capacities=capacities)
        (block,) = make_typed_blocks(topology, sample, jnp.asarray(kinds), KINDS)
        found = zip(*(some.tolist() for some in block.graph.to_edges()), strict=True)
        return block, sample, sorted(edge for edge in found if edge[2] < KINDS)

    block, sample, all_edges = block_of(None)
    count = int(sample.edges_found[0])
    for most in (count + 1, count, count - 2, 1):
        cut, sample, kept = block_of((most,))
        assert cut.graph.num_edges == min(most, block.graph.num_edges) and len(kept) == min(most, count)
        assert int(sample.lost_edges) == max(0, count - most) and set(kept) <= set(all_edges)
        values = cut.edge_values([own.astype(jnp.float32) for own in sample.numbers])
        assert values.shape == (cut.graph.num_edges,)


def test_mistakes_are_named():
    senders, receivers, kinds = graph()
    topology = HeteroTopology.from_edges({EDGE: (senders, receivers)}, {"node": NODES})
    sample = sampled(topology, jnp.array([0]), 2)
    with pytest.raises(ValueError, match=r"`edge_type` must be int\[40\], one for each edge, got \(3,\)"):
        make_typed_blocks(topology, sample, jnp.asarray(kinds[:3]), KINDS)
    with pytest.raises(TypeError, match="`edge_type` must be integers, got float64"):
        make_typed_blocks(topology, sample, kinds + 0.5, KINDS)
    other = HeteroTopology.from_edges({EDGE: ([], []), ("node", "b", "node"): ([], [])}, {"node": NODES})
    with pytest.raises(ValueError, match="must have one relation within one node type"):
        make_typed_blocks(other, sample, jnp.asarray(kinds), KINDS)


def test_values_of_edges_and_self_loops():
    senders, receivers, kinds = graph()
    topology = HeteroTopology.from_edges({EDGE: (senders, receivers)}, {"node": NODES})
    numbers = jnp.asarray(kinds)

    @jax.jit
    def made(topology):
        sample = sample_blocks(jax.random.key(0), topology, ("node", jnp.arange(NODES)), [-1])
        (block,) = make_typed_blocks(topology, sample, kinds, KINDS, add_self_loops=True)  # numpy's kinds are as good
        values = [jnp.where(own >= 0, numbers[own] + 1.0, 0) for own in edge_ids(topology, sample)]
        return block, block.edge_values(values)

    block, values = made(topology)

    @rgnn.program
    def total(g, values):
        return g.sum_to_dst(g.edge(values))

    want = np.bincount(receivers, kinds + 1.0, minlength=NODES)  # self loops add nothing
    np.testing.assert_array_equal(total(block.bipartite, values)[:NODES], want)


def test_a_graph_without_edges():
    topology = HeteroTopology.from_edges({EDGE: ([], [])}, {"node": NODES})
    sample = sampled(topology, jnp.array([0, 5]), 2)
    (block,) = make_typed_blocks(topology, sample, jnp.zeros(0, jnp.int32), KINDS)
    out = typed_sum(block.graph, jnp.ones((block.num_sources, 4)), jnp.ones((KINDS, 4)))
    np.testing.assert_array_equal(out[:2], 0)
