"""Idioms cost what the form by hand costs: predicted times of both, and equal results in float64."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from tests.rgnn.references import GRAPHS, Reference, graph_of

pytestmark = pytest.mark.newest_jax

K, H = 64, 4


@dataclass(frozen=True)
class Idiom:
    """Two ways of writing one function, and the shapes of its arrays; N, E and R stand for nodes, edges, edge types."""

    written: Any
    by_hand: Any
    arrays: dict[str, tuple[Any, ...]]


IDIOMS: dict[str, Idiom] = {}


def idiom(by_hand: Any, **arrays: tuple[Any, ...]) -> Any:
    def register(written: Any) -> Any:
        IDIOMS[written.__name__] = Idiom(rgnn.program(written), rgnn.program(by_hand), arrays)
        return written

    return register


def _message_by_hand(g: Any, x: Any, e: Any, w: Any, v: Any) -> Any:
    h, w = g.node(x), g.shared(w)
    m = rgnn.relu(g.src(h @ w[:K]) + g.dst(h @ w[K : 2 * K]) + g.edge(e) @ w[2 * K :])
    return g.sum_to_dst(m) @ g.shared(v)


@idiom(_message_by_hand, x=("N", K), e=("E", 16), w=(2 * K + 16, K), v=(K, K))
def message_of_a_concatenation(g: Any, x: Any, e: Any, w: Any, v: Any) -> Any:
    m = rgnn.relu(rgnn.concatenate([g.src(x), g.dst(x), g.edge(e)]) @ g.shared(w))
    return g.sum_to_dst(m @ g.shared(v))


def _typed_by_hand(g: Any, x: Any, w: Any) -> Any:
    w = g.per_edge_type(w)
    return g.sum_to_dst(g.src(x) @ w[:K] + g.dst(x) @ w[K:])


@idiom(_typed_by_hand, x=("N", K), w=("R", 2 * K, K))
def typed_message_of_a_concatenation(g: Any, x: Any, w: Any) -> Any:
    return g.sum_to_dst(rgnn.concatenate([g.src(x), g.dst(x)]) @ g.per_edge_type(w))


def _score_by_hand(g: Any, x: Any, w: Any, a: Any) -> Any:
    z, a = g.node(x) @ g.shared(w), g.shared(a)
    score = g.dst(rgnn.dot(z, a[:K])) + g.src(rgnn.dot(z, a[K:]))
    return g.sum_to_dst(rgnn.edge_softmax(rgnn.leaky_relu(score)) * g.src(z))


@idiom(_score_by_hand, x=("N", K), w=(K, K), a=(2 * K,))
def score_of_a_concatenation(g: Any, x: Any, w: Any, a: Any) -> Any:
    z = g.node(x) @ g.shared(w)
    score = rgnn.concatenate([g.dst(z), g.src(z)]) @ g.shared(a)
    return g.sum_to_dst(rgnn.edge_softmax(rgnn.leaky_relu(score)) * g.src(z))


@idiom(
    lambda g, x, e, w, b: g.sum_to_dst(g.src(x) * g.edge(e)) @ g.shared(w) + g.sum_to_dst(1.0) * g.shared(b),
    x=("N", K),
    e=("E",),
    w=(K, K),
    b=(K,),
)
def shared_product_of_messages(g: Any, x: Any, e: Any, w: Any, b: Any) -> Any:
    return g.sum_to_dst((g.src(x) * g.edge(e)) @ g.shared(w) + g.shared(b))


def _transformer(g: Any, query: Any, key: Any, value: Any) -> Any:
    attention = rgnn.edge_softmax(rgnn.dot(g.dst(query), g.src(key)))
    return g.sum_to_dst(attention[:, None] * g.src(value)).reshape(K)


def _transformer_by_hand(g: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    heads = [g.shared(w).reshape(K, H * (K // H)) for w in (q, k, v)]
    # Weights with heads, of the columns of each.
    stacked = [[w[:, i * K // H : (i + 1) * K // H][None] for i in range(H)] for w in heads]
    return _transformer(g, *(g.node(x) @ rgnn.concatenate(parts, axis=0) for parts in stacked))


@idiom(_transformer_by_hand, x=("N", K), q=(K, K), k=(K, K), v=(K, K))
def heads_by_reshape(g: Any, x: Any, q: Any, k: Any, v: Any) -> Any:
    return _transformer(g, *((g.node(x) @ g.shared(w)).reshape(H, K // H) for w in (q, k, v)))


def _turned(g: Any, x: Any, phase: Any) -> tuple[Any, Any, Any]:
    h, angle = g.node(x), g.per_edge_type(phase)
    a, b, c, d = h[: K // 2], h[K // 2 :], rgnn.cos(angle), rgnn.sin(angle)
    return h, g.src(a) * c - g.src(b) * d, g.src(a) * d + g.src(b) * c


def _rotation_by_hand(g: Any, x: Any, phase: Any) -> Any:
    h, real, imaginary = _turned(g, x, phase)
    real, imaginary = real - g.dst(h[: K // 2]), imaginary - g.dst(h[K // 2 :])
    return rgnn.sqrt((real * real + imaginary * imaginary).sum() + 1e-9)


@idiom(_rotation_by_hand, x=("N", K), phase=("R", K // 2))
def rotation_of_a_concatenation(g: Any, x: Any, phase: Any) -> Any:
    h, real, imaginary = _turned(g, x, phase)
    apart = rgnn.concatenate([real, imaginary]) - g.dst(h)
    return rgnn.sqrt((apart * apart).sum() + 1e-9)


@cache
def graph(nodes: int, edges: int, types: int) -> RelGraph:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, edges))
    return RelGraph.from_edges(*ends, rng.integers(0, types, edges), num_nodes=nodes, num_edge_types=types)


def sized(arrays: dict[str, tuple[Any, ...]], g: RelGraph) -> list[tuple[int, ...]]:
    rows = {"N": g.num_nodes, "E": g.num_edges, "R": g.num_edge_types}
    return [tuple(rows.get(side, side) for side in shape) for shape in arrays.values()]


def predicted(program: Any, g: RelGraph, shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """Microseconds of forward and backward with gradients, by the cost model of an H200."""
    out = io.StringIO()
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program.explain(g, *arrays, options=Options(backend="pallas", interpret=False), summary=True, file=out)
    times = [float(t) for t in re.findall(r"^total .* ([\d.]+) us$", out.getvalue(), re.MULTILINE)]
    assert len(times) == 3  # the first is forward without gradients
    return times[1], times[2]


@pytest.mark.parametrize("name", IDIOMS)
def test_an_idiom_is_predicted_to_cost_what_the_form_by_hand_does(name: str) -> None:
    case, g = IDIOMS[name], graph(5_000, 200_000, 5)
    written, by_hand = (predicted(p, g, sized(case.arrays, g)) for p in (case.written, case.by_hand))
    assert all(a <= 1.1 * b for a, b in zip(written, by_hand, strict=True)), f"{written} us, by hand {by_hand} us"


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", IDIOMS)
def test_both_forms_and_the_program_without_the_passes_agree(name: str) -> None:
    case, g = IDIOMS[name], graph(12, 40, 3)
    rng = np.random.default_rng(1)
    with jax.enable_x64(True):
        arrays = [jnp.asarray(rng.normal(size=shape) * 0.3) for shape in sized(case.arrays, g)]

        def run(program: Any, disable: tuple[str, ...] = ()) -> list[Any]:
            options = Options(backend="xla", precision="f32", disable=disable)
            y, pull = jax.vjp(lambda *a: program(g, *a, options=options), *arrays)
            return [y, *pull(jnp.cos(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape))]

        off = ("split_products", "split_rows", "weight_heads", "aggregate", "reorder", "compact")
        found = [run(case.written), run(case.by_hand), run(case.written, off)]
    for got, by_hand, plain in zip(*found, strict=True):
        np.testing.assert_allclose(got, plain, rtol=1e-9, atol=1e-11)
        np.testing.assert_allclose(by_hand, plain, rtol=1e-9, atol=1e-11)


FLOAT16: dict[str, tuple[Any, Any]] = {
    "reorder, an inner product": (
        lambda g, a: rgnn.dot(g.src(a["x"]) @ g.per_edge_type(a["w"]), g.per_edge_type(a["v"])),
        lambda r, a: np.einsum("ek,ekn,en->e", a["x"][r.s], a["w"][r.t], a["v"][r.t]),
    ),
    "reorder, two products": (
        lambda g, a: (g.src(a["x"]) @ g.per_edge_type(a["w"])) @ g.per_edge_type(a["m"]),
        lambda r, a: np.einsum("ek,ekn,enm->em", a["x"][r.s], a["w"][r.t], a["m"][r.t]),
    ),
    "reorder, a scalar by type": (
        lambda g, a: rgnn.dot(g.src(a["x"]) @ g.per_edge_type(a["w"]), g.dst(a["y"])) * g.per_edge_type(a["c"]),
        lambda r, a: np.einsum("ek,ekn,en,e->e", a["x"][r.s], a["w"][r.t], a["y"][r.d], a["c"][r.t]),
    ),
    "fold": (
        lambda g, a: g.src(g.node(a["z"]) @ g.per_node_type(a["u"])) @ g.per_edge_type(a["n"]),
        lambda r, a: np.einsum("ek,ekn,enm->em", a["z"][r.s], a["u"][r.nt][r.s], a["n"][r.t]),
    ),
}


@pytest.mark.parametrize("scale", [1e-4, 300.0])
@pytest.mark.parametrize("name", FLOAT16)
def test_products_of_float16_weights_stay_in_range(name: str, scale: float) -> None:
    """A product of two weights of 1e-4 or of 300 is beyond float16; the program as written is not."""
    program, reference = FLOAT16[name]
    edges, rng = GRAPHS["typed"], np.random.default_rng(0)
    n, types, ntypes = edges.num_nodes, edges.num_edge_types, edges.num_node_types
    shapes = {"w": (types, 8, 16), "v": (types, 16), "m": (types, 16, 4), "c": (types,)}
    shapes |= {"u": (ntypes, 2, 256), "n": (types, 256, 2)}
    arrays = {key: rng.normal(size=shape) * scale for key, shape in shapes.items()}
    arrays |= {"x": rng.normal(size=(n, 8)) * min(0.03 / scale**2, 2e4), "y": rng.normal(size=(n, 16))}
    arrays["z"] = arrays["x"][:, :2]
    arrays = {key: a.astype(np.float16) for key, a in arrays.items()}
    want = reference(Reference(edges), {key: a.astype(np.float64) for key, a in arrays.items()})
    got = rgnn.program(program)(graph_of("typed"), arrays, options=Options(backend="xla"))
    assert got.dtype == np.float16
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 2e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_bias_behind_a_sum_of_16_bits_takes_away_what_is_too_large(dtype: str) -> None:
    """The sum of the products alone is 90,000, beyond float16; with the bias it is 34,000."""
    n, rng = 60, np.random.default_rng(0)
    senders, receivers = rng.integers(0, n, (2, 2400))
    arrays = {
        "x": np.full((n, 4), 40.0),
        "y": rng.random((n, 4)) * 0.1 + 1,
        "w": np.full((4, 16), 10.0),
        "b": np.full(16, -1000.0),
    }
    given = {key: jnp.asarray(a, dtype) for key, a in arrays.items()}

    @rgnn.program
    def layer(g: Any, a: Any) -> Any:
        return g.sum_to_dst((g.src(a["x"]) * g.dst(a["y"])) @ g.shared(a["w"]) + g.shared(a["b"]))

    g = RelGraph.from_edges(senders, receivers, num_nodes=n)
    got = layer(g, given, options=Options(backend="pallas", interpret=True))
    x, y, w, b = (np.asarray(a, np.float64) for a in given.values())
    want = np.zeros((n, 16))
    np.add.at(want, receivers, (x[senders] * y[receivers]) @ w + b)
    assert np.abs(want).max() > 30_000
    tolerance = 2e-3 if dtype == "float16" else 2e-2
    assert np.abs(np.asarray(got, np.float64) - want).max() <= tolerance * np.abs(want).max()
