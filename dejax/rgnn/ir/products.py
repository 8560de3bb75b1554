"""The algebra of contractions: how the products of rows and weights are transposed and reassociated.

>>> gemm = Product.parse("k,kn->n")
>>> print(gemm.left_gradient, gemm.right_gradient)
n,kn->k k,n->kn
>>> print(*gemm.weights_first(Product.parse("k,k->")))  # (x W) . a is x . (W a)
kn,n->k k,k->
"""

from __future__ import annotations

from dataclasses import dataclass

from dejax.rgnn.ir.type_rules import parse_spec


@dataclass(frozen=True, slots=True)
class Product:
    """A contraction of two feature shapes, one letter for each axis; `h` is the axis of heads.

    A grouped GEMM is `k,kn->n`, rows times the matrix of their type; a grouped weight gradient is `k,n->kn`.
    """

    left: str
    right: str
    out: str

    @classmethod
    def parse(cls, spec: str) -> Product:
        return cls(*parse_spec(spec))

    def __str__(self) -> str:
        return f"{self.left},{self.right}->{self.out}"

    # --- kinds -------------------------------------------------------------------------------------------------------

    @property
    def is_forward(self) -> bool:
        """Whether it is rows times a matrix, `x W`, with or without heads; not `x W^T`, nor a product with vectors."""
        return self.left[-1:] == "k" and self.right[-2:] == "kn" and self.out[-1:] == "n"

    @property
    def is_inner(self) -> bool:
        """Whether it is rows times a vector of their type, or a vector for each head: one scalar a row or head."""
        return self.left[-1:] == "k" == self.right[-1:] and self.out == self.right[:-1]

    @property
    def keeps_heads(self) -> bool:
        """Whether the result has heads exactly where the rows have."""
        return ("h" in self.left) == ("h" in self.out)

    @property
    def for_each_head(self) -> bool:
        """Whether heads do not meet: both sides and the result have them."""
        return all("h" in axes for axes in (self.left, self.right, self.out))

    # --- other forms -------------------------------------------------------------------------------------------------

    @property
    def swapped(self) -> Product:
        return Product(self.right, self.left, self.out)._canonical()

    @property
    def left_gradient(self) -> Product:
        """The product of (gradient of the result, right side) that gives the gradient of the left side."""
        return Product(self.out, self.right, self.left)

    @property
    def right_gradient(self) -> Product:
        """The product of (left side, gradient of the result) that gives the gradient of the right side."""
        return Product(self.left, self.out, self.right)

    @property
    def of_one_column(self) -> Product:
        """The same where matrices have one column, and are given as vectors."""
        return Product(*(axes.replace("n", "") for axes in (self.left, self.right, self.out)))

    @property
    def with_heads_as_matrix(self) -> Product:
        """A product with a vector for each head as one with a matrix, of which these vectors are the rows."""
        return self._renamed(dict(zip(self.right, "kn", strict=False)))

    # --- two products in a row ---------------------------------------------------------------------------------------

    def weights_first(self, second: Product) -> tuple[Product, Product]:
        """`(x W) V` as `x (W V)`: the product of W and V, then of x and that."""
        x, w = self._followed_by(second)
        both = _axes(x + second.out, w + second.right)
        return Product(w, second.right, both)._canonical(), Product(x, both, second.out)._canonical()

    def _followed_by(self, second: Product) -> tuple[str, str]:
        """The axes of both sides in the letters of `second`, whose left side is the result."""
        names = dict(zip(self.out, second.left, strict=True))
        unused = (c for c in "ji" if c not in str(second))
        names |= {c: next(unused) for c in dict.fromkeys(self.left + self.right) if c not in names}
        renamed = self._renamed(names)
        return renamed.left, renamed.right

    def _canonical(self) -> Product:
        """With the letters of `ir/templates.py`: the weight, which has the most axes, is `kn`, after heads."""
        weight = max((self.right, self.out, self.left), key=len)
        names = dict(zip(weight.replace("h", ""), "kn", strict=False))
        rest = dict.fromkeys(c for c in self.left + self.right + self.out if c not in names and c != "h")
        return self._renamed({"h": "h"} | names | dict(zip(rest, "ji", strict=False)))

    def _renamed(self, names: dict[str, str]) -> Product:
        return Product(*("".join(names[c] for c in axes) for axes in (self.left, self.right, self.out)))


def _axes(wanted: str, there: str) -> str:
    """The axes of `wanted` that are in `there`: heads first, each once."""
    return "".join(sorted(dict.fromkeys(c for c in wanted if c in there), key=lambda c: c != "h"))


def with_axes(shape: tuple[int, ...], inserts: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """A feature shape with axes of size 1 inserted, one step after another; a scalar stays one."""
    for axes in inserts if shape else ():
        for axis in axes:
            shape = (*shape[:axis], 1, *shape[axis:])
    return shape
