"""A small heterogeneous graph with self loops, parallel edges, an empty relation and a type without edges."""

import jax
import jax.numpy as jnp
import numpy as np
from scipy.special import chdtrc

from dejax.minibatch import HeteroTopology, edge_ids, sample_blocks

WRITES, REV = ("author", "writes", "paper"), ("paper", "rev_writes", "author")
CITES, LIKES = ("paper", "cites", "paper"), ("author", "likes", "author")
COUNTS = {"author": 9, "lonely": 4, "paper": 13}


def edge_lists(edges=40, seed=0):
    rng = np.random.default_rng(seed)
    author, paper = rng.integers(0, 9, edges), rng.integers(0, 13, edges)
    cited, citing = rng.integers(0, 13, edges), rng.integers(0, 13, edges)
    cited[:3] = citing[:3]  # self loops
    cited[3:5], citing[3:5] = cited[3], citing[3]  # parallel edges
    return {WRITES: (author, paper), CITES: (cited, citing), LIKES: ([], []), REV: (paper, author)}


def topology_of(edges=None, **keywords):
    return HeteroTopology.from_edges(edge_lists() if edges is None else edges, COUNTS, **keywords)


def timed(edges=60, seed=3):
    lists = edge_lists(edges, seed)
    rng = np.random.default_rng(seed)
    return lists, {kind: rng.integers(0, 100, len(lists[kind][0])) for kind in lists}


def neighbours(edges, edge_type, node):
    senders, receivers = (np.asarray(ids) for ids in edges[edge_type])
    return [(int(senders[e]), node, int(e)) for e in np.flatnonzero(receivers == node)]


def jitted(topology, seeds, fan_outs, key=None, **keywords):
    """`sample_blocks` inside jit, with the topology as an argument."""
    seeds = {seeds[0]: seeds[1]} if isinstance(seeds, tuple) else seeds
    traced = {name: keywords.pop(name) for name in ("exclude", "seed_times") if name in keywords}
    key = jax.random.key(0) if key is None else key
    run = jax.jit(
        lambda key, topology, seeds, traced: sample_blocks(key, topology, seeds, fan_outs, **traced, **keywords)
    )
    return run(key, topology, jax.tree.map(jnp.asarray, seeds, is_leaf=lambda leaf: isinstance(leaf, list)), traced)


@jax.jit
def ids_and_senders(topology, sample):
    """The places of a sample's edges in the lists that the topology was made from, and their senders, by piece."""
    return edge_ids(topology, sample), sample.senders


def p_value(counts, share):
    """Of the hypothesis that the counts are in proportion to the shares."""
    expected = counts.sum() * share / share.sum()
    return chdtrc(counts.size - 1, ((counts - expected) ** 2 / expected).sum())


def sampled_edges(sample):
    """The sampled edges by relation, in the graph's node numbers: {edge type: [(sender, receiver, position)]}."""
    found = {edge_type: [] for edge_type in sample.layout.edge_types}
    layout = sample.layout
    of_pieces = jax.jit(lambda sample: (sample.senders, sample.edges))(sample)
    for piece, senders, edges in zip(layout.pieces, *of_pieces, strict=True):
        edge_type = layout.edge_types[piece.relation]
        source = np.asarray(sample.node_ids[edge_type[0]])
        target = np.asarray(sample.node_ids[edge_type[2]])
        first = layout.first(piece.hop, piece.target)
        for row, (some, positions) in enumerate(zip(np.asarray(senders), np.asarray(edges), strict=True)):
            for sender, position in zip(some, positions, strict=True):
                assert (sender >= 0) == (position >= 0)
                if sender >= 0:
                    assert source[sender] >= 0 and target[first + row] >= 0
                    found[edge_type].append((int(source[sender]), int(target[first + row]), int(position)))
    return found
