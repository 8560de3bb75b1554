"""Full-graph layers over a mesh give the numbers of one device: any program, forward and backward."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from dejax import rgnn
from dejax.distributed.full_graph import CannotDistribute, ShardedGraph, over_mesh
from dejax.rgnn import library
from tests.budget import examples
from tests.distributed.full_graphs import XLA, close, compare, mesh_of, owners
from tests.rgnn.layers.test_zoo import drawn
from tests.rgnn.layers.zoo_references import LAYERS
from tests.rgnn.random_programs import Recipe, recipes
from tests.rgnn.references import GRAPHS
from tests.rgnn.strategies import EdgeList, edge_lists
from tests.rgnn.test_operators import OPERATORS, arrays_of

REFUSED = {"products of edges": "products of rows on several devices"}


@pytest.mark.newest_jax
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str) -> None:
    edges = GRAPHS["typical"]
    kinds = dict.fromkeys(("x", "y", "heads", "zeros", "i_node", "i_graph"), "node")
    kinds |= dict.fromkeys(("e", "score", "i_edge", "i_far"), "edge")
    with jax.enable_x64(True):
        arrays = arrays_of(edges)
        named = {key: kinds.get(key, "shared") for key in arrays}
        program = rgnn.program(OPERATORS[name].program)
        if name in REFUSED:
            with pytest.raises(CannotDistribute, match=REFUSED[name]):
                compare(program, edges.build(), arrays, named)
        else:
            compare(program, edges.build(), arrays, named)


LAYER_KINDS = {"node": "node", "edge": "edge"}


@pytest.mark.newest_jax
@pytest.mark.sample(6)
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_the_zoo(name: str) -> None:
    edges = GRAPHS["typical"]
    layer, arrays = drawn(LAYERS[name], edges)
    kinds = {key: LAYER_KINDS.get(kind, "shared") for key, (kind, _) in layer.arrays.items()}
    with jax.enable_x64(True):
        program = rgnn.program(lambda g, a: layer.run(g, a, None))
        compare(program, edges.build(), arrays, kinds, parts=2)


@pytest.mark.newest_jax
@settings(max_examples=examples(20))
@given(recipes(max_steps=8), edge_lists(max_nodes=9, max_edges=30))
def test_random_programs(recipe: Recipe, edges: EdgeList) -> None:
    kinds = [{"node": "node", "edge": "edge"}.get(i.kind, "shared") for i in recipe.inputs]
    with jax.enable_x64(True):
        arrays = [np.asarray(a) for a in recipe.cast(recipe.arrays(edges), "float64")]
        try:
            compare(recipe.program(), edges.build(), arrays, kinds, parts=3, how="skewed", tolerance=1e-8)
        except CannotDistribute as error:
            assert "source pairs" in str(error) or "products of rows" in str(error)
