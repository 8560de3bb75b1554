"""Every part works where the caller's jax is strict: no ranks and no dtypes are promoted without a word.

Promotion is refused while jax traces, so each case is traced and lowered, kernels included, and not compiled.
"""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dejax import rgnn, segment
from dejax.host_gather import HostTable, RowGradient, adam, gather
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    SampleOptions,
    edge_ids,
    find_capacities,
    link_batch,
    make_typed_blocks,
    pipelined_steps,
    sample_blocks,
    seed_batches,
    step_keys,
)
from dejax.rgnn.nnx import RGATConv

WRITES, CITES = ("author", "writes", "paper"), ("paper", "cites", "paper")
COUNTS = {"author": 5, "paper": 9}


@pytest.fixture(autouse=True)
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


def lower(function: Any, *arguments: Any) -> Any:
    """The shapes of what a function gives, after its lowering."""
    return jax.jit(function).lower(*arguments).out_info


def topology_with(**values: bool) -> HeteroTopology:
    rng = np.random.default_rng(0)
    edges = {r: tuple(rng.integers(0, COUNTS[end], 30) for end in (r[0], r[2])) for r in (WRITES, CITES)}
    given = {name: {r: rng.integers(0, 9, 30) for r in edges} for name in values}
    return HeteroTopology.from_edges(edges, COUNTS, **given)


@pytest.mark.parametrize(
    ("how", "wide"), [("uniform", True), ("replace", False), ("weights", False), ("recent", False)]
)
def test_samples(how: str, wide: bool) -> None:
    with jax.enable_x64(wide):
        topology = topology_with(**{"weights": {"weights": True}, "recent": {"times": True}}.get(how, {}))
        options = SampleOptions(replace=how == "replace", recent=how == "recent")
        times = {"seed_times": jnp.arange(4, dtype=jnp.int32)} if how == "recent" else {}
        seeds = jnp.array([0, 3, 3, -1], jnp.int32)

        def sampled(key, topology, seeds):
            sample = sample_blocks(key, topology, ("paper", seeds), [2, 2], options=options, **times)
            return sample.senders, edge_ids(topology, sample)

        senders, ids = lower(sampled, jax.random.key(0), topology, seeds)
        assert len(ids) == len(senders)


@pytest.mark.parametrize("negatives", ["uniform", "degree", "in_batch"])
def test_batches_of_edges(negatives: str) -> None:
    topology = topology_with()
    edges = jnp.array([0, 1], jnp.int32), jnp.array([3, 8], jnp.int32)

    def rows(key, topology, edges):
        batch = link_batch(key, topology, WRITES, edges, 3, negatives=negatives)
        sample = sample_blocks(key, topology, batch.seeds, [2], exclude=batch.exclude)
        x = {name: jnp.ones((len(ids), 2)) for name, ids in sample.node_ids.items()}
        return batch.rows(sample, x)

    found = lower(rows, jax.random.key(0), topology, edges)
    assert [some.shape for some in found] == [(2, 2), (2, 2), (2, 3, 2)]


def test_training_steps_of_a_layer() -> None:
    topology = topology_with()
    store = FeatureStore.from_arrays({name: np.ones((count, 4), np.float32) for name, count in COUNTS.items()})
    seeds = seed_batches(np.arange(9), 4)
    bounds = find_capacities(jax.random.key(0), topology, [("paper", some) for some in seeds], [2], print_table=None)
    graphdef, params = nnx.split(RGATConv(4, 2, 2, num_heads=2, rngs=nnx.Rngs(0)))

    def update(params, batch):
        def loss(params):
            return (nnx.merge(graphdef, params)(batch.blocks[0].bipartite, batch.blocks[0].join(batch.x)) ** 2).sum()

        value, gradient = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient), value

    run = pipelined_steps(
        update, lambda key, topology, seeds: sample_blocks(key, topology, ("paper", seeds), [2], capacities=bounds)
    )
    _, losses = lower(run, params, topology, store, step_keys(jax.random.key(0), 0, 3), seeds)
    assert losses.shape == (3,)


def test_blocks_of_typed_edges() -> None:
    topology = HeteroTopology.from_edges({CITES: ([1, 2, 2], [0, 0, 1])}, {"paper": 3})
    sample = sample_blocks(jax.random.key(0), topology, ("paper", jnp.array([0], jnp.int32)), [2])
    (block,) = make_typed_blocks(topology, sample, np.array([5, 6, 7]), 8, add_self_loops=True)

    @rgnn.program
    def layer(g, x, w):
        score = g.src(x) @ g.per_edge_type(w)
        return g.sum_to_dst(rgnn.edge_softmax(score) * (g.dst(x) @ g.per_edge_type(w)))

    gradient = lower(jax.grad(lambda w: layer(block.graph, jnp.ones((3, 4)), w).sum()), jnp.ones((9, 4, 2)))
    assert gradient.shape == (9, 4, 2)


OPERATORS = sorted(set(segment.__all__) - {"SegmentPlan", "EdgePlan", "plan", "edge_plan"})


@pytest.mark.parametrize(
    ("name", "backend"),
    [*((name, "xla") for name in OPERATORS), ("segment_softmax", "pallas"), ("gather_segment_max", "pallas")],
)
def test_segments(name: str, backend: str) -> None:
    if name == "partition_softmax":
        assert lower(segment.partition_softmax, jnp.ones(3), jnp.array([2, 1])).shape == (3,)
        return
    x, ids = jnp.ones((4, 3), jnp.bfloat16), jnp.array([0, 2, 2, 7])
    others = {"gather": (ids,)}.get(name, (ids, 3) if name.startswith("segment") else (ids, ids, 3, x[:, 0]))
    found = lower(jax.grad(lambda x: getattr(segment, name)(x, *others, backend=backend).astype(jnp.float32).sum()), x)
    assert found.shape == x.shape


def test_tables() -> None:
    table = HostTable.from_numpy(np.ones((5, 2), np.float32))
    ids = jnp.array([0, 4, -1])
    optimizer = adam(0.1)
    table, _ = optimizer.update(RowGradient(ids, jnp.ones((3, 2))), optimizer.init(table), table)
    assert gather(table, ids).shape == (3, 2)
