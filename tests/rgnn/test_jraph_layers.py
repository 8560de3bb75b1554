"""Relational layers on `jraph.GraphsTuple`, alone and among jraph's own layers in one jitted step."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import rgnn
from dejax.rgnn import linen
from dejax.rgnn import nnx as rnnx
from dejax.rgnn.interop import from_graphs_tuple
from dejax.rgnn.jraph_layers import apply_to_graphs_tuple, graphs_tuple_layer

jraph = pytest.importorskip("jraph")
R, K = 3, 4

pytestmark = pytest.mark.usefixtures("programs_by_numpy")


def one_tuple(seed: int, nodes: int = 6, edges: int = 11) -> jraph.GraphsTuple:
    """Nodes and edges are mappings; edge types under "edge_type", features under "features"."""
    rng = np.random.default_rng(seed)
    return jraph.GraphsTuple(
        nodes={"features": jnp.asarray(rng.normal(size=(nodes, K)), jnp.float32), "id": jnp.arange(nodes)},
        edges={
            "features": jnp.asarray(rng.normal(size=(edges, 2)), jnp.float32),
            "edge_type": jnp.asarray(rng.integers(0, R, edges)),
        },
        senders=jnp.asarray(rng.integers(0, nodes, edges)),
        receivers=jnp.asarray(rng.integers(0, nodes, edges)),
        globals=jnp.ones((1, 5)),
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([edges]),
    )


def batched() -> jraph.GraphsTuple:
    return jraph.batch([one_tuple(0), one_tuple(1, nodes=4, edges=7)])


def only(before: jraph.GraphsTuple, after: jraph.GraphsTuple, *changed: str) -> None:
    """Checks that tuples differ only in the named fields; other leaves are identical or equal."""
    for name in jraph.GraphsTuple._fields:
        if name not in changed:
            jax.tree.map(np.testing.assert_array_equal, getattr(before, name), getattr(after, name))


def layer_of(name: str) -> Any:
    rngs = nnx.Rngs(0)
    if name == "rgcn":
        return rnnx.RGCNConv(K, 3, R, rngs=rngs)
    module = linen.HGTConv(3)
    graphs = batched()
    variables = module.init(jax.random.key(0), from_graphs_tuple(graphs, num_edge_types=R), graphs.nodes["features"])
    return functools.partial(module.apply, variables)


@pytest.mark.parametrize("name", ["rgcn", "hgt"])
def test_a_layer_gives_a_graphs_tuple(name: str) -> None:
    layer, graphs = layer_of(name), batched()
    out = apply_to_graphs_tuple(layer, graphs, num_edge_types=R, node_key="features")
    only(graphs, out, "nodes")
    assert out.nodes.keys() == {"features", "id"}
    np.testing.assert_array_equal(out.nodes["id"], graphs.nodes["id"])
    want = layer(from_graphs_tuple(graphs, num_edge_types=R), graphs.nodes["features"])
    np.testing.assert_allclose(out.nodes["features"], want, rtol=1e-6)
    # A batch gives the results of its graphs, concatenated.
    for one, part in zip([one_tuple(0), one_tuple(1, nodes=4, edges=7)], jraph.unbatch(out), strict=True):
        alone = apply_to_graphs_tuple(layer, one, num_edge_types=R, node_key="features")
        np.testing.assert_allclose(part.nodes["features"], alone.nodes["features"], rtol=1e-4, atol=1e-5)


def test_padded_inside_jit_as_outside() -> None:
    layer, graphs = layer_of("rgcn"), batched()
    padded = jraph.pad_with_graphs(graphs, n_node=17, n_edge=25, n_graph=5)
    want = apply_to_graphs_tuple(layer, graphs, num_edge_types=R, node_key="features")

    @jax.jit
    def apply(padded: jraph.GraphsTuple) -> jraph.GraphsTuple:
        keywords: dict[str, Any] = {"num_edge_types": R, "num_node_types": 1, "padded": True}
        return apply_to_graphs_tuple(layer, padded, node_key="features", **keywords)

    out = apply(padded)
    only(padded, out, "nodes")
    assert not jnp.any(out.nodes["features"][10:])
    got = jraph.unpad_with_graphs(out)
    np.testing.assert_allclose(got.nodes["features"], want.nodes["features"], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(got.n_node, graphs.n_node)


@pytest.mark.slow
def test_gradients_through_a_layer_among_those_of_jraph() -> None:
    """Padding has none."""
    layer, padded = layer_of("rgcn"), jraph.pad_with_graphs(batched(), n_node=17, n_edge=25, n_graph=5)
    network = jraph.GraphNetwork(None, lambda nodes, sent, received, _: {**nodes, "features": nodes["features"] * 2})
    of_graphs = {"num_edge_types": R, "num_node_types": 1, "padded": True, "node_key": "features"}

    @jax.jit
    def loss(x: jax.Array) -> jax.Array:
        before = network(padded._replace(nodes={**padded.nodes, "features": x}))
        return (apply_to_graphs_tuple(layer, before, **of_graphs).nodes["features"] ** 2).sum()

    gradient = jax.grad(loss)(padded.nodes["features"])
    assert jnp.abs(gradient[:10]).sum() > 0 and not jnp.any(gradient[10:])


def test_plain_arrays_and_a_graph_made_once() -> None:
    graphs = one_tuple(0)
    graphs = graphs._replace(nodes=graphs.nodes["features"], edges=graphs.edges["edge_type"])
    layer = layer_of("rgcn")
    graph = from_graphs_tuple(graphs, num_edge_types=R)
    step = graphs_tuple_layer(layer, graph=graph)
    out = jax.jit(step)(graphs)
    only(graphs, out, "nodes")
    np.testing.assert_allclose(out.nodes, layer(graph, graphs.nodes), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"must not be given together with \['num_edge_types'\]"):
        apply_to_graphs_tuple(layer, graphs, graph=graph, num_edge_types=R)
    with pytest.raises(ValueError):
        apply_to_graphs_tuple(layer, one_tuple(0, nodes=9), graph=graph, node_key="features")


def test_nodes_without_features() -> None:
    graphs = one_tuple(0)._replace(nodes=None)
    graph = from_graphs_tuple(graphs, num_edge_types=R)
    layer = rnnx.RGCNConv.featureless(graph, 3, rngs=nnx.Rngs(0))
    out = apply_to_graphs_tuple(layer, graphs, graph=graph)
    np.testing.assert_array_equal(out.nodes, layer(graph))
    only(graphs, out, "nodes")


@rgnn.program
def edge_and_node(g: Any, x: Any, e: Any, weight: Any) -> Any:
    message = g.src(x) @ g.per_edge_type(weight) + g.edge(e)
    return g.sum_to_dst(message), rgnn.tanh(message)


@pytest.mark.parametrize("added", [False, True])
def test_edge_features_in_and_out(added: bool) -> None:
    """Edge features are in the tuple's order. Added reverse edges and self loops read zeros and are not returned."""
    graphs = batched()
    types = 2 * R + 1 if added else R
    weight = jax.random.normal(jax.random.key(0), (types, K, 2))
    keywords: dict[str, Any] = {"num_edge_types": R, "node_key": "features", "edge_key": "features", "with_edges": True}
    if added:
        keywords |= {"add_reverse": True, "add_self_loops": True}
    out = apply_to_graphs_tuple(lambda g, x, e: edge_and_node(g, x, e, weight), graphs, updates="both", **keywords)
    only(graphs, out, "nodes", "edges")
    x, edge_type = graphs.nodes["features"], graphs.edges["edge_type"]
    message = jnp.einsum("ek,ekn->en", x[graphs.senders], weight[edge_type]) + graphs.edges["features"]
    np.testing.assert_allclose(out.edges["features"], jnp.tanh(message), rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(out.edges["edge_type"], edge_type)
    want = jax.ops.segment_sum(message, graphs.receivers, 10)
    if added:
        back = jnp.einsum("ek,ekn->en", x[graphs.receivers], weight[edge_type + R])
        want = want + jax.ops.segment_sum(back, graphs.senders, 10) + x @ weight[2 * R]
    np.testing.assert_allclose(out.nodes["features"], want, rtol=1e-4, atol=1e-5)
    keywords["updates"] = "edges"
    edges_only = apply_to_graphs_tuple(lambda g, x, e: edge_and_node(g, x, e, weight)[1], graphs, **keywords)
    only(graphs, edges_only, "edges")
    np.testing.assert_allclose(edges_only.edges["features"], out.edges["features"], rtol=1e-5, atol=1e-6)


def test_errors() -> None:
    graphs, layer = one_tuple(0), layer_of("rgcn")
    with pytest.raises(ValueError, match="updates must be 'nodes', 'edges' or 'both', got 'globals'"):
        apply_to_graphs_tuple(layer, graphs, num_edge_types=R, node_key="features", updates="globals")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="name an entry of a mapping by node_key"):
        apply_to_graphs_tuple(layer, graphs, num_edge_types=R)
    with pytest.raises(TypeError, match=r"nodes must be a mapping with the entry node_key='x', got .*features"):
        apply_to_graphs_tuple(layer, graphs, num_edge_types=R, node_key="x")
    with pytest.raises(TypeError, match="edges must be a mapping with the entry edge_key='x'"):
        apply_to_graphs_tuple(layer, graphs, num_edge_types=R, node_key="features", with_edges=True, edge_key="x")
