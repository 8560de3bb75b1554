"""Idioms cost what the form by hand costs: predicted times of both, and equal results in float64."""

from __future__ import annotations

import importlib
import io
import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from tests.cases import slow_but
from tests.rgnn.contract import waves
from tests.rgnn.passes.idioms import IDIOMS, WAYS, Idiom
from tests.rgnn.preserved import by_numpy
from tests.rgnn.references import GRAPHS, Reference, graph_of

# Programs that convert to 16 bits, or count in float32.
ROUNDED = {"cast_values": 2e-2, "gcn_pow": 1e-6}
# One idiom or two for each pass.
KERNELS = (
    *("stack_weighted", "glu", "rgat_heads_loop", "heads_loop_slices", "block_diagonal_loop", "divided_before"),
    *("shared_sum", "compgcn_add_max", "gine_linear_scaled", "same_rows_twice", "basis_of_messages", "ln_on_edges"),
    *("cosine_on_edges", "softmax_explicit", "gated_on_edges", "rotation_pairs", "film", "sage_concat"),
)


@cache
def graph(nodes: int, edges: int, types: int) -> RelGraph:
    rng = np.random.default_rng(0)
    ends = rng.integers(0, nodes, (2, edges))
    return RelGraph.from_edges(*ends, rng.integers(0, types, edges), num_nodes=nodes, num_edge_types=types)


@contextmanager
def no_kernels_made() -> Iterator[None]:
    """`explain` predicts from the plan alone: tracing the kernels takes three quarters of its time."""
    module = importlib.import_module("dejax.rgnn.compiler.explain")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_traced", lambda *args: ())
        yield


def predicted(program: Any, g: RelGraph, shapes: list[tuple[int, ...]]) -> tuple[float, float]:
    """Microseconds of forward and backward with gradients, by the cost model of an H200."""
    out = io.StringIO()
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    program.explain(g, *arrays, options=Options("pallas", "tf32", interpret=False), summary=True, file=out)
    times = [float(t) for t in re.findall(r"^total .* ([\d.]+) us$", out.getvalue(), re.MULTILINE)]
    assert len(times) == 3  # the first is forward without gradients
    return times[1], times[2]


# Of the others both forms become one program (test_canonical.py).
TWO_PROGRAMS = [name for name in IDIOMS if name not in itertools.chain(*WAYS.values())]


@pytest.mark.parametrize("name", slow_but([name for name in KERNELS if name in TWO_PROGRAMS], TWO_PROGRAMS))
def test_an_idiom_is_predicted_to_cost_what_the_form_by_hand_does(name: str) -> None:
    case, g = IDIOMS[name], graph(50_000, 1_500_000, 20)
    with no_kernels_made():
        written = predicted(case.written, g, case.shapes(g))
        by_hand = predicted(case.by_hand, g, case.shapes(g))
    assert all(a <= 1.1 * b for a, b in zip(written, by_hand, strict=True)), f"{written} us, by hand {by_hand} us"


@pytest.mark.slow
@pytest.mark.parametrize("name", IDIOMS)
def test_kernels_of_an_idiom_are_made(name: str) -> None:
    case, g = IDIOMS[name], graph(50_000, 1_500_000, 20)
    written = predicted(case.written, g, case.shapes(g))
    with no_kernels_made():
        assert predicted(case.written, g, case.shapes(g)) == written


def run(program: Any, g: RelGraph, arrays: list[Any], options: Options) -> list[Any]:
    """The result and the gradients of all arrays."""
    y, pull = jax.vjp(lambda *a: program(g, *a, options=options), *arrays)
    return [y, *pull(waves(y))]


def drawn(case: Idiom, g: RelGraph) -> list[Any]:
    rng = np.random.default_rng(1)
    return [jnp.asarray(rng.normal(size=shape) * 0.3) for shape in case.shapes(g)]


@pytest.mark.parametrize("name", IDIOMS)
def test_both_forms_and_the_programs_after_each_pass_agree(name: str) -> None:
    case, g = IDIOMS[name], graph(12, 40, 3)
    with jax.enable_x64(True), by_numpy(exact=(False,)):
        arrays = drawn(case, g)
        found = [run(case.written, g, arrays, Options()), run(case.by_hand, g, arrays, Options())]
    for written, by_hand in zip(*found, strict=True):
        if name in ROUNDED:
            within = {"rtol": 0, "atol": ROUNDED[name] * (1e-2 + np.abs(np.asarray(written, np.float64)).max())}
        else:
            within = {"rtol": 1e-9, "atol": 1e-11}
        np.testing.assert_allclose(by_hand, written, **within)


@pytest.mark.parametrize("name", slow_but(["glu"], KERNELS))
def test_kernels_agree_with_float64(name: str) -> None:
    case, g = IDIOMS[name], graph(12, 40, 3)
    with jax.enable_x64(True), by_numpy():
        arrays = drawn(case, g)
        want = run(case.written, g, arrays, Options())
    arrays = [a.astype(jnp.float32) for a in arrays]
    found = run(case.written, g, arrays, Options(backend="pallas", interpret=True))
    for got, right in zip(found, want, strict=True):
        assert (
            np.linalg.norm(np.asarray(got, np.float64) - np.asarray(right))
            <= 4e-3 * np.linalg.norm(np.asarray(right)) + 1e-6
        )


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


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_rows_that_no_edge_reads_may_have_no_norm(backend: str) -> None:
    """Rows are divided by their norm once for each node; row 0, which no edge reads, is 0 / 0 then."""
    g = RelGraph.from_edges([1, 2, 2], [0, 0, 1], num_nodes=3)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(3, 16)), jnp.float32).at[0].set(0.0)

    @rgnn.program
    def layer(g: Any, x: Any) -> Any:
        row = g.src(x)
        return g.sum_to_dst(row / rgnn.sqrt((row * row).sum(keepdims=True)))

    options = Options(backend=backend, interpret=True, precision="f32")
    y, pull = jax.vjp(lambda x: layer(g, x, options=options), x)
    (gradient,) = pull(waves(y))
    plain = layer.with_options(backend="xla", disable=("compact",))
    want, back = jax.vjp(lambda x: plain(g, x), x)
    np.testing.assert_allclose(y, want, atol=1e-5)
    np.testing.assert_allclose(gradient, back(waves(y))[0], atol=1e-5)


@pytest.mark.parametrize("backend", ["xla", "pallas"])
def test_a_softmax_that_is_written_out_masks_edges(backend: str) -> None:
    """All edges of node 1 have the score -inf: their shares are 0, as in `edge_softmax`."""
    g = RelGraph.from_edges([0, 1, 2, 0], [0, 0, 0, 1], num_nodes=3)
    score = jnp.asarray([0.3, -jnp.inf, 80.0, -jnp.inf], jnp.float32)

    @rgnn.program
    def shares(g: Any, s: Any) -> Any:
        p = rgnn.exp(g.edge(s) - g.dst(g.max_to_dst(g.edge(s))))
        return p / (g.dst(g.sum_to_dst(p)) + 1e-16)

    options = Options(backend=backend, interpret=True)
    got, without = (np.asarray(shares(g, score, options=o)) for o in (options, Options(disable=("plain_forms",))))
    np.testing.assert_allclose(got, without, atol=1e-7)
    assert got[1] == got[3] == 0.0 and got[2] == 1.0
