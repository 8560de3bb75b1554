"""What `dejax.pallas` promises: each template against float64, interpreted, once for each thing that it can do.

The other cases of `reference.py` are slow here; they run on a GPU, too (tests/gpu).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.pallas.products import reference
from tests.cases import slow_but
from tests.pallas.reference import GEMMS, TRAVERSALS, WEIGHT_GRADIENTS, assert_close, decoded, interpreted

QUICK_GEMMS = {
    "no heads axis",  # with scales and dots
    "heads merged",
    "transposed, k in blocks",
    "padding, no indices",
    "bias, row-scaled, dot",
    "bfloat16 to float32",
    "f32 products",
    "three tiles a program",
}
QUICK_WEIGHT_GRADIENTS = {"heads merged", "all types empty", "bfloat16 result", "row-scaled, stored longer"}
QUICK_TRAVERSALS = {
    "attention, long segments, rows ordered",
    "attention, large scores",
    "sum, bfloat16",
    "positioned, long segments",
    "edges, bfloat16",
    "columns, long segments, rows ordered",
    "positioned, row-scaled of 100",
    "scalars",
}


@pytest.mark.parametrize("name", slow_but(QUICK_GEMMS, GEMMS))
def test_grouped_gemm(name):
    case = GEMMS[name]
    a = case.arrays()
    case.check(interpreted(case.run)(a), a)


@pytest.mark.parametrize("name", slow_but(QUICK_WEIGHT_GRADIENTS, WEIGHT_GRADIENTS))
def test_grouped_weight_gradient(name):
    case = WEIGHT_GRADIENTS[name]
    a = case.arrays()
    case.check(interpreted(case.run)(a), a)


@pytest.mark.parametrize("name", slow_but(QUICK_TRAVERSALS, TRAVERSALS))
def test_traverse(name):
    case = TRAVERSALS[name]
    a = case.arrays()
    # Scores of +-1e4 are exact in float32 to 1e-3, and so are their exponentials' arguments.
    tolerance = 2e-3 if case.spread > 1 else None
    case.check(interpreted(case.run)(a), a, tolerance)


MAPS = [(shape, dtype) for dtype in ("float32", "bfloat16") for shape in [(), (3,), (2, 5), (4, 16)]]


@pytest.mark.parametrize(("shape", "dtype"), slow_but([((2, 5), "bfloat16")], MAPS))
def test_map_entries(shape, dtype):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((7, *shape)).astype(jnp.dtype(dtype))
    y = rng.standard_normal((37, *shape)).astype(jnp.dtype(dtype))
    index = rng.integers(0, 7, 37).astype(np.int32)
    index[5] = 7  # a padding entry: reads zeros
    scale = jnp.float32(3.0)
    access = [kernels.TileOperand("indexed", 0), kernels.TileOperand("entry"), kernels.TileOperand("shared")]

    def run(x):
        return kernels.map_entries(
            lambda a, b, c: (a * b, a + c.reshape(1, 1, *(1,) * len(shape))), [x, y, scale], access, num_entries=37,
            index_tables=[index], outputs=[(shape, jnp.float32), (shape, jnp.dtype(dtype))],
        )  # fmt: skip

    product, shifted = interpreted(run)(x)
    gathered = np.where((index < 7).reshape(-1, *(1,) * len(shape)), x.astype(float)[np.minimum(index, 6)], 0)
    np.testing.assert_allclose(product, gathered * y.astype(float), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(shifted, float), gathered + 3, rtol=1e-2 if dtype != "float32" else 1e-6)
    (batched, _) = interpreted(jax.vmap(run))(jnp.stack([x, 2 * x]))
    np.testing.assert_allclose(batched[1], 2 * np.asarray(product), rtol=1e-5)


def test_products_and_sums_of_rows():
    """`row_products` of two arrays with the sum of the rows, `sum_rows` in an order, rows in 16 bits, cleared rows."""
    rng = np.random.default_rng(0)
    x, z, y = (rng.standard_normal((261, n)).astype(np.float32) for n in (17, 5, 33))
    offsets, order = np.array([0, 100, 100, 261], np.int32), rng.permutation(261).astype(np.int32)

    @interpreted
    def run(x, z, y):
        products = kernels.row_products([x, z], y, total=True, precision="f32")
        return (
            products,
            kernels.sum_rows(x, offsets, order=order),
            kernels.to_row_scaled(x),
            kernels.clear_rows([y], offsets[:2]),
        )

    (by_x, by_z, total), sums, rows, (cleared,) = run(x, z, y)
    assert_close(by_x, reference.row_product(x, y))
    assert_close(by_z, reference.row_product(z, y))
    assert_close(total, y.astype(np.float64).sum(0))
    assert_close(sums, reference.sum_rows(x, offsets, order))
    assert_close(decoded(rows), x.astype(np.float64), tolerance=2.0**-11)
    np.testing.assert_array_equal(cleared, np.where(np.arange(261)[:, None] < 100, y, 0))
