"""The contract of the compiler's operators and library models: programs, their float64 references, and how they are compared.

Every case has a program, a reference written with one row for each edge and no grouping at all, and the arrays that both
take. Tests run the cases on a backend, a dtype and a graph; the references run in float64, jitted by JAX on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dejax import rgnn
from dejax.rgnn import Options, RelGraph, library
from tests.rgnn.strategies import EdgeList

Arrays = dict[str, Any]


@dataclass(frozen=True)
class Size:
    """Widths of a case: `k` in, `n` out (of one head, where there are heads), and the number of heads."""

    k: int = 5
    n: int = 4
    h: int = 2

    def __str__(self) -> str:
        return f"{self.k}-{self.n}-{self.h}"


@dataclass(frozen=True)
class Case:
    """One operator or model.

    Attributes:
      run: (graph, arrays, options) -> the program's result.
      reference: (edges, arrays) -> the same in plain `jax.numpy`.
      arrays: size -> for each array the kind of its rows (`node`, `edge`, `source_pair`, `etype`, `ntype`, `shared`), the
        shape of a row, and the standard deviation of its numbers.
    """

    name: str
    run: Callable[[RelGraph, Arrays, Options], Any]
    reference: Callable[[Reference, Arrays], Any]
    arrays: Callable[[Size], dict[str, tuple[str, tuple[int, ...], float]]]


# --- graphs ----------------------------------------------------------------------------------------------------------


def edge_list(
    seed: int,
    nodes: int,
    edges: int,
    types: int,
    node_types: int = 1,
    *,
    senders: int = 0,
    receivers: int = 0,
    hub: int = 0,
    duplicates: int = 0,
    empty: int = -1,
) -> EdgeList:
    """Random edges.

    Args:
      senders: the first so many nodes have outgoing edges (0: all); receivers: likewise incoming edges.
      hub: so many edges arrive at node 0, besides its share of the others.
      duplicates: the last so many edges are the first ones again.
      empty: an edge type without edges.
    """
    rng = np.random.default_rng(seed)
    kinds = rng.integers(0, types, edges)
    kinds[kinds == empty] = (empty + 1) % types
    node_type = rng.integers(0, node_types, nodes).astype(np.int32) if node_types > 1 else None
    from_nodes, to_nodes = rng.integers(0, senders or nodes, edges), rng.integers(0, receivers or nodes, edges)
    to_nodes[:hub] = 0
    for column in (from_nodes, to_nodes, kinds):
        column[edges - duplicates :] = column[:duplicates]
    return EdgeList(
        from_nodes.astype(np.int32),
        to_nodes.astype(np.int32),
        kinds.astype(np.int32),
        nodes,
        types,
        node_type,
        node_types,
    )


GRAPHS: dict[str, EdgeList] = {
    # Two nodes have no incoming edge; type 1 is empty.
    "typical": edge_list(0, nodes=11, edges=40, types=4, node_types=3, receivers=9, duplicates=6, empty=1),
    # Few senders, many edges each: compaction by source; all edges arrive at two hubs.
    "hubs": edge_list(1, nodes=14, edges=90, types=3, node_types=2, senders=5, receivers=2),
    # Many senders, one receiver a type: aggregation before transformation.
    "fan_in": edge_list(2, nodes=40, edges=120, types=2, node_types=2, receivers=3),
    "sparse": edge_list(3, nodes=30, edges=9, types=12, node_types=5),
    "one_type": edge_list(4, nodes=9, edges=37, types=1),
    "one_node": edge_list(5, nodes=1, edges=3, types=2),
    "no_edges": edge_list(6, nodes=4, edges=0, types=2, node_types=2),
    # For a real GPU: many programs, hubs of thousands of edges.
    "large": edge_list(7, nodes=3000, edges=20_000, types=20, node_types=4, senders=2900, hub=4000, empty=3),
}
HUB_CHUNK = 16  # so small that `hubs` and `fan_in` have hubs


@cache
def graph_of(name: str) -> RelGraph:
    return GRAPHS[name].build(**({} if name == "large" else {"hub_chunk": HUB_CHUNK}))


# --- references ------------------------------------------------------------------------------------------------------


class Reference:
    """A graph as plain index arrays; what programs say with `g`, in terms of `jax.numpy`."""

    def __init__(self, edges: EdgeList) -> None:
        self.s, self.d, self.t = edges.senders, edges.receivers, edges.edge_type
        self.nodes, self.types = edges.num_nodes, edges.num_edge_types
        self.nt = np.zeros(self.nodes, np.int32) if edges.node_type is None else edges.node_type
        self.pair = np.unique(self.t * self.nodes + self.s, return_inverse=True)[1]

    def sum(self, x: Any, rows: np.ndarray | None = None) -> Any:
        """Sums over the edges that share a row; by default a destination."""
        rows = self.d if rows is None else rows
        return jnp.zeros((self.nodes, *x.shape[1:]), x.dtype).at[rows].add(x)

    def mean(self, x: Any, rows: np.ndarray) -> Any:
        count = np.maximum(np.bincount(rows, minlength=self.nodes), 1)
        return self.sum(x, rows) / count.reshape(-1, *(1,) * (x.ndim - 1))

    def max(self, x: Any, rows: np.ndarray) -> Any:
        """The largest of each row as a mean over the edges that have it, so that these share the gradient."""
        values = jax.lax.stop_gradient(x)
        largest = jnp.full((self.nodes, *x.shape[1:]), -jnp.inf, x.dtype).at[rows].max(values)
        chosen = (values == largest[rows]).astype(x.dtype)
        return self.sum(x * chosen / jnp.maximum(self.sum(chosen, rows), 1)[rows], rows)

    def degree(self, rows: np.ndarray, within_relation: bool = False) -> np.ndarray:
        key = rows * self.types + self.t if within_relation else rows
        return np.bincount(key, minlength=self.nodes * self.types)[key].astype(np.float64)

    def softmax(self, score: Any, within: str = "dst") -> Any:
        key = self.d if within == "dst" else self.d * self.types + self.t
        size = self.nodes * self.types
        if not len(key):
            return score
        values = jax.lax.stop_gradient(score)
        largest = jnp.full((size, *score.shape[1:]), -jnp.inf, score.dtype).at[key].max(values)[key]
        e = jnp.exp(score - largest)
        return e / jnp.zeros((size, *score.shape[1:]), score.dtype).at[key].add(e)[key]


def _axis(x: Any) -> Any:
    return x[..., None]


# --- operators -------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}


def case(
    arrays: Callable[[Size], dict[str, tuple[str, tuple[int, ...], float]]],
    reference: Callable[[Reference, Arrays], Any],
) -> Callable[[Callable[[Any, Arrays], Any]], Callable]:
    """Registers the decorated program function."""

    def register(function: Callable[[Any, Arrays], Any]) -> Callable:
        program = rgnn.program(function)
        name = function.__name__
        CASES[name] = Case(name, lambda graph, a, options: program(graph, a, options=options), reference, arrays)
        return function

    return register


def _weight(size: int) -> float:
    return size**-0.5


@case(
    lambda z: {"x": ("node", (z.k,), 1), "w": ("etype", (z.k, z.n), _weight(z.k))},
    lambda r, a: jnp.einsum("ek,ekn->en", a["x"][r.s], a["w"][r.t]),
)
def linear_on_edges(g: Any, a: Arrays) -> Any:
    return g.src(a["x"]) @ g.per_edge_type(a["w"])


@case(
    lambda z: {"x": ("node", (z.k,), 1), "w": ("etype", (z.h, z.k, z.n), _weight(z.k))},
    lambda r, a: r.sum(jnp.einsum("ek,ehkn->ehn", a["x"][r.s], a["w"][r.t])),
)
def linear_by_edge_type_and_head(g: Any, a: Arrays) -> Any:
    return g.sum_to_dst(g.src(a["x"]) @ g.per_edge_type(a["w"]))


@case(
    lambda z: {"x": ("node", (z.h, z.k), 1), "w": ("etype", (z.h, z.k, z.n), _weight(z.k))},
    lambda r, a: r.sum(jnp.einsum("ehk,ehkn->ehn", a["x"][r.d], a["w"][r.t]), r.s),
)
def linear_of_heads_to_src(g: Any, a: Arrays) -> Any:
    return g.sum_to_src(g.dst(a["x"]) @ g.per_edge_type(a["w"]))


@case(
    lambda z: {
        "x": ("node", (z.h, z.k), 1),
        "w": ("etype", (z.k, z.n), _weight(z.k)),
        "v": ("shared", (z.n, z.k), _weight(z.n)),
    },
    lambda r, a: r.sum(jnp.einsum("ehk,ekn,nj->ehj", a["x"][r.s], a["w"][r.t], a["v"])),
)
def linear_with_one_weight_for_all_heads(g: Any, a: Arrays) -> Any:
    return g.sum_to_dst((g.src(a["x"]) @ g.per_edge_type(a["w"])) @ g.shared(a["v"]))


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "w": ("ntype", (z.k, z.n), _weight(z.k)),
        "v": ("ntype", (z.h, z.n, z.k), _weight(z.n)),
    },
    lambda r, a: jnp.einsum("vk,vkn,vhnj->vhj", a["x"], a["w"][r.nt], a["v"][r.nt]),
)
def linear_by_node_type(g: Any, a: Arrays) -> Any:
    return (g.node(a["x"]) @ g.per_node_type(a["w"])) @ g.per_node_type(a["v"])


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "w": ("etype", (z.k, z.n), _weight(z.k)),
        "v": ("etype", (z.n, z.n), _weight(z.n)),
        "u": ("shared", (z.k, z.k), _weight(z.k)),
    },
    lambda r, a: r.sum(jnp.einsum("ek,kj,ejn,enm->em", a["x"][r.s], a["u"], a["w"][r.t], a["v"][r.t])),
)
def linear_chain(g: Any, a: Arrays) -> Any:
    row = g.src(g.node(a["x"]) @ g.shared(a["u"]))
    return g.sum_to_dst((row @ g.per_edge_type(a["w"])) @ g.per_edge_type(a["v"]))


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "c": ("etype", (3,), 1),
        "b": ("shared", (3, z.k, z.n), _weight(z.k)),
    },
    lambda r, a: r.sum(jnp.einsum("ek,eb,bkn->en", a["x"][r.s], a["c"][r.t], a["b"])),
)
def linear_with_a_computed_weight(g: Any, a: Arrays) -> Any:
    bases = g.shared(a["b"])
    count, k, n = bases.shape
    weight = (g.per_edge_type(a["c"])[None, :] @ bases.reshape(count, k * n)).reshape(k, n)
    return g.sum_to_dst(g.src(a["x"]) @ weight)


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "w": ("etype", (z.h, z.k, z.n), _weight(z.k)),
        "p": ("etype", (z.h, z.n), _weight(z.n)),
        "q": ("ntype", (z.k,), _weight(z.k)),
    },
    lambda r, a: (
        jnp.einsum("ek,ehkn,ehn->eh", a["x"][r.s], a["w"][r.t], a["p"][r.t])
        + _axis(jnp.einsum("ek,ek->e", a["x"][r.d], a["q"][r.nt][r.s]))
    ),
)
def dot_with_constants(g: Any, a: Arrays) -> Any:
    score = rgnn.dot(g.src(a["x"]) @ g.per_edge_type(a["w"]), g.per_edge_type(a["p"]))
    return score + rgnn.dot(g.dst(a["x"]), g.src(g.per_node_type(a["q"])))[None]


@case(
    lambda z: {"x": ("node", (z.h, z.k), _weight(z.k)), "y": ("node", (z.h, z.k), 1), "e": ("edge", (), 1)},
    lambda r, a: r.mean(jnp.einsum("ehk,ehk->eh", a["x"][r.s], a["y"][r.d]) * _axis(a["e"]), r.d),
)
def dot_of_both_ends(g: Any, a: Arrays) -> Any:
    return g.mean_to_dst(rgnn.dot(g.src(a["x"]), g.dst(a["y"])) * g.edge(a["e"]))


@case(
    lambda z: {"s": ("edge", (z.h,), 2), "x": ("node", (z.h, z.k), 1)},
    lambda r, a: (r.softmax(a["s"]), r.sum(_axis(r.softmax(a["s"])) * a["x"][r.s])),
)
def softmax_over_incoming_edges(g: Any, a: Arrays) -> Any:
    p = rgnn.edge_softmax(g.edge(a["s"]))
    return p, g.sum_to_dst(p[..., None] * g.src(a["x"]))


@case(
    lambda z: {"s": ("edge", (), 2), "x": ("node", (z.k,), 1)},
    lambda r, a: (r.softmax(a["s"], "relation"), r.sum(_axis(r.softmax(a["s"], "relation")) * a["x"][r.s])),
)
def softmax_within_relations(g: Any, a: Arrays) -> Any:
    p = rgnn.edge_softmax(g.edge(a["s"]), within="relation")
    return p, g.sum_to_dst(p * g.src(a["x"]))


@case(
    lambda z: {"x": ("node", (z.k,), 1), "e": ("edge", (z.k,), 1)},
    lambda r, a: tuple(
        reduce(a["x"][ends] * a["e"], rows)
        for reduce in (r.sum, r.mean, r.max)
        for ends, rows in ((r.s, r.d), (r.d, r.s))
    ),
)
def reductions(g: Any, a: Arrays) -> Any:
    to_dst, to_src = g.src(a["x"]) * g.edge(a["e"]), g.dst(a["x"]) * g.edge(a["e"])
    return (
        g.sum_to_dst(to_dst),
        g.sum_to_src(to_src),
        g.mean_to_dst(to_dst),
        g.mean_to_src(to_src),
        g.max_to_dst(to_dst),
        g.max_to_src(to_src),
    )


@case(
    lambda z: {"x": ("node", (z.k,), 1), "y": ("node", (z.k,), 1), "e": ("edge", (1,), 1)},
    lambda r, a: r.max(a["x"][r.s] * a["e"] + 0.37 * a["y"][r.d] - a["y"][r.s] * a["e"], r.d),
)
def largest_computed_message(g: Any, a: Arrays) -> Any:
    """Backward computes the messages again and must find the largest among them, to the last bit."""
    e = g.edge(a["e"])
    return g.max_to_dst(g.src(a["x"]) * e + g.dst(a["y"]) * 0.37 - g.src(a["y"]) * e)


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "y": ("node", (z.h, z.n), 1),
        "c": ("etype", (z.k,), 1),
    },
    lambda r, a: r.sum(
        jnp.concatenate(
            [a["x"][r.s] * a["c"][r.t], a["y"][r.d].reshape(len(r.d), a["y"].shape[1] * a["y"].shape[2])], -1
        )[:, 1:]
    ),
)
def concatenation_and_slices(g: Any, a: Arrays) -> Any:
    x, y = g.src(a["x"]) * g.per_edge_type(a["c"]), g.dst(a["y"])
    return g.sum_to_dst(rgnn.concatenate([x, y.reshape(-1)])[1:])


@case(
    lambda z: {"x": ("node", (z.h, z.k), 1)},
    lambda r, a: (
        a["x"].sum(1),
        a["x"].mean(1)[..., None],
        a["x"][:, 0] - a["x"][:, -1],
        a["x"].reshape(r.nodes, -1, 1),
    ),
)
def feature_axes(g: Any, a: Arrays) -> Any:
    x = g.node(a["x"])
    return x.sum(0), x.mean(axis=0)[:, None], x[0] - x[-1], x.reshape(-1, 1)


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "c": ("etype", (), 1),
        "d": ("ntype", (z.k,), 1),
        "b": ("shared", (z.k,), 1),
        "u": ("shared", (), 1),
    },
    lambda r, a: (
        r.sum((a["x"][r.s] + a["b"]) * _axis(a["c"][r.t]) * (2.0 - a["c"][r.t] * a["u"])[:, None]) * a["d"][r.nt]
        - a["d"][r.nt] / 3.0
    ),
)
def constants(g: Any, a: Arrays) -> Any:
    c, d = g.per_edge_type(a["c"]), g.per_node_type(a["d"])
    y = g.sum_to_dst((g.src(a["x"]) + g.shared(a["b"])) * c * (2.0 - c * g.shared(a["u"])))
    return y * d - d / 3.0


@case(
    lambda z: {"x": ("node", (z.k,), 1)},
    lambda r, a: r.sum(
        a["x"][r.s]
        * _axis(
            1 / r.degree(r.d) + 1 / r.degree(r.d, within_relation=True) + 1 / jnp.sqrt(r.degree(r.d) * r.degree(r.s))
        )
    ),
)
def degrees(g: Any, a: Arrays) -> Any:
    into, typed = g.in_degree(), g.in_degree(within_relation=True)
    both = rgnn.rsqrt(into * g.out_degree())
    return g.sum_to_dst(g.src(a["x"]) / into + g.src(a["x"]) / typed + g.src(a["x"]) * both)


@case(
    lambda z: {"p": ("source_pair", (z.k,), 1), "e": ("edge", (z.k,), 1)},
    lambda r, a: r.sum(a["p"][r.pair] * a["e"]),
)
def source_pairs(g: Any, a: Arrays) -> Any:
    return g.sum_to_dst(g.src(g.source_pair(a["p"])) * g.edge(a["e"]))


def _all_functions(x: Any, y: Any, F: dict[str, Callable]) -> list[Any]:
    p = F["square"](x) + 0.5
    return [
        *(F[name](x) for name in ("exp", "tanh", "sigmoid", "erf", "relu", "abs", "elu", "gelu", "silu")),
        *(F[name](p) for name in ("log", "sqrt", "rsqrt", "reciprocal")),
        F["leaky_relu"](x),
        F["maximum"](x, y) * F["minimum"](x, 0.25),
        F["where_positive"](y, x, p),
        F["stop_gradient"](x) * y,
        x**3 + p**0.75 - (-y) / p,
    ]


_JAX_FUNCTIONS: dict[str, Callable] = {
    **{
        name: getattr(jnp, name)
        for name in ("exp", "tanh", "abs", "log", "sqrt", "reciprocal", "maximum", "minimum", "square")
    },
    **{name: getattr(jax.nn, name) for name in ("sigmoid", "relu", "elu", "silu")},
    "erf": jax.scipy.special.erf,
    "rsqrt": jax.lax.rsqrt,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "leaky_relu": lambda x: jnp.where(x > 0, x, 0.2 * x),
    "where_positive": lambda c, x, y: jnp.where(c > 0, x, y),
    "stop_gradient": jax.lax.stop_gradient,
}


@case(
    lambda z: {"x": ("node", (z.k,), 1), "y": ("node", (z.k,), 1)},
    lambda r, a: r.sum(sum(_all_functions(a["x"][r.s], a["y"][r.d], _JAX_FUNCTIONS))),
)
def elementwise(g: Any, a: Arrays) -> Any:
    names = {name: getattr(rgnn, name) for name in _JAX_FUNCTIONS}
    return g.sum_to_dst(sum(_all_functions(g.src(a["x"]), g.dst(a["y"]), names)))


@case(
    lambda z: {
        "x": ("node", (z.k,), 1),
        "w": ("etype", (z.k, z.k), _weight(z.k)),
        "v": ("shared", (z.k, z.n), _weight(z.k)),
    },
    lambda r, a: (
        jnp.einsum(
            "ek,ekn->en",
            (hidden := jnp.tanh(r.mean(jnp.einsum("ek,ekn->en", a["x"][r.s], a["w"][r.t]), r.d) + a["x"]))[r.s]
            - hidden[r.d],
            a["w"][r.t],
        )
        @ a["v"]
    ),
)
def two_hops(g: Any, a: Arrays) -> Any:
    w = g.per_edge_type(a["w"])
    hidden = rgnn.tanh(g.mean_to_dst(g.src(a["x"]) @ w) + g.node(a["x"]))
    return ((g.src(hidden) - g.dst(hidden)) @ w) @ g.shared(a["v"])


# --- library models --------------------------------------------------------------------------------------------------


def _model(
    name: str,
    program: Any,
    reference: Callable[..., Any],
    arrays: Callable[[Size], dict[str, tuple[str, tuple[int, ...], float]]],
    **keywords: Any,
) -> None:
    def run(graph: RelGraph, a: Arrays, options: Options) -> Any:
        params = {key: value for key, value in a.items() if key != "x"}
        return program(graph, a.get("x"), params, options=options, **keywords)

    CASES[name] = Case(name, run, lambda r, a: reference(r, a, **keywords), arrays)


def rgcn_reference(r: Reference, a: Arrays, normalization: str = "mean") -> Any:
    x = a.get("x")
    if "blocks" in a:
        _, count, k, _ = a["blocks"].shape
        rows = x[r.s].reshape(len(r.s), count, k)
        message = jnp.einsum("ebk,ebkn->ebn", rows, a["blocks"][r.t])
        message = message.reshape(message.shape[0], message.shape[1] * message.shape[2])
    elif "bases" in a and x is None:
        message = jnp.einsum("ebn,eb->en", a["bases"][r.s], a["coefficients"][r.t])
    elif "bases" in a:
        message = jnp.einsum("ek,eb,bkn->en", x[r.s], a["coefficients"][r.t], a["bases"])
    elif x is None:
        message = a["weight"][r.pair]
    else:
        message = jnp.einsum("ek,ekn->en", x[r.s], a["weight"][r.t])
    if normalization == "mean":
        message = message / _axis(r.degree(r.d, within_relation=True))
    y = r.sum(message)
    if "root" in a:
        y = y + (a["root"] if x is None else x @ a["root"])
    return y + a.get("bias", 0.0)


def rgat_reference(
    r: Reference, a: Arrays, softmax: str = "dst", negative_slope: float = 0.2, concat_heads: bool = True
) -> Any:
    w, a_src, a_dst = a["weight"], a["attention_src"], a["attention_dst"]
    single = w.ndim == 3
    if single:
        w, a_src, a_dst = w[:, None], a_src[:, None], a_dst[:, None]
    z_src, z_dst = (jnp.einsum("ek,ehkd->ehd", a["x"][ends], w[r.t]) for ends in (r.s, r.d))
    score = (z_src * a_src[r.t]).sum(-1) + (z_dst * a_dst[r.t]).sum(-1)
    p = r.softmax(jnp.where(score > 0, score, negative_slope * score), softmax)
    if "edge_scale" in a:
        p = p * (_axis(a["edge_scale"]) if single else a["edge_scale"])
    y = r.sum(_axis(p) * z_src)
    y = y.reshape(r.nodes, y.shape[1] * y.shape[2]) if concat_heads or single else y.mean(1)
    return y + a.get("bias", 0.0)


def hgt_reference(r: Reference, a: Arrays) -> Any:
    x = a["x"]

    def projected(name: str) -> Any:
        y = jnp.einsum("nk,nhkd->nhd", x, a[name][r.nt])
        return y + a[f"{name}_bias"][r.nt] if f"{name}_bias" in a else y

    key, query, value = (projected(name) for name in ("key", "query", "value"))
    width = key.shape[-1]
    keys = jnp.einsum("ehd,ehdf->ehf", key[r.s], a["relation_attention"][r.t])
    p = r.softmax((keys * query[r.d]).sum(-1) * a["prior"][r.t] / np.sqrt(width))
    messages = jnp.einsum("ehd,ehdf->ehf", value[r.s], a["relation_message"][r.t])
    y = r.sum(_axis(p) * messages)
    y = jax.nn.gelu(y.reshape(r.nodes, y.shape[1] * y.shape[2]), approximate=False)
    y = jnp.einsum("nk,nko->no", y, a["out"][r.nt])
    if "out_bias" in a:
        y = y + a["out_bias"][r.nt]
    if "skip" in a:
        gate = jax.nn.sigmoid(a["skip"])[r.nt][:, None]
        y = y * gate + x * (1 - gate)
    return y


def _rgcn_arrays(kind: str, *, featureless: bool = False, root: bool = True, bias: bool = True) -> Callable:
    def arrays(z: Size) -> dict[str, tuple[str, tuple[int, ...], float]]:
        scale, blocks = _weight(z.k), z.h
        found = {} if featureless else {"x": ("node", (z.k * blocks if kind == "blocks" else z.k,), 1.0)}
        n = z.n * blocks if kind == "blocks" else z.n
        k = found["x"][1][0] if found else 0
        if kind == "weight":
            found["weight"] = ("source_pair", (n,), 1.0) if featureless else ("etype", (k, n), scale)
        elif kind == "bases":
            found["bases"] = ("node", (3, n), 1.0) if featureless else ("shared", (3, k, n), scale)
            found["coefficients"] = ("etype", (3,), 1.0)
        else:
            found["blocks"] = ("etype", (blocks, z.k, z.n), scale)
        if root:
            found["root"] = ("node", (n,), 1.0) if featureless else ("shared", (k, n), scale)
        return found | ({"bias": ("shared", (n,), 1.0)} if bias else {})

    return arrays


def _rgat_arrays(*, heads: bool = True, bias: str = "", edge_scale: bool = False) -> Callable:
    def arrays(z: Size) -> dict[str, tuple[str, tuple[int, ...], float]]:
        lead = (z.h,) if heads else ()
        found = {
            "x": ("node", (z.k,), 1.0),
            "weight": ("etype", (*lead, z.k, z.n), _weight(z.k)),
            "attention_src": ("etype", (*lead, z.n), _weight(z.n)),
            "attention_dst": ("etype", (*lead, z.n), _weight(z.n)),
        }
        if bias:
            found["bias"] = ("shared", (z.h * z.n if bias == "concat" else z.n,), 1.0)
        return found | ({"edge_scale": ("edge", lead, 1.0)} if edge_scale else {})

    return arrays


def _hgt_arrays(*, biases: bool = False, skip: bool = False) -> Callable:
    def arrays(z: Size) -> dict[str, tuple[str, tuple[int, ...], float]]:
        out = z.k if skip else z.k + 1
        found = {
            "x": ("node", (z.k,), 1.0),
            **{name: ("ntype", (z.h, z.k, z.n), _weight(z.k)) for name in ("key", "query", "value")},
            "relation_attention": ("etype", (z.h, z.n, z.n), _weight(z.n)),
            "relation_message": ("etype", (z.h, z.n, z.n), _weight(z.n)),
            "prior": ("etype", (z.h,), 1.0),
            "out": ("ntype", (z.h * z.n, out), _weight(z.h * z.n)),
        }
        if biases:
            found |= {f"{name}_bias": ("ntype", (z.h, z.n), 0.5) for name in ("key", "query", "value")}
            found["out_bias"] = ("ntype", (out,), 0.5)
        return found | ({"skip": ("ntype", (), 1.0)} if skip else {})

    return arrays


_model("rgcn_mean", library.rgcn, rgcn_reference, _rgcn_arrays("weight"))
_model(
    "rgcn_sum_bare", library.rgcn, rgcn_reference, _rgcn_arrays("weight", root=False, bias=False), normalization="sum"
)
_model("rgcn_bases", library.rgcn, rgcn_reference, _rgcn_arrays("bases", bias=False))
_model("rgcn_bases_sum", library.rgcn, rgcn_reference, _rgcn_arrays("bases", root=False), normalization="sum")
_model("rgcn_blocks", library.rgcn, rgcn_reference, _rgcn_arrays("blocks"))
_model("rgcn_featureless", library.rgcn, rgcn_reference, _rgcn_arrays("weight", featureless=True))
_model("rgcn_featureless_bases", library.rgcn, rgcn_reference, _rgcn_arrays("bases", featureless=True))
_model("rgat", library.rgat, rgat_reference, _rgat_arrays())
_model("rgat_relation", library.rgat, rgat_reference, _rgat_arrays(bias="concat"), softmax="relation")
_model("rgat_mean_heads", library.rgat, rgat_reference, _rgat_arrays(bias="mean", edge_scale=True), concat_heads=False)
_model("rgat_one_head", library.rgat, rgat_reference, _rgat_arrays(heads=False, edge_scale=True), negative_slope=0.1)
_model("hgt", library.hgt, hgt_reference, _hgt_arrays())
_model("hgt_biases", library.hgt, hgt_reference, _hgt_arrays(biases=True))
_model("hgt_skip", library.hgt, hgt_reference, _hgt_arrays(biases=True, skip=True))

MODELS = tuple(name for name in CASES if name.startswith(("rgcn", "rgat", "hgt")))
OPERATORS = tuple(name for name in CASES if name not in MODELS)


# --- arrays, and the comparison --------------------------------------------------------------------------------------


def row_counts(edges: EdgeList) -> dict[str, int]:
    pairs = len(set(zip(edges.senders.tolist(), edges.edge_type.tolist(), strict=True)))
    return {
        "node": edges.num_nodes,
        "edge": len(edges.senders),
        "source_pair": pairs,
        "etype": edges.num_edge_types,
        "ntype": edges.num_node_types,
    }


def make_arrays(name: str, edges: EdgeList, size: Size, dtype: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Random arrays of a case, rounded to `dtype`, as float64."""
    rng, rows = np.random.default_rng(seed), row_counts(edges)
    found = {}
    for key, (kind, shape, scale) in CASES[name].arrays(size).items():
        full = shape if kind == "shared" else (rows[kind], *shape)
        found[key] = round_to(rng.normal(size=full) * scale, dtype)
    return found


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    return np.asarray(x, np.float64) if dtype == "float64" else x.astype(jnp.dtype(dtype)).astype(np.float64)


@dataclass(frozen=True)
class Expected:
    """A case's arrays and cotangents, its results and its gradients, in float64."""

    arrays: dict[str, np.ndarray]
    cotangents: tuple[np.ndarray, ...]
    results: tuple[np.ndarray, ...]
    gradients: dict[str, np.ndarray]


@cache
def expected(name: str, graph: str, size: Size, dtype: str, scores: float = 1.0) -> Expected:
    """The float64 reference on one of `GRAPHS`; arrays named `s` are multiplied by `scores`."""
    edges = GRAPHS[graph]
    arrays = make_arrays(name, edges, size, dtype)
    if "s" in arrays:
        arrays["s"] = round_to(arrays["s"] * scores, dtype)
    reference, r = CASES[name].reference, Reference(edges)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):

        def flat(a: Arrays) -> tuple:
            return tuple(jax.tree.leaves(reference(r, a)))

        shapes = jax.eval_shape(flat, arrays)
        rng = np.random.default_rng(1)
        cotangents = tuple(round_to(rng.normal(size=s.shape), dtype) for s in shapes)

        def both(a: Arrays, c: tuple) -> tuple:
            results, pull = jax.vjp(flat, a)
            return results, pull(c)[0]

        results, gradients = jax.jit(both)(arrays, cotangents)
    to_numpy = lambda tree: jax.tree.map(np.asarray, tree)  # noqa: E731
    return Expected(arrays, cotangents, to_numpy(results), to_numpy(gradients))


def run_case(
    name: str, graph: RelGraph, arrays: Arrays, cotangents: tuple, options: Options, *, jit: bool = True
) -> tuple[tuple, tuple, Arrays]:
    """(results without gradients, results with gradients, gradients) of a case's program."""

    def both(graph: RelGraph, a: Arrays, c: tuple) -> tuple[tuple, tuple, Arrays]:
        flat = lambda a: tuple(jax.tree.leaves(CASES[name].run(graph, a, options)))  # noqa: E731
        results, pull = jax.vjp(flat, a)
        c = tuple(x.astype(y.dtype) for x, y in zip(c, results, strict=True))
        return flat(a), results, pull(c)[0]

    return (jax.jit(both) if jit else both)(graph, arrays, cotangents)


def error(got: Any, want: np.ndarray) -> float:
    """The norm of the difference over the norm of what is wanted.

    Numbers here are of the order of 1 or more, so what is wanted counts as 0.1 at least: a gradient may cancel to nothing.
    """
    got = np.asarray(got).astype(np.float64)
    assert got.shape == want.shape, f"shape {got.shape}, expected {want.shape}"
    if want.size == 0:
        return 0.0
    return float(np.linalg.norm(got - want) / (np.linalg.norm(want) + 0.1 * np.sqrt(want.size)))


def assert_agrees(got: tuple[tuple, tuple, Arrays], want: Expected, tolerance: float, dtype: str | None = None) -> None:
    """Compares every result and gradient; NaN agrees with nothing.

    Gradients are given half as much again: those of a softmax are sums that cancel.
    """
    plain, results, gradients = got
    found = {
        f"result {i} without gradients": error(y, w) for i, (y, w) in enumerate(zip(plain, want.results, strict=True))
    }
    found |= {f"result {i}": error(y, w) for i, (y, w) in enumerate(zip(results, want.results, strict=True))}
    assert gradients.keys() == want.gradients.keys()
    found |= {f"gradient of {key}": error(gradients[key], w) / 1.5 for key, w in want.gradients.items()}
    wrong = {key: f"{value:.1e}" for key, value in found.items() if not value < tolerance}
    assert not wrong, f"relative errors above {tolerance:g}: {wrong}"
    if dtype is not None:
        assert {str(x.dtype) for x in jax.tree.leaves(got)} == {dtype}


def check(
    name: str,
    graph: str,
    size: Size,
    options: Options,
    dtype: str = "float32",
    *,
    tolerance: float,
    scores: float = 1.0,
) -> None:
    """The contract: a case's results and gradients on a backend are those of its float64 reference."""
    want = expected(name, graph, size, dtype, scores)
    with jax.enable_x64(dtype == "float64"):
        arrays = {key: jnp.asarray(value, dtype) for key, value in want.arrays.items()}
        cotangents = tuple(jnp.asarray(c, dtype) for c in want.cotangents)
        got = run_case(name, graph_of(graph), arrays, cotangents, options)
    assert_agrees(got, want, tolerance, dtype)


# --- coverings -------------------------------------------------------------------------------------------------------

WIDTHS = (1, 3, 17, 100)
HEADS = (1, 2, 8, 3)


def covering(names: tuple[str, ...], graphs: tuple[str, ...], each: int) -> list[tuple[str, str, Size]]:
    """For each case so many (graph, size), which walk through graphs, widths and heads at different speeds."""
    found = []
    for i, name in enumerate(names):
        for j in range(each):
            at = i * each + j
            size = Size(WIDTHS[at % 4], WIDTHS[(at // 4 + j) % 4], HEADS[(at + at // 3) % 4])
            if name.startswith("hgt") or size.k * size.n * size.h > 10_000:
                size = replace(size, n=min(size.n, 17), h=min(size.h, 3) if size.n > 3 else size.h)
            found.append((name, graphs[at % len(graphs)], size))
    return found
