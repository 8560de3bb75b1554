"""Layers of the zoo as people write them in JAX: gathered rows and `jax.ops.segment_*`, edges sorted by receiver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class Segments:
    """Reductions over edges, which are sorted by receiver."""

    def __init__(self, senders: Any, receivers: Any, nodes: int) -> None:
        self.s, self.d, self.nodes = senders, receivers, nodes

    def sum(self, x: Any) -> Any:
        return jax.ops.segment_sum(x, self.d, self.nodes, indices_are_sorted=True)

    def max(self, x: Any) -> Any:
        return jax.ops.segment_max(x, self.d, self.nodes, indices_are_sorted=True)

    def degree(self) -> Any:
        return self.sum(jnp.ones(self.d.shape, jnp.float32))

    def attend(self, score: Any, value: Any) -> Any:
        e = jnp.exp(score - jax.lax.stop_gradient(self.max(score))[self.d])
        total = self.sum(e[..., None] * value)
        return total / jnp.maximum(self.sum(e), 1e-30)[..., None]


def heads(x: Any, w: Any) -> Any:
    return jnp.einsum("nk,hkd->nhd", x, w)


def gcn(g: Segments, x: Any, p: Any) -> Any:
    norm = jax.lax.rsqrt(g.degree() + 1.0)[:, None]
    z = (x @ p["weight"]) * norm
    return (g.sum(z[g.s]) + z) * norm + p["bias"]


def sage(g: Segments, x: Any, p: Any) -> Any:
    mean = g.sum(x[g.s]) / jnp.maximum(g.degree(), 1.0)[:, None]
    return mean @ p["neighbour"] + x @ p["root"] + p["bias"]


def gin(g: Segments, x: Any, p: Any) -> Any:
    h = jax.nn.relu((x + g.sum(x[g.s])) @ p["weight_1"] + p["bias_1"])
    return h @ p["weight_2"] + p["bias_2"]


def gated_gcn(g: Segments, x: Any, p: Any) -> Any:
    gate = (x @ p["gate_dst"] + p["gate_bias"])[g.d] + (x @ p["gate_src"])[g.s]
    return g.sum(jax.nn.sigmoid(gate) * (x @ p["value"] + p["value_bias"])[g.s]) + x @ p["root"] + p["bias"]


def gat(g: Segments, x: Any, p: Any) -> Any:
    z = heads(x, p["weight"])
    score = (z * p["attention_src"]).sum(-1)[g.s] + (z * p["attention_dst"]).sum(-1)[g.d]
    y = g.attend(jax.nn.leaky_relu(score, 0.2), z[g.s])
    return y.reshape(y.shape[0], -1) + p["bias"]


def gatv2(g: Segments, x: Any, p: Any) -> Any:
    z, to = (heads(x, p[f"weight_{end}"]) + p[f"bias_{end}"] for end in ("src", "dst"))
    rows = z[g.s]
    score = (jax.nn.leaky_relu(rows + to[g.d], 0.2) * p["attention"]).sum(-1)
    y = g.attend(score, rows)
    return y.reshape(y.shape[0], -1) + p["bias"]


def transformer(g: Segments, x: Any, p: Any) -> Any:
    query, key, value = (heads(x, p[name]) + p[f"{name}_bias"] for name in ("query", "key", "value"))
    score = (query[g.d] * key[g.s]).sum(-1) * query.shape[-1] ** -0.5
    y = g.attend(score, value[g.s])
    return y.reshape(y.shape[0], -1) + x @ p["root"] + p["root_bias"]


def rggnn(g: Segments, x: Any, p: Any) -> Any:
    into = jnp.einsum("nk,gkm->gnm", g.sum((x @ p["weight"])[g.s]), p["input"]) + p["input_bias"][:, None]
    own = jnp.einsum("nk,gkm->gnm", x, p["hidden"]) + p["hidden_bias"][:, None]
    reset, update = jax.nn.sigmoid(into[0] + own[0]), jax.nn.sigmoid(into[1] + own[1])
    candidate = jnp.tanh(into[2] + reset * own[2])
    return candidate + update * (x - candidate)


LAYERS: dict[str, Callable[..., Any]] = {
    "gcn": gcn,
    "sage": sage,
    "gin": gin,
    "gated_gcn": gated_gcn,
    "gat": gat,
    "gatv2": gatv2,
    "transformer": transformer,
    "rggnn": rggnn,
}
