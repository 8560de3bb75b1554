"""EntityDataset: validation, derived values, texts, files; and the imports of the package."""

import io

import numpy as np
import pytest

from dejax.datasets import EntityDataset
from dejax.datasets.files._work import Progress

FIELDS = {
    "name": "tiny",
    "senders": np.array([0, 1, 2]),
    "receivers": np.array([1, 2, 4]),
    "edge_type": np.array([0, 0, 1]),
    "node_type": np.array([0, 0, 1, 1, 1]),
    "num_nodes": 5,
    "num_edge_types": 2,
    "num_node_types": 2,
    "edge_type_names": ("knows", "wrote"),
    "node_type_names": ("person", "work"),
    "features": None,
    "labels": np.array([0, 1, 1, -1, 1]),
    "train_nodes": np.array([0, 1, 2]),
    "valid_nodes": np.zeros(0, np.int32),
    "test_nodes": np.array([4]),
    "num_classes": 2,
    "class_names": ("red", "blue"),
    "description": "made up",
}


def make(**changes) -> EntityDataset:
    return EntityDataset(**{**FIELDS, **changes})


def test_a_graph_without_a_task():
    none = np.zeros(0, np.int32)
    data = make(labels=np.full(5, -1), train_nodes=none, test_nodes=none, num_classes=0, class_names=())
    assert np.isnan(data.majority_accuracy)
    assert "0 classes" in data.summary()


def test_no_edges():
    none = np.zeros(0, np.int32)
    data = make(senders=none, receivers=none, edge_type=none)
    assert data.num_edges == 0
    assert "0 edges" in data.summary()


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"senders": np.array([0, 1, 5])}, IndexError, r"senders\[2\] must be from 0 to num_nodes - 1 = 4, got 5"),
        ({"receivers": np.array([0, -1, 2])}, IndexError, r"receivers\[1\] must be .*, got -1"),
        (
            {"edge_type": np.array([0, 0, 2])},
            IndexError,
            r"edge_type\[2\] must be from 0 to num_edge_types - 1 = 1, got 2",
        ),
        ({"node_type": np.array([0, 0, 1, 1, 2])}, IndexError, r"node_type\[4\]"),
        ({"labels": np.array([0, 1, 1, -1, 2])}, IndexError, r"labels\[4\] must be .*, got 2"),
        ({"labels": np.array([0, 1, 1, -2, 1])}, IndexError, r"labels\[3\] must be .*, got -2"),
        ({"test_nodes": np.array([9])}, IndexError, r"test_nodes\[0\] must be .*, got 9"),
        ({"senders": np.array([0.0, 1.0, 2.0])}, TypeError, "senders must have an integer dtype, got float64"),
        ({"senders": np.array([[0, 1, 2]])}, ValueError, "senders must have one axis"),
        ({"senders": np.array([0, 1, 2**40])}, ValueError, "senders must fit int32"),
        ({"receivers": np.array([0, 1])}, ValueError, "receivers must have one entry for each edge"),
        ({"edge_type": np.array([0])}, ValueError, "edge_type must have one entry for each edge"),
        ({"node_type": np.array([0])}, ValueError, "node_type must have one entry for each of the 5 nodes"),
        ({"edge_type_names": ("knows",)}, ValueError, "edge_type_names must have 2 entries, got 1"),
        ({"class_names": ()}, ValueError, "class_names must have 2 entries"),
        ({"features": np.ones((4, 2))}, ValueError, r"features must have shape \[num_nodes, d\]"),
        ({"test_nodes": np.array([3])}, ValueError, "got node 3 without one"),
        ({"test_nodes": np.array([2])}, ValueError, "must be distinct, and in no other split"),
        ({"test_nodes": np.array([4, 4])}, ValueError, "must be distinct, and in no other split"),
    ],
)
def test_validation_names_the_field(changes, error, text):
    with pytest.raises(error, match=text):
        make(**changes)


def test_texts():
    data = make()
    assert repr(data) == "EntityDataset('tiny', nodes=5, edges=3, edge_types=2, node_types=2, classes=2)"
    summary = data.summary()
    for part in ("5 nodes of 2 types", "2 edges  knows", "3 nodes  work", "features: none"):
        assert part in summary
    lines = data.split_summary().splitlines()
    assert lines[1].split() == ["train", "3", "33.3%", "66.7%"]
    assert lines[2].split() == ["valid", "0", "-", "-"]
    assert "in 1 more types" in data.summary(rows=1)


def test_restore_of_a_damaged_file(tmp_path):
    path = tmp_path / "tiny.npz"
    make().save(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="must be a file that EntityDataset.save wrote"):
        EntityDataset.restore(path)
    with pytest.raises(FileNotFoundError):
        EntityDataset.restore(tmp_path / "none.npz")


def test_progress_draws_on_a_terminal_only():
    stream = io.StringIO()
    with Progress("work", 4, unit="steps", stream=stream) as bar:
        bar.update(4)
    assert stream.getvalue() == ""  # no terminal
    with Progress("work", 4, unit="steps", enabled=True, stream=stream) as bar:
        bar.update(1)
        bar.update(3)
    last = stream.getvalue().rsplit("\r", 1)[1]
    assert "100%" in last and "4/4 steps" in last and last.endswith("\n")
    with Progress("read", enabled=True, unit="B", stream=stream) as bar:
        bar.update(3 << 20)
    assert "3.0 MiB" in stream.getvalue().rsplit("\r", 1)[1]
