"""The decoder as functions of plain pytrees: one block, the stack, the loss.

Parameters are float32. Each block casts its own to the dtype of the arithmetic, so that a copy in that dtype exists for
one block at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding

from dejax.training.decoder.config import DecoderConfig

Block = Callable[[Any, Array], Array]


def init_params(config: DecoderConfig, key: Array) -> dict[str, Any]:
    """Random parameters: normal with deviation 0.02, what is added to the residual stream smaller by sqrt(2 layers).

    Returns:
        {"embed": [vocabulary, width], "layers": {name: [layers, ...]}, "norm": [width], "unembed": [width, vocabulary]}
    """
    layers, width, hidden = config.layers, config.width, config.hidden
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes = {
        "query": (width, queries),
        "key": (width, keys),
        "value": (width, keys),
        "out": (queries, width),
        "gate": (width, hidden),
        "up": (width, hidden),
        "down": (hidden, width),
    }
    numbers = jax.random.split(key, len(shapes) + 2)
    added = (2 * layers) ** -0.5
    stack = {
        name: jax.random.normal(number, (layers, *shape)) * (0.02 * (added if name in ("out", "down") else 1.0))
        for (name, shape), number in zip(shapes.items(), numbers, strict=False)
    }
    stack["attention_norm"] = jnp.ones((layers, width))
    stack["mlp_norm"] = jnp.ones((layers, width))
    return {
        "embed": 0.02 * jax.random.normal(numbers[-1], (config.vocabulary, width)),
        "layers": stack,
        "norm": jnp.ones(width),
        "unembed": 0.02 * jax.random.normal(numbers[-2], (width, config.vocabulary)),
    }


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
    """`x / sqrt(mean(x^2) + eps) * scale` over the last axis, in float32; the dtype of `x`."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + eps)
    return (normed * scale.astype(jnp.float32)).astype(x.dtype)


def rotary(x: Array, positions: Array, base: float) -> Array:
    """Rotates pairs of elements (i, i + dim / 2) by `position * base^(-2 i / dim)`.

    Args:
        x: [batch, sequence, heads, dim].
        positions: int [sequence].
        base: of the wavelengths.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency  # [sequence, 1, half]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], -1).astype(x.dtype)


def implementation(config: DecoderConfig, wanted: str | None = None) -> str:
    """What is wanted; otherwise "cudnn" (flash attention) where a GPU computes in 16 bits, and "xla" elsewhere."""
    if wanted is not None:
        return wanted
    return "cudnn" if jax.default_backend() == "gpu" and config.dtype in ("bfloat16", "float16") else "xla"


def queries_keys_values(config: DecoderConfig, p: Any, x: Array, positions: Array) -> tuple[Array, Array, Array]:
    """The heads of a block's input, [batch, sequence, heads, head_dim]; queries and keys are rotated."""
    h = rms_norm(x, p["attention_norm"], config.norm_eps)
    parts = []
    for name in ("query", "key", "value"):
        part = h @ p[name].astype(h.dtype)
        parts.append(part.reshape(*x.shape[:2], -1, config.head_dim))
    q, k = (rotary(part, positions, config.rope_base) for part in parts[:2])
    return q, k, parts[2]


def feed_forward(config: DecoderConfig, p: Any, x: Array) -> Array:
    """SwiGLU: `(silu(h gate) * (h up)) down`, of the normed input."""
    h = rms_norm(x, p["mlp_norm"], config.norm_eps)
    gate, up = h @ p["gate"].astype(h.dtype), h @ p["up"].astype(h.dtype)
    return (jax.nn.silu(gate) * up) @ p["down"].astype(h.dtype)


def make_block(
    config: DecoderConfig, attention: str | None = None, *, batch_sharding: NamedSharding | None = None
) -> Block:
    """A block: (parameters of one layer, x [batch, sequence, width]) -> x.

    Args:
        config: the shapes.
        attention: "xla", "cudnn", or None for `implementation`.
        batch_sharding: on a mesh, the sharding of an activation, by its first axis. Without it XLA may divide queries
            and keys by the axis of their divided parameters, which cuDNN's attention refuses.
    """
    how = implementation(config, attention)

    def placed(x: Array) -> Array:
        return x if batch_sharding is None else jax.lax.with_sharding_constraint(x, batch_sharding)

    def block(p: Any, x: Array) -> Array:
        x = placed(x)
        q, k, v = map(placed, queries_keys_values(config, p, x, jnp.arange(x.shape[1])))
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=how)  # type: ignore[call-overload]
        x = x + placed(mixed).reshape(*x.shape[:2], -1) @ p["out"].astype(x.dtype)
        return placed(x + feed_forward(config, p, x))

    return block


def embed(config: DecoderConfig, params: Any, tokens: Array) -> Array:
    """Vectors of tokens, [batch, sequence, width] in the dtype of the arithmetic."""
    return params["embed"].astype(config.dtype)[tokens]


def logits(config: DecoderConfig, params: Any, x: Array) -> Array:
    """float32 [batch, sequence, vocabulary] of the last block's output."""
    h = rms_norm(x, params["norm"], config.norm_eps)
    return jnp.matmul(h, params["unembed"].astype(h.dtype), preferred_element_type=jnp.float32)


def forward(config: DecoderConfig, params: Any, tokens: Array, block: Block | None = None) -> Array:
    """Logits of the token after each token.

    Args:
        config: the shapes.
        params: as `init_params` makes them.
        tokens: int [batch, sequence].
        block: (parameters of one layer, x) -> x; by default `make_block(config)`.

    Returns:
        float32 [batch, sequence, vocabulary].
    """
    run = make_block(config) if block is None else block
    x, _ = jax.lax.scan(lambda x, p: (run(p, x), None), embed(config, params, tokens), params["layers"])
    return logits(config, params, x)


def cross_entropy(scores: Array, labels: Array) -> Array:
    """Mean of `log sum exp(scores) - scores[label]`, in nats."""
    picked = jnp.take_along_axis(scores, labels[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(scores, -1) - picked)


def loss(config: DecoderConfig, params: Any, tokens: Array, block: Block | None = None) -> Array:
    """Cross-entropy of `tokens[:, 1:]` given what precedes them; tokens: int [batch, sequence + 1]."""
    return cross_entropy(forward(config, params, tokens[:, :-1], block), tokens[:, 1:])
