"""What `dejax.minibatch` promises, through its public functions and against numpy, each capability once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax import rgnn, segment
from dejax.datasets import synthetic_igb
from dejax.host_gather import adam, shardings
from dejax.minibatch import (
    FeatureStore,
    HeteroTopology,
    NegativePool,
    SampleOptions,
    TrueEdges,
    infer_layers,
    link_batch,
    link_ranks,
    make_blocks,
    make_typed_blocks,
    pipelined_steps,
    sample_blocks,
    sampled_step,
    seed_batches,
    step_keys,
)
from dejax.minibatch import nnx as mb
from tests.cases import slow_but
from tests.minibatch.graphs import (
    CITES,
    COUNTS,
    REV,
    WRITES,
    edge_lists,
    ids_and_senders,
    jitted,
    neighbours,
    p_value,
    sampled_edges,
    timed,
    topology_of,
)

KEY = jax.random.key(0)


@rgnn.program
def mean_by_relation(g, x, w):
    return g.mean_to_dst(g.src(x) @ g.per_edge_type(w))


# -------------------------------------------------------------------------------------------- samples


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_all_neighbours_of_two_hops(on_host):
    edges, topology = edge_lists(), topology_of(on_host=on_host)
    sample = jax.jit(lambda t, s: sample_blocks(KEY, t, s, [-1, -1]))(topology, {"paper": jnp.array([4, 7])})
    found = sampled_edges(sample)
    expanded, reached = {("paper", 4), ("paper", 7)}, set()
    for hop in range(2):
        frontier = {("paper", 4), ("paper", 7)} if hop == 0 else reached - expanded
        expanded |= frontier
        for kind, node in frontier:
            for edge_type in edges:
                if edge_type[2] == kind:
                    reached |= {(edge_type[0], sender) for sender, _, _ in neighbours(edges, edge_type, node)}
    for edge_type in edges:
        want = [e for kind, node in expanded if kind == edge_type[2] for e in neighbours(edges, edge_type, node)]
        assert sorted((s, r) for s, r, _ in found[edge_type]) == sorted((s, r) for s, r, _ in want)
    for piece, own, senders in zip(sample.layout.pieces, *ids_and_senders(topology, sample), strict=True):
        edge_type = sample.layout.edge_types[piece.relation]
        source = np.asarray(sample.node_ids[edge_type[0]])
        mask = np.asarray(senders) >= 0
        np.testing.assert_array_equal(
            np.asarray(edges[edge_type][0])[np.asarray(own)[mask]], source[np.asarray(senders)[mask]]
        )
    nodes = {(kind, int(n)) for kind, ids in sample.node_ids.items() for n in np.asarray(ids) if n >= 0}
    assert nodes == reached | expanded
    assert not np.asarray(sample.lost).any() and int(sample.lost_edges) == 0
    assert int(sample.found.sum()) == len(nodes)
    sample.check(error=True)


@pytest.mark.parametrize(
    ("recent", "on_host"),
    [(True, True), *(pytest.param(*case, marks=pytest.mark.slow) for case in [(True, False), (False, True)])],
)
def test_no_edge_is_later_than_its_seed(recent, on_host):
    edges, times = timed()
    topology = topology_of(edges, times=times, on_host=on_host)
    seeds, limits = jnp.array([1, 1, 4, 6, -1]), jnp.array([80, 20, 50, -5, 90])
    options = SampleOptions(recent=recent)
    sample = jitted(topology, ("paper", seeds), [2, 2], seed_times=limits, options=options)
    count = 0
    for piece, own, senders in zip(sample.layout.pieces, *ids_and_senders(topology, sample), strict=True):
        kind = sample.layout.edge_types[piece.relation]
        first = sample.layout.first(piece.hop, piece.target)
        for row, (some, local) in enumerate(zip(np.asarray(own), np.asarray(senders), strict=True)):
            tree, node = (int(a[kind[2]][first + row]) for a in (sample.trees, sample.node_ids))
            if node < 0:
                assert (some < 0).all()
                continue
            allowed = [e for _, _, e in neighbours(edges, kind, node) if times[kind][e] <= int(limits[tree])]
            got = some[some >= 0].tolist()
            assert len(got) == min(len(allowed), piece.fan_out) and set(got) <= set(allowed)
            assert all(int(sample.trees[kind[0]][s]) == tree for s in local[local >= 0]), "seeds do not share nodes"
            if recent:
                want = sorted((times[kind][e] for e in allowed), reverse=True)[: piece.fan_out]
                assert sorted((times[kind][e] for e in got), reverse=True) == want
            count += len(got)
    assert count > 10


def test_excluded_edges_are_not_sampled():
    edges = edge_lists(200)
    topology = topology_of(edges, on_host=True)
    senders, receivers = edges[WRITES]
    chosen = np.arange(0, 200, 3)
    pairs = senders[chosen], receivers[chosen]
    out = {(int(s), int(r)) for s, r in zip(*pairs, strict=True)}
    exclude = {WRITES: (jnp.append(pairs[0], -1), jnp.append(pairs[1], -1)), REV: pairs[::-1]}
    sample = jitted(topology, ("paper", jnp.arange(13)), [-1, -1], exclude=exclude)
    found = sampled_edges(sample)
    every = {(int(s), int(r)) for s, r in zip(senders, receivers, strict=True)}
    assert {(s, r) for s, r, _ in found[WRITES]} == every - out
    assert not {(r, s) for s, r, _ in found[REV]} & out
    assert {(s, r) for s, r, _ in found[CITES]} == set(zip(*(a.tolist() for a in edges[CITES]), strict=True))


@pytest.mark.parametrize(
    "sizes", [(1, 2), *(pytest.param(sizes, marks=pytest.mark.slow) for sizes in [(0, 0), (3, 0)])]
)
def test_nodes_that_do_not_fit_are_counted_and_their_edges_masked(sizes):
    topology = topology_of()
    capacities = {"paper": sizes, "author": (2, 1)}
    sample = jitted(topology, ("paper", jnp.arange(6)), [3, 3], capacities=capacities)
    sampled_edges(sample)  # checks that all ends are there
    found, lost, layout = np.asarray(sample.found), np.asarray(sample.lost), sample.layout
    for hop in range(1, 3):
        for at, name in enumerate(layout.node_types):
            first = layout.first(hop, at)
            there = np.asarray(sample.node_ids[name])[first : first + layout.sizes[hop][at]]
            assert (there >= 0).sum() == found[hop, at] - lost[hop, at]
            assert found[hop, at] <= layout.sizes[hop][at] or lost[hop, at] == found[hop, at] - layout.sizes[hop][at]
    assert lost.any()
    with pytest.warns(UserWarning, match="did not fit"):
        sample.check()
    with pytest.raises(ValueError, match="did not fit"):
        sample.check(error=True)


def counts_of_draws(topology, runs, fan_out, degree, seed=0, **keywords):
    """How often each leaf is drawn, over `runs` copies of the center that draw independently."""

    def draw(key):
        sample = sample_blocks(key, topology, ("center", jnp.array([0])), [fan_out], **keywords)
        return jnp.where(sample.edges[0] >= 0, sample.edges[0], degree).reshape(-1)

    drawn = jax.jit(jax.vmap(draw))(jax.random.split(jax.random.key(seed), runs))
    return np.bincount(np.asarray(drawn).reshape(-1), minlength=degree + 1)[:degree], np.asarray(drawn)


def star(degree):
    """Papers that cite paper 0."""
    return {("leaf", "to", "center"): (np.arange(degree), np.zeros(degree, int))}


def test_draws_without_replacement_are_uniform():
    topology = HeteroTopology.from_edges(star(7), {"leaf": 7, "center": 1})
    counts, drawn = counts_of_draws(topology, 4000, 3, 7)
    assert all(len(set(row)) == 3 for row in drawn)
    assert p_value(counts, np.ones(7)) > 1e-4
    sets = np.unique(np.sort(drawn, axis=1) @ [49, 7, 1], return_counts=True)[1]
    assert len(sets) == 35 and p_value(sets, np.ones(35)) > 1e-4


def test_draws_with_replacement_are_uniform():
    topology = HeteroTopology.from_edges(star(7), {"leaf": 7, "center": 1})
    counts, drawn = counts_of_draws(topology, 4000, 3, 7, options=SampleOptions(replace=True))
    assert any(len(set(row)) < 3 for row in drawn)
    assert p_value(counts, np.ones(7)) > 1e-4


@pytest.mark.parametrize("replace", [False, True])
def test_draws_by_weight(replace):
    weights = np.array([0.0, 1, 2, 3, 4])
    topology = HeteroTopology.from_edges(star(5), {"leaf": 5, "center": 1}, weights={("leaf", "to", "center"): weights})
    counts, _ = counts_of_draws(topology, 6000, 1, 5, options=SampleOptions(replace=replace))
    assert counts[0] == 0 and p_value(counts[1:], weights[1:]) > 1e-4


@pytest.mark.parametrize("on_host", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_graph_of_one_type_needs_no_names(on_host):
    to, rng = ("node", "to", "node"), np.random.default_rng(0)
    edges, values = rng.integers(0, 9, (2, 40)), {"weights": rng.random(40), "times": rng.integers(0, 9, 40)}
    named = {name: {to: some} for name, some in values.items()}
    short = HeteroTopology.from_edges(edges, 9, on_host=on_host, **values)
    long = HeteroTopology.from_edges({to: edges}, {"node": 9}, on_host=on_host, **named)
    assert jax.tree.structure(short) == jax.tree.structure(long)
    jax.tree.map(np.testing.assert_array_equal, short.csc(to), long.csc(to))
    pairs = edges[:, :5]
    sample = jax.jit(lambda t: sample_blocks(KEY, t, [3, 1], [2], capacities=[3], exclude=pairs, seed_times=None))(
        short
    )
    other = jitted(long, ("node", [3, 1]), [2], capacities={"node": [3]}, exclude={to: tuple(pairs)}, seed_times=None)
    jax.tree.map(np.testing.assert_array_equal, sample, other)
    np.testing.assert_array_equal(sample.nodes, sample.node_ids["node"])


# -------------------------------------------------------------------------------------------- blocks and layers


def test_layers_on_blocks_are_those_of_numpy_on_the_sampled_edges():
    edges, rng = edge_lists(60), np.random.default_rng(0)
    topology, seeds = topology_of(edges), np.array([4, 7, 7, -1], np.int32)
    x = {name: rng.standard_normal((count, 4)).astype(np.float32) for name, count in COUNTS.items()}
    w = rng.standard_normal((2, len(edges), 4, 4)).astype(np.float32)

    @jax.jit
    def run(topology, x, w, seeds):
        sample = sample_blocks(KEY, topology, ("paper", seeds), [3, 2])
        h = {name: x[name].at[ids].get(mode="fill", fill_value=0) for name, ids in sample.node_ids.items()}
        blocks = make_blocks(sample)
        h = blocks[0].join(h)
        for block, own in zip(blocks, w, strict=True):
            h = mean_by_relation(block.bipartite, h, own)
        return blocks[-1].split(h)["paper"][sample.seed_positions["paper"]], sample

    got, sample = run(topology, x, w, seeds)
    found = sampled_edges(sample)
    h = x
    for own in w:  # all nodes; those that the sample has not expanded are not looked at
        total = {name: np.zeros((count, 4)) for name, count in COUNTS.items()}
        degree = {name: np.zeros((count, 1)) for name, count in COUNTS.items()}
        for number, edge_type in enumerate(topology.edge_types):
            for sender, receiver, _ in found[edge_type]:
                total[edge_type[2]][receiver] += h[edge_type[0]][sender] @ own[number]
                degree[edge_type[2]][receiver] += 1
        h = {name: total[name] / np.maximum(degree[name], 1) for name in COUNTS}
    np.testing.assert_allclose(got[:3], h["paper"][seeds[:3]], rtol=1e-5, atol=1e-5)


def test_relations_that_are_sampled_together_keep_their_kinds():
    rng, edge = np.random.default_rng(0), ("node", "edge", "node")
    senders, receivers, kinds = *rng.integers(0, 12, (2, 40)), rng.integers(0, 5, 40)
    topology, w = HeteroTopology.from_edges({edge: (senders, receivers)}, {"node": 12}), rng.standard_normal((6, 4, 4))
    x = rng.standard_normal((12, 4))

    @jax.jit
    def run(topology, kinds, x, w):
        sample = sample_blocks(KEY, topology, ("node", jnp.array([3, 7])), [-1])
        (block,) = make_typed_blocks(topology, sample, kinds, 5, add_self_loops=True)
        return mean_by_relation(block.bipartite, x[jnp.maximum(sample.nodes, 0)], w)

    want = np.einsum("nk,kd->nd", x, w[5])
    np.add.at(want, receivers, np.einsum("ek,ekd->ed", x[senders], w[kinds]))
    want /= 1 + np.bincount(receivers, minlength=12)[:, None]
    got = run(topology, jnp.asarray(kinds), jnp.float32(x), jnp.float32(w))
    np.testing.assert_allclose(got, want[[3, 7]], rtol=1e-4, atol=1e-5)


def test_modules_take_and_give_dicts_on_blocks_and_on_the_full_graph():
    from flax import nnx

    widths, edges, rngs = {"author": 3, "lonely": 2, "paper": 5}, edge_lists(), nnx.Rngs(0)
    model = mb.HeteroGNN(widths, 8, [rgnn.nnx.RGCNConv(8, 6, 4, rngs=rngs)], rngs=rngs)
    rng, seeds = np.random.default_rng(0), jnp.array([4, 7, 2])
    x = {name: jnp.asarray(rng.standard_normal((COUNTS[name], n)), jnp.float32) for name, n in widths.items()}

    @nnx.jit
    def on_blocks(model, topology, x):
        sample = sample_blocks(KEY, topology, ("paper", seeds), [-1])
        own = {name: x[name].at[ids].get(mode="clip") for name, ids in sample.node_ids.items()}
        return model(make_blocks(sample), own)

    want = nnx.jit(lambda model, graph, x: model(graph, x))(model, rgnn.RelGraph.from_relations(edges, COUNTS), x)
    got = on_blocks(model, topology_of(edges), x)
    np.testing.assert_allclose(got["paper"], want["paper"][seeds], rtol=1e-5, atol=1e-5)


# -------------------------------------------------------------------------------------------- steps


def test_pipelined_steps_are_single_ones_with_reads_ahead():
    """Edges in host memory are read ahead, hop by hop; features lie in both memories."""
    rng, w = np.random.default_rng(1), jnp.eye(4)[None].repeat(4, 0)
    store = FeatureStore.from_arrays(
        {name: rng.standard_normal((COUNTS[name], 4)).astype(np.float32) for name in COUNTS},
        on_device={"paper": [1, 5]},
    )
    topology, steps = topology_of(on_host=True), 3
    seeds, keys = seed_batches(np.arange(COUNTS["paper"]), 5, seed=0)[-steps:], step_keys(jax.random.key(3), 7, steps)

    def sample(key, topology, seeds):
        return sample_blocks(key, topology, ("paper", seeds), [3])

    def update(state, batch, rate):
        (block,) = batch.blocks

        def loss_of(w):
            y = mean_by_relation(block.bipartite, block.join(batch.x), w)[batch.sample.seed_positions["paper"]]
            return jnp.where(batch.seeds[:, None] >= 0, y**2, 0).sum()

        loss, gradient = jax.value_and_grad(loss_of)(state)
        return state - rate * gradient, (loss, batch.sample.nodes)

    one, state, single = sampled_step(update, sample, donate=False), w, []
    for key, some in zip(keys, seeds, strict=True):
        state, out = one(state, topology, store, key, some, 0.5)
        single.append(out)
    many = pipelined_steps(update, sample, edges_ahead=True, donate=False)
    got, outs = many(w, topology, store, keys, seeds, 0.5)
    jax.tree.map(lambda a, *some: np.testing.assert_array_equal(a, np.stack(some)), outs, *single)
    np.testing.assert_array_equal(got, state)


def test_a_step_from_seeds_to_update() -> None:
    width = 8
    data = synthetic_igb(1e-6, feature_width=width, feature_dtype="float32").with_reverse(symmetric=["cites"])
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
    store = store.embedding("fos", num_nodes["fos"], width)
    store.check_counts(num_nodes)
    embeddings, features = store.split_trainable()
    optimizer = adam(0.05)
    state = embeddings.init(optimizer)
    before = np.array(embeddings["fos"].table.numpy())
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((len(edges), width, width)) / 3, jnp.float32)
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


# -------------------------------------------------------------------------------------------- after the layers


@pytest.mark.parametrize(
    ("negatives", "edge_type"),
    slow_but([("degree", WRITES)], itertools.product(("in_batch", "degree", "uniform"), (WRITES, CITES))),
)
def test_edges_as_seeds_have_negatives_and_are_left_out(negatives, edge_type):
    edges, topology = edge_lists(), topology_of(on_host=True)
    pairs = np.append(edges[edge_type][0][:10], -1), np.append(edges[edge_type][1][:10], 3)
    reverse = REV if edge_type == WRITES else CITES

    @jax.jit
    def run(topology, pairs):
        batch = link_batch(KEY, topology, edge_type, pairs, 4, negatives=negatives, reverse=reverse)
        sample = sample_blocks(KEY, topology, batch.seeds, [3], exclude=batch.exclude)
        ids = {name: sample.node_ids[name].astype(jnp.float32)[:, None] for name in COUNTS}
        return batch.rows(sample, ids), batch.mask, batch.negative_mask, sample

    (heads, tails, wrong), mask, there, sample = run(topology, pairs)
    np.testing.assert_array_equal(heads[:10, 0], pairs[0][:10])
    np.testing.assert_array_equal(tails[:10, 0], pairs[1][:10])
    assert wrong.shape == (11, 4, 1) and mask.tolist() == [True] * 10 + [False]
    wrong, there = np.asarray(wrong)[:10, :, 0], np.asarray(there)
    assert there[:10].any() and not there[10].any()
    assert (wrong[there[:10]] >= 0).all() and (wrong != pairs[1][:10, None])[there[:10]].all()
    left = {(s, r) for s, r, _ in sampled_edges(sample)[edge_type]}
    assert not left & set(zip(pairs[0][:10].tolist(), pairs[1][:10].tolist(), strict=True))


def test_links_in_time():
    lists, times = timed()
    senders, receivers = lists[WRITES]
    born = np.arange(13) * 5
    when = np.maximum(times[WRITES], born[receivers])
    order = np.argsort(when)[-12:]  # edges of one pair of nodes at several times are among them
    topology = topology_of(lists, times={**times, WRITES: when, REV: when})
    pairs, pool = (senders[order], receivers[order]), NegativePool.from_times(born)

    @jax.jit
    def run(topology, pairs, at, ids, pool, edges):
        options = {"times": at, "edge_ids": ids, "true_edges": edges, "negatives": pool, "reverse": REV}
        batch = link_batch(KEY, topology, WRITES, pairs, 6, **options)
        sample = sample_blocks(KEY, topology, batch.seeds, [-1], exclude=batch.exclude, seed_times=batch.seed_times)
        return batch, sample

    batch, sample = run(topology, pairs, when[order], order, pool, TrueEdges.from_edges((senders, receivers)))
    wrong = np.asarray(batch.seeds["paper"])[np.asarray(batch.negatives)]
    assert (born[wrong] <= when[order][:, None]).all() and len(np.unique(wrong)) > 6
    true = set(zip(senders.tolist(), receivers.tolist(), strict=True))
    want = [[(s, w) not in true for w in row] for s, row in zip(pairs[0].tolist(), wrong.tolist(), strict=True)]
    np.testing.assert_array_equal(batch.negative_mask, want)
    np.testing.assert_array_equal(batch.seed_times["paper"], np.concatenate([when[order], np.repeat(when[order], 6)]))
    # By place in the list: the edges of the batch are left out, and all others of their ends stay, up to their time.
    found = {name: [] for name in lists}
    for piece, ids, some in zip(sample.layout.pieces, *ids_and_senders(topology, sample), strict=True):
        rows, slots = np.nonzero(np.asarray(some) >= 0)
        nodes = (rows + sample.layout.first(piece.hop, piece.target)).tolist()
        found[sample.layout.edge_types[piece.relation]] += zip(
            nodes, np.asarray(ids)[rows, slots].tolist(), strict=True
        )
    again = 0
    for name, kind, ends in ((WRITES, "paper", receivers), (REV, "author", senders)):
        seeds = zip(batch.seeds[kind].tolist(), batch.seed_times[kind].tolist(), strict=True)
        others = ~np.isin(np.arange(60), order)
        seen = [
            (k, e) for k, (node, at) in enumerate(seeds) for e in np.flatnonzero((ends == node) & (when <= at) & others)
        ]
        assert sorted(found[name]) == seen
        again += sum((senders[e], receivers[e]) in set(zip(*pairs, strict=True)) for _, e in seen)
    assert again  # an earlier edge of a pair stays


def test_filtered_ranks_leave_out_what_is_known():
    rng = np.random.default_rng(0)
    entities, relations = (rng.integers(-2, 3, (n, 6)).astype(np.float32) for n in (11, 4))
    known = np.stack([rng.integers(0, n, 60) for n in (11, 4, 11)], axis=1)
    found = link_ranks("distmult", entities, relations, entities, known[:12], known=known, sides=["tail"])
    true, want = {tuple(row) for row in known.tolist()}, []
    for head, relation, tail in known[:12].tolist():
        score = (entities[head] * relations[relation]) @ entities.T
        others = [c for c in range(11) if c != tail and (head, relation, c) not in true]
        want.append(1 + sum((score[c] > score[tail]) + 0.5 * (score[c] == score[tail]) for c in others))
    np.testing.assert_array_equal(found.tail, want)


def test_inference_computes_all_nodes_layer_by_layer():
    rng, to = np.random.default_rng(0), ("a", "to", "a")
    senders, receivers = rng.integers(0, 50, 300), rng.integers(0, 50, 300)
    x, w = rng.standard_normal((50, 4)).astype(np.float32), rng.standard_normal((2, 4, 4)).astype(np.float32)

    def layer(w, batch):
        edges = batch.edges[to]
        rows = jnp.where(edges.mask[:, None], batch.sources["a"][edges.senders], 0)
        return jnp.tanh(batch.own + segment.segment_sum(rows, edges.receivers, batch.nodes.shape[0]) @ w)

    topology = HeteroTopology.from_edges({to: (senders, receivers)}, {"a": 50})
    found = infer_layers([layer] * 2, list(w), topology, {"a": 50}, FeatureStore.from_arrays({"a": x}), batch_size=17)
    adjacency = np.zeros((50, 50))
    np.add.at(adjacency, (receivers, senders), 1)
    h = x.astype(np.float64)
    for own in w:
        h = np.tanh(h + adjacency @ h @ own)
    np.testing.assert_allclose(found["a"].numpy(), h, rtol=1e-4, atol=1e-4)
