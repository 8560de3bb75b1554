"""Products summed over all rows, interpreted, against their float64 reference."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas.machine import machine
from dejax.pallas.products import reference
from dejax.pallas.products.product_schedule import rows_per_part
from tests.cases import slow_but
from tests.pallas.reference import TF32, interpreted

# Relative to the largest element; operands of 16 bits are exact, and those that are cast to bfloat16 have 8 bits.
TOLERANCES = {"f32": 1e-6, "tf32": TF32, "bf16": 1e-2}


def arrays(rows: int, k: int, n: int, dtypes: tuple[str, str], heads: tuple[int, ...] = ()) -> tuple:
    rng = np.random.default_rng(rows + k)
    return tuple(
        jnp.asarray(rng.standard_normal((rows, *heads, width)), dtype)
        for width, dtype in zip((k, n), dtypes, strict=True)
    )


def check(found, expected: np.ndarray, precision: str) -> None:
    assert found.dtype == jnp.float32 and found.shape == expected.shape
    largest = np.abs(expected).max(initial=0)
    np.testing.assert_allclose(np.asarray(found, np.float64), expected, atol=TOLERANCES[precision] * largest)


@pytest.mark.parametrize(
    ("rows", "precision"),
    slow_but([(0, "f32"), (7, "tf32"), (1003, "bf16")], itertools.product([0, 1, 7, 128, 1003], TOLERANCES)),
)
def test_any_number_of_rows(rows, precision):
    x, y = arrays(rows, 17, 33, ("float32", "float32"))
    (found,) = interpreted(lambda x, y: kernels.row_products([x], y, precision=precision))(x, y)
    check(found, reference.row_product(x, y), precision)


DTYPES = [("float32",) * 2, ("bfloat16",) * 2, ("float16",) * 2, ("float32", "bfloat16"), ("float16", "bfloat16")]


@pytest.mark.parametrize(
    ("dtypes", "k", "n"),
    slow_but(
        [(("bfloat16",) * 2, 1, 1), (("float16", "bfloat16"), 70, 130), (("float16",) * 2, 64, 64)],
        [(d, k, n) for d in DTYPES for k, n in [(1, 1), (3, 5), (64, 64), (70, 130), (130, 200)]],
    ),
)
def test_widths_and_dtypes(dtypes, k, n):
    x, y = arrays(261, k, n, dtypes)
    (found,) = interpreted(lambda x, y: kernels.row_products([x], y))(x, y)
    check(found, reference.row_product(x, y), "tf32")


@pytest.mark.parametrize("precision", ["f32", "tf32"])
def test_heads(precision):
    x, y = arrays(140, 20, 70, ("float32", "float32"), (3,))
    (found,) = interpreted(lambda x, y: kernels.row_products([x], y, precision=precision))(x, y)
    expected = np.stack([reference.row_product(x[:, i], y[:, i]) for i in range(3)])
    check(found, expected, precision)


@pytest.mark.parametrize(
    ("share", "precision"), slow_but([(0.0, "tf32"), (0.6, "f32")], itertools.product((0.0, 0.6), TOLERANCES))
)
def test_rows_outside_of_the_mask_may_hold_anything(share, precision):
    x, y = arrays(300, 16, 20, ("float32", "float32"))
    mask = np.random.default_rng(0).random(300) < share
    expected, rows = reference.row_product(x, y, mask), np.asarray(y, np.float64)[mask].sum(0)
    x, y = (jnp.where(mask[:, None], a, other) for a, other in ((x, jnp.nan), (y, jnp.inf)))
    run = interpreted(lambda x, y, mask: kernels.row_products([x], y, total=True, mask=mask, precision=precision))
    product, total = run(x, y, jnp.asarray(mask))
    check(product, expected, precision)
    check(total, rows, "f32")


@pytest.mark.parametrize(
    ("heads", "precision", "dtype"),
    slow_but(
        [((2,), "tf32", "bfloat16")],
        [(h, *p) for h in [(), (2,)] for p in [("f32", "float32"), ("tf32", "float32"), ("tf32", "bfloat16")]],
    ),
)
def test_several_arrays_and_the_sum_of_rows_in_one_pass(heads, precision, dtype):
    """Each of another width, one of several tiles, and one of another dtype."""
    x, y = arrays(261, 70, 80, (dtype, dtype), heads)
    z, w = arrays(261, 5, 17, ("float32", dtype), heads)
    *found, total = interpreted(lambda *xs: kernels.row_products(xs, y, total=True, precision=precision))(x, z, w)
    spec = "rhk,rhn->hkn" if heads else "rk,rn->kn"
    wide = np.asarray(y, np.float64)
    for product, each in zip(found, (x, z, w), strict=True):
        check(product, np.einsum(spec, np.asarray(each, np.float64), wide), precision)
    check(total, wide.sum(0), "f32")


def test_vmap():
    x, y = arrays(3 * 150, 17, 20, ("float32", "float32"))
    x = x.reshape(3, 150, 17)
    found = interpreted(jax.vmap(lambda x, y: kernels.row_products([x], y)[0], in_axes=(0, None)))(x, y[:150])
    check(found, np.stack([reference.row_product(each, y[:150]) for each in x]), "tf32")


@pytest.mark.parametrize("tiles", [1, 2, 64, 10_000])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("rows", [1, 127, 128, 5000, 1_000_003, 1_885_136])
def test_parts_have_whole_steps_and_keep_the_device_busy(rows, block, tiles):
    per_part = rows_per_part(rows, tiles, block)
    parts = -(-rows // per_part)
    assert per_part % block == 0
    assert parts == 1 or (per_part >= 128 and parts * tiles <= 4 * machine().multiprocessors)
    if rows > 128 * 4 * machine().multiprocessors >= tiles:
        assert parts * tiles > 3 * machine().multiprocessors or parts == 4 * machine().multiprocessors // tiles


def test_errors_say_what_to_do():
    x, y = jnp.zeros((4, 3)), jnp.zeros((4, 2))
    with pytest.raises(ValueError, match=r"must be \[rows, k\] and \[rows, n\]"):
        kernels.row_products([x[:3]], y)
    with pytest.raises(ValueError, match="`mask` must have shape"):
        kernels.row_products([x], y, mask=jnp.ones(3, bool))
    with pytest.raises(ValueError, match="precision must be one of"):
        kernels.row_products([x], y, precision="f64")
    with pytest.raises(NotImplementedError, match="x must be float32"):
        kernels.row_products([x.astype(int)], y)
