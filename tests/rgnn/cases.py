"""The cases of the contract: every operator and every model of the library, as a program and as its reference."""

from __future__ import annotations

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
        + axis_after(jnp.einsum("ek,ek->e", a["x"][r.d], a["q"][r.nt][r.s]))
    ),
)
def dot_with_constants(g: Any, a: Arrays) -> Any:
    score = rgnn.dot(g.src(a["x"]) @ g.per_edge_type(a["w"]), g.per_edge_type(a["p"]))
    return score + rgnn.dot(g.dst(a["x"]), g.src(g.per_node_type(a["q"])))[None]


@case(
    lambda z: {"x": ("node", (z.h, z.k), _weight(z.k)), "y": ("node", (z.h, z.k), 1), "e": ("edge", (), 1)},
    lambda r, a: r.mean(jnp.einsum("ehk,ehk->eh", a["x"][r.s], a["y"][r.d]) * axis_after(a["e"]), r.d),
)
def dot_of_both_ends(g: Any, a: Arrays) -> Any:
    return g.mean_to_dst(rgnn.dot(g.src(a["x"]), g.dst(a["y"])) * g.edge(a["e"]))


@case(
    lambda z: {"s": ("edge", (z.h,), 2), "x": ("node", (z.h, z.k), 1)},
    lambda r, a: (r.softmax(a["s"]), r.sum(axis_after(r.softmax(a["s"])) * a["x"][r.s])),
)
def softmax_over_incoming_edges(g: Any, a: Arrays) -> Any:
    p = rgnn.edge_softmax(g.edge(a["s"]))
    return p, g.sum_to_dst(p[..., None] * g.src(a["x"]))


@case(
    lambda z: {"s": ("edge", (), 2), "x": ("node", (z.k,), 1)},
    lambda r, a: (r.softmax(a["s"], "relation"), r.sum(axis_after(r.softmax(a["s"], "relation")) * a["x"][r.s])),
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
    """Backward recomputes the messages and must find the same maximum, bit for bit."""
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
        r.sum((a["x"][r.s] + a["b"]) * axis_after(a["c"][r.t]) * (2.0 - a["c"][r.t] * a["u"])[:, None]) * a["d"][r.nt]
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
