"""The task "links": negatives, and that a step does not see the edges that it predicts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.minibatch import DECODERS
from dejax.training import Trainer, resolve
from dejax.training.command.cli import main
from dejax.training.tasks.link_graph import LinkGraph
from dejax.training.tasks.links import Negatives
from tests.training.graphs import links


def test_nodes_of_all_types_are_in_one_list():
    graph = LinkGraph.of(links())
    data, edges = graph.data, len(graph.edge_type) // 2
    assert graph.num_nodes == 28 and graph.num_relations == 3
    # Of equal edges of a relation to predict, one is kept.
    distinct = {tuple(row) for row in data.triples().tolist()}
    assert len(distinct) < 100 and len(graph.train) == len(distinct) == edges - 30
    assert set(graph.train[:, 1]) == {0, 2}
    for place, (head, relation, tail) in zip(graph.train_edge, graph.train, strict=True):
        found = graph.senders[place], graph.edge_type[place], graph.receivers[place]
        assert found == (head, relation, tail)
        back = place + edges
        assert (graph.senders[back], graph.edge_type[back], graph.receivers[back]) == (tail, relation + 3, head)
    assert graph.features.shape == (28, 6) and not graph.features[:8].any()


@pytest.mark.parametrize("kind", ["uniform", "degree", "in_batch"])
def test_negatives_have_the_type_of_the_true_end(kind):
    graph = LinkGraph.of(links())
    negatives = Negatives(graph, resolve("small", task="links", negative_kind=kind, negatives=40))
    true = np.append(np.resize(graph.train[:, 2], 99), -1)
    wrong = negatives.draw(np.random.default_rng(0), 1, 100)[0]
    of_true = graph.node_type[np.maximum(true, 0)]
    places, there = negatives.places(jax.random.key(0), *map(jnp.asarray, (true, of_true, wrong)))
    nodes = np.concatenate([true, wrong])[np.asarray(places)]
    there = np.asarray(there)
    assert there[:99].mean() > 0.3 and not there[99].any()
    own = np.broadcast_to(true[:, None], nodes.shape)
    assert (graph.node_type[nodes[there]] == graph.node_type[own[there]]).all() and (nodes != own)[there].all()
    if kind == "degree":
        seen = set(graph.train[:, [0, 2]].reshape(-1).tolist())
        assert set(nodes[there].tolist()) <= seen


@pytest.mark.parametrize("full", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_edges_to_predict_are_not_in_the_graph(full):
    """The first layer's graph has no edge between the ends of a batch's triple of its relation, nor the reverse."""
    graph = LinkGraph.of(links())
    settings = resolve("small", task="links", full_batch=full, fan_outs=(-1,), batch_size=16, negatives=2)
    task = Trainer(settings, links()).task
    task.capacities = None
    seeds = {name: jnp.asarray(some[0]) for name, some in task.order(0, 0).items()}

    def view(world, seeds):
        sample = None if full else task.sample(jax.random.key(0), world.topology, seeds)
        return task.view(world.topology, world.data, seeds, sample)

    found = view(task.world, seeds)
    (built, _), ids, positions = found.graphs[0], np.asarray(found.ids["node"]), np.asarray(found.positions["node"])
    mask = np.asarray(built.edge_mask)
    senders, receivers, kinds = (np.asarray(x)[mask] for x in (built.senders, built.receivers, built.edge_type))
    edges = set(zip(ids[senders].tolist(), kinds.tolist(), ids[receivers].tolist(), strict=True))
    ends = np.stack([seeds["kept"], seeds["true"]], axis=1)
    pairs = {(a, b) for x, y in ends.tolist() for a, b in ((x, y), (y, x))}
    asked = set(np.asarray(seeds["edge"]).tolist())
    predicted = [row for place, row in zip(graph.train_edge, graph.train, strict=True) if int(place) in asked]
    assert len(predicted) == int((seeds["kept"] >= 0).sum()) >= 14
    for h, r, t in np.stack(predicted).tolist():
        assert (h, r, t) not in edges and (t, r + 3, h) not in edges
    own = np.concatenate([seeds["kept"], seeds["true"], seeds["wrong"]])
    assert int(found.lost) == 0 and (ids[positions] == own)[own >= 0].all()
    # All other edges into the seeds are there.
    wanted = set(zip(graph.senders.tolist(), graph.edge_type.tolist(), graph.receivers.tolist(), strict=True))
    rest = {(s, r, t) for s, r, t in wanted if t in set(own.tolist()) and (s, t) not in pairs}
    assert rest <= edges


@pytest.mark.slow
@pytest.mark.parametrize("decoder", ["dot", "complex", "rotate"])
def test_decoders_and_features(decoder):
    settings = resolve(
        "small", "sage", task="links", decoder=decoder, hidden=8, fan_outs=(3,), batch_size=50, epochs=2, negatives=8,
        negative_kind="in_batch", loss="binary",
    )  # fmt: skip
    trainer = Trainer(settings, links())
    state = trainer.init(0)
    losses = []
    for now, found in trainer.run(state, 2):
        state = now
        losses += [] if found is None else found.loss
    ranks = trainer.task.ranks(trainer, state, "test")
    assert len(losses) == 2 and np.isfinite(losses).all() and ranks.tail.size == ranks.head.size == 14


@pytest.mark.parametrize(
    "decoder",
    [pytest.param("distmult", marks=pytest.mark.slow), pytest.param("rotate", marks=pytest.mark.slow), "complex"],
)
def test_vectors_against_all_nodes(decoder):
    """Without layers, with all nodes as negatives, reciprocal relations and the nuclear norm: the loss, from numpy."""
    settings = resolve(
        "small", "embeddings", task="links", decoder=decoder, hidden=8, batch_size=50, epochs=12, n3=0.02
    )
    data = links(features={})
    trainer = Trainer(settings, data)
    task, state = trainer.task, trainer.init(0)
    assert not task.sampled and settings.reciprocal
    seeds = {name: jnp.asarray(some[0]) for name, some in task.order(0, 0).items()}
    nodes, relations = state.embeddings["node"].table.numpy().copy(), np.asarray(state.params["relations"][...])
    view = task.view(None, task.world.data, seeds, None)

    @jax.jit
    def loss_of(params, nodes):
        return task.loss(trainer.merged(params), view, {"node": nodes}, seeds, task.world.data, jax.random.key(0))[0]

    loss = loss_of(state.params, nodes)
    graph, half, expected = task.graph, relations.shape[1] // 2, []
    base = DECODERS[decoder]
    for n in np.flatnonzero(np.asarray(seeds["kept"]) >= 0):
        kept, true = nodes[seeds["kept"][n]], nodes[seeds["true"][n]]
        r = relations[seeds["relation"][n]]
        own = r[half:] if n % 2 else r[:half]  # every other edge asks for its head
        scores = np.asarray(base.score(kept[None], jnp.asarray(own)[None], jnp.asarray(nodes)), np.float64)
        scores = scores[graph.node_type == graph.node_type[int(seeds["true"][n])]]
        right = float(base.score(kept, jnp.asarray(own), jnp.asarray(true)))
        vectors = [kept, true] if decoder == "rotate" else [kept, true, r[:half], r[half:]]
        modulus = [np.abs(v if decoder == "distmult" else v[:4] + 1j * v[4:]) for v in vectors]
        expected.append(np.log(np.exp(scores).sum()) - right + 0.02 * sum((m**3).sum() for m in modulus))
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-5)
    losses = [x for _, found in trainer.run(state, 12) if found is not None for x in found.loss]
    assert losses[-1] < losses[0]


def test_settings_of_vectors_alone():
    with pytest.raises(ValueError, match="fan_outs must be left out"):
        resolve("small", "embeddings", task="links", fan_outs=(3,))
    with pytest.raises(ValueError, match="negative_kind must be another than 'all' unless full_batch is True"):
        resolve("small", "sage", task="links", negative_kind="all")
    with pytest.raises(ValueError, match="reciprocal must be False with the decoder 'dot'"):
        resolve("small", "sage", task="links", decoder="dot", reciprocal=True)


def test_a_graph_without_edges_to_predict():
    with pytest.raises(ValueError, match="must have edges to predict"):
        LinkGraph.of(links(target_relations=(), valid_edges={}, test_edges={}))


def test_decoders_are_compared_and_vectors_exported(tmp_path, capsys):
    rng = np.random.default_rng(0)
    rows = [f"e{a}\tr{r}\te{b}\n" for a, r, b in rng.integers(0, [20, 3, 20], (200, 3))]
    (tmp_path / "triples.txt").write_text("".join(rows))
    options = "--links --model embeddings --decoder complex,dot --hidden 8 --epochs 1 --export --no-checkpoints"
    assert main([*options.split(), "--data", str(tmp_path), "--out", str(tmp_path / "out")]) == 0
    table = capsys.readouterr().out.split("Test triples")[1].split()
    assert {"complex", "dot", "mrr", "hits@10"} <= set(table)
    with np.load(tmp_path / "out" / "complex" / "embeddings-seed0.npz") as found:
        assert found["entities"].shape == (20, 8) and found["relations"].shape == (3, 16)
        assert set(found["entity_names"]) == {f"e{n}" for n in range(20)}
        assert list(found["relation_names"]) == ["r0", "r1", "r2"]
    with np.load(tmp_path / "out" / "dot" / "embeddings-seed0.npz") as found:
        assert "relations" not in found
