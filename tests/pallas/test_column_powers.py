"""The powers of two of columns, against numpy's maxima."""

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.pallas.formats.column_powers import MAX_COLUMNS, ROWS, Columns, Placed, column_powers, of_array, plain
from tests.cases import slow_but


def powers(array, kept):
    return of_sources([array], of_array(0, array.shape, kept))


def of_sources(arrays, source):
    ((found, short),) = column_powers([jnp.asarray(a) for a in arrays], [source], interpret=True)
    assert found.dtype == jnp.float32 and short.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(found), np.asarray(short, np.float32))
    return np.asarray(found)


SHAPES = [
    ((9, 4), (1,)), ((5000, 33), (1,)), ((3, 8, 16), (2,)), ((3, 8, 16), (1,)), ((7, 2, 5, 6), (1, 3)),
    ((7, 2, 5, 6), (3, 1)), ((2, 70, 90), (1,)), ((4, MAX_COLUMNS + 1), (1,)), ((3, 1), (1,)), ((6, 5, 1000), (0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "kept"), slow_but([SHAPES[1], SHAPES[5], SHAPES[7]], SHAPES))
def test_powers_are_within_a_factor_of_the_largest_element(shape, kept):
    rng = np.random.default_rng(1)
    scales = 10.0 ** rng.integers(-12, 13, size=[n if a in kept else 1 for a, n in enumerate(shape)])
    x = (rng.normal(size=shape) * scales).astype(np.float32)
    found = powers(x, kept)
    largest = np.abs(x).max(axis=tuple(a for a in range(x.ndim) if a not in kept))
    largest = np.transpose(largest, np.argsort(np.argsort(kept))).reshape(-1)
    assert np.all(np.log2(found) == np.round(np.log2(found)))
    assert np.all(found <= largest * 1.0001) and np.all(found >= largest / 16)


def test_a_column_of_zeros_has_the_largest_power_and_an_array_of_zeros_has_ones():
    x = np.zeros((10, 3), np.float32)
    assert np.array_equal(powers(x, (1,)), [1, 1, 1])
    x[:, 1] = 2.0**-30
    assert np.array_equal(powers(x, (1,)), [2.0**-30] * 3)
    assert np.array_equal(powers(np.zeros((0, 3), np.float32), (1,)), [1, 1, 1])


def test_infinities_and_nan_are_left_out():
    x = np.array([[np.inf, 3.0, np.nan], [4.0, np.nan, np.nan]], np.float32)
    assert np.array_equal(powers(x, (1,)), [4, 2, 4])


def test_several_arrays_at_once():
    a, b = np.full((4, 2), 8, np.float32), np.full((3, 5, 6), 0.25, np.float32)
    sources = [of_array(0, a.shape, (1,)), of_array(1, b.shape, (1,)), of_array(1, b.shape, (2,))]
    found = column_powers([jnp.asarray(a), jnp.asarray(b)], sources, interpret=True)
    assert [set(np.asarray(f).tolist()) for f, _ in found] == [{8.0}, {0.25}, {0.25}]
    assert [f.shape for f, _ in found] == [(2,), (5,), (6,)]


def wild(rng, *shape):
    """Each element at a scale of its own."""
    return (rng.normal(size=shape) * 10.0 ** rng.integers(-9, 10, size=shape)).astype(np.float32)


@pytest.mark.parametrize("shape", slow_but([((2, 70, 90),)], [((3, 8, 16),), ((2, 70, 90),), ((1, 250, 500),)]))
def test_a_column_of_a_product_is_as_large_as_its_weights_times_their_features(shape):
    """Every feature is read, for one row of the weights at least: none of them may hide the largest."""
    rng = np.random.default_rng(2)
    types, k, n = shape
    x = np.tile(wild(rng, 1, k), (20, 1))
    w = np.tile(wild(rng, 1, k, n), (types, 1, 1))
    rows = of_array(0, x.shape, (1,))
    product = Columns(((1, ROWS + "kn"), (rows, "k")), "n", ((ROWS, types), ("k", k), ("n", n)))
    found = of_sources([x, w], product)
    largest = np.abs(w * x[0][:, None]).max((0, 1))
    assert np.all(found <= largest * 1.0001) and np.all(found >= largest / 4)
    back = of_sources([x, w], Columns(((1, ROWS + "kn"), (product, "n")), "k", product.sizes))
    largest = np.abs(w * found).max((0, 2))
    assert np.all(back <= largest * 1.0001) and np.all(back >= largest / 4)


def test_heads_and_products_of_columns():
    rng = np.random.default_rng(3)
    x, w = np.tile(wild(rng, 1, 12), (5, 1)), np.tile(wild(rng, 1, 3, 4, 6), (7, 1, 1, 1))
    rows = of_array(0, x.shape, (1,))
    sizes = ((ROWS, 7), ("h", 3), ("k", 4), ("n", 6))
    heads = Columns(((1, ROWS + "hkn"), (rows, "hk")), "hn", sizes)
    largest = np.abs(w[0] * x[0].reshape(3, 4, 1)).max(1).reshape(-1)
    found = of_sources([x, w], heads)
    assert np.all(found <= largest * 1.0001) and np.all(found >= largest / 4)
    turned = Columns(((heads, "hn"), (heads, "hn")), "nh", sizes[1:])
    squares = (found**2).reshape(3, 6).T.reshape(-1)
    assert np.array_equal(of_sources([x, w], turned), squares)


def test_sums_concatenations_and_slices_of_columns():
    a, b = (np.tile(wild(np.random.default_rng(s), 1, 6), (4, 1)) for s in (4, 5))
    x, y = (of_array(i, (4, 6), (1,)) for i in (0, 1))
    of_a, of_b = (of_sources([a, b], s) for s in (x, y))
    assert np.array_equal(of_sources([a, b], Placed(((x, 0), (y, 0)), 0, (6,))), np.maximum(of_a, of_b))
    beside = Placed(((x, 0), (y, 3)), 1, (2, 6))
    expected = np.concatenate([of_a.reshape(2, 3), of_b.reshape(2, 3)], 1).reshape(-1)
    assert np.array_equal(of_sources([a, b], beside), expected)
    assert np.array_equal(
        of_sources([a, b], Placed(((beside, -2),), 1, (2, 3))), expected.reshape(2, 6)[:, 2:5].ravel()
    )
    assert np.array_equal(np.asarray(plain([a, b], beside)), expected)


STARTS = {"beside": (0, 3), "turned": (3, 0), "cut": (-2, 4), "gap": (0, 5), "over": (0, 2), "late": (1, 4)}


@pytest.mark.parametrize("where", slow_but(["gap"], STARTS))
def test_parts_of_a_concatenation_agree_with_plain_jax(where):
    """Parts side by side have a program each; parts that overlap, or leave columns out, have one."""
    starts = STARTS[where]
    a, b = (np.tile(wild(np.random.default_rng(s), 1, 12), (4, 1)) for s in (4, 5))
    x, y = of_array(0, (4, 12), (1,)), of_array(1, (4, 12), (1,))
    product = Columns(((1, ROWS + "k"), (x, "k")), "k", ((ROWS, 4), ("k", 12)))
    placed = Placed(((y, starts[0]), (product, starts[1])), 1, (4, 6))
    inner = Placed(((placed, 0), (placed, 6)), 1, (4, 12))
    for source in (placed, inner):
        found = of_sources([a, b], source)
        want = np.asarray(plain([a, b], source))
        assert np.array_equal(found == 2.0**-126, want == 2.0**-126)
        assert np.all(found <= want * 2) and np.all(found >= want / 2)


def test_the_kernel_agrees_with_plain_jax_beyond_float32():
    """Products of magnitudes that float32 cannot hold count as the largest that it can."""
    rng = np.random.default_rng(6)
    x, w = np.tile(wild(rng, 1, 5) * 1e30, (3, 1)).astype(np.float32), (wild(rng, 1, 5, 4) * 1e28).astype(np.float32)
    rows = of_array(0, x.shape, (1,))
    product = Columns(((1, ROWS + "kn"), (rows, "k")), "n", ((ROWS, 1), ("k", 5), ("n", 4)))
    assert np.array_equal(of_sources([x, w], product), plain([x, w], product))
    assert np.all(np.isfinite(plain([x, w], product)))
