"""Operators by name, on a case that can be computed by hand."""

import jax.numpy as jnp
import numpy as np

from dejax import segment

IDS = jnp.array([2, 0, 2, 0])
DATA = jnp.array([1.0, 2.0, 5.0, 4.0])  # segment 0: 2, 4; segment 1: nothing; segment 2: 1, 5


def test_reductions() -> None:
    np.testing.assert_allclose(segment.segment_mean(DATA, IDS, 3), [3, 0, 3])
    np.testing.assert_allclose(segment.segment_variance(DATA, IDS, 3), [1, 0, 4])
    np.testing.assert_allclose(segment.segment_max_or_constant(DATA, IDS, 3, constant=-7.0), [4, -7, 5])
    np.testing.assert_allclose(segment.segment_min_or_constant(DATA, IDS, 3, constant=-7.0), [2, -7, 1])


def test_normalized_segments_have_mean_0_and_variance_1() -> None:
    found = segment.segment_normalize(DATA, IDS, 3, eps=0.0)
    np.testing.assert_allclose(found, [-1, -1, 1, 1], rtol=1e-5)


def test_plans() -> None:
    made = segment.plan(IDS, 3)
    assert isinstance(made, segment.SegmentPlan) and made.num_segments == 3
    np.testing.assert_allclose(segment.segment_mean(DATA, made), [3, 0, 3])
    edges = segment.edge_plan(jnp.array([0, 1, 1]), jnp.array([2, 2, 0]), 3)
    assert isinstance(edges, segment.EdgePlan) and isinstance(edges.by_receiver, segment.SegmentPlan)


def test_minimum_of_gathered_rows() -> None:
    rows = jnp.array([[3.0], [5.0], [7.0]])
    found = segment.gather_segment_min(rows, jnp.array([0, 1, 1]), jnp.array([2, 2, 0]), 3)
    np.testing.assert_allclose(found[:, 0], [5, np.inf, 3])
