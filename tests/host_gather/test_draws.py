"""Draws of edges have the probabilities that they say, whatever the degrees and the weights: chi-square tests."""

import itertools
import time

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dejax import _native, host_gather
from dejax.host_gather import HostTable, Topology, _draws
from dejax.host_gather._weights import alias_tables
from tests.host_gather.test_sampling import chi_square

pytestmark = pytest.mark.skipif(
    _native.unavailable_reason() is not None, reason=f"no native extension: {_native.unavailable_reason()}"
)
sample_neighbors = jax.jit(host_gather.sample_neighbors, static_argnames=("fan_out", "replace", "max_degree"))
KEY = jax.random.key(11)


def star(degree: int, weights: np.ndarray | None = None, on_host: bool = False) -> Topology:
    """One node with `degree` incoming edges, of nodes 0 to degree - 1."""
    starts = np.concatenate([[0], np.full(degree, degree)])
    return Topology.from_csc(starts, np.arange(degree), num_nodes=degree, weights=weights, on_host=on_host)


def drawn(topology: Topology, seeds: int, fan_out: int, key: jax.Array = KEY, **options: object) -> np.ndarray:
    got = sample_neighbors(key, topology, jnp.zeros(seeds, jnp.int32), fan_out=fan_out, **options)
    assert np.asarray(got.mask).all()
    return np.asarray(got.senders)


def bound(degrees_of_freedom: int) -> float:
    """Of a statistic over its degrees of freedom that is exceeded once in 10^5 times or so."""
    return 1 + 4.5 * (2 / degrees_of_freedom) ** 0.5 + 14 / degrees_of_freedom


# ------------------------------------------------------------------------------------------------ uniform


@pytest.mark.sample(4)
@pytest.mark.parametrize("replace", [False, True])
@pytest.mark.parametrize("degree", [10_000_000, 16_777_217])
def test_every_edge_of_a_long_segment_can_be_drawn(degree: int, replace: bool) -> None:
    """Floats on a grid of 2^-23 leave numbers out, and hit others twice."""
    draws = drawn(star(degree), 20_000, 50, replace=replace).reshape(-1)
    assert draws.min() >= 0 and draws.max() < degree
    # Residues: a grid of 2^-23 favours some of each block of consecutive numbers.
    for modulus in (2, 3, 4, 7, 16):
        counts = np.bincount(draws % modulus, minlength=modulus)
        parts = np.bincount(np.arange(degree) % modulus, minlength=modulus) / degree
        assert chi_square(counts, parts) < bound(modulus - 1), modulus
    counts = np.bincount(draws * 50 // degree, minlength=50)
    assert chi_square(counts, np.full(50, 1 / 50)) < bound(49)
    # As many different numbers as independent draws give: with a grid there would be fewer.
    expected = degree * -np.expm1(-len(draws) / degree)
    assert abs(len(np.unique(draws)) - expected) < 6 * (len(draws) ** 2 / (2 * degree)) ** 0.5 + 10


@pytest.mark.parametrize("fan_out", [1, 2, 3, 6])
def test_all_subsets_are_equally_likely(fan_out: int) -> None:
    degree = 7
    draws = np.sort(drawn(star(degree), 30_000, fan_out), axis=1)
    subsets = {subset: k for k, subset in enumerate(itertools.combinations(range(degree), fan_out))}
    counts = np.bincount([subsets[tuple(row)] for row in draws.tolist()], minlength=len(subsets))
    assert chi_square(counts, np.full(len(subsets), 1 / len(subsets))) < bound(len(subsets) - 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("fan_out", [1, 2, 7, 25, 64, 65, 90])
def test_subsets_are_floyds(fan_out: int) -> None:
    """Against the loop that the paper has, draw for draw."""
    degree = np.random.default_rng(fan_out).integers(0, 3 * fan_out, 300).astype(np.int32)
    key = jax.random.key(fan_out)
    chosen, mask = map(np.asarray, _draws.draw_subset(key, jnp.asarray(degree), fan_out))
    last = degree[:, None] - fan_out + np.arange(fan_out, dtype=np.int32)
    draws = np.asarray(_draws.below(key, last.shape, jnp.asarray(last + 1)))
    for row in range(300):
        if degree[row] <= fan_out:
            assert chosen[row][mask[row]].tolist() == list(range(degree[row]))
            continue
        taken: list[int] = []
        for i in range(fan_out):
            taken.append(int(last[row, i] if draws[row, i] in taken else draws[row, i]))
        assert chosen[row].tolist() == taken and mask[row].all()


def test_both_ways_to_find_repeated_draws_agree() -> None:
    rows = jnp.asarray(np.random.default_rng(0).integers(0, 40, (50, 33)))
    np.testing.assert_array_equal(_draws.again_pairwise(rows), _draws.again_sorted(rows))


@pytest.mark.parametrize("fan_out", [25, 50, 200])
def test_compile_time_does_not_grow_with_the_fan_out(fan_out: int) -> None:
    topology = star(1000)
    sample = jax.jit(host_gather.sample_neighbors, static_argnames="fan_out")
    seeds = jnp.zeros(16, jnp.int32)
    start = time.process_time()
    sample.lower(KEY, topology, seeds, fan_out=fan_out).compile()
    assert time.process_time() - start < 4  # 1 s alone; a minute at 50 before


@pytest.mark.parametrize("fan_out", [65, 200])
def test_long_fan_outs_have_no_edge_twice(fan_out: int) -> None:
    draws = drawn(star(fan_out + 3), 500, fan_out)
    assert all(len(set(row)) == fan_out for row in draws.tolist())
    counts = np.bincount(draws.reshape(-1), minlength=fan_out + 3)
    assert np.abs(counts / 500 - fan_out / (fan_out + 3)).max() < 0.06


# ------------------------------------------------------------------------------------------------ by weight


def probabilities(starts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Those that alias tables give."""
    alias, _ = alias_tables(starts, weights)
    share = np.ascontiguousarray(alias[:, 0]).view(np.float32).astype(np.float64)
    counts = np.diff(starts)
    group, size = np.repeat(starts[:-1], counts), np.repeat(counts, counts)
    there = alias[:, 1] >= 0
    assert (alias[there, 1] < size[there]).all() and (share >= 0).all() and (share <= 1).all()
    found = np.where(there, share, 0) / size
    np.add.at(found, (group + alias[:, 1])[there], ((1 - share) / size)[there])
    return found


def assert_right(starts: np.ndarray, weights: np.ndarray) -> None:
    got, w = probabilities(starts, weights), weights.astype(np.longdouble)
    for begin, end in itertools.pairwise(starts):
        largest = w[begin:end].max(initial=0)
        want = w[begin:end] / (largest or 1)
        want = want / (want.sum() or 1)
        np.testing.assert_allclose(got[begin:end], want.astype(np.float64), rtol=3e-7, atol=1e-37)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 4), st.integers(0, 10**6))
def test_alias_tables_have_the_weights(counts: list[int], kind: int, seed: int) -> None:
    rng, starts = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(counts)])
    n = int(starts[-1])
    assert_right(starts, [
        rng.lognormal(0, 5, n), rng.integers(0, 3, n) * 1.0, rng.pareto(0.3, n), 10.0 ** rng.uniform(-30, 30, n),
        10.0 ** rng.uniform(-320, 308, n),
    ][kind])  # fmt: skip


def test_weights_that_float32_sums_lose() -> None:
    rng = np.random.default_rng(0)
    for weights in (
        np.array([1e8, 1, 1, 1]), np.array([1, 1, 1e20, 1]), np.array([1e308, 1e308, 1e-300, 5e-324]),
        rng.lognormal(0, 2, 100_000), 1.0 / np.arange(1, 100_001) ** 1.5, np.full(100_000, 0.1),
    ):  # fmt: skip
        assert_right(np.array([0, len(weights)]), weights)


def test_tables_made_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 12, 300))])
    weights = rng.lognormal(0, 3, starts[-1])
    whole = alias_tables(starts, weights)
    monkeypatch.setattr("dejax.host_gather._weights._BLOCK", 17)
    np.testing.assert_array_equal(whole[0][:, 1], alias_tables(starts, weights)[0][:, 1])
    np.testing.assert_array_equal(whole[1], alias_tables(starts, weights)[1])


@pytest.mark.parametrize("on_host", [False, True])
def test_skewed_weights_with_replacement(on_host: bool) -> None:
    # The last three together are drawn some 600 times, of a large one's 400,000.
    weights = np.array([1e3, 0.0, 1, 0.5, 1e-2])
    draws = drawn(star(5, weights, on_host), 40_000, 10, replace=True).reshape(-1)
    counts = np.bincount(draws, minlength=5)
    assert chi_square(counts, weights / weights.sum()) < bound(3)


def test_a_long_segment_of_lognormal_weights() -> None:
    rng = np.random.default_rng(0)
    weights = rng.lognormal(0, 2, 100_000)
    draws = drawn(star(100_000, weights), 40_000, 50, replace=True).reshape(-1)
    # By weight, in groups of about equal probability: those of small weights count as much as those of large ones.
    order = np.argsort(weights)
    total = np.cumsum(weights[order]) / weights.sum()
    group = np.empty(100_000, int)
    group[order] = np.minimum((total * 40).astype(int), 39)
    counts = np.bincount(group[draws], minlength=40)
    assert chi_square(counts, np.bincount(group, weights, 40) / weights.sum()) < bound(39)


def test_small_probabilities_are_not_rounded() -> None:
    p = jnp.array([0.0, 2.0**-40, 1e-3, 0.5, 1 - 2.0**-24, 1.0, 2.0**-32])
    hits = np.asarray(jax.jit(lambda k: _draws._happens(k, jnp.broadcast_to(p, (1 << 18, 7))))(KEY)).sum(0)
    assert hits[0] == 0 and hits[5] == 1 << 18 and hits[1] <= 1 and hits[6] <= 1 and (1 << 18) - hits[4] <= 3
    assert abs(hits[2] - 262.1) < 90 and abs(hits[3] - (1 << 17)) < 1500


@pytest.mark.parametrize("weights", [[1e8, 1, 1, 1], [1, 1e20, 1, 1], [1e-30, 1e30, 1, 1e-300], [5e-324, 1, 1e308, 3]])
def test_without_replacement_all_positive_weights_are_found(weights: list[float]) -> None:
    draws = drawn(star(4, np.array(weights)), 2000, 4, max_degree=4)
    assert (np.sort(draws, axis=1) == np.arange(4)).all()
    if weights[1] == 1e20:  # after the large one the others are equally likely
        counts = np.bincount(draws[:, 1], minlength=4)
        assert (draws[:, 0] == 1).all() and chi_square(counts[[0, 2, 3]], np.full(3, 1 / 3)) < bound(2)


@pytest.mark.sample(3)
@pytest.mark.parametrize("degree", [5, 70_000])
def test_pairs_without_replacement(degree: int) -> None:
    """The first and the second of two, where few edges have nearly all of the weight."""
    weights = np.full(degree, 1e-9)
    weights[:4] = [8, 4, 2, 1]
    draws = drawn(star(degree, weights), 20_000 if degree == 5 else 300, 2, max_degree=degree)
    assert draws.max() < 4
    p = weights[:4] / 15
    pairs = list(itertools.permutations(range(4), 2))
    counts = np.bincount([pairs.index((a, b)) for a, b in draws.tolist()], minlength=12)
    assert chi_square(counts, np.array([p[a] * p[b] / (1 - p[a]) for a, b in pairs])) < bound(11)


def test_running_sums_are_taken_for_weights() -> None:
    starts, weights = np.array([0, 3, 3, 5]), np.array([1.0, 0.0, 3.0, 2.0, 2.0])
    sums = np.array([1, 1, 4, 2, 4], np.float32)
    by_sums = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), sums, num_nodes=3)
    by_weights = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), weights=weights, num_nodes=3)
    jax.tree.map(np.testing.assert_array_equal, by_sums, by_weights)
    on_host = Topology.from_csc(starts, np.array([0, 1, 2, 0, 1]), HostTable.from_numpy(sums), num_nodes=3)
    jax.tree.map(np.testing.assert_array_equal, on_host, by_weights)


def test_weights_that_are_none() -> None:
    for wrong in ([1.0], [1.0, -1.0], [1.0, np.nan], [np.inf, 1.0]):
        with pytest.raises(ValueError, match="finite and not negative, one for each edge"):
            Topology.from_csc([0, 2], [0, 0], weights=wrong, num_nodes=1)
    with pytest.raises(ValueError, match="not both"):
        Topology.from_csc([0, 1], [0], [1.0], weights=[1.0], num_nodes=1)
    with pytest.raises(TypeError, match="outside of jitted functions"):
        jax.jit(lambda w: Topology.from_csc([0, 1], [0], weights=w, num_nodes=1).starts)(jnp.ones(1))
