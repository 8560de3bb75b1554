"""The linen binding: what it does otherwise than nnx; `layers/test_modules.py` compares the results of both."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from dejax.rgnn import linen
from dejax.rgnn import nnx as rnnx
from tests.rgnn.flax_layers import features, gated, typed_graph

pytestmark = pytest.mark.usefixtures("programs_by_numpy")

GRAPH = typed_graph()
R = GRAPH.num_edge_types


def test_nodes_without_features() -> None:
    layer, other = linen.RGCNConv(6), rnnx.RGCNConv.featureless(GRAPH, 6, rngs=nnx.Rngs(0))
    variables = jax.jit(layer.init)(jax.random.key(1), GRAPH)
    np.testing.assert_array_equal(layer.apply(rnnx.params_to_linen(other), GRAPH), other(GRAPH))
    rnnx.params_from_linen(other, variables)
    np.testing.assert_array_equal(layer.apply(variables, GRAPH), other(GRAPH))


def test_params_from_linen_errors() -> None:
    layer = rnnx.RGCNConv(4, 6, R, rngs=nnx.Rngs(0))
    variables = rnnx.params_to_linen(layer)
    with pytest.raises(ValueError, match=r"parameter \"\['bias'\]\" must have shape \(6,\), got \(5,\)"):
        rnnx.params_from_linen(layer, {"params": {**variables["params"], "bias": jnp.zeros(5)}})
    with pytest.raises(ValueError, match=r"lacks \[\"\['root'\]\"\]"):
        rnnx.params_from_linen(layer, {"params": {k: v for k, v in variables["params"].items() if k != "root"}})


def test_dropout() -> None:
    args = (GRAPH, features(GRAPH, 4))
    layer = linen.RGCNConv(6, edge_dropout=0.5, self_loop_dropout=0.2)
    other = rnnx.RGCNConv(4, 6, R, edge_dropout=0.5, self_loop_dropout=0.2, rngs=nnx.Rngs(0))
    variables = layer.init(jax.random.key(0), *args)  # needs no dropout key
    rnnx.params_from_linen(other, variables)
    np.testing.assert_array_equal(layer.apply(variables, *args, deterministic=True), other(*args, deterministic=True))
    key = {"dropout": jax.random.key(5)}
    first = layer.apply(variables, *args, deterministic=False, rngs=key)
    np.testing.assert_array_equal(first, layer.apply(variables, *args, deterministic=False, rngs=key))
    assert bool(jnp.any(first != layer.apply(variables, *args, deterministic=True)))
    np.testing.assert_array_equal(first, layer.clone(deterministic=False).apply(variables, *args, rngs=key))
    # The same dropout key gives the same result in both bindings.
    inner = layer.bind(variables, rngs=key).make_rng("dropout")
    np.testing.assert_array_equal(first, other.spec(*args, variables["params"], inner))
    with pytest.raises(ValueError, match="deterministic"):
        layer.apply(variables, *args)


def test_dtypes() -> None:
    x = features(GRAPH, 4)
    layer = linen.RGCNConv(6, dtype=jnp.bfloat16)
    out, variables = layer.init_with_output(jax.random.key(0), GRAPH, x)
    assert out.dtype == jnp.bfloat16 and variables["params"]["weight"].dtype == jnp.float32
    ones = {"bias": nn.initializers.ones}
    stored = linen.RGCNConv(6, param_dtype=jnp.bfloat16, initializers=ones).init(jax.random.key(0), GRAPH, x)["params"]
    assert stored["weight"].dtype == jnp.bfloat16 and bool(jnp.all(stored["bias"] == 1))


def test_program_module() -> None:
    params = {
        "weight": ((R, 4, 6), jax.nn.initializers.normal(0.3)),
        "gate": ((4, 6), jax.nn.initializers.glorot_uniform()),
    }
    x = features(GRAPH, 4)
    strength = jax.random.uniform(jax.random.key(5), (GRAPH.num_edges,))
    layer = linen.ProgramModule(gated, params)
    other = rnnx.ProgramModule(gated, params, rngs=nnx.Rngs(0))
    got = layer.apply(rnnx.params_to_linen(other), GRAPH, x, strength)
    np.testing.assert_array_equal(got, other(GRAPH, x, strength))
    variables = layer.init(jax.random.key(0), GRAPH, x, strength)
    assert jax.tree.map(jnp.shape, variables["params"]) == {"weight": (R, 4, 6), "gate": (4, 6)}


def test_errors() -> None:
    x = features(GRAPH, 4)
    with pytest.raises(ValueError, match="num_bases and num_blocks must not be given together"):
        linen.RGCNConv(6, num_bases=2, num_blocks=2).init(jax.random.key(0), GRAPH, x)
    with pytest.raises(ValueError, match="x must be an array of shape"):
        linen.RGCNConv(6).init(jax.random.key(0), GRAPH, x[:-1])
    with pytest.raises(ValueError, match="must not be given together with options"):
        linen.RGCNConv(6, backend="xla", options=rnnx.Options()).init(jax.random.key(0), GRAPH, x)
