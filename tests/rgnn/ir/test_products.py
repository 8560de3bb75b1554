"""The algebra of contractions: every rewritten product is the same sum, and has a form that the templates know."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from dejax.rgnn.ir.products import Product, with_axes
from dejax.rgnn.ir.templates import MATRIX_SPECS, VECTOR_SPECS, WEIGHT_GRADIENT_SPECS

SPECS = sorted(MATRIX_SPECS | VECTOR_SPECS | WEIGHT_GRADIENT_SPECS)
FORWARD = ["k,kn->n", "hk,hkn->hn", "k,hkn->hn", "hk,kn->hn"]
INNER = {1: "k,k->", 2: "hk,hk->h"}
_RNG = np.random.default_rng(0)


def operand(axes: str, size: int = 3) -> np.ndarray:
    return _RNG.normal(size=(size,) * len(axes))


def contracted(product: Product, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.einsum(str(product), x, y)


@pytest.mark.parametrize("spec", SPECS)
def test_gradients_are_transposes(spec: str) -> None:
    """The inner product with a cotangent is the same on both sides of each transpose."""
    product = Product.parse(spec)
    x, y, g = operand(product.left), operand(product.right), operand(product.out)
    want = (contracted(product, x, y) * g).sum()
    np.testing.assert_allclose((contracted(product.left_gradient, g, y) * x).sum(), want)
    np.testing.assert_allclose((contracted(product.right_gradient, x, g) * y).sum(), want)
    np.testing.assert_allclose(contracted(product.swapped, y, x), contracted(product, x, y))
    assert str(product) == spec and Product.parse(spec) == product


def pairs() -> list[tuple[str, str]]:
    """Products in a row that some pass reassociates."""
    found = [(first, INNER[len(Product.parse(first).out)]) for first in FORWARD]
    return [
        *found,
        ("k,kn->n", "k,kn->n"),
        ("k,hkn->hn", "hk,hkn->hn"),
        (",k->k", "n,kn->k"),
        ("h,hk->hk", "hn,hkn->k"),
    ]


@pytest.mark.parametrize(("first", "second"), pairs())
def test_two_products_in_a_row_in_either_order(first: str, second: str) -> None:
    one, two = Product.parse(first), Product.parse(second)
    x, w, v = operand(one.left), operand(one.right), operand(two.right)
    want = contracted(two, contracted(one, x, w), v)
    weights, rows = one.weights_first(two)
    np.testing.assert_allclose(contracted(rows, x, contracted(weights, w, v)), want)
    assert str(rows) in MATRIX_SPECS | VECTOR_SPECS


@pytest.mark.parametrize(("spec", "matrix"), [("k,hk->h", "n,kn->k"), ("h,hk->k", "k,kn->n"), ("k,k->", "k,k->")])
def test_vectors_for_each_head_are_a_matrix(spec: str, matrix: str) -> None:
    product = Product.parse(spec)
    x, w = operand(product.left), operand(product.right)
    made = product.with_heads_as_matrix
    assert str(made) == matrix
    np.testing.assert_allclose(contracted(made, x, w), contracted(product, x, w))


def test_a_matrix_of_one_column_is_a_vector() -> None:
    found = {spec: str(Product.parse(spec).of_one_column) for spec in FORWARD}
    assert found == {
        "k,kn->n": "k,k->", "hk,hkn->hn": "hk,hk->h", "k,hkn->hn": "k,hk->h", "hk,kn->hn": "hk,k->h",
    }  # fmt: skip
    assert [Product.parse(s).is_inner for s in found.values()] == [True, True, True, False]


def test_kinds_of_products() -> None:
    kinds = {name: {s for s in SPECS if getattr(Product.parse(s), name)} for name in (
        "is_forward", "is_inner", "for_each_head",
    )}  # fmt: skip
    assert kinds["is_forward"] == set(FORWARD)
    assert kinds["is_inner"] == {"k,k->", "hk,hk->h", "k,hk->h"}
    assert {"hk,hkn->hn", "hn,hkn->hk"} <= kinds["for_each_head"] and "k,hkn->hn" not in kinds["for_each_head"]
    assert [s for s in FORWARD if Product.parse(s).keeps_heads] == ["k,kn->n", "hk,hkn->hn", "hk,kn->hn"]


def test_inserted_axes_are_those_of_a_reshape() -> None:
    for shape, inserts in itertools.product([(), (3,), (3, 4)], [(), ((0,),), ((1,), (0,)), ((0, 1),)]):
        made = np.zeros(shape)
        for axes in inserts if shape else ():
            made = np.expand_dims(made, axes)
        assert with_axes(shape, inserts) == made.shape
