"""The first rows of a trainable embedding, made block by block when they are read."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from dejax.minibatch.features._formats import RESULTS, table_dtype

_FLOATS_BY_BLOCK = 1 << 22  # elements that one random stream makes


@dataclasses.dataclass(frozen=True, slots=True)
class EmbeddingRows:
    """Rows [rows, width], normal with mean 0, which depend on the seed and the row alone. Slices of rows are arrays.

    Attributes:
        shape: (rows, width).
        dtype: float32, bfloat16 or float16.
        seed: the seed of the values.
        stddev: their standard deviation.
    """

    shape: tuple[int, int]
    dtype: np.dtype
    seed: int
    stddev: np.float32
    ndim = 2

    @classmethod
    def checked(cls, what: str, rows: int, width: int, *, seed: int, stddev: float | None, dtype: Any) -> EmbeddingRows:
        """Checks what a user gave.

        Raises:
            ValueError: a negative number of rows, or a width under 1.
            TypeError: another dtype.
        """
        if rows < 0 or width < 1:
            raise ValueError(f"{what}: `num_nodes` must be at least 0 and `width` at least 1, got {rows} and {width}")
        found = table_dtype(what, dtype)
        if found.name not in RESULTS:
            raise TypeError(f"{what}: `dtype` must be one of {', '.join(RESULTS)}, got {found}")
        return cls((rows, width), found, seed, np.float32(width**-0.5 if stddev is None else stddev))

    @property
    def block(self) -> int:
        """Rows that one random stream makes."""
        return max(1, _FLOATS_BY_BLOCK // self.shape[1])

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: slice) -> np.ndarray:
        start, stop, _ = rows.indices(self.shape[0])
        found = np.empty((max(0, stop - start), self.shape[1]), self.dtype)
        for number in range(start // self.block, -(-stop // self.block)):
            first, last = number * self.block, min((number + 1) * self.block, self.shape[0])
            made = np.random.default_rng([self.seed, number]).standard_normal((last - first, self.shape[1]), np.float32)
            begin, end = max(start, first), min(stop, last)
            found[begin - start : end - start] = (made[begin - first : end - first] * self.stddev).astype(self.dtype)
        return found
