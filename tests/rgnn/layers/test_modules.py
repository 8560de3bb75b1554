"""Modules of the layers in both Flaxes: equal results, documentation, pairs of features, dropout, errors."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import dejax.rgnn.linen as linen_layers
import dejax.rgnn.nnx as nnx_layers
from dejax.rgnn import ProgramError, RelGraph, library, zoo
from dejax.rgnn.compiler.execute import counts_of
from dejax.rgnn.layers.specs import SPECS
from dejax.rgnn.passes._rewrite import live
from tests.cases import ForeignTensor, slow_but
from tests.rgnn.flax_layers import features, typed_graph

pytestmark = pytest.mark.usefixtures("programs_by_numpy")

GRAPH = typed_graph()
R, T = GRAPH.num_edge_types, GRAPH.num_node_types
EDGES = jax.random.normal(jax.random.key(5), (GRAPH.num_edges, 3))

# For each layer, or case of one: counts that the nnx module takes, settings of both, whether it takes edge features.
MODULES: dict[str, tuple[dict[str, int], dict[str, Any], bool]] = {
    "RGCNConv": ({"num_edge_types": R}, {}, False),
    "RGCNConv-bases": ({"num_edge_types": R}, {"num_bases": 2, "normalization": "sum"}, False),
    "RGCNConv-blocks": ({"num_edge_types": R}, {"num_blocks": 2, "use_root": False, "use_bias": False}, False),
    "RGATConv": ({"num_edge_types": R}, {"num_heads": 2, "softmax": "relation", "negative_slope": 0.1}, False),
    "RGATConv-mean": ({"num_edge_types": R}, {"num_heads": 2, "concat_heads": False}, False),
    "HGTConv": ({"num_node_types": T, "num_edge_types": R}, {"num_heads": 2, "head_features": 3}, False),
    "GCNConv": ({}, {}, False),
    "SAGEConv": ({}, {"aggregation": "max", "pool_features": 5}, False),
    "GINConv": ({}, {"hidden_features": 6, "train_epsilon": True}, True),
    "GatedGCNConv": ({}, {}, True),
    "PNAConv": ({}, {"num_towers": 2, "mean_log_degree": 1.3}, True),
    "GATConv": ({}, {"num_heads": 2, "use_residual": True}, True),
    "GATv2Conv": ({}, {"num_heads": 2, "share_weights": True}, True),
    "TransformerConv": ({}, {"num_heads": 2, "use_gate": True}, True),
    "RGGNNConv": ({"num_edge_types": R}, {"steps": 2}, False),
    "CompGCNConv": ({"num_edge_types": R}, {"directions": (0, 1, 0), "update_relation": True}, False),
    "SimpleHGNConv": ({"num_edge_types": R}, {"num_heads": 2, "relation_features": 3}, False),
    "SharedRGATConv": ({"num_edge_types": R}, {"num_heads": 2, "softmax": "relation"}, True),
    "HEATConv": ({"num_node_types": T, "num_edge_types": R}, {"num_heads": 2}, True),
}


def test_every_layer_is_here() -> None:
    assert {case.partition("-")[0] for case in MODULES} == SPECS.keys()
    for name, spec in SPECS.items():
        assert name in nnx_layers.__all__ and name in linen_layers.__all__
        assert spec.program in (getattr(module, spec.program.__name__, None) for module in (library, zoo))


@pytest.mark.parametrize("case", slow_but(["HGTConv", "SAGEConv", "PNAConv", "GATConv", "RGGNNConv"], MODULES))
def test_equal_parameters_give_equal_results(case: str) -> None:
    """Also the same names and shapes of parameters, from nnx to linen and back."""
    name = case.partition("-")[0]
    counts, settings, takes_edges = MODULES[case]
    x, edges = features(GRAPH, 4), (EDGES,) if takes_edges else ()
    width = {"edge_features": 3} if takes_edges else {}
    mine = getattr(nnx_layers, name)(4, 6, **counts, **settings, **width, rngs=nnx.Rngs(0))
    theirs = getattr(linen_layers, name)(6, **settings)
    variables = theirs.init(jax.random.key(1), GRAPH, x, *edges)
    converted = nnx_layers.params_to_linen(mine)
    assert jax.tree.map(jnp.shape, variables["params"]) == jax.tree.map(jnp.shape, converted["params"])
    first = theirs.apply(converted, GRAPH, x, *edges)
    jax.tree.map(np.testing.assert_array_equal, mine(GRAPH, x, *edges), first)
    found = theirs.apply(variables, GRAPH, x, *edges)
    nnx_layers.params_from_linen(mine, variables)
    for got, want, other in zip(*map(jax.tree.leaves, (mine(GRAPH, x, *edges), found, first)), strict=True):
        np.testing.assert_array_equal(got, want)
        assert np.isfinite(got).all() and np.ptp(got) > 0 and np.any(got != other)
    pickle.loads(pickle.dumps(theirs))


@pytest.mark.parametrize("name", SPECS)
def test_documentation_names_every_setting(name: str) -> None:
    own = set(inspect.signature(getattr(nnx_layers, name)).parameters)
    text = getattr(nnx_layers, name).__doc__
    assert not [setting for setting in own if setting not in text]
    assert "Attributes:" in getattr(linen_layers, name).__doc__


PAIR = RelGraph.from_bipartite([0, 1, 1, 3], [0, 0, 1, 2], num_sources=4, num_destinations=3)


@pytest.mark.parametrize("name", ["SAGEConv", pytest.param("GatedGCNConv", marks=pytest.mark.slow)])
def test_a_pair_of_features_needs_no_padding(name: str) -> None:
    key = jax.random.key(0)
    x = jax.random.normal(key, (4, 5)), jax.random.normal(key, (3, 2))
    layer = getattr(nnx_layers, name)((5, 2), 6, rngs=nnx.Rngs(0))
    padded = jnp.pad(x[0], ((0, 3), (0, 0))), jnp.pad(x[1], ((4, 0), (0, 0)))
    found = layer(PAIR, x)
    assert found.shape == (3, 6)
    np.testing.assert_array_equal(found, layer(PAIR, padded)[4:])
    theirs = getattr(linen_layers, name)(6)
    assert theirs.init_with_output(key, PAIR, x)[0].shape == (3, 6)


def settings_of(name: str) -> list[dict[str, Any]]:
    """Every choice of a layer's switches."""
    fields = {f.name: (False, True) for f in dataclasses.fields(SPECS[name]) if f.type == "bool"}
    fields |= {"aggregation": ("mean", "max", "sum"), "pool_features": (None, 3)} if name == "SAGEConv" else {}
    fields |= {"edge_features": (None, 3)} if MODULES[name][2] else {}
    return [dict(zip(fields, chosen, strict=True)) for chosen in itertools.product(*fields.values())]


def inputs_that_results_read(name: str, **settings: Any) -> set[str]:
    """The names of the arrays of a pair on which a layer's result depends."""
    spec = SPECS[name](in_features=(4, 4), out_features=6, **settings)
    x = jnp.ones((PAIR.num_nodes, 4)), jnp.ones((PAIR.num_nodes, 4))
    params = {key: jnp.ones(p.shape) for key, p in spec.params().items()}
    edges = jnp.ones((PAIR.num_edges, 3)) if settings.get("edge_features") else None
    keywords = {key: getattr(spec, key) for key in spec.passed}
    given = {} if edges is None else {spec.edge_argument: edges}
    program, _, _ = type(spec).program.traced(counts_of(PAIR), (x, params), {**given, **keywords})
    return {program.ops[i].attr("name") for i in live(program, program.outputs) if program.ops[i].name == "input"}


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.takes_pairs()])
def test_layers_read_both_parts_of_a_pair(name: str) -> None:
    """In every setting, or the layer refuses."""
    refused = 0
    for settings in settings_of(name):
        try:
            found = inputs_that_results_read(name, **settings)
        except ValueError as error:
            assert "use_root" in str(error)
            refused += 1
            continue
        assert {"x[0]", "x[1]"} <= found, settings
    assert refused < len(settings_of(name))


@pytest.mark.parametrize(("program", "weight"), [(zoo.gat, "weight"), (zoo.gatv2, "weight_src")])
def test_destinations_of_a_pair_meet_the_weight_of_the_sources(program: Any, weight: str) -> None:
    """As one array whose rows are the pair's: the result and both gradients. Destinations were not read."""
    k = jax.random.split(jax.random.key(0), 4)
    w, x = jax.random.normal(k[0], (2, 4, 3)), jax.random.normal(k[1], (7, 4))
    vectors = ("attention_src", "attention_dst") if weight == "weight" else ("attention",)
    params = {weight: w, **{v: jax.random.normal(key, (2, 3)) for v, key in zip(vectors, k[2:], strict=False)}}
    if weight == "weight_src":
        params["bias_src"] = jax.random.normal(k[3], (2, 3))
    source = jnp.arange(7)[:, None] < 4

    @jax.jit
    def both(x: Any) -> Any:
        loss = lambda x: jnp.sin(program(PAIR, x, params)).sum()  # noqa: E731
        pair = jnp.where(source, x, 0), jnp.where(source, 0, x)
        return jax.grad(loss)(x), jax.grad(loss)(pair)

    one, (sources, destinations) = both(x)
    np.testing.assert_allclose(jnp.where(source, sources, destinations), one, rtol=1e-5, atol=1e-6)
    assert np.abs(destinations[4:]).max() > 1e-3
    with pytest.raises(ProgramError, match="the parameter weight_dst must be given for a pair"):
        program(PAIR, (x, x[:, :3]), params)


def test_a_pair_needs_something_that_reads_its_destinations() -> None:
    with pytest.raises(
        ProgramError, match="have no root, because only the root term reads the destinations, got a pair"
    ):
        zoo.graphsage(PAIR, (jnp.ones((7, 4)), jnp.ones((7, 4))), {"neighbour": jnp.ones((4, 3))})
    with pytest.raises(ValueError, match="use_root must be True with a pair"):
        nnx_layers.SAGEConv((4, 4), 3, use_root=False, rngs=nnx.Rngs(0))


def test_a_pair_on_a_graph_of_relations() -> None:
    graph = RelGraph.from_relations({("user", "buys", "item"): ([0, 1], [2, 0])}, {"item": 3, "user": 2})
    layer = nnx_layers.SAGEConv((5, 2), 6, rngs=nnx.Rngs(0))
    assert layer(graph, (jnp.ones((2, 5)), jnp.ones((3, 2)))).shape == (3, 6)
    mixed = RelGraph.from_relations(
        {("user", "buys", "item"): ([0], [1]), ("item", "of", "user"): ([1], [0])}, {"item": 3, "user": 2}
    )
    with pytest.raises(ValueError, match="RelGraph.from_bipartite"):
        layer(mixed, (jnp.ones((2, 5)), jnp.ones((3, 2))))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda rngs: nnx_layers.GCNConv(0, 3, rngs=rngs), "in_features must be at least 1, got 0"),
        (lambda rngs: nnx_layers.GCNConv(2, 3.0, rngs=rngs), "out_features must be an integer, got 3.0"),
        (lambda rngs: nnx_layers.GCNConv((2, 3), 3, rngs=rngs), "in_features must be one width"),
        (lambda rngs: nnx_layers.PNAConv(4, 5, 1.0, num_towers=2, rngs=rngs), "num_towers must divide"),
        (
            lambda rngs: nnx_layers.GATConv(4, 5, attention_dropout=1.0, rngs=rngs),
            "attention_dropout, the share that is dropped",
        ),
        (lambda rngs: nnx_layers.GATv2Conv((4, 3), 5, share_weights=True, rngs=rngs), "share_weights"),
        (lambda rngs: nnx_layers.TransformerConv(4, 5, use_gate=True, use_root=False, rngs=rngs), "use_root"),
        (lambda rngs: nnx_layers.RGGNNConv(6, 5, 2, rngs=rngs), "in_features must be at most"),
        (lambda rngs: nnx_layers.GINConv((4, 3), 5, rngs=rngs), "must have one width"),
    ],
)
def test_sizes_that_do_not_fit(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make(nnx.Rngs(0))


def test_a_slope_is_no_size() -> None:
    found = [nnx_layers.GATConv(4, 3, negative_slope=slope, rngs=nnx.Rngs(0)) for slope in (0, 0.0)]
    np.testing.assert_array_equal(*(layer(GRAPH, features(GRAPH, 4)) for layer in found))


def test_weights_are_not_cut_to_integers() -> None:
    with pytest.raises(TypeError, match="`dtype` must be a dtype of floats, got int32"):
        nnx_layers.GCNConv(4, 3, dtype=jnp.int32, rngs=nnx.Rngs(0))(GRAPH, features(GRAPH, 4))


def test_features_of_other_libraries_are_read() -> None:
    layer, x = nnx_layers.GCNConv(4, 3, rngs=nnx.Rngs(0)), features(GRAPH, 4)
    np.testing.assert_array_equal(layer(GRAPH, ForeignTensor(x)), layer(GRAPH, x))
    with pytest.raises(TypeError, match="GCNConv: features must be numbers, got dtype object; convert"):
        layer(GRAPH, np.asarray(x).astype(object))


def test_arguments_that_do_not_fit() -> None:
    x = features(GRAPH, 4)
    layer = nnx_layers.GATConv(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"x must be an array of shape .*\[12, 4\], got an array of shape \(12, 5\)"):
        layer(GRAPH, features(GRAPH, 5))
    with pytest.raises(ValueError, match="made without their width"):
        layer(GRAPH, x, EDGES)
    with pytest.raises(ValueError, match=r"edge_features must have shape \(40, 3\), got None"):
        nnx_layers.GATConv(4, 3, edge_features=3, rngs=nnx.Rngs(0))(GRAPH, x)
    with pytest.raises(ValueError, match="num_edge_types=2, for which the layer was made, got 3"):
        nnx_layers.RGGNNConv(4, 4, 2, rngs=nnx.Rngs(0))(GRAPH, x)
    with pytest.raises(ValueError, match=r"pair of shapes \[\(4, 5\), \(3, 2\)\]"):
        nnx_layers.SAGEConv((5, 2), 6, rngs=nnx.Rngs(0))(PAIR, (jnp.ones((4, 5)), jnp.ones((4, 2))))
    with pytest.raises(TypeError, match="out_features"):
        nnx_layers.GATConv(4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="edge_features must be None, because this layer takes none"):
        nnx_layers.SAGEConv(4, 6, rngs=nnx.Rngs(0))(GRAPH, x, EDGES)
