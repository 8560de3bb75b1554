"""`TableSlice`: a part of a larger array, which kernels read where they are.

XLA takes about a microsecond for each array that a call is given, whatever its size. Tables that kernels alone read can
share one array so, and nothing is copied to take them apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class TableSlice:
    """A part of a table of integers, `table[start : start + length]`, which kernels read without a copy of the part.

    It may be passed wherever a kernel takes a table of integers.

    Attributes:
      table: int32[numbers], the whole table.
      start: index of the first number of the part.
      length: how many numbers the part has.
    """

    table: Any
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(length,)."""
        return (self.length,)

    @property
    def ndim(self) -> int:
        """1, the number of axes."""
        return 1

    @property
    def dtype(self) -> np.dtype:
        """int32."""
        return np.dtype(np.int32)

    def astype(self, dtype: Any) -> Any:
        """Returns this part itself for int32, and a new array of its numbers for another dtype."""
        return self if np.dtype(dtype) == self.dtype else self.array().astype(dtype)

    def array(self) -> jax.Array:
        """Copies the part to an array int32[length], for code that is not a kernel."""
        return jnp.asarray(self.table)[self.start : self.start + self.length]

    def __jax_array__(self) -> jax.Array:
        return self.array()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        numbers = np.asarray(self.table)[self.start : self.start + self.length]
        return np.array(numbers, dtype) if copy else numbers.astype(dtype or numbers.dtype, copy=False)


class SliceRef:
    """A kernel's reference to the table of a `TableSlice`, whose indices count from the slice's first number."""

    __slots__ = ("ref", "shape", "start")

    def __init__(self, ref: Any, of: TableSlice) -> None:
        self.ref, self.start, self.shape = ref, np.int32(of.start), of.shape

    def __getitem__(self, index: Any) -> Any:
        return self.ref[index + self.start]
