"""Passes lose no digits: what cancels in a program cancels as well after sums and products were made in another order.

Features have a constant column, means far from 0, columns of different scales, or an offset by node type. Each result
and gradient, against float64, is to be within 10 times the error of the program as it was written, without the passes
that reassociate; both errors are the largest of several draws, since one draw can be lucky.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph, library

REASSOCIATING = (
    "reorder", "aggregate", "fold", "contract", "hoist", "merge_gemms", "concat_parts",
)  # fmt: skip
WIDTH, HEADS, HEAD_WIDTH, TYPES, NODE_TYPES = 16, 2, 8, 5, 2
DRAWS = 5
FACTOR = 10.0
FLOOR = 1e-6  # some roundings of float32
# An array of which the program as written has no digit is not compared: its gradient is nothing but roundings.
DIGITS = 0.3

Arrays = dict[str, Any]


def make_graph(seed: int = 0, nodes: int = 40, edges: int = 300) -> RelGraph:
    """Long segments, nodes without edges, and edges that occur twice."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, nodes + 1)
    receivers = rng.choice(nodes, edges, p=weights / weights.sum())
    return RelGraph.from_edges(
        rng.integers(0, nodes, edges),
        receivers,
        rng.integers(0, TYPES, edges),
        num_nodes=nodes,
        num_edge_types=TYPES,
        node_type=rng.integers(0, NODE_TYPES, nodes),
        num_node_types=NODE_TYPES,
    )


@rgnn.program
def dot_attention(g: Any, x: Any, p: Arrays) -> Any:
    key, query, value = (g.node(x) @ g.shared(p[name]) for name in ("key", "query", "value"))
    attention = rgnn.edge_softmax(rgnn.dot(g.src(key), g.dst(query)) * (HEAD_WIDTH**-0.5))
    return g.sum_to_dst(attention[..., None] * g.src(value))


@rgnn.program
def gatv2(g: Any, x: Any, p: Arrays) -> Any:
    left, right = g.src(x) @ g.per_edge_type(p["left"]), g.dst(x) @ g.per_edge_type(p["right"])
    score = rgnn.dot(rgnn.leaky_relu(left + right), g.per_edge_type(p["attention"]))
    return g.sum_to_dst(rgnn.edge_softmax(score)[..., None] * left)


@rgnn.program
def gated_mean(g: Any, x: Any, p: Arrays) -> Any:
    gate = rgnn.sigmoid(rgnn.dot(g.src(x) @ g.per_edge_type(p["left"]), g.per_edge_type(p["attention"])))
    message = g.src(x) @ g.per_edge_type(p["right"])
    return g.sum_to_dst(gate[..., None] * message) / (g.sum_to_dst(gate)[..., None] + 1e-6)


@rgnn.program
def spread(g: Any, x: Any, p: Arrays) -> Any:
    """Mean, deviation from it, and largest: PNA's aggregators."""
    message = g.src(x) @ g.per_edge_type(p["left"])
    mean = g.mean_to_dst(message)
    deviation = rgnn.sqrt(g.mean_to_dst(rgnn.square(message - g.dst(mean))) + 1e-5)
    return mean, deviation, g.max_to_dst(message)


_MATRIX, _VECTOR = (HEADS, WIDTH, HEAD_WIDTH), (HEADS, HEAD_WIDTH)
_ATTENTION = {
    "weight": (TYPES, *_MATRIX), "attention_src": (TYPES, *_VECTOR), "attention_dst": (TYPES, *_VECTOR),
}  # fmt: skip
_PAIRWISE = {"left": (TYPES, *_MATRIX), "right": (TYPES, *_MATRIX), "attention": (TYPES, *_VECTOR)}
_HGT = {
    **dict.fromkeys(("key", "query", "value"), (NODE_TYPES, *_MATRIX)),
    **dict.fromkeys(("relation_attention", "relation_message"), (TYPES, HEADS, HEAD_WIDTH, HEAD_WIDTH)),
    "prior": (TYPES, HEADS),
    "out": (NODE_TYPES, HEADS * HEAD_WIDTH, WIDTH),
}
PROGRAMS: dict[str, tuple[Any, dict[str, Any], dict[str, tuple[int, ...]]]] = {
    "rgcn": (library.rgcn, {}, {"weight": (TYPES, WIDTH, 8), "root": (WIDTH, 8)}),
    "rgat": (library.rgat, {}, _ATTENTION),
    "rgat_relation": (library.rgat, {"softmax": "relation"}, _ATTENTION),
    "rgat_one_head": (library.rgat, {}, {k: (s[0], *s[2:]) for k, s in _ATTENTION.items()}),
    "hgt": (library.hgt, {}, _HGT),
    "dot_attention": (dot_attention, {}, dict.fromkeys(("key", "query", "value"), _MATRIX)),
    "gatv2": (gatv2, {}, _PAIRWISE),
    "gated_mean": (gated_mean, {}, _PAIRWISE),
    "spread": (spread, {}, {"left": (TYPES, *_MATRIX)}),
}


def draw(shapes: dict[str, tuple[int, ...]], graph: RelGraph, inputs: str, seed: int) -> Arrays:
    """Features of a kind and random weights, in float32."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(graph.num_nodes, WIDTH))
    x = {
        "constant column": lambda: np.concatenate([np.full((graph.num_nodes, 1), 1000.0), x[:, 1:]], 1),
        "large scores": lambda: np.concatenate([np.full((graph.num_nodes, 1), 300.0), x[:, 1:]], 1),
        "mean": lambda: x + 30,
        "means": lambda: x + 100 * rng.normal(size=WIDTH),
        "scales": lambda: x * 10.0 ** rng.integers(-4, 4, WIDTH),
        "types": lambda: x + 300 * (1.0 + np.asarray(graph.node_type))[:, None] * (np.arange(WIDTH) == 1),
    }[inputs]()
    # Scores of some units: softmaxes that are neither flat nor, all of them, of one edge.
    small = 0.03 if inputs in ("constant column", "means", "types") else 1.0
    found = {"x": x}
    for name, shape in shapes.items():
        scale = shape[-2 if name not in ("prior", "attention", "attention_src", "attention_dst") else -1] ** -0.5
        found[name] = rng.normal(size=shape) * scale
        if name in ("attention", "attention_src", "attention_dst", "query"):
            found[name] *= small
    return {name: np.asarray(value, np.float32) for name, value in found.items()}


def compiled(name: str, graph: RelGraph, options: Options) -> Callable[[Arrays, Any], tuple[Any, Any]]:
    program, keywords, _ = PROGRAMS[name]

    def results(a: Arrays) -> list[Any]:
        params = {key: value for key, value in a.items() if key != "x"}
        return jax.tree.leaves(program(graph, a["x"], params, options=options, **keywords))

    def both(a: Arrays, seed: Any) -> tuple[Any, Any]:
        found, pull = jax.vjp(results, a)
        cotangents = [jax.random.normal(jax.random.key(seed), y.shape, jnp.float32).astype(y.dtype) for y in found]
        return found, pull(cotangents)[0]

    return jax.jit(both)


def error(got: Any, want: Any) -> float:
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / size) if size else float(np.linalg.norm(got))


def check(name: str, inputs: str, options: dict[str, Any]) -> None:
    graph = make_graph()
    with jax.enable_x64(True):
        exact = compiled(name, graph, Options(backend="xla", precision="f32", disable=REASSOCIATING))
    passes = compiled(name, graph, Options(**options))
    written = compiled(name, graph, Options(**options, disable=REASSOCIATING))
    errors: dict[str, list[tuple[float, float]]] = {}
    for seed in range(DRAWS):
        arrays = draw(PROGRAMS[name][2], graph, inputs, seed)
        with jax.enable_x64(True):
            want = exact({k: jnp.asarray(v, jnp.float64) for k, v in arrays.items()}, np.uint32(seed))
        got, base = (f(jax.tree.map(jnp.asarray, arrays), np.uint32(seed)) for f in (passes, written))
        for (path, w), g, b in zip(
            jax.tree_util.tree_leaves_with_path(want), jax.tree.leaves(got), jax.tree.leaves(base), strict=True
        ):
            errors.setdefault(jax.tree_util.keystr(path), []).append((error(g, w), error(b, w)))
    compared = {key: np.max(found, 0) for key, found in errors.items() if np.max(found, 0)[1] < DIGITS}
    assert compared
    wrong = {
        k: f"{got:.1e}, as written {base:.1e}" for k, (got, base) in compared.items() if got > FACTOR * base + FLOOR
    }
    assert not wrong, f"{name}, {inputs}: {wrong}"


INPUTS = ("constant column", "large scores", "mean", "means", "scales", "types")
CASES = [
    pytest.param(name, inputs, marks=() if (name, inputs) == ("rgat", "scales") else pytest.mark.slow)
    for name in PROGRAMS
    for inputs in INPUTS
]


@pytest.mark.parametrize(("name", "inputs"), CASES)
def test_results_and_gradients_have_the_digits_of_the_program_as_written(name: str, inputs: str) -> None:
    check(name, inputs, {"backend": "xla", "precision": "f32"})


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["f32", "tf32"])
@pytest.mark.parametrize("inputs", ["constant column", "large scores", "scales"])
@pytest.mark.parametrize("name", ["rgat", "hgt", "dot_attention", "gatv2"])
def test_kernels_have_them_too(name: str, inputs: str, precision: str) -> None:
    check(name, inputs, {"backend": "pallas", "precision": precision, "interpret": True})


@pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_shared_product_that_cancels_does_so_before_the_sum(bias: bool) -> None:
    """Edge features have a mean of 100, of which the product leaves nothing: its bias, or its columns, remove it."""
    rng = np.random.default_rng(3)
    edges = 4000
    graph = RelGraph.from_edges(rng.integers(0, 5, edges), np.zeros(edges, int), num_nodes=5)
    e, w = 100 + rng.normal(size=(edges, WIDTH)), rng.normal(size=(WIDTH, 2 * WIDTH))
    w = w if bias else w - w.mean(0)
    b = -100 * w.sum(0)

    @rgnn.program
    def summed(g: Any, e: Any, w: Any, b: Any) -> Any:
        message = g.edge(e) @ g.shared(w)
        return g.sum_to_dst(message + g.shared(b) if bias else message)

    arrays = [np.asarray(a, np.float32) for a in (e, w, b)]
    exact = [a.astype(np.float64) for a in arrays]
    want = np.sum(exact[0] @ exact[1] + (exact[2] if bias else 0), axis=0)

    def error(**options: Any) -> float:
        got = np.asarray(summed(graph, *arrays, options=Options(**options)))[0]
        return float(np.linalg.norm(got - want) / np.linalg.norm(want))

    written = error(backend="xla", precision="f32", disable=REASSOCIATING)
    assert error(backend="xla", precision="f32") <= FACTOR * written + FLOOR
    assert error(backend="pallas", precision="f32", interpret=True) <= FACTOR * written + FLOOR
