"""`FloatBits`: rows of floats whose bits an array of unsigned integers carries, as tables in host memory do."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class FloatBits:
    """Stands for float[rows, k] where a kernel takes rows: it loads the integers, wherever they lie, as floats.

    Attributes:
      bits: uint[rows, k], as wide as `dtype`.
      dtype: float32, bfloat16 or float16.
      shape: of the floats; an array of host memory is never reshaped itself.
    """

    bits: jax.Array
    dtype: jnp.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, bits: jax.Array, dtype: Any) -> FloatBits:
        """Raises ValueError where `bits` is not [rows, k] of unsigned integers as wide as `dtype`."""
        floats = jnp.dtype(dtype)
        if bits.ndim != 2 or bits.dtype.kind != "u" or bits.dtype.itemsize != floats.itemsize:
            raise ValueError(
                f"bits must be [rows, k] of unsigned integers as wide as {floats}, got {bits.dtype}{list(bits.shape)}"
            )
        return cls(bits, floats, tuple(bits.shape))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def reshape(self, *shape: int) -> FloatBits:
        return dataclasses.replace(self, shape=shape)
