"""Outer products that are summed over all rows, the gradients of weights that all rows share: which a kernel sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dejax.pallas._shapes import cdiv
from dejax.pallas.machine import machine
from dejax.rgnn.ir.inter import OpProgram, parse_spec
from dejax.rgnn.ir.templates import KERNEL_DTYPES

# The side of a tile, and how many tiles keep a multiprocessor busy.
_TILE, _BUSY = 64, 4


@dataclass(frozen=True, slots=True)
class RowSum:
    """A contraction of the rows of two values, one letter for each axis, that is summed over the rows.

    Attributes:
      left, right, out: the letters of both sides and of the result.
      sizes: the size of each letter.
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
    def heads_in_one_product(self) -> bool:
        """Whether all heads are multiplied with all others, of which each one's own product is kept.

        That costs nothing where heads are so narrow that a tile has several.
        """
        return self._tiles(self.left, self.right) <= self.size(self.heads) * self._tiles(*self.one_head)

    @property
    def sides(self) -> tuple[str, str]:
        """The letters of each side that one product multiplies."""
        return (self.left, self.right) if self.heads_in_one_product else self.one_head

    @property
    def num_products(self) -> int:
        return 1 if self.heads_in_one_product else self.size(self.heads)

    @property
    def by_kernel(self) -> bool:
        """Whether it is a product of matrices that has too few tiles for a GPU, so that its rows are cut into parts.

        XLA pads the rows for that, by copies of both operands. Products with more tiles are left to it, and rows times
        scalars, of which tensor cores would multiply zeros.
        """
        leads = all(side.startswith(self.heads) for side in (self.left, self.right))
        return leads and all(self.one_head) and self.tiles < _BUSY * machine().multiprocessors

    @property
    def tiles(self) -> int:
        return self.num_products * self._tiles(*self.sides)

    def size(self, letters: str) -> int:
        return math.prod(self.sizes[c] for c in letters)

    def _tiles(self, left: str, right: str) -> int:
        return cdiv(self.size(left), _TILE) * cdiv(self.size(right), _TILE)


def row_sum(program: OpProgram, value: int) -> RowSum | None:
    """An operator as a sum that a kernel computes; None if it is no such operator."""
    op = program.ops[value]
    if op.name != "outer" or op.attr("via") != "all":
        return None
    x, y = (program.ops[a] for a in op.args)
    if not {op.dtype, x.dtype, y.dtype} <= set(KERNEL_DTYPES):
        return None
    left, right, out = parse_spec(op.attr("spec"))
    sizes = dict(zip(left, x.shape, strict=True)) | dict(zip(right, y.shape, strict=True))
    found = RowSum(left, right, out, sizes)
    return found if found.by_kernel else None


def row_sums(program: OpProgram, values: Iterable[int]) -> list[RowSum]:
    """The sums of an instance's results, all of which a kernel computes."""
    return [found for value in values if (found := row_sum(program, value)) is not None]
