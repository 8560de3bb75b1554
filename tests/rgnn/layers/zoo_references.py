"""The layers of the zoo, and in plain `jax.numpy`, one row per edge, those that PyTorch Geometric does not have.

The other layers are compared with PyTorch Geometric's own results in test_pyg_weights.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax.rgnn import zoo
from tests.rgnn.references import Arrays, Reference

K, N, H, C = 5, 4, 3, 2  # input and output width, heads, edge features


def leaky(x: Any) -> Any:
    return jnp.where(x > 0, x, 0.2 * x)


def unit(y: Any) -> Any:
    square = (y * y).sum(-1, keepdims=True)
    return jnp.where(square > 0, y / jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0)


def attend(r: Reference, score: Any, value: Any, a: Arrays) -> Any:
    p = r.softmax(score) * a.get("edge_scale", 1.0)
    return r.sum(p[..., None] * value)


def flat(y: Any) -> Any:
    return y.reshape(y.shape[0], y.shape[1] * y.shape[2])


def gated_gcn(r: Reference, a: Arrays) -> Any:
    x = a["x"]
    gate = x[r.d] @ a["gate_dst"] + x[r.s] @ a["gate_src"] + a["edge_features"] @ a["gate_edge"] + a["gate_bias"]
    return r.sum(jax.nn.sigmoid(gate) * (x[r.s] @ a["value"] + a["value_bias"])) + x @ a["root"] + a["bias"]


def pna(r: Reference, a: Arrays, mean_log_degree: float = 1.0) -> Any:
    x = a["x"]
    message = jnp.einsum("ek,tkf->etf", x[r.d], a["message_dst"]) + jnp.einsum("ek,tkf->etf", x[r.s], a["message_src"])
    message = message + a["message_bias"]
    if "edge_features" in a:
        message = message + jnp.einsum("ec,tcf->etf", a["edge_features"], a["message_edge"])
    mean = r.mean(message, r.d)
    variance = r.mean((message - mean[r.d]) ** 2, r.d)
    spread = variance > 1e-5
    deviation = jnp.where(spread, jnp.sqrt(jnp.where(spread, variance, 1.0)), 0.0)
    gathered = jnp.concatenate([mean, r.max(message, r.d), -r.max(-message, r.d), deviation], -1)
    degree = np.bincount(r.d, minlength=r.nodes)
    scale = (np.log(np.maximum(degree, 1) + 1) / mean_log_degree)[:, None, None]
    scaled = jnp.stack([gathered, gathered * scale, gathered / scale], 1)
    y = (
        jnp.einsum("nk,tkf->ntf", x, a["update"])
        + a["update_bias"]
        + jnp.einsum("nstf,stfm->ntm", scaled, a["aggregate"])
    )
    return flat(y) @ a["out"] + a["bias"]


def gat(r: Reference, a: Arrays, concat_heads: bool = True) -> Any:
    x_src, x_dst = a["x"], a.get("x_dst", a["x"])
    z = jnp.einsum("nk,hkd->nhd", x_src, a["weight"])
    z_dst = jnp.einsum("nk,hkd->nhd", x_dst, a.get("weight_dst", a["weight"]))
    score = (z[r.s] * a["attention_src"]).sum(-1) + (z_dst[r.d] * a["attention_dst"]).sum(-1)
    if "edge_features" in a:
        edge = jnp.einsum("ec,hcd->ehd", a["edge_features"], a["weight_edge"])
        score = score + (edge * a["attention_edge"]).sum(-1)
    y = attend(r, leaky(score), z[r.s], a)
    return (
        (flat(y) if concat_heads else y.mean(1))
        + a.get("bias", 0.0)
        + (x_dst @ a["residual"] if "residual" in a else 0)
    )


def rggnn(r: Reference, a: Arrays, steps: int = 1) -> Any:
    h, w = a["x"], a["weight"]
    for _ in range(steps):
        message = h[r.s] @ w if w.ndim == 2 else jnp.einsum("ek,ekn->en", h[r.s], w[r.t]) + a["edge_bias"][r.t]
        into = r.sum(message)
        i = [into @ a["input"][g] + a["input_bias"][g] for g in range(3)]
        o = [h @ a["hidden"][g] + a["hidden_bias"][g] for g in range(3)]
        reset, update = jax.nn.sigmoid(i[0] + o[0]), jax.nn.sigmoid(i[1] + o[1])
        h = (1 - update) * jnp.tanh(i[2] + reset * o[2]) + update * h
    return h


def _composed(x: Any, z: Any, composition: str) -> Any:
    if composition == "correlate":
        k = x.shape[-1]
        return jnp.stack([(x * jnp.roll(z, -i, -1)).sum(-1) for i in range(k)], -1)
    return x - z if composition == "subtract" else x * z


def compgcn(
    r: Reference,
    a: Arrays,
    directions: tuple[int, ...] | None = None,
    composition: str = "multiply",
    aggregation: str = "sum",
    return_relation: bool = False,
) -> Any:
    ids = np.zeros(r.types, int) if directions is None else np.asarray(directions)
    message = _composed(a["x"][r.s], a["relation"][r.t], composition)
    message = jnp.einsum("ek,ekn->en", message, a["weight"][ids[r.t]])
    y = r.sum(message) if aggregation == "sum" else r.mean(message, r.d)
    y = y + a["bias"]
    if "loop" in a:
        y = y + _composed(a["x"], a["loop"], composition) @ a["weight_loop"]
    return (y, a["relation"] @ a["relation_update"]) if return_relation else y


def simple_hgn(
    r: Reference, a: Arrays, beta: float = 0.05, normalize: bool = False, return_attention: bool = False
) -> Any:
    z = jnp.einsum("nk,hkd->nhd", a["x"], a["weight"])
    edge = jnp.einsum("rc,hcu->rhu", a["edge_embedding"], a["weight_edge"])[r.t]
    score = (z[r.s] * a["attention_src"]).sum(-1) + (z[r.d] * a["attention_dst"]).sum(-1)
    p = r.softmax(leaky(score + (edge * a["attention_edge"]).sum(-1)))
    if "previous_attention" in a:
        p = (1 - beta) * p + beta * a["previous_attention"]
    y = flat(r.sum(p[..., None] * z[r.s])) + a["x"] @ a["residual"] + a["bias"]
    y = unit(y) if normalize else y
    return (y, p) if return_attention else y


def heat(r: Reference, a: Arrays, concat_heads: bool = True) -> Any:
    z = jnp.einsum("nk,nkm->nm", a["x"], a["weight"][r.nt]) + a["node_bias"][r.nt]
    edge = leaky(a["edge_features"] @ a["weight_edge"])
    kind = leaky(a["edge_embedding"])[r.t]
    together = jnp.concatenate([z[r.d], z[r.s], kind, edge], -1)
    weight = jnp.concatenate([a[f"attention_{part}"] for part in ("dst", "src", "type", "edge")], 0)
    value = jnp.concatenate([z[r.s], edge], -1) @ jnp.concatenate([a["value"], a["value_edge"]], 0) + a["value_bias"]
    y = attend(r, leaky(together @ weight), value[:, None], a) + z[:, None]
    return flat(y) if concat_heads else y.mean(1)


def distmult(r: Reference, a: Arrays) -> Any:
    return (a["x"][r.s] * a["relation"][r.t] * a["x"][r.d]).sum(-1)


def _complex(x: Any) -> Any:
    half = x.shape[-1] // 2
    return jax.lax.complex(x[..., :half], x[..., half:])


def complex_(r: Reference, a: Arrays) -> Any:
    x, z = _complex(a["x"]), _complex(a["relation"])
    return jnp.real((x[r.s] * z[r.t] * jnp.conj(x[r.d])).sum(-1))


def rotate(r: Reference, a: Arrays, margin: float = 0.0) -> Any:
    x = _complex(a["x"])
    apart = x[r.s] * jnp.exp(1j * a["phase"][r.t]) - x[r.d]
    square = jnp.real(apart) ** 2 + jnp.imag(apart) ** 2
    return margin - jnp.where(square > 0, jnp.sqrt(jnp.where(square > 0, square, 1.0)), 0.0).sum(-1)


REFERENCES: dict[Any, Callable[..., Any]] = {
    zoo.gated_gcn: gated_gcn,
    zoo.pna: pna,
    zoo.gat: gat,
    zoo.rggnn: rggnn,
    zoo.compgcn: compgcn,
    zoo.simple_hgn: simple_hgn,
    zoo.heat: heat,
    zoo.distmult: distmult,
    zoo.complex_: complex_,
    zoo.rotate: rotate,
}


@dataclass(frozen=True)
class Layer:
    """One variant of a layer: program, arrays (rows, shape of a row) and keywords."""

    program: Any
    arrays: dict[str, tuple[str, tuple[int, ...]]]
    keywords: dict[str, Any]

    def run(self, graph: Any, a: Arrays, options: Any) -> Any:
        """The program's result; arrays that are no parameters are its other arguments."""
        if self.program in (zoo.distmult, zoo.complex_, zoo.rotate):
            return self.program(graph, **a, **self.keywords, options=options)
        others = ("x", "x_dst", "edge_features", "edge_weight", "previous_attention")
        params = {name: value for name, value in a.items() if name not in others}
        more = {name: a[name] for name in others[2:] if name in a}
        x = (a["x"], a["x_dst"]) if "x_dst" in a else a["x"]
        return self.program(graph, x, params, **more, **self.keywords, options=options)


def arrays(text: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Arrays from "x: node[K]; weight root[K, N]": the kind of their rows, if they have any, and the shape of a row."""
    found = {}
    for names, kind, row in re.findall(r"([\w ]+?)(?:: (\w+))?\[(.*?)\]", text.replace("; ", ";")):
        shape = eval(f"({row},)" if row else "()", {"K": K, "N": N, "H": H, "C": C})
        found |= dict.fromkeys(names.split(), (kind or "shared", shape))
    return found


_GIN = "x: node[K]; weight_1[K, 6]; weight_2[6, N]; bias_1[6]; bias_2[N]"
_PNA = (
    "x: node[K]; message_dst message_src[2, K, 3]; message_bias[2, 3]; update[2, K, N]; update_bias[2, N]; "
    "aggregate[3, 2, 12, N]; out[2 * N, 7]; bias[7]"
)
_EDGES = "edge_features: edge[C]; "
_PAIR = "x: node[K]; x_dst: node[K - 2]; " + _EDGES
_GAT = "weight[H, K, N]; attention_src attention_dst[H, N]"
_SCALE = "; edge_scale: edge[H]"
_TRANSFORMER = "query key value[H, K, N]; query_bias key_bias value_bias[H, N]"
_GRU = "input hidden[3, K, K]; input_bias hidden_bias[3, K]"
_COMP = "x: node[K]; relation: etype[K]; weight[2, K, N]; bias[N]"
_HGN = (
    "x: node[K]; weight[H, K, N]; attention_src attention_dst[H, N]; weight_edge[H, C, 6]; attention_edge[H, 6]; "
    "edge_embedding: etype[C]; residual[K, H * N]; bias[H * N]"
)
_RGAT = "x: node[K]; weight: etype[K, H * N]; query key[H * N, H]"
_OF_EDGES = "; weight_edge[C, H * N]; attention_edge[H * N, H]"
_HEAT = (
    "x: node[K]; edge_features: edge[C]; weight: ntype[K, N]; node_bias: ntype[N]; edge_embedding: etype[2]; "
    "weight_edge[C, 3]; attention_dst attention_src[N, H]; attention_type[2, H]; attention_edge[3, H]; value[N, N]; "
    "value_edge[3, N]; value_bias[N]"
)
_GATED = "gate_dst gate_src[K, N]; gate_edge[C, N]; gate_bias[N]; value[K, N]; value_bias[N]; root[K, N]; bias[N]"

# Program, arrays and keywords.
_LAYERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "gcn": (zoo.gcn, "x: node[K]; weight[K, N]; bias[N]", {}),
    "gcn_weighted": (zoo.gcn, "x: node[K]; weight[K, N]; bias[N]; edge_weight: edge[]", {"add_self_loops": False}),
    "sage_mean": (zoo.graphsage, "x: node[K]; neighbour root[K, N]; bias[N]", {}),
    "sage_pool": (
        zoo.graphsage,
        "x: node[K]; neighbour[6, N]; root[K, N]; bias[N]; pool[K, 6]; pool_bias[6]",
        {"aggregation": "max", "normalize": True},
    ),
    "sage_sum_wider": (zoo.graphsage, "x: node[K]; neighbour root[K, 7]; bias[7]", {"aggregation": "sum"}),
    "gin": (zoo.gin, _GIN, {}),
    "gine": (zoo.gin, _EDGES + _GIN + "; epsilon[]; edge[C, K]", {}),
    "gated_gcn": (zoo.gated_gcn, "x: node[K]; " + _EDGES + _GATED, {}),
    "pna": (zoo.pna, _PNA, {"mean_log_degree": 1.5}),
    "pna_edges": (zoo.pna, _EDGES + _PNA + "; message_edge[2, C, 3]", {}),
    "gat": (zoo.gat, "x: node[K]; " + _GAT + "; bias[H * N]" + _SCALE, {}),
    "gat_pair_edges": (
        zoo.gat,
        _PAIR + _GAT + "; weight_dst[H, K - 2, N]; weight_edge[H, C, N]; attention_edge[H, N]; residual[K - 2, N]",
        {"concat_heads": False},
    ),
    "gatv2": (zoo.gatv2, "x: node[K]; weight_src[H, K, N]; attention[H, N]; bias[N]", {"concat_heads": False}),
    "gatv2_pair_edges": (
        zoo.gatv2,
        _PAIR + "weight_src[H, K, N]; attention[H, N]; weight_dst[H, K - 2, N]; bias_src bias_dst[H, N]; "
        "weight_edge[H, C, N]" + _SCALE,
        {},
    ),
    "transformer": (
        zoo.graph_transformer,
        "x: node[K]; " + _TRANSFORMER + "; root[K, H * N]; root_bias[H * N]; gate[3, H * N]",
        {},
    ),
    "transformer_pair_edges": (
        zoo.graph_transformer,
        _PAIR + _TRANSFORMER + "; query[H, K - 2, N]; edge[H, C, N]; root[K - 2, N]; root_bias[N]" + _SCALE,
        {"concat_heads": False},
    ),
    "rggnn": (zoo.rggnn, "x: node[K]; weight: etype[K, K]; edge_bias: etype[K]; " + _GRU, {"steps": 2}),
    "rggnn_shared": (zoo.rggnn, "x: node[K]; weight[K, K]; " + _GRU, {}),
    "compgcn_multiply": (
        zoo.compgcn,
        _COMP + "; loop[K]; weight_loop relation_update[K, N]",
        {"directions": "alternate", "return_relation": True},
    ),
    "compgcn_subtract": (
        zoo.compgcn,
        _COMP + "; weight[1, K, N]",
        {"composition": "subtract", "aggregation": "mean"},
    ),
    "compgcn_correlate": (
        zoo.compgcn,
        _COMP + "; loop[K]; weight_loop[K, N]",
        {"composition": "correlate", "directions": "alternate"},
    ),
    "simple_hgn": (zoo.simple_hgn, _HGN + "; previous_attention: edge[H]", {"return_attention": True}),
    "simple_hgn_unit": (zoo.simple_hgn, _HGN, {"normalize": True}),
    "rgat_shared": (zoo.rgat_shared, _RGAT + "; bias[H * N]" + _SCALE, {}),
    "rgat_shared_within_edges": (
        zoo.rgat_shared,
        _EDGES + _RGAT + "; bias[N]" + _OF_EDGES,
        {"softmax": "relation", "concat_heads": False},
    ),
    "rgat_shared_multiply": (
        zoo.rgat_shared,
        _EDGES + _RGAT + "; bias[H * N]" + _OF_EDGES,
        {"mode": "multiplicative"},
    ),
    "heat": (zoo.heat, _HEAT, {}),
    "distmult": (zoo.distmult, "x: node[K]; relation: etype[K]", {}),
    "complex": (zoo.complex_, "x: node[6]; relation: etype[6]", {}),
    "rotate": (zoo.rotate, "x: node[6]; phase: etype[3]", {"margin": 6.0}),
}
LAYERS = {name: Layer(program, arrays(text), keywords) for name, (program, text, keywords) in _LAYERS.items()}
