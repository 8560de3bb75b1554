"""The cases of the contract: every operator and every model of the library, as a program and as its reference."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from dejax import rgnn
from dejax.rgnn import Options, RelGraph, library
from tests.rgnn.references import Arrays, Reference, axis_after, hgt_reference, rgat_reference, rgcn_reference


@dataclass(frozen=True)
class Size:
    """Sizes of a case: input width `k`, output width `n` (per head, where there are heads), number of heads."""

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
      arrays: size -> for each array the kind of its rows (`node`, `edge`, `source_pair`, `etype`, `ntype`, `shared`),
        the shape of a row, and the standard deviation of its numbers.
    """

    name: str
    run: Callable[[RelGraph, Arrays, Options], Any]
    reference: Callable[[Reference, Arrays], Any]
    arrays: Callable[[Size], dict[str, tuple[str, tuple[int, ...], float]]]


# --- operators -------------------------------------------------------------------------------------------------------

CASES: dict[str, Case] = {}


Shapes = dict[str, tuple[str, tuple[int, ...], float]]


def shapes(arrays: str) -> Callable[[Size], Shapes]:
    """Arrays of a case from "x y: node[k, h*n] / k; s: edge[] * 2": kinds of rows, shapes of a row, and scales.

    The standard deviation of an array is 1, the number behind `*`, or one over the root of the number behind `/`.
    """
    each = [re.fullmatch(r"(.*): (\w+)\[(.*)\](?: ([/*]) (.*))?", one) for one in arrays.split("; ")]

    def of(z: Size) -> Shapes:
        number = lambda text: eval(text, {"k": z.k, "n": z.n, "h": z.h})  # noqa: E731
        found = {}
        for names, kind, row, by, size in (one.groups() for one in each if one):
            scale = 1.0 if not by else float(number(size)) if by == "*" else number(size) ** -0.5
            sides = number(f"({row},)") if row else ()
            found |= dict.fromkeys(names.split(), (kind, sides, scale))
        return found

    return of


def case(
    arrays: str, reference: Callable[[Reference, Arrays], Any]
) -> Callable[[Callable[[Any, Arrays], Any]], Callable]:
    """Registers the decorated program function."""

    def register(function: Callable[[Any, Arrays], Any]) -> Callable:
        program, name = rgnn.program(function), function.__name__
        run = lambda graph, a, options: program(graph, a, options=options)  # noqa: E731
        CASES[name] = Case(name, run, reference, shapes(arrays))
        return function

    return register


@case(
    "x: node[k]; w: etype[k, n] / k",
    lambda r, a: jnp.einsum("ek,ekn->en", a["x"][r.s], a["w"][r.t]),
)
def linear_on_edges(g: Any, a: Arrays) -> Any:
    return g.src(a["x"]) @ g.per_edge_type(a["w"])


@case(
    "x: node[k]; w: etype[h, k, n] / k",
    lambda r, a: r.sum(jnp.einsum("ek,ehkn->ehn", a["x"][r.s], a["w"][r.t])),
)
def linear_by_edge_type_and_head(g: Any, a: Arrays) -> Any:
    return g.sum_to_dst(g.src(a["x"]) @ g.per_edge_type(a["w"]))


@case(
    "x: node[h, k]; w: etype[h, k, n] / k",
    lambda r, a: r.sum(jnp.einsum("ehk,ehkn->ehn", a["x"][r.d], a["w"][r.t]), r.s),
)
def linear_of_heads_to_src(g: Any, a: Arrays) -> Any:
    return g.sum_to_src(g.dst(a["x"]) @ g.per_edge_type(a["w"]))


@case(
    "x: node[h, k]; w: etype[k, n] / k; v: shared[n, k] / n",
    lambda r, a: r.sum(jnp.einsum("ehk,ekn,nj->ehj", a["x"][r.s], a["w"][r.t], a["v"])),
)
def linear_with_one_weight_for_all_heads(g: Any, a: Arrays) -> Any:
    return g.sum_to_dst((g.src(a["x"]) @ g.per_edge_type(a["w"])) @ g.shared(a["v"]))


@case(
    "x: node[k]; w: ntype[k, n] / k; v: ntype[h, n, k] / n",
    lambda r, a: jnp.einsum("vk,vkn,vhnj->vhj", a["x"], a["w"][r.nt], a["v"][r.nt]),
)
def linear_by_node_type(g: Any, a: Arrays) -> Any:
    return (g.node(a["x"]) @ g.per_node_type(a["w"])) @ g.per_node_type(a["v"])


@case(
    "x: node[k]; w: etype[k, n] / k; v: etype[n, n] / n; u: shared[k, k] / k",
    lambda r, a: r.sum(jnp.einsum("ek,kj,ejn,enm->em", a["x"][r.s], a["u"], a["w"][r.t], a["v"][r.t])),
)
def linear_chain(g: Any, a: Arrays) -> Any:
    row = g.src(g.node(a["x"]) @ g.shared(a["u"]))
    return g.sum_to_dst((row @ g.per_edge_type(a["w"])) @ g.per_edge_type(a["v"]))


@case(
    "x: node[k]; c: etype[3]; b: shared[3, k, n] / k",
    lambda r, a: r.sum(jnp.einsum("ek,eb,bkn->en", a["x"][r.s], a["c"][r.t], a["b"])),
)
def linear_with_a_computed_weight(g: Any, a: Arrays) -> Any:
    bases = g.shared(a["b"])
    count, k, n = bases.shape
    weight = (g.per_edge_type(a["c"])[None, :] @ bases.reshape(count, k * n)).reshape(k, n)
    return g.sum_to_dst(g.src(a["x"]) @ weight)


@case(
    "x: node[k]; w: etype[h, k, n] / k; p: etype[h, n] / n; q: ntype[k] / k",
    lambda r, a: (
        jnp.einsum("ek,ehkn,ehn->eh", a["x"][r.s], a["w"][r.t], a["p"][r.t])
        + axis_after(jnp.einsum("ek,ek->e", a["x"][r.d], a["q"][r.nt][r.s]))
    ),
)
def dot_with_constants(g: Any, a: Arrays) -> Any:
    score = rgnn.dot(g.src(a["x"]) @ g.per_edge_type(a["w"]), g.per_edge_type(a["p"]))
    return score + rgnn.dot(g.dst(a["x"]), g.src(g.per_node_type(a["q"])))[None]


@case(
    "x: node[h, k] / k; y: node[h, k]; e: edge[]",
    lambda r, a: r.mean(jnp.einsum("ehk,ehk->eh", a["x"][r.s], a["y"][r.d]) * axis_after(a["e"]), r.d),
)
def dot_of_both_ends(g: Any, a: Arrays) -> Any:
    return g.mean_to_dst(rgnn.dot(g.src(a["x"]), g.dst(a["y"])) * g.edge(a["e"]))


@case(
    "s: edge[h] * 2; x: node[h, k]",
    lambda r, a: (r.softmax(a["s"]), r.sum(axis_after(r.softmax(a["s"])) * a["x"][r.s])),
)
def softmax_over_incoming_edges(g: Any, a: Arrays) -> Any:
    p = rgnn.edge_softmax(g.edge(a["s"]))
    return p, g.sum_to_dst(p[..., None] * g.src(a["x"]))


@case(
    "s: edge[] * 2; x: node[k]",
    lambda r, a: (r.softmax(a["s"], "relation"), r.sum(axis_after(r.softmax(a["s"], "relation")) * a["x"][r.s])),
)
def softmax_within_relations(g: Any, a: Arrays) -> Any:
    p = rgnn.edge_softmax(g.edge(a["s"]), within="relation")
    return p, g.sum_to_dst(p * g.src(a["x"]))


@case(
    "x: node[k]; e: edge[k]",
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
    "x: node[k]; y: node[k]; e: edge[1]",
    lambda r, a: r.max(a["x"][r.s] * a["e"] + 0.37 * a["y"][r.d] - a["y"][r.s] * a["e"], r.d),
)
def largest_computed_message(g: Any, a: Arrays) -> Any:
    """Backward recomputes the messages and must find the same maximum, bit for bit."""
    e = g.edge(a["e"])
    return g.max_to_dst(g.src(a["x"]) * e + g.dst(a["y"]) * 0.37 - g.src(a["y"]) * e)


@case(
    "x: node[k]; y: node[h, n]; c: etype[k]",
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
    "x: node[h, k]",
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
    "x: node[k]; c: etype[]; d: ntype[k]; b: shared[k]; u: shared[]",
    lambda r, a: (
        r.sum((a["x"][r.s] + a["b"]) * axis_after(a["c"][r.t]) * (2.0 - a["c"][r.t] * a["u"])[:, None]) * a["d"][r.nt]
        - a["d"][r.nt] / 3.0
    ),
)
def constants(g: Any, a: Arrays) -> Any:
    c, d = g.per_edge_type(a["c"]), g.per_node_type(a["d"])
    y = g.sum_to_dst((g.src(a["x"]) + g.shared(a["b"])) * c * (2.0 - c * g.shared(a["u"])))
    return y * d - d / 3.0


@case(
    "x: node[k]",
    lambda r, a: r.sum(
        a["x"][r.s]
        * axis_after(
            1 / r.degree(r.d) + 1 / r.degree(r.d, within_relation=True) + 1 / jnp.sqrt(r.degree(r.d) * r.degree(r.s))
        )
    ),
)
def degrees(g: Any, a: Arrays) -> Any:
    into, typed = g.in_degree(), g.in_degree(within_relation=True)
    both = rgnn.rsqrt(into * g.out_degree())
    return g.sum_to_dst(g.src(a["x"]) / into + g.src(a["x"]) / typed + g.src(a["x"]) * both)


@case(
    "p: source_pair[k]; e: edge[k]",
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
    "x: node[k]; y: node[k]",
    lambda r, a: r.sum(sum(_all_functions(a["x"][r.s], a["y"][r.d], _JAX_FUNCTIONS))),
)
def elementwise(g: Any, a: Arrays) -> Any:
    names = {name: getattr(rgnn, name) for name in _JAX_FUNCTIONS}
    return g.sum_to_dst(sum(_all_functions(g.src(a["x"]), g.dst(a["y"]), names)))


@case(
    "x: node[k]; w: etype[k, k] / k; v: shared[k, n] / k",
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


def _model(name: str, program: Any, reference: Callable[..., Any], arrays: str, **keywords: Any) -> None:
    def run(graph: RelGraph, a: Arrays, options: Options) -> Any:
        params = {key: value for key, value in a.items() if key != "x"}
        return program(graph, a.get("x"), params, options=options, **keywords)

    CASES[name] = Case(name, run, lambda r, a: reference(r, a, **keywords), shapes(arrays))


for _name, _arrays, _keywords in (
    ("mean", "x: node[k]; weight: etype[k, n] / k; root: shared[k, n] / k; bias: shared[n]", {}),
    ("sum_bare", "x: node[k]; weight: etype[k, n] / k", {"normalization": "sum"}),
    ("bases", "x: node[k]; bases: shared[3, k, n] / k; coefficients: etype[3]; root: shared[k, n] / k", {}),
    (
        "bases_sum",
        "x: node[k]; bases: shared[3, k, n] / k; coefficients: etype[3]; bias: shared[n]",
        {"normalization": "sum"},
    ),
    ("blocks", "x: node[k*h]; blocks: etype[h, k, n] / k; root: shared[k*h, n*h] / k; bias: shared[n*h]", {}),
    ("featureless", "weight: source_pair[n]; root: node[n]; bias: shared[n]", {}),
    ("featureless_bases", "bases: node[3, n]; coefficients: etype[3]; root: node[n]; bias: shared[n]", {}),
):
    _model(f"rgcn_{_name}", library.rgcn, rgcn_reference, _arrays, **_keywords)

_RGAT = "x: node[k]; weight: etype[h, k, n] / k; attention_src attention_dst: etype[h, n] / n"
_ONE_HEAD = "x: node[k]; weight: etype[k, n] / k; attention_src attention_dst: etype[n] / n; edge_scale: edge[]"
for _name, _arrays, _keywords in (
    ("", _RGAT, {}),
    ("_relation", f"{_RGAT}; bias: shared[h*n]", {"softmax": "relation"}),
    ("_mean_heads", f"{_RGAT}; bias: shared[n]; edge_scale: edge[h]", {"concat_heads": False}),
    ("_one_head", _ONE_HEAD, {"negative_slope": 0.1}),
):
    _model(f"rgat{_name}", library.rgat, rgat_reference, _arrays, **_keywords)

_HGT = (
    "x: node[k]; key query value: ntype[h, k, n] / k; relation_attention relation_message: etype[h, n, n] / n; "
    "prior: etype[h]; out: ntype[h*n, {}] / h*n"
)
_BIASES = "key_bias query_bias value_bias: ntype[h, n] * 0.5; out_bias: ntype[{}] * 0.5"
_model("hgt", library.hgt, hgt_reference, _HGT.format("k+1"))
_model("hgt_biases", library.hgt, hgt_reference, f"{_HGT}; {_BIASES}".format("k+1", "k+1"))
_model("hgt_skip", library.hgt, hgt_reference, f"{_HGT}; {_BIASES}; skip: ntype[]".format("k", "k"))

MODELS = tuple(name for name in CASES if name.startswith(("rgcn", "rgat", "hgt")))
OPERATORS = tuple(name for name in CASES if name not in MODELS)
