"""The task "samples": layers and places of tables, times of edges, and which fields of a data set are read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset, Label, from_tables
from dejax.datasets._hetero import DESCRIPTIVE, LINK_TASK, NODE_TASK, OF_TABLES
from dejax.minibatch.topology.hetero_topology import as_numpy
from dejax.training import Trainer, resolve
from dejax.training.command import cli
from dejax.training.tasks import models
from dejax.training.tasks.data import one_type
from dejax.training.tasks.link_graph import LinkGraph
from dejax.training.tasks.prepared import prepare
from tests.training.graphs import WRITES, community_graph, links, one_type_of

TINY = {"task": "samples", "hidden": 8, "heads": 2, "batch_size": 8, "fan_outs": (4, 2), "epochs": 6, "lr": 0.05}


def trained(data, model="rgcn", **changes):
    trainer = Trainer(resolve("communities", model, **{**TINY, **changes}), data)
    return trainer, trainer.train(trainer.init(0), trainer.settings.epochs)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"model": "rgat", "place": "split", "device_bytes": 200},
        {"model": "hgt", "place": "device", "feature_dtype": "bfloat16"},
        {"model": "sage", "feature_dtype": "float8_e4m3fn", "dropout": 0.1},
        {"model": "rgcn", "full_batch": True, "epochs": 30},
    ],
    ids=lambda changes: changes["model"],
)
def test_layers_and_places(changes):
    trainer, state = trained(community_graph(), **changes)
    assert trainer.final(state)["test"] >= 0.8
    assert int(state.lost) == 0 and int(state.skipped) == 0


@pytest.mark.slow
@pytest.mark.parametrize("model", ["rgcn", "rgat", "sage"])
def test_relations_sampled_together(model):
    """The default of graphs with one node type, such as the standard library's."""
    trainer, state = trained(one_type_of(community_graph()), model, joint=True, fan_outs=(8, 8))
    assert trainer.final(state)["test"] >= 0.8
    assert int(state.lost) == 0


@pytest.mark.slow
def test_offload_gives_the_same_numbers(monkeypatch):
    monkeypatch.setattr(models, "OFFLOAD_BYTES", 1)
    data = community_graph()
    _, plain = trained(data, epochs=2, dropout=0.2, batch_size=16)
    _, offloaded = trained(data, epochs=2, dropout=0.2, batch_size=16, offload=True)
    for a, b in zip(jax.tree.leaves(plain.params), jax.tree.leaves(offloaded.params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.slow
def test_layerwise_inference_equals_the_full_graph():
    """The same parameters: layer by layer in batches, and one call on the whole graph."""
    trainer, state = trained(community_graph(), "rgat", full_batch=True, epochs=1)
    task = trainer.task
    ids = {kind: jnp.arange(count) for kind, count in task.prepared.topology.num_nodes.items()}
    x = (state.embeddings | task.prepared.features).gather(ids)
    whole = trainer.merged(state.params)(task.world.data["graph"], x)
    found = task.outputs(trainer, state)["paper"].numpy()
    np.testing.assert_allclose(found, whole["paper"], atol=1e-5)


@pytest.mark.slow
@pytest.mark.devices(2)
def test_two_devices_have_the_numbers_of_one_and_go_on_on_one():
    settings = resolve("communities", "sage", **{**TINY, "hidden": 4, "fan_outs": (3,), "parts": 2, "pipeline": 2})

    def run(devices, epochs, plain=None):
        trainer = Trainer(settings, community_graph(), devices=devices)
        state = trainer.train(trainer.init(0) if plain is None else trainer.imported(plain), epochs)
        return trainer, state, jax.tree.map(np.array, trainer.exported(state))

    trainer, two, exported = run(2, 1)
    one_trainer, one, want = run(1, 1)
    assert int(want["step"]) == 4 and want["sums"]["loss"] > 0
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5), exported, want)
    further = run(1, 2)[2]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-4), run(1, 2, exported)[2], further)
    assert trainer.final(two, inference="sampled") == one_trainer.final(one, inference="sampled")


def _turned(data: HeteroDataset, *names: str) -> HeteroDataset:
    """The data set with fields in the reverse order."""
    turned = {name: dict(reversed(getattr(data, name).items())) for name in names}
    return dataclasses.replace(data, **turned, check=False)


@pytest.mark.parametrize("task", ["samples", "links"])
def test_a_state_is_of_data_whose_relations_and_types_are_numbered_alike(task):
    if task == "samples":
        data, changes = community_graph(), TINY | {"full_batch": True}  # no sample is compiled
    else:
        data, changes = links(), {"task": "links", "model": "embeddings", "hidden": 8}
    of = lambda data: Trainer(resolve("mine", **changes), data).task.layout_of_data  # noqa: E731
    assert of(data) == of(dataclasses.replace(data, check=False))
    assert len({of(data), of(_turned(data, "edges")), of(_turned(data, "num_nodes"))}) == 3
    names = {kind: tuple(f"{kind} {n}" for n in range(count)) for kind, count in data.num_nodes.items()}
    named = dataclasses.replace(data, node_names=names, features={}, check=False)
    others = {kind: own[::-1] for kind, own in names.items()}
    assert of(named) != of(dataclasses.replace(named, node_names=others, check=False))


def test_a_trainer_refuses_a_state_of_data_that_are_numbered_otherwise():
    """All arrays have equal shapes: the weights of one relation would be those of another."""
    data = community_graph()
    settings = resolve("mine", **TINY, full_batch=True)
    trainer, other = (Trainer(settings, some) for some in (data, _turned(data, "edges")))
    plain = trainer.exported(trainer.init(0))
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, other.exported(other.init(0)))
    trainer.imported(plain)
    with pytest.raises(ValueError, match="must be of the data of this trainer, got one of data with other types"):
        other.imported(plain)


def test_a_run_is_evaluated_on_data_that_are_numbered_alike(tmp_path, capsys):
    data = community_graph()
    data.save(tmp_path / "data")
    _turned(data, "edges").save(tmp_path / "turned")
    words = ["--sampled", "--data", str(tmp_path / "data"), "--hidden", "8", "--full-batch", "--epochs", "1"]
    assert cli.main([*words, "--seeds", "1", "--no-baseline", "--out", str(tmp_path / "run")]) == 0
    evaluate = ["--evaluate", str(tmp_path / "run"), "--data"]
    assert cli.main([*evaluate, str(tmp_path / "data")]) == 0
    assert cli.main([*evaluate, str(tmp_path / "turned")]) == 2
    assert "trained on, got other types, relations or classes" in capsys.readouterr().err


def test_an_epoch_has_each_training_node_once():
    trainer = Trainer(resolve("communities", **{**TINY, "fan_outs": (2,)}), community_graph())
    one, other = (trainer.task.order(0, epoch)["ids"]["paper"] for epoch in (3, 4))
    assert sorted(one[one >= 0]) == sorted(trainer.task.splits["train"]["paper"])
    assert one.shape == (trainer.task.steps_per_epoch, 8) and not np.array_equal(one, other)


def test_one_type_keeps_relations():
    from tests.datasets.test_dataset import make

    entity = make()
    data = one_type(entity)
    assert sum(data.num_edges.values()) == entity.num_edges and len(data.edges) == entity.num_edge_types
    assert data.num_nodes == {"node": entity.num_nodes}


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
    trainer = Trainer(resolve("tables", "sage", **{**TINY, "fan_outs": (4,), "batch_size": 16}), data)
    seeds = trainer.task.with_times({"orders": np.asarray(data.splits["test"]["orders"][:15], np.int32)})
    topology = trainer.world.topology
    seen = jax.jit(lambda topology: trainer.task.sample(jax.random.key(0), topology, seeds).node_ids)(topology)
    assert seen["lines"].tolist() == list(range(80, 110)) and (seen["events"] < 0).all()
    with pytest.raises(ValueError, match="inference by layers must be of data without times"):
        trainer.task.accuracy(trainer, None)
    data.save(tmp_path)
    assert cli.main(["--sampled", "--data", str(tmp_path), "--inference", "layers"]) == 2
    assert "--inference must be sampled if edges have times" in capsys.readouterr().err


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
    if field in (*DESCRIPTIVE, *OF_TABLES):  # `features` has what encoders of columns would read
        return
    data = community_graph()
    data = dataclasses.replace(data, **{name: FILLED[name] for name in {"node_times": ("edge_times",)}.get(field, ())})
    data = dataclasses.replace(data, **{field: FILLED.get(field, getattr(data, field))})
    if field == "edge_times":
        with pytest.raises(ValueError, match="node_times must have the times of 'paper'"):
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
