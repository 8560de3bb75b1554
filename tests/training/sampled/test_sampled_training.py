"""`dejax-train --sampled`: a run that learns, exact resume, layers, places of tables."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset, Label, from_tables
from dejax.datasets._hetero import DESCRIPTIVE, LINK_TASK, NODE_TASK
from dejax.minibatch.topology import as_numpy
from dejax.training import cli
from dejax.training.links.data import LinkGraph
from dejax.training.sampled import SampledTrainer, model, resolve
from dejax.training.sampled.data import one_type, prepare

WRITES = ("author", "writes", "paper")


def community_graph(seed: int = 0, per_group: int = 20) -> HeteroDataset:
    """Papers whose class is the group of their authors; only edges and authors' features reveal it."""
    rng = np.random.default_rng(seed)
    groups, papers, authors = 3, 3 * per_group, 30
    label = np.arange(papers) % groups
    author_of = np.stack([rng.integers(0, authors // groups, papers) * groups + label for _ in range(3)], axis=1)
    edges = {WRITES: (author_of.reshape(-1), np.repeat(np.arange(papers), 3))}
    order = rng.permutation(papers)
    return HeteroDataset(
        name="communities",
        num_nodes={"author": authors, "paper": papers, "venue": 4},
        edges={**edges, ("venue", "has", "paper"): (rng.integers(0, 4, papers), np.arange(papers))},
        features={"author": np.eye(groups, dtype=np.float32)[np.arange(authors) % groups] + np.float32(0.1)},
        labels={"paper": label},
        num_classes={"paper": groups},
        splits={"train": {"paper": order[:30]}, "valid": {"paper": order[30:45]}, "test": {"paper": order[45:]}},
    )


def one_type_of(data: HeteroDataset) -> HeteroDataset:
    """The same graph with the nodes of all types side by side as one type; features are zeros where there are none."""
    first = dict(zip(data.num_nodes, np.cumsum([0, *data.num_nodes.values()]), strict=False))
    count, width = sum(data.num_nodes.values()), next(iter(data.features.values())).shape[1]
    features = np.zeros((count, width), np.float32)
    for kind, rows in data.features.items():
        features[first[kind] : first[kind] + len(rows)] = rows
    labels = np.full(count, -1)
    for kind, own in data.labels.items():
        labels[first[kind] : first[kind] + len(own)] = own
    return HeteroDataset(
        name=data.name,
        num_nodes={"node": count},
        edges={("node", r[1], "node"): (u + first[r[0]], v + first[r[2]]) for r, (u, v) in data.edges.items()},
        features={"node": features},
        labels={"node": labels},
        num_classes={"node": max(data.num_classes.values())},
        splits={name: {"node": ids["paper"] + first["paper"]} for name, ids in data.splits.items()},
    )


TINY = {"hidden": 8, "heads": 2, "batch_size": 8, "fan_outs": (4, 2), "epochs": 6, "lr": 0.05}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("data") / "communities"
    community_graph().save(place)
    return place


def words(folder, out, *more):
    tiny = "--hidden 8 --batch-size 8 --fan-outs 4,2 --epochs 4 --lr 0.05".split()
    return ["--sampled", "--data", str(folder), "--out", str(out), *tiny, *more]


def test_the_command_learns_and_resumes_to_the_same_numbers(folder, tmp_path, capsys, monkeypatch):
    assert cli.main(words(folder, tmp_path / "whole")) == 0
    text = capsys.readouterr().out
    assert "R-GCN, test" in text and "seeds a second" in text and (tmp_path / "whole" / "curves.png").is_file()
    whole = json.loads((tmp_path / "whole" / "results.json").read_text())
    assert whole["accuracy"]["test"]["mean"] >= 0.8 > 0.5 > whole["baselines"]["majority"]
    assert whole["embedding_values"] == 8 * (60 + 4) and whole["inference"] == "layers"

    # Stopped within the second epoch of four batches: the sixth step raises.
    run = SampledTrainer.run

    def stopped(self, state, *rest):
        for at, found in enumerate(run(self, state, *rest), start=1):
            yield found
            if at == 6:
                raise KeyboardInterrupt

    monkeypatch.setattr(SampledTrainer, "run", stopped)
    with pytest.raises(KeyboardInterrupt):
        cli.main(words(folder, tmp_path / "part", "--checkpoint-every", "3"))
    monkeypatch.undo()
    assert cli.main(words(folder, tmp_path / "part", "--resume")) == 0
    part = json.loads((tmp_path / "part" / "results.json").read_text())
    assert part["accuracy"] == whole["accuracy"]
    compared = [tmp_path / name / "checkpoints" / "seed0" / "16" for name in ("whole", "part")]
    assert all(place.is_dir() for place in compared)
    import orbax.checkpoint as ocp

    states = []
    for place in compared:
        with ocp.CheckpointManager(place.parent, item_names=("state", "history")) as manager:
            items = ocp.args.Composite(state=ocp.args.StandardRestore(), history=ocp.args.JsonRestore())
            found = manager.restore(16, args=items)
            states.append((jax.tree.leaves(found["state"]), found["history"]["loss"], found["history"]["accuracy"]))
    for a, b in zip(states[0][0], states[1][0], strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert states[0][1:] == states[1][1:]


def trained(data, **changes):
    trainer = SampledTrainer(resolve("communities", **{**TINY, **changes}), data)
    state = trainer.init(0)
    for now, _ in trainer.run(state, 0, trainer.settings.epochs):
        state = now
    return trainer, state


@pytest.mark.parametrize(
    "changes",
    [
        {"layer": "rgat", "place": "split", "device_bytes": 200},
        {"layer": "hgt", "place": "device", "feature_dtype": "bfloat16"},
        {"layer": "sage", "feature_dtype": "float8_e4m3fn", "dropout": 0.1},
        {"layer": "rgcn", "full_batch": True, "epochs": 30},
    ],
    ids=lambda changes: changes["layer"],
)
def test_layers_and_places(changes):
    trainer, state = trained(community_graph(), **changes)
    assert trainer.accuracy(state)["test"] >= 0.8
    assert int(state.lost) == 0


@pytest.mark.parametrize("layer", ["rgcn", "rgat", "sage"])
def test_relations_sampled_together(layer):
    """The default of graphs with one node type, such as the standard library's."""
    data = one_type_of(community_graph())
    trainer, state = trained(data, layer=layer, joint=True, fan_outs=(8, 8))
    assert trainer.accuracy(state)["test"] >= 0.8
    assert int(state.lost) == 0


def test_offload_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(model, "_OFFLOAD_BYTES", 1)
    data = community_graph()
    _, plain = trained(data, epochs=2, dropout=0.2, batch_size=16)
    _, offloaded = trained(data, epochs=2, dropout=0.2, batch_size=16, offload=True)
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(offloaded.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_layerwise_inference_equals_the_full_graph():
    """The same parameters: layer by layer in batches, and one call on the whole graph."""
    data = community_graph()
    trainer, state = trained(data, full_batch=True, epochs=1, layer="rgat")
    ids = {kind: jnp.arange(count) for kind, count in trainer.prepared.topology.num_nodes.items()}
    x = (state.embeddings | trainer.prepared.features).gather(ids)
    whole = trainer._merged(state.params)(trainer.inputs.graph, x)
    found = trainer.outputs(state)["paper"].numpy()
    np.testing.assert_allclose(found, whole["paper"], atol=1e-5)


def test_an_epoch_has_each_training_node_once():
    trainer = SampledTrainer(resolve("communities", **TINY), community_graph())
    (ids,) = trainer.order(0, 3).values()
    assert sorted(ids[ids >= 0]) == sorted(trainer.splits["train"]["paper"])
    assert len(ids) == trainer.steps_per_epoch * 8 and not np.array_equal(ids, trainer.order(0, 4)["paper"])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--fan-outs", "4,x"], "--fan-outs must be integers"),
        (["--fan-outs", "4,0"], "fan_outs must be numbers from 1, or -1"),
        (["--layer", "rgat", "--heads", "3"], "heads must divide hidden"),
        (["--dataset", "nothing"], "--dataset must be one of stdlib"),
        (["--resume", "--no-checkpoints"], "--resume must not stand with"),
        (["--resume"], "holds no run"),
        (["--dropout", "1.5"], "dropout must be a share"),
    ],
)
def test_mistakes(folder, tmp_path, capsys, wrong, message):
    assert cli.main(words(folder, tmp_path / "run", *wrong)) == 2
    assert message in capsys.readouterr().err


def test_a_graph_without_training_nodes(tmp_path, capsys):
    HeteroDataset("none", {"a": 2}, {("a", "to", "a"): ([0], [1])}).save(tmp_path / "d")
    assert cli.main(["--sampled", "--data", str(tmp_path / "d"), "--out", str(tmp_path / "o")]) == 2
    assert "no labelled nodes to train on" in capsys.readouterr().err


def test_one_type_keeps_relations():
    from tests.datasets.test_dataset import make

    entity = make()
    data = one_type(entity)
    assert sum(data.num_edges.values()) == entity.num_edges and len(data.edges) == entity.num_edge_types
    assert data.num_nodes == {"node": entity.num_nodes}


# --------------------------------------------------------------------------------------------------- times


def leaky_tables(orders: int = 60) -> HeteroDataset:
    """Orders whose label stands in an event's row that comes a day after the order, so that no order may see it."""
    y = np.random.default_rng(3).integers(0, 2, orders)
    day = np.arange(orders)
    tables = {
        "orders": {"id": day, "day": day, "paid": y, "size": np.ones(orders)},
        "events": {"order": day, "day": day + 1, "kind": [("open", "paid")[k] for k in y]},
        "lines": {"order": np.repeat(day, 2), "n": np.arange(2 * orders) % 5},
    }
    references = [("events", "order", "orders"), ("lines", "order", "orders")]
    label = Label("orders", "paid", 30, 40)
    times = {"orders": "day", "events": "day"}
    return from_tables(tables, {"orders": "id"}, references, times, label=label)


def test_a_label_of_later_rows_does_not_leak(tmp_path, capsys):
    """Without times the test accuracy of this data is 100 %, with them that of guessing."""
    data = leaky_tables()
    trainer = SampledTrainer(resolve("tables", "sage", **{**TINY, "fan_outs": (4,), "batch_size": 16}), data)
    seeds = {"orders": jnp.asarray(data.splits["test"]["orders"][:15], jnp.int32)}
    seen = jax.jit(lambda inputs: trainer._neighbourhood(jax.random.key(0), inputs, seeds)[1])(trainer.inputs)
    assert seen["lines"].tolist() == list(range(80, 110)) and (seen["events"] < 0).all()
    with pytest.raises(ValueError, match="inference by layers must be of data without times"):
        trainer.accuracy(None)
    data.save(tmp_path)
    assert cli.main(["--sampled", "--data", str(tmp_path), "--inference", "layers"]) == 2
    assert "--inference must be sampled where edges have times" in capsys.readouterr().err


READ_BY_SAMPLES = {
    "edges": lambda p: p.topology.num_edges[WRITES] == 180,
    "features": lambda p: "author" in p.features,
    "labels": lambda p: p.num_classes == 3,
    "num_classes": lambda p: p.num_classes == 3,
    "splits": lambda p: len(p.splits["train"]["paper"]) == 30,
    "node_times": lambda p: p.times["paper"].tolist() == list(range(60)),
    "edge_times": lambda p: p.topology.lists[p.topology.relations[0].lists].times is not None,
    "edge_weights": lambda p: p.topology.lists[p.topology.relations[0].lists].weights is not None,
}
FILLED = {
    "node_times": {"paper": np.arange(60)},
    "edge_times": {WRITES: np.arange(180)},
    "edge_weights": {WRITES: np.arange(180.0)},
    "edge_features": {WRITES: np.ones((180, 2))},
    "target_relations": (WRITES,),
    "valid_edges": {WRITES: ([0], [0])},
    "test_edges": {WRITES: ([0], [0])},
}


@pytest.mark.parametrize("field", [field.name for field in dataclasses.fields(HeteroDataset)])
def test_each_field_of_a_data_set_is_read_or_refused(field):
    """A field that is new is refused until somebody reads it, and this test says where."""
    if field in DESCRIPTIVE:
        return
    data = community_graph()
    data = dataclasses.replace(data, **{name: FILLED[name] for name in {"node_times": ("edge_times",)}.get(field, ())})
    data = dataclasses.replace(data, **{field: FILLED.get(field, getattr(data, field))})
    if field == "edge_times":
        with pytest.raises(ValueError, match="must have node_times of 'paper'"):
            prepare(data, resolve("communities", **TINY))
        data = dataclasses.replace(data, node_times=FILLED["node_times"])
    settings = resolve("communities", **TINY)
    if field in LINK_TASK:
        prepare(data, settings)  # another task's
        LinkGraph.of(dataclasses.replace(data, target_relations=(WRITES,)))
        return
    if field in READ_BY_SAMPLES:
        assert READ_BY_SAMPLES[field](prepare(data, settings))
    else:
        with pytest.raises(ValueError, match=f"mini-batches must get a data set without {field}"):
            prepare(data, settings)
    if field in ("edge_times", "edge_weights", "edge_features"):
        with pytest.raises(ValueError, match=rf"whole graph \(full_batch\) must get a data set without {field}"):
            prepare(data, resolve("communities", full_batch=True, **TINY))
    if field not in ("edges", "features", *NODE_TASK):
        own = dataclasses.replace(community_graph(), target_relations=(WRITES,), **{field: FILLED[field]})
        with pytest.raises(ValueError, match=f"link prediction must get a data set without {field}"):
            LinkGraph.of(own)


def test_relations_that_are_sampled_together_keep_times_and_weights():
    data = one_type_of(community_graph())
    first, second = data.edges
    data = dataclasses.replace(
        data,
        node_times={"node": np.arange(94)},
        edge_times={first: np.arange(180)},
        edge_weights={second: np.full(60, 0.5)},
    )
    found = prepare(data, resolve("communities", **{**TINY, "joint": True, "reverse": False}))
    (lists,) = found.topology.lists
    given = np.concatenate([np.arange(180), np.full(60, -(2**31))])
    assert as_numpy(lists.times).tolist() == given[as_numpy(lists.edge_ids)].tolist()
    assert lists.weights is not None


def test_reverses_that_are_there_are_not_added_again():
    data = community_graph().with_reverse()
    assert prepare(data, resolve("communities", **TINY)).data.relations == data.relations
