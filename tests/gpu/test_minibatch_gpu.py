"""Blocks and pipelined steps on a GPU: kernels against XLA, rows that come while layers run against single steps."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn
from dejax.minibatch import FeatureStore, HeteroTopology, pipelined_steps, sample_blocks, sampled_step, step_keys
from tests.minibatch import test_bipartite as blocks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("case", ["slots", "bounded edges"])
@pytest.mark.parametrize("name", blocks.PROGRAMS)
def test_kernels_on_bipartite_blocks_equal_xla(name, case):
    block, (program, params) = blocks.CASES[case](), blocks.PROGRAMS[name]
    rows = block.num_destinations
    kernels, xla = rgnn.Options(backend="pallas"), rgnn.Options(backend="xla")
    with jax.default_matmul_precision("highest"):
        reference = jax.jit(functools.partial(blocks.run, program, params, xla, rows))
        want = reference(block.graph, blocks.rows_of(block, 0.0))
    for filling in (0.0, jnp.nan):
        own = jax.jit(functools.partial(blocks.run, program, params, kernels, None))
        found = own(block.bipartite, blocks.rows_of(block, filling))
        for got, expected in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=3e-3 * float(jnp.abs(expected).max()))


@pytest.mark.parametrize("starts_on_device, edges_ahead", [(False, False), (False, True), (True, True)])
@pytest.mark.parametrize("joined", [False, True])
def test_pipelined_steps_equal_single_ones(joined, starts_on_device, edges_ahead):
    rng, counts = np.random.default_rng(0), {"author": 3000, "paper": 5000}
    kinds = [("author", "writes", "paper"), ("paper", "cites", "paper"), ("paper", "rev_writes", "author")]
    edges = {k: (rng.integers(0, counts[k[0]], 40_000), rng.integers(0, counts[k[2]], 40_000)) for k in kinds}
    topology = HeteroTopology.from_edges(edges, counts, on_host=True)
    topology = topology.with_starts_on_device() if starts_on_device else topology
    arrays = {name: rng.standard_normal((n, 64)).astype(np.float32) for name, n in counts.items()}
    store = FeatureStore.from_arrays(arrays, on_device={"paper": np.arange(0, 5000, 3)})
    weight = jnp.asarray(rng.standard_normal((3, 2, 64, 32)) * 0.1, jnp.float32)

    def sample(key, topology, seeds):
        return sample_blocks(key, topology, ("paper", seeds), [5, 5])

    def update(weight, batch):
        def loss_of(weight):
            h = batch.blocks[0].join(batch.x)
            for block in batch.blocks:
                params = {"weight": weight, "attention_src": weight[:, :, 0], "attention_dst": weight[:, :, 1]}
                h = rgnn.library.rgat(block.bipartite, h, params)
            return (h[batch.sample.seed_positions["paper"]] ** 2).mean()

        loss, gradient = jax.value_and_grad(loss_of)(weight)
        return weight - 0.1 * gradient, loss

    seeds, keys = rng.integers(0, 5000, (6, 256)).astype(np.int32), step_keys(jax.random.key(0), 0, 6)
    one, state, losses = sampled_step(update, sample, donate=False), weight, []
    for key, some in zip(keys, seeds, strict=True):
        state, loss = one(state, topology, store, key, some)
        losses.append(float(loss))
    run = pipelined_steps(update, sample, joined=joined, donate=False, edges_ahead=edges_ahead)
    got, found = run(weight, topology, store, keys, seeds)
    np.testing.assert_allclose(found, losses, rtol=1e-5)
    np.testing.assert_allclose(got, state, rtol=1e-3, atol=1e-5)
