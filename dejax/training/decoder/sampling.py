"""Samples text, token by token, with a cache of keys and values."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from dejax.training.decoder import model
from dejax.training.decoder.config import DecoderConfig


@functools.partial(jax.jit, static_argnames=("config", "length", "top_k"))
def generate(
    params: Any,
    prompt: Array,
    key: Array,
    *,
    config: DecoderConfig,
    length: int,
    temperature: float | Array = 1.0,
    top_k: int = 0,
) -> Array:
    """Continues a prompt.

    Args:
        params: of the model.
        prompt: int [batch, n], n at least 1.
        key: of the random numbers; the same key gives the same text.
        config: the shapes.
        length: number of tokens to add.
        temperature: scores are divided by it; 0: the most likely token.
        top_k: only so many most likely tokens are drawn; 0: all.

    Returns:
        int32 [batch, n + length], the prompt included.
    """
    batch, given = prompt.shape
    if given < 1:
        raise ValueError("generate: `prompt` must have at least one token, got none")
    total = given + length
    shape = (config.layers, batch, total, config.kv_heads, config.head_dim)
    cache = (jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype))
    prompt = jnp.pad(prompt.astype(jnp.int32), ((0, 0), (0, length)))

    def step(carry: Any, at: Array) -> tuple[Any, Array]:
        token, cache = carry
        scores, cache = _next_scores(config, params, token, cache, at)
        drawn = _draw(scores, jax.random.fold_in(key, at), temperature, top_k)
        token = jnp.where(at + 1 < given, prompt[:, jnp.minimum(at + 1, total - 1)], drawn)
        return (token, cache), token

    _, tokens = jax.lax.scan(step, (prompt[:, 0], cache), jnp.arange(total - 1))
    return jnp.concatenate([prompt[:, :1], tokens.T], axis=1)


def _next_scores(config: DecoderConfig, params: Any, token: Array, cache: Any, at: Array) -> tuple[Array, Any]:
    """Scores [batch, vocabulary] after the token at position `at`, and the cache with its keys and values."""

    def layer(x: Array, xs: Any) -> tuple[Array, Any]:
        p, keys, values = xs
        q, k, v = model.queries_keys_values(config, p, x, at[None])
        keys, values = (jax.lax.dynamic_update_slice_in_dim(c, n, at, 1) for c, n in ((keys, k), (values, v)))
        seen = (jnp.arange(keys.shape[1]) <= at)[None, None, None]
        mixed = jax.nn.dot_product_attention(q, keys, values, mask=seen, implementation="xla")
        x = x + mixed.reshape(*x.shape[:2], -1) @ p["out"].astype(x.dtype)
        return x + model.feed_forward(config, p, x), (keys, values)

    x = model.embed(config, params, token[:, None])
    x, cache = jax.lax.scan(layer, x, (params["layers"], *cache))
    return model.logits(config, params, x)[:, 0], cache


def _draw(scores: Array, key: Array, temperature: float | Array, top_k: int) -> Array:
    if top_k:
        least = jax.lax.top_k(scores, min(top_k, scores.shape[-1]))[0][..., -1:]
        scores = jnp.where(scores < least, -jnp.inf, scores)
    drawn = jax.random.categorical(key, scores / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, scores.argmax(-1)).astype(jnp.int32)
