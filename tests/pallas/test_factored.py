"""`Factored`: the products that it puts off, and sums of them over slots of which some hold no entry."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas import _triton
from dejax.pallas.traversal.factored import Factored, add, whole

INSIDE = np.array([[True, False], [True, True]])[:, :, None]


def tile(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 2, 16)).astype(np.float32)


def numbers(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((2, 2, 1)).astype(np.float32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("factored", [False, True])
@pytest.mark.parametrize("zeros", [False, True])
def test_slots_without_an_entry_add_nothing(zeros, factored, weighted):
    """Whatever is there: the inverse of a degree of nothing, the weight of a score of nothing."""
    x, factor, weight, total = tile(), numbers(), numbers(2), tile(3)
    x = np.where(INSIDE, x, 0.0 if zeros else np.nan)
    factor[0, 1], weight[0, 1] = np.inf, np.nan
    got = add(
        jnp.asarray(total), Factored(jnp.asarray(x), jnp.asarray(factor) if factored else None, zeros),
        jnp.asarray(INSIDE), jnp.asarray(weight) if weighted else None,
    )  # fmt: skip
    with np.errstate(invalid="ignore"):
        want = x * (factor if factored else 1) * (weight if weighted else 1)
    np.testing.assert_allclose(got, total + np.where(INSIDE, want, 0), rtol=1e-5)


def test_an_infinite_row_stays_infinite():
    x = tile()
    x[0, 0, 3] = np.inf
    got = add(jnp.zeros(x.shape), Factored(jnp.asarray(x), jnp.ones((2, 2, 1)), True), jnp.asarray(INSIDE))
    assert np.isinf(got[0, 0, 3]) and np.isfinite(np.delete(got[0, 0], 3)).all()


def test_axes_of_size_1():
    x, factor = tile(), numbers()
    value = Factored(jnp.asarray(x), jnp.asarray(factor), True)
    for shape in ((2, 2, 1, 16), (2, 2, 16, 1)):
        assert value.reshape(*shape).zeros
        np.testing.assert_array_equal(whole(value.reshape(*shape)), (x * factor).reshape(shape))
    by_head = Factored(jnp.asarray(x.reshape(2, 2, 4, 4)), jnp.asarray(factor[..., None] * np.ones((4, 1))), True)
    np.testing.assert_allclose(whole(by_head.reshape(2, 2, 4, 4, 1)), (x * factor).reshape(2, 2, 4, 4, 1), rtol=1e-6)


@pytest.mark.parametrize("row_scaled", [False, True])
def test_a_body_that_takes_factors(row_scaled):
    """A mean over entries: rows of another array over a degree, with rows that have fewer entries than a step."""
    rng = np.random.default_rng(0)
    degrees = np.array([3, 0, 1, 5])
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    index = rng.integers(0, 6, offsets[-1]).astype(np.int32)
    rows = jnp.asarray(rng.standard_normal((6, 20)), jnp.float32)
    count = jnp.repeat(jnp.asarray(degrees, jnp.float32), degrees, total_repeat_length=int(offsets[-1]))
    seen = []

    def body(x, count):
        seen.append(type(x))
        return (x.times(1 / count[..., None]),), ()

    table = kernels.to_row_scaled(rows, interpret=True) if row_scaled else rows
    (mean,), _ = kernels.traverse(
        body,
        None,
        [table, count],
        [kernels.TileOperand("indexed", 0), kernels.TileOperand("entry")],
        index_tables=[jnp.asarray(index)],
        reductions=[kernels.Reduction("sum", (20,))],
        factored=True,
        schedule=kernels.TraversalSchedule(2, 4, 1, 1),
        interpret=True,
        segments=kernels.RowSegments(
            offsets=jnp.asarray(offsets), order=None, num_entries=int(offsets[-1]), num_rows=4
        ),
    )
    assert set(seen) == {kernels.Factored}
    taken = np.asarray(table.decode() if row_scaled else rows)
    want = [taken[index[a:b]].mean(0) if b > a else np.zeros(20) for a, b in itertools.pairwise(offsets)]
    np.testing.assert_allclose(mean, np.stack(want), rtol=1e-5, atol=1e-6)


def test_one_instruction_multiplies_and_adds():
    def text(interpret):
        kernel = _triton._traced(lambda x, y, z: _triton.multiply_add(x, y, z), interpret, {})
        return str(jax.make_jaxpr(kernel)(tile(), tile(1), tile(2)))

    assert "fma.rn.f32" in text(False) and "fma.rn.f32" not in text(True)
