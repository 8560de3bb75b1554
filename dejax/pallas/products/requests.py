"""What the templates of grouped products are asked for.

Positions p = 0, 1, ... are sorted by type: those of type t, its group, are `offsets[t]` to `offsets[t + 1]`. A position
reads a row of each input array. A row has one or several heads, which are multiplied independently of each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.pallas.formats.row_scaled import RowScaled


@dataclass(frozen=True, slots=True, eq=False)
class GemmGroups:
    """The groups of a grouped GEMM, and how they are cut into tiles.

    Attributes:
      offsets: int32[types + 1].
      num_positions: the length of the indices, and of the range of positions.
      tiles: a function from the positions of a tile to int32[tiles], the type of each tile, and int32[tiles], its first
        position (for instance of `dejax.rgnn.graphs.tables.tile_table`). A tile has that many positions, or ends with
        its group. A tile that starts at or after the end of its group is unused. Where there are positions there is a
        tile.
      block: positions of a tile; a power of two, at least 16. None: the number that suits the product best.
    """

    offsets: jax.Array
    num_positions: int
    tiles: Callable[[int], tuple[jax.Array, jax.Array]]
    block: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GemmEpilogue:
    """Operations on a product row of a grouped GEMM before the row is stored, in this order.

    Attributes:
      bias: float[types, heads, n] or, without the heads axis, float[types, n]; it is added.
      activation: `relu`, `tanh`, `sigmoid` or `leaky_relu:<slope>`.
      dot_vector: float[types, heads, n]; asks for a second result, the inner product of each result row and the vector
        of its type and head, before the row is rounded to the result's dtype.
      dot_parts: cuts each row into as many equal parts, each with an inner product. If there are several, their number
        and n must be powers of two.
    """

    bias: jax.Array | None = None
    activation: str | None = None
    dot_vector: jax.Array | None = None
    dot_parts: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class GemmOutput:
    """Where a grouped GEMM puts its result rows, and how they are stored.

    Attributes:
      index: int32[num_positions], the row that a position writes; one out of range is not written. No two
        positions may name the same row. None: position p writes row p.
      num_rows: rows of the result; the number of positions by default.
      covers_all: the caller guarantees that every result row is written, so that none needs to be set to zero first.
      dtype: the dtype of the result; by default what `x` and `w` promote to.
      row_scaled: asks for the result as `RowScaled`, in half the bytes; only with `precision="tf32"` and a float32
        result. A result whose tiles have parts of several widths stays float32.
      columns: float32[heads, n] or [n], powers of two: the `columns` of the result as `RowScaled`.
    """

    index: jax.Array | None = None
    num_rows: int | None = None
    covers_all: bool = False
    dtype: Any = None
    row_scaled: bool = False
    columns: jax.Array | None = None


@dataclass(frozen=True, slots=True, eq=False)
class GroupedGemm:
    """The arguments of one grouped GEMM, which multiplies each row by the matrix of its type.

    Attributes:
      x: float[rows, heads, k], or float[rows, k] for one head, which the result then has no axis for either; or
        `RowScaled` of such a shape.
      w: float[types, heads, k, n], or without the heads axis where `x` has none.
      groups: the positions, sorted by type.
      x_index: int32[num_positions], the row of `x` that a position reads; one out of range reads as zeros. None:
        position p reads row p.
      x_columns: float32[heads, k] or [k], powers of two near the largest elements of the columns of float32 rows `x`,
        where those differ (`column_powers`). An element that is 2^126 times smaller than the largest of its column is
        read as 0. `RowScaled` have their own. None: each program measures the columns of its tile of rows.
      transpose_w: multiplies by the transposed matrices: in `w`, n comes before k.
      epilogue: what is done with a product row before it is stored.
      output: where result rows go, and how they are stored.
      precision: the precision of float32 operands: `tf32` (10-bit mantissa; computed in float16 with powers of two for
        the rows of `x` and the matrices of `w`, see `row_scaled`), `f32` (22 bits; three such products) or `bf16`
        (cast). bfloat16 and float16 are multiplied as they are. Sums are float32.
    """

    x: jax.Array | RowScaled
    w: jax.Array
    groups: GemmGroups
    x_index: jax.Array | None = None
    x_columns: jax.Array | None = None
    transpose_w: bool = False
    epilogue: GemmEpilogue = GemmEpilogue()
    output: GemmOutput = GemmOutput()
    precision: str = "tf32"

    @property
    def n(self) -> int:
        """Number of result features of each head."""
        return int(self.w.shape[-2 if self.transpose_w else -1])

    @property
    def out_rows(self) -> int:
        """Number of rows of the result."""
        return self.groups.num_positions if self.output.num_rows is None else self.output.num_rows

    @property
    def out_dtype(self) -> np.dtype:
        """The dtype of the result."""
        return jnp.dtype(self.output.dtype or jnp.promote_types(self.x.dtype, self.w.dtype))


@dataclass(frozen=True, slots=True, eq=False)
class GroupedWeightGradient:
    """The arguments of one grouped weight gradient: for each type the sum of `x^T y` over its positions.

    Attributes:
      x: float[rows, heads, k], or float[rows, k] for one head, which the result then has no axis for either; or
        `RowScaled` of such a shape.
      y: float[rows, heads, n], or float[rows, n] where `x` has no heads axis; or `RowScaled`.
      offsets: int32[types + 1].
      num_positions: the length of the indices, and of the range of positions.
      x_index: int32[num_positions], the row of `x` at each position; one out of range reads as zeros. None: row p.
      y_index: int32[num_positions], likewise for `y`.
      precision: the precision of float32 operands: `tf32` (10-bit mantissa; computed in float16 with powers of two for
        each row, see `row_scaled`), `f32` (22 bits; three such products) or `bf16` (cast). Sums are float32.
      dtype: the dtype of the result.
      rows_per_split: positions that one program sums; about a thousandth of all by default.
      splits: `split_table(offsets, rows_per_split, num_positions)` where it was made before, and then None or, where
        starts and ends are in another order, the number of each split, int32[splits].
    """

    x: jax.Array | RowScaled
    y: jax.Array | RowScaled
    offsets: jax.Array
    num_positions: int
    x_index: jax.Array | None = None
    y_index: jax.Array | None = None
    precision: str = "tf32"
    dtype: Any = jnp.float32
    rows_per_split: int | None = None
    splits: tuple[jax.Array, jax.Array, jax.Array, jax.Array | None] | None = None


def both_in_16_bits(x: Any, w: Any) -> bool:
    """Whether rows and matrices are arrays of 16 bits, of one dtype. `RowScaled` rows count as float32."""
    return bool(x.dtype == w.dtype and w.dtype in (jnp.bfloat16, jnp.float16))


def arithmetic(precision: str, *dtypes: Any) -> str:
    """How tiles are multiplied.

    `scaled`: in float16, with powers of two for rows and columns. `exact`: likewise, as two float16 parts of each
    operand. `direct`: as they are, or cast.
    """
    if precision == "bf16" or jnp.float32 not in dtypes:
        return "direct"
    return "scaled" if precision == "tf32" else "exact"
