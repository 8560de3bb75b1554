"""MLPerf's R-GAT: three layers of graph attention, one for each relation and head, and a linear map of papers.

For each relation r, from u to v, and each head:

    z = W_r h                                   (one W_r for both ends, no bias)
    e_uv = LeakyReLU_0.2(a_r . z_u + b_r . z_v)
    h'_v = sum over r of (sum over u of softmax(e)_uv z_u + bias_r)

with the softmax over the edges of v in relation r, and heads side by side. Between layers follow LeakyReLU (slope 0.01)
and dropout. Logits are a linear map of the seeds' last values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from dejax import rgnn
from dejax.minibatch import Block
from dejax.rgnn import library

EdgeType = tuple[str, str, str]
SEED_TYPE = "paper"
BETWEEN_SLOPE = 0.01
"""Of the LeakyReLU between layers."""


@dataclass(frozen=True, slots=True)
class RGATConfig:
    """The sizes of the model; by default those of MLPerf.

    Attributes:
        edge_types: the relations.
        node_types: the node types, in the order of the graph.
        in_features: width of the features.
        hidden: width of the layers, all heads together.
        heads: heads of a layer.
        layers: number of layers.
        classes: number of classes.
        dropout: share of the values between layers that is dropped.
        dtype: of the arithmetic; parameters are float32.
        backend: backend of the compiler: "auto", "pallas" or "xla".
        precision: of products: see `dejax.rgnn.Options`.
    """

    edge_types: tuple[EdgeType, ...]
    node_types: tuple[str, ...]
    in_features: int = 1024
    hidden: int = 512
    heads: int = 4
    layers: int = 3
    classes: int = 2983
    dropout: float = 0.2
    dtype: str = "bfloat16"
    backend: str = "auto"
    precision: str | None = None

    def __post_init__(self) -> None:
        if self.hidden % self.heads:
            raise ValueError(f"`hidden` must be a multiple of `heads`, got {self.hidden} and {self.heads}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"`dropout` must be at least 0 and below 1, got {self.dropout}")


def init(key: Array, config: RGATConfig) -> dict[str, Any]:
    """Parameters, float32: `layers`, each with `weight` [R, H, k, d], `attention_src`, `attention_dst` [R, H, d] and
    `bias` [R, H * d]; `head` with `weight` [hidden, classes] and `bias` [classes].

    Initial values are normal with Glorot's variance times 2 for weights and attention vectors, as in DGL's GATConv; 0
    for biases; uniform within k^-1/2 for the linear map.
    """
    relations, heads, width = len(config.edge_types), config.heads, config.hidden // config.heads
    layers = []
    for number in range(config.layers):
        k = config.hidden if number else config.in_features
        of_weight, of_src, of_dst = jax.random.split(jax.random.fold_in(key, number), 3)
        scale = 2 / (k + config.hidden) ** 0.5
        vector = 2 / ((heads + 1) * width) ** 0.5
        layers.append(
            {
                "weight": scale * jax.random.normal(of_weight, (relations, heads, k, width)),
                "attention_src": vector * jax.random.normal(of_src, (relations, heads, width)),
                "attention_dst": vector * jax.random.normal(of_dst, (relations, heads, width)),
                "bias": jnp.zeros((relations, config.hidden)),
            }
        )
    of_weight, of_bias = jax.random.split(jax.random.fold_in(key, config.layers))
    bound = config.hidden**-0.5
    head = {
        "weight": jax.random.uniform(of_weight, (config.hidden, config.classes), minval=-bound, maxval=bound),
        "bias": jax.random.uniform(of_bias, (config.classes,), minval=-bound, maxval=bound),
    }
    return {"layers": layers, "head": head}


@rgnn.program
def _layer(g: Any, x: Any, params: Any, bias: Any) -> Any:
    return library.rgat(g, x, params, softmax="relation") + g.per_node_type(bias)


def layer(config: RGATConfig, graph: rgnn.RelGraph, x: Array, params: dict[str, Array]) -> Array:
    """One layer: [sources, k] -> [destinations, hidden]. A node gets the biases of all relations into its type."""
    into = np.array([config.node_types.index(target) for _, _, target in config.edge_types], np.int32)
    bias = jnp.zeros((len(config.node_types), config.hidden)).at[into].add(params["bias"])
    own = {name: params[name].astype(x.dtype) for name in ("weight", "attention_src", "attention_dst")}
    options = rgnn.Options(backend=config.backend, precision=config.precision)
    result: Array = _layer(graph, x, own, bias.astype(x.dtype), options=options)
    return result


def logits(
    config: RGATConfig,
    params: dict[str, Any],
    blocks: Sequence[Block],
    x: Mapping[str, Array],
    positions: Array,
    key: Array | None = None,
) -> Array:
    """Logits of the seeds, float32[seeds, classes].

    Args:
        config: the sizes.
        params: from `init`.
        blocks: of `make_blocks`, one for each layer.
        x: features by node type, [nodes, in_features].
        positions: int32[seeds], the local numbers of the seeds, `sample.seed_positions["paper"]`.
        key: of dropout; None: no dropout.
    """
    h = blocks[0].join(jax.tree.map(lambda rows: rows.astype(config.dtype), x))
    for number, (block, own) in enumerate(zip(blocks, params["layers"], strict=True)):
        h = layer(config, block.bipartite, h, own)
        if number + 1 < len(blocks):
            h = jax.nn.leaky_relu(h, BETWEEN_SLOPE)
            if key is not None and config.dropout:
                h = _dropped(jax.random.fold_in(key, number), h, config.dropout)
    # Papers that are seeds are the first papers.
    seeds = blocks[-1].split(h)[SEED_TYPE][positions]
    found = jnp.dot(seeds, params["head"]["weight"].astype(h.dtype), preferred_element_type=jnp.float32)
    return found + params["head"]["bias"]


def _dropped(key: Array, h: Array, share: float) -> Array:
    """Inverted dropout by XLA's own generator: 16 random bits an element. Threefry would take longer than a layer."""
    data = jax.random.key_data(key).reshape(-1)
    fast = jax.random.wrap_key_data(jnp.concatenate([data, data])[:4], impl="rbg")
    words = jax.random.bits(fast, (h.shape[0], -(-h.shape[1] // 2)), jnp.uint32)
    halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=1)[:, : h.shape[1]]
    bound = round(share * 65536)
    return jnp.where(halves >= bound, h * (65536 / (65536 - bound)), 0).astype(h.dtype)


def loss_of(found: Array, labels: Array, valid: Array) -> Array:
    """Mean cross-entropy of the valid seeds."""
    picked = jnp.take_along_axis(found, jnp.maximum(labels, 0)[:, None], axis=1)[:, 0]
    losses = jax.nn.logsumexp(found, axis=1) - picked
    return jnp.where(valid, losses, 0).sum() / jnp.maximum(valid.sum(), 1)
