"""Shapes of the decoder, and what follows from them: parameters and floating-point operations."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """Shapes of a decoder.

    Attributes:
        layers: number of blocks.
        width: of a token's vector.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of `heads`: query heads share them in groups.
        head_dim: width of a head, even.
        hidden: width inside of the feed-forward part.
        vocabulary: number of tokens; 256 for bytes.
        dtype: of the arithmetic; parameters are float32.
        rope_base: the longest wavelength of the rotary embedding is about `2 pi rope_base` tokens.
        norm_eps: added to the mean square in RMSNorm.

    Raises:
        ValueError: a number does not fit the others.
    """

    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    hidden: int = 384
    vocabulary: int = 256
    dtype: str = "bfloat16"
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("layers", "width", "heads", "kv_heads", "head_dim", "hidden", "vocabulary"):
            if getattr(self, name) < 1:
                raise ValueError(f"DecoderConfig: `{name}` must be at least 1, got {getattr(self, name)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"DecoderConfig: `kv_heads` must divide `heads`, got kv_heads={self.kv_heads} and heads={self.heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"DecoderConfig: `head_dim` must be even, got {self.head_dim}; rotary pairs its elements")

    @property
    def layer_params(self) -> int:
        """Number of parameters of a block."""
        attention = self.width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + 3 * self.width * self.hidden + 2 * self.width

    @property
    def num_params(self) -> int:
        """Number of all parameters."""
        return self.layers * self.layer_params + 2 * self.vocabulary * self.width + self.width

    def flops_per_token(self, sequence: int) -> float:
        """Floating-point operations of forward and backward for a token, without recomputation ("model FLOPs").

        Six for each parameter of a matrix product; causal attention reads half of the sequence on average.
        """
        products = self.layers * (self.layer_params - 2 * self.width) + self.vocabulary * self.width
        attention = self.layers * 2 * self.heads * self.head_dim * sequence / 2
        return 6.0 * (products + attention)

    def replace(self, **changes: Any) -> DecoderConfig:
        """The same with other values."""
        return dataclasses.replace(self, **changes)


def _size(layers: int, width: int, heads: int, kv_heads: int, head_dim: int, hidden: int) -> DecoderConfig:
    return DecoderConfig(layers, width, heads, kv_heads, head_dim, hidden)


SIZES: dict[str, DecoderConfig] = {
    "tiny": DecoderConfig(),
    "125m": _size(20, 768, 12, 4, 64, 2048),
    "350m": _size(32, 1024, 16, 4, 64, 2816),
    "1b": _size(22, 2048, 16, 4, 128, 5632),
    "3b": _size(30, 3072, 24, 8, 128, 8192),
    "7b": _size(32, 4096, 32, 8, 128, 14336),
    "12b": _size(44, 5120, 40, 8, 128, 13824),
    "16b": _size(40, 6144, 48, 8, 128, 16384),
    "27b": _size(60, 6656, 52, 4, 128, 17920),
}
"""Configurations by name; the name is the number of parameters, rounded. The vocabulary is bytes, so nearly all of them
are in the blocks."""
