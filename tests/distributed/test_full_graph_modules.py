"""Flax modules on a graph that is divided over devices: results, gradients and training steps of one device."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from dejax import rgnn
from dejax.distributed.full_graph import CannotDistribute, ShardedGraph, over_mesh
from dejax.rgnn import linen
from dejax.rgnn import nnx as layers
from dejax.rgnn.layers import dropout
from tests.distributed.full_graphs import mesh_of, owners

pytestmark = pytest.mark.devices(4)

NODES, EDGES, R, T, K = 60, 300, 3, 2, 6
RNG = np.random.default_rng(0)
GRAPH = rgnn.RelGraph.from_edges(
    *RNG.integers(0, NODES, (2, EDGES)),
    RNG.integers(0, R, EDGES),
    num_nodes=NODES,
    num_edge_types=R,
    node_type=np.sort(RNG.integers(0, T, NODES)),
)
X = RNG.standard_normal((NODES, K)).astype(np.float32)
E = RNG.standard_normal((EDGES, 2)).astype(np.float32)


def split_over(parts: int) -> ShardedGraph:
    return ShardedGraph.from_graph(GRAPH, owners(NODES, parts), mesh_of(parts))


@rgnn.program
def mean_of_senders(g, h, w):
    return g.mean_to_dst(g.src(h) @ g.shared(w))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = layers.GATv2Conv(K, 4, num_heads=2, edge_features=2, rngs=rngs)
        self.last = layers.ProgramModule(
            mean_of_senders, {"w": ((8, 3), jax.nn.initializers.glorot_uniform())}, rngs=rngs
        )

    def __call__(self, graph, x, e):
        return self.last(graph, jnp.tanh(self.first(graph, x, e)))


@nnx.jit
def step(model, optimizer, graph, x, e):
    def loss(model):
        y = model(graph, x, e)
        return (y**2).sum() / NODES, y

    (value, y), gradients = nnx.value_and_grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return value, y, gradients


def two_steps(graph, x, e):
    """The node values of the first step; its loss and gradients, and the loss of the second step."""
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
    value, y, gradients = step(model, optimizer, graph, x, e)
    return y, jax.tree.leaves((value, gradients, step(model, optimizer, graph, x, e)[0]))


@pytest.fixture(scope="module")
def of_one_device():
    return two_steps(GRAPH, jnp.asarray(X), jnp.asarray(E))


@pytest.mark.slow  # gradients of linen modules and layers of nnx with dropout are not
@pytest.mark.parametrize("parts", [2, 4])
def test_a_step_of_nnx_modules(parts: int, of_one_device) -> None:
    split = split_over(parts)
    y, numbers = two_steps(split, split.shard_nodes(X), split.shard_edges(E))
    np.testing.assert_allclose(split.unshard_nodes(y), of_one_device[0], rtol=1e-5, atol=1e-5)
    for one, many in zip(of_one_device[1], numbers, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-5)


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, graph, x):
        return linen.SAGEConv(8, aggregation="max")(graph, x)


def test_gradients_of_linen_modules() -> None:
    model, split, found = LinenModel(), split_over(2), []
    for graph, x in ((GRAPH, jnp.asarray(X)), (split, split.shard_nodes(X))):
        params = model.init(jax.random.key(0), graph, x)

        @jax.jit
        def loss(params, graph, x):
            return (model.apply(params, graph, x) ** 2).sum()

        found.append(jax.tree.leaves((params, jax.value_and_grad(loss)(params, graph, x))))
    for one, many in zip(*found, strict=True):
        np.testing.assert_allclose(many, one, rtol=1e-5, atol=1e-5)


def test_dropout_divides_by_the_kept_edges() -> None:
    split, rate = split_over(4), 0.4
    scale = np.asarray(dropout.edge_scale(split, jax.random.key(1), rate, "mean", jnp.float32))
    kept = np.asarray(jax.random.bernoulli(jax.random.key(1), 1 - rate, (split.num_edges,)))
    scale, kept = split.unshard_edges(scale), split.unshard_edges(kept)
    _, receivers, kinds = (np.asarray(column) for column in GRAPH.to_edges())
    pair = receivers * R + kinds
    count = np.bincount(pair, kept, minlength=NODES * R)[pair]
    np.testing.assert_allclose(scale, kept / np.maximum(count, 1), rtol=1e-6)
    assert 0 < kept.sum() < EDGES


@pytest.mark.parametrize(
    "make",
    [
        lambda rngs: layers.RGCNConv(K, 4, R, edge_dropout=0.3, self_loop_dropout=0.2, rngs=rngs),
        pytest.param(lambda rngs: layers.HGTConv(K, K, T, R, dropout=0.3, rngs=rngs), marks=pytest.mark.slow),
        lambda rngs: layers.GATConv(K, 4, attention_dropout=0.3, rngs=rngs),
    ],
    ids=["RGCN", "HGT", "GAT"],
)
def test_layers_with_dropout(make) -> None:
    split = split_over(2)
    layer, x = make(nnx.Rngs(0)), split.shard_nodes(X)
    drawn, mean = nnx.jit(lambda layer, g, x: (layer(g, x), layer(g, x, deterministic=True)))(layer, split, x)
    assert np.isfinite(drawn).all() and not np.allclose(drawn, mean)
    assert not np.asarray(drawn)[~np.asarray(split.node_mask)].any()  # padding rows
    want = layer(GRAPH, jnp.asarray(X), deterministic=True)
    np.testing.assert_allclose(split.unshard_nodes(mean), want, rtol=1e-5, atol=1e-5)


def test_misuse_is_told() -> None:
    split = split_over(2)
    layer = layers.RGCNConv(K, 4, R, rngs=nnx.Rngs(0))
    message = rf"x must be an array of shape .* = \[{split.num_rows}, {K}\], got an array of shape \({NODES}, {K}\)"
    with pytest.raises(ValueError, match=message):
        layer(split, X)
    with pytest.raises(ValueError, match="must have num_edge_types=5, for which the layer was made, got 3"):
        layers.RGCNConv(K, 4, 5, rngs=nnx.Rngs(0))(split, split.shard_nodes(X))
    with pytest.raises(CannotDistribute, match="values of source pairs must not be used over a mesh"):
        layers.RGCNConv.featureless(split, 4, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"call a layer of dejax.rgnn.nnx or linen with the ShardedGraph as it is"):
        over_mesh(layer)  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="a ShardedGraph has no 'by_sender'"):
        split.by_sender
    with pytest.raises(TypeError, match="must be a RelGraph, got ShardedGraph"):
        rgnn.library.rgcn.explain(split, X, {})
