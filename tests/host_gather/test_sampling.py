"""Neighbour sampling: exact probabilities, structure of the local graph, padding."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import host_gather
from dejax.host_gather import HostTable, Topology, gather

# Node 0 has 5 incoming edges, node 1 has 2, node 2 none, node 3 one from itself.
SENDERS = np.array([1, 2, 3, 4, 5, 0, 4, 3])
RECEIVERS = np.array([0, 0, 0, 0, 0, 1, 1, 3])
WEIGHTS = np.array([1.0, 2.0, 3.0, 4.0, 0.0, 1.0, 3.0, 0.0])
DRAWS = 20_000
# Compiled as a whole: op by op it would be a compilation for each.
sample_neighbors = jax.jit(host_gather.sample_neighbors, static_argnames=("fan_out", "replace", "max_degree"))
sample_graph = jax.jit(host_gather.sample_graph, static_argnums=3, static_argnames=("max_nodes",))


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    """The statistic over its degrees of freedom: about 1 where the counts follow the probabilities."""
    used = probabilities > 0
    assert not counts[~used].any()
    expected = counts.sum() * probabilities[used]
    return float(((counts[used] - expected) ** 2 / expected).sum() / max(1, used.sum() - 1))


@pytest.mark.parametrize("on_host", [False, True])
def test_small_lists_are_taken_whole(on_host: bool) -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6, on_host=on_host)
    got = sample_neighbors(jax.random.key(0), topology, jnp.array([1, 2, 3, -1, 0, 6]), fan_out=5)
    assert [sorted(np.asarray(row)[np.asarray(m)].tolist()) for row, m in zip(got.senders, got.mask, strict=True)] == [
        [0, 4], [], [3], [], [1, 2, 3, 4, 5], []
    ]  # fmt: skip
    assert (np.asarray(got.senders)[~np.asarray(got.mask)] == -1).all()
    assert (np.asarray(got.edges)[~np.asarray(got.mask)] == -1).all()


def test_subsets_are_uniform() -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6)
    got = sample_neighbors(jax.random.key(1), topology, jnp.zeros(DRAWS, jnp.int32), fan_out=3)
    subsets = {subset: k for k, subset in enumerate(itertools.combinations(range(1, 6), 3))}
    counts = np.bincount([subsets[tuple(sorted(row))] for row in np.asarray(got.senders).tolist()], minlength=10)
    assert chi_square(counts, np.full(10, 0.1)) < 2.5


def test_with_replacement_is_uniform() -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6)
    got = sample_neighbors(jax.random.key(2), topology, jnp.zeros(DRAWS, jnp.int32), fan_out=2, replace=True)
    pairs = np.asarray(got.senders) - 1
    counts = np.bincount(pairs[:, 0] * 5 + pairs[:, 1], minlength=25)
    assert chi_square(counts, np.full(25, 1 / 25)) < 2
    one = sample_neighbors(jax.random.key(2), topology, jnp.array([3, 2]), fan_out=4, replace=True)
    assert np.asarray(one.senders).tolist() == [[3] * 4, [-1] * 4]


def test_weights_with_replacement() -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6, weights=WEIGHTS)
    got = sample_neighbors(jax.random.key(3), topology, jnp.zeros(DRAWS, jnp.int32), fan_out=2, replace=True)
    counts = np.bincount(np.asarray(got.senders).reshape(-1), minlength=6)[1:]
    assert chi_square(counts, WEIGHTS[:5] / 10) < 3.5
    nothing = sample_neighbors(jax.random.key(3), topology, jnp.array([3]), fan_out=2, replace=True)
    assert not np.asarray(nothing.mask).any()  # its only edge has weight 0


def test_weights_without_replacement() -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6, weights=WEIGHTS)
    got = sample_neighbors(jax.random.key(4), topology, jnp.zeros(DRAWS, jnp.int32), fan_out=2, max_degree=5)
    w = WEIGHTS[:4] / 10
    pairs = {pair: k for k, pair in enumerate(itertools.combinations(range(4), 2))}
    probabilities = np.array([w[a] * w[b] / (1 - w[a]) + w[b] * w[a] / (1 - w[b]) for a, b in pairs])
    counts = np.bincount(
        [pairs[tuple(sorted(r - 1 for r in row))] for row in np.asarray(got.senders).tolist()], minlength=6
    )
    assert chi_square(counts, probabilities) < 3
    few = sample_neighbors(jax.random.key(4), topology, jnp.array([0]), fan_out=5, max_degree=5)
    assert sorted(np.asarray(few.senders)[0].tolist()) == [-1, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="max_degree"):
        sample_neighbors(jax.random.key(4), topology, jnp.array([0]), fan_out=2)


def test_by_relation() -> None:
    relation = np.array([0, 0, 1, 1, 1, 0, 1, 1])
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6, relation=relation, num_relations=2, on_host=True)
    got = sample_neighbors(jax.random.key(0), topology, jnp.array([0, 1]), fan_out=2)
    senders = np.asarray(got.senders)
    assert set(senders[0, :2]) == {1, 2} and set(senders[0, 2:]) <= {3, 4, 5}
    assert senders[1].tolist() == [0, -1, 4, -1]


def test_the_local_graph_is_the_samples() -> None:
    rng = np.random.default_rng(0)
    senders, receivers = rng.integers(0, 200, 3000), rng.integers(0, 200, 3000)
    relation = rng.integers(0, 3, 3000)
    order = np.lexsort((np.arange(3000), relation, receivers))
    edges = {k: (senders[e], receivers[e], relation[e]) for k, e in enumerate(order)}
    features = rng.standard_normal((200, 4)).astype(np.float32)
    table = HostTable.from_numpy(features)
    topology = Topology.from_edges(senders, receivers, num_nodes=200, relation=relation, num_relations=3, on_host=True)

    @jax.jit
    def sample(key: jax.Array, topology: Topology, table: HostTable, seeds: jax.Array) -> tuple:
        graph = sample_graph(key, topology, seeds, (3, 2))
        return graph, gather(table, graph.node_ids)

    seeds = jnp.array([5, 9, 5, -1, 17, 300])
    graph, rows = sample(jax.random.key(0), topology, table, seeds)
    nodes, mask = np.asarray(graph.node_ids), np.asarray(graph.edge_mask)
    assert nodes[:6].tolist() == [5, 9, -1, -1, 17, -1]
    known = nodes[nodes >= 0]
    assert len(np.unique(known)) == len(known) and int(graph.dropped) == 0
    for s, r, t, e in zip(
        *(np.asarray(x)[mask] for x in (graph.senders, graph.receivers, graph.relation, graph.edges)), strict=True
    ):
        assert (nodes[s], nodes[r], t) == edges[int(e)]
    assert (np.asarray(graph.senders)[~mask] == len(nodes)).all()
    assert len(graph.senders) == sum(graph.hop_edges)
    # Each node but those of the last hop is expanded once: as many edges as it has, up to the fan-out, of each
    # relation.
    first = np.asarray(graph.receivers)[: graph.hop_edges[0]]
    for local in (0, 1, 4):
        for t in range(3):
            have = ((receivers == nodes[local]) & (relation == t)).sum()
            drawn = (
                (first == local) & (np.asarray(graph.relation)[: graph.hop_edges[0]] == t) & mask[: graph.hop_edges[0]]
            ).sum()
            assert drawn == min(have, 3)
    np.testing.assert_array_equal(rows, np.where((nodes >= 0)[:, None], features[nodes], 0))
    again, _ = sample(jax.random.key(0), topology, table, seeds)
    jax.tree.map(np.testing.assert_array_equal, graph, again)
    other, _ = sample(jax.random.key(1), topology, table, seeds)
    assert not np.array_equal(graph.edges, other.edges)


def test_a_bound_on_nodes_drops_and_counts() -> None:
    topology = Topology.from_edges(SENDERS, RECEIVERS, num_nodes=6)
    graph = sample_graph(jax.random.key(0), topology, jnp.array([0]), (5,), max_nodes=3)
    assert graph.node_ids.shape == (3,) and int(graph.dropped) == 3
    assert int(graph.edge_mask.sum()) == 2


def test_a_graph_without_edges() -> None:
    topology = Topology.from_edges(np.zeros(0, int), np.zeros(0, int), num_nodes=3)
    graph = sample_graph(jax.random.key(0), topology, jnp.array([2, 0]), (2, 2))
    assert not graph.edge_mask.any() and graph.node_ids[:2].tolist() == [2, 0]


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="`senders` must be integers from 0 to 2"):
        Topology.from_edges([3], [0], num_nodes=3)
    with pytest.raises(ValueError, match="one length"):
        Topology.from_edges([1, 2], [0], num_nodes=3)
    with pytest.raises(ValueError, match="finite and not negative"):
        Topology.from_edges([1], [0], num_nodes=3, weights=[-1.0])
    for starts, senders in (([0, 1, 1], [0]), ([0, 2, 1, 1], [0]), ([0, 1, 1, 2], [0]), ([0, 1, 1, 1], [3])):
        with pytest.raises(ValueError, match="`starts` must|`senders` must"):
            Topology.from_csc(starts, senders, num_nodes=3)
    topology = Topology.from_edges([1], [0], num_nodes=3)
    with pytest.raises(ValueError, match="`fan_out` must be at least 1"):
        sample_neighbors(jax.random.key(0), topology, jnp.array([0]), fan_out=0)
    with pytest.raises(TypeError, match=r"`seeds` must be int\[seeds\]"):
        sample_neighbors(jax.random.key(0), topology, jnp.array([0.0]), fan_out=1)
    with pytest.raises(ValueError, match="at least one hop"):
        sample_graph(jax.random.key(0), topology, jnp.array([0]), ())
