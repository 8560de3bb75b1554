"""Empty arrays, entries of no segment, narrow ids, many ties: operators follow their definitions there, too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from tests.segment.test_reductions import BACKENDS

pytestmark = [pytest.mark.newest_jax, pytest.mark.sample(3)]
NONE = jnp.zeros(0, jnp.int32)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("operator", [segment.gather_segment_sum, segment.gather_segment_max])
def test_scales_of_no_edges(operator, backend):
    def total(x, scale):
        return operator(x, NONE, NONE, 3, scale, backend=backend)

    x, scale = jnp.ones((3, 2)), jnp.zeros(0)
    assert total(x, scale).shape == (3, 2)
    gradients = jax.grad(lambda *a: total(*a).sum(), argnums=(0, 1))(x, scale)
    assert [g.shape for g in gradients] == [(3, 2), (0,)]
    assert not gradients[0].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_of_nothing(backend):
    def total(data, ids, count):
        return jax.vmap(lambda d: segment.segment_sum(d, ids, count, backend=backend))(data)

    assert total(jnp.ones((4, 2, 3)), jnp.arange(2), 0).shape == (4, 0, 3)
    np.testing.assert_array_equal(total(jnp.ones((4, 0, 3)), NONE, 2), np.zeros((4, 2, 3)))
    assert jax.grad(lambda x: segment.gather(x, jnp.arange(2), backend=backend).sum())(jnp.ones((0, 3))).shape == (0, 3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dropped", [1000.0, np.inf, np.nan])
@pytest.mark.parametrize("operator", [segment.segment_softmax, segment.segment_logsumexp])
def test_gradients_do_not_see_dropped_entries(operator, dropped, backend):
    def loss(x):
        return (operator(x, jnp.array([0, 0, 5]), 2, backend=backend)[:1] ** 2).sum()

    got = jax.grad(loss)(jnp.array([1.0, 2.0, dropped]))
    np.testing.assert_array_equal(got, jax.grad(loss)(jnp.array([1.0, 2.0, 0.0])))
    assert np.isfinite(got).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_of_a_dropped_edge(backend):
    senders, receivers, scale = jnp.array([0, 7, 1]), jnp.array([0, 0, 1]), jnp.array([1.0, jnp.inf, 1.0])
    got = segment.gather_segment_sum(jnp.array([1.0, 2.0]), senders, receivers, 2, scale, True, backend=backend)
    np.testing.assert_array_equal(got, [1, 2])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["uint8", "int8"])
def test_ids_of_eight_bits_are_clipped(dtype, backend):
    """The number of segments is none of their dtype."""
    ids = np.array([0, 100, 127, -1]).astype(dtype)
    got = segment.segment_sum(jnp.ones(4), jnp.asarray(ids), 300, mode="clip", backend=backend)
    np.testing.assert_array_equal(got, np.bincount(np.clip(ids.astype(int), 0, 299), minlength=300))


@pytest.mark.parametrize("backend", BACKENDS)
def test_plans_are_not_clipped(backend):
    plan = segment.plan(jnp.array([-1, 0, 5]), 3, backend=backend)
    with pytest.raises(ValueError, match="'clip' with a plan"):
        segment.segment_sum(jnp.ones(3), plan, mode="clip", backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integer_scales_of_a_maximum_have_no_tangent(backend):
    def loss(x):
        ids = jnp.array([0, 1])
        return segment.gather_segment_max(x, ids, ids * 0, 1, jnp.array([2, 3]), backend=backend).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([1.0, 2.0])), [0, 3])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_more_ties_than_sixteen_bits_count(dtype, backend):
    count = 3000
    ids = jnp.zeros(count, jnp.int32)
    got = jax.grad(lambda x: segment.segment_max(x, ids, 1, backend=backend).sum())(jnp.ones(count, dtype))
    np.testing.assert_array_equal(got, jnp.full(count, 1 / count, dtype))
    x = jnp.ones(1, dtype)
    gathered = jax.grad(lambda s: segment.gather_segment_max(x, ids, ids, 1, s, backend=backend).sum())
    np.testing.assert_array_equal(gathered(jnp.ones(count, dtype)), jnp.full(count, 1 / count, dtype))
