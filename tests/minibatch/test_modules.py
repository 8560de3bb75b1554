"""Flax modules with dicts by node type: blocks and a full graph give the same, nnx and linen give the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import rgnn
from dejax.minibatch import linen as mb_linen
from dejax.minibatch import make_blocks, sample_blocks
from dejax.minibatch import nnx as mb
from dejax.rgnn import linen as rgnn_linen
from dejax.rgnn.nnx import HGTConv, RGATConv, RGCNConv
from tests.minibatch.graphs import COUNTS, WRITES, edge_lists, topology_of

WIDTHS = {"author": 3, "lonely": 2, "paper": 5}
EDGES = edge_lists()
SEEDS = jnp.array([4, 7, 2])


def features(seed=0):
    rng = np.random.default_rng(seed)
    return {name: jnp.asarray(rng.standard_normal((COUNTS[name], WIDTHS[name])), jnp.float32) for name in COUNTS}


def full_graph():
    return rgnn.RelGraph.from_relations(EDGES, COUNTS)


def whole_sample(hops):
    """All neighbours, so that blocks and the full graph give the same."""
    run = jax.jit(lambda t, s: sample_blocks(jax.random.key(0), t, ("paper", s), [-1] * hops))
    return run(topology_of(EDGES), SEEDS)


def local(sample, x):
    return {
        n: x[n].at[jnp.where(ids >= 0, ids, 2**30)].get(mode="fill", fill_value=0) for n, ids in sample.node_ids.items()
    }


@pytest.mark.slow
def test_a_stack_on_blocks_equals_the_stack_on_the_full_graph():
    rngs = nnx.Rngs(0)
    layers = [RGCNConv(8, 6, 4, rngs=rngs), RGATConv(6, 2, 4, num_heads=2, rngs=rngs)]
    model = mb.HeteroGNN(WIDTHS, 8, layers, rngs=rngs)
    x, sample = features(), whole_sample(2)

    @nnx.jit
    def on_blocks(model, sample, x):
        return model(make_blocks(sample), local(sample, x))["paper"]

    want = model(full_graph(), x)
    assert {name: rows.shape for name, rows in want.items()} == {name: (COUNTS[name], 4) for name in COUNTS}
    np.testing.assert_allclose(on_blocks(model, sample, x), want["paper"][SEEDS], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_a_layer_takes_and_gives_dicts():
    conv = mb.HeteroLayer(HGTConv(4, 4, 3, 4, num_heads=2, rngs=nnx.Rngs(0)))
    x = {name: jnp.ones((COUNTS[name], 4)) * len(name) for name in COUNTS}
    sample = whole_sample(1)
    (block,) = make_blocks(sample)
    got = conv(block, local(sample, x))
    assert set(got) == set(COUNTS) and got["paper"].shape == (3, 4)
    np.testing.assert_allclose(got["paper"], conv(full_graph(), x)["paper"][SEEDS], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_linen_has_the_same_modules():
    x, sample = features(), whole_sample(1)
    blocks = make_blocks(sample)
    model = mb_linen.HeteroGNN(8, [rgnn_linen.RGCNConv(6)])
    variables = model.init(jax.random.key(0), blocks, local(sample, x))
    got = model.apply(variables, blocks, local(sample, x))["paper"]
    want = model.apply(variables, full_graph(), x)["paper"][SEEDS]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    params = variables["params"]
    same = mb.HeteroGNN(WIDTHS, 8, [RGCNConv(8, 6, 4, rngs=nnx.Rngs(1))], rngs=nnx.Rngs(1))
    for name in WIDTHS:
        linear = getattr(same.project, f"type_{name}")
        linear.kernel[...], linear.bias[...] = (params["project"][f"type_{name}"][k] for k in ("kernel", "bias"))
    for name in ("weight", "root", "bias"):
        getattr(same.layer_0, name)[...] = params["layers_0"][name]
    np.testing.assert_allclose(same(blocks, local(sample, x))["paper"], got, rtol=1e-5, atol=1e-5)
    wrapped = mb_linen.HeteroLayer(rgnn_linen.RGCNConv(6))
    even = {name: jnp.ones((COUNTS[name], 4)) for name in COUNTS}
    out, _ = wrapped.init_with_output(jax.random.key(0), full_graph(), even)
    assert out["author"].shape == (9, 6)


@pytest.mark.slow
def test_mistakes_are_named():
    rngs, x = nnx.Rngs(0), features()
    model = mb.HeteroGNN(WIDTHS, 4, [RGCNConv(4, 4, 4, rngs=rngs)] * 2, rngs=rngs)
    sample = whole_sample(1)
    with pytest.raises(ValueError, match="one block for each of the 2 layers, got 1"):
        model(make_blocks(sample), local(sample, x))
    with pytest.raises(ValueError, match=r"`x\['paper'\]` must have shape \[nodes, 5\]"):
        model(full_graph(), x | {"paper": jnp.zeros((13, 4))})
    with pytest.raises(ValueError, match="node type must be one of"):
        model(full_graph(), x | {"book": jnp.zeros((13, 4))})
    with pytest.raises(ValueError, match=r"`x\['paper'\]` must have 13 rows"):
        model(full_graph(), x | {"paper": jnp.zeros((3, 5))})
    with pytest.raises(TypeError, match="must be the blocks"):
        model([full_graph()] * 2, x)
    plain = rgnn.RelGraph.from_edges([0], [1], [0], num_nodes=2)
    with pytest.raises(ValueError, match="from_relations"):
        model(plain, x)
    assert WRITES in EDGES
