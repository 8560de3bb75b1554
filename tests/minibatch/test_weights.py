"""Alias tables give each edge the probability of its weight."""

import itertools

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from dejax.minibatch.topology._weights import alias_tables


def probabilities(starts: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """The probabilities that alias tables give to edges."""
    alias, _ = alias_tables(starts, weights)
    share = np.ascontiguousarray(alias[:, 0]).view(np.float32).astype(np.float64)
    counts = np.diff(starts)
    group, size = np.repeat(starts[:-1], counts), np.repeat(counts, counts)
    there = alias[:, 1] >= 0
    assert (alias[there, 1] < size[there]).all() and (share >= 0).all() and (share <= 1).all()
    found = np.where(there, share, 0) / size
    np.add.at(found, (group + alias[:, 1])[there], ((1 - share) / size)[there])
    return found


def assert_probabilities(starts: np.ndarray, weights: np.ndarray) -> None:
    got, w = probabilities(starts, weights), weights.astype(np.longdouble)
    for begin, end in itertools.pairwise(starts):
        largest = w[begin:end].max(initial=0)
        want = w[begin:end] / (largest or 1)
        want = want / (want.sum() or 1)
        np.testing.assert_allclose(got[begin:end], want.astype(np.float64), rtol=3e-7, atol=1e-37)


@settings(max_examples=100)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.integers(0, 4), st.integers(0, 10**6))
def test_probabilities_are_proportional_to_weights(counts: list[int], kind: int, seed: int) -> None:
    rng, starts = np.random.default_rng(seed), np.concatenate([[0], np.cumsum(counts)])
    n = int(starts[-1])
    assert_probabilities(starts, [
        rng.lognormal(0, 5, n), rng.integers(0, 3, n) * 1.0, rng.pareto(0.3, n), 10.0 ** rng.uniform(-30, 30, n),
        10.0 ** rng.uniform(-320, 308, n),
    ][kind])  # fmt: skip


def test_weights_that_float32_sums_lose() -> None:
    rng = np.random.default_rng(0)
    for weights in (
        np.array([1e8, 1, 1, 1]), np.array([1, 1, 1e20, 1]), np.array([1e308, 1e308, 1e-300, 5e-324]),
        rng.lognormal(0, 2, 100_000), 1.0 / np.arange(1, 100_001) ** 1.5, np.full(100_000, 0.1),
    ):  # fmt: skip
        assert_probabilities(np.array([0, len(weights)]), weights)


def test_tables_computed_in_blocks_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(rng.integers(0, 12, 300))])
    weights = rng.lognormal(0, 3, starts[-1])
    whole = alias_tables(starts, weights)
    monkeypatch.setattr("dejax.minibatch.topology._weights._BLOCK", 17)
    np.testing.assert_array_equal(whole[0][:, 1], alias_tables(starts, weights)[0][:, 1])
    np.testing.assert_array_equal(whole[1], alias_tables(starts, weights)[1])
