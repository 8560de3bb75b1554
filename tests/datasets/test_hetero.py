"""`HeteroDataset`: checks, conversions, and the folder that it is saved in."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from dejax.datasets import HeteroDataset, load_stdlib_links

TINY = {
    "name": "tiny",
    "num_nodes": {"a": 3, "b": 2, "none": 0},
    "edges": {
        ("a", "to", "b"): ([0, 2, 2], [1, 0, 1]),
        ("a", "likes", "a"): (np.array([0, 1, 1], np.int64), np.array([1, 1, 0], np.int64)),
        ("none", "of", "b"): ([], []),
    },
    "features": {"a": np.arange(6, dtype=np.float16).reshape(3, 2)},
    "labels": {"a": np.array([0, -1, 1], np.int32)},
    "num_classes": {"a": 2},
    "splits": {"train": {"a": np.array([0])}, "valid": {"a": np.array([2])}, "test": {"a": np.array([], np.int64)}},
    "valid_edges": {("a", "to", "b"): ([1], [1])},
    "target_relations": (("a", "to", "b"),),
    "node_times": {"b": np.array([1.5, 2.5])},
    "edge_times": {("a", "to", "b"): np.array([3, 1, 2])},
    "node_names": {"b": ("x", "y")},
    "description": "a few nodes",
}


def changed(**fields) -> dict:
    return {**TINY, **fields}


def equal(one: HeteroDataset, other: HeteroDataset) -> None:
    for field in dataclasses.fields(HeteroDataset):
        a, b = getattr(one, field.name), getattr(other, field.name)
        flat_a, flat_b = _leaves(a), _leaves(b)
        assert [path for path, _ in flat_a] == [path for path, _ in flat_b], field.name
        for (_, x), (_, y) in zip(flat_a, flat_b, strict=True):
            np.testing.assert_array_equal(x, y)
            assert np.asarray(x).dtype == np.asarray(y).dtype


def _leaves(value, path=()):
    if isinstance(value, dict):
        return [leaf for key, x in sorted(value.items()) for leaf in _leaves(x, (*path, key))]
    if isinstance(value, tuple):
        return [leaf for key, x in enumerate(value) for leaf in _leaves(x, (*path, key))]
    return [(path, value)]


def test_symmetric_relations_keep_times_and_weights() -> None:
    likes = ("a", "likes", "a")
    values = {"edge_times": {likes: np.array([7, 8, 9])}, "edge_weights": {likes: np.array([0.5, 2.0, 3.0])}}
    data = HeteroDataset("x", {"a": 2}, {likes: ([0, 1, 1], [1, 1, 0])}, **values)
    found = data.with_reverse(symmetric=["likes"])
    assert [ends.tolist() for ends in found.edges[likes]] == [[0, 1, 1, 0, 0, 1], [1, 0, 0, 1, 0, 1]]
    assert found.edge_times[likes].tolist() == [7, 9, 7, 9, -(2**31), -(2**31)]
    assert found.edge_weights[likes].tolist() == [0.5, 3.0, 0.5, 3.0, 1.0, 1.0]
    with pytest.raises(ValueError, match="must name relations without edge_features, got 'likes'"):
        dataclasses.replace(data, edge_features={likes: np.zeros((3, 1))}).with_reverse(symmetric=["likes"])


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "float16"])
def test_dtypes_are_kept_on_disk(tmp_path: Path, name: str) -> None:
    rows = np.arange(6.0).reshape(3, 2).astype(jnp.dtype(name))
    HeteroDataset("x", {"a": 3}, {}, features={"a": rows}).save(tmp_path / "here")
    found = HeteroDataset.open(tmp_path / "here").features["a"]
    assert found.dtype == rows.dtype and isinstance(found, np.memmap)
    np.testing.assert_array_equal(found.astype(np.float32), rows.astype(np.float32))


def test_files_without_the_name_of_their_dtype_are_refused(tmp_path: Path) -> None:
    HeteroDataset("x", {"a": 3}, {}, features={"a": np.zeros((3, 2), np.float32)}).save(tmp_path)
    np.save(tmp_path / "0.npy", np.zeros((3, 2), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"0.npy must name its dtype, got \|V2"):
        HeteroDataset.open(tmp_path)


BAD = {
    "num_nodes must be counts": changed(num_nodes={"a": -1}),
    r"senders of \('a', 'to', 'b'\) must be from 0 to 2": changed(edges={("a", "to", "b"): ([3], [0])}),
    r"receivers of .* must be from 0 to 1": changed(edges={("a", "to", "b"): ([0], [-1])}),
    "must name types of num_nodes, 'a', 'b', 'none'; got 'c'": changed(edges={("a", "to", "c"): ([0], [0])}),
    "must be integers .edges.": changed(edges={("a", "to", "b"): ([0.5], [0])}),
    "as many receivers as senders": changed(edges={("a", "to", "b"): ([0, 1], [0])}),
    "must be .senders, receivers., got 3 arrays": changed(edges={("a", "to", "b"): ([0], [0], [0])}),
    "must be named .source type, name": changed(edges={"to": ([0], [0])}),
    "each of the 3 nodes of type 'a', got 2": changed(features={"a": np.zeros((2, 2))}),
    "features must name types": changed(features={"c": np.zeros((2, 2))}),
    "that has labels, got none for 'a'": changed(num_classes={}),
    "labels of 'a' must be from -1 to 1": changed(labels={"a": np.array([0, 2, 1])}),
    "nodes of splits must have labels, got node 1": changed(splits={"train": {"a": np.array([1])}}),
    "splits must be named": changed(splits={"training": {}}),
    "splits must name types that have labels": changed(splits={"train": {"b": np.array([0])}}),
    "edge_times must be given for relations of `edges`": changed(edge_times={("a", "to", "b"): np.zeros(2)}),
    "must have every relation of target_relations": changed(test_edges={("b", "to", "b"): ([0], [0])}),
}


@pytest.mark.parametrize("message", BAD)
def test_bad_input(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HeteroDataset(**BAD[message])


def test_links_of_the_standard_library(tmp_path) -> None:
    package = tmp_path / "lib"
    package.mkdir()
    lines = [f"def f{i}():\n    return f{(3 * i + 1) % 40}() + g{i % 5}(A())\n" for i in range(40)]
    lines += [f"def g{i}(x):\n    return x\n" for i in range(5)]
    (package / "queue.py").write_text("class A:\n    def run(self):\n        return g0(self)\n\n" + "\n".join(lines))
    data = load_stdlib_links(package, cache=tmp_path / "cache")
    assert data.target_relations == (("function", "calls", "class"), ("function", "calls", "function"))
    everything = set()
    for edges in (data.edges, data.valid_edges, data.test_edges):
        senders, receivers = edges["function", "calls", "function"]
        pairs = set(zip(senders.tolist(), receivers.tolist(), strict=True))
        assert len(pairs) == len(senders) and not pairs & everything
        everything |= pairs
    assert len(everything) == 81 and len(data.edges["function", "calls", "function"][0]) == 65
    assert "module" not in data.features and data.features["function"].shape[1] == 64
    again = load_stdlib_links(package, cache=tmp_path / "cache")
    equal(again, data)
    with pytest.raises(ValueError, match="relation must be one of"):
        load_stdlib_links(package, cache=tmp_path / "cache", relation="knows")


def test_a_saved_data_set_may_be_read_by_whom_its_folder_may(tmp_path):
    """And numbers of numpy are counts as others are."""
    (tmp_path / "plain").mkdir()
    for _ in range(2):
        HeteroDataset("x", {"a": np.int64(3)}, {}).save(tmp_path / "saved")
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "saved"]
    assert HeteroDataset.open(tmp_path / "saved").num_nodes == {"a": 3}
    assert isinstance(HeteroDataset.open(tmp_path / "saved").num_nodes["a"], int)
