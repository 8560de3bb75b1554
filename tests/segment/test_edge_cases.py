"""Empty arrays, entries of no segment, narrow ids, many ties: operators follow their definitions there, too."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dejax import segment
from tests.cases import ForeignTensor
from tests.segment.references import BACKENDS, FLOATS, KINDS, ORDERS, Case, reference, run

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
@pytest.mark.parametrize(
    "operator",
    [segment.segment_softmax, segment.segment_logsumexp, segment.segment_variance, segment.segment_normalize],
)
def test_gradients_do_not_see_dropped_entries(operator, backend):
    """Neither do results: of a dropped infinity, a variance had the gradient NaN and a normalized entry was NaN."""
    gradient = jax.grad(lambda x: (operator(x, jnp.array([0, 0, 5]), 2, backend=backend)[:1] ** 2).sum())
    want = gradient(jnp.array([1.0, 2.0, 0.0]))
    assert np.isfinite(want).all()
    for dropped in (1000.0, np.inf, np.nan):
        np.testing.assert_array_equal(gradient(jnp.array([1.0, 2.0, dropped])), want)
        assert np.isfinite(operator(jnp.array([1.0, 2.0, dropped]), jnp.array([0, 0, 5]), 1, backend=backend)).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_scale_of_a_dropped_edge(backend):
    senders, receivers, scale = jnp.array([0, 7, 1]), jnp.array([0, 0, 1]), jnp.array([1.0, jnp.inf, 1.0])
    got = segment.gather_segment_sum(jnp.array([1.0, 2.0]), senders, receivers, 2, scale, True, backend=backend)
    np.testing.assert_array_equal(got, [1, 2])
    slope = jax.grad(
        lambda x: segment.gather_segment_sum(
            x, senders, receivers * 7, 2, jnp.roll(scale, 1), True, backend=backend
        ).sum()
    )
    np.testing.assert_array_equal(slope(jnp.array([1.0, 2.0])), [1, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_where_there_are_no_segments(backend):
    """All entries are dropped. JAX's own scatter cannot be transposed there."""
    x, ids = jnp.ones((2, 3)), jnp.array([0, 1])
    operators = [getattr(segment, f"segment_{kind}") for kind in (*KINDS, "variance", "normalize")]
    given = {"num_segments": 0, "backend": backend}
    plain = lambda x: sum(operator(x, ids, **given).sum() for operator in operators)  # noqa: E731
    gathered = lambda x: sum(  # noqa: E731
        getattr(segment, f"gather_segment_{kind}")(x, ids, ids, **given).sum() for kind in ("sum", "mean", "max")
    )
    for total in (plain, gathered):
        np.testing.assert_array_equal(jax.grad(total)(x), np.zeros((2, 3)))


def not_finite(kind, backend, order="unsorted", dtype="float32", entries=300, width=3):
    """NaN and infinities among the entries of short and of long segments give what they give in numpy."""
    case = Case(entries, 5, (width,), dtype, order, skew=0.3, spread=0.0)
    data, ids = case.arrays()
    data, rng = data.copy(), np.random.default_rng(1)
    for value in (np.nan, -np.nan, np.inf, -np.inf):
        data[rng.integers(0, entries, 2), rng.integers(0, width, 2)] = value
    with np.errstate(all="ignore"):
        want = reference(kind, data, ids, case.segments)
    with jax.enable_x64(dtype == "float64"):
        got = np.asarray(run(kind, case, data, ids, backend)).astype(np.float64)
    assert np.isnan(want).any()
    loose = 0.0 if kind in ("max", "min") else 0.02 if dtype in ("float16", "bfloat16") else 1e-4
    np.testing.assert_allclose(got, want, rtol=loose, atol=loose)


@pytest.mark.parametrize(
    ("kind", "backend"),
    [("max", "xla"), ("max", "pallas"), ("logsumexp", "xla"), ("sum", "pallas")],
)
def test_what_is_not_finite(kind, backend):
    not_finite(kind, backend)


@pytest.mark.slow
@pytest.mark.parametrize("entries", [50, 20_000])
@pytest.mark.parametrize("width", [1, 128])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_finite_of_every_width_and_dtype(kind, dtype, order, width, entries):
    not_finite(kind, "pallas", order, dtype, entries, width)


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


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_integer_scales_of_a_maximum_have_no_tangent(backend):
    def loss(x):
        ids = jnp.array([0, 1])
        return segment.gather_segment_max(x, ids, ids * 0, 1, jnp.array([2, 3]), backend=backend).sum()

    np.testing.assert_array_equal(jax.grad(loss)(jnp.array([1.0, 2.0])), [0, 3])


@pytest.mark.parametrize(
    ("dtype", "count", "backend"),
    [
        ("bfloat16", 300, "xla"),  # the odd numbers above 256 are none of its numbers
        pytest.param("bfloat16", 300, "pallas", marks=pytest.mark.slow),
        pytest.param("float16", 3000, "xla", marks=pytest.mark.slow),
        pytest.param("float16", 3000, "pallas", marks=pytest.mark.slow),
    ],
)
def test_more_ties_than_sixteen_bits_count(dtype, count, backend):
    ids = jnp.zeros(count - 1, jnp.int32)
    got = jax.grad(lambda x: segment.segment_max(x, ids, 1, backend=backend).sum())(jnp.ones(count - 1, dtype))
    np.testing.assert_array_equal(got, jnp.full(count - 1, 1 / (count - 1), dtype))
    x = jnp.ones(1, dtype)
    of_scale = jax.grad(lambda s: segment.gather_segment_max(x, ids, ids, 1, s, backend=backend).sum())
    np.testing.assert_array_equal(of_scale(jnp.ones(count - 1, dtype)), jnp.full(count - 1, 1 / (count - 1), dtype))


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_ids_of_numpy_stay_out_of_range(backend):
    """jax without 64 bits drops their upper bits: 2^32 would become 0."""
    for ids in (np.array([2**32, 1, -(2**40)]), np.array([2**64 - 1, 1, 2**32], np.uint64)):
        want = [0, 1, 0]
        one = jnp.ones(3)
        np.testing.assert_array_equal(segment.segment_sum(one, ids, 3, backend=backend), want)
        np.testing.assert_array_equal(segment.segment_sum(one, segment.plan(ids, 3, backend=backend)), want)
        np.testing.assert_array_equal(segment.gather(one, ids, backend=backend), want)
        np.testing.assert_array_equal(segment.gather_segment_sum(one, ids, ids, 3, backend=backend), want)
        np.testing.assert_array_equal(segment.segment_sum(one, ids, 3, mode="clip", backend=backend).sum(), 3)


def test_arrays_in_the_other_byte_order():
    data, ids = np.array([1.0, 2.0], ">f4"), np.array([1, 0], ">i8")
    np.testing.assert_array_equal(segment.segment_sum(data, ids, 2), [2, 1])
    np.testing.assert_array_equal(segment.gather_segment_sum(data, ids, ids, 2, scale=data), [2, 2])
    np.testing.assert_allclose(segment.segment_softmax(data, ids, 2), [1, 1])


def test_tensors_of_other_libraries_are_read():
    data, ids = ForeignTensor([1.0, 2.0]), ForeignTensor([1, 0])
    np.testing.assert_array_equal(segment.segment_sum(data, ids, 2), [2, 1])
    np.testing.assert_array_equal(segment.gather_segment_sum(data, ids, ids, 2, scale=data), [2, 2])


def test_empty_lists_are_ids():
    np.testing.assert_array_equal(segment.segment_sum([], [], 2), [0, 0])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda x, i: segment.segment_sum(x, i, 2.7), TypeError, "`num_segments` of segment_sum must be an integer"),
        (
            lambda x, i: segment.segment_sum(x, i + 2**40),
            ValueError,
            "must be given where ids are above 2.31 - 3, got None and the greatest id",
        ),
        (
            lambda x, i: segment.segment_sum(x.astype(object), i),
            TypeError,
            "must be numbers, got dtype object; convert",
        ),
        (
            lambda x, i: segment.segment_sum(x, i.astype(str), 1),
            TypeError,
            "ids must be integers, got dtype <U",
        ),
        (lambda x, i: segment.segment_softmax(x * 1j, i, 1), TypeError, "`data` of segment_softmax must be real"),
        (lambda x, i: segment.segment_variance(x * 1j, i, 1), TypeError, "`data` of segment_variance must be real"),
        (lambda x, i: segment.segment_max(x.astype("u1"), i, 2, empty=-1), ValueError, "must be from 0 to 255, got -1"),
        (lambda x, i: segment.segment_min(x.astype(int), i, 2, empty=1.5), TypeError, "must be an integer for data of"),
        (lambda x, i: segment.partition_softmax(x, [1]), ValueError, "must sum to the 2 entries of `logits`, got 1"),
        (lambda x, i: segment.partition_softmax(x, [1, 1], 3), ValueError, "must sum to the 2 entries"),
    ],
)
def test_mistakes_are_named(call, error, message):
    with pytest.raises(error, match=message):
        call(np.ones(2), np.array([0, 0]))


@pytest.mark.parametrize("backend", BACKENDS)
def test_sizes_that_export_leaves_open(backend):
    """XLA computes them on any backend: of entries, of features and of segments, with gradients."""
    entries, width, rows, count = jax.export.symbolic_shape("entries, width, rows, count")

    def run(x, table, ids, senders, like):
        given = {"num_segments": like.shape[0], "backend": backend}
        results = [segment.segment_sum(x, ids, mode="clip", **given), segment.segment_max(x, ids, empty=0, **given)]
        results += [segment.gather_segment_mean(table, senders, ids, scale=x, **given)]
        results += [segment.gather(table, senders, backend=backend)]
        slope = jax.grad(lambda x: (segment.segment_softmax(x, ids, **given) ** 2).sum())(x)
        return *results, slope

    shapes = (entries, width), (rows, width), (entries,), (entries,), (count,)
    dtypes = "float32", "float32", "int32", "int32", "float32"
    exported = jax.export.export(jax.jit(run))(*map(jax.ShapeDtypeStruct, shapes, dtypes))
    rng = np.random.default_rng(0)
    floats = (rng.normal(size=shape).astype(np.float32) for shape in ((30, 3), (5, 3)))
    given = *floats, *rng.integers(-1, 6, (2, 30)).astype(np.int32), np.ones(4, np.float32)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), exported.call(*given), run(*given))


def test_partitions_inside_jit_need_no_sum():
    got = jax.jit(segment.partition_softmax)(jnp.ones(3), jnp.array([2, 0, 1]))
    np.testing.assert_allclose(got, [0.5, 0.5, 1])


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_gradients_of_replicated_data_in_shard_map(backend):
    """They are summed over the devices, whose ids differ: of every kind of operator, in one program."""
    if len(devices := jax.devices()[:2]) < 2:
        pytest.skip("needs two devices")
    rng, split, whole = np.random.default_rng(0), PartitionSpec("i"), PartitionSpec()
    x, scales = jnp.asarray(rng.normal(size=(12, 2)), jnp.float32), jnp.asarray(rng.normal(size=(2, 12)), jnp.float32)
    ids = jnp.asarray(rng.permuted([[*range(4)] * 3] * 2, axis=1).astype(np.int32))
    plain = (segment.segment_max, segment.segment_softmax)
    gathered = (segment.gather_segment_mean, segment.gather_segment_max)

    def loss(x, scale, ids):
        results = [op(x, ids, 4, backend=backend) for op in plain]
        results += [op(x, ids, ids, 4, scale=scale, backend=backend) for op in gathered]
        results += [segment.gather(x, segment.plan(ids, 12), backend=backend)]
        return sum(jnp.sum(jnp.sin(y)) for y in results)

    def on_each(x, scales, ids):
        return jax.lax.psum(loss(x, scales[0], ids[0]), "i")

    mapped = jax.shard_map(on_each, mesh=Mesh(np.array(devices), "i"), in_specs=(whole, split, split), out_specs=whole)
    found = jax.jit(jax.grad(mapped, (0, 1)))(x, scales, ids)
    alone = jax.jit(jax.grad(lambda x, scales, ids: sum(map(loss, (x, x), scales, ids)), (0, 1)))(x, scales, ids)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, alone)
