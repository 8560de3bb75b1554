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
    """Stands for int32[length], `table[start : start + length]`, wherever a kernel takes a table of integers.

    Attributes:
      table: int32[numbers].
      start: the first number.
      length: how many.
    """

    table: Any
    start: int
    length: int

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.length,)

    @property
    def ndim(self) -> int:
        return 1

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.int32)

    def astype(self, dtype: Any) -> Any:
        return self if np.dtype(dtype) == self.dtype else self.array().astype(dtype)

    def array(self) -> jax.Array:
        """The elements by themselves, for what is no kernel."""
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
