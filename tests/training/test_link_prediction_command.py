"""`examples/link_prediction.py`: it learns a planted structure, resumes to the same numbers, refuses mistakes."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset, synthetic_triples
from dejax.training.links import LinkGraph, LinkTrainer, resolve
from dejax.training.links.cli import main
from dejax.training.links.negatives import draw

TINY = "--hidden 16 --batch-size 128 --negatives 16 --fan-outs 5,3 --bases 2 --lr 0.02 --eval-edges 50".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Triples as text files."""
    data = synthetic_triples(0.004, num_clusters=1500, noise=0.0)
    place = tmp_path_factory.mktemp("data") / "planted"
    place.mkdir()
    for split in ("train", "valid", "test"):
        rows = data.triples(split)
        (place / f"{split}.txt").write_text("".join(f"e{h}\tr{r}\te{t}\n" for h, r, t in rows.tolist()))
    return place


def run(folder, out, *more):
    return main(["--data", str(folder), "--out", str(out), *TINY, *more])


def results(out):
    return json.loads((Path(out) / "results.json").read_text())


def test_it_learns_and_resumes_to_the_same_numbers(folder, tmp_path, capsys, monkeypatch):
    assert run(folder, tmp_path / "whole", "--epochs", "12") == 0
    text = capsys.readouterr().out
    assert "mrr, test" in text and "training edges a second" in text and (tmp_path / "whole/curves.png").is_file()
    whole = results(tmp_path / "whole")
    # 58 entities: the mean reciprocal rank of a random order is about 0.08.
    assert whole["test"]["mrr"]["mean"] > 0.2 and whole["graph"]["nodes"] <= 58

    train = LinkTrainer.run

    def stopped(self, state, *rest):
        for at, found in enumerate(train(self, state, *rest), start=1):
            yield found
            if at == 12:  # within the second epoch
                raise KeyboardInterrupt

    monkeypatch.setattr(LinkTrainer, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(folder, tmp_path / "part", "--epochs", "12", "--checkpoint-every", "5")
    monkeypatch.undo()
    assert run(folder, tmp_path / "part", "--epochs", "12", "--resume") == 0
    assert results(tmp_path / "part")["test"] == whole["test"]


def small(**changes):
    """Two node types with features, two relations to predict."""
    rng = np.random.default_rng(0)
    calls, uses = ("function", "calls", "function"), ("function", "uses", "class")
    other = ("class", "has", "function")
    edges = {
        calls: (rng.integers(0, 20, 60), rng.integers(0, 20, 60)),
        other: (rng.integers(0, 8, 30), rng.integers(0, 20, 30)),
        uses: (rng.integers(0, 20, 40), rng.integers(0, 8, 40)),
    }
    held = {calls: (rng.integers(0, 20, 9), rng.integers(0, 20, 9)), uses: (np.arange(5), np.arange(5))}
    fields = {
        "features": {"function": rng.standard_normal((20, 6)).astype(np.float32)},
        "target_relations": (calls, uses),
        "valid_edges": held,
        "test_edges": held,
    }
    return HeteroDataset("small", {"class": 8, "function": 20}, edges, **{**fields, **changes})


def test_nodes_of_all_types_are_in_one_list():
    graph = LinkGraph.of(small())
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
    graph = LinkGraph.of(small())
    trainer = LinkTrainer(resolve("small", full_batch=True, negative_kind=kind, negatives=40), graph)
    true = jnp.asarray(np.append(np.resize(graph.train[:, 2], 99), -1))
    wrong, places, there = draw(jax.random.key(0), trainer.inputs, true, trainer.settings)
    nodes = np.concatenate([true, wrong])[np.asarray(places)]
    there = np.asarray(there)
    assert there[:99].mean() > 0.3 and not there[99].any()
    own = np.broadcast_to(np.asarray(true)[:, None], nodes.shape)
    assert (graph.node_type[nodes[there]] == graph.node_type[own[there]]).all() and (nodes != own)[there].all()
    if kind == "degree":
        seen = set(graph.train[:, [0, 2]].reshape(-1).tolist())
        assert set(nodes[there].tolist()) <= seen


@pytest.mark.parametrize("full", [False, True])
def test_the_edges_to_predict_are_not_in_the_graph(full):
    """The first layer's graph has no edge between the ends of a batch's triple of its relation, nor the reverse."""
    graph = LinkGraph.of(small())
    trainer = LinkTrainer(resolve("small", full_batch=full, fan_outs=(-1,), batch_size=16), graph)
    trainer.capacities = None  # they are for batches with negatives
    rows = np.arange(16)
    head, tail = (jnp.asarray(graph.train[rows, column]) for column in (0, 2))
    seeds = jnp.concatenate([head, tail])
    found = trainer._neighbourhood(
        jax.random.key(0), trainer.inputs, seeds, (head, tail), trainer.inputs.triple_edge[rows]
    )
    ((built, _),), ids, positions, lost = found
    ids, mask = np.asarray(ids), np.asarray(built.edge_mask)
    senders, receivers, kinds = (np.asarray(x)[mask] for x in (built.senders, built.receivers, built.edge_type))
    edges = set(zip(ids[senders].tolist(), kinds.tolist(), ids[receivers].tolist(), strict=True))
    for h, r, t in graph.train[rows].tolist():
        assert (h, r, t) not in edges and (t, r + 3, h) not in edges
    assert int(lost) == 0 and (ids[np.asarray(positions)] == np.asarray(seeds)).all()
    # All other edges into the seeds are there.
    wanted = set(zip(graph.senders.tolist(), graph.edge_type.tolist(), graph.receivers.tolist(), strict=True))
    pairs = {(a, b) for h, _, t in graph.train[rows].tolist() for a, b in ((h, t), (t, h))}
    rest = {(s, r, t) for s, r, t in wanted if t in set(np.asarray(seeds).tolist()) and (s, t) not in pairs}
    assert rest <= edges


@pytest.mark.parametrize("decoder", ["dot", "complex", "rotate"])
def test_decoders_and_features(decoder):
    settings = resolve(
        "small", decoder=decoder, hidden=8, fan_outs=(3,), batch_size=50, epochs=2, negatives=8, layer="sage",
        negative_kind="in_batch", loss="binary",
    )  # fmt: skip
    trainer = LinkTrainer(settings, LinkGraph.of(small()))
    state = trainer.init(0)
    losses = []
    for now, progress in trainer.run(state, 0, 2):
        state = now
        losses += [] if progress is None else [float(progress.loss[0])]
    ranks = trainer.ranks(state, "test")
    assert len(losses) == 2 and np.isfinite(losses).all() and ranks.tail.size == ranks.head.size == 14


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--fan-outs", "x"], "--fan-outs must be integers"),
        (["--decoder", "complex", "--hidden", "15"], "hidden must be even for complex"),
        (["--dataset", "nothing"], "--dataset must be one of stdlib"),
        (["--dataset", "synthetic-triples-x"], "with a positive number"),
        (["--resume"], "holds no run"),
        (["--negatives", "0"], "negatives must be at least 1"),
    ],
)
def test_mistakes(folder, tmp_path, capsys, wrong, message):
    assert run(folder, tmp_path / "run", *wrong) == 2
    assert message in capsys.readouterr().err


def test_a_graph_without_edges_to_predict():
    with pytest.raises(ValueError, match="has no edges to predict"):
        LinkGraph.of(small(target_relations=(), valid_edges={}, test_edges={}))
