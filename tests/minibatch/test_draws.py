"""Draws of edges have the documented probabilities for all degrees and weights: chi-square tests."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch.sampling import _drawing, _draws
from dejax.minibatch.topology._weights import alias_tables
from dejax.minibatch.topology.hetero_topology import EdgeLists, EdgeWeights

KEY = jax.random.key(11)


@functools.partial(jax.jit, static_argnums=3)
def _positions(key, degree, weights, draw):
    """Draws of `draw.last` receivers, each of which has the same `degree` edges."""
    bits = jax.random.bits(key, (2, draw.slots), jnp.uint32)
    start, degrees = jnp.zeros(draw.last, jnp.int32), jnp.full(draw.last, degree, jnp.int32)
    lists = EdgeLists(start, start, None, weights)
    return _drawing._draw(_drawing.Randomness(key, bits), lists, start, degrees, draw)


def drawn(degree, receivers, fan_out, kind="subset", weights=None, key=KEY):
    tables = None if weights is None else EdgeWeights(*map(jnp.asarray, alias_tables(np.array([0, degree]), weights)))
    draw = _drawing.Draw(0, kind, degree, fan_out, 0, receivers)
    chosen, mask = map(np.asarray, _positions(key, degree, tables, draw))
    assert mask.all()
    return chosen


def bound(degrees_of_freedom):
    """A bound on chi-square over its degrees of freedom that is exceeded about once in 10^5 times."""
    return 1 + 4.5 * (2 / degrees_of_freedom) ** 0.5 + 14 / degrees_of_freedom


def chi_square(counts, probabilities):
    """The statistic over its degrees of freedom: about 1 where the counts follow the probabilities."""
    used = probabilities > 0
    assert not counts[~used].any()
    expected = counts.sum() * probabilities[used]
    return float(((counts[used] - expected) ** 2 / expected).sum() / max(1, used.sum() - 1))


# ------------------------------------------------------------------------------------------------ uniform


@pytest.mark.parametrize(
    ("degree", "kind"),
    [
        (10_000_000, "subset"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in itertools.product((16_777_217, 10**7), ("any",))),
        pytest.param(16_777_217, "subset", marks=pytest.mark.slow),
    ],
)
def test_every_edge_of_a_long_segment_can_be_drawn(degree, kind):
    """Draws by floats, which are multiples of 2^-23, would miss some edges and draw others twice as often."""
    draws = drawn(degree, 6_000, 50, kind).reshape(-1)
    assert draws.min() >= 0 and draws.max() < degree
    # By residues: a grid of 2^-23 favours some edges of each block of consecutive ones.
    for modulus in (2, 3, 4, 7, 16):
        counts = np.bincount(draws % modulus, minlength=modulus)
        parts = np.bincount(np.arange(degree) % modulus, minlength=modulus) / degree
        assert chi_square(counts, parts) < bound(modulus - 1), modulus
    counts = np.bincount(draws * 50 // degree, minlength=50)
    assert chi_square(counts, np.full(50, 1 / 50)) < bound(49)
    # As many different edges as independent draws give. With a grid there would be fewer.
    expected = degree * -np.expm1(-len(draws) / degree)
    assert abs(len(np.unique(draws)) - expected) < 6 * (len(draws) ** 2 / (2 * degree)) ** 0.5 + 10


@pytest.mark.parametrize("fan_out", [1, 6])
def test_all_subsets_are_equally_likely(fan_out):
    degree = 7
    draws = np.sort(drawn(degree, 30_000, fan_out), axis=1)
    subsets = {subset: k for k, subset in enumerate(itertools.combinations(range(degree), fan_out))}
    counts = np.bincount([subsets[tuple(row)] for row in draws.tolist()], minlength=len(subsets))
    assert chi_square(counts, np.full(len(subsets), 1 / len(subsets))) < bound(len(subsets) - 1)


# In turn, all pairs, and by sorting; each at the last fan-out that takes this way.
@pytest.mark.parametrize("fan_out", [1, 8, 9, 64, 65])
def test_subsets_follow_floyds_loop(fan_out):
    """Against the loop of the algorithm, draw by draw."""
    rng = np.random.default_rng(fan_out)
    degree = rng.integers(0, 3 * fan_out, 300).astype(np.int32)
    last = degree[:, None] - fan_out + np.arange(fan_out, dtype=np.int32)
    draws = rng.integers(0, np.maximum(last + 1, 1)).astype(np.int32)
    chosen, mask = map(np.asarray, jax.jit(_draws.subset_of)(draws, degree))
    for row in range(300):
        if degree[row] <= fan_out:
            assert chosen[row][mask[row]].tolist() == list(range(degree[row]))
            continue
        taken: list[int] = []
        for i in range(fan_out):
            taken.append(int(last[row, i] if draws[row, i] in taken else draws[row, i]))
        assert chosen[row].tolist() == taken and mask[row].all()


def test_the_program_does_not_grow_with_the_fan_out():
    """A loop over draws took a minute to compile at 50."""
    lines = [
        jax.jit(_draws.subset_of).lower(jax.ShapeDtypeStruct((16, n), "int32"), jnp.ones(16, jnp.int32)).as_text()
        for n in (16, 64, 400)
    ]
    assert max(text.count("\n") for text in lines) < 400


# ------------------------------------------------------------------------------------------------ by weight


def test_skewed_weights_with_replacement():
    # The three light edges together are drawn about 600 times, the heavy one 400,000 times.
    weights = np.array([1e3, 0.0, 1, 0.5, 1e-2])
    counts = np.bincount(drawn(5, 40_000, 10, "by weight", weights).reshape(-1), minlength=5)
    assert chi_square(counts, weights / weights.sum()) < bound(3)


@pytest.mark.slow
def test_a_long_segment_of_lognormal_weights():
    weights = np.random.default_rng(0).lognormal(0, 2, 100_000)
    draws = drawn(100_000, 10_000, 50, "by weight", weights).reshape(-1)
    # Edges are counted in groups of equal probability, by weight: light edges count as much as heavy ones.
    order = np.argsort(weights)
    total = np.cumsum(weights[order]) / weights.sum()
    group = np.empty(100_000, int)
    group[order] = np.minimum((total * 40).astype(int), 39)
    counts = np.bincount(group[draws], minlength=40)
    assert chi_square(counts, np.bincount(group, weights, 40) / weights.sum()) < bound(39)


def test_small_probabilities_are_not_rounded():
    p = jnp.array([0.0, 2.0**-40, 1e-3, 0.5, 1 - 2.0**-24, 1.0, 2.0**-32])
    hits = np.asarray(jax.jit(lambda k: _draws._happens(k, jnp.broadcast_to(p, (1 << 18, 7))))(KEY)).sum(0)
    assert hits[0] == 0 and hits[5] == 1 << 18 and hits[1] <= 1 and hits[6] <= 1 and (1 << 18) - hits[4] <= 3
    assert abs(hits[2] - 262.1) < 90 and abs(hits[3] - (1 << 17)) < 1500


def test_without_replacement_all_positive_weights_are_found():
    for weights in ([1e8, 1, 1, 1], [1, 1e20, 1, 1], [1e-30, 1e30, 1, 1e-300], [5e-324, 1, 1e308, 3]):
        draws = drawn(4, 2000, 4, "keys", np.array(weights))
        assert (np.sort(draws, axis=1) == np.arange(4)).all()
        if weights[1] == 1e20:  # after the heavy edge the others are equally likely
            counts = np.bincount(draws[:, 1], minlength=4)
            assert (draws[:, 0] == 1).all() and chi_square(counts[[0, 2, 3]], np.full(3, 1 / 3)) < bound(2)


@pytest.mark.parametrize("degree", [5, pytest.param(70_000, marks=pytest.mark.slow)])
def test_pairs_without_replacement(degree):
    """The first and the second of two draws, where four edges have nearly all of the weight."""
    weights = np.full(degree, 1e-9)
    weights[:4] = [8, 4, 2, 1]
    draws = drawn(degree, 20_000 if degree == 5 else 300, 2, "keys", weights)
    assert draws.max() < 4
    p = weights[:4] / 15
    pairs = list(itertools.permutations(range(4), 2))
    counts = np.bincount([pairs.index((a, b)) for a, b in draws.tolist()], minlength=12)
    assert chi_square(counts, np.array([p[a] * p[b] / (1 - p[a]) for a, b in pairs])) < bound(11)
