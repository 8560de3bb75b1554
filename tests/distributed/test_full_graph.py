"""Full-graph layers over a mesh give the numbers of one device: any program, forward and backward."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import assume, given, settings

from dejax import rgnn
from dejax.distributed.full_graph import CannotDistribute
from dejax.rgnn import library
from tests.cases import slow_but
from tests.distributed.full_graphs import compare
from tests.rgnn.layers.test_zoo import drawn
from tests.rgnn.layers.zoo_references import LAYERS
from tests.rgnn.random_programs import Recipe, recipes
from tests.rgnn.references import GRAPHS
from tests.rgnn.strategies import EdgeList, edge_lists
from tests.rgnn.test_operators import OPERATORS, arrays_of

pytestmark = pytest.mark.devices(4)

REFUSED = {"products of edges": "products of rows on several devices"}
KINDS = dict.fromkeys(("x", "y", "heads", "zeros", "i_node", "i_graph"), "node")
KINDS |= dict.fromkeys(("e", "score", "i_edge", "i_far"), "edge")
# Compiling is what takes the time: several operators in one program take less than one by one.
GROUPS = [[name for name in OPERATORS if name not in REFUSED][i::5] for i in range(5)]
CASES = [*(pytest.param(names, marks=pytest.mark.slow) for names in GROUPS[:-1]), GROUPS[-1]]


def run_operators(names: list[str]) -> None:
    edges = GRAPHS["typical"]
    with jax.enable_x64(True):
        arrays = arrays_of(edges)
        named = {key: KINDS.get(key, "shared") for key in arrays}
        program = rgnn.program(lambda g, a: [OPERATORS[name].program(g, a) for name in names])
        compare(program, edges.build(), arrays, named)


@pytest.mark.parametrize("names", CASES, ids=", ".join)
def test_operators(names: list[str]) -> None:
    run_operators(names)


@pytest.mark.parametrize("name", REFUSED)
def test_operators_that_are_refused(name: str) -> None:
    with pytest.raises(CannotDistribute, match=REFUSED[name]):
        run_operators([name])


LAYER_KINDS = {"node": "node", "edge": "edge"}
# One of each kind: gates, scores of edges. Softmax with edge features is in test_full_graph_modules.py.
QUICK = ("gated_gcn", "complex")


@pytest.mark.parametrize("name", slow_but(QUICK, LAYERS))
def test_layers_of_the_zoo(name: str) -> None:
    edges = GRAPHS["typical"]
    layer, arrays = drawn(LAYERS[name], edges)
    kinds = {key: LAYER_KINDS.get(kind, "shared") for key, (kind, _) in layer.arrays.items()}
    with jax.enable_x64(True):
        program = rgnn.program(lambda g, a: layer.run(g, a, None))
        compare(program, edges.build(), arrays, kinds, parts=2)


def test_extrema_over_the_edges_of_a_graph_without_edges() -> None:
    graph = rgnn.RelGraph.from_edges([], [], [], num_nodes=5)
    program = rgnn.program(lambda g, a: (g.max_to_graph(g.edge(a[0])), g.min_to_graph(g.edge(a[0])) + g.node(a[1])))
    arrays = [np.zeros((0, 2), np.float32), np.ones((5, 2), np.float32)]
    compare(program, graph, arrays, ["edge", "node"], parts=2)


def test_what_is_infinite_where_no_edge_reads_it_has_no_gradient() -> None:
    """Seven of eight nodes send nothing: 1 / sqrt(0) is infinite there, and the gradient of their rows is 0."""

    @rgnn.program
    def layer(g: Any, a: Any) -> Any:
        return g.src(g.node(a[0])) * g.src(rgnn.rsqrt(g.sum_to_src(g.edge(a[1]))))

    graph = rgnn.RelGraph.from_edges([0], [0], num_nodes=8)
    arrays = [np.ones((8, 3), np.float32), np.ones(1, np.float32)]
    compare(layer, graph, arrays, ["node", "edge"], parts=3, tolerance=1e-6)


def test_gradients_by_results_without_rows() -> None:
    """The compiler of jax 0.11 crashed where the gradient read a cotangent, or a stored value, without elements."""

    @rgnn.program
    def program(g: Any, a: Any) -> Any:
        y = g.dst(a[1])
        return g.sum_to_dst(g.src(a[0]))[..., None], y / rgnn.sqrt(rgnn.square(y).sum(keepdims=True) + 1.5)

    graph = rgnn.RelGraph.from_edges([], [], [], num_nodes=1)
    compare(program, graph, [np.ones((1, 1), np.float32), np.ones((1, 9), np.float32)], ["node"] * 2, parts=3)


def with_degrees_of_64_bits(recipe: Recipe) -> Recipe:
    """Degrees are float32 by default, and XLA's `rsqrt` of a constant differs from that of an argument by 1 ulp."""
    lines = (re.sub(r"(\w+_degree)\((within_relation=True)?\)", _wide_degree, line) for line in recipe.lines)
    return dataclasses.replace(recipe, lines=tuple(lines))


def _wide_degree(call: re.Match[str]) -> str:
    given = [option for option in (call[2], 'dtype="float64"') if option]
    return f"{call[1]}({', '.join(given)})"


@pytest.mark.slow
@settings(max_examples=40)
@given(recipes(max_steps=8), edge_lists(max_nodes=9, max_edges=30))
def test_random_programs(recipe: Recipe, edges: EdgeList) -> None:
    assume(all(i.kind != "source_pair" for i in recipe.inputs))
    kinds = [LAYER_KINDS.get(i.kind, "shared") for i in recipe.inputs]
    recipe = with_degrees_of_64_bits(recipe)
    with jax.enable_x64(True):
        arrays = [np.asarray(a) for a in recipe.cast(recipe.arrays(edges), "float64")]
        try:
            compare(recipe.program(), edges.build(), arrays, kinds, parts=3, how="skewed", tolerance=1e-8)
        except CannotDistribute as error:
            assert "products of rows" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "graph"), [("rgcn", "long_segments"), ("hgt", "typical")])
def test_kernels_read_padded_tables(name: str, graph: str) -> None:
    """Interpreted Pallas kernels on the graphs of the devices, whose tables have padding."""
    edges, rng = GRAPHS[graph], np.random.default_rng(0)
    (types, node_types), k, d = (edges.num_edge_types, edges.num_node_types), 5, 2
    shapes: dict[str, tuple[int, ...]] = {"weight": (types, k, 4), "root": (k, 4)}
    if name == "hgt":
        shapes = dict.fromkeys(("key", "query", "value"), (node_types, 2, k, d))
        shapes |= dict.fromkeys(("relation_attention", "relation_message"), (types, 2, d, d))
        shapes |= {"prior": (types, 2), "out": (node_types, 2 * d, 3)}
    arrays = {key: rng.normal(size=shape).astype(np.float32) for key, shape in shapes.items()}
    arrays["x"] = rng.normal(size=(edges.num_nodes, k)).astype(np.float32)
    kinds = {key: "node" if key == "x" else "shared" for key in arrays}

    @rgnn.program
    def layer(g: Any, a: Any) -> Any:
        params = {key: value for key, value in a.items() if key != "x"}
        return getattr(library, name)(g, a["x"], params)

    options = rgnn.Options(backend="pallas", precision="f32", interpret=True)
    compare(layer, edges.build(), arrays, kinds, parts=2, tolerance=3e-5, options=options)
