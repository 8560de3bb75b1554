"""host_gather and rgnn in one step: seeds, local graph, features from host memory, a relational layer."""

import jax
import jax.numpy as jnp
import numpy as np

from dejax import rgnn
from dejax.host_gather import HostTable, Topology, sample_graph, typed_linear


@rgnn.program
def relational_sum(g: rgnn.RelGraph, h: jax.Array, w: jax.Array) -> jax.Array:
    return g.sum_to_dst(g.src(h) @ g.per_edge_type(w))


def test_a_layer_on_all_neighbours_equals_the_layer_on_the_full_graph() -> None:
    rng = np.random.default_rng(0)
    nodes, edges, relations = 30, 120, 3
    senders, receivers = rng.integers(0, nodes, edges), rng.integers(0, nodes, edges)
    relation = rng.integers(0, relations, edges)
    features = rng.standard_normal((nodes, 6)).astype(np.float32)
    w = jnp.asarray(rng.standard_normal((relations, 6, 4)), jnp.float32)
    topology = Topology.from_edges(
        senders, receivers, num_nodes=nodes, relation=relation, num_relations=relations, on_host=True
    )

    @jax.jit
    def layer(key: jax.Array, topology: Topology, table: HostTable, seeds: jax.Array, w: jax.Array) -> jax.Array:
        local = sample_graph(key, topology, seeds, [20])  # no node has more edges of one relation
        graph = rgnn.RelGraph.build_traced(
            local.senders,
            local.receivers,
            local.relation,
            num_nodes=local.node_ids.shape[0],
            num_edge_types=relations,
            edge_mask=local.edge_mask,
            node_mask=local.node_mask,
        )
        return relational_sum(graph, table[local.node_ids], w)[: local.num_seeds]

    @jax.jit
    def from_the_table(
        key: jax.Array, topology: Topology, table: HostTable, seeds: jax.Array, w: jax.Array
    ) -> jax.Array:
        """The same layer with a typed linear that reads its rows from the table, without a gathered copy."""
        local = sample_graph(key, topology, seeds, [20])
        sender = local.node_ids.at[local.senders].get(mode="fill", fill_value=-1)  # padding gives zeros
        messages = typed_linear(table, sender, local.relation, w, precision="f32")
        return jax.ops.segment_sum(messages, local.receivers, local.num_seeds)

    seeds = jnp.array([4, 17, 0])
    got = layer(jax.random.key(0), topology, HostTable.from_numpy(features), seeds, w)
    full = rgnn.RelGraph.from_edges(senders, receivers, relation, num_nodes=nodes, num_edge_types=relations)
    want = relational_sum(full, jnp.asarray(features), w)[seeds]
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
    fused = from_the_table(jax.random.key(0), topology, HostTable.from_numpy(features), seeds, w)
    np.testing.assert_allclose(fused, want, rtol=1e-4, atol=1e-5)
