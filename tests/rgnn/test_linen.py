"""The linen binding: equal to nnx for equal parameters; state dicts, checkpoints, a training step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx, serialization

from dejax.rgnn import RelGraph, linen
from dejax.rgnn import nnx as rnnx
from tests.rgnn.flax_layers import features, gated, typed_graph

pytestmark = pytest.mark.usefixtures("programs_by_numpy")

GRAPH = typed_graph()
R, T, N = GRAPH.num_edge_types, GRAPH.num_node_types, GRAPH.num_nodes


def test_nodes_without_features() -> None:
    layer, other = linen.RGCNConv(6), rnnx.RGCNConv.featureless(GRAPH, 6, rngs=nnx.Rngs(0))
    variables = jax.jit(layer.init)(jax.random.key(1), GRAPH)
    np.testing.assert_array_equal(layer.apply(rnnx.params_to_linen(other), GRAPH), other(GRAPH))
    rnnx.params_from_linen(other, variables)
    np.testing.assert_array_equal(layer.apply(variables, GRAPH), other(GRAPH))


@pytest.mark.slow
def test_initialisers_are_those_of_nnx() -> None:
    """Each parameter is drawn from the same range in both bindings, for any keys."""
    graph = typed_graph(types=40, edges=200)
    x = features(graph, 30)
    pairs = [
        (linen.RGCNConv(20), rnnx.RGCNConv(30, 20, 40, rngs=nnx.Rngs(0))),
        (linen.RGATConv(20), rnnx.RGATConv(30, 20, 40, rngs=nnx.Rngs(0))),
        (linen.HGTConv(20), rnnx.HGTConv(30, 20, 2, 40, rngs=nnx.Rngs(0))),
    ]
    for layer, other in pairs:
        theirs = rnnx.params_to_linen(other)["params"]
        for name, value in jax.jit(layer.init)(jax.random.key(0), graph, x)["params"].items():
            np.testing.assert_allclose(jnp.abs(value).max(), jnp.abs(theirs[name]).max(), rtol=0.1, err_msg=name)
    ones = jax.jit(linen.RGCNConv(20, initializers={"bias": nn.initializers.ones}).init)(jax.random.key(0), graph, x)
    assert bool(jnp.all(ones["params"]["bias"] == 1))


def test_params_from_linen_errors() -> None:
    layer = rnnx.RGCNConv(4, 6, R, rngs=nnx.Rngs(0))
    variables = rnnx.params_to_linen(layer)
    with pytest.raises(ValueError, match=r"parameter \"\['bias'\]\" must have shape \(6,\), got \(5,\)"):
        rnnx.params_from_linen(layer, {"params": {**variables["params"], "bias": jnp.zeros(5)}})
    with pytest.raises(ValueError, match=r"lacks \[\"\['root'\]\"\]"):
        rnnx.params_from_linen(layer, {"params": {k: v for k, v in variables["params"].items() if k != "root"}})


@pytest.mark.parametrize(
    ("layer", "make"),
    [
        (linen.RGCNConv(6, edge_dropout=0.5), lambda r: rnnx.RGCNConv(4, 6, R, edge_dropout=0.5, rngs=r)),
        (linen.RGATConv(6, attention_dropout=0.5), lambda r: rnnx.RGATConv(4, 6, R, attention_dropout=0.5, rngs=r)),
        (linen.HGTConv(6, dropout=0.5), lambda r: rnnx.HGTConv(4, 6, T, R, dropout=0.5, rngs=r)),
    ],
    ids=["rgcn", "rgat", "hgt"],
)
def test_dropout(layer: Any, make: Any) -> None:
    args = (GRAPH, features(GRAPH, 4))
    other = make(nnx.Rngs(0))
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


class Model(nn.Module):
    """Three layers, the first without features."""

    @nn.compact
    def __call__(self, graph: RelGraph, train: bool = False) -> jax.Array:
        h = nn.relu(linen.RGCNConv(8, edge_dropout=0.1, name="first")(graph, deterministic=not train))
        h = linen.RGATConv(3, num_heads=2, concat_heads=False, attention_dropout=0.1)(graph, h, deterministic=not train)
        return linen.HGTConv(3, dropout=0.1)(graph, h, deterministic=not train)


@pytest.mark.slow
def test_a_jitted_optax_step_learns() -> None:
    labels = jax.random.randint(jax.random.key(9), (N,), 0, 3)
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), GRAPH)
    transform = optax.adam(0.02)
    opt_state = transform.init(variables["params"])

    @jax.jit
    def step(params: Any, opt_state: Any, graph: RelGraph, key: jax.Array) -> Any:
        def loss(params: Any) -> jax.Array:
            logits = model.apply({"params": params}, graph, train=True, rngs={"dropout": key})
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        value, grads = jax.value_and_grad(loss)(params)
        updates, opt_state = transform.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, losses = variables["params"], []
    for key in jax.random.split(jax.random.key(2), 60):
        params, opt_state, value = step(params, opt_state, GRAPH, key)
        losses.append(float(value))
    assert step._cache_size() == 1
    assert np.mean(losses[-5:]) < 0.5 * losses[0]
    changed = jax.tree.map(lambda a, b: bool(jnp.any(a != b)), params, variables["params"])
    assert all(jax.tree.leaves(changed)), changed


@pytest.mark.slow
def test_state_dict_round_trip() -> None:
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), GRAPH)
    empty = jax.tree.map(jnp.zeros_like, variables)
    restored = serialization.from_bytes(empty, serialization.to_bytes(variables))
    np.testing.assert_array_equal(model.apply(restored, GRAPH), model.apply(variables, GRAPH))
    assert serialization.to_state_dict(variables)["params"]["first"].keys() == {"weight", "root", "bias"}


@pytest.mark.slow
def test_orbax_round_trip(tmp_path: Path) -> None:
    ocp = pytest.importorskip("orbax.checkpoint")
    model = Model()
    variables = jax.jit(model.init)(jax.random.key(0), GRAPH)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "model", variables)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "model", jax.tree.map(jnp.zeros_like, variables))
    np.testing.assert_array_equal(model.apply(restored, GRAPH), model.apply(variables, GRAPH))


def test_dtypes() -> None:
    x = features(GRAPH, 4)
    layer = linen.RGCNConv(6, dtype=jnp.bfloat16)
    out, variables = layer.init_with_output(jax.random.key(0), GRAPH, x)
    assert out.dtype == jnp.bfloat16 and variables["params"]["weight"].dtype == jnp.float32
    stored = linen.RGCNConv(6, param_dtype=jnp.bfloat16).init(jax.random.key(0), GRAPH, x)
    assert stored["params"]["weight"].dtype == jnp.bfloat16


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
    with pytest.raises(ValueError, match="num_bases or num_blocks, not both"):
        linen.RGCNConv(6, num_bases=2, num_blocks=2).init(jax.random.key(0), GRAPH, x)
    with pytest.raises(ValueError, match="x must be an array of shape"):
        linen.RGCNConv(6).init(jax.random.key(0), GRAPH, x[:-1])
    with pytest.raises(ValueError, match="must not be given together with options"):
        linen.RGCNConv(6, backend="xla", options=rnnx.Options()).init(jax.random.key(0), GRAPH, x)
