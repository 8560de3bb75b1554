"""ogbn-mag from a tiny made-up folder in the layout of its archive."""

import gzip

import numpy as np
import pytest

from dejax.datasets import load, load_mag, load_mag_hetero

COUNTS = {"paper": 4, "author": 3, "institution": 1, "field_of_study": 2}
EDGES = {
    ("paper", "cites", "paper"): [(0, 1), (1, 3)],
    ("author", "writes", "paper"): [(0, 0), (1, 0), (2, 3)],
    ("author", "affiliated_with", "institution"): [(0, 0)],
    ("paper", "has_topic", "field_of_study"): [(0, 1), (2, 0)],
}


def put(path, rows) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress("".join(",".join(map(str, row)) + "\n" for row in rows).encode()))


@pytest.fixture
def folder(tmp_path):
    raw = tmp_path / "mag" / "raw"
    put(raw / "num-node-dict.csv.gz", [list(COUNTS), list(COUNTS.values())])
    put(raw / "triplet-type-list.csv.gz", EDGES)
    for triplet, edges in EDGES.items():
        put(raw / "relations" / "___".join(triplet) / "edge.csv.gz", edges)
    put(raw / "node-feat" / "paper" / "node-feat.csv.gz", [(i + 0.5, -i, 1e-3 * i) for i in range(4)])
    put(raw / "node-label" / "paper" / "node-label.csv.gz", [(2,), (0,), (1,), (2,)])
    split = tmp_path / "mag" / "split" / "time" / "paper"
    put(split / "train.csv.gz", [(0,), (1,)])
    put(split / "valid.csv.gz", [(3,)])
    put(split / "test.csv.gz", [(2,)])
    return tmp_path


def test_load_gives_what_load_mag_gives(folder, tmp_path):
    by_name, by_function = load("ogbn-mag", folder, cache=tmp_path / "a"), load_mag(folder, cache=tmp_path / "b")
    for array in ("senders", "receivers", "edge_type", "node_type", "features", "labels", "train_nodes", "test_nodes"):
        np.testing.assert_array_equal(getattr(by_name, array), getattr(by_function, array))


def test_nodes_edges_labels_features(folder, tmp_path):
    data = load("ogbn-mag", folder, cache=tmp_path / "cache")
    assert data.node_type_names == ("author", "field_of_study", "institution", "paper")
    assert np.bincount(data.node_type).tolist() == [3, 2, 1, 4]
    assert data.edge_type_names == (
        "author/affiliated_with/institution",
        "author/writes/paper",
        "paper/cites/paper",
        "paper/has_topic/field_of_study",
    )
    # authors are 0..2, fields 3..4, the institution 5, papers 6..9
    edges = list(zip(data.senders.tolist(), data.edge_type.tolist(), data.receivers.tolist(), strict=True))
    assert edges == [(0, 0, 5), (0, 1, 6), (1, 1, 6), (2, 1, 9), (6, 2, 7), (7, 2, 9), (6, 3, 4), (8, 3, 3)]
    assert data.labels.tolist() == [-1] * 6 + [2, 0, 1, 2]
    assert (data.train_nodes.tolist(), data.valid_nodes.tolist(), data.test_nodes.tolist()) == ([6, 7], [9], [8])
    assert data.num_classes == 3
    assert data.features.dtype == np.float32
    np.testing.assert_allclose(data.features[6:], [(i + 0.5, -i, 1e-3 * i) for i in range(4)])
    assert not data.features[:6].any()


def test_without_features_from_the_variable_and_from_the_cache(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("DEJAX_DATA", str(folder))
    data = load("ogbn-mag", use_features=False, cache=tmp_path / "cache", progress=True)
    assert data.features is None and data.num_edges == 8
    monkeypatch.setattr("dejax.datasets.graphs.mag._read", lambda *args: pytest.fail("read again"))
    assert load("ogbn-mag", use_features=False, cache=tmp_path / "cache").num_edges == 8


def test_a_relation_without_edges(folder, tmp_path):
    put(folder / "mag" / "raw" / "relations" / "paper___cites___paper" / "edge.csv.gz", [])
    assert load("ogbn-mag", folder, cache=tmp_path / "cache").num_edges == 6


@pytest.mark.parametrize(
    ("path", "rows", "text"),
    [
        (
            "raw/relations/paper___cites___paper/edge.csv.gz",
            [(0, 4)],
            "column 1 must have numbers of paper nodes, from 0 to 3",
        ),
        ("raw/relations/paper___cites___paper/edge.csv.gz", [(0, 1, 2)], "must have 2 columns, got 3"),
        ("raw/relations/paper___cites___paper/edge.csv.gz", [("a", "b")], "must be a table of numbers"),
        ("raw/node-label/paper/node-label.csv.gz", [(1,)], "must have 4 rows, one for each paper, got 1"),
        ("raw/node-feat/paper/node-feat.csv.gz", [(1.0,)], "must have 4 rows, one for each paper, got 1"),
        ("raw/num-node-dict.csv.gz", [("paper", "author")], "a header of node types and one row of counts"),
        ("raw/num-node-dict.csv.gz", [("author",), (3,)], "must have a node type 'paper', got author"),
    ],
)
def test_bad_files(folder, tmp_path, path, rows, text):
    put(folder / "mag" / path, rows)
    with pytest.raises(ValueError, match=text):
        load("ogbn-mag", folder, cache=tmp_path / "cache")


def test_truncated_file(folder, tmp_path):
    path = folder / "mag" / "raw" / "node-feat" / "paper" / "node-feat.csv.gz"
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(ValueError, match=r"node-feat\.csv\.gz must be a table of numbers"):
        load("ogbn-mag", folder, cache=tmp_path / "cache")


def test_missing(tmp_path, monkeypatch):
    monkeypatch.delenv("DEJAX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"pass load\('ogbn-mag', folder=\.\.\.\).*DEJAX_DATA"):
        load("ogbn-mag")
    with pytest.raises(FileNotFoundError, match=r"folder must hold raw/num-node-dict\.csv\.gz"):
        load("ogbn-mag", tmp_path)


def test_mag_with_its_types(folder, tmp_path) -> None:
    cache = tmp_path / "cache"
    put(folder / "mag/raw/node-feat/paper/node_year.csv.gz", [(2015,), (2016,), (2018,), (2019,)])
    for _ in range(2):  # the second one comes from the cache
        data = load_mag_hetero(folder, cache=cache)
        assert data.num_nodes == {"author": 3, "field_of_study": 2, "institution": 1, "paper": 4}
        for relation, want in EDGES.items():
            assert list(zip(*(ends.tolist() for ends in data.edges[relation]), strict=True)) == want
        assert data.labels["paper"].tolist() == [2, 0, 1, 2] and data.num_classes == {"paper": 3}
        assert data.node_times["paper"].tolist() == [2015, 2016, 2018, 2019]
        assert data.splits["valid"]["paper"].tolist() == [3] and data.features["paper"].shape == (4, 3)
    assert load_mag_hetero(folder, cache=cache, use_features=False).features == {}
    put(folder / "mag/raw/node-feat/paper/node_year.csv.gz", [(2015,)])
    with pytest.raises(ValueError, match="must have 4 rows, one for each paper, got 1"):
        load_mag_hetero(folder, cache=cache)
