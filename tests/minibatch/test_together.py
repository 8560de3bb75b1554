"""A data set, its topology, the feature store and blocks, in one jitted step that also trains embeddings."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from dejax import rgnn
from dejax.datasets import synthetic_igb
from dejax.host_gather import adam, shardings
from dejax.minibatch import FeatureStore, HeteroTopology, make_blocks, sample_blocks

WIDTH = 8


@rgnn.program
def mean_by_relation(g, x, w):
    return g.mean_to_dst(g.src(x) @ g.per_edge_type(w))


def test_a_step_from_seeds_to_update() -> None:
    data = synthetic_igb(1e-6, feature_width=WIDTH, feature_dtype="float32").with_reverse(symmetric=["cites"])
    # Some relations and one hop: most of the time is compilation.
    edges = {
        relation: ends
        for relation, ends in data.edges.items()
        if relation[1] in ("cites", "rev_written_by", "rev_topic")
    }
    num_nodes = {kind: data.num_nodes[kind] for kind in ("paper", "author", "fos")}
    topology = HeteroTopology.from_edges(edges, num_nodes)
    store = FeatureStore.from_arrays(
        {kind: data.features[kind] for kind in ("paper", "author")},
        dtype="float8_e4m3fn",
        on_device={"paper": np.arange(0, data.num_nodes["paper"], 3)},
    )
    store = store.embedding("fos", num_nodes["fos"], WIDTH)
    store.check_counts(num_nodes)
    embeddings, features = store.split_trainable()
    optimizer = adam(0.05)
    state = embeddings.init(optimizer)
    before = np.array(embeddings["fos"].table.numpy())
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((len(edges), WIDTH, WIDTH)) / 3, jnp.float32)
    seeds = jnp.asarray(data.splits["train"]["paper"][:16], jnp.int32)

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2), out_shardings=shardings((embeddings, state, 0, 0, 0)))
    def step(embeddings, state, w, features, topology, key):
        sample = sample_blocks(key, topology, ("paper", seeds), [4])
        blocks = make_blocks(sample)
        x = (embeddings | features).gather(sample.node_ids)

        def loss(w, x):
            h = blocks[0].join(x)
            for block in blocks:
                h = jnp.tanh(mean_by_relation(block.graph, h, w)[: block.num_destinations])
            out = blocks[-1].split(h)["paper"][sample.seed_positions["paper"]]
            return ((out - 0.3) ** 2).mean()

        value, (of_w, of_x) = jax.value_and_grad(loss, argnums=(0, 1))(w, x)
        embeddings, state = embeddings.update(optimizer, sample.node_ids, of_x, state)
        return embeddings, state, w - 0.5 * of_w, value, (sample.node_ids, x)

    values = []
    for k in range(16):
        embeddings, state, w, value, (ids, x) = step(embeddings, state, w, features, topology, jax.random.key(k))
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    for kind in ("paper", "author"):
        own = np.asarray(ids[kind])
        rows = features[kind].table.numpy().astype(np.float32)
        np.testing.assert_array_equal(x[kind], np.where((own >= 0)[:, None], rows[np.maximum(own, 0)], 0))
    assert (before != embeddings["fos"].table.numpy()).any()
