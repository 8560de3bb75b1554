"""Numbers of found nodes: by a table and by a sort as numpy gives them, for one type and for several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch.sampling import _numbering
from dejax.minibatch.sampling._numbering import Nodes, NumberRanges, number_seeds


def as_numpy_says(known, found, places):
    """`number_found` in numpy; `known` and `found` are (nodes, types)."""
    numbers = np.full(len(found[0]), -1)
    after, counts = [known[0]], []
    for t, (first, size) in enumerate(zip(places.first, places.sizes, strict=True)):
        before = {int(n): at for at, (n, kind) in enumerate(zip(*known, strict=True)) if kind == t and n >= 0}
        new = [n for n in np.unique(found[0][found[1] == t]).tolist() if n >= 0 and n not in before]
        number = before | {n: first + at for at, n in enumerate(new[:size])}
        here = found[1] == t
        numbers[here] = [number.get(n, -1) for n in found[0][here].tolist()]
        after.append(np.array(new[:size] + [-1] * (size - len(new[:size])), int))
        counts.append(len(new))
    return np.concatenate(after), numbers, np.array(counts)


@pytest.mark.parametrize(
    ("how", "counts"), [("by_table", (50,)), ("by_sort", (50,)), ("by_sort", (20, 1000, 3)), ("by_sort", (2**30,) * 3)]
)
def test_new_nodes_follow_by_type_and_node(how, counts):
    """Beyond 2^31 nodes, type and node are two keys of the sort."""
    rng = np.random.default_rng(0)
    types = range(len(counts))
    known_sizes, found_sizes = (5, 6, 2)[: len(counts)], (90, 24, 5)[: len(counts)]
    for sizes in ((35, 24, 5), (4, 24, 5), (0, 0, 0)):
        sizes = sizes[: len(counts)]
        known, found = [], []
        for count, known_size, found_size in zip(counts, known_sizes, found_sizes, strict=True):
            own = rng.choice(min(count, 40), known_size, replace=False) if count > known_size else np.arange(known_size)
            known.append(np.where((rng.random(known_size) < 0.7) & (own < count), own, -1))
            found.append(rng.integers(-1, min(count, 60), found_size))
        kinds = [np.repeat(np.array(types, np.int32), n) for n in (known_sizes, found_sizes)]
        first = sum(known_sizes) + np.cumsum([0, *sizes])[:-1]
        places = NumberRanges(counts, tuple(map(int, first)), sizes)
        before, some = (np.concatenate(nodes).astype(np.int32) for nodes in (known, found))

        @jax.jit
        def run(before, some, kinds=kinds, places=places):
            after, *numbers = getattr(_numbering, how)(Nodes(before, kinds[0]), Nodes(some, kinds[1]), places)
            return after.nodes, *numbers

        want = as_numpy_says((before, kinds[0]), (some, kinds[1]), places)
        jax.tree.map(np.testing.assert_array_equal, run(before, some), want)


def test_equal_seeds_share_the_number_of_the_first():
    nodes, numbers = number_seeds(jnp.array([3, 9, 3, -1, -1, 12, 9]), 10)
    np.testing.assert_array_equal(nodes, [3, 9, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(numbers, [0, 1, 0, 3, 4, 5, 1])
