"""Rows that no edge reads: whatever stands there, results and gradients are those of the program as it is written.

Users make `degree ** -0.5` outside of a program, which is infinite at nodes without edges.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.rgnn import Options, RelGraph
from dejax.rgnn.ir.inter import Space
from dejax.rgnn.passes import PASSES, optimise
from tests.cases import slow_but
from tests.rgnn.contract import waves
from tests.rgnn.preserved import by_numpy

NODES, TYPES, WIDTH = 40, 5, 8
RNG = np.random.default_rng(0)
# Nodes 0 to 24 send, nodes 5 to 34 receive; edges have types 0 to 3.
GRAPH = RelGraph.from_edges(
    RNG.integers(0, 25, 300), RNG.integers(5, 35, 300), RNG.integers(0, 4, 300), num_nodes=NODES, num_edge_types=TYPES
)


def _of_source(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    return g.sum_to_dst(g.src(s) * (g.src(x) @ g.shared(w)))


def _of_both(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    return g.sum_to_dst(g.src(s) * g.dst(s) * (g.src(x) @ g.shared(w)))


def _of_product(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    return g.sum_to_dst((g.src(s) * g.src(x)) @ g.shared(w))


def _of_type(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    return g.sum_to_dst(g.per_edge_type(t) * (g.src(x) @ g.shared(w)))


def _of_type_and_source(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    return g.sum_to_dst(g.per_edge_type(t) * g.src(s) * (g.src(x) @ g.shared(w)))


def _in_scores(g: Any, x: Any, w: Any, s: Any, t: Any) -> Any:
    z = g.src(x) @ g.shared(w)
    return g.sum_to_dst(rgnn.edge_softmax(g.src(s) * rgnn.dot(z, g.dst(x))) * z)


PROGRAMS = [_of_source, _of_both, _of_product, _of_type, _of_type_and_source, _in_scores]


def names(x: Any) -> str:
    return x if isinstance(x, str) else x.__name__[1:]


@pytest.mark.parametrize(
    ("function", "backend"),
    slow_but(
        [*((f, "numpy") for f in PROGRAMS), (_of_both, "xla"), (_of_source, "pallas")],
        itertools.product(PROGRAMS, ("numpy", "xla", "pallas")),
    ),
    ids=names,
)
def test_infinite_factors_where_no_edge_reads_them(function: Callable[..., Any], backend: str) -> None:
    x, w = RNG.normal(size=(NODES, WIDTH)).astype("float32"), RNG.normal(size=(WIDTH, WIDTH)).astype("float32")
    read = np.zeros(NODES, bool)
    read[np.asarray(GRAPH.senders)] = True
    if function is not _of_source and function is not _of_product:
        read[np.asarray(GRAPH.receivers)] = True
    s = np.where(read, 1 + RNG.random(NODES), np.inf).astype("float32")
    t = np.where(np.arange(TYPES) < 4, 1 + RNG.random(TYPES), np.inf).astype("float32")
    program = rgnn.program(function)

    def run(options: Options) -> Any:
        y, pull = jax.vjp(lambda *a: program(GRAPH, *a, options=options), x, w, s, t)
        return y, *pull(waves(y))

    if backend == "numpy":
        with by_numpy():
            assert all(np.all(np.isfinite(a)) for a in run(Options())[:3])
        return
    want = jax.jit(lambda: run(Options(backend="xla", disable=PASSES, precision="f32")))()
    found = jax.jit(lambda: run(Options(backend=backend, precision="f32", interpret=True)))()
    for a, b in zip(found, want, strict=True):
        assert np.all(np.isfinite(b))
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-4 * float(np.abs(b).max()))


def test_factors_of_sources_multiply_rows_once() -> None:
    """`d_j^(-1/2) d_i^(-1/2)` of a graph convolution: one factor before the sum, at the nodes, and one after it."""

    @rgnn.program
    def gcn(g: Any, x: Any, w: Any) -> Any:
        out, into = (rgnn.maximum(degree, 1.0) for degree in (g.sum_to_src(1.0), g.sum_to_dst(1.0)))
        return g.sum_to_dst(g.src(out**-0.5) * g.dst(into**-0.5) * (g.src(x) @ g.shared(w)))

    rng = np.random.default_rng(0)
    graph = RelGraph.from_edges(*rng.integers(0, 50, (2, 2000)), num_nodes=50)
    task, _, _ = gcn._prepare(graph, Options(), (jnp.ones((50, WIDTH)), jnp.ones((WIDTH, WIDTH))), {})
    on_edges = [op.name for op in optimise(task.program, task.counts).ops if op.space == Space.EDGE]
    assert on_edges == ["gather"]
