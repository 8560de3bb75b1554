"""Reductions of entries by segment: numpy's results, jax's gradients, on XLA and in interpreted kernels."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax import segment
from tests.segment.cases import CASES, KERNELS, XLA
from tests.segment.references import BACKENDS, FLOATS, INTEGERS, KINDS, ORDERS, Case, check

MAX, SUM = segment.segment_max, segment.segment_sum


def each_case(chosen):
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in chosen else pytest.mark.slow) for name in CASES]
    )


@each_case(XLA)
def test_every_case_on_xla(name):
    check(*CASES[name], "xla")


@each_case(KERNELS)
def test_every_case_in_kernels(name):
    check(*CASES[name], "pallas")


@pytest.mark.slow
@given(
    st.sampled_from(KINDS),
    st.builds(
        Case,
        entries=st.sampled_from([0, 1, 70, 300]),
        segments=st.sampled_from([0, 1, 6]),
        shape=st.sampled_from([(), (3,)]),
        dtype=st.sampled_from([*FLOATS, *INTEGERS]),
        order=st.sampled_from(ORDERS),
        ids=st.sampled_from(["int32", "int64", "uint8"]),
        skew=st.sampled_from([0.0, 0.7]),
        outside=st.sampled_from([0.0, 0.3, 1.0]),
    ),
    st.sampled_from(BACKENDS),
    st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_random_cases(kind, case, backend, seed):
    check(kind, case, backend, seed)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["variance", "normalize"])
def test_gradients_of_kernels_are_those_of_xla(kind):
    with jax.enable_x64(True):
        data, ids = (jnp.asarray(a) for a in Case(dtype="float64", spread=0.0).arrays(1))

        def derivatives(backend):
            loss = lambda x: (jnp.sin(getattr(segment, f"segment_{kind}")(x, ids, 5, backend=backend))).sum()  # noqa: E731
            return jax.jvp(jax.grad(loss), (data,), (data + 1,))

        for found, want in zip(derivatives("pallas"), derivatives("xla"), strict=True):
            np.testing.assert_allclose(found, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_maxima_share_the_gradient(backend):
    data, ids = jnp.array([2.0, 2.0, 1.0, 5.0, 3.0]), jnp.array([0, 0, 0, 1, 7])
    found = jax.grad(lambda x: MAX(x, ids, 3, backend=backend)[:2].sum())(data)
    np.testing.assert_array_equal(found, [0.5, 0.5, 0, 1, 0])


@pytest.mark.parametrize("kind", ["max", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sum", "mean"))])
def test_sixteen_bits_have_gradients_of_sixteen_bits(kind):
    case = Case(dtype="bfloat16")
    data, ids = (jnp.asarray(a) for a in case.arrays())
    found = [
        jax.grad(lambda x, b=b: getattr(segment, f"segment_{kind}")(x, ids, 5, backend=b).astype(float)[0].sum())(data)
        for b in BACKENDS
    ]
    assert found[0].dtype == found[1].dtype == jnp.bfloat16
    np.testing.assert_allclose(*(f.astype(np.float32) for f in found), rtol=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_sixteen_bit_sums_do_not_stall(backend):
    # Rounded after each addition, a sum of ones in bfloat16 ends at 256.
    ones = jnp.ones(1000, jnp.bfloat16)
    assert SUM(ones, jnp.zeros(1000, int), 1, backend=backend)[0] == 1000


@pytest.mark.parametrize(
    ("kind", "ids_too"),
    [
        ("sum", False),
        ("max", True),
        *(pytest.param(*c, marks=pytest.mark.slow) for c in [("sum", True), ("max", False), ("softmax", True)]),
    ],
)
def test_vmap_and_its_gradient(kind, ids_too):
    operator = getattr(segment, f"segment_{kind}")
    rng = np.random.default_rng(0)
    data = jnp.asarray(rng.normal(size=(40, 3, 2)), jnp.float32)
    ids = jnp.asarray(rng.integers(-1, 6, (3, 40) if ids_too else 40))
    axes = (1, 0 if ids_too else None)

    def loss(data, backend):
        found = jax.vmap(lambda x, i: operator(x, i, 5, backend=backend), axes)(data, ids)
        found = jnp.where(jnp.isfinite(found), found, 0)
        return (found**2).sum(), found

    (kernels, xla) = (jax.jit(jax.grad(lambda x, b=b: loss(x, b), has_aux=True))(data) for b in ("pallas", "xla"))
    for found, want in zip(kernels, xla, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-5, atol=1e-6)


def test_the_batch_of_a_gradient_with_a_batch_of_ids():
    ids = jnp.array([[0, 1, 1], [2, 0, 2]])
    data = jnp.array([[1.0, 2, 3], [4, 5, 6]])
    found = jax.vmap(jax.grad(lambda x, i: (SUM(x, i, 3, backend="pallas") ** 2).sum()))(data, ids)
    np.testing.assert_array_equal(found, [[2, 10, 10], [20, 10, 20]])


@pytest.mark.parametrize("backend", BACKENDS)
def test_nans_propagate_and_infinities_stay(backend):
    data = jnp.array([1.0, jnp.nan, jnp.inf, 2.0, -jnp.inf, jnp.inf])
    ids = jnp.array([0, 0, 1, 1, 2, 2])
    np.testing.assert_array_equal(MAX(data, ids, 4, backend=backend), [np.nan, np.inf, np.inf, -np.inf])
    np.testing.assert_array_equal(SUM(data, ids, 4, backend=backend), [np.nan, np.inf, np.nan, 0])


@pytest.mark.parametrize("backend", BACKENDS)
def test_softmax_of_what_is_not_finite(backend):
    low = -jnp.inf
    found = segment.segment_softmax(
        jnp.array([low, low, 1e4, 1e4, low]), jnp.array([0, 0, 1, 1, 1]), 2, backend=backend
    )
    np.testing.assert_array_equal(found, [0, 0, 0.5, 0.5, 0])
    found = segment.segment_logsumexp(jnp.array([low, jnp.inf, 2e4]), jnp.array([0, 1, 2]), 4, backend=backend)
    np.testing.assert_array_equal(found, [-np.inf, np.inf, 2e4, -np.inf])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_empty_segments_have_the_value_that_is_asked_for(backend, dtype):
    data, ids = jnp.array([-3, -2], dtype), jnp.array([2, 2])
    assert MAX(data, ids, 3, empty=0, backend=backend).tolist() == [0, 0, -2]
    assert segment.segment_min(data, ids, 3, empty=7, backend=backend).tolist() == [7, 7, -3]
    # Not what is -inf for another reason.
    assert MAX(jnp.array([-jnp.inf]), jnp.array([0]), 2, empty=0, backend=backend).tolist() == [-np.inf, 0]


ATOMIC = pytest.mark.cpu_only("XLA adds by atomic operations on a GPU, in another order in each run")


@pytest.mark.parametrize("backend", ["auto", "pallas", pytest.param("xla", marks=ATOMIC)])
def test_two_calls_give_equal_bits(backend):
    case = dataclasses.replace(CASES["sum, one long segment, unsorted"][1], spread=4.0)
    data, ids = (jnp.asarray(a) for a in case.arrays())
    first, second = (np.asarray(SUM(data, ids, 9, backend=backend, deterministic=True)) for _ in range(2))
    np.testing.assert_array_equal(first, second)


def test_a_plan_gives_the_bits_of_the_call_without_it():
    data, ids = (jnp.asarray(a) for a in Case(entries=400, skew=0.6, spread=4.0).arrays())
    plan = segment.plan(ids, 5, backend="pallas")
    np.testing.assert_array_equal(SUM(data, ids, 5, backend="pallas"), SUM(data, plan, backend="pallas"))


@pytest.mark.parametrize("mode", [None, "drop", "fill", "clip", "promise_in_bounds", jax.lax.GatherScatterMode.CLIP])
@pytest.mark.parametrize("backend", BACKENDS)
def test_modes_are_those_of_jax(mode, backend):
    data, ids = jnp.arange(5.0), jnp.array([0, -1, 1, 1, 7])
    np.testing.assert_array_equal(
        SUM(data, ids, 3, mode=mode, backend=backend), jax.ops.segment_sum(data, ids, 3, mode=mode)
    )


def test_bucket_size_and_unique_indices_are_taken():
    data, ids = jnp.arange(5.0), jnp.array([4, 2, 0, 1, 3])
    for options in ({"bucket_size": 2}, {"unique_indices": True}):
        for backend in ("auto", *BACKENDS):
            assert SUM(data, ids, 5, backend=backend, **options).tolist() == [2, 3, 1, 4, 0]


def test_the_number_of_segments_is_found_outside_of_jit():
    assert SUM(jnp.ones(3), jnp.array([0, 4, 0])).tolist() == [2, 0, 0, 0, 1]
    assert SUM(jnp.ones(0), jnp.zeros(0, int)).shape == (0,)
    assert SUM(jnp.ones(1), jnp.array([-4])).shape == (0,)
    assert segment.plan(np.array([3, 0])).num_segments == 4


def test_complex_numbers_are_left_to_xla():
    data = jnp.array([1 + 2j, 3, 4j])
    found = SUM(data, jnp.array([0, 1, 0]), 2, backend="pallas")
    np.testing.assert_array_equal(found, jax.ops.segment_sum(data, jnp.array([0, 1, 0]), 2))


def test_plans_are_arguments_of_jit_and_know_what_is_sorted():
    plan = segment.plan(jnp.array([0, 0, 2]), 3)
    assert plan.order is None
    assert segment.plan(jnp.array([0, 2, 1]), 3).order is not None
    found = jax.jit(lambda x, plan: SUM(x, plan))(jnp.ones(3), plan)
    assert found.tolist() == [2, 0, 1]
    assert jax.tree.structure(jax.tree.map(jnp.copy, plan)) == jax.tree.structure(plan)


IDS, DATA = jnp.array([0, 1]), jnp.ones(2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: SUM(DATA, jnp.ones(2), 2), TypeError, "`segment_ids` of segment_sum must be integers, got float32"),
        (lambda: SUM(DATA, jnp.zeros((2, 1), int), 2), ValueError, "must have one axis, got shape"),
        (lambda: SUM(jnp.ones(3), IDS, 2), ValueError, r"an entry for each of the 2 segment_ids .* got shape \(3,\)"),
        (lambda: SUM(DATA, IDS, -1), ValueError, "`num_segments` of segment_sum must be at least 0, got -1"),
        (lambda: jax.jit(SUM)(DATA, IDS), ValueError, "`num_segments` of segment_sum, .* must be given inside jax.jit"),
        (lambda: jax.jit(SUM)(DATA, IDS, 2), ValueError, "known while tracing"),
        (lambda: SUM(DATA, IDS, 2, mode="wrap"), ValueError, "`mode` must be one of .*, got 'wrap'"),
        (
            lambda: SUM(DATA, IDS, 2, backend="cuda"),
            ValueError,
            "`backend` must be one of auto, pallas, xla, got 'cuda'",
        ),
        (lambda: SUM(DATA, segment.plan(IDS, 2), 3), ValueError, "must be that of the plan, 2, got 3"),
        (lambda: SUM(DATA, jnp.zeros(3, int), plan=segment.plan(IDS, 2)), ValueError, "must have the plan's shape"),
        (lambda: segment.plan(DATA, 2), TypeError, "`segment_ids` must be integers, got float32"),
        (lambda: segment.edge_plan(IDS, jnp.zeros(3, int), 2), ValueError, "must have one length"),
    ],
)
def test_errors_say_what_must_be_given(call, error, message):
    with pytest.raises(error, match=message):
        call()
