"""The CPU sampler that peers of mini-batch steps use: its edges are the graph's, and each node has enough of them."""

import shutil

import numpy as np
import pytest

from benchmarks.peers.hetero_sampler import HeteroSampler, compiled

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
REV = ("paper", "rev_writes", "author")
COUNTS = {"author": 30, "paper": 50}


def lists(seed=0):
    rng = np.random.default_rng(seed)
    found = {}
    for relation, edges in ((WRITES, 200), (CITES, 300), (REV, 200)):
        receivers = np.sort((COUNTS[relation[2]] * rng.random(edges) ** 2).astype(int))
        starts = np.searchsorted(receivers, np.arange(COUNTS[relation[2]] + 1)).astype(np.int32)
        found[relation] = starts, rng.integers(0, COUNTS[relation[0]], edges).astype(np.int32)
    return found


def test_samples_and_rows():
    csc = lists()
    fan_outs = [{WRITES: 3, CITES: 4}, {WRITES: 2, CITES: 2, REV: 3}]
    sampler = HeteroSampler(csc, COUNTS, fan_outs, compiled())
    edges = {relation: np.zeros((2, 1000), np.int64) for relation in csc}
    seeds = np.array([5, 49, 0, 7], np.int32)
    for key in range(3):  # tables of numbers are left as they were
        sample = sampler("paper", seeds, edges, key)
        assert sample.nodes["paper"][:4].tolist() == seeds.tolist()
        for kind, ids in sample.nodes.items():
            assert len(set(ids.tolist())) == len(ids) <= COUNTS[kind]
        for number, (relation, (starts, senders)) in enumerate(csc.items()):
            begin = 0
            for hop in range(2):
                end = sample.edge_counts[hop, number]
                own = edges[relation][:, begin:end]
                first = 0 if hop == 0 else sample.node_counts[hop - 1, list(COUNTS).index(relation[2])]
                last = sample.node_counts[hop, list(COUNTS).index(relation[2])]
                for row in range(first, last):
                    node = sample.nodes[relation[2]][row]
                    drawn = sample.nodes[relation[0]][own[0, own[1] == row]]
                    neighbours = senders[starts[node] : starts[node + 1]].tolist()
                    assert len(drawn) == min(fan_outs[hop].get(relation, 0), len(neighbours))
                    assert all(drawn.tolist().count(n) <= neighbours.count(n) for n in drawn)
                begin = end
    table = np.random.default_rng(1).standard_normal((COUNTS["paper"], 6), np.float32)
    out = np.zeros((60, 6), np.float32)
    ids = np.ascontiguousarray(sample.nodes["paper"])
    sampler.gather(table, ids, out)
    np.testing.assert_array_equal(out[: len(ids)], table[ids])


def test_a_lack_of_room_is_an_error():
    csc = lists()
    sampler = HeteroSampler(csc, COUNTS, [{CITES: 4}], compiled())
    edges = {relation: np.zeros((2, 3), np.int64) for relation in csc}
    with pytest.raises(ValueError, match="room"):
        sampler("paper", np.arange(10, dtype=np.int32), edges, 0)
