"""Local numbers of several types by one sort are those that each type gets alone."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.host_gather._numbering import number_by_sort, number_nodes
from dejax.minibatch._numbering import Numbers, number_seeds, number_together

pytestmark = pytest.mark.newest_jax


def test_types_are_numbered_together_as_each_alone():
    rng = np.random.default_rng(0)
    for limits in ((40, 30, 7), (9, 30, 7), (5, 6, 2)):
        types = []
        for count, known, found, limit in zip((20, 1000, 3), (5, 6, 2), (30, 24, 5), limits, strict=True):
            own = np.where(rng.random(known) < 0.7, rng.permutation(max(count, known))[:known], -1)
            own = np.where(own < count, own, -1)
            nodes = rng.integers(-1, count, found)
            types.append(Numbers(jnp.asarray(own, jnp.int32), jnp.asarray(nodes, jnp.int32), limit, count))
        for some, got in zip(types, number_together(types), strict=True):
            for want in (number_nodes, number_by_sort):
                expected = list(want(some.known, some.found, some.limit, some.count))
                if want is number_by_sort:
                    expected[1] = jnp.where(expected[1] < some.limit, expected[1], -1)
                    expected[2] = jnp.maximum(expected[2] - some.limit, 0)
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_array_equal(a, b)


def test_equal_seeds_share_the_number_of_the_first():
    nodes, numbers = number_seeds(jnp.array([3, 9, 3, -1, -1, 12, 9]), 10)
    np.testing.assert_array_equal(nodes, [3, 9, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(numbers, [0, 1, 0, 3, 4, 5, 1])
