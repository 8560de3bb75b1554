"""Sums over all rows of the outer products of two rows, the gradients of weights that all rows share, as products."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dejax.pallas._shapes import cdiv
from dejax.pallas.machine import machine
from dejax.pallas.products.schedule import rows_per_part

# The side of a tile, and how many tiles keep a multiprocessor busy.
_TILE, _BUSY = 64, 4


@dataclass(frozen=True, slots=True)
class RowSum:
    """A contraction of two feature shapes, one letter for each axis, that is summed over rows.

    Attributes:
        left, right, out: the letters of both sides and of the result.
        sizes: of each letter.
    """

    left: str
    right: str
    out: str
    sizes: Mapping[str, int]

    @property
    def heads(self) -> str:
        """The letters on both sides."""
        return "".join(c for c in self.left if c in self.right)

    @property
    def one_head(self) -> tuple[str, str]:
        """The letters of each side's rows of one head."""
        left, right = ("".join(c for c in side if c not in self.heads) for side in (self.left, self.right))
        return left, right

    @property
    def sides(self) -> tuple[str, str]:
        """The letters of each side that one product multiplies."""
        return (self.left, self.right) if self.together else self.one_head

    @property
    def leads(self) -> bool:
        """Whether heads come first on both sides."""
        return all(side.startswith(self.heads) for side in (self.left, self.right))

    @property
    def is_product(self) -> bool:
        """Whether it is a product of matrices, and not of rows with scalars."""
        return all(self.one_head)

    @property
    def together(self) -> bool:
        """Whether all heads are multiplied with all others, of which each one's own product is kept.

        That costs nothing where heads are so narrow that a tile has several.
        """
        return self._tiles(self.left, self.right) <= self.size(self.heads) * self._tiles(*self.one_head)

    @property
    def num_products(self) -> int:
        return 1 if self.together else self.size(self.heads)

    @property
    def by_kernel(self) -> bool:
        """Whether it is a product with too few tiles for a GPU, so that the sum over rows must be cut into parts.

        XLA pads the rows for that, by copies of both operands. Products with more tiles are left to it.
        """
        tiles = self.num_products * self._tiles(*self.sides)
        return self.leads and self.is_product and tiles < _BUSY * machine().multiprocessors

    def parts(self, rows: int) -> int:
        """How many programs sum the rows of each tile."""
        return cdiv(rows, rows_per_part(rows, self.num_products * self._tiles(*self.sides), 1))

    def size(self, letters: str) -> int:
        return math.prod(self.sizes[c] for c in letters)

    def _tiles(self, left: str, right: str) -> int:
        return cdiv(self.size(left), _TILE) * cdiv(self.size(right), _TILE)


def row_sum(spec: tuple[str, str, str], x: tuple[int, ...], y: tuple[int, ...]) -> RowSum:
    """The sum of products of rows of the feature shapes `x` and `y`."""
    left, right, out = spec
    return RowSum(left, right, out, dict(zip(left, x, strict=True)) | dict(zip(right, y, strict=True)))
