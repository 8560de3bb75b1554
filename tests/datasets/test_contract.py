"""What `dejax.datasets` promises: data sets as numpy arrays, their graphs and files, and tables without the future."""

import dataclasses
import datetime
import json
import subprocess
import sys

import numpy as np
import pytest

from dejax.datasets import EntityDataset, HeteroDataset, Label, from_tables
from tests.datasets.test_dataset import make
from tests.datasets.test_hetero import TINY, equal
from tests.datasets.test_tables import KEYS, ORDERS, PLACED, TABLES


def test_fields_and_derived_values():
    data = make(features=np.ones((5, 3)))
    for name in ("senders", "receivers", "edge_type", "node_type", "labels", "train_nodes", "test_nodes"):
        assert getattr(data, name).dtype == np.int32
    assert data.features.dtype == np.float32
    assert data.num_edges == 3
    np.testing.assert_array_equal(data.train_labels, [0, 1, 1])
    np.testing.assert_array_equal(data.test_labels, [1])
    assert data.valid_labels.shape == (0,)
    assert data.majority_accuracy == 1.0  # most training nodes are blue, and the test node is blue
    with pytest.raises(dataclasses.FrozenInstanceError):
        data.name = "other"


@pytest.mark.parametrize("features", [None, np.arange(10, dtype=np.float32).reshape(5, 2)])
def test_save_and_restore(tmp_path, features):
    data = make(features=features)
    path = tmp_path / "deep" / "tiny.npz"
    data.save(path)
    again = EntityDataset.restore(path)
    for field in dataclasses.fields(EntityDataset):
        expected, actual = getattr(data, field.name), getattr(again, field.name)
        if isinstance(expected, np.ndarray):
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)
        else:
            assert actual == expected and type(actual) is type(expected)
    assert [entry.name for entry in path.parent.iterdir()] == ["tiny.npz"]  # no temporary file is left


def test_graph():
    data = make()
    graph = data.graph(add_reverse=True, add_self_loops=True)
    assert (graph.num_nodes, graph.num_edge_types, graph.num_edges) == (5, 5, 3 + 3 + 5)
    graph = data.graph(add_reverse=False)
    senders, receivers, edge_type = graph.to_edges()
    np.testing.assert_array_equal(senders, data.senders)
    np.testing.assert_array_equal(receivers, data.receivers)
    np.testing.assert_array_equal(edge_type, data.edge_type)
    assert graph.edge_type_names == data.edge_type_names and graph.node_type_names == data.node_type_names


def test_importing_the_package_imports_neither_jax_nor_rdflib():
    code = "import sys, dejax.datasets; print([m for m in ('jax', 'rdflib', 'urllib.request') if m in sys.modules])"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_a_saved_dataset_is_mapped(tmp_path) -> None:
    data = HeteroDataset(**TINY)
    for _ in range(2):  # the second one replaces the first
        data.save(tmp_path / "here")
        opened = HeteroDataset.open(tmp_path / "here", check=True)
        equal(opened, data)
        assert isinstance(opened.edges["a", "to", "b"][0], np.memmap)
    assert [path.name for path in tmp_path.iterdir()] == ["here"]
    assert "3  a -> to -> b" in data.summary() and "1  train nodes of a" in data.summary()
    (tmp_path / "here" / "0.npy").write_bytes((tmp_path / "here" / "0.npy").read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"0.npy must be a complete .npy file"):
        HeteroDataset.open(tmp_path / "here")
    (tmp_path / "here" / "0.npy").unlink()
    with pytest.raises(FileNotFoundError, match=r"0.npy"):
        HeteroDataset.open(tmp_path / "here")
    meta = tmp_path / "here" / "dataset.json"
    meta.write_text(json.dumps({"format": 99}))
    with pytest.raises(ValueError, match="must be a HeteroDataset of format"):
        HeteroDataset.open(tmp_path / "here")
    with pytest.raises(FileExistsError, match="new, empty or a saved"):
        data.save(tmp_path)


def test_reverse_and_symmetric_relations() -> None:
    data = HeteroDataset(**TINY).with_reverse(symmetric=["likes"])
    assert data.relations == (("a", "to", "b"), ("a", "likes", "a"), ("none", "of", "b"),
                              ("b", "rev_to", "a"), ("b", "rev_of", "none"))  # fmt: skip
    assert data.edges["b", "rev_to", "a"][0] is data.edges["a", "to", "b"][1]
    assert data.edge_times["b", "rev_to", "a"].tolist() == [3, 1, 2]
    pairs = sorted(zip(*(ends.tolist() for ends in data.edges["a", "likes", "a"]), strict=True))
    assert pairs == [(0, 0), (0, 1), (0, 1), (1, 0), (1, 0), (1, 1), (2, 2)]
    with pytest.raises(ValueError, match="between nodes of one type, got 'to'"):
        data.with_reverse(symmetric=["to"])
    with pytest.raises(ValueError, match="which exists already"):
        data.with_reverse()


def test_from_entity() -> None:
    data = EntityDataset(
        name="e",
        senders=[0, 1, 2, 3, 3],
        receivers=[3, 0, 1, 4, 2],
        edge_type=[0, 1, 1, 0, 1],
        node_type=[0, 1, 0, 1, 1],
        num_nodes=5,
        num_edge_types=2,
        num_node_types=2,
        edge_type_names=("p", "q"),
        node_type_names=("x", "y"),
        features=np.array([[0.0], [1], [0], [2], [3]]),
        labels=[0, 1, 1, -1, 0],
        train_nodes=[0, 4],
        valid_nodes=[1],
        test_nodes=[2],
        num_classes=2,
        class_names=("no", "yes"),
    )
    found = HeteroDataset.from_entity(data)
    edges = {r: list(zip(*(ends.tolist() for ends in pair), strict=True)) for r, pair in found.edges.items()}
    assert edges == {
        ("x", "p", "y"): [(0, 1)],
        ("x", "q", "y"): [(1, 0)],
        ("y", "p", "y"): [(1, 2)],
        ("y", "q", "x"): [(0, 0), (1, 1)],
    }
    assert found.num_nodes == {"x": 2, "y": 3} and list(found.features) == ["y"]
    assert found.labels["y"].tolist() == [1, -1, 0] and found.splits["train"]["y"].tolist() == [2]
    HeteroDataset(**{f.name: getattr(found, f.name) for f in dataclasses.fields(found)})  # with all checks


def test_edges_times_and_features() -> None:
    data = from_tables(TABLES, **KEYS)
    assert data.num_nodes == {"users": 3, "orders": 4}
    assert [side.tolist() for side in data.edges[PLACED]] == [[0, 1, 3], [1, 0, 1]]
    assert [side.tolist() for side in data.edges["users", "rev_user", "orders"]] == [[1, 0, 1], [0, 1, 3]]
    seconds = np.array(["2024-01-01", "2024-01-02", "2024-01-04"], "datetime64[s]").astype(np.int64)
    assert data.edge_times[PLACED].tolist() == seconds.tolist()
    assert data.edge_times["users", "rev_user", "orders"].tolist() == seconds.tolist()
    users = data.features["users"]  # age, whether it is missing, and the categories "a b" and "c"
    np.testing.assert_allclose(users, [[-1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 0, 0]])
    assert data.features["orders"].shape == (4, 1 + 1 + 3)
    np.testing.assert_allclose(data.features["orders"][:, 0].mean(), 0, atol=1e-6)


def test_a_label_splits_by_time_and_features_do_not_know_the_future() -> None:
    moment = datetime.datetime(2024, 1, 3)
    label = Label("orders", "paid", valid_from=moment, test_from=datetime.date(2024, 1, 4))
    data = from_tables(TABLES, **KEYS, label=label)
    assert {k: v["orders"].tolist() for k, v in data.splits.items()} == {"train": [0, 1], "valid": [2], "test": [3]}
    assert data.labels["orders"].tolist() == [1, 0, 1, 1] and data.num_classes == {"orders": 2}
    # Price: mean 2 and deviation 1 of the first two. The state "late" is not known before the third.
    np.testing.assert_allclose(data.features["orders"], [[-1, 1, 0], [1, 0, 1], [98, 0, 0], [198, 1, 0]])
    changed = {**TABLES, "orders": {**ORDERS, "price": [1.0, 3.0, -5.0, 7.0]}}
    again = from_tables(changed, **KEYS, label=label)
    np.testing.assert_array_equal(again.features["orders"][:2], data.features["orders"][:2])
    text = from_tables(TABLES, **KEYS, label=Label("users", "bio"))
    assert text.labels["users"].tolist() == [0, 1, -1] and text.splits == {}
    with pytest.raises(ValueError, match="time_columns a column of the table 'users'"):
        from_tables(TABLES, **KEYS, label=Label("users", "bio", moment, moment))
