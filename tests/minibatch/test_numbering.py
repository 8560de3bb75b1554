"""Local numbers of several types by one sort are those that each type gets alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather._numbering import number_by_sort
from dejax.minibatch._numbering import Nodes, Places, number_found, number_seeds


@pytest.mark.parametrize("scale", [1, 2**29])  # beyond 2^31 nodes type and node are two sort keys
def test_types_are_numbered_together_as_each_alone(scale):
    rng = np.random.default_rng(0)
    counts, known_sizes, found_sizes = (20, 1000, 3), (5, 6, 2), (30, 24, 5)
    for sizes in ((35, 24, 5), (4, 24, 5), (0, 0, 0)):
        known, found = [], []
        for count, known_size, found_size in zip(counts, known_sizes, found_sizes, strict=True):
            own = np.where(rng.random(known_size) < 0.7, rng.permutation(max(count, known_size))[:known_size], -1)
            known.append(np.where(own < count, own, -1))
            found.append(rng.integers(-1, count, found_size))
        types = [np.repeat(np.arange(3, dtype=np.int32), n) for n in (known_sizes, found_sizes)]
        first = np.sum(known_sizes) + np.concatenate([[0], np.cumsum(sizes)[:-1]])
        places = Places(tuple(scale * count for count in counts), tuple(map(int, first)), sizes)
        before, some = (jnp.asarray(np.concatenate(nodes), jnp.int32) for nodes in (known, found))
        after, numbers, new = number_found(Nodes(before, types[0]), Nodes(some, types[1]), places)
        known_first, found_first = (np.concatenate([[0], np.cumsum(n)]) for n in (known_sizes, found_sizes))
        for t in range(3):
            limit = known_sizes[t] + sizes[t]
            want = number_by_sort(jnp.asarray(known[t], jnp.int32), jnp.asarray(found[t], jnp.int32), limit, counts[t])
            grown = np.concatenate([known[t], after.nodes[first[t] : first[t] + sizes[t]]])
            np.testing.assert_array_equal(grown, want[0])
            assert int(new[t]) == int(want[2]) - known_sizes[t]
            local = np.asarray(want[1])
            old = local < known_sizes[t]
            all_ = np.where(old, local + known_first[t], local - known_sizes[t] + first[t])
            all_ = np.where((local >= 0) & (local < limit), all_, -1)
            np.testing.assert_array_equal(numbers[found_first[t] : found_first[t + 1]], all_)
        np.testing.assert_array_equal(after.types[: len(types[0])], types[0])


def test_equal_seeds_share_the_number_of_the_first():
    nodes, numbers = number_seeds(jnp.array([3, 9, 3, -1, -1, 12, 9]), 10)
    np.testing.assert_array_equal(nodes, [3, 9, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(numbers, [0, 1, 0, 3, 4, 5, 1])
