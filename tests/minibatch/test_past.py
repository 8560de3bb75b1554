"""`past_edges` counts what a temporal sampler could draw."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch import HeteroTopology
from dejax.minibatch.sampling.past import past_edges


@pytest.mark.parametrize("on_host", [False, True])
def test_counts_and_last_times_are_those_of_the_edge_lists(on_host):
    rng = np.random.default_rng(0)
    edges, times = {}, {}
    for number, count in enumerate((0, 7, 400)):
        relation = ("b", f"r{number}", "a")
        edges[relation] = rng.integers(0, 9, count), rng.integers(0, 6, count)
        times[relation] = rng.integers(-50, 50, count)
    topology = HeteroTopology.from_edges(edges, {"a": 7, "b": 9}, times=times, on_host=on_host)
    nodes = np.array([0, 3, -1, 6, 5, 3])
    limits = np.stack([np.full(6, 60), rng.integers(-60, 60, 6), np.full(6, -60)])[[0, 1, 2]].astype(np.int32)
    counts, last = past_edges(topology, [2, 0, 1], jnp.asarray(nodes), jnp.asarray(limits))
    assert counts.shape == (3, 3, 6) and last.shape == (3, 6)
    for n, relation in enumerate([("b", "r2", "a"), ("b", "r0", "a"), ("b", "r1", "a")]):
        for at, node in enumerate(nodes):
            own = times[relation][edges[relation][1] == node]
            for k in range(3):
                assert counts[n, k, at] == (own <= limits[k, at]).sum()
            assert last[n, at] == max(own[own <= limits[0, at]], default=np.iinfo(np.int32).min)
