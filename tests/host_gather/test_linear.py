"""`typed_linear` against numpy, on a GPU in the kernel; and lowered for an H200."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dejax import pallas as kernels
from dejax.host_gather import HostTable, typed_linear, value_and_grad
from tests.host_gather.test_lowering import lowered, of_the_table
from tests.host_gather.test_lowering import table as abstract_table

RNG = np.random.default_rng(0)
ROWS = RNG.standard_normal((40, 20)).astype(np.float32)
W = jnp.asarray(RNG.standard_normal((4, 20, 24)), jnp.float32)
IDS = RNG.integers(-3, 43, 150, np.int32)
TYPES = RNG.integers(-1, 5, 150, np.int32)
TYPES[TYPES == 2] = 1  # a type without rows
linear = jax.jit(typed_linear, static_argnames=("precision", "out_dtype"))


def expected(rows: np.ndarray, w: np.ndarray) -> np.ndarray:
    there = (IDS >= 0) & (IDS < 40) & (TYPES >= 0) & (TYPES < 4)
    product = np.einsum("nk,nkm->nm", rows[np.clip(IDS, 0, 39)].astype(np.float64), w[np.clip(TYPES, 0, 3)])
    return np.where(there[:, None], product, 0)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16], ids=str)
def test_products(dtype: object) -> None:
    rows = ROWS.astype(dtype)
    got = linear(HostTable.from_numpy(rows), IDS, TYPES, W, precision="f32", out_dtype="float32")
    np.testing.assert_allclose(got, expected(rows, np.asarray(W, np.float64)), atol=1e-4)


def test_gradients() -> None:
    table, weight = HostTable.from_numpy(ROWS), jnp.asarray(RNG.standard_normal((150, 24)), jnp.float32)

    def loss(w: jax.Array, table: HostTable) -> jax.Array:
        return (typed_linear(table, IDS, TYPES, w, precision="f32") * weight).sum()

    there = ((IDS >= 0) & (IDS < 40))[:, None]
    rows = np.where(there, ROWS[np.clip(IDS, 0, 39)], 0)
    want = np.stack([rows[t == TYPES].T @ np.asarray(weight)[t == TYPES] for t in range(4)])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(W, table), want, atol=1e-4)
    _, gradient = value_and_grad(loss, argnums=1)(W, table)  # the gradient of the rows must not be zero
    found = np.zeros_like(ROWS)
    np.add.at(found, np.asarray(gradient.ids)[np.asarray(gradient.ids) >= 0],
              np.asarray(gradient.values)[np.asarray(gradient.ids) >= 0])  # fmt: skip
    dense = jax.grad(
        lambda rows: (jnp.einsum("nk,nkm->nm", rows[np.clip(IDS, 0, 39)], W[np.clip(TYPES, 0, 3)]) * weight
                      * (there & ((TYPES >= 0) & (TYPES < 4))[:, None])).sum()
    )(jnp.asarray(ROWS))  # fmt: skip
    np.testing.assert_allclose(found, dense, atol=1e-4)


def test_the_kernel_reads_floats_from_their_bits() -> None:
    x, offsets = ROWS[:16, :16], jnp.array([0, 5, 16])
    groups = kernels.GemmGroups(offsets, jnp.array([0, 1]), jnp.array([0, 5]), 16, 16)
    want = kernels.grouped_gemm(kernels.GroupedGemm(jnp.asarray(x), W[:2, :16], groups), interpret=True)
    bits = jnp.asarray(np.ascontiguousarray(x).view(np.uint32))
    floats = kernels.FloatBits.of(bits, jnp.float32)
    got = kernels.grouped_gemm(kernels.GroupedGemm(floats, W[:2, :16], groups), interpret=True)
    np.testing.assert_array_equal(got, want)
    with pytest.raises(ValueError, match="unsigned integers as wide as bfloat16"):
        kernels.FloatBits.of(bits, jnp.bfloat16)


def test_on_a_gpu_the_table_is_an_operand_of_the_kernel() -> None:
    ids = jax.ShapeDtypeStruct((4096,), jnp.int32)
    w = jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)
    step = jax.value_and_grad(lambda w, t, i: typed_linear(t, i, i % 8, w).sum())
    text = lowered(step, w, abstract_table(1 << 21), ids)
    others = [line for line in of_the_table(text, "2097152x128") if "grouped_gemm" not in line]
    assert others == []
    assert text.count("grouped_weight_gradient") and text.count("custom_call @dejax_table_gather") == 1


def test_bad_arguments() -> None:
    table = HostTable.from_numpy(ROWS)
    with pytest.raises(
        TypeError, match=r"`table` must be \[rows, k\] of float32, bfloat16 or float16, got shape \(3, 20\) of int8"
    ):
        typed_linear(HostTable.zeros((3, 20), np.int8), IDS, TYPES, W)
    with pytest.raises(ValueError, match=r"`w` must be \[types, 20, m\]"):
        typed_linear(table, IDS, TYPES, W[:, :3])
    with pytest.raises(ValueError, match=r"must be \[n\]"):
        typed_linear(table, IDS, TYPES[:3], W)
    with pytest.raises(TypeError, match="`types` must be integers"):
        typed_linear(table, IDS, TYPES * 1.0, W)
    assert typed_linear(table, [], np.zeros(0, np.int32), W).shape == (0, 24)


def test_precision_is_checked() -> None:
    for wrong in ("fp32", "highest", None, "TF32"):
        with pytest.raises(ValueError, match=r"`precision` must be one of \('tf32', 'f32', 'bf16'\)"):
            typed_linear(HostTable.from_numpy(ROWS), IDS, TYPES, W, precision=wrong)
