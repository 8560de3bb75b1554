"""Layers in plain JAX, and ours: name -> a function that makes one for a graph.

`jax_ragged`: gather, `jax.lax.ragged_dot`, segment sums. `jax_dense`: every node times the matrix of every type, then a
gather; it is faster if nodes are few. `tokamax`: as `jax_ragged`, with tokamax's kernels.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.peers.case import Graph, Settings

Params = dict[str, Any]


class NotInstalled(Exception):
    """A peer needs a package that is not installed."""


@dataclass(frozen=True, slots=True)
class Layer:
    """`function(tables, x, params)`. The tables are an argument, so that they do not become constants."""

    function: Callable[[Any, jax.Array, Params], jax.Array]
    tables: Any


@lru_cache(maxsize=1)
def rel_graph(graph: Graph) -> tuple[Any, float]:
    """Our graph, and the seconds to make it and to put it on the device. The last graph is kept."""
    from dejax import rgnn

    start = time.perf_counter()
    built = rgnn.RelGraph.from_edges(
        graph.senders,
        graph.receivers,
        graph.edge_type,
        num_nodes=graph.num_nodes,
        num_edge_types=graph.num_edge_types,
        node_type=graph.node_type,
        num_node_types=graph.num_node_types,
    )
    jax.block_until_ready(built)
    return jax.device_put(built), time.perf_counter() - start


def dejax_layer(graph: Graph, model: str, settings: Settings) -> Layer:
    from dejax import rgnn

    options = rgnn.Options(precision=settings.precision)
    program = getattr(rgnn.library, model)
    return Layer(lambda tables, x, params: program(tables, x, params, options=options), rel_graph(graph)[0])


def ragged_layer(graph: Graph, model: str, settings: Settings, product: Any = jax.lax.ragged_dot) -> Layer:
    typed = lambda x, w, sizes: _by_heads(product, x, w, sizes)  # noqa: E731
    return Layer(_ragged(model, graph.num_nodes, typed), _tables(graph, model, settings))


def tokamax_layer(graph: Graph, model: str, settings: Settings) -> Layer:
    try:
        import tokamax
    except ImportError as error:
        raise NotInstalled(f"tokamax ({error})") from None
    return ragged_layer(graph, model, settings, tokamax.ragged_dot)


def dense_layer(graph: Graph, model: str, settings: Settings) -> Layer:
    return Layer(_dense(model, graph.num_nodes), _tables(graph, model, settings))


LAYERS: dict[str, Callable[[Graph, str, Settings], Layer]] = {
    "dejax": dejax_layer,
    "jax_ragged": ragged_layer,
    "jax_dense": dense_layer,
    "tokamax": tokamax_layer,
}


def _tables(graph: Graph, model: str, settings: Settings) -> dict[str, jax.Array]:
    tables = {
        "src": graph.senders,
        "dst": graph.receivers,
        "etype": graph.edge_type,
        "sizes": graph.edges_by_type.astype(np.int32),
        "ntype": graph.node_type,
        "nsizes": graph.nodes_by_type.astype(np.int32),
    }
    if model == "rgcn":
        tables["scale"] = graph.mean_scale.astype(jnp.dtype(settings.dtype))
    return {key: jnp.asarray(value) for key, value in tables.items()}


def _by_heads(product: Any, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [m, k] by w [types, k, n], or [types, heads, k, d] to [m, heads, d]; rows sorted by type."""
    if w.ndim == 3:
        return product(x, w, sizes)
    types, heads, k, d = w.shape
    return product(x, w.transpose(0, 2, 1, 3).reshape(types, k, heads * d), sizes).reshape(-1, heads, d)


def _per_head(typed: Any, x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
    """x [m, heads, d] by w [types, heads, d, f], head by head."""
    return jnp.stack([typed(x[:, h], w[:, h], sizes) for h in range(x.shape[1])], 1)


def _softmax(score: jax.Array, dst: jax.Array, nodes: int) -> jax.Array:
    largest = jax.ops.segment_max(jax.lax.stop_gradient(score), dst, nodes)
    e = jnp.exp(score - largest[dst])
    return e / jax.ops.segment_sum(e, dst, nodes)[dst]


def _ragged(model: str, nodes: int, typed: Any) -> Any:
    def rgcn(t: Any, x: Any, p: Params) -> Any:
        return jax.ops.segment_sum(typed(x[t["src"]], p["weight"], t["sizes"]) * t["scale"][:, None], t["dst"], nodes)

    def rgat(t: Any, x: Any, p: Params) -> Any:
        z_src, z_dst = (typed(x[t[end]], p["weight"], t["sizes"]) for end in ("src", "dst"))
        score = (z_src * p["attention_src"][0]).sum(-1) + (z_dst * p["attention_dst"][0]).sum(-1)
        attention = _softmax(jax.nn.leaky_relu(score, 0.2), t["dst"], nodes)
        return jax.ops.segment_sum(attention[..., None] * z_src, t["dst"], nodes).reshape(nodes, -1)

    def hgt(t: Any, x: Any, p: Params) -> Any:
        key, query, value = (typed(x, p[name], t["nsizes"]) for name in ("key", "query", "value"))
        keys = _per_head(typed, key[t["src"]], p["relation_attention"], t["sizes"])
        score = (keys * query[t["dst"]]).sum(-1) * p["prior"][t["etype"]] * key.shape[-1] ** -0.5
        messages = _per_head(typed, value[t["src"]], p["relation_message"], t["sizes"])
        attention = _softmax(score, t["dst"], nodes)
        y = jax.ops.segment_sum(attention[..., None] * messages, t["dst"], nodes).reshape(nodes, -1)
        return typed(jax.nn.gelu(y, approximate=False), p["out"], t["nsizes"])

    return {"rgcn": rgcn, "rgat": rgat, "hgt": hgt}[model]


def _dense(model: str, nodes: int) -> Any:
    def of_source(t: Any, z: Any) -> Any:
        return z.reshape(-1, *z.shape[2:])[t["etype"] * nodes + t["src"]]

    def rgcn(t: Any, x: Any, p: Params) -> Any:
        z = jnp.einsum("nk,rkm->rnm", x, p["weight"])
        return jax.ops.segment_sum(of_source(t, z) * t["scale"][:, None], t["dst"], nodes)

    def rgat(t: Any, x: Any, p: Params) -> Any:
        z = jnp.einsum("nk,rhkd->rnhd", x, p["weight"])
        from_src, from_dst = ((z * p[f"attention_{end}"][0]).sum(-1) for end in ("src", "dst"))
        at_dst = from_dst.reshape(-1, z.shape[2])[t["etype"] * nodes + t["dst"]]
        score = jax.nn.leaky_relu(of_source(t, from_src) + at_dst, 0.2)
        attention = _softmax(score, t["dst"], nodes)
        return jax.ops.segment_sum(attention[..., None] * of_source(t, z), t["dst"], nodes).reshape(nodes, -1)

    def hgt(t: Any, x: Any, p: Params) -> Any:
        def project(x: Any, w: Any) -> Any:
            return jax.lax.ragged_dot(x, w, t["nsizes"])

        key, query, value = (_by_heads(jax.lax.ragged_dot, x, p[n], t["nsizes"]) for n in ("key", "query", "value"))
        keys = jnp.einsum("nhd,rhdf->rnhf", key, p["relation_attention"])
        messages = jnp.einsum("nhd,rhdf->rnhf", value, p["relation_message"])
        score = (of_source(t, keys) * query[t["dst"]]).sum(-1) * p["prior"][t["etype"]] * key.shape[-1] ** -0.5
        attention = _softmax(score, t["dst"], nodes)
        y = jax.ops.segment_sum(attention[..., None] * of_source(t, messages), t["dst"], nodes).reshape(nodes, -1)
        return project(jax.nn.gelu(y, approximate=False), p["out"])

    return {"rgcn": rgcn, "rgat": rgat, "hgt": hgt}[model]
