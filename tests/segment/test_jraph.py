"""jraph's models with every `segment_*` replaced, and with the operators given as arguments."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import segment

jraph, utils = pytest.importorskip("jraph"), pytest.importorskip("jraph._src.utils")

NAMES = [name for name in dir(jraph) if name.startswith("segment_") or name == "partition_softmax"]


def graph():
    rng = np.random.default_rng(0)
    n_node, n_edge = np.array([4, 7, 1]), np.array([9, 20, 0])
    first = np.repeat(np.cumsum(n_node) - n_node, n_edge)
    ends = [first + rng.integers(0, np.repeat(n_node, n_edge)) for _ in range(2)]
    return jraph.GraphsTuple(
        nodes=jnp.asarray(rng.normal(size=(12, 3)), jnp.float32),
        edges=jnp.asarray(rng.normal(size=(29, 2)), jnp.float32),
        senders=jnp.asarray(ends[0]),
        receivers=jnp.asarray(ends[1]),
        globals=jnp.ones((3, 1)),
        n_node=jnp.asarray(n_node),
        n_edge=jnp.asarray(n_edge),
    )


def joined(*parts):
    return jnp.concatenate(parts, axis=-1)


def network(**options):
    return jraph.GraphNetwork(update_edge_fn=joined, update_node_fn=joined, update_global_fn=joined, **options)


MODELS = {
    "GraphNetwork": lambda o: network(
        **dict.fromkeys(("aggregate_nodes_for_globals_fn", "aggregate_edges_for_globals_fn"), o.segment_mean),
        aggregate_edges_for_nodes_fn=o.segment_sum,
    ),
    "GraphNetwork, maxima": lambda o: network(
        aggregate_edges_for_nodes_fn=o.segment_max_or_constant, aggregate_edges_for_globals_fn=o.segment_min_or_constant
    ),
    "GraphNetwork, attention": lambda o: network(
        attention_logit_fn=lambda e, s, r, g: e.sum(-1, keepdims=True),
        attention_normalize_fn=o.segment_softmax,
        attention_reduce_fn=lambda e, w: e * w,
        aggregate_edges_for_nodes_fn=o.segment_sum,
    ),
    "GCN": lambda o: jraph.GraphConvolution(lambda n: n * 2, aggregate_nodes_fn=o.segment_sum, add_self_edges=True),
    "GAT": lambda o: jraph.GAT(lambda n: n, lambda s, r, e: (s * r).sum(-1, keepdims=True), lambda n: n),
    "InteractionNetwork": lambda o: jraph.InteractionNetwork(
        lambda e, s, r: e * s[:, :2], joined, aggregate_edges_for_nodes_fn=o.segment_sum
    ),
    "DeepSets": lambda o: jraph.DeepSets(joined, joined, aggregate_nodes_for_globals_fn=o.segment_mean),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_with_every_operator_replaced(name, monkeypatch):
    start = graph()
    if name == "GAT":
        start = start._replace(edges=None, globals=None)

    def run(operators):
        def loss(nodes):
            out = MODELS[name](operators)(start._replace(nodes=nodes))
            return sum((leaf**2).sum() for leaf in jax.tree.leaves((out.nodes, out.globals))), out

        return jax.jit(jax.grad(loss, has_aux=True))(start.nodes)

    want = run(jraph)
    for operator in NAMES:
        monkeypatch.setattr(utils, operator, getattr(segment, operator))
    found = run(segment)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5), found, want)


@pytest.mark.parametrize("name", sorted({n for n in NAMES if n.startswith("segment_")}))
@pytest.mark.parametrize("backend", ["xla", pytest.param("pallas", marks=pytest.mark.slow)])
def test_each_operator_is_that_of_jraph(name, backend):
    rng = np.random.default_rng(0)
    data, ids = jnp.asarray(rng.normal(size=(30, 2)), jnp.float32), jnp.asarray(rng.integers(0, 5, 30))
    want = getattr(jraph, name)(data, ids, 7)
    np.testing.assert_allclose(getattr(segment, name)(data, ids, 7, backend=backend), want, rtol=1e-5, atol=1e-6)


def test_partition_softmax():
    logits = jnp.array([1.0, 2.0, 3.0, 4.0])
    want = jraph.partition_softmax(logits, jnp.array([3, 1]))
    np.testing.assert_allclose(segment.partition_softmax(logits, jnp.array([3, 1])), want, rtol=1e-6)
