"""Attention of seeds over their trees, against float64 numpy, and its gradients against differences of that."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax.minibatch import HeteroTopology, make_blocks, sample_blocks
from dejax.rgnn import Options, RelGraph
from dejax.training import Trainer
from dejax.training.fitting import fit
from dejax.training.tables.tree_attention import (
    AGES,
    TreeTransformer,
    days_between,
    encoded_ages,
    tree_attention,
    tree_graph,
)
from tests.training.test_tables import settings, shop

H, N, D, R, ROWS = 2, 4, 3, 3, 9
ROOT = np.array([0, 1, 2, 0, 0, 1, 1, 1, 0])  # the third seed has only itself
KIND = np.array([0, 0, 0, 1, 2, 1, 1, 2, 2])


def arrays(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {
        **dict.fromkeys(("query", "key", "value"), (H, N, D)),
        "age": (H, AGES, D),
        **dict.fromkeys(("key_kind", "value_kind"), (R, H, D)),
    }
    params = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    return {"x": rng.normal(size=(ROWS, N)), "ages": rng.random((ROWS, AGES)), **params}


def reference(a):
    """[rows, H * D] in float64, edge by edge."""
    out = np.zeros((ROWS, H, D))
    for root in range(3):
        own = np.flatnonzero(ROOT == root)
        for head in range(H):
            q = a["x"][root] @ a["query"][head]
            k = a["x"][own] @ a["key"][head] + a["ages"][own] @ a["age"][head] + a["key_kind"][KIND[own], head]
            v = a["x"][own] @ a["value"][head] + a["value_kind"][KIND[own], head]
            score = np.exp((k @ q - (k @ q).max()) / np.sqrt(D))
            out[root, head] = score / score.sum() @ v
    return out.reshape(ROWS, H * D)


def test_attention_and_its_gradients():
    a = arrays()
    graph = RelGraph.from_edges(np.arange(ROWS), ROOT, KIND, num_nodes=ROWS, num_edge_types=R)
    weight = np.random.default_rng(1).normal(size=(ROWS, H * D))

    def value(given):
        y = tree_attention(graph, **given)
        return (y * weight).sum(), y

    narrow = {name: jnp.asarray(array, jnp.float32) for name, array in a.items()}
    (_, found), gradients = jax.jit(jax.value_and_grad(value, has_aux=True))(narrow)
    np.testing.assert_allclose(found, reference(a), rtol=1e-4, atol=1e-5)
    rng = np.random.default_rng(2)
    for name, array in a.items():
        direction = rng.normal(size=array.shape)
        ends = [(reference({**a, name: array + step * direction}) * weight).sum() for step in (1e-5, -1e-5)]
        slope = float((np.asarray(gradients[name], np.float64) * direction).sum())
        assert slope == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-3, abs=1e-3), name


@functools.cache
def sampling():
    """Cutoffs of two seeds and of padding -> the sample and the graph of its trees; compiled once."""
    edges = {("a", "to", "b"): ([0, 1, 2, 0], [0, 0, 1, 1]), ("b", "of", "a"): ([0, 1], [0, 2])}
    times = {relation: np.arange(len(ends[0])) for relation, ends in edges.items()}
    topology = HeteroTopology.from_edges(edges, {"a": 3, "b": 2}, times=times)

    @jax.jit
    def run(cutoffs):
        seeds = {"b": jnp.array([0, 1, -1])}
        sample = sample_blocks(jax.random.key(0), topology, seeds, [2, 2], seed_times={"b": cutoffs})
        return sample, tree_graph(make_blocks(sample)[0], sample.trees)

    return run


def test_each_row_of_a_sample_has_an_edge_to_its_seed():
    sample, graph = sampling()(np.array([9, 2, 0], np.int32))
    mask = np.asarray(graph.edge_mask)
    roots, kinds = np.asarray(graph.receivers)[mask], np.asarray(graph.edge_type)[mask]
    trees = np.concatenate([np.asarray(tree) for tree in sample.trees.values()])
    assert sorted(roots.tolist()) == sorted(trees[trees >= 0].tolist())
    assert set(roots.tolist()) == {0, 1} and (kinds[np.asarray(graph.senders)[mask] < 2] == 1).all()  # hop 0, table b
    ids = np.concatenate([np.asarray(sample.node_ids[kind]) for kind in ("a", "b")])
    assert mask.sum() == (ids >= 0).sum()


def test_a_seed_reads_its_own_tree_alone():
    """Other trees, and padding, change nothing; a row of its own does."""
    sample, _ = sampling()(np.array([9, 9, 0], np.int32))
    model = TreeTransformer(4, 2, 2, 2, 2, 1, options=Options(), rngs=nnx.Rngs(0))
    x = {table: jax.random.normal(jax.random.key(len(ids)), (len(ids), 4)) for table, ids in sample.node_ids.items()}
    days = {table: jnp.ones(len(ids)) for table, ids in sample.node_ids.items()}

    @jax.jit
    def outputs(x):
        return model(make_blocks(sample), x, sample.trees, days)["b"][:3, 0]

    def changed(keep):
        return {table: jnp.where(keep(sample.trees[table])[:, None], rows, 9.0) for table, rows in x.items()}

    before = np.asarray(outputs(x))
    others = np.asarray(outputs(changed(lambda tree: tree == 0)))
    own = np.asarray(outputs({**x, "a": jnp.where((sample.trees["a"] == 0)[:, None], 9.0, x["a"])}))
    assert np.isfinite(before[:2]).all()
    np.testing.assert_allclose(others[0], before[0], rtol=1e-6)
    assert others[1] != before[1] and own[0] != before[0] and own[1] == pytest.approx(before[1], rel=1e-6)


@pytest.mark.slow
def test_the_model_learns_from_rows_of_the_past():
    data = shop()
    trainer = Trainer(settings(model="relgt", heads=4, epochs=4), data)
    fitted = fit(trainer, 0)
    assert trainer.final(fitted.state)["auroc"] > 0.9


def test_ages_are_encoded_and_rows_without_a_time_are_marked():
    now, always = 2**31 - 2, -(2**31)
    known = jnp.array([now, now - 86_400, -(2**31) + 5, always], jnp.int32)
    found = np.asarray(encoded_ages(days_between(known, jnp.full(4, now, jnp.int32))))
    assert found.shape == (4, AGES) and (np.diff(found[:3, :-1], axis=0) > 0).all()
    assert found[:, -1].tolist() == [0, 0, 0, 1] and not found[3, :-1].any()
