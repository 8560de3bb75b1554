"""Layers of the zoo are their papers' equations: results and gradients, on random graphs and awkward ones."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejax.rgnn import Options, ProgramError, RelGraph, zoo
from tests.cases import slow_but
from tests.rgnn.contract import waves
from tests.rgnn.layers.zoo_references import LAYERS, REFERENCES, Layer
from tests.rgnn.preserved import by_numpy
from tests.rgnn.references import GRAPHS, LONG_SEGMENT_CHUNK, Arrays, Reference
from tests.rgnn.strategies import EdgeList, edge_lists

XLA = Options(backend="xla", precision="f32")
KERNELS = Options(backend="pallas", precision="f32", interpret=True)


def drawn(layer: Layer, edges: EdgeList, seed: int = 0) -> tuple[Layer, dict[str, np.ndarray]]:
    """The layer with its keywords for this graph, and random arrays in float64."""
    rng = np.random.default_rng(seed)
    rows = {
        "node": edges.num_nodes,
        "edge": len(edges.senders),
        "etype": edges.num_edge_types,
        "ntype": edges.num_node_types,
    }
    arrays = {}
    for name, (kind, shape) in layer.arrays.items():
        full = shape if kind == "shared" else (rows[kind], *shape)
        arrays[name] = rng.normal(size=full) * 0.5
    if "edge_weight" in arrays:
        arrays["edge_weight"] = np.abs(arrays["edge_weight"]) + 0.1
    if layer.keywords.get("directions") == "alternate":
        directions = tuple(i % 2 for i in range(edges.num_edge_types))
        layer = replace(layer, keywords=layer.keywords | {"directions": directions})
    return layer, arrays


def both(function: Any, arrays: Arrays) -> tuple[tuple[Any, ...], Arrays]:
    """Results and gradients, for cotangents of many signs and sizes."""
    results, pull = jax.vjp(lambda a: tuple(jax.tree.leaves(function(a))), arrays)
    return results, pull(tuple(map(waves, results)))[0]


def compare(name: str, edges: EdgeList, options: Options, seed: int = 0) -> None:
    """Compares results and gradients with numpy's: XLA in float64, kernels in float32."""
    layer, arrays = drawn(LAYERS[name], edges, seed)
    exact = options.backend == "xla"
    dtype, tolerance = (np.float64, 1e-10) if exact else (np.float32, 3e-5)
    graph = edges.build(long_segment_chunk=LONG_SEGMENT_CHUNK)
    with jax.enable_x64(True), by_numpy(exact=()):
        wide = {key: jnp.asarray(np.asarray(value, dtype).astype(np.float64)) for key, value in arrays.items()}
        wanted = both(lambda a: layer.run(graph, a, XLA), wide)
    with jax.enable_x64(exact):
        given = {key: jnp.asarray(value.astype(dtype)) for key, value in arrays.items()}
        found = jax.jit(lambda a: both(lambda a: layer.run(graph, a, options), a))(given)
    for (path, got), want in zip(jax.tree_util.tree_leaves_with_path(found), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == dtype and got.shape == want.shape, f"{name} {path}"
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale, err_msg=f"{name} {path}")


AWKWARD = ("one_node", "no_edges", "long_segments")


@pytest.mark.parametrize(
    ("name", "graph"),
    slow_but(
        [*((name, "typical") for name in LAYERS), *zip(("gat", "pna", "gated_gcn"), AWKWARD, strict=True)],
        itertools.product(LAYERS, ("typical", *AWKWARD)),
    ),
)
def test_results_by_numpy(name: str, graph: str) -> None:
    """Passes preserve results and gradients, and results are those of the layer's reference, where it has one."""
    edges = GRAPHS[graph]
    layer, arrays = drawn(LAYERS[name], edges)
    with jax.enable_x64(True), by_numpy() as programs:
        given = jax.tree.map(jnp.asarray, arrays)
        found = layer.run(edges.build(long_segment_chunk=LONG_SEGMENT_CHUNK), given, XLA)
        assert programs
        if layer.program not in REFERENCES:
            return
        reference = REFERENCES[layer.program]
        wanted = jax.jit(lambda a: reference(Reference(edges), a, **layer.keywords))(arrays)
    for got, want in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        scale = max(1.0, float(np.abs(want).max(initial=0.0)))
        np.testing.assert_allclose(got, want, rtol=1e-10, atol=1e-10 * scale)


@pytest.mark.parametrize("name", slow_but(["gat"], LAYERS))
def test_layers_in_float64_on_a_typical_graph(name: str) -> None:
    compare(name, GRAPHS["typical"], XLA)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
def test_layers_on_kernels(name: str) -> None:
    compare(name, GRAPHS["typical"], KERNELS)


@pytest.mark.slow
@settings(max_examples=20)
@given(edges=edge_lists(max_nodes=5, max_edges=10), name=st.sampled_from(sorted(LAYERS)), seed=st.integers(0, 3))
def test_layers_on_random_graphs(edges: EdgeList, name: str, seed: int) -> None:
    compare(name, edges, XLA, seed)


@pytest.mark.parametrize("dtype", ["float16", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_squares_and_degrees_of_16_bits_are_float32(dtype: str) -> None:
    """Squares of 300 and a degree of 70,000 are beyond float16; a mean square needs more digits than bfloat16 has."""
    many = 80
    graph = RelGraph.from_edges(np.arange(many), np.zeros(many, int), num_nodes=many)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(many, 4)) * 30 + 300, dtype)
    one, exact = jnp.eye(4, dtype=dtype), np.asarray(x, np.float64)

    units = zoo.graphsage(graph, x, {"neighbour": one * 0, "root": one}, normalize=True)
    np.testing.assert_allclose(
        np.asarray(units, np.float64), exact / np.linalg.norm(exact, axis=1, keepdims=True), rtol=2e-2
    )

    senders = np.arange(70_000) % many
    graph_of_one = RelGraph.from_edges(np.append(senders, 0), np.append(senders * 0, 1), num_nodes=many)
    got = zoo.gcn(graph_of_one, x / 300, {"weight": one}, jnp.ones(70_001, dtype))
    degree = np.bincount(np.append(senders * 0, 1), minlength=many) + 1.0
    rows = exact / 300 / np.sqrt(degree)[:, None]
    want = (rows[senders].sum(0) + rows[0]) / np.sqrt(degree[0])
    assert got.dtype == dtype
    np.testing.assert_allclose(np.asarray(got, np.float64)[0], want, rtol=2e-2)

    towers = {"message_dst": one[None] * 0, "message_src": one[None], "update": one[None] * 0, "out": one}
    pick = jnp.zeros((3, 1, 16, 4), dtype).at[0, 0, 12:].set(one)  # the standard deviation alone
    deviation = zoo.pna(graph, x, {**towers, "aggregate": pick})
    np.testing.assert_allclose(np.asarray(deviation, np.float64)[0], exact.std(0), rtol=2e-2)


def test_parameters_that_are_missing_or_unknown() -> None:
    graph, x = GRAPHS["typical"].build(), jnp.ones((11, 5))
    with pytest.raises(ProgramError, match="gat: the parameters lack weight, attention_src, attention_dst"):
        zoo.gat(graph, x, {"bias": jnp.ones(3)})
    with pytest.raises(ProgramError, match="gcn: the parameters hold unknown kernel"):
        zoo.gcn(graph, x, {"weight": jnp.ones((5, 3)), "kernel": jnp.ones(3)})
    edges = jnp.ones((40, 2))
    with pytest.raises(ProgramError, match="gatv2: the parameters weight_edge must be given with edge_features"):
        zoo.gatv2(graph, x, {"weight_src": jnp.ones((1, 5, 3)), "attention": jnp.ones((1, 3))}, edges)
    gin = {"weight_1": jnp.ones((5, 3)), "weight_2": jnp.ones((3, 3)), "edge": jnp.ones((2, 5))}
    with pytest.raises(ProgramError, match="gin: edge_features must be given with the parameters edge"):
        zoo.gin(graph, x, gin)
    with pytest.raises(ProgramError, match="aggregation must be one of 'mean', 'max', 'sum', got 'mode'"):
        zoo.graphsage(graph, x, {"neighbour": jnp.ones((5, 3))}, aggregation="mode")
    relation = {"relation": jnp.ones((4, 5)), "weight": jnp.ones((2, 5, 3))}
    with pytest.raises(ProgramError, match="directions must be 4 integers below 2"):
        zoo.compgcn(graph, x, relation, directions=(0, 1, 2, 0))
    with pytest.raises(ProgramError, match="mean_log_degree must be positive"):
        zoo.pna(graph, x, dict.fromkeys(PNA, x), mean_log_degree=0.0)
    with pytest.raises(ProgramError, match="rows of an even width"):
        zoo.complex_(graph, x, jnp.ones((4, 5)))
    with pytest.raises(ProgramError, match="steps must be an int of at least 1, got 0"):
        zoo.rggnn(graph, x, {"weight": x, "input": x, "hidden": x}, steps=0)


PNA = ("message_dst", "message_src", "update", "aggregate", "out")
