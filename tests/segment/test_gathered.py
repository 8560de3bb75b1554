"""Reductions of gathered rows: those of the stored messages, with the same gradients."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment
from tests.segment.test_reductions import BACKENDS

pytestmark = pytest.mark.sample(3)

ROWS, SEGMENTS, EDGES = 11, 7, 300
KINDS = ("sum", "mean", "max", "min")
SCALES = {"none": None, "edge": (), "edge, with an axis": (1, 1), "head": (2,), "feature": (2, 3)}


def arrays(scale="edge", dtype="float32", is_sorted=False, outside=True):
    rng = np.random.default_rng(3)
    low, more = (-1, 1) if outside else (0, 0)
    senders = rng.integers(low, ROWS + more, EDGES)
    receivers = rng.integers(low, SEGMENTS + more, EDGES)
    receivers[: EDGES // 2] = 2  # a long segment
    receivers = np.sort(receivers) if is_sorted else receivers
    x = jnp.asarray(rng.normal(size=(ROWS, 2, 3)), dtype)
    shape = SCALES[scale]
    scales = None if shape is None else jnp.asarray(rng.normal(size=(EDGES, *shape)), dtype)
    return x, jnp.asarray(senders), jnp.asarray(receivers), scales


def plain(kind, x, senders, receivers, scale):
    """As people write it, of edges that exist, by XLA."""
    known = np.flatnonzero((senders >= 0) & (senders < ROWS) & (receivers >= 0) & (receivers < SEGMENTS))
    messages = x[senders[known]]
    if scale is not None:
        messages = messages * scale[known].reshape(known.size, *scale.shape[1:3], *(1,) * (3 - scale.ndim))
    return getattr(segment, f"segment_{kind}")(messages, receivers[known], SEGMENTS, backend="xla")


def fused(kind, x, senders, receivers, scale, backend="pallas", **options):
    return getattr(segment, f"gather_segment_{kind}")(
        x, senders, receivers, SEGMENTS, scale, backend=backend, **options
    )


def loss(function, kind, x, senders, receivers, scale, **options):
    out = function(kind, x, senders, receivers, scale, **options)
    out = jnp.where(jnp.isfinite(out), out, 0)
    return (jnp.cos(jnp.arange(out.size).reshape(out.shape)) * out**2).sum()


def cases() -> list:
    """Each pair of an operator, a scale and a backend; the other half is marked slow."""
    every = itertools.product(enumerate(BACKENDS), enumerate(KINDS), enumerate(SCALES))
    return [
        pytest.param(kind, scale, backend, marks=pytest.mark.slow if (i + j + k) % 2 else ())
        for (i, backend), (j, kind), (k, scale) in every
    ]


@pytest.mark.sample(4)
@pytest.mark.parametrize(("kind", "scale", "backend"), cases())
def test_values_and_gradients(kind, scale, backend):
    with jax.enable_x64(True):
        x, senders, receivers, scales = arrays(scale, "float64")
        want = plain(kind, x, senders, receivers, scales)
        np.testing.assert_allclose(fused(kind, x, senders, receivers, scales, backend), want, rtol=1e-12, atol=1e-12)
        numbers = (1,) if scales is None else (1, 4)
        found = jax.grad(loss, [n + 1 for n in numbers])(fused, kind, x, senders, receivers, scales, backend=backend)
        want = jax.grad(loss, [n + 1 for n in numbers])(plain, kind, x, senders, receivers, scales)
        for f, w in zip(found, want, strict=True):
            np.testing.assert_allclose(f, w, rtol=1e-11, atol=1e-11)


@pytest.mark.sample(3)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", ["sorted", "plan"])
def test_sorted_edges_and_plans(kind, order):
    x, senders, receivers, scales = arrays(is_sorted=order == "sorted")
    options = {"indices_are_sorted": True}
    if order == "plan":
        options = {"plan": segment.edge_plan(senders, receivers, ROWS, SEGMENTS, backend="pallas")}
    want = plain(kind, x, senders, receivers, scales)
    np.testing.assert_allclose(fused(kind, x, senders, receivers, scales, **options), want, rtol=1e-5, atol=1e-4)
    found = jax.grad(lambda x: loss(fused, kind, x, senders, receivers, scales, **options))(x)
    want = jax.grad(lambda x: loss(plain, kind, x, senders, receivers, scales))(x)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["sum", "max"])
def test_sixteen_bits_round_once(kind, dtype):
    x, senders, receivers, scales = arrays(dtype=dtype)
    found = fused(kind, x, senders, receivers, scales)
    exact = plain(kind, x.astype(jnp.float32), senders, receivers, scales.astype(jnp.float32))
    assert found.dtype == x.dtype
    one_rounding = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    np.testing.assert_allclose(found.astype(jnp.float32), exact, rtol=one_rounding, atol=1e-5)
    # The message that is the maximum is found again when gradients are computed.
    gradient = jax.grad(lambda x: loss(fused, kind, x, senders, receivers, scales).astype(jnp.float32))(x)
    assert float(jnp.abs(gradient).max()) > 0


@pytest.mark.parametrize("axes", [(1, None), (1, 1), (None, 1)])
@pytest.mark.parametrize("scale", ["edge", "head"])
def test_vmap(axes, scale):
    x, senders, receivers, scales = arrays(scale)
    xs = jnp.stack([x, x + 1], 1) if axes[0] else x
    scales = jnp.stack([scales, scales * 2], 1) if axes[1] else scales
    results = [
        jax.vmap(lambda x, s, b=b: fused("sum", x, senders, receivers, s, b), axes)(xs, scales) for b in BACKENDS
    ]
    np.testing.assert_allclose(*results, rtol=1e-5, atol=1e-4)


def test_vmap_of_edges():
    x, senders, receivers, scales = arrays()
    senders, receivers = jnp.stack([senders, senders[::-1]]), jnp.stack([receivers, receivers])
    results = [
        jax.vmap(lambda s, r, b=b: jax.grad(lambda x: loss(fused, "sum", x, s, r, scales, backend=b))(x))(
            senders, receivers
        )
        for b in BACKENDS
    ]
    np.testing.assert_allclose(*results, rtol=1e-4, atol=1e-3)


def test_hessian_along_a_direction():
    with jax.enable_x64(True):
        x, senders, receivers, scales = arrays(dtype="float64")
        found, want = (
            jax.jvp(jax.grad(lambda x, f=f: loss(f, "sum", x, senders, receivers, scales)), (x,), (x + 1,))[1]
            for f in (fused, plain)
        )
        np.testing.assert_allclose(found, want, rtol=1e-11)


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
    x, senders, receivers, scales = arrays()
    with pytest.raises(ValueError, match=r"`scale` must have the shape \(300,\)"):
        fused("sum", x, senders, receivers, scales[:-1])
    with pytest.raises(TypeError, match="must be made by edge_plan"):
        fused("sum", x, senders, receivers, None, plan=segment.plan(receivers, SEGMENTS))
    with pytest.raises(ValueError, match="must have the 12 rows that its plan was made for, got 11"):
        fused("sum", x, None, None, None, plan=segment.edge_plan(senders, receivers, 12, SEGMENTS))
