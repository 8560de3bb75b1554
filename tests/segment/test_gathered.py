"""Reductions of gathered rows: those of the stored messages, with the same gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from tests.segment.references import BACKENDS, RECEIVERS, SCALES, check_gathered, edges, gathered, gathered_reference

KINDS = ("sum", "mean", "max", "min")
# test_contract.py has a sum with a scale for each head.
QUICK = ("mean", "none", "sorted")
SIXTEEN_BITS = [("max", "float16"), ("sum", "bfloat16"), ("sum", "float16")]


@pytest.mark.parametrize(
    ("kind", "scale", "order"),
    [
        pytest.param(*case, marks=() if case == QUICK else pytest.mark.slow)
        for case in itertools.product(KINDS, SCALES, ["unsorted", "sorted", "plan"])
    ],
)
def test_kernels(kind, scale, order):
    check_gathered(kind, scale, "pallas", order)


@pytest.mark.parametrize(("kind", "scale"), [*zip(KINDS, list(SCALES)[1:], strict=True), ("sum", "none")])
def test_values_and_gradients_on_xla(kind, scale):
    check_gathered(kind, scale, "xla")


@pytest.mark.parametrize(
    ("kind", "dtype"), [("max", "bfloat16"), *(pytest.param(*case, marks=pytest.mark.slow) for case in SIXTEEN_BITS)]
)
def test_sixteen_bits_round_once(kind, dtype):
    x, senders, receivers, scales = edges(dtype=dtype)
    exact, _ = gathered_reference(kind, x, senders, receivers, scales)
    found = gathered(kind, x, senders, receivers, scales)
    assert found.dtype == x.dtype
    one_rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=one_rounding, atol=1e-5)


@pytest.mark.slow
def test_maxima_of_sixteen_bits_are_found_again_for_gradients():
    x, senders, receivers, scales = edges(dtype="bfloat16")
    found, pull = jax.vjp(lambda x: gathered("max", x, senders, receivers, scales), x)
    assert float(jnp.abs(pull(found)[0]).max()) > 0


@pytest.mark.parametrize(
    ("axes", "scale"),
    [
        pytest.param(axes, scale, marks=() if (axes, scale) == ((1, 1), "head") else pytest.mark.slow)
        for axes in [(1, None), (1, 1), (None, 1)]
        for scale in ("edge", "head")
    ],
)
def test_vmap(axes, scale):
    x, senders, receivers, scales = edges(scale)
    xs = [x, x + 1] if axes[0] else [x, x]
    by = [scales, scales * 2] if axes[1] else [scales, scales]
    arguments = (jnp.stack(xs, 1) if axes[0] else x, jnp.stack(by, 1) if axes[1] else scales)
    found = jax.vmap(lambda x, s: gathered("sum", x, senders, receivers, s), axes)(*arguments)
    want = [gathered_reference("sum", x, senders, receivers, s)[0] for x, s in zip(xs, by, strict=True)]
    np.testing.assert_allclose(found, np.stack(want), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_vmap_of_edges(backend):
    x, senders, receivers, scales = edges()
    both = jnp.stack([senders, senders[::-1]])

    def gradient(senders):
        return jax.grad(lambda x: (gathered("sum", x, senders, receivers, scales, backend) ** 2).sum())(x)

    want = []
    for some in both:
        out, pull = gathered_reference("sum", x, some, receivers, scales)
        want.append(pull(2 * out)[0])
    np.testing.assert_allclose(jax.vmap(gradient)(both), np.stack(want), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_a_sum_is_linear_in_rows_and_in_scales(backend):
    """With which derivatives of all orders are known: the Hessian of a sum's square along a direction."""
    with jax.enable_x64(True):
        x, senders, receivers, scales = edges(dtype="float64")
        loss = lambda x: (gathered("sum", x, senders, receivers, scales, backend) ** 2).sum()  # noqa: E731
        found = jax.jvp(jax.grad(loss), (x,), (x + 1,))[1]
        out, pull = gathered_reference("sum", x + 1, senders, receivers, scales)
        np.testing.assert_allclose(found, pull(2 * out)[0], rtol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_and_no_edges(backend):
    x, ids = jnp.arange(6, dtype=jnp.int16).reshape(3, 2), jnp.array([2, 0, 2])
    out = segment.gather_segment_sum(x, ids, jnp.array([1, 1, 0]), 2, backend=backend)
    assert out.dtype == jnp.int16 and out.tolist() == [[4, 5], [4, 6]]
    none = jnp.zeros(0, jnp.int32)
    assert segment.gather_segment_max(x, none, none, 2, empty=5, backend=backend).tolist() == [[5, 5]] * 2
    assert segment.gather_segment_mean(x[:0], ids, ids, 3, backend=backend).tolist() == [[0, 0]] * 3


@pytest.mark.parametrize("backend", BACKENDS)
def test_gather_is_transposed_to_a_sum(backend):
    x, ids = jnp.arange(6.0).reshape(3, 2), jnp.array([2, 0, 2, -1, 3])
    found, pull = jax.vjp(lambda x: segment.gather(x, ids, backend=backend), x)
    assert found.tolist() == [[4, 5], [0, 1], [4, 5], [0, 0], [0, 0]]
    assert pull(jnp.ones((5, 2)))[0].tolist() == [[1, 1], [0, 0], [2, 2]]
    plan = segment.plan(ids, 3, backend=backend)
    assert jax.grad(lambda x: segment.gather(x, plan, backend=backend).sum())(x).tolist() == [[1, 1], [0, 0], [2, 2]]


def test_errors():
    x, senders, receivers, scales = edges()
    with pytest.raises(ValueError, match=r"`scale` must have the shape \(300,\)"):
        gathered("sum", x, senders, receivers, scales[:-1])
    with pytest.raises(TypeError, match="must be made by edge_plan"):
        gathered("sum", x, senders, receivers, None, plan=segment.plan(receivers, RECEIVERS))
    with pytest.raises(ValueError, match="must have the 12 rows that its plan was made for, got 11"):
        gathered("sum", x, None, None, None, plan=segment.edge_plan(senders, receivers, 12, RECEIVERS))
